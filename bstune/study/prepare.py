"""Everything that can be wrong with a study, found before anything is written."""

import importlib
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bstune.config import Composed, compose
from bstune.core.clock import stopwatch
from bstune.core.errors import ConfigError
from bstune.core.records import TrialProtocol, TrialSpec
from bstune.core.search_space import SizeLimits, Space
from bstune.options import StudyOptions, flat_settings, with_option
from bstune.recipe import Recipe
from bstune.study.early_checks import check_output
from bstune.study.planning.baseline import (
    NO_OWN_RUN,
    Baseline,
    baseline_of,
    text_on_excess,
    text_on_outside,
)
from bstune.study.planning.doubts import doubt_of_direction
from bstune.study.planning.next_command import START_SLACK
from bstune.study.planning.plan import SearchBudget, most_start_seconds, wall_limit
from bstune.study.planning.survey_time import is_surveyed, seconds_left_of
from bstune.study.planning.trial_budget import single_trial, with_budget_in_time, with_single_budget
from bstune.study.prepare_training import PreparedRuns, prepare_training
from bstune.study.prepared import PreparedStudy
from bstune.study.storage.attributes import ARGUMENTS, THREADS_ARE_OPEN
from bstune.study.storage.connection import check_storage
from bstune.study.storage.opening import stored_settings
from bstune.study.storage.samplers import build_sampler
from bstune.system.console import plural
from bstune.system.failures import cause
from bstune.system.files import Output
from bstune.system.secrets import redact_values
from bstune.system.watchdog import waiting_for, watching
from bstune.tracking.address import check_uri, tracking_uri
from bstune.trial.backend import TrialBackend, make_protocol, make_space
from bstune.trial.replay import ReplayBackend, options_from_table

if TYPE_CHECKING:
    import optuna

    from bstune.hardware.survey import Survey

# The fewest trials of a whole budget that search.wall_seconds must have time for.
FEWEST_RUNS = 3
# The fewest steps of a trial of the objective loss at the smallest batch size.
FEWEST_STEPS = 10
# What logs a study; mlflow takes seconds to import.
TRACKING = "bstune.tracking.runs"
# Seconds after which this process says what it waits for. The process that trains says it after
# ten.
OWN_SILENCE = 13.0
ON_TEST_NOTE = "the target is measured on the test images, as the workload's source does"


# Composes options and checks them. A replayed workload takes what is left open from its table.
compose_checked = partial(compose, from_table=options_from_table)


def compose_joined(study: "optuna.Study", arguments: Sequence[str]) -> Composed:
    """Compose the options and the recipe of a process that joins a study.

    They are those of the study's own arguments, then ``arguments``. MLflow is off, as the owner
    alone logs the study.

    Raises:
        ConfigError: for a study of Python objects, which has no arguments.
    """
    if not study.user_attrs[ARGUMENTS]:
        raise ConfigError(
            f"the study {study.study_name!r} was begun in Python or by a sweep of Hydra, and no "
            "worker can join it: continue it by the script or the command that began it"
        )
    return compose_checked([*study.user_attrs[ARGUMENTS], *arguments, "mlflow.enabled=false"])


def prepare(
    options: StudyOptions,
    recipe: Recipe | None,
    log: Callable[[str], None] = lambda line: None,
    backend: TrialBackend | None = None,
    elapsed: Callable[[], float] | None = None,
) -> PreparedStudy:
    """Check a study against this machine, its data and its storage, and give all that runs it.

    Args:
        options: checked, as :func:`bstune.config.compose` gives them.
        recipe: builds what is trained; None: the workload is answered from its table.
        log: takes lines of progress.
        backend: runs the trials in place of the workload's own.
        elapsed: says how many seconds ago the command began; None: it begins now.

    Raises:
        BstuneError: one of its subclasses, for what a user can mend and would fail later.
    """
    elapsed = elapsed or stopwatch()
    # By ``seconds=None`` a training step has its usual time limit.
    with (
        watching(log, seconds=None, silence=OWN_SILENCE) as say,
        waiting_for("the study's preparation"),
    ):
        return _prepare(options, recipe, say, backend, elapsed)


