"""The trials of one study: claimed, run, stored, written and shown, until the search and its replicates end.

Any number of processes may do this on one study at once. One of them owns it and reports; the others only run trials.
"""

import math
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

import optuna
from optuna.trial import FrozenTrial

from bstune.core.errors import StudyError, UserCodeError
from bstune.core.records import Objective, TrialResult
from bstune.search.observations import Posterior, fresh_horizons, fresh_steps
from bstune.study.critical import critical_batch
from bstune.study.lease import Leases
from bstune.study.model import REPORT_PARTICLES, sampler_context, study_posterior
from bstune.study.plan import searched
from bstune.study.prepare import PreparedStudy
from bstune.study.replicates import Winner, candidates, next_replicate
from bstune.study.storage import (
    CUT_SHORT,
    DEVICE,
    OUTPUT,
    Asked,
    ask,
    ask_replicate,
    attempt,
    build_sampler,
    claim_free,
    cut_short,
    ended_below_limit,
    finish_abandoned,
    finished,
    free_indices,
    read,
    results,
    running,
    shorten,
    tell,
    working,
)
from bstune.study.wall import WallTime
from bstune.system.console import format_count
from bstune.system.files import append_text, keep_trials, write_text
from bstune.trial.backend import stops_trials
from bstune.trial.workers import Finished, Runner, with_step_time

if TYPE_CHECKING:
    from bstune.study.tracking.runs import Tracking

MIN_REACHED = 6  # trials before the search may end by search.precision
PRECISION_PARTICLES = 400  # of the posterior while the search goes on
PRECISION_EVERY = 4  # trials between looks at search.precision
ABANDON_FACTOR = (
    1.2  # a stopped trial beyond this many times the best trial's time or steps is not continued
)
MAX_STATES = 32
MAX_FAILURES = 3  # trials in a row that failed end the study
UNWRITTEN = 1.01  # times the trials in trials.jsonl: it is written again once there are so many, and at the end
WAIT_SECONDS = 0.5  # between looks at what other processes do


