"""Irises, with a learning rate that falls on plateaus, early stopping and the best checkpoint."""

import lightning as L
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from sklearn.datasets import load_iris
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Iris(L.LightningDataModule):
    def setup(self, stage):
        x, y = load_iris(return_X_y=True)
        order = torch.randperm(150, generator=torch.Generator().manual_seed(5))
        x = torch.tensor(x, dtype=torch.float32)[order]
        y = torch.tensor(y)[order]
        self.splits = {"fit": (x[:90], y[:90]), "validate": (x[90:120], y[90:120])}

    def loader(self, split, **options):
        return DataLoader(TensorDataset(*self.splits[split]), **options)

    def train_dataloader(self):
        return self.loader("fit", batch_size=10, shuffle=True)

    def val_dataloader(self):
        return self.loader("validate", batch_size=30)


class IrisNet(L.LightningModule):
    def __init__(self, lr=0.02):
        super().__init__()
        self.lr = lr
        self.net = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 3))

    def loss(self, batch):
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def training_step(self, batch, batch_idx):
        return self.loss(batch)

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.loss(batch))

    def configure_callbacks(self):
        return [
            EarlyStopping("val_loss", patience=30),
            ModelCheckpoint(monitor="val_loss", save_top_k=1, filename="{epoch}-{val_loss:.3f}"),
        ]

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=self.lr, momentum=0.9)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=5)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "monitor": "val_loss"},
        }
