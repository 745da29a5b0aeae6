"""The steps of a fit without the calls that nobody listens to, where nobody can tell the difference.

Around each step Lightning calls some thirty hooks of the module, the call-backs, the strategy and the precision
plug-in, which mostly do nothing; with small networks that takes longer than the step. :class:`LeanLoop` does in their
order only the things that have an effect: whatever a module, an optimizer, a schedule or a call-back of bstune's can
see, counters, epochs and logged values too, is as it is in Lightning's own loop, and so are weights and histories, bit
for bit. Evaluations, checkpoints, the ends of epochs, and where a resumed fit goes on are Lightning's own code. Where
somebody listens to the steps, or a step is of another kind, Lightning's loop takes all of them, and ``name`` says why.

It knows the inside of Lightning's loop, so it is for the versions that it was compared with alone.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from importlib import import_module
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor
from torch._C._autograd import _profiler_enabled
from torch.optim import LBFGS, Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from bstune.core.records import FastMode
from bstune.trial.batches import TrainBatches
from bstune.trial.fast.graph import CapturedSteps, captures
from bstune.trial.trainer import NoProfiler, is_overridden, of_package, package_of

TRIED = (
    "2.6.0",
    "2.6.6",
)  # of either package: between the two no line of what is replaced here has changed
LEAN, GRAPH = "lean", "graph"
BATCH_HOOKS = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")
MODULE_HOOKS = (
    *(
        "on_train_batch_start",
        "on_train_batch_end",
        "on_before_zero_grad",
        "optimizer_zero_grad",
        "on_before_backward",
    ),
    *(
        "backward",
        "on_after_backward",
        "on_before_optimizer_step",
        "configure_gradient_clipping",
        "clip_gradients",
    ),
    *("optimizer_step", "lr_scheduler_step", *BATCH_HOOKS),
)
CALLED = (
    "on_train_batch_start",
    "on_after_backward",
    "on_train_batch_end",
)  # of bstune's own call-backs
CALLBACK_HOOKS = (*CALLED, "on_before_zero_grad", "on_before_backward", "on_before_optimizer_step")
PRECISIONS = (
    "Precision",
    "MixedPrecision",
    "HalfPrecision",
    "DoublePrecision",
)  # Lightning's, for one device
LABELLED = Optimizer.profile_hook_step(
    lambda: None
).__code__  # of what torch puts around an optimizer's step


class LeanLoop:
    """Takes the steps of a Trainer's fit, from the first one on, in place of Lightning's loop where it can.

    Args:
        trainer: which has not begun to train.
        mode: ``auto``, ``off`` for Lightning's loop in any case, or ``graph`` for steps that are captured on CUDA, too.
        around: makes a context for what captures them, which is no step of the training.
        start: is called ahead of the first of some steps that follow one another, where this loop takes them.

    Attributes:
        take_step: from a batch and its number in the epoch to what Lightning hands to ``on_train_batch_end``: forward
            and backward pass and the optimizer's step; it is called between the hooks.
    """

    take_step: Callable[[Any, int], dict[str, Any]]

    def __init__(
        self,
        trainer: Any,
        mode: FastMode,
        around: Callable[[], AbstractContextManager[Any]] = nullcontext,
        start: Callable[[], object] = lambda: None,
    ) -> None:
        self._mode, self._around, self._start = mode, around, start
        self._captured: CapturedSteps | None = None
        self._trainer, self._epoch_loop = trainer, trainer.fit_loop.epoch_loop
        self._began = False
        self._reason = f"protocol.fast={mode}" if mode == "off" else None
        self._advance_as_lightning = self._epoch_loop.advance
        if self._reason is None:
            self._epoch_loop.advance = self._begin

    @property
    def name(self) -> str | None:
        """``lean`` or ``graph``, or that another loop took the steps and why; None where no step was begun."""
        if self._reason is not None:
            return f"Lightning's: {self._reason}"
        if self._captured is not None:
            return (
                GRAPH
                if self._captured.reason is None
                else f"{LEAN}, not {GRAPH}: {self._captured.reason}"
            )
        return LEAN if self._began else None

    @property
    def runs(self) -> bool:
        """Whether it has taken steps, and goes on."""
        return self._began and self._reason is None

    def _begin(self, fetcher: Any) -> None:
        """Choose the loop, once a fit: at its first step everything is set up, and has been called at the start."""
        loop, trainer, module = self._epoch_loop, self._trainer, self._trainer.lightning_module
        del loop.advance
        self._began, self._reason = True, why_not(trainer, module, fetcher)
        if self._reason is None:
            self._prepare(trainer, module, fetcher)
            loop.advance = self._advance
            # With bstune's profiler, they do nothing.
            loop._on_before_fetch = loop._on_after_fetch = fetcher._start_profiler = (
                fetcher._stop_profiler
            ) = _nothing
        loop.advance(fetcher)

    def _prepare(self, trainer: Any, module: LightningModule, fetcher: Any) -> None:
        loop, package = self._epoch_loop, package_of(module)
        self._module, self._names, self._strategy = module, vars(module), trainer.strategy
        self._device, self._logged = trainer.strategy.root_device, loop._results
        self._connector = trainer._logger_connector
        plain = type(trainer.precision_plugin).__name__ == "Precision"
        self._converted: Callable[[Any], Any] | None = (
            None if plain else trainer.precision_plugin.convert_input
        )
        self._context: Callable[[], AbstractContextManager[Any]] | None = (
            None if plain else trainer.precision_plugin.train_step_context
        )
        of = partial(of_package, package)
        self._takes_index = of("utilities.signature_utils.is_param_in_hook_signature")
        self._closure_class = of("loops.optimization.automatic.Closure")
        self._result_class = of("loops.optimization.automatic.ClosureResult")
        # Lightning makes a batch ahead of the step before it, to see an end, and the step then finds it in no cache.
        # bstune's own have no end, and draw from generators of their own.
        loaders, iterator = fetcher.combined_loader.flattened, fetcher.iterator._iterator
        own = len(loaders) == 1 and type(loaders[0]) is TrainBatches
        self._stream: Iterator[Any] | None = iterator.iterators[0] if own else None
        self._hooks = {
            name: [
                getattr(callback, name)
                for callback in trainer.callbacks
                if _overrides(callback, name)
            ]
            for name in CALLED
        }
        self._optimizer_progress = loop.automatic_optimization.optim_progress.optimizer
        self._zero_grad_progress = (
            self._optimizer_progress.zero_grad.total,
            self._optimizer_progress.zero_grad.current,
        )
        self._clips = bool(trainer.gradient_clip_val)
        self._step_function: Any = None
        self._batch: tuple[Any, ...] = ()
        self._optimizer: Any = None
        self._step_of_object: Any = None  # as it was when this was found:
        self._quiet_step: Callable[..., Any] | None = (
            None  # the optimizer's, without its label and its hooks
        )
        self._outputs: Any = None
        self.take_step = self._take_step
        if captures(self._mode, self._device):
            optimizer = trainer.strategy.optimizers[0]
            self.take_step = self._captured = CapturedSteps(
                module, optimizer, self._take_step, self._around
            )

    def _advance(self, fetcher: Any) -> None:
        """Train up to a batch after which Lightning may have something to do, as its own loop does with one."""
        loop, trainer = self._epoch_loop, self._trainer
        if loop.restarting:
            self._advance_as_lightning(fetcher)
            return
        if loop.val_loop.restarting:
            loop.val_loop.restarting = False
        self._start()
        if self._captured is not None:
            self._captured.look_again()
        progress, steps = loop.batch_progress, self._optimizer_progress.step.total
        total, current = progress.total, progress.current
        while True:
            self._train_on_batch(fetcher)
            every = trainer.val_check_batch
            if (
                trainer.should_stop
                or progress.is_last_batch
                or total.ready % every == 0
                or current.ready % every == 0
                or 0 <= loop.max_steps <= steps.completed
                or current.ready >= trainer.num_training_batches
                or trainer.received_sigterm
            ):
                return
            loop._batches_that_stepped += 1

    def _train_on_batch(self, fetcher: Any) -> None:
        loop, trainer, module, hooks = self._epoch_loop, self._trainer, self._module, self._hooks
        progress, logged = loop.batch_progress, self._logged
        total, current = progress.total, progress.current
        if self._stream is None:
            batch = next(fetcher)[0]
        else:
            batch = fetcher.batches.pop()[0] if fetcher.batches else next(self._stream)
        if batch is None:  # is skipped there
            self._advance_as_lightning(_Fetched(fetcher))
            return
        progress.is_last_batch = fetcher.done
        index: int = current.ready
        batch = self._moved(batch if self._converted is None else self._converted(batch))
        total.ready += 1
        current.ready += 1
        # What its on_batch_start does.
        self._connector._first_loop_iter = self._connector._first_loop_iter is None
        logged.batch, logged.batch_size, logged.dataloader_idx = batch, None, None
        for hook in hooks["on_train_batch_start"]:
            hook(trainer, module, batch, index)
        total.started += 1
        current.started += 1
        steps = self._optimizer_progress.step
        steps.total.ready += 1
        steps.current.ready += 1
        outputs = self.take_step(batch, index)
        steps.total.completed += 1
        steps.current.completed += 1
        total.processed += 1
        current.processed += 1
        self._step_schedules(index + 1)
        for hook in hooks["on_train_batch_end"]:
            hook(trainer, module, outputs, batch, index)
        if logged:
            self._connector.on_batch_end()
        else:
            logged.batch = logged.batch_size = None
        total.completed += 1
        current.completed += 1
        if logged:
            self._connector.update_train_step_metrics()

    def _moved(self, batch: Any) -> Any:
        """Return a batch on the device: one that is there already in a container of its own, as Lightning makes it."""
        kind = type(batch)
        if kind is tuple or kind is list:
            for one in batch:
                if type(one) is not Tensor or one.device != self._device:
                    break
            else:
                return kind(batch)
        batch = self._module._on_before_batch_transfer(batch, dataloader_idx=0)
        return self._strategy.batch_to_device(batch, dataloader_idx=0)

    def _take_step(self, batch: Any, index: int) -> dict[str, Any]:
        optimizer = self._strategy.optimizers[0]
        of_object = vars(optimizer)
        if optimizer is not self._optimizer or of_object.get("step") is not self._step_of_object:
            self._optimizer, self._step_of_object = optimizer, of_object.get("step")
            self._quiet_step = _without_label(optimizer)
        function = self._module.training_step
        if function != self._step_function:
            self._step_function, self._indexed = (
                function,
                self._takes_index(function, "batch_idx", min_args=2),
            )
        self._batch, self._outputs = (batch, index) if self._indexed else (batch,), None
        self._names["_current_fx_name"] = "optimizer_step"  # what self.log() is called in
        # The optimizer calls it: some do so several times, or change the weights before.
        if self._quiet_step is None:
            optimizer.step(closure=self._closure)
        else:
            _step_without_label(self._quiet_step, optimizer, closure=self._closure)
        self._names["_current_fx_name"] = None
        outputs: dict[str, Any] | None = self._outputs
        self._outputs, self._batch = None, ()
        if outputs is None:
            raise RuntimeError(
                f"{type(optimizer).__name__}.step() does not call the closure that it is given"
            )
        return outputs

    def _closure(self) -> Tensor | None:
        """Run the forward pass and the backward pass; return the loss without its graph."""
        if not torch.is_grad_enabled():  # by the optimizer
            with torch.enable_grad():
                return self._closure()
        names, optimizer = self._names, self._optimizer
        names["_current_fx_name"] = "training_step"
        if self._context is None:
            output = self._step_function(*self._batch)
        else:
            with self._context():
                output = self._step_function(*self._batch)
        names["_current_fx_name"] = "optimizer_step"
        loss: Tensor | None
        if isinstance(output, Tensor):
            loss, outputs = output, {"loss": output.detach()}
            if not output.is_cpu:  # where a CUDA graph of torch.compile's may write to it again
                outputs["loss"] = outputs["loss"].clone()
        else:
            result = self._result_class.from_training_step_output(output)
            loss, outputs = result.closure_loss, {} if result.loss is None else result.asdict()
            if loss is None:
                self._closure_class(lambda: result).closure()  # warns
        total, current = self._zero_grad_progress
        total.ready += 1
        current.ready += 1
        total.started += 1
        current.started += 1
        names["_current_fx_name"] = "optimizer_zero_grad"
        _forget_gradients(optimizer)
        names["_current_fx_name"] = "optimizer_step"
        total.completed += 1
        current.completed += 1
        if loss is not None:
            names["_current_fx_name"] = "backward"
            loss.backward()
            for hook in self._hooks["on_after_backward"]:
                hook(self._trainer, self._module)
            names["_current_fx_name"] = "optimizer_step"
        if self._clips:
            trainer = self._trainer
            algorithm = trainer.gradient_clip_algorithm or "norm"
            trainer.precision_plugin.clip_gradients(optimizer, trainer.gradient_clip_val, algorithm)
        self._outputs = outputs
        return outputs.get("loss")

    def _step_schedules(self, batches: int) -> None:
        """Step the schedules that are due after so many batches of the epoch."""
        loop = self._epoch_loop
        for config in self._strategy.lr_scheduler_configs:
            if config.interval == "step" and batches % config.frequency == 0:
                progress = loop.scheduler_progress
                progress.increment_ready()
                self._names["_current_fx_name"] = "lr_scheduler_step"
                config.scheduler.step()
                self._names["_current_fx_name"] = None
                progress.increment_completed()
        if loop.batch_progress.is_last_batch or batches == self._trainer.num_training_batches:
            loop.update_lr_schedulers("epoch", update_plateau_schedulers=False)


def _nothing() -> None:
    pass


def _without_label(optimizer: Optimizer) -> Callable[..., Any] | None:
    """Return the step of an optimizer's class as it was written; None where it may be another one that is called.

    Around it torch puts a label for its profiler and the calls of hooks, which take longer than a small step, and a
    schedule puts, in the optimizer itself, a function that notes the call.
    """
    of_class, of_object = type(optimizer).step, vars(optimizer).get("step")
    if getattr(of_class, "__code__", None) is not LABELLED:
        return None
    if of_object is not None:
        if (
            not hasattr(of_object, "_wrapped_by_lr_sched")
            or getattr(of_object, "__wrapped__", None) is not of_class
        ):
            return None
        optimizer._opt_called = True  # type: ignore[attr-defined]
    step: Callable[..., Any] = of_class.__wrapped__  # type: ignore[attr-defined]
    return step


def _forget_gradients(optimizer: Optimizer) -> None:
    """Call ``zero_grad``; where it is torch's, do what that does, without its label for the profiler."""
    if (
        type(optimizer).zero_grad is not Optimizer.zero_grad
        or "zero_grad" in vars(optimizer)
        or _profiler_enabled()
    ):
        optimizer.zero_grad()
        return
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = None


