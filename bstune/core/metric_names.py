"""What the names of metrics tell: which way is better, and which of several is the loss."""

import re
from collections.abc import Collection
from typing import TYPE_CHECKING

from bstune.core.errors import ConfigError

# A target takes its mode from here.
if TYPE_CHECKING:
    from bstune.core.records import Mode, Target

# Words in the name of a metric that say which way is better.
LESS_IS_BETTER = (
    "loss",
    "error",
    "err",
    "mse",
    "rmse",
    "mae",
    "nll",
    "bce",
    "ce",
    "xent",
    "perplexity",
    "ppl",
)
MORE_IS_BETTER = (
    "acc",
    "accuracy",
    "f1",
    "auc",
    "auroc",
    "precision",
    "recall",
    "iou",
    "dice",
    "r2",
)
LOSS = "loss"
# A value of a metric of at most so many may be a percentage.
PERCENT = 100.0


def mode_of(metric: str) -> "Mode | None":
    """Tell which way a metric is better by the words of its name; None where they do not tell."""
    words = set(re.split(r"[^a-z0-9]+", metric.lower()))
    is_less = bool(words.intersection(LESS_IS_BETTER))
    is_more = bool(words.intersection(MORE_IS_BETTER))
    if is_less == is_more:
        return None
    if is_less:
        return "min"
    return "max"


def fraction_meant(target: "Target", start: float, closest: float) -> float | None:
    """Give a target in percent as a fraction, where its metric looks like one; None elsewhere.

    Args:
        target: of the study.
        start: the metric at first. One that lies beyond the fraction is of another scale.
        closest: the metric where it came closest to the target. At 0 it tells nothing of its scale.
    """
    fraction = target.value / PERCENT
    is_percentage = target.mode == "max" and 1.0 < target.value <= PERCENT
    is_share = 0.0 <= start < fraction and 0.0 < closest <= 1.0
    return fraction if is_percentage and is_share else None


def choose_loss(metrics: Collection[str]) -> str | None:
    """Choose which of a validation's metrics is the loss; None where the names do not tell.

    It is the only metric; else the shortest name with "loss" in it, as Lightning logs ``val_loss``
    as ``val_loss_epoch``, too; else the only metric of which less is better.
    """
    if len(metrics) == 1:
        return next(iter(metrics))
    losses = [metric for metric in metrics if LOSS in metric.lower()]
    if losses:
        return min(losses, key=lambda metric: (len(metric), metric))
    falling = [metric for metric in metrics if mode_of(metric) == "min"]
    if len(falling) == 1:
        return falling[0]
    return None


def parse_target(text: str, option: str = "--target") -> "tuple[str, float, Mode]":
    """Read metric, value and mode of a target, such as ``val_loss<=0.1`` or ``val_acc=0.9``.

    Raises:
        ConfigError: for another text, or if neither the sign nor the metric's name says which way
            is better; it names the ``option``.
    """
    parts = re.fullmatch(r"\s*([^<>=\s]+)\s*(<=|>=|=)\s*(\S+)\s*", text)
    try:
        if parts is None:
            raise ValueError
        value = float(parts[3])
    except ValueError as error:
        raise ConfigError(
            f"{option} must be a metric and a number, such as val_loss=0.1, 'val_loss<=0.1' or "
            f"'val_acc>=0.9', but got {text}"
        ) from error
    metric = parts[1]
    modes: dict[str, Mode | None] = {"<=": "min", ">=": "max", "=": mode_of(metric)}
    mode = modes[parts[2]]
    if mode is None:
        raise ConfigError(
            f"{option} {text}: the name {metric} does not say which way is better: correct it, or "
            f"write '{metric}<={value:g}' or '{metric}>={value:g}', in quotes"
        )
    return metric, value, mode
