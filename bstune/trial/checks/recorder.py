"""Watches a short trial of the preflight: a call-back whose parts record one thing each.

At the end of the trial their records make a :class:`~bstune.trial.checks.short_trial.ShortTrial`.
"""

import functools
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from bstune.core.records import TrialResult, TrialSpec
from bstune.system.failures import place_of
from bstune.system.watchdog import Wait
from bstune.trial.checks.attributes import Attribute, attributes_of, fingerprint
from bstune.trial.checks.continuation import Course
from bstune.trial.checks.doubled_batch import DoubledLoss, doubled_loss
from bstune.trial.checks.given_data import check_epoch_schedules
from bstune.trial.checks.logged_metric import check_metric
from bstune.trial.checks.monitors import Monitors, monitors_of
from bstune.trial.checks.schedule_end import copies_of_schedules
from bstune.trial.checks.short_trial import (
    ComparedWeights,
    GroupRate,
    SeenModule,
    SeenSchedules,
    ShortTrial,
)
from bstune.trial.devices.device import synchronize
from bstune.trial.devices.randomness import GeneratorStates, random_state
from bstune.trial.lightning.installed import Callback, LightningModule, Trainer, sized_len
from bstune.trial.parts.metric import metric

# The steps of a short trial.
SHORT_STEPS = 4
# The steps after which weights of two learning rates are compared, and one of the trials stops.
COMPARED_STEPS = 3
# A trial whose steps have taken this long ends early, and no trial that would take longer is begun
# without need: a large network on a CPU takes seconds for a step.
PATIENCE_SECONDS = 2.0
# The steps after which such a slow trial ends. One would be too few, as it may be at a warm-up's
# rate of zero.
SLOW_STEPS = 2
# Hooks after which the random generators' states are recorded, in the order of their calls.
SEEDING_HOOKS = ("on_fit_start", "on_train_start")
# Further moments at which they are recorded.
BUILT = "__init__"
FIRST_STEP = "the first step"
# A module that no trial has built yet.
UNBUILT = SeenModule(name="", place="", automatic=True, parameters=0)


@dataclass(frozen=True)
class RecordingPlan:
    """When a short trial ends, and which of its steps are recorded.

    Args:
        steps: after so many steps it ends, or earlier if it is slow. A spec with ``max_steps`` ends
            there instead.
        compared_steps: after so many steps the weights are kept, to be compared with another
            trial's. None: after ``COMPARED_STEPS``, or after the last step of a slow trial.
        followed_after: the number of its own steps after which its course is recorded; None: it is
            not recorded.
        doubles_batch: whether the loss of the last step's batch is compared with that of each
            example twice. The trial's weights are of no use after that.
    """

    steps: int = SHORT_STEPS
    compared_steps: int | None = None
    followed_after: int | None = None
    doubles_batch: bool = False


SHORT_PLAN = RecordingPlan()


