"""Scaling rules: from a batch size to a learning rate, through a baseline (B0, lr0).

A rule is the prior mean of lr*(B) in the search, never a constraint.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from bstune.core.errors import InputError


@dataclass(frozen=True)
class ScalingRule:
    """A rule, by its formula.

    Args:
        growth: lr(B)/lr0 at a batch size B, the baseline's B0 and a noise scale B_noise, all in
            examples, numbers or arrays.
        turns: whether it turns at B_noise; a power of B does not.
    """

    growth: Callable[[Any, Any, Any], Any]
    turns: bool = False


def _around(share: Any) -> Any:
    """What the rate of ``surge`` is divided by, at a share of the noise scale."""
    return share**0.5 + share**-0.5


RULES = {
    "none": ScalingRule(lambda b, b0, b_noise: (b / b0) ** 0.0),
    # Krizhevsky 2014 (arXiv 1404.5997); Malladi et al. 2022 (arXiv 2205.10287) for Adam.
    "sqrt": ScalingRule(lambda b, b0, b_noise: (b / b0) ** 0.5),
    # Goyal et al. 2017 (arXiv 1706.02677).
    "linear": ScalingRule(lambda b, b0, b_noise: b / b0),
    # McCandlish et al. 2018 (arXiv 1812.06162), eq. 2.6.
    "saturating": ScalingRule(
        lambda b, b0, b_noise: (1.0 + b_noise / b0) / (1.0 + b_noise / b), turns=True
    ),
    # Li et al. 2024 (arXiv 2405.14578), for Adam.
    "surge": ScalingRule(
        lambda b, b0, b_noise: _around(b0 / b_noise) / _around(b / b_noise), turns=True
    ),
}
# Of optimizers other than SGD, and where the optimizer is not known.
DEFAULT_RULE = "sqrt"

# The name of one of them.
if TYPE_CHECKING:
    Rule = str
else:
    Rule = Literal[tuple(RULES)]


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
        rule: a name of :data:`RULES`.
        batch_size: B, in examples.
        baseline: (B0, lr0).
        noise_scale: B_noise, in examples, which a rule that turns needs; the critical batch size
            stands for it.

    Raises:
        InputError: for an unknown rule, a noise scale that is missing, and what is not positive.
    """
    if not isinstance(rule, str) or rule not in RULES:
        raise InputError(f"scaling must be one of {', '.join(RULES)}, but got {rule!r}")
    if RULES[rule].turns and noise_scale is None:
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
    return float(lr_today * RULES[rule].growth(size, size_today, noise))


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
    batch_sizes: tuple[float, float],
    baseline: float,
    noise_scale: float | None,
) -> tuple[str, ...]:
    """The rules that an interval of lr*(B)'s exponent allows, both ends included.

    Args:
        exponent_low, exponent_high: of the exponent over ``batch_sizes``.
        batch_sizes: a smaller and a larger one; of a rule its slope between them counts.
        baseline: B0, through which the rules go.
        noise_scale: of the rules that turn; without it they are left out.
    """
    low, high = batch_sizes
    allowed = []
    for name, rule in RULES.items():
        if rule.turns and noise_scale is None:
            continue
        at_low, at_high = (rule.growth(size, baseline, noise_scale) for size in batch_sizes)
        slope = math.log(at_high / at_low, high / low)
        if exponent_low <= slope <= exponent_high:
            allowed.append(name)
    return tuple(allowed)
