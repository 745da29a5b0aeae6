"""Composes options and a recipe out of YAML and arguments, by Hydra.

This module, :mod:`bstune.choices`, :mod:`bstune.hydra_recipe` and the integrations alone know Hydra
and OmegaConf. They give typed values: :class:`bstune.options.StudyOptions`, whose bounds
:func:`check` has checked with all mistakes at once, and a recipe.
"""

import argparse
import difflib
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra import compose as hydra_compose
from hydra import initialize_config_module
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Sweep
from hydra.errors import HydraException
from hydra.experimental.callback import Callback
from hydra.version import VersionBase
from omegaconf import DictConfig, ListConfig, OmegaConf, open_dict, read_write
from omegaconf.errors import (
    InterpolationToMissingValueError,
    MissingMandatoryValue,
    OmegaConfBaseException,
)
from pydantic import ValidationError
from yaml import MappingNode, SafeLoader, YAMLError, safe_load
from yaml import Node as YamlNode
from yaml import compose as compose_yaml

from bstune import hydra_versions
from bstune.choices import with_choices_of
from bstune.core.errors import ConfigError
from bstune.hydra_recipe import HydraRecipe
from bstune.options import (
    OPTION_NAMES,
    GivenOptions,
    Node,
    ReplayedOptions,
    Section,
    StudyOptions,
    TrainedOptions,
    flatten,
    kind_of_options,
    mistake,
    option_at,
    options_of_section,
    with_option,
)
from bstune.options.refusal import shown
from bstune.system.inputs import one_line
from bstune.system.secrets import redact_values, remember, secret_options
from bstune.system.shipped import CONFIG_MODULE, read_shipped, workload_names
from bstune.system.terminal import ArgumentParser

CONFIG_NAME = "config"
# How the line of an option begins that there is none of.
UNKNOWN = "unknown option"
DID_YOU_MEAN = ": did you mean "
# In front of a key that a config does not have yet, as on Hydra's command line.
ADDS = "+"
GROUPS = ("workload", "scaling", "sampler", "schedule", "algorithm")
# Groups without a choice by default.
OPTIONAL = ("schedule", "algorithm")
# The most characters of a choice; no file's name is longer.
LONGEST_CHOICE = 200
# The values that are known only in a trial or on a machine. Nodes of the options keep references to
# them.
KEPT_REFERENCES = (
    "trial.batch_size",
    "trial.lr",
    "trial.seed",
    "trial.total_steps",
    "data.root",
    "device",
    "precision",
)
NODES = (
    "workload.data",
    "workload.module",
    "workload.trainer",
    "trainer",
    "scaling.rule",
    "sampler",
)
# Takes the values that a replayed workload has, and gives those that it lacks, from its table, by
# the dotted key of the config.
FromTable = Callable[[Mapping[str, object]], Mapping[str, object]]


@dataclass(frozen=True)
class Composed:
    """A composed study: its options, and the recipe of what it trains."""

    options: StudyOptions
    recipe: HydraRecipe | None
    """None for a study that is answered from recorded runs."""

    @property
    def trained_recipe(self) -> HydraRecipe:
        """The recipe of a workload that is trained; a ConfigError for one that is replayed."""
        if self.recipe is None:
            raise ConfigError(
                f"the workload {self.options.workload.name} is answered from recorded runs, which "
                "have nothing to train: name a workload that is trained"
            )
        return self.recipe


def compose(arguments: Sequence[str], from_table: FromTable | None = None) -> Composed:
    """Compose a command line, and check it. A ConfigError lists all of its mistakes.

    ``from_table`` gives the values that a replayed workload leaves open, from its table of recorded
    runs.
    """
    parsed = parse(arguments)
    options = expand_shorthands(parsed.overrides)
    if parsed.config_dir:
        if not Path(parsed.config_dir).is_dir():
            raise ConfigError(f"--config-dir {parsed.config_dir} is not a folder")
        options.append(f"hydra.searchpath=[file://{Path(parsed.config_dir).absolute()}]")
    config, unknown = compose_known(CONFIG_MODULE, parsed.config_name, options)
    try:
        composed = validate(config, unknown, from_table, groups_in(parsed.config_dir), options)
    except ConfigError as error:
        file = _workload_file(parsed.config_dir, options)
        if file is None:
            raise
        lines = [_with_place(line, file, options) for line in str(error).splitlines()]
        raise ConfigError("\n".join(lines)) from error
    _check_one_goal(composed.options, options)
    return composed


