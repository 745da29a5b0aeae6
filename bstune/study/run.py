"""Runs a prepared study: its plan is printed, the search's trials run, its winners run again, its report is written.

Meanwhile a live table shows the trials on a terminal; elsewhere one plain line a trial does.
"""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

import optuna
from omegaconf import OmegaConf
from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from bstune.core.console import format_count, format_number, format_seconds, redact
from bstune.core.errors import StudyError
from bstune.core.files import Output, keep_trials, locked, write_text
from bstune.core.records import Objective, Target, TrialResult, TrialSpec
from bstune.study import storage
from bstune.study.model import b_crit_interval, sampler_context, study_posterior
from bstune.study.plan import max_seconds, remaining_seconds
from bstune.study.prepare import PreparedStudy
from bstune.study.replicates import candidates, next_replicate
from bstune.study.report import report_study
from bstune.study.summary import trials_table, winners
from bstune.trial.backend import stops_trials
from bstune.trial.workers import Finished, Workers, with_solo_step_time

if TYPE_CHECKING:
    from bstune.study.tracking import Tracking

MIN_REACHED = 6  # trials before the search may end by search.precision
PRECISION_PARTICLES = 400  # of the posterior while the search goes on
PRECISION_EVERY = 4  # trials between looks at search.precision
ABANDON_FACTOR = 1.2  # a stopped trial beyond this many times the best trial's time or steps is not continued
MAX_STATES = 32
MAX_DEATHS = 3  # of the processes that train one trial side by side with others, before the study ends


def plan_text(prepared: PreparedStudy, done: Sequence[TrialResult]) -> str:
    """Return the plan in a few lines; ``done`` are the trials that an earlier run of the study finished."""
    config, budget, space = prepared.config, prepared.budget, prepared.space
    limits = [(budget.seconds, "training"), (budget.wall_seconds, "wall time")]
    spendable = [f"{format_seconds(seconds)} of {what}" for seconds, what in limits if seconds is not None]
    trial_budget = prepared.protocol.budget
    spent = f"{format_count(trial_budget.steps)} steps and {format_count(trial_budget.examples)} examples"
    if not stops_trials(config.sampler):
        ends = f", {budget.stratified:.0%} of them spread evenly over log B; each ends at the target or after {spent}"
    elif prepared.backend.stops:
        ends = "; each ends at the target or once it cannot matter, and may be continued; winners run again"
    else:
        ends = f"; each ends at the target or after {spent}"
    rule = config.scaling.rule["_target_"].rpartition(".")[2]
    bounds = f", within {format_number(space.lr_low)} to {format_number(space.lr_high)}" if space.lr_low > 0 else ""
    lines = [
        f"study {config.study}: {prepared.protocol.target}, objective {budget.objective}, on "
        f"{prepared.backend.description}",
        f"  batch sizes {format_count(space.low)} to {format_count(space.high)}, "
        f"learning rates within a factor of {format_number(2**space.delta_bound)} of rule {rule} "
        f"through B = {format_count(config.scaling.batch_size)}, lr = {format_number(config.scaling.lr)}{bounds}",
        f"  {', '.join([f'{budget.trials} trials', *spendable])}{ends}",
    ]
    if space.tunables:
        ranges = (f"{one.name} ({format_number(one.low)} to {format_number(one.high)})" for one in space.tunables)
        lines.append(f"  searches {', '.join(ranges)} as well")
    remaining = remaining_seconds(budget, done)
    if remaining is not None:  # what the study's own trials suggest; a bound from timed steps before the first
        seconds = format_seconds(remaining / config.search.workers)
        lines.append(f"  continues after {len(done)} trials; about {seconds} to go")
    else:
        seconds = format_seconds(max_seconds(budget, space, prepared.protocol, prepared.backend))
        lines.append(f"  at most about {seconds} if every trial ran to its budget")
    return "\n".join([*lines, *(f"  {note}" for note in prepared.notes)])


