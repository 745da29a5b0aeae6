"""Watches a short trial from within: a call-back whose parts look at one thing each.

What they have seen at the end of the trial is a
:class:`~bstune.trial.checks.short_trial.ShortTrial`.
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
from bstune.trial.checks.given_data import check_epoch_schedules
from bstune.trial.checks.logged_metric import check_metric
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
from bstune.trial.lightning.installed import Callback, LightningModule, Trainer
from bstune.trial.parts.metric import metric

# Of one short trial.
SHORT_STEPS = 4
# After which the weights of two learning rates are compared, and one of the trials is stopped.
COMPARED_STEPS = 3
# A trial whose steps have taken this long ends after its second one, and none is begun that would
# take longer without need: a large network on a CPU takes seconds a step.
PATIENCE_SECONDS = 2.0
# Of a trial that slow: the first one may be at a warm-up's rate of zero.
SLOW_STEPS = 2
# Hooks after which the generators' states are looked at, in the order of their calls.
SEEDING_HOOKS = ("on_fit_start", "on_train_start")
# Moments at which they are looked at besides.
BUILT = "__init__"
FIRST_STEP = "the first step"
# What is known of a module before a trial has built it.
UNBUILT = SeenModule(name="", place="", automatic=True, parameters=0, gradient_bytes=0)


@dataclass(frozen=True)
class RecordingPlan:
    """When a short trial ends, and after which of its steps a recorder looks at it.

    Args:
        steps: after which it ends, or earlier if it is slow; a spec with ``max_steps`` ends there.
        compared_steps: after how many the weights are kept, to be compared with another trial's;
            None: after ``COMPARED_STEPS``, or the last one that a slow trial takes before.
        followed_after: of its own steps, from which on its course is recorded; None: it is not.
    """

    steps: int = SHORT_STEPS
    compared_steps: int | None = None
    followed_after: int | None = None


SHORT_PLAN = RecordingPlan()


class Recorder(Callback):
    """Watches a short trial from within.

    Args:
        spec: of the trial.
        metric_name: the target's.
        plan: when the trial is looked at and ends.
        wait: told what the trial comes to.
        exact: whether equal trainings are equal to the bit.
    """

    def __init__(
        self, spec: TrialSpec, metric_name: str, plan: RecordingPlan, wait: Wait, *, exact: bool
    ) -> None:
        self._spec = spec
        self._steps = plan.steps
        self._waits = WaitTexts(wait, spec)
        self.clock = StepClock()
        self._module = UNBUILT
        self._generators = GeneratorLooks()
        self._optimizer_steps = OptimizerSteps()
        self._weights = WeightsKeeper(plan.compared_steps)
        self._metrics = MetricsLogged(metric_name)
        self._followed = FollowedSteps(plan.followed_after, exact)
        self._schedules = SeenSchedules()
        self._course: Course | None = None
        self._batches = 0
        self._waits.go_on("start", limited=False)

    def seen(self, result: TrialResult) -> ShortTrial:
        """Give what was seen of the trial, which has ended with ``result``."""
        return ShortTrial(
            spec=self._spec,
            result=result,
            module=self._module,
            step_ends=tuple(self.clock.ends),
            batches=self._batches,
            optimizer_steps=self._optimizer_steps.of_each(),
            weights=self._weights.kept(),
            schedules=self._schedules,
            generators=self._generators.states,
            start_metric=self._metrics.at_start,
            course=self._course,
        )

    def attach(self, module: LightningModule) -> LightningModule:
        """Let the Trainer call this one with the module's own call-backs."""
        self._module = _seen_at_build(module)
        self._waits.module_name = self._module.name
        configure = module.configure_callbacks

        def configured() -> Sequence[Callback]:
            callbacks = configure()
            if not isinstance(callbacks, Sequence):
                callbacks = [callbacks]
            return [*callbacks, self]

        module.configure_callbacks = configured  # type: ignore[method-assign]
        self._generators.look(BUILT)
        self._generators.look_after_hooks(module)
        return module

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Look at the module, whose layers are all there, before its first batch."""
        # It has no limit: the loader may read all of the data for it.
        self._waits.go_on("first batch", limited=False)
        check_epoch_schedules(trainer, pl_module)
        self._module = _seen_at_start(self._module, pl_module)
        self._weights.before = weights_of(pl_module)

    def on_before_optimizer_step(
        self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer
    ) -> None:
        """Count a step of an optimizer."""
        self._optimizer_steps.count(trainer, optimizer)

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Look at generators and at the batch, before a step."""
        self._wait_for_step(trainer)
        if self.clock.began is None:
            self.clock.begin()
            self._generators.look(FIRST_STEP)
        steps = self._batches // trainer.accumulate_grad_batches
        self._followed.see_batch(trainer, pl_module, batch, steps)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Keep weights where they are compared, and end a trial that is long enough."""
        self._batches += 1
        # The next step's batch is drawn from now on.
        self._wait_for_step(trainer)
        steps, rest = divmod(self._batches, trainer.accumulate_grad_batches)
        # Only with its last micro-batch is the step taken.
        if rest != 0:
            return
        self._weights.keep_after(steps, trainer, pl_module)
        synchronize(pl_module.device)
        self.clock.end_step()
        # A spec that names its last step ends the trial by it.
        if self._spec.max_steps is None and self._is_long_enough(steps):
            trainer.should_stop = True

    def _is_long_enough(self, steps: int) -> bool:
        is_slow = steps >= SLOW_STEPS and self.clock.elapsed() > PATIENCE_SECONDS
        return steps >= self._steps or is_slow

    def on_sanity_check_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Name the evaluation of the untrained weights."""
        self._waits.go_on("evaluation", limited=True)

    def on_sanity_check_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Go on with the start, whose evaluation is over."""
        self._waits.go_on("start", limited=False)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Look at the schedules and at the course, after the last step."""
        self._waits.go_on("end", limited=False)
        steps = self._batches // trainer.accumulate_grad_batches
        self._schedules = _seen_schedules(trainer, pl_module, steps)
        self._course = self._followed.course(
            trainer, pl_module, steps, start=self._weights.before, metrics=self._metrics.validated
        )

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Put aside what was logged before this evaluation."""
        self._waits.go_on("evaluation", limited=True)
        self._metrics.put_aside(trainer)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Look at what the evaluation has logged."""
        self._metrics.look(trainer, pl_module)

    def _wait_for_step(self, trainer: Trainer) -> None:
        number = 1 + self._batches // trainer.accumulate_grad_batches
        self._waits.go_on(f"training step {number}", limited=True)


