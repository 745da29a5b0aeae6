"""Averages of the weights that are evaluated in their place, and Lookahead.

None of them waits for an accelerator.

A value out of the range that a class gives is a ConfigError.
"""

import math
from abc import abstractmethod
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from bstune.core.errors import ConfigError, check_positive_integer
from bstune.trial.lightning.installed import Callback, LightningModule, Trainer, WeightAveraging

# Snapshots per averaging window: the average changes little between them, and a step costs nothing
# in between.
SNAPSHOTS = 16
# A module's own parameters or buffers by name, and a name.
Slot = tuple[dict[str, Any], str]


@dataclass
class _Averaged:
    """Averages, each with the place of the module's own value that it is an average of."""

    tensors: list[Tensor] = field(default_factory=list)
    """The averages."""
    slots: list[Slot] = field(default_factory=list)
    """The places in the module, in the same order."""

    def values(self) -> list[Tensor]:
        """Take the module's own values as they are now, in the order of the averages."""
        return [values_of[name] for values_of, name in self.slots]


class _DeviceAverage(WeightAveraging):
    """Averages weights and buffers over some of the steps, and has the average evaluated.

    An update is average <- decay x average + (1 - decay) x weights. The first update copies the
    weights. Whole numbers, such as counts of batches, are copied, never averaged.
    """

    def __init__(self) -> None:
        super().__init__()
        # The module's own weights, while the average stands in their place; else none.
        self._own_weights: list[Tensor] = []
        # How many updates there were. It is an array, as torch's AveragedModel reads the count in
        # the same memory.
        self._updates = np.zeros((), np.int64)
        # The averages of whole numbers, and those of all others.
        self._whole_numbers = _Averaged()
        self._averages = _Averaged()

    @abstractmethod
    def decay(self, step: int) -> float:
        """Give the share that the average so far has in the average after ``step``."""

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Make the average, in the type that the module has before Lightning casts it.

        So it is in float32 for weights in half precision.
        """
        super().setup(trainer, pl_module, stage)
        if self._average_model is not None:
            # The count of updates lies on the host. torch's AveragedModel branches on it, and would
            # wait for the device. numpy counts in the same memory in a tenth of the time.
            self._updates = np.zeros((), np.int64)
            self._average_model.n_averaged = torch.from_numpy(self._updates)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Move the average to the weights' device: Lightning moves the module after ``setup``."""
        assert self._average_model is not None  # noqa: S101  # set up
        self._average_model.module.to(pl_module.device)
        # The pairs of an earlier fit are dropped.
        self._whole_numbers = _Averaged()
        self._averages = _Averaged()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, *arguments: Any
    ) -> None:
        """Update the average if it is due."""
        step = trainer.global_step
        # A micro-batch that is not a step's last one leaves the step's number as it was. Lightning
        # passes should_update the step's index, from 0.
        if step > self._latest_update_step and self.should_update(step_idx=step - 1):
            self._update(pl_module, self.decay(step))
            self._latest_update_step = step

    @torch.no_grad()
    def _update(self, pl_module: LightningModule, decay: float) -> None:
        """Update the average by the module's weights; ``decay`` is the average's own share."""
        # At a fit's first update each average is paired with the value that it averages.
        is_paired = bool(self._whole_numbers.tensors or self._averages.tensors)
        if not is_paired:
            self._pair(pl_module)
        kept_counts = self._whole_numbers.tensors
        averages = self._averages.tensors
        present_counts = self._whole_numbers.values()
        present_values = self._averages.values()
        # All tensors are averaged at once: most have a few numbers, and each would be an operator
        # of its own on an accelerator. The first average is the weights themselves.
        if not self._updates:
            torch._foreach_copy_([*kept_counts, *averages], [*present_counts, *present_values])
        else:
            # Counts, as of batches, are never averaged.
            if kept_counts:
                torch._foreach_copy_(kept_counts, present_counts)
            weights = list[Tensor]()
            for average, value in zip(averages, present_values, strict=True):
                weights.append(value.to(average.dtype))
            torch._foreach_lerp_(averages, weights, 1.0 - decay)
        self._updates += 1

    def _pair(self, pl_module: LightningModule) -> None:
        """Note each average, and the place (slot) of the module's value that it averages."""
        assert self._average_model is not None  # noqa: S101  # set up
        tensors = _tensors(self._average_model.module)
        for tensor, slot in zip(tensors, _slots(pl_module), strict=True):
            averaged = self._averages if tensor.is_floating_point() else self._whole_numbers
            averaged.tensors.append(tensor)
            averaged.slots.append(slot)

    @torch.no_grad()
    def on_validation_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Keep the weights aside, and put the average, rounded to their type, in their place."""
        if self._average_model is not None:
            self._own_weights = [value.clone() for value in _tensors(pl_module)]
            self._copy_average_to_current(pl_module)

    @torch.no_grad()
    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Put the kept weights back."""
        # Nothing was kept where there is no average.
        if self._average_model is None:
            return
        for value, trained in zip(_tensors(pl_module), self._own_weights, strict=True):
            value.copy_(trained)
        self._own_weights = []


