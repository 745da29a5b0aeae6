"""What an experiment comes to: a sentence, the numbers behind it, and one figure.

Sweeps: ``python -m bstune.sweeps.harness NAME [options]`` runs a named experiment that reproduces a published result.

A sweep is one file in ``sweeps/`` (installed as bstune.sweeps) on top of ``conf/``: its keys under ``sweep`` say where
the result was published, where the outputs go, and which function of :mod:`bstune.experiments` is called with which
parameters. That function is called as ``run(config, console, **parameters)`` and returns a
:class:`~bstune.sweeps.harness.Finding`; its annotations are the parameters' types. A sweep that trains takes
``config`` into its defaults, so that every option of bstune is one of its own; one that does not has no options but
those under ``sweep``, and is called with an empty config. Annotations may be numbers, ``str``, ``bool``, lists and
dictionaries of them, and lists of dataclasses, which the YAML gives as mappings.
"""

import argparse
import functools
import inspect
import os
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, make_dataclass
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import ConfigKeyError, OmegaConfBaseException, ValidationError

from bstune.config import compose_known, instantiate, is_replayed, validate, without_plus
from bstune.core.console import format_number, quieten, redact
from bstune.core.errors import ConfigError, Interrupted, StudyError
from bstune.core.files import check_writable
from bstune.core.records import dump_json
from bstune.trial.replay import complete

if TYPE_CHECKING:
    from rich.console import Console


@dataclass(frozen=True)
class Finding:
    """What an experiment comes to.

    Args:
        sentence: the finding, computed from the rows, in one sentence.
        rows: the numbers, one mapping a line of the table; all of plain values that go to JSON. Lists and mappings in
            them are written to ``result.json`` and left out of the table.
        n: how many measurements stand behind each row: repeats, or seeds.
        device: name of the device that it was measured on.
        draw: writes the figure to the path that it is given, as a PNG whatever the path's suffix is.
    """

    sentence: str
    rows: Sequence[Mapping[str, Any]]
    n: int
    device: str
    draw: Callable[[Path], None]


SWEEP_MODULE = "bstune.sweeps"
COMMAND = "python -m bstune sweep"
GIVEN = 2  # parameters of an experiment that are not in its YAML: config and console


@dataclass
class SweepSettings:
    """The keys under ``sweep``; no defaults here, the YAML owns them."""

    source: str
    output: str
    experiment: Any


@dataclass(frozen=True)
class SweepOutput:
    """The paths of one sweep."""

    root: Path

    @property
    def result(self) -> Path:
        """The finding with all that it rests on."""
        return self.root / "result.json"

    @property
    def figure(self) -> Path:
        """The one figure."""
        return self.root / "figure.png"


@dataclass(frozen=True)
class Sweep:
    """A checked sweep.

    Args:
        name: its file's.
        source: the published result.
        output: where its files go.
        config: the rest of the composed config, checked; empty for a sweep without a workload.
        experiment: ``run`` of its module.
        parameters: for the experiment, each of its annotated type.
        plain_parameters: the same as plain values.
    """

    name: str
    source: str
    output: SweepOutput
    config: DictConfig
    experiment: functools.partial[Finding]
    parameters: Mapping[str, Any]
    plain_parameters: Mapping[str, Any]


def main(arguments: list[str]) -> None:
    """Run the sweep that is named, or list the sweeps."""
    parser = _parser()
    parsed = parser.parse_args(arguments)
    if parsed.name is None:
        sys.stdout.write((parser.format_help() + "\n" if parsed.help else "") + listing())
    elif parsed.help:
        sys.stdout.write(redact(OmegaConf.to_yaml(compose_sweep(parsed.name, parsed.options))))
    else:
        run_sweep(parsed.name, parsed.options)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=COMMAND, description="Reproduces a published result.", add_help=False)
    parser.add_argument("name", nargs="?", help="the sweep; without one, the sweeps are listed")
    parser.add_argument("options", nargs="*", help="options of the sweep's file, as sweep.output=DIR")
    parser.add_argument("-h", "--help", action="store_true", help="after a name: list the options, as they are set")
    return parser


