"""What a trial is asked for, what fixes it, and its result: frozen records that go to JSON and come back unchanged.

The JSON is strict: a value that does not exist is ``null``, never NaN or Infinity. This module needs neither torch
nor numpy, so that everything that works on recorded trials starts fast.

When a trial is evaluated depends on examples and past values, never on measured seconds. One evaluation costs ``cost``
x (validation examples), in examples trained. The next one waits until both hold:

* its step is ``ratio`` times the last one's (at least one step on), rounded down: steps to target is known to that;
* the cost of all evaluations with it is at most ``share`` of the examples trained near the target, and half of that far
  from it, so that half is saved up for the dense evaluations near it.

Near means that the target is predicted within ``near`` times the steps so far, by a straight line in log steps through
the last evaluation and the latest one at least ``LOOK_BACK`` times earlier. Metrics mostly flatten in log steps, so the
line is early rather than late. A trial that has once been near stays near: a noisy metric would switch back and forth.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, field, fields, replace
from typing import Any, Literal, get_args

from bstune.core.batch_schedule import BatchPlan, BatchSchedule, constant
from bstune.core.errors import ConfigError, RecordError

Status = Literal["reached", "censored", "diverged", "oom", "failed"]
STATUSES: tuple[str, ...] = get_args(Status)
Objective = Literal["time", "steps", "both", "curve"]  # of a study
Merit = Literal["time", "steps"]  # what a winner is best by
OBJECTIVES: tuple[Objective, ...] = get_args(Objective)
NEVER = 1e300  # a goal is a finite number, and far from this one
FORMER = {
    "slot": "trial_index",
    "parent": "resumed_from",
    "confirms": "replicate_of",
    "settings": "hyperparameters",
}
LOOK_BACK = 1.25
CompileMode = Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"]
COMPILE_MODES: tuple[CompileMode, ...] = get_args(CompileMode)
CUDA_GRAPH_MODES = ("reduce-overhead", "max-autotune")
FastMode = Literal["auto", "off", "graph"]


@dataclass(frozen=True)
class Target:
    """A validation metric, its goal and its direction, such as ``val/error <= 0.10``.

    Args:
        metric: the name under which the Lightning module logs it.
        value: the goal.
        mode: ``min`` if the metric has to fall to ``value``, ``max`` if it has to rise to it.

    Raises:
        ConfigError: for an unknown mode or a goal that is not a finite number.
    """

    metric: str
    value: float
    mode: Literal["min", "max"]

    def __post_init__(self) -> None:
        if self.mode not in ("min", "max"):
            raise ConfigError(f"target.mode must be min or max, but got {self.mode!r}")
        if not math.isfinite(self.value):
            raise ConfigError(f"target.value must be a finite number, but got {self.value}")

    def gap(self, value: float) -> float:
        """Return how far ``value`` still is from the goal: positive before it, zero or negative once reached."""
        return value - self.value if self.mode == "min" else self.value - value

    def reached(self, value: float) -> bool:
        """Return whether ``value`` meets the goal; NaN never does."""
        return self.gap(value) <= 0.0

    @property
    def never_met(self) -> "Target":
        """The same metric with a goal that no value meets: for training that only its budget ends."""
        return replace(self, value=-NEVER if self.mode == "min" else NEVER)

    def __str__(self) -> str:
        return f"{self.metric} {'<=' if self.mode == 'min' else '>='} {self.value:g}"


@dataclass(frozen=True)
class TrialSpec:
    """What one trial is asked to do."""

    number: int  # Optuna's
    trial_index: int  # its place in the study's plan, from 0; a trial that is asked again keeps it
    batch_size: int  # examples per applied optimizer step
    lr: float
    delta: float | None  # log2(lr / rule(batch_size)); None where no rule was used
    seed: int  # of the initial weights, the order of the data and the augmentation
    max_steps: int | None = (
        None  # it stops there, steps of the trial it continues included; None: the study's budget
    )
    resumed_from: int | None = (
        None  # the stopped trial that it continues, at the same batch size, rate and seed
    )
    replicate_of: int | None = (
        None  # the trial whose hyper-parameters it runs again on a fresh seed
    )
    hyperparameters: Mapping[str, float] = field(
        default_factory=dict
    )  # further ones, by name (see bstune.config)

    def trial_fields(self) -> dict[str, Any]:
        """Return the fields that a trial's record takes over as they are: all but ``max_steps``."""
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name != "max_steps"}


