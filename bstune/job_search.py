"""The search of a job's study: slot after slot, or several at a time, then its winners on fresh seeds."""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import optuna
from rich.console import Console

from bstune.errors import StudyError
from bstune.job_model import b_crit_interval, known_of, own_arguments
from bstune.output import Output, write_text
from bstune.preflight import Job
from bstune.progress import Progress
from bstune.records import TrialResult, TrialSpec
from bstune.report import format_count, winners
from bstune.search.confirm import contenders, next_confirmation
from bstune.search.study import (
    ask,
    ask_confirmation,
    build_sampler,
    ended_by_themselves,
    fail_one,
    finish_abandoned,
    next_slot,
    results,
    run_trial_of,
    running,
    warn_cut_short,
)
from bstune.workers import Ended, Workers, alone

if TYPE_CHECKING:
    from bstune.tracking import Tracking

MOST_CERTAIN_AFTER = 6  # reached trials, before the search may end by search.precision
CERTAIN_PARTICLES = 400  # of the posterior while the search goes on
CERTAIN_EVERY = 4  # slots between looks at search.precision
ABANDONED_AT = 1.2  # times the best trial's time or steps: a stopped trial that has taken more is not continued
MOST_STATES = 32
MOST_DEATHS = 3  # of the processes that train one slot side by side with others, before the study ends


def run_slots(job: Job, study: optuna.Study, tracking: "Tracking | None", console: Console) -> str:
    """Search, then confirm the winners; return, in words, what ended the search."""
    with Progress(job.plan.trials, job.protocol.target, console) as progress:
        workers = job.runner.workers
        if workers is None:
            ended = _search(job, study, tracking, progress)
        else:
            ended = _search_side_by_side(job, study, tracking, progress, workers)
        while True:  # alone, whoever trained the finalists: their seconds are measured
            done = _write(job, study, progress)
            due = next_confirmation(done, job.plan.objective, job.plan.confirmations, job.plan.finalists)
            if due is None:
                return ended
            asked = ask_confirmation(study, *due, job.plan, job.space, job.runner.stops)
            _run(job, study, asked, done, tracking)


def _search(job: Job, study: optuna.Study, tracking: "Tracking | None", progress: Progress) -> str:
    """Run the search's trials one after another; return, in words, what ended it."""
    while True:
        done = _write(job, study, progress)
        slot = next_slot(study, job.plan)
        if slot is None:
            return _plan_done(job)
        ended = _ended(job, done)
        if ended is not None:
            return ended
        _run(job, study, _ask(job, study, slot), done, tracking)


