"""Builds a module as it is at the start of its training, under a Trainer, and inspects it.

Its layers, optimizers and schedules are built then. Schedules are stepped ahead to see the learning
rates that they will set.
"""

import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any

from torch.optim import Optimizer

from bstune.core.errors import ConfigError
from bstune.core.metric_names import mode_of
from bstune.core.records import TrialProtocol, TrialSpec
from bstune.system.failures import cause, place_of
from bstune.system.watchdog import waiting_for
from bstune.trial.batches.loader import worker_starts
from bstune.trial.batches.micro_batches import micro_batch_sizes_of
from bstune.trial.checks.schedule_end import ScheduleEnd
from bstune.trial.lightning.installed import (
    Callback,
    LightningModule,
    Trainer,
    seed_everything,
    sized_len,
)
from bstune.trial.lightning.packages import is_overridden
from bstune.trial.lightning.trainer import (
    length_arguments,
    make_trainer,
    without_recording_or_stopping,
)
from bstune.trial.loop import Workload, fit

# The most steps of a schedule that are inspected, which takes under a second.
SCHEDULE_STEPS = 20_000
# The settings of an optimizer: for each parameter group its numbers, by name.
GroupNumbers = list[dict[str, float]]


def depends_on_length(
    workload: Workload, specs: Sequence[TrialSpec], protocol: TrialProtocol
) -> bool:
    """Whether the module's schedules depend on the length of training that its Trainer states.

    The settings at each step under one Trainer are compared with those under another that trains
    twice as long. False where the batches have no end, as then a Trainer states no length.

    ``specs``: trials of several lengths. In one that is no longer than a schedule's warm-up, what
    follows the warm-up is not seen.
    """
    for spec in specs:
        batches = workload.train_batches(spec)
        if sized_len(batches) is None and not getattr(batches, "ends_by_steps", False):
            return False
        steps = protocol.last_step(spec.batch_size)
        settings = rates_ahead(workload, spec, protocol, steps=steps, until=steps)
        # Without a schedule nothing depends on the length.
        if not any(settings):
            return False
        if settings != rates_ahead(workload, spec, protocol, steps=2 * steps, until=steps):
            return True
    return False


def rates_ahead(
    workload: Workload, spec: TrialSpec, protocol: TrialProtocol, steps: int, until: int
) -> list[list[GroupNumbers]]:
    """Step each schedule of a module ahead, and give its optimizer's settings at each step.

    Schedules that look at a metric are left out.

    Args:
        workload: whose module has the schedules.
        spec: of the trial.
        protocol: of the trial.
        steps: the length of the training that the Trainer states, which schedules may read.
        until: optimizer steps that are inspected, but at most ``SCHEDULE_STEPS`` of each schedule.

    Returns:
        For each schedule the settings before its first step and after each one.

    Raises:
        ConfigError: for a schedule that raises an error.
    """
    settings: list[list[GroupNumbers]] = []

    def look(trainer: Trainer, module: LightningModule) -> None:
        settings.extend(_step_through(trainer, module, spec.batch_size, until))

    look_at_start(workload, spec, protocol, steps, look)
    return settings


def _step_through(
    trainer: Trainer, module: LightningModule, batch_size: int, until: int
) -> list[list[GroupNumbers]]:
    """Step each schedule ahead, under a Trainer that is set up and has not begun to train.

    Args:
        trainer: has the schedules.
        module: steps them.
        batch_size: of the trial, for a message.
        until: optimizer steps that are inspected, but at most ``SCHEDULE_STEPS`` of each schedule.

    Returns:
        For each schedule its optimizer's settings before its first step and after each one.

    Raises:
        ConfigError: for a schedule that raises an error.
    """
    settings: list[list[GroupNumbers]] = []
    has_epochs = trainer.num_training_batches != float("inf")
    for config in trainer.lr_scheduler_configs:
        is_stepped = config.interval == "step" or has_epochs
        if is_stepped and not config.reduce_on_plateau:
            settings.append(_settings_ahead(trainer, module, config, batch_size, until))
    _set_counts(trainer, epochs=0, steps=0)
    return settings


