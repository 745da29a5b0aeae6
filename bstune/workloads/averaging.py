"""An average of the weights that is evaluated in their place."""

import math
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

# Updates in a window: the average changes little between them.
UPDATES_IN_WINDOW = 16


class RunningWeightAverage(Callback):
    """Evaluates an average of the weights whose window is ``fraction`` of the steps so far.

    So it needs neither a number of steps nor a window in steps. The weights of step s count in
    proportion to s^(1/fraction - 1) at every later step t: their cumulative weight is
    (s/t)^(1/fraction), their mean age t fraction/(1 + fraction), the same share of the run at every
    batch size (polynomial-decay averaging, Shamir and Zhang 2013, arXiv 1212.1824, eq. 6 with eta =
    1/fraction - 1). The average is updated every ``fraction``/16 of the steps so far, at least one
    step apart; the first update copies the weights. Its state is in Lightning's checkpoint.

    Args:
        fraction: in (0, 1].
    """

    def __init__(self, fraction: float) -> None:
        self.fraction = fraction
        self._last = 0
        self._averages: list[Tensor] = []

    @property
    def next_update(self) -> int:
        """The step, from 1, of the next update."""
        last = self._last
        return max(last + 1, math.ceil(last * (1.0 + self.fraction / UPDATES_IN_WINDOW)))

    def state_dict(self) -> dict[str, Any]:
        """Give the average, and the step of its last update."""
        return {"last": self._last, "averages": self._averages}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from what :meth:`state_dict` gave."""
        self._last, self._averages = state_dict["last"], state_dict["averages"]

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Move the average to the weights' device."""
        self._averages = [average.to(pl_module.device) for average in self._averages]

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, *arguments: Any
    ) -> None:
        """Update the average where it is due."""
        step = trainer.global_step
        if step < self.next_update:
            return
        weights = [weight.detach() for weight in pl_module.parameters()]
        if not self._averages:
            self._averages = [weight.clone() for weight in weights]
        kept = (self._last / step) ** (1.0 / self.fraction)
        torch._foreach_lerp_(self._averages, weights, 1.0 - kept)
        self._last = step

    def on_validation_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Put the average in the place of the weights."""
        self._swap(pl_module)

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Put the weights back."""
        self._swap(pl_module)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Leave the average in the module."""
        self._swap(pl_module)

    def _swap(self, module: LightningModule) -> None:
        """Exchange weights and average; before the first update there is none."""
        pairs = zip(module.parameters(), self._averages, strict=False)
        for index, (weight, average) in enumerate(pairs):
            weight.data, self._averages[index] = average, weight.data
