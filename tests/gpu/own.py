"""Tunes a module that bstune does not know, its trials in a process of their own: own.py DEVICE.

A regression with two hidden layers, on data that lie on the CPU. The last line on the screen is JSON: winner, gain,
statuses, devices, and seconds in all.
"""

import json
import sys
import time

import torch
from lightning.pytorch import LightningModule
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import bstune

TRAIN_EXAMPLES = 20_000
WALL_SECONDS = 40.0


class Regression(LightningModule):
    """Two hidden layers and Adam."""

    def __init__(self, lr: float = 1e-3) -> None:
        super().__init__()
        self.lr = lr
        self.net = nn.Sequential(
            nn.Linear(32, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 1)
        )

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        inputs, outputs = batch
        return nn.functional.mse_loss(self.net(inputs), outputs)

    def validation_step(self, batch: list[torch.Tensor], batch_idx: int) -> None:
        self.log("val_loss", self.training_step(batch, batch_idx))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=self.lr)


def made_data() -> tuple[DataLoader, DataLoader]:
    """Training and validation data of a smooth function of 32 inputs."""
    draw = torch.Generator().manual_seed(0)
    inputs = torch.randn(TRAIN_EXAMPLES + 2000, 32, generator=draw)
    outputs = torch.sin(inputs[:, :8]).sum(1, keepdim=True)
    parts: list[Dataset] = [
        TensorDataset(inputs[:TRAIN_EXAMPLES], outputs[:TRAIN_EXAMPLES]),
        TensorDataset(inputs[TRAIN_EXAMPLES:], outputs[TRAIN_EXAMPLES:]),
    ]
    return DataLoader(parts[0], batch_size=64, shuffle=True), DataLoader(parts[1], batch_size=2000)


def main(device: str) -> None:
    """Tune, and print what came of it."""
    began = time.monotonic()
    result = bstune.tune(
        lambda trial: Regression(lr=trial.lr),
        made_data(),
        name="own",
        target="val_loss<=0.5",
        reference=(64, 1e-3),
        wall_seconds=WALL_SECONDS,
        options=[f"device={device}", "mlflow.enabled=false"],
    )
    winner = result.best
    print(
        json.dumps(
            {
                "winner": None if winner is None else [winner.batch_size, winner.lr, winner.steps],
                "gain": None if result.gain is None else result.gain.ratio,
                "trials": result.trials["status"].value_counts().to_dict(),
                "devices": list(result.summary.devices),
                "seconds": time.monotonic() - began,
            }
        )
    )


if __name__ == "__main__":
    main(sys.argv[1])
