"""``bstune.tune``: a study of Python objects, run as the command runs one of a config."""

import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from numbers import Real
from os import PathLike
from typing import Any

import numpy as np
from lightning.pytorch import LightningDataModule, LightningModule
from omegaconf import DictConfig
from rich.console import Console

from bstune.config import compose_workload, read_yaml
from bstune.core.errors import BstuneError, ConfigError
from bstune.core.records import Budget, Target
from bstune.core.search_space import BATCH_SCHEDULE, MODULE
from bstune.hardware.survey import Survey, compose_survey, survey_of
from bstune.study.result import Result
from bstune.study.run import run
from bstune.system.console import plain_console, quieten
from bstune.system.exits import os_exit_answered
from bstune.system.failures import in_users_code
from bstune.system.terminal import filtered
from bstune.system.user import name_user
from bstune.trial.backend import OWNED
from bstune.trial.objects import Objects, Trial, data_module, given, module_builder
from bstune.trial.process import restored
from bstune.trial.workers import PICKLE_ERRORS

Module = Callable[[Trial], LightningModule] | type[LightningModule]
Data = LightningDataModule | Sequence[Any] | Mapping[str, Any] | Callable[[int], Any]
UNMET = -1e15  # a goal that no metric meets
SMALL_LR = (
    1e-3  # a survey trains nothing: its learning rates are this one's by the rule, divided by 1000
)
TUNABLE = {"low", "high", "log", "integer", "complement"}
# The options that the arguments of tune() set, by name.
OPTIONS = {
    "name": "study",
    "objective": "search.objective",
    "trials": "search.trials",
    "seconds": "search.seconds",
    "wall_seconds": "search.wall_seconds",
    "workers": "search.workers",
    "precision": "precision",
    "device": "device",
    "seed": "seed",
    "output": "output",
    "storage": "storage",
    "survey": "hardware.enabled",
    "mlflow": "mlflow.enabled",
}


