"""Reads a config file of LightningCLI as text, before PyTorch and the user's code are imported.

    file = read_file(Path("config.yaml"), Chosen("val_loss=0.1"))
    file.sections["model"]["class_path"]

All that a study needs, and neither the file nor the command line has, is one refusal. It ends with
the command to type, as far as the file tells it.
"""

import ast
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

from bstune.core.errors import ConfigError
from bstune.core.metric_names import parse_target
from bstune.core.search_space import OVERRIDE_LR
from bstune.options import Node
from bstune.recipe import RATES, looks_like_rate
from bstune.system.arguments import hint_on
from bstune.system.console import listing
from bstune.system.inputs import one_line, parse_yaml, read_text

# Sections of a file.
SECTIONS = ("trainer", "model", "data", "optimizer", "lr_scheduler")
# Keys of a file that are ignored, as a study has values of its own for them, such as seeds.
IGNORED = ("seed_everything", "ckpt_path", "verbose", "weights_only")
# A Trainer's arguments from which the budget is made.
LENGTHS = ("max_epochs", "max_steps")
# The module of the Trainer, by Lightning's package: the first one that is there counts.
TRAINERS = ("lightning.pytorch.trainer.trainer", "pytorch_lightning.trainer.trainer")
# What stands in a command for a class that the file does not tell.
ANY_CLASS = "MODULE.CLASS"
# The option of a study that a command proposes where nothing says how long a trial is.
SHORT_STUDY = "quick=true"
NEEDS_JSONARGPARSE = (
    "files of LightningCLI are read by jsonargparse, as LightningCLI itself does: "
    "pip install 'bstune[lightning-cli]'"
)


@dataclass(frozen=True)
class Chosen:
    """The options of the command line that complete a file."""

    # The target as text; None: the metric is the project's own, and the goal is the value that its
    # own configuration comes to.
    target: str | None = None
    # Dotted names of the classes, where the file names none.
    model: str | None = None
    data: str | None = None
    # The dotted key of the learning rate in the file; None: it is found by its name.
    lr: str | None = None
    # The workload's name; None: that of the model's class.
    name: str | None = None
    # Whether the study is limited by seconds.
    is_timed: bool = False
    # Whether bstune sets the learning rate in the model's optimizers.
    overrides_lr: bool = False
    # Further options of bstune, as they were typed.
    options: tuple[str, ...] = ()


@dataclass(frozen=True)
class CliFile:
    """A file of LightningCLI, and the options of the command line that complete it."""

    path: Path
    chosen: Chosen
    # Those of SECTIONS that the file has. The model and the data have their classes.
    sections: Node
    # Its keys of IGNORED.
    ignored: tuple[str, ...] = ()

    def command(self, *options: str, **added: str) -> str:
        """Write the command that reads this file, as it is to be typed.

        Args:
            options: of bstune that it has besides those that were typed.
            added: values of :class:`Chosen` that it has besides, by name.
        """
        words = ["bstune", "lightning", one_line(str(self.path))]
        for name in ("target", "model", "data", "lr", "name"):
            value = added.get(name) or getattr(self.chosen, name)
            if value is not None:
                words += [f"--{name}", value]
        return shlex.join([*words, *self.chosen.options, *options])


@dataclass
class _Missing:
    """What neither the file nor the command line tells.

    Attributes:
        things: in words.
        added: values of :class:`Chosen` that would tell them, by name.
        options: of bstune that would tell them.
    """

    things: list[str] = field(default_factory=list)
    added: dict[str, str] = field(default_factory=dict)
    options: list[str] = field(default_factory=list)


def read_file(path: Path, chosen: Chosen) -> CliFile:
    """Read a file of LightningCLI, and check what it and the command line tell by themselves.

    Raises:
        ConfigError: for what cannot be used; or names all that is missing, with the command.
    """
    if find_spec("jsonargparse") is None:
        raise ConfigError(NEEDS_JSONARGPARSE)
    if chosen.name is not None and not re.fullmatch(r"\w[\w.-]*", chosen.name):
        raise ConfigError(
            f"--name must be letters, digits, and - . _ between them, but got {chosen.name!r}"
        )
    if chosen.target is not None:
        parse_target(chosen.target)
    missing = _Missing()
    sections, ignored = _read_sections(path)
    for name, given in (("model", chosen.model), ("data", chosen.data)):
        sections[name] = _with_class(name, sections.get(name, {}), given, missing)
    unknown = list(_unknown_arguments(sections))
    if unknown:
        raise ConfigError("\n".join(f"{one_line(str(path))}: {line}" for line in unknown))
    if isinstance(sections.get("trainer"), dict):
        check_lengths(sections["trainer"], one_line(str(path)))
    file = CliFile(path, chosen, sections, tuple(ignored))
    if not chosen.is_timed and not _has_length(sections.get("trainer")):
        missing.things.append(
            "the length of a trial (trainer.max_epochs or trainer.max_steps in the file, or the "
            f"study's time, {SHORT_STUDY} or search.wall_seconds=SECONDS)"
        )
        missing.options.append(SHORT_STUDY)
    _look_for_rate(file, missing)
    if missing.things:
        lacks = listing(missing.things)
        command = file.command(*missing.options, **missing.added)
        raise ConfigError(f"{one_line(str(path))} lacks {lacks}: {command}")
    return file


