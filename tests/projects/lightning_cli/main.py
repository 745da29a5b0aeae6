"""Classifies digits: ``python -m lightning_cli.main fit --config lightning_cli/config.yaml``."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.cli import LightningCLI, OptimizerCallable
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, Sampler, TensorDataset


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


@dataclass
class Sizes:
    bs: int = 32
    validation: int = 100


class Neighbours(Sampler[list[int]]):
    """Batches of examples that lie side by side, as a sampler makes them that sorts by length."""

    def __init__(self, n: int, batch_size: int) -> None:
        self.n = n
        self.batch_size = batch_size

    def __iter__(self) -> Iterator[list[int]]:
        for batch in torch.randperm(len(self)).tolist():
            first = batch * self.batch_size
            yield list(range(first, first + self.batch_size))

    def __len__(self) -> int:
        return self.n // self.batch_size


class Buckets(SklearnDigits):
    """Digits in batches of a sampler's own making; ``fixed`` is a batch size that stays.

    Another number of ``batches_kept`` than 32 is refused.
    """

    def __init__(
        self, sizes: Sizes | None = None, fixed: int = 0, batches_kept: int | None = None
    ) -> None:
        super().__init__()
        if batches_kept not in (None, 32):
            raise ValueError(f"cannot keep {batches_kept} batches")
        self.sizes = sizes or Sizes()
        self.fixed = fixed

    def train_dataloader(self) -> DataLoader:
        batch_size = 32 if self.fixed else self.sizes.bs
        sampler = Neighbours(len(self.parts[0]), batch_size)
        return DataLoader(self.parts[0], batch_sampler=sampler)


class Endless(IterableDataset):
    def __init__(self, rows: TensorDataset) -> None:
        self.rows = rows

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        while True:
            yield from self.rows


class Stream(SklearnDigits):
    """Digits without an end, in the order in which they come."""

    def train_dataloader(self) -> DataLoader:
        return DataLoader(Endless(self.parts[0]), batch_size=self.hparams.batch_size)


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


class LitLinear(LightningModule):
    """A logistic regression; its optimizer is an argument."""

    def __init__(self, optimizer: OptimizerCallable = torch.optim.Adam) -> None:
        super().__init__()
        self.model = nn.Linear(64, 10)
        self.optimizer = optimizer

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        return nn.functional.cross_entropy(self.model(batch[0]), batch[1])

    def validation_step(self, batch: list[torch.Tensor], batch_idx: int) -> None:
        self.log("val_loss", nn.functional.cross_entropy(self.model(batch[0]), batch[1]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.optimizer(self.parameters())


class LitBased(LitLinear):
    """Calls its learning rate by a name of its own."""

    def __init__(self, base_lr: float = 0.02) -> None:
        super().__init__()
        self.base_lr = base_lr

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.optimizer(self.parameters(), lr=self.base_lr)


if __name__ == "__main__":
    LightningCLI()