def _workload_file(folder: str | None, arguments: Sequence[str]) -> Path | None:
    """Give the user's file that holds the workload; None if the workload is one that ships."""
    names = list[str]()
    for argument in arguments:
        if argument.startswith("workload="):
            names.append(argument.partition("=")[2])
    # Hydra looks in bstune's own configs first.
    if folder is None or not names or names[-1] in workload_names():
        return None
    file = Path(folder, "workload", f"{names[-1]}.yaml")
    return file if file.is_file() else None


def _with_place(line: str, file: Path, arguments: Sequence[str]) -> str:
    """Add the workload's file, and the line in it, to a message on an option of the workload.

    Nothing is added for an option whose value comes from elsewhere: one that the command line sets,
    or that the file does not have. For one that is missing everywhere the file alone is added.
    """
    # The message begins with the option's name.
    name = re.match(r"workload\.[\w.]+\w", line)
    if name is None or any(option.lstrip("+~").startswith(f"{name[0]}=") for option in arguments):
        return line
    if " is missing: " in line:
        return f"{line} ({one_line(str(file))})"
    number = _line_of(name[0].split("."), file.read_text(encoding="utf-8"))
    if number is None:
        return line
    return f"{line} ({one_line(str(file))}:{number})"


def _line_of(path: Sequence[str], text: str) -> int | None:
    """Find the line of an option in a workload's YAML; None if it is not there.

    Args:
        path: the option's names from ``workload`` on. A file for Hydra's global package has
            ``workload`` in it, another file begins below that.
        text: of the file.
    """
    root = compose_yaml(text, SafeLoader)
    # Most files begin below ``workload``.
    number = _line_below(root, path[1:])
    if number is None:
        number = _line_below(root, path)
    return number


def _line_below(node: YamlNode | None, names: Sequence[str]) -> int | None:
    """Find the line of the key at these names in nested mappings; None if there is none."""
    if not isinstance(node, MappingNode):
        return None
    for key, value in node.value:
        if key.value != names[0]:
            continue
        if len(names) > 1:
            return _line_below(value, names[1:])
        return int(key.start_mark.line) + 1
    return None


def _check_one_goal(options: StudyOptions, arguments: Sequence[str]) -> None:
    """Refuse a target on the command line under the objective ``loss``, which has none.

    The target of a workload's file is left alone.
    """
    key = "workload.target.value="
    targets = [argument for argument in arguments if argument.lstrip("+").startswith(key)]
    if options.search.objective == "loss" and targets:
        raise ConfigError(
            f"search.objective=loss seeks the best {options.workload.target.metric} within a "
            f"budget, and {targets[0]} a target: leave one of them out"
        )


def groups_in(folder: str | None) -> frozenset[str]:
    """Name the config groups in a folder of the user's; none without a folder.

    Sections with these names may stand beside bstune's own options.
    """
    if not folder:
        return frozenset()
    return frozenset(path.name for path in Path(folder).iterdir() if path.is_dir())


def compose_given(
    workload: Mapping[str, Any], arguments: Sequence[str], set_options: Mapping[str, Any]
) -> StudyOptions:
    """Compose the options for a workload that is given as values, not by name, and check them.

    Args:
        workload: the options of :class:`bstune.options.GivenWorkload`.
        arguments: those of a command line.
        set_options: further values by the option's dotted key; they replace those of the arguments.
    """
    name = "given"
    store = ConfigStore.instance()
    store.store(group="workload", name=name, node=dict(workload))
    try:
        arguments_with_workload = [f"workload={name}", *arguments]
        config, unknown = compose_known(CONFIG_MODULE, CONFIG_NAME, arguments_with_workload)
    finally:
        # All of this process shares the store: later composing would find this workload.
        del store.repo["workload"][f"{name}.yaml"]
    for option, value in set_options.items():
        OmegaConf.update(config, option, value, force_add=True)
    return validate(config, unknown, arguments=arguments).options


def resolved(text: str) -> str:
    """Resolve the references in a text, such as ``${oc.env:NAME}``.

    ConfigError for one that cannot be resolved.
    """
    try:
        return str(OmegaConf.create({"text": text}).text)
    except (OmegaConfBaseException, ValueError) as error:
        raise ConfigError(str(error).splitlines()[0]) from error


