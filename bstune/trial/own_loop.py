"""A trial that a loop of the user's trains: what it is handed, what it reports, and its record.

A study asks for a trial, the loop trains it and tells what it came to. Nothing here trains::

    for trial in bstune.Study(...):
        ...
        if not trial.report(step, loss):
            break
        ...
        trial.finish(seconds=seconds)

What a loop saves of a stopped trial is its own, in a format of its own. Beside it lies a file that
ends as all states of the study do (:func:`bstune.system.files.own_mark`): by it the saved trial is
found again, and removed once nothing needs it.
"""

import json
import math
import operator
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol, Self

import numpy as np
import torch
from torch import Tensor

import bstune
from bstune.core.errors import ConfigError, check_positive_integer
from bstune.core.numbers import as_float, as_int, shown
from bstune.core.records import Status, TrialProtocol, TrialResult, TrialSpec
from bstune.core.step_time import StepTime, fit_line
from bstune.core.step_time_law import law_of_trials
from bstune.options import StudyOptions
from bstune.system.console import plural
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
from bstune.trial.processes.workers import Finished

# Seconds of a step that no limit of a study's time holds back: none has been timed yet.
UNTIMED = StepTime(1e-12, 0.0)
START_GAP = "start_gap"
NOT_FINISHED = "its loop went on without trial.finish(seconds=...)"
SHORT = "its last report was before trial.max_steps: report there too, so that it can go on"
# Trials in a row that no report at their last step has made comparable.
CUT_MEAN_NEVER = 3
NEVER_AT_END = (
    "{trials} trials in a row ended before trial.max_steps, the last one with a report at step "
    "{steps} of {end}: trials that go on start afresh, from their first step, unless the loop "
    "reports at trial.max_steps too, as by taking min(10, trial.max_steps - step) steps between "
    "reports"
)
NOT_SAVED = (
    "nothing was saved at trial.save_to when trial {number} was stopped: trials that go on start "
    "afresh, from their first step"
)

Measurements = tuple[tuple[int, float, float], ...]
"""Of each measured step its number, its unbiased |G|^2 and its tr Sigma."""


class Noise(Protocol):
    """What has measured a noise scale, as :class:`bstune.LoopNoiseScale` does."""

    @property
    def measurements(self) -> Measurements:
        """Of each measured step its number, from the trial's first one on, |G|^2 and tr Sigma."""


