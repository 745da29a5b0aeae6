"""A study in which no trial reached the target: why, how far it came, what it would take.

The best point so far is the one whose metric came closest to the target. It is compared with the
baseline at equal seconds of training: the closest that each has come to the target by then, one run
of each.
"""

import math
from collections.abc import Callable, Sequence

import numpy as np

from bstune.core.metric_names import fraction_meant, mode_of
from bstune.core.records import Budget, Target, TrialResult
from bstune.result import (
    MAX_TEXT,
    AtEqualSeconds,
    ClosestTrial,
    Failures,
    SoFar,
    Unreached,
    finite,
)
from bstune.search.acquisition import MIN_STEPS
from bstune.search.candidates import predicted_steps
from bstune.search.posterior import Posterior

# A trial still improves that gained this share of its distance to the target over the last half of
# its steps; or this share of all that it ever gained, if it rises or falls as a whole. A far target
# would have each trial look as if it had come to rest.
IMPROVEMENT = 0.05
# The last evaluations of which the better one counts: one step back is no rest.
LAST_EVALUATIONS = 2
# At most so many values of a trial are tested for a trend, which takes their number's square.
TREND_VALUES = 200
# The normal quantile of Mann's test for a trend, one-sided at 5%.
TREND_QUANTILE = 1.645
# Evaluations of a trial of which anything is predicted: fewer show no rate.
LEAST_EVALUATIONS = 3
# A prediction is told up to so many times the steps that its trial ran: farther off it may be wrong
# by several times.
FARTHEST_PREDICTION = 2.0
# The easier target that is proposed lies on this side of the closest value, so that its trial would
# have met it: by this share of the trial's distance to the target, or of what it gained if less.
CLEARLY_EASIER = 0.05
# The digits of the easier target: as few as let it stand where it should.
EASIER_DIGITS = range(2, 8)
# A product of floats may lie this much, as a share, above a quotient of the same ones.
STEP_ROUNDING = 1e-9


def unreached_because(
    trials: Sequence[TrialResult],
    last_parts: Sequence[TrialResult],
    target: Target,
    budget: Budget,
    ran_for_target: bool = True,
) -> Unreached | None:
    """Collect what tells why no trial reached the target; None if one did, or none has run.

    It counts the stopped trials; how many of them still improved over the last half of their steps,
    and how many were evaluated too seldom to tell; how many of each had spent their budget; and the
    trials that ended before their schedule. ``easier`` is a target that the closest trial would
    have met.

    Args:
        trials: all parts of all trials.
        last_parts: the trials, with only the last part of one that was continued.
        target: the one that was not reached.
        budget: of one trial.
        ran_for_target: whether the trials were run for this target. Where they were run for another
            one it is not known why they were stopped, and only the closest trial is told.
    """
    if not trials or any(trial.reached for trial in trials):
        return None
    best = _closest(trials, target)
    closest = None
    easier = None
    as_fraction = None
    if best is not None:
        trial, step, value = best
        first_value = next(first for _, first in trial.history if first is not None)
        easier = _easier(target, first_value, value)
        # A metric whose name tells no share, such as a return, may well be meant as it stands.
        if mode_of(target.metric) == "max":
            as_fraction = fraction_meant(target, first_value, value)
        closest = ClosestTrial(
            value=value,
            steps=step,
            number=trial.number,
            batch_size=trial.batch_size,
            lr=trial.lr,
        )
    if not ran_for_target:
        return Unreached(closest=closest, as_fraction=as_fraction)
    stopped = [trial for trial in last_parts if trial.status == "stopped"]
    improving = list[TrialResult]()
    # Those with too few evaluations to tell whether they still improved.
    untold = list[TrialResult]()
    for trial in stopped:
        still_improves = _improves(trial, target)
        if still_improves is None:
            untold.append(trial)
        elif still_improves:
            improving.append(trial)
    cut_schedules = [trial for trial in stopped if _is_cut_before_horizon(trial)]
    # The longest of these trials is advised as budget, unless it is too short for a trial.
    cut_examples = 0
    for trial in cut_schedules:
        if trial.steps >= MIN_STEPS:
            cut_examples = max(cut_examples, trial.steps * trial.batch_size)
    diverged = [trial.lr for trial in trials if trial.status == "diverged"]
    return Unreached(
        closest=closest,
        easier=finite(easier),
        as_fraction=as_fraction,
        stopped=len(stopped),
        improving=len(improving),
        improving_at_budget=_number_at_budget(improving, budget),
        untold=len(untold),
        untold_at_budget=_number_at_budget(untold, budget),
        cut_schedules=len(cut_schedules),
        cut_examples=cut_examples,
        budget_steps=budget.steps,
        budget_examples=budget.examples,
        smallest_diverged_lr=min(diverged, default=None),
    )