class Progress:
    """A live table with a progress bar on a terminal; one plain line a trial elsewhere."""

    def __init__(self, total: int, target: Target, console: Console) -> None:
        self._total, self._target, self._console = total, target, console
        self._shown: set[int] | None = None
        self.live: Live | None = None  # shown while it is entered
        if console.is_terminal:
            left = TextColumn("left"), TimeRemainingColumn()
            self._bar = Bar(BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), *left, console=console)
            self._task = self._bar.add_task("trials", total=total)
            self.live = Live(console=console, refresh_per_second=2, transient=True)

    def show(self, done: Sequence[TrialResult]) -> None:
        """Show the finished trials; those of an earlier run are not repeated as lines."""
        if self.live is not None:
            finished = sum(result.status != "failed" and result.replicate_of is None for result in done)
            self._bar.update(self._task, completed=finished)
            self.live.update(Group(trials_table(done, self._target), self._bar))
            return
        for result in done:
            # Side by side, trials do not end in order of their numbers.
            if self._shown is not None and result.number not in self._shown:
                self._console.print(trial_line(result, self._total), soft_wrap=True, highlight=False)
        self._shown = {result.number for result in done}


def trial_line(result: TrialResult, total: int | None) -> str:
    """Return one trial as a plain line; ``total`` trials are planned, None for a trial by itself."""
    place = f"trial {result.trial_index + 1}/{total}" if total is not None else "trial"
    if result.replicate_of is not None:
        place = f"replicates trial {result.replicate_of} on a fresh seed"
    elif result.resumed_from is not None:
        place += f" (continues number {result.resumed_from})"
    last = result.history[-1][1] if result.history else None
    time = f", {format_seconds(result.time_to_target)} to target" if result.reached else ""
    reason = f": {result.message}" if result.message else ""
    values = "".join(f"  {name} {format_number(value)}" for name, value in result.hyperparameters.items())
    return (
        f"{place}  B {result.batch_size}  lr {format_number(result.lr)}{values}  {result.status}"
        f" at step {result.steps} ({format_number(last)}){time}, {format_seconds(result.wall_seconds)} in all{reason}"
    )


def run_study(prepared: PreparedStudy, arguments: Sequence[str], console: Console) -> list[TrialResult]:
    """Run or continue the study, write its report and return its trials; ``arguments`` compose its config again."""
    config, objective, files = prepared.config, prepared.budget.objective, prepared.files
    with locked(files):
        study = storage.open_study(config.study, config.storage, objective, prepared.frozen_settings, files.root)
        storage.finish_abandoned(study, objective)
        console.print(plan_text(prepared, storage.results(study)), soft_wrap=True)
        files.checkpoints.mkdir(exist_ok=True)
        write_text(files.config, redact(OmegaConf.to_yaml(config)))
        if prepared.survey is not None:
            from bstune.hardware.report import write_survey  # torch takes seconds to import: replays have no survey

            write_survey(prepared.survey, files)
        tracking = None
        if config.mlflow.enabled:
            from bstune.study.tracking import open_tracking  # mlflow takes seconds to import

            tracking = open_tracking(prepared, study)
        progress = Progress(prepared.budget.trials, prepared.protocol.target, console)
        try:
            with progress.live or nullcontext():
                stop_reason = _Search(prepared, study, tracking, progress).run_all()
        finally:  # a trial that was cut short is a record too
            write_trials(files, storage.results(study))
        console.print(stop_reason)
        report_study(prepared, study, tracking, stop_reason, arguments, console)
        return storage.results(study)


def run_single(prepared: PreparedStudy, spec: TrialSpec, console: Console) -> TrialResult:
    """Run one trial by itself, and write its record and what else it leaves."""
    files = prepared.files.single_trial(spec.batch_size, spec.lr, spec.seed)
    with locked(files):
        files.checkpoints.mkdir(exist_ok=True)
        result = prepared.backend.run(spec, files, None)
        write_text(files.record, result.to_json() + "\n")
        write_text(files.config, redact(OmegaConf.to_yaml(prepared.config)))
    console.print(trial_line(result, None), soft_wrap=True)
    if result.reached:
        for name, value in prepared.backend.test(spec, files).items():
            console.print(f"{name} {value:.4g}")
    console.print(f"record {files.record}", soft_wrap=True)
    return result


