"""The one question of a study: what a trial costs, and what the answer's rows are called.

Nothing else asks which question it is.
"""

from dataclasses import dataclass
from typing import Literal

from bstune.core.records import Budget, StepTime, Target

Objective = Literal["time"]
# The labels of the answer's rows by objective, as ``Question.rows`` gives them.
ROWS: dict[str, tuple[str, ...]] = {
    "time": ("Time", "Easier", "Also good", "Scaling", "Warning", "Next", "Train"),
}


@dataclass(frozen=True)
class Question:
    """Least training time to the target.

    Args:
        target: that ends a trial.
        budget: that ends a trial which does not reach the target.
        objective: ``time``.
    """

    target: Target
    budget: Budget
    objective: Objective = "time"

    def cost(self, steps: float, batch_size: float, step_time: StepTime) -> float:
        """What is minimised: for ``time`` the training seconds of so many steps."""
        return steps * step_time(batch_size)

    @property
    def rows(self) -> tuple[str, ...]:
        """The labels of the answer's rows, in their order; one that has nothing to say is absent.

        The first line, the verdict, stands above them.
        """
        return ROWS[self.objective]
