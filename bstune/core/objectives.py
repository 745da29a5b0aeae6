"""The objectives of a study: by what its winners are chosen, and which values Optuna gets of a trial.

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
        merits: by which winners are chosen; the first one's is the answer's. None of the objective
            loss, whose winner has the best metric at its budget's end.
        values: what Optuna optimizes, by the names that its dashboard shows, of a trial whose
            metric is to fall (``min``) or to rise; a value of None is not known, such as seconds on
            another device than the study's.
    """

    merits: tuple[Merit, ...]
    values: dict[str, Callable[[TrialResult, Mode], float | None]]


def _seconds(trial: TrialResult, mode: Mode) -> float | None:
    return trial.time_to_target


def _steps(trial: TrialResult, mode: Mode) -> float:
    return float(trial.steps)


def _examples(trial: TrialResult, mode: Mode) -> float:
    return float(trial.steps * trial.batch_size)


def _metric(trial: TrialResult, mode: Mode) -> float | None:
    """Give the best value of the metric within the budget, as the answer has it."""
    return trial.best_value(mode)


SOUGHT: dict[Objective, Sought] = {
    "time": Sought(("time",), {"seconds to target": _seconds}),
    "steps": Sought(("steps",), {"steps to target": _steps}),
    "both": Sought(("time", "steps"), {"steps to target": _steps, "seconds to target": _seconds}),
    "curve": Sought(("time",), {"examples to target": _examples}),
    "loss": Sought((), {"metric at the budget's end": _metric}),
}
