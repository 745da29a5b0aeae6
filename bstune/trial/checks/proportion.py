"""Checks that a learning rate which bstune sets in the optimizer moves all others in proportion.

The schedules ahead then keep their shape.
"""

import math
import time
import warnings
from collections.abc import Callable, Sequence

from bstune.trial.checks.schedule_end import STEPS_BETWEEN_LOOKS, ScheduleCopy

# The most steps of a schedule's own that are compared.
STEPS_AHEAD = 2000
# The longest time for stepping one pair of schedules.
SECONDS_AHEAD = 0.5

# The relative tolerance of a proportion: floats lose some digits in thousands of steps.
NEAR = 1e-5
# At most this share of a schedule's highest rate counts as 0: rounding leaves some where the
# schedule comes to 0.
NOTHING_OF_HIGHEST = 1e-9


def are_in_proportion(
    own: Sequence[float], others: Sequence[float], factor: float, highest: float | None = None
) -> bool:
    """Whether each of ``others`` is ``factor`` times the rate at its place in ``own``.

    Rates that are tiny beside ``highest`` count as 0; None: beside the highest of ``own``.
    """
    if highest is None:
        highest = max(map(abs, own), default=0.0)
    negligible = NOTHING_OF_HIGHEST * highest * factor
    pairs = zip(own, others, strict=True)
    return all(
        math.isclose(rate * factor, other, rel_tol=NEAR, abs_tol=negligible)
        for rate, other in pairs
    )


def schedule_out_of_proportion(
    own: Sequence[ScheduleCopy],
    others: Sequence[ScheduleCopy],
    factor: float,
    *,
    now: Callable[[], float] = time.monotonic,
) -> str | None:
    """Name a schedule whose later rates are not ``factor`` times as high in another trial.

    None where those of all schedules are.

    Args:
        own: copies of a trial's schedules, which are stepped ahead.
        others: copies of the other trial's schedules, in the same order.
        factor: the other trial's learning rate over this one's.
        now: a clock in seconds: a comparison takes ``SECONDS_AHEAD`` at most.
    """
    # A schedule that only one of the trials has cannot be compared.
    for copy, other in zip(own, others, strict=False):
        if not _keep_proportion(copy, other, factor, now):
            return copy.name
    return None


def _keep_proportion(
    copy: ScheduleCopy, other: ScheduleCopy, factor: float, now: Callable[[], float]
) -> bool:
    """Whether a schedule's later rates are ``factor`` times as high in the other trial.

    True also where the time is over, or the schedule ends, before any rate has differed.
    """
    began = now()
    # The highest rate so far. Rates that are tiny beside it count as 0.
    highest = 0.0
    with warnings.catch_warnings(action="ignore"):
        for number in range(STEPS_AHEAD):
            # The two trials may have ended at different steps, so one is stepped until both agree.
            ahead = copy.schedule.last_epoch - other.schedule.last_epoch
            rates = _rates(copy)
            highest = max([highest, *map(abs, rates)])
            if ahead == 0 and not are_in_proportion(rates, _rates(other), factor, highest):
                return False
            try:
                if ahead <= 0:
                    copy.schedule.step()
                if ahead >= 0:
                    other.schedule.step()
            # A schedule may raise any error at its end, which another check reports.
            except Exception:  # noqa: BLE001
                return True
            if number % STEPS_BETWEEN_LOOKS == 0 and now() - began > SECONDS_AHEAD:
                return True
    return True


def _rates(copy: ScheduleCopy) -> list[float]:
    """Give the present learning rate of each parameter group of a schedule."""
    return [float(group["lr"]) for group in copy.schedule.optimizer.param_groups]
