"""Runs a study whose trials are jobs of anyone's Hydra application: ``hydra/sweeper=bstune``.

Each trial is one job, which the application's launcher starts with the trial's values as overrides.
The task's return value is reported to the trial: a number that the config names, or a dict::

    {"history": [(step, value), ...], "seconds_per_step": 0.01}    # the target's metric; None: NaN
    {"steps": 120, "seconds_per_step": 0.01}                       # to the target; math.inf: missed

Unless it is named, the objective is ``time`` where the first jobs that end return seconds, and
``steps`` where they return none. From then on it is the study's. A number is ``returns: steps``, or
``returns: metric`` at the end of ``budget``, which is compared as by ``objective: loss``;
``target`` is then a name alone. A job that raises an error is a failed trial, one that returns NaN
a diverged one. Any other value ends the sweep with a line.

The keys below ``hydra.sweeper`` (all of them are in
:class:`hydra_plugins.bstune_sweeper.sweeper.BstuneSweeperConf`):

* ``params`` as of Hydra's Optuna sweeper; the command line's come after. ``batch_size: KEY`` and
  ``lr: KEY`` name the two where their keys do not end in ``batch_size``, ``lr`` or
  ``learning_rate``. A choice of batch sizes searches all multiples of their greatest common
  divisor, a choice of rates all rates between.
* ``reference: [B, lr]`` is where the search begins; left out, it is the application's own pair.
* ``max_steps``, ``resume_from`` and ``save_to`` name the keys by which jobs are stopped and
  continued; ``checkpoint: PATH`` is where a job saves below its output folder, in place of
  ``save_to``. Without them each job runs to its end. ``seed`` names the key of the trial's seed;
  without it nothing runs again on fresh seeds.
* ``schedule_ends: true`` says that a job's learning rate schedule ends at its ``max_steps``: the
  search then chooses how long each schedule is.
* ``sampler`` is one of bstune's by name, or a node with the ``_target_`` of any of Optuna's.
* ``n_jobs`` trials are handed together to ``hydra/launcher``, and the next ones follow once all
  have ended. Where a launcher loses a whole batch, each of its jobs is launched once more, by
  itself.

The same command goes on after a kill. ``multirun.yaml`` and ``optimization_results.yaml`` go to
``hydra.sweep.dir``, the study's files and page to ``outputs/NAME``.
"""

import json
import math
import shlex
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from hydra.core.override_parser.types import Quote, QuotedString
from hydra.core.utils import JobReturn
from hydra.errors import HydraException
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import safe_dump

from bstune.config import plain_error
from bstune.core.errors import BstuneError, ConfigError, StudyError, UserCodeError
from bstune.core.metric_names import mode_of, parse_target
from bstune.core.numbers import as_float, as_int, shown
from bstune.core.objectives import Objective
from bstune.core.option_names import ARGUMENT_OPTIONS, in_hydra, in_python
from bstune.core.records import Budget, Target, TrialResult
from bstune.integrations.hydra_params import Params, bare, read_params
from bstune.options import StudyOptions, with_option
from bstune.result.values import TrialPoint
from bstune.study.commands import rounded_within
from bstune.study.own_loop import batches_of
from bstune.study.result import Result
from bstune.study.showing.printed import from_here, short_path
from bstune.study.storage.opening import (
    begun_study,
    change_objective,
    find_study,
    settings_of,
)
from bstune.study.storage.trials import results
from bstune.study.study import Study
from bstune.system import interruption
from bstune.system.console import plain_console, print_line
from bstune.system.exits import interrupted_status, is_interruption, sys_exit_error
from bstune.system.files import write_text
from bstune.system.terminal import write_error
from bstune.trial.own_loop.loop_backend import LoopLimits
from bstune.trial.own_loop.loop_trial import LoopTrial

