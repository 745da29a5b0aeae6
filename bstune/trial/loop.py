"""One trial: a Lightning Trainer trains a workload at one batch size, learning rate and seed, up to the target.

Lightning runs the steps and the evaluations; a call-back decides when to evaluate, counts the applied steps, runs the
clock and ends the trial.

A trial that is resumed from a stopped one is the trial that was never stopped, bit for bit on a CPU, but for one more
evaluation where it was stopped; it changes neither the training nor when later ones are due. Steps, examples and
history are those of the whole chain, seconds the trial's own.
"""

import functools
import inspect
import math
import os
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.fabric.utilities.data import sized_len
from lightning.pytorch import (
    Callback,
    LightningDataModule,
    LightningModule,
    Trainer,
    seed_everything,
)
from lightning.pytorch.utilities.memory import garbage_collection_cuda

from bstune.core.clock import Phase, TrialClock, seconds_per_step
from bstune.core.errors import BstuneError, ConfigError
from bstune.core.records import (
    Status,
    Target,
    TrialProtocol,
    TrialResult,
    TrialSpec,
    is_near,
    next_dense_evaluation,
    next_evaluation,
)
from bstune.system.exits import is_interruption, sys_exit_error
from bstune.system.failures import cause
from bstune.system.files import may_take, partial_of, put_in_place
from bstune.system.interruption import temporary_folder
from bstune.trial import distributed
from bstune.trial.batches import (
    loaders_of,
    micro_batch_sizes,
    random_state,
    set_random_state,
    stream_of,
    weight_micro_batches,
)
from bstune.trial.checkpoint import Own, PlainFiles, StateWriter, Stopped, StoppedState, read_state
from bstune.trial.compile import (
    USER_CODE_ERRORS,
    Compiling,
    first_line,
    is_out_of_memory,
    warn_once,
)
from bstune.trial.device import (
    cuda_settings,
    device_name,
    device_of,
    forget_failed_allocations,
    processor_wait_of,
    synchronize,
    versions,
)
from bstune.trial.epoch import accumulate_on, accumulated
from bstune.trial.half_lives import effective_lr
from bstune.trial.lean_loop import LeanLoop
from bstune.trial.noise_scale import NoiseScale
from bstune.trial.skipped_steps import SkippedSteps
from bstune.trial.trainer import (
    lengths,
    looks_at_epochs,
    make_trainer,
    of_package,
    package_of,
    serving,
)

# A gradient scaler halves its scale at each step that it skips: after this many in a row no loss can be finite.
SKIPPED_STEPS_MEAN_DIVERGED = 50
# The noise scale is taken of batches split in two; normalisation layers refuse parts of a single example.
MIN_SPLIT = 4
LOGGED = (
    "number",
    "batch_size",
    "lr",
    "seed",
)  # of a trial, by the user's loggers as hyper-parameters


@dataclass(frozen=True)
class Workload:
    """What trials need of a workload."""

    build_module: Callable[[TrialSpec], LightningModule]
    # B examples, or their micro-batches; endless, or an epoch's.
    train_batches: Callable[[TrialSpec], Iterable[Any]]
    validation_batches: Iterable[Any]  # the same at every batch size
    validation_examples: int
    test_batches: Iterable[Any] | None = (
        None  # None: there is no test set apart from the validation data
    )
    train_examples: int = 0
    validates_on_test: bool = False  # whether the target is measured on the published test set
    data_module: LightningDataModule | None = None  # set up; its hooks on batches are called
    notes: tuple[str, ...] = ()  # what it does without, such as a test set that cannot be read


