"""One trial: a Lightning Trainer trains a workload up to the target.

It does so at one batch size, learning rate and seed.

Lightning runs the steps and the evaluations; the parts of the trial (:mod:`bstune.trial.parts`),
one job each, decide when to evaluate, count the applied steps, run the clock and end the trial.

A trial that is resumed from a stopped one equals the trial that was never stopped, bit for bit on a
CPU. It has one more evaluation, where it was stopped, which changes neither the training nor the
steps of later evaluations. Its record's steps, examples and history are those of the whole chain of
trials that continue each other; its seconds are its own.
"""

import functools
import inspect
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from bstune.core.clock import Phase, TrialClock, seconds_per_step
from bstune.core.errors import BstuneError
from bstune.core.records import TrialProtocol, TrialResult, TrialSpec
from bstune.system.exits import is_interruption, sys_exit_error
from bstune.system.failures import note_steps
from bstune.system.files import may_take, partial_of, put_in_place
from bstune.system.interruption import temporary_folder
from bstune.trial.batches.accumulation import weight_micro_batches
from bstune.trial.batches.index_stream import stream_of
from bstune.trial.devices import distributed
from bstune.trial.devices.device import (
    cuda_settings,
    device_name,
    device_of,
    forget_failed_allocations,
    processor_wait_of,
    synchronize,
    versions,
)
from bstune.trial.devices.errors import first_line, is_out_of_memory
from bstune.trial.fast.take_steps import take_steps
from bstune.trial.lightning.installed import (
    LightningDataModule,
    LightningModule,
    Trainer,
    garbage_collection_cuda,
    seed_everything,
)
from bstune.trial.lightning.packages import of_package, package_of
from bstune.trial.lightning.trainer import length_arguments, make_trainer, serving
from bstune.trial.parts.assemble import parts_of
from bstune.trial.parts.checkpoint import OwnFile, PlainFiles, StateWriter, Stopped
from bstune.trial.parts.last_step import steps_of_trainer
from bstune.trial.parts.trial_callback import TrialCallback
from bstune.trial.parts.unplanned_end import explain_end, what_is_not_finite

# The fields of a trial that the user's loggers get as hyper-parameters.
LOGGED = ("number", "batch_size", "lr", "seed")


@dataclass(frozen=True)
class Workload:
    """A model and its data, as trials need them."""

    # Builds a trial's module.
    build_module: Callable[[TrialSpec], LightningModule]
    # Opens a trial's batches of B examples, or their micro-batches. They are endless or an epoch's.
    train_batches: Callable[[TrialSpec], Iterable[Any]]
    # The same at every batch size.
    validation_batches: Iterable[Any]
    validation_examples: int
    # None where there is no test set apart from the validation data.
    test_batches: Iterable[Any] | None = None
    # 0 where the number is not known, as that of a stream.
    train_examples: int = 0
    # Whether the target is measured on the published test set.
    validates_on_test: bool = False
    # The data module, set up, whose hooks on batches are called; None where there are none to call.
    data_module: LightningDataModule | None = None
    # Lines that tell the user what was left out or assumed, such as an unreadable test set.
    notes: tuple[str, ...] = ()
    # Whether bstune sets the learning rate in the optimizers that a module builds.
    overrides_lr: bool = False
    # The option that asks for that, as the user writes it.
    override: str = ""


