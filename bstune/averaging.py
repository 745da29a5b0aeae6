"""Average of the weights over a stated fraction of the steps so far: no horizon, no length in steps."""

import math
from typing import Any

import torch
from lightning.pytorch.callbacks import WeightAveraging
from torch.optim.swa_utils import get_ema_multi_avg_fn

from bstune.errors import ConfigError

# Snapshots per averaging window: the average changes little between them, and a step costs nothing in between.
SNAPSHOTS = 16


class RunningWeightAverage(WeightAveraging):
    """Evaluates an average whose window is ``fraction`` of the steps so far.

    The weights of step s count in proportion to s^(1/fraction - 1) at every later step t, so that their cumulative
    weight is (s/t)^(1/fraction) and their mean age is t fraction/(1 + fraction) (polynomial-decay averaging, Shamir and
    Zhang 2013, eq. 6 with eta = 1/fraction - 1). The window is the same share of the run at every batch size, and no
    horizon has to be known. The average is updated every ``fraction``/16 of the steps so far (at least one step apart).

    Args:
        fraction: in (0, 1].

    Raises:
        ConfigError: for a fraction outside (0, 1].
    """

    def __init__(self, fraction: float) -> None:
        if not 0.0 < fraction <= 1.0:
            raise ConfigError(f"the fraction of steps that is averaged must lie in (0, 1], but got {fraction}")
        super().__init__(multi_avg_fn=self._blend)
        self.fraction = fraction
        self._updated_at = 0
        self._step = 0

    def should_update(self, step_idx: int | None = None, epoch_idx: int | None = None) -> bool:
        """Return whether the snapshots' spacing is over; never at the end of an epoch."""
        if step_idx is None:
            return False
        step = step_idx + 1
        due = step >= max(self._updated_at + 1, math.ceil(self._updated_at * (1.0 + self.fraction / SNAPSHOTS)))
        if due:
            self._step = step
        return due

    def _blend(self, averaged: list[torch.Tensor], current: list[torch.Tensor], _: torch.Tensor | int) -> None:
        # Called once for each device and dtype of an update, so the step is noted in on_train_batch_end.
        decay = (self._updated_at / self._step) ** (1.0 / self.fraction)
        get_ema_multi_avg_fn(decay)(averaged, current, 0)  # type: ignore[no-untyped-call]

    def on_train_batch_end(self, *args: object, **kwargs: object) -> None:
        """Update the average if a snapshot is due."""
        super().on_train_batch_end(*args, **kwargs)  # type: ignore[arg-type]
        self._updated_at = self._step

    def state_dict(self) -> dict[str, Any]:
        """Return when the average was last updated; Lightning saves the average itself."""
        return {**super().state_dict(), "updated_at": self._updated_at}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take up what :meth:`state_dict` returned."""
        super().load_state_dict(state_dict)
        self._updated_at = self._step = state_dict["updated_at"]