def run_trial(
    workload: Workload,
    spec: TrialSpec,
    protocol: TrialProtocol,
    checkpoint: Path | None = None,
    *,
    clock: TrialClock | None = None,
    state: Path | None = None,
    resume: Stopped | None = None,
    horizon: int | None = None,
) -> TrialResult:
    """Train until the target, ``spec.max_steps`` or the budget, and return the record.

    ``horizon`` is the number of steps that the Trainer names as its own, and ends after; None: the budget's, whenever
    the trial ends, so that a trial stopped early has the schedules of one that is not. ``checkpoint`` gets
    the weights that reached the target, ``state`` the training state of a stopped trial; a StateError says, before
    anything is done, that the trial cannot be resumed but can start afresh.
    """
    resumed_from = None if resume is None else resume.record.number
    if spec.resumed_from != resumed_from:
        raise ValueError(
            f"a trial with resumed_from={spec.resumed_from} cannot go on from trial {resumed_from}"
        )
    distributed.check_count(protocol.devices)
    device = device_of(protocol.trainer)
    clock = clock or TrialClock(
        synchronize=functools.partial(synchronize, device), waited=processor_wait_of(device)
    )
    progress = _Progress(spec, protocol, workload.validation_examples, resume)
    forget_failed_allocations(device)
    compiling = Compiling(protocol.compile, clock)
    loop = _TargetLoop(progress, clock, compiling, horizon)
    try:
        _train(workload, loop, checkpoint, state, resume)
    except BstuneError:
        raise
    except Exception as error:
        if is_out_of_memory(error):
            progress.status, progress.message = "out of memory", first_line(error)
        elif (lost := loop.not_finite()) is not None:
            progress.diverge(f"{first_line(error)} at step {progress.steps}: {lost}")
        else:
            raise
    except SystemExit as error:
        if is_interruption(error):
            raise
        raise sys_exit_error(error) from error
    finally:
        compiling.end()
    clock.enter(Phase.CLOSING)
    # A Trainer and its module refer to each other: the device's memory would wait for Python's collector.
    if progress.status == "out of memory" or torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        garbage_collection_cuda()
    return _record(loop, compiling.failed)


def _record(loop: "_TargetLoop", not_compiled: str | None) -> TrialResult:
    """Return the record of a trial that has ended."""
    spec, protocol, progress, clock = loop.spec, loop.protocol, loop.progress, loop.clock
    return TrialResult(
        **spec.trial_fields(),
        status=progress.status,
        steps=progress.steps,
        steps_low=progress.steps_low,
        examples=progress.steps * spec.batch_size,
        train_seconds=clock.seconds(Phase.TRAINING),
        eval_seconds=clock.seconds(Phase.EVALUATION),
        startup_seconds=clock.seconds(Phase.STARTUP),
        wall_seconds=clock.total_seconds,
        device=device_name(protocol.trainer, protocol.devices),
        versions={**versions(), **cuda_settings(device_of(protocol.trainer))},
        history=tuple(progress.history),
        message=progress.message or not_compiled or loop.missing,
        noise_scale=loop.noise_scale.measurements,
        training_loop=None if loop.lean is None else loop.lean.name,
        effective_lr=loop.effective_lr,
        seconds_per_step=seconds_per_step(clock.segments, protocol.warmup_steps),
    )


