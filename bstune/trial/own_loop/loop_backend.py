"""Hands trials to the user's own training loop and takes them back; what a loop can do.

The loop may save a stopped trial, in a format of its own, to train on from there later. Beside that
lies a file that ends as all states of the study do (:func:`bstune.system.files.own_mark`): by it
the study finds the saved trial again, and removes it once nothing needs it.
"""

import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import torch

import bstune
from bstune.core.metric_names import PERCENT
from bstune.core.records import RunIdentity, TrialProtocol, TrialResult, TrialSpec
from bstune.core.step_time import StepTime, fit_line
from bstune.core.step_time_law import law_of_trials
from bstune.options import StudyOptions, flatten
from bstune.system.console import format_number, format_seconds, plural
from bstune.system.files import (
    Output,
    is_own,
    make_inside,
    may_take,
    own_mark,
    saved_beside,
    whole_file,
)
from bstune.trial.backend import JobCommand, TrialBackend, chooses_horizons
from bstune.trial.devices.device import processor, resolve_device
from bstune.trial.own_loop.loop_trial import (
    JOB_ENDED_SHORT,
    LoopTrial,
    Measurements,
    has_ended_short,
)
from bstune.trial.parts.state import TrialState, state_after
from bstune.trial.parts.verdict import Verdict
from bstune.trial.processes.messages import Finished

# The time of a step before any was timed: so short that a study's time limit holds no trial back.
UNTIMED = StepTime(overhead=1e-12, per_example=0.0)
# The key in the file beside a saved trial.
START_GAP = "start_gap"
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
NO_FURTHER = (
    "trial {number} ended at step {steps} of {end}, no later than trial {earlier} before it: its "
    "configuration is not asked again; to let it go on report at trial.max_steps, or save what it "
    "goes on from at {place}"
)
PAST_THE_END = (
    "trial {number} reported step {steps}, past trial.max_steps={end}: its further steps are time "
    "that the study has not planned; take min(10, trial.max_steps - step) steps between reports"
)
MORE_THAN_PASSED = (
    "trial {number} gave {given} of training, but only {passed} had passed since it began: "
    "trial.finish(seconds=...) takes seconds, not milliseconds, of this trial alone; those of a "
    "recorded run may be more"
)
# Two clocks may tell so many seconds, and this share of them, apart. A coarse one has 64 ticks a
# second.
CLOCK_TICK_SECONDS = 0.02
CLOCK_DRIFT = 0.01
MET_AT_ONCE = (
    "trial 0 met {target} at its first evaluation, {value} after {steps}: when it did is not "
    "known, and batch sizes that all do so look alike; stop here and evaluate earlier, or give a "
    "harder target with another study=NAME"
)
IN_PERCENT = "; if {metric} is in percent, {percent:g} is meant"
WRONG_WAY = (
    "; a target that untrained weights meet too is the wrong way round, which trial.report(0, "
    "value) before the first step tells"
)


