"""How the best learning rate grows with the batch size."""

from bstune.result.values import Count, Level, NotNegative, Part, Positive, Real, Text


class Exponent(Part, frozen=True):
    """The exponent of the best learning rate over the batch size, within a range of these."""

    exponent: Real
    """Median over the posterior."""
    low: Real
    """Lower end of its interval."""
    high: Real
    """Upper end of its interval."""
    prior_low: Real
    """Lower end of the prior's interval."""
    prior_high: Real
    """Upper end of the prior's interval."""
    start: Positive
    """Smallest batch size of the range, in examples."""
    end: Positive
    """Largest batch size of the range, in examples."""
    reached: Count
    """Trials in this range that reached the target."""
    octaves: NotNegative
    """Octaves between the smallest and the largest batch size of these trials."""
    identified: bool
    """Whether these trials span enough of the range, and narrow the prior."""
    rules: dict[Text, Real]
    """The exponent of each scaling rule over this range, by the rule's name."""


class LearningRateLaw(Exponent, frozen=True):
    """How the best learning rate grows: over the whole range, and below the critical batch size."""

    below_b_crit: Exponent | None
    """The exponent below the critical batch size. None where that range is too short."""
    level: Level
    """Nominal coverage of the intervals."""
