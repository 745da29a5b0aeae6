"""What becomes of a study's winners at its end: tests, marks, and a look for checkpoints."""

import platform
from collections.abc import Mapping
from contextlib import chdir

import optuna

from bstune.core.records import Merit
from bstune.result import WINNERS, WinnerName, finite
from bstune.study.planning.replicates import Winner
from bstune.study.prepared import PreparedStudy
from bstune.study.storage.attributes import TESTS, WINNER
from bstune.study.storage.lease import Lease, this_machine
from bstune.study.storage.trials import lease_of
from bstune.system.console import listing
from bstune.system.failures import optional
from bstune.system.files import is_own

NO_METRICS = "no test metrics"


def metrics_of_winners(
    prepared: PreparedStudy, study: optuna.Study, best: Mapping[Merit, Winner], missing: list[str]
) -> dict[WinnerName, dict[str, float | None]]:
    """Test the winners' checkpoints on the test set; give their metrics by winner.

    A trial with metrics is not tested again, however often the study goes on. A winner without
    metrics has no entry. Where the user's code fails, ``missing`` gets a line for each of its
    errors.
    """
    tests: dict[str, dict[str, float]] = dict(study.user_attrs.get(TESTS, {}))
    # By number, as one trial may win by time and by steps.
    winners = {winner.trial.number: winner.trial for winner in best.values()}
    untested = [trial for number, trial in winners.items() if str(number) not in tests]
    # The trials whose tests failed, by the line on the error: winners often fail alike.
    failed = dict[str, list[str]]()
    for trial in untested:
        lines = list[str]()
        # The user's code may change the working directory: chdir goes back to it.
        with optional(NO_METRICS, lines), chdir("."):
            metrics = prepared.backend.test(trial.again(), prepared.files)
            if metrics:
                tests[str(trial.number)] = dict(metrics)
        for line in lines:
            failed.setdefault(line, []).append(str(trial.number))
    for line, numbers in failed.items():
        cause = line.removeprefix(NO_METRICS)
        noun = "trial" if len(numbers) == 1 else "trials"
        missing.append(f"{NO_METRICS} of {noun} {listing(numbers)}{cause}")
    if untested:
        study.set_user_attr(TESTS, tests)
    by_winner = dict[WinnerName, dict[str, float | None]]()
    for name, criterion in WINNERS.items():
        if criterion.merit not in best:
            continue
        of_trial = tests.get(str(best[criterion.merit].trial.number))
        if of_trial is not None:
            by_winner[name] = {metric: finite(value) for metric, value in of_trial.items()}
    return by_winner


def mark_winners(study: optuna.Study, best: Mapping[Merit, Winner]) -> None:
    """Store the winners as an attribute of the study, where Optuna's dashboard shows them.

    The winners' trials get no mark, as a trial that has ended cannot be changed any more.
    """
    shown = dict[str, dict[str, int | float]]()
    for criterion in WINNERS.values():
        if criterion.merit in best:
            trial = best[criterion.merit].trial
            point = {"trial": trial.number, "batch_size": trial.batch_size, "lr": trial.lr}
            shown[criterion.heading] = point
    if study.user_attrs.get(WINNER, {}) != shown:
        study.set_user_attr(WINNER, shown)


def checkpoints_elsewhere(
    prepared: PreparedStudy, study: optuna.Study, best: Mapping[Merit, Winner]
) -> list[str]:
    """Give a line for each winner whose checkpoint another machine has.

    Where a trial of this machine has none, it wrote none: its target may have been set after it
    had ended.
    """
    files = prepared.files
    # Recorded runs leave no checkpoint anywhere.
    if prepared.backend.train_examples is None:
        return []
    numbers = {winner.trial.number for winner in best.values()}
    lines = list[str]()
    for number in sorted(numbers):
        # The file is here, and this study wrote it.
        if is_own(files.checkpoint(number)):
            continue
        lease = lease_of(study, number)
        if lease is not None and _wrote_here(lease):
            continue
        machine = "a process that left no lease"
        if lease is not None:
            machine = lease.name
        where = f"is not in {files.checkpoints}, but with {machine}"
        lines.append(f"the checkpoint of trial {number} {where}")
    return lines


def _wrote_here(lease: Lease) -> bool:
    """Whether a process wrote its files into the folder of the study that this machine has.

    A study's owner on this machine did. A worker may have a folder of its own.
    """
    # After a boot the machine's identity is another one, and its name stays.
    is_here = lease.machine == this_machine() or f"@{platform.node()} (" in lease.name
    return is_here and lease.role == "owner"
