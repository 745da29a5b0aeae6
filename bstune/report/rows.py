"""The rows that charts draw, prepared once: the page and the picture of a study both read them.

shown = panel(trials, result, "steps")
shown.stars[0].value  # steps to expect at the winner to use
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from bstune.core.records import Merit, TrialResult
from bstune.core.scaling import RULES
from bstune.result import (
    INTERVAL_QUANTILE,
    WINNERS,
    CriticalBatchSize,
    CurvePoint,
    StudyResult,
    WinnerResult,
)

# The names of the baseline, and of the winner by the study's objective, in charts.
YOURS = "yours"
USE = "use"
# The natural logarithm of a learning rate, at most: exp of 710 is beyond floats.
LARGEST_LOG_RATE = 600.0
# The name of the line that has the trials' own exponent.
LAW = "law"


@dataclass(frozen=True)
class Mark:
    """A trial as a panel of steps or of seconds shows it."""

    number: int
    """The trial's number."""
    batch_size: int
    """Examples of a step."""
    lr: float
    """The learning rate."""
    reached: bool
    """Whether it met the target. Else it was stopped before."""
    value: float | None
    """Steps, or seconds of training, to the target. None where it missed it or was not timed."""
    low: float | None
    """Steps, or seconds of training, that did not suffice. None where it was not timed."""

    @property
    def height(self) -> float | None:
        """The steps or seconds at which it stands: those to the target, or that did not suffice.

        None where they are not known.
        """
        # A height of 0 has no place on a logarithmic axis.
        if self.reached:
            return self.value or None
        return self.low or None


@dataclass(frozen=True)
class Band:
    """S*(B), or S*(B) tau(B), with its interval, over batch size."""

    batch_size: tuple[float, ...]
    """Examples of a step, rising."""
    low: tuple[float, ...]
    """Lower end of the interval, in steps or in seconds."""
    middle: tuple[float, ...]
    """Median, in steps or in seconds."""
    high: tuple[float, ...]
    """Upper end of the interval, in steps or in seconds."""


@dataclass(frozen=True)
class Star:
    """A winner in a panel, at the steps or seconds that are expected of it."""

    winner: WinnerResult
    """The winner."""
    heading: str
    """``use``, or what it is best by, such as ``least time``."""
    is_use: bool
    """Whether it is the winner to use, by the study's objective."""
    value: float
    """Steps or seconds at which it stands."""
    low: float | None
    """Lower end of the interval over fresh seeds. None where none ran."""
    high: float | None
    """Upper end of that interval. None where none ran, or too many missed the target."""


@dataclass(frozen=True)
class Panel:
    """The rows of a chart of steps, or of seconds, over batch size."""

    merit: Merit
    """``time`` for a chart of seconds, or ``steps``."""
    trials: tuple[Mark, ...]
    """The trials that reached the target or were stopped before it."""
    frontier: tuple[Mark, ...]
    """Of these trials the ones with the fewest examples near their batch size."""
    band: Band | None
    """The curve with its interval. None where it is not known."""
    stars: tuple[Star, ...]
    """The winner to use, and the winner by this panel's merit if it is another."""
    baseline: Mark | None
    """The user's own configuration; None where it neither reached the target nor was stopped."""

    @property
    def reached(self) -> tuple[Mark, ...]:
        """The trials that reached the target and have a value to be drawn at."""
        return tuple(mark for mark in self.trials if mark.reached and mark.value)

    @property
    def stopped(self) -> tuple[Mark, ...]:
        """The stopped trials with a lower bound: steps, or seconds, at which they still missed."""
        return tuple(mark for mark in self.trials if not mark.reached and mark.low)


@dataclass(frozen=True)
class PowerLaw:
    """A straight line of learning rates over batch size, both logarithmic."""

    name: str
    """A scaling rule's name, or ``law``."""
    words: str
    """Its name in texts."""
    exponent: float
    """Its slope: the power of the batch size."""
    batch_size: float
    """The batch size of the point that it goes through, in examples."""
    lr: float
    """The learning rate of that point."""
    start: float
    """Smallest batch size at which it is drawn."""
    end: float
    """Largest batch size at which it is drawn."""

    def lr_at(self, batch_size: float) -> float:
        """Give the line's learning rate at a batch size."""
        log_growth = self.exponent * math.log(batch_size / self.batch_size)
        # A folder may come from anybody: a rate that no float can hold becomes the nearest one.
        return math.exp(
            max(-LARGEST_LOG_RATE, min(LARGEST_LOG_RATE, math.log(self.lr) + log_growth))
        )