def read_yaml(name: str) -> Node:
    """Read a YAML file of ``conf/``."""
    content: Node = safe_load(read_shipped(name))
    return content


def option_names() -> list[str]:
    """Name all options that do not depend on the workload."""
    return list(flatten(read_yaml(f"{CONFIG_NAME}.yaml")))


def nearest(name: str, names: Iterable[str]) -> list[str]:
    """Guess which names were meant: up to three that end in ``name``, else the most similar one.

    A name of the same section comes before others, and is compared without the section's name.
    """
    candidates = list(names)
    ending = [candidate for candidate in candidates if candidate.endswith(f".{name}")]
    if ending:
        return ending[:3]
    section, dot, last = name.rpartition(".")
    prefix = section + dot
    others = list[str]()
    siblings = list[str]()
    for candidate in candidates:
        if prefix and candidate.startswith(prefix):
            siblings.append(candidate.removeprefix(prefix))
        else:
            others.append(candidate)
    similar = difflib.get_close_matches(last, siblings, n=1)
    if similar:
        return [prefix + similar[0]]
    return difflib.get_close_matches(name, others, n=1)


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Take a command line apart into ``config_dir``, ``config_name`` and ``overrides``."""
    parser = ArgumentParser(prog="bstune", add_help=False, allow_abbrev=False)
    parser.add_argument("--config-dir", "-cd")
    parser.add_argument("--config-name", "-cn", default=CONFIG_NAME)
    parser.add_argument("overrides", nargs="*", metavar="OPTION=VALUE")
    return parser.parse_intermixed_args(list(arguments))


def expand_shorthands(arguments: Sequence[str]) -> list[str]:
    """Write arguments in Hydra's full form: ``workload=NAME``, and ``workload.target.value=VALUE``.

    On the command line they may be ``+workload=NAME`` and ``target=VALUE``.
    """
    full = list[str]()
    for argument in arguments:
        workload = re.sub(r"^\++workload=", "workload=", argument)
        full.append(re.sub(r"^target=", "workload.target.value=", workload))
    return full


def quote_for_hydra(arguments: Sequence[str]) -> list[str]:
    """Give the arguments as Hydra takes them.

    A choice of nothing, such as ``schedule=null``, is left out. What Hydra would not read as a text
    is quoted: a value with ``~``, and the name of a choice that is a number, such as ``Nan``.
    ConfigError for a choice of a group that is no name.
    """
    hydra_arguments = list[str]()
    for argument in arguments:
        name, _, value = argument.partition("=")
        # Hydra's grammar has no ~ outside of quotes. A value that is quoted, or a list or mapping,
        # is left as it is.
        if "~" in value and not re.search(r"['\"\\,]|^[\[{]", value):
            argument = f"{name}='{value}'"
        if name.lstrip("+") in GROUPS:
            hydra_arguments += _quoted_choice(argument)
        else:
            hydra_arguments.append(argument)
    return hydra_arguments


def _quoted_choice(argument: str) -> list[str]:
    """Give an argument that chooses from a group as Hydra takes it; none for a choice of nothing.

    ConfigError for a choice that is no name.
    """
    name, _, value = argument.partition("=")
    group = name.lstrip("+")
    try:
        choice = OverridesParser.create().parse_override(argument).value()
    except HydraException as error:
        raise ConfigError(plain_error(error)) from error
    if choice is None and group in OPTIONAL:
        return []
    # A file may have such a name: Nan.yaml, 1.yaml, on.yaml.
    if isinstance(choice, bool | int | float):
        return [f"{name}='{value.strip()}'"]
    if not isinstance(choice, Sweep) and not _are_names(choice):
        raise ConfigError(f"{group} must be the name of a choice, but got {argument[:200]}")
    return [argument]


def _are_names(choice: object) -> bool:
    """Whether a choice is a name, or a list of names."""
    names = choice if isinstance(choice, list) else [choice]
    return all(isinstance(name, str) and 0 < len(name) <= LONGEST_CHOICE for name in names)


def secret_option(argument: str) -> str | None:
    """Name the option whose value, in an argument of the command line, holds a secret.

    None if there is no secret; empty if the argument is no option. A reference to the environment
    is no secret.
    """
    named = re.fullmatch(r"[+~-]*([\w./@:-]+?)=(.*)", argument, re.DOTALL)
    # The = may be part of a URL's query.
    if named is None or "://" in named[1]:
        return "" if secret_options(argument) else None
    name = named[1]
    value: object = named[2].strip("\"'")
    # Hydra may refuse the argument, as it does a URL with a comma. A wrong one is reported later.
    with suppress(HydraException):
        override = OverridesParser.create().parse_override(argument)
        if not override.is_sweep_override():
            value = override.value()
    return next(iter(secret_options(value, name)), None)


def config_shown(text: str) -> str:
    """Give a text that Hydra printed, without the secrets of a config.

    A config with secrets is written anew, as YAML. A text that is no config, or has no secret,
    stays as it is.
    """
    try:
        config = OmegaConf.create(text)
    except (YAMLError, OmegaConfBaseException, ValueError):
        return text
    values = OmegaConf.to_container(config, resolve=False)
    if not secret_options(values):
        return text
    # The secrets are left out of all that is printed later, too.
    remember(values)
    return OmegaConf.to_yaml(OmegaConf.create(redact_values(values)))


class HideSecrets(Callback):
    """Hydra's call-back that leaves secrets out of the config which Hydra writes of a multirun.

    The multirun's jobs compose configs of their own, which have the secrets.
    """

    def on_multirun_start(self, config: DictConfig, **_: Any) -> None:
        """Take the secrets out of the multirun's config, in place."""
        remember(OmegaConf.to_container(config, resolve=False))
        with read_write(config):
            for name in config:
                # A node is looked at as it stands: reading its value would resolve interpolations.
                if name != "hydra" and isinstance(config._get_node(name), DictConfig | ListConfig):
                    values = OmegaConf.to_container(config[name], resolve=False)
                    config[name] = redact_values(values, str(name))


