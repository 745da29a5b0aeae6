"""A trial that the user's own training loop trains: its values, its reports and its record.

A study hands a trial to the loop; the loop trains it and reports its metric. Nothing here trains::

    for trial in bstune.Study(...):
        ...
        if not trial.report(step, loss):
            break
        ...
        trial.finish(seconds=seconds)
"""

import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Protocol

import numpy as np
from torch import Tensor

import bstune
from bstune.core.errors import ConfigError, check_positive_integer
from bstune.core.numbers import as_float, as_int, shown
from bstune.core.records import CUT_SHORT, Status, TrialResult, TrialSpec
from bstune.system.console import plural
from bstune.system.failures import described
from bstune.trial.batches.index_stream import endless_indices
from bstune.trial.devices.errors import first_line, is_out_of_memory
from bstune.trial.devices.randomness import seeded_generators
from bstune.trial.parts.metric import shortest_decimal
from bstune.trial.parts.state import TrialState
from bstune.trial.parts.verdict import Verdict
from bstune.trial.processes.messages import Finished

NOT_FINISHED = "its loop went on without trial.finish(seconds=...)"
# What the message of a trial that its loop ended too early begins with.
BEFORE_END = "its last report was before trial.max_steps"
ENDED_SHORT = f"{BEFORE_END}: report there too, so that it can go on"
# The same, in words for a job of a Hydra application.
JOB_ENDED_SHORT = f"{BEFORE_END}: let its job evaluate there, too, so that it can go on"
ENDED_BY_CALLBACK = f"{BEFORE_END}, as {{name}} ended it: leave that out, so that it can go on"

# The loop's user may have written the target in a call of Study, or in a sweep of Hydra's.
MET_AT_STEP_0 = (
    "give the target the other direction or a harder value; if the loop has trained, report the "
    "steps that it took, as step 0 is before any"
)

Measurements = tuple[tuple[int, float, float], ...]
"""The number, the unbiased |G|^2 and tr Sigma of each step whose noise scale was measured."""


class Noise(Protocol):
    """An object that has measured a noise scale, as :class:`bstune.LoopNoiseScale` does."""

    @property
    def measurements(self) -> Measurements:
        """Each measured step's number, |G|^2 and tr Sigma; numbers count from the trial's first."""


