"""Linear regression on NASA's airfoil self-noise, as in Dive into Deep Learning, 12.5.

The target is measured on the rows that are trained on, as there: it says how well an algorithm
minimises, not how well the model generalises.
"""

from collections.abc import Callable

import numpy as np
import torch
from lightning.pytorch import LightningDataModule, LightningModule
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from bstune.workloads.batches import Batch, WholeBatches, as_it_is


class LinearRegression(LightningModule):
    """Trains x w + b on (features, labels); logs ``val/loss``, the mean of (x w + b - y)^2 / 2.

    Args:
        features: number of features.
        init_std: standard deviation of the first weights, around 0; b starts at 0.
        optimizer: called with parameters and ``lr``.
        lr: learning rate, constant.
    """

    def __init__(
        self, features: int, init_std: float, optimizer: Callable[..., Optimizer], lr: float
    ) -> None:
        super().__init__()
        self.linear = nn.Linear(features, 1)
        nn.init.normal_(self.linear.weight, std=init_std)
        nn.init.zeros_(self.linear.bias)
        self.make_optimizer = optimizer
        self.lr = lr

    def forward(self, features: Tensor) -> Tensor:
        """Compute predictions (N,) for features (N, features)."""
        predictions: Tensor = self.linear(features).squeeze(1)
        return predictions

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Compute the mean loss of a batch."""
        features, labels = batch
        losses: Tensor = (self(features) - labels) ** 2 / 2
        return losses.mean()

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        """Log the mean loss."""
        self.log("val/loss", self.training_step(batch, batch_idx), batch_size=len(batch[1]))

    def configure_optimizers(self) -> Optimizer:
        """Make the optimizer."""
        return self.make_optimizer(self.parameters(), lr=self.lr)


class AirfoilData(LightningDataModule):
    """Batches (features, labels) of the first rows of a table, for training and validation alike.

    Args:
        table: (n, features + 1), the label last; each column is standardised over all n rows.
        batch_size: examples of a training batch.
        rows: how many of the first rows are used; validation takes them in one batch.
    """

    def __init__(self, table: NDArray[np.float64], batch_size: int, rows: int) -> None:
        super().__init__()
        self.batch_size = batch_size
        standardised = (table - table.mean(axis=0)) / table.std(axis=0)
        used = torch.tensor(standardised[:rows], dtype=torch.float32)
        self.rows = WholeBatches(used[:, :-1].contiguous(), used[:, -1].contiguous())

    def train_dataloader(self) -> DataLoader[Batch]:
        """Make the loader of the rows, in a new order each epoch."""
        return DataLoader(self.rows, self.batch_size, shuffle=True, collate_fn=as_it_is)

    def val_dataloader(self) -> DataLoader[Batch]:
        """Make the loader of the same rows, in one batch."""
        return DataLoader(self.rows, len(self.rows), collate_fn=as_it_is)