def compose_known(module: str, name: str, options: Sequence[str]) -> tuple[DictConfig, list[str]]:
    """Compose a config of the options that Hydra knows, and give the names of the others beside it.

    Args:
        module: the package of configs.
        name: of the config.
        options: arguments of a command line, in full.
    """
    unknown: list[str] = []
    left_out: set[str] = set()
    options = quote_for_hydra(options)
    with (
        _callers_hydra_aside(),
        initialize_config_module(module, **hydra_versions.VERSION_ARGUMENTS),
    ):
        # Hydra names one unknown option at a time. Each is left out, until Hydra takes the rest.
        while True:
            known = list[str]()
            for option in options:
                if option.split("=")[0].lstrip("+~") not in left_out:
                    known.append(option)
            try:
                return hydra_compose(name, known), unknown
            except (HydraException, OmegaConfBaseException) as error:
                refused = re.match(r"Could not override '([^']+)'", str(error))
                if refused is None or refused[1] in left_out:
                    raise ConfigError(plain_error(error)) from error
                left_out.add(refused[1])
                unknown.append(_unknown_name(refused[1], error))
            # These are for bytes that are no text, for numbers, and for defaults without an end.
            except (YAMLError, ValueError, RecursionError) as error:
                raise ConfigError(
                    f"a config file is none that Hydra reads: {' '.join(str(error).split())}"
                ) from error
            except OSError as error:
                raise ConfigError(f"a config file cannot be read: {error.strerror}") from error


def _unknown_name(option: str, error: Exception) -> str:
    """Name what Hydra does not know of an option: a key in its value, or the option itself.

    Args:
        option: that Hydra refused, such as ``search`` of ``search={trails: 3}``.
        error: that Hydra raised. Its cause is OmegaConf's, which has the key in full.
    """
    key = str(getattr(error.__cause__, "full_key", ""))
    return key if key.startswith(f"{option}.") else option


@contextmanager
def _callers_hydra_aside() -> Iterator[None]:
    """Put the Hydra of a calling program aside within a ``with`` block.

    Hydra refuses to start a second time.
    """
    theirs = GlobalHydra.instance().hydra
    version = VersionBase.instance().version_base
    if theirs is None:
        yield
        return
    GlobalHydra.instance().clear()
    try:
        yield
    finally:
        GlobalHydra.instance().hydra = theirs
        VersionBase.instance().version_base = version


