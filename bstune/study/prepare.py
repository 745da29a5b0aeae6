"""Everything that can be wrong with a study, found before anything is written."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import chdir, contextmanager
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig, OmegaConf

from bstune.config import batch_schedule_of, compose, flatten, is_replayed, to_dict
from bstune.core.clock import stopwatch
from bstune.core.errors import BstuneError, ConfigError, UserCodeError
from bstune.core.records import CUDA_GRAPH_MODES, TrialProtocol, TrialResult, TrialSpec
from bstune.core.search_space import BATCH_SCHEDULE, HALF_LIVES, Space
from bstune.study.baseline import Baseline, baseline_of
from bstune.study.connection import check_storage
from bstune.study.duration import advice_on_time
from bstune.study.plan import SearchBudget, max_seconds
from bstune.study.storage import ARGUMENTS, build_sampler
from bstune.system.console import quieten
from bstune.system.exits import is_interruption, sys_exit_error
from bstune.system.failures import cause, described
from bstune.system.files import Identity, Output, check_owner, check_writable
from bstune.system.secrets import redact_values
from bstune.system.watchdog import waiting_for, watching
from bstune.trial.backend import (
    TrialBackend,
    chooses_horizons,
    make_protocol,
    make_space,
    stops_trials,
)
from bstune.trial.printed_once import own_lines, printed_once
from bstune.trial.replay import ReplayBackend, complete
from bstune.trial.trials_log import TrialsLog
from bstune.trial.workers import InProcess, Workers, mps_runs

if TYPE_CHECKING:
    import optuna
    from lightning.pytorch import LightningModule

    from bstune.hardware.survey import Survey
    from bstune.trial.objects import Objects
    from bstune.trial.workload import LightningBackend

QUICK_SECONDS = 120.0  # of wall time, of a study with quick=true
LEAST_SURVEYED = 100.0  # of search.wall_seconds: a shorter study has no seconds for a survey
SURVEY_SHARE = (
    0.1  # of search.wall_seconds, that timing steps may take: the search is to have the rest
)
COMPILED_TRIALS = (
    32  # in one process, as torch keeps some memory of each (tests/benchmarks/bench_flat_memory.py)
)
HORIZON_CAVEAT = (
    "The workload's schedule ends with the trial, at its horizon: S(B) is the shortest horizon that reaches the "
    "target, and a point stands where a run met the target, at its horizon's end or before."
)
FIXED_HORIZON_CAVEAT = (
    "The workload's schedule ends with the budget, which this sampler leaves as it is: the curve shows where this "
    "schedule stops working rather than the fewest steps (sampler=frontier chooses each trial's horizon)."
)
ON_TEST_CAVEAT = "The target is measured on the test images, as the workload's source does: there is no other test."
SCHEDULE_CAVEAT = (
    "Batch sizes grow while training ({}): those of the curve and of the answer are where a trial starts, and the "
    "critical batch size is one of starts too: it says nothing of a constant batch size."
)
ON_TEST_NOTE = "the target is measured on the test images, as the workload's source does"

SHARED_CAVEAT = "No plan for further devices: it starts from the seconds per step of one, and here {} share the steps."


compose_checked = partial(
    compose, complete=complete
)  # a replayed workload takes from its table what is left open


def compose_joined(study: "optuna.Study", arguments: Sequence[str]) -> DictConfig:
    """Compose the config of a process that joins a study; the owner alone sends it to MLflow, which takes a second."""
    if not study.user_attrs[ARGUMENTS]:
        raise ConfigError(
            f"the study {study.study_name!r} trains Python objects, which no command line has: continue it by the call "
            "of bstune.tune() that began it"
        )
    return compose_checked([*study.user_attrs[ARGUMENTS], *arguments, "mlflow.enabled=false"])


@dataclass(frozen=True)
class PreparedStudy:
    """A checked study, or one trial by itself."""

    config: DictConfig  # device and precision resolved
    budget: SearchBudget
    space: Space  # what is searched, within what the hardware takes
    protocol: TrialProtocol
    backend: TrialBackend
    files: Output
    trial: TrialSpec | None  # the one trial to run instead of a study
    frozen_settings: Mapping[str, Any]  # flat, which must not change while a study goes on
    survey: "Survey | None"  # None where the hardware was not surveyed
    workers: (
        Callable[[int], Workers] | None
    )  # so many processes that train; None: trials run in this one
    notes: list[str]  # further lines of the printed plan
    elapsed: Callable[[], float]  # seconds of the command, which search.wall_seconds is of
    baseline: Baseline | None = None  # what trial 0 runs; None: the search's own first point

    def open_runner(self, count: int | None = None) -> Workers | InProcess:
        """Return what runs the trials, ``search.workers`` or ``count`` at a time."""
        if self.workers is None:
            return InProcess(self.backend.run)
        return self.workers(count or self.config.search.workers)

    @property
    def caveats(self) -> list[str]:
        """What the report prints below its table."""
        horizon = [
            HORIZON_CAVEAT if chooses_horizons(self.config.sampler) else FIXED_HORIZON_CAVEAT
        ]
        horizon = horizon if self.backend.horizon else []
        if self.protocol.batch_schedule is not None:
            horizon.append(SCHEDULE_CAVEAT.format(growth_of(self.protocol, self.space, self.trial)))
        if self.config.devices > 1:
            horizon.append(SHARED_CAVEAT.format(self.config.devices))
        return [*horizon, ON_TEST_CAVEAT] if self.backend.validates_on_test else horizon


def growth_of(protocol: TrialProtocol, space: Space, trial: TrialSpec | None) -> str:
    """Return how batch sizes grow while training, in words: what is searched is each trial's own."""
    searched = [one.name for one in space.tunables if one.key.startswith(BATCH_SCHEDULE)]
    return (
        f"in each trial by its own {' and '.join(searched)}"
        if searched and trial is None
        else str(protocol.batch_schedule)
    )


