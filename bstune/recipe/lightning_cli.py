"""A recipe of a LightningCLI file, which LightningCLI itself reads, and builds what it names.

Nothing that the file or the script names is imported here, but in the worker.
"""

import argparse
import os
import re
import runpy
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from bstune.core.errors import InputError
from bstune.options import RATES, Options
from bstune.recipe.hydra import recipe_arguments
from bstune.recipe.recipe import (
    OF_TRAINER,
    PACKAGES,
    Recipe,
    TrialSettings,
    value_of_today,
)
from bstune.system.files import read_yaml

# What a file that LightningCLI saved has beside its sections.
OF_FIT = ("ckpt_path", "weights_only")
# Trials have seeds of their own, and log nowhere.
OURS = ("--seed_everything=false", "--trainer.logger=false")
# Sections whose numbers a trial may set.
SECTIONS = ("model", "data", "optimizer", "lr_scheduler")
# Lightning's names of a device and of precisions, and the options' own.
NAMES = {"gpu": "cuda", "32": "32-true", "64": "64-true", "16": "16-mixed", "bf16": "bf16-mixed"}


@dataclass(frozen=True)
class CliFile:
    """What a command line has for LightningCLI."""

    named: tuple[str, ...]
    """Config files, the later ones over the earlier, and the script that makes the LightningCLI."""
    overrides: tuple[str, ...]
    """As LightningCLI takes them: ``--KEY=VALUE``."""
    lr_key: str | None
    """The file's key of the rate, or its last part; None: it is looked up."""

    @property
    def files(self) -> list[str]:
        """The config files alone."""
        return [path for path in self.named if path != self.script]

    @property
    def script(self) -> str | None:
        """The script; None: the files name all classes."""
        return next((path for path in self.named if path.endswith(".py")), None)


def split_arguments(arguments: Sequence[str]) -> tuple[CliFile, list[str]]:
    """Split a command line into what is for LightningCLI, and bstune's options.

    ``[main.py] [fit] [--config] config.yaml --model.init_args.width=64 lr_key=KEY trials=8``

    Raises:
        InputError: there is no file, or jsonargparse is missing.
    """
    if find_spec("jsonargparse") is None:
        raise InputError("LightningCLI needs jsonargparse: pip install 'bstune[lightning-cli]'")
    named, overrides, options, lr_key = list[str](), list[str](), list[str](), None
    for word in arguments:
        name, equals, value = word.partition("=")
        if word in ("fit", "-c", "--config"):
            continue
        if not equals or name == "--config":
            named.append(value or word)
        elif name.startswith("-"):
            overrides.append(word)
        elif name == "lr_key":
            lr_key = value
        else:
            options.append(word)
    for path in named or ["config.yaml"]:
        if not os.path.isfile(path):
            raise InputError(f"lightning needs a file of LightningCLI, but there is no {path}")
    return CliFile(tuple(named), tuple(overrides), lr_key), options


def read_sections(file: CliFile) -> tuple[dict[str, Any], dict[str, str]]:
    """Read the files as plain YAML.

    Returns:
        What is trained, for the study's config, and the options that the Trainer's section tells.

    Raises:
        InputError: a file is no mapping.
    """
    read, trainer = [], dict[str, Any]()
    for path in file.files:
        sections = read_yaml(Path(path))
        of_trainer = sections.get("trainer") or {} if isinstance(sections, dict) else None
        if not isinstance(of_trainer, dict):
            raise InputError(f"{path} is no file of LightningCLI, with model, data and trainer")
        trainer |= of_trainer
        read.append(sections)
    overrides = dict(override.removeprefix("--").split("=", 1) for override in file.overrides)
    options = {}
    for name, option in OF_TRAINER.items():
        given = str(overrides.get(f"trainer.{name}", trainer.get(name)))
        # Other numbers of devices are Lightning's ways to say all.
        if given not in ("None", "auto") and (name != "devices" or given.isdecimal()):
            options[option] = NAMES.get(given, given)
    return {**asdict(file), "files": read, "overrides": overrides}, options


