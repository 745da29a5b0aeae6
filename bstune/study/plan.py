"""What decides what a study does, and the steps that it may take."""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass

from bstune.core.question import Question
from bstune.core.records import Frozen, Role, Spec, StepTime
from bstune.core.space import Configuration, Space
from bstune.core.step_time import Surveyed
from bstune.search.fit import NOTHING, SurveyedSizes
from bstune.study.deadline import Deadline


class Ask(Frozen):
    """A trial to run: a spec without a number, which the storage gives."""

    place: str
    role: Role
    batch_size: int
    lr: float
    values: dict[str, int | float] = {}
    seed: int
    max_steps: int
    schedule_steps: int | None = None
    first_evaluation: int | None = None
    resumed_from: int | None = None
    repeats: int | None = None
    until: float | None = None
    """The time at which it stops, by the clock that ``now`` was read from; None: no limit."""


@dataclass(frozen=True)
class Wait:
    """Other processes run what this one waits for."""


@dataclass(frozen=True)
class Done:
    """Nothing is left to run."""


@dataclass(frozen=True)
class Plan:
    """All that decides what a study does, but for its records.

    Args:
        trials: configurations of the search, the baseline not counted.
        seeds: new seeds of the best and the baseline.
        seed: of the study, from which all others follow.
        sampler: what proposes the configurations of the search: ``frontier`` (the law), ``grid``,
            or one of Optuna's.
        step_time: tau(B) where it is known beforehand; None: it is fitted to the trials.
        resumable: whether a pruned trial can be resumed here.
        fits: what a survey has found of batch sizes.
        timings: of a survey: batch size, seconds of a step, their relative standard deviation.
    """

    question: Question
    space: Space
    baseline: Configuration | None
    trials: int
    seeds: int
    seed: int
    sampler: str = "frontier"
    deadline: Deadline | None = None
    step_time: StepTime | None = None
    resumable: Callable[[int], bool] = lambda number: True
    fits: SurveyedSizes = NOTHING
    timings: tuple[Surveyed, ...] = ()

    @property
    def end(self) -> float | None:
        """When the last trial has to stop; None without a time limit."""
        return self.deadline.end if self.deadline else None

    def is_baseline(self, trial: Spec) -> bool:
        """Whether a trial ran the baseline's configuration; none did without a baseline."""
        baseline = self.baseline
        if baseline is None:
            return False
        return (trial.batch_size, trial.lr, trial.values) == (
            baseline.batch_size,
            baseline.lr,
            baseline.values,
        )


def trial_seed(study_seed: int, place: str) -> int:
    """The seed of a place in the plan, 31 bits."""
    digest = hashlib.sha256(f"{study_seed}/{place}".encode()).digest()
    return int.from_bytes(digest[:4], "big") >> 1