def _prepare(
    options: StudyOptions,
    recipe: Recipe | None,
    say: Callable[[str], None],
    backend: TrialBackend | None,
    elapsed: Callable[[], float],
) -> PreparedStudy:
    """Check the options, try the training, survey the hardware and collect all that a run needs.

    :func:`prepare`, which has the same arguments, calls this.
    """
    options = with_single_budget(options, recipe)
    threads_given = options.threads
    resolved = _resolved(options, recipe, backend)
    options = resolved.options
    protocol = resolved.protocol
    doubt = doubt_of_direction(protocol.target)
    if doubt is not None:
        say(doubt)
    budget = search_budget(options)
    # Training takes any learning rate; recorded runs have only those of their table.
    lr_range = TrialBackend.lr_range
    if resolved.backend is not None:
        lr_range = resolved.backend.lr_range
    space = make_space(options, lr_range)
    files = Output(Path(options.output).absolute())
    trial = single_trial(options)
    _check_places(options, budget, trial)
    options, notes = _checked_tracking(options, trial)
    if resolved.backend is None:
        assert resolved.recipe is not None  # noqa: S101 (else the backend replays)
        seconds_left = seconds_left_of(options, elapsed)
        runs = prepare_training(
            options, resolved.recipe, protocol, space, trial, budget, files, seconds_left, say
        )
    else:
        runs = PreparedRuns(resolved.backend, space)
    backend = runs.backend
    notes += runs.notes
    # A workload that its first steps refuse does not wait for mlflow.
    options, tracking_notes = _with_imported_tracking(options, trial)
    notes += tracking_notes
    backend.check(runs.space, trial)
    options, budget_note = with_budget_in_time(options, backend, trial, elapsed)
    if budget_note is not None:
        protocol = replace(protocol, budget=options.budget.budget)
        notes.append(budget_note)
    if backend.validates_on_test:
        notes.append(ON_TEST_NOTE)
    notes += backend.notes
    baseline: Baseline | None = None
    if trial is None:
        limits = _size_limits(backend, runs.survey)
        baseline, notes_on_baseline = _choose_baseline(options, runs.space, limits)
        notes += notes_on_baseline
    is_for_target = options.search.objective != "loss"
    # An open target is taken from a run of the user's own configuration, the baseline.
    if is_for_target and protocol.target.is_open and baseline is None:
        raise ConfigError(NO_OWN_RUN.format(because=_why_no_own_run(options, trial)))
    prepared_study = PreparedStudy(
        # The options keep what the user asked for, not the number of threads from the storage.
        options=with_option(options, "threads", threads_given),
        recipe=resolved.recipe,
        budget=budget,
        space=runs.space,
        protocol=protocol,
        backend=backend,
        files=files,
        trial=trial,
        frozen_settings=_frozen_settings(options, runs, resolved.threads_are_open),
        survey=runs.survey,
        open_processes=runs.open_runner,
        training=runs.training,
        notes=notes,
        elapsed=elapsed,
        survey_seconds=runs.survey_seconds,
        baseline=baseline,
    )
    if not is_for_target and trial is None:
        _check_budget(prepared_study)
    return prepared_study


@dataclass(frozen=True)
class _Resolved:
    """A study's options and recipe, with the device and precision of this machine."""

    options: StudyOptions
    recipe: Recipe | None
    protocol: TrialProtocol
    # What runs the trials in place of training; None: they are trained.
    backend: TrialBackend | None
    # Whether nobody has chosen torch's threads yet.
    threads_are_open: bool = False


def _resolved(
    options: StudyOptions, recipe: Recipe | None, backend: TrialBackend | None
) -> _Resolved:
    """Resolve device and precision of what is trained.

    Without a recipe nothing is trained here: ``backend`` answers the trials or, if it is None, the
    workload's table does.
    """
    if backend is None and recipe is not None:
        # torch and lightning take 4 s to import, and a replayed study needs neither.
        from bstune.trial.workload import checked_protocol, resolve

        options, threads_are_open = _with_stored_threads(options)
        options, recipe = resolve(options, recipe)
        return _Resolved(
            options=options,
            recipe=recipe,
            protocol=checked_protocol(options, recipe),
            # It is made once the training's first steps have been tried.
            backend=None,
            threads_are_open=threads_are_open,
        )
    if options.devices > 1:
        raise ConfigError(
            f"devices={options.devices} share batches that are trained, and here nothing is: "
            "use devices=1"
        )
    protocol = make_protocol(options, recipe)
    return _Resolved(
        options=options,
        recipe=recipe,
        protocol=protocol,
        backend=backend or ReplayBackend(options, protocol),
    )


