"""Whether the user's own configuration, where it is the winner, is known to be the best one.

A search that ended early has stopped other configurations on their way to the target. The own one
may then be the winner for want of others that were run on.
"""

import math
from collections import Counter
from collections.abc import Sequence

import numpy as np

from bstune.core.records import Merit, TrialResult
from bstune.core.step_time_law import StepTimeLaw
from bstune.report.rows import last_part_of_each
from bstune.result import UntoldOthers
from bstune.search.frontier_law import log_steps
from bstune.search.posterior import Posterior
from bstune.study.planning.baseline import BaselineRuns
from bstune.study.planning.replicates import WORTH_A_CHANGE, Winner, same_point

# The own configuration is known to be the best one if each other one is better by WORTH_A_CHANGE
# with at most this chance. It is each one's own chance: that of any grows with their number, and a
# long search has stopped many that are each unlikely to win.
SURE_BEST = 0.1
# It is known to be so, too, once so many others have reached the target: the search has compared
# it, and has then left those that it stopped.
ENOUGH_COMPARED = 4


def untold_others(
    done: Sequence[TrialResult],
    own: BaselineRuns | None,
    winner: Winner | None,
    posterior: Posterior,
    merit: Merit,
    law: StepTimeLaw | None,
) -> UntoldOthers | None:
    """Count what the other configurations came to, where one that was stopped may well be better.

    None where the user's own configuration is not the winner, or is known to be the best.

    Args:
        done: the study's trials.
        own: the runs of the user's own configuration, if any.
        winner: of the study, if any.
        posterior: of these trials.
        merit: whether seconds or steps to the target are compared.
        law: tau(B) with its error; None where that is not known.
    """
    if own is None or winner is None or not same_point(own.first, winner.trial):
        return None
    others = list[TrialResult]()
    for trial in last_part_of_each(done):
        if trial.replicate_of is None and not same_point(own.first, trial):
            others.append(trial)
    counts = Counter(trial.status for trial in others)
    if counts["reached"] >= ENOUGH_COMPARED:
        return None
    stopped = {trial.number for trial in others if trial.status == "stopped"}
    chance = _chance_of_better(posterior, winner.trial.number, stopped, merit, law)
    if chance <= SURE_BEST:
        return None
    return UntoldOthers(
        chance=chance,
        reached=counts["reached"],
        stopped=counts["stopped"],
        diverged=counts["diverged"],
        out_of_memory=counts["out of memory"],
    )


def _chance_of_better(
    posterior: Posterior,
    own_number: int,
    stopped: set[int],
    merit: Merit,
    law: StepTimeLaw | None,
) -> float:
    """Compute the greatest chance of any stopped trial to need clearly less than the user's own.

    A trial's chance is the share of the posterior's draws in which it takes clearly fewer steps
    or seconds (``merit``) to the target. ``own_number`` and ``stopped`` are numbers of trials.
    """
    numbers = [trial.number for trial in posterior.observations]
    places = [place for place, number in enumerate(numbers) if number in stopped]
    if not places or own_number not in numbers:
        return 0.0
    drawn = log_steps(posterior.theta, posterior.data.points, posterior.prior)
    if merit == "time":
        sizes = np.exp2([trial.x for trial in posterior.observations])
        drawn = drawn + np.log(posterior.tau(sizes))
        if law is not None:
            step_times = law.draws(len(drawn), np.random.default_rng(0))
            drawn = drawn + np.log(step_times.over_law(sizes))
    of_own = drawn[:, [numbers.index(own_number)]]
    is_better = drawn[:, places] < of_own + math.log1p(-WORTH_A_CHANGE)
    return float(is_better.mean(axis=0).max())
