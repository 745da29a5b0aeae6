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
    """The best value of the metric in each run."""
    mean: Real
    """The mean of these values."""
    low: Real
    """Lower end of the interval of the mean."""
    high: Real
    """Upper end of the interval of the mean."""
    level: Level
    """Nominal coverage of the interval."""
    broken: Count
    """Further runs that diverged, or ended before their budget. They have no value here."""


class SizeSeconds(Part, frozen=True):
    """The seconds of a step at a batch size."""

    batch_size: BatchSize
    """Examples of a step."""
    seconds: Positive
    """Seconds of a step."""


class PointAtBudget(TrialPoint, frozen=True):
    """A trial's configuration, and the metric that it reaches at its budget's end."""

    steps: Count
    """Steps of its budget."""
    value: Real
    """The best value of the metric within its trial, which may be lucky."""
    predicted: Real | None
    """The metric that all trials predict for a fresh seed."""
    fresh: FreshValues | None
    """Its runs on fresh seeds. None where there were none."""
    seconds: NotNegative | None = None
    """Training seconds of these steps. None where those of a step are not known."""

    @property
    def expected(self) -> float:
        """The metric to expect of a fresh seed: the mean over those that ran.

        Without fresh seeds it is the prediction. Without a prediction it is the trial's own value.
        """
        if self.fresh is not None:
            return self.fresh.mean
        return self.value if self.predicted is None else self.predicted


class GainAtBudget(Part, frozen=True):
    """By how much the winner is better than the baseline at the budget's end."""

    difference: Real
    """Winner against baseline, signed so that a difference above 0 is better in either mode."""
    low: Real | None
    """Lower end of the interval of the difference. None without fresh seeds of both."""
    high: Real | None
    """Upper end of the interval of the difference. None without fresh seeds of both."""
    level: Level
    """Nominal coverage of the interval."""
    seeds: Count
    """Fresh seeds on which both ran."""
    share: Share | None
    """The part of the budget after which the winner has the baseline's metric. None: it has not."""


class AsGoodAtBudget(Part, frozen=True):
    """The batch sizes that are not shown to be worse than the best one.

    Each is judged at its best learning rate.
    """

    low: BatchSize
    """The smallest of them, in examples."""
    high: BatchSize
    """The largest of them, in examples."""
    lr_low: Positive
    """The best learning rate at ``low``."""
    lr_high: Positive
    """The best learning rate at ``high``."""
    is_low_open: bool
    """Whether smaller ones may be as good: they were not searched, or no trial speaks for them."""
    is_high_open: bool
    """Whether larger ones may be as good: they were not searched, or no trial speaks for them."""


class SizeAtBudget(Part, frozen=True):
    """The metric of a batch size at the budget's end, at its best learning rate."""

    batch_size: BatchSize
    """Examples of a step."""
    value: Real
    """The metric: the posterior's median, without a seed's luck."""
    low: Real
    """Lower end of its interval."""
    high: Real
    """Upper end of its interval."""
    lr: Positive
    """The best learning rate."""


class BestSizeAtShare(Part, frozen=True):
    """The best batch size for a part of the budget."""

    share: Share
    """The part of the budget, from 0 to 1."""
    batch_size: Positive
    """The posterior's median, in examples."""
    low: Positive
    """Lower end of its interval."""
    high: Positive
    """Upper end of its interval."""
    is_at_end: bool
    """Whether it is an end of the batch sizes that were searched."""


class BestSizeLater(Part, frozen=True):
    """The best batch size for a longer budget, predicted from its growth so far."""

    times: Positive
    """How many times as long as the study's that budget is."""
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
    """Trials that all have the same metric at their budget's end: it does not tell them apart."""

    value: Real
    """The metric."""
    differs_at: Share | None
    """The smallest part of the budget by which the trials differed. None: they never did."""


class AtBudget(Part, frozen=True):
    """The answer of the objective loss: what has the best metric when the budget ends."""

    seconds: Positive | None
    """The budget in seconds of training, counted by ``times``. None for another budget."""
    examples: Count | None
    """The budget in examples. None for another budget."""
    steps: Count | None
    """The budget in steps. None for another budget."""
    times: Items[SizeSeconds]
    """The seconds of a step by which seconds are counted. Empty for another budget."""
    winner: PointAtBudget
    """The point to use."""
    baseline: PointAtBudget | None
    """The user's own configuration. None where it did not run to its budget's end."""
    gain: GainAtBudget | None
    """None without a baseline, or where the baseline is the winner."""
    as_good: AsGoodAtBudget
    """The batch sizes around the best one that may be as good."""
    curve: Items[SizeAtBudget]
    """The metric over batch size, which rises along the list."""
    growth: SizeGrowthOverBudget | None
    """How the best batch size grows. None where fewer than two parts of the budget have a trial."""
    same: SameAtBudget | None
    """What all trials have in common. None where they differ at their budget's end."""
    gain_left: NotNegative
    """The gain that is expected of one more point, in units of the metric."""
    gain_left_at_most: NotNegative
    """The gain that is expected if the law were known exactly: no search can expect more."""
    seed_scatter: NotNegative
    """Standard deviation of the metric from seed to seed, in units of the metric."""
    count_error: NotNegative | None = None
    """How well the steps within a budget of seconds are known, USE's beside the baseline's.

    Standard deviation of the log of their ratio; 0.1 is about 10%. None for another budget, without
    a baseline, and where steps were not timed.
    """
