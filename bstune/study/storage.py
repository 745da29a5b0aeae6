"""The Optuna study: ask for a trial, store its record, continue at any point.

Optuna's storage holds everything: each finished trial carries its record. A trial index of the search is done once one
of its trials has finished; a trial that was cut short is asked again with the same parameters.
"""

import inspect
import json
import logging
import threading
import uuid
import warnings
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import optuna
from omegaconf import DictConfig
from optuna.distributions import BaseDistribution, FloatDistribution, IntDistribution
from optuna.exceptions import ExperimentalWarning
from optuna.samplers import BaseSampler, PartialFixedSampler, QMCSampler, RandomSampler
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, TrialState
from sqlalchemy import create_engine, text
from sqlalchemy.engine import make_url
from sqlalchemy.exc import ArgumentError, SQLAlchemyError

from bstune.core.errors import ConfigError, StudyError
from bstune.core.files import check_writable
from bstune.core.records import Objective, Target, TrialResult, TrialSpec, dump_json
from bstune.core.search_space import Space
from bstune.search.sampler import RECORD, RESUMED_FROM
from bstune.study.plan import SearchBudget
from bstune.trial.backend import sampler_factory

logger = logging.getLogger(__name__)
CONNECT_SECONDS = 5
# Attributes in the storage. Studies of another FORMAT name other fields in their specs and records.
FORMAT_VERSION = 2
FORMAT, FROZEN_SETTINGS = "bstune:format", "bstune:settings"
STUDY_ID, OUTPUT = "bstune:study_id", "bstune:output"
TRIAL_INDEX, SPEC = "bstune:trial_index", "bstune:spec"
REPLICATE_LIMIT = 2  # times the original trial's steps: the limit of a replicate
Asked = tuple[optuna.Trial, TrialSpec]


def engine_arguments(url: str) -> dict[str, Any]:
    """Return connection arguments that make a storage which does not answer fail within seconds."""
    try:
        backend = make_url(url).get_backend_name()
    except ArgumentError as error:
        raise StudyError(
            f"storage={url} is no database URL: use one such as sqlite:///bstune.db or postgresql://user@host/name"
        ) from error
    option = "timeout" if backend == "sqlite" else "connect_timeout"
    return {"connect_args": {option: CONNECT_SECONDS}}


def check_storage(url: str) -> None:
    """Connect to the storage and disconnect, writing nothing; StudyError if it is no database or does not answer."""
    arguments = engine_arguments(url)
    database = make_url(url)
    if database.get_backend_name() == "sqlite" and database.database not in (None, "", ":memory:"):
        path = Path(database.database)
        check_writable(path, f"storage={url}")
        if not path.absolute().parent.is_dir():
            raise StudyError(f"storage={url}: the folder {path.parent} does not exist: make it, or choose another")
        if not path.exists():  # connecting would create it
            return
    outcome: Future[None] = Future()

    def connect() -> None:
        try:
            engine = create_engine(url, **arguments)
            with engine.connect() as connection:
                sqlite = engine.dialect.name == "sqlite"  # reads nothing of the file for SELECT 1
                connection.execute(text("SELECT count(*) FROM sqlite_master" if sqlite else "SELECT 1"))
            engine.dispose()
            outcome.set_result(None)
        except (SQLAlchemyError, ImportError) as error:
            outcome.set_exception(error)

    # A driver's own time-out may cover no more than the connection, and a server may accept it and never answer.
    threading.Thread(target=connect, daemon=True).start()
    try:
        outcome.result(timeout=2 * CONNECT_SECONDS)
    except (SQLAlchemyError, ImportError, TimeoutError) as error:
        reason = (str(error) or f"no answer within {2 * CONNECT_SECONDS} s").splitlines()[0]
        raise StudyError(
            f"the storage does not answer: storage={url}: {reason}; "
            "start it, install its driver, or use another one, such as storage=sqlite:///bstune.db"
        ) from error


