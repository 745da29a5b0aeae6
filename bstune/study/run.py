"""Runs a prepared study: its plan is printed, the search's trials run, its winners run again, its report is written.

Meanwhile a terminal shows how far it has come in one live line, a notebook in a table; elsewhere
one plain line a trial does.
"""

import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import optuna
from rich.console import Console
from rich.progress import MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar
from rich.table import Column
from rich.text import Text

from bstune.core.errors import StudyError, UserCodeError
from bstune.core.records import Budget, Target, TrialResult, TrialSpec
from bstune.options import StudyOptions
from bstune.recipe import Recipe
from bstune.search.each_batch_size import batch_sizes
from bstune.study.analysis.critical import passing
from bstune.study.at_budget import question_of
from bstune.study.folder_config import text_of_options
from bstune.study.live_page import LivePage
from bstune.study.live_table import live_html
from bstune.study.own_target import goal_of, stored_goal, with_goal
from bstune.study.planning.plan import max_seconds, remaining_seconds, searched
from bstune.study.prepare import PreparedStudy, prepare
from bstune.study.report import Findings, report_study
from bstune.study.search import Paused, Search, go_through
from bstune.study.storage.attributes import (
    ARGUMENTS,
    BUDGET_TIMES,
    DEVICE,
    GOAL,
    OUTPUT,
    STUDY_ID,
)
from bstune.study.storage.lease import Leases
from bstune.study.storage.opening import budget_times_of, check_joined, open_study
from bstune.study.storage.patience import patient
from bstune.study.storage.telling import finish_abandoned, store_unstored
from bstune.study.storage.trials import results
from bstune.system import interruption
from bstune.system.console import format_count, format_number, format_seconds, plural, print_line
from bstune.system.failures import optional
from bstune.system.files import (
    Identity,
    Output,
    check_owner,
    make_inside,
    owned,
    remove_partials,
    write_text,
)
from bstune.system.interruption import Stage
from bstune.system.watchdog import LINE_SECONDS, THREAD_LOOK_SECONDS
from bstune.trial.backend import chooses_batch_sizes, chooses_horizons, stops_trials

MINUTE = 60.0  # seconds between two lines while a long trial trains

# Options that another machine that joins the study gives itself, or has no use for.
MACHINE_OPTIONS = (
    "storage=",
    "study=",
    "output=",
    "mlflow.",
    "debug=",
    "data.root=",
    "search.workers=",
    "device=",
)


def _turns(prepared: PreparedStudy) -> str | None:
    """Return how a sampler that tunes each batch size by itself goes through them; None for another sampler."""
    space, trials = prepared.space, prepared.budget.trials
    if not chooses_batch_sizes(prepared.options):
        return None
    ratio = prepared.options.sampler["ratio"]
    count = len(batch_sizes(space.low, space.high, ratio, space.snap))
    each = f"at each of {plural(count, 'batch size')} in turn"
    if trials < count:
        return (
            f"at the {trials} smallest of {count} batch sizes alone: choose search.trials as a "
            f"multiple of {count}"
        )
    return each if trials % count == 0 else f"{each}, one more at the {trials % count} smallest"


