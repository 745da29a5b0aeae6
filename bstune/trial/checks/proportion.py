"""Whether a rate that is set in the optimizer moves all others in proportion.

Schedules then keep their shape.
"""

import math
import time
import warnings
from collections.abc import Callable, Sequence

from bstune.trial.checks.schedule_end import STEPS_BETWEEN_LOOKS, ScheduleCopy

# Of a schedule's own.
STEPS_AHEAD = 2000
# Of stepping one pair of schedules.
SECONDS_AHEAD = 0.5

# Relative: floats lose some digits in thousands of steps.
NEAR = 1e-5
# Of a schedule's highest rate: what is left of it where the schedule comes to 0.
NOTHING_OF_HIGHEST = 1e-9


def are_in_proportion(
    own: Sequence[float], others: Sequence[float], factor: float, highest: float | None = None
) -> bool:
    """Say whether others are ``factor`` times as high as rates.

    ``highest`` is the rate beside which small ones are nothing; None: the highest of ``own``.
    """
    if highest is None:
        highest = max(map(abs, own), default=0.0)
    nothing = NOTHING_OF_HIGHEST * highest * factor
    pairs = zip(own, others, strict=True)
    return all(
        math.isclose(rate * factor, other, rel_tol=NEAR, abs_tol=nothing) for rate, other in pairs
    )


def schedule_out_of_proportion(
    own: Sequence[ScheduleCopy],
    others: Sequence[ScheduleCopy],
    factor: float,
    *,
    now: Callable[[], float] = time.monotonic,
) -> str | None:
    """Name a schedule whose rates ahead are not ``factor`` times its own in another trial.

    None: all keep their shape.

    Args:
        own: copies of a trial's schedules, which are stepped ahead.
        others: those of the other trial, in the same order.
        factor: by which the other one's rate is higher.
        now: a clock of seconds.
    """
    for copy, other in zip(own, others, strict=False):
        if not _keep_proportion(copy, other, factor, now):
            return copy.name
    return None


def _keep_proportion(
    copy: ScheduleCopy, other: ScheduleCopy, factor: float, now: Callable[[], float]
) -> bool:
    began = now()
    highest = 0.0
    with warnings.catch_warnings(action="ignore"):
        for number in range(STEPS_AHEAD):
            # The two trials may have ended at different steps.
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
            # A schedule may raise anything at its end, which is said elsewhere.
            except Exception:  # noqa: BLE001
                return True
            if number % STEPS_BETWEEN_LOOKS == 0 and now() - began > SECONDS_AHEAD:
                return True
    return True


def _rates(copy: ScheduleCopy) -> list[float]:
    return [float(group["lr"]) for group in copy.schedule.optimizer.param_groups]
