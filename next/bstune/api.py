"""What people call: tune a workload or survey it, load a study's result."""

import base64
import html
import importlib
import io
import math
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING, Any

import yaml
from pydantic import Field, PrivateAttr

from bstune import __version__
from bstune.config import Composed, options_from_python
from bstune.core.errors import InputError
from bstune.core.question import Question
from bstune.core.records import Budget, Record, Target
from bstune.hardware.survey import Survey
from bstune.options import Options, differing, with_question
from bstune.recipe.found import remembered
from bstune.recipe.recipe import Recipe, settings_of
from bstune.report.answer import render
from bstune.report.hardware import survey_line, survey_text
from bstune.report.read import read_asked, read_records, read_result
from bstune.study.analysis import Study, analyse
from bstune.study.begin import Begun, begin, further_workers
from bstune.study.deadline import Deadline, limited
from bstune.study.estimates import step_time_of
from bstune.study.finish import TrialsFile, write_asked, write_study
from bstune.study.loop import AskedTrial, Crew, HangWatch
from bstune.study.machine import Machine, machine_of, survey_seconds, surveyed, without_survey
from bstune.study.of_options import (
    fixed_options,
    fixed_place,
    plan_line,
    plan_of,
    shared_by,
    with_threads,
)
from bstune.study.once import survey_once
from bstune.study.prepare import OfProject, prepared
from bstune.study.progress import Progress, Stopwatch
from bstune.study.result import ResultWarning, StudyResult
from bstune.study.retarget import retargeted
from bstune.study.run import answered, planned, train_all_here
from bstune.study.storage import database_errors, opened
from bstune.study.workload import (
    COMMAND,
    Workload,
    best_in_file,
    by_lightning,
    command_line,
    commands_of,
    config_of,
    own_training,
    python_call,
    report_command,
    training_command,
)
from bstune.system.files import StudyFolder, whole_file, write_text
from bstune.system.interruption import interruptible
from bstune.system.secrets import hide
from bstune.system.ticker import Ticker, say
from bstune.tracking.mlflow import log_study
from bstune.trial.table import find_table
from bstune.trial.table import train as train_from_table
from bstune.trial.trial import Trial
from bstune.trial.worker import AnyWorker

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer

# What :func:`_finish` takes 2 CPU seconds to import.
OF_ANSWER = ("bstune.report.figure", "bstune.report.page", "matplotlib.backends.backend_agg")
# The answer in short, as Optuna's study has it.
SHORT: Any = {"verdict": True, "best": {"batch_size", "lr", "values"}, "speedup": {"value"}}
OF_MLFLOW = "mlflow.store.tracking.sqlalchemy_store"