def _check_places(options: StudyOptions, budget: SearchBudget, trial: TrialSpec | None) -> None:
    """Refuse an output folder, a sampler and a storage that cannot be used.

    This comes before the survey, which may take minutes.
    """
    check_output(options)
    # Building one shows whether the options suit the sampler; this one is not used.
    build_sampler(options, budget, trial_index=0)
    if trial is None:
        with waiting_for("the storage"):
            check_storage(options.storage)


def _check_budget(prepared: PreparedStudy) -> None:
    """Refuse a budget of the objective loss that no search can use.

    That is one in which the smallest batch size takes fewer than ``FEWEST_STEPS``, or seconds that
    exceed the study's wall time or have no timed steps to count them by.
    """
    budget = prepared.options.budget
    wall_seconds = prepared.budget.wall_seconds
    if budget.seconds is not None:
        if wall_seconds is not None and FEWEST_RUNS * budget.seconds > wall_seconds:
            # The next command's start may take longer than this one's. The advice has time for
            # twice the fewest trials.
            start = START_SLACK * prepared.elapsed()
            advised = math.ceil(start + 2 * FEWEST_RUNS * budget.seconds)
            raise ConfigError(
                f"search.wall_seconds={wall_seconds:g} is no time for {FEWEST_RUNS} trials of "
                f"budget.seconds={budget.seconds:g}: give search.wall_seconds={advised}, or "
                f"budget.seconds={wall_seconds / (2 * FEWEST_RUNS):g}"
            )
        if prepared.recipe is not None and prepared.survey is None:
            raise ConfigError(
                f"budget.seconds={budget.seconds:g} needs steps that are timed over all batch "
                "sizes: let hardware.enabled=true, or give budget.examples or budget.steps"
            )
    smallest = prepared.space.low
    steps = prepared.last_step(smallest)
    if steps >= FEWEST_STEPS:
        return
    if budget.seconds is not None:
        # They are rounded up, so that they are enough.
        seconds = 1.01 * FEWEST_STEPS * prepared.backend.step_time(smallest)
        least = f"budget.seconds={seconds:.3g}"
    elif budget.counts_examples:
        least = f"budget.examples={FEWEST_STEPS * smallest}"
    else:
        least = f"budget.steps={FEWEST_STEPS}"
    raise ConfigError(
        f"a trial at the smallest batch size, {smallest}, ends after {plural(steps, 'step')}, "
        f"which tells nothing: give {least} at least"
    )


def _choose_baseline(
    options: StudyOptions, space: Space, limits: SizeLimits
) -> tuple[Baseline | None, list[str]]:
    """Give the study's baseline, the user's own configuration, and the plan's notes on its size.

    It is None where its batch size is over the limits, and where the study leaves it out.
    """
    baseline = baseline_of(options, space, limits)
    notes = list[str]()
    too_large = text_on_excess(options, limits)
    if too_large is not None:
        notes.append(too_large)
    if baseline is not None:
        searched = options.search.batch_size
        outside = text_on_outside(baseline, searched.low, searched.high)
        if outside is not None:
            notes.append(outside)
    return baseline, notes


def _why_no_own_run(options: StudyOptions, trial: TrialSpec | None) -> str:
    """Say why a study leaves out its user's own configuration, which could be run.

    ``trial``: the one trial that the command runs; None: it runs a study.
    """
    if trial is not None:
        return "a single trial has none beside it"
    if not options.search.baseline:
        return "search.baseline=false leaves it out"
    return "this sampler goes through the batch sizes by itself"