def run_trial(
    workload: Workload,
    spec: TrialSpec,
    protocol: TrialProtocol,
    checkpoint: Path | None = None,
    *,
    clock: TrialClock | None = None,
    state_file: Path | None = None,
    resume: Stopped | None = None,
    horizon: int | None = None,
) -> TrialResult:
    """Train until the target, ``spec.max_steps`` or the budget, and give the record.

    Args:
        workload: what is trained.
        spec: of the trial.
        protocol: of all trials.
        checkpoint: the file that gets the weights which reached the target; None: they are not
            kept.
        clock: counts the trial's seconds; None: one that the trial makes.
        state_file: gets the training state of a stopped trial; None: it is not kept.
        resume: the stopped trial from which this one goes on; None: it starts afresh.
        horizon: the Trainer's max_steps, which schedules read and at which it ends. None: the
            budget's last step, even for a trial that is stopped before, so that its schedule is
            that of a whole trial.

    Raises:
        StateError: before anything is done, where the trial cannot be resumed but can start afresh.
    """
    resumed_from = None if resume is None else resume.record.number
    if spec.resumed_from != resumed_from:
        raise ValueError(
            f"a trial with resumed_from={spec.resumed_from} cannot go on from trial {resumed_from}"
        )
    # The target's value may be the one that the study's first trial came to.
    protocol = protocol.with_goal_of(spec)
    distributed.check_count(protocol.devices)
    device = device_of(protocol.trainer)
    clock = clock or TrialClock(
        synchronize=functools.partial(synchronize, device), waited=processor_wait_of(device)
    )
    parts = parts_of(
        spec, protocol, workload.validation_examples, clock, resume, horizon, versions()
    )
    callback = TrialCallback(parts)
    forget_failed_allocations(device)
    _train_or_note_error(workload, callback, horizon, checkpoint, state_file, resume)
    clock.enter(Phase.CLOSING)
    # A Trainer and its module refer to each other: the device's memory would wait for Python's
    # collector.
    is_out = parts.state.status == "out of memory"
    if is_out or torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        garbage_collection_cuda()
    return _record(callback)


def _train_or_note_error(
    workload: Workload,
    callback: TrialCallback,
    horizon: int | None,
    checkpoint: Path | None,
    state_file: Path | None,
    resume: Stopped | None,
) -> None:
    """Train until a trial ends, by an error of memory or divergence as well.

    Such an error is noted in the trial's state. Any other one is raised, with the steps before it
    noted for the record of the failed trial. The arguments are those of :func:`_train`.
    """
    parts = callback.parts
    try:
        _train(workload, callback, horizon, checkpoint, state_file, resume)
    except BstuneError:
        raise
    except Exception as error:
        if not _note_out_of_memory_or_diverged(error, callback):
            note_steps(error, parts.state.steps)
            raise
    # The user's code called sys.exit(): that fails this trial, and is not to end the study.
    except SystemExit as error:
        if is_interruption(error):
            raise
        note_steps(error, parts.state.steps)
        raise sys_exit_error(error) from error
    finally:
        parts.compiling.end()


def _note_out_of_memory_or_diverged(error: Exception, callback: TrialCallback) -> bool:
    """Note that an error has ended the trial as out of memory or diverged, and say whether it has.

    False for any other error, which is one of the user's code or of bstune's.
    """
    state = callback.parts.state
    if is_out_of_memory(error):
        state.status = "out of memory"
        state.message = first_line(error)
        return True
    not_finite = what_is_not_finite(state, callback.module)
    if not_finite is None:
        return False
    state.diverge(f"{first_line(error)} at step {state.steps}: {not_finite}")
    return True


def _record(callback: TrialCallback) -> TrialResult:
    """Make the record of a trial that has ended."""
    parts = callback.parts
    spec = parts.spec
    protocol = parts.protocol
    clock = parts.clock
    state = parts.state
    training_loop: str | None = None
    if callback.step_taker is not None:
        training_loop = callback.step_taker.name
    return TrialResult(
        **spec.trial_fields(),
        status=state.status,
        steps=state.steps,
        steps_low=state.steps_low,
        examples=state.steps * spec.batch_size,
        train_seconds=clock.seconds(Phase.TRAINING),
        eval_seconds=clock.seconds(Phase.EVALUATION),
        startup_seconds=clock.seconds(Phase.STARTUP),
        wall_seconds=clock.total_seconds,
        device=device_name(protocol.trainer, protocol.devices),
        versions={**versions(), **cuda_settings(device_of(protocol.trainer))},
        history=state.recorded_history,
        # Of several messages the record has the weightiest: how the trial ended comes first.
        message=state.message or parts.compiling.failed or parts.noise_scale.missing,
        noise_scale=parts.noise_scale.measurements,
        training_loop=training_loop,
        # That of SGD or RMSprop with a momentum m, lr/(1 - m).
        effective_lr=state.effective_lr,
        seconds_per_step=seconds_per_step(clock.segments, protocol.warmup_steps),
    )


