"""A trial that the user's own training loop trains: its values, its reports and its record.

A study hands a trial to the loop; the loop trains it and reports its metric. Nothing here trains::

    for trial in bstune.Study(...):
        ...
        if not trial.report(step, loss):
            break
        ...
        trial.finish(seconds=seconds)

The loop may save a stopped trial, in a format of its own, to train on from there later. Beside that
lies a file that ends as all states of the study do (:func:`bstune.system.files.own_mark`): by it
the study finds the saved trial again, and removes it once nothing needs it.
"""

import json
import math
import operator
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple, Protocol, Self

import numpy as np
import torch
from torch import Tensor

import bstune
from bstune.core.errors import ConfigError, check_positive_integer
from bstune.core.numbers import as_float, as_int, shown
from bstune.core.records import CUT_SHORT, Status, TrialProtocol, TrialResult, TrialSpec
from bstune.core.step_time import StepTime, fit_line
from bstune.core.step_time_law import law_of_trials
from bstune.options import StudyOptions
from bstune.system.console import format_number, plural
from bstune.system.failures import described
from bstune.system.files import (
    Output,
    is_own,
    make_inside,
    may_take,
    own_mark,
    saved_beside,
    whole_file,
)
from bstune.trial.backend import TrialBackend
from bstune.trial.batches.index_stream import endless_indices
from bstune.trial.devices.device import processor, resolve_device
from bstune.trial.devices.errors import first_line, is_out_of_memory
from bstune.trial.devices.randomness import seeded_generators
from bstune.trial.parts.metric import shortest_decimal
from bstune.trial.parts.state import TrialState, state_after
from bstune.trial.parts.verdict import Verdict
from bstune.trial.processes.messages import Finished

# The time of a step before any was timed: so short that a study's time limit holds no trial back.
UNTIMED = StepTime(overhead=1e-12, per_example=0.0)
# The key in the file beside a saved trial.
START_GAP = "start_gap"
NOT_FINISHED = "its loop went on without trial.finish(seconds=...)"
ENDED_SHORT = "its last report was before trial.max_steps: report there too, so that it can go on"
# After so many trials in a row without a report at their last step, trials are not continued.
CUT_MEAN_NEVER = 3
NEVER_AT_END = (
    "{trials} trials in a row ended before trial.max_steps, the last one with a report at step "
    "{steps} of {end}: trials that go on start afresh, from their first step, unless the loop "
    "reports at trial.max_steps too, as by taking min(10, trial.max_steps - step) steps between "
    "reports"
)
NOT_SAVED = (
    "nothing was saved at {place} when trial {number} was stopped: trials that go on start afresh, "
    "from their first step"
)

PAST_THE_END = (
    "trial {number} reported step {steps}, past trial.max_steps={end}: its further steps are time "
    "that the study has not planned; take min(10, trial.max_steps - step) steps between reports"
)
MET_AT_ONCE = (
    "trial 0 met {target} at its first evaluation, {value} after {steps}: when it did is not "
    "known, so evaluate earlier, or give a harder target"
)
WRONG_WAY = (
    "; a target that untrained weights meet too is the wrong way round, which trial.report(0, "
    "value) before the first step tells"
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
    ) -> None:
        self._spec = spec
        self._noise_scale = noise_scale
        self._needs_seconds = needs_seconds
        self._state = state
        self._verdict = verdict
        self._budget_end = budget_end
        self._refuses_further_steps = refuses_further_steps
        self._now = now
        self._began = now()
        self._finished: Finished | None = None
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

        The steps of the stopped trial that it continues count too.
        """
        return self._state.last_step

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
            ConfigError: where ``examples`` is no positive whole number, or less than the batch
                size.
        """
        # A number of numpy's or torch's is taken, too. Anything else is refused as it was given.
        count = as_int(examples)
        checked = examples if count is None else count
        check_positive_integer("the examples of trial.batches", checked)
        if self.batch_size > examples:
            raise ConfigError(
                f"batch size {self.batch_size} is larger than the data set ({examples} examples): "
                "lower the largest of batch_sizes"
            )
        # A study of a module makes two generators: of the order, and of its loader's workers.
        order, _ = seeded_generators(self.seed, "cpu", count=2)
        return endless_indices(
            operator.index(examples), self.batch_size, order, first=self.first_step
        )

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
        if steps == 0 and not self._state.history and self.first_step == 0:
            if is_finite:
                self._verdict.begin(number)
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
                that are no positive number; and without seconds where the objective needs them and
                the trial has not diverged.
        """
        if self._finished is not None:
            raise ConfigError(
                f"trial {self.number} is finished already: call finish() once a trial"
            )
        train_seconds = None if seconds is None else _seconds(seconds)
        state = self._state
        own_steps = state.steps - state.first_step
        self._check_complete(own_steps, train_seconds)
        # The last report was answered that the trial trains on, but the loop ends it all the same.
        ended_short = self._trains_on
        if ended_short:
            state.message = ENDED_SHORT
        wall_seconds = self._now() - self._began
        record = TrialResult.unmeasured(
            self._spec,
            state.status,
            steps=state.steps,
            examples=state.steps * self.batch_size,
            steps_low=state.steps_low,
            # In a study's sums the wall time stands for seconds that were not reported.
            train_seconds=wall_seconds if train_seconds is None else train_seconds,
            wall_seconds=wall_seconds,
            seconds_per_step=train_seconds / own_steps if train_seconds else None,
            versions={"bstune": bstune.__version__},
            history=tuple(state.history),
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

        It asks neither a run of the winner on a fresh seed nor a trial at its budget's end.
        """
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
            raise ConfigError(
                f"trial {self.number} reports step {steps}, past the {state.last_step} of its "
                "budget, at which trials are compared: end it at trial.max_steps, and report there"
            )


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


