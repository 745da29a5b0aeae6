"""What a workload is asked once, without a study: its survey, and the training of one pair."""

from contextlib import closing
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from bstune.core.errors import InputError, StudyError, UserCodeError
from bstune.core.records import Record, Spec, Target
from bstune.hardware.survey import Survey
from bstune.options import Options, missing
from bstune.recipe.found import fill_by_stored
from bstune.study.begin import begin
from bstune.study.loop import AskedTrial, HangWatch, train_here, train_in_worker
from bstune.study.machine import kept_or_new_survey, machine_of
from bstune.study.prepare import fill_from_project
from bstune.study.storage import StudyStorage
from bstune.study.workload import Workload
from bstune.system.files import StudyFolder, discard_folder, ensure_home, write_text
from bstune.trial.worker import AnyWorker, Worker


def survey_once(options: Options, workload: Workload) -> tuple[Survey, bool]:
    """The survey of a workload, and whether it was kept from an earlier time.

    It is all that ``bstune survey`` and :func:`bstune.survey` do.

    Raises:
        InputError: for recorded runs, which nothing trains, and where no batch size fits.
        UserCodeError: the user's code does not train at the baseline's batch size.
    """
    if workload.recipe is None:
        raise InputError("recorded runs have no survey: name a workload that is trained")
    ensure_home()
    with TemporaryDirectory() as folder, Worker(Path(folder) / "log") as worker:
        machine = machine_of(options, worker)
        patience = HangWatch(trial_seconds=options.trial_seconds).limit
        # A metric is not needed.
        any_target = Target("any", None if options.seeks_metric else 0.0, "min")
        options = options.model_copy(update={"target": options.target or any_target})
        options, _ = fill_from_project(
            worker, workload.recipe, options, workload.commands.study, patience
        )
        seconds = options.survey_seconds
        return kept_or_new_survey(
            machine, worker, workload.recipe, options, workload.settings, seconds
        )


def train_once(options: Options, workload: Workload) -> Record:
    """Train one configuration, ``trial.batch_size`` and ``trial.lr``, with its checkpoint.

    A command that gives these two does it in place of a study.

    Its folder is inside ``output``, and has the record and the checkpoint of its end.

    Raises:
        UserCodeError: if the training failed, with the user's file and line.
    """
    pair = options.trial.pair
    if pair is None:
        raise InputError("trial.batch_size and trial.lr are missing: give both for one run")
    options = _fill_by_study(options)
    of_study = StudyFolder(Path(options.output))
    batch_size, lr = pair
    name = f"trial-{batch_size}-{lr:.6g}-{options.trial.seed}"
    folder = StudyFolder(of_study.root / name)
    asked = _asked_run(options, folder, batch_size, lr)
    with closing(begin(options, trains=workload.recipe is not None, log=folder.log)) as begun:
        try:
            record = _train_asked(options, workload, begun.worker, asked)
        except (InputError, StudyError):
            discard_folder(folder)
            discard_folder(of_study)
            raise
    write_text(folder.trials, record.model_dump_json() + "\n")
    write_text(folder.config, workload.config)
    if record.status == "failed":
        raise UserCodeError(record.message)
    return record


def _fill_by_study(options: Options) -> Options:
    """Fill what is open by what a study of its name has found; InputError for what is missing."""
    if options.is_open("target") or options.is_open("budget.steps"):
        storage = StudyStorage(options.storage, options.study_name)
        options = fill_by_stored(options, storage.setting)
        storage.discard()
    absent = [missing("target")] if options.is_open("target") else []
    if options.trial.steps is None and not options.budget_is_in_steps:
        absent.append(missing("budget.steps" if options.budget.seconds is None else "trial.steps"))
    if absent:
        raise InputError("\n".join(absent))
    return options


def _asked_run(options: Options, folder: StudyFolder, batch_size: int, lr: float) -> AskedTrial:
    """The trial of ``trial.batch_size`` and ``trial.lr``; steps that are given are all trained."""
    given = options.trial
    total_steps = given.steps or options.budget.last_step(batch_size)
    spec = Spec(
        number=0,
        place="once",
        role="search",
        batch_size=batch_size,
        lr=lr,
        values=given.values or {},
        seed=given.seed,
        max_steps=total_steps,
        schedule_steps=total_steps if options.schedule_ends else None,
    )
    return AskedTrial(
        spec=spec,
        target=options.target if given.steps is None else replace(options.target, goal=None),
        total_steps=total_steps,
        save_to=folder.root / "checkpoint.ckpt",
        keep=True,
    )


def _train_asked(
    options: Options, workload: Workload, worker: AnyWorker | None, asked: AskedTrial
) -> Record:
    """Train a trial; InputError where its batch size does not fit."""
    assert workload.train is not None  # noqa: S101 (the command line has no loop of one's own)
    if worker is None:
        record = train_here(asked, workload.train)
    else:
        machine_of(options, worker)
        watch = HangWatch(trial_seconds=options.trial_seconds)
        *_, last = train_in_worker(worker, asked, workload.train, watch)
        assert last is not None  # noqa: S101 (a training ends with its record)
        record = last
    if record.is_unfit:
        raise InputError(record.message)
    return record
