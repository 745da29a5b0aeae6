"""A recipe of a LightningCLI file, which LightningCLI itself reads, and builds what it names.

Nothing that the file or the script names is imported here, but in the worker.
"""

import argparse
import inspect
import re
import runpy
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from bstune.core.errors import InputError
from bstune.options import Options
from bstune.recipe.hydra import of_options
from bstune.recipe.recipe import (
    OF_TRAINER,
    RATES,
    Recipe,
    TrialSettings,
    value_of_today,
)
from bstune.system.console import guess
from bstune.system.files import read_yaml

PACKAGES = ("lightning.pytorch", "pytorch_lightning")
# What a file that LightningCLI saved has beside its sections.
OF_FIT = ("ckpt_path", "weights_only")
# Trials have seeds of their own, and log nowhere.
OURS = ("--seed_everything=false", "--trainer.logger=false")
# Lightning's names of a device and of precisions, and the options' own.
NAMES = {"gpu": "cuda", "32": "32-true", "64": "64-true", "16": "16-mixed", "bf16": "bf16-mixed"}


@dataclass(frozen=True)
class CliFile:
    """What a command line has for LightningCLI."""

    files: tuple[str, ...]
    """Config files, the later ones over the earlier."""
    overrides: tuple[str, ...]
    """As LightningCLI takes them: ``--KEY=VALUE``."""
    script: str | None
    """That makes the LightningCLI; None: files that name all classes."""
    lr_key: str | None
    """The file's key of the rate; None: it is looked up."""

    @property
    def name(self) -> str:
        """The study's, where none is given."""
        return Path((self.files or (str(self.script),))[-1]).stem

    @property
    def typed(self) -> list[str]:
        """It again, as words of a command line."""
        words = [*([self.script] if self.script else []), *self.files, *self.overrides]
        return [*words, f"lr_key={self.lr_key}"] if self.lr_key else words


def split_arguments(arguments: Sequence[str]) -> tuple[CliFile, list[str]]:
    """Split a command line into what is for LightningCLI, and bstune's options.

    ``[main.py] [fit] config.yaml --model.init_args.width=64 lr_key=KEY trials=8``

    Raises:
        InputError: there is no file, or jsonargparse is missing.
    """
    if find_spec("jsonargparse") is None:
        raise InputError("LightningCLI needs jsonargparse: pip install 'jsonargparse[signatures]'")
    files, overrides, options = list[str](), list[str](), list[str]()
    script = lr_key = None
    words = iter(arguments)
    for word in words:
        name, equals, value = word.partition("=")
        if name.startswith("-") and not equals:
            value = next(words, "")
        if name in ("-c", "--config"):
            files.append(value)
        elif name.startswith("-"):
            overrides.append(f"{name}={value}")
        elif name == "lr_key":
            lr_key = value
        elif equals:
            options.append(word)
        elif word.endswith(".py"):
            script = word
        elif word != "fit":
            files.append(word)
    given = [*files, *([script] if script else [])]
    if not given:
        raise InputError("lightning needs a file of LightningCLI, as in bstune lightning FILE.yaml")
    for path in given:
        if not Path(path).is_file():
            raise InputError(f"there is no file {path}")
    return CliFile(tuple(files), tuple(overrides), script, lr_key), options


def of_sections(file: CliFile) -> tuple[dict[str, Any], dict[str, str]]:
    """Read the files as plain YAML.

    Returns:
        What is trained, for the study's config, and the options that the Trainer's section tells.

    Raises:
        InputError: a file is none of LightningCLI, or names no class.
    """
    read, trainer = [], dict[str, Any]()
    has_class = file.script is not None or any(it.startswith("--model") for it in file.overrides)
    for path in file.files:
        sections = read_yaml(Path(path))
        if not (isinstance(sections, dict) and {"model", "data", "trainer"} & sections.keys()):
            raise InputError(f"{path} is no file of LightningCLI, with model, data and trainer")
        model, of_trainer = sections.get("model"), sections.get("trainer")
        has_class |= isinstance(model, str) or "class_path" in (model or ())
        trainer |= of_trainer if isinstance(of_trainer, dict) else {}
        read.append(sections)
    if not has_class:
        files = " ".join(file.files)
        raise InputError(
            f"{files} has no class_path of its model: give the script that makes the LightningCLI, "
            f"as in bstune lightning main.py {files}"
        )
    for override in file.overrides:
        name, _, value = override.removeprefix("--trainer.").partition("=")
        trainer[name] = value
    options = {}
    for name, option in OF_TRAINER.items():
        given = str(trainer.get(name))
        # Other numbers of devices are Lightning's ways to say all.
        if given not in ("None", "auto") and (name != "devices" or given.isdecimal()):
            options[option] = NAMES.get(given, given)
    overrides = dict(override.removeprefix("--").split("=", 1) for override in file.overrides)
    node = {"script": file.script, "files": read, "overrides": overrides, "lr_key": file.lr_key}
    return node, options