def open_study(
    name: str, url: str, objective: Objective, frozen_settings: Mapping[str, Any], output: Path
) -> optuna.Study:
    """Create the study, or load it if its frozen settings and its output folder, locked by the caller, are the same."""
    directions = [StudyDirection.MINIMIZE] * (2 if objective == "both" else 1)
    try:
        storage = optuna.storages.RDBStorage(url, engine_kwargs=engine_arguments(url))
        if name in optuna.get_all_study_names(storage):
            study = optuna.load_study(study_name=name, storage=storage)
            _check_continued(study, frozen_settings, output)
            return study
        study = optuna.create_study(study_name=name, storage=storage, directions=directions)
        study.set_user_attr(FORMAT, FORMAT_VERSION)
        study.set_user_attr(STUDY_ID, uuid.uuid4().hex)
        study.set_user_attr(OUTPUT, str(output.absolute()))
        study.set_user_attr(FROZEN_SETTINGS, dump_json(frozen_settings))
    except (SQLAlchemyError, optuna.exceptions.StorageInternalError) as error:
        raise StudyError(f"the storage does not answer: storage={url}: {str(error).splitlines()[0]}") from error
    return study


def changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """Return the settings that differ, a line each."""
    changed = [key for key in sorted(before.keys() | now.keys()) if before.get(key) != now.get(key)]
    return "\n".join(f"  {key}: was {before.get(key)!r}, now {now.get(key)!r}" for key in changed)


def _check_continued(study: optuna.Study, frozen_settings: Mapping[str, Any], output: Path) -> None:
    """Refuse another format, other settings, and a second output folder while the first one exists."""
    name, attributes = study.study_name, study.user_attrs
    if FORMAT not in attributes and FROZEN_SETTINGS not in attributes:
        raise StudyError(f"the storage has a study {name!r} that is not bstune's: choose another name with study=NAME")
    version = attributes.get(FORMAT, 1)
    if version != FORMAT_VERSION:
        raise StudyError(
            f"the study {name!r} was begun by another version of bstune (format {version}; this one reads "
            f"{FORMAT_VERSION}): continue it with that version, or begin another one with study=NAME"
        )
    lines = changes(json.loads(attributes[FROZEN_SETTINGS]), json.loads(dump_json(frozen_settings)))
    if lines:
        raise StudyError(
            f"the study {name!r} began with other settings:\n{lines}\n"
            "continue it with the settings it began with, or begin another one with study=NAME"
        )
    first = Path(attributes[OUTPUT])
    if first == output.absolute():
        return
    if first.exists():
        raise StudyError(
            f"the study {name!r} writes to {first}: continue it with output={first}, "
            "or begin another one with study=NAME"
        )
    study.set_user_attr(OUTPUT, str(output.absolute()))  # the folder was moved


def results(study: optuna.Study) -> list[TrialResult]:
    """Return the records of the finished trials in order of their numbers; one that was cut short is ``failed``."""
    records = []
    for trial in study.get_trials(deepcopy=False):
        if trial.state.is_finished() and RECORD in trial.user_attrs:
            records.append(TrialResult.from_json(trial.user_attrs[RECORD]))
        elif trial.state == TrialState.FAIL and SPEC in trial.user_attrs:
            message = "the process ended before the trial did; it is asked again"
            records.append(TrialResult.unmeasured(_spec(trial), "failed", message=message))
    return records


def _spec(trial: FrozenTrial) -> TrialSpec:
    return TrialSpec(**json.loads(trial.user_attrs[SPEC]))


def ended_below_limit(study: optuna.Study) -> set[int]:
    """Return the numbers of the censored trials that ended below their limit, as where a recorded run ends."""
    numbers = set()
    for trial in study.get_trials(deepcopy=False, states=(TrialState.PRUNED,)):
        if RECORD in trial.user_attrs and SPEC in trial.user_attrs:
            max_steps, result = _spec(trial).max_steps, TrialResult.from_json(trial.user_attrs[RECORD])
            if result.status == "censored" and max_steps is not None and result.steps < max_steps:
                numbers.add(trial.number)
    return numbers