OWN_SAMPLER = "frontier"
OBJECTIVE = ARGUMENT_OPTIONS["objective"]
PAGE_FILE = "report.html"
# Users' scripts read it, as they do that of Hydra's Optuna sweeper.
RESULTS_FILE = "optimization_results.yaml"
# Hydra's flags that say where the application's config is.
CONFIG_FLAGS = ("--config-name", "-cn", "--config-path", "-cp", "--config-dir", "-cd")
# A spending, in costs of a full trial, that no study comes to.
NEVER_SPENT = 1e6
SAME_SEED = (
    "each job has the seed of the application's config, so that none runs again on a fresh one; "
    "hydra.sweeper.seed=KEY names where it takes one"
)
# Optuna's samplers search so many sigmas on each side of the rule.
SIGMAS = 3.0
# The least octaves of learning rates to search on each side, as sigma must be over 0.
LEAST_OCTAVES = 0.01
NO_SECONDS = (
    "the task returns no seconds_per_step, so that the study seeks the fewest steps: to seek the "
    "least time, return it, and give another hydra.sweeper.study_name"
)
RETURNS = ("steps", "metric")
NAMED_KEYS = ("seed", "max_steps", "resume_from", "save_to")
IN_A_DICT = {"steps", "seconds_per_step", "history"}
WHAT_TO_RETURN = (
    "return its steps to the target, its metric at the end, or a dict of history (pairs of step "
    "and metric) or steps, and of seconds_per_step"
)


class Sweeping(Protocol):
    """Hydra's sweeper: its settings, and the values that Hydra sets before it sweeps."""

    settings: dict[str, Any]
    config: DictConfig | None
    launcher: Launcher | None
    hydra_context: HydraContext | None

    def validate_batch_is_legal(self, batch: Sequence[Sequence[str]]) -> None:
        """Raise an error if the overrides of a job cannot be composed."""


@dataclass(frozen=True)
class Settings:
    """The keys below ``hydra.sweeper``; ``BstuneSweeperConf`` says what they mean."""

    params: Mapping[str, object] | None
    batch_size: str | None
    lr: str | None
    seed: str | None
    max_steps: str | None
    resume_from: str | None
    save_to: str | None
    checkpoint: str | None
    schedule_ends: bool
    target: str | None
    mode: str | None
    budget: Mapping[str, int] | None
    objective: str | None
    returns: str | None
    reference: Sequence[float] | None
    sampler: str | Mapping[str, object] | None
    options: Sequence[str]
    n_trials: int | None
    n_jobs: int
    study_name: str | None
    storage: str | None
    load_if_exists: bool

    @property
    def goal(self) -> str:
        """The study's objective: the given one, else ``loss`` if tasks return a metric.

        Any other sweep begins with ``time``.
        """
        if self._given_goal is not None:
            return self._given_goal
        return "loss" if self.returns == "metric" else "time"

    @property
    def goal_is_open(self) -> bool:
        """Whether the first jobs settle the objective, by returning seconds or none."""
        return self._given_goal is None and self.returns != "metric"

    @property
    def _given_goal(self) -> str | None:
        """The objective that the user has named, below ``hydra.sweeper`` or among ``options``."""
        if self.objective:
            return self.objective
        given = [line for line in self.options if bare(line).startswith(f"{OBJECTIVE}=")]
        return given[-1].partition("=")[2] if given else None

    @property
    def has_own_sampler(self) -> bool:
        """Whether bstune's own sampler searches."""
        return self.sampler in (None, OWN_SAMPLER)


def run_sweep(sweeper: Sweeping, arguments: Sequence[str]) -> None:
    """Run or continue the study, and write its results.

    An error that the user can mend ends the process with a line and status 2, Ctrl-C with one and
    130, and a termination signal that Lightning or bstune has turned into an error with one and
    143.
    """
    try:
        _sweep(sweeper, arguments)
    except BstuneError as error:
        write_error(f"error: {error}")
        sys.exit(error.exit_status)
    except (KeyboardInterrupt, SystemExit) as error:
        if not is_interruption(error):
            raise
        write_error(interruption.text())
        # Lightning makes an exit with status 1 of Ctrl-C.
        sys.exit(interrupted_status(error))


def _sweep(sweeper: Sweeping, arguments: Sequence[str]) -> None:
    """Run or continue the study; ``arguments`` are the parameters on the command line."""
    settings = Settings(**sweeper.settings)
    config = sweeper.config
    launcher = sweeper.launcher
    context = sweeper.hydra_context
    assert config is not None  # noqa: S101 (it was set up)
    assert launcher is not None  # noqa: S101 (it was set up)
    assert context is not None  # noqa: S101 (it was set up)
    _check(settings, config)
    lines = [f"{key}={value}" for key, value in (settings.params or {}).items()]
    every_line = [*lines, *arguments]
    params = read_params(every_line, settings.batch_size, settings.lr, context.config_loader)
    study = _study(settings, params, config)
    _check_jobs(sweeper, settings, params, study)
    folder = Path(config.hydra.sweep.dir)
    folder.mkdir(parents=True, exist_ok=True)
    OmegaConf.save(config, folder / "multirun.yaml")
    # A line says that jobs which take no seed are never run again on a fresh one.
    assumptions = () if settings.seed is not None else (SAME_SEED,)
    run_jobs = partial(_run_jobs, launcher, settings, params)
    job_command = partial(_job_command, params, settings.max_steps)
    limits = replace(_limits(settings, params), job_command=job_command)
    with _refused_in_hydra():
        _run_for_objective(run_jobs, study.options, limits, assumptions)
        _write_results(study.result, params, folder)
    print_line(plain_console(), f"results   {short_path(folder / RESULTS_FILE)}")