class Search:
    """The trials of one study, as one of the processes that work on it runs them."""

    def __init__(
        self,
        prepared: PreparedStudy,
        study: optuna.Study,
        leases: Leases,
        tracking: "Tracking | None",
        show: Callable[[Sequence[TrialResult]], None],
    ) -> None:
        self._prepared, self._study, self._leases = prepared, study, leases
        self._tracking, self._show = tracking, show
        self._budget, self._worker = prepared.budget, leases.own.id
        self._asked: dict[int, optuna.Trial] = {}
        self._ended: set[int] = set()  # numbers of the finished trials
        self._lines: dict[int, str] = {}  # of trials.jsonl, by number
        self._looked = 0
        self.ran = 0  # trials that this process ran
        self.sampled: tuple[Sequence[TrialResult], Posterior] | None = (
            None  # the report's posterior, of which trials
        )
        self._files_kept_here = (
            leases.own.role == "owner" or str(prepared.files.root) != study.user_attrs[OUTPUT]
        )
        self._stops = prepared.backend.stops and stops_trials(prepared.config.sampler)
        self._wall = WallTime(study, prepared.budget, prepared.elapsed, leases.own.role == "owner")
        self._times = study.user_attrs[DEVICE] == prepared.backend.device_kind

    def run(self) -> str:
        """Search, then run the winners again on fresh seeds; return what ended the search, as a line."""
        try:
            return self._run()
        finally:  # a trial that was cut short is a record too
            self._wall.keep()
            if self._files_kept_here:
                self._write_trials(results(self._study))

    def _run(self) -> str:
        with cut_short(self._study, self._budget.objective, self._worker):
            with self._prepared.open_runner() as runner:
                try:
                    stop_reason = self._search(runner)
                    if runner.count == 1:
                        self._replicate(runner)
                except (
                    BaseException
                ):  # an interruption too: what has finished meanwhile is stored all the same
                    for one in runner.poll():
                        # One that has failed may have been ended with this process.
                        if one.record is not None and one.record.status != "failed":
                            with suppress(
                                StudyError
                            ):  # the storage is gone: a file has it, and the others'
                                self._store(one)
                    raise
            if (
                self._prepared.config.search.workers > 1
            ):  # nothing beside them, so that their seconds are measured
                with self._prepared.open_runner(1) as runner:
                    self._replicate(runner)
        return stop_reason

    def _search(self, runner: Runner) -> str:
        stop_reason: str | None = None
        while True:
            trials = self._read()
            done = self._write(trials)
            left = bool(free_indices(trials, self._budget.trials))
            if left:
                stop_reason = stop_reason or self._stop_reason(done)
            while left and stop_reason is None and runner.free:
                asked = self._ask(done)
                self._start(runner, asked)
                left = asked is not None
            if runner.running:
                with self._wall.trial():
                    finished = runner.wait()
                self._store(finished)
            elif working(self._study) - {self._worker}:
                time.sleep(WAIT_SECONDS)
            elif not left or stop_reason is not None:
                return stop_reason or f"the plan is done: search.trials={self._budget.trials}"

    def _replicate(self, runner: Runner) -> None:
        budget, space, stops = self._budget, self._prepared.space, self._prepared.backend.stops
        while self._leases.own.role == "owner":
            done = self._write(self._read())
            if not budget.replicates or not any(trial.reached for trial in done):
                return
            posterior = study_posterior(self._prepared, done, REPORT_PARTICLES)
            self.sampled = done, posterior
            due = next_replicate(
                done, fresh_steps(posterior), budget.objective, budget.replicates, budget.candidates
            )
            if due is None or not self._has_time(done, *due):
                return
            horizon = fresh_horizons(posterior).get(due[0].trial.number)
            self._start(
                runner,
                ask_replicate(self._study, *due, budget, space, stops, self._worker, horizon),
            )
            if runner.running:
                self._store(runner.wait())

    def _has_time(self, done: Sequence[TrialResult], winner: Winner, replicate: int) -> bool:
        """Return whether a replicate may begin: the first winner's time was kept, another one's has to be left."""
        if replicate or not any(trial.replicate_of is not None for trial in done):
            return self._wall.left > 0
        return self._wall.left > self._budget.replicates * self._wall.replicate_seconds(
            done, winner.trial
        )

    def _start(self, runner: Runner, asked: Asked | None) -> None:
        if asked is None:  # other processes have taken what was left
            return
        trial, spec = asked
        self._asked[trial.number] = trial
        resumed_from = (
            None if spec.resumed_from is None else finished(self._study, spec.resumed_from)
        )
        runner.start(spec, self._prepared.files, resumed_from)

    def _store(self, finished: Finished) -> None:
        """Store a trial's record; an error that ends the study is raised."""
        result, spec = finished.result(), finished.spec
        self.ran += 1
        if not self._times:
            result = replace(result, seconds_per_step=None)
        survey = self._prepared.survey
        if survey is not None and survey.step_time is not None:
            result = with_step_time(result, survey.step_time)
        trial, files = self._asked.pop(spec.number), self._prepared.files
        try:
            ranks_stopped = not stops_trials(self._prepared.config.sampler)
            tell(
                self._study,
                trial,
                result,
                self._budget.objective,
                self._prepared.protocol.target,
                ranks_stopped,
            )
        except StudyError:  # the storage is gone: the same command stores it
            append_text(files.unstored, result.to_json() + "\n")
            raise
        if result.status == "failed":
            check_failures(results(self._study), finished.frames, finished.cause)

    def _ask(self, done: Sequence[TrialResult]) -> Asked | None:
        prepared, claimed = (
            self._prepared,
            claim_free(self._study, self._budget.trials, self._worker),
        )
        if claimed is None:
            return None
        context = sampler_context(
            prepared, ended_below_limit(claimed.trials) if self._stops else ()
        )
        sampler = build_sampler(
            prepared.config.sampler, self._budget, claimed.trial_index, context, attempt(claimed)
        )
        asked = ask(
            self._study, claimed, self._budget, prepared.space, sampler, prepared.backend.stops
        )
        if self._budget.wall_seconds is None or not self._stops:
            return asked
        backend = prepared.backend
        return shorten(
            asked, self._wall.max_steps(done, asked[1], backend.step_time, backend.evaluation_share)
        )

    def _read(self) -> Sequence[FrozenTrial]:
        """Return the study's trials; those of processes that are gone are ended before, to be asked again."""
        self._leases.check()
        trials = read(self._study)
        others = working(trials) - {self._worker}
        gone = others - self._leases.living() if others else set()
        if gone:
            finish_abandoned(self._study, self._budget.objective, gone.__contains__)
            trials = read(self._study)
        return trials

    def _write(self, trials: Sequence[FrozenTrial]) -> list[TrialResult]:
        """Write and show the finished trials, delete the files that nothing needs any more, and return the records."""
        files, objective = self._prepared.files, self._budget.objective
        done = results(trials)
        ended = {result.number for result in done}

        def winning() -> set[int]:
            return {trial.number for trial in candidates(done)}

        def continued() -> set[int]:
            needed = {
                spec.resumed_from for spec in running(trials) if spec.resumed_from is not None
            }
            return worth_continuing(done, objective) | needed

        if self._files_kept_here and ended != self._ended:
            self._ended = ended
            if len(ended) >= UNWRITTEN * len(self._lines):
                self._write_trials(done)
            keep_trials(files.checkpoints, ended, winning)
            keep_trials(files.states, ended, continued)
        if self._tracking is not None:
            for result in done:
                self._tracking.send_trial(result)
        self._show(done)
        return done

    def _write_trials(self, done: Sequence[TrialResult]) -> None:
        """Write ``trials.jsonl``: one record a trial, in order of their numbers."""
        self._lines = {
            trial.number: self._lines.get(trial.number) or trial.to_json() + "\n" for trial in done
        }
        write_text(self._prepared.files.trials, "".join(self._lines.values()))

    def _stop_reason(self, done: Sequence[TrialResult]) -> str | None:
        """Return the limit that ends the search, as a line; None while it goes on."""
        spent = self._budget.spent(done) or self._wall.spent(done)
        if spent is not None or self._budget.precision is None:
            return spent
        first = _first_trials(searched(done))
        if len(first) <= self._looked:
            return None
        self._looked = len(first)
        return self._precise(first)

    def _precise(self, searched: Sequence[TrialResult]) -> str | None:
        """Return a line that B_crit's interval is within ``search.precision``; None if it is wider, or unset."""
        precision, reached = self._budget.precision, sum(trial.reached for trial in searched)
        if precision is None or reached < MIN_REACHED:
            return None
        posterior = study_posterior(self._prepared, searched, PRECISION_PARTICLES)
        found = critical_batch(posterior)
        low, high = (None, None) if found is None else (found.b_crit_low, found.b_crit_high)
        if low is None or high is None or high / low >= precision:
            return None
        return (
            f"stopped: B_crit lies between {format_count(low)} and {format_count(high)}, "
            f"within search.precision={precision:g}"
        )