def _train(
    workload: Workload,
    loop: "_TargetLoop",
    checkpoint: Path | None,
    state: Path | None,
    resume: Stopped | None,
) -> None:
    """Train until the loop ends the trial, and write what it leaves."""
    spec, protocol, progress = loop.spec, loop.protocol, loop.progress
    seed_everything(spec.seed, workers=False, verbose=False)
    module = workload.build_module(spec)
    sizes = loop.micro_batch_sizes
    if len(sizes) > 1 or distributed.place() is not None:
        weight_micro_batches(module, sizes, spec.batch_size)
    for name in ("training_step", "validation_step"):
        setattr(module, name, _without_stop_iteration(name, getattr(module, name)))
    train = workload.train_batches(spec)
    distributed.check_share(train, sizes)
    options: dict[str, Any] = {"weights_only": True}
    if resume is not None and progress.state is not None:
        stream_of(train).resume(progress.state.stream)
        options["ckpt_path"] = resume.state
    if state is not None:
        loop.writer = StateWriter(state, stream_of(train), loop.clock)
    arguments = lengths(train, len(sizes), loop.longest, module.automatic_optimization)
    with temporary_folder() as folder, _discarding(loop.writer):
        trainer = make_trainer(
            protocol.trainer,
            module,
            [loop],
            folder,
            accumulate_grad_batches=len(sizes),
            **arguments,
        )
        around = functools.partial(loop.clock.interrupt_segment, Phase.STARTUP)
        loop.lean = LeanLoop(trainer, protocol.fast, around, loop.clock.train)
        trainer.strategy.checkpoint_io = PlainFiles(trainer, module)  # type: ignore[assignment]
        for logger in trainer.loggers:
            logger.log_hyperparams(
                {name: getattr(spec, name) for name in LOGGED} | dict(spec.hyperparameters)
            )
        fit(trainer, workload, module, train, sizes[0], **options)
        loop.explain_end(trainer)
        if progress.status == "reached" and checkpoint is not None:
            partial = partial_of(checkpoint)
            try:
                own = Own(checkpoint)
                trainer.save_checkpoint(partial, weights_only=True, storage_options=own)
                if distributed.is_first() and may_take(checkpoint):
                    put_in_place(partial, checkpoint)
            finally:
                if distributed.is_first():
                    partial.unlink(missing_ok=True)
        if progress.status == "stopped" and loop.writer is not None:
            loop.writer.keep()


def fit(
    trainer: Trainer,
    workload: Workload,
    module: LightningModule,
    train: Iterable[Any],
    size: int,
    **options: Any,
) -> None:
    """Train a module on these batches, of ``size`` examples each, with the workload's other data."""
    data, validation = workload.data_module, workload.validation_batches
    with warnings.catch_warnings():
        # The data live on the device, so advice on loader workers is beside the point.
        advice = of_package(
            package_of(module, data), "fabric.utilities.warnings.PossibleUserWarning"
        )
        warnings.simplefilter("ignore", advice)
        if "ckpt_path" in options:  # the optimizer's steps before are the stopped trial's
            warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step")
        if data is None:
            trainer.fit(module, train, validation, **options)
        else:
            trainer.fit(
                module, datamodule=serving(data, size, train=train, val=validation), **options
            )


@contextmanager
def _discarding(writer: StateWriter | None) -> Iterator[None]:
    """Remove a state that was written and not kept."""
    try:
        yield
    finally:
        if writer is not None:
            writer.discard()


def _without_stop_iteration(name: str, step: Callable[..., Any]) -> Callable[..., Any]:
    """Return a step whose StopIteration is an error: Lightning would take it for the end of the data."""

    @functools.wraps(step)
    def checked(*args: Any, **kwargs: Any) -> Any:
        try:
            return step(*args, **kwargs)
        except StopIteration as error:
            raise RuntimeError(f"StopIteration in {name}").with_traceback(
                error.__traceback__
            ) from error

    checked.__wrapped__ = inspect.unwrap(step)  # Lightning reads its arguments
    return checked


