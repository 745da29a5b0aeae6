"""Scaling rules: from a batch size to a learning rate, through a reference pair (B0, lr0).

A rule changes the learning rate alone. The search never trusts one: its variable is delta = log2(lr
/ rule(B)). What else may follow the batch size, if it is asked for, are decays: an average's, or a
weight's, whose half-life is kept in examples.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

from bstune.core.errors import ConfigError

# A rule once its reference (and noise scale, where it takes one) is bound.
ScalingRule = Callable[[float], float]


def none(batch_size: float, reference_batch_size: float, reference_lr: float) -> float:
    """Keep the learning rate of the reference, lr0, at every batch size."""
    return reference_lr


def sqrt(batch_size: float, reference_batch_size: float, reference_lr: float) -> float:
    """Scale by lr0 (B/B0)^1/2 (Krizhevsky 2014; the usual choice for Adam, Malladi et al. 2022)."""
    return reference_lr * math.sqrt(batch_size / reference_batch_size)


def linear(batch_size: float, reference_batch_size: float, reference_lr: float) -> float:
    """Scale by lr0 B/B0 (Goyal et al. 2017)."""
    return reference_lr * batch_size / reference_batch_size


def saturating(
    batch_size: float, reference_batch_size: float, reference_lr: float, noise_scale: float | None
) -> float:
    """Scale linearly below the noise scale, and hardly above it.

    The rate is lr_max / (1 + B_noise/B), with lr_max such that rule(B0) = lr0 (McCandlish et al.
    2018, eq. 2.6).
    """
    noise = _noise_scale(noise_scale, "saturating")
    return reference_lr * (1 + noise / reference_batch_size) / (1 + noise / batch_size)


def surge(
    batch_size: float, reference_batch_size: float, reference_lr: float, noise_scale: float | None
) -> float:
    """Scale for sign-like optimizers such as Adam (Li et al. 2024, arXiv 2405.14578).

    The rate is lr_max / (0.5 (sqrt(B_noise/B) + sqrt(B/B_noise))), with lr_max such that rule(B0) =
    lr0. It rises as the square root, peaks at the noise scale and falls above it.
    """
    noise = _noise_scale(noise_scale, "surge")

    def hill(batch: float) -> float:
        """Compute twice what divides the highest rate: it is least at the noise scale."""
        return math.sqrt(noise / batch) + math.sqrt(batch / noise)

    return reference_lr * hill(reference_batch_size) / hill(batch_size)


@dataclass(frozen=True)
class NamedRule:
    """A rule as a user names it.

    Args:
        lr: the rule, a function of a batch size, the reference's batch size and rate, and a noise
            scale where ``exponent`` is None.
        words: what texts call it.
        exponent: the power of B that the rule is; None: it is no power.
    """

    lr: Callable[..., float]
    words: str
    exponent: float | None

    @property
    def takes_noise_scale(self) -> bool:
        """Whether the rule has a noise scale, in examples, where it turns."""
        return self.exponent is None


# Every rule that ships, by its name. A new one stands here and in a file of conf/scaling/.
RULES = {
    "none": NamedRule(none, "a constant rate", exponent=0.0),
    "sqrt": NamedRule(sqrt, "the square root", exponent=0.5),
    "linear": NamedRule(linear, "linear scaling", exponent=1.0),
    "saturating": NamedRule(saturating, "the saturating rule", exponent=None),
    "surge": NamedRule(surge, "the surge rule", exponent=None),
}


def lr_of(
    rule: str,
    batch_size: float,
    reference_batch_size: float,
    reference_lr: float,
    noise_scale: float | None = None,
) -> float:
    """Scale a learning rate to another batch size, from a pair that goes together.

    >>> round(lr_of("sqrt", 512, 64, 0.1), 3)
    0.283
    >>> round(lr_of("saturating", 512, 64, 0.1, noise_scale=200), 3)
    0.297

    Args:
        rule: the name of one of ``RULES``.
        batch_size: the batch size to which the rate is scaled, in examples.
        reference_batch_size: the batch size of the pair, in examples.
        reference_lr: the learning rate of the pair, which the rule keeps.
        noise_scale: in examples; a rule that ``takes_noise_scale`` needs it.

    Raises:
        ConfigError: for an unknown rule, a noise scale that is missing, and what is not positive.
    """
    named = RULES.get(rule)
    if named is None:
        raise ConfigError(f"the scaling rule must be one of {', '.join(RULES)}, but got {rule!r}")
    positive: dict[str, float | None] = {
        "batch size": batch_size,
        "reference batch size": reference_batch_size,
        "learning rate": reference_lr,
        "noise scale": noise_scale,
    }
    for name, value in positive.items():
        if value is not None and not (math.isfinite(value) and value > 0):
            raise ConfigError(f"the {name} must be a positive number, but got {value:g}")
    if named.takes_noise_scale:
        return named.lr(batch_size, reference_batch_size, reference_lr, noise_scale)
    return named.lr(batch_size, reference_batch_size, reference_lr)


def beta2_of(batch_size: float, half_life: float) -> float:
    """Compute Adam's beta2 at a batch size that keeps a half-life, both in examples.

    beta2 = 2^(-B/half_life) is the decay of the squared gradients. At small B a fixed beta2 forgets
    too soon (Marek et al. 2025, arXiv 2507.07101, section 3). Porian et al. 2024, arXiv 2406.19146,
    found that it is the reason why Adam does badly there.
    """
    return math.exp2(-batch_size / half_life)


def shrinkage_of(batch_size: float, half_life: float) -> float:
    """Compute the fraction by which a step shrinks a weight without gradient: 1 - 2^(-B/half_life).

    Batch size and half-life are in examples. Divided by the learning rate it is the weight decay
    (Wang and Aitchison 2024, arXiv 2405.13698: the time scale 1/(lr x weight_decay) is to be kept,
    in epochs).
    """
    return -math.expm1(-batch_size / half_life * math.log(2.0))


def effective_lr_of(lr: float, momentum: float, dampening: float = 0.0) -> float:
    """Compute the rate at which a gradient acts over all steps: lr (1 - dampening)/(1 - momentum).

    Source: Shallue et al. 2018.
    """
    # torch's SGD dampens nothing without a momentum.
    if not momentum:
        return lr
    return lr * (1.0 - dampening) / (1.0 - momentum)


def _noise_scale(noise_scale: float | None, rule: str) -> float:
    """Check that a rule which needs a noise scale has one, and give it back."""
    if noise_scale is None:
        raise ConfigError(
            f"the scaling rule {rule} needs a noise scale: give one in examples with "
            "scaling.noise_scale=N, or choose scaling=sqrt, scaling=linear or scaling=none"
        )
    return noise_scale
