"""A loop of plain PyTorch, whose batch size and learning rate a study chooses."""

import time

import torch
from projects.own_loop.digits import TRAIN, make_model, validate
from torch.nn.functional import cross_entropy


def train(study, every=5):
    images, labels = TRAIN
    for trial in study:
        torch.manual_seed(trial.seed)
        model = make_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=trial.lr)
        if trial.resume_from is not None:
            saved = torch.load(trial.resume_from)
            model.load_state_dict(saved["model"])
            optimizer.load_state_dict(saved["optimizer"])
        step = trial.first_step
        seconds = 0.0
        goes_on = True
        batches = trial.batches(len(images))
        if step == 0:
            trial.report(0, validate(model))
        while goes_on:
            began = time.perf_counter()
            for _ in range(min(every, trial.max_steps - step)):
                batch = next(batches)
                loss = cross_entropy(model(images[batch]), labels[batch])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                step += 1
            seconds += time.perf_counter() - began
            goes_on = trial.report(step, validate(model))
        torch.save(
            {"model": model.state_dict(), "optimizer": optimizer.state_dict()}, trial.save_to
        )
        trial.finish(seconds=seconds)
