"""A study's results in one mapping, the content of ``curve.json``."""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from bstune.core.curve import CurveFit, FrontierPoint, frontier_points, log_slope
from bstune.core.records import STATUSES, Budget, Merit, Target, TrialResult
from bstune.report.rows import REGIMES, WINNERS, Row, Summary, trial_row
from bstune.search.posterior import noise_scale_row
from bstune.study.critical import CriticalBatch
from bstune.study.replicates import Winner, confirmed_row, time_order
from bstune.study.unreached import unreached_row

SMALL_END_SPAN = 4.0  # the slope at the small end is taken over this factor of batch size, and at least three points


def summarize(
    trials: Iterable[TrialResult],
    target: Target,
    fit: CurveFit | str,
    lr_exponent: Row | None = None,
    stop_reason: str | None = None,
    critical: CriticalBatch | None = None,
    best: Mapping[Merit, Winner] | None = None,
    budget: Budget | None = None,
) -> Summary:
    """Return the content of ``curve.json``: ``critical`` is the one answer that every trial informs, ``best`` wins.

    ``fit``, the curve through the frontier's points or why there is none, and the noise scale are diagnostics.
    ``budget``: of one trial.
    """
    trials = sorted(trials, key=lambda trial: trial.number)
    points = frontier_points(trials)
    fitted = None if isinstance(fit, str) else fit
    last = _last_parts(trials)
    rows: dict[str, Any] = dict.fromkeys(WINNERS)
    rows |= {
        name: winner_row(best[one.merit])
        for name, one in WINNERS.items()
        if best and one.merit in best
    }
    return {
        "target": str(target),
        "metric": target.metric,
        "goal": target.value,
        "mode": target.mode,
        "devices": sorted({trial.device for trial in trials if trial.device}),
        "training_loops": dict(
            sorted(Counter(trial.training_loop for trial in trials if trial.training_loop).items())
        ),
        "stop_reason": stop_reason,
        "trials": len(last),
        "continued": len(trials) - len(last),
        "spend": {
            "runs": len(last),
            "seconds": sum(
                trial.train_seconds + trial.eval_seconds + trial.startup_seconds for trial in trials
            ),
            "examples": sum(trial.examples for trial in last),
        },
        "statuses": {status: sum(trial.status == status for trial in last) for status in STATUSES},
        "unreached": unreached_row(trials, last, target, budget),
        "points": [_point_row(point, trials) for point in points],
        "critical": None if critical is None else asdict(critical),
        "regimes": [] if critical is None else _regimes(critical),
        "small_end": _small_end(points),
        "fit": None
        if fitted is None
        else {k: v for k, v in asdict(fitted).items() if k != "points"},
        "fit_note": fit if isinstance(fit, str) else fit.note,
        "noise_scale": noise_scale_row(
            trials,
            None if critical is None else critical.b_crit,
            None if fitted is None else fitted.b_crit,
        ),
        "lr_exponent": lr_exponent,
        **rows,
        "pareto": [_trial_row(trial) for trial in pareto_front(trials)],
    }


def pareto_front(trials: Iterable[TrialResult]) -> list[TrialResult]:
    """Return the trials that no other beats both in steps and in time to target, from least time to fewest steps."""
    front: list[TrialResult] = []
    for trial in sorted(
        (trial for trial in trials if trial.time_to_target is not None), key=time_order
    ):
        if not front or trial.steps < front[-1].steps:
            front.append(trial)
    return front


def _last_parts(trials: Sequence[TrialResult]) -> list[TrialResult]:
    """Return the trials, those that continue each other as the last one of them; a failed one continues none."""
    continued = {trial.resumed_from for trial in trials if trial.status != "failed"}
    return [trial for trial in trials if trial.number not in continued]


def _trial_row(trial: TrialResult) -> dict[str, Any]:
    names = (
        "number",
        "seed",
        "batch_size",
        "lr",
        "hyperparameters",
        "horizon",
        "steps",
        "seconds_per_step",
    )
    return {name: getattr(trial, name) for name in (*names, "time_to_target")}


def winner_row(winner: Winner) -> dict[str, Any]:
    """Return a winner as ``curve.json`` has it: ``steps`` and ``time_to_target`` are those to expect of a fresh seed.

    They are the median over its runs on fresh seeds (null where half of these missed the target), else predicted; those
    of the trial itself, which may be lucky, are its ``single_run``.
    """
    row, tau = _trial_row(winner.trial), winner.trial.seconds_per_step
    single = {name: row[name] for name in ("steps", "time_to_target")}
    fresh = confirmed_row(winner.runs)
    expected = {
        "steps": winner.steps,
        "time_to_target": None if tau is None else winner.steps * tau,
    }
    if fresh is not None:
        expected = {"steps": fresh["steps_median"], "time_to_target": fresh["time_median"]}
    return {
        **row,
        "horizon": winner.advised_horizon,
        **expected,
        "confirmed": fresh,
        "single_run": single,
    }


def _point_row(point: FrontierPoint, trials: Sequence[TrialResult]) -> dict[str, Any]:
    status, field = ("censored", "steps_low") if point.censored else ("reached", "steps")
    wanted = (point.batch_size, status, point.steps)
    # The trials are in order of their numbers, as the frontier breaks ties.
    return trial_row(
        next(one for one in trials if (one.batch_size, one.status, getattr(one, field)) == wanted)
    )


def _small_end(points: Sequence[FrontierPoint]) -> dict[str, Any] | None:
    """Least squares of log S over log B over the smallest batch sizes that reached the target; None below two."""
    reached = [point for point in points if not point.censored and point.steps > 0]
    if len(reached) < 2:
        return None
    near = [
        point for point in reached if point.batch_size <= SMALL_END_SPAN * reached[0].batch_size
    ]
    near = near if len(near) > 2 else reached[:3]
    slope = log_slope(near)
    x, y = (
        np.log(values)
        for values in zip(*((point.batch_size, point.steps) for point in near), strict=True)
    )
    residual = y - y.mean() - slope * (x - x.mean())
    degrees = len(near) - 2
    error = (
        math.sqrt(residual @ residual / degrees / ((x - x.mean()) ** 2).sum())
        if degrees > 0
        else None
    )
    return {
        "slope": slope,
        "standard_error": error,
        "batch_sizes": [point.batch_size for point in near],
    }


def _regimes(critical: CriticalBatch) -> list[dict[str, Any]]:
    """Return the regimes within the batch sizes that reached the target, and their bounds in examples."""
    low, high = critical.perfect_scaling_below, critical.maximal_data_parallelism_above
    if low is None or high is None:
        return []
    start, end = float(critical.smallest), float(critical.largest)
    rows = zip(REGIMES, ((start, low), (max(start, low), min(end, high)), (high, end)), strict=True)
    return [
        {"name": name, "from": first, "to": last} for name, (first, last) in rows if first < last
    ]