class LoopTrial:
    """One trial of a study, for a loop of yours: the values to train with.

    Its evaluations are told here, too. What the study searches besides is an attribute too, by its
    name, as ``trial.dropout``: a name that is none of the trial's own (:func:`is_name_of_a_trial`).

    Args:
        spec: what it is asked to do.
        state: how far the part of it was trained that it continues.
        verdict: ends it.
        metric: the name of the target's metric, which is reported.
        save_to: the file or folder where the loop may save it, once it is ``worth_saving``.
        resume_from: what the loop saved of the part that it continues; None: it starts afresh.
        budget_end: the step from which on it is never asked to go on; None: a larger budget may ask
            it.
        is_exact: whether nothing past ``max_steps`` can be used.
        needs_seconds: whether the objective is one of time.
        now: a monotonic clock, in seconds.
        noise_scale: what the part that it continues has measured of the noise scale.
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
        is_exact: bool,
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
        self._is_exact = is_exact
        self._now = now
        self._began = now()
        self._finished: Finished | None = None
        self._went_on = True
        self.metric = metric
        self.save_to = save_to
        self.resume_from = resume_from

    @property
    def spec(self) -> TrialSpec:
        """What it is asked to do."""
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
        """Of the initial weights, the order of the data and the augmentation."""
        return self._spec.seed

    @property
    def number(self) -> int:
        """Its number in the study."""
        return self._spec.number

    @property
    def first_step(self) -> int:
        """Steps that were reported of the part that it continues; 0: it starts afresh."""
        return self._state.first_step

    @property
    def max_steps(self) -> int:
        """The step after which it ends for now, counted from its very first one."""
        return self._state.last_step

    @property
    def hyperparameters(self) -> Mapping[str, int | float]:
        """What the study searches besides, by name."""
        return self._spec.hyperparameters

    @property
    def finished(self) -> Finished | None:
        """How it ended; None before :meth:`finish`."""
        return self._finished

    def __getattr__(self, name: str) -> int | float:
        searched = {} if name.startswith("_") else self._spec.hyperparameters
        if name not in searched:
            raise AttributeError(f"a trial has no {name!r}")
        return searched[name]

    def __repr__(self) -> str:
        values = {"batch_size": self.batch_size, "lr": self.lr, "seed": self.seed}
        stated = {**values, **self.hyperparameters, "max_steps": self.max_steps}
        return f"LoopTrial({', '.join(f'{name}={value!r}' for name, value in stated.items())})"

    def batches(self, examples: int) -> Iterator[Tensor]:
        """Yield the indices of one batch after another, (batch_size,) int64, without end.

        They are of one shuffled epoch after another, each batch of exactly ``batch_size`` examples,
        and go on after ``first_step`` of them: the same as in a study of a module with the trial's
        seed. A DataLoader takes them as its ``batch_sampler``.

        Args:
            examples: in the training data.

        Raises:
            ConfigError: for a number of them that is none, and where there are fewer than in a
                batch.
        """
        count = as_int(examples)
        stated = examples if count is None else count
        check_positive_integer("the examples of trial.batches", stated)
        if self.batch_size > examples:
            raise ConfigError(
                f"batch size {self.batch_size} is larger than the data set ({examples} examples): "
                "lower the largest of batch_sizes"
            )
        order, _ = seeded_generators(self.seed, "cpu", 2)
        return endless_indices(
            operator.index(examples), self.batch_size, order, first=self.first_step
        )

    def report(self, step: int, value: object) -> bool:
        """Tell the metric after a step of the optimizer, and hear whether to go on.

        Args:
            step: how many steps of the optimizer were taken, those of an earlier part included; 0
                before the first one, by which it is told later that the trial has diverged.
            value: of the target's metric: a number, or a tensor or an array of one. One that is not
                finite ends the trial as diverged.

        Returns:
            Whether to train on. Once it is False it stays so, and further values are left out.

        Raises:
            ConfigError: for a value that is no number, and a step that does not rise.
        """
        if self._finished is not None:
            raise ConfigError(f"trial {self.number} is finished: report before trial.finish()")
        steps = _whole_number(step)
        number = _number(value)
        if not self._went_on:
            return False
        if steps == 0 and not self._state.history and self.first_step == 0:
            if math.isfinite(number):
                self._verdict.begin(number)
            return True
        self._check_rises(steps)
        self._state.steps = steps
        finite = number if math.isfinite(number) else None
        self._verdict.judge(finite, loss=0.0)
        is_late = self._is_out_of_time()
        self._went_on = not self._state.ended and not is_late
        return self._went_on

    def reach(self, step: int) -> None:
        """Tell, in place of :meth:`report`, after which step the target was first met.

        It is for a loop that knows no values of the metric.

        Args:
            step: as :meth:`report` takes it; the one before it is taken to have missed the target.

        Raises:
            ConfigError: for a step that does not lie after the last one.
        """
        self._end_at(_whole_number(step), "reached")

    def miss(self) -> None:
        """Tell, in place of :meth:`report`, that the target was not met until ``max_steps``."""
        self._end_at(self.max_steps, "stopped")

    def _end_at(self, steps: int, status: Status) -> None:
        state = self._state
        self._check_rises(steps)
        state.steps = steps
        state.steps_low = steps - 1 if status == "reached" else steps
        state.status = status
        self._went_on = False

    def finish(self, seconds: object = None, noise: Noise | None = None) -> None:
        """Tell that the trial has ended, once, after its last report.

        Args:
            seconds: of the training alone since it was handed over, evaluation and start-up left
                out, as a number, or a tensor or an array of one; of these the seconds of a step are
                made. None: they were not measured, and no time to target is told.
            noise: what has measured the noise scale meanwhile, which the study then takes in; its
                steps are the trial's, as of ``LoopNoiseScale(first_step=trial.first_step)``.

        Raises:
            ConfigError: where it was told before, nothing was reported, or the seconds are none or missing,
                which an objective of time needs of what has not diverged.
        """
        if self._finished is not None:
            raise ConfigError(
                f"trial {self.number} is finished already: call finish() once a trial"
            )
        taken = None if seconds is None else _seconds(seconds)
        state = self._state
        own_steps = state.steps - state.first_step
        if own_steps == 0:
            raise ConfigError(
                f"trial {self.number} ended without an evaluation, and a trial ends by its metric: "
                f"call trial.report(step, value) with {self.metric} before trial.finish()"
            )
        # What has diverged has no time to the target.
        if taken is None and self._needs_seconds and not self.has_diverged:
            raise ConfigError(
                "an objective of time needs the seconds of training: call "
                "trial.finish(seconds=...), or give objective='steps'"
            )
        if self._went_on:
            state.message = SHORT
        wall_seconds = self._now() - self._began
        record = TrialResult.unmeasured(
            self._spec,
            state.status,
            steps=state.steps,
            examples=state.steps * self.batch_size,
            steps_low=state.steps_low,
            train_seconds=wall_seconds if taken is None else taken,
            wall_seconds=wall_seconds,
            seconds_per_step=taken / own_steps if taken else None,
            versions={"bstune": bstune.__version__},
            history=tuple(state.history),
            message=state.message,
            noise_scale=self._measured(noise),
        )
        end = self._budget_end
        is_cut = self._went_on and end is not None and self.max_steps < end
        self._finished = Finished(self._spec, record, is_cut=is_cut)

    def _measured(self, noise: Noise | None) -> Measurements:
        """Give the noise scale's measurements of all parts of the trial, as their steps rise."""
        measurements = list(self._noise_scale)
        if noise is not None:
            measurements += noise.measurements
        # What a loop has kept itself of an earlier part counts once.
        by_step = {measured[0]: measured for measured in measurements}
        return tuple(by_step[step] for step in sorted(by_step))

    def fail(self, error: BaseException) -> None:
        """Tell, in place of :meth:`finish`, that an error has ended the trial.

        A batch size that is out of memory bounds those that come; any other error counts as a
        failure, of which three in a row end the study, by a UserCodeError from the last of them.
        """
        if self._finished is not None:
            raise ConfigError(
                f"trial {self.number} is finished already: call fail() or finish() once"
            )
        if is_out_of_memory(error):
            self._end("out of memory", first_line(error))
            return
        message, frames = described(error)
        cause = error if isinstance(error, Exception) else None
        self._end("failed", message, frames, cause)

    def abandon(self) -> Finished:
        """Give how it ended; where the loop has not said so, it has failed."""
        if self._finished is None:
            self._end("failed", NOT_FINISHED)
        assert self._finished is not None  # noqa: S101 (set just now)
        return self._finished

    def _end(
        self, status: Status, message: str, frames: str = "", cause: Exception | None = None
    ) -> None:
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
        """Whether what was reported has ended it as diverged."""
        return self._state.status == "diverged"

    @property
    def worth_saving(self) -> bool:
        """Whether it has been stopped and may be asked to go on: it is saved at ``save_to``."""
        return not self._went_on and self._state.status == "stopped" and self.may_go_on

    @property
    def may_go_on(self) -> bool:
        """Whether it may be asked to go on later.

        No run on a fresh seed is, nor one for the loss at its budget's end.
        """
        is_full = self._budget_end is not None and self._state.steps >= self._budget_end
        return self._spec.replicate_of is None and not is_full

    @property
    def start_gap(self) -> float | None:
        """How far from the target it was before training; None: that was not reported."""
        return self._verdict.start_gap

    def _is_out_of_time(self) -> bool:
        limit = self._spec.max_seconds
        return limit is not None and self._now() - self._began > limit

    def _check_rises(self, steps: int) -> None:
        """Refuse a step that does not lie after the last one."""
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
        if self._is_exact and steps > state.last_step:
            raise ConfigError(
                f"trial {self.number} reports step {steps}, past the {state.last_step} of its "
                "budget, at which trials are compared: end it at trial.max_steps, and report there"
            )


