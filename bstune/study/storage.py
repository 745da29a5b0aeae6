"""The Optuna study: ask and tell, one slot of the plan after another, resumable at any point.

Optuna's storage holds everything: each finished trial carries its record. A slot is done when one of its trials has
finished; a trial that was cut short keeps its slot and its parameters when it is asked again.
"""

import functools
import inspect
import json
import logging
import threading
import uuid
import warnings
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import asdict
from pathlib import Path
from typing import Any

import optuna
from omegaconf import DictConfig, OmegaConf
from optuna.distributions import FloatDistribution, IntDistribution
from optuna.exceptions import ExperimentalWarning
from optuna.samplers import BaseSampler, PartialFixedSampler, QMCSampler, RandomSampler
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, TrialState
from sqlalchemy import create_engine, text
from sqlalchemy.engine import make_url
from sqlalchemy.exc import ArgumentError, NoSuchModuleError, SQLAlchemyError

from bstune.config import build
from bstune.core.errors import ConfigError, StudyError
from bstune.core.files import check_writable
from bstune.core.records import Target, TrialResult, TrialSpec, dump_json
from bstune.core.search_space import Space, Tunable
from bstune.search.sampler import RECORD, RESUMED_FROM, FrontierSampler
from bstune.study.plan import SearchBudget

logger = logging.getLogger(__name__)
CONNECT_SECONDS = 5
# Attributes in the storage.
SLOT, SPEC = "bstune:slot", "bstune:spec"
SETTINGS, STUDY_ID, OUTPUT = "bstune:settings", "bstune:study_id", "bstune:output"
CONFIRMATION_LIMIT = 2  # times the finalist's steps: what a fresh seed is given


def engine_arguments(url: str) -> dict[str, Any]:
    """Return connection arguments that make a storage which does not answer fail within seconds.

    Raises:
        StudyError: if the URL is none.
    """
    try:
        backend = make_url(url).get_backend_name()
    except ArgumentError as error:
        raise StudyError(
            f"storage={url} is no database URL: use one such as sqlite:///bstune.db or postgresql://user@host/name"
        ) from error
    option = "timeout" if backend == "sqlite" else "connect_timeout"
    return {"connect_args": {option: CONNECT_SECONDS}}


def check_storage(url: str) -> None:
    """Connect to the storage and go again, writing nothing.

    Raises:
        StudyError: if it does not answer, or is not a database.
    """
    arguments = engine_arguments(url)
    database = make_url(url)
    if database.get_backend_name() == "sqlite" and database.database not in (None, "", ":memory:"):
        path = Path(database.database)
        check_writable(path, f"storage={url}")
        if not path.absolute().parent.is_dir():
            raise StudyError(f"storage={url}: the folder {path.parent} does not exist: make it, or choose another")
        if not path.exists():  # connecting would create it
            return
    # A driver's own time-out may cover no more than the connection, and a server may accept it and never answer.
    outcome: Future[None] = Future()
    threading.Thread(target=_connect, args=(url, arguments, outcome), daemon=True).start()
    try:
        outcome.result(timeout=2 * CONNECT_SECONDS)
    except (SQLAlchemyError, NoSuchModuleError, ImportError, TimeoutError) as error:
        reason = (str(error) or f"no answer within {2 * CONNECT_SECONDS} s").splitlines()[0]
        raise StudyError(
            f"the storage does not answer: storage={url}: {reason}; "
            "start it, install its driver, or use another one, such as storage=sqlite:///bstune.db"
        ) from error


def _connect(url: str, arguments: Mapping[str, Any], outcome: "Future[None]") -> None:
    try:
        engine = create_engine(url, **arguments)
        with engine.connect() as connection:
            connection.execute(text("SELECT 1"))
            if engine.dialect.name == "sqlite":
                connection.execute(text("SELECT count(*) FROM sqlite_master"))
        engine.dispose()
    except (SQLAlchemyError, NoSuchModuleError, ImportError) as error:
        outcome.set_exception(error)
    else:
        outcome.set_result(None)


