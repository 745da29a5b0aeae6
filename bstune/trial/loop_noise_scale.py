"""Measures the gradient noise scale in a user's own loop that accumulates gradients.

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
    """The micro-batches of a step so far."""

    # Examples in each micro-batch.
    examples: list[int] = field(default_factory=list)
    # The squared norm of each micro-batch's part of the gradient.
    squares: list[Tensor] = field(default_factory=list)
    # The gradient so far, summed over the micro-batches, by the parameter's place in the model.
    total: dict[int, Tensor] = field(default_factory=dict)


class LoopNoiseScale:
    """Measures the noise scale in a loop of yours.

    It takes the gradients of the micro-batches that a step accumulates. A loop without accumulation
    has one gradient a step, which does not tell the noise scale: let it take its batch in two
    halves on measured steps. A measured step keeps one more gradient in memory. For Lightning's
    Trainer there is :class:`bstune.NoiseScale`.

    Args:
        every: steps from one measured step to the next; on the others :meth:`measure` does nothing.
        window: how many measured steps, the latest, are in the moving estimate.
        level: probability of the estimate's interval.
        weights: of the micro-batches' gradients in the step's. ``equal``: 1/k each, where each of k
            losses is divided by k. ``examples``: n_i/B, where the loss of n_i of the step's B
            examples is multiplied by that.
        first_step: steps that were taken before, such as ``trial.first_step`` of a trial that goes
            on; steps are counted from there.

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
        # Called to refuse a level out of its range.
        moving_estimate([], window, level)
        self._every = every
        self._window = window
        self._level = level
        self._weights = weights
        self._steps = first_step
        self._step = _Step()
        # The number of steps that were due and not measured, as a gradient was missing or not
        # finite.
        self.passed_over = 0
        # The number, |G|^2 and tr Sigma of each measured step.
        self._measurements: list[tuple[int, float, float]] = []

    @property
    def measurements(self) -> tuple[tuple[int, float, float], ...]:
        """The number, the unbiased |G|^2 and tr Sigma of each measured step.

        Numbers count on from ``first_step``.
        """
        return tuple(self._measurements)

    @property
    def estimate(self) -> NoiseScaleEstimate:
        """The moving estimate, from the latest ``window`` measured steps."""
        return moving_estimate(self._measurements, self._window, self._level)

    @property
    def is_due(self) -> bool:
        """Whether the step that is taken now is measured."""
        return (self._steps + 1) % self._every == 0

    def measure(self, parameters: Iterable[nn.Parameter], examples: int) -> None:
        """Read a micro-batch's part of the gradient, after its backward pass.

        Args:
            parameters: of the model, the same ones in the same order each time.
            examples: the number of examples in the micro-batch.

        Raises:
            ConfigError: where ``examples`` is no positive integer, or a gradient is sparse.
        """
        check_positive_integer("the examples of a micro-batch", examples)
        if not self.is_due:
            return
        step = self._step
        square: Tensor | None = None
        for index, parameter in enumerate(parameters):
            gradient = parameter.grad
            if gradient is None:
                continue
            if gradient.is_sparse:
                raise ConfigError(
                    "the noise scale needs dense gradients, but a parameter's is sparse: leave it "
                    "out"
                )
            # This micro-batch has added its part to the gradient of those before.
            accumulated = step.total.get(index)
            part = gradient if accumulated is None else gradient - accumulated
            of_part = part.detach().float().square().sum()
            square = of_part if square is None else square + of_part.to(square.device)
            step.total[index] = gradient.detach().clone()
        step.examples.append(examples)
        if square is not None:
            step.squares.append(square)

    def step(self, scale: float = 1.0) -> None:
        """Take in the step, after its last backward pass.

        Call it before gradients are clipped or set to zero.

        Args:
            scale: the factor by which a gradient scaler has multiplied the loss.

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
        # A micro-batch in which no parameter had a gradient has no square.
        if len(step.squares) < len(step.examples):
            self.passed_over += 1
            return
        norms = self._norms(step, scale)
        if math.isfinite(norms.squared_gradient) and math.isfinite(norms.trace):
            measured = self._steps, norms.squared_gradient, norms.trace
            self._measurements.append(measured)
        else:
            self.passed_over += 1

    def _norms(self, step: _Step, loss_scale: float) -> GradientNorms:
        """Give a step's mean squared gradient norms, of its micro-batches and of its whole batch.

        With weights w_i of micro-batches of n_i examples, the batch sizes that the two belong to
        are one over the sums of w_i/n_i and of w_i^2/n_i (derived in
        :mod:`bstune.core.noise_scale`).

        Args:
            step: the gradients that were read in it.
            loss_scale: the factor by which a gradient scaler, for low precision, has multiplied the
                losses and with them the gradients.
        """
        examples = step.examples
        batch_size = sum(examples)
        weights = [1.0 / len(examples)] * len(examples)
        if self._weights == "examples":
            weights = [count / batch_size for count in examples]
        squares = torch.stack([square.cpu() for square in step.squares]).double().tolist()
        squares_of_total = list[Tensor]()
        for gradient in step.total.values():
            squares_of_total.append(gradient.float().square().sum().cpu())
        big = torch.stack(squares_of_total).double().sum().item()
        parts = list(zip(squares, weights, examples, strict=True))
        # A part of the gradient is w_i g_i, so its square over w_i is w_i |g_i|^2.
        small = sum(square / weight for square, weight, _ in parts)
        inverse_small = sum(weight / count for _, weight, count in parts)
        inverse_big = sum(weight**2 / count for _, weight, count in parts)
        # Squared norms grow with the square of the loss's scale, which is taken out again.
        return GradientNorms(
            small=small / loss_scale**2,
            small_size=1.0 / inverse_small,
            big=big / loss_scale**2,
            big_size=1.0 / inverse_big,
        )