def recipe_of_file(file: CliFile, options: Options) -> Recipe:
    """Make the recipe of a LightningCLI file, which is read in the worker.

    Args:
        file: with the command line's overrides.
        options: of the study.
    """
    built = _OfFile(file, [one.name for one in options.tunables])
    return Recipe(
        module=built.module,
        data=built.data,
        trainer=built.trainer,
        own_values=built.own_values,
        **of_options(options),
    )


class _OfFile:
    """Module, data and Trainer's arguments of a trial, which LightningCLI builds together.

    Args:
        file: that it reads.
        tuned: names of further values.
    """

    def __init__(self, file: CliFile, tuned: Sequence[str]) -> None:
        self._file = file
        self._tuned = tuned
        self._built: tuple[TrialSettings, Any] | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what was built, which no other process and no copy needs."""
        return vars(self) | {"_built": None}

    def module(self, trial: TrialSettings) -> Any:
        """Build all of a trial, and give its module."""
        self._built = trial, self._cli(trial)
        return self._built[1].model

    def data(self, trial: TrialSettings) -> Any:
        """Give the data module that was built with the module."""
        data = self._of(trial).datamodule
        if data is None:
            raise InputError(f"{self._file.name} has no data: name a LightningDataModule, as data")
        return data

    def trainer(self, trial: TrialSettings) -> dict[str, Any]:
        """Give the Trainer's arguments that are not its defaults, and that no option is for."""
        cli = self._of(trial)
        defaults = inspect.signature(cli.users_trainer).parameters
        given = {}
        for name, value in cli.trainer.items():
            is_default = name in defaults and value == defaults[name].default
            if value is not None and not is_default and name not in OF_TRAINER:
                given[name] = value
        return given

    def own_values(self) -> dict[str, int | float | None]:
        """The file's rate, as ``lr``, and its further values; it builds nothing."""
        config = dict(_made(self._file, (), builds=False).config.items())
        keys = {"lr": self._rate_key(config)} | {name: _key(config, name) for name in self._tuned}
        return {name: value_of_today(name, config[key]) for name, key in keys.items()}

    def _of(self, trial: TrialSettings) -> Any:
        if self._built is None or self._built[0] is not trial:
            self.module(trial)
        assert self._built is not None  # noqa: S101 (module sets it)
        return self._built[1]

    def _cli(self, trial: TrialSettings) -> Any:
        """Let LightningCLI read and build all with a trial's values."""
        config = dict(_made(self._file, (), builds=False).config.items())
        values = {_key(config, name): value for name, value in trial.values.items()}
        if trial.lr is not None:
            values[self._rate_key(config)] = trial.lr
        sizes = list(_keys(config, ("batch_size",), ("data",)))
        if trial.batch_size is not None and len(sizes) == 1:
            values[sizes[0]] = trial.batch_size
        return _made(self._file, [f"--{key}={value!r}" for key, value in values.items()])

    def _rate_key(self, config: Mapping[str, Any]) -> str:
        """The config's key of the rate; InputError that asks for it, or says what is meant."""
        given = self._file.lr_key
        found = list(_keys(config, RATES, ("model", "optimizer")))
        name = self._file.name
        if given is None and len(found) == 1:
            return found[0]
        if given is None:
            what = f"rates {', '.join(found)}" if found else f"no {' or '.join(RATES)}"
            example = found[0] if found else "model.init_args.NAME"
            raise InputError(f"{name} has {what}: say which is meant, as lr_key={example}")
        if given not in config:
            meant = guess(given, [*found, *_keys(config)])
            raise InputError(f"{name} has no lr_key={given}: did you mean {meant}?")
        return given


