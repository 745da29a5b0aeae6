"""A project of LightningCLI: what its files name, and the script that some of them need."""

import torch
from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.cli import LightningCLI, OptimizerCallable
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

X = torch.randn(96, 6, generator=torch.Generator().manual_seed(0))


class Data(LightningDataModule):
    def __init__(self, root: str = "data", batch_size: int = 16, features: int = 6) -> None:
        super().__init__()
        self.save_hyperparameters()

    def train_dataloader(self) -> DataLoader:
        x = X[:, : self.hparams.features]
        return DataLoader(TensorDataset(x, x.sum(1)), self.hparams.batch_size, shuffle=True)

    def val_dataloader(self) -> DataLoader:
        x = X[:, : self.hparams.features]
        return DataLoader(TensorDataset(x, x.sum(1)), 96)


class WithoutRate(LightningModule):
    """Its optimizer is a section of the file."""

    def __init__(self, features: int = 6, dropout: float = 0.0) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(nn.Linear(features, 1), nn.Dropout(dropout))

    def _loss(self, batch: list[torch.Tensor]) -> torch.Tensor:
        return nn.functional.mse_loss(self.net(batch[0]).squeeze(1), batch[1])

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        return self._loss(batch)

    def validation_step(self, batch: list[torch.Tensor], batch_idx: int) -> None:
        self.log("val_loss", self._loss(batch))


class Model(WithoutRate):
    def __init__(self, learning_rate: float = 0.01, features: int = 6, dropout: float = 0.0):
        super().__init__(features, dropout)
        self.learning_rate = learning_rate

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), self.learning_rate)


class WithOptimizer(WithoutRate):
    def __init__(self, optimizer: OptimizerCallable = torch.optim.Adam, features: int = 6) -> None:
        super().__init__(features)
        self.optimizer = optimizer

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.optimizer(self.parameters())


class Cli(LightningCLI):
    def add_arguments_to_parser(self, parser) -> None:
        parser.link_arguments("data.features", "model.features")


def main() -> None:
    Cli(Model, Data, trainer_defaults={"max_epochs": 5}, seed_everything_default=42)


if __name__ == "__main__":
    main()
