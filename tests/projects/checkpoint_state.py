"""Diabetes progression; the evaluated weights are an exponential moving average, kept in the checkpoint."""

from copy import deepcopy
from dataclasses import dataclass

import lightning as L
import torch
from sklearn.datasets import load_diabetes
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


@dataclass
class Normalizer:
    mean: float
    std: float


class EMARegressor(L.LightningModule):
    def __init__(self, lr: float = 1e-2, decay: float = 0.98):
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 1))
        self.normalizer = None
        self.ema = None

    def on_fit_start(self):
        if self.normalizer is None:
            _, y = self.trainer.datamodule.train.tensors
            self.normalizer = Normalizer(y.mean().item(), y.std().item())
        if self.ema is None:
            self.ema = {"net": deepcopy(self.net).requires_grad_(False), "updates": 0}

    def training_step(self, batch, batch_idx):
        x, y = batch
        target = (y - self.normalizer.mean) / self.normalizer.std
        return nn.functional.mse_loss(self.net(x).squeeze(1), target)

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.ema["updates"] += 1
        decay = min(self.hparams.decay, self.ema["updates"] / (10 + self.ema["updates"]))
        for slow, fast in zip(self.ema["net"].parameters(), self.net.parameters(), strict=True):
            slow.lerp_(fast.detach(), 1 - decay)

    def validation_step(self, batch, batch_idx):
        x, y = batch
        prediction = self.ema["net"](x).squeeze(1) * self.normalizer.std + self.normalizer.mean
        self.log("val_rmse", nn.functional.mse_loss(prediction, y).sqrt())

    def on_save_checkpoint(self, checkpoint):
        checkpoint["ema"] = {"net": self.ema["net"].state_dict(), "updates": self.ema["updates"]}
        checkpoint["normalizer"] = self.normalizer

    def on_load_checkpoint(self, checkpoint):
        self.normalizer = checkpoint["normalizer"]
        self.ema = {
            "net": deepcopy(self.net).requires_grad_(False),
            "updates": checkpoint["ema"]["updates"],
        }
        self.ema["net"].load_state_dict(checkpoint["ema"]["net"])

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.hparams.lr)


class Diabetes(L.LightningDataModule):
    batch_size = 32

    def prepare_data(self):
        load_diabetes()

    def setup(self, stage):
        x, y = (torch.tensor(part, dtype=torch.float32) for part in load_diabetes(return_X_y=True))
        x = 20 * x
        order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
        self.train = TensorDataset(x[order[:342]], y[order[:342]])
        self.val = TensorDataset(x[order[342:]], y[order[342:]])

    def train_dataloader(self):
        return DataLoader(self.train, self.batch_size, shuffle=True)

    def val_dataloader(self):
        return DataLoader(self.val, 100)