def tune(
    module: Module,
    data: Data,
    *,
    target: Target,
    batch_sizes: tuple[int, int],
    reference: tuple[int, float],
    budget: Budget,
    trainer: Mapping[str, Any] | None = None,
    tunable: Mapping[str, Any] | None = None,
    name: str | None = None,
    objective: str | None = None,
    trials: int | None = None,
    seconds: float | None = None,
    wall_seconds: float | None = None,
    workers: int | None = None,
    precision: str | None = None,
    device: str | None = None,
    seed: int | None = None,
    output: str | PathLike[str] | None = None,
    storage: str | None = None,
    survey: bool | None = None,
    mlflow: bool | None = None,
    options: Sequence[str] = (),
) -> Result:
    """Search batch size and learning rate of a Lightning module; the same call continues the study.

    Generators, torch's flags, the working directory, loggers, warnings, environment variables and the objects that are
    given are afterwards as they were. What is None is as ``conf/`` has it.

    A training step or an evaluation of the first tries and the survey that takes longer than
    ``protocol.trial_seconds``, or 300 s where none is set, is interrupted as by Ctrl-C, and a UserCodeError raised.
    This process is not ended: what stands in C code, or is called from another than the main thread, goes on, and
    lines say what is waited for. ``os._exit`` in the user's code ends the process, with a line and status 1.

    Args:
        module: a function of a trial (``trial.lr``, ``.batch_size``, ``.seed``, ``.total_steps`` and what
            is ``tunable``) that returns a new LightningModule; or a class with an argument ``lr`` or ``learning_rate``,
            and, if it likes, others of these names.
        data: a LightningDataModule; DataLoaders ``(train, val)`` or ``(train, val, test)``, or a dict of these names;
            or a function of a batch size that returns one of them. Trials train on batches of exactly B examples.
        target: the validation metric to reach, such as ``Target("val_loss", 0.1, mode="min")``.
        batch_sizes: the smallest and the largest one to search.
        reference: a batch size and a learning rate that go together: where the search begins.
        budget: after which a trial gives up.
        trainer: further arguments of the Lightning Trainer.
        tunable: further hyper-parameters to search, by name: ``(low, high)``, or a dict of ``low``, ``high``, ``log``,
            ``integer`` and ``complement`` (1 - value is searched).
        name: of the study: one of the same name is continued; None: the module's class.
        objective: ``time``, ``steps``, ``both`` or ``curve``.
        trials: of the whole search; a stopped one that is continued counts once.
        seconds: of training, over the whole search.
        wall_seconds: of wall time, over all calls, each from its start to its report.
        workers: trials side by side, each in a process of its own; 0: one by one in this process.
        precision: as the Trainer takes it, or ``auto``.
        device: ``cpu``, ``cuda`` or ``auto``.
        seed: of the study.
        output: folder of the study's files.
        storage: URL of Optuna's storage.
        survey: whether to measure first what the hardware allows.
        mlflow: whether to log to MLflow.
        options: further ones, as on the command line: ``["search.replicates=1", "scaling=linear"]``.

    Returns:
        The study's results, and what runs the winner again.

    Raises:
        ConfigError: for an argument that cannot be used.
        BstuneError: its other classes, for what else a user can mend.
        Exception: what the user's own code raised before any trial, or in this process, with a note.
    """
    arguments = dict(locals())
    with restored(), filtered():
        name_user(os.environ)
        quieten()
        console = plain_console()
        workload, objects = _workload(arguments)
        chosen = {
            option: arguments[one] for one, option in OPTIONS.items() if arguments[one] is not None
        }
        chosen |= {"output": str(output)} if output is not None else {}
        config = compose_workload(
            workload, _strings(options), {**chosen, "search.tune": _tuned(workload, options)}
        )
        _check_processes(config, objects, chosen, console)
        with given(config.study, objects), _users_errors(), os_exit_answered():
            findings = run(config, None, console)
    assert findings is not None  # noqa: S101 (no single trial is asked for)
    return Result(findings, objects)


def survey(
    *arguments: str,
    module: Module | None = None,
    data: Data | None = None,
    metric: str | None = None,
    batch_sizes: tuple[int, int] | None = None,
    trainer: Mapping[str, Any] | None = None,
) -> Survey:
    """Return what this machine allows for a workload, measured or from the cache, which alone is written.

    The workload is one that a config names, ``survey("workload=digits")``, or a module and data, ``survey(
    module=LitModel, data=MyDataModule(), metric="val_loss", batch_sizes=(8, 2048))``.

    Args:
        arguments: as on the command line: ``workload=NAME`` first, unless objects are given, then ``OPTION=VALUE``,
            such as ``device=cuda``, ``precision=bf16-mixed``, ``hardware.seconds=20`` or ``hardware.refresh=true``
            (measures again).
        module: a function of a trial, or a class, as :func:`tune` takes it.
        data: as :func:`tune` takes it.
        metric: that the module logs in validation, which is evaluated too.
        batch_sizes: the smallest and the largest one to look at.
        trainer: further arguments of the Lightning Trainer.

    Returns:
        The survey: ``ceiling.batch_size`` in examples, ``step_time(B)`` in seconds, ``limits`` and ``cost`` of the
        roofline, ``notes`` with what could not be measured.

    Raises:
        ConfigError: for an argument that cannot be used, a workload that is answered from a table, or one that cannot
            be built.
        DataError: if the data cannot be read.
        HardwareError: if no batch size fits or runs, or the device is lost.
    """
    if module is None:
        return survey_of(compose_survey(arguments), lambda line: None)[0]
    missing = [
        name
        for name, value in (("data", data), ("metric", metric), ("batch_sizes", batch_sizes))
        if not value
    ]
    if missing:
        raise ConfigError(f"survey of a module needs {' and '.join(missing)} besides")
    nothing: dict[str, Any] = {"tunable": None, "seed": None, "budget": Budget(1000, 1)}
    low, _ = _pair({"batch_sizes": batch_sizes}, "batch_sizes", "(smallest, largest)")
    given_objects = {"module": module, "data": data, "batch_sizes": batch_sizes, "trainer": trainer}
    reference = {"reference": (low, SMALL_LR), "target": Target(str(metric), UNMET, "min")}
    with restored(), filtered():
        workload, objects = _workload({**nothing, **given_objects, **reference})
        config = compose_workload(workload, _strings(arguments), {})
        try:
            _ = objects.pickled
        except PICKLE_ERRORS as error:
            raise ConfigError(
                f"module and data must be pickled, as memory is probed in other processes: {error}"
            ) from error
        with given(config.study, objects), _users_errors(), os_exit_answered():
            return survey_of(config, lambda line: None)[0]