class WaitTexts:
    """Names what a short trial comes to, for who waits for it.

    Args:
        wait: that is told.
        spec: of the trial.
    """

    def __init__(self, wait: Wait, spec: TrialSpec) -> None:
        self._wait = wait
        self._spec = spec
        # Empty until the module is built.
        self.module_name = ""

    def go_on(self, what: str, *, limited: bool) -> None:
        """Name the next part of the trial.

        Steps and evaluations are limited, its start and its end are not.
        """
        parts = [f"the preflight's {what}"]
        if self.module_name:
            parts.append(f" of {self.module_name}")
        parts.append(f" at batch size {self._spec.batch_size}")
        for name, value in self._spec.hyperparameters.items():
            parts.append(f", {name} {value:g}")
        self._wait.go_on("".join(parts), limited=limited)


class StepClock:
    """When the first step began, and when each step ended.

    Args:
        now: a clock of seconds.
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
        """Give the seconds since the first step began; 0 before."""
        if self.began is None:
            return 0.0
        return self._now() - self.began


def _seen_at_build(module: LightningModule) -> SeenModule:
    """Name a module that is built; its layers may not be yet."""
    return replace(
        UNBUILT,
        name=type(module).__name__,
        place=place_of(type(module).configure_optimizers),
    )


def _seen_at_start(built: SeenModule, module: LightningModule) -> SeenModule:
    """Add what is known of a module once all of its layers are there."""
    parameters = 0
    gradient_bytes = 0
    for parameter in module.parameters():
        if parameter.requires_grad:
            parameters += parameter.numel()
            gradient_bytes += parameter.numel() * parameter.element_size()
    return replace(
        built,
        automatic=module.automatic_optimization,
        parameters=parameters,
        gradient_bytes=gradient_bytes,
    )


class GeneratorLooks:
    """The states of the random generators at some moments of a trial's start, by library."""

    def __init__(self) -> None:
        self.states: dict[str, GeneratorStates] = {}

    def look(self, moment: str) -> None:
        """Note the states as they are now."""
        self.states[moment] = random_state()

    def look_after_hooks(self, module: LightningModule) -> None:
        """Note the states also after each of the module's hooks that may seed them."""
        for hook in SEEDING_HOOKS:
            setattr(module, hook, self._followed_by_look(hook, getattr(module, hook)))

    def _followed_by_look(self, hook: str, call: Callable[..., object]) -> Callable[..., object]:
        @functools.wraps(call)
        def called(*args: object, **kwargs: object) -> object:
            returned = call(*args, **kwargs)
            self.look(hook)
            return returned

        return called