def _slots(module: nn.Module) -> list[Slot]:
    """Find the places of a module's parameters and buffers, in the order of :func:`_tensors`.

    They are found once, as a search at each update would take long.
    """
    slots: dict[int, Slot] = {}
    for kind in ("_parameters", "_buffers"):
        for part in module.modules():
            values: dict[str, Any] = getattr(part, kind)
            for name, value in values.items():
                # A tensor that several parts share has one place.
                if value is not None:
                    slots.setdefault(id(value), (values, name))
    return list(slots.values())


def _tensors(module: nn.Module) -> list[Tensor]:
    """Give a module's parameters, then its buffers, without their gradients' graph."""
    return [tensor.detach() for tensor in (*module.parameters(), *module.buffers())]


class RunningWeightAverage(_DeviceAverage):
    """Evaluates an average of the weights whose window is ``fraction`` of the steps so far.

    So it needs neither the training's number of steps nor a window in steps. The weights of step s
    count in proportion to s^(1/fraction - 1) at every later step t, so that their cumulative weight
    is (s/t)^(1/fraction) and their mean age is t fraction/(1 + fraction) (polynomial-decay
    averaging, Shamir and Zhang 2013, eq. 6 with eta = 1/fraction - 1), the same share of the run at
    every batch size. The average is updated every ``fraction``/16 of the steps so far (at least one
    step apart).

    Args:
        fraction: in (0, 1].
    """

    def __init__(self, fraction: float) -> None:
        if not 0.0 < fraction <= 1.0:
            raise ConfigError(
                f"the fraction of steps that is averaged must lie in (0, 1], but got {fraction}"
            )
        super().__init__()
        self.fraction = fraction

    def should_update(self, step_idx: int | None = None, epoch_idx: int | None = None) -> bool:
        """Tell whether the next snapshot is due; never at the end of an epoch."""
        last = self._latest_update_step
        # About SNAPSHOTS updates fall into the average's window, which grows with the steps.
        due = max(last + 1, math.ceil(last * (1.0 + self.fraction / SNAPSHOTS)))
        return step_idx is not None and step_idx + 1 >= due

    def decay(self, step: int) -> float:
        """Give the share of the average so far.

        It is (s/t)^(1/fraction), with the latest update at step s and this one at step t.
        """
        return float((self._latest_update_step / step) ** (1.0 / self.fraction))


class ExponentialMovingAverage(_DeviceAverage):
    """Evaluates an exponential moving average of weights and buffers, updated every few steps.

    average <- decay^every x average + (1 - decay^every) x weights, as in Page's version of 34 s
    (2019, "How to train your ResNet 8": 0.99 every 5 steps). Unlike his it starts from the weights
    after the first step. Its window is 1/(1 - decay) steps.

    Args:
        decay: of one step, from 0 (the weights of the last update themselves) to below 1.
        every: steps between updates, a positive integer.
    """

    def __init__(self, decay: float, every: int) -> None:
        if not 0.0 <= decay < 1.0:
            raise ConfigError(f"the decay of a moving average must lie in [0, 1), but got {decay}")
        check_positive_integer("the steps between updates of an average", every)
        super().__init__()
        self._decay = decay**every
        self._every = every

    def should_update(self, step_idx: int | None = None, epoch_idx: int | None = None) -> bool:
        """Tell whether an update is due; never at the end of an epoch."""
        return step_idx is not None and step_idx % self._every == 0

    def decay(self, step: int) -> float:
        """Give the share of the average so far, decay^every, the same at each update."""
        return self._decay


