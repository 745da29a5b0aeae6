"""Winners run again on fresh seeds before they are reported: the best of many noisy runs is a lucky one.

The trial with the least merit (time or steps to target) is the first candidate. It is run again on fresh seeds, and its
confirmed merit is the geometric mean over those replicates alone. As long as another point's own single run claims to
beat the best confirmed one, that point is the next candidate. All of it is a function of the trials: a study that is
continued asks for what is still due.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from statistics import median
from typing import Any, Literal

from bstune.core.records import Objective, TrialResult

Merit = Literal["time", "steps"]
Runs = Mapping[int, tuple[TrialResult, ...]]
MERITS: Mapping[Objective, tuple[Merit, ...]] = {
    "time": ("time",),
    "curve": ("time",),
    "steps": ("steps",),
    "both": ("time", "steps"),
}
SAME_POINT = 0.2  # octaves: closer than this in both batch size and learning rate, two trials are at one point
# A replicate that diverged, ran out of memory or missed the target over its horizon counts as this many times the
FAILURE_FACTOR = 4.0  # candidate's merit


@dataclass(frozen=True)
class Confirmed:
    """A winner and its replicates, in order of their numbers; one that was stopped and continued stands here once."""

    winner: TrialResult
    runs: tuple[TrialResult, ...]


def next_replicate(
    trials: Sequence[TrialResult], objective: Objective, replicates: int, max_candidates: int
) -> tuple[TrialResult, int] | None:
    """Return the candidate to run again, and which of its ``replicates`` is due, from 0; None when all is done."""
    runs = _replicates(trials)
    for merit in MERITS[objective]:
        single_runs = ranked(trials, merit)
        chosen: list[TrialResult] = []
        for candidate in _points(single_runs, runs):
            best = min((_confirmed_merit(one, runs, merit) for one in chosen), default=math.inf)
            if len(chosen) == max_candidates or math.log(_merit(candidate, merit)) >= best:
                break
            point = _replicated(candidate, runs, single_runs)
            done = len(runs.get(point.number, ()))
            if done < replicates:
                return point, done
            if not done:  # replicates is 0
                break
            chosen.append(point)
    return None


def candidates(trials: Sequence[TrialResult], objective: Objective, max_candidates: int) -> list[TrialResult]:
    """Return the trials that may be the winner once all replicates are done, by each merit: keep their checkpoints."""
    runs = _replicates(trials)
    kept = {trial.number: trial for trial in trials if trial.number in runs}
    for merit in MERITS[objective]:
        for trial in islice(_points(ranked(trials, merit), runs), max(max_candidates, 1)):
            kept[trial.number] = trial
    return [kept[number] for number in sorted(kept)]


def confirmed(trials: Sequence[TrialResult], objective: Objective) -> Confirmed | None:
    """Return the candidate with the least mean log merit over its replicates, of those with the most replicates.

    None where the best single run's point has no replicate. Of equals the better single run wins.
    """
    merit = MERITS[objective][0]
    runs = _replicates(trials)
    single_runs = ranked(trials, merit)
    replicated = [trial for trial in single_runs if trial.number in runs]
    if not any(_same_point(single_runs[0], trial) for trial in replicated):
        return None
    most = max(len(runs[trial.number]) for trial in replicated)
    complete = [trial for trial in replicated if len(runs[trial.number]) == most]
    winner = min(complete, key=lambda trial: _confirmed_merit(trial, runs, merit))
    return Confirmed(winner, runs[winner.number])


def confirmed_row(best: Confirmed) -> dict[str, Any]:
    """Return, as ``curve.json`` has it, how many replicates reached the target, and the spread over all of them.

    A run that did not reach it takes longer than any that did: then the maximum is null, and maybe the median.
    """
    times = [run.time_to_target for run in best.runs]
    steps = [float(run.steps) if run.reached else None for run in best.runs]
    return {
        "seeds": [run.seed for run in best.runs],
        "reached": sum(run.reached for run in best.runs),
        "runs": len(best.runs),
        **_spread("time", times),
        **_spread("steps", steps),
    }


def time_order(trial: TrialResult) -> tuple[float, int, int]:
    """Return what sorts trials by time to target: of equals fewer steps, then the lower number come first."""
    return _merit(trial, "time"), trial.steps, trial.number


def _merit(trial: TrialResult, merit: Merit) -> float:
    if merit == "steps":
        return float(trial.steps)
    return math.inf if trial.time_to_target is None else trial.time_to_target


def ranked(trials: Sequence[TrialResult], merit: Merit) -> list[TrialResult]:
    """Return the trials that can be candidates, best first: reached, and no replicates themselves."""
    own = [trial for trial in trials if trial.reached and trial.replicate_of is None]
    if merit == "steps":
        return sorted(own, key=lambda trial: (trial.steps, _merit(trial, "time"), trial.number))
    return sorted((trial for trial in own if trial.time_to_target is not None), key=time_order)


def _points(ranked: Sequence[TrialResult], runs: Runs) -> Iterator[TrialResult]:
    """Yield the best trial of each point, best first; beside a point that has replicates there is no other."""
    taken: list[TrialResult] = []
    for trial in ranked:
        if not any(_same_point(trial, other) for other in taken):
            yield trial
            taken += [trial, _replicated(trial, runs, ranked)]


def _replicated(trial: TrialResult, runs: Runs, ranked: Sequence[TrialResult]) -> TrialResult:
    """Return the trial at the same point that has replicates, the trial itself first; without any the trial itself."""
    if trial.number in runs:
        return trial
    near = [other for other in ranked if other.number in runs and _same_point(trial, other)]
    return max(near, key=lambda other: (len(runs[other.number]), -other.number), default=trial)


def _same_point(a: TrialResult, b: TrialResult) -> bool:
    sizes, rates = abs(math.log2(a.batch_size / b.batch_size)), abs(math.log2(a.lr / b.lr))
    return max(sizes, rates) < SAME_POINT and a.hyperparameters == b.hyperparameters


def _replicates(trials: Sequence[TrialResult]) -> Runs:
    """Return the finished replicates of each candidate, by its number; of one that was continued the last part."""
    runs = [trial for trial in trials if trial.replicate_of is not None and trial.status != "failed"]
    continued = {trial.resumed_from for trial in runs}
    replicates: dict[int, tuple[TrialResult, ...]] = {}
    for trial in sorted(runs, key=lambda trial: trial.number):
        if trial.number not in continued and trial.replicate_of is not None:
            replicates[trial.replicate_of] = (*replicates.get(trial.replicate_of, ()), trial)
    return replicates


def _confirmed_merit(candidate: TrialResult, runs: Runs, merit: Merit) -> float:
    """Return the mean log merit over a candidate's replicates."""
    logs = [math.log(_replicate_merit(run, candidate, merit)) for run in runs[candidate.number]]
    return sum(logs) / len(logs)


def _replicate_merit(run: TrialResult, candidate: TrialResult, merit: Merit) -> float:
    """Return a replicate's merit, or what it counts as where it did not reach the target."""
    own = _merit(candidate, merit)
    if run.status in ("diverged", "oom") or (run.horizon is not None and not run.reached):
        return FAILURE_FACTOR * own  # its steps bound nothing: after its horizon's end there is no going on
    tau = run.seconds_per_step or candidate.seconds_per_step
    unit = 1.0 if merit == "steps" or tau is None else tau
    # A stopped run is a bound, and no less than the candidate's merit: stopped early, it must not look fast.
    return run.steps * unit if run.reached else max(run.steps * unit, own)


def _spread(name: str, values: Sequence[float | None]) -> dict[str, float | None]:
    missing_last = [math.inf if value is None else value for value in values]
    spread = {"median": median(missing_last), "low": min(missing_last), "high": max(missing_last)}
    return {f"{name}_{key}": value if math.isfinite(value) else None for key, value in spread.items()}
