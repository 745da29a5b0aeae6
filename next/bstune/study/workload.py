"""What a study tunes, and what runs it again with further options: a command or a call."""

import json
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import yaml

from bstune.core.errors import InputError
from bstune.core.records import Target
from bstune.options import Options
from bstune.recipe.recipe import Recipe
from bstune.study.machine import Machine
from bstune.system.secrets import hide
from bstune.trial.table import Table
from bstune.trial.trial import Trial

COMMAND = "python -m bstune"
Command = Callable[[Mapping[str, object]], str]
"""What runs a study with further options, as a command or a call."""
TrainCommand = Callable[[int, float, int | None], str]
"""What trains a batch size and a rate, likewise; the third value is its steps, where a schedule's
length or the best metric in a budget is sought."""


# Options that one run does not read.
OF_SEARCH = ("trials", "seeds", "wall_seconds", "workers", "sampler")


@dataclass(frozen=True)
class Workload:
    """What is trained, from a config or from Python objects.

    Args:
        name: of the workload.
        settings: what must not change while a study goes on, as JSON.
        config: the config as YAML, without secrets.
        command, train_command: what runs it again, and what trains its best.
        train: trains one trial; it is sent to the worker with cloudpickle. None: whoever runs the
            study trains them.
        table: recorded runs that answer in place of training.
        recipe: of what is trained; None for recorded runs.
        machine: that trains; None: it is looked at.
    """

    name: str
    settings: Mapping[str, object]
    config: str
    command: Command
    train_command: TrainCommand
    train: Callable[[Trial], None] | None = None
    table: Table | None = None
    recipe: Recipe | None = None
    machine: Machine | None = None


def config_of(options: Options) -> str:
    """The config of a study that no file tells, as YAML, without secrets."""
    return yaml.safe_dump(hide(options.model_dump(mode="json")), sort_keys=False)


def by_lightning(recipe: Recipe) -> Callable[[Trial], None]:
    """Training by Lightning, whose import is left to the worker."""
    return partial(_train_by_lightning, recipe)


def _train_by_lightning(recipe: Recipe, trial: Trial) -> None:
    from bstune.trial.lightning import train

    train(recipe, trial)


def _by_name(words: Sequence[str]) -> dict[str, str]:
    """The words of a command by their options, without secrets; other words may stand twice."""
    given = dict[str, str]()
    for word in words:
        name, sign, value = word.partition("=")
        is_option = sign and not name.startswith("-")
        key = name if is_option else str(len(given))
        given[key] = name + sign + hide(value, name.lstrip("+~-"))
    return given


def command_line(arguments: Sequence[str], options: Mapping[str, object]) -> str:
    """A command line with further options, as a shell takes it, without secrets."""
    given = _by_name(arguments)
    # Another study needs a folder of its own.
    if "study" in options and "output" in given:
        given["output"] += "-" + str(options["study"]).rpartition("-")[2]
    for option, changed in options.items():
        if isinstance(changed, Mapping):
            # Hydra's keys have no quotes.
            pairs = [f"{name}: {value}" for name, value in changed.items()]
            changed = f"{{{', '.join(pairs)}}}"
        given[option] = f"{option}={changed}"
    return f"{COMMAND} {shlex.join(given.values())}"


def training_command(
    arguments: Sequence[str], batch_size: int, lr: float, steps: int | None
) -> str:
    """The command that trains the best; options of the search alone are left out."""
    arguments = [word for word in arguments if word.partition("=")[0] not in OF_SEARCH]
    options: dict[str, object] = {"trial.batch_size": batch_size, "trial.lr": lr}
    if steps is not None:
        options["trial.steps"] = steps
    return command_line(arguments, options)


def python_call(name: str, options: Mapping[str, object], function: str = "bstune.tune") -> str:
    """A call of :func:`bstune.tune`, or of another function, with further options."""
    arguments: dict[str, object] = {"name": options.get("study", name)}
    sections: dict[str, dict[str, object]] = {}
    for option, value in options.items():
        section, _, key = option.partition(".")
        if key:
            sections.setdefault(section, {})[key] = value
        elif option != "study":
            arguments[option] = value
    arguments |= sections
    written = "".join(f", {argument}={value!r}" for argument, value in arguments.items())
    return f"{function}(...{written})"


def application_command(words: Sequence[str], options: Mapping[str, object]) -> str:
    """A Hydra application's command with further options of its sweeper, without secrets."""
    given = _by_name(words)
    for option, changed in options.items():
        # Hydra quotes what is no plain word.
        is_plain = not isinstance(changed, str) or re.fullmatch(r"[\w./-]+", changed)
        name = f"hydra.sweeper.{option}"
        given[name] = f"{name}={changed if is_plain else json.dumps(changed)}"
    return shlex.join(given.values())


def best_in_file(arguments: Sequence[str], folder: str, *of_best: object) -> str:
    """What trains the best where further values are tuned: it is in best.yaml.

    Args:
        arguments: of the command line.
        folder: of the study.
        of_best: batch size, rate and steps, which the file has, too.
    """
    return command_line(arguments, {"trial": f"{folder}/best.yaml"})


def commands_of(
    command: str, name: str, asked: Mapping[str, object]
) -> tuple[Command, TrainCommand]:
    """What runs a study with further options, and what trains a batch size and a rate.

    Args:
        command: that runs the study, as :func:`command_line` or :func:`python_call` writes it.
        name: of the study.
        asked: options of another question; they make it another study.
    """
    another = {"study": f"{name}-2"} if asked else {}
    if not command.startswith(COMMAND) and "(..." not in command:
        own = _words(command)
        return lambda options: application_command(own, {**asked, **another, **options}), in_words
    if not command.startswith(COMMAND):
        function = command.partition("(")[0]
        call = partial(python_call, function=function)
        train = own_training if function == "bstune.tune" else in_words
        return lambda options: call(name, {**asked, **another, **options}), train
    arguments = _words(command.removeprefix(COMMAND))
    for option, value in asked.items():
        arguments.append(f"{option}={'null' if value is None else value}")
    run = partial(command_line, arguments)
    return lambda options: run({**another, **options}), partial(training_command, arguments)


def _words(command: str) -> list[str]:
    try:
        return shlex.split(command)
    except ValueError as error:
        raise InputError(f"config.yaml has no command of a study, but {command}") from error


def report_command(folder: Path, target: Target) -> str:
    """What answers another goal from the trials in a study's folder."""
    return f"{COMMAND} report {shlex.quote(str(folder))} target={target.goal:g}"


def own_training(*of_best: object) -> str:
    """What trains the best in a project of one's own, in Python."""
    return "result.train()"


def in_words(batch_size: int, lr: float, steps: int | None) -> str:
    """The best for a loop of one's own, which no command trains."""
    end = f", up to step {steps}," if steps is not None else ""
    return f"batch size {batch_size} and lr {lr:g}{end} in your own loop"


def in_best_file(folder: str, *of_best: object) -> str:
    """The best where further values are tuned, likewise."""
    return f"the configuration in {folder}/best.yaml"
