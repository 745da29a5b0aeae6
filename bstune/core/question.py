"""The one question of a study: what is minimised, and what a trial costs.

Here and in :mod:`bstune.options` alone the name of the objective decides anything;
``report/answer.py`` looks up its rows and words by it.
"""

import math
from dataclasses import dataclass
from typing import Literal

from bstune.core.records import Budget, StepTime, Target

Objective = Literal["time", "steps", "curve", "metric"]
# A budget of seconds ends at the step that is this near its end: a quotient may be rounded.
FOR_ROUNDING = 1.0 + 1e-9


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
    def that_ends(self) -> str:
        """What a trial does that comes to its end, such as "that reaches the target"."""
        return "that trains to its budget's end" if self.seeks_metric else "that reaches the target"

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