def sweep_names() -> list[str]:
    """Return the names of the sweeps that there are, sorted."""
    return sorted(Path(file.name).stem for file in files(SWEEP_MODULE).iterdir() if file.name.endswith(".yaml"))


def listing() -> str:
    """Return the sweeps, each with the published result that it reproduces, and how one is run."""
    lines = [f"{name}\n    {compose_sweep(name, ()).sweep.source}" for name in sweep_names()]
    return "\n".join([*lines, f"run one with: {COMMAND} NAME [options]; its options: {COMMAND} NAME --help", ""])


def compose_sweep(name: str, options: Sequence[str]) -> DictConfig:
    """Return the config of a sweep, composed but not checked; ConfigError for an unknown sweep, option or group."""
    if name not in sweep_names():
        raise ConfigError(f"there is no sweep {name!r}; sweeps: {', '.join(sweep_names())}")
    config, unknown = compose_known(SWEEP_MODULE, name, without_plus(options))
    if unknown:
        raise ConfigError("\n".join(f"unknown option {option}; --help lists the options" for option in unknown))
    return config


def check_sweep(name: str, config: DictConfig) -> Sweep:
    """Check a composed sweep, writing nothing.

    Raises:
        ConfigError: for an unknown option, a value that is missing or of the wrong type, or no workload where the
            sweep needs one.
        StudyError: if its output cannot be written.
    """
    if not isinstance(config.get("sweep"), DictConfig):
        raise ConfigError(f"sweep must have the keys source, output and experiment, but got {config.get('sweep')!r}")
    try:
        values = OmegaConf.to_container(config.sweep, resolve=True)  # what it refers to may be beside it
        own = OmegaConf.merge(OmegaConf.structured(SweepSettings), values)
        source, root = own.source, own.output
        experiment = instantiate(own.experiment, "sweep.experiment")
    except ConfigKeyError as error:
        raise ConfigError(f"unknown option sweep.{error.full_key}; --help lists the options") from error
    except OmegaConfBaseException as error:
        raise ConfigError(f"sweep: {str(error).splitlines()[0]}") from error
    if not isinstance(experiment, functools.partial):
        raise ConfigError("sweep.experiment must have _partial_: true: it is called once everything is checked")
    parameters, plain_parameters = _typed(experiment)
    output = SweepOutput(Path(root))
    rest = config.copy()
    with open_dict(rest):
        del rest["sweep"]
    check_writable(output.result, f"sweep.output={root}")
    return Sweep(name, source, output, _checked(name, rest), experiment, parameters, plain_parameters)


def _checked(name: str, rest: DictConfig) -> DictConfig:
    if "protocol" not in rest:  # conf/config.yaml is not among its defaults
        if rest:
            raise ConfigError(f"unknown option {next(iter(rest))!s}; --help lists the options")
        return rest
    if "workload" not in rest:
        raise ConfigError(f"the sweep {name} needs a workload: add +workload=NAME")
    return validate(rest, complete=complete)


