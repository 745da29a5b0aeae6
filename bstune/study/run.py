"""What a study shows while it runs: the plan, then a live table on a terminal or plain lines elsewhere.

Runs a checked job: a study from its plan to its report, or one trial by itself.

The search of a job's study: slot after slot, or several at a time, then its winners on fresh seeds.
"""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Self

import optuna
from omegaconf import DictConfig, OmegaConf
from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from bstune.core.console import format_count, format_number, format_seconds, redact
from bstune.core.errors import StudyError
from bstune.core.files import Output, locked, write_text
from bstune.core.records import Target, TrialResult, TrialSpec
from bstune.core.search_space import Tunable
from bstune.study.model import b_crit_interval, known_of, own_arguments
from bstune.study.plan import max_seconds, remaining_seconds
from bstune.study.prepare import PreparedStudy
from bstune.study.replicates import contenders, next_confirmation
from bstune.study.report import report_study
from bstune.study.storage import (
    ask,
    ask_confirmation,
    build_sampler,
    ended_by_themselves,
    fail_one,
    finish_abandoned,
    is_own,
    next_trial_index,
    open_study,
    results,
    run_trial_of,
    running,
    warn_cut_short,
)
from bstune.study.summary import trials_table, winners
from bstune.trial.workers import Ended, Workers, alone

if TYPE_CHECKING:
    from bstune.study.tracking import Tracking


def plan_text(prepared: PreparedStudy, done: Sequence[TrialResult], estimate: tuple[float, bool]) -> str:
    """Return the plan in a few lines.

    Args:
        prepared: the checked job.
        done: trials that an earlier run of the study finished.
        estimate: seconds, and whether they bound a study in which every trial runs to its budget.
    """
    plan, space = prepared.budget, prepared.space
    seconds, bound = estimate
    rule = prepared.config.scaling.rule["_target_"].rpartition(".")[2]
    limits = [f"{plan.trials} trials"]
    if plan.seconds is not None:
        limits.append(f"{format_seconds(plan.seconds)} of training")
    if plan.wall_seconds is not None:
        limits.append(f"{format_seconds(plan.wall_seconds)} of wall time")
    lines = [
        f"study {prepared.config.study}: {prepared.protocol.target}, objective {plan.objective}, on {prepared.backend.description}",
        f"  batch sizes {format_count(space.low)} to {format_count(space.high)}, "
        f"learning rates within a factor of {format_number(2**space.delta_bound)} of rule {rule} "
        f"through B = {format_count(prepared.config.scaling.batch_size)}, lr = {format_number(prepared.config.scaling.lr)}"
        + (f", within {format_number(space.lr_low)} to {format_number(space.lr_high)}" if space.lr_low > 0 else ""),
        f"  {', '.join(limits)}{_ends(prepared)}",
    ]
    if space.tunables:
        lines.append(f"  searches {', '.join(_range_text(one) for one in space.tunables)} as well")
    if done:
        lines.append(f"  continues after {len(done)} trials; about {format_seconds(seconds)} to go")
    else:
        kind = "at most about" if bound else "about"
        lines.append(f"  {kind} {format_seconds(seconds)} if every trial ran to its budget")
    lines += [f"  {note}" for note in prepared.notes]
    return "\n".join(lines)


def _range_text(tunable: Tunable) -> str:
    return f"{tunable.name} ({format_number(tunable.low)} to {format_number(tunable.high)})"


def _ends(prepared: PreparedStudy) -> str:
    budget = prepared.protocol.budget
    spent = f"{format_count(budget.steps)} steps and {format_count(budget.examples)} examples"
    if is_own(prepared.config.sampler) and prepared.backend.stops:
        return "; each ends at the target or once it cannot matter, and may be continued; winners run again"
    if is_own(prepared.config.sampler):
        return f"; each ends at the target or after {spent}"
    return (
        f", {prepared.budget.stratified:.0%} of them spread evenly over log B; each ends at the target or after {spent}"
    )


