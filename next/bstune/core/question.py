"""The one question of a study: what is minimised, what a trial costs, and the answer's rows.

No search reads the name of the objective: what it needs to know of it is here.
"""

from dataclasses import dataclass
from typing import Literal

from bstune.core.records import Budget, StepTime, Target

Objective = Literal["time", "steps", "curve", "metric"]
# The labels of the answer's rows by objective, in their order; one that has nothing to say is
# absent. The first line, the verdict, stands above them.
ROWS: dict[str, tuple[str, ...]] = {
    "time": ("Time", "Easier", "Also good", "Scaling", "Warning", "Next", "Train"),
    "steps": ("Steps", "Easier", "Also good", "Scaling", "Warning", "Next", "Train"),
    "curve": ("Range", "Rates", "Easier", "Warning", "Next"),
}


@dataclass(frozen=True)
class Question:
    """What is sought: the least time or the fewest steps to the target, or the curve.

    Args:
        target: that ends a trial.
        budget: that ends a trial which does not reach the target.
        objective: ``time``, ``steps`` or ``curve`` (the steps-to-target curve and B_crit).
        schedule_ends: each trial's schedule ends with it; its length is chosen, up to the budget.
    """

    target: Target
    budget: Budget
    objective: Objective = "time"
    schedule_ends: bool = False

    def value(self, steps: float, batch_size: float, step_time: StepTime) -> float:
        """What is minimised: training seconds to the target or, for ``steps``, steps to it."""
        return steps if self.objective == "steps" else self.cost(steps, batch_size, step_time)

    def cost(self, steps: float, batch_size: float, step_time: StepTime) -> float:
        """What a trial takes: training seconds of so many steps."""
        return steps * step_time(batch_size)

    @property
    def seeks_best(self) -> bool:
        """Whether a best configuration is sought, which new seeds confirm."""
        return self.objective != "curve"