@dataclass(frozen=True)
class _Search:
    """The trials of one study: asked, run, stored, written and shown."""

    prepared: PreparedStudy
    study: optuna.Study
    tracking: "Tracking | None"
    progress: Progress

    def run_all(self) -> str:
        """Search, then run the winners again on fresh seeds; return the sentence that says what ended the search."""
        budget, open_workers = self.prepared.budget, self.prepared.open_workers
        stop_reason = self.one_by_one() if open_workers is None else self.side_by_side(open_workers)
        while True:  # one by one, whoever trained the candidates: their seconds are measured
            done = self.write()
            due = next_replicate(done, budget.objective, budget.replicates, budget.candidates)
            if due is None:
                return stop_reason or f"the plan is done: search.trials={budget.trials}"
            asked = storage.ask_replicate(self.study, *due, budget, self.prepared.space, self.prepared.backend.stops)
            self.run(asked, done)

    def one_by_one(self) -> str | None:
        """Run the trials one after another; return the limit that ended the search, None if all have run."""
        while True:
            done = self.write()
            trial_index = storage.next_trial_index(self.study, self.prepared.budget.trials)
            if trial_index is None:
                return None
            stop_reason = self.prepared.budget.spent(done) or self._precise(_searched(done))
            if stop_reason is not None:
                return stop_reason
            self.run(self._ask(trial_index), done)

    def side_by_side(self, open_workers: Callable[[], Workers]) -> str | None:
        """Run several trials at a time; return as above. What is asked depends on which trials are done by then."""
        asked: dict[int, optuna.Trial] = {}
        deaths: Counter[int] = Counter()
        stop_reason: str | None = None
        looked = 0
        with open_workers() as workers, storage.cut_short(self.study, self.prepared.budget.objective):
            try:
                while True:
                    done = self.write()
                    stop_reason = stop_reason or self.prepared.budget.spent(done)
                    first = _first_trials(_searched(done))
                    if stop_reason is None and len(first) > looked:
                        looked = len(first)
                        stop_reason = self._precise(first)
                    while stop_reason is None and workers.free:
                        trial_index = storage.next_trial_index(self.study, self.prepared.budget.trials)
                        if trial_index is None:
                            break
                        trial, spec = self._ask(trial_index)
                        asked[trial.number] = trial
                        workers.start(spec, self.prepared.files, _resumed(spec, done))
                    if not workers.running:
                        return stop_reason
                    finished = workers.wait()
                    if finished.exit_reason is None:
                        self._store(asked[finished.spec.number], finished)
                    else:
                        deaths[finished.spec.trial_index] += 1
                        self._fail(finished, deaths[finished.spec.trial_index])
            except BaseException:  # an interruption too: what has finished meanwhile is stored all the same
                for finished in workers.poll():
                    if finished.record is not None:
                        self._store(asked[finished.spec.number], finished)
                raise

    def _fail(self, finished: Finished, deaths: int) -> None:
        """Fail a trial whose process died; StudyError is raised if that was its ``MAX_DEATHS``-th death."""
        spec = finished.spec
        storage.fail_one(self.study, spec, str(finished.exit_reason))
        if deaths == MAX_DEATHS:
            raise StudyError(
                f"the process that trained B = {spec.batch_size}, lr = {spec.lr:g} {finished.exit_reason}, "
                f"{MAX_DEATHS} times: lower search.workers or search.batch_size.high where memory is short; the "
                "finished trials are stored, and the same command with search.workers=1 continues the study"
            )

    def run(self, asked: storage.Asked, done: Sequence[TrialResult]) -> None:
        """Run a trial that was asked for, from where the trial that it continues was stopped, and store its record."""
        trial, spec = asked
        with storage.cut_short(self.study, self.prepared.budget.objective):
            self._tell(trial, self.prepared.backend.run(spec, self.prepared.files, _resumed(spec, done)))

    def _store(self, trial: optuna.Trial, finished: Finished) -> None:
        # An error of the training is raised here; side_by_side then stores what else has finished and fails the rest.
        self._tell(trial, with_solo_step_time(finished.result(), self.prepared.backend.step_time))

    def _tell(self, trial: optuna.Trial, result: TrialResult) -> None:
        storage.tell(self.study, trial, result, self.prepared.budget.objective, self.prepared.protocol.target)
        if self.tracking is not None:
            self.tracking.send_trial(result)

    def _ask(self, trial_index: int) -> storage.Asked:
        prepared = self.prepared
        context = sampler_context(prepared, storage.ended_below_limit(self.study))
        sampler = storage.build_sampler(prepared.config.sampler, prepared.budget, trial_index, context)
        return storage.ask(self.study, trial_index, prepared.budget, prepared.space, sampler, prepared.backend.stops)

    def write(self) -> list[TrialResult]:
        """Write and show the finished trials, delete the files that nothing needs any more, and return the trials."""
        files, objective = self.prepared.files, self.prepared.budget.objective
        done = storage.results(self.study)
        write_trials(files, done)
        now = storage.running(self.study)
        writing = {spec.number for spec in now}
        winning = [*winners(done).values(), *candidates(done, objective, self.prepared.budget.candidates)]
        keep_trials(files.checkpoints, {trial.number for trial in winning}, writing)
        read = {spec.resumed_from for spec in now if spec.resumed_from is not None}
        keep_trials(files.states, worth_continuing(done, objective) | read, writing)
        self.progress.show(done)
        return done

    def _precise(self, searched: Sequence[TrialResult]) -> str | None:
        """Return the sentence that says that B_crit's interval is within ``search.precision``, or None."""
        precision, reached = self.prepared.budget.precision, sum(trial.reached for trial in searched)
        if precision is None or reached < MIN_REACHED or len(searched) % PRECISION_EVERY:
            return None
        posterior = study_posterior(self.prepared, searched, PRECISION_PARTICLES)
        low, _, high = b_crit_interval(self.prepared, posterior)
        if high / low >= precision:
            return None
        return (
            f"stopped: B_crit lies between {format_count(low)} and {format_count(high)}, "
            f"within search.precision={precision:g}"
        )


