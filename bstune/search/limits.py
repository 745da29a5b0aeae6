"""How far a trial goes: the step at which it stops, or the length of its schedule.

A new trial gets a part of what the best configuration takes, a pruned one that is resumed more, and
none more than little over it. While no trial has reached the target, what all have cost decides.
All steps and costs here are in steps of the trial that is limited.
"""

import math

import numpy as np
from numpy.typing import NDArray

from bstune.search.findings import OWN_DEVIATION
from bstune.search.law import NOISE
from bstune.search.schedule_length import least_cost

# No trial runs longer than so many times the best configuration's predicted cost: its give-up cost.
GIVE_UP = 1.2
# A trial first runs to a probe limit, the lesser of this share of the give-up cost and this share
# of its own prediction. One that has run this share of its probe limit may run to the give-up cost.
PROBE_OF_GIVE_UP = 0.4
PROBE_OF_OWN = 0.6
TRIED = 0.75
# Before any trial has reached the target: a share of all that was spent, for a new one and for a
# resumed one, at least this share of the budget. With 0.12 and 0.5, 4 of 60 searches had reached
# nothing after 10 times the best trial's cost, with these one (five tables).
SHARE_OF_SPENT = 0.2
RESUMED_SHARE_OF_SPENT = 0.25
LEAST_SHARE_OF_BUDGET = 1 / 64
# A resumed trial runs on for at least these shares of its steps, before and after the first hit.
LEAST_RESUMED = 1.4
LEAST_RESUMED_AFTER_HIT = 1.3
LEAST_STEPS = 10
# Where schedules end with their trials: before the first hit one costs at most as much as all that
# was spent, so that costs double; then this share of it, or little more than what the best takes.
LENGTH_OF_SPENT = 0.5
# Where the best metric counts a trial first runs to this share of its budget, then to its end: with
# a sixteenth and a quarter 18 searches of three tables were as far off.
PROBE_OF_BUDGET = 1 / 8


def limit_after_hit(best_steps: float, predicted: float, first_step: int) -> float:
    """The step at which a trial stops once the target has been reached.

    Args:
        best_steps: with which it would be as good as the best configuration.
        predicted: its own steps to the target.
        first_step: steps of the trial that it resumes.
    """
    give_up = GIVE_UP * best_steps
    probe = min(PROBE_OF_GIVE_UP * give_up, PROBE_OF_OWN * predicted)
    limit = probe if first_step < TRIED * probe else give_up
    return max(limit, LEAST_RESUMED_AFTER_HIT * first_step, LEAST_STEPS)


def limit_before_hit(spent: float, last_step: int, first_step: int) -> float:
    """The step at which a trial stops while no trial has reached the target.

    Args:
        spent: on all trials.
        last_step: of the budget.
        first_step: steps of the trial that it resumes.
    """
    share = RESUMED_SHARE_OF_SPENT if first_step else SHARE_OF_SPENT
    more = max(share * spent, LEAST_SHARE_OF_BUDGET * last_step, LEAST_STEPS)
    return max(first_step + more, LEAST_RESUMED * first_step)


def limit_beside_best(best_steps: float, last_step: int) -> int:
    """The step at which a trial stops that no law predicts.

    Args:
        best_steps: with which it would be as good as the best so far; infinite while no trial has
            reached the target.
        last_step: of the budget.
    """
    return math.ceil(min(max(GIVE_UP * best_steps, LEAST_STEPS), last_step))


def affordable_length(spent: float, budget: float, best_steps: float | None) -> float:
    """The longest schedule that a trial may have where its schedule ends with it.

    Args:
        spent: on all trials.
        budget: what the cheapest trial may cost, to its whole budget.
        best_steps: with which it would be as good as the best configuration; None while no trial
            has reached the target.
    """
    if best_steps is None:
        return max(spent, LEAST_SHARE_OF_BUDGET * budget)
    return max(LENGTH_OF_SPENT * spent, GIVE_UP * best_steps)


def schedule_length(
    draw: NDArray[np.float64], log_steps: float, longest: float, latest: float
) -> float:
    """The length of a schedule of least expected cost in one draw.

    Args:
        draw: of the posterior, (1, parameters).
        log_steps: log S in it.
        longest: steps of the longest schedule.
        latest: the step by which the target has to be reached.
    """
    # The draw's S is known but for what seeds and the configuration itself add.
    deviation = math.hypot(math.exp(draw[0, NOISE]), OWN_DEVIATION)
    return max(least_cost(draw, log_steps, deviation, longest, latest).steps, LEAST_STEPS)
