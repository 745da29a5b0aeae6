"""The config of a command line: composed by Hydra, its values checked, its nodes instantiated.

It stays an OmegaConf ``DictConfig``, whose references resolve when they are read; :func:`validate` checks its resolved
values against the pydantic tree in :mod:`bstune.options` and lists all mistakes at once.
"""

import argparse
import difflib
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.resources import files
from pathlib import Path
from typing import Any

from hydra import compose as hydra_compose
from hydra import initialize_config_module
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Sweep
from hydra.errors import HydraException, InstantiationException
from hydra.experimental.callback import Callback
from hydra.utils import instantiate as hydra_instantiate
from hydra.version import VersionBase
from omegaconf import DictConfig, ListConfig, OmegaConf, open_dict, read_write
from omegaconf.errors import (
    InterpolationToMissingValueError,
    MissingMandatoryValue,
    OmegaConfBaseException,
)
from pydantic import ValidationError
from yaml import YAMLError, safe_load

from bstune.choices import with_choices_of
from bstune.core.batch_schedule import BatchSchedule
from bstune.core.errors import BstuneError, ConfigError
from bstune.core.records import Budget
from bstune.options import OPTIONS, Node, ReplayedOptions, Section, TrainedOptions, mistake
from bstune.system.secrets import redact_values, remember, secret_options
from bstune.system.terminal import ArgumentParser

CONFIG_MODULE, CONFIG_NAME, HYDRA_VERSION = "bstune.conf", "config", "1.3"
CLASS_KEYS = {"class_path", "init_args", "dict_kwargs"}  # of what LightningCLI instantiates
GROUPS = ("workload", "scaling", "sampler", "schedule", "algorithm", "batch_schedule")
OPTIONAL = ("schedule", "algorithm", "batch_schedule")  # groups without a choice by default
Complete = Callable[
    [DictConfig], DictConfig
]  # fills in what a replayed workload takes from its table


def is_replayed(config: DictConfig) -> bool:
    """Return whether the workload is answered from a table (which may still be missing), rather than trained."""
    workload = config.get("workload")
    return isinstance(workload, DictConfig) and "table" in set(workload.keys())


def compose(arguments: Sequence[str], complete: Complete | None = None) -> DictConfig:
    """Return the config of a command line, composed and validated, or raise a ConfigError with all its mistakes."""
    parsed = parse(arguments)
    options = without_plus(parsed.overrides)
    if parsed.config_dir:
        if not Path(parsed.config_dir).is_dir():
            raise ConfigError(f"--config-dir {parsed.config_dir} is not a folder")
        options.append(f"hydra.searchpath=[file://{Path(parsed.config_dir).absolute()}]")
    config, unknown = compose_known(CONFIG_MODULE, parsed.config_name, options)
    return validate(config, unknown, complete, groups_in(parsed.config_dir), options)


def groups_in(folder: str | None) -> frozenset[str]:
    """Return the names of the config groups in a folder of the user's: they may stand beside bstune's own options."""
    return (
        frozenset(path.name for path in Path(folder).iterdir() if path.is_dir())
        if folder
        else frozenset()
    )


def compose_workload(
    workload: Mapping[str, Any], arguments: Sequence[str], set_options: Mapping[str, Any]
) -> DictConfig:
    """Return the config of a workload that is given as values instead of by name, composed and validated.

    ``arguments`` are those of a command line; ``set_options`` are values by option, which come after them.
    """
    name, store = "python", ConfigStore.instance()
    store.store(group="workload", name=name, node=dict(workload))
    try:
        config, unknown = compose_known(
            CONFIG_MODULE, CONFIG_NAME, [f"workload={name}", *arguments]
        )
    finally:  # the store is the process's: later it would be listed among the workloads
        del store.repo["workload"][f"{name}.yaml"]
    for option, value in set_options.items():
        OmegaConf.update(config, option, value, force_add=True)
    return validate(config, unknown, arguments=arguments)


def read_yaml(name: str) -> Any:
    """Return the content of a YAML file of ``conf/``."""
    return safe_load(files(CONFIG_MODULE).joinpath(name).read_text(encoding="utf-8"))


def choices_in(group: str) -> list[str]:
    """List the names of the choices of a config group that ship, sorted."""
    names = [one.name for one in files(CONFIG_MODULE).joinpath(group).iterdir()]
    return sorted(name.removesuffix(".yaml") for name in names if name.endswith(".yaml"))


def workload_names() -> list[str]:
    """Return the names of the workloads that ship, sorted."""
    return choices_in("workload")


def option_names() -> list[str]:
    """Return the names of all options that do not depend on the workload."""
    return list(flatten(read_yaml(f"{CONFIG_NAME}.yaml")))


