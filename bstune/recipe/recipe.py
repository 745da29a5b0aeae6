"""The recipe of a workload: functions of a trial's settings that build what is trained."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Literal, Protocol

from bstune.core.errors import InputError

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule


# Both are Lightning.
PACKAGES = ("lightning.pytorch", "pytorch_lightning")
# Arguments of the Trainer that are options here.
OF_TRAINER = {"precision": "precision", "accelerator": "device", "devices": "devices"}


class TrialSettings(Protocol):
    """What the functions of a recipe see; a :class:`bstune.trial.trial.Trial` has them."""

    batch_size: int
    """Examples per applied optimizer step."""
    lr: float
    values: Mapping[str, int | float]
    """Further hyper-parameters of the configuration, by name."""
    seed: int
    first_step: int
    """The steps of the trial that it resumes."""
    total_steps: int
    """The step at which its schedule ends."""
    is_building: bool
    """Whether a module is being built with further values."""


def settings_of(
    batch_size: int | None,
    lr: float | None,
    steps: int,
    seed: int = 0,
    values: Mapping[str, int | float] | None = None,
) -> TrialSettings:
    """What a recipe builds for, where nothing is reported.

    A batch size or a rate that is None is left to the project's own default.
    """
    trial: Any = SimpleNamespace(
        batch_size=batch_size,
        lr=lr,
        values=values or {},
        seed=seed,
        first_step=0,
        total_steps=steps,
    )
    return trial  # type: ignore[no-any-return]


def epoch_examples(examples: int | None, batch_size: int, limit: float) -> int | None:
    """Examples of an epoch, as the Trainer's ``limit_train_batches`` counts them.

    Args:
        examples: of the training set; None, as the result: a stream does not tell.
        batch_size: in examples.
        limit: batches of that size (an int), or a share of all (a float); at least one is left.
    """
    if examples is None:
        return limit * batch_size if isinstance(limit, int) else None
    if limit == 1.0 and isinstance(limit, float):
        return examples
    whole = examples // batch_size
    batches = min(limit, whole) if isinstance(limit, int) else int(limit * whole)
    return max(batches, 1) * batch_size


def value_of_today(name: str, value: Any) -> int | float | None:
    """A further value that the project has; None where it has none.

    InputError for what is no number, such as a tuple or True: it cannot be tuned.
    """
    if value is None or value is inspect.Parameter.empty:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InputError(
            f"tune={name} must name a number, but the project has {name}={value!r:.60}: name an "
            f"argument that is one, and build that of it"
        )
    return value


@dataclass(frozen=True)
class Recipe:
    """Builds what is trained, for each trial; it is sent to the worker with cloudpickle.

    Args:
        module: builds a LightningModule of either Lightning package.
        data: builds a LightningDataModule, or a pair of a train and a validation loader.
        data_follows: whether it does for the trial's batch size: a training loader whose batches
            cannot be replaced is then used as it is.
        trainer: further arguments of Lightning's Trainer, such as ``callbacks``.
        device: ``cpu``, ``cuda``, or ``auto`` for CUDA where there is a device.
        precision: as Lightning's Trainer names it, or ``auto``.
        threads: torch's threads; None leaves torch's own number.
        compile: the mode of torch.compile; None: eager.
        micro_batch_size: examples that a device takes at once, of a batch that is larger
            accumulated; None: the whole batch.
        devices: that share each batch equally.
        noise_scale: measure the gradient noise scale as well.
        override_lr: put the trial's rate into the optimizers' groups.
        validation_batch_size: of each validation batch; ``trial``: the trial's; None: the loader's
            own.
        own_values: gives the further values that are used today, by name; None: it does not tell.
            The rate, where it is told so, is ``lr``. InputError for one that nothing takes.
        algorithm: builds what makes an optimizer of parameter groups, in place of the module's own;
            None: that stays.
        schedule: builds what makes a schedule of an optimizer, stepped each step, likewise.
    """

    module: "Callable[[TrialSettings], LightningModule]"
    data: Callable[[TrialSettings], Any]
    trainer: Callable[[TrialSettings], dict[str, Any]] = lambda trial: {}
    device: str = "auto"
    precision: str = "32-true"
    threads: int | None = None
    compile: str | None = None
    micro_batch_size: int | None = None
    devices: int = 1
    noise_scale: bool = False
    override_lr: bool = False
    validation_batch_size: Literal["trial"] | None = None
    data_follows: bool = False
    own_values: "Callable[[], dict[str, int | float | None]]" = dict
    algorithm: Callable[[TrialSettings], Any] = lambda trial: None
    schedule: Callable[[TrialSettings], Any] = lambda trial: None


def resolve_device(device: str) -> str:
    """Resolve ``auto``, in the worker, which has imported torch: CUDA where there is a device."""
    if device != "auto":
        return device
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def resolve_precision(precision: str, device: str) -> str:
    """Resolve ``auto``, in the worker: bf16-mixed on a CUDA device that has it, else 16-mixed.

    Args:
        precision: as Lightning's Trainer names it, or ``auto``.
        device: ``cpu`` or ``cuda``. On a CPU ``auto`` is 32-true.

    Raises:
        InputError: the device cannot do it.
    """
    if device == "cpu":
        if precision == "16-mixed":
            raise InputError("precision=16-mixed needs CUDA: on a CPU give precision=bf16-mixed")
        return "32-true" if precision == "auto" else precision
    import torch

    has_bfloat16 = torch.cuda.is_bf16_supported(including_emulation=False)
    if precision.startswith("bf16") and not has_bfloat16:
        raise InputError(
            f"precision={precision}, but {torch.cuda.get_device_name()} has no bfloat16: give "
            f"precision=16-mixed"
        )
    if precision == "auto":
        return "bf16-mixed" if has_bfloat16 else "16-mixed"
    return precision