def plan_text(prepared: PreparedStudy, done: Sequence[TrialResult]) -> str:
    """Return the plan in a few lines; ``done`` are the trials that an earlier run of the study finished."""
    options = prepared.options
    budget = prepared.budget
    space = prepared.space
    limits = [(budget.seconds, "training"), (budget.wall_seconds, "wall time")]
    spendable = [
        f"{format_seconds(seconds)} of {what}" for seconds, what in limits if seconds is not None
    ]
    trial_budget = prepared.protocol.budget
    spent = budget_text(trial_budget)
    if not stops_trials(options):
        spread = _turns(prepared) or f"{budget.stratified:.0%} of them spread evenly over log B"
        ends = f", {spread}; each ends at the target or after {spent}"
    elif prepared.backend.stops:
        again = "; winners run again" if budget.replicates and budget.candidates else ""
        may_go_on = ", and may be continued" if prepared.backend.continues else ""
        ends = f"; each ends at the target or once it cannot matter{may_go_on}{again}"
    elif prepared.backend.horizon and chooses_horizons(options):
        ends = (
            "; each ends at the target or with its schedule, at a horizon that the search chooses, "
            f"at most {spent}"
        )
    else:
        ends = f"; each ends at the target or after {spent}"
    rule = options.scaling.rule["_target_"].rpartition(".")[2]
    bounds = (
        f", within {format_number(space.lr_low)} to {format_number(space.lr_high)}"
        if space.lr_low > 0
        else ""
    )
    question = str(prepared.protocol.target)
    if budget.objective == "loss":
        question = question_of(options)
        ends = "; each ends at its budget"
        if prepared.backend.stops:
            ends += ", and waits on the way while another is better"
    lines = [
        f"study {options.study}: {question}, objective {budget.objective}, on "
        f"{prepared.backend.description}",
        f"  batch sizes {format_count(space.low)} to {format_count(space.high)}, learning rates "
        f"within a factor of {format_number(2**space.delta_bound)} of rule {rule} through B = "
        f"{format_count(options.scaling.batch_size)}, lr = "
        f"{format_number(options.scaling.lr)}{bounds}",
        f"  {', '.join([plural(budget.trials, 'trial'), *spendable])}{ends}",
    ]
    if space.tunables:
        ranges = (
            f"{one.name} ({format_number(one.low)} to {format_number(one.high)})"
            for one in space.tunables
        )
        lines.append(f"  searches {', '.join(ranges)} as well")
    remaining = remaining_seconds(budget, done)
    if (
        remaining is not None
    ):  # what the study's own trials suggest; a bound from timed steps before the first
        seconds = format_seconds(remaining / max(1, options.search.workers))
        lines.append(f"  continues after {plural(len(done), 'trial')}; about {seconds} to go")
    elif prepared.backend.knows_step_time:
        most = max_seconds(
            budget, space, prepared.protocol, prepared.backend, options.budget.seconds
        )
        seconds = format_seconds(most)
        lines.append(f"  at most about {seconds} if every trial ran to its budget")
    lines += [f"  {note}" for note in prepared.notes]
    return "\n".join(lines)


def budget_text(budget: Budget) -> str:
    """Say what ends a trial: a budget of one step, or of one example, is of the other alone."""
    steps = f"{plural(budget.steps, 'step')}"
    examples = f"{plural(budget.examples, 'example')}"
    if budget.steps <= 1:
        return examples
    if budget.examples <= 1:
        return steps
    return f"{steps} and {examples}"


WENT_ON = ("reached", "stopped")  # statuses of trials that no error ended


class Progress:
    """A live line on a terminal, a live table in a notebook; one plain line a trial elsewhere."""

    def __init__(self, total: int, target: Target, console: Console) -> None:
        self._total, self._target = total, target
        self.console = console
        self._shown: set[int] | None = None
        self._said: set[str] = set()  # messages of trials
        self.live: Bar | None = None  # shown while it is entered
        self._displayed: Any = None  # in a notebook
        self._spoke = time.monotonic()
        self._waited = 0.0  # seconds without a line, since the last trial ended
        self._points = 0
        if console.is_interactive:
            text = TextColumn(
                "{task.description}", markup=False, table_column=Column(no_wrap=True, ratio=1)
            )
            self.live = Bar(
                MofNCompleteColumn(),
                text,
                TimeElapsedColumn(),
                console=console,
                transient=True,
                expand=True,
            )
            self._task = self.live.add_task("trials", total=total)

    def show(self, done: Sequence[TrialResult], to_go: float | None = None) -> None:
        """Show the finished trials; those of an earlier run are not repeated as lines.

        ``to_go``: the seconds that the rest of the study is predicted to take; None: not known.
        """
        left = None if to_go is None else f"about {format_seconds(to_go)} to go"
        # A live line is cut at its end.
        text = live_text(done, self._target)
        live = text if left is None else f"{left}; {text}"
        rest = "" if left is None else f"; {left}"
        self._spoke = time.monotonic()
        self._waited = 0.0
        self._points = sum(result.resumed_from is None for result in searched(done))
        if self.live is not None:
            points = sum(result.resumed_from is None for result in searched(done))
            self.live.update(self._task, completed=points, description=live)
            return
        if self.console.is_jupyter:
            from IPython.display import display  # there in a notebook alone

            come_to = f"{self._points} of {plural(self._total, 'configuration')}; {live}"
            bundle = {"text/plain": live, "text/html": live_html(done, come_to)}
            if self._displayed is None:
                self._displayed = display(bundle, raw=True, display_id=True)
            else:
                self._displayed.update(bundle, raw=True)
            return
        shown = self._shown = (
            {result.number for result in done} if self._shown is None else self._shown
        )
        points = sum(
            result.number in shown and result.resumed_from is None for result in searched(done)
        )
        # Side by side, trials do not end in order of their numbers.
        new = [result for result in done if result.number not in shown]
        for result in new:
            points += result in searched([result]) and result.resumed_from is None
            place = f"configuration {points} of {self._total}"
            # Past its points a search trains a stopped one again, where it cannot be continued.
            if points > self._total:
                place = "again from its first step"
            line = trial_line(result, self._target, place)
            line += self._message(result) + (rest if result is new[-1] else "")
            print_line(self.console, line)
            shown.add(result.number)

    def _message(self, result: TrialResult) -> str:
        """Return a trial's message as the end of its line.

        What one trial went on without, others go on without as well: it is said once.
        """
        went_on = result.status in WENT_ON
        if result.message is None or (went_on and result.message in self._said):
            return ""
        self._said.add(result.message)
        return f": {result.message}"

    def waiting_line(self, now: float) -> str | None:
        """Say what is waited for, where no line has been printed for long; None: not yet.

        Before the first trial has ended a line comes every ten seconds, then one a minute. A live
        line shows the time by itself.
        """
        silence = now - self._spoke
        limit = LINE_SECONDS if self._points == 0 else MINUTE
        if self.live is not None or self.console.is_jupyter or silence < limit:
            return None
        self._waited += silence
        self._spoke = now
        return (
            f"training, {self._points} of {self._total} configurations tried, "
            f"{format_seconds(self._waited)}"
        )