class Result(StudyResult):
    """What a study found, with its folder."""

    folder: Path = Field(exclude=True)
    _recipe: Recipe | None = PrivateAttr(default=None)

    @property
    def records(self) -> list[Record]:
        """All trials, in order of their numbers."""
        return read_records(self.folder)

    def at(
        self,
        target: str | float | Target | None = None,
        *,
        budget: Budget | Mapping[str, float] | int | None = None,
    ) -> "Result":
        """What the same trials say of another target, or of the best metric in a smaller budget.

        Args:
            target: such as ``"val/loss <= 0.2"``, or another goal of the same metric.
            budget: in place of a target: ``{"seconds": 30}``, or steps, or examples.

        Raises:
            InputError: they do not tell.
        """
        given = {"target": target, "budget": budget}
        asked = {key: it for key, it in given.items() if it is not None}
        return ask_again(self.folder, asked).of_project(self._recipe)

    def train(self, **trainer: Any) -> "tuple[LightningModule, Trainer]":
        """Train the best in this process, as its trials were: the same batches, rate and schedule.

        It makes exactly ``train_steps`` of :attr:`best` or, where there are none, as many optimizer
        steps as its runs took in the median, rounded up. The Trainer has its own logger,
        call-backs, progress bar and evaluations, but for call-backs that choose length, batch size
        or rate, such as EarlyStopping, and writes to ``best`` in the study's folder unless it has a
        ``default_root_dir``. What the study shared among
        devices is trained on one. Then ``test_step``, where there is one, sees the data's
        ``test_dataloader`` once: its metrics are in ``trainer.callback_metrics``.

        Args:
            trainer: arguments of the Trainer in place of the study's, such as ``logger``.

        Returns:
            The trained module and its Trainer.

        Raises:
            InputError: the result was loaded, without the project, or has no best.
        """
        if self._recipe is None:
            how = self.train_command or ""
            if not how.startswith(COMMAND):
                how = "bstune.tune(...).train(), as the same call reads a finished study again"
            raise InputError(f"a folder has no project to train: use {how}")
        best = self.best
        if best is None:
            raise InputError(f"objective={self.objective} seeks no best to train")
        own, machine, _ = read_asked(self.folder)
        recipe = replace(self._recipe, threads=machine.threads, devices=1, noise_scale=False)
        if own.micro_batch_size == "auto" and machine.survey is not None:
            recipe = replace(recipe, micro_batch_size=machine.survey.largest_fit)
        steps = best.train_steps or math.ceil(best.steps)
        total = best.train_steps or own.budget.last_step(best.batch_size)
        trial = settings_of(best.batch_size, best.lr, total, own.trial.seed, best.values)
        # It imports torch.
        from bstune.trial.own_training import train_best

        return train_best(recipe, trial, steps, self.folder / "best", trainer)

    def of_project(self, recipe: Recipe | None) -> "Result":
        """Keep what trains its best."""
        self._recipe = recipe
        return self

    def trials_dataframe(self) -> Any:
        """The trials as a pandas DataFrame, a row each, as Optuna calls it."""
        import pandas

        left_out = {"values", "history", "noise_scale"}
        rows = [one.model_dump(exclude=left_out) | one.values for one in self.records]
        return pandas.DataFrame(rows)

    def __str__(self) -> str:
        return render(self)

    def _repr_html_(self) -> str:
        """What a notebook shows: the answer and the figure."""
        from bstune.report.figure import curve_figure

        file = io.BytesIO()
        curve_figure(self, self.records).savefig(file, format="png", dpi=80)
        image = base64.b64encode(file.getvalue()).decode()
        return f'<pre>{html.escape(str(self))}</pre><img src="data:image/png;base64,{image}">'


class ProjectSurvey(Survey):
    """What a machine allows a project; ``print()`` shows its table."""

    was_kept: bool = Field(exclude=True)
    """From an earlier time."""

    def __str__(self) -> str:
        return survey_text(self, self.was_kept)


def tune(
    module: Any,
    data: Any,
    *,
    target: str | Target | None = None,
    baseline: tuple[int, float] | None = None,
    batch_size: tuple[int, int] | None = None,
    budget: Budget | Mapping[str, int] | int | None = None,
    name: str | None = None,
    trainer: Mapping[str, Any] | None = None,
    **options: Any,
) -> Result:
    """Find the batch size and learning rate with which a project reaches its target fastest.

    What is not given is looked up in the project, and said: its batch size and rate, the length of
    its training (``trainer={"max_epochs": 10}``) and the metric that its validation logs. A target
    that is not given is what it reaches in a thirtieth of ``wall_seconds``, or in 10 s.

    Args:
        module: a LightningModule's class with an argument for the learning rate, or a function of
            the trial that builds one, ``lambda trial: MyModule(lr=trial.lr)``; one whose rate is a
            literal with ``override_lr=True``.
        data: a LightningDataModule, or a pair of a train and a validation DataLoader, or a function
            of ``batch_size`` that makes one, as streams need that make their own batches. Training
            batches are made of its data set; of several loaders the first one has B examples.
            Validation keeps the loader's own batch size in all trials; for a network that needs
            batches of B give ``validation_batch_size="trial"``.
        target: such as ``"val/loss <= 0.1"``.
        baseline: batch size and rate that are used today.
        batch_size: the smallest and the largest to try; from a sixteenth of the baseline's to 32
            times as many, up to the training set.
        budget: of a trial that does not reach the target: steps, or steps and examples.
        name: of the study; the module's name.
        trainer: further arguments of Lightning's Trainer.
        options: any other option of ``conf/config.yaml``, such as ``trials=32, wall_seconds=120``.

    Returns:
        The result; ``print(result)`` shows the answer.

    Raises:
        bstune.core.errors.BstuneError: for what cannot be used, in one line.
    """
    began = time.monotonic()
    given = dict(options, target=target, baseline=baseline, batch_size=batch_size, budget=budget)
    checked, workload = _of_project(module, data, name, trainer, given)
    result = run_study(checked, workload, begin(checked, checked.study or workload.name, began))
    return result.of_project(workload.recipe)