def plain_error(error: Exception) -> str:
    """Write Hydra's message without its search path, and with the workloads on one line.

    Hydra's message on a workload has the problem in its first line, a heading in the second, and
    the workloads from the third on.
    """
    message = str(error) or str(error.__cause__)
    lines = list[str]()
    for line in message.split("Config search path")[0].splitlines():
        if line.strip():
            lines.append(line.strip())
    workload = re.search(r"You must specify 'workload'|Could not find 'workload/(.*)'", lines[0])
    if not workload:
        return "\n".join(lines)
    problem = "no workload was given"
    if workload[1] is not None:
        problem = f"there is no workload {workload[1]!r}"
    return (
        f"{problem}\nworkloads: {', '.join(lines[2:])}\nrun one with: python -m bstune "
        "+workload=NAME"
    )


def validate(
    config: DictConfig,
    unknown: Sequence[str] = (),
    from_table: FromTable | None = None,
    groups: Collection[str] = (),
    arguments: Sequence[str] = (),
) -> Composed:
    """Put the choices of schedule and algorithm into a composed config, and check every value.

    Args:
        config: as Hydra composed it; it is changed.
        unknown: options that were already found to be unknown.
        from_table: gives the values that a replayed workload leaves open, from its table of
            recorded runs. None: they are missing.
        groups: further sections, which the user's own files refer to.
        arguments: those that composed the config.

    Raises:
        ConfigError: for all mistakes, a line each.
    """
    kind = kind_of_options(config.get("workload"))
    config, unknown = with_choices_of(config, _nothing_to_choose(kind), arguments, unknown)
    # This objective seeks the best metric within a budget: the target needs no value.
    if OmegaConf.select(config, "search.objective") == "loss":
        _leave_target_open(config)
    if kind is ReplayedOptions and from_table is not None:
        # The table may give the options that are missing.
        _, mistakes = _options_and_mistakes(config, unknown, groups)
        others = [line for line in mistakes if " is missing: " not in line]
        if others:
            raise ConfigError("\n".join(others))
        for key, value in from_table(_resolve(config.workload, "", {})).items():
            OmegaConf.update(config, key, value, force_add=True)
    return check(config, unknown, groups)


def _leave_target_open(config: DictConfig) -> None:
    """Set a missing value of the target to ``auto``: a study within a budget needs none."""
    key = "workload.target.value"
    if OmegaConf.select(config, "workload.target") is None:
        OmegaConf.update(config, "workload.target", {}, force_add=True)
    if OmegaConf.select(config, key, throw_on_missing=False) is None:
        OmegaConf.update(config, key, "auto", force_add=True)


def _nothing_to_choose(kind: type[StudyOptions]) -> str | None:
    """Say why a workload has no place for a choice of schedule or algorithm.

    None where it may have a place.
    """
    if kind is ReplayedOptions:
        return "a replayed workload is not trained"
    if kind is GivenOptions:
        return "a module that is a Python object builds its optimizers itself"
    return None


def check(
    config: DictConfig, unknown: Sequence[str] = (), groups: Collection[str] = ()
) -> Composed:
    """Check every value of a config in which all choices are made.

    The checked values are written into the config, which the recipe holds from then on. The classes
    and functions that the config names are not imported.

    Args:
        config: it is changed.
        unknown: options that were already found to be unknown.
        groups: further sections, which the user's own files refer to.

    Raises:
        ConfigError: for all mistakes, a line each.
    """
    options, mistakes = _options_and_mistakes(config, unknown, groups)
    if mistakes or options is None:
        raise ConfigError("\n".join(mistakes))
    # A config of Hydra's refuses new keys: open_dict lets options be added that it left out.
    with open_dict(config):
        _write_checked(config, options, _plain(config))
    # References in the nodes that Hydra instantiates are resolved to the values just written.
    options = _with_nodes(options, config)
    if not isinstance(options, TrainedOptions):
        return Composed(options, recipe=None)
    key_of_tunable = {name: tunable.key for name, tunable in options.workload.tunable.items()}
    return Composed(options, HydraRecipe.of(config, key_of_tunable))


def with_settings(composed: Composed, settings: Mapping[str, Any]) -> Composed:
    """Set values and nodes at their dotted keys in a composed study, and check all of it again.

    A key that begins with + is added. ConfigError for another key that is not there yet.
    """
    config: DictConfig = OmegaConf.create(dict(composed.trained_recipe.values))
    for path, value in settings.items():
        key = path.removeprefix(ADDS)
        parent, _, name = key.rpartition(".")
        try:
            holder = OmegaConf.select(config, parent) if parent else config
            if not isinstance(holder, DictConfig):
                raise ConfigError(f"the config has no option {key}")
            is_to_be_added = path.startswith(ADDS)
            if name not in holder and not is_to_be_added:
                raise ConfigError(
                    f"the config has no option {key}; an argument that is not there is added by "
                    f"{ADDS}{key}"
                )
            holder[name] = value
        except OmegaConfBaseException as error:
            raise ConfigError(f"{key}: {str(error).splitlines()[0]}") from error
    return check(config)


