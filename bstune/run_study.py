"""A study from its begin to its files: search, new seeds, answer, MLflow.

:func:`run_study` runs :func:`study_trials`, which prepares the study, trains until the answer is
settled, and writes it. The trials come from :mod:`bstune.study.loop`.
"""

import importlib
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from threading import Thread
from typing import Any

from bstune.core.records import Record
from bstune.hardware.survey import Survey
from bstune.options import Options
from bstune.recipe.found import fill_by_stored
from bstune.recipe.recipe import Recipe
from bstune.report.answer import render
from bstune.report.hardware import survey_line
from bstune.result import Result
from bstune.study.advice import plan_with_more_seeds
from bstune.study.analysis import StudyFacts, analyse
from bstune.study.begin import Begun, begin, further_workers
from bstune.study.deadline import Deadline, deadline_after_start
from bstune.study.folder import TrialsFile, config_text, read_result, write_asked, write_study
from bstune.study.loop import AskedTrial, Crew, HangWatch, Observer, asked_batches, train_here
from bstune.study.machine import (
    Machine,
    kept_or_new_survey,
    machine_of,
    survey_seconds,
    why_no_survey,
)
from bstune.study.make_plan import (
    fixed_options,
    fixed_place,
    plan_of,
    plan_text,
    what_joining_needs,
    with_threads,
)
from bstune.study.plan import Plan
from bstune.study.prepare import OfProject, prepare_project
from bstune.study.progress import Progress, Stopwatch
from bstune.study.result import StudyResult
from bstune.study.storage import StudyStorage, database_errors, open_study
from bstune.study.workload import Workload
from bstune.system.files import StudyFolder, whole_file, write_text
from bstune.system.interruption import interruptible
from bstune.system.ticker import Ticker, say
from bstune.tracking.mlflow import log_study
from bstune.trial.trial import Trial
from bstune.trial.worker import AnyWorker

# What :func:`_write_and_log` takes 2 CPU seconds to import.
OF_ANSWER = ("bstune.report.figure", "bstune.report.page", "matplotlib.backends.backend_agg")
# The answer in short, as Optuna's study has it.
SHORT: Any = {"verdict": True, "best": {"batch_size", "lr", "values"}, "speedup": {"value"}}
OF_MLFLOW = "mlflow.store.tracking.sqlalchemy_store"


def run_study(options: Options, workload: Workload, begun: Begun | None = None) -> Result:
    """Run a study to its end, or go on with it: search, new seeds, answer, files, MLflow.

    Args:
        options: of the study.
        workload: that is tuned.
        begun: what :func:`bstune.study.begin.begin` gives; None: the study begins here.

    Raises:
        BstuneError: for what cannot be used; Interrupted by Ctrl-C.
    """
    with interruptible():
        try:
            next(study_trials(options, workload, begun))
        except StopIteration as over:
            result: Result = over.value
            return result
    raise AssertionError("only a workload without train yields its trials")