class Progress:
    """A live table with a progress bar on a terminal; one plain line a trial elsewhere."""

    def __init__(self, total: int, target: Target, console: Console) -> None:
        self._total, self._target, self._console = total, target, console
        self._shown: set[int] | None = None
        self._live: Live | None = None
        if console.is_terminal:
            columns = (
                BarColumn(),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                TextColumn("left"),
                TimeRemainingColumn(),
            )
            self._bar = Bar(*columns, console=console)
            self._task = self._bar.add_task("trials", total=total)
            self._live = Live(console=console, refresh_per_second=2, transient=True)

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def show(self, done: Sequence[TrialResult]) -> None:
        """Show the trials that are done; those of an earlier run are not repeated as lines."""
        if self._live is not None:
            finished = sum(result.status != "failed" and result.replicate_of is None for result in done)
            self._bar.update(self._task, completed=finished)
            self._live.update(Group(trials_table(done, self._target), self._bar))
            return
        if self._shown is not None:
            for result in done:
                if result.number not in self._shown:  # side by side, trials do not end in order of their numbers
                    self._console.print(self.line(result, self._total), soft_wrap=True, highlight=False)
        self._shown = {result.number for result in done}

    @staticmethod
    def line(result: TrialResult, total: int | None) -> str:
        """Return one trial as a plain line."""
        place = f"trial {result.trial_index + 1}/{total}" if total is not None else "trial"
        if result.replicate_of is not None:
            place = f"confirms trial {result.replicate_of} on a fresh seed"
        elif result.resumed_from is not None:
            place += f" (continues number {result.resumed_from})"
        last = result.history[-1][1] if result.history else None
        time = f", {format_seconds(result.time_to_target)} to target" if result.reached else ""
        reason = f": {result.message}" if result.message else ""
        settings = "".join(f"  {name} {format_number(value)}" for name, value in result.hyperparameters.items())
        return (
            f"{place}  B {result.batch_size}  lr {format_number(result.lr)}{settings}  {result.status}"
            f" at step {result.steps} ({format_number(last)}){time}, {format_seconds(result.wall_seconds)} in all"
            f"{reason}"
        )


def run_study(prepared: PreparedStudy, arguments: Sequence[str], console: Console) -> None:
    """Run the study, or go on with it, and write its report.

    Args:
        prepared: from :func:`bstune.study.prepare.prepare`.
        arguments: of the command line, for the command that trains the winner again.
        console: where the plan, the progress and the final table go.

    Raises:
        StudyError: if the study cannot be opened, or another process runs it.
    """
    with locked(prepared.files):
        study = open_study(
            prepared.config.study,
            prepared.config.storage,
            prepared.budget.objective,
            prepared.frozen_settings,
            prepared.files.root,
        )
        finish_abandoned(study, prepared.budget.objective)
        done = results(study)
        console.print(plan_text(prepared, done, _estimate(prepared, done)), soft_wrap=True)
        prepared.files.checkpoints.mkdir(exist_ok=True)
        write_text(prepared.files.config, shareable_yaml(prepared.config))
        if prepared.survey is not None:
            from bstune.hardware.report import write_survey

            write_survey(prepared.survey, prepared.files)
        tracking = None
        if prepared.config.mlflow.enabled:
            from bstune.study.tracking import open_job_tracking  # mlflow takes seconds to import

            tracking = open_job_tracking(prepared, study)
        try:
            ended = run_slots(prepared, study, tracking, console)
        finally:  # a trial that was cut short is a record too
            write_trials(prepared.files, results(study))
        console.print(ended)
        report_study(prepared, study, tracking, ended, arguments, console)


def run_single(prepared: PreparedStudy, spec: TrialSpec, console: Console) -> TrialResult:
    """Run one trial by itself, and write its record and what else it leaves."""
    output = prepared.files.single_trial(spec.batch_size, spec.lr, spec.seed)
    with locked(output):
        output.checkpoints.mkdir(exist_ok=True)
        result = prepared.backend.run(spec, output, None)
        write_text(output.record, result.to_json() + "\n")
        write_text(output.config, shareable_yaml(prepared.config))
    console.print(Progress.line(result, None), soft_wrap=True)
    if result.reached:
        for name, value in prepared.backend.test(spec, output).items():
            console.print(f"{name} {value:.4g}")
    console.print(f"record {output.record}", soft_wrap=True)
    return result


def _estimate(prepared: PreparedStudy, done: Sequence[TrialResult]) -> tuple[float, bool]:
    """Return seconds, and whether they are a bound from timed steps (or what the study's own trials suggest)."""
    remaining = remaining_seconds(prepared.budget, done)
    if remaining is not None:
        return remaining / prepared.config.search.workers, False
    backend, protocol = prepared.backend, prepared.protocol
    seconds = max_seconds(
        prepared.budget,
        prepared.space,
        lambda batch_size: backend.longest(batch_size, protocol),
        backend.step_time,
        backend.evaluation_share,
    )
    return seconds, True


def shareable_yaml(config: DictConfig) -> str:
    """Return the composed config as YAML, without passwords; values from the environment stay references to it."""
    return redact(OmegaConf.to_yaml(config))


MOST_CERTAIN_AFTER = 6  # reached trials, before the search may end by search.precision
CERTAIN_PARTICLES = 400  # of the posterior while the search goes on
CERTAIN_EVERY = 4  # slots between looks at search.precision
ABANDONED_AT = 1.2  # times the best trial's time or steps: a stopped trial that has taken more is not continued
MOST_STATES = 32
MOST_DEATHS = 3  # of the processes that train one slot side by side with others, before the study ends


