"""What a trial is asked for, what fixes it, and its result.

They are frozen records that go to JSON and come back unchanged. The JSON is strict: a value that
does not exist is ``null``, never NaN or Infinity. This module needs neither torch nor numpy, so
that everything that works on recorded trials starts fast.
"""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, field, fields, replace
from typing import Any, Literal, NamedTuple, get_args

from bstune.core.errors import ConfigError, RecordError
from bstune.core.evaluation_schedule import EvaluationSchedule
from bstune.core.metric_names import mode_of
from bstune.core.numbers import as_float, is_finite_number, shown

Status = Literal["reached", "stopped", "diverged", "out of memory", "failed"]
STATUSES: tuple[str, ...] = get_args(Status)
# The message of a failed trial that an interruption of its study has ended: nothing is wrong with
# it.
CUT_SHORT = "the process ended before the trial did; it is asked again"
# The same of a run on a fresh seed that the study's wall time has ended: it is no miss.
OUT_OF_TIME = "the wall time ended before the run did; it is asked again"
ENDED_BY_STUDY = (CUT_SHORT, OUT_OF_TIME)
# Messages of a trial that went on without something begin so. They say nothing of its end.
NO_NOISE_SCALE = "the noise scale is not measured"
NOT_COMPILED = "trained eagerly"
WENT_ON_WITHOUT = (NO_NOISE_SCALE, NOT_COMPILED)
# The name of a training loop that is Lightning's own, not bstune's, begins so.
LIGHTNINGS_LOOP = "Lightning's: "
# The device of a trial that recorded runs answer.
REPLAY_DEVICE = "replay"
# The direction in which a metric is to go.
Mode = Literal["min", "max"]
# The batch size, the learning rate, the seed and the further hyper-parameters of a run.
RunIdentity = tuple[int, float, int, tuple[tuple[str, int | float], ...]]
# What a winner is best by.
Merit = Literal["time", "steps"]
# The largest count or measurement in a record.
LARGEST_RECORDED = 1e15
# Stands for a goal that no value meets: goals that are known are far from it.
NEVER = 1e300
CompileMode = Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"]
CUDA_GRAPH_MODES = ("reduce-overhead", "max-autotune")
FastMode = Literal["auto", "off", "graph"]
# The loop whose seconds of a step count: Lightning's, or the lean one.
StepsOf = Literal["trainer", "lean"]


def sign_of(mode: Mode) -> float:
    """Give the sign that makes a metric's lower values the better ones.

    It is 1 for a metric that is to fall, and -1 for one that is to rise.
    """
    return 1.0 if mode == "min" else -1.0


@dataclass(frozen=True)
class Target:
    """A validation metric, its goal and its direction, such as ``val/error <= 0.10``.

    Args:
        metric: the name under which the Lightning module logs it.
        value: the goal.
        mode: ``min`` if the metric has to fall to ``value``, ``max`` if it has to rise to it; left
            out, as the metric's name says, such as ``min`` for a loss.

    Raises:
        ConfigError: for an unknown mode, one that the name does not say, a goal that is not a
            finite number, or a metric that is no name.
    """

    metric: str
    value: float
    # It is never None once the target is made.
    mode: Mode = None  # type: ignore[assignment]

    def __post_init__(self) -> None:
        self._check_types()
        given: object = self.mode
        if given is None:
            # A frozen dataclass refuses a plain assignment, here too.
            object.__setattr__(self, "mode", self._mode_of_name())
        elif given not in ("min", "max"):
            raise ConfigError(f"target.mode must be min or max, but got {shown(given)}")

    def _check_types(self) -> None:
        """Raise a ConfigError for a metric that is no name, and a value that is no finite number.

        A number of numpy's, or of a tensor, becomes a float.
        """
        metric: object = self.metric
        if not isinstance(metric, str) or not metric:
            raise ConfigError(f"target.metric must be a metric's name, but got {shown(metric)}")
        number = as_float(self.value)
        if number is None or not math.isfinite(number):
            raise ConfigError(f"target.value must be a finite number, but got {shown(self.value)}")
        if type(self.value) not in (int, float):
            object.__setattr__(self, "value", number)

    def _mode_of_name(self) -> Mode:
        """Give the mode that the metric's name tells, such as ``min`` for a loss.

        ConfigError if the name does not tell it.
        """
        mode = mode_of(self.metric)
        if mode is None:
            raise ConfigError(
                f"Target({self.metric!r}, {self.value!r}): the name does not say which way is "
                "better: give mode='min' or mode='max'"
            )
        return mode

    def gap(self, value: float) -> float:
        """How far ``value`` still is from the goal: zero or negative once it is reached."""
        if self.mode == "min":
            return value - self.value
        return self.value - value

    def reached(self, value: float) -> bool:
        """Whether ``value`` meets the goal; NaN never does."""
        return self.gap(value) <= 0.0

    @property
    def sign(self) -> float:
        """1 if the metric is to fall, -1 if it is to rise."""
        return sign_of(self.mode)

    def best_bound(self, bounds: Sequence[float]) -> float:
        """Choose the better one of the metric's bounds (least value, greatest value)."""
        low, high = bounds
        if self.mode == "min":
            return low
        return high

    @property
    def never_met(self) -> "Target":
        """The same metric with a goal that no value meets, so that only the budget ends a trial."""
        # Below all values if the metric is to fall (sign 1), above all if it is to rise (-1).
        return replace(self, value=-self.sign * NEVER)

    @property
    def is_open(self) -> bool:
        """Whether its goal is not known yet: it will be the value that the first trial reaches."""
        return abs(self.value) == NEVER

    def __str__(self) -> str:
        sign = "<=" if self.mode == "min" else ">="
        goal = "what your own configuration comes to" if self.is_open else f"{self.value:g}"
        return f"{self.metric} {sign} {goal}"


