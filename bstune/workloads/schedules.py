"""Learning-rate schedules: functions of an optimizer that make a torch scheduler for it.

The scheduler is stepped once per optimizer step. It multiplies the optimizer's learning rate, or
each parameter group's own, by a factor. ``total_steps`` are the trial's own steps, over 0, and a
factor is at least 0; anything else is a ConfigError. A group that holds ``steps`` (see
:func:`bstune.workloads.optim.parameter_groups`) is trained for its first steps only: the factor is
0 from then on, and before it, where the group's ``fade`` is set, 1 - t/steps at step t in place of
the schedule's. Its parameters are frozen then, so that backward passes end above them.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from bstune.core.errors import ConfigError
from bstune.core.records import Budget
from bstune.trial.devices import distributed


class _Freezing(LambdaLR):
    """torch's scheduler, which also freezes the parameters of groups whose ``steps`` are over."""

    def step(self, epoch: int | None = None) -> None:
        """Set the rates of the next step, and freeze the groups whose steps are over."""
        super().step(epoch)
        self._freeze()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a checkpoint, and freeze the groups whose steps were over."""
        super().load_state_dict(state_dict)
        self._freeze()

    def _freeze(self) -> None:
        """Freeze the parameters of the groups whose steps are over."""
        # DDP waits for the gradient of each parameter that it began with.
        if distributed.place() is not None:
            return
        # A scheduler's last_epoch is the number of its steps.
        for group in self.optimizer.param_groups:
            if self.last_epoch >= group.get("steps", math.inf):
                for parameter in group["params"]:
                    parameter.requires_grad_(False).grad = None


def constant(optimizer: Optimizer) -> LambdaLR:
    """Make a schedule that keeps the optimizer's learning rate."""
    return _scheduled(optimizer, lambda step: 1.0)


def warmup_then_constant(optimizer: Optimizer, warmup_examples: int, batch_size: int) -> LambdaLR:
    """Make a linear warm-up over ``warmup_examples`` examples, then a constant rate.

    Step t (from 0) uses lr min(1, (t + 1)/n) with n = ceil(warmup_examples/batch_size).
    """
    if warmup_examples < 0:
        raise ConfigError(f"warm-up is a number of examples, at least 0, but got {warmup_examples}")
    steps = max(1, math.ceil(warmup_examples / batch_size))
    return _scheduled(optimizer, lambda step: min(1.0, (step + 1) / steps))


def linear_decay(optimizer: Optimizer, total_steps: int, end: float) -> LambdaLR:
    """Make a schedule that falls from 1 by a straight line.

    Step t (from 0) uses 1 - (1 - end) t/total_steps, so that the first step has the whole rate and
    the last one more than ``end``. From ``total_steps`` on the factor is ``end``.
    """
    _check_ranges(total_steps, end=end)
    return _scheduled(optimizer, lambda step: 1.0 - (1.0 - end) * min(1.0, step / total_steps))


def decay_then_constant(
    optimizer: Optimizer,
    budget_steps: int,
    budget_examples: int,
    batch_size: int,
    length: float,
    end: float,
) -> LambdaLR:
    """Make a schedule that falls from 1 to ``end`` by a straight line, and stays there.

    (Shallue et al. 2018, 4.2.) Step t (from 0) uses 1 - (1 - end) min(1, t/n), where n = length x
    max(budget_steps, budget_examples/batch_size). So ``length``, over 0, is a share of the steps of
    a trial that never reaches its target.
    """
    if not 0.0 < length < math.inf:
        raise ConfigError(
            f"a decay's length is a share of the budget's steps, over 0, but got {length}"
        )
    budget = Budget(steps=budget_steps, examples=budget_examples)
    steps = math.ceil(length * budget.last_step(batch_size))
    return linear_decay(optimizer, steps, end)


def one_cycle(
    optimizer: Optimizer, total_steps: int, peak: float, start: float, end: float
) -> LambdaLR:
    """Make the one-cycle schedule: from ``start`` to 1 and on to ``end``, each along half a cosine.

    (Smith and Topin 2019, in the form of torch's OneCycleLR, whose ``pct_start`` is ``peak``,
    ``div_factor`` is 1/start and ``final_div_factor`` is start/end.) With p = peak x total_steps -
    1, step t (from 0) uses 1 + (start - 1)(1 + cos(pi t/p))/2 up to p, and end + (1 - end)(1 +
    cos(pi (t - p)/(total_steps - 1 - p)))/2 up to the last step; later ones use ``end``. ``peak``
    lies in (0, 1); a cycle that is too short to rise starts at 1.
    """
    # torch's OneCycleLR gives every parameter group one rate, moves the momentum, and raises on one
    # step more.
    _check_ranges(total_steps, peak, start=start, end=end)
    peak_step = max(0.0, peak * total_steps - 1.0)
    last_step = total_steps - 1.0

    def factor(step: int) -> float:
        if step < peak_step:
            return _cosine(start, 1.0, step / peak_step)
        if last_step > peak_step:
            return _cosine(1.0, end, min(1.0, (step - peak_step) / (last_step - peak_step)))
        # The cycle has no time to fall.
        if step <= peak_step:
            return 1.0
        return end

    return _scheduled(optimizer, factor)


