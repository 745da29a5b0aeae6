"""The recipe of a workload: functions of a trial's settings that build what is trained."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule


# Names of the argument of a module that is the learning rate.
RATES = ("lr", "learning_rate")


class TrialSettings(Protocol):
    """What the functions of a recipe see; a :class:`bstune.trial.trial.Trial` has them."""

    batch_size: int
    """Examples per applied optimizer step."""
    lr: float
    values: Mapping[str, int | float]
    """Further hyper-parameters of the configuration, by name."""
    seed: int
    max_steps: int
    """The step at which this run stops."""
    total_steps: int
    """The step at which its schedule ends."""


def no_arguments(trial: TrialSettings) -> dict[str, Any]:
    """Add nothing to the Trainer's arguments."""
    return {}


@dataclass(frozen=True)
class Recipe:
    """Builds what is trained, for each trial; it is sent to the worker with cloudpickle.

    Args:
        module: builds a LightningModule of either Lightning package.
        data: builds a LightningDataModule, or a pair of a train and a validation loader.
        trainer: further arguments of Lightning's Trainer, such as ``callbacks``.
        device: ``cpu``, ``cuda``, or ``auto`` for CUDA where there is a device.
        precision: as Lightning's Trainer names it.
        threads: torch's threads; None leaves torch's own number.
    """

    module: "Callable[[TrialSettings], LightningModule]"
    data: Callable[[TrialSettings], Any]
    trainer: Callable[[TrialSettings], dict[str, Any]] = no_arguments
    device: str = "auto"
    precision: str = "32-true"
    threads: int | None = None


def resolve_device(device: str) -> str:
    """Resolve ``auto``, in the worker, which has imported torch: CUDA where there is a device."""
    if device != "auto":
        return device
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"
