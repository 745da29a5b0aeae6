"""Handwritten digits with a one-cycle policy of 500 steps, as many as its author trained for."""

import lightning as L
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Digits(L.LightningDataModule):
    def setup(self, stage):
        x, y = load_digits(return_X_y=True)
        x = torch.tensor(x, dtype=torch.float32) / 16
        y = torch.tensor(y)
        self.train = TensorDataset(x[:1400], y[:1400])
        self.val = TensorDataset(x[1400:], y[1400:])

    def train_dataloader(self):
        return DataLoader(self.train, batch_size=56, shuffle=True)

    def val_dataloader(self):
        return DataLoader(self.val, batch_size=200)


class Net(L.LightningModule):
    def __init__(self, lr=0.5):
        super().__init__()
        self.lr = lr
        self.net = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))

    def loss(self, batch):
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def training_step(self, batch, batch_idx):
        return self.loss(batch)

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.loss(batch))

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=self.lr, momentum=0.9)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=self.lr, total_steps=500)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


if __name__ == "__main__":
    L.Trainer(max_epochs=20).fit(Net(), Digits())
