"""Loops of one's own under a study: the same trials as bstune.tune, kills, and what a loop may do wrong."""

import importlib
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
        "reference": (32, 0.2),
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


def run_loop(name, trials=None):
    """Train a study's trials, or those that are given, by a loop; return their records."""
    study = study_of(name)
    more = {"trainer_class": in_tunes_order()} if name == "huggingface" else {}
    loop_of(name)(study if trials is None else trials(study), every=1, **more)
    return study.result.records


def study_of(name):
    metric = "eval_loss" if name == "huggingface" else "val_loss"
    return bstune.Study(**arguments(target=f"{metric}<=0.7"))


def assert_same(records, expected, exactly):
    """Compare what depends on no clock."""
    assert len(records) == len(expected)
    for record, other in zip(records, expected, strict=True):
        *decided, history = without_clock(record)
        *decided_by_other, history_of_other = without_clock(other)
        assert decided == decided_by_other
        if exactly:
            assert history == history_of_other
        else:
            assert np.array(history) == pytest.approx(np.array(history_of_other), rel=1e-6)


@pytest.mark.parametrize("name", LOOPS)
@pytest.mark.filterwarnings("ignore")  # advice of Lightning and transformers to whoever trains a toy
def test_a_loop_has_the_trials_of_tune(name, tuned):
    records = run_loop(name)
    assert any(record.resumed_from is not None for record in records)
    # Hugging Face's Trainer averages the loss of its evaluation once more.
    assert_same(records, tuned, exactly=name != "huggingface")


KILLED = """
import os, signal, sys
sys.path.insert(0, {tests!r})
from test_own_loop import run_loop


def kill(step, value):
    os.kill(os.getpid(), signal.SIGKILL)


def killed(study):
    for trial in study:
        if trial.resume_from is not None:
            trial.report = kill
        yield trial


run_loop({name!r}, killed)
"""


@pytest.mark.slow
@pytest.mark.parametrize("name", LOOPS)
@pytest.mark.filterwarnings("ignore")
def test_a_loop_that_is_killed_goes_on_where_it_was(name, tuned):
    loop_of(name)
    script = KILLED.format(tests=str(TESTS), name=name)
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, timeout=280)
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    records = run_loop(name)
    (cut_short,) = (record for record in records if record.status == "failed")
    assert cut_short.resumed_from is not None
    finished = [record for record in records if record.status != "failed"]
    assert_same(finished, tuned, exactly=name != "huggingface")
    # What was saved of trials that nothing continues any more is gone.
    left = {path.name for path in Path("outputs/digits/states").iterdir()}
    continued = {record.resumed_from for record in finished}
    assert not {f"trial-{number}.saved" for number in continued} & left