def prepare(
    config: DictConfig,
    log: Callable[[str], None] = lambda line: None,
    backend: TrialBackend | None = None,
    elapsed: Callable[[], float] | None = None,
) -> PreparedStudy:
    """Check a composed config against this machine, its data and its storage, and return the study.

    ``backend`` runs the trials; None: the workload is trained, or answered from its table, as the config says.
    ``elapsed`` says how many seconds ago the command began; None: now.
    """
    elapsed = elapsed or stopwatch()
    if config.quick and config.search.wall_seconds is None:
        config = config.copy()
        config.search.wall_seconds = QUICK_SECONDS
    if backend is None and not is_replayed(config):
        # torch and lightning take 4 s to import, and a replayed study needs neither
        from bstune.trial.workload import checked_protocol, resolve

        config = resolve(config)
        protocol = checked_protocol(config)
    else:
        if config.devices > 1:
            raise ConfigError(
                f"devices={config.devices} share batches that are trained, and here nothing is: use devices=1"
            )
        protocol = make_protocol(config)
        backend = backend or ReplayBackend(config, protocol)
    budget = search_budget(config)
    space = make_space(config) if backend is None else make_space(config, backend.lr_range)
    files = Output(Path(config.output).absolute())
    check_writable(files.root / "trials.jsonl", f"output={config.output}")
    build_sampler(config.sampler, budget, 0)
    trial: TrialSpec | None = None
    if config.trial.batch_size is None:
        check_owner(files, Identity.of(config.study, config.storage))
        check_storage(config.storage)
    else:
        trial = TrialSpec(0, 0, config.trial.batch_size, config.trial.lr, None, config.trial.seed)
    notes: list[str] = []
    if config.mlflow.enabled and trial is None:
        try:
            # mlflow takes seconds to import
            from bstune.tracking.address import check_uri, tracking_uri
        except ImportError as error:
            config = config.copy()
            config.mlflow.enabled = False
            notes.append(f"not logged in MLflow, which cannot be imported: {cause(error)}")
        else:
            check_uri(tracking_uri(config.mlflow))
    survey: Survey | None = None
    frozen = frozen_settings(config)
    workers: Callable[[int], Workers] | None = None
    if backend is None:
        trials_log = TrialsLog(files.trials_log)
        own = own_lines(log)
        with (
            printed_once(trials_log),
            watching(own, config.protocol.trial_seconds) as say,
            _users_errors(),
        ):
            backend, space, survey, more = _train(config, protocol, space, trial, budget, say)
        protocol = backend.protocol
        notes += more
        if protocol.batch_schedule is not None:
            notes.append(
                f"batch sizes are where a trial starts: they grow, {growth_of(protocol, space, trial)}"
            )
        if config.devices > 1:
            with printed_once(trials_log), watching(own, config.protocol.trial_seconds):
                notes += _several(config, backend, space, survey, trial)
        if config.devices > 1 or (trial is None and config.search.workers > 0):
            workers, more = _processes(config, survey, trials_log)
            notes += more
    backend.check(space, trial)
    if backend.validates_on_test:
        notes.append(ON_TEST_NOTE)
    frozen = redact_values({**frozen, **backend.frozen_settings})
    notes += backend.notes
    baseline, why_none = (
        (None, None) if trial else baseline_of(config, space, _largest(backend, survey))
    )
    notes += [] if why_none is None else [why_none]
    return PreparedStudy(
        config,
        budget,
        space,
        protocol,
        backend,
        files,
        trial,
        frozen,
        survey,
        workers,
        notes,
        elapsed,
        baseline,
    )


