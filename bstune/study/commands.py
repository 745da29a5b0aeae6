"""What runs a study again with further options, and what trains its best: a command or a call."""

import json
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal

from bstune.core.errors import InputError
from bstune.core.records import Target
from bstune.options import Options, differing
from bstune.system.secrets import hide

COMMAND = "python -m bstune"
# Options that one run does not read.
OF_SEARCH = ("trials", "seeds", "wall_seconds", "workers", "sampler")
# What is called in Python.
FUNCTIONS = {"tune": "bstune.tune", "loop": "bstune.Study"}

Way = Literal["command", "lightning", "tune", "loop", "application"]
"""How a study is begun: by a command, by one with LightningCLI's files, by ``bstune.tune``, by a
loop over ``bstune.Study``, or by the sweeper of a Hydra application."""
Command = Callable[[Mapping[str, object]], str]
"""What runs a study with further options, as a command or a call."""
TrainCommand = Callable[[int, float, int | None], str]
"""What trains a batch size and a rate, likewise; the third value is its steps, where a schedule's
length or the best metric in a budget is sought."""


@dataclass(frozen=True)
class Commands:
    """How a study was begun, what runs it again and what trains its best."""

    way: Way
    study: Command
    train: TrainCommand


def line_commands(way: Way, arguments: Sequence[str], folder: str | None = None) -> Commands:
    """The commands of a study that a command line begins.

    Args:
        way: ``command`` or ``lightning``.
        arguments: of the command line.
        folder: of the study, where further values are tuned: its best.yaml has them.
    """
    train: TrainCommand = partial(training_command, arguments)
    if folder is not None:
        train = for_any_best(command_line(arguments, {"trial": f"{folder}/best.yaml"}))
    return Commands(way, partial(command_line, arguments), train)


def call_commands(way: Way, name: str) -> Commands:
    """The calls of a study that Python begins; ``way`` is ``tune`` or ``loop``."""
    train: TrainCommand = partial(best_in_words, "your own loop")
    if way == "tune":
        train = for_any_best("result.train()")
    return Commands(way, partial(python_call, FUNCTIONS[way], name), train)


def stored_commands(way: Way, command: str, own: Options, asked: Options) -> Commands:
    """The commands of a study that is read from its folder.

    Args:
        way: that it was begun.
        command: that runs it.
        own: options of the study.
        asked: the same, or those of another question, which is another study.
    """
    options = differing(own, asked)
    if way in FUNCTIONS:
        commands = call_commands(way, own.study_name)
    elif way == "application":
        words = _split(command)
        train = partial(best_in_words, "your application")
        commands = Commands(way, partial(application_command, words), train)
    else:
        asking = command_line(_words_after_command(command), options)
        commands = line_commands(way, _words_after_command(asking))
    if own.tunables and way != "tune":
        # best.yaml is of the study's own question.
        commands = replace(commands, train=for_any_best("the configuration of row Best"))
    if options:
        options["study"] = f"{own.study_name}-2"
    return replace(commands, study=lambda further: commands.study({**options, **further}))


def _words_after_command(command: str) -> list[str]:
    return _split(command.removeprefix(COMMAND))


def _split(command: str) -> list[str]:
    try:
        return shlex.split(command)
    except ValueError as error:
        raise InputError(f"config.yaml has no command of a study, but {command}") from error


def _words_by_option(words: Sequence[str]) -> dict[str, str]:
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
    given = _words_by_option(arguments)
    # Another study needs a folder of its own.
    if "study" in options and "output" in given:
        given["output"] += "-" + str(options["study"]).rpartition("-")[2]
    for option, changed in options.items():
        if isinstance(changed, Mapping):
            # Hydra's keys have no quotes.
            pairs = [f"{name}: {value}" for name, value in changed.items()]
            changed = f"{{{', '.join(pairs)}}}"
        given[option] = f"{option}={'null' if changed is None else changed}"
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


def python_call(function: str, name: str, options: Mapping[str, object]) -> str:
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
    given = _words_by_option(words)
    for option, changed in options.items():
        # Hydra quotes what is no plain word.
        is_plain = not isinstance(changed, str) or re.fullmatch(r"[\w./-]+", changed)
        name = f"hydra.sweeper.{option}"
        given[name] = f"{name}={changed if is_plain else json.dumps(changed)}"
    return shlex.join(given.values())


def for_any_best(text: str) -> TrainCommand:
    """What trains the best in the same words whatever it is."""
    return lambda *of_best: text


def best_in_words(where: str, batch_size: int, lr: float, steps: int | None) -> str:
    """The best where no command trains it: ``batch size 118 and lr 1.18 in your own loop``."""
    end = f", up to step {steps}," if steps is not None else ""
    return f"batch size {batch_size} and lr {lr:g}{end} in {where}"


def report_command(folder: Path, target: Target) -> str:
    """What answers another goal from the trials in a study's folder."""
    return f"{COMMAND} report {shlex.quote(str(folder))} target={target.goal:g}"