def open_study(name: str, url: str, objective: str, settings: Mapping[str, Any], output: Path) -> optuna.Study:
    """Create the study, or load it if its settings are the same.

    Args:
        name: of the study.
        url: of the storage.
        objective: ``time``, ``steps``, ``both`` or ``curve``.
        settings: what must not change while a study goes on, flat, as strict JSON values.
        output: the study's folder, whose lock the caller holds: a study has one, so that one process runs it.

    Raises:
        StudyError: if the storage does not answer, or the study began with other settings or in another folder.
    """
    directions = [StudyDirection.MINIMIZE] * (2 if objective == "both" else 1)
    try:
        storage = optuna.storages.RDBStorage(url, engine_kwargs=engine_arguments(url))
        known = name in optuna.get_all_study_names(storage)
        if known:
            study = optuna.load_study(study_name=name, storage=storage)
            _refuse_changes(study, settings)
            _refuse_other_folder(study, output)
            return study
        study = optuna.create_study(study_name=name, storage=storage, directions=directions)
        study.set_user_attr(STUDY_ID, uuid.uuid4().hex)
        study.set_user_attr(OUTPUT, str(output.absolute()))
        study.set_user_attr(SETTINGS, dump_json(settings))
    except (SQLAlchemyError, optuna.exceptions.StorageInternalError) as error:
        raise StudyError(f"the storage does not answer: storage={url}: {str(error).splitlines()[0]}") from error
    return study


def _refuse_changes(study: optuna.Study, settings: Mapping[str, Any]) -> None:
    stored = study.user_attrs.get(SETTINGS)
    if stored is None:
        raise StudyError(
            f"the storage has a study {study.study_name!r} that is not bstune's: choose another name with study=NAME"
        )
    before, now = json.loads(stored), json.loads(dump_json(settings))
    changed = [key for key in sorted(before.keys() | now.keys()) if before.get(key) != now.get(key)]
    if changed:
        lines = [f"  {key}: was {before.get(key)!r}, now {now.get(key)!r}" for key in changed]
        raise StudyError(
            f"the study {study.study_name!r} began with other settings:\n"
            + "\n".join(lines)
            + "\ncontinue it with the settings it began with, or begin another one with study=NAME"
        )


def _refuse_other_folder(study: optuna.Study, output: Path) -> None:
    """Refuse a second folder while the first is there; take one that was moved."""
    own = Path(study.user_attrs[OUTPUT])
    if own == output.absolute():
        return
    if own.exists():
        raise StudyError(
            f"the study {study.study_name!r} writes to {own}: continue it with output={own}, "
            "or begin another one with study=NAME"
        )
    study.set_user_attr(OUTPUT, str(output.absolute()))


def finish_abandoned(study: optuna.Study, objective: str) -> None:
    """End the trials that a killed process left running: told if their record was stored, failed otherwise."""
    for trial in study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
        record = trial.user_attrs.get(RECORD)
        if record is None:
            study.tell(trial.number, state=TrialState.FAIL)
        else:
            _tell(study, trial.number, TrialResult.from_json(record), objective)


def results(study: optuna.Study) -> list[TrialResult]:
    """Return the records of the finished trials in order of their numbers; one that was cut short is ``failed``."""
    found = []
    for trial in study.get_trials(deepcopy=False):
        if trial.state.is_finished() and RECORD in trial.user_attrs:
            found.append(TrialResult.from_json(trial.user_attrs[RECORD]))
        elif trial.state == TrialState.FAIL and SPEC in trial.user_attrs:
            found.append(_failed(_spec(trial)))
    return found


def _spec(trial: FrozenTrial) -> TrialSpec:
    return TrialSpec(**json.loads(trial.user_attrs[SPEC]))


def _failed(spec: TrialSpec) -> TrialResult:
    return TrialResult(
        **spec.identity(),
        status="failed",
        steps=0,
        steps_low=0,
        examples=0,
        train_seconds=0.0,
        eval_seconds=0.0,
        startup_seconds=0.0,
        wall_seconds=0.0,
        seconds_per_step=None,
        device="",
        versions={},
        message="the process ended before the trial did; its slot is asked again",
    )


def ended_by_themselves(study: optuna.Study) -> set[int]:
    """Return the numbers of the censored trials that ended ahead of their limit, as a recorded run does."""
    found = set()
    for trial in study.get_trials(deepcopy=False, states=(TrialState.PRUNED,)):
        if RECORD in trial.user_attrs and SPEC in trial.user_attrs:
            max_steps, result = _spec(trial).max_steps, TrialResult.from_json(trial.user_attrs[RECORD])
            if result.status == "censored" and max_steps is not None and result.steps < max_steps:
                found.add(trial.number)
    return found


def next_trial_index(study: optuna.Study, plan: SearchBudget) -> int | None:
    """Return the first slot of the plan that no trial has filled or is about to; None when there is none."""
    taken = (TrialState.COMPLETE, TrialState.PRUNED, TrialState.RUNNING)
    done = {
        trial.user_attrs[SLOT] for trial in study.get_trials(deepcopy=False, states=taken) if SLOT in trial.user_attrs
    }
    return next((trial_index for trial_index in range(plan.trials) if trial_index not in done), None)


