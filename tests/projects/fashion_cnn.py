"""A small convolutional net on 6,000 images of Fashion-MNIST."""

import gzip
import os
from pathlib import Path

import lightning.pytorch as pl
import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class FashionDataModule(pl.LightningDataModule):
    def __init__(self, data_dir=os.environ.get("PROJECT_DATA", "data"), batch_size=64):
        super().__init__()
        self.save_hyperparameters()

    def setup(self, stage=None):
        root = Path(self.hparams.data_dir) / "fashion-mnist"
        with gzip.open(root / "train-images-idx3-ubyte.gz") as f:
            x = np.frombuffer(f.read(16 + 7000 * 784)[16:], np.uint8).reshape(-1, 1, 28, 28)
        with gzip.open(root / "train-labels-idx1-ubyte.gz") as f:
            y = np.frombuffer(f.read(8 + 7000)[8:], np.uint8)
        x = (torch.tensor(x).float() / 255 - 0.286) / 0.353
        y = torch.tensor(y).long()
        self.train_set = TensorDataset(x[:6000], y[:6000])
        self.val_set = TensorDataset(x[6000:], y[6000:])

    def train_dataloader(self):
        return DataLoader(self.train_set, batch_size=self.hparams.batch_size, shuffle=True)

    def val_dataloader(self):
        return DataLoader(self.val_set, batch_size=500)


class LitCNN(pl.LightningModule):
    def __init__(self, lr=0.01, width=8):
        super().__init__()
        self.save_hyperparameters()
        self.features = nn.Sequential(
            nn.Conv2d(1, width, 5, stride=2), nn.ReLU(), nn.Conv2d(width, 2 * width, 3, stride=2)
        )
        self.classifier = nn.Linear(2 * width * 25, 10)

    def forward(self, x):
        return self.classifier(self.features(x).relu().flatten(1))

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = F.cross_entropy(self(x), y)
        self.log("train/loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        logits = self(x)
        self.log("val/loss", F.cross_entropy(logits, y), prog_bar=True)
        self.log("val/acc", (logits.argmax(1) == y).float().mean(), prog_bar=True)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.hparams.lr, momentum=0.9)