@contextmanager
def _refused_in_hydra() -> Iterator[None]:
    """Let refusals within the context name options as a sweep sets them."""
    try:
        yield
    except UserCodeError:
        raise
    except BstuneError as error:
        text = str(error)
        # The study may have written the options as arguments of Python already. The cause of its
        # error then has them as options.
        before = str(error.__cause__)
        if in_python(before) == text:
            text = before
        error.args = (in_hydra(text),)
        raise


def _job_command(
    params: Params, max_steps_key: str | None, point: TrialPoint, last_step: int
) -> str:
    """Write the application's own command that trains a point.

    Args:
        params: of the sweep, whose fixed overrides all its jobs have.
        max_steps_key: the application's key of the steps after which a job ends; None: it has none.
        point: to train. Its learning rate is rounded to what is shown.
        last_step: of a trial's budget at the point's batch size, which a seed may need.
    """
    shown = dict[str, float]()
    for name, value in point.hyperparameters.items():
        tunable = params.tunable[name]
        if value is not None:
            shown[name] = rounded_within(value, tunable["low"], tunable["high"])
    values = params.values(shown)
    values[params.batch_size] = str(round(point.batch_size))
    values[params.lr] = repr(rounded_within(point.lr, params.rates.low, params.rates.high))
    # The application's own max_steps may be fewer than the trials had. A job whose schedule ends
    # with it is as long as that.
    if max_steps_key is not None:
        values[max_steps_key] = str(last_step if point.horizon is None else point.horizon)
    return shlex.join([*application_words(sys.argv), *_override_lines(params, values)])


def application_words(arguments: Sequence[str]) -> list[str]:
    """Give the words that begin the application's command: its script, and where its config is.

    ``arguments``: of the process, the script first.
    """
    script = arguments[0]
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    words = [Path(script).name]
    # A script that pip has installed is called by its name.
    if script.endswith(".py"):
        words = ["python", str(from_here(Path(script)))]
    # It was begun by ``python -m``.
    if spec is not None:
        words = ["python", "-m", spec.name.removesuffix(".__main__")]
    follows = False
    for argument in arguments[1:]:
        name, sign, _ = argument.partition("=")
        is_flag = name in CONFIG_FLAGS
        if is_flag or follows:
            words.append(argument)
        # Its value is the next word unless it stands behind the sign.
        follows = is_flag and not sign
    return words


def _limits(settings: Settings, params: Params) -> LoopLimits:
    """Say what the jobs of a sweep can do, and the range of learning rates that it searches."""
    save_place = f"the path in {settings.save_to}"
    if settings.checkpoint is not None:
        save_place = f"{settings.checkpoint} in the job's output folder"
    # A job returns what it did at its end: its trial is reported in hindsight. Only a job that
    # takes ``max_steps`` can be stopped before the end of its budget.
    return LoopLimits(
        stops=settings.max_steps is not None,
        schedule_ends=settings.schedule_ends,
        lr_range=(params.rates.low, params.rates.high),
        jobs=settings.n_jobs,
        in_hindsight=True,
        continues=settings.resume_from is not None,
        save_place=save_place,
        objective_is_open=settings.goal_is_open,
    )


def _run_for_objective(
    run_jobs: Callable[[StudyOptions, LoopLimits, tuple[str, ...]], bool],
    options: StudyOptions,
    limits: LoopLimits,
    assumptions: tuple[str, ...],
) -> None:
    """Run the jobs of a study whose objective may be open: whether they return seconds settles it.

    Args:
        run_jobs: runs them with these options, limits and assumptions, as :func:`_run_jobs` does.
        options: of the study.
        limits: of its jobs; they say whether the objective is open.
        assumptions: lines on what the study takes for granted of the jobs.
    """
    settled = _objective_settled_before(options) if limits.objective_is_open else None
    settled_limits = replace(limits, objective_is_open=False)
    if settled == "steps":
        run_jobs(_seeking_steps(options), settled_limits, assumptions)
        return
    if settled == "time":
        run_jobs(options, settled_limits, assumptions)
        return
    seeks_steps = run_jobs(options, limits, assumptions)
    if seeks_steps:
        print_line(plain_console(), NO_SECONDS)
        run_jobs(_seeking_steps(options), settled_limits, ())


