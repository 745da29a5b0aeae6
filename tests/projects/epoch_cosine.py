"""Breast cancer, diagnosed by a logistic regression on random features; cosine annealing, once per epoch."""

import torch
from lightning.pytorch import LightningDataModule, LightningModule
from sklearn.datasets import load_breast_cancer
from sklearn.model_selection import train_test_split
from sklearn.preprocessing import StandardScaler
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import DataLoader, TensorDataset


def loader(x, y, **options):
    return DataLoader(
        TensorDataset(torch.from_numpy(x).float(), torch.from_numpy(y).float()), **options
    )


class CancerData(LightningDataModule):
    def setup(self, stage: str):
        x, y = load_breast_cancer(return_X_y=True)
        x, _, y, _ = train_test_split(x, y, test_size=100, random_state=0)
        x = StandardScaler().fit_transform(x)
        parts = train_test_split(x, y, test_size=100, random_state=0)
        self.x, self.x_val, self.y, self.y_val = parts

    def train_dataloader(self):
        return loader(self.x, self.y, batch_size=32, shuffle=True, drop_last=True)

    def val_dataloader(self):
        return loader(self.x_val, self.y_val, batch_size=100)


class Classifier(LightningModule):
    def __init__(self, learning_rate=0.05, features=200):
        super().__init__()
        self.learning_rate = learning_rate
        self.model = nn.Sequential(
            nn.Linear(30, features), nn.Tanh(), nn.Linear(features, 1), nn.Flatten(0)
        )
        self.model[0].requires_grad_(False)

    def step(self, batch, stage):
        x, y = batch
        logits = self.model(x)
        loss = nn.functional.binary_cross_entropy_with_logits(logits, y)
        error = ((logits > 0) != (y > 0.5)).float().mean()
        self.log_dict({f"{stage}/loss": loss, f"{stage}/error": error}, on_epoch=True)
        return loss

    def training_step(self, batch):
        return self.step(batch, "train")

    def validation_step(self, batch):
        self.step(batch, "val")

    def on_train_epoch_end(self):
        self.log("lr", self.lr_schedulers().get_last_lr()[0])

    def configure_optimizers(self):
        trained = [p for p in self.parameters() if p.requires_grad]
        optimizer = torch.optim.SGD(trained, lr=self.learning_rate, momentum=0.9)
        return [optimizer], [CosineAnnealingLR(optimizer, T_max=self.trainer.max_epochs)]