class Recorder(Callback):
    """Watches a short trial from within, as one of its call-backs.

    Args:
        spec: of the trial.
        metric_name: the name of the target's metric.
        plan: when the trial ends, and which of its steps are recorded.
        wait: is told which part of the trial runs, for the user who waits.
        exact: whether equal trainings have equal results to the bit. The record of the trial's last
            steps says so to the check that compares it with that of an equal training.
    """

    def __init__(
        self, spec: TrialSpec, metric_name: str, plan: RecordingPlan, wait: Wait, *, exact: bool
    ) -> None:
        self._spec = spec
        self._steps = plan.steps
        self._doubles_batch = plan.doubles_batch
        self._waits = WaitTexts(wait, spec)
        self.clock = StepClock()
        self._module = UNBUILT
        self._generators = GeneratorRecorder()
        self._optimizer_steps = OptimizerSteps()
        self._weights = WeightsKeeper(plan.compared_steps)
        self._metrics = MetricsLogged(metric_name)
        self._followed = FollowedSteps(plan.followed_after, exact)
        # The schedules at the trial's end.
        self._schedules = SeenSchedules()
        # The record of the last steps, which is compared with another trial's; None: none is made.
        self._course: Course | None = None
        # The call-backs that stop or save a training.
        self._monitors = Monitors()
        # Whether the training data have a length, after which they begin anew.
        self._has_epochs = False
        # The micro-batches that have been trained on.
        self._batches = 0
        # The loss of the last batch, and with each of its examples twice; None: not compared.
        self._doubled_loss: DoubledLoss | None = None
        self._waits.go_on("start", has_time_limit=False)

    def seen(self, result: TrialResult) -> ShortTrial:
        """Give the record of what was seen of the trial, which has ended with ``result``."""
        return ShortTrial(
            spec=self._spec,
            result=result,
            module=self._module,
            step_ends=tuple(self.clock.ends),
            batches=self._batches,
            optimizer_steps=self._optimizer_steps.of_each(),
            weights=self._weights.compared_weights(),
            schedules=self._schedules,
            generators=self._generators.states,
            start_metric=self._metrics.at_start,
            course=self._course,
            monitors=self._monitors,
            has_epochs=self._has_epochs,
            losses=self._doubled_loss,
        )

    def attach(self, module: LightningModule) -> LightningModule:
        """Make this one of the module's own call-backs, and record the module that was just built.

        A trial makes its Trainer itself, so that only its module can bring a call-back.
        """
        # Messages name the module's class, and the place of its configure_optimizers. Its layers
        # may be made only as the training starts: they are recorded then.
        self._module = _named_module(module)
        self._waits.module_name = self._module.name
        configure = module.configure_callbacks

        def configured() -> Sequence[Callback]:
            callbacks = configure()
            if not isinstance(callbacks, Sequence):
                callbacks = [callbacks]
            return [*callbacks, self]

        module.configure_callbacks = configured  # type: ignore[method-assign]
        # The states of the random generators, after the build and after each of the module's hooks:
        # they tell whether a trial draws the same numbers again.
        self._generators.record(BUILT)
        self._generators.record_after_hooks(module)
        return module

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Find the call-backs that stop or save a training, before they choose their folders."""
        # Lightning sets up call-backs that save after all others.
        self._monitors = monitors_of(trainer.callbacks)  # type: ignore[attr-defined]

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Look at the module, whose layers are all there, before its first batch."""
        # Its time has no limit, as the loader may read all of the data for its first batch.
        self._waits.go_on("first batch", has_time_limit=False)
        check_epoch_schedules(trainer, pl_module)
        self._module = _seen_at_start(self._module, pl_module)
        self._weights.before = weights_of(pl_module)
        self._has_epochs = sized_len(trainer.train_dataloader) is not None

    def on_before_optimizer_step(
        self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer
    ) -> None:
        """Count a step of an optimizer."""
        self._optimizer_steps.count(trainer, optimizer)

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Record the random generators before the first step, and the batch of a followed step.

        Steps are followed, which means recorded in full, where a stopped trial's last steps are
        compared with those of a trial that was not stopped.
        """
        self._tell_awaited_step(trainer)
        if self.clock.began is None:
            self.clock.begin()
            self._generators.record(FIRST_STEP)
        steps = self._batches // trainer.accumulate_grad_batches
        self._followed.see_batch(trainer, pl_module, batch, steps)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Keep weights where they are compared, and end a trial that is long enough.

        If its plan says so, the loss of the last batch is compared with that of each example twice.
        """
        self._batches += 1
        # The batch of the next step is drawn now. If that hangs, the user is told of that step.
        self._tell_awaited_step(trainer)
        steps, further_micro_batches = divmod(self._batches, trainer.accumulate_grad_batches)
        # A step is taken with its last micro-batch.
        if further_micro_batches != 0:
            return
        self._weights.keep_after(steps, trainer, pl_module)
        # Without this the clock would read when the host has asked for the step's work.
        synchronize(pl_module.device)
        self.clock.end_step()
        # A spec with max_steps ends the trial itself.
        if self._spec.max_steps is None and self._is_long_enough(steps):
            trainer.should_stop = True
            # The step of a micro-batch is weighted, and has no loss of its own.
            if self._doubles_batch and trainer.accumulate_grad_batches == 1:
                self._doubled_loss = doubled_loss(pl_module, batch, self._spec.batch_size)

    def _is_long_enough(self, steps: int) -> bool:
        """Whether the trial may end after so many steps: those of its plan, or fewer if slow."""
        is_slow = steps >= SLOW_STEPS and self.clock.elapsed() > PATIENCE_SECONDS
        return steps >= self._steps or is_slow

    def on_sanity_check_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Tell the user that the untrained weights are evaluated."""
        self._waits.go_on("evaluation", has_time_limit=True)

    def on_sanity_check_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Tell the user that the trial's start goes on after that evaluation."""
        self._waits.go_on("start", has_time_limit=False)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Record the schedules and the course, after the last step."""
        self._waits.go_on("end", has_time_limit=False)
        steps = self._batches // trainer.accumulate_grad_batches
        self._schedules = _seen_schedules(trainer, pl_module, steps)
        self._course = self._followed.course(
            trainer, pl_module, steps, start=self._weights.before, metrics=self._metrics.validated
        )

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Put aside the metrics that were logged before this evaluation."""
        self._waits.go_on("evaluation", has_time_limit=True)
        self._metrics.put_aside(trainer)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Record the metrics that the evaluation has logged."""
        self._metrics.record(trainer, pl_module)

    def _tell_awaited_step(self, trainer: Trainer) -> None:
        """Tell the user the number of the training step that is waited for."""
        number = 1 + self._batches // trainer.accumulate_grad_batches
        self._waits.go_on(f"training step {number}", has_time_limit=True)


class WaitTexts:
    """Tells a user who waits for a short trial which part of it runs.

    Args:
        wait: shows the texts, and limits the time of some parts.
        spec: of the trial.
    """

    def __init__(self, wait: Wait, spec: TrialSpec) -> None:
        self._wait = wait
        self._spec = spec
        # The name of the module's class; empty until it is built.
        self.module_name = ""

    def go_on(self, part: str, *, has_time_limit: bool) -> None:
        """Tell that the next part of the trial begins, and whether its time is limited.

        That of steps and evaluations is, but not that of the start and the end.
        """
        texts = [f"the preflight's {part}"]
        if self.module_name:
            texts.append(f" of {self.module_name}")
        texts.append(f" at batch size {self._spec.batch_size}")
        for name, value in self._spec.hyperparameters.items():
            texts.append(f", {name} {value:g}")
        self._wait.go_on("".join(texts), limited=has_time_limit)


class StepClock:
    """Records when the first step began, and when each step ended.

    Args:
        now: a clock, in seconds.

    Attributes:
        began: the first step's beginning; None before it.
        ends: of the steps, in order.
    """

    def __init__(self, *, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self.began: float | None = None
        self.ends: list[float] = []

    def begin(self) -> None:
        """Note that the first step begins."""
        self.began = self._now()

    def end_step(self) -> None:
        """Note that a step has ended."""
        self.ends.append(self._now())

    def elapsed(self) -> float:
        """Give the seconds since the first step began; 0 before it began."""
        if self.began is None:
            return 0.0
        return self._now() - self.began


def _named_module(module: LightningModule) -> SeenModule:
    """Begin the record of a module, with the name of its class and the place of its code."""
    return replace(
        UNBUILT,
        name=type(module).__name__,
        place=place_of(type(module).configure_optimizers),
    )


def _seen_at_start(built: SeenModule, module: LightningModule) -> SeenModule:
    """Add to a module's record what is known once all of its layers are there.

    That is whether it steps its optimizers automatically, and the number of its trained parameters.
    A frozen parameter does not count.
    """
    parameters = 0
    for parameter in module.parameters():
        if parameter.requires_grad:
            parameters += parameter.numel()
    return replace(
        built,
        automatic=module.automatic_optimization,
        parameters=parameters,
    )


class GeneratorRecorder:
    """Records the states of the random generators at some moments of a trial's start.

    Attributes:
        states: by the moment's name.
    """

    def __init__(self) -> None:
        self.states: dict[str, GeneratorStates] = {}

    def record(self, moment: str) -> None:
        """Record the states as they are now, under the moment's name."""
        self.states[moment] = random_state()

    def record_after_hooks(self, module: LightningModule) -> None:
        """Also record the states after each of the module's hooks that may seed generators."""
        for hook in SEEDING_HOOKS:
            setattr(module, hook, self._followed_by_record(hook, getattr(module, hook)))

    def _followed_by_record(self, hook: str, call: Callable[..., object]) -> Callable[..., object]:
        """Make a function that calls a hook, and then records the states under its name."""

        @functools.wraps(call)
        def called(*args: object, **kwargs: object) -> object:
            returned = call(*args, **kwargs)
            self.record(hook)
            return returned

        return called


