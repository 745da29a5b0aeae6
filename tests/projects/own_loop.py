"""A plain loop over digits under a study: ``python own_loop.py SECONDS``."""

import sys

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy

import bstune

IMAGES, LABELS = (torch.as_tensor(part) for part in load_digits(return_X_y=True))
IMAGES = IMAGES.float() / 16
TRAIN, VAL = slice(1200), slice(1200, 1500)


def make_model():
    return nn.Sequential(nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 10))


def validate(model):
    with torch.no_grad():
        return cross_entropy(model(IMAGES[VAL]), LABELS[VAL]).item()


def main(wall_seconds):
    study = bstune.Study(
        "own_loop",
        target="val_loss <= 0.7",
        baseline=(32, 0.2),
        scaling="linear",
        budget={"examples": 20000},
        mlflow={"uri": None},
        wall_seconds=wall_seconds,
    )
    images, labels = IMAGES[TRAIN], LABELS[TRAIN]
    for trial in study:
        torch.manual_seed(trial.seed)
        model = make_model()
        if trial.resume_from is not None:
            model.load_state_dict(torch.load(trial.resume_from))
        optimizer = torch.optim.SGD(model.parameters(), lr=trial.lr)
        step = trial.first_step
        for batch in trial.batches(len(images)):
            optimizer.zero_grad()
            cross_entropy(model(images[batch]), labels[batch]).backward()
            optimizer.step()
            step += 1
            if step % 5 == 0 and not trial.report(step, validate(model)):
                break
        if trial.worth_saving:
            torch.save(model.state_dict(), trial.save_to)
    print(study.result)


if __name__ == "__main__":
    main(float(sys.argv[1]))
