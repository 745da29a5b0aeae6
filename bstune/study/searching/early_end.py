"""Ends a search before its means are spent, by ``search.precision`` or ``search.least_gain``."""

from collections.abc import Sequence

from bstune.core.records import TrialResult
from bstune.search.budget_findings import gain_left_of
from bstune.study.analysis.critical import critical_batch
from bstune.study.analysis.model import budget_posteriors, study_posterior
from bstune.study.at_budget import is_full
from bstune.study.planning.plan import SearchEnd
from bstune.study.prepared import PreparedStudy
from bstune.study.searching.limits import is_for_loss
from bstune.system.console import format_count, format_number

# So many trials have reached the target before the search may end by search.precision.
FEWEST_REACHED = 6
# So many trials have run to their budget's end before the search may end by search.least_gain.
FEWEST_FULL = 5
# Draws of the posterior while the search goes on, as it is sampled again and again.
LOOK_PARTICLES = 400
# The search looks at search.precision and search.least_gain after each multiple of so many trials.
LOOK_EVERY = 4


def has_goal(prepared: PreparedStudy) -> bool:
    """Whether an option may end the search before its trials and seconds are spent.

    It is ``search.least_gain`` for the objective loss, else ``search.precision``.
    """
    budget = prepared.budget
    goal = budget.least_gain if is_for_loss(prepared) else budget.precision
    return goal is not None


def first_trials(trials_of_search: Sequence[TrialResult]) -> list[TrialResult]:
    """Select the trials of the first indices, as far as all of these are done.

    The number of indices is a multiple of ``LOOK_EVERY``. Trials side by side end in any order, and
    when the search ends must not depend on that, nor on when one looks.
    """
    indices = {trial.trial_index for trial in trials_of_search}
    done_in_a_row = 0
    while done_in_a_row in indices:
        done_in_a_row += 1
    count = done_in_a_row - done_in_a_row % LOOK_EVERY
    return [trial for trial in trials_of_search if trial.trial_index < count]


def early_end(prepared: PreparedStudy, trials: Sequence[TrialResult]) -> SearchEnd | None:
    """Give the end of the search, if these trials have answered its question well enough.

    It is None otherwise.
    """
    if is_for_loss(prepared):
        return _little_to_gain(prepared, trials)
    return _precise(prepared, trials)


def _little_to_gain(prepared: PreparedStudy, trials: Sequence[TrialResult]) -> SearchEnd | None:
    """Give the end of a search in which at most ``search.least_gain`` is still to gain.

    It is None if more is to gain, or the option is unset.
    """
    least_gain = prepared.budget.least_gain
    full = sum(is_full(trial, prepared.last_step) for trial in trials)
    if least_gain is None or full < FEWEST_FULL:
        return None
    # The share 1 is the whole budget.
    posterior = budget_posteriors(prepared, trials, LOOK_PARTICLES, (1.0,))[1.0]
    left = gain_left_of(posterior)
    if left is None or left.at_most > least_gain * left.seed_scatter:
        return None
    metric = prepared.protocol.target.metric
    return SearchEnd(
        f"stopped: {metric} {format_number(left.at_most, 2)} at most is still to gain, within "
        f"search.least_gain={least_gain:g} of what one seed differs from another, "
        f"{format_number(left.seed_scatter, 2)}",
        "search.least_gain",
    )


def _precise(prepared: PreparedStudy, trials: Sequence[TrialResult]) -> SearchEnd | None:
    """Give the end of a search whose B_crit has an interval within ``search.precision``.

    It is None if the interval is wider, or the option is unset.
    """
    precision = prepared.budget.precision
    reached = sum(trial.reached for trial in trials)
    if precision is None or reached < FEWEST_REACHED:
        return None
    critical = critical_batch(study_posterior(prepared, trials, LOOK_PARTICLES))
    if critical is None or critical.low is None or critical.high is None:
        return None
    if critical.high / critical.low >= precision:
        return None
    return SearchEnd(
        f"stopped: B_crit lies between {format_count(critical.low)} and "
        f"{format_count(critical.high)}, within search.precision={precision:g}"
    )
