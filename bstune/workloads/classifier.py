"""The Lightning module of most workloads: it classifies, with any model and optimizer."""

from collections.abc import Callable
from copy import copy

import torch
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler


class Classifier(LightningModule):
    """Trains ``model`` on (inputs, labels); logs ``val/error`` and ``val/loss`` of a label.

    Args:
        model: from inputs, such as images (N, channels, height, width) or tokens (N, T), to logits
            (N, classes) or (N, classes, T).
        loss: of (logits, labels), the mean over examples; ``val/loss`` is that of labels that are
            not smoothed.
        optimizer: called with parameters and ``lr``.
        lr: learning rate.
        schedule: called with the optimizer; without one the rate is constant.
        average: averages the weights; without one they are evaluated as they are.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Callable[[Tensor, Tensor], Tensor],
        optimizer: Callable[..., Optimizer],
        lr: float,
        schedule: Callable[[Optimizer], LRScheduler] | None = None,
        average: Callback | None = None,
    ) -> None:
        super().__init__()
        self.model = model
        self.loss = loss
        # Where smoothing is tuned all trials are compared by one metric.
        self.validation_loss = copy(loss)
        if isinstance(self.validation_loss, nn.CrossEntropyLoss):
            self.validation_loss.label_smoothing = 0.0
        self.make_optimizer = optimizer
        self.lr = lr
        self.make_schedule = schedule
        self.average = average
        # Wrong labels, summed loss and labels of each validation batch.
        self._sums: list[Tensor] = []

    def forward(self, inputs: Tensor) -> Tensor:
        """Compute logits."""
        logits: Tensor = self.model(inputs)
        return logits

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Compute the mean loss of a batch."""
        inputs, labels = batch
        return self.loss(self(inputs), labels)

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        """Add up errors and losses."""
        inputs, labels = batch
        # Three digits of bfloat16 are too few for a loss.
        logits = self(inputs).float()
        wrong = (logits.argmax(dim=1) != labels).sum().double()
        count = labels.numel()
        loss = self.validation_loss(logits, labels).double() * count
        self._sums.append(torch.stack([wrong, loss, torch.full_like(loss, count)]))

    def on_validation_epoch_end(self) -> None:
        """Log the errors' share and the mean loss over all labels."""
        # float64, and counts summed before they are divided: 700 errors of 5,000 are 0.14, and in
        # float32, or as a mean of means, a little more.
        wrong, loss, labels = torch.stack(self._sums).sum(dim=0)
        self._sums.clear()
        self.log_dict({"val/error": wrong / labels, "val/loss": loss / labels})

    def configure_optimizers(self) -> OptimizerLRScheduler:
        """Make the optimizer, and its schedule, which is stepped each step."""
        optimizer = self.make_optimizer(self.parameters(), lr=self.lr)
        if self.make_schedule is None:
            return optimizer
        scheduler = self.make_schedule(optimizer)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "interval": "step"},
        }

    def configure_callbacks(self) -> list[Callback]:
        """List the average, if there is one."""
        return [] if self.average is None else [self.average]
