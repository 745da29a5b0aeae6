"""Who takes the steps of a fit, and how many of them come before the first replay."""

from types import SimpleNamespace

import pytest
import torch
from fits import DATA, HELD_OUT, Regression
from torch.utils.data import DataLoader

from bstune.trial.fast import lean_loop, reasons
from bstune.trial.fast.take_steps import eager_steps, take_steps
from bstune.trial.lightning import internals as lightning_internals
from bstune.trial.lightning.trainer import make_trainer


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
    # Nothing has begun yet.
    assert steps.name == (name if mode == "off" else None)
    trainer.fit(module, DataLoader(DATA, batch_size=10), HELD_OUT)
    # 50 examples in batches of 10, or of 20 where two are accumulated.
    assert trainer.global_step == (3 if options else 5)
    assert (steps.runs, steps.name) == (runs, name)
    assert bool(starts) == runs


@pytest.mark.parametrize(
    ("mode", "device", "steps"),
    [("graph", "cuda", 3), ("graph", "cpu", 0), ("auto", "cuda", 0), ("off", "cuda", 0)],
)
def test_only_steps_that_are_captured_begin_eagerly(mode, device, steps):
    assert eager_steps(mode, torch.device(device)) == steps


@pytest.mark.filterwarnings("ignore:.*num_workers.*")
def test_a_newer_lightning_takes_its_own_steps_whatever_has_become_of_its_private_members(
    monkeypatch,
):
    def gone(*arguments):
        raise AttributeError("it has another name now")

    monkeypatch.setattr(lightning_internals, "TRIED", ("2.6.0",))
    monkeypatch.setattr(
        lightning_internals, "import_module", lambda package: SimpleNamespace(__version__="2.7.1")
    )
    monkeypatch.setattr(reasons, "fetches_batches", gone)
    for name in (
        "begin_batch",
        "connector_of_loggers",
        "leave_out_profiler",
        "results_of_training",
    ):
        monkeypatch.setattr(lean_loop, name, gone)
    module = Regression()
    trainer = make_trainer({"accelerator": "cpu", "devices": 1, "log_every_n_steps": 1}, module)
    steps = take_steps(trainer, "graph")
    trainer.fit(module, DataLoader(DATA, batch_size=10), HELD_OUT)
    assert trainer.global_step == 5
    assert not steps.runs
    assert steps.name == (
        "Lightning's: lightning.pytorch 2.7.1 is not one of the versions that it was compared "
        "with, 2.6.0"
    )
