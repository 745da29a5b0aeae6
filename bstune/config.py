"""Hydra in, options and a recipe out; no other module composes a config."""

import argparse
import itertools
import math
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hydra
import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from bstune.core.errors import InputError
from bstune.options import (
    OF_EACH_TRIAL,
    Options,
    from_python,
    missing,
    options_from,
    own_target,
    unknown,
)
from bstune.recipe.hydra import NODES, recipe_of
from bstune.recipe.lightning_cli import read_sections, recipe_of_file, split_arguments
from bstune.recipe.recipe import Recipe
from bstune.study.commands import Commands, line_commands
from bstune.system.console import guess
from bstune.system.files import read_yaml
from bstune.system.secrets import HIDDEN, hide, is_secret

if TYPE_CHECKING:
    from bstune.study.workload import Workload

# In a wheel conf/ is the package bstune.conf; in the source tree it lies beside the package.
_PACKAGE = Path(__file__).parent
CONF = next(path for path in (_PACKAGE / "conf", _PACKAGE.parent / "conf") if path.is_dir())
# What a workload's file has beside options.
PARTS = {"table", "tunable"}
# Hydra 1.3 has to be asked for its own behaviour; 1.4 has no other, and warns of the argument.
VERSION: dict[str, Any] = {"version_base": "1.3"} if hydra.__version__.startswith("1.3.") else {}


@dataclass(frozen=True)
class Composed:
    """A composed command line."""

    options: Options
    parts: dict[str, Any]
    """The config as plain containers, references such as ``${trial.lr}`` as they are written.

    Beside the options it may have ``table`` and ``tunable``.
    """
    recipe: Recipe | None
    """What is trained; None for a workload that is answered from the recorded runs of ``table``."""
    commands: Commands
    """What runs the study of this command line again."""
    yaml: str
    """The config for config.yaml, without secrets."""
    show: bool
    """``--cfg job``: print ``yaml`` and end."""

    def workload(self) -> "Workload":
        """What is tuned, or answered by recorded runs."""
        # They import numpy.
        from bstune.study.workload import Workload
        from bstune.trial.table import find_table

        kept = ("data", "module", "trainer", "table")
        return Workload(
            name=str(self.options.workload),
            settings={key: self.parts.get(key) for key in kept},
            config=self.yaml,
            commands=self.commands,
            table=None if self.recipe else find_table(self.parts["table"]),
            recipe=self.recipe,
        )


@contextmanager
def _one_line_each() -> Iterator[None]:
    """Let what YAML and OmegaConf refuse in the body be an InputError of one line."""
    try:
        yield
    except OmegaConfBaseException as error:
        raise InputError(_one_line(error.full_key or "", error)) from error
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        place = f"{mark.name}, line {mark.line + 1}" if mark else "a config file"
        raise InputError(f"{place}: {error.problem}") from error
    except (yaml.YAMLError, UnicodeError) as error:
        raise InputError(_one_line("a config file is no YAML", error)) from error