def _keys(
    config: Mapping[str, Any],
    names: Sequence[str] = (),
    sections: Sequence[str] = ("model", "data", "optimizer"),
) -> Iterator[str]:
    """Name the numbers of some sections, those of some names where there are any."""
    for key, value in config.items():
        section, name = key.partition(".")[0], key.rpartition(".")[2]
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if is_number and section in sections and name in (names or (name,)):
            yield key


def _key(config: Mapping[str, Any], name: str) -> str:
    """The key of a further value; InputError where there is none, or several."""
    keys = list(_keys(config, [name]))
    if len(keys) != 1:
        meant = ", ".join(keys or sorted({key.rpartition(".")[2] for key in _keys(config)}))
        raise InputError(f"tune={name} must name one number of the file: it has {meant}")
    return keys[0]


class _Made(BaseException):
    """Leaves the user's script once its LightningCLI is made, and carries that."""


class _Reading:
    """Mixed into the user's LightningCLI: it gives the Trainer's arguments in place of one."""

    builds: bool
    trainer_class: Any
    config: Any

    def add_default_arguments_to_parser(self, parser: Any) -> None:
        super().add_default_arguments_to_parser(parser)  # type: ignore[misc]
        for name in OF_FIT:
            parser.add_argument(f"--{name}")

    def parse_arguments(self, parser: Any, args: Any) -> None:
        # Lightning's own warns of this process's command line.
        self.config = parser.parse_args(args)

    def instantiate_classes(self) -> None:
        if self.builds:
            super().instantiate_classes()  # type: ignore[misc]

    def after_instantiate_classes(self) -> None:
        if self.builds:
            super().after_instantiate_classes()  # type: ignore[misc]

    def _instantiate_trainer(self, *arguments: Any) -> Any:
        self.users_trainer, self.trainer_class = self.trainer_class, dict
        return super()._instantiate_trainer(*arguments)  # type: ignore[misc]


def _made(file: CliFile, overrides: Sequence[str], *, builds: bool = True) -> Any:
    """Make the LightningCLI of a file; without ``builds`` it has a ``config`` alone.

    Raises:
        InputError: LightningCLI refuses the file or an override.
        Exception: whatever the user's code raises.
    """
    for folder in ("", Path(file.script or "").parent):
        if str(Path(folder).absolute()) not in sys.path:
            sys.path.insert(0, str(Path(folder).absolute()))
    words = [*(f"--config={path}" for path in file.files), *file.overrides, *OURS, *overrides]
    classes = [import_module(f"{name}.cli").LightningCLI for name in PACKAGES if find_spec(name)]
    makes: list[Callable[[], Any]] = list(classes)
    if file.script is not None:
        makes = [partial(runpy.run_path, file.script, run_name="__main__")]
    refusals = []
    for make in makes:
        try:
            with ExitStack() as stack:
                for cli in classes:
                    stack.enter_context(_read_by(cli, words, builds=builds))
                make()
        except _Made as made:
            return made.args[0]
        # A model of the other package is none of this one's.
        except argparse.ArgumentError as error:
            refusals.append(_essence(str(error)))
    if not refusals:
        raise InputError(f"{file.script} makes no LightningCLI: give the script that does")
    raise InputError(f"LightningCLI refuses {' '.join(file.files) or file.script}: {refusals[0]}")


@contextmanager
def _read_by(cli: Any, words: Sequence[str], *, builds: bool) -> Iterator[None]:
    """Let a class and its subclasses read some words, whatever they are called with."""
    own_init = cli.__init__

    def init(self: Any, *positional: Any, **named: Any) -> None:
        given = inspect.signature(own_init).bind(self, *positional, **named).arguments
        parser = given.get("parser_kwargs") or {}
        parser = {**parser, **parser.get("fit", {}), "exit_on_error": False}
        ours = {"args": words, "run": False, "save_config_callback": None, "parser_kwargs": parser}
        self.__class__ = type("Reading", (_Reading, type(self)), {"builds": builds})
        own_init(**given | ours)
        raise _Made(self)

    cli.__init__ = init
    try:
        yield
    finally:
        cli.__init__ = own_init


def _essence(refusal: str) -> str:
    """What jsonargparse refuses, in one line without the types that it tried."""
    line = " ".join(refusal.split())
    line = re.sub(r"Does not validate against any .*? Errors: - ", "", line)
    return re.split(r" - Expected a | Given value type", line)[0]
