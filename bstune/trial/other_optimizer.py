"""Another optimizer or schedule in place of a module's own: the options algorithm and schedule."""

from collections.abc import Callable
from importlib import import_module
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from bstune.core.errors import InputError
from bstune.trial.trainer import base_rates, package_of


class OtherOptimizer(Callback):
    """Replaces the optimizer, the schedule, or both, that a module has configured.

    A fit has one where the option ``algorithm`` or ``schedule`` is given; it acts once, as the fit
    starts. Each group of parameters keeps its rate; another optimizer alone has its rates moved by
    the module's own schedule.

    Args:
        algorithm: makes an optimizer of parameter groups; None: the module's own stays.
        schedule: makes a schedule of an optimizer, which is stepped each step; likewise.

    Raises:
        InputError: the module has several optimizers, or steps them itself.
    """

    def __init__(
        self,
        algorithm: Callable[[list[Any]], Optimizer] | None,
        schedule: Callable[[Optimizer], Any] | None,
    ) -> None:
        self._algorithm = algorithm
        self._schedule = schedule

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Put what was made in the place of what the module has configured."""
        optimizers = trainer.optimizers
        if len(optimizers) != 1 or not pl_module.automatic_optimization:
            how = "" if pl_module.automatic_optimization else " that it steps itself"
            raise InputError(
                f"algorithm and schedule replace those of one optimizer that Lightning steps, but "
                f"{type(pl_module).__name__} has {len(optimizers)}{how}: leave them out"
            )
        own = new = optimizers[0]
        configs = trainer.strategy.lr_scheduler_configs
        rates = base_rates(own)
        if self._algorithm is not None:
            groups = [group["params"] for group in own.param_groups]
            pairs = zip(groups, rates, strict=True)
            new = self._algorithm([{"params": params, "lr": rate} for params, rate in pairs])
            trainer.optimizers = [new]
        if self._schedule is not None:
            for group, rate in zip(new.param_groups, rates, strict=True):
                group |= {"lr": rate, "initial_lr": rate}
            types = import_module(f"{package_of(pl_module)}.utilities.types")
            config = types.LRSchedulerConfig(self._schedule(new), interval="step")
            trainer.strategy.lr_scheduler_configs = [config]
        elif new is not own and configs:
            _copy_group_settings(own, new)
            for config in configs:
                _bind_schedule(config.scheduler, new)


def _copy_group_settings(own: Optimizer, new: Optimizer) -> None:
    """Give an optimizer's groups what a schedule of another one has put there."""
    # Its constructor lets the optimizer tell its steps, which torch's schedules ask for.
    LambdaLR(new, lambda step: 1.0)
    for group, of_own in zip(new.param_groups, own.param_groups, strict=True):
        kept = {name: value for name, value in group.items() if name not in ("lr", "initial_lr")}
        group |= of_own | kept


def _bind_schedule(scheduler: Any, optimizer: Optimizer) -> None:
    """Let a schedule, and those that it is made of, move the rates of another optimizer."""
    scheduler.optimizer = optimizer
    for inner in getattr(scheduler, "_schedulers", ()):
        _bind_schedule(inner, optimizer)