class OptimizerSteps:
    """Counts the steps of each optimizer of a trial."""

    def __init__(self) -> None:
        # The steps of each optimizer, by its index among the Trainer's.
        self._steps: Counter[int] = Counter()

    def count(self, trainer: Trainer, optimizer: Optimizer) -> None:
        """Count a step that this optimizer is about to take."""
        # Lightning may hand over its wrapper of the optimizer.
        stepped = getattr(optimizer, "optimizer", optimizer)
        # An optimizer that the Trainer does not know counts as its first.
        index_of_optimizer = 0
        for index, known in enumerate(trainer.optimizers):
            if known is stepped:
                index_of_optimizer = index
                break
        self._steps[index_of_optimizer] += 1

    def of_each(self) -> tuple[int, ...]:
        """Give the number of steps of each optimizer, in order, up to the last that took any.

        The tuple is empty if none did.
        """
        last_index = max(self._steps, default=-1)
        return tuple(self._steps[index] for index in range(last_index + 1))


class WeightsKeeper:
    """Keeps copies of the weights that are compared with another trial's.

    Args:
        steps: after so many the weights are kept. None: after ``SLOW_STEPS``, and again after
            ``COMPARED_STEPS``, as a slow trial ends before those.

    Attributes:
        before: the weights before the first step.
    """

    def __init__(self, steps: int | None) -> None:
        self._kept_after: tuple[int, ...] = (SLOW_STEPS, COMPARED_STEPS)
        if steps is not None:
            self._kept_after = (steps,)
        # The steps after which weights were kept last; before that, those that are planned.
        self._steps = steps or COMPARED_STEPS
        self.before: dict[str, Tensor] = {}
        self._after: dict[str, Tensor] | None = None
        self._rates: tuple[GroupRate, ...] = ()

    def keep_after(self, steps: int, trainer: Trainer, module: LightningModule) -> None:
        """Keep weights and learning rates, if they are compared after so many steps."""
        if steps in self._kept_after:
            self._steps = steps
            self._after = weights_of(module)
            self._rates = rates_of(trainer)

    def compared_weights(self) -> ComparedWeights:
        """Give the weights and rates that were kept last."""
        return ComparedWeights(
            steps=self._steps, before=self.before, after=self._after, rates=self._rates
        )


