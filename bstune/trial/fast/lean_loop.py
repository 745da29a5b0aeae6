"""The lean loop: takes the steps of a fit without the calls of hooks that do nothing.

Around each step Lightning calls some thirty hooks of the module, the call-backs, the strategy and
the precision plug-in, most of which do nothing. With small networks that takes longer than the
step. :class:`LeanLoop` makes only the calls that have an effect, in their order. All that a module,
an optimizer, a schedule or a call-back of bstune's can see is as in Lightning's own loop, counters,
epochs and logged values too. So are weights and histories, bit for bit. Evaluations, checkpoints,
the ends of epochs, and the start of a resumed fit are Lightning's own code. Where a hook does
something, or a step is of another kind, Lightning's loop takes all steps, and ``name`` says why
(:mod:`bstune.trial.fast.reasons`).

Methods here do the work of functions of Lightning, which their docstrings name. They are for those
versions alone that they were compared with (:mod:`bstune.trial.lightning.internals`).
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from bstune.core.records import LIGHTNINGS_LOOP, FastMode
from bstune.trial.batches.image_batches import TrainBatches
from bstune.trial.fast.graph import CapturedSteps, captures
from bstune.trial.fast.optimizer_step import OptimizerStep, remove_gradients
from bstune.trial.fast.reasons import has_hook, why_not
from bstune.trial.lightning.installed import LightningModule
from bstune.trial.lightning.internals import (
    CurrentHook,
    begin_batch,
    connector_of_loggers,
    count_step_for_loggers,
    iterators_of,
    leave_out_profiler,
    results_of_training,
    transferred_by_hooks,
)
from bstune.trial.lightning.packages import of_package, package_of

LEAN = "lean"
GRAPH = "graph"


class LeanLoop:
    """Takes the steps of a Trainer's fit in place of Lightning's loop, where it can.

    Args:
        trainer: which has not begun to train.
        mode: ``auto`` for this loop, ``graph`` to capture its steps on CUDA too, ``off`` for
            Lightning's loop.
        around: makes a context within which steps are captured, such as one that stops the
            training's clock.
        start: is called each time before the loop takes some steps in a row.
    """

    def __init__(
        self,
        trainer: Any,
        mode: FastMode,
        around: Callable[[], AbstractContextManager[object]],
        start: Callable[[], object],
    ) -> None:
        self._trainer = trainer
        self._epoch_loop = trainer.fit_loop.epoch_loop
        self._mode = mode
        self._capture_context = around
        self._start = start
        self._advance_as_lightning = self._epoch_loop.advance
        # None before the first step, and where Lightning's loop takes the steps.
        self._steps: LeanSteps | None = None
        # Why Lightning's loop takes the steps; None: it does not.
        self._reason: str | None = None
        if mode == "off":
            self._reason = f"protocol.fast={mode}"
        else:
            self._epoch_loop.advance = self._begin

    @property
    def name(self) -> str | None:
        """``lean`` or ``graph``, or which loop took the steps instead and why.

        None where no step was begun.
        """
        if self._reason is not None:
            return f"{LIGHTNINGS_LOOP}{self._reason}"
        if self._steps is None:
            return None
        captured = self._steps.captured
        if captured is None:
            return LEAN
        if captured.reason is not None:
            return f"{LEAN}, not {GRAPH}: {captured.reason}"
        return GRAPH

    @property
    def runs(self) -> bool:
        """Whether it takes the fit's steps in place of Lightning's loop; False before the first."""
        return self._steps is not None

    def _begin(self, fetcher: Any) -> None:
        """Choose the loop at the first step of a fit, when all is set up, and take that step.

        At that step Lightning calls this in place of its own loop's ``advance``.
        """
        loop = self._epoch_loop
        module = self._trainer.lightning_module
        # The loop's own method is back in force, unless the lean loop replaces it below.
        del loop.advance
        self._reason = why_not(self._trainer, module, fetcher)
        if self._reason is None:
            self._steps = LeanSteps(self._trainer, module, fetcher, self._advance_as_lightning)
            # In mode ``graph`` on CUDA a step is captured, as a CUDA graph, and the steps after it
            # replay that. The capture itself is no training: it has a context of its own.
            if captures(self._mode, self._trainer.strategy.root_device):
                self._steps.capture(self._capture_context)
            loop.advance = self._advance
            leave_out_profiler(loop, fetcher)
        loop.advance(fetcher)

    def _advance(self, fetcher: Any) -> None:
        """Take steps up to one after which Lightning may have something to do.

        Lightning calls this in place of its ``_TrainingEpochLoop.advance``, which takes one step.
        Between two steps Lightning would look at ``done`` and call ``on_advance_end``. Of the
        latter only the count of steps for the loggers is needed here.
        """
        loop = self._epoch_loop
        steps = self._steps
        # A resumed fit may begin with an evaluation in place of a step: Lightning's advance tells.
        if steps is None or loop.restarting:
            self._advance_as_lightning(fetcher)
            return
        # As in Lightning's advance: an evaluation that comes after a training step begins anew.
        if loop.val_loop.restarting:
            loop.val_loop.restarting = False
        # The caller's function: it starts the clock of the training.
        self._start()
        # Hooks of Lightning have run since the last step, and may have changed the module.
        if steps.captured is not None:
            steps.captured.check_module_at_next_step()
        steps.train_on_batch(fetcher)
        while not self._lightning_may_have_work():
            count_step_for_loggers(loop)
            steps.train_on_batch(fetcher)

    def _lightning_may_have_work(self) -> bool:
        """Whether Lightning may have to validate after this batch, or to end the epoch or fit."""
        trainer = self._trainer
        loop = self._epoch_loop
        progress = loop.batch_progress
        ready = progress.current.ready
        every = trainer.val_check_batch
        applied = loop.automatic_optimization.optim_progress.optimizer.step.total.completed
        # Lightning validates by one of two counts of batches, as check_val_every_n_epoch says. Here
        # either count hands over to it: to hand over too often changes nothing.
        return bool(
            trainer.should_stop
            or progress.is_last_batch
            or progress.total.ready % every == 0
            or ready % every == 0
            or 0 <= loop.max_steps <= applied
            or ready >= trainer.num_training_batches
            or trainer.received_sigterm
        )


class LeanSteps:
    """Takes the steps of a fit as Lightning's loop does, without the hooks that do nothing.

    Args:
        trainer: of the fit.
        module: that it trains.
        fetcher: fetches the batches.
        advance_as_lightning: takes a step with a fetcher as Lightning's loop does.

    Attributes:
        captured: captures steps and replays them; None: every step is run as it is.
    """

    def __init__(
        self,
        trainer: Any,
        module: LightningModule,
        fetcher: Any,
        advance_as_lightning: Callable[[Any], None],
    ) -> None:
        self._trainer = trainer
        self._module = module
        self._advance_as_lightning = advance_as_lightning
        self._epoch_loop = trainer.fit_loop.epoch_loop
        self._progress = self._epoch_loop.automatic_optimization.optim_progress.optimizer
        self._strategy = trainer.strategy
        self._device = trainer.strategy.root_device
        self._hook = CurrentHook(module)
        self._results = results_of_training(trainer)
        self._connector = connector_of_loggers(trainer)
        self._batch_start_hooks = _hooks(trainer, "on_train_batch_start")
        self._after_backward_hooks = _hooks(trainer, "on_after_backward")
        self._batch_end_hooks = _hooks(trainer, "on_train_batch_end")
        package = package_of(module)
        self._takes_index = of_package(
            package, "utilities.signature_utils.is_param_in_hook_signature"
        )
        self._closure_class = of_package(package, "loops.optimization.automatic.Closure")
        self._result_class = of_package(package, "loops.optimization.automatic.ClosureResult")
        # In single precision the plug-in leaves batches and steps as they are.
        self._precision: Any = None
        if type(trainer.precision_plugin).__name__ != "Precision":
            self._precision = trainer.precision_plugin
        self._clips = bool(trainer.gradient_clip_val)
        # The iterator of bstune's own batches; None: the fetcher gives the batches.
        self._stream = _endless_iterator(fetcher)
        self._optimizer_step = OptimizerStep()
        # The module's training_step at the last step, and whether it takes the batch's number.
        self._training_step: Any = None
        self._takes_batch_idx = False
        # The arguments of training_step and its outputs, in the step that is being taken.
        self._arguments: tuple[Any, ...] = ()
        self._outputs: dict[str, Any] | None = None
        self.captured: CapturedSteps | None = None
        # Takes the optimizer's step on a batch, given its number in the epoch, and gives the
        # outputs that Lightning hands to ``on_train_batch_end``.
        self._take: Callable[[Any, int], dict[str, Any]] = self._take_step

    def capture(self, around: Callable[[], AbstractContextManager[object]]) -> None:
        """From here on capture steps as CUDA graphs and replay them, where that is possible.

        ``around`` makes a context for each capture, such as one that stops the training's clock.
        """
        optimizer = self._strategy.optimizers[0]
        self.captured = CapturedSteps(self._module, optimizer, self._take_step, around)
        self._take = self.captured

    def train_on_batch(self, fetcher: Any) -> None:
        """Take the next step with the counters and hooks of Lightning's epoch loop.

        It does what ``_TrainingEpochLoop.advance`` does.
        """
        progress = self._epoch_loop.batch_progress
        total = progress.total
        current = progress.current
        batch = self._next_batch(fetcher)
        # Lightning skips a batch that is None.
        if batch is None:
            self._advance_as_lightning(_FetchedNone(fetcher))
            return
        progress.is_last_batch = fetcher.done
        index: int = current.ready
        batch = self._batch_on_device(batch)
        total.ready += 1
        current.ready += 1
        begin_batch(self._connector, self._results, batch)
        for hook in self._batch_start_hooks:
            hook(self._trainer, self._module, batch, index)
        total.started += 1
        current.started += 1
        steps = self._progress.step
        steps.total.ready += 1
        steps.current.ready += 1
        outputs = self._take(batch, index)
        steps.total.completed += 1
        steps.current.completed += 1
        total.processed += 1
        current.processed += 1
        self._step_schedules(index + 1)
        for hook in self._batch_end_hooks:
            hook(self._trainer, self._module, outputs, batch, index)
        # Where nothing is logged, only the reference to the batch is dropped.
        logged = self._results
        if logged:
            self._connector.on_batch_end()
        else:
            logged.batch = None
            logged.batch_size = None
        total.completed += 1
        current.completed += 1
        if logged:
            self._connector.update_train_step_metrics()

    def _next_batch(self, fetcher: Any) -> Any:
        """Take the next batch, as Lightning's ``_PrefetchDataFetcher.__next__`` does."""
        if self._stream is None:
            return next(fetcher)[0]
        # bstune's own endless batches are made only now. Those that Lightning's loop has fetched
        # ahead come first.
        if fetcher.batches:
            return fetcher.batches.pop()[0]
        return next(self._stream)

    def _batch_on_device(self, batch: Any) -> Any:
        """Give a batch on the device, in a new tuple or list as Lightning makes it.

        Hooks move the batch, unless all its tensors are on the device already.
        """
        if self._precision is not None:
            batch = self._precision.convert_input(batch)
        kind = type(batch)
        if (kind is tuple or kind is list) and self._are_on_device(batch):
            return kind(batch)
        return transferred_by_hooks(self._strategy, self._module, batch)

    def _are_on_device(self, parts: Iterable[object]) -> bool:
        """Whether all parts of a batch are plain tensors on the device."""
        return all(type(part) is Tensor and part.device == self._device for part in parts)

    def _take_step(self, batch: object, index: int) -> dict[str, Any]:
        """Take the optimizer's step on a batch, as Lightning's ``_AutomaticOptimization.run`` does.

        ``index`` is the batch's number in the epoch. The outputs for the hooks are returned.
        """
        training_step = self._module.training_step
        if training_step != self._training_step:
            self._training_step = training_step
            # Lightning also takes the second of two parameters for the index, whatever its name.
            self._takes_batch_idx = self._takes_index(training_step, "batch_idx", min_args=2)
        self._arguments = (batch, index) if self._takes_batch_idx else (batch,)
        self._outputs = None
        optimizer = self._strategy.optimizers[0]
        self._hook.enter("optimizer_step")
        self._optimizer_step.take(optimizer, self._closure)
        self._hook.enter(None)
        outputs: dict[str, Any] | None = self._outputs
        self._outputs = None
        self._arguments = ()
        if outputs is None:
            raise RuntimeError(
                f"{type(optimizer).__name__}.step() does not call the closure that it is given"
            )
        return outputs

    def _closure(self) -> Tensor | None:
        """Run the forward and the backward pass, and return the loss without its graph.

        It does what Lightning's ``Closure.closure`` does. None where the step has no loss.
        """
        # An optimizer may have switched gradients off around its step.
        if not torch.is_grad_enabled():
            with torch.enable_grad():
                return self._closure()
        # Around each hook it is noted which one runs, as ``self.log`` asks for it.
        hook = self._hook
        optimizer = self._optimizer_step.optimizer
        hook.enter("training_step")
        if self._precision is None:
            output = self._training_step(*self._arguments)
        else:
            with self._precision.train_step_context():
                output = self._training_step(*self._arguments)
        hook.enter("optimizer_step")
        loss, outputs = self._loss_of(output)
        zero_grad = self._progress.zero_grad
        zero_grad.total.ready += 1
        zero_grad.current.ready += 1
        zero_grad.total.started += 1
        zero_grad.current.started += 1
        hook.enter("optimizer_zero_grad")
        remove_gradients(optimizer)
        hook.enter("optimizer_step")
        zero_grad.total.completed += 1
        zero_grad.current.completed += 1
        if loss is not None:
            hook.enter("backward")
            loss.backward()  # type: ignore[no-untyped-call]
            for after_backward in self._after_backward_hooks:
                after_backward(self._trainer, self._module)
            hook.enter("optimizer_step")
        if self._clips:
            trainer = self._trainer
            algorithm = trainer.gradient_clip_algorithm or "norm"
            trainer.precision_plugin.clip_gradients(optimizer, trainer.gradient_clip_val, algorithm)
        self._outputs = outputs
        return outputs.get("loss")

    def _loss_of(self, output: Any) -> tuple[Tensor | None, dict[str, Any]]:
        """Split the output of ``training_step``, as ``ClosureResult`` does.

        Returns:
            The loss with its graph (None where there is none), and the outputs for the hooks.
        """
        if isinstance(output, Tensor):
            detached = output.detach()
            # The hooks get a copy, as a CUDA graph of torch.compile's may write to the tensor
            # again.
            if not output.is_cpu:
                detached = detached.clone()
            return output, {"loss": detached}
        result = self._result_class.from_training_step_output(output)
        loss: Tensor | None = result.closure_loss
        # Lightning's closure warns that there is no loss.
        if loss is None:
            self._closure_class(lambda: result).closure()
        outputs = dict[str, Any]()
        if result.loss is not None:
            outputs = result.asdict()
        return loss, outputs

    def _step_schedules(self, batches: int) -> None:
        """Step the schedules that are due after ``batches`` batches of the epoch.

        It does what Lightning's ``update_lr_schedulers`` does.
        """
        loop = self._epoch_loop
        for config in self._strategy.lr_scheduler_configs:
            if config.interval == "step" and batches % config.frequency == 0:
                progress = loop.scheduler_progress
                progress.increment_ready()
                self._hook.enter("lr_scheduler_step")
                config.scheduler.step()
                self._hook.enter(None)
                progress.increment_completed()
        if loop.batch_progress.is_last_batch or batches == self._trainer.num_training_batches:
            loop.update_lr_schedulers("epoch", update_plateau_schedulers=False)


def _hooks(trainer: Any, name: str) -> list[Callable[..., object]]:
    """List the methods ``name`` of those call-backs that do something in this hook."""
    return [getattr(callback, name) for callback in trainer.callbacks if has_hook(callback, name)]


def _endless_iterator(fetcher: Any) -> Iterator[Any] | None:
    """Find the iterator of bstune's own batches; None where the batches are others.

    Bstune's have no end and draw from generators of their own, so they are made just before their
    step. Lightning would make each one step earlier, to see whether it is the last, and the step
    would then find it in no cache.
    """
    loaders = fetcher.combined_loader.flattened
    if len(loaders) != 1 or type(loaders[0]) is not TrainBatches:
        return None
    return iterators_of(fetcher)[0]


class _FetchedNone:
    """Stands for the data fetcher, so that Lightning takes a batch that was None and skips it."""

    def __init__(self, fetcher: Any) -> None:
        self.done = fetcher.done

    def __next__(self) -> tuple[None, int, int]:
        return None, 0, 0
