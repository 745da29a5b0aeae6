"""A head on a frozen backbone; both are given to the module, and saved with its hyper-parameters."""

import lightning.pytorch as pl
import torch
from sklearn.datasets import load_wine
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Backbone(nn.Module):
    def __init__(self, inputs: int = 13, width: int = 64):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(inputs, width), nn.GELU(), nn.Linear(width, width), nn.GELU()
        )

    def forward(self, x):
        return self.layers(x)


class Transfer(pl.LightningModule):
    def __init__(self, backbone: nn.Module, criterion: nn.Module, width=64, classes=3, lr=1e-3):
        super().__init__()
        self.save_hyperparameters()
        self.backbone = backbone.requires_grad_(False)
        self.criterion = criterion
        self.head = nn.Linear(width, classes)

    def forward(self, x):
        return self.head(self.backbone(x))

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = self.criterion(self(x), y)
        self.log("train/loss", loss)
        return {"loss": loss, "inputs": x.detach()}

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.log("val/loss", self.criterion(self(x), y))

    test_step = validation_step

    def configure_optimizers(self):
        return torch.optim.AdamW(self.head.parameters(), lr=self.hparams.lr, weight_decay=1e-4)


class Wine(pl.LightningDataModule):
    def __init__(self, batch_size=16, sizes=(98, 50, 30), seed=1):
        super().__init__()
        self.save_hyperparameters()

    def setup(self, stage):
        x, y = load_wine(return_X_y=True)
        x = (x - x.mean(0)) / x.std(0)
        data = TensorDataset(torch.tensor(x, dtype=torch.float32), torch.tensor(y))
        generator = torch.Generator().manual_seed(self.hparams.seed)
        self.parts = torch.utils.data.random_split(data, self.hparams.sizes, generator)

    def train_dataloader(self):
        return DataLoader(self.parts[0], self.hparams.batch_size, shuffle=True)

    def val_dataloader(self):
        return DataLoader(self.parts[1], 64)

    def test_dataloader(self):
        return DataLoader(self.parts[2], 64)
