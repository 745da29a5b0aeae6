"""An MLP whose layers are built where Lightning recommends it for large models, by the sizes that the data have."""

import lightning as L
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, Subset, TensorDataset


class DigitsData(L.LightningDataModule):
    def setup(self, stage):
        bunch = load_digits()
        images = torch.tensor(bunch.images, dtype=torch.float32).unsqueeze(1) / 16
        data = TensorDataset(images, torch.tensor(bunch.target))
        self.dims = (1, 8, 8)
        self.num_classes = len(bunch.target_names)
        if stage in ("fit", "validate"):
            self.train = Subset(data, range(1200))
            self.val = Subset(data, range(1200, 1500))
        if stage == "test":
            self.test = Subset(data, range(1500, len(data)))

    def train_dataloader(self):
        return DataLoader(self.train, batch_size=32, shuffle=True)

    def val_dataloader(self):
        return DataLoader(self.val, batch_size=300)

    def test_dataloader(self):
        return DataLoader(self.test, batch_size=300)


class ConvNet(L.LightningModule):
    def __init__(self, channels: int = 8, lr: float = 0.05):
        super().__init__()
        self.channels = channels
        self.lr = lr
        self.model = None

    def setup(self, stage):
        self.num_classes = self.trainer.datamodule.num_classes

    def configure_model(self):
        if self.model is not None:
            return
        channels, height, width = self.trainer.datamodule.dims
        size = self.channels * height * width // 4
        self.model = nn.Sequential(
            nn.Conv2d(channels, self.channels, 3, padding=1),
            nn.BatchNorm2d(self.channels),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(size, self.num_classes),
        )

    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self.model(batch[0]), batch[1])

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", F.cross_entropy(self.model(batch[0]), batch[1]))

    def test_step(self, batch, batch_idx):
        self.log("test_loss", F.cross_entropy(self.model(batch[0]), batch[1]))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.lr, momentum=0.9, nesterov=True)
