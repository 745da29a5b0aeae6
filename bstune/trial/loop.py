"""One trial: train a workload at one batch size, learning rate and seed with a Lightning Trainer, to the target.

Lightning runs the steps and the evaluations; a call-back of ours says when to evaluate, counts the applied steps, runs
the clock and ends the trial. The result is a record with a status; whatever the trial came to, nothing is returned in
place of one.
"""

import copy
import functools
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.fabric.utilities.data import sized_len
from lightning.fabric.utilities.warnings import PossibleUserWarning
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer, seed_everything
from lightning.pytorch.profilers import PassThroughProfiler
from lightning.pytorch.utilities.memory import garbage_collection_cuda

from bstune.core.clock import Phase, TrialClock, seconds_per_step
from bstune.core.errors import ConfigError
from bstune.core.records import Status, Target, TrialProtocol, TrialResult, TrialSpec, is_near, next_evaluation
from bstune.trial.batches import micro_batch_sizes, random_state, set_random_state, stream_of, weight_micro_batches
from bstune.trial.checkpoint import StateWriter, Stopped, read_state
from bstune.trial.compile import RAISED_BY_MODULES, Compiling, first_line, is_out_of_memory, warn_once
from bstune.trial.device import device_name, synchronize, versions
from bstune.trial.noise_scale import NoiseScale

# A gradient scaler halves its scale at each step that it skips: after this many in a row no loss can be finite.
SKIPPED_STEPS_MEAN_DIVERGED = 50
# The noise scale is taken of batches split in two; normalisation layers refuse parts of a single example.
LEAST_SPLIT = 4


@dataclass(frozen=True)
class Workload:
    """What trials need of a workload.

    Args:
        build_module: builds the Lightning module of one trial; the random number generators are seeded before.
        train_batches: an endless stream for one trial: at each step a batch of exactly B examples, or its micro-batches.
        validation_batches: what an evaluation reads, the same at every batch size.
        validation_examples: examples in it.
        test_batches: None where there is no test set apart from the validation data.
        train_examples: examples in one training epoch.
        validates_on_test: whether the target is measured on the published test set.
        data_module: whose hooks on batches are called, such as ``on_after_batch_transfer``; it is set up already.
    """

    build_module: Callable[[TrialSpec], LightningModule]
    train_batches: Callable[[TrialSpec], Iterable[Any]]
    validation_batches: Iterable[Any]
    validation_examples: int
    test_batches: Iterable[Any] | None = None
    train_examples: int = 0
    validates_on_test: bool = False
    data_module: LightningDataModule | None = None


def run_trial(
    workload: Workload,
    spec: TrialSpec,
    protocol: TrialProtocol,
    checkpoint: Path | None = None,
    *,
    clock: TrialClock | None = None,
    state: Path | None = None,
    resume: Stopped | None = None,
) -> TrialResult:
    """Train one workload until the target, or until the spec's steps or the budget are spent, and return the record.

    A trial that goes on from a stopped one is the trial that was never stopped, bit for bit on a CPU, but for one more
    evaluation where it was stopped, unless one was due there. It changes neither the training (an evaluation leaves
    the random number generators as it finds them) nor when later ones are due. Call-backs and modules get back the
    state that they had before it, and their hooks on the start of training are called again. Steps, examples and
    history are those of the whole chain, seconds the trial's own.

    Measuring the noise scale leaves the training and its clock as they are (see :class:`NoiseScale`): passes over parts
    of a batch count as evaluation, while norms that are read in the backward passes of micro-batches stay training.
    A batch below ``LEAST_SPLIT`` examples and a module that steps its optimizers itself are not measured; where
    measuring fails, for memory or for what the module does, it ends for this trial with a warning.

    Args:
        workload: data and module.
        spec: batch size, learning rate and seed, and the step at which to stop in place of the budget's.
        protocol: what stays fixed in a study.
        checkpoint: where the weights that reached the target are written; None writes none.
        clock: a test's own; by default one that synchronises the device.
        state: where the training state is left if the trial ends out of steps; None leaves none. A trial that its own
            module stops leaves none either.
        resume: the trial from which this one goes on, ``spec.resumed_from``; None starts afresh.

    Raises:
        ConfigError: if the module does not log the target's metric, meets the target before it is trained, or steps
            its optimizers itself while batches are accumulated from micro-batches; if no step is left; or if the place
            in batches other than bstune's own is to be left or taken up.
        StateError: before anything else, if the state to go on from cannot be used; the trial can start afresh.
        ValueError: if ``spec.resumed_from`` is not the trial to go on from.
    """
    parent = None if resume is None else resume.record.number
    if spec.resumed_from != parent:
        raise ValueError(f"a trial with parent {spec.resumed_from} cannot go on from trial {parent}")
    clock = clock or TrialClock(synchronize=synchronize)
    loop = _TargetLoop(spec, protocol, workload.validation_examples, clock, resume)
    try:
        _train(workload, spec, protocol, loop, clock, checkpoint, state, resume)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        loop.status, loop.message = "oom", first_line(error)
    finally:
        if loop.compiling is not None:
            loop.compiling.end()
    clock.enter(Phase.CLOSING)
    # A Trainer and its module refer to each other: the device's memory would wait for Python's collector.
    if loop.status == "oom" or torch.cuda.is_available():
        garbage_collection_cuda()
    return _record(spec, protocol, loop, clock)


