"""What a few steps show before anything long.

Short trials at the smallest batch sizes, through the same code as every other trial: two batch
sizes are timed, two learning rates and two seeds compared, schedules stepped ahead; one of the
trials is stopped and continued, and compared with one that is not. Each mistake has a function that
finds it.

Refused, with status 2 and what to change, are rates that train alike, no validation, a metric that
is never logged, loaders that cannot be read in batches of another size, a target that untrained
weights meet, a checkpoint that does not load back, and a schedule that raises within the budget. A
module that seeds itself is named. One that keeps state that its checkpoint lacks is tuned, too: its
trials start afresh, and the plan names the attribute.
"""

import functools
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import BatchSampler, DataLoader

from bstune.core.errors import BstuneError, ConfigError, StateError
from bstune.core.evaluation_schedule import AT_THE_END
from bstune.core.records import TrialProtocol, TrialResult, TrialSpec
from bstune.core.search_space import BUDGET, Space, corners
from bstune.core.step_time import StepTime
from bstune.options import StudyOptions, overrides
from bstune.recipe import Recipe
from bstune.system.console import format_number, listing
from bstune.system.failures import cause, described, place_of
from bstune.system.interruption import temporary_folder
from bstune.system.watchdog import Wait, waiting_for
from bstune.trial.backend import chooses_horizons
from bstune.trial.batches.counted_stream import has_no_length
from bstune.trial.batches.loader import HOW_TO_GIVE, KEPT_OPTIONS, loaders_of, not_rebatchable
from bstune.trial.checks.attributes import Attribute, attributes_of, fingerprint
from bstune.trial.checks.continuation import Course, lost_state
from bstune.trial.checks.given_data import check_batches, check_epoch_schedules
from bstune.trial.checks.proportion import are_in_proportion, schedule_out_of_proportion
from bstune.trial.checks.schedule_end import ScheduleCopy, copies_of_schedules, end_of_schedule
from bstune.trial.checks.start import how_to_log
from bstune.trial.devices.device import device_of, synchronize
from bstune.trial.devices.randomness import random_state
from bstune.trial.lightning.installed import (
    Callback,
    LightningDataModule,
    LightningModule,
    Trainer,
    garbage_collection_cuda,
    sized_len,
)
from bstune.trial.lightning.packages import is_overridden
from bstune.trial.lightning.trainer import without_monitors
from bstune.trial.loop import Workload, run_trial
from bstune.trial.parts.checkpoint import Stopped
from bstune.trial.parts.metric import metric
from bstune.trial.parts.verdict import refuse_met_target

# Of one short trial.
SHORT_STEPS = 4
# After which the weights of two learning rates are compared, and one of the trials is stopped.
COMPARED_STEPS = 3
# After a stop: what changes a rate at the end of a step shows in the next one.
FOLLOWED_STEPS = 2
# Between the two batch sizes: small ones are cheap.
SPREAD = 4
# Between the two where so many steps of the smaller one take no longer than this on a CPU: the line
# through the two is extrapolated less far.
FAST_SPREAD = 32
FAST_SECONDS = 0.5
# Validation examples on which untrained weights are first compared with the target. Where these
# meet it, all of them decide.
START_EXAMPLES = 128
# Of other evaluations: some metrics are not defined on a single example.
FEW_EXAMPLES = 64
# A trial whose steps have taken this long ends after its second one, and none is begun that would
# take longer without need: a large network on a CPU takes seconds a step.
PATIENCE_SECONDS = 2.0
# Of a trial that slow: the first one may be at a warm-up's rate of zero.
SLOW_STEPS = 2
# Hooks after which the generators' states are looked at, in the order of their calls.
SEEDING_HOOKS = ("on_fit_start", "on_train_start")
BUILT = "__init__"
FIRST_STEP = "the first step"


@dataclass(frozen=True)
class PreflightFindings:
    """What the short trials measured, and what the study does without."""

    # The batch size that was trained.
    smallest: int
    step_time: StepTime
    gradient_bytes: int
    notes: tuple[str, ...]
    # Predicted for an evaluation on all of the validation data.
    evaluation_seconds: float = 0.0
    # In which the validation data are read; 0: unknown.
    evaluation_batches: int = 0
    # Whether a stopped trial can go on; else it starts afresh.
    continues: bool = True
    # Of the module, as far as they are trained.
    parameters: int = 0