def survey(
    module: Any,
    data: Any,
    *,
    name: str | None = None,
    trainer: Mapping[str, Any] | None = None,
    **options: Any,
) -> ProjectSurvey:
    """Measure which batch sizes fit into memory, what their steps take and what bounds them.

    Args:
        module, data, name, trainer, options: as of :func:`tune`, such as
            ``batch_size=(8, 4096), survey="refresh"``.

    Returns:
        The survey; ``print(survey)`` shows its table.

    Raises:
        bstune.core.errors.BstuneError: for what cannot be used, in one line.
    """
    checked, workload = _of_project(module, data, name, trainer, options)
    found, was_kept = survey_once(checked, workload)
    return ProjectSurvey(**found.model_dump(), was_kept=was_kept)


def _of_project(
    module: Any,
    data: Any,
    name: str | None,
    trainer: Mapping[str, Any] | None,
    given: Mapping[str, Any],
) -> tuple[Options, Workload]:
    """The options and the workload of a project of Python objects."""
    study = name or _type_name(module)
    say(f"bstune {__version__}: {study}")
    if study == "<lambda>":
        raise InputError("name is missing: a function without a name needs one, as name='STUDY'")
    checked = options_from_python(workload=study, **given)
    # It imports torch, which commands leave to the worker.
    from bstune.recipe.project import recipe_of_project

    recipe = recipe_of_project(module, data, trainer=trainer, options=checked)
    workload = Workload(
        name=study,
        train=by_lightning(recipe),
        settings={"data": _type_name(data), "trainer": sorted(trainer or {})},
        config=config_of(checked),
        recipe=recipe,
        command=partial(python_call, study),
        train_command=own_training,
    )
    return checked, workload


def _type_name(part: Any) -> str:
    """Name a class or a function, or the class of another object."""
    return str(getattr(part, "__name__", type(part).__name__))


def load(folder: str | Path) -> Result:
    """Read the result of a study from its folder; InputError if there is none."""
    root = Path(folder)
    return Result(**read_result(root).model_dump(), folder=root)


def ask_again(folder: str | Path, given: Mapping[str, Any]) -> Result:
    """What the trials of a study, which may still run, say of another question; nothing is written.

    Args:
        folder: of the study.
        given: as of :func:`bstune.options.with_question`; nothing asks for the study's own.

    Raises:
        InputError: there is no study, or its trials do not tell.
    """
    root = Path(folder)
    own, machine, beside = read_asked(root)
    options = with_question(own, given)
    records = sorted(read_records(root), key=lambda record: record.number)
    if options == own and StudyFolder(root).curve.exists():
        found = load(root)
        # A study that was run again has further trials.
        if found.trials == len(records):
            return found
    step_time = find_table(str(beside["table"])).step_time if "table" in beside else None
    plan = plan_of(own, machine, None, step_time, resumable=lambda number: False)
    name = str(own.study or own.workload)
    ran_for = None
    if options != own:
        # A budget of seconds is in the steps that it would have been in the study.
        tau = plan.question.budget_step_time or step_time_of(plan, records)
        question = Question(options.target, options.budget, options.objective, budget_step_time=tau)
        schedule_follows = bool(beside.get("schedule_follows"))
        records = retargeted(plan.question, question, records, schedule_follows)
        plan = replace(plan, question=question)
        ran_for = str(own.target if own.target != options.target else own.budget)
    command, train = commands_of(str(beside["command"]), name, differing(own, options))
    if own.tunables and train is not own_training:
        # best.yaml is of the study's own question.
        train = lambda batch_size, lr, steps: "the configuration of row Best"  # noqa: E731
    study = Study(
        plan=plan,
        workload=str(own.workload),
        name=name,
        device=machine.device,
        threads=machine.threads,
        command=command,
        train=train,
        again=partial(report_command, root),
        ran_for=ran_for,
    )
    return Result(**analyse(study, records).model_dump(), folder=root)


def workload_from_config(composed: Composed, arguments: Sequence[str]) -> Workload:
    """The workload of a composed command line."""
    options = composed.options
    table = None
    if composed.recipe is None:
        table = find_table(composed.parts["table"])
        train: Callable[[Trial], None] = partial(train_from_table, table)
    else:
        train = by_lightning(composed.recipe)
    kept = ("data", "module", "trainer", "table")
    train_command = partial(training_command, arguments)
    if options.tunables:
        train_command = partial(best_in_file, arguments, options.output)
    return Workload(
        name=options.workload or "workload",
        train=train,
        settings=hide({key: composed.parts.get(key) for key in kept}),
        config=composed.yaml,
        table=table,
        recipe=composed.recipe,
        command=partial(command_line, arguments),
        train_command=train_command,
    )


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
            next(studied(options, workload, begun))
        except StopIteration as over:
            result: Result = over.value
            return result
    raise AssertionError("only a workload without train yields its trials")


