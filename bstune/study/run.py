"""Runs a prepared study: its plan is printed, the search's trials run, its report is written.

The winners run again before it. Meanwhile :mod:`bstune.study.showing.progress` shows how far it has
come.
"""

import shlex
from collections.abc import Callable, Iterator, Sequence
from contextlib import chdir, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import optuna
from rich.console import Console
from rich.status import Status
from rich.text import Text

from bstune.core.errors import StudyError, UserCodeError
from bstune.core.option_names import in_hydra, in_python
from bstune.core.records import TrialResult, TrialSpec
from bstune.options import GivenOptions, StudyOptions
from bstune.recipe import Recipe
from bstune.study.analysis.critical import ended_where_met
from bstune.study.early_checks import check_time_left, check_unchanged
from bstune.study.folder_config import text_of_options
from bstune.study.own_target import (
    OwnRun,
    goal_of,
    start_of,
    stored_goal,
    with_goal,
    without_start,
)
from bstune.study.planning.plan_text import plan_text
from bstune.study.planning.wall import WallTime
from bstune.study.prepare import prepare
from bstune.study.prepared import PreparedStudy
from bstune.study.report import Findings, report_study
from bstune.study.search import Paused, Search, run_through
from bstune.study.searching.finished_trial import check_any_trial, check_baseline
from bstune.study.searching.limits import advised_for_baseline, planned_baseline_steps
from bstune.study.showing.live_page import LivePage
from bstune.study.showing.outcome import outcome_line
from bstune.study.showing.progress import (
    HowFar,
    Progress,
    lines_while_waiting,
    trial_line,
)
from bstune.study.storage.attributes import (
    ARGUMENTS,
    BUDGET_TIMES,
    DEVICE_KIND,
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
from bstune.system.console import plural, print_line
from bstune.system.failures import optional
from bstune.system.files import (
    Identity,
    Output,
    check_owner,
    is_own,
    make_inside,
    owned,
    remove_partials,
    write_text,
)
from bstune.system.interruption import Stage
from bstune.system.watchdog import waiting_for, watching

if TYPE_CHECKING:
    from bstune.tracking.runs import Tracking

# What a study waits for before its first trial.
OPENING_MLFLOW = "MLflow to open, which would slow the first trial down"
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

# A loop's metric before training is known only where it is reported.
MET_AT_FIRST = (
    "that run met it at its first evaluation, and untrained weights may, too: trial.report(0, "
    "value) before the first step lets bstune refuse such a target"
)


def make_show(
    progress: Progress, page: LivePage, prepared: PreparedStudy
) -> Callable[[Sequence[TrialResult], float | None], None]:
    """Make the function that shows the finished trials, as progress and on the study's page.

    It takes the trials and the predicted seconds until the study's end, None where not known.
    """

    def show(done: Sequence[TrialResult], seconds_to_go: float | None) -> None:
        progress.show(done, seconds_to_go)
        # The page has no results until the first trial has set the target.
        results_so_far = done
        if prepared.protocol.target.is_open:
            results_so_far = ()
        page.show(prepared, results_so_far, seconds_to_go)

    return show


def make_begin(progress: Progress, page: LivePage) -> Callable[[TrialSpec, HowFar], None]:
    """Make the function to call before each trial begins.

    It brings the page up to date, then tells the progress.
    """

    def begin(spec: TrialSpec, how_far: HowFar) -> None:
        page.catch_up()
        progress.begin(spec, how_far)

    return begin


@contextmanager
def left_unless_ended(page: LivePage) -> Iterator[None]:
    """Where the body raises, let the page say that the study was left before its end."""
    try:
        yield
    except BaseException:
        page.leave()
        raise


def run(
    options: StudyOptions,
    recipe: Recipe | None,
    arguments: Sequence[str] | None,
    console: Console,
    elapsed: Callable[[], float] | None = None,
) -> Findings | TrialResult:
    """Prepare and run the study, or the one trial, that the options state.

    Args:
        options: of the study.
        recipe: makes data and modules; None for recorded runs.
        arguments: the command line that composed the options; None for a study of Python objects.
        console: where it is shown.
        elapsed: says how many seconds ago the command began; None: it begins now.

    Returns:
        The study's findings, or the record of the one trial.
    """
    interruption.enter_stage(Stage.PREPARATION)
    # Opening the study refuses changed options. Where a module is trained, that comes after minutes
    # of short trials and measurements, so that options are compared here first.
    if recipe is not None:
        check_unchanged(options)
        check_time_left(options)
    # A dumb terminal shows no live line, and gets plain ones.
    if console.is_interactive:
        with console.status("preparing") as status:
            update = partial(_set_status, status)
            log = _in_users_language(options, update)
            prepared = prepare(options, recipe, log, elapsed=elapsed)
    else:
        say = _in_users_language(options, partial(print_line, console))
        prepared = prepare(options, recipe, say, elapsed=elapsed)
    try:
        if prepared.trial is None:
            return run_study(prepared, arguments, console)
        return run_single(prepared, prepared.trial, console)
    finally:
        prepared.close()


def _progress_of(prepared: PreparedStudy, console: Console) -> Progress:
    """Make what shows a study's trials on the console."""
    return Progress(prepared.budget.trials, prepared.protocol.target, prepared.last_step, console)


def _in_users_language(
    options: StudyOptions, show: Callable[[str], None], *, in_sweep: bool = False
) -> Callable[[str], None]:
    """Wrap ``show``, which prints a line, so that options are spelled as the user sets them.

    For a study of the command line it is ``show`` itself. ``in_sweep``: whether the study is a
    sweep of Hydra's; otherwise its options were set in a Python call.
    """
    if not isinstance(options, GivenOptions):
        return show
    spelled = in_hydra if in_sweep else in_python

    def show_as_set(line: str) -> None:
        show(spelled(line))

    return show_as_set


def _set_status(status: Status, line: str) -> None:
    """Show a line in place of the one before. Brackets in it are text, not rich's markup."""
    status.update(Text(line))


def run_study(
    prepared: PreparedStudy, arguments: Sequence[str] | None, console: Console
) -> Findings:
    """Run or continue the study, write its report and give its findings.

    ``arguments``: the command line that composed the options; None for a study of Python objects.
    """
    return run_through(paused_study(prepared, arguments, console))


def paused_study(
    prepared: PreparedStudy, arguments: Sequence[str] | None, console: Console
) -> Paused[Findings]:
    """Run or continue the study and write its report, as a generator that gives the findings.

    It pauses before it waits for a trial, which a loop of the user's may train meanwhile.

    ``arguments``: the command line that composed the options; None for a study of Python objects.
    """
    options = prepared.options
    files = prepared.files
    workers_arguments = arguments_to_join(options, arguments or ())
    in_sweep = prepared.backend.job_command is not None
    say = _in_users_language(options, partial(print_line, console), in_sweep=in_sweep)
    # Where a storage, a disk or MLflow is slow to answer, a line says so.
    with watching(say, seconds=None), waiting_for("the storage"):
        study = _opened_study(prepared, workers_arguments)
    identity = Identity.of(options.study, options.storage, study.user_attrs[STUDY_ID])
    join = worker_command(options, arguments or ())
    leases = Leases(study, "owner", options.search.lease_seconds, join=join)
    # Lines on parts that fail and that the study can do without, which the report shows.
    missing = list[str]()
    with leases.acquired(say), owned(files, identity):
        with watching(say, seconds=None) as watched_say, waiting_for("the study's files"):
            _take_over(prepared, study, leases, workers_arguments)
            watched_say(plan_text(prepared, results(study)))
            _write_first_files(prepared, missing)
            prepared = _with_budget_times(prepared, study)
        page = LivePage(files.report, prepared.elapsed, say)
        wall = WallTime(
            study,
            prepared.budget,
            prepared.elapsed,
            owner=True,
            surveyed=prepared.survey_seconds,
        )
        if prepared.sets_target:
            prepared = yield from _with_own_target(prepared, study, leases, wall, console, page)
            write_text(files.config, text_of_options(prepared.options))
        # MLflow opens before the search: its imports and tables would add to a trial's seconds.
        with watching(say, seconds=None), waiting_for(OPENING_MLFLOW):
            tracking = _opened_tracking(prepared, study, missing)
        progress = _progress_of(prepared, console)
        # From here on an interruption is told as one of a search.
        interruption.enter_stage(Stage.SEARCH)
        with left_unless_ended(page):
            show = make_show(progress, page, prepared)
            with progress.live or nullcontext(), lines_while_waiting(progress):
                begin = make_begin(progress, page)
                search = Search(prepared, study, leases, wall, tracking, show, begin)
                end = yield from search.paused()
            interruption.enter_stage(Stage.REPORT)
            findings = report_study(
                prepared, study, tracking, end, arguments, console, search.sampled, missing
            )
    check_baseline(findings.result, search.failed_baseline)
    check_any_trial(findings.result)
    return findings


def _opened_study(prepared: PreparedStudy, workers_arguments: list[str]) -> optuna.Study:
    """Open the study in its storage, or create it there.

    ``workers_arguments``: from which a worker that joins composes the study.
    """
    objective = prepared.budget.objective
    return open_study(
        prepared.options.study,
        prepared.options.storage,
        objective,
        prepared.frozen_settings,
        prepared.files.root,
        prepared.backend.device_kind,
        workers_arguments,
        maximizes=objective == "loss" and prepared.protocol.target.mode == "max",
    )


def _write_first_files(prepared: PreparedStudy, missing: list[str]) -> None:
    """Write the files that a study has before its first trial: its config and its survey.

    ``missing`` gets a line on what of the survey could not be written.
    """
    make_inside(prepared.files.checkpoints)
    write_text(prepared.files.config, text_of_options(prepared.options))
    if prepared.survey is not None:
        # torch takes seconds to import: replays have no survey.
        from bstune.hardware.report import write_survey

        write_survey(prepared.survey, prepared.files, missing)


def arguments_to_join(options: StudyOptions, arguments: Sequence[str]) -> list[str]:
    """Give the arguments that a machine which joins the study composes, before its own.

    They are those of the study's command, without options of its own machine, such as a device.

    Args:
        options: of the study. A budget that was shortened to the time that this command has left is
            given as it is: the other machine has less time left, and other seconds of a step.
        arguments: of the command; empty for a study of Python objects, which no machine joins.
    """
    of_study = list[str]()
    for argument in arguments:
        # Hydra's + and ~ before an option add and delete it.
        if not argument.lstrip("+~").startswith(MACHINE_OPTIONS):
            of_study.append(argument)
    stated = options.workload.budget
    budget = options.budget.budget
    # Only a budget that bstune has assumed is ever shortened, never one that the user has stated.
    may_be_shortened = stated.assumed_epoch is not None
    if of_study and may_be_shortened and budget != stated.budget:
        of_study += [f"budget.steps={budget.steps}", f"budget.examples={budget.examples}"]
    return of_study


def worker_command(options: StudyOptions, arguments: Sequence[str]) -> str | None:
    """Write the command by which a worker joins the study; None where none can.

    ``arguments``: of the study's own command; empty for one that no command line composes.
    """
    if not arguments:
        return None
    storage = f"storage={options.storage}"
    # The option as it was typed: ``${oc.env:...}`` keeps a password out of the line.
    for argument in arguments:
        if argument.startswith("storage="):
            storage = argument
    return shlex.join(["bstune", "worker", storage, f"study={options.study}"])


def _take_over(
    prepared: PreparedStudy, study: optuna.Study, leases: Leases, workers_arguments: list[str]
) -> None:
    """Tidy up after an earlier run of the study, which may have been killed.

    Files that were half written are deleted. Records that the storage did not take are stored.
    Trials whose processes are gone are ended. The backend learns from the trials that have ended.
    """
    # A worker that joins from now on composes the study from these.
    if workers_arguments and workers_arguments != study.user_attrs[ARGUMENTS]:
        study.set_user_attr(ARGUMENTS, workers_arguments)
    remove_partials(prepared.files.root)
    # Records that the storage did not take come first: they are among the results below.
    store_unstored(study, prepared.files)
    living = leases.living()
    finish_abandoned(study, prepared.budget.objective, lambda worker: worker not in living)
    prepared.backend.look_back(results(study), prepared.files)


def _with_budget_times(prepared: PreparedStudy, study: optuna.Study) -> PreparedStudy:
    """Give the study with the seconds of a step that turn its budget of seconds into steps.

    A study with another budget is given back as it is. The first run stores the seconds: a later
    survey must not change what is compared.
    """
    if prepared.options.budget.seconds is None:
        return prepared
    if BUDGET_TIMES not in study.user_attrs:
        times = [list(pair) for pair in prepared.measured_budget_times()]
        patient(study.set_user_attr)(BUDGET_TIMES, times)
    return replace(prepared, budget_times=budget_times_of(study))


def _opened_tracking(
    prepared: PreparedStudy, study: optuna.Study, missing: list[str]
) -> "Tracking | None":
    """Open the study's run in MLflow; None where MLflow is off.

    None, too, where it cannot be opened: ``missing`` then gets a line that says why.
    """
    tracking: Tracking | None = None
    if prepared.options.mlflow.enabled:
        # mlflow takes seconds to import.
        from bstune.tracking.runs import open_tracking

        with optional("MLflow", missing):
            tracking = open_tracking(prepared, study)
    return tracking


def _with_own_target(
    prepared: PreparedStudy,
    study: optuna.Study,
    leases: Leases,
    wall: WallTime,
    console: Console,
    page: LivePage,
) -> Paused[PreparedStudy]:
    """Give the study with its target, which its first trial sets.

    That trial runs here unless it has run before.
    """
    metric = prepared.protocol.target
    bounds = prepared.options.workload.target.bounds
    is_loop = prepared.recipe is None and isinstance(prepared.options, GivenOptions)
    doubts = list[str]()

    def set_target(record: TrialResult) -> TrialResult:
        """Store the goal that a record sets, and give the record as if it had ended at the goal.

        The goal is stored first, so that no record is stored without the goal that it sets.
        """
        run = OwnRun(
            planned_steps=planned_baseline_steps(prepared),
            wall_seconds=prepared.budget.wall_seconds,
            advised_seconds=advised_for_baseline(prepared, wall),
            last_step=prepared.last_step(record.batch_size),
        )
        goal = goal_of(record, metric, bounds, run)
        patient(study.set_user_attr)(GOAL, goal)
        # This trial's history may begin at step 0, with what untrained weights come to. The study's
        # other records begin after the first step, and so does the one that is stored.
        trained_record = without_start(record)
        revised = ended_where_met(trained_record, replace(metric, value=goal))
        met_at_first_evaluation = revised.reached and revised.steps_low == 0
        if is_loop and met_at_first_evaluation and start_of(record) is None:
            doubts.append(MET_AT_FIRST)
        return revised

    if stored_goal(study) is None:
        # From here on an interruption is told as one of a search.
        interruption.enter_stage(Stage.SEARCH)
        progress = _progress_of(prepared, console)
        with progress.live or nullcontext(), lines_while_waiting(progress), left_unless_ended(page):
            show = make_show(progress, page, prepared)
            begin = make_begin(progress, page)
            search = Search(
                prepared, study, leases, wall, tracking=None, show=show, before_trial=begin
            )
            yield from search.paused_baseline(set_target)
    goal = stored_goal(study)
    assert goal is not None  # noqa: S101 (the first trial has set it)
    ended = [trial for trial in results(study) if trial.trial_index == 0]
    prepared = with_goal(prepared, goal, ended[-1] if ended else None)
    came_to = "the target is what your own configuration came to"
    if prepared.goal is not None:
        came_to += f" {prepared.goal.after}"
    # The target is eased, so that a second run of the same configuration would reach it.
    easier = "made easier by what chance is worth"
    print_line(console, f"{came_to}, {easier}: {prepared.protocol.target}")
    for doubt in doubts:
        print_line(console, doubt)
    return prepared


def run_worker(prepared: PreparedStudy, study: optuna.Study, console: Console) -> int:
    """Run trials of a study that another process owns until there is none left to run.

    Returns:
        How many ran here.
    """
    check_joined(study, prepared.frozen_settings)
    shared = Output(Path(study.user_attrs[OUTPUT]))
    identity = Identity.of(
        prepared.options.study, prepared.options.storage, study.user_attrs[STUDY_ID]
    )
    # Where this machine sees the owner's folder, states and checkpoints go there.
    if shared.identity.exists():
        check_owner(shared, identity)
        prepared = replace(prepared, files=shared)
    if prepared.sets_target:
        goal = stored_goal(study)
        if goal is None:
            raise StudyError(
                f"the study {study.study_name!r} has its target from its first trial, which has "
                "not ended yet: join it afterwards"
            )
        prepared = with_goal(prepared, goal, first=None)
    # A budget of seconds is as many steps here as for the owner.
    prepared = replace(prepared, budget_times=budget_times_of(study))
    leases = Leases(study, "worker", prepared.options.search.lease_seconds)
    with leases.acquired(), owned(prepared.files, identity):
        store_unstored(study, prepared.files)
        owners = [lease.name for lease in leases.others() if lease.role == "owner"]
        run_by = ", ".join(owners) or "nobody now"
        print_line(console, f"joins study {study.study_name}, run by {run_by}")
        device = prepared.backend.device_kind
        if device != study.user_attrs[DEVICE_KIND]:
            note = f"its seconds are those of {study.user_attrs[DEVICE_KIND]}"
            note += f": trials on {device} give steps only"
            # Brackets in names and messages are text, not rich's markup.
            console.print(note, soft_wrap=True, markup=False)
        make_inside(prepared.files.checkpoints)
        progress = _progress_of(prepared, console)
        # From here on an interruption is told as one of a search.
        interruption.enter_stage(Stage.SEARCH)
        with progress.live or nullcontext(), lines_while_waiting(progress):
            wall = WallTime(study, prepared.budget, prepared.elapsed, owner=False)
            search = Search(
                prepared,
                study,
                leases,
                wall,
                tracking=None,
                show=progress.show,
                before_trial=progress.begin,
            )
            end = search.run()
    console.print(f"{end.sentence}; {plural(search.ran, 'trial')} run here", markup=False)
    return search.ran


def run_single(prepared: PreparedStudy, spec: TrialSpec, console: Console) -> TrialResult:
    """Run one trial without a study: write its record and config, print how it ended.

    It prints where the weights that met the target lie, and their metrics on the test set.

    Raises:
        UserCodeError: where it failed in the user's code.
        StudyError: where it failed elsewhere.
    """
    files = prepared.files.single_trial(spec.batch_size, spec.lr, spec.seed)
    identity = Identity.of(prepared.options.study, prepared.options.storage)
    # The study's own folder is taken as well: the trial's lies in it, and the study may come later.
    with owned(prepared.files, identity), owned(files, identity):
        make_inside(files.checkpoints)
        for folder in (files.root, files.checkpoints):
            remove_partials(folder)
        with prepared.open_runner(1) as runner:
            # From here on an interruption is told as one of a single trial.
            interruption.enter_stage(Stage.SINGLE)
            runner.start(spec, files, resumed_from=None)
            finished = runner.wait()
        result = finished.result()
        write_text(files.record, result.to_json() + "\n")
        write_text(files.config, text_of_options(prepared.options))
    if result.status == "failed":
        # Where there are frames, the user's code has raised the error.
        kind = UserCodeError if finished.frames else StudyError
        raise kind(
            f"the trial failed with {result.message}\n{finished.frames}record {files.record}"
        )
    line = trial_line(result, prepared.protocol.target, prepared.last_step)
    if result.message is not None:
        line += f": {result.message}"
    # Brackets in messages and paths are text, not rich's markup.
    console.print(line, soft_wrap=True, markup=False)
    # Of a trial that reached the target, the line above says so already.
    if result.status == "stopped" and prepared.budget.objective != "loss":
        last = result.history[-1][1] if result.history else None
        outcome = outcome_line(prepared.protocol.target, last, result.steps)
        console.print(outcome, soft_wrap=True, markup=False)
    failures = list[str]()
    if result.reached:
        # The trial counts even if its test fails. The user's code may change the working directory:
        # chdir goes back to it.
        with optional("no test metrics", failures), chdir("."):
            for name, value in prepared.backend.test(spec, files).items():
                console.print(f"{name} {value:.4g}", markup=False)
    for failure in failures:
        console.print(f"NOTE {failure}", soft_wrap=True, markup=False)
    console.print(f"record {files.record}", soft_wrap=True, markup=False)
    weights = files.checkpoint(spec.number)
    if is_own(weights):
        console.print(f"weights {weights}", soft_wrap=True, markup=False)
    return result
