"""Everything that can be wrong with a study, found before anything is written."""

import importlib
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from bstune.config import Composed, compose
from bstune.core.clock import stopwatch
from bstune.core.errors import ConfigError
from bstune.core.records import TrialProtocol, TrialSpec
from bstune.core.search_space import SizeLimits, Space
from bstune.core.step_time import seconds_between
from bstune.options import StudyOptions, flat_settings, shown, with_option
from bstune.recipe import Recipe
from bstune.study.early_checks import check_output
from bstune.study.planning.assumed_budget import SecondsLeft, budget_in_time
from bstune.study.planning.baseline import (
    NO_OWN_RUN,
    Baseline,
    baseline_of,
    text_on_excess,
    text_on_outside,
)
from bstune.study.planning.duration import advice_on_time
from bstune.study.planning.next_command import START_SLACK
from bstune.study.planning.plan import QUICK_SECONDS, SearchBudget, max_seconds
from bstune.study.planning.survey_time import (
    LEAST_LEFT,
    is_surveyed,
    needs_survey,
    seconds_left_of,
    survey_limit,
)
from bstune.study.storage.attributes import ARGUMENTS, THREADS_ARE_OPEN
from bstune.study.storage.connection import check_storage
from bstune.study.storage.opening import (
    stored_budget_times,
    stored_settings,
)
from bstune.study.storage.samplers import build_sampler
from bstune.study.training import Training, TrainingHere, TrainingProcess, TriedBackend
from bstune.system.console import format_number, format_seconds, plural
from bstune.system.failures import cause
from bstune.system.files import Output
from bstune.system.secrets import redact_values
from bstune.system.watchdog import waiting_for, watching
from bstune.tracking.address import check_uri, tracking_uri
from bstune.trial.backend import (
    Timed,
    TrialBackend,
    chooses_horizons,
    make_protocol,
    make_space,
    stops_trials,
)
from bstune.trial.processes.printed_once import own_lines, printed_once
from bstune.trial.processes.trials_log import TrialsLog
from bstune.trial.processes.workers import InProcess, Workers, mps_runs
from bstune.trial.replay import ReplayBackend, options_from_table

if TYPE_CHECKING:
    import optuna

    from bstune.hardware.survey import Survey
    from bstune.trial.own_loop import LoopRunner

# What logs a study; mlflow takes seconds to import.
TRACKING = "bstune.tracking.runs"
# Batch sizes whose seconds of a step are stored with a budget of seconds.
BUDGET_SIZES = 33
# The fewest trials of a whole budget that search.wall_seconds must have time for.
FEWEST_RUNS = 3
# The fewest steps of a trial of the objective loss at the smallest batch size.
FEWEST_STEPS = 10
# Seconds after which this process says what it waits for. The process that trains says it after
# ten.
OWN_SILENCE = 13.0
HORIZON_CAVEAT = (
    "The workload's schedule ends with the trial, at its horizon: S(B) is the shortest horizon "
    "that reaches the target, and a point stands where a run met the target, at its horizon's end "
    "or before."
)
FIXED_HORIZON_CAVEAT = (
    "The workload's schedule ends with the budget, which this sampler leaves as it is: the curve "
    "shows where this schedule stops working rather than the fewest steps (sampler=frontier "
    "chooses each trial's horizon)."
)
ON_TEST_CAVEAT = (
    "The target is measured on the test images, as the workload's source does: there is no other "
    "test."
)
ON_TEST_NOTE = "the target is measured on the test images, as the workload's source does"

OVERRIDDEN_CAVEAT = (
    "The learning rate was set in the optimizer that configure_optimizers builds, in place of its "
    "own, all groups and schedules in proportion."
)
OWN_TARGET_CAVEAT = (
    "The target is what your own configuration came to {after}: {target}, which is made easier by "
    "what chance is worth (workload.target.value sets another)."
)

SHARED_CAVEAT = (
    "No plan for further devices: it starts from the seconds per step of one, and here {} share "
    "the steps."
)


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
            f"the study {study.study_name!r} trains Python objects, which no command line has: "
            "continue it by the call of bstune.tune() that began it"
        )
    return compose_checked([*study.user_attrs[ARGUMENTS], *arguments, "mlflow.enabled=false"])


