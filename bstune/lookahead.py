"""Lookahead: slow weights that the trained ones are drawn back to every few steps."""

import itertools
import math
from collections.abc import Iterator
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn

from bstune.data.batches import check_size
from bstune.errors import ConfigError


class Lookahead(Callback):
    """Draws the weights back to slow ones every few steps, the harder the later in training.

    (Zhang et al. 2019, arXiv 1907.08610, algorithm 1, in the form of hlb-CIFAR10 and cifar10-airbench.) At step t, a
    multiple of ``every``, slow <- slow + (1 - d)(fast - slow) and fast <- slow, with
    d = decay x (t/total_steps)^power; at step ``total_steps`` fast <- slow once more, which takes what the last few
    steps did alone out again. Buffers, such as the statistics of batch normalisation, are weights here; whole numbers
    are left alone. The slow weights start at the untrained ones. Steps that a gradient scaler skips are counted: with k
    of them fast <- slow comes k steps before the end. Nothing waits for an accelerator.

    Args:
        total_steps: the trial's own steps, over 0.
        every: steps between updates. 5 in the source.
        decay: from 0 (which changes nothing but the last step) to 1. 0.95^5 in the source.
        power: of the growth of d, at least 0. 3 in the source.

    Raises:
        ConfigError: for a value out of its range.
    """

    def __init__(self, total_steps: int, every: int, decay: float, power: float) -> None:
        if total_steps < 1:
            raise ConfigError(f"lookahead needs at least one step, but got {total_steps}")
        check_size("the steps between updates of lookahead", every)
        if not 0.0 <= decay <= 1.0:
            raise ConfigError(f"the decay of lookahead must lie in [0, 1], but got {decay}")
        if not 0.0 <= power < math.inf:
            raise ConfigError(f"the power of lookahead must be at least 0, but got {power}")
        self._total_steps, self._every, self._decay, self._power = total_steps, every, decay, power
        self._slow: list[Tensor] = []
        self._step = 0

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Start anew; a state is taken up after this."""
        self._slow, self._step = [], 0

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Take the slow weights from the module, or put those of a state where it is."""
        weights = list(_weights(pl_module))
        known = self._slow or weights
        self._slow = [slow.to(weight, copy=True) for slow, weight in zip(known, weights, strict=True)]

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *arguments: Any) -> None:
        """Update both if it is due; micro-batches but the last of a step are none."""
        step = trainer.global_step
        if step <= self._step:
            return
        self._step = step
        if step % self._every == 0:
            self._update(pl_module, self._decay * min(1.0, step / self._total_steps) ** self._power)
        if step == self._total_steps:
            self._update(pl_module, 1.0)

    @torch.no_grad()
    def _update(self, pl_module: LightningModule, decay: float) -> None:
        fast = list(_weights(pl_module))
        torch._foreach_lerp_(self._slow, fast, 1.0 - decay)
        torch._foreach_copy_(fast, self._slow)

    def state_dict(self) -> dict[str, Any]:
        """Return the slow weights, and the step that they are of."""
        return {"slow": self._slow, "step": self._step}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take up what :meth:`state_dict` returned."""
        self._slow, self._step = list(state_dict["slow"]), state_dict["step"]


def _weights(module: nn.Module) -> Iterator[Tensor]:
    for tensor in itertools.chain(module.parameters(), module.buffers()):
        if tensor.is_floating_point():
            yield tensor.detach()
