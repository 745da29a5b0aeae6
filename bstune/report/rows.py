"""The names and rows of ``curve.json``, a study's results in one mapping, which ``study/`` writes and this shows."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from bstune.core.records import Merit, TrialResult

Summary = dict[str, Any]
Row = Mapping[str, Any]


class Criterion(NamedTuple):
    """What a winner is best by, a heading, and the field of its row with the value that is expected."""

    merit: Merit
    heading: str
    field: str


WINNERS = {
    "best_by_time": Criterion("time", "least time", "time_to_target"),
    "best_by_steps": Criterion("steps", "fewest steps", "steps"),
}
REGIMES = ("perfect scaling", "diminishing returns", "maximal data parallelism")


def winner_to_use(summary: Row) -> tuple[str | None, Row | None]:
    """Return the winner by the study's objective and its key."""
    name = summary.get("use")
    return name, summary.get(name) if name else None


def trial_row(trial: TrialResult) -> dict[str, Any]:
    """Return a trial as a row of ``curve.json``'s points: both ends of its interval, null where there is none."""
    kept = (
        "batch_size",
        "lr",
        "delta",
        "hyperparameters",
        "number",
        "steps_low",
        "seconds_per_step",
        "time_to_target",
    )
    tau, reached = trial.seconds_per_step, trial.reached
    return {
        **{name: getattr(trial, name) for name in kept},
        "censored": not reached,
        "steps": trial.steps if reached else None,
        "time_low": None if tau is None else trial.steps_low * tau,
        "examples_low": trial.steps_low * trial.batch_size,
        "examples": trial.examples if reached else None,
    }