def is_name_of_a_trial(name: str) -> bool:
    """Say whether a trial has an attribute of its own by this name.

    Nothing that is searched can have it.
    """
    return name.startswith("_") or hasattr(LoopTrial, name) or name in LoopTrial.__annotations__


def _whole_number(step: object) -> int:
    """Read a step."""
    steps = as_int(step)
    if steps is None or steps < 0:
        raise ConfigError(f"trial.report needs a whole number of steps, but got {shown(step)}")
    return steps


def _number(value: object) -> float:
    """Read a value."""
    number = as_float(value)
    if number is None:
        raise ConfigError(f"trial.report needs a number as its value, but got {shown(value)}")
    # What a tensor's item() gives of a float32 does not say that it was one.
    with np.errstate(over="ignore"):
        is_float32 = float(np.float32(number)) == number
    return shortest_decimal(number) if is_float32 else number


def _seconds(seconds: object) -> float:
    number = as_float(seconds)
    if number is None or not 0.0 < number < math.inf:
        raise ConfigError(
            "trial.finish needs the seconds of training, a positive number, but got "
            f"{shown(seconds)}"
        )
    return number


@dataclass(frozen=True)
class LoopLimits:
    """What a loop cannot do, or may not.

    Args:
        stops: whether it trains a trial for ``max_steps``; else each runs to its budget.
        lr_range: the smallest and the largest learning rate.
        jobs: how many trials it trains side by side.
        in_hindsight: whether it tells of a trial once that has ended, so that no time limit ends
            it.
    """

    stops: bool = True
    lr_range: tuple[float, float] = TrialBackend.lr_range
    jobs: int = 1
    in_hindsight: bool = False


