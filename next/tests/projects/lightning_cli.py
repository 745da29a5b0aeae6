"""Classifies digits: ``python lightning_cli.py fit --config lightning_cli.yaml``."""

import torch
from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.cli import LightningCLI
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class SklearnDigits(LightningDataModule):
    def __init__(self, val_size: int = 300, test_size: int = 297, batch_size: int = 32) -> None:
        super().__init__()
        self.save_hyperparameters()

    def setup(self, stage: str) -> None:
        x, y = load_digits(return_X_y=True)
        data = TensorDataset(torch.tensor(x, dtype=torch.float32) / 16, torch.tensor(y))
        val = self.hparams.val_size
        test = self.hparams.test_size
        sizes = [len(data) - val - test, val, test]
        self.parts = torch.utils.data.random_split(data, sizes, torch.Generator().manual_seed(0))

    def train_dataloader(self) -> DataLoader:
        return DataLoader(self.parts[0], batch_size=self.hparams.batch_size, shuffle=True)

    def val_dataloader(self) -> DataLoader:
        return DataLoader(self.parts[1], batch_size=100)

    def test_dataloader(self) -> DataLoader:
        return DataLoader(self.parts[2], batch_size=100)


class LitMLP(LightningModule):
    def __init__(
        self,
        net: nn.Module,
        hidden: list[int],
        activation: str = "ReLU",
        label_smoothing: float = 0.0,
    ) -> None:
        super().__init__()
        layers: list[nn.Module] = [net]
        for inputs, outputs in zip(hidden, [*hidden[1:], 10], strict=True):
            layers += [getattr(nn, activation)(), nn.Linear(inputs, outputs)]
        self.model = nn.Sequential(*layers)
        self.loss = nn.CrossEntropyLoss(label_smoothing=label_smoothing)

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        return self.loss(self.model(batch[0]), batch[1])

    def validation_step(self, batch: list[torch.Tensor], batch_idx: int) -> None:
        self.log("val_loss", nn.functional.cross_entropy(self.model(batch[0]), batch[1]))

    def test_step(self, batch: list[torch.Tensor], batch_idx: int) -> None:
        self.log("test_loss", nn.functional.cross_entropy(self.model(batch[0]), batch[1]))


if __name__ == "__main__":
    LightningCLI()
