"""What people call: tune a workload, load a study's result."""

import math
import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import yaml
from pydantic import Field

from bstune import __version__
from bstune.config import Composed, options_from_python
from bstune.core.errors import InputError, StudyError, UserCodeError
from bstune.core.question import Question
from bstune.core.records import Budget, Record, Spec, StepTime, Target
from bstune.core.space import Configuration
from bstune.hardware.survey import Survey
from bstune.options import Options, missing, space_of
from bstune.recipe.found import remembered
from bstune.recipe.recipe import Recipe
from bstune.report.answer import render
from bstune.report.hardware import survey_line
from bstune.report.read import read_records, read_result
from bstune.search.fit import Ends
from bstune.study.advice import followed
from bstune.study.analysis import Study, analyse
from bstune.study.begin import Begun, begin
from bstune.study.deadline import OTHERS, Deadline, least_limit
from bstune.study.finish import TrialsFile, write_study
from bstune.study.loop import (
    AskedTrial,
    HangWatch,
    Observer,
    asked_trials,
    train_here,
    train_in_worker,
)
from bstune.study.machine import RECORDED, Machine, describe_machine, surveyed
from bstune.study.plan import Plan
from bstune.study.prepare import checked, looked_up, piloted
from bstune.study.progress import Progress, Stopwatch
from bstune.study.result import ResultWarning, StudyResult
from bstune.study.storage import StudyStorage, database_errors
from bstune.system.console import count, seconds
from bstune.system.files import (
    StudyFolder,
    discard_folder,
    whole_file,
    write_text,
)
from bstune.system.interruption import interruptible
from bstune.system.secrets import hide
from bstune.system.ticker import Ticker, say
from bstune.tracking.mlflow import log_study
from bstune.trial.checks import unreachable
from bstune.trial.table import Table, find_table
from bstune.trial.table import train as train_from_table
from bstune.trial.trial import Trial
from bstune.trial.worker import AnyWorker, Worker, call, value_of

# Configurations of the search where nobody says how many; under a time limit as many as there is
# time for, up to so many: with more, decisions take longer than 0.3 s.
TRIALS = 32
TRIALS_IN_TIME = 1000
# The least seconds that a survey is made in.
LEAST_SURVEY_SECONDS = 3.0


class Result(StudyResult):
    """What a study found, with its folder."""

    folder: Path = Field(exclude=True)

    @property
    def records(self) -> list[Record]:
        """All trials, in order of their numbers."""
        return read_records(self.folder)

    def __str__(self) -> str:
        return render(self)


@dataclass(frozen=True)
class Workload:
    """What is trained, from a config or from Python objects.

    Args:
        name: of the workload.
        train: trains one trial; it is sent to the worker with cloudpickle.
        settings: what must not change while a study goes on, as JSON.
        config: the config as YAML, without secrets.
        table: recorded runs that answer in place of training.
        recipe: of what is trained; None for recorded runs.
        command: what runs it with further options, as a command or a call.
        train_command: what trains a batch size and a rate, likewise; a third value is the length of
            the schedule, where that is chosen.
    """

    name: str
    train: Callable[[Trial], None]
    settings: Mapping[str, object]
    config: str
    table: Table | None
    recipe: Recipe | None
    command: Callable[[Mapping[str, object]], str]
    train_command: Callable[[int, float, int | None], str]


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
            the trial that builds one, ``lambda trial: MyModule(lr=trial.lr)``.
        data: a LightningDataModule, or a pair of a train and a validation DataLoader. Training
            batches are made of its data set; validation keeps the loader's own.
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
    study = name or _type_name(module)
    say(f"bstune {__version__}: {study}")
    if study == "<lambda>":
        raise InputError("name is missing: a function without a name needs one, as name='STUDY'")
    given = dict(options, target=target, baseline=baseline, batch_size=batch_size, budget=budget)
    checked = options_from_python(workload=study, **given)
    # It imports torch, which commands leave to the worker.
    from bstune.recipe.project import recipe_of_project

    recipe = recipe_of_project(module, data, trainer=trainer, options=checked)
    workload = Workload(
        name=study,
        train=_lightning(recipe),
        settings={"data": _type_name(data), "trainer": sorted(trainer or {})},
        config=yaml.safe_dump(hide(checked.model_dump(mode="json")), sort_keys=False),
        table=None,
        recipe=recipe,
        command=partial(_call, study),
        train_command=_own_training,
    )
    return run_study(checked, workload, begin(checked, checked.study or study, began))