class _Progress:
    """Steps and evaluations of a trial so far: when the next evaluation is due, and how the trial ends."""

    def __init__(
        self,
        spec: TrialSpec,
        protocol: TrialProtocol,
        validation_examples: int,
        resume: Stopped | None,
    ) -> None:
        self.status: Status = "stopped"
        self.message: str | None = None
        self.steps = self.steps_low = 0
        self.history: list[tuple[int, float | None]] = []
        self.start_gap: float | None = (
            None  # of the target before training; None if it was not measured
        )
        self.near = False
        self.forced: tuple[
            int, ...
        ] = ()  # steps evaluated though not due: at an epoch's end, or where it was stopped
        self.skipped = 0  # steps that a gradient scaler left out
        self.ended = False
        self.spec, self.protocol, self._validation_examples = spec, protocol, validation_examples
        self.due_step = self._next_due()
        self.state: StoppedState | None = None
        if resume is not None:
            record = resume.record
            device = device_name(protocol.trainer, protocol.devices)
            self.state = state = read_state(resume, spec, device, versions())
            self.steps, self.steps_low, self.history = (
                record.steps,
                record.steps_low,
                list(record.history),
            )
            self.start_gap, self.near, self.forced = state.start_gap, state.near, state.forced
            self.due_step, self.skipped = state.due_step, state.skipped
            # The state is from before the evaluation that ended the trial.
            if self.steps >= self.due_step:
                self.due_step = self._next_due()
            else:
                self.forced += (self.steps,)
        self.first_step = self.steps
        # A trial that is asked for by itself may have a limit past the budget.
        self.last_step = (
            protocol.last_step(spec.batch_size) if spec.max_steps is None else spec.max_steps
        )
        if self.last_step <= self.steps:
            raise ConfigError(
                f"a trial that has {self.steps} steps cannot be trained until step {self.last_step}: raise max_steps"
            )

    def judge(self, value: float | None, loss: float, stopped: bool) -> None:
        """Take in an evaluation, which may end the trial; None is a value that is not finite."""
        self.history.append((self.steps, value))
        target, self.ended = self.protocol.target, True
        if not math.isfinite(loss):
            self.diverge(f"the training loss is {loss} at step {self.steps}")
        elif value is None:
            self.diverge(f"{target.metric} is not finite at step {self.steps}")
        elif (
            self.start_gap is not None
            and target.gap(value) > self.protocol.divergence * self.start_gap
        ):
            self.diverge(f"{target.metric} is {value:g} at step {self.steps}, far past its start")
        elif target.reached(value):
            self.status, self.message = "reached", None
            return
        elif self.steps >= self.last_step:
            self.status, self.message = "stopped", None
        else:
            self.ended = False
            if self.steps < self.due_step:
                self.forced += (self.steps,)
            elif not stopped:  # by the module, or by skipped steps
                self.due_step = self._next_due()
        self.steps_low = self.steps

    def leave_out(self, loss: float, stopped: bool) -> None:
        """Take in an evaluation without the target's metric, which tells nothing of it."""
        self.ended = self.steps >= self.last_step or not math.isfinite(loss)
        if not math.isfinite(loss):
            self.diverge(f"the training loss is {loss} at step {self.steps}")
        elif self.ended:
            self.status, self.message = "stopped", None
        elif self.steps >= self.due_step and not stopped:
            self.due_step = self._next_due()

    def diverge(self, message: str) -> None:
        self.status, self.message = "diverged", message

    def _next_due(self) -> int:
        schedule = self.protocol.evaluation_schedule
        due = [pair for pair in self.history if pair[0] not in self.forced]
        self.near = self.near or is_near(due, self.protocol.target, schedule.near)
        so_far = (
            self.steps,
            self.spec.batch_size,
            self._validation_examples,
            len(due),
            self.near,
            schedule,
        )
        if self.spec.dense_steps is None:
            return next_evaluation(*so_far)
        return next_dense_evaluation(*so_far, self.spec.dense_steps)