class _ConfigLookup:
    """Looks up values of a composed config for the checks of options."""

    def __init__(self, config: DictConfig) -> None:
        self._config = config

    def value_at(self, key: str) -> object:
        """Give the value at a dotted key; the text ``nothing`` where there is none."""
        return OmegaConf.select(self._config, key, default="nothing")

    def is_reference(self, section: str, name: str) -> bool:
        """Whether a value of a section refers to another one, which is checked where it stands."""
        return OmegaConf.is_interpolation(self._config[section], name)


def _options_and_mistakes(
    config: DictConfig, unknown: Sequence[str], groups: Collection[str]
) -> tuple[StudyOptions | None, list[str]]:
    """Give the options of a config, and its mistakes, a line each.

    Args:
        config: in which all choices are made.
        unknown: dotted keys of options that were already found to be unknown.
        groups: further sections, which the user's own files refer to.

    Returns:
        The options, None if a value is refused, and the lines.
    """
    # The value of each option by its dotted key, as it is written: references are not resolved.
    written = flatten(_plain(config))
    kind = kind_of_options(config.get("workload"))
    # The line of each mistake, by the option's dotted key.
    mistakes = {name: _unknown_line(name, written, kind) for name in unknown}
    values = _resolve(config, "", mistakes)
    # Secrets among the values are hidden in all that is printed from here on.
    remember(values)
    # A section of the user's own is no option of bstune's. It serves references, which are resolved
    # by now.
    without_groups = dict[str, object]()
    for name, value in values.items():
        if name in OPTION_NAMES or name not in groups:
            without_groups[name] = value
    options: StudyOptions | None = None
    try:
        options = kind.model_validate(without_groups, context=_ConfigLookup(config))
    except ValidationError as error:
        for details in error.errors():
            name = ".".join(str(part) for part in details["loc"])
            line = mistake(name, details)
            # By this type of error pydantic refuses an option that the model does not have.
            if details["type"] == "extra_forbidden":
                line = _unknown_line(name, written, kind)
            # By this type of error pydantic refuses a value in the place of a section.
            below = options_of_section(kind, f"{name}.")
            if details["type"] == "model_type" and below:
                line = _section_line(name, details["input"], below)
            # A missing value, or one that cannot be read, has its line from ``_resolve``.
            mistakes.setdefault(name, line)
    return options, _lines_on(mistakes, written)


def _guessed_names(mistakes: Mapping[str, str]) -> set[str]:
    """Name the options that misspelled ones are likely to mean, by the lines on these."""
    guessed = set[str]()
    for line in mistakes.values():
        unknown, guess, meant = line.partition(DID_YOU_MEAN)
        if guess and unknown.startswith(UNKNOWN):
            guessed |= set(meant.removesuffix("?").split(" or "))
    return guessed


def _lines_on(mistakes: Mapping[str, str], written: Mapping[str, object]) -> list[str]:
    """Choose the lines that the user sees, and put them in order.

    An option that is a copy of another one, ``${name}``, has the other's mistake, which is shown
    once. Unknown names come first: a misspelled name breaks references to the right one, which is
    not told to be missing as well.

    Args:
        mistakes: the line of each mistake, by the option's dotted key.
        written: each option's value by its dotted key, with references as they are written.
    """
    lines = list[str]()
    guessed = _guessed_names(mistakes)
    for name in sorted(mistakes, key=lambda name: not mistakes[name].startswith(UNKNOWN)):
        originals = _originals(name, written)
        # Where a section itself is mistaken, so is each copy of an option of it.
        sections = {original.rpartition(".")[0] for original in originals}
        is_misspelled = name in guessed and " is missing: " in mistakes[name]
        if mistakes.keys().isdisjoint(originals | sections) and not is_misspelled:
            lines.append(mistakes[name])
    # Where options are copies of each other, all lines would be left out: then all are shown.
    return lines or list(mistakes.values())