class LoopTrial:
    """One trial of a study for a training loop of yours, which reports its evaluations to it.

    It has the values to train with. A further hyper-parameter that the study searches is an
    attribute too, such as ``trial.dropout``; its name must be none of the trial's own
    (:func:`is_name_of_a_trial`).

    Args:
        spec: of the trial.
        state: its steps and evaluations, those of the stopped trial that it continues included.
        verdict: ends the trial by its evaluations.
        metric: the name of the target's metric, which is reported.
        save_to: the file or folder where the loop may save the trial, once it is ``worth_saving``.
        resume_from: what the loop saved of the stopped trial that this one continues; None: it
            starts afresh.
        budget_end: the step from which on the trial is never asked to go on; None: there is none,
            as a larger budget may be given.
        refuses_further_steps: whether a report past ``max_steps`` is refused.
        needs_seconds: whether the study's objective needs the seconds of training.
        now: a monotonic clock, in seconds.
        noise_scale: measurements of the stopped trial that this one continues.
        schedule_ends: whether the loop's schedule ends at ``max_steps``: a trial that ends before
            it without the target is refused, and none goes on.
        largest_batch_size: that the study may ask for; None: not known.
    """

    metric: str
    save_to: Path
    resume_from: Path | None

    def __init__(
        self,
        spec: TrialSpec,
        state: TrialState,
        verdict: Verdict,
        metric: str,
        save_to: Path,
        resume_from: Path | None,
        budget_end: int | None,
        refuses_further_steps: bool,
        needs_seconds: bool,
        now: Callable[[], float],
        noise_scale: Measurements = (),
        schedule_ends: bool = False,
        largest_batch_size: int | None = None,
    ) -> None:
        self._spec = spec
        self._largest_batch_size = largest_batch_size
        # What ends the trial before its last step, where it has a name.
        self._ended_by: str | None = None
        self._noise_scale = noise_scale
        self._schedule_ends = schedule_ends
        self._needs_seconds = needs_seconds
        self._state = state
        self._verdict = verdict
        self._budget_end = budget_end
        self._refuses_further_steps = refuses_further_steps
        self._now = now
        self._began = now()
        self._finished: Finished | None = None
        # Whether step 0 was reported, which is no part of the history.
        self._has_start = False
        # Whether the loop is to train on, as the last report was answered.
        self._trains_on = True
        self.metric = metric
        self.save_to = save_to
        self.resume_from = resume_from

    @property
    def spec(self) -> TrialSpec:
        """The batch size, the learning rate, the seed and the limits that the study asks for."""
        return self._spec

    @property
    def batch_size(self) -> int:
        """Examples per step of the optimizer, accumulated ones and all devices together."""
        return self._spec.batch_size

    @property
    def lr(self) -> float:
        """The learning rate."""
        return self._spec.lr

    @property
    def seed(self) -> int:
        """The seed of the initial weights, the order of the data and the augmentation."""
        return self._spec.seed

    @property
    def number(self) -> int:
        """The trial's number in the study."""
        return self._spec.number

    @property
    def first_step(self) -> int:
        """The last reported step of the stopped trial that this one continues.

        0 where the trial starts afresh.
        """
        return self._state.first_step

    @property
    def max_steps(self) -> int:
        """The step after which the trial ends, unless the study asks it to go on later.

        The steps of the stopped trial that it continues count too. Under
        ``Study(schedule_ends=True)`` it is the length of the schedule.
        """
        return self._state.last_step

    @property
    def schedule_ends(self) -> bool:
        """Whether the loop's schedule ends with the trial: ``Study(schedule_ends=True)``."""
        return self._schedule_ends

    @property
    def hyperparameters(self) -> Mapping[str, int | float]:
        """The values that the study searches besides batch size and learning rate, by name."""
        return self._spec.hyperparameters

    @property
    def finished(self) -> Finished | None:
        """How the trial ended; None before :meth:`finish` or :meth:`fail`."""
        return self._finished

    def __getattr__(self, name: str) -> int | float:
        # copy and pickle ask for private names before ``_spec`` is there.
        searched = {} if name.startswith("_") else self._spec.hyperparameters
        if name not in searched:
            raise AttributeError(f"a trial has no {name!r}")
        return searched[name]

    def __repr__(self) -> str:
        values = {"batch_size": self.batch_size, "lr": self.lr, "seed": self.seed}
        stated = {**values, **self.hyperparameters, "max_steps": self.max_steps}
        texts = [f"{name}={value!r}" for name, value in stated.items()]
        return f"LoopTrial({', '.join(texts)})"

    def batches(self, examples: int) -> Iterator[Tensor]:
        """Yield the indices of one batch after another, (batch_size,) int64, without end.

        Each batch has exactly ``batch_size`` examples, from one shuffled epoch after another. The
        first ``first_step`` batches are left out. The batches are those of a study of a module with
        the same seed. A DataLoader takes them as its ``batch_sampler``.

        Args:
            examples: the number of training examples.

        Raises:
            ConfigError: where ``examples`` is no positive whole number, or less than the largest
                batch size of the study.
        """
        # A number of numpy's or torch's is taken, too. Anything else is refused as it was given.
        count = as_int(examples)
        checked = examples if count is None else count
        check_positive_integer("the examples of trial.batches", checked)
        check_examples(self, checked)
        # A study of a module makes two generators: of the order, and of its loader's workers.
        order, _ = seeded_generators(self.seed, "cpu", count=2)
        return endless_indices(checked, self.batch_size, order, first=self.first_step)

    def report(self, step: int, value: object) -> bool:
        """Report the metric after a step of the optimizer, and learn whether to train on.

        Args:
            step: how many steps the optimizer has taken, those of the trial that this one continues
                included. A report at 0, before the first step, is the start: a trial has diverged
                once it is far past that. One past ``max_steps`` ends the trial, too, which a line
                says once; the objective loss refuses it.
            value: of the target's metric: a number, or a tensor or an array of one. A value that is
                not finite ends the trial as diverged.

        Returns:
            Whether to train on. Once it is False it stays so, and further values are left out.

        Raises:
            ConfigError: for a value that is no number, and a step that does not rise.
        """
        if self._finished is not None:
            raise ConfigError(f"trial {self.number} is finished: report before trial.finish()")
        steps = _whole_number(step)
        number = _number(value)
        is_finite = math.isfinite(number)
        if not self._trains_on:
            return False
        is_start = steps == 0 and not self._state.history and self.first_step == 0
        # A loop that reports step 0 again counts no steps, and would never end.
        if is_start and not self._has_start:
            self._has_start = True
            if is_finite:
                self._verdict.begin(number, MET_AT_STEP_0)
            return True
        self._check_rises(steps)
        self._state.steps = steps
        # This ends a trial that has come to max_steps, too. The training loss is not reported.
        self._verdict.judge(number if is_finite else None, loss=None)
        is_late = self._is_out_of_time()
        self._trains_on = not self._state.ended and not is_late
        return self._trains_on

    def reach(self, step: int) -> None:
        """Report, in place of :meth:`report`, the step after which the target was first met.

        It is for a loop that knows no values of the metric.

        Args:
            step: as :meth:`report` takes it; the step before it is taken to have missed the target.

        Raises:
            ConfigError: for a step that does not lie after the last one.
        """
        self._end_without_value(_whole_number(step), "reached")

    def miss(self) -> None:
        """Report, in place of :meth:`report`, that the target was not met until ``max_steps``."""
        self._end_without_value(self.max_steps, "stopped")

    def _end_without_value(self, steps: int, status: Status) -> None:
        """End the trial after ``steps`` steps as reached or stopped, without a metric's value."""
        state = self._state
        self._check_rises(steps)
        state.steps = steps
        # The loop names the very step that met the target first, so the one before missed it.
        state.steps_low = steps - 1 if status == "reached" else steps
        state.status = status
        self._trains_on = False

    def finish(self, seconds: object = None, noise: Noise | None = None) -> None:
        """Tell the study that the trial has ended, once, after its last report.

        Args:
            seconds: of the training alone since the trial was handed over, without evaluation and
                start-up: a number, or a tensor or an array of one. The seconds of a step come from
                them. None: they were not measured, and the trial has no time to target.
            noise: has measured the noise scale meanwhile, which the study then takes in. Its steps
                are the trial's, as with ``LoopNoiseScale(first_step=trial.first_step)``.

        Raises:
            ConfigError: where the trial was finished before or nothing was reported; for seconds
                that are no positive number; without seconds where the objective needs them and the
                trial has not diverged; and before the end of a schedule that ends with the trial.
        """
        if self._finished is not None:
            raise ConfigError(
                f"trial {self.number} is finished already: call finish() once a trial"
            )
        train_seconds = None if seconds is None else _seconds(seconds)
        state = self._state
        own_steps = state.steps - state.first_step
        self._check_complete(own_steps, train_seconds)
        # The answer to the last report was to train on, but the loop ended the trial.
        ended_short = self._trains_on
        if ended_short:
            state.message = ENDED_SHORT
            if self._ended_by is not None:
                state.message = ENDED_BY_CALLBACK.format(name=self._ended_by)
        wall_seconds = self._now() - self._began
        # In a study's sums the wall time stands for seconds that were not reported.
        seconds_in_sums = wall_seconds if train_seconds is None else train_seconds
        seconds_per_step: float | None = None
        if train_seconds:
            seconds_per_step = train_seconds / own_steps
        record = TrialResult.unmeasured(
            self._spec,
            state.status,
            steps=state.steps,
            examples=state.steps * self.batch_size,
            steps_low=state.steps_low,
            train_seconds=seconds_in_sums,
            wall_seconds=wall_seconds,
            seconds_per_step=seconds_per_step,
            versions={"bstune": bstune.__version__},
            history=state.recorded_history,
            message=state.message,
            noise_scale=self._measurements_with(noise),
        )
        # Trials with a budget's end are compared by their loss. One that is to stop before that end
        # is compared at its max_steps: if it ended short of them, its value there is missing.
        is_compared_early = self._budget_end is not None and self.max_steps < self._budget_end
        self._finished = Finished(self._spec, record, is_cut=ended_short and is_compared_early)

    def _measurements_with(self, noise: Noise | None) -> Measurements:
        """Give the noise scale's measurements of the whole trial, in the order of their steps.

        They are those of the trial that it continues, and those of ``noise``; None: it has none.
        """
        measurements = list(self._noise_scale)
        if noise is not None:
            measurements += noise.measurements
        # A loop may have kept earlier measurements itself: one of each step counts.
        by_step = {measured[0]: measured for measured in measurements}
        return tuple(by_step[step] for step in sorted(by_step))

    def fail(self, error: BaseException) -> None:
        """Tell the study, in place of :meth:`finish`, that an error has ended the trial.

        Where the device has run out of memory, later trials have smaller batches. A trial that
        Ctrl-C has ended is asked again. Any other error is a failure: three in a row end the study,
        by a UserCodeError from the last of them.
        """
        if self._finished is not None:
            raise ConfigError(
                f"trial {self.number} is finished already: call fail() or finish() once"
            )
        if is_out_of_memory(error):
            self._end_by_error("out of memory", first_line(error))
            return
        if isinstance(error, KeyboardInterrupt):
            self._end_by_error("failed", CUT_SHORT)
            return
        message, frames = described(error)
        # The study's own error has this one as its cause, unless it only ends a process, as
        # SystemExit does.
        cause = error if isinstance(error, Exception) else None
        self._end_by_error("failed", message, frames, cause)

    def abandon(self) -> Finished:
        """Tell how the trial ended; if its loop went on without ending it, end it as failed."""
        if self._finished is None:
            self._end_by_error("failed", NOT_FINISHED)
        assert self._finished is not None  # noqa: S101 (set just now)
        return self._finished

    def _end_by_error(
        self, status: Status, message: str, frames: str = "", cause: Exception | None = None
    ) -> None:
        """End the trial with a record of its error.

        Args:
            status: ``out of memory`` or ``failed``.
            message: the error in a line.
            frames: the lines of the user's code that led to it, as text.
            cause: the error; None where there is none to raise.
        """
        state = self._state
        record = TrialResult.unmeasured(
            self._spec,
            status,
            steps=state.steps,
            examples=state.steps * self.batch_size,
            steps_low=state.steps_low,
            wall_seconds=self._now() - self._began,
            history=tuple(state.history),
            message=message,
        )
        self._finished = Finished(self._spec, record, frames=frames, cause=cause)

    @property
    def has_diverged(self) -> bool:
        """Whether a reported value has ended the trial as diverged."""
        return self._state.status == "diverged"

    @property
    def worth_saving(self) -> bool:
        """Whether the loop should save the trial: a limit has ended it, and it may go on later."""
        return not self._trains_on and self._state.status == "stopped" and self.may_go_on

    @property
    def may_go_on(self) -> bool:
        """Whether the study may ask the trial to go on later.

        It asks neither a run of the winner on a fresh seed nor a trial at the end of its budget or
        schedule.
        """
        if self._schedule_ends:
            return False
        is_at_budget_end = self._budget_end is not None and self._state.steps >= self._budget_end
        return self._spec.replicate_of is None and not is_at_budget_end

    @property
    def start_gap(self) -> float | None:
        """How far from the target the metric was before training; None if that was not reported."""
        return self._verdict.start_gap

    def _is_out_of_time(self) -> bool:
        """Whether the trial has run for more seconds than its spec allows."""
        limit = self._spec.max_seconds
        return limit is not None and self._now() - self._began > limit

    def _check_complete(self, own_steps: int, train_seconds: float | None) -> None:
        """Raise a ConfigError where the study lacks an evaluation, or the seconds of training.

        Args:
            own_steps: those since the trial was handed over.
            train_seconds: of the same steps; None: the loop has not told them.
        """
        if own_steps == 0:
            raise ConfigError(
                f"trial {self.number} ended without an evaluation, and a trial ends by its metric: "
                f"call trial.report(step, value) with {self.metric} before trial.finish()"
            )
        # Without its schedule's end a trial tells nothing of how long a schedule it takes.
        if self._schedule_ends and self._trains_on:
            ended = "ended" if self._ended_by is None else f"was ended by {self._ended_by}"
            raise ConfigError(
                f"trial {self.number} {ended} with a report at step {self._state.steps}, but its "
                f"schedule ends at trial.max_steps={self.max_steps}: train and report until then"
            )
        # A trial that has diverged has no time to the target.
        if train_seconds is None and self._needs_seconds and not self.has_diverged:
            raise ConfigError(
                "an objective of time needs the seconds of training: call "
                "trial.finish(seconds=...), or give objective='steps'"
            )

    def _check_rises(self, steps: int) -> None:
        """Raise a ConfigError for a step that does not lie after the last one, or past the end."""
        state = self._state
        rises = steps > state.steps
        is_first_report = state.steps == state.first_step
        if not rises and is_first_report and self.resume_from is not None:
            raise ConfigError(
                f"trial {self.number} continues one of {plural(state.first_step, 'step')}, but "
                f"reports step {steps}: load trial.resume_from, and count on from there"
            )
        if not rises:
            raise ConfigError(
                f"the steps that trial {self.number} reports must rise, but step {steps} comes "
                f"after {state.steps}: report the optimizer's steps since the trial's first one"
            )
        if self._refuses_further_steps and steps > state.last_step:
            end = "its budget, at which trials are compared"
            if self._schedule_ends:
                end = "its schedule"
            raise ConfigError(
                f"trial {self.number} reports step {steps}, past the {state.last_step} of {end}: "
                "end it at trial.max_steps, and report there"
            )