@dataclass(frozen=True)
class LoopLimits:
    """What a study may ask of a training loop.

    Args:
        stops: whether the loop stops a trial at ``max_steps``; else each runs to its budget.
        lr_range: the smallest and the largest learning rate.
        jobs: how many trials the loop trains side by side.
        in_hindsight: whether the loop reports a trial only once it has ended, so that no time limit
            can end it.
        continues: whether the loop can train a stopped trial on from what it saved of that.
        save_place: where the loop is to save a trial, in its own terms.
        objective_is_open: whether the objective, time, may yet have to become steps: trials may end
            without their seconds, as it is not known yet whether the loop tells them.
    """

    stops: bool = True
    lr_range: tuple[float, float] = TrialBackend.lr_range
    jobs: int = 1
    in_hindsight: bool = False
    continues: bool = True
    save_place: str = "trial.save_to"
    objective_is_open: bool = False


ANY_LOOP = LoopLimits()


class _Beginning(NamedTuple):
    """Where a trial begins: afresh, or where a stopped trial that it continues was left."""

    state: TrialState
    resume_from: Path | None = None
    """What the loop saved of the stopped trial."""
    start_gap: float | None = None
    """Its distance from the target before training; None: not known."""
    noise_scale: Measurements = ()
    """Its measurements."""


