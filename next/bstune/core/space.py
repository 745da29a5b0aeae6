"""What a study searches: a range of batch sizes and one of learning rates around a scaling rule."""

import math
from dataclasses import dataclass

from bstune.core.records import Frozen
from bstune.core.rules import lr_of


class Configuration(Frozen):
    """A batch size, a learning rate and further values."""

    batch_size: int
    lr: float
    values: dict[str, int | float] = {}


@dataclass(frozen=True)
class Space:
    """The ranges of a search, and the rule that its prior follows.

    Args:
        low, high: batch sizes, both included.
        multiple: batch sizes are snapped to it; ``low`` and ``high`` are multiples.
        lr_low, lr_high: learning rates, both included.
        rule: a name of :data:`bstune.core.rules.EXPONENTS`.
        anchor: batch size and rate that the rule goes through: the baseline, where there is one.
    """

    low: int
    high: int
    lr_low: float
    lr_high: float
    rule: str
    anchor: tuple[float, float]
    multiple: int = 1

    def rule_lr(self, batch_size: float) -> float:
        """The scaling rule's learning rate."""
        return lr_of(self.rule, batch_size, self.anchor)

    def snap(self, batch_size: float) -> int:
        """The nearest batch size that is allowed."""
        low, high = self.low // self.multiple, self.high // self.multiple
        snapped = min(max(round(batch_size / self.multiple), max(low, 1)), max(high, 1))
        return snapped * self.multiple

    def snap_lr(self, lr: float) -> float:
        """The nearest learning rate within the range, in three digits: as it is printed."""
        rounded = float(f"{lr:.3g}")
        return min(max(rounded, self.lr_low), self.lr_high)

    @property
    def middle(self) -> float:
        """log2 of the geometric middle of the batch sizes."""
        return 0.5 * (math.log2(self.low) + math.log2(self.high))
