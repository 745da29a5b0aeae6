"""What a study searches: a range of batch sizes and one of learning rates around a scaling rule."""

import math
from dataclasses import dataclass, replace

from bstune.core.records import Frozen
from bstune.core.rules import lr_of

# An open end of the rates lies so many octaves beyond the rule's.
LR_OCTAVES = 10


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
        rule: a name of :data:`bstune.core.rules.Rule`.
        anchor: batch size and rate that the rule goes through: the baseline, where there is one.
        noise_scale: at which some rules turn, in examples; None: at the critical batch size.
    """

    low: int
    high: int
    lr_low: float
    lr_high: float
    rule: str
    anchor: tuple[float, float]
    multiple: int = 1
    noise_scale: float | None = None

    def rule_lr(self, batch_size: float) -> float:
        """The scaling rule's learning rate; a noise scale that is not known is the middle's."""
        return lr_of(self.rule, batch_size, self.anchor, self.noise_scale or 2.0**self.middle)

    def snap(self, batch_size: float) -> int:
        """The nearest batch size that is allowed."""
        low, high = self.low // self.multiple, self.high // self.multiple
        snapped = min(max(round(batch_size / self.multiple), max(low, 1)), max(high, 1))
        return snapped * self.multiple

    def snap_lr(self, lr: float) -> float:
        """The nearest learning rate within the range, in three digits: as it is printed."""
        rounded = float(f"{lr:.3g}")
        return min(max(rounded, self.lr_low), self.lr_high)

    @staticmethod
    def around(
        sizes: tuple[int, int],
        rates: tuple[float | None, float | None],
        rule: str,
        baseline: tuple[float, float] | None,
        multiple: int,
    ) -> "Space | None":
        """The space whose rule goes through the baseline; None if nothing says which rates to try.

        Without a baseline the rule goes through the geometric middle of both ranges.

        Args:
            sizes: smallest and largest batch size.
            rates: smallest and largest; one that is None lies ``LR_OCTAVES`` beyond the rule's.
            rule: as of the class.
            baseline: batch size and rate.
            multiple: as of the class.
        """
        low, high = sizes
        lr_low, lr_high = rates
        anchor = baseline
        if anchor is None:
            if lr_low is None or lr_high is None:
                return None
            anchor = math.sqrt(low * high), math.sqrt(lr_low * lr_high)
        space = Space(low, high, lr_low or 0.0, lr_high or math.inf, rule, anchor, multiple)
        of_rule = [space.rule_lr(size) for size in sizes]
        return replace(
            space,
            lr_low=lr_low or min(of_rule) / 2.0**LR_OCTAVES,
            lr_high=lr_high or max(of_rule) * 2.0**LR_OCTAVES,
        )

    @property
    def middle(self) -> float:
        """log2 of the geometric middle of the batch sizes."""
        return 0.5 * (math.log2(self.low) + math.log2(self.high))
