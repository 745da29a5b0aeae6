"""What a trial is asked for and what came of it: frozen values, one JSON line each.

The JSON is strict: a value that does not exist is ``null``, never NaN or Infinity.
"""

import math
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field
from pydantic.dataclasses import dataclass

from bstune.core.errors import InputError
from bstune.system.secrets import hide_in_text

Mode = Literal["min", "max"]
Role = Literal["baseline", "search", "new seed"]
Status = Literal[
    "reached",  # the target, at an evaluation
    "finished",  # its whole budget, of which the best metric counts
    "missed",  # its whole budget, without the target
    "pruned",  # stopped before its budget ended: its steps are a bound
    "diverged",  # the metric is no finite number
    "out of memory",
    "refused",  # a batch size that the user's code does not take
    "failed",  # the user's code raised, or its process died
]

# NumPy has no larger whole numbers.
Count = Annotated[int, Field(ge=1, lt=2**63)]
Natural = Annotated[int, Field(ge=0, lt=2**63)]

_TARGET = re.compile(r"\s*(?P<metric>[^<>=\s]+)\s*(?P<sign><=|>=)\s*(?P<goal>\S+)\s*")
_WITHOUT_GOAL = re.compile(r"\s*(?P<mode>min|max)\s+(?P<metric>[^<>=\s]+)\s*")


@dataclass(frozen=True, config=ConfigDict(extra="forbid", allow_inf_nan=False))
class Target:
    """A validation metric, its goal and its direction, such as ``val/error <= 0.10``.

    Args:
        metric: the name under which the module logs it.
        goal: a finite number; None where the best value counts, as in ``min val/loss``.
        mode: ``min`` where the metric has to fall to the goal, ``max`` where it has to rise.
    """

    metric: Annotated[str, Field(min_length=1)]
    goal: float | None
    mode: Mode

    @staticmethod
    def parse(text: str) -> "Target":
        """Read ``val/loss <= 0.1``, ``val/accuracy >= 0.9`` or, without a goal, ``min val/loss``.

        InputError for another text.
        """
        without_goal = _WITHOUT_GOAL.fullmatch(text)
        if without_goal is not None:
            mode: Mode = "min" if without_goal["mode"] == "min" else "max"
            return Target(without_goal["metric"], None, mode)
        match = _TARGET.fullmatch(text)
        try:
            if match is None:
                raise ValueError
            goal = float(match["goal"])
            if not math.isfinite(goal):
                raise ValueError
        except ValueError as error:
            raise InputError(
                f"target must be a metric, <= or >=, and a number, such as 'val/loss <= 0.1', or "
                f"without a goal 'min val/loss', but got {text!r}"
            ) from error
        return Target(match["metric"], goal, "min" if match["sign"] == "<=" else "max")

    def gap(self, value: float) -> float:
        """How far ``value`` is from the goal: zero or negative once it is reached, NaN for NaN.

        Without a goal only the order of gaps tells something: smaller is better.
        """
        goal = self.goal or 0.0
        return value - goal if self.mode == "min" else goal - value

    def best(self, values: Iterable[float]) -> float:
        """The best of finite values; ValueError without one."""
        return min(values, key=self.gap)

    def reached(self, value: float) -> bool:
        """Whether ``value`` meets the goal; NaN never does, and nothing does without a goal."""
        return self.goal is not None and self.gap(value) <= 0.0

    def __str__(self) -> str:
        if self.goal is None:
            return f"{self.mode} {self.metric}"
        return f"{self.metric} {'<=' if self.mode == 'min' else '>='} {self.goal:g}"


class Frozen(BaseModel):
    """A frozen value that refuses unknown fields, and numbers that are not finite."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class Budget(Frozen):
    """How long a trial may train: until both its steps and its examples are spent.

    ``seconds`` stand in their place, where they are given; the question turns them into steps.
    """

    steps: Count
    examples: Count = 1
    seconds: Annotated[float, Field(gt=0)] | None = None

    @property
    def is_whole_run(self) -> bool:
        """Whether it is one run of a length of its own, which counts as one step."""
        return self.seconds is None and self.steps == self.examples == 1

    def __str__(self) -> str:
        if self.seconds is not None:
            return f"{self.seconds:g} s"
        if self.is_whole_run:
            return "a whole run"
        # One step, or one example, is what a budget of the other has.
        parts = [f"{self.steps:,} steps"] if self.steps > 1 or self.examples == 1 else []
        parts += [f"{self.examples:,} examples"] if self.examples > 1 else []
        return " and ".join(parts)

    def last_step(self, batch_size: float) -> int:
        """The step after which steps and examples are both spent."""
        return max(self.steps, math.ceil(self.examples / batch_size))


class Spec(Frozen):
    """One configuration on one seed, up to a step."""

    number: Natural
    """Optuna's number of the trial."""
    place: str
    """Its place in the plan: ``search/0``, ``seed/3/1``. A place that was lost is asked again."""
    role: Role
    batch_size: Count
    """Examples per applied optimizer step."""
    lr: Annotated[float, Field(gt=0)]
    values: dict[str, int | float] = {}
    """Further hyper-parameters of the configuration, by name."""
    seed: Natural
    """Of the initial weights, the order of the data and the augmentation."""
    max_steps: Count
    """The step at which it stops, steps of the trial that it resumes included."""
    schedule_steps: Count | None = None
    """The step at which its schedule ends; None: the schedule does not end with the trial."""
    first_evaluation: Count | None = None
    """The step by which it is first evaluated; None: when that costs little."""
    resumed_from: int | None = None
    """The pruned trial that it resumes: same configuration, same seed."""
    repeats: int | None = None
    """The trial whose configuration it runs on a new seed."""