def preflight(
    workload: Workload,
    protocol: TrialProtocol,
    space: Space,
    trial: TrialSpec | None,
    *,
    continues: bool,
    survey: bool,
) -> PreflightFindings:
    """Refuse a workload that cannot be tuned, with what to change.

    The user's own errors are raised as they are.

    Args:
        workload: what is trained.
        protocol: of the study's trials.
        space: of batch sizes and learning rates.
        trial: the one to run instead of a study; None: a study.
        continues: whether trials are stopped and continued.
        survey: whether one will find the smallest batch size at which the module can be trained.
    """
    if trial is not None:
        # A single trial's batch size may be one at which the module can be built where the range's
        # smallest is none.
        space = replace(space, low=trial.batch_size, high=trial.batch_size)
    short = _ShortTrials(workload, protocol)
    small = space.snap(space.low)
    large = space.snap(min(space.high, space.low * SPREAD))
    check_batches(workload, small, large)
    lowest = -space.delta_bound
    try:
        first = short.run(small, space.lr(small, lowest), start=True)
    except BstuneError:
        raise
    # Such as batch normalisation's, of a batch of one.
    except Exception:
        if not survey or small == large:
            raise
        small = large
        first = short.run(small, space.lr(small, lowest), start=True)
    seconds = {small: first.seconds}
    is_fast = FAST_SPREAD * first.seconds <= FAST_SECONDS
    if is_fast and large != small and device_of(protocol.trainer).type == "cpu":
        large = space.snap(min(space.high, space.low * FAST_SPREAD))
    # The survey trains at further batch sizes, and times them: here it is not worth long steps.
    is_slow = SLOW_STEPS * first.seconds * large / small > PATIENCE_SECONDS
    if large != small and not (survey and is_slow):
        seconds[large] = short.run(large, space.lr(large, lowest)).seconds
    notes = [*manual_notes(first, protocol)]
    notes += schedule_notes(first, protocol.last_step(small))
    if trial is None:
        other_seed = short.run_spec(replace(first.spec, seed=first.spec.seed + 1), steps=1)
        notes += seed_notes(first, other_seed)
    other_rate = replace(first.spec, lr=space.lr(small, 0.0))
    other, why_not_continued = _compared(
        short, workload, first, other_rate, continues, protocol.last_step(small)
    )
    if why_not_continued is not None:
        notes.append(f"a stopped trial cannot be continued, it starts afresh: {why_not_continued}")
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        garbage_collection_cuda()
    return PreflightFindings(
        smallest=small,
        step_time=_step_time(seconds),
        gradient_bytes=first.gradient_bytes,
        notes=tuple(notes),
        evaluation_seconds=short.evaluation_seconds(other),
        evaluation_batches=short.evaluation_batches,
        continues=why_not_continued is None,
        parameters=first.parameters,
    )


def _compared(
    short: "_ShortTrials",
    workload: Workload,
    first: "_Recorder",
    spec: TrialSpec,
    continues: bool,
    longest: int,
) -> tuple["_Recorder", str | None]:
    """Run a trial at another rate than the first one's, stop it, and let it go on.

    One trial serves both checks. With it comes why it cannot be continued; None: it can, or nothing
    asks for it. The budget ends a trial after ``longest`` steps.
    """
    if not continues:
        other = short.run_spec(spec, compared_steps=first.compared_steps)
        check_rates(first, other, workload)
        return other, None
    with temporary_folder() as folder:
        state = Path(folder) / "stopped.ckpt"
        spec = replace(spec, max_steps=first.compared_steps)
        other = short.run_spec(spec, compared_steps=first.compared_steps, state=state)
        check_rates(first, other, workload)
        # A trial that ended by itself before its last step leaves no state.
        if not state.exists():
            return other, None
        return other, _why_not_continued(short, other, state, longest)


def _step_time(seconds: Mapping[int, float]) -> StepTime:
    """Draw the line through the seconds of a step at one or two batch sizes, no part negative."""
    small = min(seconds)
    large = max(seconds)
    if small == large:
        return StepTime(0.0, seconds[small] / small)
    slope = max(0.0, (seconds[large] - seconds[small]) / (large - small))
    return StepTime(max(0.0, seconds[small] - slope * small), slope)


# Short trials


