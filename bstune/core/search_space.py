"""The space that a study searches: integer batch sizes, and delta = log2(lr / rule(B))."""

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
# Points that are closer than so many octaves, in both batch size and learning rate, count as one.
SAME_POINT = 0.2


def are_near(batch_size: float, lr: float, other_batch_size: float, other_lr: float) -> bool:
    """Whether two points count as one: both values differ by less than ``SAME_POINT`` octaves."""
    octaves_of_size = abs(math.log2(batch_size / other_batch_size))
    octaves_of_rate = abs(math.log2(lr / other_lr))
    return max(octaves_of_size, octaves_of_rate) < SAME_POINT


@dataclass(frozen=True)
class Tunable:
    """A further hyper-parameter: a number of the config that is searched."""

    name: str
    """Its name in the study, the records and the report."""
    key: str
    """The dotted config key that it sets: below ``MODULE`` or ``BUDGET``, or of ``HALF_LIVES``."""
    low: float
    high: float
    log: bool
    """Whether it is searched on a log scale."""
    integer: bool
    complement: bool = False
    """Whether 1 - value is searched, as on a log scale a momentum is (Shallue et al. 2018)."""
    own: float | None = None
    """The value that the user trains with today; None: it is not known."""

    @property
    def usual(self) -> float:
        """The user's own value; the middle of the range where that is not known."""
        return self.middle if self.own is None else self.for_config(self.own)

    def for_config(self, value: float) -> float:
        """Convert a value to what the config takes: an integer where it is to be one."""
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
        # A complement is its own inverse: it leads back from the scale that is searched.
        return self.for_config(self.searched(middle))

    def searched(self, value: float) -> float:
        """Convert a value to the number that is searched in its place, and back.

        For a complement it is 1 - value either way, else the value itself.
        """
        return 1.0 - value if self.complement else value


def corners(tunables: tuple[Tunable, ...]) -> list[dict[str, float]]:
    """List two settings of the tunables to check beforehand, where a trial is likeliest to fail.

    All tunables are at their smallest values, and all at their largest. Empty without tunables.
    """
    if not tunables:
        return []
    smallest = {tunable.name: tunable.for_config(tunable.low) for tunable in tunables}
    largest = {tunable.name: tunable.for_config(tunable.high) for tunable in tunables}
    return [smallest, largest]


@dataclass(frozen=True)
class Space:
    """The batch sizes and learning rates that a study searches."""

    low: int
    """The smallest batch size."""
    high: int
    """The largest; it is a candidate even if it is no multiple."""
    multiple: int
    """Batch sizes are snapped to multiples of this."""
    sigma: float
    """Standard deviation of delta, in octaves."""
    rule: ScalingRule
    octaves: float | None = None
    """Delta lies within plus and minus this; None: 3 sigma."""
    lr_low: float = 0.0
    """The lowest learning rate that is allowed; lower ones are clipped to it."""
    lr_high: float = math.inf
    """The highest."""
    tunables: tuple[Tunable, ...] = ()

    @property
    def delta_bound(self) -> float:
        """Delta, log2 of the learning rate over the rule's, lies within plus and minus this.

        It is set in octaves; else it is three standard deviations of delta's prior.
        """
        return 3.0 * self.sigma if self.octaves is None else self.octaves

    def snap(self, batch_size: float) -> int:
        """Round to the nearest candidate: a multiple in the range, or the largest batch size.

        Of two that are as near it is the smaller one.
        """
        first = math.ceil(self.low / self.multiple) * self.multiple
        last = math.floor(self.high / self.multiple) * self.multiple
        nearest = min(max(round(batch_size / self.multiple) * self.multiple, first), last)
        candidates = {self.high}
        if first <= last:
            candidates.add(nearest)
        return min(candidates, key=lambda candidate: (abs(candidate - batch_size), candidate))

    def stratum(self, index: int, offset: float) -> int:
        """Choose the batch size of trial ``index`` of a sequence that is spread evenly over log B.

        ``offset`` in [0, 1) shifts the sequence, differently in each study.
        """
        fraction = (van_der_corput(index) + offset) % 1.0
        return self.snap(self.low * (self.high / self.low) ** fraction)

    def searched(self, values: Mapping[str, float]) -> dict[str, float]:
        """Convert the tunables' values, by name, to the numbers that are searched instead."""
        return {tunable.name: tunable.searched(values[tunable.name]) for tunable in self.tunables}

    def lr(self, batch_size: int, delta: float) -> float:
        """Compute the learning rate rule(B) 2^delta, clipped to the allowed range."""
        return min(max(self.rule(batch_size) * math.exp2(delta), self.lr_low), self.lr_high)

    def lowest_rate_spec(self, batch_size: int) -> TrialSpec:
        """Describe a trial outside of the search, such as to time steps of a batch size.

        It has the lowest learning rate that is searched, as at a high one it might diverge at once.
        Its number, index and seed are placeholders. Delta, the octaves above the scaling rule's
        rate, is None, as no sampler has chosen it.
        """
        return TrialSpec(
            number=0,
            trial_index=0,
            batch_size=batch_size,
            lr=self.lr(batch_size, -self.delta_bound),
            delta=None,
            seed=0,
        )

    def delta(self, batch_size: int, lr: float) -> float:
        """Compute log2(lr / rule(B)), which lies beyond the bound for some clipped rates."""
        return math.log2(lr / self.rule(batch_size))


def van_der_corput(index: int, base: int = 2) -> float:
    """Compute a term of van der Corput's low-discrepancy sequence in [0, 1), by its index.

    In base 2 it begins with 0, 1/2, 1/4, 3/4.
    """
    value = 0.0
    weight = 1.0 / base
    while index:
        index, digit = divmod(index, base)
        value += digit * weight
        weight /= base
    return value


@dataclass(frozen=True)
class SizeLimits:
    """The largest batch sizes that can be trained."""

    examples: int | None = None
    """Of the training data; None: not known."""
    in_memory: int | None = None
    """The largest batch size that fits; None: not known, or larger than all that are searched."""

    def excess(self, batch_size: int) -> str | None:
        """Say why the user's own batch size cannot be trained; None where it can."""
        own = f"your own batch size, {batch_size}"
        if self.examples is not None and batch_size > self.examples:
            return f"{own}, is larger than the training data, {self.examples} examples"
        if self.in_memory is not None and batch_size > self.in_memory:
            return (
                f"{own}, is past {self.in_memory}, the largest that was seen to fit into the memory"
            )
        return None
