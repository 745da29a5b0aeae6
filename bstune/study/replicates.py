"""Winners run again on fresh seeds, before they are reported: the best of many noisy runs is a lucky one.

The trial with the least merit (time or steps to target) is the first finalist. It is run again on fresh seeds, and its
confirmed merit is the geometric mean over those runs alone. As long as another point's own single run claims to beat
the best confirmed one, that point is the next finalist. All of it is a function of the trials: a study that goes on
asks for what is still due.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from bstune.core.errors import ConfigError
from bstune.core.records import TrialResult

Merit = Literal["time", "steps"]
Runs = Mapping[int, tuple[TrialResult, ...]]
MERITS: Mapping[str, tuple[Merit, ...]] = {
    "time": ("time",),
    "curve": ("time",),
    "steps": ("steps",),
    "both": ("time", "steps"),
}
SAME_POINT = 0.2  # octaves: closer than this in both batch size and learning rate, two trials alike are at one point
WENT_WRONG = 4.0  # a fresh run that diverged or ran out of memory counts as this many times the finalist's own merit


@dataclass(frozen=True)
class Confirmed:
    """A winner and its fresh runs, in order of their numbers; one that was stopped and continued stands here once."""

    winner: TrialResult
    runs: tuple[TrialResult, ...]


def next_confirmation(
    trials: Sequence[TrialResult], objective: str, seeds: int, finalists: int
) -> tuple[TrialResult, int] | None:
    """Return the finalist to run again, and which of its ``seeds`` replicates is due, from 0; None when all is done.

    Replicates are run one after another. One that failed is asked again; any other status finishes it.

    Args:
        trials: all finished trials of the study, in any order.
        objective: ``time``, ``steps``, ``curve`` (confirmed by time) or ``both`` (by time, then by steps).
        seeds: fresh runs of each finalist; 0: nothing is confirmed.
        finalists: at most this many points are confirmed for each of time and steps.

    Raises:
        ConfigError: for an unknown objective, or a negative number.
    """
    if seeds < 0 or finalists < 0:
        raise ConfigError(f"fresh seeds and finalists must be 0 or more, but got {seeds} and {finalists}")
    runs = _fresh_runs(trials)
    for merit in _merits(objective):
        chosen: list[TrialResult] = []
        for finalist in _contenders(trials, merit, runs):
            best = min((_confirmed_merit(known, runs, merit) for known in chosen), default=None)
            if len(chosen) == finalists or (best is not None and math.log(_own(finalist, merit)) >= best):
                break
            point = _tried(finalist, runs, _ranked(trials, merit))
            done = len(runs.get(point.number, ()))
            if done < seeds:
                return point, done
            if not done:  # seeds is 0
                break
            chosen.append(point)
    return None


def contenders(trials: Sequence[TrialResult], objective: str, finalists: int) -> list[TrialResult]:
    """Return the trials that may be the winner once all is confirmed: keep their checkpoints.

    They are the best ``finalists`` points by each merit, and all that have fresh runs.
    """
    runs = _fresh_runs(trials)
    kept = {trial.number: trial for trial in trials if trial.number in runs}
    for merit in _merits(objective):
        for trial in _contenders(trials, merit, runs)[: max(finalists, 1)]:
            kept[trial.number] = trial
    return [kept[number] for number in sorted(kept)]


def confirmed(trials: Sequence[TrialResult], objective: str) -> Confirmed | None:
    """Return the finalist with the least mean log merit on fresh seeds, of those with the most fresh runs.

    None where the best single run's point has no fresh run: what was confirmed then was another objective's winner, or
    an earlier one. Of equals the better single run wins. ``both`` goes by time.
    """
    merit = _merits(objective)[0]
    runs = _fresh_runs(trials)
    ranked = _ranked(trials, merit)
    finalists = [trial for trial in ranked if trial.number in runs]
    if not any(_same_point(ranked[0], finalist) for finalist in finalists):
        return None
    most = max(len(runs[finalist.number]) for finalist in finalists)
    complete = [finalist for finalist in finalists if len(runs[finalist.number]) == most]
    winner = min(complete, key=lambda finalist: _confirmed_merit(finalist, runs, merit))
    return Confirmed(winner, runs[winner.number])


def confirmed_row(found: Confirmed) -> dict[str, Any]:
    """Return a confirmation as ``curve.json`` has it: how many fresh runs reached the target, and their spread.

    A run that did not reach the target takes longer than any that did: the most is null then, and so is the median
    where half of the runs or more did not. Times are in seconds, null where the time of a step is not known.
    """
    times = [run.time_to_target for run in found.runs]
    steps = [float(run.steps) if run.reached else None for run in found.runs]
    return {
        "seeds": [run.seed for run in found.runs],
        "reached": sum(run.reached for run in found.runs),
        "runs": len(found.runs),
        **{f"time_{name}": value for name, value in _spread(times).items()},
        **{f"steps_{name}": value for name, value in _spread(steps).items()},
    }


def time_order(trial: TrialResult) -> tuple[float, int, int]:
    """Return what sorts trials by time to target: of equals fewer steps, then the lower number come first."""
    return _seconds(trial), trial.steps, trial.number


def steps_order(trial: TrialResult) -> tuple[int, float, int]:
    """Return what sorts trials by steps to target: of equals less time, then the lower number come first."""
    return trial.steps, _seconds(trial), trial.number


def _seconds(trial: TrialResult) -> float:
    return math.inf if trial.time_to_target is None else trial.time_to_target


def _merits(objective: str) -> tuple[Merit, ...]:
    if objective not in MERITS:
        raise ConfigError(f"the objective must be one of {', '.join(MERITS)}, but got {objective!r}")
    return MERITS[objective]


def _ranked(trials: Sequence[TrialResult], merit: Merit) -> list[TrialResult]:
    """Return the trials that can be finalists, best first: reached, and no fresh runs themselves."""
    own = [trial for trial in trials if trial.reached and trial.replicate_of is None]
    if merit == "steps":
        return sorted(own, key=steps_order)
    return sorted((trial for trial in own if trial.time_to_target is not None), key=time_order)


def _contenders(trials: Sequence[TrialResult], merit: Merit, runs: Runs) -> list[TrialResult]:
    """Return the best trial of each point, best first; a point that has fresh runs is not confirmed anew nearby."""
    found: list[TrialResult] = []
    taken: list[TrialResult] = []
    ranked = _ranked(trials, merit)
    for trial in ranked:
        if not any(_same_point(trial, other) for other in taken):
            found.append(trial)
            taken += [trial, _tried(trial, runs, ranked)]
    return found


def _tried(trial: TrialResult, runs: Runs, ranked: Sequence[TrialResult]) -> TrialResult:
    """Return the trial at the same point that has fresh runs, the trial itself first; without any the trial itself."""
    if trial.number in runs:
        return trial
    known = [other for other in ranked if other.number in runs and _same_point(trial, other)]
    return max(known, key=lambda other: (len(runs[other.number]), -other.number), default=trial)


def _same_point(a: TrialResult, b: TrialResult) -> bool:
    sizes, rates = abs(math.log2(a.batch_size / b.batch_size)), abs(math.log2(a.lr / b.lr))
    return max(sizes, rates) < SAME_POINT and a.hyperparameters == b.hyperparameters


def _fresh_runs(trials: Sequence[TrialResult]) -> Runs:
    """Return the finished fresh runs of each finalist, by its number; of a run that was continued the last part."""
    finalists = {trial.number for trial in trials if trial.reached and trial.replicate_of is None}
    fresh = [trial for trial in trials if trial.replicate_of in finalists and trial.status != "failed"]
    continued = {trial.resumed_from for trial in fresh}
    last = sorted((trial for trial in fresh if trial.number not in continued), key=lambda trial: trial.number)
    runs = {number: tuple(trial for trial in last if trial.replicate_of == number) for number in sorted(finalists)}
    return {number: own for number, own in runs.items() if own}


def _own(trial: TrialResult, merit: Merit) -> float:
    return float(trial.steps) if merit == "steps" else _seconds(trial)


def _confirmed_merit(finalist: TrialResult, runs: Runs, merit: Merit) -> float:
    """Return the mean log merit over a finalist's fresh runs."""
    logs = [math.log(_run_merit(run, finalist, merit)) for run in runs[finalist.number]]
    return sum(logs) / len(logs)


def _run_merit(run: TrialResult, finalist: TrialResult, merit: Merit) -> float:
    """Return a fresh run's merit, or what it counts as.

    A stopped run counts as its bound, and as no less than the finalist's own merit: stopped early, it must not look
    fast. The steps of a run that went wrong bound nothing.
    """
    own = _own(finalist, merit)
    if run.status in ("diverged", "oom"):
        return WENT_WRONG * own
    tau = run.seconds_per_step or finalist.seconds_per_step
    unit = 1.0 if merit == "steps" or tau is None else tau
    return run.steps * unit if run.reached else max(run.steps * unit, own)


def _spread(values: Sequence[float | None]) -> dict[str, float | None]:
    known = sorted(value for value in values if value is not None)
    middle = known[(len(values) - 1) // 2 : len(values) // 2 + 1]
    whole = len(middle) == 2 - len(values) % 2
    return {
        "median": sum(middle) / len(middle) if whole else None,
        "low": known[0] if known else None,
        "high": known[-1] if len(known) == len(values) else None,
    }
