"""The objectives of a study: what winners are chosen by, and which values Optuna gets of a trial.

How the search goes about one is in ``search/acquisition.py`` and ``search/sampler.py``.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, get_args

from bstune.core.records import Merit, Mode, TrialResult

Objective = Literal["time", "steps", "both", "curve", "loss"]
OBJECTIVES: tuple[Objective, ...] = get_args(Objective)


@dataclass(frozen=True)
class Sought:
    """What a study of one objective looks for.

    Args:
        merits: by which winners are chosen; the first one's winner is the answer. The objective
            loss has none: its winner has the best metric at its budget's end.
        values: what Optuna minimizes or maximizes, by the names that its dashboard shows. Each is a
            function of a trial and of the metric's mode. It gives None where the value is not
            known, such as seconds on another device than the study's.
    """

    merits: tuple[Merit, ...]
    values: dict[str, Callable[[TrialResult, Mode], float | None]]


def _seconds(trial: TrialResult, mode: Mode) -> float | None:
    """Give a trial's seconds to the target; it takes ``mode`` as all of ``Sought.values`` do."""
    return trial.time_to_target


def _steps(trial: TrialResult, mode: Mode) -> float:
    """Give a trial's steps; it takes ``mode`` as all of ``Sought.values`` do."""
    return float(trial.steps)


def _examples(trial: TrialResult, mode: Mode) -> float:
    """Give the examples that a trial took; it takes ``mode`` as all of ``Sought.values`` do."""
    return float(trial.steps * trial.batch_size)


def _metric(trial: TrialResult, mode: Mode) -> float | None:
    """Give the best value of a trial's metric within its budget."""
    return trial.best_value(mode)


SOUGHT: dict[Objective, Sought] = {
    "time": Sought(("time",), {"seconds to target": _seconds}),
    "steps": Sought(("steps",), {"steps to target": _steps}),
    "both": Sought(("time", "steps"), {"steps to target": _steps, "seconds to target": _seconds}),
    "curve": Sought(("time",), {"examples to target": _examples}),
    "loss": Sought((), {"metric at the budget's end": _metric}),
}
