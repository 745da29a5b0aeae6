"""An average of the weights that is evaluated in their place."""

import math

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import WeightAveraging
from torch import Tensor

# Updates in a window: the average changes little between them.
UPDATES_IN_WINDOW = 16


class RunningWeightAverage(WeightAveraging):
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
        super().__init__(multi_avg_fn=self._update)
        self.fraction = fraction

    @property
    def next_update(self) -> int:
        """The step, from 1, of the next update."""
        last = self._latest_update_step
        return max(last + 1, math.ceil(last * (1.0 + self.fraction / UPDATES_IN_WINDOW)))

    def should_update(self, step_idx: int | None = None, epoch_idx: int | None = None) -> bool:
        """Whether an update is due after the step of that index, from 0; never after an epoch."""
        return step_idx is not None and step_idx + 1 >= self.next_update

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Move the average to the weights' device: Lightning moves the module after ``setup``."""
        if self._average_model is not None:
            self._average_model.module.to(pl_module.device)

    def _update(self, averages: list[Tensor], weights: list[Tensor], updates: Tensor) -> None:
        """Move averages towards weights, in place."""
        kept = (self._latest_update_step / self.next_update) ** (1.0 / self.fraction)
        torch._foreach_lerp_(averages, weights, float(1.0 - kept))
