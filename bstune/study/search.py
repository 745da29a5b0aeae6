"""The trials of one study: asked, run, stored and shown until search and fresh seeds are through.

Any number of processes may do this on one study at once. One of them owns it and reports; the
others only run trials.

A search is a generator that pauses where it waits for a trial: a loop of the user's trains it
there. What it decides are functions of the trials, in :mod:`bstune.study.searching`.
"""

import math
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import optuna
from optuna.trial import FrozenTrial

from bstune.core.errors import StudyError
from bstune.core.objectives import SOUGHT
from bstune.core.records import TrialResult, TrialSpec
from bstune.search.posterior import Posterior
from bstune.search.predictions import fresh_horizons, fresh_steps
from bstune.study.analysis.model import (
    REPORT_PARTICLES,
    budget_posteriors,
    sampler_context,
    study_posterior,
)
from bstune.study.analysis.step_times import with_common_step_time
from bstune.study.at_budget import is_full
from bstune.study.planning.baseline import is_at_baseline
from bstune.study.planning.plan import SearchEnd, count_points, trials_of_search
from bstune.study.planning.wall import WallTime
from bstune.study.prepared import PreparedStudy
from bstune.study.searching.early_end import early_end, first_trials, has_goal
from bstune.study.searching.finished_trial import check_failures, is_out_of_time, record_to_store
from bstune.study.searching.fresh_seeds import DueReplicate, due_at_budget, due_to_target
from bstune.study.searching.limits import is_for_loss, limit_reached, limited_baseline, within_time
from bstune.study.searching.rescue import Rescue, baseline_to_finish, choose_rescue, needs_rescue
from bstune.study.searching.time_to_go import PointEnds, study_seconds_to_go
from bstune.study.searching.trial_files import (
    TrialFiles,
    numbers_that_may_go_on,
    numbers_that_may_win,
)
from bstune.study.showing.progress import HowFar
from bstune.study.storage.asking import Ranking, ask, ask_continuation, ask_replicate
from bstune.study.storage.attributes import DEVICE_KIND, OUTPUT
from bstune.study.storage.lease import Leases
from bstune.study.storage.patience import StorageGoneError, patient
from bstune.study.storage.samplers import build_sampler
from bstune.study.storage.telling import cut_short, finish_abandoned, shorten, tell
from bstune.study.storage.trials import (
    AskedTrial,
    Trials,
    busy_workers,
    finished_record,
    read_trials,
    results,
    running_specs,
)
from bstune.study.storage.turns import (
    ended_below_limit,
    free_indices,
    free_turn,
    points_given_up,
)
from bstune.system.files import append_text
from bstune.trial.backend import sampler_factory, stops_trials
from bstune.trial.processes.messages import Finished
from bstune.trial.processes.workers import Runner

if TYPE_CHECKING:
    from bstune.tracking.runs import Tracking

# Seconds between looks at what other processes do.
OTHERS_SECONDS = 0.5
Outcome = TypeVar("Outcome")
Paused = Generator[None, None, Outcome]
"""A generator that pauses before it waits for a trial, and returns its outcome at the end."""


def run_through(paused: Paused[Outcome]) -> Outcome:
    """Run a generator that pauses to its end, and give what it returns.

    It goes on after each pause at once: a runner, not a loop of the user's, trains the trials.
    """
    while True:
        try:
            next(paused)
        except StopIteration as end:
            outcome: Outcome = end.value
            return outcome