def _without_nan(value: Any) -> Any:
    """JSON has no NaN: a metric that is no finite number is None."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _rising(history: tuple[tuple[int, float | None], ...]) -> tuple[tuple[int, float | None], ...]:
    """Check that steps rise; pydantic makes its own error of a ValueError."""
    steps = [step for step, _ in history]
    if steps != sorted(set(steps)):
        raise ValueError(f"the steps of a history must rise, but got {steps[:20]}")
    return history


Evaluation = tuple[Natural, Annotated[float | None, BeforeValidator(_without_nan)]]
History = Annotated[tuple[Evaluation, ...], AfterValidator(_rising)]


class Record(Spec):
    """How a trial ended; steps, seconds and history are of the whole chain that it resumes."""

    status: Status
    steps: Natural
    """At the first evaluation that met the target, or in all."""
    steps_low: Natural = 0
    """At the last evaluation that missed it: the steps to target lie in (steps_low, steps]."""
    seconds_per_step: Annotated[float, Field(gt=0)] | None = None
    """Median over the segments between evaluations, after warm-up."""
    train_seconds: Annotated[float, Field(ge=0)] = 0.0
    """Training alone, of this trial without the one that it resumes."""
    other_seconds: Annotated[float, Field(ge=0)] = 0.0
    """Evaluation, start-up and saving of this trial."""
    history: History = ()
    """(step, metric) of each evaluation; None stands for a metric that is no finite number."""
    noise_scale: tuple[tuple[int, float, float], ...] = ()
    """(step, |G|^2, tr Sigma) of each step at which the noise scale was measured."""
    message: Annotated[str, AfterValidator(hide_in_text)] = ""
    """Why it failed or diverged, in one line, without secrets."""

    @property
    def has_trained(self) -> bool:
        """Whether it trained as asked, to its own end or up to where it was stopped."""
        return self.status in ("reached", "finished", "missed", "pruned")

    @property
    def reached(self) -> bool:
        """Whether it reached the target or, where the best metric counts, its budget's end."""
        return self.status in ("reached", "finished")

    @property
    def steps_to_target(self) -> float:
        """The middle of the whole steps in (steps_low, steps]; all steps where it did not reach."""
        middle = 0.5 * (self.steps_low + 1 + self.steps)
        return max(middle, 1.0) if self.status == "reached" else float(self.steps)

    @property
    def steps_error(self) -> float:
        """Relative standard deviation of ``steps_to_target``, uniform over the whole steps."""
        if self.status != "reached":
            return 0.0
        # The variance of a uniform distribution over n whole numbers is (n^2 - 1)/12.
        count = max(self.steps - self.steps_low, 1)
        return math.sqrt((count**2 - 1) / 12.0) / self.steps_to_target

    @property
    def is_unfit(self) -> bool:
        """Whether its batch size does not fit: into memory, or to the user's code."""
        return self.status in ("out of memory", "refused")

    @property
    def finite_history(self) -> list[tuple[int, float]]:
        """The evaluations whose metric is a finite number."""
        return [(step, value) for step, value in self.history if value is not None]

    @property
    def finite_values(self) -> list[float]:
        """The metric of each evaluation, where it is a finite number."""
        return [value for _, value in self.finite_history]


Records = Sequence[Record]
"""Of trials that have ended, in order of their numbers."""


def last_of_chains(records: Records) -> list[Record]:
    """The last record of each chain of resumed trials, in order of their numbers."""
    resumed = {record.resumed_from for record in records}
    return [record for record in records if record.number not in resumed]


StepTime = Callable[[float], float]
"""Seconds of a step at a batch size, tau(B)."""