def run_slots(prepared: PreparedStudy, study: optuna.Study, tracking: "Tracking | None", console: Console) -> str:
    """Search, then confirm the winners; return, in words, what ended the search."""
    with Progress(prepared.budget.trials, prepared.protocol.target, console) as progress:
        workers = prepared.open_workers
        if workers is None:
            ended = _search(prepared, study, tracking, progress)
        else:
            ended = _search_side_by_side(prepared, study, tracking, progress, workers)
        while True:  # alone, whoever trained the finalists: their seconds are measured
            done = _write(prepared, study, progress)
            due = next_confirmation(
                done, prepared.budget.objective, prepared.budget.confirmations, prepared.budget.finalists
            )
            if due is None:
                return ended
            asked = ask_confirmation(study, *due, prepared.budget, prepared.space, prepared.backend.stops)
            _run(prepared, study, asked, done, tracking)


def _search(prepared: PreparedStudy, study: optuna.Study, tracking: "Tracking | None", progress: Progress) -> str:
    """Run the search's trials one after another; return, in words, what ended it."""
    while True:
        done = _write(prepared, study, progress)
        trial_index = next_trial_index(study, prepared.budget)
        if trial_index is None:
            return _plan_done(prepared)
        ended = _ended(prepared, done)
        if ended is not None:
            return ended
        _run(prepared, study, _ask(prepared, study, trial_index), done, tracking)


def _search_side_by_side(
    prepared: PreparedStudy,
    study: optuna.Study,
    tracking: "Tracking | None",
    progress: Progress,
    open_workers: Callable[[], Workers],
) -> str:
    """Run several of the search's trials at a time; return, in words, what ended it.

    What a slot is asked depends on the trials that are done by then, and these on which of those that run ends first:
    it is another study than one after another, and not the same one twice. What comes of a spec is the same.

    Raises:
        StudyError: if the processes of one slot die ``MOST_DEATHS`` times.
    """
    asked: dict[int, tuple[optuna.Trial, TrialSpec]] = {}
    deaths: Counter[int] = Counter()
    ended: str | None = None
    looked = 0

    def store(trial: Ended) -> None:
        def train(spec: TrialSpec) -> TrialResult:
            return alone(trial.future.result(), prepared.backend.step_time)

        result = run_trial_of(
            study, asked[trial.spec.number], prepared.budget.objective, prepared.protocol.target, train
        )
        if tracking is not None:
            tracking.send_trial(result)

    with open_workers() as workers:
        whole = False
        try:
            while True:
                done = _write(prepared, study, progress)
                ended = ended or _spent(prepared, done)
                settled = _first_slots(_searched(done))
                if ended is None and len(settled) > looked:
                    looked = len(settled)
                    ended = _certain(prepared, settled)
                while (
                    ended is None
                    and workers.free
                    and (trial_index := next_trial_index(study, prepared.budget)) is not None
                ):
                    trial, spec = asked_now = _ask(prepared, study, trial_index)
                    asked[trial.number] = asked_now
                    workers.start(spec, prepared.files, _parent(spec, done))
                if not workers.running:
                    whole = True
                    return ended or _plan_done(prepared)
                over = workers.wait()
                if over.died is None:
                    store(over)
                    continue
                deaths[over.spec.trial_index] += 1
                fail_one(study, over.spec, over.died)
                if deaths[over.spec.trial_index] == MOST_DEATHS:
                    raise StudyError(
                        f"the process that trained B = {over.spec.batch_size}, lr = {over.spec.lr:g} {over.died}, "
                        f"{MOST_DEATHS} times: lower search.workers or search.batch_size.high where memory is short; "
                        "the finished trials are stored, and the same command with search.workers=1 continues the study"
                    )
        finally:
            if not whole:  # an error or an interruption: what has ended meanwhile is stored all the same
                for over in workers.over():
                    if over.died is None and over.future.exception() is None:
                        store(over)
                for spec in running(study):
                    warn_cut_short(spec)
                finish_abandoned(study, prepared.budget.objective)


def _plan_done(prepared: PreparedStudy) -> str:
    return f"the plan is done: search.trials={prepared.budget.trials}"


def _ask(prepared: PreparedStudy, study: optuna.Study, trial_index: int) -> tuple[optuna.Trial, TrialSpec]:
    sampler = build_sampler(
        prepared.config.sampler, prepared.budget, trial_index, own_arguments(prepared, ended_by_themselves(study))
    )
    return ask(study, trial_index, prepared.budget, prepared.space, sampler, prepared.backend.stops)


def _ended(prepared: PreparedStudy, done: Sequence[TrialResult]) -> str | None:
    """Return which limit or which certainty ends the search, in words; None if none."""
    return _spent(prepared, done) or _certain(prepared, _searched(done))