def nearest(name: str, names: Iterable[str]) -> list[str]:
    """Return the names that end in ``name``, else the most similar one, if there is one: what was meant."""
    candidates = list(names)
    ending = [one for one in candidates if one.endswith(f".{name}")]
    return ending[:3] or difflib.get_close_matches(name, candidates, n=1)


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Return the ``config_dir``, ``config_name`` and ``overrides`` of a command line."""
    parser = ArgumentParser(prog="bstune", add_help=False, allow_abbrev=False)
    parser.add_argument("--config-dir", "-cd")
    parser.add_argument("--config-name", "-cn", default=CONFIG_NAME)
    parser.add_argument("overrides", nargs="*", metavar="OPTION=VALUE")
    return parser.parse_intermixed_args(list(arguments))


def without_plus(arguments: Sequence[str]) -> list[str]:
    """Return the arguments with ``workload=NAME`` for ``+workload=NAME``."""
    return [re.sub(r"^\++workload=", "workload=", argument) for argument in arguments]


def with_choices(arguments: Sequence[str]) -> list[str]:
    """Return the arguments as Hydra takes them: without ``schedule=null`` and its like, and with ``~`` in quotes.

    ConfigError for the choice of a group that is no name.
    """
    kept = []
    for argument in arguments:
        name, _, value = argument.partition("=")
        if "~" in value and not re.search(r"['\"\\,]|^[\[{]", value):
            argument = f"{name}='{value}'"
        group, choice = name.lstrip("+"), None
        if group in GROUPS:
            try:
                choice = OverridesParser.create().parse_override(argument).value()
            except HydraException as error:
                raise ConfigError(plain_error(error)) from error
            if choice is None and group in OPTIONAL:
                continue
            names = choice if isinstance(choice, list) else [choice]
            is_name = all(isinstance(one, str) and 0 < len(one) <= 200 for one in names)
            if not is_name and not isinstance(choice, Sweep):
                raise ConfigError(f"{group} must be the name of a choice, but got {argument[:200]}")
        kept.append(argument)
    return kept


def secret_option(argument: str) -> str | None:
    """Return the name of the option whose value, in an argument of the command line, holds a secret; None: none does.

    The name is empty for a word that is no option. References to the environment are no secrets.
    """
    named = re.fullmatch(r"[+~-]*([\w./@:-]+?)=(.*)", argument, re.DOTALL)
    if named is None or "://" in named[1]:
        return "" if secret_options(argument) else None
    name, text = named[1], named[2]
    value: Any = text.strip("\"'")
    try:
        override = OverridesParser.create().parse_override(argument)
        if not override.is_sweep_override():
            value = override.value()
    except HydraException:  # said later; or a URL with a comma, which Hydra's grammar refuses
        pass
    return next(iter(secret_options(value, name)), None)


def config_shown(text: str) -> str:
    """Return a config that Hydra printed, as YAML without secrets; a text without any, or no config, as it is."""
    try:
        config = OmegaConf.create(text)
    except (YAMLError, OmegaConfBaseException, ValueError):
        return text
    values = OmegaConf.to_container(config, resolve=False)
    if not secret_options(values):
        return text
    remember(values)
    return OmegaConf.to_yaml(OmegaConf.create(redact_values(values)))


class HideSecrets(Callback):
    """Hydra's call-back that leaves secrets out of the config which Hydra writes of a multirun; jobs compose theirs."""

    def on_multirun_start(self, config: DictConfig, **_: Any) -> None:
        """Change the config in place."""
        remember(OmegaConf.to_container(config, resolve=False))
        with read_write(config):
            for name in config:
                if name != "hydra" and isinstance(config._get_node(name), DictConfig | ListConfig):
                    values = OmegaConf.to_container(config[name], resolve=False)
                    config[name] = redact_values(values, str(name))


def compose_known(module: str, name: str, options: Sequence[str]) -> tuple[DictConfig, list[str]]:
    """Return a config composed of the options that Hydra knows, and the names of those that it does not know."""
    unknown: list[str] = []
    options = with_choices(options)
    with _own_hydra(), initialize_config_module(module, version_base=HYDRA_VERSION):
        while True:
            known = [
                option for option in options if option.split("=")[0].lstrip("+~") not in unknown
            ]
            try:
                return hydra_compose(name, known), unknown
            except (HydraException, OmegaConfBaseException) as error:
                refused = re.match(r"Could not override '([^']+)'", str(error))
                if refused is None or refused[1] in unknown:
                    raise ConfigError(plain_error(error)) from error
                unknown.append(refused[1])
            except (
                YAMLError,
                ValueError,
                RecursionError,
            ) as error:  # of bytes, numbers and defaults
                raise ConfigError(
                    f"a config file is none that Hydra reads: {' '.join(str(error).split())}"
                ) from error
            except OSError as error:
                raise ConfigError(f"a config file cannot be read: {error.strerror}") from error