def check_examples(trial: LoopTrial, examples: int) -> None:
    """Raise a ConfigError where the study may ask for larger batches than the data have examples.

    Its first trial is refused, before a later one of such a batch size could fail at each call.
    ``examples``: of the training data. It is no attribute of the trial, whose names something
    tunable cannot have.
    """
    largest = trial.batch_size
    if trial._largest_batch_size is not None:
        largest = max(largest, trial._largest_batch_size)
    if largest > examples:
        raise ConfigError(
            f"batch size {largest} is larger than the data set ({examples} examples): "
            "lower the largest of batch_sizes, and give another name, as the study has begun"
        )


def name_what_ends(trial: LoopTrial, name: str) -> None:
    """Name a call-back that may end a trial before its last step, for the trial's message."""
    trial._ended_by = name


def has_ended_short(record: TrialResult) -> bool:
    """Whether a trial's loop has ended it before its last step, so that it cannot go on."""
    return record.message is not None and record.message.startswith(BEFORE_END)


def is_name_of_a_trial(name: str) -> bool:
    """Whether a trial has an attribute by this name, so that no hyper-parameter can have it."""
    return name.startswith("_") or hasattr(LoopTrial, name) or name in LoopTrial.__annotations__


def _whole_number(step: object) -> int:
    """Give a reported step as an int; a ConfigError for one that is no whole number."""
    steps = as_int(step)
    if steps is None or steps < 0:
        raise ConfigError(f"trial.report needs a whole number of steps, but got {shown(step)}")
    return steps


def _number(value: object) -> float:
    """Give a reported value as a float; a ConfigError for one that is no number.

    A float32 becomes the shortest decimal that rounds to it, such as 0.1.
    """
    number = as_float(value)
    if number is None:
        raise ConfigError(f"trial.report needs a number as its value, but got {shown(value)}")
    # A tensor's item() does not tell that the value was a float32. A value out of float32's range
    # overflows here.
    with np.errstate(over="ignore"):
        is_float32 = float(np.float32(number)) == number
    return shortest_decimal(number) if is_float32 else number


def _seconds(seconds: object) -> float:
    """Give reported seconds as a float; a ConfigError for any that are no positive number."""
    number = as_float(seconds)
    if number is None or not 0.0 < number < math.inf:
        raise ConfigError(
            "trial.finish needs the seconds of training, a positive number, but got "
            f"{shown(seconds)}"
        )
    return number


def last_report(trial: LoopTrial) -> tuple[int, float | None] | None:
    """Give the step and the value of a trial's last report; None before any.

    It is no attribute of the trial, whose names something tunable cannot have.
    """
    history = trial._state.history
    return history[-1] if history else None