def _searched(done: Sequence[TrialResult]) -> list[TrialResult]:
    """Return the search's trials: neither replicates, which may have begun before, nor failed ones."""
    return [trial for trial in done if trial.replicate_of is None and trial.status != "failed"]


def _first_trials(searched: Sequence[TrialResult]) -> list[TrialResult]:
    """Return the trials of the first indices, a multiple of ``PRECISION_EVERY`` of them, that are all done.

    Precision must not depend on how many others end beside them.
    """
    indices = {trial.trial_index for trial in searched}
    whole = next(trial_index for trial_index in range(len(indices) + 1) if trial_index not in indices)
    whole -= whole % PRECISION_EVERY
    return [trial for trial in searched if trial.trial_index < whole]


def _resumed(spec: TrialSpec, done: Sequence[TrialResult]) -> TrialResult | None:
    return next((result for result in done if result.number == spec.resumed_from), None)


def worth_continuing(done: Sequence[TrialResult], objective: Objective) -> set[int]:
    """Return the numbers of the stopped trials that may still be continued: the newest ``MAX_STATES`` of them.

    Those that may win come first; the others, which took more than the best trial by the objective, serve the curve.
    """
    resumed = {trial.resumed_from for trial in done if trial.status != "failed"}  # what was cut short is asked again
    reached = [trial for trial in done if trial.reached and trial.replicate_of is None]
    fastest = min((time for trial in reached if (time := trial.time_to_target) is not None), default=math.inf)
    fewest = min((trial.steps for trial in reached), default=math.inf)

    def may_win(trial: TrialResult) -> bool:
        by_time = trial.steps * (trial.seconds_per_step or 0.0) < ABANDON_FACTOR * fastest
        by_steps = trial.steps < ABANDON_FACTOR * fewest
        return {"time": by_time, "steps": by_steps, "both": by_time or by_steps, "curve": True}[objective]

    stopped = (trial for trial in _searched(done) if trial.status == "censored" and trial.number not in resumed)
    last = sorted(stopped, key=lambda trial: (may_win(trial), trial.number))
    return {trial.number for trial in last[-MAX_STATES:]}


def write_trials(files: Output, done: Sequence[TrialResult]) -> None:
    """Write ``trials.jsonl``: one record a trial, in order of their numbers."""
    write_text(files.trials, "".join(result.to_json() + "\n" for result in done))
