"""The files of a study's trials: records in ``trials.jsonl``, and the checkpoints kept."""

import math
from collections.abc import Callable, Collection, Sequence

from bstune.core.objectives import SOUGHT, Objective
from bstune.core.records import Merit, TrialResult, TrialSpec
from bstune.study.analysis.step_times import with_common_step_time
from bstune.study.at_budget import is_full
from bstune.study.planning.plan import trials_of_search
from bstune.study.planning.replicates import candidates
from bstune.study.prepared import PreparedStudy
from bstune.study.searching.limits import is_for_loss
from bstune.system.files import Output, keep_trials, write_text

# A stopped trial that took more than so many times the best trial's time or steps cannot win.
ABANDON_FACTOR = 1.2
# States of stopped trials that are kept: each is as large as the model and its optimizer.
MAX_STATES = 32
# trials.jsonl is written again once there are so many times the trials in it, and at the end.
REWRITE_GROWTH = 1.01


class TrialFiles:
    """``trials.jsonl``, and the checkpoints and states of trials, as one process keeps them."""

    def __init__(self, files: Output) -> None:
        self._files = files
        # Numbers of the finished trials.
        self._ended: set[int] = set()
        # The records in trials.jsonl and their lines, by number.
        self._lines: dict[int, tuple[TrialResult, str]] = {}

    def update(
        self,
        trials: Sequence[TrialResult],
        winning: Callable[[], Collection[int]],
        continued: Callable[[], Collection[int]],
    ) -> None:
        """Take in the finished trials, and delete the files that nothing needs any more.

        Args:
            trials: all that have finished.
            winning: gives the numbers of the trials whose checkpoints are kept.
            continued: gives the numbers of the trials whose states are kept.
        """
        ended = {trial.number for trial in trials}
        if ended == self._ended:
            return
        self._ended = ended
        # Writing the whole file for each of thousands of trials would take longer and longer.
        if len(ended) >= REWRITE_GROWTH * len(self._lines):
            self.write(trials)
        keep_trials(self._files.checkpoints, ended, winning)
        keep_trials(self._files.states, ended, continued)

    def write(self, trials: Sequence[TrialResult]) -> None:
        """Write ``trials.jsonl``: one record a trial, in order of their numbers."""
        # There may be thousands of records, of which hardly any changes.
        lines = dict[int, tuple[TrialResult, str]]()
        for trial in trials:
            written = self._lines.get(trial.number)
            if written is None or written[0] != trial:
                written = trial, trial.to_json() + "\n"
            lines[trial.number] = written
        self._lines = lines
        write_text(self._files.trials, "".join(line for _, line in lines.values()))


def numbers_that_may_win(prepared: PreparedStudy, trials: Sequence[TrialResult]) -> set[int]:
    """Give the numbers of the trials that may become the winner."""
    # The search ranks by the trials' own seconds of a step, the report by one law for all of them.
    timed_alike = with_common_step_time(prepared, trials)
    return {trial.number for trial in (*candidates(trials), *candidates(timed_alike))}


def numbers_that_may_go_on(
    prepared: PreparedStudy, trials: Sequence[TrialResult], running: Sequence[TrialSpec]
) -> set[int]:
    """Give the numbers of the stopped trials that are continued now, or may be later.

    ``running``: what the trials that run now were asked to do.
    """
    if not prepared.backend.continues:
        return set()
    # A process may just be reading the state of a trial that it continues.
    needed = {spec.resumed_from for spec in running if spec.resumed_from is not None}
    unfinished = with_common_step_time(prepared, trials)
    if is_for_loss(prepared):
        unfinished = [trial for trial in unfinished if not is_full(trial, prepared.last_step)]
    return worth_continuing(unfinished, prepared.budget.objective) | needed


def worth_continuing(trials: Sequence[TrialResult], objective: Objective) -> set[int]:
    """Choose the stopped trials whose states are kept, at most ``MAX_STATES``; give their numbers.

    Trials that can still win come first. Others, which have taken more than the best trial, follow:
    only the curve needs them. The newest of either kind are kept.
    """
    # A continuation that was cut short is asked again, from the same state.
    resumed = {trial.resumed_from for trial in trials if trial.status != "failed"}
    stopped = list[TrialResult]()
    for trial in trials_of_search(trials):
        if trial.status == "stopped" and trial.number not in resumed:
            stopped.append(trial)
    can_still_win = _winning_test(trials, objective)
    # The last ones are kept: numbers rise with time, and False sorts before True.
    in_order = sorted(stopped, key=lambda trial: (can_still_win(trial), trial.number))
    return {trial.number for trial in in_order[-MAX_STATES:]}


def _winning_test(
    trials: Sequence[TrialResult], objective: Objective
) -> Callable[[TrialResult], bool]:
    """Make the function that says whether a stopped trial can still become the best one.

    It can if it has not taken ``ABANDON_FACTOR`` times as much as the best one to the target.
    """
    fastest = math.inf
    fewest = math.inf
    for trial in trials:
        if not trial.reached or trial.replicate_of is not None:
            continue
        fewest = min(fewest, trial.steps)
        if trial.time_to_target is not None:
            fastest = min(fastest, trial.time_to_target)

    def can_still_win(trial: TrialResult) -> bool:
        # These objectives have no best time or fewest steps that a trial could exceed.
        if objective in ("curve", "loss"):
            return True
        seconds = trial.steps * (trial.seconds_per_step or 0.0)
        by_merit: dict[Merit, bool] = {
            "time": seconds < ABANDON_FACTOR * fastest,
            "steps": trial.steps < ABANDON_FACTOR * fewest,
        }
        return any(by_merit[merit] for merit in SOUGHT[objective].merits)

    return can_still_win