@contextmanager
def heard(progress: Progress) -> Iterator[None]:
    """Print a line from time to time while trials train."""
    ended = threading.Event()

    def keep_saying() -> None:
        while not ended.wait(THREAD_LOOK_SECONDS):
            line = progress.waiting_line(time.monotonic())
            if line is not None:
                with suppress(OSError, ValueError):  # nobody reads what is printed any more
                    print_line(progress.console, line)

    thread = threading.Thread(target=keep_saying, name="bstune-progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def shown_by(
    progress: Progress, page: LivePage, prepared: PreparedStudy
) -> Callable[[Sequence[TrialResult], float | None], None]:
    """Give what shows the finished trials, and the seconds to go, where a user looks and in the study's page."""

    def show(done: Sequence[TrialResult], to_go: float | None) -> None:
        progress.show(done, to_go)
        # What the first trial comes to is no result before the target is that.
        page.show(prepared, () if prepared.protocol.target.is_open else done, to_go)

    return show


@contextmanager
def left_unless_ended(page: LivePage) -> Iterator[None]:
    """Let the page say that the study was left, where it does not come to its end."""
    try:
        yield
    except BaseException:
        page.leave()
        raise


def live_text(done: Sequence[TrialResult], target: Target | None = None) -> str:
    """Return what the trials have come to, as one line: the last of them, with its metric, and the best.

    ``target`` names the metric; None: it is left out.
    """
    if not done:
        return "no trial yet"
    last, reached = done[-1], [trial for trial in done if trial.reached]
    seen = "" if target is None else _seen(last, target).rstrip(",")
    texts = [f"trial {last.number}: {_place(last)}, {last.status}{seen}"]
    if reached:
        best = min(reached, key=lambda trial: (trial.time_to_target or math.inf, trial.steps))
        taken = (
            plural(best.steps, "step")
            if best.time_to_target is None
            else format_seconds(best.time_to_target)
        )
        texts.insert(0, f"best {taken} at {_place(best)}")
    return "; ".join(texts)


def _place(result: TrialResult) -> str:
    return f"B {result.batch_size}, lr {format_number(result.lr)}"


def _seen(result: TrialResult, target: Target) -> str:
    """Write the last value of the metric, however the trial ended; empty where none was finite."""
    last = next((value for _, value in reversed(result.history) if value is not None), None)
    if last is None:
        return ""
    seen = f" at {target.metric} {format_number(last)}"
    best = result.best_value(target.mode)
    if target.is_open and best is not None and best != last:
        seen += f", best {format_number(best)},"
    return seen


def trial_line(result: TrialResult, target: Target, place: str = "") -> str:
    """Write one trial as a plain line, without its message.

    Args:
        result: of the trial.
        target: whose metric is named. Where no value meets it, the best one counts, and is named too.
        place: which of the search's points it is, if it is one.
    """
    if result.replicate_of is not None:
        place = f"repeats {result.replicate_of} on a fresh seed"
    elif result.resumed_from is not None:
        place = f"continues {result.resumed_from}"
    seen = _seen(result, target)
    steps = plural(result.steps, "step") + (
        f" of {result.horizon}" if result.horizon is not None else ""
    )
    time = "" if result.time_to_target is None else f", {format_seconds(result.time_to_target)}"
    values = "".join(
        f"  {name} {format_number(value)}" for name, value in result.hyperparameters.items()
    )
    parts = [
        f"trial {result.number}",
        place,
        f"B {result.batch_size}  lr {format_number(result.lr)}{values}",
    ]
    parts.append(f"{result.status}{seen} after {steps}{time}")
    return "  ".join(part for part in parts if part)


