"""One trial: train a workload at one batch size, learning rate and seed with a Lightning Trainer, to the target.

Lightning runs the steps and the evaluations; a call-back of ours says when to evaluate, counts the applied steps, runs
the clock and ends the trial. The result is a record with a status; whatever the trial came to, nothing is returned in
place of one.
"""

import copy
import functools
import math
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.fabric.utilities.data import sized_len
from lightning.fabric.utilities.warnings import PossibleUserWarning
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer, seed_everything
from lightning.pytorch.utilities.memory import is_oom_error

from bstune.cadence import Cadence, is_near, next_evaluation
from bstune.clock import Phase, TrialClock, seconds_per_step
from bstune.data.batches import micro_batch_sizes
from bstune.errors import ConfigError
from bstune.records import Status, Target, TrialResult, TrialSpec

# A gradient scaler halves its scale at each step that it skips: after this many in a row no loss can be finite.
SKIPPED_STEPS_MEAN_DIVERGED = 50


@dataclass(frozen=True)
class Budget:
    """A trial ends without its target once ``steps`` steps are applied and ``examples`` examples are trained on."""

    steps: int
    examples: int

    def __post_init__(self) -> None:
        if self.steps < 1 or self.examples < 1:
            raise ConfigError(
                f"budget.steps and budget.examples must be at least 1, but got {self.steps} and {self.examples}"
            )

    def last_step(self, batch_size: int) -> int:
        """Return the steps after which both are spent: the frontier's own shape, flat in steps, then in examples."""
        return max(self.steps, math.ceil(self.examples / batch_size))


@dataclass(frozen=True)
class Protocol:
    """What stays fixed in every trial of a study.

    Args:
        target: what to reach.
        budget: when to give up.
        cadence: when to evaluate.
        micro_batch_size: a larger batch is accumulated from micro-batches of this many examples; None: never.
        warmup_steps: steps in a segment of their own at the start, left out of tau(B).
        divergence: diverged is a trial whose metric is this many times as far from its goal as at the start.
        trainer: further arguments of the Lightning Trainer, such as ``accelerator`` and ``precision``.
    """

    target: Target
    budget: Budget
    cadence: Cadence
    micro_batch_size: int | None
    warmup_steps: int
    divergence: float
    trainer: Mapping[str, Any]


def run_trial(
    spec: TrialSpec,
    build_module: Callable[[TrialSpec], LightningModule],
    train_batches: Callable[[TrialSpec], Iterable[Any]],
    validation_batches: Iterable[Any],
    validation_examples: int,
    protocol: Protocol,
    checkpoint: Path | None = None,
    clock: TrialClock | None = None,
    data_module: LightningDataModule | None = None,
) -> TrialResult:
    """Train one workload until the target, or until the budget is spent, and return the record.

    Args:
        spec: batch size, learning rate and seed.
        build_module: builds the module; the random number generators are seeded before.
        train_batches: returns an endless stream: for each step a batch of exactly B examples, or its micro-batches.
        validation_batches: what an evaluation reads, the same at every batch size.
        validation_examples: examples in it.
        protocol: what stays fixed in a study.
        checkpoint: where the weights that reached the target are written; None writes none.
        clock: a test's own; by default one that synchronises the device.
        data_module: whose hooks on batches are called, such as ``on_after_batch_transfer``; it is set up already.

    Raises:
        ConfigError: if the module does not log the target's metric, meets the target before it is trained, or steps
            its optimizers itself while batches are accumulated from micro-batches.
    """
    clock = clock or TrialClock(synchronize=_synchronize)
    sizes = micro_batch_sizes(spec.batch_size, protocol.micro_batch_size)
    loop = _TargetLoop(spec, protocol, len(sizes), validation_examples, clock)
    try:
        seed_everything(spec.seed, workers=False, verbose=False)
        module = build_module(spec)
        if len(sizes) > 1:
            _weight_micro_batches(module, sizes)
        trainer = make_trainer(protocol.trainer, accumulate_grad_batches=len(sizes), callbacks=[loop])
        _fit(trainer, module, train_batches(spec), validation_batches, data_module)
        if loop.status == "reached" and checkpoint is not None:
            partial = checkpoint.with_suffix(".partial")
            trainer.save_checkpoint(partial, weights_only=True)
            partial.replace(checkpoint)
    except (RuntimeError, MemoryError) as error:
        if not _is_out_of_memory(error):
            raise
        loop.status, loop.message = "oom", (str(error) or type(error).__name__).splitlines()[0]
    clock.enter(Phase.CLOSING)
    return TrialResult(
        number=spec.number,
        slot=spec.slot,
        batch_size=spec.batch_size,
        lr=spec.lr,
        delta=spec.delta,
        seed=spec.seed,
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
        message=loop.message,
    )


def _fit(
    trainer: Trainer,
    module: LightningModule,
    train: Iterable[Any],
    validation: Iterable[Any],
    data_module: LightningDataModule | None,
) -> None:
    with warnings.catch_warnings():
        # The data live on the device, so advice on loader workers is beside the point.
        warnings.simplefilter("ignore", PossibleUserWarning)
        if data_module is None:
            trainer.fit(module, train, validation)
        else:
            trainer.fit(module, datamodule=serving(data_module, train=train, val=validation))


