"""The space that a study searches: integer batch sizes on a log scale, and delta = log2(lr / rule(B))."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from bstune.core.scaling import ScalingRule

MODULE = "workload.module."
BUDGET = "budget."
HALF_LIVES = ("scaling.beta2_half_life", "scaling.weight_decay_half_life")
# Sets the rate there.
OVERRIDE_LR = "scaling.override_lr"


@dataclass(frozen=True)
class Tunable:
    """A number of the config that is searched."""

    name: str  # in the study, the records and the report
    key: str  # the config key that it sets, dotted, below workload.module or budget, or of HALF_LIVES
    low: float
    high: float
    log: bool  # whether it is searched on a log scale
    integer: bool
    complement: bool = False  # whether 1 - value is searched, as on a log scale a momentum is (Shallue et al. 2018)

    def value(self, value: float) -> float:
        """Return a value as the config takes it: an integer where it is one."""
        return round(value) if self.integer else value

    @property
    def middle(self) -> float:
        """The middle of the range on the scale that is searched."""
        low, high = self.searched(self.low), self.searched(self.high)
        # Options refuse a log scale from 0 on, where they are checked.
        has_logs = self.log and min(low, high) > 0
        middle = math.sqrt(low * high) if has_logs else (low + high) / 2
        return self.value(self.searched(middle))

    def searched(self, value: float) -> float:
        """Return what is searched in place of a value, and the value of what was searched: one less the other."""
        return 1.0 - value if self.complement else value


def corners(tunables: tuple[Tunable, ...]) -> list[dict[str, float]]:
    """Return all at their smallest values, and all at their largest; nothing without tunables."""
    ends = ("low", "high") if tunables else ()
    return [{one.name: one.value(getattr(one, end)) for one in tunables} for end in ends]


@dataclass(frozen=True)
class Space:
    """Batch sizes and learning rates; ``high`` is always a candidate."""

    low: int
    high: int
    multiple: int  # batch sizes are snapped to multiples of this
    sigma: float  # standard deviation of delta, in octaves
    rule: ScalingRule
    octaves: float | None = None  # delta lies within plus and minus this; None: 3 sigma
    lr_low: float = (
        0.0  # the range of learning rates that can be had; the rule's values are clipped to it
    )
    lr_high: float = math.inf
    tunables: tuple[Tunable, ...] = ()

    @property
    def delta_bound(self) -> float:
        """Delta lies within plus and minus this, in octaves."""
        return 3.0 * self.sigma if self.octaves is None else self.octaves

    def snap(self, batch_size: float) -> int:
        """Return the nearest candidate: a multiple within the range, or the largest batch size itself."""
        first = math.ceil(self.low / self.multiple) * self.multiple
        last = math.floor(self.high / self.multiple) * self.multiple
        nearest = min(max(round(batch_size / self.multiple) * self.multiple, first), last)
        candidates = {self.high, nearest} if first <= last else {self.high}
        return min(candidates, key=lambda candidate: (abs(candidate - batch_size), candidate))

    def stratum(self, index: int, offset: float) -> int:
        """Return the batch size of stratified trial ``index``, spread over log B; studies differ in ``offset`` < 1."""
        share = (van_der_corput(index) + offset) % 1.0
        return self.snap(self.low * (self.high / self.low) ** share)

    def searched(self, values: Mapping[str, float]) -> dict[str, float]:
        """Return what is searched in place of the tunables' values, by name."""
        return {one.name: one.searched(values[one.name]) for one in self.tunables}

    def lr(self, batch_size: int, delta: float) -> float:
        """Return rule(B) 2^delta, clipped to the learning rates that can be had."""
        return min(max(self.rule(batch_size) * math.exp2(delta), self.lr_low), self.lr_high)

    def delta(self, batch_size: int, lr: float) -> float:
        """Return log2(lr / rule(B)); of a clipped rate it may lie beyond the bound."""
        return math.log2(lr / self.rule(batch_size))


def van_der_corput(index: int, base: int = 2) -> float:
    """Return term ``index`` of the low-discrepancy sequence of a base, 0, 1/2, 1/4, 3/4, ... of base 2, in [0, 1)."""
    value, weight = 0.0, 1.0 / base
    while index:
        index, digit = divmod(index, base)
        value += digit * weight
        weight /= base
    return value