def _type_name(part: Any) -> str:
    """Name a class or a function, or the class of another object."""
    return str(getattr(part, "__name__", type(part).__name__))


def load(folder: str | Path) -> Result:
    """Read the result of a study from its folder; InputError if there is none."""
    root = Path(folder)
    return Result(**read_result(root).model_dump(), folder=root)


def workload_from_config(composed: Composed, arguments: Sequence[str]) -> Workload:
    """The workload of a composed command line."""
    options = composed.options
    table = None
    if composed.recipe is None:
        table = find_table(composed.parts["table"])
        train: Callable[[Trial], None] = partial(train_from_table, table)
    else:
        train = _lightning(composed.recipe)
    kept = ("data", "module", "trainer", "table")
    return Workload(
        name=options.workload or "workload",
        train=train,
        settings=hide({key: composed.parts.get(key) for key in kept}),
        config=composed.yaml,
        table=table,
        recipe=composed.recipe,
        command=partial(_command, arguments),
        train_command=partial(_training_command, arguments),
    )


def _own_training(batch_size: int, lr: float, steps: int | None) -> str:
    """What trains the best in a project of one's own."""
    schedule = f", with a schedule of {steps} steps," if steps is not None else ""
    return f"batch size {batch_size} and lr {lr:g}{schedule} in your project"


def _training_command(
    arguments: Sequence[str], batch_size: int, lr: float, steps: int | None
) -> str:
    """The command that trains the best."""
    options: dict[str, object] = {"trial.batch_size": batch_size, "trial.lr": lr}
    if steps is not None:
        options["trial.steps"] = steps
    return _command(arguments, options)


def _command(arguments: Sequence[str], options: Mapping[str, object]) -> str:
    """A command line with further options, as a shell takes it, without secrets."""
    given = {}
    for argument in arguments:
        name, sign, value = argument.partition("=")
        given[name] = name + sign + hide(value, name.lstrip("+~"))
    # Another study needs a folder of its own.
    if "study" in options and "output" in given:
        given["output"] += "-" + str(options["study"]).rpartition("-")[2]
    for option, changed in options.items():
        given[option] = f"{option}={changed}"
    return shlex.join(["python", "-m", "bstune", *given.values()])


def _call(name: str, options: Mapping[str, object]) -> str:
    """A call of :func:`tune` with further options."""
    arguments: dict[str, object] = {"name": options.get("study", name)}
    sections: dict[str, dict[str, object]] = {}
    for option, value in options.items():
        section, _, key = option.partition(".")
        if key:
            sections.setdefault(section, {})[key] = value
        elif option != "study":
            arguments[option] = value
    arguments |= sections
    written = "".join(f", {argument}={value!r}" for argument, value in arguments.items())
    return f"bstune.tune(...{written})"


def _lightning(recipe: Recipe) -> Callable[[Trial], None]:
    """Training by Lightning, whose import is left to the worker."""
    return partial(_train_by_lightning, recipe)


def _train_by_lightning(recipe: Recipe, trial: Trial) -> None:
    from bstune.trial.lightning import train

    train(recipe, trial)