def studied(
    options: Options,
    workload: Workload,
    begun: Begun | None = None,
    jobs: int = 1,
    joins: bool = False,
) -> Generator[list[AskedTrial], None, Result | None]:
    """Run a study as :func:`run_study` does; trials that nothing here trains are yielded.

    Args:
        options: of the study.
        workload: that is tuned; where its ``train`` is None, whoever drives this sets the record
            of each trial that it is given.
        begun: what :func:`bstune.study.begin.begin` gives; None: the study begins here.
        jobs: the most trials that are yielded at once; a workload that trains has ``workers``.
        joins: train what another process has planned, which gives the answer; None is returned.
    """
    folder = StudyFolder(Path(options.output))
    name = options.study or workload.name
    failed = "failed; the same command goes on with what is stored"
    with ExitStack() as stack, database_errors(options.storage, failed):
        begun = begun or begin(options, name, trains=workload.table is None)
        stack.callback(begun.close)
        ticker, stopwatch = begun.ticker, Stopwatch(begun.at)
        storage = stack.enter_context(opened(options.storage, name, folder))
        # A study that was begun goes on with what was found before.
        options = with_threads(remembered(options, storage.setting))
        storage.check({**fixed_options(options), **workload.settings})
        options, project, machine, train, deadline = _prepared(
            options, workload, begun, storage.setting, stopwatch
        )
        plan = plan_of(
            options,
            machine,
            deadline,
            step_time=None if workload.table is None else workload.table.step_time,
            resumable=lambda number: (
                workload.table is not None
                or (project.resumes and folder.checkpoint(number).exists())
            ),
        )
        place = fixed_place(machine)
        settings = {**fixed_options(options), **workload.settings}
        if not joins:
            settings |= place
        elif place != {name: storage.setting(name) for name in place}:
            # Another kind of machine gives steps alone.
            storage.counts_seconds = False
            plan = replace(plan, timings=())
        storage.begin(plan.space, plan.question, {**settings, **project.model_dump(mode="json")})
        say(plan_line(workload.name, options, plan, machine))
        config = _filled_config(options, workload, project.schedule_follows)
        if not joins:
            storage.settle(by_proxy=True)
            storage.share(shared_by(options, machine, workload.command({}), begun.at))
            write_asked(folder, config, machine)
        study = Study(
            plan=plan,
            workload=workload.name,
            name=name,
            device=machine.device,
            threads=machine.threads,
            command=workload.command,
            train=workload.train_command,
            again=partial(report_command, folder.root),
            warnings=tuple(
                ResultWarning(kind="schedule", fix=remedy, state=state)
                for state, remedy in project.schedules
            ),
        )
        stopwatch.plan = plan
        progress = Progress(ticker, plan, storage.records())
        watch = HangWatch(options.wall_seconds, options.trial_seconds)
        train_some: Callable[[Sequence[AskedTrial]], None] | None = None
        if train is not None and begun.worker is not None:
            others = further_workers(options.workers, begun.worker, begun.log)
            workers = [begun.worker, *map(stack.enter_context, others)]
            jobs = len(workers)
            train_some = Crew(workers, train, watch, progress.begun).train
        elif train is not None:
            train_some = partial(train_all_here, train)
        observers = (stopwatch, progress, TrialsFile(folder))
        if joins:
            yield from planned(plan, storage, folder, train_some, observers, jobs)
            return None
        if options.workers and begun.worker is not None:
            # This process has little to do while the worker trains.
            modules = OF_ANSWER if options.mlflow.uri is None else (*OF_ANSWER, OF_MLFLOW)
            Thread(target=_import_all, args=modules, daemon=True).start()
        result, records = yield from answered(
            study, storage, folder, train_some, observers, ticker, jobs
        )
        ticker.does("writing the answer")
        stopwatch.lap("answer")
        result = _timed(result, stopwatch, folder)
        answer = _finish(options, config, folder, result, records, machine, deadline)
        storage.show_answer(result.model_dump(mode="json", include=SHORT), render(result))
        return answer