def _read_sections(path: Path) -> tuple[Node, list[str]]:
    """Read the sections of a file, and list its keys of ``IGNORED``."""
    name = one_line(str(path))
    content = parse_yaml(read_text(path, "the config file"), name)
    # In a file for several subcommands of LightningCLI, training has its sections under ``fit``.
    if isinstance(content, dict):
        content = content.get("fit", content)
    if not isinstance(content, dict):
        raise ConfigError(
            f"{name} must hold LightningCLI's trainer, model and data, but holds {content!r:.100}"
        )
    others = [key for key in content if key not in (*SECTIONS, *IGNORED)]
    if others:
        raise ConfigError(
            f"{name}: {', '.join(map(str, others))} is none of {', '.join(SECTIONS)}: what a "
            "project's own LightningCLI adds is not known here; put call-backs under "
            "trainer.callbacks, other arguments under model and data"
        )
    sections = {key: content[key] for key in SECTIONS if content.get(key) is not None}
    for key, section in sections.items():
        # A class without arguments may stand alone.
        if not isinstance(section, dict | str):
            raise ConfigError(
                f"{name}: {key} must hold arguments by name, but holds {section!r:.100}"
            )
    return sections, [key for key in IGNORED if key in content]


def _with_class(name: str, section: Node | str, given: str | None, missing: _Missing) -> Node:
    """Give a section with its class, which the command line may have given.

    ``missing`` gets a class that neither tells.
    """
    if isinstance(section, str):
        return {"class_path": section}
    if "class_path" in section:
        return section
    if given is None:
        missing.things.append(f"the class of its {name}")
        missing.added[name] = ANY_CLASS
    return {"class_path": given or ANY_CLASS, "init_args": section}


def _unknown_arguments(sections: Node) -> Iterator[str]:
    """Write a line on each argument that the class of the Trainer, model or data does not take.

    Only classes whose source tells all of their arguments are asked.
    """
    trainer = sections.get("trainer")
    if isinstance(trainer, dict):
        # Of either package of Lightning, as one of them alone may be installed.
        candidates = (arguments_of(f"{module}.Trainer") for module in TRAINERS)
        known = next((names for names in candidates if names is not None), None)
        yield from _lines_on_unknown("trainer", "Trainer", trainer, known)
    for name in ("model", "data"):
        class_path = sections[name].get("class_path")
        values = sections[name].get("init_args")
        if isinstance(class_path, str) and isinstance(values, dict):
            called = class_path.rpartition(".")[2]
            yield from _lines_on_unknown(name, called, values, arguments_of(class_path))


def _lines_on_unknown(
    section: str, called: str, values: Mapping[object, object], known: list[str] | None
) -> Iterator[str]:
    """Write a line on each of a section's arguments that is none of the ``known`` ones.

    ``called``: the name of the class. Without known arguments there are no lines.
    """
    if known is None:
        return
    for key in values:
        # A dotted name leads into an argument, and jsonargparse appends to one that ends with +.
        name = str(key).partition(".")[0].removesuffix("+")
        if name in known:
            continue
        hint = hint_on(name, known)
        yield f"{section}: {one_line(name)} is no argument of {called}; {hint}"