def curve_point(trial: TrialResult) -> CurvePoint:
    """Give a trial as a point of a result.

    Of a trial that was stopped it has only the steps and seconds that did not suffice.
    """
    seconds_per_step = trial.seconds_per_step
    time_low = None
    if seconds_per_step is not None:
        time_low = trial.steps_low * seconds_per_step
    steps: int | None = None
    examples: int | None = None
    if trial.reached:
        steps = trial.steps
        examples = trial.examples
    return CurvePoint(
        number=trial.number,
        batch_size=trial.batch_size,
        lr=trial.lr,
        delta=trial.delta,
        hyperparameters=dict(trial.hyperparameters),
        steps_low=trial.steps_low,
        steps=steps,
        seconds_per_step=seconds_per_step,
        time_to_target=trial.time_to_target,
        time_low=time_low,
        examples=examples,
        stopped=not trial.reached,
    )


def panel(trials: Sequence[TrialResult], result: StudyResult, merit: Merit) -> Panel:
    """Prepare the rows of the chart of seconds (merit ``time``) or of steps over batch size."""
    points = shown_trials(trials)
    return Panel(
        merit=merit,
        trials=_marks_of(points, merit),
        frontier=_marks_of(result.points, merit),
        band=band(result, merit),
        stars=tuple(_stars(result, merit)),
        baseline=_baseline_mark(points, result, merit),
    )


def shown_trials(trials: Sequence[TrialResult]) -> list[CurvePoint]:
    """Give the trials that reached the target or were stopped before it, as points.

    A trial in several parts is one point.
    """
    points = list[CurvePoint]()
    for trial in last_part_of_each(trials):
        if trial.reached or trial.status == "stopped":
            points.append(curve_point(trial))
    return points


def last_part_of_each(trials: Sequence[TrialResult]) -> list[TrialResult]:
    """Give the last part of each trial: the others are parts that another one continues.

    The last part's outcome and history are those of the whole trial.
    """
    # A part that failed continues nothing: the one before it is still the last.
    continued = {trial.resumed_from for trial in trials if trial.status != "failed"}
    return [trial for trial in trials if trial.number not in continued]


def mark_of(point: CurvePoint, merit: Merit) -> Mark:
    """Give the mark of a point in a panel of seconds (merit ``time``) or of steps."""
    value: float | None = point.steps
    low: float | None = point.steps_low
    if merit == "time":
        value = point.time_to_target
        low = point.time_low
    return Mark(
        number=point.number,
        batch_size=point.batch_size,
        lr=point.lr,
        reached=not point.stopped,
        value=value,
        low=low,
    )


def _marks_of(points: Sequence[CurvePoint], merit: Merit) -> tuple[Mark, ...]:
    """Give the marks of points in a panel of seconds (merit ``time``) or of steps."""
    return tuple(mark_of(point, merit) for point in points)


def band(result: StudyResult, merit: Merit) -> Band | None:
    """Give the fewest steps S*(B), or for merit ``time`` their seconds, with an interval.

    The seconds are S*(B) tau(B), with tau(B) those of a step. The errors of log S*(B) and of log
    tau(B) are independent: their squares add up. None where the curve, or the seconds of a step,
    are not known.
    """
    curve = result.curve
    if curve is None or len(curve.batch_size) < 2:
        return None
    if merit == "steps":
        return Band(batch_size=curve.batch_size, low=curve.low, middle=curve.steps, high=curve.high)
    tau = curve.seconds_per_step
    if tau is None:
        return None
    # Where the error of tau is not known, the interval is that of the steps alone.
    errors = curve.seconds_error or (0.0,) * len(tau)
    low = list[float]()
    middle = list[float]()
    high = list[float]()
    for i, seconds in enumerate(tau):
        steps = curve.steps[i]
        half_of_tau = INTERVAL_QUANTILE * errors[i]
        below = math.hypot(math.log(steps / curve.low[i]), half_of_tau)
        above = math.hypot(math.log(curve.high[i] / steps), half_of_tau)
        middle.append(steps * seconds)
        low.append(steps * seconds * math.exp(-below))
        high.append(steps * seconds * math.exp(above))
    return Band(batch_size=curve.batch_size, low=tuple(low), middle=tuple(middle), high=tuple(high))