def _easier(target: Target, first: float, closest: float) -> float | None:
    """Choose a target that a trial has met: between its first value and the closest.

    It has few digits. None for a trial that came no closer than it began.

    Args:
        target: the one that was not reached.
        first: the metric's first value in the closest trial.
        closest: its value that came closest to the target.
    """
    gained = target.gap(first) - target.gap(closest)
    if not gained > 0.0:
        return None
    back = CLEARLY_EASIER * min(target.gap(closest), gained)
    # The sign is 1 if the metric is to fall: an easier target is then a larger one.
    easier = closest + target.sign * back
    for digits in EASIER_DIGITS:
        rounded = float(f"{easier:.{digits - 1}e}")
        if target.gap(closest) <= target.gap(rounded) < target.gap(first):
            return rounded
    return easier


def _is_cut_before_horizon(trial: TrialResult) -> bool:
    """Whether a trial ended before its schedule did, and no call-back ended it."""
    # One that a call-back ended has a message.
    if trial.horizon is None or trial.end_message is not None:
        return False
    return trial.steps < trial.horizon


def _number_at_budget(trials: Sequence[TrialResult], budget: Budget) -> int:
    """Count the trials that had spent their budget."""
    return sum(trial.steps >= budget.last_step(trial.batch_size) for trial in trials)


def failures_of(last_parts: Sequence[TrialResult]) -> Failures | None:
    """Count the trials that failed by themselves, and tell how the last one did.

    It is None where none did. What was cut short with its process says nothing of the user's code.
    """
    messages = list[str]()
    for trial in last_parts:
        if trial.status == "failed" and not trial.was_cut_short:
            messages.append(trial.message or "an unknown error")
    if not messages:
        return None
    return Failures(trials=len(messages), message=messages[-1][:MAX_TEXT])


def best_so_far(
    trials: Sequence[TrialResult],
    target: Target,
    baseline: TrialResult | None,
    posterior: Posterior,
    last_step: Callable[[float], int],
) -> SoFar | None:
    """Describe the trial that came closest to a target that no trial has reached.

    It is None where a trial reached it, or none has a metric. ``steps`` and ``seconds`` are those
    at which the trial came to ``value``. What it is predicted to take to the target is None where
    its history does not tell, and where that is far beyond what it ran.

    Args:
        trials: all that ended.
        target: the one that was not reached.
        baseline: its first run, with which the trial is compared; None without it.
        posterior: of all trials.
        last_step: gives the step at which a trial's budget is spent, by batch size.
    """
    if any(trial.reached for trial in trials):
        return None
    best = _closest(trials, target)
    if best is None:
        return None
    trial, step, value = best
    predicted = None
    evaluations = sum(metric is not None for _, metric in trial.history)
    if evaluations >= LEAST_EVALUATIONS:
        predicted = predicted_steps(posterior, trial.number)
    more_than: int | None = None
    beyond_budget = False
    if predicted is not None:
        budget_steps = last_step(trial.batch_size)
        farthest = math.floor(FARTHEST_PREDICTION * trial.steps)
        beyond_budget = predicted > budget_steps
        # A prediction far beyond what the trial ran is not trusted, and no trial runs beyond its
        # budget: of such steps only that they are more than this bound is told.
        if beyond_budget or predicted > farthest:
            more_than = budget_steps if beyond_budget else farthest
            predicted = None
    compared: AtEqualSeconds | None = None
    if baseline is not None:
        compared = _compared(trial, baseline, target)
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
        compared=compared,
        more_than=more_than,
        beyond_budget=beyond_budget,
    )