def next_trial_index(study: optuna.Study, trials: int) -> int | None:
    """Return the first index below ``trials`` that no trial has finished or runs at; None when there is none."""
    states = (TrialState.COMPLETE, TrialState.PRUNED, TrialState.RUNNING)
    taken = {trial.user_attrs.get(TRIAL_INDEX) for trial in study.get_trials(deepcopy=False, states=states)}
    return next((trial_index for trial_index in range(trials) if trial_index not in taken), None)


def running(study: optuna.Study) -> list[TrialSpec]:
    """Return the trials that run now."""
    trials = study.get_trials(deepcopy=False, states=(TrialState.RUNNING,))
    return [_spec(trial) for trial in trials if SPEC in trial.user_attrs]


def ask(
    study: optuna.Study, trial_index: int, budget: SearchBudget, space: Space, sampler: BaseSampler, stops: bool
) -> Asked:
    """Ask Optuna for a trial, or for one that was cut short again; without a limit unless trials can be stopped."""
    stopping: Any = sampler if hasattr(sampler, "max_steps") else None  # chooses every batch size itself
    for earlier in reversed(study.get_trials(deepcopy=False, states=(TrialState.FAIL,))):
        # One without its spec was not asked to the end.
        if earlier.user_attrs.get(TRIAL_INDEX) == trial_index and SPEC in earlier.user_attrs:
            trial = _suggested(study, trial_index, space, sampler, earlier.params)
            return _stored(trial, replace(_spec(earlier), number=trial.number))
    stratum = None if stopping is not None else budget.stratum(trial_index, space)
    trial = _suggested(study, trial_index, space, sampler, {} if stratum is None else {"batch_size": stratum})
    batch_size = space.snap(trial.params["batch_size"])
    lr, seed = space.lr(batch_size, trial.params["delta"]), budget.trial_seed(trial_index)
    max_steps, resumed_from = None, None
    if stopping is not None and stops:
        max_steps, resumed_from = stopping.max_steps(trial.number), stopping.resumed_from(trial.number)
        if resumed_from is not None:
            continued = _spec(study.get_trials(deepcopy=False)[resumed_from])
            lr, seed = continued.lr, continued.seed
    delta = space.delta(batch_size, lr)
    values = {one.name: trial.params[one.name] for one in space.tunables}
    spec = TrialSpec(
        trial.number, trial_index, batch_size, lr, delta, seed, max_steps, resumed_from, hyperparameters=values
    )
    return _stored(trial, spec)


def ask_replicate(
    study: optuna.Study, original: TrialResult, replicate: int, budget: SearchBudget, space: Space, stops: bool
) -> Asked:
    """Ask for all of a trial's hyperparameters again, on a fresh seed; at most twice its steps where trials stop."""
    trial_index = budget.replicate_index(original.trial_index, replicate)
    first = study.get_trials(deepcopy=False)[original.number]
    trial = _suggested(study, trial_index, space, RandomSampler(seed=0), first.params)
    spec = replace(
        _spec(first),
        number=trial.number,
        trial_index=trial_index,
        seed=budget.trial_seed(trial_index),
        max_steps=REPLICATE_LIMIT * original.steps if stops else None,
        resumed_from=None,
        replicate_of=original.number,
    )
    return _stored(trial, spec)


def _suggested(
    study: optuna.Study, trial_index: int, space: Space, sampler: BaseSampler, fixed: dict[str, Any]
) -> optuna.Trial:
    with warnings.catch_warnings(action="ignore", category=ExperimentalWarning):
        study.sampler = PartialFixedSampler(fixed, sampler) if fixed else sampler
        trial = study.ask(distributions(space))
        trial.set_user_attr(TRIAL_INDEX, trial_index)
    return trial


def _stored(trial: optuna.Trial, spec: TrialSpec) -> Asked:
    trial.set_user_attr(SPEC, dump_json(asdict(spec)))
    if spec.resumed_from is not None:
        trial.set_user_attr(RESUMED_FROM, spec.resumed_from)
    return trial, spec


@contextmanager
def cut_short(study: optuna.Study, objective: Objective) -> Iterator[None]:
    """End all running trials if the body, which runs them, raises: they are asked again later."""
    try:
        yield
    except BaseException:  # Ctrl-C too; it goes on up
        for spec in running(study):
            _warn(spec, " was cut short; the finished ones are stored, the same command asks it again")
        finish_abandoned(study, objective)
        raise


