"""Digits by LightningCLI: the classes that its files name, and the script that some of them need."""

import torch
from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.cli import LightningCLI, OptimizerCallable
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class SklearnDigits(LightningDataModule):
    def __init__(self, val_size: int = 300, batch_size: int = 32, features: int = 64) -> None:
        super().__init__()
        self.save_hyperparameters()

    def setup(self, stage: str) -> None:
        x, y = load_digits(return_X_y=True)
        x = torch.tensor(x[:, : self.hparams.features], dtype=torch.float32) / 16
        data = TensorDataset(x, torch.tensor(y))
        sizes = [1200, self.hparams.val_size, len(data) - 1200 - self.hparams.val_size]
        self.parts = torch.utils.data.random_split(data, sizes, torch.Generator().manual_seed(0))

    def train_dataloader(self) -> DataLoader:
        return DataLoader(self.parts[0], batch_size=self.hparams.batch_size, shuffle=True)

    def val_dataloader(self) -> DataLoader:
        return DataLoader(self.parts[1], batch_size=100)


class LitMLP(LightningModule):
    """Its optimizer is a section of the file."""

    def __init__(self, net: nn.Module, hidden: list[int], activation: str = "ReLU") -> None:
        super().__init__()
        layers: list[nn.Module] = [net]
        for inputs, outputs in zip(hidden, [*hidden[1:], 10], strict=True):
            layers += [getattr(nn, activation)(), nn.Linear(inputs, outputs)]
        self.model = nn.Sequential(*layers)

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        return nn.functional.cross_entropy(self.model(batch[0]), batch[1])

    def validation_step(self, batch: list[torch.Tensor], batch_idx: int) -> None:
        self.log("val_loss", nn.functional.cross_entropy(self.model(batch[0]), batch[1]))


class WithRate(LitMLP):
    def __init__(self, learning_rate: float = 0.01, features: int = 64, dropout: float = 0.0):
        super().__init__(nn.Sequential(nn.Linear(features, 16), nn.Dropout(dropout)), [16])
        self.save_hyperparameters()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), self.hparams.learning_rate)


class WithOptimizer(LitMLP):
    def __init__(self, optimizer: OptimizerCallable = torch.optim.Adam) -> None:
        super().__init__(nn.Linear(64, 16), [16])
        self.optimizer = optimizer

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.optimizer(self.parameters())


class Cli(LightningCLI):
    def add_arguments_to_parser(self, parser) -> None:
        parser.link_arguments("data.features", "model.features")


def main() -> None:
    Cli(WithRate, SklearnDigits, trainer_defaults={"max_epochs": 5}, seed_everything_default=42)


if __name__ == "__main__":
    main()