class OptimizerSteps:
    """Counts the steps of each optimizer of a trial."""

    def __init__(self) -> None:
        # By the optimizer's place among the Trainer's.
        self._steps: Counter[int] = Counter()

    def count(self, trainer: Trainer, optimizer: Optimizer) -> None:
        """Count a step that this optimizer is about to take."""
        # Lightning's wrapper of an optimizer holds it.
        stepped = getattr(optimizer, "optimizer", optimizer)
        place = 0
        for number, known in enumerate(trainer.optimizers):
            if known is stepped:
                place = number
                break
        self._steps[place] += 1

    def of_each(self) -> tuple[int, ...]:
        """Give the steps of each optimizer in their order, up to the last one that took any."""
        last_place = max(self._steps, default=-1)
        return tuple(self._steps[place] for place in range(last_place + 1))


class WeightsKeeper:
    """Keeps the weights that are compared with another trial's.

    Args:
        steps: after which; None: after as many as a slow trial takes, and again after
            ``COMPARED_STEPS``.
    """

    def __init__(self, steps: int | None) -> None:
        self._kept_after: tuple[int, ...] = (SLOW_STEPS, COMPARED_STEPS)
        if steps is not None:
            self._kept_after = (steps,)
        self._steps = steps or COMPARED_STEPS
        # Weights before the first step.
        self.before: dict[str, Tensor] = {}
        self._after: dict[str, Tensor] | None = None
        self._rates: tuple[GroupRate, ...] = ()

    def keep_after(self, steps: int, trainer: Trainer, module: LightningModule) -> None:
        """Keep weights and learning rates, if it is after this step that they are compared."""
        if steps in self._kept_after:
            self._steps = steps
            self._after = weights_of(module)
            self._rates = rates_of(trainer)

    def kept(self) -> ComparedWeights:
        """Give what was kept last."""
        return ComparedWeights(
            steps=self._steps, before=self.before, after=self._after, rates=self._rates
        )


class MetricsLogged:
    """Looks at what each evaluation logs, apart from what was logged before it.

    Args:
        metric_name: the target's.
    """

    def __init__(self, metric_name: str) -> None:
        self._name = metric_name
        # The target's metric of the untrained weights.
        self.at_start: float | None = None
        # Metrics of the last evaluation.
        self.validated: dict[str, float] = {}
        self._before: dict[str, Tensor] = {}

    def put_aside(self, trainer: Trainer) -> None:
        """Put aside what is logged until now, before an evaluation.

        What was logged in training, or in an earlier evaluation, must not look like this one's.
        """
        self._before = dict(trainer.callback_metrics)
        trainer.callback_metrics.clear()

    def look(self, trainer: Trainer, module: LightningModule) -> None:
        """Note what an evaluation has logged, and refuse it if the target's metric is missing."""
        if trainer.sanity_checking:
            if self._name in trainer.callback_metrics:
                self.at_start = metric(trainer, self._name)
            return
        place = place_of(type(module).validation_step)
        check_metric(self._name, trainer.callback_metrics, self._before, place)
        logged = trainer.callback_metrics.items()
        self.validated = {name: float(value) for name, value in logged}
        for name, value in self._before.items():
            trainer.callback_metrics.setdefault(name, value)


class FollowedSteps:
    """Records the course of a trial's last steps.

    Args:
        after: of its own steps, from which on; None: nothing is recorded.
        exact: whether equal trainings are equal to the bit.
    """

    def __init__(self, after: int | None, exact: bool) -> None:
        self._after = after
        self._exact = exact
        self._attributes: dict[str, Attribute] | None = None
        self._batches: list[str] = []

    def see_batch(
        self, trainer: Trainer, module: LightningModule, batch: object, steps: int
    ) -> None:
        """Note the batch of a step before which ``steps`` were taken, and how the first began."""
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
            metrics: of its last evaluation.
        """
        if self._attributes is None or self._after is None:
            return None
        return Course(
            steps=steps - self._after,
            attributes=self._attributes,
            batches=tuple(self._batches),
            rates=tuple(rate.lr for rate in rates_of(trainer)),
            start=start if self._after == 0 else {},
            weights=weights_of(module),
            metrics=metrics,
            exact=self._exact,
        )


def _seen_schedules(trainer: Trainer, module: LightningModule, steps: int) -> SeenSchedules:
    """Copy the schedules of a trial that ends after ``steps``, once for each check."""
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
    """Give the learning rates of all groups of parameters, as they are now."""
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
