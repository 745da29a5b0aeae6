"""The shipped workloads, their data and their modules, trained by a plain Trainer."""

import os
from functools import partial

import numpy as np
import pytest
import torch
from lightning.pytorch import Trainer, seed_everything
from lightning.pytorch.callbacks import LambdaCallback
from omegaconf import OmegaConf
from small import QUIET
from torch import nn
from torch.nn import functional
from torch.optim import SGD
from torch.utils.data import DataLoader, TensorDataset

from bstune.config import CONF, compose
from bstune.core.records import Spec, Target
from bstune.recipe.recipe import settings_of
from bstune.trial.lightning import train
from bstune.trial.trial import Trial, run_trial
from bstune.workloads.classifier import Classifier

pytestmark = pytest.mark.filterwarnings("ignore:.*does not have many workers")
UNREACHABLE = Target("val/loss", 0.0, "min")
DATA = os.environ.get("BSTUNE_DATA", "")
needs_data = pytest.mark.skipif(not DATA, reason="BSTUNE_DATA is not set")
# A step of resnet_cifar takes half a second: tests/test_resnet9.py trains a narrow one.
LEFT_OUT = {"replay", "resnet_cifar"}
TRAINED = sorted({file.stem for file in CONF.glob("workload/*.yaml")} - LEFT_OUT)
# The equally likely labels, where they are not ten classes.
LABELS = {"airfoil": None, "shakespeare_lstm": 65, "shakespeare_transformer": 65}


@pytest.mark.parametrize("name", TRAINED)
def test_a_few_steps_lower_the_loss(name):
    if name != "digits" and not DATA:
        pytest.skip("BSTUNE_DATA is not set")
    composed = compose([f"+workload={name}", "device=cpu", "threads=1"])
    recipe, labels = composed.recipe, LABELS.get(name, 10)
    trial = settings_of(16, composed.options.baseline.lr, 20)
    seed_everything(0, verbose=False)
    data, module = recipe.data(trial), recipe.module(trial)
    data.validation_batch_size = 100
    losses = []
    keep = LambdaCallback(on_train_batch_end=lambda *given: losses.append(given[2]["loss"].item()))
    settings = {"accelerator": "cpu", "max_steps": 20, "limit_val_batches": 1, "callbacks": [keep]}
    trainer = Trainer(**recipe.trainer(trial), **QUIET, **settings)
    trainer.fit(module, data)
    assert labels is None or losses[0] == pytest.approx(np.log(labels), rel=0.25)
    assert np.mean(losses[15:]) < np.mean(losses[:5])
    trainer.validate(module, data, verbose=False)
    assert np.isfinite(float(trainer.callback_metrics[composed.options.target.metric]))
    # What may be tuned is there, and a trial's values arrive.
    config = OmegaConf.create(composed.parts)
    for part in config.tunable.values():
        assert OmegaConf.select(config, part.key) is not None
    assert len(next(iter(data.train_dataloader()))[1]) == 16
    assert module.lr == trial.lr


def test_workloads_of_a_folder_have_bases(tmp_path):
    base = tmp_path / "workload" / "base"
    base.mkdir(parents=True)
    (base / "short.yaml").write_text("budget: {steps: 7}\ntrials: 3\n")
    mine = "defaults: [digits, base/nesterov@_here_, base/short@_here_, _self_]\ntrials: 5\n"
    (tmp_path / "workload" / "mine.yaml").write_text(mine)
    composed = compose(["--config-dir", str(tmp_path), "+workload=mine"])
    assert (composed.options.budget.steps, composed.options.trials) == (7, 5)
    assert composed.parts["module"]["optimizer"]["nesterov"] is True
    assert composed.parts["data"]["test"] == 297


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
