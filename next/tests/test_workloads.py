"""The shipped workloads, their data and their modules, trained by a plain Trainer."""

import os
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from hydra.utils import instantiate
from lightning.pytorch import Trainer, seed_everything
from omegaconf import OmegaConf
from small import QUIET
from torch import nn
from torch.nn import functional
from torch.optim import SGD
from torch.utils.data import DataLoader, TensorDataset

from bstune.config import compose
from bstune.core.records import Spec, Target
from bstune.trial.lightning import train
from bstune.trial.trial import Trial, run_trial
from bstune.workloads.classifier import Classifier

pytestmark = pytest.mark.filterwarnings("ignore:.*does not have many workers")
UNREACHABLE = Target("val/loss", 0.0, "min")
CONF = Path(__file__).parents[1] / "conf" / "workload"
DATA = os.environ.get("BSTUNE_DATA", "")
needs_data = pytest.mark.skipif(not DATA, reason="BSTUNE_DATA is not set")
TRAINED = [
    "digits",
    pytest.param("airfoil", marks=needs_data),
    pytest.param("fashion_mlp", marks=needs_data),
]


def composed(name, **trial):
    """A workload's file, with the values of a trial, of its baseline unless given."""
    file = OmegaConf.load(CONF / f"{name}.yaml")
    values = {**file.baseline, "seed": 0, "total_steps": 400, **trial}
    return OmegaConf.merge(file, {"trial": values, "data_root": DATA})


@pytest.mark.parametrize("name", TRAINED)
def test_twenty_steps_lower_the_loss(name):
    seed_everything(0, verbose=False)
    config = composed(name)
    data, module = instantiate(config.data), instantiate(config.module)
    (before,) = Trainer(accelerator="cpu", **QUIET).validate(module, data, verbose=False)
    Trainer(max_steps=20, max_epochs=-1, accelerator="cpu", **QUIET).fit(module, data)
    (after,) = Trainer(accelerator="cpu", **QUIET).validate(module, data, verbose=False)
    assert after["val/loss"] < 0.7 * before["val/loss"]
    assert Target.parse(config.target).metric in after
    keys = [part.key for part in config.tunable.values()]
    assert all(OmegaConf.select(config, key) is not None for key in keys)
    # A trial's values arrive.
    config = composed(name, batch_size=32, lr=0.125)
    assert len(next(iter(instantiate(config.data).train_dataloader()))[1]) == 32
    assert instantiate(config.module).lr == 0.125


def test_error_and_loss_are_of_all_examples():
    # 700 of 5,000 are wrong; a float32, or a mean of the batches' means, is more than 0.14.
    labels = torch.zeros(5000, dtype=torch.int64)
    logits = torch.tensor([1.0, 0.0]).repeat(5000, 1)
    logits[np.random.RandomState(0).permutation(5000)[:700]] = torch.tensor([0.0, 3.0])
    # Trials of other smoothing are compared by the same loss.
    smoothed = nn.CrossEntropyLoss(label_smoothing=0.2)
    module = Classifier(nn.Identity(), smoothed, partial(SGD), lr=0.1)
    assert module.training_step((logits, labels), 0) == smoothed(logits, labels)
    validating = Trainer(accelerator="cpu", **QUIET)
    loader = DataLoader(TensorDataset(logits, labels), 7)
    validating.validate(module, loader, verbose=False)
    metrics = validating.callback_metrics
    assert metrics["val/error"].item() == 0.14
    loss = functional.cross_entropy(logits.double(), labels)
    assert metrics["val/loss"].item() == pytest.approx(loss.item(), rel=1e-6)


@needs_data
def test_an_lstm_learns_shakespeare_as_in_the_recorded_table():
    recipe = compose(["+workload=shakespeare_lstm", "threads=1", "device=cpu"]).recipe
    spec = Spec(number=0, place="", role="search", batch_size=32, lr=0.01, seed=0, max_steps=64)
    record = run_trial(partial(train, recipe), Trial(spec, UNREACHABLE, total_steps=300))
    # Its first run; characters by their frequency alone have 3.3 nats.
    assert record.history == ((64, pytest.approx(2.21825, abs=2e-3)),)