def study_trials(
    options: Options,
    workload: Workload,
    begun: Begun | None = None,
    jobs: int = 1,
    joins: bool = False,
) -> Generator[list[AskedTrial], None, Result | None]:
    """Run a study step by step; trials that nothing here trains are yielded.

    :func:`run_study` calls it; so do ``bstune worker``, which joins a study, and
    :func:`bstune.own_loop.begin_driven_study`, for loops and Hydra jobs that train what is yielded.

    Args:
        options: of the study.
        workload: that is tuned; where its ``train`` is None, whoever drives this sets the record
            of each trial that it is given.
        begun: what :func:`bstune.study.begin.begin` gives; None: the study begins here.
        jobs: the most trials that are yielded at once; a workload that trains has ``workers``.
        joins: train what another process has planned, which gives the answer; None is returned.
    """
    folder = StudyFolder(Path(options.output))
    name = options.study_name
    failed = "failed; the same command goes on with what is stored"
    with database_errors(options.storage, failed), ExitStack() as stack:
        begun = begun or begin(options, trains=workload.recipe is not None)
        stack.callback(begun.close)
        ticker, stopwatch = begun.ticker, Stopwatch(begun.at)
        storage = stack.enter_context(open_study(options.storage, name, folder))
        # A study that was begun goes on with what was found before.
        options = with_threads(fill_by_stored(options, storage.setting))
        storage.check({**fixed_options(options), **workload.settings})
        options, project, machine, workload, deadline = _prepare_study(
            options, workload, begun, storage.setting, stopwatch
        )
        table = workload.table
        plan = plan_of(
            options,
            machine,
            deadline,
            step_time=None if table is None else table.step_time,
            resumable=lambda number: (
                table is not None or (project.resumes and folder.checkpoint(number).exists())
            ),
        )
        place = fixed_place(machine)
        settings = {**fixed_options(options), **workload.settings}
        if not joins:
            settings |= place
        elif place != {name: storage.setting(name) for name in place}:
            # Another kind of machine gives steps alone.
            storage.keeps_step_times = False
            plan = replace(plan, timings=())
        storage.begin(plan.space, plan.question, {**settings, **project.model_dump(mode="json")})
        say(plan_text(workload.name, options, plan, machine))
        config = config_text(options, workload, project)
        if not joins:
            storage.settle(by_proxy=True)
            storage.share(what_joining_needs(options, machine, workload.commands, begun.at))
            write_asked(folder, config, machine)
        stopwatch.plan = plan
        progress = Progress(ticker, plan, storage.records())
        train = workload.train
        train_some = None
        if train is not None:
            workers = _training_workers(stack, begun, options)
            jobs = max(len(workers), 1)
            watch = HangWatch(options.wall_seconds, options.trial_seconds)
            train_some = (
                Crew(workers, train, watch, progress.trial_begins).train
                if workers
                else partial(_train_in_turn, train)
            )
        observers = (stopwatch, progress, TrialsFile(folder))
        if joins:
            yield from _train_planned(plan, storage, folder, train_some, observers, jobs)
            return None
        if options.workers and begun.worker is not None:
            # This process has little to do while the worker trains.
            modules = OF_ANSWER if options.mlflow.uri is None else (*OF_ANSWER, OF_MLFLOW)
            Thread(target=_import_all, args=modules, daemon=True).start()
        study = StudyFacts(
            plan=plan,
            workload=workload.name,
            name=name,
            machine=machine,
            project=project,
            commands=workload.commands,
            folder=folder.root,
        )
        result, records = yield from _train_until_settled(
            study, storage, folder, train_some, observers, ticker, jobs
        )
        ticker.does("writing the answer")
        stopwatch.lap("answer")
        result = _with_phases(result, stopwatch, folder)
        answer = _write_and_log(options, config, folder, result, records, machine, deadline)
        storage.show_answer(result.model_dump(mode="json", include=SHORT), render(result))
        return answer


def _training_workers(stack: ExitStack, begun: Begun, options: Options) -> list[AnyWorker]:
    """The workers that train; a recorded run has none."""
    if begun.worker is None:
        return []
    others = further_workers(options.workers, begun.worker, begun.log)
    return [begun.worker, *map(stack.enter_context, others)]


def _prepare_study(
    options: Options,
    workload: Workload,
    begun: Begun,
    setting: Callable[[str], Any],
    stopwatch: Stopwatch,
) -> tuple[Options, OfProject, Machine, Workload, Deadline | None]:
    """Look at the machine and the project, and make the survey; recorded runs have none of these.

    Args:
        options, workload, begun: of the study.
        setting: gives what is stored of the study, by name; None for a new one.
        stopwatch: counts the start and the preparation.

    Returns:
        The options, all of them filled; what the project told; the machine with its survey; the
        workload as that says to train it; the time limit.
    """
    worker, recipe = begun.worker, workload.recipe
    if worker is not None:
        begun.ticker.does("importing torch and lightning")
    machine = workload.machine or machine_of(options, worker)
    deadline = deadline_after_start(options.wall_seconds, begun.at, stopwatch.lap("start"))
    project, preflight_seconds = OfProject(), 0.0
    if worker is not None and recipe is not None:
        if setting("target") is None:
            begun.ticker.does("looking at the project")
            options, project, preflight_seconds = prepare_project(
                worker, recipe, options, workload.commands.study, deadline
            )
        else:
            project = OfProject(**{name: setting(name) for name in OfProject.model_fields})
        seconds = survey_seconds(options, deadline, preflight_seconds)
        machine, recipe = _with_survey(
            options, workload, worker, machine, project.survey, seconds, begun.ticker
        )
        # The study keeps the survey by which its budget of seconds is one of steps.
        if options.budget.seconds is not None:
            project = project.model_copy(update={"survey": machine.survey})
    took = stopwatch.lap("preparation")
    if deadline is not None:
        deadline = replace(deadline, preparation=took)
    return options, project, machine, replace(workload, recipe=recipe), deadline