class MetricsLogged:
    """Records the metrics that each evaluation logs, apart from those logged before it.

    Args:
        metric_name: the name of the target's metric.

    Attributes:
        at_start: the target's metric of the untrained weights; None: it was not logged, or is not
            finite.
        validated: the metrics of the last evaluation, by name.
    """

    def __init__(self, metric_name: str) -> None:
        self._name = metric_name
        self.at_start: float | None = None
        self.validated: dict[str, float] = {}
        self._logged_before: dict[str, Tensor] = {}

    def put_aside(self, trainer: Trainer) -> None:
        """Remove the Trainer's metrics before an evaluation, until the evaluation is recorded.

        Metrics of the training or an earlier evaluation must not look like this one's.
        """
        self._logged_before = dict(trainer.callback_metrics)
        trainer.callback_metrics.clear()

    def record(self, trainer: Trainer, module: LightningModule) -> None:
        """Record the metrics of an evaluation, and put back those that were logged before it.

        Of the evaluation before the first step only the target's metric is kept. A ConfigError says
        that this metric is missing.
        """
        if trainer.sanity_checking:
            if self._name in trainer.callback_metrics:
                self.at_start = metric(trainer, self._name)
            return
        place = place_of(type(module).validation_step)
        check_metric(self._name, trainer.callback_metrics, self._logged_before, place)
        logged = trainer.callback_metrics.items()
        self.validated = {name: float(value) for name, value in logged}
        # Call-backs may look for these later. Where both have a name, the evaluation's value stays.
        for name, value in self._logged_before.items():
            trainer.callback_metrics.setdefault(name, value)