@dataclass(frozen=True)
class LoopLimits:
    """What a study may ask of a training loop.

    Args:
        stops: whether the loop stops a trial at ``max_steps``; else each runs to its budget.
        schedule_ends: whether the loop's schedule ends with each trial, at ``max_steps``. Then no
            trial is stopped before, or goes on.
        lr_range: the smallest and the largest learning rate.
        jobs: how many trials the loop trains side by side.
        in_hindsight: whether the loop reports a trial only once it has ended, so that no time limit
            can end it.
        continues: whether the loop can train a stopped trial on from what it saved of that.
        save_place: where the loop is to save a trial, in its own terms.
        job_command: writes the command that trains a point, where trials are jobs of an application
            of Hydra's; None: they are not.
        objective_is_open: whether the objective, time, may yet have to become steps: trials may end
            without their seconds, as it is not known yet whether the loop tells them.
    """

    stops: bool = True
    schedule_ends: bool = False
    lr_range: tuple[float, float] = TrialBackend.lr_range
    jobs: int = 1
    in_hindsight: bool = False
    continues: bool = True
    save_place: str = "trial.save_to"
    job_command: JobCommand | None = None
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
        self._largest_batch_size = round(options.search.batch_size.high)
        self._is_for_loss = options.search.objective == "loss"
        # A trial may end without its seconds until the study knows whether its objective is time or
        # steps.
        self._may_lack_seconds = limits.objective_is_open
        self._needs_seconds = (
            options.search.objective in ("time", "both") and not self._may_lack_seconds
        )
        # Nothing is said of seconds that the objective does not ask for.
        if options.search.objective in ("time", "both"):
            self.notes = ("seconds are the trials' own, as no step was timed before",)
        self._say = say
        self._now = now
        # The batch size and the seconds of a step of each trial that reported its seconds.
        self._timed: list[tuple[int, float]] = []
        self._fitted_step_time: Callable[[float], float] = UNTIMED
        # Whether a trial was told that it ran past its last step.
        self._has_told_of_end = False
        # Whether a trial was told that it gave more seconds than had passed.
        self._has_told_of_seconds = False
        # The number and the steps of the last run of each configuration and seed.
        self._last_run: dict[RunIdentity, tuple[int, int]] = {}
        # Whether a configuration was told to be given up, as its loop ends it by itself.
        self._has_told_of_no_further = False
        # The number of trials in a row that ended before their last step.
        self._cut_in_a_row = 0
        # Whether the loop's schedule ends with each trial.
        self.horizon = limits.schedule_ends
        # Whether trials may end at a step before their budget's end, without a schedule for that.
        self.stops = limits.stops and not self.horizon
        # Only a trial that was stopped can go on.
        self._can_continue = self.stops and limits.continues
        # Whether trials do go on: False once the loop turns out not to save them where they could.
        self.continues = self._can_continue
        self._save_place = limits.save_place
        self.lr_range = limits.lr_range
        # Whether the loop reports a trial only once it has ended.
        self._in_hindsight = limits.in_hindsight
        # Whether the user's loop trains in this process; else another program does, such as a Hydra
        # application.
        self.trains_in_loop = not limits.in_hindsight
        self.job_command = limits.job_command
        device = resolve_device(options.device, "device")
        if device.type == "cpu":
            self.device = "cpu"
            self.device_kind = f"cpu of {processor()}"
        else:
            self.device = torch.cuda.get_device_name(device)
            self.device_kind = self.device
        # These settings must not change while a study goes on.
        self.frozen_settings = {"device": self.device, **self._frozen_schedule(options)}
        self.versions = {"bstune": bstune.__version__}

    def _frozen_schedule(self, options: StudyOptions) -> dict[str, object]:
        """Give the settings that must not change where the loop's schedule ends with each trial.

        The budget is one of them, unless the sampler chooses how long each schedule is.
        """
        if not self.horizon:
            return {}
        budget: dict[str, object] = {}
        if not chooses_horizons(options):
            budget = flatten({"budget": options.budget.model_dump()})
        return {"schedule_ends": True, **budget}

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
            self._last_run[record.run_identity] = record.number, record.steps
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
        is_final = record.replicate_of is not None or has_ended_short(record)
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
            sets_goal=spec.sets_goal,
        )
        # Trials that are compared by their loss, and schedules, end at a given step: a later report
        # is refused. No trial goes on past the budget's end.
        return LoopTrial(
            spec,
            beginning.state,
            verdict,
            metric=protocol.target.metric,
            save_to=saved_beside(folder.state(spec.number)),
            resume_from=beginning.resume_from,
            budget_end=budget_end if self._is_for_loss else None,
            refuses_further_steps=self._is_for_loss or self.horizon,
            schedule_ends=self.horizon,
            needs_seconds=self._needs_seconds,
            now=self._now,
            noise_scale=beginning.noise_scale,
            largest_batch_size=self._largest_batch_size,
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
        if has_ended_short(record) and not self.stops:
            message = None
        # The horizon is the length of a schedule that ends with its trial.
        horizon: int | None = None
        if self.horizon and record.status != "failed":
            horizon = trial.max_steps
        record = replace(record, device=self.device, message=message, horizon=horizon)
        self._take_seconds(record)
        self._tell_if_past_end(trial, record)
        self._tell_if_more_than_passed(record)
        self._tell_if_no_further(trial, record)
        self._tell_if_met_at_once(trial, record)
        self._keep_saved(trial, record, folder)
        # Of use to a job is only how it could go on, where jobs can.
        if has_ended_short(record) and self.job_command is not None:
            record = replace(record, message=JOB_ENDED_SHORT if self._can_continue else None)
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

    def _tell_if_more_than_passed(self, record: TrialResult) -> None:
        """Say once that a trial gave more seconds than had passed since it was handed over.

        They are taken all the same, as a loop may replay recorded seconds. What a loop reports in
        hindsight has passed before.
        """
        # A trial that gave no seconds has those that passed in their place.
        passed = record.wall_seconds
        most = (1.0 + CLOCK_DRIFT) * passed + CLOCK_TICK_SECONDS
        if self._has_told_of_seconds or self._in_hindsight or record.train_seconds <= most:
            return
        self._has_told_of_seconds = True
        self._say(
            MORE_THAN_PASSED.format(
                number=record.number,
                given=format_seconds(record.train_seconds),
                passed=format_seconds(passed),
            )
        )

    def _tell_if_no_further(self, trial: LoopTrial, record: TrialResult) -> None:
        """Say once that a trial which ran again from its first step came no further than before.

        Its loop ended it, as by a patience of its own, and would do so each time.
        """
        identity = record.run_identity
        earlier = self._last_run.get(identity)
        self._last_run[identity] = record.number, record.steps
        if earlier is None or record.resumed_from is not None:
            return
        number, steps = earlier
        ended_itself = has_ended_short(record) and record.steps <= steps
        if self._has_told_of_no_further or not ended_itself:
            return
        self._has_told_of_no_further = True
        self._say(
            NO_FURTHER.format(
                number=record.number,
                steps=record.steps,
                end=trial.max_steps,
                earlier=number,
                place=self._save_place,
            )
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
        target = self._protocol.target
        # The hint is for a loop that could report its start and has not. A start that was reported
        # has missed the target.
        if target.mode == "max" and 0.0 < target.value <= 1.0 < (value or 0.0) <= PERCENT:
            text += IN_PERCENT.format(metric=target.metric, percent=PERCENT * target.value)
        elif trial.start_gap is None and not self._in_hindsight:
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

        Args:
            state: the path of that file.
            start_gap: the trial's distance from the target before training; None: not known.
        """
        # A file there that bstune has not written stays as it is.
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
