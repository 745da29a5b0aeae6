"""A project that trains in milliseconds: a linear model, and variants that go wrong."""

import sys
import time

import torch
from lightning.pytorch import LightningDataModule, LightningModule
from torch.utils.data import DataLoader, TensorDataset

EXAMPLES = 256


def examples(seed):
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(EXAMPLES, 10, generator=generator)
    outputs = inputs @ torch.arange(10.0) / 10 + 0.1 * torch.randn(EXAMPLES, generator=generator)
    return TensorDataset(inputs, outputs)


class Data(LightningDataModule):
    def train_dataloader(self):
        return DataLoader(examples(0), batch_size=16, shuffle=True)

    def val_dataloader(self):
        return DataLoader(examples(1), batch_size=EXAMPLES)


class Model(LightningModule):
    """It starts at a loss of 2.9 and falls to 0.01."""

    def __init__(self, lr=0.01):
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


class Raises(Model):
    def training_step(self, batch, batch_idx):
        raise ValueError("no such column")


class Leaves(Model):
    def training_step(self, batch, batch_idx):
        sys.exit(3)


class Sleeps(Model):
    def training_step(self, batch, batch_idx):
        time.sleep(0.5)
        return self.loss(batch)


ARGUMENTS = {
    "target": "val/loss <= 0.1",
    "baseline": (16, 0.01),
    "batch_size": (2, 128),
    "budget": {"steps": 200, "examples": 12_000},
    "trials": 6,
    "seeds": 2,
    "threads": 1,
    "device": "cpu",
}