@contextmanager
def _own_hydra() -> Iterator[None]:
    """Put aside, for a while, the Hydra of a program that calls this one, which would be refused as a second one."""
    theirs, version = GlobalHydra.instance().hydra, VersionBase.instance().version_base
    if theirs is None:
        yield
        return
    GlobalHydra.instance().clear()
    try:
        yield
    finally:
        GlobalHydra.instance().hydra, VersionBase.instance().version_base = theirs, version


def plain_error(error: Exception) -> str:
    """Return Hydra's message without its search path, its workloads on one line."""
    message = str(error) or str(error.__cause__)
    lines = [
        line.strip() for line in message.split("Config search path")[0].splitlines() if line.strip()
    ]
    workload = re.search(r"You must specify 'workload'|Could not find 'workload/(.*)'", lines[0])
    if not workload:
        return "\n".join(lines)
    problem = (
        "no workload was given" if workload[1] is None else f"there is no workload {workload[1]!r}"
    )
    return f"{problem}\nworkloads: {', '.join(lines[2:])}\nrun one with: python -m bstune +workload=NAME"


def validate(
    config: DictConfig,
    unknown: Sequence[str] = (),
    complete: Complete | None = None,
    groups: Collection[str] = (),
    arguments: Sequence[str] = (),
) -> DictConfig:
    """Return a copy of the config with every value checked and of its type; references stay references.

    ``groups`` are further sections, which the user's own files refer to; ``arguments`` those that composed it.
    ConfigError lists all mistakes, a line each, with those options that were already found to be unknown.
    """
    config, unknown = with_choices_of(config.copy(), is_replayed(config), arguments, unknown)
    if is_replayed(config) and complete is not None:
        _parse(config, unknown, groups, incomplete=True)
        config = complete(config)
    return check(config, unknown, groups)


def check(
    config: DictConfig, unknown: Sequence[str] = (), groups: Collection[str] = ()
) -> DictConfig:
    """Check every value of a config in which all choices are made, and give it with each of its type.

    ConfigError as :func:`validate`. Nothing that the config names is imported.
    """
    config = config.copy()
    with open_dict(config):
        _write_types(config, _parse(config, unknown, groups))
    return config


def _parse(
    config: DictConfig, unknown: Sequence[str], groups: Collection[str], incomplete: bool = False
) -> Section | None:
    """Return the options of a config; ConfigError for all mistakes, without missing values if it is ``incomplete``."""
    names = flatten(OmegaConf.to_container(config))  # type: ignore[arg-type]  # of a mapping
    mistakes, options = {name: _unknown(name, names) for name in unknown}, None
    values = _resolve(config, "", mistakes)
    remember(values)
    values = {
        name: value for name, value in values.items() if name in OPTIONS or name not in groups
    }
    try:
        options = (ReplayedOptions if is_replayed(config) else TrainedOptions).model_validate(
            values, context=config
        )
    except ValidationError as error:
        for one in error.errors():
            name = ".".join(str(part) for part in one["loc"])
            mistakes.setdefault(
                name,
                _unknown(name, names) if one["type"] == "extra_forbidden" else mistake(name, one),
            )
    lines = [
        line for name, line in mistakes.items() if str(names.get(name))[2:-1] not in mistakes
    ]  # ${copied} option
    lines = lines or list(mistakes.values())  # of options that are copies of each other
    lines = [line for line in lines if not (incomplete and " is missing: " in line)]
    if lines:
        raise ConfigError("\n".join(lines))
    return options


def _resolve(node: Any, name: str, mistakes: dict[str, str]) -> Any:
    """Return a config node as plain values, with a line in ``mistakes`` for each that is missing or cannot be read."""
    if not isinstance(node, DictConfig | ListConfig):
        return node
    values: dict[Any, Any] = {}
    keys: Any = node.keys() if isinstance(node, DictConfig) else range(len(node))
    for key in keys:
        option = f"{name}{key!s}"
        try:
            values[key] = _resolve(node[key], f"{option}.", mistakes)
        except (MissingMandatoryValue, InterpolationToMissingValueError):
            mistakes[option] = mistake(option, {"type": "missing"})
        except OmegaConfBaseException as error:
            mistakes[option] = f"{option}: {str(error).splitlines()[0]}"
    return values if isinstance(node, DictConfig) else list(values.values())


def _unknown(name: str, names: Mapping[str, Any]) -> str:
    """Return the line for an option that there is not: the nearest one that there is."""
    if name in ("workload.data", "workload.module"):
        return f"{name}: a workload is trained (data and module) or replayed (table), but this one has both"
    near = " or ".join(
        nearest(name, [one for one in names if not f"{one}.".startswith(f"{name}.")])
    )
    then = (
        f": did you mean {near}?" if near else "; bstune --cfg job +workload=NAME lists the options"
    )
    return f"unknown option {name}{then}"