def _warn(spec: TrialSpec, what: str) -> None:
    logger.warning("trial %d (B %d, lr %g)%s", spec.number, spec.batch_size, spec.lr, what)


def finish_abandoned(study: optuna.Study, objective: Objective) -> None:
    """End the trials that a process left running: with their record if it was stored, as failed otherwise."""
    for trial in study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
        record = trial.user_attrs.get(RECORD)
        if record is None:
            study.tell(trial.number, state=TrialState.FAIL)
        else:
            _tell(study, trial.number, TrialResult.from_json(record), objective)


def fail_one(study: optuna.Study, spec: TrialSpec, reason: str) -> None:
    """Fail one trial whose process is gone, while others run on; it is asked again with the same parameters."""
    study.tell(spec.number, state=TrialState.FAIL)
    _warn(spec, f": its process {reason}; it is asked again")


def tell(study: optuna.Study, trial: optuna.Trial, result: TrialResult, objective: Objective, target: Target) -> None:
    """Store a trial's record, and tell Optuna its value: reached is COMPLETE, failed is FAIL, the others are PRUNED."""
    values = [value for _, value in result.history if value is not None]
    if values and not result.reached and objective != "both":  # Optuna reports no values to two objectives
        # TPE ranks pruned trials by their last reported step, then by the value there. Steps mean different things at
        # different batch sizes, so all get the same one: the gap to the target ranks them.
        trial.report(target.gap(values[-1]), step=1)
    trial.set_user_attr(RECORD, result.to_json())  # from here on a killed process loses nothing of the trial
    _tell(study, trial.number, result, objective)


def _tell(study: optuna.Study, number: int, result: TrialResult, objective: Objective) -> None:
    time_to_target, steps = result.time_to_target, float(result.steps)
    if result.status == "failed":
        study.tell(number, state=TrialState.FAIL)
    elif time_to_target is None:
        study.tell(number, state=TrialState.PRUNED)
    else:
        values = {
            "time": [time_to_target],
            "steps": [steps],
            "both": [steps, time_to_target],
            "curve": [steps * result.batch_size],
        }
        study.tell(number, values[objective])


def distributions(space: Space) -> dict[str, BaseDistribution]:
    """Return the parameters of a study, as :func:`ask` suggests them."""
    searched: dict[str, BaseDistribution] = {
        "batch_size": IntDistribution(space.low, space.high, log=True),
        "delta": FloatDistribution(-space.delta_bound, space.delta_bound),
    }
    for one in space.tunables:
        if one.integer:
            searched[one.name] = IntDistribution(round(one.low), round(one.high), log=one.log)
        else:
            searched[one.name] = FloatDistribution(one.low, one.high, log=one.log)
    return searched


def build_sampler(
    config: DictConfig, budget: SearchBudget, trial_index: int, context: Mapping[str, Any] | None = None
) -> BaseSampler:
    """Build the sampler of one trial, with its own seed and the entries of ``context`` that its class asks for."""
    factory = sampler_factory(config)
    sampler = getattr(factory, "func", None)
    if not (inspect.isclass(sampler) and issubclass(sampler, BaseSampler)):
        raise ConfigError(f"sampler must name an optuna.samplers.BaseSampler in _target_, but got {dict(config)}")
    seed, wanted = budget.sampler_seed(trial_index), getattr(sampler, "context", ())
    arguments = {name: value for name, value in (context or {}).items() if name in wanted}
    if issubclass(sampler, QMCSampler):  # keeps one seed: its place in the sequence is kept in the storage
        arguments |= {"seed": budget.seed, "independent_sampler": RandomSampler(seed=seed)}
    elif "seed" in inspect.signature(sampler).parameters:
        arguments["seed"] = seed
    try:
        with warnings.catch_warnings(action="ignore", category=ExperimentalWarning):
            built: BaseSampler = factory(**arguments)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"sampler cannot be built: {error}") from error
    return built
