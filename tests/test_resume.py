"""A trial that was pruned and resumed equals one that never stopped, bit for bit.

A case of each class is trained without a stop, and with stops after 12 and 25 steps: one of them
is an epoch's end, the other is not. ``benchmarks/resume.py`` tries all cases.
"""

import random

import numpy as np
import pytest
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import EMAWeightAveraging
from lightning.pytorch.plugins import MixedPrecision
from search_records import spec
from small import Batches, scheduled, step_by_hand, trained
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import ConstantLR, OneCycleLR, ReduceLROnPlateau, SequentialLR, StepLR
from torch.utils.data import DataLoader, TensorDataset

from bstune.core.records import Target
from bstune.trial.trial import Trial
from bstune.workloads.averaging import RunningWeightAverage
from bstune.workloads.muon import Muon

# On a machine with one processor torch advises on the number of a loader's processes.
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")
GENERATOR = torch.Generator().manual_seed(0)
X = torch.randn(400, 10, generator=GENERATOR)
Y = (X @ torch.randn(10, 3, generator=GENERATOR)).argmax(1)
STEPS = 40


class Plain(LightningModule):
    """Batch normalisation and dropout, with momentum."""

    def __init__(self, trial):
        super().__init__()
        # An object that no checkpoint may hold, as it is read with weights_only=True.
        self.save_hyperparameters({"activation": torch.nn.ReLU()})
        self.trial = trial
        self.net = torch.nn.Sequential(
            torch.nn.Linear(10, 32),
            torch.nn.BatchNorm1d(32),
            torch.nn.ReLU(),
            torch.nn.Dropout(0.2),
            torch.nn.Linear(32, 3),
        )

    def loss(self, batch):
        return cross_entropy(self.net(batch[0]), batch[1])

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.log("loss", loss, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch, batch_idx):
        torch.rand(3)  # an evaluation that takes random numbers
        self.log("val_loss", self.loss(batch))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.trial.lr, momentum=0.9)


def by_steps(trainer, optimizer):
    return StepLR(optimizer, 2, 0.7)


def one_cycle(trainer, optimizer):
    """Its length is asked for before a checkpoint is read."""
    return OneCycleLR(optimizer, 0.1, total_steps=trainer.estimated_stepping_batches + 1)


def plateau(threshold):
    settings = {"patience": 0, "threshold": threshold, "factor": 0.7}
    return lambda trainer, optimizer: ReduceLROnPlateau(optimizer, **settings)


EpochSchedule = scheduled(by_steps, "epoch", base=Plain)
StepSchedule = scheduled(by_steps, base=Plain)
OneCycle = scheduled(one_cycle, base=Plain)
Plateau = scheduled(plateau(0.2), "epoch", "val_loss", Plain)
# It reads the epoch's mean training loss, of which no checkpoint keeps the part so far.
PlateauOnTraining = scheduled(plateau(0.03), "epoch", "loss", Plain)


class Manual(Plain):
    """Two optimizers that step by hand."""

    def __init__(self, trial):
        super().__init__(trial)
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        step_by_hand(self, self.loss(batch))

    def configure_optimizers(self):
        halves = self.net[0].parameters(), self.net[4].parameters()
        return [torch.optim.SGD(half, lr=self.trial.lr, momentum=0.9) for half in halves]


class Augmented(torch.utils.data.Dataset):
    def __len__(self):
        return len(X)

    def __getitem__(self, index):
        return X[index] + random.random() + np.random.rand() + torch.rand(10), Y[index]


class AugmentedWithMuon(Plain):
    """It augments where the batch lies, as the image workloads do; matrices and biases by Muon."""

    def on_after_batch_transfer(self, batch, dataloader_idx):
        inputs, labels = batch
        noise = torch.rand(len(inputs), 1) if self.trainer.training else 0.0
        return inputs + noise, labels

    def configure_optimizers(self):
        return Muon(self.parameters(), lr=self.trial.lr)


def stream(trial, workers=0):
    batches = Batches(TensorDataset(X[3:], Y[3:]), trial.batch_size)
    return DataLoader(batches, batch_size=None, num_workers=workers)


def two_loaders(trial, workers=0):
    """The second one is longer, and has twice as large batches."""
    one = DataLoader(TensorDataset(X[:300], Y[:300]), 8, shuffle=True)
    other = DataLoader(TensorDataset(X, Y), 16, shuffle=True)
    return {"one": one, "two": [other]}


class OfTwo(Plain):
    def training_step(self, batch, batch_idx):
        assert 2 * len(batch["one"][0]) == len(batch["two"][0][0])
        return self.loss(batch["one"]) + self.loss(batch["two"][0])


class Literal(Plain):
    """Its rate is put into the groups."""

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=3.0, momentum=0.9)


