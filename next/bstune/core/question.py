"""The one question of a study: what is minimised, what a trial costs, and the answer's words.

Here and in :mod:`bstune.options` alone the name of the objective decides anything; the report looks
up its words by it.
"""

import math
from dataclasses import dataclass
from typing import Literal

from bstune.core.records import Budget, StepTime, Target

Objective = Literal["time", "steps", "curve", "metric"]
# A budget of seconds ends at the step that is this near its end: a quotient may be rounded.
FOR_ROUNDING = 1.0 + 1e-9


@dataclass(frozen=True)
class Wording:
    """How the answer to an objective is written.

    Args:
        rows: its labels in their order; one that has nothing to say is absent. The first line, the
            verdict, stands above them.
        least: what is sought.
        verb, better, than: of a comparison with the baseline.
        that_ends: what a trial does that comes to the question's end.
    """

    rows: tuple[str, ...]
    least: str = ""
    verb: str = ""
    better: str = ""
    than: str = ""
    that_ends: str = "that reaches the target"


WORDINGS: dict[Objective, Wording] = {
    "time": Wording(
        ("Best", "Time", "Easier", "Also good", "Scaling", "Warning", "Next", "Train"),
        "the least time to the target", "is", "as fast", "as",
    ),
    "steps": Wording(
        ("Best", "Steps", "Easier", "Also good", "Scaling", "Warning", "Next", "Train"),
        "the fewest steps to the target", "takes", "fewer steps", "than",
    ),
    "curve": Wording(("Range", "Rates", "Easier", "Warning", "Next")),
    "metric": Wording(
        ("Best", "Budget", "Also good", "Warning", "Next", "Train"),
        that_ends="that trains to its budget's end",
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Question:
    """What is sought: the least time or the fewest steps to the target, the curve, or the metric.

    Args:
        target: that ends a trial; without a goal the best value of the metric counts.
        budget: that ends a trial which does not reach the target.
        objective: ``time``, ``steps``, ``curve`` (the steps-to-target curve and B_crit) or
            ``metric`` (the best value within the budget).
        schedule_ends: each trial's schedule ends with it; its length is chosen, up to the budget.
        budget_step_time: tau(B) by which a budget of seconds is one of steps, the same throughout a
            study.
    """

    target: Target
    budget: Budget
    objective: Objective = "time"
    schedule_ends: bool = False
    budget_step_time: StepTime | None = None

    def value(self, steps: float, batch_size: float, step_time: StepTime) -> float:
        """What is minimised: training seconds to the target or, for ``steps``, steps to it.

        For ``metric`` it is the budget to the best run's metric, in budgets.
        """
        if self.seeks_metric:
            return steps / self.last_step(batch_size)
        return steps if self.counts_steps else self.cost(steps, batch_size, step_time)

    def cost(self, steps: float, batch_size: float, step_time: StepTime) -> float:
        """What a trial takes: training seconds of so many steps."""
        return steps * step_time(batch_size)

    def last_step(self, batch_size: float) -> int:
        """The step at which the budget of a trial ends."""
        if self.budget.seconds is None or self.budget_step_time is None:
            return self.budget.last_step(batch_size)
        steps = self.budget.seconds / self.budget_step_time(batch_size)
        return max(1, math.floor(steps * FOR_ROUNDING))

    @property
    def value_name(self) -> str:
        """What a trial's value is called, such as ``steps to val/loss <= 0.1``."""
        if self.seeks_metric:
            return self.target.metric
        return f"{'steps' if self.counts_steps else 'seconds'} to {self.target}"

    @property
    def seeks_best(self) -> bool:
        """Whether a best configuration is sought, which new seeds confirm."""
        return self.objective != "curve"

    @property
    def seeks_metric(self) -> bool:
        """Whether the best metric within the budget is sought."""
        return self.objective == "metric"

    @property
    def counts_steps(self) -> bool:
        """Whether steps are minimised: of sizes that tie the smallest costs least."""
        return self.objective == "steps"

    @property
    def counts_seconds(self) -> bool:
        """Whether seconds are minimised, which are known as well as step times are."""
        return self.objective == "time"