def _seconds(steps: float | None, trial: TrialResult) -> float | None:
    """Turn steps of a trial into seconds of training; None where either is not known."""
    if steps is None or trial.seconds_per_step is None:
        return None
    return steps * trial.seconds_per_step


def _closest(
    trials: Sequence[TrialResult], target: Target
) -> tuple[TrialResult, int, float] | None:
    """Find the trial that came closest to the target, the step at which it did, and its metric.

    It is None where no trial has a metric.
    """
    seen = list[tuple[TrialResult, int, float]]()
    for trial in trials:
        for step, value in trial.history:
            if value is not None:
                seen.append((trial, step, value))
    return min(seen, key=lambda entry: target.gap(entry[2]), default=None)


def _compared(trial: TrialResult, baseline: TrialResult, target: Target) -> AtEqualSeconds | None:
    """Compare the metric of a trial and of the baseline at equal seconds of training.

    The seconds are those at which the shorter one of the two ended. None where the two are the
    same point, where one of them has no metric or no seconds, or where the baseline diverged or ran
    out of memory.
    """
    if (trial.batch_size, trial.lr) == (baseline.batch_size, baseline.lr):
        return None
    if baseline.status in ("diverged", "out of memory"):
        return None
    if trial.seconds_per_step is None or baseline.seconds_per_step is None:
        return None
    seconds_of_trial = trial.steps * trial.seconds_per_step
    seconds_of_baseline = baseline.steps * baseline.seconds_per_step
    seconds = min(seconds_of_trial, seconds_of_baseline)
    value = _value_by(trial, seconds, target)
    of_baseline = _value_by(baseline, seconds, target)
    if value is None or of_baseline is None:
        return None
    return AtEqualSeconds(seconds=seconds, value=value, baseline_value=of_baseline)


def _value_by(trial: TrialResult, seconds: float, target: Target) -> float | None:
    """Give the value closest to the target that a trial had within so many seconds of training.

    It is None where it has no seconds, or no value by then.
    """
    if trial.seconds_per_step is None:
        return None
    # The margin keeps the trial's own last step, where division and multiplication round apart.
    last_step = seconds / trial.seconds_per_step * (1.0 + STEP_ROUNDING)
    values = list[float]()
    for step, value in trial.history:
        if value is None or not math.isfinite(value):
            continue
        if 0 < step <= last_step:
            values.append(value)
    return min(values, key=target.gap, default=None)


def _improves(trial: TrialResult, target: Target) -> bool | None:
    """Whether a trial came clearly closer to the target over the last half of its steps.

    Clearly is by a share of its distance to the target; or of what it has gained in all, where its
    values as a whole come closer. It is None for fewer than two evaluations, which show no change.
    """
    # A gap is how far the metric still is from the target.
    gaps = [(step, target.gap(value)) for step, value in trial.history if value is not None]
    if len(gaps) < 2:
        return None
    _, first_gap = gaps[0]
    last_step, _ = gaps[-1]
    gaps_of_first_half = [gap for step, gap in gaps if 2 * step <= last_step]
    least_gap = min(gaps_of_first_half, default=first_gap)
    values = [gap for _, gap in gaps]
    last_gap = min(values[-LAST_EVALUATIONS:])
    if last_gap < (1.0 - IMPROVEMENT) * least_gap:
        return True
    gained = first_gap - min(values)
    return _falls(values) and last_gap < least_gap - IMPROVEMENT * gained


def _falls(values: Sequence[float]) -> bool:
    """Whether values fall over time by the test of Mann (1945), which fewer than 4 never pass."""
    # Of many values, as where a loop reports each step, evenly spaced ones tell as much.
    gap = math.ceil(len(values) / TREND_VALUES)
    spaced = np.array(values[::gap], dtype=np.float64)
    count = len(spaced)
    # Each pair is there twice, with both signs: the later value less the earlier one counts.
    differences = np.triu(np.sign(spaced[None, :] - spaced[:, None]), k=1)
    score = -float(differences.sum())
    variance = count * (count - 1) * (2 * count + 5) / 18.0
    return score > TREND_QUANTILE * math.sqrt(variance)