@_one_line_each()
def compose(arguments: Sequence[str], *, lightning: bool = False) -> Composed:
    """Compose a command line: ``+workload=NAME OPTION=VALUE --config-dir DIR --cfg job``.

    With ``lightning`` what stands in the workload's place is for LightningCLI, as in
    :func:`bstune.recipe.lightning_cli.split_arguments`. Nothing that is named is imported.

    Raises:
        InputError: for what cannot be used, a line each.
    """
    flags, rest, folders = _split_flags(arguments)
    file, module_node = None, None
    defaults = [f"hydra.searchpath=['file://{folder}']" for folder in folders[1:]]
    if lightning:
        file, rest = split_arguments(rest)
        module_node, options_of_trainer = read_sections(file)
        defaults += [f"{name}={value}" for name, value in options_of_trainer.items()]
    overrides = []
    workload = best_file = None
    for argument in rest:
        named = re.fullmatch(r"\+*(workload|algorithm|schedule)=(.*)", argument)
        names_best = re.fullmatch(r"trial=(.*\.yaml)", argument)
        if names_best:
            best_file = Path(names_best[1])
        elif named is None:
            overrides.append(_quoted(argument))
        elif named[1] == "workload":
            workload = named[2]
        elif named[2] != "null":
            _file_of(named[1], named[2], folders)
            overrides.append(f"+{named[1]}={named[2]}")
    if file is None:
        _file_of("workload", workload, folders)
        # A workload's keys land beside the options, whose defaults they replace.
        defaults.append(f"+workload@_global_={workload}")
    config = _compose_by_hydra([*defaults, *overrides])
    config.workload = workload if file is None else Path(file.named[-1]).stem
    if "table" in config or OmegaConf.is_missing(config, "table"):
        _fill_from_table(config)
    _fill_by_name(config, folders)
    values = _option_values(config)
    if best_file is not None:
        # Other commands need not wait for what reads a study.
        from bstune.study.folder import read_best

        # OmegaConf resolves nothing in it.
        own = values.get("trial")
        values["trial"] = (own if isinstance(own, dict) else {}) | read_best(best_file)
    _check_tunable(config.get("tunable") or OmegaConf.create())
    values["tune"] = _ranges_of_tune(values["tune"], config)
    is_given = any(one.partition("=")[0].lstrip("+") == "target" for one in overrides)
    if values.get("target") is not None and not is_given:
        values["target"] = own_target(str(values["target"]), str(values["objective"]))
    parts: Any = OmegaConf.to_container(config)
    if module_node is not None:
        parts["module"] = values["module"] = module_node
    options = options_from(values)
    # What is resolved stands in the place of its reference.
    text = yaml.safe_dump(hide(parts | values), sort_keys=False)
    recipe = None
    if file is not None:
        recipe = recipe_of_file(file, options)
    elif "table" not in parts:
        recipe = recipe_of(parts, options)
    folder = options.output if options.tunables else None
    commands = line_commands("command", arguments, folder)
    if lightning:
        commands = line_commands("lightning", ["lightning", *arguments], folder)
    return Composed(options, parts, recipe, commands, text, show=flags.cfg is not None)


def jobs_of_sweep(arguments: Sequence[str]) -> dict[str, list[str]]:
    """The command lines of ``-m``, a study each, by their folders.

    ``+workload=digits seed=0,1`` is outputs/digits-0 and outputs/digits-1.

    Raises:
        InputError: nothing is to be split, or Hydra cannot split it.
    """
    choices, swept = [], []
    for argument in arguments:
        name, equals, _ = argument.partition("=")
        choices.append([argument])
        if not equals or name.startswith("-"):
            continue
        override = OverridesParser.create().parse_override(_quoted(argument))
        if override.is_discrete_sweep():
            swept.append(name)
            choices[-1] = [f"{name}={one}" for one in _values_of_sweep(override)]
    if not swept:
        raise InputError("-m splits values that differ, as seed=0,1: give some, or leave out -m")
    jobs = {}
    for job in itertools.product(*choices):
        values = dict(one.split("=", 1) for one in job if "=" in one)
        # A file of LightningCLI stands first.
        named = "study" if "study" in values else "+workload"
        name_of_study = values.get(named) or Path(job[0]).stem
        others = [values[name] for name in swept if name != named]
        study = re.sub(r"[^\w.-]+", "_", "-".join([name_of_study, *others]))
        folder = f"{values.get('output', 'outputs')}/{study}"
        if folder in jobs:
            raise InputError(f"-m has two studies for {folder}: begin them by a command each")
        kept = [one for one in job if not one.startswith(("study=", "output="))]
        jobs[folder] = [*kept, f"study={study}", f"output={folder}"]
    return jobs


def _values_of_sweep(override: Override) -> list[str]:
    """The values of a sweep of Hydra's; InputError where it needs what a command line lacks."""
    try:
        return list(override.sweep_string_iterator())
    except HydraException as error:
        raise InputError(_one_line(f"-m cannot split {override.input_line}", error)) from error


