"""The space that a study searches: integer batch sizes on a log scale, and delta = log2(lr / rule(B))."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from bstune.core.records import TrialSpec
from bstune.core.scaling import ScalingRule

MODULE = "workload.module."
BUDGET = "budget."
# Options that set the optimizer's beta2 and weight decay by a half-life in examples.
HALF_LIVES = ("scaling.beta2_half_life", "scaling.weight_decay_half_life")
# Sets the trial's learning rate in the optimizers of a module that has no argument for it.
OVERRIDE_LR = "scaling.override_lr"


@dataclass(frozen=True)
class Tunable:
    """A number of the config that is searched."""

    name: str
    """In the study, the records and the report."""
    key: str
    """The config key that it sets, dotted: below ``MODULE`` or ``BUDGET``, or of ``HALF_LIVES``."""
    low: float
    high: float
    log: bool
    """Whether it is searched on a log scale."""
    integer: bool
    complement: bool = False
    """Whether 1 - value is searched, as on a log scale a momentum is (Shallue et al. 2018)."""

    def value(self, value: float) -> float:
        """Give a value as the config takes it: an integer where it is to be one."""
        return round(value) if self.integer else value

    @property
    def middle(self) -> float:
        """The middle of the range on the scale that is searched."""
        low = self.searched(self.low)
        high = self.searched(self.high)
        middle = (low + high) / 2
        # Options refuse a log scale from 0 on, where they are checked.
        if self.log and min(low, high) > 0:
            middle = math.sqrt(low * high)
        # Its own complement leads back from the scale that is searched.
        return self.value(self.searched(middle))

    def searched(self, value: float) -> float:
        """Give what is searched in place of a value, and the value of what was searched.

        Each is 1 less the other.
        """
        return 1.0 - value if self.complement else value


def corners(tunables: tuple[Tunable, ...]) -> list[dict[str, float]]:
    """Give all at their smallest values, and all at their largest; nothing without tunables."""
    if not tunables:
        return []
    smallest = {tunable.name: tunable.value(tunable.low) for tunable in tunables}
    largest = {tunable.name: tunable.value(tunable.high) for tunable in tunables}
    return [smallest, largest]


@dataclass(frozen=True)
class Space:
    """Batch sizes and learning rates; ``high`` is always a candidate."""

    low: int
    high: int
    multiple: int
    """Batch sizes are snapped to multiples of this."""
    sigma: float
    """Standard deviation of delta, in octaves."""
    rule: ScalingRule
    octaves: float | None = None
    """Delta lies within plus and minus this; None: 3 sigma."""
    lr_low: float = 0.0
    """The range of learning rates that can be had; the rule's values are clipped to it."""
    lr_high: float = math.inf
    tunables: tuple[Tunable, ...] = ()

    @property
    def delta_bound(self) -> float:
        """Delta lies within plus and minus this, in octaves."""
        return 3.0 * self.sigma if self.octaves is None else self.octaves

    def snap(self, batch_size: float) -> int:
        """Give the nearest candidate: a multiple within the range, or the largest batch size itself."""
        first = math.ceil(self.low / self.multiple) * self.multiple
        last = math.floor(self.high / self.multiple) * self.multiple
        nearest = min(max(round(batch_size / self.multiple) * self.multiple, first), last)
        candidates = {self.high}
        if first <= last:
            candidates.add(nearest)
        return min(candidates, key=lambda candidate: (abs(candidate - batch_size), candidate))

    def stratum(self, index: int, offset: float) -> int:
        """Give the batch size of stratified trial ``index``, spread over log B.

        Studies differ in their ``offset`` < 1.
        """
        share = (van_der_corput(index) + offset) % 1.0
        return self.snap(self.low * (self.high / self.low) ** share)

    def searched(self, values: Mapping[str, float]) -> dict[str, float]:
        """Give what is searched in place of the tunables' values, by name."""
        return {tunable.name: tunable.searched(values[tunable.name]) for tunable in self.tunables}

    def lr(self, batch_size: int, delta: float) -> float:
        """Give rule(B) 2^delta, clipped to the learning rates that can be had."""
        return min(max(self.rule(batch_size) * math.exp2(delta), self.lr_low), self.lr_high)

    def lowest_rate_spec(self, batch_size: int) -> TrialSpec:
        """Give a trial at the lowest learning rate of the search: a high one may diverge at once."""
        return TrialSpec(
            number=0,
            trial_index=0,
            batch_size=batch_size,
            lr=self.lr(batch_size, -self.delta_bound),
            delta=None,
            seed=0,
        )

    def delta(self, batch_size: int, lr: float) -> float:
        """Give log2(lr / rule(B)); of a clipped rate it may lie beyond the bound."""
        return math.log2(lr / self.rule(batch_size))


def van_der_corput(index: int, base: int = 2) -> float:
    """Give term ``index`` of a base's low-discrepancy sequence in [0, 1): of base 2, 0, 1/2, 1/4, 3/4, ..."""
    value = 0.0
    weight = 1.0 / base
    while index:
        index, digit = divmod(index, base)
        value += digit * weight
        weight /= base
    return value
