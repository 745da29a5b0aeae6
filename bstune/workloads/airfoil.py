"""Linear regression on NASA's airfoil self-noise, as in Dive into Deep Learning, 12.5.3 and 12.5.4.

Features and label are standardised over all rows. The target is measured on the rows that are
trained on, as there: it says how well an algorithm minimises, not how well the model generalises.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, TensorDataset

from bstune.core.errors import ConfigError, check_positive_integer
from bstune.trial.devices.device import resolve_device
from bstune.trial.lightning.installed import LightningDataModule, LightningModule

Batch = tuple[Tensor, Tensor]


class LinearRegression(LightningModule):
    """Trains x w + b on (features, labels) and logs ``val/loss``.

    The loss is the mean over examples of (x w + b - y)^2 / 2.

    Args:
        features: number of features.
        init_std: standard deviation of the first weights, normal around 0; b starts at 0.
        optimizer: called with parameters and ``lr``.
        lr: learning rate.
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

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Compute the mean loss of the batch's examples."""
        features, labels = batch
        losses: Tensor = (self(features) - labels) ** 2 / 2
        return losses.mean()

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        """Log ``val/loss``, averaged over all examples."""
        loss = self.training_step(batch, batch_idx)
        self.log("val/loss", loss, on_step=False, on_epoch=True, batch_size=len(batch[1]))

    def configure_optimizers(self) -> Optimizer:
        """Make the optimizer. The learning rate is constant."""
        return self.make_optimizer(self.parameters(), lr=self.lr)


class AirfoilData(LightningDataModule):
    """The first rows of a table, standardised, on one device.

    Training and validation data are the same rows.

    Args:
        load: returns rows of features and a label, such as ``functools.partial(load_airfoil,
            root=...)``.
        device: ``cpu``, ``cuda``, ``cuda:N``, or ``auto``: CUDA where there is one.
        rows: how many of the first rows are trained on.
        row_by_row: whether a DataLoader takes single rows out of main memory and puts them together
            to batches, as in the book. Otherwise whole batches are taken out on the device.
    """

    def __init__(
        self,
        *,
        load: Callable[[], NDArray[np.float64]],
        device: str,
        rows: int,
        row_by_row: bool = False,
    ) -> None:
        """Keep the arguments; the class's docstring has them. :meth:`setup` reads and checks."""
        super().__init__()
        self._load = load
        self._device = device
        self._rows = rows
        self._row_by_row = row_by_row
        # The rows on the device; None before :meth:`setup`.
        self._resident: _Rows | None = None

    def setup(self, stage: str | None = None) -> None:
        """Read, verify and standardise the data, once; refuse more rows than there are."""
        if self._resident is None:
            device = resolve_device(self._device)
            table = self._load()
            check_positive_integer("workload.data.rows", self._rows)
            if self._rows > len(table):
                raise ConfigError(
                    f"workload.data.rows must be from 1 to {len(table)}, but got {self._rows}"
                )
            standardised = (table - table.mean(axis=0)) / table.std(axis=0)
            rows = torch.tensor(standardised[: self._rows], dtype=torch.float32, device=device)
            self._resident = _Rows(rows[:, :-1].contiguous(), rows[:, -1].contiguous())

    def train_dataloader(self) -> DataLoader[Any]:
        """Make a loader whose one batch has all rows."""
        self.setup()
        assert self._resident is not None  # noqa: S101  # set up
        if self._row_by_row:
            in_memory = TensorDataset(*(part.cpu() for part in self._resident.tensors))
            return DataLoader(in_memory, batch_size=self._rows)
        # _Rows returns whole batches already.
        return DataLoader(self._resident, batch_size=self._rows, collate_fn=lambda batch: batch)

    val_dataloader = train_dataloader


class _Rows(TensorDataset):
    """Rows on a device that are taken out by batches.

    A row at a time would take longer than the training step.
    """

    def __getitems__(self, index: list[int]) -> tuple[Tensor, ...]:
        # torch.tensor is slow on lists.
        rows = torch.from_numpy(np.array(index)).to(self.tensors[0].device)
        return tuple(tensor.index_select(0, rows) for tensor in self.tensors)
