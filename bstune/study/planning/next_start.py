"""Whether a stated wall time holds the start of a command that continues a study.

It is asked before torch is imported, so that it knows the study's storage and its options alone. A
start of minutes, after which no second is left to train, is refused in seconds.
"""

import optuna

from bstune.options import StudyOptions
from bstune.study.planning.next_command import NextCommand
from bstune.study.planning.plan import RESCUE_SHARE, count_points, trials_of_search
from bstune.study.planning.survey_time import survey_seconds
from bstune.study.planning.wall import (
    OTHERS_SHARE,
    REPORT_DECISIONS,
    REPORT_SECONDS,
    TimeTaken,
)
from bstune.study.storage.trials import results


def limit_to_continue(options: StudyOptions, study: optuna.Study) -> int | None:
    """Give the least ``search.wall_seconds`` that has time for another trial of a study.

    It is None where the stated limit holds a start as short as the study has had, where none is
    stated, and where the search has run all of its trials or has not begun one.

    Args:
        options: of the command that continues the study.
        study: as the commands before this one have left it.
    """
    limit = options.search.wall_seconds
    ended = results(study)
    trials = trials_of_search(ended)
    if limit is None or not trials or count_points(trials) >= options.search.trials:
        return None
    taken = TimeTaken.of(study)
    if limit - taken.seconds > taken.shortest_start:
        return None
    # What lies between two trials is mostly the decision on the second one.
    in_trials = sum(trial.wall_seconds for trial in ended)
    decision = max(taken.searches - in_trials, 0.0) / len(ended)
    longest = max(trial.wall_seconds for trial in trials)
    to_target = [trial.wall_seconds for trial in trials if trial.reached]
    is_for_target = options.search.objective != "loss"

    def kept(limit: float) -> float:
        """Give the most that is kept for what follows the search, by the limit."""
        if not is_for_target or not to_target:
            return RESCUE_SHARE * limit
        of_winner = options.search.replicates * (decision + max(to_target))
        return of_winner + OTHERS_SHARE * limit

    following = NextCommand(
        charged=taken.seconds,
        start=taken.shortest_start,
        survey=lambda limit, left: survey_seconds(options, limit, left),
        trials=1,
        decision=decision,
        trial=lambda limit: longest,
        kept=kept,
        report=REPORT_SECONDS + REPORT_DECISIONS * decision,
    )
    return following.least_limit(limit)