def _with_survey(
    options: Options,
    workload: Workload,
    worker: AnyWorker,
    machine: Machine,
    survey: Survey | None,
    seconds: float,
    ticker: Ticker,
) -> tuple[Machine, Recipe]:
    """Make or read the survey, unless the study has one; machine and recipe as it says.

    Raises:
        InputError: an option needs the survey, which is left out.
    """
    assert workload.recipe is not None  # noqa: S101 (there is a worker)
    # A study that was begun keeps its number of threads.
    recipe = replace(workload.recipe, threads=options.threads)
    if survey is None:
        why = why_no_survey(options, worker, seconds)
        if why:
            say(f"no survey of memory and step times: {why}")
            return machine, recipe
        ticker.does("survey of memory and step times")
        survey, was_kept = kept_or_new_survey(
            machine, worker, recipe, options, workload.settings, seconds
        )
        say(survey_line(survey, was_kept))
    recipe = replace(recipe, threads=survey.threads)
    if options.micro_batch_size == "auto":
        recipe = replace(recipe, micro_batch_size=survey.largest_fit)
    return machine.with_survey(survey), recipe


def _train_until_settled(
    study: StudyFacts,
    storage: StudyStorage,
    folder: StudyFolder,
    train: Callable[[Sequence[AskedTrial]], None] | None,
    observers: Sequence[Observer],
    ticker: Ticker,
    jobs: int,
) -> Generator[list[AskedTrial], None, tuple[StudyResult, list[Record]]]:
    """Train what a study plans, and what its answer asks for while there is time.

    Args:
        study: with its plan.
        storage, folder: of the study.
        train: trains those that run until one has its record; None: they are yielded, for a loop of
            one's own.
        observers: are told of each.
        ticker: that says what goes on.
        jobs: the most trials at once.

    Returns:
        The result, and the records that it is of.

    Raises:
        BstuneError: as by :func:`bstune.study.loop.asked_batches` and ``train``.
    """
    folder.checkpoints.mkdir(exist_ok=True)
    is_first = True
    while True:
        before = len(storage.records())
        yield from _train_planned(study.plan, storage, folder, train, observers, jobs)
        ticker.does("computing the answer")
        records = storage.records()
        result = analyse(study, records)
        more = plan_with_more_seeds(study.plan, result, time.monotonic())
        is_stuck = not is_first and len(records) == before
        if more is None or is_stuck:
            return result, records
        study = replace(study, plan=more)
        is_first = False


def _train_planned(
    plan: Plan,
    storage: StudyStorage,
    folder: StudyFolder,
    train: Callable[[Sequence[AskedTrial]], None] | None,
    observers: Sequence[Observer],
    jobs: int,
) -> Generator[list[AskedTrial]]:
    """Train what one plan asks for; arguments and errors as of :func:`_train_until_settled`."""
    with closing(asked_batches(plan, storage, folder, observers, jobs=jobs)) as batches:
        for running in batches:
            if train is None:
                yield running
            else:
                train(running)


def _train_in_turn(train: Callable[[Trial], None], running: Sequence[AskedTrial]) -> None:
    """Train trials in this process, one after another."""
    for asked in running:
        asked.record = train_here(asked, train)


def _with_phases(result: StudyResult, stopwatch: Stopwatch, folder: StudyFolder) -> StudyResult:
    """A result with where the seconds went."""
    phases = stopwatch.phases
    # A command that had nothing to train leaves the result as it was.
    if not stopwatch.trials and folder.result.exists():
        phases = read_result(folder.root).spent.phases
    spent = result.spent.model_copy(update={"phases": phases})
    return result.model_copy(update={"spent": spent})


def _import_all(*modules: str) -> None:
    """Import modules, up to one that is not there: who needs it says so."""
    with suppress(ImportError):
        for module in modules:
            importlib.import_module(module)


def _write_and_log(
    options: Options,
    config: str,
    folder: StudyFolder,
    result: StudyResult,
    records: Sequence[Record],
    machine: Machine,
    deadline: Deadline | None,
) -> Result:
    """Write a study's files, and log it to MLflow where a time limit allows it."""
    # They import matplotlib and jinja2, which nothing needs before.
    from bstune.report.figure import curve_figure, roofline_figure
    from bstune.report.page import page

    write_study(folder, result, records)
    with whole_file(folder.figure) as file:
        curve_figure(result, records).savefig(file, format="png", dpi=150)
    survey = machine.survey
    if survey is not None and survey.roofline is not None:
        with whole_file(folder.roofline) as file:
            figure = roofline_figure(survey.roofline, survey.timings)
            figure.savefig(file, format="png", dpi=150)
    write_text(folder.page, page(result, records, config, survey))
    uri, experiment = options.mlflow.uri, options.mlflow.experiment
    is_late = deadline is not None and not deadline.allows_mlflow(time.monotonic())
    if uri is not None and is_late:
        say("MLflow: left out, as the time is over; the same command logs the study")
    elif uri is not None:
        logged = log_study(result, records, folder, uri=uri, experiment=experiment)
        say(f"MLflow: {logged}")
    return Result(**result.model_dump(), folder=folder.root)