@dataclass(frozen=True)
class TrialResult:
    """The record of one trial, whatever its status.

    Args:
        number: Optuna's number of the trial.
        trial_index: its place in the study's plan, from 0.
        batch_size: examples per applied optimizer step.
        lr: learning rate.
        delta: log2(lr / rule(batch_size)); None where no rule was used.
        seed: of the initial weights, the order of the data and the augmentation.
        status: ``reached``; ``censored`` (out of steps or stopped early: right-censored); or how the trial failed.
        steps: optimizer steps applied until the first evaluation that met the target, or run if censored; those of
            the trial that it continues are counted.
        steps_low: step of the last evaluation that missed the target (0 if none): S lies in (steps_low, steps] where
            the target was reached, above steps_low where it was not.
        examples: examples trained on, steps x batch_size, or the sum over ``batch_parts``.
        train_seconds: of the training clock, with warm-up; like all seconds, without those of the continued trial.
        eval_seconds: evaluation, and the passes that measure the noise scale beside the training, in seconds.
        startup_seconds: from the trial's start to its first training step, evaluation at step 0 left out.
        wall_seconds: the trial as a whole.
        seconds_per_step: tau(B): the survey's, where there is one, so that a machine under load does not decide; else
            the trial's own. None if no step was finished.
        device: name of the device.
        versions: versions of the packages that the result depends on; on CUDA, also its libraries and their settings.
        history: (step, value) pairs of the target's metric, from the first step; a value that was not finite is None.
        message: the error, for ``diverged``, ``oom`` and ``failed``.
        resumed_from: number of the stopped trial that it continues; None: it started afresh.
        replicate_of: number of the trial whose hyper-parameters it runs again on a fresh seed; None: none's.
        noise_scale: (step, |G|^2, tr Sigma) of the steps at which it was measured (:mod:`bstune.core.noise_scale`),
            those of the trial that it continues included; steps that a gradient scaler skips are counted.
        hyperparameters: further ones that the study searches, by name.
        measured_seconds_per_step: the trial's own, the median over segments after warm-up; None where it is no other.
        horizon: steps after which its schedule ends, of a workload whose schedule ends with the trial; else None.
        training_loop: what took the steps: ``lean``, ``graph``, or ``lean, not graph: `` or ``Lightning's: `` and why;
            None: no Trainer took any.
        batch_parts: (batch size, steps, seconds per step) of each part of the steps, of a trial whose batch size
            changed: ``batch_size`` is the first one's, and ``seconds_per_step`` the mean over all steps; else empty.
        effective_lr: lr/(1 - m) of SGD with a momentum m, before any schedule; None for other optimizers.
    """

    number: int
    trial_index: int
    batch_size: int
    lr: float
    delta: float | None
    seed: int
    status: Status
    steps: int
    steps_low: int
    examples: int
    train_seconds: float
    eval_seconds: float
    startup_seconds: float
    wall_seconds: float
    seconds_per_step: float | None
    device: str
    versions: Mapping[str, str]
    history: tuple[tuple[int, float | None], ...] = field(default=())
    message: str | None = None
    resumed_from: int | None = None
    replicate_of: int | None = None
    noise_scale: tuple[tuple[int, float, float], ...] = ()
    hyperparameters: Mapping[str, float] = field(default_factory=dict)
    measured_seconds_per_step: float | None = None
    horizon: int | None = None
    training_loop: str | None = None
    batch_parts: tuple[tuple[int, int, float | None], ...] = ()
    effective_lr: float | None = None

    @classmethod
    def unmeasured(cls, spec: TrialSpec, status: Status, **values: Any) -> "TrialResult":
        """Return a record of the spec and ``values``, whose other fields are zero or empty."""
        empty: dict[str, Any] = dict.fromkeys(("steps", "steps_low", "examples"), 0)
        empty |= dict.fromkeys(
            ("train_seconds", "eval_seconds", "startup_seconds", "wall_seconds"), 0.0
        )
        empty |= {"seconds_per_step": None, "device": "", "versions": {}}
        return cls(**{**spec.trial_fields(), **empty, "status": status, **values})

    @property
    def reached(self) -> bool:
        """Whether the trial met its target."""
        return self.status == "reached"

    @property
    def time_to_target(self) -> float | None:
        """T = S x tau(B) in seconds; None if the target was not reached."""
        return (
            self.steps * self.seconds_per_step
            if self.reached and self.seconds_per_step is not None
            else None
        )

    def after(self, steps: int) -> dict[str, Any]:
        """Return what the record says of its first ``steps`` steps: as fields, ``steps`` among them."""
        if not self.batch_parts:
            return {"steps": steps, "examples": steps * self.batch_size}
        parts, before = list[tuple[int, int, float | None]](), 0
        for size, count, tau in self.batch_parts:
            if before < steps:
                parts.append((size, min(count, steps - before), tau))
            before += count
        return {
            "steps": steps,
            "examples": sum(size * count for size, count, _ in parts),
            **timed(parts),
        }

    def to_json(self) -> str:
        """Return the record as one line of strict JSON."""
        return dump_json(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "TrialResult":
        """Return the record that :meth:`to_json` wrote; RecordError if it is none, or of a former version."""
        values = json.loads(text)
        if not isinstance(values, dict):
            raise RecordError(f"a trial record is a JSON object, but got {text[:80]!r}")
        former = [f"{name} (now {FORMER[name]})" for name in FORMER if name in values]
        former += ["status budget (now censored)"] * (values.get("status") == "budget")
        if former:
            what = f"the trial record is of a former version of bstune, with {', '.join(former)}"
            raise RecordError(
                f"{what}: rename them, or run the study again under another name, study=NAME"
            )
        required = {
            f.name for f in fields(cls) if f.default is MISSING and f.default_factory is MISSING
        }
        missing, unknown = (
            sorted(required - values.keys()),
            sorted(values.keys() - {f.name for f in fields(cls)}),
        )
        if missing or unknown:
            both = (("lacks", missing), ("has unknown", unknown))
            faults = [f"{what} {', '.join(names)}" for what, names in both if names]
            raise RecordError(f"a trial record {' and '.join(faults)}")
        if values["status"] not in STATUSES:
            raise RecordError(f"status must be one of {STATUSES}, but got {values['status']!r}")
        values["history"] = tuple((int(step), value) for step, value in values.get("history", ()))
        values["noise_scale"] = tuple(
            (int(step), float(g), float(s)) for step, g, s in values.get("noise_scale", ())
        )
        values["batch_parts"] = tuple(
            (int(size), int(steps), tau) for size, steps, tau in values.get("batch_parts", ())
        )
        return cls(**values)


def timed(parts: Sequence[tuple[int, int, float | None]]) -> dict[str, Any]:
    """Return ``batch_parts`` and the ``seconds_per_step`` that they make: the sum of tau(B_i) x steps_i over steps."""
    seconds = [tau * steps for _, steps, tau in parts if tau is not None]
    mean = (
        sum(seconds) / sum(steps for _, steps, _ in parts)
        if parts and len(seconds) == len(parts)
        else None
    )
    return {"batch_parts": tuple(parts), "seconds_per_step": mean}


def dump_json(value: Any, indent: int | None = None) -> str:
    """Return strict JSON: floats that are not finite become ``null``, mappings and sequences are walked."""
    return json.dumps(_finite(value), allow_nan=False, indent=indent)


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(k): _finite(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(v) for v in value]
    return value


@dataclass(frozen=True)
class EvaluationSchedule:
    """When a trial is evaluated: the options of the rule in the module's docstring."""

    ratio: float  # of steps between evaluations near the target, over 1
    share: float  # of evaluation in training, both counted in examples, in (0, 1]
    cost: float  # of evaluating one example, in examples trained
    near: float  # the target counts as near when it is predicted within this many times the steps so far, over 1


def is_near(history: Sequence[tuple[int, float | None]], target: Target, near: float) -> bool:
    """Return whether the target is predicted within ``near`` times the last of at least two finite evaluations."""
    gaps = [(step, target.gap(value)) for step, value in history if value is not None and step > 0]
    if len(gaps) < 2:
        return False
    step, gap = gaps[-1]
    earlier = [pair for pair in gaps[:-1] if pair[0] * LOOK_BACK <= step] or gaps[:1]
    step_before, gap_before = earlier[-1]
    slope = (gap - gap_before) / math.log(step / step_before)
    return gap + slope * math.log(near) <= 0.0


def next_evaluation(
    step: int,
    batch_size: int | BatchPlan,
    validation_examples: int,
    evaluations: int,
    near: bool,
    schedule: EvaluationSchedule,
) -> int:
    """Return the step of the next evaluation after ``evaluations`` of them, the last one at ``step`` (0: none)."""
    cost = (evaluations + 1) * schedule.cost * validation_examples
    allowed = schedule.share if near else schedule.share / 2
    plan = batch_size if isinstance(batch_size, BatchPlan) else constant(batch_size)
    affordable = plan.batches_until(cost, allowed)
    return max(step + 1, math.floor(schedule.ratio * step), affordable)


@dataclass(frozen=True)
class Budget:
    """A trial ends without its target once ``steps`` steps are applied and ``examples`` examples are trained on."""

    steps: int = 1
    examples: int = 1

    def last_step(self, batch_size: int | BatchPlan) -> int:
        """Return the steps after which both are spent: the frontier's own shape, flat in steps, then in examples."""
        plan = batch_size if isinstance(batch_size, BatchPlan) else constant(batch_size)
        return max(self.steps, plan.batches_until(self.examples))


@dataclass(frozen=True)
class TrialProtocol:
    """What stays fixed in every trial of a study, whether it is trained or answered from a table."""

    target: Target
    budget: Budget  # when to give up
    evaluation_schedule: EvaluationSchedule
    micro_batch_size: (
        int | None
    )  # a larger batch is accumulated from micro-batches of this many examples; None: never
    warmup_steps: int  # in a segment of their own at the start, left out of tau(B)
    divergence: float  # diverged is a trial whose metric is this many times as far from its goal as at the start
    noise_scale_every: (
        int | None
    )  # steps between measurements of the gradient noise scale; None: it is not measured
    compile: (
        str | None
    )  # the mode of torch.compile in which the module is compiled; None: it is not
    trainer: Mapping[
        str, Any
    ]  # further arguments of the Lightning Trainer, such as accelerator and precision
    fast: FastMode  # whether the lean loop takes the steps where it can, or Lightning's own always
    devices: int = 1  # that share each batch, a process each
    batch_schedule: BatchSchedule | None = (
        None  # how batch sizes grow while training; None: they stay
    )

    def plan(self, batch_size: int) -> BatchPlan:
        """Return the batch sizes of a trial that starts at this one."""
        return (
            constant(batch_size)
            if self.batch_schedule is None
            else self.batch_schedule.plan(batch_size)
        )

    def last_step(self, batch_size: int) -> int:
        """Return the steps after which the budget of a trial that starts at this batch size is spent."""
        return self.budget.last_step(self.plan(batch_size))