def _originals(name: str, written: Mapping[str, object]) -> set[str]:
    """Name the option that an option copies by a reference, ``${original}``.

    For a section these are the sections that its options copy from. ``written`` has each option's
    value, with references as they are written, by its dotted key.
    """
    originals = set[str]()
    for key, value in written.items():
        reference = re.fullmatch(r"\$\{(.*)\}", str(value), re.DOTALL)
        if reference is None:
            continue
        original = reference[1]
        section = key.rpartition(".")[0]
        if key == name:
            originals.add(original)
        elif section == name:
            originals.add(original.rpartition(".")[0])
    return originals


def _with_nodes(options: StudyOptions, config: DictConfig) -> StudyOptions:
    """Copy the options with nodes whose references are resolved to checked values.

    A node is a part of the config that Hydra instantiates (``NODES``). References to values that
    only a trial or a machine knows (``KEPT_REFERENCES``) stay as they are written: they are
    resolved there.
    """
    escaped = _with_kept_references(config)
    for key in NODES:
        if option_at(options, key) is None:
            continue
        # A resolver that expects a number may refuse the text of a reference: then the node is
        # resolved from the config itself. A node that cannot be resolved either way stays as it is.
        for source in (escaped, config):
            mistakes: dict[str, str] = {}
            node = OmegaConf.select(source, key)
            values = _resolve(node, "", mistakes)
            if isinstance(values, dict) and not mistakes:
                options = with_option(options, key, values)
                break
    return options


def _with_kept_references(config: DictConfig) -> DictConfig:
    """Copy a config, with a text in the place of each value that only a trial or a machine knows.

    The text is the escaped reference to the value itself. Resolving what refers to the value turns
    that into the plain reference, and no further.
    """
    escaped = config.copy()
    with open_dict(escaped):
        for key in KEPT_REFERENCES:
            section = key.partition(".")[0]
            if OmegaConf.select(escaped, section, throw_on_missing=False) is not None:
                OmegaConf.update(escaped, key, f"\\${{{key}}}", force_add=True)
    return escaped


def _write_checked(node: DictConfig, section: Section, written: Mapping[str, Any]) -> None:
    """Put a section's checked values into the section's node of the config.

    Checking may have changed their types, such as an int to a float. References stay as they are,
    and so do nodes, the parts that Hydra instantiates.

    Args:
        node: it is changed.
        section: the section with the checked values.
        written: the node's values as they are written; empty where a reference leads to the node.
    """
    for name, field in type(section).model_fields.items():
        value = getattr(section, name)
        if isinstance(value, Section):
            _write_checked(node[name], value, _section_at(written, name))
        # The one mapping of sections: its keys are the names of the tunables.
        elif name == "tunable":
            node.setdefault(name, {})
            tunables = _section_at(written, name)
            for key, tunable in value.items():
                _write_checked(node[name][key], tunable, _section_at(tunables, key))
        elif field.annotation == Node or _is_written(value, written, name):
            continue
        # An option of few workloads (field.exclude) is not added to the config of the others.
        elif name in node or not field.exclude:
            # A text differs from the config's if its ~ became the home directory, or if it refers
            # to a number. It then takes the place of a reference, too.
            is_changed_text = isinstance(value, str) and value != node[name]
            if is_changed_text or not OmegaConf.is_interpolation(node, name):
                node[name] = value


