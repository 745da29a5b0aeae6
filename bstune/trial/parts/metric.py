"""The target's metric, as a module logs it in an evaluation."""

import math

import numpy as np
import torch
from torch import Tensor

from bstune.core.errors import ConfigError
from bstune.trial.batches.loader import loaders_of
from bstune.trial.lightning.installed import Trainer, sized_len


class LoggedMetric:
    """Tells what an evaluation has logged from what an earlier one has.

    Lightning keeps the last value.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._before: Tensor | None = None

    def before_evaluation(self, trainer: Trainer) -> None:
        """Note the value from before the evaluation that begins."""
        self._before = trainer.callback_metrics.get(self._name)

    def is_logged(self, trainer: Trainer) -> bool:
        """Say whether there is a value, of this evaluation or of an earlier one."""
        return self._name in trainer.callback_metrics

    def is_from_before(self, trainer: Trainer) -> bool:
        """Say whether this evaluation has logged none: a module may log in some of them alone."""
        return self._before is not None and trainer.callback_metrics[self._name] is self._before

    def value(self, trainer: Trainer) -> float | None:
        """Give the value, None if it is not finite; a ConfigError says that none was logged."""
        return metric(trainer, self._name)


def metric(trainer: Trainer, name: str) -> float | None:
    """Give the value of the metric after an evaluation, None if it is not finite."""
    value = trainer.callback_metrics.get(name)
    if value is None:
        logged = ", ".join(sorted(trainer.callback_metrics)) or "nothing"
        raise ConfigError(
            f"the target's metric is {name!r}, but the module logs {logged} in validation: "
            "set workload.target.metric to one of them, or log it"
        )
    number = float(value.item())
    if value.dtype == torch.float32:
        number = shortest_decimal(number)
    return number if math.isfinite(number) else None


def shortest_decimal(number: float) -> float:
    """Give the shortest decimal that rounds to a float32.

    0.1 in float32 is 0.10000000149, and misses <= 0.1.
    """
    return float(str(np.float32(number)))


def mean_loss(loss: object) -> float:
    """Give the mean of what ``training_step`` returned as its loss.

    0.0 where that is no tensor.
    """
    if isinstance(loss, Tensor):
        return loss.detach().float().mean().item()
    return 0.0


def checks_all_data(trainer: Trainer) -> bool:
    """Say whether a Trainer's sanity check takes all validation data.

    The first batches may hold one class only.
    """
    lengths = [sized_len(loader) for loader in loaders_of(trainer.val_dataloaders)]
    # Of a length that is 0 or not known no check takes all.
    batches = sum(length or math.inf for length in lengths)
    return sum(trainer.num_sanity_val_batches) >= batches
