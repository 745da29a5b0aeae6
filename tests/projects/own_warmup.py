"""Breast cancer; a warm-up that the module keeps for itself and steps in optimizer_step."""

import lightning as L
import torch
from torch import nn


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
