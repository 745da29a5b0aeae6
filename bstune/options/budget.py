"""``budget``: when a trial gives up."""

from pydantic import Field

from bstune.core.records import Budget
from bstune.options.values import Positive, PositiveSeconds, Section


class BudgetOptions(Section):
    """A trial gives up once both its steps and its examples are spent."""

    steps: Positive
    """Optimizer steps of one trial, which gives up once its examples are spent, too."""
    examples: Positive
    """Examples that one trial trains on."""

    @property
    def budget(self) -> Budget:
        """The budget as trials have it."""
        return Budget(self.steps, self.examples)

    @property
    def counts_examples(self) -> bool:
        """Whether examples were given, and not steps alone.

        A budget lasts until both its steps and its examples are spent. A single example is spent by
        the first step, so that it never decides: it stands for none, as each of the two options is
        a positive number.
        """
        return self.examples > 1


class WorkloadBudgetOptions(BudgetOptions):
    """A trial gives up once both its steps and its examples are spent."""

    assumed_epoch: Positive | None = Field(default=None, exclude=True)
    """Examples of an epoch, where bstune has assumed the budget; null: the user has stated it."""


class TrialBudgetOptions(BudgetOptions):
    """A trial gives up once both its steps and its examples are spent."""

    seconds: PositiveSeconds | None
    """With search.objective=loss, training seconds of one trial; null: its examples, or its steps
    where examples=1."""