class _TargetLoop(Callback):
    """Asks the Trainer for evaluations, counts applied steps, runs the clock and ends the trial."""

    def __init__(
        self, spec: TrialSpec, protocol: Protocol, micro_batches: int, validation_examples: int, clock: TrialClock
    ) -> None:
        self.history: list[tuple[int, float | None]] = []
        self.status: Status = "budget"
        self.message: str | None = None
        self.steps = 0
        self.steps_low = 0
        self._spec = spec
        self._protocol = protocol
        self._micro_batches = micro_batches
        self._validation_examples = validation_examples
        self._clock = clock
        self._last_step = protocol.budget.last_step(spec.batch_size)
        self._start_gap: float | None = None
        self._evaluations = 0
        self._near = False
        self._next_step = self._after(0)
        self._segment_start = 0
        self._skipped_in_a_row = 0
        self._scale = 0.0
        self._loss: Any = None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        # Last, so that what other call-backs do after a step, such as averaging weights, is still training.
        others = [callback for callback in trainer.callbacks if callback is not self]  # type: ignore[attr-defined]
        trainer.callbacks = [*others, self]  # type: ignore[attr-defined]

    def on_sanity_check_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._clock.enter(Phase.EVALUATION)

    def on_sanity_check_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._clock.enter(Phase.STARTUP)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        self._scale = scaler.get_scale() if scaler is not None else 0.0
        self._clock.enter(Phase.TRAINING)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        # Lightning validates after a batch whose number is a multiple of val_check_batch: this one, or none.
        trainer.val_check_batch = batch_idx + 2
        if (batch_idx + 1) % self._micro_batches:
            return
        self._count_step(trainer)
        if self._skipped_in_a_row >= SKIPPED_STEPS_MEAN_DIVERGED:
            self._end(trainer, "diverged", f"the gradients overflowed in {self._skipped_in_a_row} steps in a row")
        if self.steps >= self._next_step or trainer.should_stop:
            self._loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
            trainer.val_check_batch = batch_idx + 1
            self._clock.end_segment(self.steps - self._segment_start, Phase.EVALUATION)
        elif self.steps == self._protocol.warmup_steps and self._segment_start == 0:
            self._clock.end_segment(self.steps, Phase.TRAINING)
            self._segment_start = self.steps

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        value = metric(trainer, self._protocol.target.metric)
        if trainer.sanity_checking:
            self._start(value, _evaluates_all(trainer))
            return
        self._evaluations += 1
        self.history.append((self.steps, value))
        self._judge(trainer, value)
        self._segment_start = self.steps
        self._clock.enter(Phase.TRAINING if not trainer.should_stop else Phase.CLOSING)

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
            self._end(trainer, "budget", None)
        elif not trainer.should_stop:  # neither the module nor skipped steps have ended the trial
            self._next_step = self._after(self.steps)
        self.steps_low = self.steps

    def _after(self, step: int) -> int:
        cadence, target = self._protocol.cadence, self._protocol.target
        self._near = self._near or is_near(self.history, target, cadence.near)
        sizes = self._spec.batch_size, self._validation_examples
        return min(next_evaluation(step, *sizes, self._evaluations, self._near, cadence), self._last_step)

    def _end(self, trainer: Trainer, status: Status, message: str | None) -> None:
        self.status, self.message = status, message
        trainer.should_stop = True


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


def _weight_micro_batches(module: LightningModule, sizes: Sequence[int]) -> None:
    """Make the accumulated gradient the large batch's: weight micro-batch i by n_i/B.

    Lightning divides each of the k losses by k, so the loss is multiplied by k n_i/B. The module's own loss has to be a
    mean over examples.

    Raises:
        ConfigError: if the module steps its optimizers itself.
    """
    if not module.automatic_optimization:
        raise ConfigError(
            f"{type(module).__name__} steps its optimizers itself (manual optimization), so its batches cannot be "
            "accumulated from micro-batches: set protocol.micro_batch_size=null"
        )
    step = module.training_step
    batch_size, count = sum(sizes), len(sizes)

    @functools.wraps(step)
    def weighted(*args: Any, **kwargs: Any) -> Any:
        output = step(*args, **kwargs)
        # From the Trainer: a training_step need not take the number of its batch.
        weight = count * sizes[module.trainer.fit_loop.batch_idx % count] / batch_size
        if isinstance(output, Mapping):
            return {**output, "loss": output["loss"] * weight}
        return None if output is None else output * weight

    module.training_step = weighted  # type: ignore[method-assign]


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


def _is_out_of_memory(error: BaseException) -> bool:
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    text = str(error)
    return is_oom_error(error) or "CUBLAS_STATUS_ALLOC_FAILED" in text or "DefaultCPUAllocator" in text


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def device_name(trainer_options: Mapping[str, Any]) -> str:
    """Return the name of the device that trials run on, such as ``NVIDIA H200`` or ``cpu (2 threads)``."""
    if trainer_options.get("accelerator") == "cuda":
        return torch.cuda.get_device_name(trainer_options["devices"][0])
    threads = torch.get_num_threads()
    return f"cpu ({threads} thread{'s' if threads > 1 else ''})"


@functools.cache
def versions() -> Mapping[str, str]:
    """Return the versions of the packages that a trial's result depends on."""
    found = {}
    for name in ("bstune", "torch", "lightning"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "unknown"
    return found