def check_failures(
    done: Sequence[TrialResult], frames: str = "", cause: Exception | None = None
) -> None:
    """Raise UserCodeError if too many trials failed in a row, or StudyError; ``frames`` and ``cause``: of the last one.

    Trials that were cut short, as by an interruption, do not count.
    """
    ran = [trial for trial in done if trial.message != CUT_SHORT]
    last = next((i for i, trial in enumerate(reversed(ran)) if trial.status != "failed"), len(ran))
    if last >= MAX_FAILURES:
        which = (
            f"the last {last} trials failed"
            if last < len(ran)
            else f"the first {last} trials all failed"
        )
        kind = UserCodeError if frames else StudyError
        raise kind(
            f"{which}, the last one with {ran[-1].message}\n{frames}"
            "the finished trials are stored: mend it, and the same command continues the study"
        ) from cause


def _first_trials(searched: Sequence[TrialResult]) -> list[TrialResult]:
    """Return the trials of the first indices, a multiple of ``PRECISION_EVERY`` of them, that are all done.

    Side by side others end while these run: precision must not depend on how many, or on when one looks.
    """
    indices = {trial.trial_index for trial in searched}
    whole = next(
        trial_index for trial_index in range(len(indices) + 1) if trial_index not in indices
    )
    whole -= whole % PRECISION_EVERY
    return [trial for trial in searched if trial.trial_index < whole]


def worth_continuing(done: Sequence[TrialResult], objective: Objective) -> set[int]:
    """Return the numbers of the stopped trials that may still be continued: ``MAX_STATES`` of them.

    First come those that may win, then those that only the curve needs, as they have taken more than the best trial by
    the objective. Of either kind the newest are kept: a state is as large as the model and its optimizer.
    """
    resumed = {
        trial.resumed_from for trial in done if trial.status != "failed"
    }  # what was cut short is asked again
    reached = [trial for trial in done if trial.reached and trial.replicate_of is None]
    fastest = min(
        (time for trial in reached if (time := trial.time_to_target) is not None), default=math.inf
    )
    fewest = min((trial.steps for trial in reached), default=math.inf)

    def may_win(trial: TrialResult) -> bool:
        by_time = trial.steps * (trial.seconds_per_step or 0.0) < ABANDON_FACTOR * fastest
        by_steps = trial.steps < ABANDON_FACTOR * fewest
        return {"time": by_time, "steps": by_steps, "both": by_time or by_steps, "curve": True}[
            objective
        ]

    stopped = (
        trial
        for trial in searched(done)
        if trial.status == "censored" and trial.number not in resumed
    )
    last = sorted(stopped, key=lambda trial: (may_win(trial), trial.number))
    return {trial.number for trial in last[-MAX_STATES:]}
