"""A project that trains in milliseconds: a linear model, and variants that go wrong."""

import functools
import sys
import time

import torch
from lightning.pytorch import LightningDataModule, LightningModule
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from bstune.recipe.recipe import Recipe
from bstune.trial.lightning import train
from bstune.trial.trial import run_trial

EXAMPLES = 256
# Arguments of a Trainer that prints and writes nothing.
QUIET = dict.fromkeys(
    ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False
)


def examples(seed):
    generator = torch.Generator().manual_seed(seed)
    # Each input tells as much, but the last ones are small: descent along them is slow.
    scales = torch.logspace(0.0, -0.7, 10)
    plain = torch.randn(EXAMPLES, 10, generator=generator)
    noise = 0.1 * torch.randn(EXAMPLES, generator=generator)
    return TensorDataset(scales * plain, 0.3 * plain.sum(dim=1) + noise)


class Batches(IterableDataset):
    """A stream of batches of its own, each pass in another order; the last one may be smaller."""

    def __init__(self, dataset, batch_size):
        self.examples = dataset
        self.batch_size = batch_size

    def __iter__(self):
        for rows in torch.randperm(len(self.examples)).split(self.batch_size):
            yield self.examples[rows]


class Data(LightningDataModule):
    def train_dataloader(self):
        return DataLoader(examples(0), batch_size=16, shuffle=True)

    def val_dataloader(self):
        return DataLoader(examples(1), batch_size=EXAMPLES)


class WithTest(Data):
    def test_dataloader(self):
        return self.val_dataloader()


class Guarded(Data):
    """Data behind a token."""

    def __init__(self, api_token, account):
        super().__init__()
        self.given = api_token, account


class Model(LightningModule):
    """Its loss falls from 1 to 0.01."""

    def __init__(self, lr=0.1):
        super().__init__()
        self.lr = lr
        self.linear = torch.nn.Linear(10, 1)

    def loss(self, batch):
        inputs, outputs = batch
        return torch.nn.functional.mse_loss(self.linear(inputs).squeeze(1), outputs)

    def training_step(self, batch, batch_idx):
        return self.loss(batch)

    def validation_step(self, batch, batch_idx):
        self.log("val/loss", self.loss(batch))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.lr)


def scheduled(make, interval="step", monitor=None, base=Model):
    """A module whose schedule ``make`` makes of the Trainer and an optimizer."""

    class Scheduled(base):
        def configure_optimizers(self):
            optimizer = super().configure_optimizers()
            schedule = make(self.trainer, optimizer)
            config = {"scheduler": schedule, "interval": interval, "monitor": monitor}
            return [optimizer], [config]

    return Scheduled


def step_by_hand(module, loss):
    """A step of manual optimization, by each of a module's optimizers."""
    optimizers = module.optimizers()
    optimizers = optimizers if isinstance(optimizers, list) else [optimizers]
    for optimizer in optimizers:
        optimizer.zero_grad()
    module.manual_backward(loss)
    for optimizer in optimizers:
        optimizer.step()


def to_zero(trainer, optimizer):
    """A schedule that ends with the trial."""
    length = trainer.max_steps
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / length)


class Counts(scheduled(to_zero)):
    """It keeps the sizes of its batches, of training and test."""

    calls = []
    tested = []

    def training_step(self, batch, batch_idx):
        self.calls.append(len(batch[0]))
        return super().training_step(batch, batch_idx)

    def test_step(self, batch, batch_idx):
        self.tested.append(len(batch[0]))
        self.log("test/loss", self.loss(batch))


class Raises(Model):
    def training_step(self, batch, batch_idx):
        raise ValueError("no such column")


class Leaves(Model):
    def training_step(self, batch, batch_idx):
        sys.exit(3)


class Sleeps(Model):
    """It trains for longer than a preflight does, and then falls asleep."""

    def training_step(self, batch, batch_idx):
        if self.global_step == 10:
            time.sleep(30)
        return self.loss(batch)


ARGUMENTS = {
    "target": "val/loss <= 0.1",
    "baseline": (16, 0.05),
    "batch_size": (2, 128),
    "budget": {"steps": 500, "examples": 20_000},
    "trials": 6,
    "seeds": 2,
    "threads": 1,
    "device": "cpu",
    "survey": "off",
}


def trained(build, data, trial, **options):
    """Train a trial by Lightning on a CPU; its record and its module."""
    modules = []

    def module(settings):
        modules.append(build(settings))
        return modules[0]

    recipe = Recipe(module, data, **{"device": "cpu", "threads": 1, **options})
    record = run_trial(functools.partial(train, recipe), trial)
    return record, next(iter(modules), None)