class _ShortTrials:
    """Runs short trials of a workload, each watched by a recorder."""

    def __init__(self, workload: Workload, protocol: TrialProtocol) -> None:
        self._workload = workload
        self._protocol = replace(
            protocol.for_steps_only(),
            # What a metric was at earlier evaluations must not tell two trials apart.
            evaluation_schedule=AT_THE_END,
            noise_scale_every=None,
            trainer=without_monitors(protocol.trainer),
        )
        self._exact = device_of(protocol.trainer).type == "cpu"
        self._target = protocol.target
        examples = max(1, workload.validation_examples)
        self._validation = workload.validation_batches
        self._start = workload.validation_batches
        loaders = loaders_of(workload.validation_batches)
        self.evaluation_batches = sum(sized_len(loader) or 0 for loader in loaders)
        if len(loaders) == 1:
            # Every n-th batch, so that a part of the data stands for all, in whatever order.
            self._validation = in_small_batches(loaders[0], FEW_EXAMPLES)
            every = max(1, examples // START_EXAMPLES)
            self._start = _EveryNth(self._validation, every).batches
            loaders = [self._validation]
        batches = sum(sized_len(loader) or 1 for loader in loaders)
        self._few = max(1, round(FEW_EXAMPLES * batches / examples))
        # Of the validation data.
        self._few_share = min(1.0, self._few / batches)

    def evaluation_seconds(self, trial: "_Recorder") -> float:
        """Predict the seconds of an evaluation on all of the data from those of a short trial."""
        if trial.result is None:
            return 0.0
        evaluations = max(1, len(trial.result.history))
        return trial.result.eval_seconds / evaluations / self._few_share

    def run(self, batch_size: int, lr: float, *, start: bool = False) -> "_Recorder":
        """Train ``SHORT_STEPS`` steps; ``start``: untrained weights must not meet the target."""
        return self.run_spec(TrialSpec(0, 0, batch_size, lr, None, 0), start=start)

    def run_spec(
        self,
        spec: TrialSpec,
        *,
        start: bool = False,
        whole: bool = False,
        compared_steps: int | None = None,
        steps: int = SHORT_STEPS,
        followed_after: int | None = None,
        state: Path | None = None,
        resume: Stopped | None = None,
    ) -> "_Recorder":
        """Train for some ``steps``, or until the spec's last one.

        Args:
            spec: of the trial.
            start: whether untrained weights are evaluated too, on a part of the validation data.
            whole: whether they are evaluated on all of it.
            compared_steps: after which the weights are kept; None: as long as it takes.
            steps: of a trial whose spec names no last one.
            followed_after: of its own steps, from which on its course is recorded; None: it is not.
            state: where a trial that is stopped leaves its state; None: nowhere.
            resume: a stopped trial from which this one goes on; None: it starts afresh.
        """
        build = self._workload.build_module
        protocol = self._protocol
        validation = self._validation
        if whole:
            validation = self._workload.validation_batches
        elif start:
            validation = self._start
        else:
            # It is evaluated once, at the end, on a few batches.
            limits = {"limit_val_batches": self._few, "num_sanity_val_steps": 0}
            protocol = replace(protocol, trainer={**protocol.trainer, **limits})
        with waiting_for("the preflight", steps=True) as wait:
            recorder = _Recorder(
                spec,
                self._target.metric,
                wait,
                compared_steps=compared_steps,
                steps=steps,
                followed_after=followed_after,
                exact=self._exact,
            )
            workload = replace(
                self._workload,
                build_module=lambda trial: recorder.attach(build(trial)),
                validation_batches=validation,
            )
            recorder.result = run_trial(workload, spec, protocol, state=state, resume=resume)
        if start and recorder.start_metric is not None:
            is_part = self._start is not self._workload.validation_batches and not whole
            # A part may meet it by chance: all of the data decide.
            if is_part and self._target.reached(recorder.start_metric):
                return self.run_spec(spec, start=True, whole=True)
            refuse_met_target(self._target, recorder.start_metric)
        return recorder


def in_small_batches(batches: Any, batch_size: int) -> Any:
    """Hand out validation batches of at most ``batch_size`` examples, where they can be cut.

    Of bstune's own batches and of a DataLoader that cuts them off its sampler's order, any can. A
    few steps are not to wait for an evaluation of a thousand images by a network that takes seconds
    for them.
    """
    if (sized_len(batches) or 0) == 0:
        return batches
    if hasattr(batches, "in_batches_of"):
        if batches.batch_size <= batch_size:
            return batches
        return batches.in_batches_of(batch_size)
    # A subclass may give batches by rules of its own.
    if type(batches) is not DataLoader or type(batches.batch_sampler) is not BatchSampler:
        return batches
    if batches.batch_sampler.batch_size <= batch_size:
        return batches
    kept = {name: getattr(batches, name) for name in KEPT_OPTIONS}
    return DataLoader(
        batches.dataset,
        batch_size=batch_size,
        sampler=batches.batch_sampler.sampler,
        drop_last=batches.batch_sampler.drop_last,
        **kept,
    )


class _EveryNth:
    """Every n-th of the validation batches; a DataLoader reads no other."""

    def __init__(self, batches: Iterable[object], n: int) -> None:
        self._whole = batches
        self._n = n
        self.batches: Iterable[object] = self
        if n == 1:
            self.batches = batches
        elif (
            type(batches) is DataLoader
            and batches.batch_sampler is not None
            and sized_len(batches) is not None
        ):
            kept = {name: getattr(batches, name) for name in KEPT_OPTIONS}
            every_nth = list(batches.batch_sampler)[::n]
            self.batches = DataLoader(batches.dataset, batch_sampler=every_nth, **kept)

    def __iter__(self) -> Iterator[object]:
        return islice(self._whole, 0, None, self._n)

    def __len__(self) -> int:
        return len(range(0, sized_len(self._whole) or 1, self._n))


@dataclass(frozen=True)
class GroupRate:
    """The learning rate of one of an optimizer's groups of parameters."""

    optimizer: str
    lr: float
    # Before any schedule, where one has noted it.
    initial_lr: float


class _Recorder(Callback):
    """Watches a short trial from within.

    Args:
        spec: of the trial; with ``max_steps`` it ends there.
        metric_name: the target's.
        wait: told what the trial comes to.
        compared_steps: after how many the weights are kept, to be compared with another trial's;
            None: after ``COMPARED_STEPS``, or the last one that a slow trial takes before.
        steps: after which it is ended, or earlier if it is slow.
        followed_after: of its own steps, from which on its course is recorded; None: it is not.
        exact: whether equal trainings are equal to the bit.
        now: a clock of seconds.
    """

    def __init__(
        self,
        spec: TrialSpec,
        metric_name: str,
        wait: Wait | None = None,
        *,
        compared_steps: int | None = None,
        steps: int = SHORT_STEPS,
        followed_after: int | None = None,
        exact: bool = True,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.spec = spec
        self._metric = metric_name
        self._steps = steps
        self._followed_after = followed_after
        self._exact = exact
        self.course: Course | None = None
        self.schedules: tuple[ScheduleCopy, ...] = ()
        # Further copies: a comparison with another trial's steps them, as looking for their end
        # steps the first ones.
        self.compared_schedules: tuple[ScheduleCopy, ...] = ()
        # Names of schedules that cannot be copied.
        self.unknown_schedules: tuple[str, ...] = ()
        # States, by when and by library.
        self.generators: dict[str, dict[str, Any]] = {}
        self._attributes: dict[str, Attribute] | None = None
        self._batches: list[str] = []
        self._now = now
        # When the first step began.
        self._began: float | None = None
        # When each step has ended.
        self._ends: list[float] = []
        self._kept_after: tuple[int, ...] = (SLOW_STEPS, COMPARED_STEPS)
        if compared_steps is not None:
            self._kept_after = (compared_steps,)
        self.compared_steps = compared_steps or COMPARED_STEPS
        self._wait = wait or Wait("")
        self.result: TrialResult | None = None
        self.module_name = ""
        # Where its configure_optimizers is written.
        self.place = ""
        self._wait_for("start", limited=False)
        self.automatic = True
        self.gradient_bytes = 0
        self.parameters = 0
        self.batches = 0
        # Of the validation batches, before any training.
        self.start_metric: float | None = None
        # Weights before the first step, by name.
        self.before: dict[str, Tensor] = {}
        # Weights after ``compared_steps`` steps; None: the trial ended before.
        self.after: dict[str, Tensor] | None = None
        # Learning rates at that step.
        self.rates: list[GroupRate] = []
        # Steps of each optimizer, by its place among them.
        self.optimizer_steps: Counter[int] = Counter()
        self._metrics: dict[str, Tensor] = {}
        # Metrics of the last evaluation.
        self._validated: dict[str, float] = {}

    @property
    def seconds(self) -> float:
        """Seconds of the fastest step, from the end of the one before it; 0: none was timed."""
        steps = (end - start for start, end in pairwise(self._ends))
        return min(steps, default=0.0)

    def attach(self, module: LightningModule) -> LightningModule:
        """Let the Trainer call this one with the module's own call-backs."""
        self.module_name = type(module).__name__
        self.place = place_of(type(module).configure_optimizers)
        configure = module.configure_callbacks

        def configured() -> Sequence[Callback]:
            callbacks = configure()
            if not isinstance(callbacks, Sequence):
                callbacks = [callbacks]
            return [*callbacks, self]

        module.configure_callbacks = configured  # type: ignore[method-assign]
        self._look_at_generators(BUILT)
        for hook in SEEDING_HOOKS:
            setattr(module, hook, self._followed_by_look(hook, getattr(module, hook)))
        return module

    def _followed_by_look(self, hook: str, call: Callable[..., object]) -> Callable[..., object]:
        @functools.wraps(call)
        def called(*args: object, **kwargs: object) -> object:
            returned = call(*args, **kwargs)
            self._look_at_generators(hook)
            return returned

        return called

    def _look_at_generators(self, moment: str) -> None:
        self.generators[moment] = random_state()

    def _wait_for(self, what: str, *, limited: bool) -> None:
        """Name what the trial comes to.

        Steps and evaluations are limited, its start and its end are not.
        """
        parts = [f"the preflight's {what}"]
        if self.module_name:
            parts.append(f" of {self.module_name}")
        parts.append(f" at batch size {self.spec.batch_size}")
        for name, value in self.spec.hyperparameters.items():
            parts.append(f", {name} {value:g}")
        self._wait.go_on("".join(parts), limited=limited)

    def _wait_for_step(self, trainer: Trainer) -> None:
        number = 1 + self.batches // trainer.accumulate_grad_batches
        self._wait_for(f"training step {number}", limited=True)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # It has no limit: the loader may read all of the data for it.
        self._wait_for("first batch", limited=False)
        self.automatic = pl_module.automatic_optimization
        check_epoch_schedules(trainer, pl_module)
        for parameter in pl_module.parameters():
            if parameter.requires_grad:
                self.gradient_bytes += parameter.numel() * parameter.element_size()
                self.parameters += parameter.numel()
        self.before = _weights(pl_module)

    def on_before_optimizer_step(
        self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer
    ) -> None:
        # Lightning's wrapper of an optimizer holds it.
        stepped = getattr(optimizer, "optimizer", optimizer)
        place = 0
        for number, known in enumerate(trainer.optimizers):
            if known is stepped:
                place = number
                break
        self.optimizer_steps[place] += 1

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self._wait_for_step(trainer)
        if self._began is None:
            self._began = self._now()
            self._look_at_generators(FIRST_STEP)
        if self._followed_after is None:
            return
        if self.batches >= self._followed_after * trainer.accumulate_grad_batches:
            if self._attributes is None:
                self._attributes = attributes_of(trainer, pl_module)
            self._batches.append(fingerprint(batch))

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.batches += 1
        # The next step's batch is drawn from now on.
        self._wait_for_step(trainer)
        steps, rest = divmod(self.batches, trainer.accumulate_grad_batches)
        if steps in self._kept_after and rest == 0:
            self.compared_steps = steps
            self.after = _weights(pl_module)
            self.rates = _rates(trainer)
        if rest == 0:
            synchronize(pl_module.device)
            self._ends.append(self._now())
        seconds = 0.0 if self._began is None else self._now() - self._began
        is_slow = steps >= SLOW_STEPS and seconds > PATIENCE_SECONDS
        is_over = self.spec.max_steps is None and (steps >= self._steps or is_slow)
        if rest == 0 and is_over:
            trainer.should_stop = True

    def on_sanity_check_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._wait_for("evaluation", limited=True)

    def on_sanity_check_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._wait_for("start", limited=False)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._wait_for("end", limited=False)
        steps = self.batches // trainer.accumulate_grad_batches
        self.schedules = copies_of_schedules(trainer, pl_module, steps)
        self.compared_schedules = copies_of_schedules(trainer, pl_module, steps)
        unknown = list[str]()
        for config in trainer.lr_scheduler_configs:
            schedule: object = config.scheduler
            if not isinstance(schedule, LRScheduler):
                unknown.append(type(schedule).__name__)
        self.unknown_schedules = tuple(unknown)
        if self._attributes is None or self._followed_after is None:
            return
        self.course = Course(
            steps=steps - self._followed_after,
            attributes=self._attributes,
            batches=tuple(self._batches),
            rates=tuple(rate.lr for rate in _rates(trainer)),
            start=self.before if self._followed_after == 0 else {},
            weights=_weights(pl_module),
            metrics=self._validated,
            exact=self._exact,
        )

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._wait_for("evaluation", limited=True)
        # What was logged in training, or in an earlier evaluation, must not look like this one's.
        self._metrics = dict(trainer.callback_metrics)
        trainer.callback_metrics.clear()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not trainer.sanity_checking:
            place = place_of(type(pl_module).validation_step)
            check_metric(self._metric, trainer.callback_metrics, self._metrics, place)
            logged = trainer.callback_metrics.items()
            self._validated = {name: float(value) for name, value in logged}
            for name, value in self._metrics.items():
                trainer.callback_metrics.setdefault(name, value)
        elif self._metric in trainer.callback_metrics:
            self.start_metric = metric(trainer, self._metric)


def _rates(trainer: Trainer) -> list[GroupRate]:
    rates = []
    for optimizer in trainer.optimizers:
        for group in optimizer.param_groups:
            if "lr" in group:
                initial = float(group.get("initial_lr", group["lr"]))
                rates.append(GroupRate(type(optimizer).__name__, float(group["lr"]), initial))
    return rates


def _weights(module: LightningModule) -> dict[str, Tensor]:

    named = module.named_parameters()
    return {name: weight.detach().to("cpu", copy=True) for name, weight in named}


# What each of them finds


def check_takes_rate(recipe: Recipe) -> None:
    """Refuse a recipe of which nothing takes the trial's learning rate."""
    if not recipe.takes("lr"):
        raise ConfigError(
            "nothing in the workload takes ${trial.lr}, so every learning rate would train alike: "
            f"{recipe.advice_on_rate()}; or give {recipe.override}, which sets the rate in the "
            "optimizer"
        )


def check_loaders(data: LightningDataModule, *, is_given: bool = False) -> None:
    """Refuse a data module whose loaders a trial cannot use.

    Its training data are read in other batches, the others as they are.

    Args:
        data: that is set up.
        is_given: whether a function of the batch size has made it, so that its batches may be taken
            as they come.
    """
    if hasattr(data, "train_batches"):
        return
    name = type(data).__name__
    for method in ("train_dataloader", "val_dataloader"):
        if not is_overridden(method, data):
            raise ConfigError(
                f"{name}{place_of(type(data))} has no {method}: define it, so that it returns a "
                "DataLoader"
            )
    problem = not_rebatchable(data.train_dataloader())
    if problem is not None and not is_given:
        raise ConfigError(
            f"{name}.train_dataloader() cannot be read in batches of another size: {problem}; "
            f"{HOW_TO_GIVE}. Or return DataLoader(dataset, batch_size=..., shuffle=True) over a "
            "data set with __len__ and __getitem__ (a ConcatDataset or StackDataset of several), "
            "or give the data module train_batches(batch_size, micro_batch_size, seed), which "
            "yields batches of that size without end"
        )
    loaders = data.val_dataloader()
    validation = loaders_of(loaders)
    if not validation or validation == [None]:
        raise ConfigError(
            f"{name}.val_dataloader(){place_of(type(data).val_dataloader)} returns no loader, and "
            "a trial ends by a metric that is logged in validation: return a DataLoader over the "
            "validation data"
        )
    # Its examples are counted when the data are loaded.
    if has_no_length(loaders):
        return
    for loader in validation:
        if not (isinstance(loader, DataLoader) and hasattr(loader.dataset, "__len__")):
            raise ConfigError(
                f"{name}.val_dataloader() returns a {type(loader).__name__} without a length: "
                "return a DataLoader over a data set with __len__, so that evaluations take their "
                "share of the examples"
            )


def check_metric(
    name: str, logged: Mapping[str, object], in_training: Mapping[str, object], where_to: str = ""
) -> None:
    """Refuse a target whose metric is not ``logged`` in validation.

    It may be logged ``in_training``.

    ``where_to`` says where the module's validation_step is written; empty: not known.
    """
    if name in logged:
        return
    where = "in training alone" if name in in_training else "nowhere"
    if not logged:
        raise ConfigError(
            f"the target's metric {name!r} is logged {where}, and nothing in "
            f"validation_step{where_to}: {how_to_log(name)}"
        )
    raise ConfigError(
        f"the target's metric {name!r} is logged {where}; in validation the module logs "
        f"{', '.join(sorted(logged))}: make one of them the target's (target='METRIC<=VALUE' in "
        f"Python, workload.target.metric=METRIC), or log it in validation_step{where_to}"
    )


def check_rates(slow: _Recorder, fast: _Recorder, workload: Workload) -> None:
    """Refuse a workload that does not follow its learning rate, by trials at two of them."""
    # A range of a single rate has nothing to compare.
    if slow.spec.lr == fast.spec.lr:
        return
    problem = rate_problem(slow, fast, workload.overrides_lr, workload.override)
    if problem is None and workload.overrides_lr:
        problem = proportion_problem(slow, fast, workload.override)
    if problem is not None:
        raise ConfigError(problem)


def rate_problem(
    slow: _Recorder, fast: _Recorder, is_overridden: bool = False, override: str = ""
) -> str | None:
    """Return why two learning rates are the same to the module.

    None if they are not, or if a few steps do not show it.

    ``is_overridden`` is whether the rate is set in the optimizer, ``override`` what does so. At a
    rate of zero, as a warm-up begins with, nothing shows it; nor where no weight moves, if the
    optimizers' own rates are the trial's.
    """
    if slow.after is None or fast.after is None:
        return None
    if not _are_equal(slow.after, fast.after):
        return None
    follows = slow.rates != fast.rates
    has_moved = not _are_equal(slow.before, slow.after)
    is_at_zero = all(rate.lr == 0.0 for rate in (*slow.rates, *fast.rates))
    if slow.rates and (is_at_zero or (follows and not has_moved)):
        return None
    same = (
        f"trial.lr has no effect: at {format_number(slow.spec.lr)} and at "
        f"{format_number(fast.spec.lr)} the first {slow.compared_steps} steps of "
        f"{slow.module_name} are the same"
    )
    if not slow.rates:
        return (
            f"{same}, as it has no optimizer with a learning rate: return one from "
            "configure_optimizers"
        )
    if follows:
        return (
            f"{same}, though the rates of its optimizers are not: train the weights by these "
            "optimizers' steps"
        )
    # Many groups of parameters may have one rate, which is shown once.
    rates = [f"{rate.optimizer} {format_number(rate.lr)}" for rate in slow.rates]
    shown = ", ".join(dict.fromkeys(rates))
    same += f", with these rates of its optimizers at both: {shown}"
    if is_overridden:
        return (
            f"{same}. {override} sets the rate in the optimizer, and a hook of the module or a "
            "schedule sets one of its own after that: let it use the rate that the module is given"
        )
    return (
        f"{same}. Let configure_optimizers{slow.place}, and any schedule that sets rates of its "
        "own (as OneCycleLR's max_lr), use the rate that the module was given; or give "
        f"{override}, which sets it in the optimizer"
    )


def _are_equal(weights: Mapping[str, Tensor], others: Mapping[str, Tensor]) -> bool:
    """Say whether weights are the others of the same names, to the bit."""
    return all(torch.equal(weight, others[name]) for name, weight in weights.items())


def proportion_problem(slow: _Recorder, fast: _Recorder, override: str) -> str | None:
    """Return what does not keep its proportion to a rate that is set in the optimizer.

    None if all does.
    """
    advice = "let the module take the rate, and use it there"
    if slow.unknown_schedules:
        return (
            f"{override} sets the rate in torch's own schedules, and "
            f"{slow.module_name}{slow.place} has {listing(slow.unknown_schedules)}: {advice}"
        )
    factor = fast.spec.lr / slow.spec.lr
    name = schedule_out_of_proportion(slow.compared_schedules, fast.compared_schedules, factor)
    if name is not None:
        return (
            f"{override} moves all rates in proportion, and {name} of "
            f"{slow.module_name}{slow.place} has rates of its own ahead: {advice}"
        )
    slow_rates = [rate.lr for rate in slow.rates]
    fast_rates = [rate.lr for rate in fast.rates]
    # Other groups of parameters have no rates to compare with.
    comparable = len(slow_rates) == len(fast_rates)
    if comparable and not are_in_proportion(slow_rates, fast_rates, factor):
        return (
            f"{override} moves all rates in proportion, and after {slow.compared_steps} steps "
            f"those of {slow.module_name}{slow.place} are not: a hook of the module sets some; "
            f"{advice}"
        )
    return None


def _why_not_continued(
    short: _ShortTrials, stopped: _Recorder, state: Path, longest: int
) -> str | None:
    """Continue a stopped trial beside one that is not stopped; None if the two are the same.

    What the user's code cannot load is refused. The budget ends a trial after ``longest`` steps.
    """
    assert stopped.result is not None  # noqa: S101 (it has left a state)
    done = stopped.compared_steps
    # Steps that take seconds are few.
    followed = FOLLOWED_STEPS if done >= COMPARED_STEPS else 1
    spec = replace(stopped.spec, max_steps=max(done + 1, min(done + followed, longest)))
    resumed_spec = replace(spec, number=1, resumed_from=0)
    resume = Stopped(stopped.result, state)

    def resumed() -> Course | None:
        return short.run_spec(resumed_spec, followed_after=0, resume=resume).course

    def straight() -> Course | None:
        return short.run_spec(spec, followed_after=done).course

    try:
        gone_on = resumed()
    except StateError as error:
        # The note says itself what cannot be continued, and that it starts afresh.
        message = str(error)
        reason = message.partition("cannot be read: ")[2].removesuffix("; it starts afresh")
        return (reason or message).splitlines()[0]
    except Exception as error:
        _, frames = described(error)
        raise ConfigError(
            f"a stopped trial of {stopped.module_name} cannot be continued from its checkpoint: "
            f"{cause(error)}; let it load what it saves, make in __init__ what "
            "on_train_epoch_start makes (not called again amid an epoch), or set sampler=tpe, "
            f"which continues no trial\n{frames}".rstrip()
        ) from error
    not_stopped = straight()
    if gone_on is None or not_stopped is None:
        return None
    # Both are run again where they differ: a training may differ from itself.
    lost = lost_state(not_stopped, gone_on, lambda: (straight(), resumed()))
    if lost is None:
        return None
    return lost.text(stopped.module_name)


def schedule_notes(trial: _Recorder, last_step: int) -> Iterator[str]:
    """Yield where schedules are at 0 before a trial's last step; refuse those that raise there."""
    for schedule in trial.schedules:
        end = end_of_schedule(schedule, last_step)
        if end is None:
            continue
        text = end.text(trial.module_name, trial.spec.batch_size, last_step)
        if end.error is not None:
            raise ConfigError(text)
        yield text


def seed_notes(trial: _Recorder, other: _Recorder) -> Iterator[str]:
    """Yield which generators are the same at the first step of two trials with different seeds."""
    if FIRST_STEP not in trial.generators or FIRST_STEP not in other.generators:
        return
    same = _same_generators(trial, other, FIRST_STEP)
    if not same:
        return
    # The first moment from which on they are the same.
    where = FIRST_STEP
    for moment in reversed((BUILT, *SEEDING_HOOKS)):
        if not set(same) <= set(_same_generators(trial, other, moment)):
            break
        where = moment
    seen = f"at {where}" if where == FIRST_STEP else f"after {where}"
    yield (
        f"fresh seeds are not fresh: {trial.module_name} seeds {listing(same)} itself (two seeds "
        f"of a trial have one state of the generator {seen}): leave the seed to bstune, or take "
        "the trial's (trial.seed in Python, ${trial.seed} in YAML)"
    )


def _same_generators(trial: _Recorder, other: _Recorder, moment: str) -> list[str]:
    """Name the libraries whose generator has one state in both trials at a moment."""
    others = other.generators[moment]
    same = list[str]()
    for name, state in trial.generators[moment].items():
        if name in others and fingerprint(state) == fingerprint(others[name]):
            same.append(name)
    return same


def manual_notes(trial: _Recorder, protocol: TrialProtocol) -> Iterator[str]:
    """Yield what a study does without where the module steps its optimizers itself."""
    if trial.automatic:
        return
    last_place = max(trial.optimizer_steps, default=-1)
    counts = [str(trial.optimizer_steps[place]) for place in range(last_place + 1)]
    took = " and ".join(counts) or "no"
    without = "" if protocol.noise_scale_every is None else ", without noise scale"
    yield (
        f"{trial.module_name} steps its optimizers itself (manual optimization): trained as it is, "
        f"one step of a trial a batch (in {trial.batches} batches its optimizers took {took} steps)"
        f"{without}"
    )


def check_tunables(
    options: StudyOptions, workload: Workload, protocol: TrialProtocol, space: Space, *, stops: bool
) -> None:
    """Train a few steps at the smallest batch size with all further hyperparameters at each end."""
    name = options.workload.name
    short = _ShortTrials(workload, protocol)
    for tunable in space.tunables:
        if not tunable.key.startswith(BUDGET):
            continue
        if stops:
            raise ConfigError(
                f"workload.tunable.{tunable.name} sets {tunable.key}, but no schedule of {name} "
                "ends with its budget: it would change nothing but when a trial gives up"
            )
        if chooses_horizons(options):
            raise ConfigError(
                f"workload.tunable.{tunable.name} sets {tunable.key}, but the search itself "
                f"chooses how long each schedule of {name} is, within the budget: leave "
                f"{tunable.name} out of search.tune"
            )
    for values in corners(space.tunables):
        lr = space.lr(space.low, -space.delta_bound)
        spec = TrialSpec(0, 0, space.low, lr, None, 0, hyperparameters=values)
        try:
            short.run_spec(spec)
        except (TypeError, ValueError, ConfigError) as error:
            raise ConfigError(
                "workload.tunable: the module does not take "
                f"{', '.join(overrides(options, values))} at batch size {space.low}: "
                f"{str(error).splitlines()[0]}"
            ) from error