def _search_side_by_side(
    job: Job,
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
            return alone(trial.future.result(), job.runner.step_time)

        result = run_trial_of(study, asked[trial.spec.number], job.plan.objective, job.protocol.target, train)
        if tracking is not None:
            tracking.send_trial(result)

    with open_workers() as workers:
        whole = False
        try:
            while True:
                done = _write(job, study, progress)
                ended = ended or _spent(job, done)
                settled = _first_slots(_searched(done))
                if ended is None and len(settled) > looked:
                    looked = len(settled)
                    ended = _certain(job, settled)
                while ended is None and workers.free and (slot := next_slot(study, job.plan)) is not None:
                    trial, spec = asked_now = _ask(job, study, slot)
                    asked[trial.number] = asked_now
                    workers.start(spec, job.output, _parent(spec, done))
                if not workers.running:
                    whole = True
                    return ended or _plan_done(job)
                over = workers.wait()
                if over.died is None:
                    store(over)
                    continue
                deaths[over.spec.slot] += 1
                fail_one(study, over.spec, over.died)
                if deaths[over.spec.slot] == MOST_DEATHS:
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
                finish_abandoned(study, job.plan.objective)


def _plan_done(job: Job) -> str:
    return f"the plan is done: search.trials={job.plan.trials}"


def _ask(job: Job, study: optuna.Study, slot: int) -> tuple[optuna.Trial, TrialSpec]:
    sampler = build_sampler(job.config.sampler, job.plan, slot, own_arguments(job, ended_by_themselves(study)))
    return ask(study, slot, job.plan, job.space, sampler, job.runner.stops)


def _ended(job: Job, done: Sequence[TrialResult]) -> str | None:
    """Return which limit or which certainty ends the search, in words; None if none."""
    return _spent(job, done) or _certain(job, _searched(done))


def _spent(job: Job, done: Sequence[TrialResult]) -> str | None:
    spent = job.plan.spent(done)
    return None if spent is None else f"stopped: {spent}"


def _searched(done: Sequence[TrialResult]) -> list[TrialResult]:
    # Of the search alone: a study that is continued while its winners run again, or after it, has ended here before.
    return [trial for trial in done if trial.confirms is None and trial.status != "failed"]


def _certain(job: Job, searched: Sequence[TrialResult]) -> str | None:
    reached = sum(trial.reached for trial in searched)
    if job.plan.precision is None or reached < MOST_CERTAIN_AFTER or len(searched) % CERTAIN_EVERY:
        return None
    low, _, high = b_crit_interval(job, known_of(job, searched, CERTAIN_PARTICLES))
    if high / low >= job.plan.precision:
        return None
    return (
        f"stopped: B_crit lies between {format_count(low)} and {format_count(high)}, "
        f"within search.precision={job.plan.precision:g}"
    )


def _first_slots(searched: Sequence[TrialResult]) -> list[TrialResult]:
    """Return the trials of the first slots, a multiple of ``CERTAIN_EVERY`` of them, that are all done.

    Side by side others end while these do: what is certain must not depend on how many, or on when one looks.
    """
    slots = {trial.slot for trial in searched}
    whole = next(slot for slot in range(len(slots) + 1) if slot not in slots)
    whole -= whole % CERTAIN_EVERY
    return [trial for trial in searched if trial.slot < whole]


def _write(job: Job, study: optuna.Study, progress: Progress) -> list[TrialResult]:
    """Write what has been done, show it, delete the files that nothing needs any more, and return the trials."""
    done = results(study)
    write_trials(job.output, done)
    kept = [*winners(done).values(), *contenders(done, job.plan.objective, job.plan.finalists)]
    now = running(study)
    writing = {spec.number for spec in now}
    job.output.keep_checkpoints({trial.number for trial in kept}, writing)
    read = {spec.parent for spec in now if spec.parent is not None}
    job.output.keep_states(worth_continuing(done, job.plan.objective) | read, writing)
    progress.show(done)
    return done


def worth_continuing(done: Sequence[TrialResult], objective: str) -> set[int]:
    """Return the numbers of the stopped trials that may still be continued: ``MOST_STATES`` of them.

    First come those that may win, then those that only the curve needs, as they have taken more than the best trial:
    seconds for ``time``, steps for ``steps``, both of the two for ``both``. Of either kind the newest are kept. A state
    is as large as the model and its optimizer.
    """
    parents = {trial.parent for trial in done if trial.status != "failed"}  # what was cut short is asked again
    reached = [trial for trial in done if trial.reached and trial.confirms is None]
    fastest = min((time for trial in reached if (time := trial.time_to_target) is not None), default=math.inf)
    fewest = min((trial.steps for trial in reached), default=math.inf)

    def may_win(trial: TrialResult) -> bool:
        by_time = trial.steps * (trial.seconds_per_step or 0.0) < ABANDONED_AT * fastest
        by_steps = trial.steps < ABANDONED_AT * fewest
        return {"time": by_time, "steps": by_steps, "both": by_time or by_steps, "curve": True}[objective]

    ends = [trial for trial in done if trial.status == "budget" and trial.number not in parents]
    last = sorted((t for t in ends if t.confirms is None), key=lambda trial: (may_win(trial), trial.number))
    return {trial.number for trial in last[-MOST_STATES:]}


def _run(
    job: Job,
    study: optuna.Study,
    asked: tuple[optuna.Trial, TrialSpec],
    done: Sequence[TrialResult],
    tracking: "Tracking | None",
) -> None:
    """Run a trial that was asked for, from where the trial that it continues was stopped, if it names one."""

    def train(spec: TrialSpec) -> TrialResult:
        return job.runner.train(spec, job.output, _parent(spec, done))

    result = run_trial_of(study, asked, job.plan.objective, job.protocol.target, train)
    if tracking is not None:
        tracking.send_trial(result)


def _parent(spec: TrialSpec, done: Sequence[TrialResult]) -> TrialResult | None:
    return next((result for result in done if result.number == spec.parent), None)


def write_trials(output: Output, done: Sequence[TrialResult]) -> None:
    """Write ``trials.jsonl``: one record a trial, in order of their numbers."""
    write_text(output.trials, "".join(result.to_json() + "\n" for result in done))