def _step_without_label(step: Callable[..., Any], optimizer: Optimizer, **options: Any) -> None:
    """Take a step and call its hooks as torch does, but for its label, unless torch's profiler runs."""
    if optimizer._optimizer_step_pre_hooks or _global_optimizer_pre_hooks or _profiler_enabled():
        optimizer.step(**options)
        return
    step(optimizer, **options)
    for hooks in (optimizer._optimizer_step_post_hooks, _global_optimizer_post_hooks):
        for hook in hooks.values():
            hook(optimizer, (optimizer,), options)


class _Fetched:
    """A data fetcher that has fetched a batch that is None."""

    def __init__(self, fetcher: Any) -> None:
        self.done = fetcher.done

    def __next__(self) -> tuple[None, int, int]:
        return None, 0, 0


def why_not(trainer: Any, module: LightningModule, fetcher: object) -> str | None:
    """Return why Lightning's own loop is to take the steps of a fit; None where the lean one does the same."""
    return next(_reasons(trainer, module, fetcher), None)


def _reasons(trainer: Any, module: LightningModule, fetcher: object) -> Iterator[str]:
    package, strategy, precision = package_of(module), trainer.strategy, trainer.precision_plugin
    of, version = partial(of_package, package), import_module(package).__version__
    if version not in TRIED:
        yield f"{package} {version} is not one of the versions that it was compared with, {' and '.join(TRIED)}"
    if not module.automatic_optimization:
        yield "manual optimization"
    if len(trainer.optimizers) != 1:
        yield f"{len(trainer.optimizers)} optimizers"
    for optimizer in trainer.optimizers:
        wrapped = isinstance(optimizer, LBFGS | of("core.optimizer.LightningOptimizer"))
        if wrapped or not isinstance(optimizer, Optimizer):
            yield f"the optimizer {type(optimizer).__name__}"
    if trainer.accumulate_grad_batches != 1:
        yield "accumulation of micro-batches"
    if trainer.world_size != 1:
        yield f"{trainer.world_size} devices"
    if type(strategy) is not of("strategies.SingleDeviceStrategy") or strategy.model is not module:
        yield f"the strategy {type(strategy).__name__}"
    if getattr(precision, "scaler", None) is not None:
        yield "a gradient scaler"
    if type(precision) not in [of(f"plugins.precision.{name}") for name in PRECISIONS]:
        yield f"the precision plug-in {type(precision).__name__}"
    if any(config.reduce_on_plateau for config in trainer.lr_scheduler_configs):
        yield "a schedule by metrics"
    if type(fetcher) is not of("loops.fetchers._PrefetchDataFetcher"):
        yield "training_step takes dataloader_iter"
    if not isinstance(trainer.profiler, NoProfiler):
        yield f"the profiler {type(trainer.profiler).__name__}"
    yield from _overridden(module, MODULE_HOOKS)
    if trainer.datamodule is not None:
        yield from _overridden(trainer.datamodule, BATCH_HOOKS)
    for callback in trainer.callbacks:
        ours = type(callback).__module__.startswith("bstune.")
        yield from _overridden(
            callback, [name for name in CALLBACK_HOOKS if not (ours and name in CALLED)]
        )


def _overridden(thing: object, hooks: "list[str] | tuple[str, ...]") -> Iterator[str]:
    for name in hooks:
        if _overrides(thing, name):
            yield f"{type(thing).__name__} has {name}"


def _overrides(thing: object, name: str) -> bool:
    try:
        return is_overridden(name, thing)
    except AttributeError:  # an object that is called in the method's place
        return True
