"""The target's metric, as a module logs it in an evaluation."""

import math

import numpy as np
import torch
from torch import Tensor

from bstune.core.errors import ConfigError
from bstune.trial.batches.loader import loaders_of
from bstune.trial.lightning.installed import Trainer, sized_len


class LoggedMetric:
    """Reads the target's metric, and tells a new value from that of an earlier evaluation.

    Lightning keeps the last value where an evaluation logs none.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._value_before: Tensor | None = None

    def before_evaluation(self, trainer: Trainer) -> None:
        """Remember the value from before the evaluation that begins."""
        self._value_before = trainer.callback_metrics.get(self._name)

    def is_logged(self, trainer: Trainer) -> bool:
        """Whether there is a value, of this evaluation or of an earlier one."""
        return self._name in trainer.callback_metrics

    def is_from_before(self, trainer: Trainer) -> bool:
        """Whether the value is an earlier one, as this evaluation has logged none.

        A module may log the metric in some evaluations only.
        """
        if self._value_before is None:
            return False
        # Where an evaluation logs the metric, Lightning puts a new tensor in its place.
        return trainer.callback_metrics[self._name] is self._value_before

    def value(self, trainer: Trainer) -> float | None:
        """Give the value; None if it is not finite. A ConfigError says that none was logged."""
        return metric(trainer, self._name)


def metric(trainer: Trainer, name: str) -> float | None:
    """Give the value of the metric after an evaluation; None if it is not finite.

    A ConfigError says that the module has not logged it.
    """
    value = trainer.callback_metrics.get(name)
    if value is None:
        logged = ", ".join(sorted(trainer.callback_metrics)) or "nothing"
        raise ConfigError(
            f"the target's metric is {name!r}, but the module logs {logged} in validation: "
            "set workload.target.metric to one of them, or log it"
        )
    number = float(value.item())
    # In float32 a metric of 0.1 is a little more, and would miss a target of 0.1.
    if value.dtype == torch.float32:
        number = shortest_decimal(number)
    return number if math.isfinite(number) else None


def shortest_decimal(number: float) -> float:
    """Give the shortest decimal number that rounds to a float32.

    A metric of 0.1 in float32 is 0.10000000149, which would miss a target of 0.1.
    """
    return float(str(np.float32(number)))


def mean_loss(loss: object) -> float:
    """Give the mean of the loss that ``training_step`` returned.

    Where that is no tensor it is 0.0, which is finite and so ends no trial.
    """
    if isinstance(loss, Tensor):
        return loss.detach().float().mean().item()
    return 0.0


def checks_all_data(trainer: Trainer) -> bool:
    """Whether a Trainer's sanity check takes all validation data.

    A part of the data, its first batches, may hold one class only.
    """
    lengths = [sized_len(loader) for loader in loaders_of(trainer.val_dataloaders)]
    # Where a length is 0 or not known, no check is taken to read all.
    batches = sum(length or math.inf for length in lengths)
    return sum(trainer.num_sanity_val_batches) >= batches