def _tuned(workload: Mapping[str, Any], options: Sequence[str]) -> list[str]:
    """Return what the search tunes beside batch size and rate: all that is tunable, and a schedule of batch sizes."""
    asked = any(one.startswith("search.tune=") and BATCH_SCHEDULE in one for one in options)
    return [*workload["tunable"], *([BATCH_SCHEDULE] if asked else [])]


@contextmanager
def _users_errors() -> Iterator[None]:
    """Raise what the user's code raised, with a note, in place of the error that was made of it."""
    try:
        yield
    except SystemExit as error:
        if isinstance(
            error.__context__, KeyboardInterrupt
        ):  # Lightning turns the one into the other
            raise error.__context__ from None
        raise
    except BstuneError as error:
        cause = error.__cause__
        while cause is not None and not _is_users_error(cause):
            cause = cause.__cause__
        if cause is None:
            raise
        cause.add_note(str(error))
        raise cause from cause.__cause__


def _is_users_error(error: BaseException) -> bool:
    """Say whether the user's code raised an error; what ends a process, such as SystemExit, is not raised again."""
    is_error = isinstance(error, Exception) and not isinstance(error, BstuneError)
    return is_error and in_users_code(error)


def _check_processes(
    config: DictConfig, objects: Objects, chosen: Mapping[str, Any], console: Console
) -> None:
    """Let objects that cannot be sent to another process be trained in this one; refuse what was asked for else."""
    if not config.search.workers and not config.hardware.enabled and config.devices == 1:
        return
    try:
        _ = objects.pickled
    except PICKLE_ERRORS as error:
        reason = (
            f"module and data cannot be sent to another process ({type(error).__name__}: {error})"
        )
        if config.devices > 1:
            raise ConfigError(
                f"devices={config.devices}: {reason}: let them be pickled, or use one device"
            ) from error
        for name, option in (("workers", "search.workers"), ("survey", "hardware.enabled")):
            if chosen.get(option):
                raise ConfigError(
                    f"{name}={chosen[option]}: {reason}: leave {name} out, or let them be pickled"
                ) from error
        console.print(
            f"{reason}: trials run in this one, and the hardware is not surveyed", soft_wrap=True
        )
        config.search.workers, config.hardware.enabled = 0, False