def _stars(result: StudyResult, merit: Merit) -> list[Star]:
    """Give the winner to use, and the winner by the panel's merit if it is another."""
    stars = list[Star | None]()
    use = result.winner
    if use is not None:
        stars.append(_star(use, USE, merit, is_use=True))
    best = result.winner_by(merit)
    if best is not None and (use is None or best.number != use.number):
        for criterion in WINNERS.values():
            if criterion.merit == merit:
                stars.append(_star(best, criterion.heading, merit, is_use=False))
    return [star for star in stars if star is not None]


def _star(winner: WinnerResult, heading: str, merit: Merit, *, is_use: bool) -> Star | None:
    """Give the star of a winner. None where no steps or seconds are known to place it at."""
    low: float | None = None
    high: float | None = None
    if winner.confirmed is not None:
        low, high = winner.confirmed.interval_by(merit)
    # Where half of the fresh seeds missed the target, the star stands at the best of them, or at
    # the trial itself.
    value = winner.expected(merit) or low or winner.of_single_run(merit)
    if not value:
        return None
    return Star(winner=winner, heading=heading, is_use=is_use, value=value, low=low, high=high)


def _baseline_mark(points: Sequence[CurvePoint], result: StudyResult, merit: Merit) -> Mark | None:
    """Give the mark of the baseline: trial 0 of a study, or the last part that continues it.

    None where it neither reached the target nor was stopped, or has no place in the panel.
    """
    if result.baseline is None:
        return None
    for point in points:
        if point.number == result.baseline.number:
            mark = mark_of(point, merit)
            return mark if mark.height else None
    return None


def shown_critical(result: StudyResult) -> CriticalBatchSize | None:
    """Give the critical batch size if there is something to show: its value or an end.

    None, too, where one batch size alone reached the target.
    """
    critical = result.critical_batch_size
    if critical is None or critical.is_of_one_size:
        return None
    if critical.value is None and critical.low is None and critical.high is None:
        return None
    return critical


def perfect_scaling_examples(result: StudyResult) -> float | None:
    """Give the examples to the target, B x S, along the line of perfect scaling.

    On that line twice the batch halves the steps. None where fewer than two points of the frontier
    reached the target.
    """
    reached = [point.examples for point in result.points if point.examples]
    if len(reached) < 2:
        return None
    # E_min of all trials is surer than the fewest examples of a single one.
    critical = result.critical_batch_size
    if critical is not None and critical.e_min is not None:
        return critical.e_min
    return min(reached)


def rate_lines(result: StudyResult, start: float, end: float) -> list[PowerLaw]:
    """Give the scaling rules, and the law that the trials show, as lines of learning rates.

    All go through one point: the best learning rate at the middle batch size of the curve or, where
    there is none, the study's reference, its pair of batch size and rate to begin with. Rules go
    from batch size ``start`` to ``end``.
    """
    batch_size: float = result.reference.batch_size
    lr = result.reference.lr
    if result.curve is not None:
        middle = len(result.curve.batch_size) // 2
        batch_size = result.curve.batch_size[middle]
        lr = result.curve.lr[middle]
    lines = list[PowerLaw]()
    for name, rule in RULES.items():
        if rule.exponent is not None:
            lines.append(
                PowerLaw(
                    name=name,
                    words=rule.words,
                    exponent=rule.exponent,
                    batch_size=batch_size,
                    lr=lr,
                    start=start,
                    end=end,
                )
            )
    law = result.lr_exponent
    if law is not None and law.identified:
        # The law is drawn where the trials are: beyond them it is a guess.
        low = law.start
        high = law.end
        if result.curve is not None:
            low = max(low, result.curve.batch_size[0])
            high = min(high, result.curve.batch_size[-1])
        words = f"the trials' own law, B^{law.exponent:z.2f}"
        lines.append(
            PowerLaw(
                name=LAW,
                words=words,
                exponent=law.exponent,
                batch_size=batch_size,
                lr=lr,
                start=low,
                end=high,
            )
        )
    return lines
