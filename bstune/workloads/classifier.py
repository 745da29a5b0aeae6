"""The Lightning module of the workloads that ship: image classification with any model, optimizer and schedule."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from bstune.schedules import constant


class Classifier(LightningModule):
    """Trains ``model`` on (images, labels) and logs ``val/error``, ``val/loss``, ``test/error`` and ``test/loss``.

    Args:
        model: maps images (N, C, H, W) to logits (N, classes).
        loss: of (logits, labels), averaged over examples.
        optimizer: called with parameters and ``lr``.
        lr: learning rate.
        schedule: called with the optimizer; None keeps the rate constant.
        average: a call-back that averages weights; None evaluates the weights as they are.
        callbacks: others, such as :class:`~bstune.lookahead.Lookahead`; they are called before the average is taken.
        groups: called with this module and ``lr``, returns the optimizer's parameter groups; None: one group of all.
            See :func:`~bstune.parameter_groups.parameter_groups`.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Callable[[Tensor, Tensor], Tensor],
        optimizer: Callable[..., Optimizer],
        lr: float,
        schedule: Callable[[Optimizer], LRScheduler] | None = None,
        average: Callback | None = None,
        callbacks: Sequence[Callback] = (),
        groups: Callable[..., list[dict[str, Any]]] | None = None,
    ) -> None:
        super().__init__()
        self.model = model
        self.loss = loss
        self.make_optimizer = optimizer
        self.lr = lr
        self.make_schedule = schedule
        self.average = average
        self.callbacks = tuple(callbacks)
        self.make_groups = groups
        self._sums: list[Tensor] = []

    def forward(self, images: Tensor) -> Tensor:
        """Return logits (N, classes)."""
        logits: Tensor = self.model(images)
        return logits

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Return the batch's mean loss."""
        images, labels = batch
        return self.loss(self(images), labels)

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        """Add up errors and losses on the device."""
        self._add(batch)

    def test_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        """Add up errors and losses on the device."""
        self._add(batch)

    def on_validation_epoch_end(self) -> None:
        """Log ``val/error`` and ``val/loss``."""
        self._log("val")

    def on_test_epoch_end(self) -> None:
        """Log ``test/error`` and ``test/loss``."""
        self._log("test")

    def configure_optimizers(self) -> Any:
        """Return the optimizer, with its schedule stepped once an optimizer step."""
        if self.make_groups is None:
            optimizer = self.make_optimizer(self.parameters(), lr=self.lr)
        else:
            optimizer = self.make_optimizer(self.make_groups(self, lr=self.lr), lr=self.lr)
        schedule = self.make_schedule
        if schedule is None and self.make_groups is None:
            return optimizer
        # A group that is trained on its first examples alone needs a schedule even where the rate is constant.
        scheduler = (schedule or constant)(optimizer)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def configure_callbacks(self) -> Sequence[Callback] | Callback:
        """Return the call-backs, the averaging one last."""
        return [*self.callbacks, *([] if self.average is None else [self.average])]

    def _add(self, batch: tuple[Tensor, Tensor]) -> None:
        images, labels = batch
        logits = self(images)
        loss = self.loss(logits, labels).float() * len(labels)
        wrong = (logits.argmax(dim=1) != labels).sum()
        self._sums.append(torch.stack([wrong.float(), loss, torch.full_like(loss, len(labels))]))

    def _log(self, stage: str) -> None:
        # Counts are summed before they are divided: a mean of means would miss a target of 0.1 at 500 of 5,000.
        wrong, loss, examples = torch.stack(list(_drain(self._sums))).sum(dim=0)
        self.log_dict({f"{stage}/error": wrong / examples, f"{stage}/loss": loss / examples})


def _drain(items: list[Tensor]) -> Iterable[Tensor]:
    taken = items[:]
    items.clear()
    return taken
