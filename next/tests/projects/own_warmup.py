"""Breast cancer; a warm-up that the module keeps for itself and steps in optimizer_step."""

import lightning as L
import torch
from sklearn.datasets import load_breast_cancer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Cancer(L.LightningDataModule):
    def setup(self, stage):
        x, y = load_breast_cancer(return_X_y=True)
        x = torch.tensor(x, dtype=torch.float32)
        x = (x - x.mean(0)) / x.std(0)
        y = torch.tensor(y, dtype=torch.float32)
        order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
        x = x[order]
        y = y[order]
        self.train = TensorDataset(x[:400], y[:400])
        self.val = TensorDataset(x[400:], y[400:])

    def train_dataloader(self):
        return DataLoader(self.train, batch_size=32, shuffle=True)

    def val_dataloader(self):
        return DataLoader(self.val, batch_size=100)


class Net(L.LightningModule):
    def __init__(self, lr=0.1, warmup=100):
        super().__init__()
        self.lr = lr
        self.warmup_steps = warmup
        self.net = nn.Sequential(nn.Linear(30, 8), nn.ReLU(), nn.Linear(8, 1), nn.Flatten(0))

    def loss(self, batch):
        x, y = batch
        return nn.functional.binary_cross_entropy_with_logits(self.net(x), y)

    def training_step(self, batch, batch_idx):
        return self.loss(batch)

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.loss(batch))

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=self.lr)
        self.warmup = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: min(1.0, (step + 1) / self.warmup_steps)
        )
        return optimizer

    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure):
        optimizer.step(closure=optimizer_closure)
        self.warmup.step()


if __name__ == "__main__":
    L.Trainer(max_epochs=20).fit(Net(), Cancer())