def _workload(arguments: Mapping[str, Any]) -> tuple[dict[str, Any], Objects]:
    """Return the workload of a study as its config has it, and its objects; a ConfigError for what cannot be used."""
    target, budget = (
        _checked(arguments, name, kind) for name, kind in (("target", Target), ("budget", Budget))
    )
    if budget == Budget():
        raise ConfigError(
            "budget ends a trial after one step: give bstune.Budget(examples=...) or steps=..."
        )
    low, high = _pair(arguments, "batch_sizes", "(smallest, largest)")
    batch_size, lr = _pair(arguments, "reference", "(batch size, learning rate)")
    tunable = {name: _tunable(name, value) for name, value in (arguments["tunable"] or {}).items()}
    middle = {name: _middle(one) for name, one in tunable.items()}
    build = module_builder(arguments["module"], list(tunable))
    objects = Objects(
        build, data_module(arguments["data"], batch_size), _trainer(arguments["trainer"])
    )
    values = {"batch_size": batch_size, "lr": lr, "seed": arguments["seed"] or 0}
    first = Trial({**values, "total_steps": budget.last_step(batch_size), **middle})
    kind = type(objects.build_module(first)).__name__
    workload = read_yaml("python.yaml")
    workload |= {
        "name": kind,
        "reference": {"batch_size": batch_size, "lr": lr},
        "batch_size": {"low": low, "high": high},
        "budget": {"steps": budget.steps, "examples": budget.examples},
        "target": {"metric": target.metric, "value": target.value, "mode": target.mode},
        "tunable": tunable,
    }
    workload["data"]["of"] = type(objects.data).__name__
    workload["trainer"]["of"] = {one: _plain(value) for one, value in objects.trainer.items()}
    ends = {"total_steps": "${trial.total_steps}"} if first.has_read("total_steps") else {}
    workload["module"] |= {"of": kind, **ends, **middle}
    return workload, objects


def _trainer(given: Any) -> dict[str, Any]:
    """Return the user's arguments of the Trainer; those that would change what a trial is are refused."""
    if given is not None and not isinstance(given, Mapping):
        raise ConfigError(
            f"trainer must be a dict of the Trainer's arguments, but got {type(given).__name__}"
        )
    for one in given or ():
        if one in OWNED:
            raise ConfigError(f"trainer: {one} is bstune's own: {OWNED[one]}")
    return dict(given or {})


def _plain(value: Any) -> Any:
    """Return a value as a config has it: an object by its class."""
    if isinstance(value, tuple | list):
        return [_plain(one) for one in value]
    return value if isinstance(value, str | int | float | None) else type(value).__name__


def _checked(arguments: Mapping[str, Any], name: str, kind: type) -> Any:
    if not isinstance(arguments[name], kind):
        raise ConfigError(f"{name} must be a bstune.{kind.__name__}, but got {arguments[name]!r}")
    return arguments[name]


def _pair(arguments: Mapping[str, Any], name: str, what: str) -> tuple[Any, Any]:
    value = arguments[name]
    numbers = isinstance(value, tuple | list) and all(_is_number(one) for one in value)
    if not numbers or len(value) != 2:
        raise ConfigError(f"{name} must be two numbers {what}, but got {value!r}")
    first, second = (one.item() if isinstance(one, np.generic) else one for one in value)
    return first, second


def _tunable(name: str, value: Any) -> dict[str, Any]:
    """Return a further hyper-parameter as a config has it."""
    if isinstance(value, Mapping) and {"low", "high"} <= value.keys() <= TUNABLE:
        return {"log": False, "integer": False, **value, "key": f"{MODULE}{name}"}
    if (
        isinstance(value, tuple | list)
        and len(value) == 2
        and all(_is_number(one) for one in value)
    ):
        whole = all(isinstance(one, int) for one in value)
        return {
            "low": value[0],
            "high": value[1],
            "log": False,
            "integer": whole,
            "key": f"{MODULE}{name}",
        }
    raise ConfigError(
        f"tunable[{name!r}] must be (low, high) or a dict of {', '.join(sorted(TUNABLE))}, but got {value!r}"
    )


def _middle(tunable: Mapping[str, Any]) -> float:
    low, high = tunable["low"], tunable["high"]
    if tunable["log"] and tunable.get("complement") and high < 1:
        return 1.0 - math.sqrt((1.0 - low) * (1.0 - high))
    value = math.sqrt(low * high) if tunable["log"] and low > 0 else (low + high) / 2
    return round(value) if tunable["integer"] else value


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def _strings(options: Sequence[str]) -> Sequence[str]:
    if isinstance(options, str) or not all(isinstance(one, str) for one in options):
        raise ConfigError(
            f"options must be a list such as ['search.replicates=1'], but got {options!r}"
        )
    return options