@dataclass(frozen=True)
class TrialSpec:
    """What one trial is asked to do."""

    number: int
    """Optuna's number of the trial."""
    trial_index: int
    """Its place in the study's plan, from 0; a trial that is asked again keeps it."""
    batch_size: int
    """Examples per applied optimizer step."""
    lr: float
    delta: float | None
    """log2(lr / rule(batch_size)); None where no rule was used."""
    seed: int
    """Seed of the initial weights, the order of the data and the augmentation."""
    max_steps: int | None = None
    """The step at which it stops, those of the trial that it continues included; None: the study's
    budget ends it."""
    resumed_from: int | None = None
    """The stopped trial that it continues, at the same batch size, rate and seed."""
    replicate_of: int | None = None
    """The trial whose hyper-parameters it runs again on a fresh seed."""
    hyperparameters: Mapping[str, int | float] = field(default_factory=dict)
    """Other hyper-parameters that are searched, by name (see bstune.config)."""
    max_seconds: float | None = None
    """Wall time after which its next step is its last one; None: no limit."""
    dense_steps: tuple[int, int] | None = None
    """The steps between which it is expected to meet the target and is evaluated densely; None: no
    such steps."""
    goal: float | None = None
    """The target's goal, where the study has it from its first trial; None: the protocol's."""
    sets_goal: bool = False
    """Whether the study takes its goal from this trial: the trial's record then begins with the
    metric before training, at step 0."""

    def trial_fields(self) -> dict[str, Any]:
        """Collect the fields that a trial's record takes over: all but the trial's limits."""
        # The limits only say how long it may run, when it is evaluated and which goal ends it.
        limits = ("max_steps", "max_seconds", "dense_steps", "goal", "sets_goal")
        names = [spec_field.name for spec_field in fields(self) if spec_field.name not in limits]
        return {name: getattr(self, name) for name in names}