def run_trial_of(
    study: optuna.Study,
    asked: tuple[optuna.Trial, TrialSpec],
    objective: str,
    target: Target,
    train: Callable[[TrialSpec], TrialResult],
) -> TrialResult:
    """Train a trial that was asked for, and store what it came to.

    An error in training fails the trial and goes on up; its slot is asked again with the same parameters.
    """
    trial, spec = asked
    finished = False
    try:
        result = train(spec)
        if not result.reached and objective != "both":  # Optuna reports no values to two objectives
            _report_gap(trial, result, target)
        trial.set_user_attr(RECORD, result.to_json())  # from here on a killed process loses nothing of the trial
        _tell(study, trial.number, result, objective)
        finished = True
    finally:
        if not finished:
            finish_abandoned(study, objective)
            warn_cut_short(spec)
    return result


def warn_cut_short(spec: TrialSpec) -> None:
    """Log that a trial was cut short, and that nothing else is lost."""
    logger.warning(
        "trial %d (B %d, lr %g) was cut short; the finished ones are stored, the same command asks it again",
        spec.number,
        spec.batch_size,
        spec.lr,
    )


def running(study: optuna.Study) -> list[TrialSpec]:
    """Return the trials that run now."""
    trials = study.get_trials(deepcopy=False, states=(TrialState.RUNNING,))
    return [_spec(trial) for trial in trials if SPEC in trial.user_attrs]


def fail_one(study: optuna.Study, spec: TrialSpec, reason: str) -> None:
    """End one trial whose process is gone, while others go on; its slot is asked again with the same parameters."""
    study.tell(spec.number, state=TrialState.FAIL)
    logger.warning(
        "trial %d (B %d, lr %g): its process %s; its slot is asked again", spec.number, spec.batch_size, spec.lr, reason
    )


def ask(
    study: optuna.Study, trial_index: int, plan: SearchBudget, space: Space, sampler: BaseSampler, stops: bool
) -> tuple[optuna.Trial, TrialSpec]:
    """Ask Optuna for the slot's trial, from the sampler or as it was asked before.

    Args:
        study: where the trial goes.
        slot: of the plan.
        plan: seeds, and the batch sizes of stratified slots, which bstune's own sampler has none of.
        space: what is searched.
        sampler: of this slot.
        stops: whether a trial can be stopped early and continued; the sampler's limits are left out otherwise.
    """
    own = isinstance(sampler, FrontierSampler)
    earlier = _asked_before(study, trial_index)
    stratum = None if own else plan.stratum(trial_index, space)
    fixed: dict[str, Any] = {} if stratum is None else {"batch_size": stratum}
    if earlier is not None:
        fixed = dict(earlier.params)
    trial, batch_size, delta, hyperparameters = _suggested(study, trial_index, space, sampler, fixed)
    lr, seed, max_steps, resumed_from = space.lr(batch_size, delta), plan.trial_seed(trial_index), None, None
    if earlier is not None:
        before = _spec(earlier)
        lr, seed, max_steps, resumed_from = before.lr, before.seed, before.max_steps, before.resumed_from
    elif isinstance(sampler, FrontierSampler) and stops:
        max_steps, resumed_from = sampler.max_steps(trial.number), sampler.resumed_from(trial.number)
        if resumed_from is not None:
            continued = _spec(study.get_trials(deepcopy=False)[resumed_from])
            lr, seed = continued.lr, continued.seed
    delta = space.delta(batch_size, lr)
    spec = TrialSpec(
        trial.number, trial_index, batch_size, lr, delta, seed, max_steps, resumed_from, hyperparameters=hyperparameters
    )
    _note(trial, spec)
    return trial, spec


def ask_confirmation(
    study: optuna.Study, finalist: TrialResult, replicate: int, plan: SearchBudget, space: Space, stops: bool
) -> tuple[optuna.Trial, TrialSpec]:
    """Ask for all of a finalist's hyper-parameters again, on a fresh seed.

    Where trials can be stopped early, for at most twice the finalist's steps.
    """
    trial_index = plan.replicate_index(finalist.trial_index, replicate)
    params = study.get_trials(deepcopy=False)[finalist.number].params
    trial, *_ = _suggested(study, trial_index, space, RandomSampler(seed=0), dict(params))
    spec = TrialSpec(
        number=trial.number,
        trial_index=trial_index,
        batch_size=finalist.batch_size,
        lr=finalist.lr,
        delta=finalist.delta,
        seed=plan.trial_seed(trial_index),
        max_steps=CONFIRMATION_LIMIT * finalist.steps if stops else None,
        replicate_of=finalist.number,
        hyperparameters=finalist.hyperparameters,
    )
    _note(trial, spec)
    return trial, spec