def _split_flags(arguments: Sequence[str]) -> tuple[argparse.Namespace, list[str], list[Path]]:
    """Take ``--config-dir`` and ``--cfg`` out of a command line; the folders of configs, too."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--config-dir", "-cd", type=Path)
    parser.add_argument("--cfg", choices=["job"])
    try:
        flags, rest = parser.parse_known_args(list(arguments))
    except argparse.ArgumentError as error:
        raise InputError(str(error)) from error
    folders = [CONF]
    if flags.config_dir is not None:
        if not os.path.isdir(flags.config_dir):
            raise InputError(f"--config-dir must be a folder, but got {flags.config_dir}")
        folders.append(flags.config_dir.absolute())
    return flags, rest, folders


def _file_of(group: str, name: str | None, folders: Sequence[Path]) -> Path:
    """The file of a workload, an algorithm or a schedule.

    InputError with a guess for no such, or for what :func:`read_yaml` refuses.
    """
    found = (file for folder in folders for file in folder.glob(f"{group}/*.yaml"))
    files = {file.stem: file for file in found if file.is_file()}
    if name in files:
        # Its limits are those of a file from others.
        read_yaml(files[name])
        return files[name]
    meant = guess(name or "", files)
    problem = f"there is no {group} {name}" if name else f"{group} is missing"
    hint = f"did you mean {meant}? " if meant else ""
    plus = "+" if group == "workload" else ""
    raise InputError(
        f"{problem}: {hint}{plus}{group}=NAME takes {', '.join(sorted(files))}, or a file of your "
        f"own in --config-dir DIR"
    )


def _fill_by_name(config: DictConfig, folders: Sequence[Path]) -> None:
    """Put its file in the place of an algorithm's or a schedule's name."""
    for group in ("algorithm", "schedule"):
        if isinstance(config[group], str):
            config[group] = OmegaConf.load(_file_of(group, config[group], folders))


@_one_line_each()
def options_from_python(**given: Any) -> Options:
    """Check options that are spelled as Python arguments; see :func:`bstune.options.from_python`.

    The others have the defaults of ``conf/config.yaml``. InputError as by
    :func:`bstune.options.options_from`.
    """
    defaults = OmegaConf.load(CONF / "config.yaml")
    # Targets, call-backs and other objects are kept as they are.
    values = OmegaConf.create(from_python(given), flags={"allow_objects": True})
    config: Any = OmegaConf.merge(defaults, values)
    _fill_by_name(config, [CONF])
    return options_from(_option_values(config))


def _fill_from_table(config: DictConfig) -> None:
    """Fill in what a workload leaves open that recorded runs answer, from their table.

    The baseline is the geometric middle of the recorded batch sizes and of the rates.
    """
    # What is no section is refused with the other options.
    sections = ("budget", "batch_size", "lr", "baseline")
    if not all(OmegaConf.is_dict(config[section]) for section in sections):
        return
    # Other workloads need not wait for numpy.
    from bstune.trial.table import find_table

    if OmegaConf.is_missing(config, "table"):
        raise InputError(missing("table"))
    table = find_table(str(config.table))
    if config.schedule_ends is True and not table.schedule_ends:
        raise InputError(
            f"schedule_ends must be false: the runs of {config.table} have schedules without an "
            f"end, but got {config.schedule_ends}"
        )
    if config.noise_scale is True:
        raise InputError("noise_scale must be false: recorded runs have no gradients, but got true")
    # Runs whose schedules ended with them say themselves which question they answer.
    config.schedule_ends = table.schedule_ends
    if OmegaConf.is_interpolation(config, "study"):
        config.study = f"{config.workload}-{Path(config.table).stem}"
    if config.budget.get("steps") is None:
        config.budget = {**table.budget.model_dump(), "seconds": config.budget.get("seconds")}
    low, high = table.range
    defaults = {
        "target": str(table.target) if table.target else None,
        "batch_size.low": low,
        "batch_size.high": high,
        "lr.low": table.lrs[0],
        "lr.high": table.lrs[-1],
        "baseline.batch_size": round(_middle(table.batch_sizes)),
        "baseline.lr": _middle(table.lrs),
    }
    for name, value in defaults.items():
        if value is not None and OmegaConf.select(config, name) is None:
            OmegaConf.update(config, name, value)
    if config.get("target") is None:
        raise InputError(missing("target"))


def _check_tunable(tunable: Any) -> None:
    """InputError for what a workload cannot say of the further values that ``tune`` may name."""
    entries = tunable.items() if OmegaConf.is_dict(tunable) else [("NAME", tunable)]
    for name, entry in entries:
        if not OmegaConf.is_dict(entry) or not isinstance(entry.get("key", ""), str):
            raise InputError(
                f"tunable.{name} must be {{key: KEY, low: LOW, high: HIGH}}, but got {entry}"
            )


def _ranges_of_tune(tune: Any, config: DictConfig) -> Any:
    """Give names that are tuned the workload's ranges of ``tunable``.

    Raises:
        InputError: for a name without one, and for recorded runs, which have no further values.
    """
    if not tune:
        return None
    if "table" in config:
        raise InputError(f"tune={tune}: recorded runs have no further values; leave out tune")
    if not isinstance(tune, list):
        return tune
    tunable = config.get("tunable") or {}
    ranges = {}
    for name in tune:
        if not isinstance(name, str) or name in OF_EACH_TRIAL:
            # Options refuse it.
            return tune
        if name not in tunable:
            raise InputError(
                f"tune must name what tunable has a range for, {', '.join(tunable) or 'none'}, but "
                f"got {name}: give it a range, as tune={{{name}: [LOW, HIGH]}}"
            )
        ranges[name] = [tunable[name].get("low"), tunable[name].get("high")]
    return ranges


def _middle(values: Sequence[float]) -> float:
    """Choose the value that is nearest to the geometric middle of rising values."""
    middle = math.sqrt(values[0] * values[-1])
    return min(values, key=lambda value: abs(math.log(value / middle)))


def _quoted(argument: str) -> str:
    """Quote a value that Hydra's grammar has no place for, such as ``target=val/loss <= 0.1``."""
    name, equals, value = argument.partition("=")
    ways = [argument]
    # Lists, mappings and what is quoted already are meant as Hydra's own.
    if equals and value[:1] not in ("[", "{", "'", '"'):
        quoted = value.replace("'", "\\'")
        ways.append(f"{name}='{quoted}'")
    for way in ways:
        # A ValueError is that of a number of more than 4,300 digits.
        with suppress(HydraException, ValueError):
            OverridesParser.create().parse_override(way)
            return way
    raise InputError(
        f"options must be OPTION=VALUE, without --, as Hydra reads them, but got {argument}"
    )