def _with_stored_threads(options: StudyOptions) -> tuple[StudyOptions, bool]:
    """Set ``threads`` to the number that the stored study has, where the options leave it open.

    Give the options, and whether the number is open: neither the user nor a survey has chosen it.
    """
    # torch takes seconds to import.
    from bstune.hardware.threads import OMP_THREADS

    # A single trial is not part of the study, whose number does not bind it.
    if options.threads != "auto" or single_trial(options) is not None:
        return options, False
    stored = stored_settings(options.study, options.storage)
    threads = stored.get("threads")
    if not isinstance(threads, int):
        # OMP_NUM_THREADS in the environment is the user's choice, too.
        return options, OMP_THREADS not in os.environ
    # The stored number may be one that nobody has chosen: then a survey of this run chooses one.
    are_open = stored.get(THREADS_ARE_OPEN) is True
    if are_open and is_surveyed(options, trial=None):
        return options, True
    return with_option(options, "threads", threads), are_open


def _frozen_settings(
    options: StudyOptions, runs: "PreparedRuns", threads_are_open: bool
) -> Mapping[str, Any]:
    """Collect the settings that must not change while a study goes on, without secrets.

    ``threads_are_open``: whether nobody had chosen torch's threads before this run's survey.
    """
    of_backend = runs.backend.frozen_settings
    settings = {**flat_settings(options), **of_backend}
    survey_has_chosen = runs.survey is not None and runs.survey.threads is not None
    # There is no number where training is not on a CPU, or several processes share its threads.
    has_number = of_backend.get("threads") is not None
    if threads_are_open and not survey_has_chosen and has_number:
        # A survey of a later run may still choose another number.
        settings[THREADS_ARE_OPEN] = True
    settings_without_secrets: Mapping[str, Any] = redact_values(settings)
    return settings_without_secrets


def _checked_tracking(
    options: StudyOptions, trial: TrialSpec | None
) -> tuple[StudyOptions, list[str]]:
    """Check the address of MLflow, and give the options and the plan's notes.

    Only an address of a rare kind takes MLflow's import for that. Where the import fails the
    options turn MLflow off, and a note says so.

    ``trial``: the one trial that the command runs, which is not logged; None: it runs a study.
    """
    if not options.mlflow.enabled or trial is not None:
        return options, []
    try:
        with waiting_for("the modules of MLflow"):
            check_uri(tracking_uri(options.mlflow))
    except ImportError as error:
        return _without_tracking(options, error)
    return options, []


def _with_imported_tracking(
    options: StudyOptions, trial: TrialSpec | None
) -> tuple[StudyOptions, list[str]]:
    """Import MLflow, and give the options and the plan's notes.

    Where MLflow cannot be imported the options turn it off, and a note says so.

    ``trial``: the one trial that the command runs, which is not logged; None: it runs a study.
    """
    if not options.mlflow.enabled or trial is not None:
        return options, []
    try:
        with waiting_for("the modules of MLflow"):
            importlib.import_module(TRACKING)
    except ImportError as error:
        return _without_tracking(options, error)
    return options, []


def _without_tracking(options: StudyOptions, error: ImportError) -> tuple[StudyOptions, list[str]]:
    """Turn MLflow off, which could not be imported, and give the plan's note on it."""
    note = f"not logged in MLflow, which cannot be imported: {cause(error)}"
    return with_option(options, "mlflow.enabled", False), [note]


def _size_limits(backend: TrialBackend, survey: "Survey | None") -> SizeLimits:
    """Collect the largest batch sizes that the data and the memory allow."""
    in_memory: int | None = None
    # Where every size that was tried fits, the ceiling is the end of the range, not of the memory.
    if survey is not None and survey.ceiling.above is not None:
        in_memory = survey.ceiling.batch_size
    return SizeLimits(backend.train_examples, in_memory)


def search_budget(options: StudyOptions) -> SearchBudget:
    """Collect the budget of the search from the options."""
    search = options.search
    return SearchBudget(
        objective=search.objective,
        trials=search.trials,
        seconds=search.seconds,
        wall_seconds=wall_limit(options),
        most_start=most_start_seconds(options),
        precision=search.precision,
        least_gain=search.least_gain,
        replicates=search.replicates,
        candidates=search.candidates,
        stratified=search.stratified,
        baseline=search.baseline,
        seed=options.seed,
    )