def _run_jobs(
    launcher: Launcher,
    settings: Settings,
    params: Params,
    options: StudyOptions,
    limits: LoopLimits,
    assumptions: tuple[str, ...],
) -> bool:
    """Run or continue the study by launching its trials' jobs, to its end.

    Where the objective is open, the study begins with ``time``. If its first jobs return no
    seconds, it is left before its end. What has been trained is stored by then.

    Returns:
        Whether it was left so, and is to go on with the objective ``steps``.
    """
    is_open = limits.objective_is_open
    with closing(batches_of(options, assumptions, limits)) as batches:
        for batch in batches:
            overrides = [_overrides(trial, settings, params) for trial in batch]
            jobs = _launch(launcher, batch, overrides)
            # While the objective is open, a return without seconds is an answer, and no mistake.
            needs_seconds = options.search.objective in ("time", "both") and not is_open
            _report_jobs(batch, jobs, settings, needs_seconds)
            if is_open:
                ended = [trial.finished for trial in batch]
                records = [finished.result() for finished in ended if finished is not None]
                settled = _settled_objective(records)
                if settled == "steps":
                    return True
                is_open = settled is None
    return False


def _settled_objective(records: Sequence[TrialResult]) -> Objective | None:
    """Give the objective that the seconds of trials, or their lack, settle.

    It is None where all have failed or diverged: a job that diverges may return no seconds though
    others do.
    """
    ended = [record for record in records if record.status in ("reached", "stopped")]
    if any(record.seconds_per_step is not None for record in ended):
        return "time"
    return "steps" if ended else None


def _objective_settled_before(options: StudyOptions) -> Objective | None:
    """Give the objective that an earlier run of the sweep has settled; None where none has.

    A run that was killed just then has stored its trials alone.
    """
    begun = begun_study(options.study, options.storage)
    if begun is None:
        return None
    stored = settings_of(begun).get(OBJECTIVE)
    if stored == "time":
        return _settled_objective(results(begun))
    # A study of any other objective is refused by its settings.
    return "steps" if stored == "steps" else None


def _seeking_steps(options: StudyOptions) -> StudyOptions:
    """Let the study, which has begun, seek the fewest steps; give its options for that."""
    change_objective(find_study(options.study, options.storage), "steps")
    return with_option(options, OBJECTIVE, "steps")


def _check(settings: Settings, config: DictConfig) -> None:
    """Refuse settings that no study can have."""
    if settings.n_jobs < 1:
        raise ConfigError(
            f"hydra.sweeper.n_jobs must be how many jobs are launched at once, 1 or more, but got "
            f"{settings.n_jobs}"
        )
    workers = [line for line in settings.options if bare(line).startswith("search.workers=")]
    if workers:
        raise ConfigError(
            f"hydra.sweeper.options has {workers[0]}: leave it out, hydra.sweeper.n_jobs says how "
            "many jobs are launched at once"
        )
    if settings.returns == "seconds":
        raise ConfigError(
            "hydra.sweeper.returns=seconds: seconds alone do not tell the steps that a batch size "
            'takes: let the task return {"steps": ..., "seconds_per_step": ...}'
        )
    if settings.returns is not None and settings.returns not in RETURNS:
        raise ConfigError(
            f"hydra.sweeper.returns must be {' or '.join(RETURNS)}, but got {settings.returns!r}"
        )
    if settings.target is None:
        raise ConfigError(
            "hydra.sweeper.target is missing: give the metric and its goal, as val_loss<=0.5, or "
            "with objective=loss the metric alone"
        )
    _check_direction(str(settings.target), settings.mode)
    if not settings.budget or not settings.budget.keys() <= {"steps", "examples"}:
        raise ConfigError(
            "hydra.sweeper.budget must be how long a job trains at most, as {examples: 100000} or "
            f"{{steps: 1000}}, but got {settings.budget}"
        )
    can_save = settings.save_to is not None or settings.checkpoint is not None
    if settings.resume_from is not None and (settings.max_steps is None or not can_save):
        raise ConfigError(
            f"hydra.sweeper.resume_from={settings.resume_from} lets a stopped job go on: name "
            "max_steps, which stops it, too, and where it is saved: save_to=KEY, or "
            "checkpoint=PATH below its output folder"
        )
    if settings.schedule_ends and settings.max_steps is None:
        raise ConfigError(
            "hydra.sweeper.schedule_ends=true needs the key of a job's length, at which its "
            "schedule ends: name it, hydra.sweeper.max_steps=KEY"
        )
    if settings.schedule_ends and settings.resume_from is not None:
        raise ConfigError(
            f"hydra.sweeper.resume_from={settings.resume_from} lets a stopped job go on, but by "
            "schedule_ends=true each job's schedule ends with it: leave one of the two out"
        )
    for name in NAMED_KEYS:
        key = getattr(settings, name)
        if key is not None and not key.startswith("+") and not _has_key(config, key):
            raise ConfigError(
                f"hydra.sweeper.{name}={key}: the application's config has no {key}: add '{key}: "
                f"null' to it, or name it +{key}"
            )