def _settings_ahead(
    trainer: Trainer, module: LightningModule, config: Any, batch_size: int, until: int
) -> list[GroupNumbers]:
    """Step one schedule ahead; give its optimizer's settings before its first step and after each.

    ``config`` has the schedule, in Lightning's terms. The other arguments are those of
    :func:`_step_through`.
    """
    by_epoch = config.interval != "step"
    # Optimizer steps from one step of the schedule to the next.
    stride = 1
    if by_epoch:
        batches = int(trainer.num_training_batches)
        stride = max(1, batches // trainer.accumulate_grad_batches)
    settings = [_settings(config.scheduler.optimizer)]
    # The settings above are those of the first optimizer step, so one fewer is left.
    for number in range(1, min(math.ceil(until / stride), SCHEDULE_STEPS)):
        # A schedule of another library may read the Trainer's counts: they go with the steps.
        _set_counts(trainer, epochs=number if by_epoch else 0, steps=number * stride)
        if number % config.frequency == 0:
            try:
                module.lr_scheduler_step(config.scheduler, None)
            except Exception as error:
                # A module that steps its optimizers itself may never step it this often.
                if not module.automatic_optimization:
                    break
                name = type(config.scheduler).__name__
                end = ScheduleEnd(name, step=(number - 1) * stride, error=cause(error))
                text = end.text(type(module).__name__, batch_size, until)
                raise ConfigError(text) from error
        settings.append(_settings(config.scheduler.optimizer))
    return settings


def _set_counts(trainer: Trainer, *, epochs: int, steps: int) -> None:
    """Set the numbers of epochs and optimizer steps that a Trainer counts as done."""
    trainer.fit_loop.epoch_progress.current.completed = epochs
    automatic = trainer.fit_loop.epoch_loop.automatic_optimization
    automatic.optim_progress.optimizer.step.total.completed = steps


def _settings(optimizer: Optimizer) -> GroupNumbers:
    """Give the numbers of an optimizer's parameter groups, which schedules may change.

    A tuple, such as betas, gives each of its numbers by its index: ``betas.0``, ``betas.1``.
    """
    groups = GroupNumbers()
    for group in optimizer.param_groups:
        numbers = dict[str, float]()
        for key, value in group.items():
            # A learning rate may be a tensor.
            if key == "lr" or isinstance(value, int | float):
                numbers[key] = float(value)
            elif isinstance(value, tuple):
                for index, part in enumerate(value):
                    if isinstance(part, int | float):
                        numbers[f"{key}.{index}"] = float(part)
        groups.append(numbers)
    return groups


def at_start(
    workload: Workload, spec: TrialSpec, protocol: TrialProtocol
) -> tuple[LightningModule, Trainer]:
    """Build a module as it is before its first step, and its Trainer.

    Values that the module logs from then on are dropped.
    """
    steps = protocol.last_step(spec.batch_size)
    module, trainer = look_at_start(workload, spec, protocol, steps, lambda trainer, module: None)
    for name in ("log", "log_dict"):
        setattr(module, name, lambda *args, **options: None)
    return module, trainer


def look_at_start(
    workload: Workload,
    spec: TrialSpec,
    protocol: TrialProtocol,
    steps: int,
    look: Callable[..., object],
) -> tuple[LightningModule, Trainer]:
    """Begin to train with all hooks of a trial's start, and end before the first step.

    Args:
        workload: whose module is built.
        spec: of the trial.
        protocol: of the trial.
        steps: the length of the training that the Trainer states, which schedules may read.
        look: is called with the Trainer and the module, once optimizers and layers are there.

    Returns:
        The module and its Trainer.
    """
    seed_everything(spec.seed, workers=False, verbose=False)
    module = workload.build_module(spec)
    check_hooks(module)
    train = workload.train_batches(spec)
    micro_batch_sizes = micro_batch_sizes_of(spec.batch_size, protocol.micro_batch_size)
    trainer = make_trainer(
        without_recording_or_stopping(protocol.trainer),
        module,
        [_AtStart(look)],
        accumulate_grad_batches=len(micro_batch_sizes),
        num_sanity_val_steps=0,
        **length_arguments(train, len(micro_batch_sizes), steps, module.automatic_optimization),
    )
    with warnings.catch_warnings():
        # Schedules are stepped here without their optimizers.
        warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step")
        what = f"the start of {type(module).__name__}'s training"
        with waiting_for(what + worker_starts(train)):
            fit(trainer, workload, module, train, micro_batch_sizes[0])
    return module, trainer


class _AtStart(Callback):
    """Calls a function once optimizers and layers are there; then the training ends."""

    def __init__(self, look: Callable[..., object]) -> None:
        self._look = look

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Call the function, and let the training have no epoch."""
        # It tells the Trainer the length of the data, which schedules may ask for.
        trainer.fit_loop.setup_data()
        self._look(trainer, pl_module)
        trainer.fit_loop.max_epochs = 0


def check_hooks(module: LightningModule, metric: str = "val_loss") -> None:
    """Raise a ConfigError for a module that lacks a method which every trial calls.

    ``metric`` is the name of the metric that it should log in validation.
    """
    name = f"{type(module).__name__}{place_of(type(module))}"
    for hook, advice in (
        ("training_step", "return the loss there"),
        ("configure_optimizers", "return the optimizer there"),
        ("validation_step", how_to_log(metric)),
    ):
        if not is_overridden(hook, module):
            raise ConfigError(f"{name} has no {hook}: {advice}")


def how_to_log(metric: str) -> str:
    """Give the advice how a module logs a metric by which trials are compared, with its code."""
    value = "torch.nn.functional.cross_entropy(self(inputs), labels)"
    if mode_of(metric) == "max":
        value = "(self(inputs).argmax(1) == labels).float().mean()"
    return (
        "a trial ends by a metric that is logged in validation, which the module does so:\n"
        "    def validation_step(self, batch, batch_idx):\n"
        "        inputs, labels = batch\n"
        f"        self.log({metric!r}, {value})"
    )