def arguments_of(class_path: str) -> list[str] | None:
    """Read from its source which arguments a class takes, without importing it.

    It is None where the source is not found or does not tell all of them: where the class has no
    ``__init__`` of its own or one with ``**kwargs``, or is made by a decorator.
    """
    module, _, name = class_path.rpartition(".")
    source = _source_of(module)
    if source is None:
        return None
    try:
        tree = ast.parse(source.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return None
    for node in tree.body:
        if not isinstance(node, ast.ClassDef) or node.name != name or node.decorator_list:
            continue
        for part in node.body:
            if isinstance(part, ast.FunctionDef) and part.name == "__init__":
                return _all_named(part.args)
    return None


def _all_named(arguments: ast.arguments) -> list[str] | None:
    """List the names of a method's arguments but for ``self``; None where others are taken, too."""
    if arguments.vararg is not None or arguments.kwarg is not None:
        return None
    named = [*arguments.posonlyargs, *arguments.args]
    return [argument.arg for argument in (*named[1:], *arguments.kwonlyargs)]


def _source_of(module: str) -> Path | None:
    """Find a module's file without importing its packages; None where there is none."""
    top, *inner = module.split(".")
    try:
        # Python finds a module at the top without running anything.
        spec = find_spec(top)
    except (ImportError, ValueError):
        return None
    if spec is None:
        return None
    if not inner:
        return None if spec.origin is None else Path(spec.origin)
    for folder in spec.submodule_search_locations or ():
        place = Path(folder, *inner)
        for file in (place.with_suffix(".py"), place / "__init__.py"):
            if file.is_file():
                return file
    return None


def check_lengths(trainer: Mapping[str, object], file: str = "") -> None:
    """Raise a ConfigError for a number that is no length of a Trainer's run: 0, or below but -1.

    Args:
        trainer: its arguments, by name. -1 and None set no limit; what is no number is passed over.
        file: the name of the file that has them; empty: they are given in Python.
    """
    for name in LENGTHS:
        value = trainer.get(name)
        number = _number(value)
        if number is None or number > 0 or number == -1:
            continue
        place = f"{file}: " if file else ""
        raise ConfigError(
            f"{place}trainer.{name} must be at least 1, or -1 for no limit, but got {value!r:.100}"
        )


def _has_length(trainer: object) -> bool:
    """Whether a file's section ``trainer`` says how long the training is; -1 and null do not.

    A text counts by the number in it, which jsonargparse reads there.
    """
    if not isinstance(trainer, dict):
        return False
    numbers = [_number(trainer.get(name)) for name in LENGTHS]
    return any(number is not None and number > 0 for number in numbers)


def _number(value: object) -> float | None:
    """Give the number that a value is, or that a text has; None for any other value."""
    if not isinstance(value, int | float | str):
        return None
    try:
        return float(value)
    except ValueError:
        return None


def _look_for_rate(file: CliFile, missing: _Missing) -> None:
    """Look for the learning rate among the file's own numbers.

    ``missing`` gets the choice between several that have its name. Where the command lacks
    something anyway, it also gets a number that only looks like the rate; else the defaults of
    the user's classes may yet tell.
    """
    if file.chosen.lr is not None or file.chosen.overrides_lr:
        return
    numbers = numbers_of(file.sections)
    named = named_rates(numbers)
    if len(named) > 1:
        missing.things.append(f"the choice of its learning rate, {' or '.join(named)}")
        missing.added["lr"] = named[0]
    alike = looking_like_rates(numbers)
    if missing.things and alike and not named:
        missing.things.append(f"a number named {' or '.join(RATES)} ({_alike_in_words(alike)})")
        missing.added["lr"] = alike[0]


def numbers_of(
    sections: Mapping[str, object], names: Sequence[str] = ("optimizer", "model")
) -> dict[str, float]:
    """Give the numbers of some of a file's sections by dotted keys.

    By default they are the sections among whose numbers the learning rate is.
    """
    numbers = dict[str, float]()
    for name in names:
        section = sections.get(name)
        if isinstance(section, dict):
            numbers.update(_numbers(section, f"{name}."))
    return numbers


def _numbers(values: Mapping[str, object], prefix: str) -> Iterator[tuple[str, float]]:
    """Yield each number in nested mappings with its dotted key, which ``prefix`` begins.

    Lists are passed over.
    """
    for name, value in values.items():
        if isinstance(value, dict):
            yield from _numbers(value, f"{prefix}{name}.")
        elif isinstance(value, int | float) and not isinstance(value, bool):
            yield f"{prefix}{name}", value


def named_rates(numbers: Mapping[str, float]) -> list[str]:
    """List the keys of the numbers that are learning rates by their names.

    An optimizer in the file takes the place of the model's own, so its rates go before others.
    """
    named = [key for key in numbers if key.rpartition(".")[2] in RATES]
    of_optimizer = [key for key in named if key.startswith("optimizer.")]
    return of_optimizer or named


def looking_like_rates(numbers: Mapping[str, float]) -> list[str]:
    """List the keys of positive numbers whose names speak of a learning rate, as base_lr does."""
    positive = [key for key, value in numbers.items() if value > 0]
    return [key for key in positive if looks_like_rate(key.rpartition(".")[2])]


def _alike_in_words(alike: list[str]) -> str:
    """Say that numbers look like a learning rate."""
    return f"{listing(alike)} {'looks' if len(alike) == 1 else 'look'} like it"


def which_rate(file: CliFile, numbers: Mapping[str, float]) -> str:
    """Ask which number is the learning rate, and offer those that look like it in a command.

    Args:
        file: which is read.
        numbers: of the file, by dotted keys, with the defaults of the user's classes if these are
            known.
    """
    named = named_rates(numbers)
    alike = looking_like_rates(numbers)
    offered = [*named, *(key for key in alike if key not in named)]
    if file.chosen.lr is not None:
        problem = f"there is no number {file.chosen.lr}"
    elif named:
        problem = f"{listing(named)} are named {' or '.join(RATES)}"
    else:
        problem = f"none is named {' or '.join(RATES)}"
    if not offered:
        problem = f"{problem} (numbers: {', '.join(numbers) or 'none'})"
    elif not named:
        problem = f"{problem}; {_alike_in_words(alike)}"
    key = offered[0] if offered else "KEY"
    return (
        f"which number is the learning rate? {problem}: {file.command(lr=key)}; where it stands in "
        f"configure_optimizers, {OVERRIDE_LR}=true sets it in the optimizer"
    )
