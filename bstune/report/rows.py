"""The rows that charts draw, prepared once: trials and winners by what they take to the target."""

from collections.abc import Sequence
from dataclasses import dataclass

from bstune.core.records import Merit, TrialResult
from bstune.result import CurvePoint


@dataclass(frozen=True)
class Mark:
    """A trial as a panel of steps or of seconds shows it."""

    number: int
    """The trial's number."""
    batch_size: int
    """Examples of a step."""
    reached: bool
    """Whether it met the target; else it was stopped before."""
    value: float | None
    """Steps, or seconds of training, to the target; None where it missed it or was not timed."""
    low: float | None
    """Those that did not suffice."""


def curve_point(trial: TrialResult) -> CurvePoint:
    """Give a trial as a point of a result: both ends of its interval, None where there is none."""
    seconds_per_step = trial.seconds_per_step
    time_low = None
    if seconds_per_step is not None:
        time_low = trial.steps_low * seconds_per_step
    return CurvePoint(
        number=trial.number,
        batch_size=trial.batch_size,
        lr=trial.lr,
        delta=trial.delta,
        hyperparameters=dict(trial.hyperparameters),
        steps_low=trial.steps_low,
        steps=trial.steps if trial.reached else None,
        seconds_per_step=seconds_per_step,
        time_to_target=trial.time_to_target,
        time_low=time_low,
        examples_low=trial.steps_low * trial.batch_size,
        examples=trial.examples if trial.reached else None,
        stopped=not trial.reached,
    )


def marks(points: Sequence[CurvePoint], merit: Merit) -> list[Mark]:
    """Points as a panel of seconds (merit ``time``) or of steps shows them."""
    shown = list[Mark]()
    for point in points:
        value: float | None = point.steps
        low: float | None = point.steps_low
        if merit == "time":
            value, low = point.time_to_target, point.time_low
        shown.append(Mark(point.number, point.batch_size, not point.stopped, value, low))
    return shown


def shown_trials(trials: Sequence[TrialResult]) -> list[CurvePoint]:
    """Give the trials that reached the target or were stopped before it, as points."""
    return [curve_point(trial) for trial in trials if trial.reached or trial.status == "stopped"]