def _asked_before(study: optuna.Study, trial_index: int) -> FrozenTrial | None:
    """Return the slot's last trial that was cut short; one without its spec was not asked to the end."""
    failed = study.get_trials(deepcopy=False, states=(TrialState.FAIL,))
    return next((t for t in reversed(failed) if t.user_attrs.get(SLOT) == trial_index and SPEC in t.user_attrs), None)


def _suggested(
    study: optuna.Study, trial_index: int, space: Space, sampler: BaseSampler, fixed: dict[str, Any]
) -> tuple[optuna.Trial, int, float, dict[str, float]]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ExperimentalWarning)
        study.sampler = PartialFixedSampler(fixed, sampler) if fixed else sampler
        trial = study.ask(dict(distributions(space)))
        trial.set_user_attr(SLOT, trial_index)
    settings = {one.name: trial.params[one.name] for one in space.tunables}
    return trial, space.snap(trial.params["batch_size"]), trial.params["delta"], settings


def _note(trial: optuna.Trial, spec: TrialSpec) -> None:
    trial.set_user_attr(SPEC, dump_json(asdict(spec)))
    if spec.resumed_from is not None:
        trial.set_user_attr(RESUMED_FROM, spec.resumed_from)


def distributions(space: Space) -> dict[str, IntDistribution | FloatDistribution]:
    """Return the parameters of a study, as :func:`ask` suggests them."""
    return {
        "batch_size": IntDistribution(space.low, space.high, log=True),
        "delta": FloatDistribution(-space.delta_bound, space.delta_bound),
        **{one.name: _distribution(one) for one in space.tunables},
    }


def _distribution(tunable: Tunable) -> IntDistribution | FloatDistribution:
    if tunable.integer:
        return IntDistribution(round(tunable.low), round(tunable.high), log=tunable.log)
    return FloatDistribution(tunable.low, tunable.high, log=tunable.log)


def build_sampler(
    config: DictConfig, plan: SearchBudget, trial_index: int, own: Mapping[str, Any] | None = None
) -> BaseSampler:
    """Build the sampler of one slot, seeded by the study's seed and the slot.

    A quasi-random sequence is the exception: it keeps one seed, and its place in it is kept in the storage.

    Args:
        config: node of the sampler.
        plan: of the study.
        slot: of the plan.
        own: further arguments of bstune's own sampler; other samplers do not take them.

    Raises:
        ConfigError: if the config builds no sampler.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ExperimentalWarning)
        return _build_sampler(config, plan, trial_index, own or {})


def is_own(config: DictConfig) -> bool:
    """Return whether the config names bstune's own sampler."""
    own = f"{FrontierSampler.__module__}.{FrontierSampler.__qualname__}"
    return bool(config.get("_target_") == own)


def _build_sampler(config: DictConfig, plan: SearchBudget, trial_index: int, own: Mapping[str, Any]) -> BaseSampler:
    node = config.copy()
    OmegaConf.update(node, "_partial_", True, force_add=True)
    partial = build(node, "sampler")
    target = partial.func if isinstance(partial, functools.partial) else None
    if not (inspect.isclass(target) and issubclass(target, BaseSampler)):
        raise ConfigError(f"sampler must name an optuna.samplers.BaseSampler in _target_, but got {dict(config)}")
    seed = plan.sampler_seed(trial_index)
    arguments: dict[str, Any] = {}
    if "seed" in inspect.signature(target).parameters:
        arguments["seed"] = seed
    if issubclass(target, QMCSampler):
        arguments = {"seed": plan.seed, "independent_sampler": RandomSampler(seed=seed)}
    if issubclass(target, FrontierSampler):
        arguments |= own
    try:
        built: BaseSampler = partial(**arguments)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"sampler cannot be built: {error}") from error
    return built


def _tell(study: optuna.Study, number: int, result: TrialResult, objective: str) -> None:
    """Tell Optuna: reached is COMPLETE, failed is FAIL, the others are PRUNED."""
    if result.status == "failed":
        study.tell(number, state=TrialState.FAIL)
        return
    time_to_target = result.time_to_target
    if time_to_target is None:
        study.tell(number, state=TrialState.PRUNED)
        return
    steps = float(result.steps)
    values = {
        "time": [time_to_target],
        "steps": [steps],
        "both": [steps, time_to_target],
        "curve": [steps * result.batch_size],
    }
    study.tell(number, values[objective])


def _report_gap(trial: optuna.Trial, result: TrialResult, target: Target) -> None:
    """Store how far from the target a censored trial was left, so that a general sampler can rank it.

    TPE ranks pruned trials by their last reported step, then by the value there. All get the same step, so that it is
    the value that ranks them: steps mean different things at different batch sizes.
    """
    values = [value for _, value in result.history if value is not None]
    if values:
        trial.report(target.gap(values[-1]), step=1)