def _spent(prepared: PreparedStudy, done: Sequence[TrialResult]) -> str | None:
    spent = prepared.budget.spent(done)
    return None if spent is None else f"stopped: {spent}"


def _searched(done: Sequence[TrialResult]) -> list[TrialResult]:
    # Of the search alone: a study that is continued while its winners run again, or after it, has ended here before.
    return [trial for trial in done if trial.replicate_of is None and trial.status != "failed"]


def _certain(prepared: PreparedStudy, searched: Sequence[TrialResult]) -> str | None:
    reached = sum(trial.reached for trial in searched)
    if prepared.budget.precision is None or reached < MOST_CERTAIN_AFTER or len(searched) % CERTAIN_EVERY:
        return None
    low, _, high = b_crit_interval(prepared, known_of(prepared, searched, CERTAIN_PARTICLES))
    if high / low >= prepared.budget.precision:
        return None
    return (
        f"stopped: B_crit lies between {format_count(low)} and {format_count(high)}, "
        f"within search.precision={prepared.budget.precision:g}"
    )


def _first_slots(searched: Sequence[TrialResult]) -> list[TrialResult]:
    """Return the trials of the first slots, a multiple of ``CERTAIN_EVERY`` of them, that are all done.

    Side by side others end while these do: what is certain must not depend on how many, or on when one looks.
    """
    trial_indices = {trial.trial_index for trial in searched}
    whole = next(trial_index for trial_index in range(len(trial_indices) + 1) if trial_index not in trial_indices)
    whole -= whole % CERTAIN_EVERY
    return [trial for trial in searched if trial.trial_index < whole]


def _write(prepared: PreparedStudy, study: optuna.Study, progress: Progress) -> list[TrialResult]:
    """Write what has been done, show it, delete the files that nothing needs any more, and return the trials."""
    done = results(study)
    write_trials(prepared.files, done)
    kept = [*winners(done).values(), *contenders(done, prepared.budget.objective, prepared.budget.finalists)]
    now = running(study)
    writing = {spec.number for spec in now}
    prepared.files.keep_checkpoints({trial.number for trial in kept}, writing)
    read = {spec.resumed_from for spec in now if spec.resumed_from is not None}
    prepared.files.keep_states(worth_continuing(done, prepared.budget.objective) | read, writing)
    progress.show(done)
    return done


def worth_continuing(done: Sequence[TrialResult], objective: str) -> set[int]:
    """Return the numbers of the stopped trials that may still be continued: ``MOST_STATES`` of them.

    First come those that may win, then those that only the curve needs, as they have taken more than the best trial:
    seconds for ``time``, steps for ``steps``, both of the two for ``both``. Of either kind the newest are kept. A state
    is as large as the model and its optimizer.
    """
    parents = {trial.resumed_from for trial in done if trial.status != "failed"}  # what was cut short is asked again
    reached = [trial for trial in done if trial.reached and trial.replicate_of is None]
    fastest = min((time for trial in reached if (time := trial.time_to_target) is not None), default=math.inf)
    fewest = min((trial.steps for trial in reached), default=math.inf)

    def may_win(trial: TrialResult) -> bool:
        by_time = trial.steps * (trial.seconds_per_step or 0.0) < ABANDONED_AT * fastest
        by_steps = trial.steps < ABANDONED_AT * fewest
        return {"time": by_time, "steps": by_steps, "both": by_time or by_steps, "curve": True}[objective]

    ends = [trial for trial in done if trial.status == "censored" and trial.number not in parents]
    last = sorted((t for t in ends if t.replicate_of is None), key=lambda trial: (may_win(trial), trial.number))
    return {trial.number for trial in last[-MOST_STATES:]}


def _run(
    prepared: PreparedStudy,
    study: optuna.Study,
    asked: tuple[optuna.Trial, TrialSpec],
    done: Sequence[TrialResult],
    tracking: "Tracking | None",
) -> None:
    """Run a trial that was asked for, from where the trial that it continues was stopped, if it names one."""

    def train(spec: TrialSpec) -> TrialResult:
        return prepared.backend.run(spec, prepared.files, _parent(spec, done))

    result = run_trial_of(study, asked, prepared.budget.objective, prepared.protocol.target, train)
    if tracking is not None:
        tracking.send_trial(result)


def _parent(spec: TrialSpec, done: Sequence[TrialResult]) -> TrialResult | None:
    return next((result for result in done if result.number == spec.resumed_from), None)


def write_trials(output: Output, done: Sequence[TrialResult]) -> None:
    """Write ``trials.jsonl``: one record a trial, in order of their numbers."""
    write_text(output.trials, "".join(result.to_json() + "\n" for result in done))
