"""Scaling rules: from a batch size to a learning rate, through a baseline (B0, lr0).

A rule is the prior mean of lr*(B) in the search, never a constraint.
"""

import math
from typing import Any, Literal, get_args

from bstune.core.errors import InputError

Rule = Literal["none", "sqrt", "linear", "saturating", "surge"]
# The power of B that a rule is; the other rules turn at the noise scale.
EXPONENTS: dict[str, float] = {
    "none": 0.0,
    "sqrt": 0.5,  # Krizhevsky 2014 (arXiv 1404.5997); Malladi et al. 2022 (2205.10287) for Adam
    "linear": 1.0,  # Goyal et al. 2017 (arXiv 1706.02677)
}
# Of optimizers other than SGD, and where the optimizer is not known.
DEFAULT_RULE: Rule = "sqrt"


def needs_noise_scale(rule: str) -> bool:
    """Whether a rule turns at a noise scale; InputError for an unknown one."""
    if rule not in get_args(Rule):
        raise InputError(f"scaling must be one of {', '.join(get_args(Rule))}, but got {rule!r}")
    return rule not in EXPONENTS


def divisor(rule: str, ratio: Any) -> Any:
    """What divides a rule's highest rate, up to a constant, at B_noise/B, numbers or arrays.

    ``saturating`` is lr_max/(1 + B_noise/B) (McCandlish et al. 2018, arXiv 1812.06162, eq. 2.6),
    ``surge`` lr_max/(1/2 (sqrt(B_noise/B) + sqrt(B/B_noise))) (Li et al. 2024, arXiv 2405.14578).
    The others are powers of B, at any noise scale.
    """
    if rule == "saturating":
        return 1.0 + ratio
    if rule == "surge":
        return ratio**0.5 + ratio**-0.5
    return ratio ** EXPONENTS[rule]


def lr_of(
    rule: str,
    batch_size: float,
    baseline: tuple[float, float],
    noise_scale: float | None = None,
) -> float:
    """The learning rate of a rule that goes through a baseline.

    >>> from bstune import lr_of
    >>> round(lr_of("sqrt", 256, (64, 0.1)), 3)
    0.2
    >>> round(lr_of("saturating", 256, (64, 0.1), noise_scale=128), 3)
    0.2

    Args:
        rule: ``none``, ``sqrt``, ``linear``, ``saturating`` or ``surge``.
        batch_size: B, in examples.
        baseline: (B0, lr0).
        noise_scale: B_noise, in examples, at which ``saturating`` and ``surge`` turn; the critical
            batch size stands for it.

    Raises:
        InputError: for an unknown rule, a noise scale that is missing, and what is not positive.
    """
    if needs_noise_scale(rule) and noise_scale is None:
        raise InputError(
            f"noise_scale is missing: scaling={rule} turns at it; give it in examples, or the "
            f"critical batch size in its place"
        )
    try:
        baseline_batch_size, baseline_lr = baseline
    except (TypeError, ValueError) as error:
        raise InputError(
            f"baseline must be (batch size, learning rate), but got {baseline!r:.100}"
        ) from error
    size = _positive("batch_size", batch_size)
    size_today = _positive("baseline's batch size", baseline_batch_size)
    lr_today = _positive("baseline's lr", baseline_lr)
    noise = 1.0 if noise_scale is None else _positive("noise_scale", noise_scale)
    at_baseline = divisor(rule, noise / size_today)
    return float(lr_today * at_baseline / divisor(rule, noise / size))


def _positive(name: str, value: Any) -> float:
    """A positive finite number; InputError for another value."""
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not 0.0 < number < math.inf:
        raise InputError(f"{name} must be a positive number, but got {value!r:.100}")
    return number


def allowed_rules(
    exponent_low: float,
    exponent_high: float,
    batch_sizes: tuple[float, float] | None = None,
    noise_scale: float | None = None,
) -> tuple[str, ...]:
    """The rules that an interval of lr*(B)'s exponent allows, both ends included.

    Args:
        exponent_low, exponent_high: of the exponent over ``batch_sizes``.
        batch_sizes: the smallest and the largest. ``saturating`` and ``surge`` are no powers: what
            counts is their slope between these.
        noise_scale: at which they turn; without it, or one batch size alone, they are left out.
    """
    slopes = dict(EXPONENTS)
    if batch_sizes is not None and noise_scale is not None and batch_sizes[0] < batch_sizes[1]:
        low, high = batch_sizes
        for rule in ("saturating", "surge"):
            growth = lr_of(rule, high, (low, 1.0), noise_scale)
            slopes[rule] = math.log(growth) / math.log(high / low)
    return tuple(rule for rule, slope in slopes.items() if exponent_low <= slope <= exponent_high)