class OptimizersAverage(Callback):
    """Evaluates the average that the optimizer keeps by itself, as a schedule-free one does.

    (Defazio et al. 2024, arXiv 2405.15682.) Such an optimizer trains at other weights than those
    that it gives. Its methods ``eval`` and ``train`` put the one in the place of the other.
    """

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Put the weights that are trained in place."""
        self._switch(trainer, "train")

    def on_validation_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Put the average in the place of the weights."""
        self._switch(trainer, "eval")

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Put the weights that are trained back."""
        # An evaluation after the fit leaves the average in place.
        if trainer.state.fn == "fit":
            self._switch(trainer, "train")

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Leave the average in the module."""
        self._switch(trainer, "eval")

    @staticmethod
    def _switch(trainer: Trainer, mode: Literal["train", "eval"]) -> None:
        """Let each optimizer put its trained weights, or its average, into the module."""
        for optimizer in trainer.optimizers:
            getattr(optimizer, mode)()


class Lookahead(Callback):
    """Pulls the weights back to a slow copy every few steps, more strongly later in training.

    (Zhang et al. 2019, arXiv 1907.08610, algorithm 1, in the form of hlb-CIFAR10 and
    cifar10-airbench.) At step t, a multiple of ``every``, slow <- slow + (1 - d)(fast - slow) and
    fast <- slow, with d = decay x (t/total_steps)^power; at step ``total_steps`` fast <- slow once
    more. The slow weights start at the untrained ones. Buffers, such as batch normalisation's
    statistics, are weights here; whole numbers are left alone. With k steps that a gradient scaler
    skips, the last fast <- slow comes k steps before the end.

    Args:
        total_steps: the trial's own steps, over 0.
        every: steps between updates, a positive integer. 5 in the source.
        decay: from 0 (which changes nothing but the last step) to 1. 0.95^5 in the source.
        power: of the growth of d, at least 0. 3 in the source.
    """

    def __init__(self, total_steps: int, every: int, decay: float, power: float) -> None:
        if total_steps < 1:
            raise ConfigError(f"lookahead needs at least one step, but got {total_steps}")
        check_positive_integer("the steps between updates of lookahead", every)
        if not 0.0 <= decay <= 1.0:
            raise ConfigError(f"the decay of lookahead must lie in [0, 1], but got {decay}")
        if not 0.0 <= power < math.inf:
            raise ConfigError(f"the power of lookahead must be at least 0, but got {power}")
        self._total_steps = total_steps
        self._every = every
        self._decay = decay
        self._power = power
        self._slow: list[Tensor] = []
        self._step = 0

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Forget an earlier fit; a checkpoint's state is loaded after this."""
        self._slow = []
        self._step = 0

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Copy the slow weights from the module, or move those of a checkpoint to its device."""
        weights = _floating(pl_module)
        slow_weights = list[Tensor]()
        for slow, weight in zip(self._slow or weights, weights, strict=True):
            slow_weights.append(slow.to(weight, copy=True))
        self._slow = slow_weights

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, *arguments: Any
    ) -> None:
        """Update slow and fast weights if that is due, at the last micro-batch of a step."""
        step = trainer.global_step
        if step <= self._step:
            return
        self._step = step
        if step % self._every == 0:
            share = min(1.0, step / self._total_steps)
            self._update(pl_module, self._decay * share**self._power)
        # The training ends with the slow weights in the module.
        if step == self._total_steps:
            self._update(pl_module, decay=1.0)

    @torch.no_grad()
    def _update(self, pl_module: LightningModule, decay: float) -> None:
        """Set slow and fast weights, those of the module, to one mixture of both.

        It is ``decay`` x slow + (1 - ``decay``) x fast.
        """
        fast = _floating(pl_module)
        torch._foreach_lerp_(self._slow, fast, 1.0 - decay)
        torch._foreach_copy_(fast, self._slow)

    def state_dict(self) -> dict[str, Any]:
        """Give the slow weights and the number of the last step."""
        return {"slow": self._slow, "step": self._step}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what :meth:`state_dict` returned."""
        self._slow = list(state_dict["slow"])
        self._step = state_dict["step"]


def _floating(module: nn.Module) -> list[Tensor]:
    """Give a module's parameters and buffers that are not whole numbers."""
    return [tensor for tensor in _tensors(module) if tensor.is_floating_point()]
