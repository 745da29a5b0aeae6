"""Regression of diabetes progression; the data set is small, so there is no test split, and setup says so."""

import lightning as L
import torch
from sklearn.datasets import load_diabetes
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class TrainValData(L.LightningDataModule):
    def setup(self, stage):
        if stage not in ("fit", "validate"):
            raise NotImplementedError(f"there is no {stage} split")
        x, y = (torch.tensor(part, dtype=torch.float32) for part in load_diabetes(return_X_y=True))
        data = TensorDataset(x / x.std(0), (y - y.mean()) / y.std())
        self.train, self.val = torch.utils.data.random_split(
            data, [342, 100], torch.Generator().manual_seed(3)
        )

    def train_dataloader(self):
        return DataLoader(self.train, batch_size=64, shuffle=True, num_workers=0)

    def val_dataloader(self):
        return DataLoader(self.val, batch_size=50)

    def test_dataloader(self):
        raise NotImplementedError("there is no test split")


class Regressor(L.LightningModule):
    def __init__(self, lr=0.01):
        super().__init__()
        self.lr = lr
        self.net = nn.Sequential(nn.Linear(10, 16), nn.Tanh(), nn.Linear(16, 1), nn.Flatten(0))
        self.losses = []

    def training_step(self, batch, batch_idx):
        return nn.functional.huber_loss(self.net(batch[0]), batch[1])

    def validation_step(self, batch, batch_idx):
        self.losses.append(nn.functional.mse_loss(self.net(batch[0]), batch[1]))

    def on_validation_epoch_end(self):
        self.log("val_mse", torch.stack(self.losses).mean())
        self.losses.clear()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.lr)
