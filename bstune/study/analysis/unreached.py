"""A study in which no trial reached the target: why, how far it came, and what the best point so far would take.

The best point so far is the one whose metric came closest to the target. It is compared with the baseline at equal
seconds of training: the closest that each has come to the target by then, one run of each.
"""

import math
from collections.abc import Sequence

from bstune.core.records import Budget, Target, TrialResult
from bstune.result import MAX_TEXT, AtEqualSeconds, ClosestTrial, SoFar, Unreached, finite
from bstune.search.acquisition import predicted_steps
from bstune.search.observations import Posterior

# Of its distance to the target, over the last half of its steps: what a trial gains that still improves.
IMPROVEMENT = 0.05
LEAST_EVALUATIONS = 3  # of a trial: fewer show no rate of its own, and nothing is predicted of it
CLEARLY_EASIER = 1.05  # times that distance: a target that the closest trial would have met


def unreached_because(
    trials: Sequence[TrialResult],
    last_parts: Sequence[TrialResult],
    target: Target,
    budget: Budget,
    sought: bool = True,
) -> Unreached | None:
    """Tell what tells why no trial reached the target; None if one did, or none has run.

    Of the trials that were stopped: how many still improved over the last half of their steps, and had spent their
    budget by then. ``easier`` is a target that the closest value would have met.

    Args:
        trials: all parts of all trials.
        last_parts: of trials that continue each other the last one.
        target: the one that was not reached.
        budget: of one trial.
        sought: whether the study sought this target; of another one it is not known why trials
            were stopped.
    """
    if not trials or any(trial.reached for trial in trials):
        return None
    best = _closest(trials, target)
    closest = None
    easier = None
    if best is not None:
        trial, step, value = best
        easier = target.value + CLEARLY_EASIER * (value - target.value)
        closest = ClosestTrial(
            value=value,
            steps=step,
            number=trial.number,
            batch_size=trial.batch_size,
            lr=trial.lr,
        )
    if not sought:
        return Unreached(closest=closest)
    stopped = [trial for trial in last_parts if trial.status == "stopped"]
    improving = [trial for trial in stopped if _improves(trial, target)]
    ends = [trial for trial in improving if trial.steps >= budget.last_step(trial.batch_size)]
    diverged = [trial.lr for trial in trials if trial.status == "diverged"]
    messages = [trial.message for trial in trials if trial.message]
    return Unreached(
        closest=closest,
        easier=finite(easier),
        stopped=len(stopped),
        improving=len(improving),
        improving_at_budget=len(ends),
        budget_steps=budget.steps,
        budget_examples=budget.examples,
        smallest_diverged_lr=min(diverged, default=None),
        message=messages[-1][:MAX_TEXT] if messages else None,
    )


def best_so_far(
    trials: Sequence[TrialResult],
    target: Target,
    baseline: TrialResult | None,
    posterior: Posterior,
) -> SoFar | None:
    """Give the best point of a study that has not reached its target.

    ``steps`` and ``seconds`` are those of training at which it came to ``value``; what it is predicted to take to the
    target is None where its history does not tell. None where a trial reached the target, or none has a metric.
    """
    if any(trial.reached for trial in trials):
        return None
    best = _closest(trials, target)
    if best is None:
        return None
    trial, step, value = best
    predicted = None
    if sum(value is not None for _, value in trial.history) >= LEAST_EVALUATIONS:
        predicted = predicted_steps(posterior, trial.number)
    return SoFar(
        number=trial.number,
        seed=trial.seed,
        batch_size=trial.batch_size,
        lr=trial.lr,
        hyperparameters=dict(trial.hyperparameters),
        horizon=trial.horizon,
        value=value,
        steps=step,
        seconds=_seconds(step, trial),
        predicted_steps=finite(predicted),
        predicted_seconds=finite(_seconds(predicted, trial)),
        compared=None if baseline is None else _compared(trial, baseline, target),
    )


def _seconds(steps: float | None, trial: TrialResult) -> float | None:
    if steps is None or trial.seconds_per_step is None:
        return None
    return steps * trial.seconds_per_step


def _closest(
    trials: Sequence[TrialResult], target: Target
) -> tuple[TrialResult, int, float] | None:
    """Return the trial that came closest to the target, after how many steps, and its metric there."""
    seen = [
        (trial, step, value)
        for trial in trials
        for step, value in trial.history
        if value is not None
    ]
    return min(seen, key=lambda entry: target.gap(entry[2]), default=None)


def _compared(trial: TrialResult, baseline: TrialResult, target: Target) -> AtEqualSeconds | None:
    """Tell what a trial and the baseline had come to by the end of the shorter one of the two.

    None where they are one point, one of them has no metric or no seconds, or the baseline did not train: that is said
    instead.
    """
    if (trial.batch_size, trial.lr) == (baseline.batch_size, baseline.lr):
        return None
    if baseline.status in ("diverged", "out of memory"):
        return None
    if trial.seconds_per_step is None or baseline.seconds_per_step is None:
        return None
    seconds = min(trial.steps * trial.seconds_per_step, baseline.steps * baseline.seconds_per_step)
    value = _value_by(trial, seconds, target)
    of_baseline = _value_by(baseline, seconds, target)
    if value is None or of_baseline is None:
        return None
    return AtEqualSeconds(seconds=seconds, value=value, baseline_value=of_baseline)


def _value_by(trial: TrialResult, seconds: float, target: Target) -> float | None:
    """Return the closest that a trial has come to the target within so many seconds of training."""
    if trial.seconds_per_step is None:
        return None
    # The product of a last step and its seconds may differ from the quotient's by a rounding.
    last_step = seconds / trial.seconds_per_step * (1.0 + 1e-9)
    values = [
        value
        for step, value in trial.history
        if value is not None and math.isfinite(value) and 0 < step <= last_step
    ]
    return min(values, key=target.gap, default=None)


def _improves(trial: TrialResult, target: Target) -> bool:
    """Return whether a trial came clearly closer to the target over the last half of its steps."""
    gaps = [(step, target.gap(value)) for step, value in trial.history if value is not None]
    if len(gaps) < 2:
        return True  # it was stopped before it could be seen
    last_step, last_gap = gaps[-1]
    before = min((gap for step, gap in gaps if 2 * step <= last_step), default=gaps[0][1])
    return last_gap < (1.0 - IMPROVEMENT) * before
