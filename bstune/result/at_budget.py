"""The answer of the objective loss: what has the best metric when the budget ends."""

from bstune.result.values import (
    BatchSize,
    Count,
    Items,
    Level,
    NotNegative,
    Part,
    Positive,
    Real,
    Share,
    TrialPoint,
)


class FreshValues(Part, frozen=True):
    """What runs of one point on fresh seeds came to at their budget's end."""

    seeds: Items[Count]
    """Their seeds."""
    values: Items[Real]
    """The best value of the metric of each."""
    mean: Real
    """Their mean."""
    low: Real
    """Lower end of the mean's interval."""
    high: Real
    """Upper end of the mean's interval."""
    level: Level
    """Nominal coverage of the interval."""
    broken: Count
    """Further runs that diverged or ended before, which are not among the values."""


class SizeSeconds(Part, frozen=True):
    """The seconds of a step at a batch size."""

    batch_size: BatchSize
    """Examples of a step."""
    seconds: Positive
    """Of a step."""


class PointAtBudget(TrialPoint, frozen=True):
    """A point, and what it comes to at its budget's end."""

    steps: Count
    """Of its budget."""
    value: Real
    """The best value of the metric within its trial, which may be lucky."""
    predicted: Real | None
    """The metric that all trials predict of a fresh seed."""
    fresh: FreshValues | None
    """None where it did not run on fresh seeds."""

    @property
    def expected(self) -> float:
        """The metric to expect: of its fresh seeds, else predicted, else its own."""
        if self.fresh is not None:
            return self.fresh.mean
        return self.value if self.predicted is None else self.predicted


class GainAtBudget(Part, frozen=True):
    """By how much the winner is better than the baseline at the budget's end."""

    difference: Real
    """The baseline's metric over the winner's, or the other way where it rises: above 0 is better."""
    low: Real | None
    """Lower end of its interval; None without fresh seeds of both."""
    high: Real | None
    """Upper end of its interval."""
    level: Level
    """Nominal coverage of the interval."""
    seeds: Count
    """Fresh seeds on which both ran."""
    share: Share | None
    """The part of the budget after which the winner has the baseline's metric; None: it never has."""


class AsGoodAtBudget(Part, frozen=True):
    """The batch sizes that are not shown to be worse than the best, each at its best learning rate."""

    low: BatchSize
    """The smallest of them, in examples."""
    high: BatchSize
    """The largest of them, in examples."""
    lr_low: Positive
    """The best learning rate at ``low``."""
    lr_high: Positive
    """The best learning rate at ``high``."""
    is_low_open: bool
    """Whether ``low`` is the smallest that was searched."""
    is_high_open: bool
    """Whether ``high`` is the largest that was searched."""


class SizeAtBudget(Part, frozen=True):
    """What a batch size comes to at the budget's end, at its best learning rate."""

    batch_size: BatchSize
    """Examples of a step."""
    value: Real
    """The metric, the posterior's median, without a seed's luck."""
    low: Real
    """Lower end of its interval."""
    high: Real
    """Upper end of its interval."""
    lr: Positive
    """The best learning rate."""


class BestSizeAtShare(Part, frozen=True):
    """The best batch size for a part of the budget."""

    share: Share
    """Of the budget."""
    batch_size: Positive
    """The posterior's median, in examples."""
    low: Positive
    """Lower end of its interval."""
    high: Positive
    """Upper end of its interval."""
    is_at_end: bool
    """Whether it is an end of the batch sizes that were searched."""


class BestSizeLater(Part, frozen=True):
    """The best batch size for a longer budget, foretold by how it has grown."""

    times: Positive
    """The budget."""
    batch_size: Positive
    """The posterior's median, in examples."""
    low: Positive
    """Lower end of its interval."""
    high: Positive
    """Upper end of its interval."""


class SizeGrowthOverBudget(Part, frozen=True):
    """How the best batch size grows with the budget: B ~ budget^exponent."""

    exponent: Real
    """The posterior's median."""
    low: Real
    """Lower end of its interval."""
    high: Real
    """Upper end of its interval."""
    level: Level
    """Nominal coverage of the interval."""
    best_sizes: Items[BestSizeAtShare]
    """The longest budget first."""
    later: BestSizeLater
    """At several times the budget."""


class SameAtBudget(Part, frozen=True):
    """Trials that all have the same metric at their budget's end, which tells nothing of them."""

    value: Real
    """The metric."""
    differs_at: Share | None
    """The smallest part of the budget by which they differed; None: by none of it."""


class AtBudget(Part, frozen=True):
    """The answer of the objective loss: what has the best metric when the budget ends."""

    seconds: Positive | None
    """Seconds of training, by ``times``, where these are the budget."""
    examples: Count | None
    """Examples, where these are."""
    steps: Count | None
    """Steps, where these are."""
    times: Items[SizeSeconds]
    """Seconds of a step by which seconds are counted; empty for another budget."""
    winner: PointAtBudget
    """The point to use."""
    baseline: PointAtBudget | None
    """The reference; None where it did not run to its budget's end."""
    gain: GainAtBudget | None
    """None without a baseline, or where it is the winner."""
    as_good: AsGoodAtBudget
    """Around the best batch size."""
    curve: Items[SizeAtBudget]
    """Over rising batch sizes."""
    growth: SizeGrowthOverBudget | None
    """None where fewer than two parts of the budget have a trial."""
    same: SameAtBudget | None
    """None where the trials differ at their budget's end."""
    gain_left: NotNegative
    """What one more point may gain, expected, in units of the metric."""
    gain_left_at_most: NotNegative
    """What whoever knew the law exactly would gain, expected: a bound of what any search may."""
    seed_scatter: NotNegative
    """What one seed differs from another, a standard deviation, in units of the metric."""