ANY_LOOP = LoopLimits()


class LoopBackend(TrialBackend):
    """Hands a study's trials to a loop of the user's, one after another.

    Args:
        options: of the study.
        protocol: of all trials.
        say: takes lines.
        now: a monotonic clock, in seconds.
        limits: of the loop.
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
        self._is_exact = options.search.objective == "loss"
        self._needs_seconds = options.search.objective in ("time", "both")
        self._say = say
        self._now = now
        # Batch size and seconds of a step of each trial that told them.
        self._timed: list[tuple[int, float]] = []
        self._tau: Callable[[float], float] = UNTIMED
        # Trials in a row that ended before the step at which they were to be compared.
        self._cut = 0
        self.stops = limits.stops
        self.continues = limits.stops
        self.lr_range = limits.lr_range
        self._in_hindsight = limits.in_hindsight
        device = resolve_device(options.device, "device")
        if device.type == "cpu":
            self.device = "cpu"
            self.device_kind = f"cpu of {processor()}"
        else:
            self.device = torch.cuda.get_device_name(device)
            self.device_kind = self.device
        self.frozen_settings = {"device": self.device}
        self.versions = {"bstune": bstune.__version__}

    @property
    def knows_step_time(self) -> bool:  # type: ignore[override]
        """Whether a trial has told its seconds."""
        return bool(self._timed)

    def step_time(self, batch_size: float) -> float:
        """Give the seconds of a step by what the trials so far have told; next to none before."""
        return self._tau(batch_size)

    def look_back(self, done: Sequence[TrialResult], folder: Output) -> None:
        """Take in the seconds of earlier trials, and whether any that may go on was saved."""
        for record in done:
            self._take_seconds(record)
        # What was cut short is asked again.
        resumed = {record.resumed_from for record in done if record.status != "failed"}
        stopped = list[TrialResult]()
        for record in done:
            if record.number not in resumed and self._may_go_on(record):
                stopped.append(record)
        if stopped:
            self.continues = any(self.resumable(record.number, folder) for record in stopped)

    def _may_go_on(self, record: TrialResult) -> bool:
        """Say whether a trial of an earlier run was to be saved.

        As :attr:`LoopTrial.worth_saving`.
        """
        is_ended = record.replicate_of is not None or record.message == SHORT
        is_full = self._is_exact and record.steps >= self._budget_end(record.batch_size)
        return record.status == "stopped" and not is_ended and not is_full

    def _budget_end(self, batch_size: int) -> int:
        """Give the step after which a trial's budget is spent, as the study counts it."""
        if not self._is_exact:
            return self._protocol.last_step(batch_size)
        if self._budget.examples > 1:
            return math.ceil(self._budget.examples / batch_size)
        return self._budget.steps

    def resumable(self, number: int, folder: Output) -> bool:
        """Say whether the loop has saved a stopped trial."""
        return is_own(folder.state(number)) and _is_there(saved_beside(folder.state(number)))

    def hand_over(
        self, spec: TrialSpec, folder: Output, resumed_from: TrialResult | None
    ) -> LoopTrial:
        """Make a trial for the loop."""
        if self._in_hindsight:
            spec = replace(spec, max_seconds=None)
        make_inside(folder.states)
        # Marked before anything is saved, so that it is found whatever ends this process.
        self._mark(folder.state(spec.number), None)
        protocol = self._protocol.with_goal_of(spec)
        budget_end = self._budget_end(spec.batch_size)
        last_step = spec.max_steps or budget_end
        resume_from: Path | None = None
        start_gap: float | None = None
        noise_scale: Measurements = ()
        state = TrialState(first_step=0, last_step=last_step, steps=0)
        if resumed_from is not None and self.resumable(resumed_from.number, folder):
            former_state = folder.state(resumed_from.number)
            resume_from = saved_beside(former_state)
            start_gap = _read_start_gap(former_state)
            state = state_after(resumed_from, 0, last_step)
            noise_scale = tuple(resumed_from.noise_scale)
        else:
            spec = replace(spec, resumed_from=None)
        verdict = Verdict(
            state,
            protocol.target,
            protocol.divergence,
            start_gap,
            may_begin_met=spec.goal is not None,
        )
        return LoopTrial(
            spec,
            state,
            verdict,
            protocol.target.metric,
            saved_beside(folder.state(spec.number)),
            resume_from,
            budget_end if self._is_exact else None,
            self._is_exact,
            self._needs_seconds,
            self._now,
            noise_scale,
        )

    def take_back(self, trial: LoopTrial, folder: Output) -> Finished:
        """Take a trial that its loop has ended, or has gone on without."""
        finished = trial.abandon()
        self._note_cut(trial, finished)
        record = finished.result()
        message = record.message
        # A loop that trains each trial to its budget counts its end as it likes.
        if message == SHORT and not self.stops:
            message = None
        record = replace(record, device=self.device, message=message)
        self._take_seconds(record)
        self._keep_saved(trial, record, folder)
        return replace(finished, record=record)

    def _note_cut(self, trial: LoopTrial, finished: Finished) -> None:
        """Let trials start afresh where a loop for the loss never reports at their last step.

        It is said once. None of its trials could be chosen to go on to the end of its budget else.
        """
        if self._is_exact and finished.is_cut:
            self._cut += 1
        else:
            self._cut = 0
        if self._cut == CUT_MEAN_NEVER and self.continues:
            self.continues = False
            steps = finished.result().steps
            self._say(NEVER_AT_END.format(trials=self._cut, steps=steps, end=trial.max_steps))

    def _take_seconds(self, record: TrialResult) -> None:
        if not record.seconds_per_step:
            return
        self._timed.append((record.batch_size, record.seconds_per_step))
        self._tau = law_of_trials(self._timed) or fit_line(self._timed)

    def _mark(self, state: Path, start_gap: float | None) -> None:
        """Write the file by which what a loop has saved beside it is the study's."""
        if may_take(state):
            with whole_file(state) as file:
                text = json.dumps({START_GAP: start_gap})
                file.write(text.encode() + b"\n" + own_mark(state))

    def _keep_saved(self, trial: LoopTrial, record: TrialResult, folder: Output) -> None:
        """Mark what the loop has saved of a stopped trial as the study's.

        Say where it should be there and is not.
        """
        if record.status != "stopped":
            return
        if _is_there(trial.save_to):
            self._mark(folder.state(trial.number), trial.start_gap)
        elif self.continues and trial.worth_saving:
            self.continues = False
            self._say(NOT_SAVED.format(number=trial.number))