def _check_direction(text: str, mode: str | None) -> None:
    """Refuse a target the wrong way round: no job tells whether untrained weights meet it.

    Args:
        text: of the target.
        mode: the direction that is stated besides; None: none is.
    """
    if mode not in (None, "min", "max"):
        raise ConfigError(f"hydra.sweeper.mode must be min or max, but got {mode!r}")
    if not any(sign in text for sign in "<=>"):
        return
    metric, value, of_sign = parse_target(text, "hydra.sweeper.target")
    usual = mode_of(metric)
    stated = mode or usual
    if stated is None or stated == of_sign:
        return
    by = "by its name" if mode is None else f"by mode={mode}"
    verb, sign = ("rise", ">=") if stated == "max" else ("fall", "<=")
    mended = f"{metric}{sign}{value:.12g}"
    raise ConfigError(
        f"hydra.sweeper.target={text}: {by} {metric} is to {verb}: write {mended}, or "
        f"hydra.sweeper.mode={of_sign} if the other way is meant"
    )


def _has_key(config: DictConfig, key: str) -> bool:
    """Tell whether a config has a dotted key."""
    parent, _, name = key.rpartition(".")
    node = OmegaConf.select(config, parent) if parent else config
    return isinstance(node, DictConfig) and name in list(node.keys())


def _study(settings: Settings, params: Params, config: DictConfig) -> Study:
    """Make the study of a sweep from the settings, the parameters and the application's config."""
    reference_size, reference_rate = _reference(settings, params, config)
    options = list[str]()
    # Batch sizes given as a list: the multiples of their greatest common divisor are searched.
    if params.multiple is not None:
        options.append(f"search.batch_size.multiple={params.multiple}")
    options += _seed_options(settings)
    options += _sampler_options(settings, params, reference_rate)
    # While the jobs are still to settle it, the study begins with its default, time.
    objective = None if settings.goal_is_open else settings.goal
    with _refused_in_hydra():
        study = Study(
            target=_target(str(settings.target), settings.mode),
            batch_sizes=(int(params.batch_sizes.low), int(params.batch_sizes.high)),
            reference=(reference_size, reference_rate),
            budget=Budget(**(settings.budget or {})),
            tunable=params.tunable,
            name=settings.study_name or str(config.hydra.job.name),
            objective=objective,
            trials=settings.n_trials,
            workers=settings.n_jobs,
            storage=settings.storage,
            options=[*options, *settings.options],
        )
    if not settings.load_if_exists:
        _check_new(study)
    return study


def _seed_options(settings: Settings) -> list[str]:
    """Give the options by which no trial runs again on a fresh seed, if the application takes none.

    Without a seed the job would only be repeated.
    """
    if settings.seed is not None:
        return []
    options = ["search.replicates=0"]
    # At a budget bstune's own sampler runs its best points again while it searches, whatever
    # search.replicates says.
    if settings.goal == "loss" and settings.has_own_sampler:
        options.append(f"sampler.policy.loss_fresh_after={NEVER_SPENT:g}")
    return options


def _target(target: str, mode: str | None) -> Target | str:
    """Give the target as a study takes it.

    A metric's name without a goal becomes, with a mode, an open target: its goal is not known yet.
    Without a mode the study takes the mode that the metric's name suggests.
    """
    if mode is None or any(sign in target for sign in "<=>"):
        return target
    # The value is replaced by one that is never met.
    return Target(target, value=0.0, mode=mode).never_met  # type: ignore[arg-type]