def recipe_of_file(file: CliFile, options: Options) -> Recipe:
    """Make the recipe of a LightningCLI file, which is read in the worker.

    Args:
        file: with the command line's overrides.
        options: of the study.
    """
    built = _BuiltByCli(file, [one.name for one in options.tunables], not options.override_lr)
    return Recipe(
        module=built.module,
        data=built.data,
        trainer=built.trainer,
        data_follows=True,
        own_values=built.own_values,
        **recipe_arguments(options),
    )


class _BuiltByCli:
    """Module, data and Trainer's arguments of a trial, which LightningCLI builds together.

    Args:
        file: that it reads.
        tuned: names of further values.
        sets_lr: whether the trial's rate is set in it.
    """

    def __init__(self, file: CliFile, tuned: Sequence[str], sets_lr: bool) -> None:
        self._file = file
        self._tuned = tuned
        self._sets_lr = sets_lr
        self._built: tuple[TrialSettings, Any] | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what was built, which no other process and no copy needs."""
        return vars(self) | {"_built": None}

    def module(self, trial: TrialSettings) -> Any:
        """Build all of a trial, and give its module.

        All values are numbers. Where no key, or several, are called batch_size, the loader alone
        gets the trial's.
        """
        config = _values_by_key(self._file)
        values = {
            _one_number_key(config, [name], "tune"): value for name, value in trial.values.items()
        }
        if trial.lr is not None and self._sets_lr:
            values[self._rate_key(config)] = trial.lr
        size_keys = _number_keys(config, ["batch_size"])
        if trial.batch_size is not None and len(size_keys) == 1:
            values[size_keys[0]] = trial.batch_size
        cli = _read_by_cli(self._file, [f"--{key}={value!r}" for key, value in values.items()])
        self._built = trial, cli
        return cli.model

    def _cli_of(self, trial: TrialSettings) -> Any:
        """What was built for a trial; it is built where it is asked for first."""
        if self._built is None or self._built[0] is not trial:
            self.module(trial)
        assert self._built is not None  # noqa: S101 (module sets it)
        return self._built[1]

    def data(self, trial: TrialSettings) -> Any:
        """Give the data module that was built with the module."""
        data = self._cli_of(trial).datamodule
        if data is None:
            raise InputError("the file has no data: name a LightningDataModule, as data.class_path")
        return data

    def trainer(self, trial: TrialSettings) -> dict[str, Any]:
        """Give the Trainer's arguments, but for those that are options."""
        arguments = self._cli_of(trial).trainer
        return {name: value for name, value in arguments.items() if name not in OF_TRAINER}

    def own_values(self) -> dict[str, int | float | None]:
        """The file's rate, as ``lr``, and its further values, or their defaults; nothing is built.

        :func:`bstune.trial.look_up.look_up` calls it in the worker, where alone the file's classes
        are imported, after the user's script ran to build the module. The file is read once more,
        by that script if there is one, as those classes have the defaults.

        Raises:
            InputError: a name is that of no number of the file, or of several.
        """
        config = _values_by_key(self._file)
        keys = {name: _one_number_key(config, [name], "tune") for name in self._tuned}
        if self._sets_lr:
            keys["lr"] = self._rate_key(config)
        return {name: value_of_today(name, config[key]) for name, key in keys.items()}

    def _rate_key(self, config: Mapping[str, Any]) -> str:
        """The key of the rate; InputError where there is none, or several."""
        given = self._file.lr_key
        return _one_number_key(config, RATES if given is None else [given], "lr_key=KEY")


def _number_keys(config: Mapping[str, Any], names: Collection[str]) -> list[str]:
    """The keys of numbers that a trial may set and that have a name; with none, of all."""
    keys = []
    for key, value in config.items():
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        is_meant = not names or key in names or key.rpartition(".")[2] in names
        if is_number and is_meant and key.startswith(SECTIONS):
            keys.append(key)
    return keys


