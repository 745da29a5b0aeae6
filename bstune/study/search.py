"""The trials of one study: claimed, run, stored, written and shown, until the search and its replicates end.

Any number of processes may do this on one study at once. One of them owns it and reports; the others only run trials.

A search is a generator that pauses where it waits for a trial: a loop of the user's trains it there.
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

from bstune.core.errors import StudyError, UserCodeError
from bstune.core.objectives import SOUGHT, Objective
from bstune.core.records import Merit, TrialResult, TrialSpec
from bstune.search.acquisition import GIVEN_UP_AT, LEAST_GROWTH, MIN_STEPS, most_promising
from bstune.search.budget_findings import gain_left_of
from bstune.search.fixed_budget import rank_full_trials
from bstune.search.observations import Posterior, fresh_horizons, fresh_steps
from bstune.study.analysis.critical import critical_batch
from bstune.study.analysis.model import (
    REPORT_PARTICLES,
    budget_posteriors,
    sampler_context,
    study_posterior,
)
from bstune.study.analysis.step_times import with_common_step_time
from bstune.study.at_budget import (
    best_full,
    due_run,
    held,
    is_full,
    known_best,
    runs_to_come,
)
from bstune.study.planning.baseline import (
    Baseline,
    BaselineRuns,
    baseline_runs,
    due_seed,
    first_steps,
)
from bstune.study.planning.duration import Runs, pace_of, replicates_to_come, seconds_to_go
from bstune.study.planning.plan import (
    MEANS_SHARE,
    RESCUE_SHARE,
    SearchEnd,
    is_baseline_replicate,
    searched,
)
from bstune.study.planning.replicates import Winner, candidates, next_replicate, winners
from bstune.study.planning.wall import REPORT_SECONDS, TrialCost, WallTime, best, fit_cost
from bstune.study.prepare import PreparedStudy
from bstune.study.storage.asking import Ranking, ask, ask_continuation, ask_replicate
from bstune.study.storage.attributes import DEVICE, OUTPUT
from bstune.study.storage.lease import Leases
from bstune.study.storage.patience import StorageGoneError
from bstune.study.storage.samplers import build_sampler
from bstune.study.storage.telling import cut_short, finish_abandoned, shorten, tell, within_steps
from bstune.study.storage.trials import (
    CUT_SHORT,
    AskedTrial,
    Trials,
    finished,
    read,
    results,
    running,
    working,
)
from bstune.study.storage.turns import attempt, ended_below_limit, free_indices, free_turn
from bstune.system.console import format_count, format_number
from bstune.system.files import append_text, keep_trials, write_text
from bstune.trial.backend import chooses_horizons, sampler_factory, stops_trials
from bstune.trial.processes.workers import Finished, Runner, with_step_time

if TYPE_CHECKING:
    from bstune.tracking.runs import Tracking

MIN_REACHED = 6  # trials before the search may end by search.precision
MIN_FULL = 5  # trials to their budget's end before the search may end by search.least_gain
LOOK_PARTICLES = 400  # of the posterior while the search goes on
LOOK_EVERY = 4  # trials between looks at search.precision and search.least_gain
ABANDON_FACTOR = (
    1.2  # a stopped trial beyond this many times the best trial's time or steps is not continued
)
MAX_STATES = 32
MAX_RESCUED = 3  # trials that go to the end of their budgets, where points alone are counted and none has reached
MAX_FAILURES = 3  # trials in a row that failed end the study
UNWRITTEN = 1.01  # times the trials in trials.jsonl: it is written again once there are so many, and at the end
WAIT_SECONDS = 0.5  # between looks at what other processes do
Answer = TypeVar("Answer")
Paused = Generator[None, None, Answer]
"""What pauses before it waits for a trial, and comes to an answer."""


def go_through(paused: Paused[Answer]) -> Answer:
    """Go on after each pause at once, as where a runner trains the trials, and give the answer."""
    while True:
        try:
            next(paused)
        except StopIteration as end:
            answer: Answer = end.value
            return answer


class Search:
    """The trials of one study, as one of the processes that work on it runs them."""

    def __init__(
        self,
        prepared: PreparedStudy,
        study: optuna.Study,
        leases: Leases,
        tracking: "Tracking | None",
        show: Callable[[Sequence[TrialResult], float | None], None],
    ) -> None:
        self._prepared, self._study, self._leases = prepared, study, leases
        self._tracking, self._show = tracking, show
        self._budget, self._worker = prepared.budget, leases.own.id
        self._asked: dict[int, AskedTrial] = {}  # by their numbers
        self._ended: set[int] = set()  # numbers of the finished trials
        self._lines: dict[int, str] = {}  # of trials.jsonl, by number
        self._looked = 0
        # Points that this command found done; None: it has not looked yet.
        self._points_before: int | None = None
        # The seconds at which this command looked first, and at which each of its points ended.
        self._point_ends: list[float] = []
        # Whether the search has: what follows are runs on fresh seeds.
        self._has_ended = False
        self.ran = 0  # trials that this process ran
        self.sampled: tuple[Sequence[TrialResult], Posterior] | None = (
            None  # the report's posterior, of which trials
        )
        self._files_kept_here = (
            leases.own.role == "owner" or str(prepared.files.root) != study.user_attrs[OUTPUT]
        )
        self._stops = prepared.backend.stops and stops_trials(prepared.options)
        self._gone = False  # whether the storage was waited for in vain
        self._no_time: SearchEnd | None = None  # why the last trial that was asked did not begin
        self._wall = WallTime(study, prepared.budget, prepared.elapsed, leases.own.role == "owner")
        self._times = study.user_attrs[DEVICE] == prepared.backend.device_kind
        self._sampler_factory = sampler_factory(prepared.options)
        # A sampler of Optuna's ranks trials without a value by what they reported. Two objectives
        # have no value to report.
        has_one_value = len(SOUGHT[self._budget.objective].values) == 1
        is_ranked = has_one_value and not stops_trials(prepared.options)
        self._ranking = Ranking(prepared.protocol.target) if is_ranked else None

    def run(self) -> SearchEnd:
        """Search, then run the winners again on fresh seeds; return what ended the search."""
        return go_through(self.paused())

    def paused(self) -> Paused[SearchEnd]:
        """Do what :meth:`run` does, with a pause before each trial is waited for."""
        try:
            end = yield from self._run()
        except StorageGoneError:  # asking it again would wait again
            raise
        except BaseException:  # a trial that was cut short is a record too
            self._leave()
            raise
        self._leave()
        return end

    def paused_baseline(self, read: Callable[[TrialResult], TrialResult]) -> Paused[None]:
        """Run the baseline alone, as trial 0, and store what ``read`` makes of its record.

        It is asked again after it failed, as any trial is; what has no record sets no target.
        """
        try:
            yield from self._run_baseline(read)
        except StorageGoneError:  # asking it again would wait again
            raise
        except BaseException:
            # What was cut short has taken its time, and is a record.
            self._leave()
            raise

    def _run_baseline(self, read: Callable[[TrialResult], TrialResult]) -> Paused[None]:
        with (
            cut_short(self._study, self._budget.objective, self._worker),
            self._prepared.open_runner(1) as runner,
        ):
            while not searched(self._write(self._read())):
                asked = self._ask([], self._study)
                if asked is None and self._no_time is not None:
                    raise StudyError(
                        f"the target is to be what your own configuration comes to: {self._no_time.sentence}"
                    )
                if asked is None:
                    raise StudyError(
                        "another process has begun the study's first trial, which sets its target: "
                        "the same command goes on once it has ended"
                    )
                self._start(runner, asked)
                with self._wall.trial():
                    finished = yield from _ended(runner)
                self._store(finished, read)

    def _leave(self) -> None:
        self._wall.keep()
        if self._files_kept_here:
            self._write_trials(results(self._study))

    def _run(self) -> Paused[SearchEnd]:
        with cut_short(self._study, self._budget.objective, self._worker):
            with self._prepared.open_runner() as runner:
                try:
                    end = yield from self._search(runner)
                    self._has_ended = True
                    if runner.count == 1:
                        yield from self._run_again(runner)
                except BaseException as error:
                    # An interruption too: what has finished meanwhile is stored all the same.
                    self._gone = self._gone or isinstance(error, StorageGoneError)
                    for one in runner.poll():
                        # One that has failed may have been ended with this process.
                        if one.record is not None and one.record.status != "failed":
                            # Where the storage is gone a file has it, and the others'.
                            with suppress(StudyError):
                                self._store(one)
                    raise
            if (
                self._prepared.options.search.workers > 1
            ):  # nothing beside them, so that their seconds are measured
                with self._prepared.open_runner(1) as runner:
                    yield from self._run_again(runner)
        return end

    def _run_again(self, runner: Runner) -> Paused[None]:
        """Run the winners again on fresh seeds."""
        if self._is_for_loss:
            yield from self._run_again_at_budget(runner)
        else:
            yield from self._replicate(runner)

    @property
    def _is_for_loss(self) -> bool:
        """Whether the best metric at the budget's end is sought, and no target."""
        return self._budget.objective == "loss"

    def _search(self, runner: Runner) -> Paused[SearchEnd]:
        end: SearchEnd | None = None
        while True:
            trials = self._read()
            latest: Trials = trials
            done = self._write(trials)
            left = bool(free_indices(trials, self._budget.trials))
            if left:
                end = end or self._end(done)
            while left and end is None and runner.free:
                asked = self._ask(done, latest)
                self._start(runner, asked)
                latest = self._study
                left = asked is not None
                end = end or self._no_time
            if runner.running:
                with self._wall.trial():
                    finished = yield from _ended(runner)
                self._store(finished)
            elif working(self._study) - {self._worker}:
                time.sleep(WAIT_SECONDS)
            elif not left or end is not None:
                rescue = self._rescue(done)
                if rescue is None:
                    plan = self._budget.trials
                    return end or SearchEnd(f"the plan is done: search.trials={plan}")
                self._start(runner, rescue)
                # Once one has reached the target, what was kept for it is free.
                end = self._no_time = None

    def _rescue(self, done: Sequence[TrialResult]) -> AskedTrial | None:
        """Ask the most promising stopped trial to go on, where a search ends with nothing that reached the target.

        It goes on past the steps that are predicted of it, to its budget at most and within what is left of the study's
        seconds. Where points alone are counted, so many trials are brought to the end of their budgets. Where no trial
        can be continued, it starts afresh.
        """
        prepared, budget = self._prepared, self._budget
        is_owner = self._leases.own.role == "owner"
        if (
            self._is_for_loss
            or not self._stops
            or not is_owner
            or any(trial.reached for trial in done)
        ):
            return None
        ended = [
            trial
            for trial in searched(done)
            if trial.status == "stopped"
            and trial.steps >= prepared.protocol.last_step(trial.batch_size)
        ]
        is_timed = budget.seconds is not None or budget.wall_seconds is not None
        if not is_timed and len(ended) >= MAX_RESCUED:
            return None
        cut = ended_below_limit(read(self._study))
        posterior = study_posterior(prepared, done, LOOK_PARTICLES)
        chosen = most_promising(
            posterior,
            lambda size: float(prepared.protocol.last_step(round(size))),
            lambda number: number not in cut and self._can_go_on(number),
        )
        if chosen is None:
            return None
        number, predicted = chosen
        stopped = next(trial for trial in done if trial.number == number)
        max_steps = self._rescue_steps(stopped, predicted, done)
        if max_steps is None:
            return None
        return ask_continuation(
            self._study,
            stopped,
            max_steps,
            prepared.space,
            self._worker,
            afresh=not prepared.backend.continues,
        )

    def _can_go_on(self, number: int) -> bool:
        """Say whether a stopped trial's state is there, or is not needed as it starts afresh."""
        backend = self._prepared.backend
        return not backend.continues or backend.resumable(number, self._prepared.files)

    def _rescue_steps(
        self, stopped: TrialResult, predicted: float, done: Sequence[TrialResult]
    ) -> int | None:
        """Return the step up to which a stopped trial goes on; None if what is left of the seconds is too short."""
        backend = self._prepared.backend
        step_time = backend.step_time
        last_step = self._prepared.protocol.last_step(stopped.batch_size)
        first = stopped.steps
        paid = first if backend.continues else 0
        wanted = max(first + GIVEN_UP_AT * (predicted - first), LEAST_GROWTH * first, MIN_STEPS)
        limits = [float(last_step), wanted]
        spec = TrialSpec(
            stopped.number,
            stopped.trial_index,
            stopped.batch_size,
            stopped.lr,
            stopped.delta,
            stopped.seed,
            resumed_from=stopped.number if backend.continues else None,
        )
        within = self._wall.max_steps(done, spec, self._cost(done), step_time, reserve=0.0)
        if within is None:
            return None
        limits.append(float(within))
        if self._budget.seconds is not None:
            seconds = self._budget.seconds - sum(trial.train_seconds for trial in done)
            limits.append(paid + seconds / step_time(stopped.batch_size))
        steps = math.floor(min(limits))
        return steps if steps > first else None

    def _replicate(self, runner: Runner) -> Paused[None]:
        budget, space, stops = self._budget, self._prepared.space, self._prepared.backend.stops
        while self._leases.own.role == "owner":
            done = with_common_step_time(self._prepared, self._write(self._read()))
            if not budget.replicates or not any(trial.reached for trial in done):
                return
            with self._wall.fine_look():
                posterior = study_posterior(self._prepared, done, REPORT_PARTICLES)
                self.sampled = done, posterior
                predicted = fresh_steps(posterior)
                due = next_replicate(
                    done, predicted, budget.objective, budget.replicates, budget.candidates
                )
            if due is None:
                asked = self._ask_baseline_again(done, predicted)
                if asked is None:
                    return
                self._start(runner, asked)
                self._store((yield from _ended(runner)))
                continue
            if not self._has_time(done, *due):
                return
            horizon = fresh_horizons(posterior).get(due[0].trial.number)
            self._start(
                runner,
                ask_replicate(self._study, *due, budget, space, stops, self._worker, horizon),
            )
            if runner.running:
                self._store((yield from _ended(runner)))

    def _run_again_at_budget(self, runner: Runner) -> Paused[None]:
        """Run the point whose fresh seed is predicted to be best again, and the baseline beside it."""
        prepared, budget = self._prepared, self._budget
        while self._leases.own.role == "owner":
            done = with_common_step_time(prepared, self._write(self._read()))
            with self._wall.fine_look():
                posterior = budget_posteriors(prepared, done, REPORT_PARTICLES, (1.0,))[1.0]
            expected = rank_full_trials(posterior)
            if not expected:
                return
            by_number = {trial.number: trial for trial in done}
            ranked = [by_number[one.run.number] for one in expected]
            runs = baseline_runs(done, prepared.baseline)
            due = due_run(done, ranked[0], runs, budget.replicates, budget.candidates)
            if due is None:
                best = known_best(done, ranked, budget.replicates)
                due = due_run(done, best, runs, budget.replicates, budget.candidates)
            if due is None or not self._has_time_to_the_end(done, due.trial):
                return
            last_step = prepared.last_step(due.trial.batch_size)
            asked = ask_replicate(
                self._study,
                Winner(due.trial, float(last_step)),
                due.replicate,
                budget,
                prepared.space,
                prepared.backend.stops,
                self._worker,
                seed_of=due.seed_of,
                last_step=last_step,
            )
            if asked is None:  # another process has begun it
                return
            self._start(runner, asked)
            self._store((yield from _ended(runner)))

    def _has_time_to_the_end(self, done: Sequence[TrialResult], trial: TrialResult) -> bool:
        """Return whether one more run of a trial to its budget's end may begin."""
        seconds = self._wall.replicate_seconds(
            self._prepared.last_step(trial.batch_size),
            self._prepared.backend.step_time(trial.batch_size),
            self._cost(done),
        )
        return self._wall.left > seconds

    def _ask_baseline_again(
        self, done: Sequence[TrialResult], predicted: Mapping[int, float]
    ) -> AskedTrial | None:
        """Ask the baseline on the next of the winner's fresh seeds; None if there is none, or no time for it."""
        budget = self._budget
        merit = SOUGHT[budget.objective].merits[0]
        winner = winners(
            done, predicted, budget.objective, budget.replicates, budget.candidates
        ).get(merit)
        runs = baseline_runs(done, self._prepared.baseline)
        due = due_seed(runs, winner, self._baseline_seconds(runs))
        if due is None or runs is None:
            return None
        seconds = self._wall.replicate_seconds(
            runs.first.steps,
            self._prepared.backend.step_time(runs.first.batch_size),
            self._cost(done),
        )
        if seconds > self._wall.left:
            return None
        again = Winner(runs.first, float(runs.first.steps))
        return ask_replicate(
            self._study,
            again,
            # It may have run on an earlier winner's seeds, whose indices are taken.
            len(runs.again),
            budget,
            self._prepared.space,
            self._prepared.backend.stops,
            self._worker,
            seed_of=due,
        )

    def _baseline_seconds(self, runs: BaselineRuns | None) -> float:
        """Return the seconds of training that are left for the baseline's runs on fresh seeds."""
        budget = self._budget
        limits = [limit for limit in (budget.seconds, budget.wall_seconds) if limit is not None]
        if runs is None or not limits:
            return math.inf
        spent = sum(run.wall_seconds for run in runs.again)
        return MEANS_SHARE * min(limits) - spent

    def _has_time(self, done: Sequence[TrialResult], winner: Winner, replicate: int) -> bool:
        """Return whether a replicate may begin: of another winner than the first, all of its replicates."""
        is_first = replicate or not any(trial.replicate_of is not None for trial in done)
        count = 1 if is_first else self._budget.replicates
        seconds = self._wall.replicate_seconds(
            max(winner.steps, winner.trial.steps),
            self._prepared.backend.step_time(winner.trial.batch_size),
            self._cost(done),
        )
        return self._wall.left > count * seconds

    def _start(self, runner: Runner, asked: AskedTrial | None) -> None:
        if asked is None:  # other processes have taken what was left
            return
        spec = asked[1]
        self._asked[spec.number] = asked
        resumed_from = (
            None if spec.resumed_from is None else finished(self._study, spec.resumed_from)
        )
        is_baseline = self._stops and self._prepared.baseline is not None and spec.trial_index == 0
        # Of a budget it runs to the end, as any other.
        is_baseline = is_baseline and not self._is_for_loss
        limit = self._wall.trial_limit(is_baseline)
        max_seconds = limit if math.isfinite(limit) else None
        goal = self._prepared.goal
        spec = replace(spec, max_seconds=max_seconds, goal=None if goal is None else goal.value)
        runner.start(spec, self._prepared.files, resumed_from)

    def _store(
        self, finished: Finished, read: Callable[[TrialResult], TrialResult] | None = None
    ) -> None:
        """Store a trial's record, or what ``read`` makes of it; an error that ends the study is raised."""
        result, spec = finished.result(), finished.spec
        self.ran += 1
        if not self._times:
            result = replace(result, seconds_per_step=None)
        survey = self._prepared.survey
        if survey is not None and survey.step_time is not None:
            result = with_step_time(result, survey.step_time)
        if read is not None and result.status != "failed":
            result = read(result)
        ended_by_itself = (
            result.status == "stopped"
            and spec.max_steps is not None
            and result.steps < spec.max_steps
            and not _is_out_of_time(spec, result)
            # A loop's trial that ended between its reports may have come further.
            and not finished.is_cut
        )
        if self._is_for_loss and ended_by_itself:
            result = held(result, self._prepared.last_step(result.batch_size))
        if self._gone:
            self._keep(result)
            return
        asked = self._asked.pop(spec.number)
        if _is_out_of_time(spec, result):
            shorten(self._study, asked, result.steps, self._worker)
        try:
            full = self._is_for_loss and is_full(result, self._prepared.last_step)
            tell(self._study, asked, result, self._budget.objective, full)
        except StudyError as error:
            self._gone = isinstance(error, StorageGoneError)
            self._keep(result)
            raise
        if result.status == "failed":
            check_failures(results(self._study), finished.frames, finished.cause)

    def _keep(self, result: TrialResult) -> None:
        """Keep a record beside a storage that is gone: the same command stores it there."""
        append_text(self._prepared.files.unstored, result.to_json() + "\n")

    def _ask(self, done: Sequence[TrialResult], trials: Trials) -> AskedTrial | None:
        """Ask the next trial of the search; None where no index is free any more, or no time is left."""
        prepared, budget = self._prepared, self._budget
        others = 0  # more than run trials now; processes that have just begun run none
        while self._no_time is None:
            turn = free_turn(trials, budget.trials, self._worker, others)
            if turn is None:
                return None
            cut = ended_below_limit(turn.trials) if self._stops else ()
            context = sampler_context(prepared, cut)
            sampler = build_sampler(
                prepared.options,
                budget,
                turn.trial_index,
                context,
                attempt(turn),
                self._sampler_factory,
            )
            asked = ask(
                self._study,
                turn,
                budget,
                prepared.space,
                sampler,
                prepared.backend.stops,
                self._baseline(),
                self._ranking,
                partial(self._within_time, done),
            )
            if asked is not None:
                return asked
            # Another process has begun a trial at this index meanwhile.
            trials, others = self._study, len(self._leases.others())
        return None

    def _within_time(self, done: Sequence[TrialResult], spec: TrialSpec) -> TrialSpec | None:
        """Return a trial that ends while there is time for what has to follow; None if that leaves it too short."""
        if self._is_for_loss:
            # Nothing else ends it where no sampler of bstune's says how far it is to run.
            spec = within_steps(spec, self._prepared.last_step(spec.batch_size))
        if not self._stops:
            return spec
        backend = self._prepared.backend
        if not backend.continues:
            # A sampler need not know what "resumable" says.
            spec = replace(spec, resumed_from=None)
        cost = self._cost(done)
        reserve = self._reserve(done, cost)
        max_steps = self._wall.max_steps(done, spec, cost, backend.step_time, reserve)
        if max_steps is None:
            self._no_time = self._wall.end(done, reserve, self._shortest(cost))
            return None
        return within_steps(spec, max_steps)

    def _reserve(self, done: Sequence[TrialResult], cost: TrialCost) -> float:
        """Return the wall seconds that are kept; none before the first trial, without which there is no answer."""
        if not searched(done):
            return 0.0
        if self._is_for_loss:
            last_step = self._prepared.last_step
            if not any(is_full(trial, last_step) for trial in done):
                return 0.0  # there is no winner to run again
            return self._reserve_at_budget(done, cost)
        if not self._stops and not any(trial.reached for trial in done):
            return 0.0  # no stopped trial can go on
        runs = baseline_runs(done, self._prepared.baseline)
        first = None if runs is None else runs.first
        return self._wall.reserve(done, cost, self._prepared.backend.step_time, first)

    def _reserve_at_budget(self, done: Sequence[TrialResult], cost: TrialCost) -> float:
        """Return the wall seconds of the winner's fresh seeds and the baseline's, or a share of all at most."""
        batch_size = self._prepared.options.scaling.batch_size
        seconds = self._wall.replicate_seconds(
            self._prepared.last_step(batch_size),
            self._prepared.backend.step_time(batch_size),
            cost,
        )
        runs = self._budget.replicates * (1 if self._prepared.baseline is None else 2)
        return min(runs * seconds, RESCUE_SHARE * self._wall.limit)

    def _cost(self, done: Sequence[TrialResult]) -> TrialCost:
        backend = self._prepared.backend
        return fit_cost(done, backend.step_time, backend.evaluation_share)

    def _shortest(self, cost: TrialCost) -> float:
        """Return the wall seconds of the least trial that is worth its start, at the reference batch size."""
        step_time = self._prepared.backend.step_time(self._prepared.options.scaling.batch_size)
        return cost.seconds(MIN_STEPS * step_time)

    def _baseline(self) -> tuple[Baseline, int | None] | None:
        """Return what the first trial runs, and for how many steps; None where it is the search's own choice."""
        prepared, baseline = self._prepared, self._prepared.baseline
        if baseline is None:
            return None
        backend = prepared.backend
        last_step = prepared.last_step(baseline.batch_size)
        if self._is_for_loss:
            return baseline, last_step
        if not self._stops:
            chosen = backend.horizon and chooses_horizons(prepared.options)
            return baseline, last_step if chosen else None
        steps = first_steps(
            baseline,
            self._budget,
            last_step,
            backend.step_time(baseline.batch_size),
            1.0 + backend.evaluation_share,
        )
        return baseline, steps

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
            # By its own seconds, and by those of all trials, which the report ranks by.
            timed_alike = with_common_step_time(self._prepared, done)
            both = (*candidates(done), *candidates(timed_alike))
            return {trial.number for trial in both}

        def continued() -> set[int]:
            if not self._prepared.backend.continues:
                return set()
            needed = {
                spec.resumed_from for spec in running(trials) if spec.resumed_from is not None
            }
            open_trials = done
            if self._is_for_loss:
                last_step = self._prepared.last_step
                open_trials = [trial for trial in done if not is_full(trial, last_step)]
            return worth_continuing(open_trials, objective) | needed

        if self._files_kept_here and ended != self._ended:
            self._ended = ended
            if len(ended) >= UNWRITTEN * len(self._lines):
                self._write_trials(done)
            keep_trials(files.checkpoints, ended, winning)
            keep_trials(files.states, ended, continued)
        if self._tracking is not None:
            for result in done:
                self._tracking.send_trial(result)
        self._show(done, self._seconds_to_go(done))
        return done

    def _seconds_to_go(self, done: Sequence[TrialResult]) -> float | None:
        """Return what the rest of the study is predicted to take; None before a point has ended here."""
        points = [trial for trial in searched(done) if trial.resumed_from is None]
        elapsed = self._prepared.elapsed()
        if self._points_before is None:
            self._points_before = len(points)
            self._point_ends.append(elapsed)
        new = len(points) - self._points_before - (len(self._point_ends) - 1)
        self._point_ends += [elapsed] * new
        pace = pace_of(self._point_ends, self._points_before)
        if pace is None:
            return None
        left = 0 if self._has_ended else max(0, self._budget.trials - len(points))
        report = REPORT_SECONDS + self._wall.fine_decision
        runs = self._runs_to_come(done)
        limit = self._wall.left + report
        return seconds_to_go(pace, len(points), left, runs, report, limit)

    def _runs_to_come(self, done: Sequence[TrialResult]) -> tuple[Runs, ...]:
        """Return the runs on fresh seeds that are still to come, if the winners stay what they are now."""
        if self._is_for_loss:
            return self._budget_runs_to_come(done)
        leaders = best(done, self._budget)
        if not leaders:
            return ()
        step_time, cost = self._prepared.backend.step_time, self._cost(done)

        def seconds(trial: TrialResult) -> float:
            return self._wall.replicate_seconds(trial.steps, step_time(trial.batch_size), cost)

        again = [trial for trial in done if trial.replicate_of is not None]
        of_baseline = sum(is_baseline_replicate(trial.trial_index) for trial in again)
        runs = baseline_runs(done, self._prepared.baseline)
        planned = replicates_to_come(
            len(again) - of_baseline, self._budget.replicates, len(leaders)
        )
        to_come = [Runs(planned, max(map(seconds, leaders)))]
        if runs is not None and runs.first.reached and runs.first not in leaders:
            left = max(0, self._budget.replicates - of_baseline)
            to_come.append(Runs(left, seconds(runs.first)))
        return tuple(to_come)

    def _budget_runs_to_come(self, done: Sequence[TrialResult]) -> tuple[Runs, ...]:
        """Return the runs on fresh seeds of the best full trial so far, and of the baseline beside it."""
        prepared, cost = self._prepared, self._cost(done)

        def seconds(batch_size: int) -> float:
            last_step = prepared.last_step(batch_size)
            return self._wall.replicate_seconds(
                last_step, prepared.backend.step_time(batch_size), cost
            )

        return runs_to_come(
            done,
            best_full(done, prepared.last_step, prepared.protocol.target),
            baseline_runs(done, prepared.baseline),
            self._budget.replicates,
            seconds,
        )

    def _write_trials(self, done: Sequence[TrialResult]) -> None:
        """Write ``trials.jsonl``: one record a trial, in order of their numbers."""
        self._lines = {
            trial.number: self._lines.get(trial.number) or trial.to_json() + "\n" for trial in done
        }
        write_text(self._prepared.files.trials, "".join(self._lines.values()))

    def _end(self, done: Sequence[TrialResult]) -> SearchEnd | None:
        """Return the limit that ends the search; None while it goes on."""
        # Of a budget no share is kept for a trial that is to reach something.
        spent = self._budget.spent(done, continues=self._stops and not self._is_for_loss)
        if spent is None and math.isfinite(self._wall.limit):
            cost = self._cost(done)
            reserve = self._reserve(done, cost)
            spent = self._wall.spent(done, cost, reserve, self._shortest(cost))
        goal = self._budget.least_gain if self._is_for_loss else self._budget.precision
        if spent is not None or goal is None:
            return spent
        first = _first_trials(searched(done))
        if len(first) <= self._looked:
            return None
        self._looked = len(first)
        return self._gained(first) if self._is_for_loss else self._precise(first)

    def _gained(self, trials: Sequence[TrialResult]) -> SearchEnd | None:
        """Say that no more than ``search.least_gain`` is still to gain; None if more is, or it is unset."""
        prepared, least_gain = self._prepared, self._budget.least_gain
        full = sum(is_full(trial, prepared.last_step) for trial in trials)
        if least_gain is None or full < MIN_FULL:
            return None
        found = budget_posteriors(prepared, trials, LOOK_PARTICLES, (1.0,))[1.0]
        left = gain_left_of(found)
        if left is None or left.at_most > least_gain * left.seed_scatter:
            return None
        metric = prepared.protocol.target.metric
        return SearchEnd(
            f"stopped: {metric} {format_number(left.at_most, 2)} at most is still to gain, within "
            f"search.least_gain={least_gain:g} of what one seed differs from another, "
            f"{format_number(left.seed_scatter, 2)}",
            "search.least_gain",
        )

    def _precise(self, trials: Sequence[TrialResult]) -> SearchEnd | None:
        """Say that B_crit's interval is within ``search.precision``; None if it is wider, or unset."""
        precision = self._budget.precision
        reached = sum(trial.reached for trial in trials)
        if precision is None or reached < MIN_REACHED:
            return None
        posterior = study_posterior(self._prepared, trials, LOOK_PARTICLES)
        found = critical_batch(posterior)
        low, high = (None, None) if found is None else (found.low, found.high)
        if low is None or high is None or high / low >= precision:
            return None
        return SearchEnd(
            f"stopped: B_crit lies between {format_count(low)} and {format_count(high)}, "
            f"within search.precision={precision:g}"
        )