def _train(
    workload: Workload,
    callback: TrialCallback,
    horizon: int | None,
    checkpoint: Path | None,
    state_file: Path | None,
    resume: Stopped | None,
) -> None:
    """Train until a trial ends, and write its weights or its state where asked to.

    Args:
        workload: what is trained.
        callback: has the parts of the trial, which count its steps and end it.
        horizon: the Trainer's max_steps; None: the budget's last step.
        checkpoint: the file that gets the weights which reached the target; None: none does.
        state_file: gets the training state of a stopped trial; None: none does.
        resume: the stopped trial from which this one goes on; None: it starts afresh.
    """
    parts = callback.parts
    spec = parts.spec
    micro_batch_sizes = parts.micro_batch_sizes
    seed_everything(spec.seed, workers=False, verbose=False)
    module = _built_module(workload, spec, micro_batch_sizes)
    train = workload.train_batches(spec)
    distributed.check_share(train, micro_batch_sizes)
    # A stopped trial's file is read as plain data alone, so that no code in it is run.
    options: dict[str, Any] = {"weights_only": True}
    if resume is not None and parts.resume.stopped is not None:
        stream_of(train).resume(parts.resume.stopped.stream)
        options["ckpt_path"] = resume.state
    if state_file is not None:
        parts.snapshot.writer = StateWriter(state_file, stream_of(train), parts.clock)
    writer = parts.snapshot.writer
    with temporary_folder() as folder, _discarding(writer):
        trainer = _trainer_of(callback, module, train, horizon, folder)
        fit(trainer, workload, module, train, micro_batch_sizes[0], **options)
        explain_end(parts.state, trainer)
        if parts.state.status == "reached" and checkpoint is not None:
            _save_weights(trainer, checkpoint)
        if parts.state.status == "stopped" and writer is not None:
            writer.keep()


def _trainer_of(
    callback: TrialCallback,
    module: LightningModule,
    train: Iterable[object],
    horizon: int | None,
    folder: str,
) -> Trainer:
    """Make the Trainer of a trial, with the loop that takes its steps.

    Args:
        callback: has the parts of the trial, and gets the loop as its ``step_taker``.
        module: to train.
        train: the training batches.
        horizon: the Trainer's max_steps; None: the budget's last step.
        folder: for the files that the user's call-backs and loggers write.
    """
    parts = callback.parts
    protocol = parts.protocol
    micro_batches = len(parts.micro_batch_sizes)
    steps = steps_of_trainer(parts.state, parts.spec, protocol, horizon)
    trainer = make_trainer(
        protocol.trainer,
        module,
        [callback],
        folder,
        accumulate_grad_batches=micro_batches,
        **length_arguments(train, micro_batches, steps, module.automatic_optimization),
    )
    # The capture of a CUDA graph counts as start-up, not as training.
    as_startup = functools.partial(parts.clock.interrupt_segment, Phase.STARTUP)
    callback.step_taker = take_steps(
        trainer, protocol.fast, around=as_startup, start=parts.clock.train
    )
    # A trial's own checkpoints hold plain data alone.
    trainer.strategy.checkpoint_io = PlainFiles(trainer, module)  # type: ignore[assignment]
    _log_hyperparameters(trainer, parts.spec)
    return trainer