def run(
    options: StudyOptions,
    recipe: Recipe | None,
    arguments: Sequence[str] | None,
    console: Console,
    elapsed: Callable[[], float] | None = None,
) -> Findings | TrialResult:
    """Prepare and run the study, or the one trial, that the options state.

    ``arguments`` of the command line compose the options again; None: none do, as the recipe is of Python objects.
    ``elapsed`` says how many seconds ago the command began; None: now.
    """
    interruption.enter(Stage.PREPARATION)
    # One line on a terminal; a dumb one shows no live line, and gets plain ones.
    with console.status("preparing") if console.is_interactive else nullcontext() as status:
        say = partial(print_line, console)
        prepared = prepare(
            options,
            recipe,
            say if status is None else lambda line: status.update(Text(line)),
            elapsed=elapsed,
        )
    try:
        if prepared.trial is None:
            return run_study(prepared, arguments, console)
        return run_single(prepared, prepared.trial, console)
    finally:
        prepared.close()


def run_study(
    prepared: PreparedStudy, arguments: Sequence[str] | None, console: Console
) -> Findings:
    """Run or continue the study, write its report and return its findings; ``arguments`` compose its config again."""
    return go_through(paused_study(prepared, arguments, console))


def paused_study(
    prepared: PreparedStudy, arguments: Sequence[str] | None, console: Console
) -> Paused[Findings]:
    """Do what :func:`run_study` does, with a pause before each trial is waited for."""
    options = prepared.options
    objective = prepared.budget.objective
    files = prepared.files
    again = [one for one in arguments or () if not one.lstrip("+~").startswith(MACHINE_OPTIONS)]
    kind = prepared.backend.device_kind
    study = open_study(
        options.study,
        options.storage,
        objective,
        prepared.frozen_settings,
        files.root,
        kind,
        again,
        maximizes=objective == "loss" and prepared.protocol.target.mode == "max",
    )
    identity = Identity.of(options.study, options.storage, study.user_attrs[STUDY_ID])
    leases = Leases(study, "owner", options.search.lease_seconds)
    say, missing = partial(print_line, console), list[str]()
    with leases.acquired(say), owned(files, identity):
        if again and again != study.user_attrs[ARGUMENTS]:
            study.set_user_attr(ARGUMENTS, again)  # of which a worker joins what goes on
        remove_partials(files.root)
        store_unstored(study, files)
        living = leases.living()
        finish_abandoned(study, objective, lambda worker: worker not in living)
        prepared.backend.look_back(results(study), files)
        say(plan_text(prepared, results(study)))
        make_inside(files.checkpoints)
        write_text(files.config, text_of_options(options))
        if prepared.survey is not None:
            # torch takes seconds to import: replays have no survey
            from bstune.hardware.report import write_survey

            write_survey(prepared.survey, files, missing)
        if options.budget.seconds is not None:
            if BUDGET_TIMES not in study.user_attrs:
                times = [list(pair) for pair in prepared.measured_budget_times()]
                patient(study.set_user_attr)(BUDGET_TIMES, times)
            prepared = replace(prepared, budget_times=budget_times_of(study))
        page = LivePage(files.report, prepared.elapsed, say)
        if prepared.sets_target:
            prepared = yield from _with_own_target(prepared, study, leases, console, page)
            write_text(files.config, text_of_options(prepared.options))
        tracking = None
        if options.mlflow.enabled:
            from bstune.tracking.runs import open_tracking  # mlflow takes seconds to import

            with optional("MLflow", missing):
                tracking = open_tracking(prepared, study)
        progress = Progress(prepared.budget.trials, prepared.protocol.target, console)
        interruption.enter(Stage.SEARCH)
        with left_unless_ended(page):
            show = shown_by(progress, page, prepared)
            with progress.live or nullcontext(), heard(progress):
                search = Search(prepared, study, leases, tracking, show)
                end = yield from search.paused()
            interruption.enter(Stage.REPORT)
            return report_study(
                prepared, study, tracking, end, arguments, console, search.sampled, missing
            )