class Search:
    """The trials of one study, as one of the processes that work on it runs them."""

    def __init__(
        self,
        prepared: PreparedStudy,
        study: optuna.Study,
        leases: Leases,
        wall: WallTime,
        tracking: "Tracking | None",
        show: Callable[[Sequence[TrialResult], float | None], None],
        before_trial: Callable[[TrialSpec, HowFar], None] | None = None,
    ) -> None:
        """Prepare to run the trials of a study.

        Args:
            prepared: the study.
            study: in its storage, with its trials.
            leases: of this process, and of those that run trials beside it.
            wall: what is left of the study's wall time.
            tracking: logs the trials, such as to MLflow; None where it is off.
            show: gets the finished trials, and the predicted seconds to the study's end, None
                where not known.
            before_trial: called before each trial begins, with a function that gives its last
                evaluation, if that is known here; None: nothing is called.
        """
        self._prepared = prepared
        self._study = study
        self._leases = leases
        self._tracking = tracking
        self._show = show
        self._before_trial = before_trial
        self._budget = prepared.budget
        self._worker = leases.own.id
        self._is_owner = leases.own.role == "owner"
        self._wall = wall
        # Whether trials may be stopped early and continued, and the sampler does so.
        self._stops_trials = prepared.backend.stops and stops_trials(prepared.options)
        # Seconds of another kind of device than that on which the study began do not compare.
        self._counts_seconds = study.user_attrs[DEVICE_KIND] == prepared.backend.device_kind
        # A worker on another machine keeps the files of its own trials.
        keeps_files = self._is_owner or str(prepared.files.root) != study.user_attrs[OUTPUT]
        self._files = TrialFiles(prepared.files) if keeps_files else None
        self._sampler_factory = sampler_factory(prepared.options)
        # A sampler of Optuna's ranks trials without a value by what they reported. A study that
        # seeks two values has no single one to rank by.
        has_one_value = len(SOUGHT[self._budget.objective].values) == 1
        is_ranked = has_one_value and not stops_trials(prepared.options)
        self._ranking = Ranking(prepared.protocol.target) if is_ranked else None
        # The trials that this process has begun, by their numbers.
        self._asked: dict[int, AskedTrial] = {}
        # Whether another process trained a trial when the study was last read.
        self._others_train = False
        # The numbers of trials that began with no other trial beside them.
        self._began_alone: set[int] = set()
        # When points ended here, from which the seconds to the study's end are predicted.
        self._point_ends = PointEnds()
        # Steps that a fresh seed is predicted to take, by a trial's number, as when a run on one
        # was chosen last; None before one was.
        self._predicted: Mapping[int, float] | None = None
        # How many trials there were when it was last decided whether they suffice.
        self._trials_looked_at = 0
        # Whether the search has ended, so that only runs on fresh seeds follow.
        self._search_has_ended = False
        # Whether the storage was waited for in vain.
        self._storage_is_gone = False
        # The last run of the user's own configuration that failed here.
        self.failed_baseline: Finished | None = None
        # Trials that this process ran.
        self.ran = 0
        # The report's posterior, and the trials that it is of.
        self.sampled: tuple[Sequence[TrialResult], Posterior] | None = None

    def run(self) -> SearchEnd:
        """Search, then run the winners again on fresh seeds; give what ended the search."""
        return run_through(self.paused())

    def paused(self) -> Paused[SearchEnd]:
        """Search, then run the winners on fresh seeds, as a generator that gives the search's end.

        It pauses before it waits for a trial, which a loop of the user's may train meanwhile.
        """
        try:
            end = yield from self._run()
        except StorageGoneError:
            # Leaving writes to the storage, and would wait for it in vain once more.
            raise
        except BaseException:
            # A trial that was cut short has a record, too, which is written.
            self._leave()
            raise
        self._leave()
        return end

    def paused_baseline(self, revise: Callable[[TrialResult], TrialResult]) -> Paused[None]:
        """Run the baseline alone, as trial 0, and store what ``revise`` makes of its record.

        As any trial, it is asked again after it failed. A trial that failed sets no target.
        """
        try:
            yield from self._run_baseline(revise)
        except StorageGoneError:
            # Leaving writes to the storage, and would wait for it in vain once more.
            raise
        except BaseException:
            # What was cut short has taken its time, and is a record.
            self._leave()
            raise

    def _run_baseline(self, revise: Callable[[TrialResult], TrialResult]) -> Paused[None]:
        """Ask trial 0 and run it until the study has a record of it, which sets the target.

        ``revise``: takes the trial's record and gives the one to store.

        Raises:
            StudyError: where no time is left for it, or another process has begun it.
        """
        # An error ends the trials that run here, so that the same command asks them again.
        with (
            cut_short(self._study, self._budget.objective, self._worker),
            self._prepared.open_runner(1) as runner,
        ):
            while not trials_of_search(self._finished_trials()):
                asked = self._ask([], self._study)
                if asked is None or isinstance(asked, SearchEnd):
                    raise self._error_without_baseline(asked)
                self._start(runner, asked)
                yield from self._store_next(runner, revise)
        # What follows until the search's first trial is not the time of a decision on one.
        self._wall.pause()

    def _error_without_baseline(self, end: SearchEnd | None) -> StudyError:
        """Say why trial 0, which was to set the target, did not begin.

        ``end``: why no time is left for it; None: another process has begun it.
        """
        if end is None:
            return StudyError(
                "another process has begun the study's first trial, which sets its target: "
                "the same command goes on once it has ended"
            )
        return StudyError(
            f"the target is to be what your own configuration comes to: {end.sentence}"
        )

    def _leave(self) -> None:
        """Store the wall time that the study took, and write its trials, for the next command."""
        self._wall.keep()
        if self._files is not None:
            self._files.write(results(self._study))

    def _run(self) -> Paused[SearchEnd]:
        """Search, then run the winners again on fresh seeds; give what ended the search."""
        # An error ends the trials that run here, so that the same command asks them again.
        with cut_short(self._study, self._budget.objective, self._worker):
            with self._prepared.open_runner() as runner:
                try:
                    end = yield from self._search_and_run_again(runner)
                except BaseException as error:
                    # An interruption is caught, too: what has finished meanwhile is stored all the
                    # same.
                    if isinstance(error, StorageGoneError):
                        self._storage_is_gone = True
                    self._store_finished(runner)
                    raise
            # After a search by several processes, a single one runs the fresh seeds.
            if self._prepared.options.search.workers > 1:
                with self._prepared.open_runner(1) as runner:
                    yield from self._run_again(runner)
        return end

    def _search_and_run_again(self, runner: Runner) -> Paused[SearchEnd]:
        """Search, then run the winners on fresh seeds; go on with the search in time that is left.

        For the fresh seeds of each winner the longest is kept that they may take, so that some of
        it is left in the end. Where several trials run at once, this only searches.
        """
        while True:
            self._search_has_ended = False
            end = yield from self._search(runner)
            self._search_has_ended = True
            # Fresh seeds run with nothing beside them, so that their seconds are measured.
            if runner.count != 1:
                return end
            ran_before = self.ran
            yield from self._run_again(runner)
            # The search goes on where the wall time ended it, as fresh seeds may take less than was
            # kept for them. Where none ran, no more time is left than then.
            if end.limit != "search.wall_seconds" or self.ran == ran_before:
                return end
            done = self._finished_trials()
            if limit_reached(self._prepared, self._wall, self._stops_trials, done) is not None:
                return end
            # The seconds of the fresh seeds are not the time of a decision on the next trial.
            self._wall.pause()

    def _store_finished(self, runner: Runner) -> None:
        """Store the other trials that had finished when an error ended the study."""
        for ended in runner.poll():
            # A trial may have failed only because this process ends: it is asked again later.
            if ended.record is not None and ended.record.status != "failed":
                # Where the storage is gone a file keeps the record.
                with suppress(StudyError):
                    self._store(ended)

    def _search(self, runner: Runner) -> Paused[SearchEnd]:
        """Ask and run trials until their plan is done or something ends the search before.

        Where none has reached the target by then, a stopped one may go on.
        """
        end: SearchEnd | None = None
        while True:
            trials = self._read()
            # The records of those that have ended.
            done = self._write(trials)
            # Each trial of the plan has an index, which is free until a process takes it.
            has_free_index = bool(free_indices(trials, self._budget.trials))
            if has_free_index and end is None:
                end = self._search_end(done)
            if has_free_index and end is None:
                end = self._start_trials(runner, done, trials)
            if runner.running:
                yield from self._store_next(runner)
            # Another process trains a trial, whose end may change what comes next.
            elif busy_workers(self._study) - {self._worker}:
                time.sleep(OTHERS_SECONDS)
            # Nothing was left to begin.
            else:
                rescue = self._ask_rescue(done)
                if rescue is None:
                    plan = self._budget.trials
                    return end or SearchEnd(f"the plan is done: search.trials={plan}")
                self._start(runner, rescue)
                yield from self._store_next(runner)
                # If it has reached the target, the seconds that were kept for it are free, and the
                # search may go on.
                end = None

    def _start_trials(
        self, runner: Runner, done: Sequence[TrialResult], trials: Sequence[FrozenTrial]
    ) -> SearchEnd | None:
        """Begin trials of the search until the runner is full, or there is none to begin.

        Give the end of the search where too little time is left for one; else None.

        Args:
            runner: trains them.
            done: the records of the trials that have ended.
            trials: all trials, as they were just read.
        """
        latest: Trials = trials
        while runner.free:
            asked = self._ask(done, latest)
            if asked is None or isinstance(asked, SearchEnd):
                return asked
            self._start(runner, asked)
            # What was read before does not have the trial that has just begun.
            latest = self._study
        return None

    def _store_next(
        self, runner: Runner, revise: Callable[[TrialResult], TrialResult] | None = None
    ) -> Paused[None]:
        """Wait until a trial has ended, and store its record, or what ``revise`` makes of it."""
        with self._wall.trial():
            finished = yield from _wait_for_trial(runner)
        self._store(finished, revise)

    def _ask_rescue(self, done: Sequence[TrialResult]) -> AskedTrial | None:
        """Ask the most promising stopped trial to go on, where none has reached the target.

        It is None where one has, where another process decides it, or where none can go on.
        """
        prepared = self._prepared
        # Only a sampler that stops trials leaves any to continue. Where several processes search,
        # the owner alone decides which trial goes on.
        if not self._stops_trials or not self._is_owner or not needs_rescue(prepared, done):
            return None
        # Numbers of the stopped trials that can go no further.
        exhausted = ended_below_limit(read_trials(self._study))
        return self._ask_to_go_on(choose_rescue(prepared, self._wall, done, exhausted))

    def _ask_baseline_to_go_on(self, done: Sequence[TrialResult]) -> AskedTrial | None:
        """Ask the baseline's first run to go on, where the study's time had cut it short.

        It is None where it had not, no time is left, or another process has begun a trial at the
        index that the run would take.
        """
        if not self._stops_trials:
            return None
        exhausted = ended_below_limit(read_trials(self._study))
        return self._ask_to_go_on(baseline_to_finish(self._prepared, self._wall, done, exhausted))

    def _ask_to_go_on(self, rescue: Rescue | None) -> AskedTrial | None:
        """Ask a stopped trial to go on.

        It is None without such a trial, or where another process has begun a trial at the index,
        the place in the study's plan, that the continuation would take.
        """
        if rescue is None:
            return None
        prepared = self._prepared
        # Where nothing can be continued, the trial is run again from its first step.
        return ask_continuation(
            self._study,
            rescue.stopped,
            rescue.max_steps,
            prepared.space,
            self._worker,
            afresh=not prepared.backend.continues,
        )

    def _run_again(self, runner: Runner) -> Paused[None]:
        """Run the winners again on fresh seeds."""
        if is_for_loss(self._prepared):
            yield from self._run_again_at_budget(runner)
        else:
            yield from self._run_again_to_target(runner)

    def _run_again_to_target(self, runner: Runner) -> Paused[None]:
        """Run the winners on fresh seeds, and the baseline on the seeds of the winner to use.

        One run goes on at a time, so that its seconds are measured with nothing beside it. Each is
        chosen by all that have ended, until none is due. In the time that is left then, a baseline
        that was cut short goes on.
        """
        # The study's owner alone runs fresh seeds.
        if not self._is_owner:
            return
        while True:
            done = self._comparable_trials()
            if not self._budget.replicates or not any(trial.reached for trial in done):
                return
            # This takes as many draws as the report, and so tells how long the report will take.
            with self._wall.fine_look():
                posterior = study_posterior(self._prepared, done, REPORT_PARTICLES)
                # The report takes this posterior, if no further trial ends before it.
                self.sampled = done, posterior
                predicted = fresh_steps(posterior)
                self._predicted = predicted
                horizons = fresh_horizons(posterior)
            due = due_to_target(self._prepared, self._wall, done, predicted, horizons)
            # If a baseline goes on and reaches the target now, its fresh seeds may be due.
            asked = self._ask_baseline_to_go_on(done) if due is None else self._ask_again(due)
            if asked is not None:
                self._start(runner, asked)
                self._store((yield from _wait_for_trial(runner)))
            elif due is None:
                return
            elif due.is_baseline:
                # Another process has begun this run, and goes on with those that follow it.
                return
            # Else another process has begun this winner's run. The trials are read again: that run
            # may have ended since, and another one may be due.

    def _run_again_at_budget(self, runner: Runner) -> Paused[None]:
        """Run the point with the best prediction on fresh seeds, and the baseline on the same ones.

        Each run is chosen once the one before it has ended. It returns where no run is due, or
        another process has begun the due one.
        """
        prepared = self._prepared
        # The study's owner alone runs fresh seeds.
        if not self._is_owner:
            return
        while True:
            done = self._comparable_trials()
            # The share 1 is the whole budget.
            with self._wall.fine_look():
                posterior = budget_posteriors(prepared, done, REPORT_PARTICLES, (1.0,))[1.0]
            due = due_at_budget(prepared, self._wall, done, posterior)
            asked = None if due is None else self._ask_again(due)
            if asked is None:
                return
            self._start(runner, asked)
            self._store((yield from _wait_for_trial(runner)))

    def _ask_again(self, due: DueReplicate) -> AskedTrial | None:
        """Ask a run on a fresh seed; None if another process has begun it."""
        return ask_replicate(
            self._study,
            due.winner,
            due.replicate,
            budget=self._budget,
            space=self._prepared.space,
            stops=self._prepared.backend.stops,
            worker=self._worker,
            horizon=due.horizon,
            seed_of=due.seed_of,
            is_baseline=due.is_baseline,
            last_step=due.last_step,
        )

    def _start(self, runner: Runner, asked: AskedTrial) -> None:
        """Begin a trial that was asked, with the limits and the goal that it has now."""
        _, spec = asked
        self._asked[spec.number] = asked
        resumed_from = None
        if spec.resumed_from is not None:
            resumed_from = finished_record(self._study, spec.resumed_from)
        has_baseline = self._prepared.baseline is not None
        is_baseline = has_baseline and spec.trial_index == 0
        # A baseline that has taken too long may be cut short, so that the search has time left. For
        # the objective loss every trial ends with the budget, and a cut one could not be compared.
        is_limited = self._stops_trials and is_baseline and not is_for_loss(self._prepared)
        limit = self._wall.trial_limit(is_limited)
        max_seconds = limit if math.isfinite(limit) else None
        # Where the study's first trial sets the target, the protocol does not have its value.
        goal = self._prepared.goal
        goal_value = None if goal is None else goal.value
        sets_goal = self._prepared.sets_target
        spec = replace(spec, max_seconds=max_seconds, goal=goal_value, sets_goal=sets_goal)
        if self._prepared.options.search.workers <= 1 and not self._others_train:
            self._began_alone.add(spec.number)
        if self._before_trial is not None:
            self._before_trial(spec, partial(runner.reached, spec.number))
        self._wall.begin_trial()
        runner.start(spec, self._prepared.files, resumed_from)

    def _store(
        self, finished: Finished, revise: Callable[[TrialResult], TrialResult] | None = None
    ) -> None:
        """Store a trial's record, or what ``revise`` makes of it.

        Raises:
            BstuneError: the one with which the trial ends the study, or for too many failed trials
                in a row.
            StudyError: where the storage does not take the record, which a file then keeps.
        """
        spec = finished.spec
        result = record_to_store(self._prepared, finished, self._counts_seconds, revise)
        result = replace(result, ran_alone=spec.number in self._began_alone)
        self.ran += 1
        if self._storage_is_gone:
            self._keep(result)
            return
        asked = self._asked.pop(spec.number)
        # A trial that ends below its stored limit of steps counts as one that goes no further. This
        # one can go on, so its limit becomes the steps that it has run.
        if is_out_of_time(spec, result):
            shorten(self._study, asked, result.steps, self._worker)
        try:
            # At the objective loss a trial that has run to its budget's end has a value to tell.
            full = is_for_loss(self._prepared) and is_full(result, self._prepared.last_step)
            tell(self._study, asked, result, self._budget.objective, is_full=full)
        except StudyError as error:
            self._storage_is_gone = isinstance(error, StorageGoneError)
            self._keep(result)
            raise
        # Under a limit the time taken is stored now, so that it counts even if the process is
        # killed next. Without one it is stored at the end: a trial takes no further transaction.
        if math.isfinite(self._wall.limit):
            patient(self._wall.keep)()
        if is_at_baseline(result, self._prepared.baseline):
            # The baseline is asked again after a failure: the last run counts.
            self.failed_baseline = finished if result.status == "failed" else None
        if result.status == "failed" and not result.was_cut_short:
            # The trial's own line comes before the error that ends the study.
            self._finished_trials()
            check_failures(results(self._study), finished.frames, finished.cause)

    def _keep(self, result: TrialResult) -> None:
        """Write a record to a file, as the storage is gone. The command that goes on stores it."""
        append_text(self._prepared.files.unstored, result.to_json() + "\n")

    def _ask(self, done: Sequence[TrialResult], trials: Trials) -> AskedTrial | SearchEnd | None:
        """Ask the next trial of the search.

        Where too little time is left for it, this gives the end of the search; None where no index
        is free any more.
        """
        prepared = self._prepared
        budget = self._budget
        # How many processes work beside this one; free_turn() counts those that run trials itself.
        others = 0
        while True:
            # A free index of the search, for which this process is to ask a trial.
            turn = free_turn(trials, budget.trials, self._worker, others)
            if turn is None:
                return None
            # Numbers of the stopped trials that can go no further.
            exhausted = ended_below_limit(turn.trials) if self._stops_trials else ()
            # Its random numbers depend on the index, and on the points that failed there before.
            sampler = build_sampler(
                prepared.options,
                budget,
                turn.trial_index,
                context=sampler_context(prepared, exhausted),
                attempt=points_given_up(turn),
                factory=self._sampler_factory,
            )
            asked = ask(
                self._study,
                turn,
                budget,
                prepared.space,
                sampler,
                stops=prepared.backend.stops,
                baseline=limited_baseline(prepared, self._stops_trials),
                ranking=self._ranking,
                limited=partial(within_time, self._prepared, self._wall, self._stops_trials, done),
            )
            if asked is not None:
                return asked
            # Another process has begun a trial at this index meanwhile. From now on processes that
            # have no trial yet count as well.
            trials = self._study
            others = len(self._leases.others())

    def _finished_trials(self) -> list[TrialResult]:
        """Read the trials, and give the records of the finished ones, written and shown."""
        return self._write(self._read())

    def _comparable_trials(self) -> list[TrialResult]:
        """Give the records of the finished trials, with seconds of a step by one law for all."""
        return with_common_step_time(self._prepared, self._finished_trials())

    def _read(self) -> Sequence[FrozenTrial]:
        """Read the study's trials.

        Those of processes that are gone are ended first, so that they are asked again.
        """
        self._leases.check()
        trials = read_trials(self._study)
        others = busy_workers(trials) - {self._worker}
        self._others_train = bool(others)
        gone = others - self._leases.living() if others else set()
        if gone:
            finish_abandoned(self._study, self._budget.objective, gone.__contains__)
            trials = read_trials(self._study)
        return trials

    def _write(self, trials: Sequence[FrozenTrial]) -> list[TrialResult]:
        """Write, log and show the finished trials; give their records."""
        done = results(trials)
        # A survey has timed the steps. Where its timings are few, the trials' own steps correct the
        # seconds of a step. All records get the corrected ones.
        if self._prepared.backend.timed is not None:
            done = with_common_step_time(self._prepared, done)
        if self._files is not None:
            self._files.update(
                done,
                winning=partial(numbers_that_may_win, self._prepared, done),
                continued=lambda: numbers_that_may_go_on(
                    self._prepared, done, running_specs(trials)
                ),
            )
        if self._tracking is not None:
            for result in done:
                self._tracking.send_trial(result)
        self._show(done, self._seconds_to_go(done))
        return done

    def _seconds_to_go(self, done: Sequence[TrialResult]) -> float | None:
        """Predict the wall seconds until the study's end.

        None before this command has tried two points to their ends, each a batch size with its
        learning rate: how fast points end is not known then.
        """
        self._point_ends.note(count_points(done), self._prepared.elapsed())
        pace = self._point_ends.pace()
        if pace is None:
            return None
        return study_seconds_to_go(
            self._prepared,
            self._wall,
            done,
            pace,
            search_has_ended=self._search_has_ended,
            predicted=self._predicted,
        )

    def _search_end(self, done: Sequence[TrialResult]) -> SearchEnd | None:
        """Say what ends the search: seconds that are spent, or an answer that is good enough.

        None while it goes on.
        """
        spent = limit_reached(self._prepared, self._wall, self._stops_trials, done)
        if spent is not None or not has_goal(self._prepared):
            return spent
        # The first trials, as many as a multiple of a fixed number: the end must not depend on when
        # one looks.
        first = first_trials(trials_of_search(done))
        # A look at the same trials again would say the same.
        if len(first) <= self._trials_looked_at:
            return None
        self._trials_looked_at = len(first)
        return early_end(self._prepared, first)


def _wait_for_trial(runner: Runner) -> Paused[Finished]:
    """Pause, so that a loop of the user's may train a trial, then wait until one has ended."""
    yield
    return runner.wait()
