"""Learning-rate schedules: functions of an optimizer that make a scheduler, stepped each step."""

import math
from collections.abc import Callable, Sequence

import numpy as np
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR


def warmup_then_constant(optimizer: Optimizer, warmup_examples: int, batch_size: int) -> LambdaLR:
    """Make a linear warm-up over ``warmup_examples`` examples, then a constant rate.

    Step t (from 0) uses lr min(1, (t + 1)/n) with n = ceil(warmup_examples/batch_size).
    """
    steps = max(1, math.ceil(warmup_examples / batch_size))
    return LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / steps))


def warmup_then_linear(optimizer: Optimizer, total_steps: int, warmup: float) -> LambdaLR:
    """Make a rate that falls linearly to 0 at ``total_steps``, after a warm-up of a share of them.

    Step t (from 0) uses lr (t + 1)/n in the n = round(warmup total_steps) steps of the warm-up,
    then lr (1 - x), where x = (t - n)/(total_steps - n).
    """
    return _warmed(optimizer, total_steps, warmup, lambda share: 1.0 - share)


def warmup_then_cosine(optimizer: Optimizer, total_steps: int, warmup: float) -> LambdaLR:
    """Make a rate that falls as :func:`warmup_then_linear`, but by lr (1 + cos(pi x))/2."""
    return _warmed(optimizer, total_steps, warmup, lambda x: 0.5 * (1.0 + math.cos(math.pi * x)))


def piecewise_linear(
    optimizer: Optimizer, total_steps: int, knots: Sequence[float], factors: Sequence[float]
) -> LambdaLR:
    """Make a rate that follows straight lines between (knots[i] total_steps, lr factors[i]).

    Step t (from 0) uses the place t + 1, so that a start at 0 wastes no step. Page's triangle
    (2018, "How to train your ResNet") has knots 0, 5/24 and 1 and factors 0, 1 and 0.
    """
    return LambdaLR(
        optimizer, lambda step: float(np.interp((step + 1) / total_steps, knots, factors))
    )


def _warmed(
    optimizer: Optimizer, total_steps: int, warmup: float, decay: Callable[[float], float]
) -> LambdaLR:
    """Make a warm-up over a share of the steps, then ``decay`` of the share of the rest."""
    steps = round(warmup * total_steps)

    def factor(step: int) -> float:
        if step < steps:
            return (step + 1) / steps
        return decay(min(1.0, (step - steps) / max(1, total_steps - steps)))

    return LambdaLR(optimizer, factor)