@dataclass(frozen=True)
class OwnGoal:
    """The target's value, where the study's first trial has set it.

    Args:
        value: of the metric.
        steps: of that trial's whole run; 0 where its record is not at hand.
        seconds: of training in these steps; None where not known.
    """

    value: float
    steps: int
    seconds: float | None

    @property
    def after(self) -> str:
        """How long the trial ran, in words, or "in its first run" where that is not at hand."""
        if not self.steps:
            return "in its first run"
        words = f"after {plural(self.steps, 'step')}"
        if self.seconds is not None:
            words += f", {format_seconds(self.seconds)}"
        return words


@dataclass(frozen=True)
class PreparedStudy:
    """A checked study, or one trial by itself."""

    options: StudyOptions
    """Of the study, with device and precision resolved."""
    recipe: Recipe | None
    """None: nothing is trained."""
    budget: SearchBudget
    space: Space
    """What is searched, within what the hardware takes."""
    protocol: TrialProtocol
    backend: TrialBackend
    files: Output
    trial: TrialSpec | None
    """The one trial to run instead of a study."""
    frozen_settings: Mapping[str, Any]
    """Options by their dotted names, which must not change while a study goes on."""
    survey: "Survey | None"
    """None where the hardware was not surveyed."""
    # Starts a number of processes that train; None: trials run in this one.
    open_processes: "Callable[[int], Workers | LoopRunner] | None"
    training: Training | None
    """None: nothing is trained."""
    notes: list[str]
    """Further lines of the printed plan."""
    elapsed: Callable[[], float]
    """Gives the seconds since the command began, which search.wall_seconds limits."""
    survey_seconds: float = 0.0
    """How long this command surveyed the hardware; 0 where the survey was cached."""
    baseline: Baseline | None = None
    """What trial 0 runs; None: the search's own first point."""
    goal: OwnGoal | None = None
    """The value of the target, where trial 0 has set it."""
    # Batch sizes and seconds of a step with which a study for the loss began; None: measured now.
    budget_times: tuple[tuple[int, float], ...] | None = None

    def open_runner(self, count: int | None = None) -> "Workers | InProcess | LoopRunner":
        """Start what runs the trials, ``count`` at a time; None: ``search.workers`` at a time."""
        if self.open_processes is None:
            return InProcess(self.backend.run)
        return self.open_processes(count or self.options.search.workers)

    def seconds_per_step(self, batch_size: float) -> float:
        """Give the seconds of a step that turn a budget of seconds into steps.

        A study that has begun keeps the seconds that it stored then, interpolated in logarithms
        between batch sizes: a new survey must not change its budget.
        """
        if self.budget_times is None:
            return self.backend.step_time(batch_size)
        return seconds_between(self.budget_times, batch_size)

    def measured_budget_times(self) -> tuple[tuple[int, float], ...]:
        """Give batch sizes spread evenly in logarithm over the range, each with a step's seconds.

        The reference's batch size is one of them.
        """
        low = self.space.low
        high = self.space.high
        shares_of_range = np.linspace(0.0, 1.0, BUDGET_SIZES)
        sizes = {round(low * (high / low) ** share) for share in shares_of_range.tolist()}
        # At the reference the baseline's budget is not interpolated.
        sizes.add(round(self.options.scaling.batch_size))
        return tuple((size, self.backend.step_time(size)) for size in sorted(sizes))

    @property
    def sets_target(self) -> bool:
        """Whether the study's first trial is still to set its target."""
        return self.budget.objective != "loss" and self.protocol.target.is_open

    def last_step(self, batch_size: float) -> int:
        """Give the step after which a trial's budget is spent.

        For the objective loss the budget is one of three: seconds, which the seconds of a step turn
        into steps, else examples, else steps.
        """
        size = round(batch_size)
        if self.budget.objective != "loss":
            return self.protocol.last_step(size)
        return _steps_at_budget(self.options, size, self.seconds_per_step)

    def close(self) -> None:
        """End the process that has loaded the data, if one was started and trains nothing now."""
        if self.training is not None:
            self.training.close()

    @property
    def caveats(self) -> list[str]:
        """Sentences of the report on how the schedule, devices and target were treated."""
        caveats = list[str]()
        if self.backend.horizon and chooses_horizons(self.options):
            caveats.append(HORIZON_CAVEAT)
        elif self.backend.horizon:
            caveats.append(FIXED_HORIZON_CAVEAT)
        if self.options.devices > 1:
            caveats.append(SHARED_CAVEAT.format(self.options.devices))
        if self.options.scaling.override_lr:
            caveats.append(OVERRIDDEN_CAVEAT)
        if self.backend.validates_on_test:
            caveats.append(ON_TEST_CAVEAT)
        if self.goal is not None:
            target = self.protocol.target
            caveats.append(OWN_TARGET_CAVEAT.format(after=self.goal.after, target=target))
        return caveats


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
    now = elapsed or stopwatch()
    with (
        watching(log, seconds=None, silence=OWN_SILENCE) as say,
        waiting_for("the study's preparation"),
    ):
        return _prepare(options, recipe, say, backend, now)


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
    options = _with_single_budget(options, recipe)
    if options.quick and options.search.wall_seconds is None:
        options = with_option(options, "search.wall_seconds", QUICK_SECONDS)
    threads_given = options.threads
    asked = _resolved(options, recipe, backend)
    options = asked.options
    protocol = asked.protocol
    budget = search_budget(options)
    # Training takes any learning rate; recorded runs have only those of their table.
    lr_range = TrialBackend.lr_range
    if asked.backend is not None:
        lr_range = asked.backend.lr_range
    space = make_space(options, lr_range)
    files = Output(Path(options.output).absolute())
    trial = _single_trial(options)
    _check_places(options, budget, trial)
    options, notes = _checked_tracking(options, trial)
    if asked.backend is None:
        assert asked.recipe is not None  # noqa: S101 (else the backend replays)
        seconds_left = seconds_left_of(options, elapsed)
        runs = _prepare_training(
            options, asked.recipe, protocol, space, trial, budget, files, seconds_left, say
        )
    else:
        runs = _PreparedRuns(asked.backend, space)
    backend = runs.backend
    notes += runs.notes
    # A workload that its first steps refuse does not wait for mlflow.
    options, tracking_notes = _with_imported_tracking(options, trial)
    notes += tracking_notes
    backend.check(runs.space, trial)
    options, budget_note = _with_budget_in_time(options, backend, trial, elapsed)
    if budget_note is not None:
        protocol = replace(protocol, budget=options.budget.budget)
        notes.append(budget_note)
    if backend.validates_on_test:
        notes.append(ON_TEST_NOTE)
    notes += backend.notes
    baseline: Baseline | None = None
    if trial is None:
        limits = _size_limits(backend, runs.survey)
        baseline = baseline_of(options, runs.space, limits)
        too_large = text_on_excess(options, limits)
        if too_large is not None:
            notes.append(too_large)
    if baseline is not None:
        asked_sizes = options.search.batch_size
        outside = text_on_outside(baseline, asked_sizes.low, asked_sizes.high)
        if outside is not None:
            notes.append(outside)
    is_for_target = options.search.objective != "loss"
    if is_for_target and protocol.target.is_open and baseline is None:
        raise ConfigError(NO_OWN_RUN.format(because=_why_no_own_run(options, trial)))
    prepared_study = PreparedStudy(
        # The options keep what the user asked for, not the number of threads from the storage.
        options=with_option(options, "threads", threads_given),
        recipe=asked.recipe,
        budget=budget,
        space=runs.space,
        protocol=protocol,
        backend=backend,
        files=files,
        trial=trial,
        frozen_settings=_frozen_settings(options, runs, asked.threads_are_open),
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


def _steps_at_budget(
    options: StudyOptions, batch_size: int, seconds_per_step: Callable[[float], float]
) -> int:
    """Give the step at which a trial of the objective loss has spent its budget.

    ``seconds_per_step``: gives the seconds of a step at a batch size, for a budget of seconds.
    """
    budget = options.budget
    if budget.seconds is not None:
        # The margin keeps a whole number of steps whole where the division falls just below it.
        steps = budget.seconds / seconds_per_step(batch_size)
        return max(1, math.floor(steps * (1.0 + 1e-9)))
    # One example is the default: the user has counted the budget in steps.
    if budget.examples > 1:
        return math.ceil(budget.examples / batch_size)
    return budget.steps


def _with_budget_in_time(
    options: StudyOptions,
    backend: TrialBackend,
    trial: TrialSpec | None,
    elapsed: Callable[[], float],
) -> tuple[StudyOptions, str | None]:
    """Shorten a trial's budget that bstune has assumed, and give the plan's note on it.

    A schedule that ends with its trial is as long as the budget. A trial that the study's time cuts
    off tells nothing, so that its budget must end earlier. The budget stays as it is where the user
    has stated it, where no schedule ends with it, and for a sampler that does not choose the length
    of schedules: there the budget is part of the workload.
    """
    stated = options.workload.budget
    epoch = stated.assumed_epoch
    is_for_target = options.search.objective != "loss"
    if epoch is None or options.budget.budget != stated.budget or not is_for_target:
        return options, None
    if trial is not None or not backend.horizon or not chooses_horizons(options):
        return options, None
    batch_size = round(options.scaling.batch_size)
    wall_left: float | None = None
    if options.search.wall_seconds is not None:
        wall_left = options.search.wall_seconds - elapsed()
    left = SecondsLeft(
        training=options.search.seconds,
        wall=wall_left,
        wall_per_training=1.0 + backend.evaluation_share,
    )
    shortened = budget_in_time(
        stated.budget, epoch, batch_size, backend.step_time(batch_size), left
    )
    if shortened == stated.budget:
        return options, None
    options = with_option(options, "budget.steps", shortened.steps)
    options = with_option(options, "budget.examples", shortened.examples)
    epochs = format_number(shortened.examples / epoch, 2)
    return options, (
        f"assumed: budget.examples={shortened.examples}, {epochs} epochs in place of "
        f"{format_number(stated.examples / epoch, 2)}, as the schedule ends with its trial and the "
        "study's time would cut a longer one; budget.examples=N sets another"
    )


def _with_single_budget(options: StudyOptions, recipe: Recipe | None) -> StudyOptions:
    """Turn the budget of a single trial for the objective loss into steps.

    They are as many as in a study: its stored seconds of a step turn a budget of seconds into
    steps. ConfigError where the study has stored none. Options of a study stay as they are.
    """
    trial = _single_trial(options)
    if trial is None or options.search.objective != "loss":
        return options
    # The step's seconds are asked for at the trial's batch size alone.
    steps = _steps_at_budget(
        options, trial.batch_size, lambda size: _single_step_seconds(options, recipe)
    )
    options = with_option(options, "budget.seconds", None)
    # A limit of one example is no limit.
    options = with_option(options, "budget.examples", 1)
    return with_option(options, "budget.steps", steps)


def _single_step_seconds(options: StudyOptions, recipe: Recipe | None) -> float:
    """Give the seconds of a step at a single trial's batch size, as its study has stored them.

    Without a recipe they are those of the table.

    Raises:
        ConfigError: where the study has stored none.
    """
    batch_size = options.trial.batch_size
    assert batch_size is not None  # noqa: S101 (the caller has looked)
    if recipe is None:
        return ReplayBackend(options, make_protocol(options, None)).step_time(batch_size)
    times = stored_budget_times(options.study, options.storage)
    if times is None:
        raise ConfigError(
            f"budget.seconds={shown(options.budget.seconds)} of a single trial are counted by the "
            f"seconds of a step that study={options.study} has measured, and it has measured none: "
            "run the study first, or give budget.steps=N budget.examples=1"
        )
    return seconds_between(times, batch_size)


def _check_budget(prepared: PreparedStudy) -> None:
    """Refuse a budget of the objective loss that no search can use.

    That is one in which the smallest batch size takes fewer than ``FEWEST_STEPS``, or seconds that
    exceed the study's wall time or have no timed steps to count them by.
    """
    budget = prepared.options.budget
    wall_seconds = prepared.budget.wall_seconds
    if budget.seconds is not None:
        if wall_seconds is not None and FEWEST_RUNS * budget.seconds > wall_seconds:
            # The next command's start may take longer than this one's.
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
    elif budget.examples > 1:
        least = f"budget.examples={FEWEST_STEPS * smallest}"
    else:
        least = f"budget.steps={FEWEST_STEPS}"
    raise ConfigError(
        f"a trial at the smallest batch size, {smallest}, ends after {plural(steps, 'step')}, "
        f"which tells nothing: give {least} at least"
    )


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

    Give the options, and whether neither the user nor a survey has chosen the number so far: then
    a survey of this run chooses it.
    """
    # torch takes seconds to import.
    from bstune.hardware.threads import OMP_THREADS

    # A single trial is not part of the study, whose number does not bind it.
    if options.threads != "auto" or _single_trial(options) is not None:
        return options, False
    stored = stored_settings(options.study, options.storage)
    threads = stored.get("threads")
    if not isinstance(threads, int):
        # OMP_NUM_THREADS in the environment is the user's choice, too.
        return options, OMP_THREADS not in os.environ
    are_open = stored.get(THREADS_ARE_OPEN) is True
    if are_open and is_surveyed(options, trial=None):
        return options, True
    return with_option(options, "threads", threads), are_open


def _frozen_settings(
    options: StudyOptions, runs: "_PreparedRuns", threads_are_open: bool
) -> Mapping[str, Any]:
    """Collect the settings that must not change while a study goes on, without secrets.

    ``threads_are_open``: whether nobody had chosen torch's threads before this run's survey.
    """
    of_backend = runs.backend.frozen_settings
    settings = {**flat_settings(options), **of_backend}
    are_chosen = runs.survey is not None and runs.survey.threads is not None
    # None: training is not on a CPU, or several processes share its threads.
    if threads_are_open and not are_chosen and of_backend.get("threads") is not None:
        settings[THREADS_ARE_OPEN] = True
    settings_without_secrets: Mapping[str, Any] = redact_values(settings)
    return settings_without_secrets


def _single_trial(options: StudyOptions) -> TrialSpec | None:
    """Give the one trial that ``trial.batch_size`` and ``trial.lr`` ask for; None for a study."""
    asked = options.trial
    if asked.batch_size is None or asked.lr is None:
        return None
    # delta is None, as no scaling rule gives the rate.
    return TrialSpec(
        number=0,
        trial_index=0,
        batch_size=asked.batch_size,
        lr=asked.lr,
        delta=None,
        seed=asked.seed,
    )


def _checked_tracking(
    options: StudyOptions, trial: TrialSpec | None
) -> tuple[StudyOptions, list[str]]:
    """Check the address of MLflow, which takes its import only for an address of a rare kind.

    Arguments and values are those of :func:`_with_imported_tracking`.
    """
    if not options.mlflow.enabled or trial is not None:
        return options, []
    try:
        with waiting_for("MLflow"):
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
        with waiting_for("MLflow"):
            importlib.import_module(TRACKING)
    except ImportError as error:
        return _without_tracking(options, error)
    return options, []


def _without_tracking(options: StudyOptions, error: ImportError) -> tuple[StudyOptions, list[str]]:
    """Turn MLflow off, which could not be imported, and give the plan's note on it."""
    note = f"not logged in MLflow, which cannot be imported: {cause(error)}"
    return with_option(options, "mlflow.enabled", False), [note]


@dataclass(frozen=True)
class _PreparedRuns:
    """What runs a study's trials on this machine, and what the survey found."""

    backend: TrialBackend
    space: Space
    """What is searched, within the batch sizes that fit."""
    training: Training | None = None
    """None where trials are answered from a table."""
    survey: "Survey | None" = None
    """None where the hardware was not surveyed."""
    open_runner: Callable[[int], Workers] | None = None
    """Starts a number of processes that train; None: trials run in this one."""
    notes: Sequence[str] = ()
    """Further lines of the printed plan."""
    survey_seconds: float = 0.0
    """How long the survey took here; 0 where there is none, or it was cached."""


def _prepare_training(
    options: StudyOptions,
    recipe: Recipe,
    protocol: TrialProtocol,
    space: Space,
    trial: TrialSpec | None,
    budget: SearchBudget,
    files: Output,
    seconds_left: Callable[[], float],
    say: Callable[[str], None],
) -> _PreparedRuns:
    """Try a few steps, survey the hardware, and choose the processes that train."""
    # torch takes seconds to import.
    from bstune.trial.checks.learning_rate import check_takes_rate

    if not options.scaling.override_lr:
        check_takes_rate(recipe)
    trials_log = TrialsLog(files.trials_log)
    # A single trial, and a study with search.workers=0, train in this process.
    in_processes = trial is None and options.search.workers > 0
    processes = TrainingProcess(options, recipe, trials_log)
    training: Training = processes
    if not in_processes:
        training = TrainingHere(options, recipe, protocol, trials_log)
    with waiting_for("the process that trains"):
        runs = _try_and_survey(
            options, recipe, protocol, space, trial, budget, training, seconds_left, say
        )
    notes = list(runs.notes)
    if options.devices > 1:
        # What the processes of the devices print goes to the log; bstune's own lines are shown.
        with printed_once(trials_log), watching(own_lines(say), options.protocol.trial_seconds):
            notes += _time_several_devices(options, recipe, runs, trial)
    open_runner: Callable[[int], Workers] | None = None
    if options.devices > 1 or in_processes:
        open_runner, notes_on_processes = _process_starter(processes, options, runs.survey)
        notes += notes_on_processes
    return replace(runs, open_runner=open_runner, notes=notes)


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
        wall_seconds=search.wall_seconds,
        precision=search.precision,
        least_gain=search.least_gain,
        replicates=search.replicates,
        candidates=search.candidates,
        stratified=search.stratified,
        baseline=search.baseline,
        seed=options.seed,
    )