def _reference(settings: Settings, params: Params, config: DictConfig) -> tuple[int, float]:
    """Give the reference batch size and learning rate: the given ones, or the application's."""
    pair = settings.reference
    if pair is None:
        pair = [_selected(config, key) for key in (params.batch_size, params.lr)]
    is_pair = len(pair) == 2 and all(as_float(value) is not None for value in pair)
    # NaN is refused, too, as it is not above anything.
    if not is_pair or not pair[0] >= 1 or not pair[1] > 0:
        raise ConfigError(
            "hydra.sweeper.reference must be a batch size and a learning rate that go together, as "
            f"[64, 0.1]: the application's config has {bare(params.batch_size)}={pair[0]!r} and "
            f"{bare(params.lr)}={pair[-1]!r}"
        )
    return int(pair[0]), float(pair[1])


def _selected(config: DictConfig, key: str) -> Any:
    """Give the value at a dotted key; None if there is none, or if it cannot be resolved."""
    try:
        return OmegaConf.select(config, bare(key))
    except OmegaConfBaseException:
        return None


def _sampler_options(settings: Settings, params: Params, lr: float) -> list[str]:
    """Give the options that choose one of Optuna's samplers; none for bstune's own.

    Such a sampler searches the same range of learning rates at each batch size. ``lr`` is the
    reference's.
    """
    sampler = settings.sampler
    if settings.has_own_sampler:
        return []
    rates = params.rates
    # The search is as wide on both sides of the reference's rate, SIGMAS sigmas: the farther end of
    # the range decides. Without scaling that rate is the centre at each batch size.
    octaves = max(math.log2(rates.high / lr), math.log2(lr / rates.low), LEAST_OCTAVES)
    sigma = octaves / SIGMAS
    options = ["scaling=none", f"scaling.lr_octaves_sigma={sigma!r}"]
    if isinstance(sampler, str):
        return [f"sampler={sampler}", *options]
    arguments = dict(sampler or {})
    if not isinstance(arguments.get("_target_"), str):
        raise ConfigError(
            "hydra.sweeper.sampler must be a name, as random or tpe, or a node with a _target_, as "
            f"{{_target_: optuna.samplers.CmaEsSampler}}, but got {sampler!r}"
        )
    # The config of random search has a _target_ alone, in whose place the node's stands.
    options += ["sampler=random", f"sampler._target_={arguments.pop('_target_')}"]
    # A study's sampler has the study's seed.
    seed = arguments.pop("seed", None)
    if seed is not None:
        options.append(f"seed={seed}")
    for name, value in arguments.items():
        options.append(f"+sampler.{name}={json.dumps(value)}")
    return options


def _check_new(study: Study) -> None:
    """Refuse a study that has begun before."""
    options = study.options
    try:
        find_study(options.study, options.storage)
    # There is no such study yet.
    except StudyError:
        return
    raise ConfigError(
        f"the study {options.study!r} has begun in {options.storage}, and "
        "hydra.sweeper.load_if_exists is false: give another study_name, or let it be true to go on"
    )


def _check_jobs(sweeper: Sweeping, settings: Settings, params: Params, study: Study) -> None:
    """Compose a job like a trial's, so that an unknown key ends the sweep before it begins."""
    # Any values will do, as the keys are what is checked.
    lowest = {name: tunable["low"] for name, tunable in params.tunable.items()}
    reference = study.options.workload.reference
    values = params.values(lowest)
    values[params.batch_size] = str(round(reference.batch_size))
    values[params.lr] = repr(reference.lr)
    for key in (settings.seed, settings.max_steps):
        if key is not None:
            values[key] = "1"
    try:
        sweeper.validate_batch_is_legal([_override_lines(params, values)])
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(f"a job of the sweep cannot be composed: {plain_error(error)}") from error


def _overrides(trial: LoopTrial, settings: Settings, params: Params) -> list[str]:
    """Give the overrides of a trial's job."""
    values = params.values(trial.hyperparameters)
    values[params.batch_size] = str(trial.batch_size)
    values[params.lr] = repr(trial.lr)
    trial_values = [
        (settings.seed, str(trial.seed)),
        (settings.max_steps, str(trial.max_steps)),
        (settings.save_to, _quoted(trial.save_to)),
    ]
    if trial.resume_from is not None:
        trial_values.append((settings.resume_from, _quoted(trial.resume_from)))
    for key, value in trial_values:
        # The application does not take the values whose keys are not named.
        if key is not None:
            values[key] = value
    return _override_lines(params, values)