def _is_there(saved: Path) -> bool:
    """Say whether something was saved: a file, or a folder with something in it."""
    if saved.is_dir():
        return any(saved.iterdir())
    return saved.exists()


def _read_start_gap(state: Path) -> float | None:
    """Read how far from the target a saved trial was before training; None: it was not told."""
    first = state.read_bytes().partition(b"\n")[0]
    try:
        start_gap = json.loads(first)[START_GAP]
    except (ValueError, KeyError, TypeError):
        return None
    return start_gap if isinstance(start_gap, float) else None


class LoopRunner:
    """Runs a study's trials as a loop of the user's trains them.

    What it waits for has ended before.

    Args:
        backend: hands trials over, and takes them back.
        count: how many the loop is handed at once.
    """

    def __init__(self, backend: LoopBackend, count: int = 1) -> None:
        self.count = max(1, count)
        self._backend = backend
        self._folder: Output | None = None
        # In the order in which they were started, and are waited for.
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

        Of a batch that it has trained all are told first.
        """
        is_told = len(self.to_train) == len(self._trials)
        return is_told and len(self._trials) < self.count

    @property
    def running(self) -> list[TrialSpec]:
        """The trials that were not waited for yet."""
        return [trial.spec for trial in self._trials]

    def start(self, spec: TrialSpec, output: Output, resumed_from: TrialResult | None) -> None:
        """Make a trial for the loop, which gets it at the study's next pause."""
        self._folder = output
        self._trials.append(self._backend.hand_over(spec, output, resumed_from))

    def wait(self) -> Finished:
        """Take the first trial back, which has failed where the loop has not ended it."""
        return self._take_back(self._trials[0])

    def poll(self) -> Iterator[Finished]:
        """Yield the trials that the loop has ended, where they are not waited for any more."""
        for trial in self._trials.copy():
            if trial.finished is not None:
                yield self._take_back(trial)

    def _take_back(self, trial: LoopTrial) -> Finished:
        assert self._folder is not None  # noqa: S101 (a trial was started)
        self._trials.remove(trial)
        return self._backend.take_back(trial, self._folder)
