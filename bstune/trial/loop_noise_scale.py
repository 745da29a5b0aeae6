"""The gradient noise scale of a loop of one's own that accumulates gradients over micro-batches.

>>> noise = LoopNoiseScale()
>>> for micro_batches in steps:  # doctest: +SKIP
...     optimizer.zero_grad()
...     for micro_batch in micro_batches:
...         (loss_of(model, micro_batch) / len(micro_batches)).backward()
...         noise.measure(model.parameters(), len(micro_batch[0]))
...     noise.step()  # before gradients are clipped
...     optimizer.step()
>>> print(noise.estimate)  # doctest: +SKIP

The arithmetic and its source stand in :mod:`bstune.core.noise_scale`.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor, nn

from bstune.core.errors import ConfigError, check_positive_integer
from bstune.core.interval import INTERVAL_LEVEL
from bstune.core.noise_scale import (
    WINDOW,
    GradientNorms,
    NoiseScaleEstimate,
    moving_estimate,
)


@dataclass
class _Step:
    """The micro-batches of a step so far: their examples, their parts of the gradient, its sum."""

    examples: list[int] = field(default_factory=list)
    squares: list[Tensor] = field(default_factory=list)
    total: dict[int, Tensor] = field(default_factory=dict)


class LoopNoiseScale:
    """Measures the noise scale in a loop of yours, from the gradients of the micro-batches that a step accumulates.

    A loop without accumulation has one gradient a step, which does not tell it: let it take its
    batch in two halves on measured steps. A measured step keeps one more gradient in memory. For
    Lightning's Trainer there is :class:`bstune.NoiseScale`.

    Args:
        every: steps from one measured step to the next; on the others :meth:`measure` does nothing.
        window: measured steps in the moving estimate, the latest.
        level: of the interval.
        weights: of the micro-batches' gradients in the step's. ``equal``: 1/k each of k, where each
            loss is divided by k; ``examples``: n_i/B, where it is multiplied by that.
        first_step: steps that were taken before, as ``trial.first_step`` of a trial that goes on;
            steps are counted from there.

    Raises:
        ConfigError: for a setting out of its range.
    """

    def __init__(
        self,
        every: int = 1,
        window: int = WINDOW,
        level: float = INTERVAL_LEVEL,
        weights: Literal["equal", "examples"] = "equal",
        first_step: int = 0,
    ) -> None:
        check_positive_integer("the noise scale's every", every)
        check_positive_integer("the noise scale's window", window)
        if weights not in ("equal", "examples"):
            raise ConfigError(
                f"the noise scale's weights must be equal or examples, but got {weights!r}"
            )
        if not isinstance(first_step, int) or isinstance(first_step, bool) or first_step < 0:
            raise ConfigError(
                "the noise scale's first_step must be a whole number of steps, but got "
                f"{first_step!r}"
            )
        # It refuses a level out of its range.
        moving_estimate([], window, level)
        self._every = every
        self._window = window
        self._level = level
        self._weights = weights
        self._steps = first_step
        self._step = _Step()
        # Steps that were due, but had a gradient that is not finite or none.
        self.passed_over = 0
        self._measurements: list[tuple[int, float, float]] = []

    @property
    def measurements(self) -> tuple[tuple[int, float, float], ...]:
        """Of each measured step its number, its unbiased |G|^2 and its tr Sigma.

        Numbers count on from ``first_step``.
        """
        return tuple(self._measurements)

    @property
    def estimate(self) -> NoiseScaleEstimate:
        """The moving estimate: of the latest ``window`` measured steps."""
        return moving_estimate(self._measurements, self._window, self._level)

    @property
    def is_due(self) -> bool:
        """Whether the step that is taken now is measured."""
        return (self._steps + 1) % self._every == 0

    def measure(self, parameters: Iterable[nn.Parameter], examples: int) -> None:
        """Read a micro-batch's part of the gradient, after its backward pass.

        Args:
            parameters: of the model, the same ones in the same order each time.
            examples: of the micro-batch.

        Raises:
            ConfigError: for a number of examples that is none, or a sparse gradient.
        """
        check_positive_integer("the examples of a micro-batch", examples)
        if not self.is_due:
            return
        step = self._step
        square: Tensor | None = None
        for place, parameter in enumerate(parameters):
            gradient = parameter.grad
            if gradient is None:
                continue
            if gradient.is_sparse:
                raise ConfigError(
                    "the noise scale needs dense gradients, but a parameter's is sparse: leave it "
                    "out"
                )
            # What this micro-batch has added to the gradient of those before.
            accumulated = step.total.get(place)
            part = gradient if accumulated is None else gradient - accumulated
            norm = part.detach().float().square().sum()
            square = norm if square is None else square + norm.to(square.device)
            step.total[place] = gradient.detach().clone()
        step.examples.append(examples)
        if square is not None:
            step.squares.append(square)

    def step(self, scale: float = 1.0) -> None:
        """Take in the step, after its last backward pass.

        Its gradients are not yet clipped or set to zero.

        Args:
            scale: by which a gradient scaler has multiplied the loss.

        Raises:
            ConfigError: where a measured step has one micro-batch alone.
        """
        step = self._step
        self._step = _Step()
        is_due = self.is_due
        self._steps += 1
        if not is_due:
            return
        if len(step.examples) < 2:
            raise ConfigError(
                "the noise scale needs two micro-batches a step or more, but got "
                f"{len(step.examples)}: call measure() after the backward pass of each, or take "
                "the batch in two halves"
            )
        if len(step.squares) < len(step.examples):
            self.passed_over += 1
            return
        norms = self._norms(step, scale)
        if math.isfinite(norms.squared_gradient) and math.isfinite(norms.trace):
            measured = self._steps, norms.squared_gradient, norms.trace
            self._measurements.append(measured)
        else:
            self.passed_over += 1

    def _norms(self, step: _Step, scale: float) -> GradientNorms:
        examples = step.examples
        total = sum(examples)
        equal = 1.0 / len(examples)
        weights = [equal] * len(examples)
        if self._weights == "examples":
            weights = [count / total for count in examples]
        squares = torch.stack([square.cpu() for square in step.squares]).double().tolist()
        of_total = list[Tensor]()
        for gradient in step.total.values():
            of_total.append(gradient.float().square().sum().cpu())
        big = torch.stack(of_total).double().sum().item()
        parts = list(zip(squares, weights, examples, strict=True))
        # A part of the gradient is w_i g_i, and counts as w_i |g_i|^2.
        small = sum(square / weight for square, weight, _ in parts)
        inverse_small = sum(weight / count for _, weight, count in parts)
        inverse_big = sum(weight**2 / count for _, weight, count in parts)
        return GradientNorms(
            small=small / scale**2,
            small_size=1.0 / inverse_small,
            big=big / scale**2,
            big_size=1.0 / inverse_big,
        )