class LoopBackend(TrialBackend):
    """Hands a study's trials to the user's training loop, and takes them back.

    Args:
        options: of the study.
        protocol: of all trials.
        say: prints a line.
        now: a monotonic clock, in seconds.
        limits: what the loop can do.
    """

    description = "a loop of yours"
    notes = ("seconds are the trials' own, as no step was timed before",)

    def __init__(
        self,
        options: StudyOptions,
        protocol: TrialProtocol,
        say: Callable[[str], None],
        now: Callable[[], float] = time.monotonic,
        limits: LoopLimits = ANY_LOOP,
    ) -> None:
        self._protocol = protocol
        self._budget = options.budget
        self._is_for_loss = options.search.objective == "loss"
        # A trial may end without its seconds while the objective, time, may yet become steps.
        self._may_lack_seconds = limits.objective_is_open
        self._needs_seconds = (
            options.search.objective in ("time", "both") and not self._may_lack_seconds
        )
        self._say = say
        self._now = now
        # The batch size and the seconds of a step of each trial that reported its seconds.
        self._timed: list[tuple[int, float]] = []
        self._fitted_step_time: Callable[[float], float] = UNTIMED
        # Whether a trial was told that it ran past its last step.
        self._has_told_of_end = False
        # The number of trials in a row that ended before their last step.
        self._cut_in_a_row = 0
        # Whether trials may end at a step before their budget's end.
        self.stops = limits.stops
        # Only a trial that was stopped can go on.
        self._can_continue = limits.stops and limits.continues
        # Whether trials do go on: False once the loop turns out not to save them where they could.
        self.continues = self._can_continue
        self._save_place = limits.save_place
        self.lr_range = limits.lr_range
        # Whether the loop reports a trial only once it has ended.
        self._in_hindsight = limits.in_hindsight
        # Otherwise another program has the values, such as an application of Hydra.
        self.trains_in_loop = not limits.in_hindsight
        device = resolve_device(options.device, "device")
        if device.type == "cpu":
            self.device = "cpu"
            self.device_kind = f"cpu of {processor()}"
        else:
            self.device = torch.cuda.get_device_name(device)
            self.device_kind = self.device
        # These settings must not change while a study goes on.
        self.frozen_settings = {"device": self.device}
        self.versions = {"bstune": bstune.__version__}

    @property
    def knows_step_time(self) -> bool:  # type: ignore[override]
        """Whether a trial has reported its seconds."""
        return bool(self._timed)

    @property
    def objective_is_open(self) -> bool:  # type: ignore[override]
        """Whether the study's objective, time, may yet have to become steps.

        It may as long as no trial has told its seconds, where it is not known whether the loop
        tells any.
        """
        return self._may_lack_seconds and not self._timed

    def step_time(self, batch_size: float) -> float:
        """Give the seconds of a step at a batch size, from the seconds that trials have reported.

        Before any has, they are next to zero, so that no limit in seconds holds a trial back.
        """
        return self._fitted_step_time(batch_size)

    def look_back(self, done: Sequence[TrialResult], folder: Output) -> None:
        """Take in the trials of earlier runs: their seconds, and whether the loop saves trials.

        If the loop should have saved some stopped trials and saved none, no trial is continued.
        """
        for record in done:
            self._take_seconds(record)
        # A trial whose continuation failed is not among these: it is to be continued once more.
        resumed = {record.resumed_from for record in done if record.status != "failed"}
        to_be_saved = list[TrialResult]()
        for record in done:
            if record.number not in resumed and self._is_to_be_saved(record):
                to_be_saved.append(record)
        if to_be_saved and self._can_continue:
            self.continues = any(self.resumable(record.number, folder) for record in to_be_saved)

    def _is_to_be_saved(self, record: TrialResult) -> bool:
        """Whether the loop should have saved a trial: it was stopped, and could go on later.

        Three kinds cannot: a run of the winner on a fresh seed (``replicate_of``), a trial that the
        loop ended before its last step, and one that has spent its budget.
        """
        is_final = record.replicate_of is not None or record.message == ENDED_SHORT
        is_at_budget_end = self._is_for_loss and record.steps >= self._budget_end(record.batch_size)
        return record.status == "stopped" and not is_final and not is_at_budget_end

    def _budget_end(self, batch_size: int) -> int:
        """Give the step after which a trial's budget is spent.

        Trials that are compared by their loss all have the same number of examples, or of steps.
        """
        if not self._is_for_loss:
            return self._protocol.last_step(batch_size)
        if self._budget.counts_examples:
            return math.ceil(self._budget.examples / batch_size)
        return self._budget.steps

    def resumable(self, number: int, folder: Output) -> bool:
        """Whether the loop has saved the stopped trial ``number``, beside a file of the study's."""
        return is_own(folder.state(number)) and _was_saved(saved_beside(folder.state(number)))

    def hand_over(
        self, spec: TrialSpec, folder: Output, resumed_from: TrialResult | None
    ) -> LoopTrial:
        """Make a trial for the loop.

        It goes on from the trial that ``resumed_from`` records, if the loop has saved that; else it
        starts afresh.
        """
        # A loop that reports a trial only once it has ended cannot be stopped by a time limit.
        if self._in_hindsight:
            spec = replace(spec, max_seconds=None)
        make_inside(folder.states)
        # The mark is written before the loop saves anything, so that the study finds the saved
        # trial whatever ends this process. The distance from the target before training, the start
        # gap, is not known yet.
        self._mark(folder.state(spec.number), start_gap=None)
        # The target's value may be the one that the study's first trial came to.
        protocol = self._protocol.with_goal_of(spec)
        budget_end = self._budget_end(spec.batch_size)
        last_step = spec.max_steps or budget_end
        if resumed_from is not None and self.resumable(resumed_from.number, folder):
            beginning = _continuation(resumed_from, folder, last_step)
        else:
            beginning = _Beginning(TrialState(first_step=0, last_step=last_step, steps=0))
            spec = replace(spec, resumed_from=None)
        verdict = Verdict(
            beginning.state,
            protocol.target,
            protocol.divergence,
            beginning.start_gap,
            # Untrained weights may meet the target that the first trial came to (``goal``). The
            # user's own target is refused where they do.
            may_start_at_target=spec.goal is not None,
        )
        # Trials that are compared by their loss end at a given step: a later report is refused, and
        # no trial goes on past the budget's end.
        return LoopTrial(
            spec,
            beginning.state,
            verdict,
            metric=protocol.target.metric,
            save_to=saved_beside(folder.state(spec.number)),
            resume_from=beginning.resume_from,
            budget_end=budget_end if self._is_for_loss else None,
            refuses_further_steps=self._is_for_loss,
            needs_seconds=self._needs_seconds,
            now=self._now,
            noise_scale=beginning.noise_scale,
        )

    def take_back(self, trial: LoopTrial, folder: Output) -> Finished:
        """Take a trial back from its loop, and tell how it ended.

        If the loop went on without ending it, it has failed.
        """
        finished = trial.abandon()
        self._note_cut(trial, finished)
        record = finished.result()
        message = record.message
        # A loop that does not stop at max_steps ends each trial at a step of its own: no fault.
        if message == ENDED_SHORT and not self.stops:
            message = None
        record = replace(record, device=self.device, message=message)
        self._take_seconds(record)
        self._tell_if_past_end(trial, record)
        self._tell_if_met_at_once(trial, record)
        self._keep_saved(trial, record, folder)
        return replace(finished, record=record)

    def _note_cut(self, trial: LoopTrial, finished: Finished) -> None:
        """Count trials in a row that their loop ended too early to be compared by their loss.

        Such trials cannot go on. After ``CUT_MEAN_NEVER`` of them no trial is continued any more:
        each starts afresh, and the user is told so once.
        """
        if self._is_for_loss and finished.is_cut:
            self._cut_in_a_row += 1
        else:
            self._cut_in_a_row = 0
        if self._cut_in_a_row == CUT_MEAN_NEVER and self.continues:
            self.continues = False
            steps = finished.result().steps
            self._say(
                NEVER_AT_END.format(trials=self._cut_in_a_row, steps=steps, end=trial.max_steps)
            )

    def _tell_if_past_end(self, trial: LoopTrial, record: TrialResult) -> None:
        """Say once that a trial has run past its last step, where the loop could have stopped it.

        A loop that is told nothing of ``max_steps``, or reports in hindsight, could not.
        """
        knows_end = self.stops and not self._in_hindsight
        if self._has_told_of_end or not knows_end or record.steps <= trial.max_steps:
            return
        self._has_told_of_end = True
        self._say(
            PAST_THE_END.format(number=record.number, steps=record.steps, end=trial.max_steps)
        )

    def _tell_if_met_at_once(self, trial: LoopTrial, record: TrialResult) -> None:
        """Say that the study's first trial met the target at its first evaluation.

        All batch sizes that do so look alike. Other workloads are evaluated before training, where
        a target that is met already is refused; a loop need not report that.
        """
        if record.number != 0 or not record.reached or len(record.history) != 1:
            return
        _, value = record.history[0]
        text = MET_AT_ONCE.format(
            target=self._protocol.target,
            value=format_number(value),
            steps=plural(record.steps, "step"),
        )
        # The hint is for a loop that could report its start and has not. A start that was reported
        # has missed the target.
        if trial.start_gap is None and not self._in_hindsight:
            text += WRONG_WAY
        self._say(text)

    def _take_seconds(self, record: TrialResult) -> None:
        """Fit tau(B), the seconds of a step over batch size, anew with those of a trial.

        A trial that reported no seconds changes nothing.
        """
        if not record.seconds_per_step:
            return
        self._timed.append((record.batch_size, record.seconds_per_step))
        # While all batch sizes lie within about a quarter of an octave, no law of tau(B) can be
        # fitted, and a line is fitted instead.
        self._fitted_step_time = law_of_trials(self._timed) or fit_line(self._timed)

    def _mark(self, state: Path, start_gap: float | None) -> None:
        """Write the file that marks a trial saved beside it as the study's.

        ``start_gap`` is the trial's distance from the target before training; None: not known.
        """
        if may_take(state):
            with whole_file(state) as file:
                text = json.dumps({START_GAP: start_gap})
                file.write(text.encode() + b"\n" + own_mark(state))

    def _keep_saved(self, trial: LoopTrial, record: TrialResult, folder: Output) -> None:
        """Mark a stopped trial that the loop has saved as the study's.

        Where it should have been saved and was not, trials are no longer continued, and the user is
        told so.
        """
        if record.status != "stopped":
            return
        if _was_saved(trial.save_to):
            self._mark(folder.state(trial.number), trial.start_gap)
        elif self.continues and trial.worth_saving:
            self.continues = False
            self._say(NOT_SAVED.format(place=self._save_place, number=trial.number))