def run_study(options: Options, workload: Workload, begun: Begun | None = None) -> Result:
    """Run a study to its end, or go on with it: search, new seeds, answer, files, MLflow.

    Args:
        options: of the study.
        workload: that is tuned.
        begun: what :func:`bstune.study.begin.begin` gives; None: the study begins here.

    Raises:
        BstuneError: for what cannot be used; Interrupted by Ctrl-C.
    """
    folder = StudyFolder(Path(options.output))
    name = options.study or workload.name
    failed = "failed; the same command goes on with what is stored"
    storage = None
    with interruptible(), ExitStack() as stack, database_errors(options.storage, failed):
        begun = begun or begin(options, name, trains=workload.table is None)
        stack.callback(begun.close)
        worker, ticker = begun.worker, begun.ticker
        stopwatch = Stopwatch(begun.at)
        try:
            storage = StudyStorage(options.storage, name)
            # A study that was begun goes on with what was found before.
            options = remembered(options, storage.setting)
            kept = ("resumes", "examples", "schedules")
            of_project = {name: storage.setting(name) for name in kept}
            if worker is not None:
                ticker.does("importing torch and lightning")
            machine = _machine(options, worker)
            deadline = _deadline(options, begun.at, stopwatch.lap("start"))
            recipe = workload.recipe
            preflight = 0.0
            if worker is not None and recipe is not None and storage.setting("target") is None:
                ticker.does("looking at the project")
                hang = HangWatch(options.wall_seconds, options.trial_seconds).limit
                options, found = looked_up(worker, recipe, options, workload.command, hang)
                checks = checked(worker, recipe, options, found, hang)
                of_project = {
                    "resumes": checks.resumes,
                    "examples": found.examples,
                    "schedules": [
                        (one.state, one.remedy) for one in checks.schedules if one.is_unmoved
                    ],
                }
                preflight = stopwatch.lap("preparation")
                options = piloted(worker, recipe, options, found, hang)
            threads = options.threads or storage.setting("threads")
            workload, machine = _with_survey(
                options, workload, worker, machine, threads, deadline, preflight, ticker
            )
            stopwatch.lap("preparation")
            if deadline is not None:
                deadline = replace(deadline, preparation=stopwatch.phases.preparation)
            resumes = of_project["resumes"] is not False
            plan = _plan(options, workload, folder, machine, deadline, resumes)
            storage.begin(plan.space, {**_settings(options, workload, machine), **of_project})
            first_plan = plan
            study_of = partial(
                Study,
                workload=workload.name,
                name=name,
                device=machine.device,
                threads=machine.threads,
                command=workload.command,
                train=workload.train_command,
                warnings=tuple(
                    ResultWarning(kind="schedule", fix=remedy, state=state)
                    for state, remedy in of_project["schedules"] or ()
                ),
            )
            stopwatch.plan = plan
            progress = Progress(ticker, plan, storage.records())
            say(_described(options, workload, plan, machine))
            observers = (stopwatch, progress, TrialsFile(folder))
            while True:
                before = len(storage.records())
                _run_trials(options, workload, folder, plan, storage, worker, observers, progress)
                ticker.does("computing the answer")
                records = storage.records()
                result = analyse(study_of(plan), records)
                more = followed(plan, result, time.monotonic())
                is_stuck = plan is not first_plan and len(records) == before
                if more is None or is_stuck:
                    break
                plan = more
        except (InputError, StudyError, UserCodeError):
            if storage is None or not storage.records():
                discard_folder(folder)
            raise
        ticker.does("writing the answer")
        stopwatch.lap("answer")
        phases = stopwatch.phases
        # A command that had nothing to train leaves the result as it was.
        if not stopwatch.trials and folder.curve.exists():
            phases = read_result(folder.root).spent.phases
        spent = result.spent.model_copy(update={"phases": phases})
        result = result.model_copy(update={"spent": spent})
        return _finish(options, workload, folder, result, records, machine, deadline)


def _deadline(options: Options, began: float, start: float) -> Deadline | None:
    """The time limit, once the start is over; InputError where that took all of it."""
    if options.wall_seconds is None:
        return None
    deadline = Deadline(began, options.wall_seconds, start)
    if deadline.shared == 0.0:
        raise InputError(
            f"wall_seconds={options.wall_seconds:g} is too short for two trials: the start alone "
            f"took {seconds(start)}; give at least wall_seconds={math.ceil(least_limit(start, []))}"
        )
    return deadline


def _described(options: Options, workload: Workload, plan: Plan, machine: Machine) -> str:
    """Say in a line what the study does, and what it may take."""
    what = (
        f"{workload.name}: {options.target}, batch sizes {plan.space.low} to {plan.space.high} "
        f"(scaling: {plan.space.rule}), {machine.device}"
    )
    if plan.deadline is None or options.trials is not None:
        what += f", {count(plan.trials, 'configuration')}"
    if plan.deadline is None:
        return what
    of_baseline, shared = plan.deadline.baseline_seconds, plan.deadline.shared
    return (
        f"{what}, {seconds(shared)}: the baseline at most {seconds(of_baseline)}, others at least "
        f"{seconds(OTHERS * shared)}"
    )


def _run_trials(
    options: Options,
    workload: Workload,
    folder: StudyFolder,
    plan: Plan,
    storage: StudyStorage,
    worker: AnyWorker | None,
    observers: Sequence[Observer],
    progress: Progress,
) -> None:
    """Train one trial after another; recorded runs need no worker."""
    folder.checkpoints.mkdir(exist_ok=True)
    watch = HangWatch(options.wall_seconds, options.trial_seconds)
    with closing(asked_trials(plan, storage, folder, observers)) as asked_ones:
        for asked in asked_ones:
            if worker is None:
                asked.record = train_here(asked, workload.train, options.target)
                continue
            progress.begun(asked.spec, partial(getattr, worker, "told"))
            alive = partial(storage.heartbeat, asked.spec)
            asked.record = train_in_worker(
                worker, asked, workload.train, options.target, watch, alive
            )