class FollowedSteps:
    """Records the course of a trial's last steps: their batches, and the state before and after.

    Args:
        after: the number of the trial's steps before the record begins; None: nothing is recorded.
        exact: whether equal trainings have equal results to the bit.
    """

    def __init__(self, after: int | None, exact: bool) -> None:
        self._after = after
        self._exact = exact
        self._attributes: dict[str, Attribute] | None = None
        self._batches: list[str] = []

    def see_batch(
        self, trainer: Trainer, module: LightningModule, batch: object, steps: int
    ) -> None:
        """Record the batch of the next step, if that step is followed; ``steps`` came before it.

        Before the first followed step the attributes of the module and its optimizers are recorded.
        """
        if self._after is None or steps < self._after:
            return
        if self._attributes is None:
            self._attributes = attributes_of(trainer, module)
        self._batches.append(fingerprint(batch))

    def course(
        self,
        trainer: Trainer,
        module: LightningModule,
        steps: int,
        *,
        start: Mapping[str, Tensor],
        metrics: Mapping[str, float],
    ) -> Course | None:
        """Give the course at the trial's end; None where none was to be recorded.

        Args:
            trainer: of the trial.
            module: that it has trained.
            steps: of the whole trial.
            start: weights before its first step.
            metrics: of its last evaluation, by name.
        """
        if self._attributes is None or self._after is None:
            return None
        return Course(
            steps=steps - self._after,
            attributes=self._attributes,
            batches=tuple(self._batches),
            rates=tuple(rate.lr for rate in rates_of(trainer)),
            # A trial that is followed from a later step had other weights when these steps began.
            start=start if self._after == 0 else {},
            weights=weights_of(module),
            metrics=metrics,
            exact=self._exact,
            has_schedule=bool(trainer.lr_scheduler_configs),
        )


def _seen_schedules(trainer: Trainer, module: LightningModule, steps: int) -> SeenSchedules:
    """Copy the schedules of a trial that ends after ``steps``, once for each of two checks.

    One check steps its copies to their end, the other beside those of another trial. Schedules that
    are not torch's cannot be copied: the checks name their classes.
    """
    unknown = list[str]()
    for config in trainer.lr_scheduler_configs:
        schedule: object = config.scheduler
        if not isinstance(schedule, LRScheduler):
            unknown.append(type(schedule).__name__)
    return SeenSchedules(
        to_end=copies_of_schedules(trainer, module, steps),
        to_compare=copies_of_schedules(trainer, module, steps),
        unknown=tuple(unknown),
    )


def rates_of(trainer: Trainer) -> tuple[GroupRate, ...]:
    """Give the present learning rate of each parameter group, in the order of the optimizers."""
    rates = list[GroupRate]()
    for optimizer in trainer.optimizers:
        for group in optimizer.param_groups:
            if "lr" in group:
                initial = float(group.get("initial_lr", group["lr"]))
                rates.append(GroupRate(type(optimizer).__name__, float(group["lr"]), initial))
    return tuple(rates)


def weights_of(module: LightningModule) -> dict[str, Tensor]:
    """Copy the weights of a module to the host, by name."""
    named = module.named_parameters()
    return {name: weight.detach().to("cpu", copy=True) for name, weight in named}
