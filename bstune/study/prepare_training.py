"""What trains a study's trials on this machine: first steps, survey of the hardware, processes."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from textwrap import shorten
from typing import TYPE_CHECKING

from bstune.core.errors import ConfigError
from bstune.core.records import TrialProtocol, TrialSpec
from bstune.core.search_space import Space
from bstune.options import StudyOptions, with_option
from bstune.recipe import Recipe
from bstune.study.early_checks import check_takes_rate
from bstune.study.planning.doubts import doubt_of_scale
from bstune.study.planning.plan import SearchBudget
from bstune.study.planning.survey_time import LEAST_LEFT, is_surveyed, needs_survey, survey_limit
from bstune.study.training import Training, TrainingHere, TrainingProcess, Tried, TriedBackend
from bstune.system.console import plural
from bstune.system.files import Output
from bstune.system.watchdog import WAITING, Wait, waiting_for, watching
from bstune.trial.backend import Timed, TrialBackend, stops_trials
from bstune.trial.processes.printed_once import own_lines, printed_once
from bstune.trial.processes.trials_log import TrialsLog
from bstune.trial.processes.workers import Workers, mps_runs

if TYPE_CHECKING:
    from bstune.hardware.survey import Survey

# Characters of a line by which a wait is named.
NAMING_WIDTH = 60


@dataclass(frozen=True)
class PreparedRuns:
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


def prepare_training(
    options: StudyOptions,
    recipe: Recipe,
    protocol: TrialProtocol,
    space: Space,
    trial: TrialSpec | None,
    budget: SearchBudget,
    files: Output,
    seconds_left: Callable[[], float],
    say: Callable[[str], None],
) -> PreparedRuns:
    """Try a few steps, survey the hardware, and choose the processes that train."""
    check_takes_rate(options, recipe)
    trials_log = TrialsLog(files.trials_log)
    # A single trial, and a study with search.workers=0, train in this process.
    in_processes = trial is None and options.search.workers > 0
    processes = TrainingProcess(options, recipe, trials_log)
    training: Training = processes
    if not in_processes:
        training = TrainingHere(options, recipe, protocol, trials_log)
    with waiting_for("the process that trains to start") as wait:
        noting_say = noting_lines(say, wait)
        runs = _try_and_survey(
            options, recipe, protocol, space, trial, budget, training, seconds_left, noting_say
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


def noting_lines(say: Callable[[str], None], wait: Wait) -> Callable[[str], None]:
    """Make a function that prints a line with ``say``, and names ``wait`` after it.

    The wait is for the process that trains, which the lines come from: the user waits for what
    comes after its last line. The wait's seconds count from that line.
    """

    def noting_say(line: str) -> None:
        # A line of the other process's own watch tells of no progress.
        if not line.startswith(WAITING):
            last = shorten(line, NAMING_WIDTH, placeholder=" ...")
            wait.go_on(f"the process that trains, after '{last}'", limited=False)
        say(line)

    return noting_say


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
) -> PreparedRuns:
    """Take a few steps, then survey the hardware if there is time and need for it.

    ``seconds_left``: gives what is left of ``search.wall_seconds``.
    """
    continues = trial is None and stops_trials(options)
    surveyed = is_surveyed(options, trial)
    tried = training.try_steps(trial, continues=continues, surveyed=surveyed, say=say)
    backend = TriedBackend(tried, training)
    doubt = doubt_of_scale(protocol.target, tried.findings.start_metric)
    if doubt is not None:
        say(doubt)
    survey, was_cached = _survey_in_time(
        options, recipe, protocol, space, training, tried, seconds_left, say
    )
    if survey is None:
        return PreparedRuns(backend, space, training)
    # torch takes seconds to import.
    from bstune.hardware.report import headline

    _take_survey(backend, training, survey, options.search.workers)
    # The space is limited to the batch sizes that fit.
    high = min(space.high, survey.ceiling.batch_size)
    # A survey from the cache has cost this study no time.
    survey_seconds = 0.0 if was_cached else survey.seconds
    space = replace(space, low=survey.ceiling.smallest, high=high)
    return PreparedRuns(
        backend=backend,
        space=space,
        training=training,
        survey=survey,
        notes=tuple(headline(survey, was_cached)),
        survey_seconds=survey_seconds,
    )


def _survey_in_time(
    options: StudyOptions,
    recipe: Recipe,
    protocol: TrialProtocol,
    space: Space,
    training: Training,
    tried: Tried,
    seconds_left: Callable[[], float],
    say: Callable[[str], None],
) -> tuple["Survey | None", bool]:
    """Survey the hardware, or take a survey from the cache; say whether it was there.

    None where the workload is not to be surveyed, and where too little time is left for a survey
    and the cache has none.
    """
    # torch takes seconds to import.
    from bstune.hardware.survey import measure_with
    from bstune.hardware.survey_cache import cached, kept

    # A workload that is not to be surveyed has neither.
    key = tried.survey_key
    how = tried.how_timed
    if key is None or how is None:
        return None, False
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

    if left < LEAST_LEFT and not needs_survey(options):
        known = kept(limited_options, key, how)
        return known, known is not None
    with waiting_for("the survey of the hardware"):
        return cached(limited_options, key, how, measured, say)


def _take_survey(backend: TriedBackend, training: Training, survey: "Survey", workers: int) -> None:
    """Give the backend the survey's seconds of a step and, on a CPU, its number of threads.

    ``workers``: how many trials are trained at once.
    """
    threads: int | None = None
    if survey.threads is not None:
        threads = survey.threads.threads
        # The device's name says with how many threads it trains.
        backend.rename(training.use_threads(threads))
    law = survey.step_time
    # Where the survey could not time enough batch sizes the backend keeps the first steps' seconds.
    if law is None:
        return
    backend.timed = Timed(survey.seconds_of, survey.measured.waited, threads)
    # The law is later fitted to the trials' own steps as well. Those of trials side by side would
    # falsify it, as such trials slow each other down.
    backend.step_time = law if workers <= 1 else law.without_trials()


def _time_several_devices(
    options: StudyOptions, recipe: Recipe, runs: PreparedRuns, trial: TrialSpec | None
) -> list[str]:
    """Time the steps that several devices share, and give the plan's note on the devices.

    Nothing is timed after a survey, which has timed the steps, or for a single trial.
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

    workers = options.search.workers
    if workers <= 1:
        return processes.runner, []
    if survey is None or survey.step_time is None:
        raise ConfigError(
            f"search.workers={workers} needs steps that are timed at two batch sizes or more, with "
            "nothing beside them: widen search.batch_size, or use search.workers=1"
        )
    bytes_each = survey.ceiling.at.limit
    threads: int | None = None
    memory_limit: int | None = None
    if options.device.startswith("cuda"):
        memory_limit = bytes_each
    else:
        # Together they have the machine's cores, and each no more threads than are fastest.
        threads = max(1, torch.get_num_threads() // workers)
        if survey.threads is not None:
            threads = min(threads, survey.threads.threads)

    def open_runner(count: int) -> Workers:
        # A trial that runs alone, such as a winner that runs again, has the whole machine.
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
    # The seconds per step, of which the note tells first, were measured with the config's values.
    if options.search.tune:
        note += (
            f"; they are those of the config's own {', '.join(options.search.tune)}, whatever a "
            f"trial's"
        )
    return note