@dataclass(frozen=True)
class TrialResult:
    """The record of one trial: how it ended, after how many steps and seconds, and its history.

    Args:
        number: Optuna's number of the trial.
        trial_index: its place in the study's plan, from 0.
        batch_size: examples per applied optimizer step.
        lr: learning rate.
        delta: log2(lr / rule(batch_size)); None where no rule was used.
        seed: seed of the initial weights, the order of the data and the augmentation.
        status: ``reached``; ``stopped`` (out of steps or stopped early: a bound from below); or how
            the trial failed.
        steps: optimizer steps applied until the first evaluation that met the target, or run if
            stopped; those of the trial that it continues are counted.
        steps_low: step of the last evaluation that missed the target (0 if none): S lies in
            (steps_low, steps] where the target was reached, above steps_low where it was not.
        examples: examples trained on, steps x batch_size.
        train_seconds: seconds of the training clock, with warm-up. Like all seconds they leave out
            those of the continued trial.
        eval_seconds: seconds of evaluation, and of the passes that measure the noise scale beside
            the training.
        startup_seconds: seconds from the trial's start to its first training step, without those of
            the evaluation at step 0.
        wall_seconds: seconds of the trial as a whole.
        seconds_per_step: tau(B) of the survey, where there is one, so that a machine under load
            does not decide; else the trial's own. None if no step was finished.
        device: name of the device.
        versions: versions of the packages that the result depends on; on CUDA, also its libraries
            and their settings.
        history: (step, value) pairs of the target's metric, from the first step; a value that was
            not finite is None.
        message: the error, for ``diverged``, ``out of memory`` and ``failed``; else what ended it,
            or None.
        resumed_from: number of the stopped trial that it continues; None: it started afresh.
        replicate_of: number of the trial whose hyper-parameters it runs again on a fresh seed;
            None: none's.
        noise_scale: (step, |G|^2, tr Sigma) of the steps at which it was measured
            (:mod:`bstune.core.noise_scale`), those of the trial that it continues included; steps
            that a gradient scaler skips are counted.
        hyperparameters: further ones that the study searches, by name.
        measured_seconds_per_step: the trial's own, the median over segments after warm-up; None
            where it is no other.
        ran_alone: whether no other trial of its study ran on the same machine meanwhile, as far as
            its process knew.
        horizon: steps after which its schedule ends, of a workload whose schedule ends with the
            trial; else None.
        training_loop: what took the steps: ``lean``, ``graph``, or ``lean, not graph: `` or
            ``Lightning's: `` and why; None: no Trainer took any.
        effective_lr: lr/(1 - m) of SGD with a momentum m, before any schedule; None for other
            optimizers.
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
    hyperparameters: Mapping[str, int | float] = field(default_factory=dict)
    measured_seconds_per_step: float | None = None
    ran_alone: bool = True
    horizon: int | None = None
    training_loop: str | None = None
    effective_lr: float | None = None

    @classmethod
    def unmeasured(cls, spec: TrialSpec, status: Status, **values: Any) -> "TrialResult":
        """Make a record from the spec and ``values``; all other fields are zero or empty."""
        empty: dict[str, Any] = {
            "steps": 0,
            "steps_low": 0,
            "examples": 0,
            "train_seconds": 0.0,
            "eval_seconds": 0.0,
            "startup_seconds": 0.0,
            "wall_seconds": 0.0,
            "seconds_per_step": None,
            "device": "",
            "versions": {},
        }
        return cls(**{**spec.trial_fields(), **empty, "status": status, **values})

    @property
    def reached(self) -> bool:
        """Whether the trial met its target."""
        return self.status == "reached"

    @property
    def run_identity(self) -> RunIdentity:
        """What a run has in common with one that repeats it from its first step."""
        values = tuple(sorted(self.hyperparameters.items()))
        return self.batch_size, self.lr, self.seed, values

    @property
    def was_cut_short(self) -> bool:
        """Whether its study's interruption or wall time ended it: it is no failure of its own."""
        return self.status == "failed" and self.message in ENDED_BY_STUDY

    @property
    def end_message(self) -> str | None:
        """The message on what ended the trial; None where it is on what the trial went without."""
        if self.message is None or self.message.startswith(WENT_ON_WITHOUT):
            return None
        return self.message

    @property
    def outcome(self) -> str:
        """How the trial ended, in words: its status, or ``cut short``."""
        return "cut short" if self.was_cut_short else self.status

    @property
    def time_to_target(self) -> float | None:
        """T = S x tau(B) in seconds; None if the target was not reached."""
        if not self.reached or self.seconds_per_step is None:
            return None
        return self.steps * self.seconds_per_step

    def best_value(self, mode: Mode) -> float | None:
        """Find the best value of the metric after training began; None where it has none."""
        # At step 0 nothing is trained yet.
        values = [value for step, value in self.history if step > 0 and value is not None]
        if not values:
            return None
        if mode == "min":
            return min(values)
        return max(values)

    def again(self, max_steps: int | None = None) -> TrialSpec:
        """Make the spec of the same trial, to be trained again from its start.

        ``max_steps`` limits its steps; None: it has no limit.
        """
        return TrialSpec(
            number=self.number,
            trial_index=self.trial_index,
            batch_size=self.batch_size,
            lr=self.lr,
            delta=self.delta,
            seed=self.seed,
            max_steps=max_steps,
            hyperparameters=self.hyperparameters,
        )

    def fields_after(self, steps: int) -> dict[str, Any]:
        """Make the fields of this record that change if it is cut after ``steps`` steps."""
        return {"steps": steps, "examples": steps * self.batch_size}

    def to_json(self) -> str:
        """Write the record as one line of strict JSON."""
        return dump_json(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "TrialResult":
        """Read a record that :meth:`to_json` wrote, which may be anybody's.

        Raises:
            RecordError: for a text that is no record; it names what is wrong.
        """
        try:
            values = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise RecordError(f"a trial record is a line of JSON, but got {text[:80]!r}") from error
        # Messages quote 80 characters at most, as the text may be long and anybody's.
        if not isinstance(values, dict):
            raise RecordError(f"a trial record is a JSON object, but got {text[:80]!r}")
        _check_names(values)
        for name, value in values.items():
            record_field = _FIELDS[name]
            if not record_field.is_valid(value):
                raise RecordError(
                    f"{name} of a trial record must be {record_field.allowed}, but got "
                    f"{repr(value)[:80]}"
                )
        return cls(**{name: _FIELDS[name].read(value) for name, value in values.items()})


def _check_names(values: Mapping[str, Any]) -> None:
    """Raise RecordError if a record lacks a field, or has an unknown one."""
    known = set[str]()
    required = set[str]()
    for record_field in fields(TrialResult):
        known.add(record_field.name)
        if record_field.default is MISSING and record_field.default_factory is MISSING:
            required.add(record_field.name)
    missing = sorted(required - values.keys())
    unknown = sorted(values.keys() - known)
    faults = list[str]()
    if missing:
        faults.append(f"lacks {', '.join(missing)[:200]}")
    if unknown:
        faults.append(f"has unknown {', '.join(unknown)[:200]}")
    if faults:
        raise RecordError(f"a trial record {' and '.join(faults)}")


class _Field(NamedTuple):
    """What a field of a record may hold, and how it is read from JSON.

    A record may come from anybody's folder or storage, and what reads it takes logarithms of batch
    sizes and divides by steps.
    """

    is_valid: Callable[[object], bool]
    allowed: str
    """What it may hold, in words."""
    read: Callable[[Any], Any] = lambda value: value
    """Converts the value that JSON has."""


def _is_number(value: object) -> bool:
    """Whether a value is a number of at most ``LARGEST_RECORDED`` in size."""
    return is_finite_number(value) and abs(value) <= LARGEST_RECORDED


def _is_count(value: object) -> bool:
    """Whether a value is a whole number from 0 to ``LARGEST_RECORDED``."""
    if isinstance(value, bool) or not isinstance(value, int):
        return False
    return 0 <= value <= LARGEST_RECORDED


def _is_batch_size(value: object) -> bool:
    """Whether a value is a whole number of at least 1."""
    return _is_count(value) and value != 0


def _is_seconds(value: object) -> bool:
    """Whether a value is a number of at least 0."""
    return _is_number(value) and value >= 0  # type: ignore[operator]


def _is_positive(value: object) -> bool:
    """Whether a value is a number above 0."""
    return _is_number(value) and value > 0  # type: ignore[operator]


def _is_text(value: object) -> bool:
    """Whether a value is a text."""
    return isinstance(value, str)


def _or_none(is_valid: Callable[[object], bool]) -> Callable[[object], bool]:
    """Make a check that takes None, too."""
    return lambda value: value is None or is_valid(value)


def _mapping_of(is_valid: Callable[[object], bool]) -> Callable[[object], bool]:
    """Make a check of a mapping whose values are all valid."""
    return lambda value: isinstance(value, dict) and all(map(is_valid, value.values()))


def _rows_of(*columns: Callable[[object], bool]) -> Callable[[object], bool]:
    """Make a check of a list of rows, each with a valid value in each column."""

    def is_row(row: object) -> bool:
        """Whether a value is a list with a valid value for each column."""
        if not isinstance(row, list) or len(row) != len(columns):
            return False
        return all(is_valid(value) for is_valid, value in zip(columns, row, strict=True))

    return lambda value: isinstance(value, list) and all(map(is_row, value))


def _tuples(rows: list[list[Any]]) -> tuple[tuple[Any, ...], ...]:
    """Convert rows from lists to tuples."""
    return tuple(tuple(row) for row in rows)


_COUNT = _Field(_is_count, "a whole number of at most 1e15")
_SECONDS = _Field(_is_seconds, "a number of seconds")
_MAYBE_COUNT = _Field(_or_none(_is_count), "a whole number or null")
_FIELDS: Mapping[str, _Field] = {
    "number": _COUNT,
    "trial_index": _COUNT,
    "batch_size": _Field(_is_batch_size, "a whole number of at least 1"),
    "lr": _Field(_is_positive, "a positive number"),
    # Metrics and gradients may be as large as a float.
    "delta": _Field(_or_none(is_finite_number), "a number or null"),
    "seed": _COUNT,
    "status": _Field(lambda value: value in STATUSES, f"one of {', '.join(STATUSES)}"),
    "steps": _COUNT,
    "steps_low": _COUNT,
    "examples": _COUNT,
    "train_seconds": _SECONDS,
    "eval_seconds": _SECONDS,
    "startup_seconds": _SECONDS,
    "wall_seconds": _SECONDS,
    "seconds_per_step": _Field(_or_none(_is_seconds), "a number of seconds or null"),
    "device": _Field(_is_text, "a text"),
    "versions": _Field(_mapping_of(_is_text), "a mapping of texts"),
    "history": _Field(
        _rows_of(_is_count, _or_none(is_finite_number)), "rows of a step and a value", _tuples
    ),
    "message": _Field(_or_none(_is_text), "a text or null"),
    "resumed_from": _MAYBE_COUNT,
    "replicate_of": _MAYBE_COUNT,
    "noise_scale": _Field(
        _rows_of(_is_count, is_finite_number, is_finite_number),
        "rows of a step and two numbers",
        _tuples,
    ),
    "hyperparameters": _Field(_mapping_of(is_finite_number), "a mapping of numbers"),
    "measured_seconds_per_step": _Field(_or_none(_is_seconds), "a number of seconds or null"),
    "ran_alone": _Field(lambda value: isinstance(value, bool), "true or false"),
    "horizon": _MAYBE_COUNT,
    "training_loop": _Field(_or_none(_is_text), "a text or null"),
    "effective_lr": _Field(_or_none(is_finite_number), "a number or null"),
}


def dump_json(value: Any, indent: int | None = None) -> str:
    """Write strict JSON: floats that are not finite become ``null``, at any depth."""
    return json.dumps(_finite(value), allow_nan=False, indent=indent)


def _finite(value: Any) -> Any:
    """Replace floats that are not finite by None, at any depth of mappings and sequences."""
    # JSON has no name for NaN and the infinities, and its keys are texts.
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value


@dataclass(frozen=True)
class Budget:
    """When a trial gives up: once both its steps and its examples are spent.

    Args:
        steps: optimizer steps, at any batch size.
        examples: the examples that a trial trains on, those of repeated epochs included.
    """

    steps: int = 1
    examples: int = 1

    def last_step(self, batch_size: int) -> int:
        """Compute the step after which both the steps and the examples are spent."""
        return max(self.steps, math.ceil(self.examples / batch_size))


@dataclass(frozen=True)
class TrialProtocol:
    """What stays fixed in every trial of a study, be it trained or answered from a table."""

    target: Target
    budget: Budget
    """When a trial gives up."""
    evaluation_schedule: EvaluationSchedule
    micro_batch_size: int | None
    """A larger batch is accumulated from micro-batches of this many examples; None: never."""
    warmup_steps: int
    """Steps at the start that are a segment of their own, left out of tau(B)."""
    divergence: float
    """A trial whose metric is so many times as far from the goal as at the start has diverged."""
    noise_scale_every: int | None
    """Steps between measurements of the gradient noise scale; None: it is not measured."""
    compile: str | None
    """The mode of torch.compile in which the module is compiled; None: it is not."""
    trainer: Mapping[str, Any]
    """Further arguments of the Lightning Trainer, such as accelerator and precision."""
    fast: FastMode
    """Whether the lean loop takes the steps where it can, or Lightning's own always."""
    devices: int = 1
    """How many devices share each batch, with a process each."""

    def last_step(self, batch_size: int) -> int:
        """Compute the step after which the budget of a trial at this batch size is spent."""
        return self.budget.last_step(batch_size)

    def for_steps_only(self, budget: Budget | None = None) -> "TrialProtocol":
        """Make the protocol of training that only a budget ends: this protocol's, or another."""
        return replace(self, target=self.target.never_met, budget=budget or self.budget)

    def with_goal_of(self, spec: TrialSpec) -> "TrialProtocol":
        """Make the protocol of a trial: with the spec's goal, if the spec has one of its own."""
        if spec.goal is None:
            return self
        return replace(self, target=replace(self.target, value=spec.goal))