def _override_lines(params: Params, values: Mapping[str, str]) -> list[str]:
    """Write the overrides of a job: the fixed ones that all jobs have, then its own values."""
    return [*params.fixed, *(f"{key}={value}" for key, value in values.items())]


def _quoted(path: Path) -> str:
    """Write an absolute path in quotes for an override."""
    return QuotedString(str(path.absolute()), Quote.single).with_quotes()


def _launch(
    launcher: Launcher, batch: Sequence[LoopTrial], overrides: Sequence[Sequence[str]]
) -> list[JobReturn | Exception]:
    """Launch a job for each trial, all at once, and give their returns or errors, in that order.

    If the process of a job ends, as for want of memory, or the job calls ``sys.exit``, the launcher
    raises an error for the whole batch. That does not say which job it was, nor what the others
    returned. Each is then launched once more, by itself.
    """
    try:
        return list(launcher.launch(overrides, initial_job_idx=batch[0].number))
    except SystemExit as error:
        if is_interruption(error):
            raise
        raised: Exception = sys_exit_error(error)
    except Exception as error:  # noqa: BLE001 (a launcher may raise anything)
        raised = error
    if len(batch) == 1:
        return [raised]
    jobs: list[JobReturn | Exception] = []
    for trial, job_overrides in zip(batch, overrides, strict=True):
        jobs += _launch(launcher, [trial], [job_overrides])
    return jobs


def _report_jobs(
    batch: Sequence[LoopTrial],
    jobs: Sequence[JobReturn | Exception],
    settings: Settings,
    needs_seconds: bool,
) -> None:
    """Report the returns of a batch's jobs to their trials.

    ``needs_seconds``: whether a return without seconds is refused.

    A ConfigError, which the user is to mend, is raised once all jobs are reported.
    """
    first_error: ConfigError | None = None
    for trial, job in zip(batch, jobs, strict=True):
        try:
            _report_job(trial, job, settings, needs_seconds)
        except ConfigError as error:
            if first_error is None:
                first_error = error
    if first_error is not None:
        raise first_error


def _report_job(
    trial: LoopTrial, job: JobReturn | Exception, settings: Settings, needs_seconds: bool
) -> None:
    """Report the return or the error of a trial's job, and end the trial.

    ConfigError for a return value that the sweep cannot use.
    """
    if isinstance(job, Exception):
        trial.fail(job)
        return
    try:
        returned = job.return_value
    except Exception as error:  # noqa: BLE001 (the application may raise anything)
        trial.fail(error)
        return
    returned_dict = returned
    if not isinstance(returned, Mapping):
        returned_dict = _number_as_dict(trial, returned, settings)
    if not returned_dict.keys() <= IN_A_DICT or not {"history", "steps"} & returned_dict.keys():
        raise ConfigError(
            f"the task returned a dict of {', '.join(map(str, returned_dict))}: {WHAT_TO_RETURN}"
        )
    first_step = trial.first_step
    last_step = _report_return(trial, returned_dict)
    if trial.worth_saving and settings.checkpoint is not None:
        _keep_checkpoint(trial, job, settings.checkpoint)
    seconds_per_step = as_float(returned_dict.get("seconds_per_step"))
    if seconds_per_step is None and needs_seconds and not trial.has_diverged:
        raise ConfigError(
            f"the objective {settings.goal} needs seconds: let the task return "
            '{"seconds_per_step": ...} besides, or give hydra.sweeper.objective=steps under '
            "another hydra.sweeper.study_name"
        )
    seconds: float | None = None
    if seconds_per_step is not None:
        seconds = seconds_per_step * (last_step - first_step)
    trial.finish(seconds=seconds)


def _report_return(trial: LoopTrial, returned_dict: Mapping[str, object]) -> int:
    """Report a dict that the task returned, and give its last step."""
    # A history says more than the steps to the target.
    if "history" in returned_dict:
        return _report_history(trial, returned_dict["history"])
    return _report_steps(trial, returned_dict["steps"])


def _number_as_dict(trial: LoopTrial, returned: object, settings: Settings) -> dict[str, Any]:
    """Give the dict that stands for a number that the task returned; ConfigError for no number."""
    number = as_float(returned)
    if number is None:
        raise ConfigError(f"the task returned {shown(returned)}: {WHAT_TO_RETURN}")
    if settings.returns is None:
        raise ConfigError(
            f"the task returned {shown(returned)}: hydra.sweeper.returns must say what it is, "
            f"{' or '.join(RETURNS)}"
        )
    if settings.returns == "metric":
        return {"history": [(trial.max_steps, number)]}
    return {"steps": number}