def _train(
    workload: Workload,
    spec: TrialSpec,
    protocol: TrialProtocol,
    loop: "_TargetLoop",
    clock: TrialClock,
    checkpoint: Path | None,
    state: Path | None,
    resume: Stopped | None,
) -> None:
    """Train to the end that ``loop`` sets, and write the checkpoint or the state that it leaves."""
    seed_everything(spec.seed, workers=False, verbose=False)
    module = workload.build_module(spec)
    if protocol.noise_scale_every is not None and module.automatic_optimization:
        loop.measure_noise(protocol.noise_scale_every)
    sizes = micro_batch_sizes(spec.batch_size, protocol.micro_batch_size)
    if len(sizes) > 1:
        weight_micro_batches(module, sizes)
    trainer = make_trainer(protocol.trainer, accumulate_grad_batches=len(sizes), callbacks=[loop])
    train = workload.train_batches(spec)
    if resume is not None:
        stream_of(train).take_up(loop.place)
    writer = None if state is None else StateWriter(state, stream_of(train), clock)
    if writer is not None:
        loop.leave_state(writer)
    try:
        _fit(trainer, module, train, workload, None if resume is None else resume.state)
        if loop.status == "reached" and checkpoint is not None:
            partial = checkpoint.with_suffix(".partial")
            trainer.save_checkpoint(partial, weights_only=True)
            partial.replace(checkpoint)
        if loop.status == "censored" and writer is not None:
            writer.keep()
    finally:
        if writer is not None:
            writer.discard()


def _record(spec: TrialSpec, protocol: TrialProtocol, loop: "_TargetLoop", clock: TrialClock) -> TrialResult:
    return TrialResult(
        **spec.identity(),
        status=loop.status,
        steps=loop.steps,
        steps_low=loop.steps_low,
        examples=loop.steps * spec.batch_size,
        train_seconds=clock.seconds(Phase.TRAINING),
        eval_seconds=clock.seconds(Phase.EVALUATION),
        startup_seconds=clock.seconds(Phase.STARTUP),
        wall_seconds=clock.total_seconds,
        seconds_per_step=seconds_per_step(clock.segments, protocol.warmup_steps),
        device=device_name(protocol.trainer),
        versions=versions(),
        history=tuple(loop.history),
        message=loop.message or (None if loop.compiling is None else loop.compiling.failed),
        noise_scale=() if loop.noise_scale is None else loop.noise_scale.measurements,
    )


def _fit(
    trainer: Trainer, module: LightningModule, train: Iterable[Any], workload: Workload, state: Path | None
) -> None:
    resume: dict[str, Any] = {"ckpt_path": state, "weights_only": True}
    validation, data_module = workload.validation_batches, workload.data_module
    with warnings.catch_warnings():
        # The data live on the device, so advice on loader workers is beside the point.
        warnings.simplefilter("ignore", PossibleUserWarning)
        if data_module is None:
            trainer.fit(module, train, validation, **resume)
        else:
            trainer.fit(module, datamodule=serving(data_module, train=train, val=validation), **resume)


