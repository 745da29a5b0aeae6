"""Learning-rate schedules: functions of the optimizer that return a torch scheduler stepped once an optimizer step.

Lengths are given in examples, or as the trial's own number of steps; a schedule is built anew for each trial.
"""

import math
from collections.abc import Sequence
from itertools import pairwise

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from bstune.errors import ConfigError


def constant(optimizer: Optimizer) -> LambdaLR:
    """Return a schedule that keeps the optimizer's learning rate."""
    return LambdaLR(optimizer, lambda step: 1.0)


def warmup_then_constant(optimizer: Optimizer, warmup_examples: int, batch_size: int) -> LambdaLR:
    """Return a linear warm-up over ``warmup_examples`` examples, then a constant rate.

    Step t (from 0) uses lr min(1, (t + 1)/n) with n = ceil(warmup_examples/batch_size).

    Raises:
        ConfigError: for a negative number of examples.
    """
    if warmup_examples < 0:
        raise ConfigError(f"warm-up is a number of examples, at least 0, but got {warmup_examples}")
    steps = max(1, math.ceil(warmup_examples / batch_size))
    return LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / steps))


def piecewise_linear(
    optimizer: Optimizer, total_steps: int, knots: Sequence[float], factors: Sequence[float]
) -> LambdaLR:
    """Return a schedule that joins (knots[i] x total_steps, factors[i]) by straight lines.

    Step t (from 0) uses the factor at t + 1, so that a schedule that starts at factor 0 wastes no step. Before the
    first and after the last knot the factor is theirs. David Page's triangle has knots (0, 5/24, 1), factors (0, 1, 0).

    Args:
        optimizer: its learning rate is what the factors multiply.
        total_steps: the trial's own steps, over 0.
        knots: shares of ``total_steps``, increasing.
        factors: of the optimizer's learning rate, one for each knot.

    Raises:
        ConfigError: for no steps, fewer than two knots, knots that do not increase, or another number of factors.
    """
    if total_steps < 1:
        raise ConfigError(f"a schedule with a horizon needs at least one step, but got {total_steps}")
    if len(knots) < 2 or not all(a < b for a, b in pairwise(knots)):
        raise ConfigError(f"knots must be two or more increasing shares of the steps, but got {list(knots)}")
    if len(knots) != len(factors):
        raise ConfigError(
            f"a schedule needs a factor for each knot, but got {len(knots)} knots and {len(factors)} factors"
        )
    pairs = list(zip(knots, factors, strict=True))

    def factor(step: int) -> float:
        share = (step + 1) / total_steps
        if share <= pairs[0][0]:
            return pairs[0][1]
        for (x0, y0), (x1, y1) in pairwise(pairs):
            if share <= x1:
                return y0 + (y1 - y0) * (share - x0) / (x1 - x0)
        return pairs[-1][1]

    return LambdaLR(optimizer, factor)
