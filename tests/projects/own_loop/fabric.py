"""A loop of Lightning Fabric, whose batch size and learning rate a study chooses."""

import time

import torch
from lightning.fabric import Fabric
from projects.own_loop.digits import TRAIN, make_model, validate
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset


def train(study, every=5):
    fabric = Fabric(accelerator="cpu", devices=1)
    data = TensorDataset(*TRAIN)
    for trial in study:
        fabric.seed_everything(trial.seed, verbose=False)
        model = make_model()
        model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=trial.lr))
        loader = DataLoader(data, batch_sampler=trial.batches(len(data)))
        batches = iter(fabric.setup_dataloaders(loader, use_distributed_sampler=False))
        state = {"model": model, "optimizer": optimizer}
        if trial.resume_from is not None:
            fabric.load(trial.resume_from, state)
        step = trial.first_step
        seconds = 0.0
        goes_on = True
        if step == 0:
            trial.report(0, validate(model))
        while goes_on:
            began = time.perf_counter()
            for _ in range(min(every, trial.max_steps - step)):
                images, labels = next(batches)
                loss = cross_entropy(model(images), labels)
                optimizer.zero_grad()
                fabric.backward(loss)
                optimizer.step()
                step += 1
            seconds += time.perf_counter() - began
            goes_on = trial.report(step, validate(model))
        fabric.save(trial.save_to, state)
        trial.finish(seconds=seconds)