def _typed(experiment: functools.partial[Finding]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return an experiment's parameters, as its annotations have them and as plain values.

    A parameter with a default is none of the YAML's: a clock that tests replace.
    """
    own = list(inspect.signature(experiment.func).parameters.values())[GIVEN:]
    schema = make_dataclass("Parameters", [(p.name, p.annotation) for p in own if p.default is p.empty])
    try:
        merged = OmegaConf.merge(OmegaConf.structured(schema), experiment.keywords)
        if missing := OmegaConf.missing_keys(merged):
            raise ConfigError(f"no value is given for sweep.experiment.{', sweep.experiment.'.join(sorted(missing))}")
        typed = OmegaConf.to_object(merged)
    except ConfigKeyError as error:
        raise ConfigError(f"unknown option sweep.experiment.{error.full_key}; --help lists the options") from error
    except ValidationError as error:
        raise ConfigError(f"sweep.experiment.{error.full_key}: {str(error).splitlines()[0]}") from error
    plain = OmegaConf.to_container(merged)
    return {f.name: getattr(typed, f.name) for f in fields(schema)}, dict(plain)  # type: ignore[arg-type]


def run_sweep(name: str, options: Sequence[str]) -> None:
    """Run a sweep: write its result and its figure, and print its table and its sentence.

    Raises:
        BstuneError: one of its kinds; nothing is written then.
    """
    sweep = check_sweep(name, compose_sweep(name, options))
    if sweep.config:
        quieten(training=not is_replayed(sweep.config))
    from rich.console import Console

    console = Console()
    console.print(f"{name}: {sweep.source}", soft_wrap=True, markup=False)
    try:
        finding = sweep.experiment.func(sweep.config, console, **sweep.parameters)
    except (KeyboardInterrupt, SystemExit) as error:  # Lightning turns the first into the second
        raise Interrupted("interrupted: the sweep has written nothing") from error
    write(sweep, finding, options)
    show(sweep, finding, console)


def write(sweep: Sweep, finding: Finding, options: Sequence[str]) -> None:
    """Write ``result.json`` and ``figure.png``: both are whole, or as they were.

    Raises:
        StudyError: if they cannot be written.
    """
    from bstune.trial.device import versions

    output = sweep.output
    values = {
        "sweep": sweep.name,
        "source": sweep.source,
        "sentence": finding.sentence,
        "n": finding.n,
        "device": finding.device,
        "versions": versions(),
        "command": shlex.join([*COMMAND.split(), sweep.name, *(redact(option) for option in options)]),
        "parameters": sweep.plain_parameters,
        "rows": finding.rows,
    }
    made = [path for path in (output.root, *output.root.parents) if not path.exists()]
    partial = {path: path.with_name(f".{path.name}.{os.getpid()}") for path in (output.figure, output.result)}
    try:
        output.root.mkdir(parents=True, exist_ok=True)
        finding.draw(partial[output.figure])
        partial[output.result].write_text(dump_json(values, indent=2) + "\n", encoding="utf-8")
        for path, temporary in partial.items():
            temporary.replace(path)
    except OSError as error:
        raise StudyError(
            f"sweep.output={output.root} cannot be written: {error.strerror}; choose another with sweep.output=DIR"
        ) from error
    finally:
        for temporary in partial.values():
            temporary.unlink(missing_ok=True)
        with suppress(OSError):  # not empty: the outputs are there
            for path in made:
                path.rmdir()


def show(sweep: Sweep, finding: Finding, console: "Console") -> None:
    """Print the rows as a table, the sentence, and where the files are."""
    from rich import box
    from rich.markup import escape
    from rich.table import Table

    columns: dict[str, list[Any]] = {}
    for key in dict.fromkeys(key for row in finding.rows for key in row):
        values = [row.get(key) for row in finding.rows]
        if not any(isinstance(value, list | tuple | Mapping) for value in values):
            columns[key] = values
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1), pad_edge=False)
    for key, values in columns.items():
        text = any(isinstance(value, str) for value in values)
        table.add_column(key.replace("_", " "), justify="left" if text else "right", overflow="fold")
    for cells in zip(*columns.values(), strict=True):
        table.add_row(*(escape(_cell(value)) for value in cells))
    console.print(table)
    console.print(finding.sentence, soft_wrap=True, markup=False)
    for what, path in (("result", sweep.output.result), ("figure", sweep.output.figure)):
        console.print(f"{what} {path}", soft_wrap=True, markup=False)


def _cell(value: object) -> str:
    if isinstance(value, int | float) and not isinstance(value, bool):
        return format_number(value, 4)
    return "-" if value is None else str(value)

