"""What a study searches: batch sizes, learning rates around a scaling rule, and further values."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from bstune.core.records import Frozen
from bstune.core.rules import lr_of

# An open end of the rates lies so many octaves beyond the rule's.
LR_OCTAVES = 10
# A range that spans so many times its lower end is searched by its logarithm.
LOG_FACTOR = 10.0
Number = int | float


class Configuration(Frozen):
    """A batch size, a learning rate and further values."""

    batch_size: int
    lr: float
    values: dict[str, int | float] = {}


@dataclass(frozen=True)
class Tunable:
    """The range of a further value, and the coordinate, 0 to 1, in which it is searched.

    Args:
        name: of the value.
        low, high: both included; where both are whole numbers, all values are.
    """

    name: str
    low: Number
    high: Number

    def __str__(self) -> str:
        whole = ", whole" if self.is_whole else ""
        return f"{self.name} {self.low:.10g} to {self.high:.10g} ({self.scale}{whole})"

    @property
    def is_whole(self) -> bool:
        """Whether its values are whole numbers."""
        return isinstance(self.low, int) and isinstance(self.high, int)

    @property
    def scale(self) -> Literal["log", "log of 1 - x", "linear"]:
        """In which it is searched: a log where its values, or what they lack of 1, span a factor.

        A momentum of 0.8 to 0.999 is searched by 1 - momentum, as Shallue et al. 2018 do.
        """
        of_values = of_lack = 1.0
        if self.low > 0:
            of_values = self.high / self.low
        if self.low >= 0 and self.high < 1:
            of_lack = (1.0 - self.low) / (1.0 - self.high)
        if max(of_values, of_lack) < LOG_FACTOR:
            return "linear"
        return "log" if of_values >= of_lack else "log of 1 - x"

    def place(self, value: float) -> float:
        """The coordinate of a value; of one beyond the range that of the nearer end."""
        inside = min(max(value, self.low), self.high)
        low, high = self._ends
        return (self._searched(inside) - low) / (high - low)

    def value(self, place: float) -> Number:
        """The value at a coordinate: whole, or in three digits, as it is printed."""
        low, high = self._ends
        searched = low + place * (high - low)
        if self.scale == "log of 1 - x":
            # Three digits of what it lacks of 1, without a float's last ones.
            value = round(1.0 - float(f"{math.exp(-searched):.3g}"), 12)
        else:
            value = math.exp(searched) if self.scale == "log" else searched
            value = round(value) if self.is_whole else float(f"{value:.3g}")
        return min(max(value, self.low), self.high)

    @property
    def _ends(self) -> tuple[float, float]:
        """Both ends of the range on its scale."""
        return self._searched(self.low), self._searched(self.high)

    def _searched(self, value: float) -> float:
        """A value on the scale in which it is searched."""
        match self.scale:
            case "log":
                return math.log(value)
            case "log of 1 - x":
                return -math.log1p(-value)
            case _:
                return value


@dataclass(frozen=True)
class Space:
    """The ranges of a search, and the rule that its prior follows.

    Args:
        low, high: batch sizes, both included.
        multiple: batch sizes are snapped to it; ``low`` and ``high`` are multiples.
        lr_low, lr_high: learning rates, both included.
        rule: a name of :data:`bstune.core.rules.RULES`.
        anchor: batch size and rate that the rule goes through: the baseline, where there is one.
        tunables: the further values that are searched.
    """

    low: int
    high: int
    lr_low: float
    lr_high: float
    rule: str
    anchor: tuple[float, float]
    multiple: int = 1
    tunables: tuple[Tunable, ...] = ()

    def rule_lr(self, batch_size: float) -> float:
        """The scaling rule's learning rate; one that turns does in the middle of the range."""
        return lr_of(self.rule, batch_size, self.anchor, noise_scale=2.0**self.middle)

    def snap(self, batch_size: float) -> int:
        """The nearest batch size that is allowed."""
        low, high = self.low // self.multiple, self.high // self.multiple
        snapped = min(max(round(batch_size / self.multiple), max(low, 1)), max(high, 1))
        return snapped * self.multiple

    def snap_lr(self, lr: float) -> float:
        """The nearest learning rate within the range, in three digits: as it is printed."""
        rounded = float(f"{lr:.3g}")
        return min(max(rounded, self.lr_low), self.lr_high)

    def places(self, values: Mapping[str, Number]) -> list[float]:
        """The coordinates of further values, in the order of ``tunables``."""
        return [tunable.place(values[tunable.name]) for tunable in self.tunables]

    def values_at(self, places: Iterable[float]) -> dict[str, Number]:
        """The further values at coordinates."""
        return {
            one.name: one.value(place) for one, place in zip(self.tunables, places, strict=True)
        }

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