def triangle(
    optimizer: Optimizer, total_steps: int, peak: float, start: float, end: float, floor: float
) -> LambdaLR:
    """Make Page's triangle: straight lines from ``start`` to 1 and on to ``end``, where it stays.

    (Page 2018 and 2019, "How to train your ResNet", 3 and 8.) It is :func:`piecewise_linear` with
    knots (0, peak, 1 - floor) and factors (start, 1, end). ``floor``, in [0, 1), is the last share
    of the steps, all at ``end``, for an average of their weights; ``peak`` lies in (0, 1 - floor).
    """
    if not 0.0 <= floor < 1.0:
        raise ConfigError(
            f"a schedule's floor is a share of its steps from 0 to below 1, but got {floor}"
        )
    _check_ranges(total_steps, peak, 1.0 - floor, start=start, end=end)
    return piecewise_linear(optimizer, total_steps, (0.0, peak, 1.0 - floor), (start, 1.0, end))


def piecewise_linear(
    optimizer: Optimizer, total_steps: int, knots: Sequence[float], factors: Sequence[float]
) -> LambdaLR:
    """Make a schedule that joins (knots[i] x total_steps, factors[i]) by straight lines.

    Step t (from 0) uses the factor at t + 1, so that a schedule that starts at factor 0 wastes no
    step. Before the first knot the factor is the first one, and after the last knot the last one.
    David Page's triangle has knots (0, 5/24, 1), factors (0, 1, 0). There are at least two
    increasing knots, shares of ``total_steps``, and as many factors.
    """
    _check_ranges(total_steps)
    are_increasing = all(knot < following for knot, following in pairwise(knots))
    if len(knots) < 2 or not are_increasing:
        raise ConfigError(
            f"knots must be two or more increasing shares of the steps, but got {list(knots)}"
        )
    if len(knots) != len(factors):
        raise ConfigError(
            f"a schedule needs a factor for each knot, but got {len(knots)} knots and "
            f"{len(factors)} factors"
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

    return _scheduled(optimizer, factor)


def _scheduled(optimizer: Optimizer, factor: Callable[[int], float]) -> LambdaLR:
    """Make the scheduler with ``factor(step)`` at a step, and 0 for a group that is frozen."""
    factors = [_factor_of_group(group, factor) for group in optimizer.param_groups]
    freezes = any("steps" in group for group in optimizer.param_groups)
    scheduler = _Freezing if freezes else LambdaLR
    return scheduler(optimizer, factors)


def _factor_of_group(
    group: Mapping[str, Any], factor: Callable[[int], float]
) -> Callable[[int], float]:
    """Give a group's factor by step: it is 0 after the group's ``steps``, if it has them.

    Until then it is ``factor``, or falls from 1 by a straight line where the group has ``fade``.
    """
    steps: int | None = group.get("steps")
    fades: bool = group.get("fade", False)
    if steps is None:
        return factor

    def of_first_steps(step: int) -> float:
        if step >= steps:
            return 0.0
        if fades:
            return 1.0 - step / steps
        return factor(step)

    return of_first_steps


def _cosine(start: float, end: float, share: float) -> float:
    """Give the value at a share of the way from ``start`` to ``end`` along half a cosine."""
    return end + (start - end) * (1.0 + math.cos(math.pi * share)) / 2.0


def _check_ranges(
    total_steps: int, peak: float | None = None, below: float = 1.0, **factors: float
) -> None:
    """Refuse values of a schedule that are out of their range.

    Args:
        total_steps: at least one.
        peak: between 0 and ``below``; None: there is none.
        below: the upper end of the peak's range.
        **factors: at least 0, by their names.
    """
    if total_steps < 1:
        raise ConfigError(
            f"a schedule with a horizon needs at least one step, but got {total_steps}"
        )
    if peak is not None and not 0.0 < peak < below:
        raise ConfigError(
            f"a schedule's peak must lie between 0 and {below:g} of its steps, but got {peak}"
        )
    for name, value in factors.items():
        if not 0.0 <= value < math.inf:
            raise ConfigError(
                f"a schedule's {name} is a factor of the learning rate, at least 0, but got {value}"
            )