def _filled_config(options: Options, workload: Workload, schedule_follows: bool) -> str:
    """A workload's config with all options as they were found, and what another question needs."""
    config = yaml.safe_load(workload.config) | options.model_dump(mode="json")
    config |= {"target": str(options.target), "command": workload.command({})}
    config["schedule_follows"] = schedule_follows
    return yaml.safe_dump(hide(config), sort_keys=False)


def _prepared(
    options: Options,
    workload: Workload,
    begun: Begun,
    setting: Callable[[str], Any],
    stopwatch: Stopwatch,
) -> tuple[Options, OfProject, Machine, Callable[[Trial], None] | None, Deadline | None]:
    """Look at the machine and the project, and make the survey; recorded runs have none of these.

    Args:
        options, workload, begun: of the study.
        setting: gives what it was begun with, by name; None: it is new.
        stopwatch: counts the start and the preparation.

    Returns:
        The options, all of them filled; what the project told; the machine with its survey; what
        trains a trial; the time limit.
    """
    worker, recipe = begun.worker, workload.recipe
    if worker is not None:
        begun.ticker.does("importing torch and lightning")
    machine = workload.machine or machine_of(options, worker)
    deadline = limited(options.wall_seconds, begun.at, stopwatch.lap("start"))
    project, preflight, train = OfProject(), 0.0, workload.train
    if worker is not None and recipe is not None:
        if setting("target") is None:
            begun.ticker.does("looking at the project")
            options, project, preflight = prepared(
                worker, recipe, options, workload.command, deadline
            )
        else:
            project = OfProject(**{name: setting(name) for name in OfProject.model_fields})
        seconds = survey_seconds(options, deadline, preflight)
        machine, train = _with_survey(
            options, workload, worker, machine, project.survey, seconds, begun.ticker
        )
        if options.budget.seconds is not None:
            project = project.model_copy(update={"survey": machine.survey})
    took = stopwatch.lap("preparation")
    if deadline is not None:
        deadline = replace(deadline, preparation=took)
    return options, project, machine, train, deadline


def _with_survey(
    options: Options,
    workload: Workload,
    worker: AnyWorker,
    machine: Machine,
    survey: Survey | None,
    seconds: float,
    ticker: Ticker,
) -> tuple[Machine, Callable[[Trial], None]]:
    """Make or read the survey, unless the study has one; the machine with it, and what trains.

    Raises:
        InputError: an option needs the survey, which is left out.
    """
    assert workload.recipe is not None  # noqa: S101 (there is a worker)
    # A study that was begun keeps its number of threads.
    recipe = replace(workload.recipe, threads=options.threads)
    if survey is None:
        why = without_survey(options, worker, seconds)
        if why:
            say(f"no survey of memory and step times: {why}")
            return machine, by_lightning(recipe)
        ticker.does("survey of memory and step times")
        survey, was_kept = surveyed(machine, worker, recipe, options, workload.settings, seconds)
        say(survey_line(survey, was_kept))
    recipe = replace(recipe, threads=survey.threads)
    if options.micro_batch_size == "auto":
        recipe = replace(recipe, micro_batch_size=survey.largest_fit)
    return machine.with_survey(survey), by_lightning(recipe)


def _timed(result: StudyResult, stopwatch: Stopwatch, folder: StudyFolder) -> StudyResult:
    """A result with where the seconds went."""
    phases = stopwatch.phases
    # A command that had nothing to train leaves the result as it was.
    if not stopwatch.trials and folder.curve.exists():
        phases = read_result(folder.root).spent.phases
    spent = result.spent.model_copy(update={"phases": phases})
    return result.model_copy(update={"spent": spent})


def _import_all(*modules: str) -> None:
    """Import modules, up to one that is not there: who needs it says so."""
    with suppress(ImportError):
        for module in modules:
            importlib.import_module(module)


def _finish(
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
    if machine.survey is not None and machine.survey.roofline is not None:
        with whole_file(folder.roofline) as file:
            roofline_figure(machine.survey).savefig(file, format="png", dpi=150)
    write_text(folder.page, page(result, records, config))
    uri, experiment = options.mlflow.uri, options.mlflow.experiment
    is_late = deadline is not None and not deadline.allows_mlflow(time.monotonic())
    if uri is not None and is_late:
        say("MLflow: left out, as the time is over; the same command logs the study")
    elif uri is not None:
        logged = log_study(result, records, folder, uri=uri, experiment=experiment)
        say(f"MLflow: {logged}")
    return Result(**result.model_dump(), folder=folder.root)