def _ended(runner: Runner) -> Paused[Finished]:
    """Wait for a trial, after a pause in which a loop of the user's may train it."""
    yield
    return runner.wait()


def _is_out_of_time(spec: TrialSpec, result: TrialResult) -> bool:
    """Return whether its wall time ended a trial, rather than itself: then it can go on."""
    return (
        spec.max_seconds is not None
        and result.status == "stopped"
        and result.message is None
        and result.wall_seconds > spec.max_seconds
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
    """Return the trials of the first indices, a multiple of ``LOOK_EVERY`` of them, that are all done.

    Side by side others end while these run: precision must not depend on how many, or on when one looks.
    """
    indices = {trial.trial_index for trial in searched}
    whole = next(
        trial_index for trial_index in range(len(indices) + 1) if trial_index not in indices
    )
    whole -= whole % LOOK_EVERY
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
        if objective in ("curve", "loss"):
            return True
        by_merit: dict[Merit, bool] = {"time": by_time, "steps": by_steps}
        return any(by_merit[merit] for merit in SOUGHT[objective].merits)

    stopped = (
        trial
        for trial in searched(done)
        if trial.status == "stopped" and trial.number not in resumed
    )
    last = sorted(stopped, key=lambda trial: (may_win(trial), trial.number))
    return {trial.number for trial in last[-MAX_STATES:]}
