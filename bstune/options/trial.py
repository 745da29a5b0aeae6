"""``trial``: one trial in place of a study."""

from typing import Self

from pydantic import model_validator

from bstune.options.refusal import shown
from bstune.options.values import Count, Positive, PositiveFinite, Section, Seed


class TrialOptions(Section):
    """With batch_size and lr, one trial is trained instead of a study."""

    batch_size: Positive | None
    """Batch size of one trial, which is trained instead of a study."""
    lr: PositiveFinite | None
    """Its learning rate."""
    seed: Seed
    """Its seed."""
    total_steps: Count | None
    """The steps after which its schedule ends; bstune sets it."""

    @model_validator(mode="after")
    def _is_whole(self) -> Self:
        """Refuse a batch size without a learning rate, and the reverse."""
        if (self.batch_size is None) != (self.lr is None):
            pair = f"batch_size={shown(self.batch_size)} and lr={shown(self.lr)}"
            raise ValueError(
                f"to train one trial, give both trial.batch_size and trial.lr, but got {pair}"
            )
        return self