class _TargetLoop(Callback):
    """Asks the Trainer for evaluations, counts applied steps, runs the clock and ends the trial."""

    def __init__(
        self,
        spec: TrialSpec,
        protocol: TrialProtocol,
        validation_examples: int,
        clock: TrialClock,
        resume: Stopped | None,
    ) -> None:
        self.history: list[tuple[int, float | None]] = []
        self.status: Status = "censored"
        self.message: str | None = None
        self.steps = 0
        self.steps_low = 0
        self._spec = spec
        self._protocol = protocol
        self._micro_batches = len(micro_batch_sizes(spec.batch_size, protocol.micro_batch_size))
        self._validation_examples = validation_examples
        self._clock = clock
        self._start_gap: float | None = None
        self._forced: tuple[int, ...] = ()
        self._near = False
        self._skipped_in_a_row = 0
        self._scale = 0.0
        self._loss: Any = None
        self._batches = 0
        self._generators: Mapping[str, Any] | None = None
        self._writer: StateWriter | None = None
        self._due_step = self._after(0)
        self._metrics: Mapping[str, torch.Tensor] = {}
        self.place: Mapping[str, Any] = {}
        self.compiling = None if protocol.compile is None else Compiling(protocol.compile, clock)
        self.noise_scale: NoiseScale | None = None
        self._measures = False
        if resume is not None:
            self._resume(resume)
        self._first_step = self._segment_start = self.steps
        self._last_step = _last_step(spec, protocol, self.steps)

    def _resume(self, resume: Stopped) -> None:
        state = read_state(resume, self._spec, device_name(self._protocol.trainer), versions())
        self.steps, self.steps_low = resume.record.steps, resume.record.steps_low
        self.history = list(resume.record.history)
        self._start_gap, self._near, self._forced = state.start_gap, state.near, state.forced
        self._due_step, self._metrics = state.due_step, state.metrics
        self.place, self._batches, self._generators = state.stream, state.stream["batches"], state.generators
        # The state is from before the evaluation that ended the trial.
        if self.steps >= self._due_step:
            self._due_step = self._after(self.steps)
        else:
            self._forced += (self.steps,)

    def leave_state(self, writer: StateWriter) -> None:
        """Write the state if the trial ends out of steps."""
        self._writer = writer
        writer.prepare(last=self.steps + 1 >= self._last_step)

    def measure_noise(self, every: int) -> None:
        """Measure the noise scale every few steps, if batches are large enough.

        Lightning's calls of one more call-back would be some percent of a short step, so its hooks are called here.
        """
        self._measures = self._micro_batches > 1 or self._spec.batch_size >= LEAST_SPLIT
        self.noise_scale = NoiseScale(every=every, weights="examples", around=self._aside)

    @contextmanager
    def _aside(self) -> Iterator[None]:
        with (
            self._clock.interrupt_segment(Phase.EVALUATION),
            nullcontext() if self.compiling is None else self.compiling.eagerly(),
        ):
            yield

    def state_dict(self) -> dict[str, Any]:
        """Return the noise scale's measurements, for the trial that goes on."""
        return {} if self.noise_scale is None else {"noise_scale": self.noise_scale.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take up what :meth:`state_dict` returned."""
        if self.noise_scale is not None and "noise_scale" in state_dict:
            self.noise_scale.load_state_dict(state_dict["noise_scale"])

    def _measure(self, hook: str, trainer: Trainer, module: LightningModule, *arguments: Any) -> None:
        """Call a hook of the noise scale; if it cannot measure, that is its end, and not the trial's."""
        if self.noise_scale is None or not self._measures:
            return
        try:
            getattr(self.noise_scale, hook)(trainer, module, *arguments)
        except RAISED_BY_MODULES as error:
            self._measures = False
            self.noise_scale.on_exception(trainer, module, error)
            reason = first_line(error)
            warn_once(f"the noise scale is not measured (protocol.noise_scale_every=null leaves it out): {reason}")

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        # Last, so that what other call-backs do after a step, such as averaging weights, is still training.
        others = [callback for callback in trainer.callbacks if callback is not self]  # type: ignore[attr-defined]
        first = [] if self._writer is None else [self._writer]
        trainer.callbacks = [*first, *others, self]  # type: ignore[attr-defined]
        self._measure("setup", trainer, pl_module, stage)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._measure("teardown", trainer, pl_module, stage)

    def on_sanity_check_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._clock.enter(Phase.EVALUATION)

    def on_sanity_check_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._clock.enter(Phase.STARTUP)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        self._scale = scaler.get_scale() if scaler is not None else 0.0
        self._restore_generators()
        trainer.callback_metrics.update(self._metrics)  # Lightning next steps the schedules that look at them
        self._clock.enter(Phase.TRAINING)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if self.compiling is not None:
            self.compiling.before_training_step(trainer, pl_module, batch, batch_idx)
        self._measure("on_train_batch_start", trainer, pl_module, batch, batch_idx)

    def on_validation_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        if self.compiling is not None:
            self.compiling.before_validation_step(trainer, pl_module, batch, batch_idx)

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._measure("on_after_backward", trainer, pl_module)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        # Lightning validates after a batch whose number is a multiple of val_check_batch: this one, or none.
        trainer.val_check_batch = batch_idx + 2
        if (batch_idx + 1) % self._micro_batches:
            return
        self._batches += 1
        self._count_step(trainer)
        if self._writer is not None:
            self._writer.prepare(last=self.steps + 1 >= self._last_step)
        if self._skipped_in_a_row >= SKIPPED_STEPS_MEAN_DIVERGED:
            self._end(trainer, "diverged", f"the gradients overflowed in {self._skipped_in_a_row} steps in a row")
        if self.steps >= min(self._due_step, self._last_step) or trainer.should_stop:
            self._loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
            trainer.val_check_batch = batch_idx + 1
            self._clock.end_segment(self.steps - self._segment_start, Phase.EVALUATION)
            self._generators = random_state()
            if self._writer is not None and self.steps >= self._last_step and self.status == "censored":
                self._take_state(self._writer, trainer.callback_metrics)
        elif self.steps - self._first_step == self._protocol.warmup_steps and self._segment_start == self._first_step:
            self._clock.end_segment(self.steps - self._first_step, Phase.TRAINING)
            self._segment_start = self.steps

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        value = metric(trainer, self._protocol.target.metric)
        if trainer.sanity_checking:
            self._start(value, _evaluates_all(trainer))
            return
        self.history.append((self.steps, value))
        self._judge(trainer, value)
        self._segment_start = self.steps
        self._restore_generators()
        self._clock.enter(Phase.TRAINING if not trainer.should_stop else Phase.CLOSING)

    def _take_state(self, writer: StateWriter, metrics: Mapping[str, torch.Tensor]) -> None:
        writer.take(
            self._batches,
            number=self._spec.number,
            batch_size=self._spec.batch_size,
            lr=self._spec.lr,
            seed=self._spec.seed,
            steps=self.steps,
            start_gap=self._start_gap,
            near=self._near,
            due_step=self._due_step,
            forced=self._forced,
            metrics={name: value.detach().cpu().clone() for name, value in metrics.items()},
            generators=self._generators,
            device=device_name(self._protocol.trainer),
            versions=dict(versions()),
        )

    def _restore_generators(self) -> None:
        if self._generators is not None:
            set_random_state(self._generators)
            self._generators = None

    def _start(self, value: float | None, evaluates_all: bool) -> None:
        target = self._protocol.target
        if value is None or not evaluates_all:  # the first batch may hold one class only: it says nothing of the start
            return
        if target.reached(value):
            raise met_before_training(target, value)
        self._start_gap = target.gap(value)

    def _count_step(self, trainer: Trainer) -> None:
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        if scaler is None:
            self.steps += 1
            return
        # A scaler lowers its scale at the steps that it skips, and only then.
        scale = scaler.get_scale()
        skipped = scale < self._scale
        self._scale = scale
        self._skipped_in_a_row = self._skipped_in_a_row + 1 if skipped else 0
        self.steps += not skipped

    def _judge(self, trainer: Trainer, value: float | None) -> None:
        target = self._protocol.target
        loss = self._loss.detach().float().item() if isinstance(self._loss, torch.Tensor) else 0.0
        if not math.isfinite(loss):
            self._end(trainer, "diverged", f"the training loss is {loss} at step {self.steps}")
        elif value is None:
            self._end(trainer, "diverged", f"{target.metric} is not finite at step {self.steps}")
        elif self._start_gap is not None and target.gap(value) > self._protocol.divergence * self._start_gap:
            self._end(trainer, "diverged", f"{target.metric} is {value:g} at step {self.steps}, far past its start")
        elif target.reached(value):
            self._end(trainer, "reached", None)
            return
        elif self.steps >= self._last_step:
            self._end(trainer, "censored", None)
        elif not trainer.should_stop:  # neither the module nor skipped steps have ended the trial
            self._due_step = self._after(self.steps)
        self.steps_low = self.steps

    def _after(self, step: int) -> int:
        evaluation_schedule, target = self._protocol.evaluation_schedule, self._protocol.target
        due = [pair for pair in self.history if pair[0] not in self._forced]
        self._near = self._near or is_near(due, target, evaluation_schedule.near)
        return next_evaluation(
            step, self._spec.batch_size, self._validation_examples, len(due), self._near, evaluation_schedule
        )

    def _end(self, trainer: Trainer, status: Status, message: str | None) -> None:
        self.status, self.message = status, message
        trainer.should_stop = True


def _last_step(spec: TrialSpec, protocol: TrialProtocol, steps: int) -> int:
    # A trial's own limit may lie past the budget, which is then only a scale for the search.
    last = protocol.budget.last_step(spec.batch_size) if spec.max_steps is None else spec.max_steps
    if last <= steps:
        raise ConfigError(f"a trial that has {steps} steps cannot be trained until step {last}: raise its limit")
    return last


class _NoProfiler(PassThroughProfiler):
    """Profiles nothing, in one context for all: Lightning's own makes a new one some 30 times a step."""

    _nothing = nullcontext()

    def profile(self, action_name: str) -> nullcontext[None]:  # type: ignore[override]
        return self._nothing


def make_trainer(options: Mapping[str, Any], **arguments: Any) -> Trainer:
    """Return a Trainer that writes nothing: no logger, no checkpoints, no progress bar; one endless epoch.

    It evaluates once before training, for the metric's value at the start, and then when it is asked to.
    """
    return Trainer(
        **{
            "max_epochs": 1,
            "num_sanity_val_steps": -1,
            "val_check_interval": 1,
            "check_val_every_n_epoch": None,
            "logger": False,
            "enable_checkpointing": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "profiler": _NoProfiler(),
            **options,
            **arguments,
        }
    )


def serving(data_module: LightningDataModule, **batches: Iterable[Any]) -> LightningDataModule:
    """Return a shallow copy of a data module that is set up, with its hooks on batches, that serves these batches.

    Args:
        data_module: the project's own.
        batches: ``train``, ``val`` or ``test``, and what to read for it.
    """
    served = copy.copy(data_module)
    served.prepare_data = lambda: None  # type: ignore[method-assign]
    served.setup = lambda stage: None  # type: ignore[method-assign]
    for stage, iterable in batches.items():
        setattr(served, f"{stage}_dataloader", functools.partial(_identity, iterable))
    return served


def _identity(value: Any) -> Any:
    return value


def met_before_training(target: Target, value: float) -> ConfigError:
    """Return the error for a target that untrained weights meet."""
    return ConfigError(
        f"the target {target} is met before training ({target.metric} starts at {value:g}): "
        "check workload.target.mode and workload.target.value"
    )


def metric(trainer: Trainer, name: str) -> float | None:
    """Return the value of the metric after an evaluation, None if it is not finite.

    A float32 is read as the shortest decimal that rounds to it: 0.1 in float32 is 0.10000000149, and would miss <= 0.1.
    """
    value = trainer.callback_metrics.get(name)
    if value is None:
        logged = ", ".join(sorted(trainer.callback_metrics)) or "nothing"
        raise ConfigError(
            f"the target's metric is {name!r}, but the module logs {logged} in validation: "
            "set workload.target.metric to one of them, or log it"
        )
    number = float(str(np.float32(value.item()))) if value.dtype == torch.float32 else float(value.item())
    return number if math.isfinite(number) else None


def _evaluates_all(trainer: Trainer) -> bool:
    """Return whether the evaluation before training reads all validation data."""
    batches = sized_len(trainer.val_dataloaders)
    return batches is not None and sum(trainer.num_sanity_val_batches) >= batches
