"""Weights micro-batches so that they accumulate to the gradient of a large batch."""

import functools
from collections.abc import Mapping, Sequence
from typing import Any

from bstune.core.errors import ConfigError
from bstune.trial.devices import distributed
from bstune.trial.lightning.installed import LightningModule


def cannot_accumulate(module_name: str, devices: int = 1) -> ConfigError:
    """Make the error about a module that steps its optimizers itself, and so cannot accumulate.

    ``devices``: that were to share its batches.
    """
    impossible = "accumulated from micro-batches"
    instead = "protocol.micro_batch_size=null"
    if devices > 1:
        impossible = "split over devices"
        instead = "devices=1"
    return ConfigError(
        f"{module_name} steps its optimizers itself (manual optimization), so its "
        f"batches cannot be {impossible}: set {instead}"
    )


def weight_micro_batches(
    module: LightningModule, micro_batch_sizes: Sequence[int], batch_size: int
) -> None:
    """Weight the loss of micro-batch i by n_i/B, so that gradients add up to the large batch's.

    Args:
        module: whose training step is replaced.
        micro_batch_sizes: n_i, of each micro-batch of a batch, on this device.
        batch_size: B, the sum of all n_i over all devices.

    Raises:
        ConfigError: for a module that steps its optimizers itself.
    """
    devices = distributed.count()
    if not module.automatic_optimization:
        raise cannot_accumulate(type(module).__name__, devices)
    count = len(micro_batch_sizes)
    step = module.training_step

    @functools.wraps(step)
    def weighted(*args: Any, **kwargs: Any) -> Any:
        output = step(*args, **kwargs)
        # The weight makes up for Lightning, which divides each of the k losses by k, and for DDP,
        # which divides the gradients' sum by the number of devices. The micro-batch's number comes
        # from the Trainer, as a step need not take it.
        micro_batch_size = micro_batch_sizes[module.trainer.fit_loop.batch_idx % count]
        weight = devices * count * micro_batch_size / batch_size
        if isinstance(output, Mapping):
            return {**output, "loss": output["loss"] * weight}
        # A step may return nothing, which Lightning passes over.
        if output is None:
            return None
        return output * weight

    module.training_step = weighted  # type: ignore[method-assign]