def _built_module(
    workload: Workload, spec: TrialSpec, micro_batch_sizes: Sequence[int]
) -> LightningModule:
    """Build the module of a trial, and wrap its training step and validation step.

    The losses of micro-batches are weighted by their examples. A StopIteration in a step is an
    error, as Lightning would take it for the end of the data.
    """
    module = workload.build_module(spec)
    # Micro-batches, and the shares of several devices, may differ in size.
    if len(micro_batch_sizes) > 1 or distributed.place() is not None:
        weight_micro_batches(module, micro_batch_sizes, spec.batch_size)
    for name in ("training_step", "validation_step"):
        setattr(module, name, _without_stop_iteration(name, getattr(module, name)))
    return module


def _log_hyperparameters(trainer: Trainer, spec: TrialSpec) -> None:
    """Give the user's loggers the values of a trial that its search chooses."""
    for logger in trainer.loggers:
        # Each logger gets a dict of its own, as it may write to what it is given.
        values = {name: getattr(spec, name) for name in LOGGED}
        logger.log_hyperparams({**values, **spec.hyperparameters})


def _save_weights(trainer: Trainer, checkpoint: Path) -> None:
    """Write the weights that reached the target to ``checkpoint``, whole or not at all.

    A file of that name which the study did not write stays as it is.
    """
    partial = partial_of(checkpoint)
    try:
        # Every process of a trial must call this; the first one writes. OwnFile marks the file as
        # the study's.
        trainer.save_checkpoint(partial, weights_only=True, storage_options=OwnFile(checkpoint))
        if distributed.is_first() and may_take(checkpoint):
            put_in_place(partial, checkpoint)
    finally:
        if distributed.is_first():
            partial.unlink(missing_ok=True)


def fit(
    trainer: Trainer,
    workload: Workload,
    module: LightningModule,
    train: Iterable[object],
    micro_batch_size: int,
    **options: Any,
) -> None:
    """Train a module on ``train`` and evaluate it on the workload's validation data.

    Args:
        trainer: runs the training.
        workload: whose validation data and data module are used.
        module: that is trained.
        train: the training batches.
        micro_batch_size: examples in each of them.
        options: further arguments of ``Trainer.fit``, such as ``ckpt_path``.
    """
    data = workload.data_module
    validation = workload.validation_batches
    package = package_of(module, data)
    with warnings.catch_warnings():
        # The data live on the device, so advice on loader workers is beside the point.
        advice = of_package(package, "fabric.utilities.warnings.PossibleUserWarning")
        warnings.simplefilter("ignore", advice)
        # A resumed trial's schedule steps before the optimizer has stepped in this process, of
        # which PyTorch warns; the stopped trial took the earlier steps.
        if "ckpt_path" in options:
            warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step")
        if data is None:
            trainer.fit(module, train, validation, **options)
        else:
            served = serving(data, micro_batch_size, train=train, val=validation)
            trainer.fit(module, datamodule=served, **options)


@contextmanager
def _discarding(writer: StateWriter | None) -> Iterator[None]:
    """At the end of the context, remove a state that was written and not kept.

    None: the trial writes no state.
    """
    try:
        yield
    finally:
        if writer is not None:
            writer.discard()


def _without_stop_iteration(name: str, step: Callable[..., object]) -> Callable[..., object]:
    """Wrap a module's step so that a StopIteration in it is a RuntimeError.

    Lightning would take the StopIteration for the end of the data. ``name`` is the step's.
    """

    @functools.wraps(step)
    def checked(*args: object, **kwargs: object) -> object:
        try:
            return step(*args, **kwargs)
        except StopIteration as error:
            # The new error keeps the frames of the user's code, in which the first one was raised.
            users_frames = error.__traceback__
            raise RuntimeError(f"StopIteration in {name}").with_traceback(users_frames) from error

    # Lightning reads the names of the step's own arguments.
    checked.__wrapped__ = inspect.unwrap(step)
    return checked
