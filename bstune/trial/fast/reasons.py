"""Finds a reason why Lightning's own loop has to take the steps of a fit, not the lean loop.

A hook does something at the steps, or they are of a kind that the lean loop does not know.
"""

from collections.abc import Iterable, Iterator
from typing import Any

from torch.optim import LBFGS, Optimizer

from bstune.trial.lightning.installed import LightningModule
from bstune.trial.lightning.internals import fetches_batches, version_not_tried
from bstune.trial.lightning.packages import is_overridden, of_package, package_of
from bstune.trial.lightning.trainer import BATCH_HOOKS, NoProfiler

# Hooks of a module that the lean loop does not call.
MODULE_HOOKS = (
    "on_train_batch_start",
    "on_train_batch_end",
    "on_before_zero_grad",
    "optimizer_zero_grad",
    "on_before_backward",
    "backward",
    "on_after_backward",
    "on_before_optimizer_step",
    "configure_gradient_clipping",
    "clip_gradients",
    "optimizer_step",
    "lr_scheduler_step",
    *BATCH_HOOKS,
)
# The hooks of a step that the lean loop calls, in bstune's own call-backs alone.
CALLED = ("on_train_batch_start", "on_after_backward", "on_train_batch_end")
# All hooks of a call-back at a step.
CALLBACK_HOOKS = (*CALLED, "on_before_zero_grad", "on_before_backward", "on_before_optimizer_step")
# Lightning's precision plug-ins that the lean loop knows.
PRECISION_PLUGINS = ("Precision", "MixedPrecision", "HalfPrecision", "DoublePrecision")


def why_not(trainer: Any, module: LightningModule, fetcher: object) -> str | None:
    """Give the first reason why Lightning's own loop has to take the steps of a fit.

    None where the lean loop gives the same results.
    """
    return next(_reasons(trainer, module, fetcher), None)


def _reasons(trainer: Any, module: LightningModule, fetcher: object) -> Iterator[str]:
    """Yield every reason why Lightning's own loop has to take the steps, in a few words each."""
    package = package_of(module)
    not_tried = version_not_tried(package)
    if not_tried is not None:
        yield not_tried
    yield from _reasons_of_optimizers(trainer, module, package)
    if trainer.accumulate_grad_batches != 1:
        yield "accumulation of micro-batches"
    if trainer.world_size != 1:
        yield f"{trainer.world_size} devices"
    strategy = trainer.strategy
    single = of_package(package, "strategies.SingleDeviceStrategy")
    if type(strategy) is not single or strategy.model is not module:
        yield f"the strategy {type(strategy).__name__}"
    precision = trainer.precision_plugin
    if getattr(precision, "scaler", None) is not None:
        yield "a gradient scaler"
    known = [of_package(package, f"plugins.precision.{name}") for name in PRECISION_PLUGINS]
    if type(precision) not in known:
        yield f"the precision plug-in {type(precision).__name__}"
    if any(config.reduce_on_plateau for config in trainer.lr_scheduler_configs):
        yield "a schedule by metrics"
    if not fetches_batches(package, fetcher):
        yield "training_step takes dataloader_iter"
    if not isinstance(trainer.profiler, NoProfiler):
        yield f"the profiler {type(trainer.profiler).__name__}"
    yield from _reasons_of_hooks(trainer, module)


def _reasons_of_optimizers(trainer: Any, module: LightningModule, package: str) -> Iterator[str]:
    """Yield why Lightning's own loop has to take the steps, as far as the optimizers ask for it."""
    if not module.automatic_optimization:
        yield "manual optimization"
    if len(trainer.optimizers) != 1:
        yield f"{len(trainer.optimizers)} optimizers"
    lightnings = of_package(package, "core.optimizer.LightningOptimizer")
    for optimizer in trainer.optimizers:
        # LBFGS calls its closure several times a step; a LightningOptimizer's step calls Lightning.
        is_unknown = isinstance(optimizer, LBFGS | lightnings)
        if is_unknown or not isinstance(optimizer, Optimizer):
            yield f"the optimizer {type(optimizer).__name__}"


def _reasons_of_hooks(trainer: Any, module: LightningModule) -> Iterator[str]:
    """Yield, as reasons against the lean loop, the hooks of a step that somebody has overridden.

    They are the module's, the data module's and the call-backs'.
    """
    yield from _overridden(module, MODULE_HOOKS)
    if trainer.datamodule is not None:
        yield from _overridden(trainer.datamodule, BATCH_HOOKS)
    for callback in trainer.callbacks:
        # The lean loop itself calls some hooks of bstune's own call-backs: those are no reason.
        is_bstunes = type(callback).__module__.startswith("bstune.")
        hooks: Iterable[str] = CALLBACK_HOOKS
        if is_bstunes:
            hooks = [name for name in CALLBACK_HOOKS if name not in CALLED]
        yield from _overridden(callback, hooks)


def _overridden(owner: object, hooks: Iterable[str]) -> Iterator[str]:
    """Yield those of some hooks in which a module, data module or call-back does something."""
    for name in hooks:
        if has_hook(owner, name):
            yield f"{type(owner).__name__} has {name}"


def has_hook(owner: object, hook: str) -> bool:
    """Whether a module, data module or call-back does something in a hook."""
    try:
        return is_overridden(hook, owner)
    # A callable object without the attributes of a function stands in the method's place.
    except AttributeError:
        return True