def _was_saved(saved: Path) -> bool:
    """Whether there is a file at the path, or a folder with something in it."""
    if saved.is_dir():
        return any(saved.iterdir())
    return saved.exists()


def _continuation(resumed_from: TrialResult, folder: Output, last_step: int) -> _Beginning:
    """Begin a trial where the loop has saved the stopped one that ``resumed_from`` records."""
    former_state = folder.state(resumed_from.number)
    return _Beginning(
        state=state_after(resumed_from, skipped=0, last_step=last_step),
        resume_from=saved_beside(former_state),
        start_gap=_read_start_gap(former_state),
        noise_scale=tuple(resumed_from.noise_scale),
    )


def _read_start_gap(state: Path) -> float | None:
    """Read how far from the target a saved trial was before training; None if that is not known."""
    first_line_of_file = state.read_bytes().partition(b"\n")[0]
    try:
        start_gap = json.loads(first_line_of_file)[START_GAP]
    except (ValueError, KeyError, TypeError):
        return None
    return start_gap if isinstance(start_gap, float) else None


class LoopRunner:
    """Keeps the trials that the user's training loop has, for a study that starts and awaits them.

    The loop trains between two calls of the study, so no call here waits.

    Args:
        backend: hands trials over, and takes them back.
        count: how many trials the loop has at once.
    """

    def __init__(self, backend: LoopBackend, count: int = 1) -> None:
        self.count = max(1, count)
        self._backend = backend
        self._folder: Output | None = None
        # The trials that were not taken back yet, in the order in which they were started.
        self._trials: list[LoopTrial] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._trials.clear()

    @property
    def to_train(self) -> list[LoopTrial]:
        """The trials that the loop has, and has not ended."""
        return [trial for trial in self._trials if trial.finished is None]

    @property
    def free(self) -> bool:
        """Whether the loop takes another trial.

        It does not before all trials that it has ended are taken back.
        """
        all_taken_back = len(self.to_train) == len(self._trials)
        return all_taken_back and len(self._trials) < self.count

    @property
    def running(self) -> list[TrialSpec]:
        """The specs of the trials that were not taken back yet."""
        return [trial.spec for trial in self._trials]

    def start(self, spec: TrialSpec, output: Output, resumed_from: TrialResult | None) -> None:
        """Make a trial for the loop, which gets it once the study waits for trials to end."""
        self._folder = output
        self._trials.append(self._backend.hand_over(spec, output, resumed_from))

    def wait(self) -> Finished:
        """Take the first trial back. It has failed if the loop has not ended it.

        The study pauses before it calls this, and the loop trains in that pause, in the same
        thread. A wait would therefore never end: a trial that is not over now was left by its loop,
        and no one trains it any more.
        """
        return self._take_back(self._trials[0])

    def poll(self) -> Iterator[Finished]:
        """Take back the trials that the loop has ended, and yield how each ended."""
        for trial in self._trials.copy():
            if trial.finished is not None:
                yield self._take_back(trial)

    def _take_back(self, trial: LoopTrial) -> Finished:
        """Take a trial back from the loop, and tell how it ended."""
        assert self._folder is not None  # noqa: S101 (a trial was started)
        self._trials.remove(trial)
        return self._backend.take_back(trial, self._folder)