def _write_types(node: DictConfig, section: Any) -> None:
    """Write a section's validated values into its node, but for references: an int becomes a float, say."""
    for name, field in type(section).model_fields.items():
        value = getattr(section, name)
        if isinstance(value, Section):
            _write_types(node[name], value)
        elif name == "tunable":
            node.setdefault(name, {})
            for key, tunable in value.items():
                _write_types(node[name][key], tunable)
        elif field.annotation != Node and (name in node or not field.exclude):
            text = (
                isinstance(value, str) and value != node[name]
            )  # a home directory, or a reference to a number
            if text or not OmegaConf.is_interpolation(node, name):
                node[name] = value


def instantiate(node: DictConfig, what: str) -> Any:
    """Instantiate a config node, whose targets are written as Hydra does or as LightningCLI does.

    ConfigError is raised if a target cannot be found or does not take its arguments.
    """
    try:
        return hydra_instantiate(_with_targets(node), _convert_="all")
    except (
        InstantiationException,
        OmegaConfBaseException,
        TypeError,
    ) as error:  # TypeError: of _partial_ and its like
        if isinstance(error.__cause__, BstuneError):
            raise error.__cause__ from None  # it caused the error: a ring of causes has no end
        reason = _not_found(error) or " ".join(str(error).split())
        raise ConfigError(f"{what} cannot be built: {reason}") from error


def _with_targets(node: DictConfig) -> DictConfig:
    """Return a node in which ``_target_`` and the arguments beside it stand for ``class_path`` and ``init_args``."""
    if "class_path" not in OmegaConf.to_yaml(node):
        return node
    converted: DictConfig = OmegaConf.create(_targets(OmegaConf.to_container(node, resolve=True)))
    return converted


def _targets(value: Any) -> Any:
    if isinstance(value, list):
        return [_targets(one) for one in value]
    if (
        not isinstance(value, dict) or value.get("_recursive_") is False
    ):  # its target reads what is inside
        return value
    if "class_path" in value and value.keys() <= CLASS_KEYS:
        value = {
            "_target_": value["class_path"],
            **(value.get("init_args") or {}),
            **(value.get("dict_kwargs") or {}),
        }
    return {key: _targets(one) for key, one in value.items()}


def _not_found(error: Exception) -> str | None:
    """Return which module, or which name in a module, a target misses; None if that is not what is wrong."""
    located = re.match(r"Error locating target '([^']*)'", str(error))
    if located is None or error.__cause__ is None:
        return None
    cause, target = error.__cause__.__cause__ or error.__cause__, located[1]
    if not isinstance(cause, ModuleNotFoundError) or cause.name is None:
        return f"importing {target} fails: {cause!r}"
    parent, _, name = cause.name.rpartition(".")
    if not f"{target}.".startswith(f"{cause.name}."):
        return f"importing {target} needs the module {cause.name}, which is not installed"
    if parent:
        return f"{parent} has no {name}, for {target}"
    return f"there is no module {name}, for {target}: run bstune in the folder that holds it, or install it"


def to_dict(config: DictConfig) -> dict[str, Any]:
    """Return a config node with every reference resolved, as plain values."""
    values = OmegaConf.to_container(config, resolve=True)
    return {str(key): value for key, value in values.items()} if isinstance(values, dict) else {}


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested mappings as one, its keys joined by dots."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        name = f"{prefix}{key}"
        flat.update(flatten(value, f"{name}.") if isinstance(value, Mapping) else {name: value})
    return flat


def with_hyperparameters(config: DictConfig, values: Mapping[str, float]) -> DictConfig:
    """Return a copy of the config in which each value, by its tunable's name, stands at the tunable's key."""
    config = config.copy()
    for name, value in values.items():
        OmegaConf.update(config, config.workload.tunable[name].key, value)
    return config


def overrides(config: DictConfig, values: Mapping[str, float]) -> list[str]:
    """Return the arguments of the command line that give tunables their values."""
    return [f"{config.workload.tunable[name].key}={value!r}" for name, value in values.items()]


def batch_schedule_of(config: DictConfig) -> BatchSchedule | None:
    """Return the schedule of batch sizes that a config states; None where they stay."""
    chosen = config.get("batch_schedule")
    if chosen is None:
        return None
    values = to_dict(chosen)
    return BatchSchedule(**{**values, "switch_examples": tuple(values["switch_examples"])})


def budget_of(config: DictConfig) -> Budget:
    """Return the budget that a config states."""
    return Budget(config.budget.steps, config.budget.examples)