def _one_number_key(config: Mapping[str, Any], names: Collection[str], option: str) -> str:
    """The key of one number; InputError where there is none, or several."""
    found = _number_keys(config, names)
    if len(found) != 1:
        raise InputError(
            f"{option} must name one number of the file, but {' or '.join(names)} names "
            f"{len(found)}: it has {', '.join(found or _number_keys(config, ()))}"
        )
    return found[0]


class _Made(BaseException):
    """Leaves the user's script once its LightningCLI is made, and carries that."""


class _Reading:
    """Mixed into the user's LightningCLI: it gives the Trainer's arguments in place of one."""

    builds: bool
    config: Any

    def add_default_arguments_to_parser(self, parser: Any) -> None:
        """Let the file have what a saved one has of its fit."""
        super().add_default_arguments_to_parser(parser)  # type: ignore[misc]
        for name in OF_FIT:
            parser.add_argument(f"--{name}")

    def parse_arguments(self, parser: Any, args: Any) -> None:
        # Lightning's own warns of this process's command line.
        self.config = parser.parse_args(args)

    def instantiate_classes(self) -> None:
        """Build, or end the reading where the values are all that is wanted."""
        if not self.builds:
            raise _Made(self)
        super().instantiate_classes()  # type: ignore[misc]

    def _instantiate_trainer(self, *arguments: Any) -> Any:
        """Give the arguments as a dict."""
        self.trainer_class = dict
        return super()._instantiate_trainer(*arguments)  # type: ignore[misc]


def _values_by_key(file: CliFile) -> dict[str, Any]:
    """The values of a file and of the defaults, by their keys."""
    return dict(_read_by_cli(file, (), builds=False).config.items())


def _read_by_cli(file: CliFile, overrides: Sequence[str], *, builds: bool = True) -> Any:
    """Let LightningCLI read a file; without ``builds`` it has a ``config`` alone.

    Raises:
        InputError: LightningCLI refuses the file or an override.
        Exception: whatever the user's code raises.
    """
    for place in (Path.cwd(), Path(file.script or "").absolute().parent):
        if str(place) not in sys.path:
            sys.path.insert(0, str(place))
    words = [*(f"--config={path}" for path in file.files), *file.overrides, *OURS, *overrides]
    classes = [import_module(f"{name}.cli").LightningCLI for name in PACKAGES if find_spec(name)]
    makes: list[Callable[[], Any]] = list(classes)
    if file.script is not None:
        makes = [partial(runpy.run_path, file.script, run_name="__main__")]
    refusals = ["it makes no LightningCLI"]
    for make in makes:
        try:
            with ExitStack() as stack:
                for cli in classes:
                    stack.enter_context(_made_to_read(cli, words, builds))
                make()
        except _Made as made:
            return made.args[0]
        # A model of the other package is none of this one's.
        except argparse.ArgumentError as error:
            refusals.append(" ".join(str(error).split()))
    # Of all types that jsonargparse tried, what is wrong with the one that is meant.
    reason = refusals[:2][-1]
    essence = re.search(r"Problem with .*?(?= - Expected| Given value|$)", reason)
    hint = "" if file.script else "; if a script makes the LightningCLI, give it before the file"
    raise InputError(
        f"LightningCLI refuses {' '.join(file.named)}: {essence[0] if essence else reason}{hint}"
    )


@contextmanager
def _made_to_read(cli: Any, words: Sequence[str], builds: bool) -> Iterator[None]:
    """Let a class and its subclasses read some words, whatever they are called with."""
    own_init = cli.__init__

    def init(self: Any, model: Any = None, data: Any = None, **named: Any) -> None:
        """Read the words, without what the script asks for of a run; it never returns."""
        parser = {**(named.get("parser_kwargs") or {}), "exit_on_error": False}
        ours = {"args": words, "run": False, "save_config_callback": None, "parser_kwargs": parser}
        self.__class__ = type("Reading", (_Reading, type(self)), {"builds": builds})
        classes = {"model_class": model, "datamodule_class": data}
        own_init(self, **(classes | named | ours))
        raise _Made(self)

    cli.__init__ = init
    try:
        yield
    finally:
        cli.__init__ = own_init