def _try_and_survey(
    options: StudyOptions,
    recipe: Recipe,
    protocol: TrialProtocol,
    space: Space,
    trial: TrialSpec | None,
    budget: SearchBudget,
    training: Training,
    seconds_left: Callable[[], float],
    say: Callable[[str], None],
) -> _PreparedRuns:
    """Take a few steps, then survey the hardware if there is time and need for it.

    A survey limits the space to the batch sizes that fit, and gives the seconds of a step.

    ``seconds_left``: gives what is left of ``search.wall_seconds``.
    """
    # torch takes seconds to import.
    from bstune.hardware.report import headline
    from bstune.hardware.survey import measure_with
    from bstune.hardware.survey_cache import cached, kept

    continues = trial is None and stops_trials(options)
    surveyed = is_surveyed(options, trial)
    tried = training.try_steps(trial, continues=continues, surveyed=surveyed, say=say)
    backend = TriedBackend(tried, training)
    if trial is None:
        advice = _advice_on_length(options, protocol, space, budget, backend)
        if advice is not None:
            say(advice)
            backend.notes += (advice,)
    # A workload that is not to be surveyed has neither.
    key = tried.survey_key
    how = tried.how_timed
    if key is None or how is None:
        return _PreparedRuns(backend, space, training)
    left = seconds_left()
    limited_options = with_option(options, "hardware.seconds", survey_limit(options, left))

    def measured() -> "Survey":
        return measure_with(
            limited_options,
            recipe,
            space,
            protocol,
            tried.train_examples or 0,
            tried.findings,
            how,
            partial(training.time_steps, say, how),
            say,
        )

    if left >= LEAST_LEFT or needs_survey(options):
        with waiting_for("the survey of the hardware"):
            survey, was_cached = cached(limited_options, key, how, measured, say)
    else:
        # Too little time is left for a survey: one of an earlier command is used, if there is one.
        known = kept(limited_options, key, how)
        if known is None:
            return _PreparedRuns(backend, space, training)
        survey, was_cached = known, True
    high = min(space.high, survey.ceiling.batch_size)
    space = replace(space, low=survey.ceiling.smallest, high=high)
    # Seconds of the first steps stand in where the survey could not time enough batch sizes.
    backend.step_time = survey.step_time or tried.findings.step_time
    if survey.step_time is not None:
        # Trials side by side slow each other down: their own steps would falsify the law.
        if options.search.workers > 1:
            backend.step_time = survey.step_time.without_trials()
        threads: int | None = None
        if survey.threads is not None:
            threads = survey.threads.threads
        backend.timed = Timed(survey.seconds_of, survey.measured.waited, threads)
    # The device's name says with how many threads it trains.
    if survey.threads is not None:
        backend.rename(training.use_threads(survey.threads.threads))
    return _PreparedRuns(
        backend=backend,
        space=space,
        training=training,
        survey=survey,
        notes=tuple(headline(survey, was_cached)),
        survey_seconds=0.0 if was_cached else survey.seconds,
    )


