"""Who takes the steps of a fit, and how many of them come before the first replay."""

import pytest
import torch
from fits import DATA, HELD_OUT, Regression
from torch.utils.data import DataLoader

from bstune.trial.fast.take_steps import eager_steps, take_steps
from bstune.trial.trainer import make_trainer


@pytest.mark.parametrize(
    ("mode", "options", "runs", "name"),
    [
        ("off", {}, False, "Lightning's: protocol.fast=off"),
        ("auto", {}, True, "lean"),
        # A CPU has no graphs, which is no reason to be told.
        ("graph", {}, True, "lean"),
        (
            "auto",
            {"accumulate_grad_batches": 2},
            False,
            "Lightning's: accumulation of micro-batches",
        ),
    ],
)
@pytest.mark.filterwarnings("ignore:.*num_workers.*")
def test_who_takes_the_steps(mode, options, runs, name):
    module = Regression()
    trainer = make_trainer(
        {"accelerator": "cpu", "devices": 1, "log_every_n_steps": 1}, module, **options
    )
    starts = []
    steps = take_steps(trainer, mode, start=lambda: starts.append(trainer.global_step))
    assert steps.name == (name if mode == "off" else None)  # as nothing was begun
    trainer.fit(module, DataLoader(DATA, batch_size=10), HELD_OUT)
    assert trainer.global_step == (3 if options else 5)
    assert (steps.runs, steps.name) == (runs, name)
    assert bool(starts) == runs


@pytest.mark.parametrize(
    ("mode", "device", "steps"),
    [("graph", "cuda", 3), ("graph", "cpu", 0), ("auto", "cuda", 0), ("off", "cuda", 0)],
)
def test_only_steps_that_are_captured_begin_eagerly(mode, device, steps):
    assert eager_steps(mode, torch.device(device)) == steps