def in_turn(trainer, optimizer):
    parts = [ConstantLR(optimizer, 0.5, 9), StepLR(optimizer, 2, 0.9)]
    return SequentialLR(optimizer, parts, [9])


LiteralRate = scheduled(in_turn, base=Literal)


def scaler():
    # The first steps are skipped, as the scale is much too large.
    return {"plugins": [MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", 2.0**30))]}


# A module, arguments of the Trainer, the training data or what makes its loaders, their workers.
CASES = {
    "plain": (Plain, dict, Augmented(), 0),
    "epoch schedule": (EpochSchedule, dict, None, 0),
    "step schedule": (StepSchedule, dict, None, 0),
    "one cycle": (OneCycle, dict, None, 0),
    "plateau": (Plateau, dict, None, 0),
    "clipping": (EpochSchedule, lambda: {"gradient_clip_val": 0.5}, None, 0),
    "EMA": (Plain, lambda: {"callbacks": [EMAWeightAveraging(decay=0.9)]}, None, 0),
    "running average": (Plain, lambda: {"callbacks": [RunningWeightAverage(0.1)]}, None, 0),
    "gradient scaler": (StepSchedule, scaler, None, 0),
    "two workers": (Plain, dict, Augmented(), 2),
    "micro-batches": (StepSchedule, dict, Augmented(), 0),
    "micro-batches of a scaler": (StepSchedule, scaler, None, 0),
    "bf16-mixed": (StepSchedule, dict, None, 0),
    "plateau on training": (PlateauOnTraining, dict, None, 0),
    "stream": (EpochSchedule, dict, stream, 0),
    "stream with workers": (Plain, dict, stream, 2),
    "manual on a stream": (Manual, dict, stream, 0),
    "several loaders": (OfTwo, dict, two_loaders, 0),
    "literal rate": (LiteralRate, dict, None, 0),
    "augmented, Muon": (AugmentedWithMuon, dict, None, 0),
}
# Settings of the recipe; with a scaler of its own the Trainer takes no precision.
SETTINGS = {
    "gradient scaler": {"precision": None},
    "micro-batches": {"micro_batch_size": 6},
    "micro-batches of a scaler": {"precision": None, "micro_batch_size": 6},
    "bf16-mixed": {"precision": "bf16-mixed"},
    "literal rate": {"override_lr": True},
}
# The batch size of a case of each class.
CLASSES = {
    "two workers": 16,
    "clipping": 16,
    "one cycle": 130,
    "plateau": 130,
    "manual on a stream": 16,
    "EMA": 130,
    "running average": 16,
    "micro-batches of a scaler": 16,
    "several loaders": 16,
    "literal rate": 130,
    "augmented, Muon": 16,
}


def run(case, batch_size, max_steps, earlier=None, save_to=None, resume_from=None):
    """Train a trial; its module, its record."""
    build, arguments, data, workers = CASES[case]

    def loaders(trial):
        if callable(data):
            return data(trial, workers)
        return DataLoader(data or TensorDataset(X, Y), 8, shuffle=True, num_workers=workers)

    trial = Trial(
        spec(batch_size=batch_size, lr=0.05, max_steps=max_steps),
        Target("val_loss", 0.0, "min"),
        total_steps=STEPS,
        earlier=earlier,
        save_to=save_to,
        resume_from=resume_from,
    )
    record, module = trained(
        build,
        lambda trial: (loaders(trial), DataLoader(TensorDataset(X[:40], Y[:40]), 20)),
        trial,
        data_follows=callable(data),
        trainer=lambda trial: arguments(),
        **SETTINGS.get(case, {}),
    )
    return module.state_dict(), record


def resumed_at(stops, case, batch_size, folder):
    """Weights and record of a trial that was pruned at each of the stops in turn."""
    earlier = None
    checkpoint = None
    for stop in stops:
        save_to = folder / f"{stop}.ckpt"
        _, earlier = run(case, batch_size, stop, earlier, save_to, checkpoint)
        assert (earlier.status, earlier.steps) == ("pruned", stop)
        checkpoint = save_to
    return run(case, batch_size, STEPS, earlier, None, checkpoint)


def are_equal(whole, resumed):
    """Whether weights are equal, and evaluations but for those at the stops."""
    weights, record = whole
    resumed_weights, resumed_record = resumed
    if resumed_record.status != "missed" or not set(record.history) <= set(resumed_record.history):
        return False
    return all(torch.equal(tensor, resumed_weights[name]) for name, tensor in weights.items())


@pytest.mark.parametrize("case, batch_size", CLASSES.items())
def test_a_resumed_trial_equals_one_that_never_stopped(case, batch_size, tmp_path):
    whole = run(case, batch_size, STEPS)
    assert (whole[1].status, whole[1].steps) == ("missed", STEPS)
    assert are_equal(whole, resumed_at((12, 25), case, batch_size, tmp_path))