def _with_own_target(
    prepared: PreparedStudy,
    study: optuna.Study,
    leases: Leases,
    console: Console,
    page: LivePage,
) -> Paused[PreparedStudy]:
    """Let the study's first trial set its target, unless it has, and give the study with it."""
    metric = prepared.protocol.target
    bounds = prepared.options.workload.target.bounds

    def met_target(record: TrialResult) -> TrialResult:
        """Store the goal, from which on a killed process loses nothing of it, and end the record there."""
        goal = goal_of(record, metric, bounds)
        patient(study.set_user_attr)(GOAL, goal)
        return passing(record, replace(metric, value=goal))

    if stored_goal(study) is None:
        interruption.enter(Stage.SEARCH)
        progress = Progress(prepared.budget.trials, metric, console)
        with progress.live or nullcontext(), heard(progress), left_unless_ended(page):
            search = Search(prepared, study, leases, None, shown_by(progress, page, prepared))
            yield from search.paused_baseline(met_target)
    goal = stored_goal(study)
    assert goal is not None  # noqa: S101 (set just now)
    ended = [trial for trial in results(study) if trial.trial_index == 0]
    prepared = with_goal(prepared, goal, ended[-1] if ended else None)
    after = "" if prepared.goal is None else f" {prepared.goal.after}"
    print_line(
        console,
        f"the target is what your own configuration came to{after}: {prepared.protocol.target}",
    )
    return prepared


def run_worker(prepared: PreparedStudy, study: optuna.Study, console: Console) -> int:
    """Run trials of a study that another process owns until there is none left to run; return how many."""
    check_joined(study, prepared.frozen_settings)
    shared = Output(Path(study.user_attrs[OUTPUT]))
    identity = Identity.of(
        prepared.options.study, prepared.options.storage, study.user_attrs[STUDY_ID]
    )
    if (
        shared.identity.exists()
    ):  # this machine sees the owner's folder: states and checkpoints go there
        check_owner(shared, identity)
        prepared = replace(prepared, files=shared)
    if prepared.sets_target:
        goal = stored_goal(study)
        if goal is None:
            raise StudyError(
                f"the study {study.study_name!r} has its target from its first trial, which has "
                "not ended yet: join it then"
            )
        prepared = with_goal(prepared, goal, None)
    prepared = replace(prepared, budget_times=budget_times_of(study))
    leases = Leases(study, "worker", prepared.options.search.lease_seconds)
    with leases.acquired(), owned(prepared.files, identity):
        store_unstored(study, prepared.files)
        lives = [lease.name for lease in leases.others() if lease.role == "owner"]
        joins = f"joins study {study.study_name}, run by {', '.join(lives) or 'nobody now'}"
        print_line(console, joins)
        if prepared.backend.device_kind != study.user_attrs[DEVICE]:
            console.print(
                f"its seconds are those of {study.user_attrs[DEVICE]}: trials on "
                f"{prepared.backend.device_kind} give steps only",
                soft_wrap=True,
            )
        make_inside(prepared.files.checkpoints)
        progress = Progress(prepared.budget.trials, prepared.protocol.target, console)
        interruption.enter(Stage.SEARCH)
        with progress.live or nullcontext(), heard(progress):
            search = Search(prepared, study, leases, None, progress.show)
            end = search.run()
    console.print(f"{end.sentence}; {plural(search.ran, 'trial')} run here")
    return search.ran


def run_single(prepared: PreparedStudy, spec: TrialSpec, console: Console) -> TrialResult:
    """Run one trial by itself, and write its record and what else it leaves."""
    files = prepared.files.single_trial(spec.batch_size, spec.lr, spec.seed)
    identity = Identity.of(prepared.options.study, prepared.options.storage)
    with (
        owned(prepared.files, identity),
        owned(files, identity),
    ):  # the study's own, which may begin later
        make_inside(files.checkpoints)
        for folder in (files.root, files.checkpoints):
            remove_partials(folder)
        with prepared.open_runner(1) as runner:
            interruption.enter(Stage.SINGLE)
            runner.start(spec, files, None)
            finished = runner.wait()
        result = finished.result()
        write_text(files.record, result.to_json() + "\n")
        write_text(files.config, text_of_options(prepared.options))
    if result.status == "failed":
        kind = UserCodeError if finished.frames else StudyError
        raise kind(
            f"the trial failed with {result.message}\n{finished.frames}record {files.record}"
        )
    message = "" if result.message is None else f": {result.message}"
    console.print(trial_line(result, prepared.protocol.target) + message, soft_wrap=True)
    if result.reached:
        for name, value in prepared.backend.test(spec, files).items():
            console.print(f"{name} {value:.4g}")
    console.print(f"record {files.record}", soft_wrap=True)
    return result