def _report_history(trial: LoopTrial, history: object) -> int:
    """Report a history of (step, metric), and give its last step.

    A continued trial's history may begin before the trial's first step. The last evaluation before
    a schedule's end stands for that end.
    """
    last_step = trial.first_step
    step_before_last = last_step
    has_start = False
    goes_on = True
    pairs = list(history) if isinstance(history, list | tuple) else []
    are_pairs = all(isinstance(pair, list | tuple) and len(pair) == 2 for pair in pairs)
    if not pairs or not are_pairs:
        raise ConfigError(
            f"the task returned the history {shown(history)}: it must be pairs of step and metric"
        )
    for step, value in pairs:
        # What lies before the checkpoint of a continued trial is known already. The trial itself
        # refuses steps that are no whole numbers, and a step 0 of a fresh trial.
        whole_step = as_int(step)
        is_continued = trial.first_step > 0
        if is_continued and whole_step is not None and whole_step <= trial.first_step:
            continue
        # Untrained weights may have been evaluated twice.
        if whole_step == 0 and has_start:
            continue
        has_start = has_start or whole_step == 0
        # StopAtTarget and JSON have None for a value that is not finite.
        goes_on = trial.report(step, math.nan if value is None else value)
        step_before_last = last_step
        last_step = int(step)
        if not goes_on:
            break
    if last_step == trial.first_step:
        raise ConfigError(
            f"the task returned a history until step {pairs[-1][0]}, but its trial went on after "
            f"step {trial.first_step}: load what {trial.resume_from} has, and count on from there"
        )
    # A job evaluates every so many steps, and its schedule may end between two evaluations.
    is_last_before_end = 2 * last_step - step_before_last > trial.max_steps > last_step
    if goes_on and trial.schedule_ends and is_last_before_end:
        last_value = pairs[-1][1]
        trial.report(trial.max_steps, math.nan if last_value is None else last_value)
        return trial.max_steps
    return last_step


def _report_steps(trial: LoopTrial, steps: object) -> int:
    """Report the steps to the target, and give the trial's last step.

    Infinite steps say that the target was missed, NaN that the training diverged.
    """
    number = as_float(steps)
    if number is None or number <= 0 or (math.isfinite(number) and not number.is_integer()):
        raise ConfigError(
            f"the task returned {shown(steps)} as its steps to the target: return a whole number "
            "from 1 on, or math.inf where it missed the target"
        )
    if math.isnan(number):
        trial.report(trial.max_steps, math.nan)
        return trial.max_steps
    if math.isinf(number):
        trial.miss()
        return trial.max_steps
    trial.reach(int(number))
    return int(number)


def _keep_checkpoint(trial: LoopTrial, job: JobReturn, checkpoint: str) -> None:
    """Copy a job's checkpoint from its output folder to where a continued trial finds it.

    A job that has left none there has saved nothing to go on from.
    """
    assert job.hydra_cfg is not None  # noqa: S101 (of a job that ran)
    job_checkpoint = Path(job.hydra_cfg.hydra.runtime.output_dir) / checkpoint
    if job_checkpoint.is_dir():
        shutil.copytree(job_checkpoint, trial.save_to, dirs_exist_ok=True)
    elif job_checkpoint.exists():
        shutil.copyfile(job_checkpoint, trial.save_to)


def _write_results(result: Result, params: Params, folder: Path) -> None:
    """Write ``optimization_results.yaml`` with the best point, as Hydra's sweepers do."""
    best = result.best
    at_budget = result.summary.at_budget
    other_values = params.values(best.hyperparameters)
    named = {**other_values, params.batch_size: best.batch_size, params.lr: best.lr}
    # The value is what the objective minimizes or maximizes: steps, their seconds, or for ``loss``
    # the metric at the budget's end.
    best_value: float | None = best.steps
    if at_budget is not None:
        best_value = at_budget.winner.value
    elif result.summary.objective == "time":
        best_value = best.time_to_target
    content = {
        "name": "bstune",
        "best_params": {bare(key): value for key, value in named.items()},
        "best_value": best_value,
        "critical_batch_size": result.critical_batch_size.value,
        "study": result.summary.study,
        "folder": str(result.folder),
        "page": str(result.folder / PAGE_FILE),
    }
    write_text(folder / RESULTS_FILE, safe_dump(content, sort_keys=False))