def _compose_by_hydra(overrides: list[str]) -> DictConfig:
    """Compose by Hydra; InputError of one line for whatever it refuses."""
    try:
        with hydra.initialize_config_dir(str(CONF), **VERSION):
            return hydra.compose("config", overrides)
    except HydraException as error:
        refused = re.match(r"Could not override '(.+)'", str(error))
        if refused is None:
            line = _one_line(error, error.__cause__ or "")
            for name, _, value in (override.partition("=") for override in overrides):
                if value and is_secret(name):
                    line = line.replace(value, HIDDEN)
            raise InputError(line) from error
        name = refused[1]
        key = re.search(r"Key '(.+?)' is not in struct", str(error.__cause__))
        if key is not None and name.rpartition(".")[2] != key[1]:
            name = f"{name}.{key[1]}"
        is_argument = name.partition(".")[0] in NODES
        line = f"there is no {name}: +{name}=VALUE adds it" if is_argument else unknown(name)
        raise InputError(line) from error
    # Of a file, and of Hydra's parser of overrides and of defaults lists.
    except (OSError, ValueError, AssertionError) as error:
        raise InputError(_one_line("the config cannot be composed", error)) from error


def _one_line(*messages: object) -> str:
    """Join messages in one line, without Hydra's search path and OmegaConf's keys."""
    parts = []
    for message in messages:
        part = re.split(r"Config search path|\s+full_key:", str(message))[0]
        parts.append(" ".join(part.split()))
    return ": ".join(filter(None, parts))


def _option_values(config: DictConfig) -> dict[str, Any]:
    """Resolve the options of a config; nodes stay as they are written.

    InputError for an option that is missing; OmegaConf's error for a reference that leads nowhere.
    """
    plain: Any = OmegaConf.to_container(config)
    left_out = [name for name in Options.model_fields if name not in plain]
    absent = [missing(name) for name in (*left_out, *_missing_keys(plain, ""))]
    if absent:
        raise InputError("\n".join(absent))
    # Groups of a project's own, such as paths, stand beside the options.
    of_project = set(re.findall(r"\$\{(\w+)", str(plain))) - Options.model_fields.keys()
    values = {}
    for key in plain:
        value = plain[key] if key in NODES else config[key]
        if OmegaConf.is_config(value):
            value = OmegaConf.to_container(value, resolve=True)
        if key not in PARTS | of_project:
            values[key] = value
    return values


def _missing_keys(value: Any, name: str) -> Iterator[str]:
    """Name the keys below one whose value has to be given."""
    if isinstance(value, str) and value == "???":
        yield name
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _missing_keys(inner, f"{name}.{key}" if name else key)
