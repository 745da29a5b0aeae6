"""Loops of one's own under a study: the same trials as bstune.tune, kills, and what a loop may do wrong."""

import importlib
import json
import math
import os
import signal
import subprocess
import sys
from contextlib import chdir
from pathlib import Path

import numpy as np
import pytest
import torch
from lightning.pytorch import LightningModule
from projects.own_loop.digits import TRAIN, VAL, make_model
from test_study import without_clock
from toolbox import trials_of
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import bstune
from bstune.core.errors import ConfigError, StudyError

LOOPS = ("bare", "fabric", "huggingface")
EVERY_STEP = [
    "protocol.evaluation_ratio=1.0001",
    "protocol.evaluation_share=1.0",
    "protocol.evaluation_cost=1e-9",
]
TESTS = Path(__file__).parent


def arguments(**changes):
    """Return the arguments of a study of digits whose objective depends on no clock."""
    own = {
        "target": "val_loss<=0.7",
        "batch_sizes": (16, 256),
        "reference": (32, 0.05),
        "budget": bstune.Budget(steps=1, examples=20_000),
        "objective": "steps",
        "trials": 6,
        "name": "digits",
        "mlflow": False,
        "options": ["search.replicates=1", "protocol.noise_scale_every=null"],
    }
    return own | changes


def loop_of(name):
    """Return a loop's function; skip where its package is missing."""
    if name == "huggingface":
        pytest.importorskip("transformers", reason="Hugging Face's transformers is not installed")
    return importlib.import_module(f"projects.own_loop.{name}").train


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("bstune.study.report.draw_curve", lambda *arguments: None)  # takes a second


class Digits(LightningModule):
    def __init__(self, lr):
        super().__init__()
        self.lr = lr
        self.net = make_model()

    def training_step(self, batch, batch_idx):
        return cross_entropy(self.net(batch[0]), batch[1])

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", cross_entropy(self.net(batch[0]), batch[1]))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.lr)


@pytest.fixture(scope="module")
def tuned(tmp_path_factory):
    """Return the trials of bstune.tune on the model that the loops train, evaluated after each step."""
    data = DataLoader(TensorDataset(*TRAIN), 32), DataLoader(TensorDataset(*VAL), 300)
    stated = arguments()
    stated["options"] = [*stated["options"], *EVERY_STEP]
    with chdir(tmp_path_factory.mktemp("tuned")):
        return bstune.tune(Digits, data, workers=0, survey=False, **stated).records


def in_tunes_order():
    """Return a Trainer that reads its data as a study of a module does, in place of an order of its own."""
    from transformers import Trainer

    from bstune.integrations.huggingface import TrialCallback

    class InTunesOrder(Trainer):
        def get_train_dataloader(self):
            (callback,) = (
                one for one in self.callback_handler.callbacks if isinstance(one, TrialCallback)
            )
            batches = callback._trial.batches(len(self.train_dataset))
            # They go on where the trial did.
            self.args.ignore_data_skip = True
            return DataLoader(self.train_dataset, batch_sampler=batches, collate_fn=self.data_collator)

    return InTunesOrder


@pytest.mark.parametrize("name", LOOPS)
@pytest.mark.filterwarnings("ignore")  # advice of Lightning and transformers to whoever trains a toy
def test_a_loop_has_the_trials_of_tune(name, tuned):
    target = "eval_loss<=0.7" if name == "huggingface" else "val_loss<=0.7"
    study = bstune.Study(**arguments(target=target))
    more = {"trainer_class": in_tunes_order()} if name == "huggingface" else {}
    loop_of(name)(study, every=1, **more)
    records = study.result.records
    assert any(record.resumed_from is not None for record in records)
    assert len(records) == len(tuned)
    for record, of_tune in zip(records, tuned, strict=True):
        *decided, history = without_clock(record)
        *decided_by_tune, history_of_tune = without_clock(of_tune)
        assert decided == decided_by_tune
        if name == "huggingface":
            # It averages the loss of its evaluation once more.
            assert np.array(history) == pytest.approx(np.array(history_of_tune), rel=1e-6)
        else:
            assert history == history_of_tune