def _finish(
    options: Options,
    workload: Workload,
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

    write_study(folder, result, records, workload.config, machine)
    with whole_file(folder.figure) as file:
        curve_figure(result, records).savefig(file, format="png", dpi=150)
    if machine.survey is not None and machine.survey.roofline is not None:
        with whole_file(folder.roofline) as file:
            roofline_figure(machine.survey).savefig(file, format="png", dpi=150)
    write_text(folder.page, page(result, records, workload.config))
    uri, experiment = options.mlflow.uri, options.mlflow.experiment
    is_late = deadline is not None and not deadline.allows_mlflow(time.monotonic())
    if uri is not None and is_late:
        say("MLflow: left out, as the time is over; the same command logs the study")
    elif uri is not None:
        logged = log_study(result, records, folder, uri=uri, experiment=experiment)
        say(f"MLflow: {logged}")
    return Result(**result.model_dump(), folder=folder.root)


def _machine(options: Options, worker: AnyWorker | None) -> Machine:
    """Ask the worker what it runs on; recorded runs have none."""
    if worker is None:
        return RECORDED
    # That a time limit is over meanwhile is told with what is enough.
    limit = HangWatch(trial_seconds=options.trial_seconds).limit
    of_machine = (options.device, options.threads, options.precision, options.devices)
    machine: Machine = value_of(call(worker, describe_machine, *of_machine, limit=limit))
    return machine


def _with_survey(
    options: Options,
    workload: Workload,
    worker: AnyWorker | None,
    machine: Machine,
    threads: int | None,
    deadline: Deadline | None,
    preflight: float,
    ticker: Ticker,
) -> tuple[Workload, Machine]:
    """Make or read the survey, and train with the number of threads that it chose.

    Args:
        options, workload, worker, machine: of the study.
        threads: that were given, or that the study was begun with; None: the survey chooses.
        deadline: of which the survey may take its share.
        preflight: seconds that this took of it.
        ticker: that says what goes on.

    Raises:
        InputError: ``micro_batch_size=auto`` or ``memory_limit`` without a survey.
    """
    if workload.recipe is None:
        return workload, machine
    seconds = options.survey_seconds
    if deadline is not None:
        # Preflight has had its part of them.
        seconds = min(seconds, deadline.preparation_seconds - preflight)
    why = ""
    if options.survey == "off":
        why = "survey=off"
    elif not isinstance(worker, Worker):
        why = "it needs one worker, and devices=1"
    elif seconds < LEAST_SURVEY_SECONDS:
        why = f"{seconds:.1f} s are too few, which survey_seconds and wall_seconds set"
    needs = {
        "micro_batch_size=auto": options.micro_batch_size == "auto",
        "memory_limit": options.memory_limit is not None,
    }
    for name, is_given in needs.items():
        if why and is_given:
            raise InputError(f"{name} needs the survey, which is left out: {why}")
    if why:
        say(f"no survey of memory and step times: {why}")
        return workload, machine
    assert isinstance(worker, Worker)  # noqa: S101 (the reasons above say so)
    recipe = replace(workload.recipe, threads=threads)
    ticker.does("survey of memory and step times")
    space = space_of(options, machine.kind)
    patience = HangWatch(options.wall_seconds, options.trial_seconds).limit
    survey, was_kept = surveyed(
        machine, worker, recipe, options, space, workload.settings, seconds, patience
    )
    say(survey_line(survey, was_kept))
    recipe = replace(recipe, threads=survey.threads)
    if options.micro_batch_size == "auto":
        recipe = replace(recipe, micro_batch_size=survey.largest_fit)
    threads = survey.threads or machine.threads
    machine = machine.model_copy(update={"survey": survey, "threads": threads})
    return replace(workload, recipe=recipe, train=_lightning(recipe)), machine


def _plan(
    options: Options,
    workload: Workload,
    folder: StudyFolder,
    machine: Machine,
    deadline: Deadline | None,
    resumes: bool,
) -> Plan:
    baseline = None
    if options.baseline.pair is not None:
        batch_size, lr = options.baseline.pair
        baseline = Configuration(batch_size=batch_size, lr=lr)
    step_time: StepTime | None = None
    if workload.table is not None:
        step_time = workload.table.step_time
    space = space_of(options, machine.kind)
    fits: Ends = (None, None)
    # Larger batches are accumulated of what fits.
    if machine.survey is not None and options.micro_batch_size != "auto":
        fits = machine.survey.fits
    trials = options.trials or (TRIALS if deadline is None else TRIALS_IN_TIME)
    return Plan(
        question=Question(options.target, options.budget, options.objective, options.schedule_ends),
        space=space,
        baseline=baseline,
        trials=trials,
        seeds=options.seeds,
        seed=options.seed,
        deadline=deadline,
        step_time=step_time,
        fits=fits,
        timings=machine.survey.step_times if machine.survey else (),
        resumable=lambda number: (
            workload.table is not None or (resumes and folder.checkpoint(number).exists())
        ),
    )


def _settings(options: Options, workload: Workload, machine: Machine) -> dict[str, object]:
    """What must not change while a study goes on."""
    fixed = (
        "objective",
        "target",
        "budget",
        "batch_size",
        "lr",
        "baseline",
        "scaling",
        "schedule_ends",
        "compile",
        "micro_batch_size",
        "devices",
        "seed",
    )
    values = options.model_dump(mode="json", include=set(fixed))
    place = {
        "device": machine.device,
        "threads": machine.threads,
        "precision": machine.precision,
    }
    return {**values, **place, "target": str(options.target), **workload.settings}


def survey_once(options: Options, workload: Workload) -> tuple[Survey, bool]:
    """The survey of a workload, and whether it was kept from an earlier time.

    Raises:
        InputError: for recorded runs, which nothing trains, and where no batch size fits.
        UserCodeError: the user's code does not train at the baseline's batch size.
    """
    if workload.recipe is None:
        raise InputError("recorded runs have no survey: name a workload that is trained")
    with interruptible(), TemporaryDirectory() as folder, Worker(Path(folder) / "log") as worker:
        machine = _machine(options, worker)
        patience = HangWatch(trial_seconds=options.trial_seconds).limit
        # A metric is not needed.
        options = options.model_copy(update={"target": options.target or unreachable("any", "min")})
        options, _ = looked_up(worker, workload.recipe, options, workload.command, patience)
        space = space_of(options, machine.kind)
        return surveyed(
            machine,
            worker,
            workload.recipe,
            options,
            space,
            workload.settings,
            options.survey_seconds,
            patience,
        )


def train_once(options: Options, workload: Workload) -> Record:
    """Train one configuration, ``trial.batch_size`` and ``trial.lr``, with its checkpoint.

    Its folder is inside ``output``, and has the record and the checkpoint of its end.

    Raises:
        UserCodeError: if the training failed, with the user's file and line.
    """
    pair = options.trial.pair
    if pair is None:
        raise InputError("trial.batch_size and trial.lr are missing: give both for one run")
    batch_size, lr = pair
    study = options.study or workload.name
    if options.is_open("target") or options.is_open("budget.steps"):
        # A study of the same name has found them.
        options = remembered(options, StudyStorage(options.storage, study).setting)
    needed = ["target"] if options.trial.steps else ["target", "budget.steps"]
    absent = [missing(name) for name in needed if options.is_open(name)]
    if absent:
        raise InputError("\n".join(absent))
    of_study = StudyFolder(Path(options.output))
    name = f"trial-{batch_size}-{lr:.6g}-{options.trial.seed}"
    folder = StudyFolder(of_study.root / name)
    total_steps = options.trial.steps or options.budget.last_step(batch_size)
    spec = Spec(
        number=0,
        place="once",
        role="search",
        batch_size=batch_size,
        lr=lr,
        seed=options.trial.seed,
        max_steps=total_steps,
        schedule_steps=total_steps if options.schedule_ends else None,
    )
    asked = AskedTrial(
        spec=spec,
        total_steps=total_steps,
        earlier=None,
        until=None,
        save_to=folder.root / "checkpoint.ckpt",
        resume_from=None,
        keep=True,
    )
    with interruptible(), ExitStack() as stack:
        begun = begin(options, study, trains=workload.table is None, log=name)
        stack.callback(begun.close)
        if begun.worker is None:
            folder.root.mkdir(exist_ok=True)
            record = train_here(asked, workload.train, options.target)
        else:
            _machine(options, begun.worker)
            watch = HangWatch(trial_seconds=options.trial_seconds)
            record = train_in_worker(
                begun.worker, asked, workload.train, options.target, watch, lambda: None
            )
    if record.is_unfit:
        discard_folder(folder)
        raise InputError(record.message)
    write_text(folder.trials, record.model_dump_json() + "\n")
    write_text(folder.config, workload.config)
    if record.status == "failed":
        raise UserCodeError(record.message)
    return record