class _TargetLoop(Callback):
    """Asks the Trainer for the evaluations that are due, runs the clock, and stops the Trainer when the trial ends."""

    def __init__(
        self, progress: _Progress, clock: TrialClock, compiling: Compiling, horizon: int | None
    ) -> None:
        self.progress, self.clock, self._compiling = progress, clock, compiling
        self.spec, self.protocol = progress.spec, progress.protocol
        protocol = progress.protocol
        self._horizon = horizon
        self._has_epochs = self._each_epoch = (
            False  # with an end; and whether it is evaluated at each end too
        )
        self._epoch: Mapping[str, Any] | None = (
            None  # what the stopped trial's has accumulated, until it is put back
        )
        self._last_epoch = progress.steps  # at the end of the last one
        self._amid_epoch = False  # until the first batch of a trial that goes on
        self._again = False  # whether an evaluation of the stopped trial runs again
        self.writer: StateWriter | None = None
        self.lean: LeanLoop | None = None
        # Lightning's calls of one more call-back would be some percent of a short step, so its hooks are called here.
        self.noise_scale = NoiseScale(
            every=protocol.noise_scale_every, weights="examples", around=self._aside
        )
        self._measures_noise = False
        self.effective_lr: float | None = None
        self.missing: str | None = None  # what the trial goes on without
        self.micro_batch_sizes = micro_batch_sizes(
            progress.spec.batch_size, protocol.micro_batch_size
        )
        self._skipped_in_a_row = 0
        self._generators = None if progress.state is None else progress.state.generators
        self._segment_start = progress.steps
        self._loss: Any = None  # of the last step
        self._frozen: tuple[str, ...] | None = (
            None  # parameters of a trial that goes on, until they are
        )
        # Of a trial that goes on, until its first batch.
        self._restored: dict[str, torch.Tensor] | None = None
        self._before: Any = None  # the target's metric before the present evaluation
        self._asked_to_stop = self._stopping = (
            False  # by what may be one process alone; by all of them
        )
        self._module: LightningModule | None = None
        self._process = os.getpid()
        self._began = time.monotonic()

    @property
    def longest(self) -> int:
        """The steps after which the Trainer itself ends."""
        if self._horizon is not None:
            return self._horizon
        budget = self.protocol.last_step(self.spec.batch_size)
        return max(budget, self.progress.last_step) + self.progress.skipped

    def explain_end(self, trainer: Trainer) -> None:
        """Note what ended a trial that neither an evaluation nor its last step ended."""
        progress = self.progress
        if progress.ended or progress.status != "stopped":
            return
        if not trainer.should_stop and (
            progress.steps == progress.first_step or trainer.max_epochs == 1
        ):
            raise RuntimeError(
                f"the training ended by itself at step {progress.steps}, as a StopIteration ends it"
            )
        callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
        reasons = (getattr(callback, "stopping_reason_message", None) for callback in callbacks)
        reason = next(
            filter(None, reasons),
            "by the module or a call-back" if trainer.should_stop else "by itself",
        )
        progress.message = (
            f"the training was stopped at step {progress.steps}: {reason.splitlines()[0]}"
        )

    def not_finite(self) -> str | None:
        """Return what is not finite any more, the last step's loss or the weights; None if both are."""
        try:
            if isinstance(self._loss, torch.Tensor) and not self._loss.isfinite().all():
                return f"the training loss is {self._loss.float().mean().item()}"
            weights = () if self._module is None else self._module.named_parameters()
            return next(
                (
                    f"{name} is not finite"
                    for name, weight in weights
                    if not weight.isfinite().all()
                ),
                None,
            )
        except RuntimeError:  # the device does not compute any more, as after an assertion of CUDA
            return None

    def _expect_last_step(self) -> None:
        if self._is_late():
            self.progress.last_step = min(self.progress.last_step, self.progress.steps + 1)
        if self.writer is not None:
            self.writer.prepare(last=self.progress.steps + 1 >= self.progress.last_step)

    def _is_late(self) -> bool:
        """Return whether the trial's wall time is over; of several processes each would see another time."""
        limit = self.spec.max_seconds
        if limit is None or distributed.place() is not None:
            return False
        return time.monotonic() - self._began > limit

    @contextmanager
    def _aside(self) -> Iterator[None]:
        with self.clock.interrupt_segment(Phase.EVALUATION), self._compiling.eagerly():
            yield

    def state_dict(self) -> dict[str, Any]:
        return (
            {}
            if self.protocol.noise_scale_every is None
            else {"noise_scale": self.noise_scale.state_dict()}
        )

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if self.protocol.noise_scale_every is not None and "noise_scale" in state_dict:
            self.noise_scale.load_state_dict(state_dict["noise_scale"])

    def _measure_noise(
        self, hook: str, trainer: Trainer, module: LightningModule, *arguments: Any
    ) -> None:
        """Call a hook of the noise scale; an error there ends the measuring, and not the trial."""
        if not self._measures_noise:
            return
        try:
            getattr(self.noise_scale, hook)(trainer, module, *arguments)
        except USER_CODE_ERRORS as error:
            self._measures_noise = False
            self.noise_scale.on_exception(trainer, module, error)
            self.missing = (
                "the noise scale is not measured (protocol.noise_scale_every=null leaves it out): "
            )
            self.missing += cause(error)
            warn_once(self.missing)

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._module = pl_module
        callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
        scheduler = of_package(package_of(pl_module), "callbacks.GradientAccumulationScheduler")
        if any(isinstance(one, scheduler) for one in callbacks):
            raise ConfigError(
                "GradientAccumulationScheduler makes steps of several batches, but batch sizes count all accumulated "
                "examples: leave it out"
            )
        # Last, so that what other call-backs do after a step, such as averaging weights, is still training.
        others = [callback for callback in callbacks if callback is not self]
        first = [] if self.writer is None else [self.writer]
        trainer.callbacks = [*first, *others, self]  # type: ignore[attr-defined]
        self._expect_last_step()
        alone = distributed.place() is None
        if (
            self.protocol.noise_scale_every is not None
            and pl_module.automatic_optimization
            and alone
        ):
            self._measures_noise = (
                len(self.micro_batch_sizes) > 1 or self.spec.batch_size >= MIN_SPLIT
            )
        self._measure_noise("setup", trainer, pl_module, stage)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._measure_noise("teardown", trainer, pl_module, stage)

    def on_sanity_check_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.clock.enter(Phase.EVALUATION)

    def on_sanity_check_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.clock.enter(Phase.STARTUP)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # The checkpoint's weights are there; the module's own hooks follow, and may set some.
        if self.progress.state is not None:
            self._restored = _copied_state(pl_module)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.effective_lr = effective_lr(trainer.optimizers)
        self._skipped_steps = SkippedSteps(trainer, pl_module)
        self._restore_generators()
        self._has_epochs = sized_len(trainer.train_dataloader) is not None
        self._each_epoch = self._has_epochs and looks_at_epochs(trainer, pl_module)
        self.clock.enter(Phase.TRAINING)
        if self.progress.state is not None:
            self._resume(trainer, self.progress.state)

    def _resume(self, trainer: Trainer, state: StoppedState) -> None:
        """Go on as the trial that was not stopped: Lightning next steps the schedules that look at metrics."""
        self._frozen = state.frozen
        trainer.callback_metrics.update(state.metrics)
        trainer.val_check_batch = trainer.fit_loop.batch_idx + 1  # where it was stopped
        if not self._has_epochs:
            return
        self._epoch, self._amid_epoch = state.epoch, True
        if state.steps >= state.due_step or (self._each_epoch and self._at_epoch_end(trainer)):
            # The state is from before this evaluation, which what looks at it is to see.
            self._again, self._generators = True, random_state()
            validation = trainer.fit_loop.epoch_loop.val_loop
            validation.restarting, validation._restart_stage = False, "restarted_mid_evaluation"
            self.clock.enter(Phase.EVALUATION)

    def _at_epoch_end(self, trainer: Trainer) -> bool:
        return trainer.fit_loop.batch_idx + 1 >= trainer.num_training_batches

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self._go_on_with_epoch(trainer, pl_module)
        if (
            self._amid_epoch
        ):  # Lightning would accumulate anew from what it takes for an epoch's first batch
            trainer._logger_connector._first_loop_iter = self._amid_epoch = False
        self._compiling.before_training_step(trainer, pl_module, batch, batch_idx)
        self._measure_noise("on_train_batch_start", trainer, pl_module, batch, batch_idx)

    def _go_on_with_epoch(self, trainer: Trainer, module: LightningModule) -> None:
        """Put back weights, what was accumulated and frozen, once, after hooks of the module that may reset them."""
        if self._restored is not None:
            _put_back(module, self._restored)
            self._restored = None
        if self._frozen is not None:
            for name, parameter in module.named_parameters():
                if parameter.requires_grad == (name in self._frozen):
                    parameter.requires_grad_(name not in self._frozen)
            self._frozen = None
        if self._epoch is not None:
            accumulate_on(trainer, module, self._epoch)
            self._epoch = None

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._go_on_with_epoch(trainer, pl_module)
        self._before = trainer.callback_metrics.get(self.protocol.target.metric)

    def on_validation_batch_start(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        self._compiling.before_validation_step(trainer, pl_module, batch, batch_idx)

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._measure_noise("on_after_backward", trainer, pl_module)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        # Lightning validates after a batch whose number is a multiple of val_check_batch: this one, or none.
        trainer.val_check_batch = batch_idx + 2
        self._end_copies()
        self._hold_stop(trainer)
        self._loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        if (batch_idx + 1) % len(self.micro_batch_sizes):
            return
        progress = self.progress
        skipped = self._skipped_steps.skipped(self._loss)
        progress.steps += not skipped
        if skipped:
            progress.skipped += 1
            if self._horizon is None and trainer.max_steps > 0:
                trainer.fit_loop.epoch_loop.max_steps += 1
        self._skipped_in_a_row = self._skipped_in_a_row + 1 if skipped else 0
        self._expect_last_step()
        if self._skipped_in_a_row >= SKIPPED_STEPS_MEAN_DIVERGED:
            progress.diverge(f"the gradients overflowed in {self._skipped_in_a_row} steps in a row")
            trainer.should_stop = True
        loop = trainer.fit_loop.epoch_loop
        over = trainer.should_stop or 0 < loop.max_steps <= loop.global_step
        epoch_end = self._each_epoch and self._at_epoch_end(trainer)
        batches = progress.steps + progress.skipped
        if progress.steps >= min(progress.due_step, progress.last_step) or over or epoch_end:
            trainer.val_check_batch = batch_idx + 1
            self._end_segment(Phase.EVALUATION)
            self._generators = random_state()
            if (
                self.writer is not None
                and progress.steps >= progress.last_step
                and progress.status == "stopped"
            ):
                epoch = accumulated(trainer, pl_module) if self._has_epochs else {}
                self._take_state(self.writer, pl_module, batches, trainer.callback_metrics, epoch)
        elif (
            self._segment_start
            == progress.first_step
            == progress.steps - self.protocol.warmup_steps
        ):
            self._end_segment(Phase.TRAINING)
            self._segment_start = progress.steps

    def _end_segment(self, phase: Phase) -> None:
        self.clock.end_segment(self.progress.steps - self._segment_start, phase)

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        distributed.explain(exception)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._hold_stop(trainer)
        # Lightning would step no schedule by a metric at the end of an epoch in which it went on.
        self._go_on_with_epoch(trainer, pl_module)
        trainer.fit_loop._restarting = self._amid_epoch = False
        ended_early = self._has_epochs and self._horizon is None and not trainer.should_stop
        if (
            ended_early
            and trainer.current_epoch + 1 == trainer.max_epochs
            and self.progress.steps > self._last_epoch
        ):
            # The module or a gradient scaler has left out steps.
            trainer.fit_loop.max_epochs = trainer.current_epoch + 2
        self._last_epoch = self.progress.steps

    def _hold_stop(self, trainer: Trainer) -> None:
        """Put off a wish to stop to the next evaluation, as it may be that of one process among several."""
        if distributed.place() is not None and not self._stopping:
            self._asked_to_stop |= trainer.should_stop
            trainer.should_stop = False

    def _end_copies(self) -> None:
        if os.getpid() != self._process:  # the user's code has forked: one process is to train on
            os._exit(0)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._end_copies()
        name = self.protocol.target.metric
        if trainer.sanity_checking and name not in trainer.callback_metrics:
            return  # a module may log nothing there
        loss = (
            self._loss.detach().float().mean().item()
            if isinstance(self._loss, torch.Tensor)
            else 0.0
        )
        stop = trainer.should_stop or self._asked_to_stop
        value, loss, stop = distributed.agree(metric(trainer, name), loss, stop)
        is_old = self._before is not None and trainer.callback_metrics[name] is self._before
        if trainer.sanity_checking:
            batches = [sized_len(one) or math.inf for one in loaders_of(trainer.val_dataloaders)]
            # The first batches alone may hold one class only.
            if value is not None and sum(trainer.num_sanity_val_batches) >= sum(batches):
                refuse_met_target(self.protocol.target, value)
                self.progress.start_gap = self.protocol.target.gap(value)
            return
        if is_old:  # Lightning keeps what the module logs in some evaluations alone
            self.progress.leave_out(loss, stop)
        elif not self._again:
            self.progress.judge(value, loss, stop)
        self._again = False
        trainer.should_stop = self._stopping = self.progress.ended or stop
        self._segment_start = self.progress.steps
        self._restore_generators()
        if trainer.should_stop:
            self.clock.enter(Phase.CLOSING)
        elif (
            self.lean is None or not self.lean.runs
        ):  # it enters it when Lightning is done with the evaluation
            self.clock.train()

    def _take_state(
        self,
        writer: StateWriter,
        module: LightningModule,
        batches: int,
        metrics: Mapping[str, torch.Tensor],
        epoch: Mapping[str, Any],
    ) -> None:
        frozen = [name for name, one in module.named_parameters() if not one.requires_grad]
        writer.take(
            StoppedState(
                number=self.spec.number,
                batch_size=self.spec.batch_size,
                lr=self.spec.lr,
                seed=self.spec.seed,
                steps=self.progress.steps,
                skipped=self.progress.skipped,
                start_gap=self.progress.start_gap,
                near=self.progress.near,
                due_step=self.progress.due_step,
                forced=self.progress.forced,
                metrics={name: value.detach().cpu().clone() for name, value in metrics.items()},
                epoch=epoch,
                stream=writer.position(batches),
                generators=self._generators or {},
                frozen=tuple(frozen),
                device=device_name(self.protocol.trainer, self.protocol.devices),
                versions=dict(versions()),
            )
        )

    def _restore_generators(self) -> None:
        if self._generators is not None:
            set_random_state(self._generators)
            self._generators = None


def _copied_state(module: LightningModule) -> dict[str, torch.Tensor]:
    """Copy a module's weights and buffers."""
    state = module.state_dict()
    tensors = {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}
    return {name: value.detach().clone() for name, value in tensors.items()}


def _put_back(module: LightningModule, state: Mapping[str, torch.Tensor]) -> None:
    """Set a module's weights and buffers where they differ from a copy."""
    own = module.state_dict()
    with torch.no_grad():
        for name, value in state.items():
            found = own.get(name)
            if not isinstance(found, torch.Tensor) or found.shape != value.shape:
                continue
            if not torch.equal(found, value):
                found.copy_(value)


def refuse_met_target(target: Target, value: float) -> None:
    """Raise a ConfigError for a target that untrained weights meet."""
    if target.reached(value):
        raise ConfigError(
            f"the target {target} is met before training ({target.metric} starts at {value:g}): "
            "check workload.target.mode and workload.target.value"
        )


def metric(trainer: Trainer, name: str) -> float | None:
    """Return the value of the metric after an evaluation, None if it is not finite."""
    value = trainer.callback_metrics.get(name)
    if value is None:
        logged = ", ".join(sorted(trainer.callback_metrics)) or "nothing"
        raise ConfigError(
            f"the target's metric is {name!r}, but the module logs {logged} in validation: "
            "set workload.target.metric to one of them, or log it"
        )
    # A float32 is read as the shortest decimal that rounds to it: 0.1 in float32 is 0.10000000149, and misses <= 0.1.
    number = (
        float(str(np.float32(value.item())))
        if value.dtype == torch.float32
        else float(value.item())
    )
    return number if math.isfinite(number) else None