def _largest(backend: TrialBackend, survey: "Survey | None") -> int | None:
    """Return the largest batch size that the data and the memory allow; None where neither is known."""
    limits = [] if backend.train_examples is None else [backend.train_examples]
    if survey is not None and survey.ceiling.above is not None:
        limits.append(survey.ceiling.batch_size)
    return min(limits, default=None)


def search_budget(config: DictConfig) -> SearchBudget:
    """Return the budget of a config's search."""
    names = [field.name for field in fields(SearchBudget) if field.name in config.search]
    return SearchBudget(seed=config.seed, **{name: config.search[name] for name in names})


@contextmanager
def _users_errors() -> Iterator[None]:
    """Turn what the user's code raises into a UserCodeError that says where; what folder it leaves is come back to."""
    try:
        with chdir("."):
            yield
    except BstuneError:
        raise
    except (Exception, SystemExit) as error:
        if isinstance(error, SystemExit) and is_interruption(error):
            raise
        shown = sys_exit_error(error) if isinstance(error, SystemExit) else error
        message, frames = described(shown)
        raise UserCodeError(
            f"the workload cannot be trained: {message}\n{frames}".rstrip()
        ) from error


def _train(
    config: DictConfig,
    protocol: TrialProtocol,
    space: Space,
    trial: TrialSpec | None,
    budget: SearchBudget,
    log: Callable[[str], None],
) -> "tuple[LightningBackend, Space, Survey | None, list[str]]":
    """Load the data, try a few steps, survey the hardware: the backend, the space that fits, the survey and notes."""
    # 4 s, as above
    from bstune.hardware.report import headline
    from bstune.hardware.survey import cached_survey
    from bstune.trial.preflight import check_loaders, check_takes_rate, check_tunables, preflight
    from bstune.trial.start import check_hooks
    from bstune.trial.workload import (
        LightningBackend,
        build_workload,
        check_largest,
        load_data,
        seeded,
        train_examples,
    )

    check_takes_rate(config)
    log(f"reading the data of {config.workload.name}")
    data = load_data(config)
    with seeded(config), waiting_for(f"the loaders of {type(data).__name__}"):
        check_loaders(data)
        if trial is None:
            check_largest(space.high, data)
        else:
            check_largest(trial.batch_size, data, "trial.batch_size")
    largest = None
    if protocol.batch_schedule is not None:
        protocol, largest = _limited(config, protocol, train_examples(data), space, trial)
    workload = build_workload(config, data)
    module = workload.build_module(
        trial or TrialSpec(0, 0, space.low, space.lr(space.low, 0.0), 0.0, 0)
    )
    check_hooks(module)
    backend = LightningBackend(config, workload, protocol)
    wall_seconds = config.search.wall_seconds
    has_time = wall_seconds is None or wall_seconds >= LEAST_SURVEYED
    # Several trials side by side take their seconds from the survey.
    has_time = has_time or config.search.workers > 1
    surveyed = trial is None and config.hardware.enabled and has_time
    continues = trial is None and backend.stops and stops_trials(config.sampler)
    alone = replace(protocol, devices=1, batch_schedule=None)
    log(f"trying a few steps of {type(module).__name__} at its smallest batch size")
    found = preflight(workload, alone, space, trial, continues=continues, survey=surveyed)
    check_tunables(config, workload, alone, replace(space, low=found.smallest), stops=backend.stops)
    backend.step_time, backend.gradient_bytes = found.step_time, found.gradient_bytes
    backend.notes += found.notes
    if trial is None:
        seconds = max_seconds(budget, space, protocol, backend) / max(1, config.search.workers)
        limited = budget.wall_seconds is not None or budget.seconds is not None
        advice = advice_on_time(seconds, budget.trials, str(config.device), limited)
        if advice is not None:
            log(advice)
            backend.notes += (advice,)
    if not surveyed:
        return backend, space, None, []
    timed = config.copy()
    if config.search.wall_seconds is not None:
        timed.hardware.seconds = min(
            config.hardware.seconds, SURVEY_SHARE * config.search.wall_seconds
        )
    constant = replace(protocol, batch_schedule=None)
    wide = space if largest is None else replace(space, high=largest)
    with waiting_for("the survey of the hardware"):
        survey, cached = cached_survey(timed, wide, constant, data, lambda: workload, log, found)
    ceiling = survey.ceiling.batch_size
    space = replace(space, low=survey.ceiling.smallest, high=min(space.high, ceiling))
    backend.step_time = survey.step_time or found.step_time
    notes = [*headline(survey, cached)]
    if largest is not None and ceiling < largest and protocol.micro_batch_size is None:
        share = -(-ceiling // config.devices)
        config.protocol.micro_batch_size = share
        _check_accumulates(config, module, largest, ceiling)
        backend.protocol = replace(protocol, micro_batch_size=share)
        backend.workload = build_workload(config, data)
        notes.append(
            f"batch sizes past the memory ceiling, {ceiling}, up to {largest}, are accumulated from micro-batches of "
            f"{share}" + " on each device" * (config.devices > 1)
        )
    return backend, space, survey, notes


def _check_accumulates(
    config: DictConfig, module: "LightningModule", largest: int, ceiling: int
) -> None:
    """Refuse a schedule of batch sizes past the memory ceiling where they cannot be accumulated."""
    reason = None
    if not module.automatic_optimization:
        reason = f"{type(module).__name__} steps its optimizers itself (manual optimization)"
    elif str(config.device).startswith("cuda") and config.compile in CUDA_GRAPH_MODES:
        reason = f"compile={config.compile} replays CUDA graphs, which overwrite gradients"
    if reason is not None:
        raise ConfigError(
            f"batch_schedule: batch sizes up to {largest} are past the memory ceiling, {ceiling}, and cannot be "
            f"accumulated, as {reason}: set batch_schedule.largest={ceiling}"
        )


def _limited(
    config: DictConfig,
    protocol: TrialProtocol,
    examples: int,
    space: Space,
    trial: TrialSpec | None,
) -> tuple[TrialProtocol, int]:
    """Limit the schedule of batch sizes to the training data; return the protocol and the largest batch size."""
    tuned = {one.key for one in space.tunables}
    if fixed := [
        name for name in HALF_LIVES if name in tuned or OmegaConf.select(config, name) is not None
    ]:
        raise ConfigError(
            f"{fixed[0]} is applied once a trial, at its first batch size, which batch_schedule changes: leave out one "
            "of the two"
        )
    largest = min(config.batch_schedule.largest or examples, examples)
    config.batch_schedule.largest = largest
    schedule = batch_schedule_of(config)
    assert schedule is not None  # noqa: S101 (it has been chosen)
    start = space.high if trial is None else trial.batch_size
    reached = schedule.plan(start).largest
    if any(one.key.startswith(BATCH_SCHEDULE) for one in space.tunables):
        reached = largest
    return replace(protocol, batch_schedule=schedule), reached


def _several(
    config: DictConfig,
    backend: TrialBackend,
    space: Space,
    survey: "Survey | None",
    trial: TrialSpec | None,
) -> list[str]:
    """Time steps on several devices where no survey and no single trial does, and return the plan's note."""
    from bstune.hardware.several import shared_step_time  # 4 s, as above

    if survey is None and trial is None:
        backend.step_time = shared_step_time(config, space)
    return [
        f"{config.devices} devices share each batch, a process each; all evaluate all validation data; the noise scale "
        "is not measured"
    ]


def _processes(
    config: DictConfig, survey: "Survey | None", log: TrialsLog
) -> tuple[Callable[[int], Workers], list[str]]:
    """Return what starts so many processes that train and print to ``log``, and the plan's notes about them."""
    # 4 s, as above
    import torch

    from bstune.trial.objects import objects_of

    count, seconds = config.search.workers, config.protocol.trial_seconds
    plain_config = OmegaConf.to_container(config, resolve=False)

    def start(count: int) -> Workers:
        shared = (threads, limit) if count > 1 else (None, None)
        open_train = partial(open_trials, plain_config, objects_of(config.study), *shared)
        return Workers(
            open_train,
            count,
            seconds,
            config.devices,
            COMPILED_TRIALS if config.compile else None,
            log,
        )

    threads: int | None = None
    limit: int | None = None
    if count == 1:
        return start, []
    if survey is None or survey.step_time is None:
        raise ConfigError(
            f"search.workers={count} needs steps that are timed at two batch sizes or more, with nothing beside them: "
            "widen search.batch_size, or use search.workers=1"
        )
    cuda = str(config.device).startswith("cuda")
    threads = None if cuda else max(1, torch.get_num_threads() // count)
    share = survey.ceiling.at.limit
    limit = share if cuda else None
    each = "" if threads is None else f" with {threads} thread{'s' if threads > 1 else ''}"
    note = (
        f"{count} trials at once, each{each} within {share / 2**20:,.0f} MiB; seconds per step are the survey's, "
        "measured alone; which trial comes next depends on which ends first"
    )
    if config.search.replicates:
        note += "; winners run again alone"
    if cuda and not mps_runs():
        note += "; they take turns on the device, as NVIDIA's MPS does not run (nvidia-cuda-mps-control -d starts it)"
    if config.search.tune:
        note += f"; they are those of the config's own {', '.join(config.search.tune)}, whatever a trial's"
    return start, [note]


def open_trials(
    config: Any, objects: "Objects | None", threads: int | None, limit: int | None
) -> Callable[[TrialSpec, Output, TrialResult | None], TrialResult]:
    """Return what trains a trial in a worker's process, with torch's ``threads`` and within ``limit`` bytes of CUDA.

    ``objects`` are those of a study of Python objects.
    """
    # 4 s, as above
    import torch

    from bstune.hardware.memory import cap_cuda_memory
    from bstune.trial.distributed import config_of_process
    from bstune.trial.objects import give
    from bstune.trial.workload import LightningBackend, load, resolve

    quieten()
    if threads is not None:
        torch.set_num_threads(threads)
    resolved = resolve(config_of_process(config))
    give(resolved.study, objects)
    if limit is not None:
        device = torch.device(resolved.device)
        cap_cuda_memory(device, limit / torch.cuda.get_device_properties(device).total_memory)
    return LightningBackend(resolved, *load(resolved)).run


def frozen_settings(config: DictConfig) -> dict[str, Any]:
    """Return, flat, the settings of a config that must not change while a study goes on; budget and sampler may."""
    config = config.copy()
    schedule = config.get(BATCH_SCHEDULE)
    config.data.root = ""  # where the data lie does not matter: their checksums are pinned
    config.trial.batch_size, config.trial.lr, config.trial.total_steps = 1, 1.0, 1
    values = flatten(
        {
            name: to_dict(config[name])
            for name in ("workload", "scaling", "prior", "protocol", "trainer")
        }
    )
    for name in ("low", "high", "multiple"):
        values[f"search.batch_size.{name}"] = config.search.batch_size[name]
    for name in ("trials", "budget.steps", "budget.examples"):
        values.pop(f"workload.{name}", None)
    # What may be searched is no matter of a study that does not.
    tuned = tuple(f"workload.tunable.{name}." for name in config.search.tune)
    values = {
        key: v
        for key, v in values.items()
        if not key.startswith("workload.tunable") or key.startswith(tuned)
    }
    if schedule is not None:
        values |= flatten({BATCH_SCHEDULE: to_dict(schedule)})
    return {**values, "search.objective": config.search.objective, "seed": config.seed}