def _advice_on_length(
    options: StudyOptions,
    protocol: TrialProtocol,
    space: Space,
    budget: SearchBudget,
    backend: TrialBackend,
) -> str | None:
    """Say what a long study takes, and what would make it fit; None for one that is not long."""
    seconds = max_seconds(budget, space, protocol, backend, options.budget.seconds)
    seconds /= max(1, options.search.workers)
    limited = budget.wall_seconds is not None or budget.seconds is not None
    return advice_on_time(seconds, budget.trials, options.device, limited)


def _time_several_devices(
    options: StudyOptions, recipe: Recipe, runs: _PreparedRuns, trial: TrialSpec | None
) -> list[str]:
    """Time the steps that several devices share, and give the plan's note on them.

    A survey has timed them already, and a single trial needs no timing.
    """
    # torch takes seconds to import.
    from bstune.hardware.several_devices import shared_step_time

    if runs.survey is None and trial is None:
        runs.backend.step_time = shared_step_time(options, recipe, runs.space)
    return [
        f"{options.devices} devices share each batch, a process each; all evaluate all validation "
        "data; the noise scale is not measured"
    ]


def _process_starter(
    processes: TrainingProcess, options: StudyOptions, survey: "Survey | None"
) -> tuple[Callable[[int], Workers], list[str]]:
    """Make the function that starts a number of processes that train, and the plan's notes on them.

    Raises:
        ConfigError: where several trials are to run at once and no survey has timed the steps.
    """
    # torch takes seconds to import.
    import torch

    count = options.search.workers
    if count <= 1:
        return processes.runner, []
    if survey is None or survey.step_time is None:
        raise ConfigError(
            f"search.workers={count} needs steps that are timed at two batch sizes or more, with "
            "nothing beside them: widen search.batch_size, or use search.workers=1"
        )
    bytes_each = survey.ceiling.at.limit
    threads: int | None = None
    memory_limit: int | None = None
    if options.device.startswith("cuda"):
        memory_limit = bytes_each
    else:
        # Together they have the machine's cores, and each no more threads than are fastest.
        threads = max(1, torch.get_num_threads() // count)
        if survey.threads is not None:
            threads = min(threads, survey.threads.threads)

    def open_runner(count: int) -> Workers:
        if count == 1:
            return processes.runner(1)
        return processes.runner(count, threads, memory_limit)

    return open_runner, [_note_on_processes(options, threads, bytes_each)]


def _note_on_processes(options: StudyOptions, threads: int | None, bytes_each: int) -> str:
    """Say in the plan how several trials run at once.

    Args:
        options: the study's.
        threads: of torch in each process; None: not limited, as the device is a GPU.
        bytes_each: of memory, for each process.
    """
    each = ""
    if threads is not None:
        each = f" with {plural(threads, 'thread')}"
    count = options.search.workers
    note = (
        f"{count} trials at once, each{each} within {bytes_each / 2**20:,.0f} MiB; seconds per "
        "step are the survey's, measured alone; which trial comes next depends on which ends first"
    )
    if options.search.replicates:
        note += "; winners run again alone"
    if options.device.startswith("cuda") and not mps_runs():
        note += (
            "; they take turns on the device, as NVIDIA's MPS does not run "
            "(nvidia-cuda-mps-control -d starts it)"
        )
    if options.search.tune:
        note += (
            f"; they are those of the config's own {', '.join(options.search.tune)}, whatever a "
            f"trial's"
        )
    return note
