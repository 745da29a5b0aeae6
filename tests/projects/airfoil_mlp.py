"""The noise of airfoils by an MLP; the network is handed to the module."""

import os

import numpy as np
import torch
from lightning.pytorch import LightningDataModule, LightningModule
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split


class AirfoilDataModule(LightningDataModule):
    def __init__(self, path=os.environ.get("PROJECT_DATA", "data") + "/airfoil_self_noise.dat"):
        super().__init__()
        table = np.loadtxt(path, dtype=np.float32)
        table = torch.from_numpy((table - table.mean(0)) / table.std(0))
        dataset = TensorDataset(table[:, :5], table[:, 5:])
        self.parts = random_split(dataset, [0.8, 0.2], torch.Generator().manual_seed(1))

    def train_dataloader(self):
        return DataLoader(self.parts[0], batch_size=32, shuffle=True)

    def val_dataloader(self):
        return DataLoader(self.parts[1], batch_size=1024)


class Regressor(LightningModule):
    def __init__(self, lr: float = 1e-3, net: nn.Module | None = None, weight_decay: float = 1e-2):
        super().__init__()
        self.save_hyperparameters(ignore="net")
        self.net = net or nn.Sequential(
            nn.Linear(5, 64), nn.SiLU(), nn.Linear(64, 64), nn.SiLU(), nn.Linear(64, 1)
        )

    def _step(self, batch, stage):
        x, y = batch
        loss = nn.functional.mse_loss(self.net(x), y)
        self.log(f"{stage}_mse", loss)
        return loss

    def training_step(self, batch, batch_idx):
        return self._step(batch, "train")

    def validation_step(self, batch, batch_idx):
        self._step(batch, "val")

    def configure_optimizers(self):
        hparams = self.hparams
        return torch.optim.AdamW(
            self.parameters(), lr=hparams.lr, weight_decay=hparams.weight_decay
        )
