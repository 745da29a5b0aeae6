"""Scaling rules: from a batch size to a learning rate, through a baseline (B0, lr0).

A rule is the prior mean of lr*(B) in the search, never a constraint.
"""

from typing import Literal, get_args

from bstune.core.errors import InputError

Rule = Literal["none", "sqrt", "linear"]
# The power of B that each rule is.
EXPONENTS: dict[str, float] = {
    "none": 0.0,
    "sqrt": 0.5,  # Krizhevsky 2014 (arXiv 1404.5997); Malladi et al. 2022 (2205.10287) for Adam
    "linear": 1.0,  # Goyal et al. 2017 (arXiv 1706.02677)
}


def allowed_rules(exponent_low: float, exponent_high: float) -> tuple[str, ...]:
    """The rules whose power of B lies in an interval of the exponent of lr*(B)."""
    return tuple(
        rule for rule, power in EXPONENTS.items() if exponent_low <= power <= exponent_high
    )


def lr_of(rule: str, batch_size: float, baseline: tuple[float, float]) -> float:
    """The learning rate of a rule, lr0 (B/B0)^exponent.

    Args:
        rule: ``none``, ``sqrt`` or ``linear``; InputError for another.
        batch_size: B, over 0.
        baseline: (B0, lr0).
    """
    if rule not in EXPONENTS:
        raise InputError(f"scaling must be one of {', '.join(get_args(Rule))}, but got {rule!r}")
    baseline_batch_size, baseline_lr = baseline
    return float(baseline_lr * (batch_size / baseline_batch_size) ** EXPONENTS[rule])