def _section_at(written: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Give the written values of the section ``name``; empty where it is a reference to another."""
    values = written.get(name)
    return values if isinstance(values, dict) else {}


def _is_written(value: object, written: Mapping[str, Any], name: str) -> bool:
    """Whether a value stands in the config already, with the same type.

    Most do, and to set a value in a config takes far longer than to see that.
    """
    # A config holds lists in place of tuples.
    if isinstance(value, tuple):
        value = list(value)
    # The texts of 1 and 1.0 differ: values of other types count as different.
    return name in written and repr(value) == repr(written[name])


def _plain(config: DictConfig) -> dict[str, Any]:
    """Give a config as plain values, with references and ``???`` as they are written."""
    values: Any = OmegaConf.to_container(config, resolve=False)
    return values  # type: ignore[no-any-return]


def _resolve(node: object, name: str, mistakes: dict[str, str]) -> Any:
    """Give the plain values of a config node, with references resolved.

    ``mistakes`` gets a line, by the option's name, for each value that is missing or cannot be
    read. ``name`` is the node's dotted key, with a dot at its end.
    """
    if not isinstance(node, DictConfig | ListConfig):
        return node
    return _resolve_below(node, OmegaConf.to_container(node, resolve=False), name, mistakes)


def _resolve_below(
    node: DictConfig | ListConfig, written: Any, name: str, mistakes: dict[str, str]
) -> Any:
    """Resolve the values of a node that refer to others, and give all its values as plain ones.

    The other values are taken from ``written``, which has all values of the node as they are
    written: to look a value up in a config takes long.
    """
    values: dict[Any, Any] = {}
    keys: Any = written if isinstance(node, DictConfig) else range(len(written))
    for key in keys:
        value = written[key]
        if not _has_references(value):
            values[key] = value
            continue
        option = f"{name}{key!s}"
        try:
            # A value that is no section or list is a reference, which may lead to one.
            if isinstance(value, dict | list):
                values[key] = _resolve_below(node[key], value, f"{option}.", mistakes)
            else:
                values[key] = _resolve(node[key], f"{option}.", mistakes)
        except (MissingMandatoryValue, InterpolationToMissingValueError):
            # The line is that of pydantic's error on a missing value.
            mistakes[option] = mistake(option, {"type": "missing"})
        except OmegaConfBaseException as error:
            mistakes[option] = f"{option}: {str(error).splitlines()[0]}"
    if isinstance(node, DictConfig):
        return values
    return list(values.values())


def _has_references(written: object) -> bool:
    """Whether a value, or one inside of it, may be a reference or is missing."""
    # OmegaConf writes a reference as ${name}, and a missing value as ???.
    text = str(written)
    return "${" in text or "???" in text


def _section_line(name: str, value: object, below: Sequence[str]) -> str:
    """Write the line on a value in the place of a section, which has the options ``below``."""
    return (
        f"{name} has options of its own ({', '.join(below)}): give each by itself, as "
        f"{name}.{below[0]}=..., but got {shown(value)}"
    )


def _unknown_line(name: str, names: Mapping[str, object], options: type[StudyOptions]) -> str:
    """Write the line on an unknown option, with the nearest of the names that there are.

    Args:
        name: of the unknown option.
        names: of the options in the config, the unknown one among them.
        options: the model of all options. It has those that the config leaves out, too.
    """
    if name in ("workload.data", "workload.module"):
        return (
            f"{name}: a workload is trained (data and module) or replayed (table), but this one "
            "has both"
        )
    section, _, below = name.partition(".")
    first = below.partition(".")[0]
    # A section that a workload has as well, such as its budget, is no option of the study's alone.
    is_of_workload = first in options_of_section(options, f"workload.{first}")
    if section == "workload" and first in OPTION_NAMES and not is_of_workload:
        return (
            f"{name}: {first} is an option of the study, not of its workload. Give it on the "
            "command line, or beside workload: in a file that begins with '# @package _global_', "
            "as conf/workload/airfoil.yaml"
        )
    # The unknown option itself, and what is below it, stand among the names.
    others = [option for option in names if not f"{option}.".startswith(f"{name}.")]
    own_section = name.rpartition(".")[0]
    if f"{own_section}._target_" in names:
        return _unknown_argument_line(name, own_section, others)
    beside = options_of_section(options, name)
    others += [f"{own_section}.{option}" for option in beside]
    meant = " or ".join(nearest(name, dict.fromkeys(others)))
    if meant:
        return f"{UNKNOWN} {name}{DID_YOU_MEAN}{meant}?"
    if beside:
        return f"{UNKNOWN} {name}; {own_section} has {', '.join(beside)}"
    return f"{UNKNOWN} {name}; bstune --cfg job +workload=NAME lists the options"


def _unknown_argument_line(name: str, section: str, others: Sequence[str]) -> str:
    """Write the line on an unknown argument of an object that Hydra builds.

    The object may well take the argument, though the config does not have it.

    Args:
        name: of the unknown option.
        section: the object's own name.
        others: the names of the options in the config.
    """
    beside = list[str]()
    for option in others:
        is_own = option.startswith(f"{section}.") and not option.endswith("._target_")
        if is_own:
            beside.append(option)
    meant = nearest(name, beside)
    if meant:
        return f"{UNKNOWN} {name}{DID_YOU_MEAN}{meant[0]}?"
    return f"{UNKNOWN} {name}; to give {section} one more argument, write +{name}=VALUE"
