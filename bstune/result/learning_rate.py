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
    """Trials there that reached the target."""
    octaves: NotNegative
    """Between the smallest and the largest batch size of these trials."""
    identified: bool
    """Whether they narrow the prior, over enough of the range."""
    rules: dict[Text, Real]
    """The exponent that each scaling rule has there."""


class LearningRateLaw(Exponent, frozen=True):
    """How the best learning rate grows: over the whole range, and below the critical batch size."""

    below_b_crit: Exponent | None
    """None where that range is too short."""
    level: Level
    """Nominal coverage of the intervals."""
