"""``bstune sweep NAME [options]`` runs a named experiment that reproduces a published result.

A sweep is one YAML file in ``sweeps/`` (installed as bstune.sweeps) on top of ``conf/``. Its keys
under ``sweep`` name the published result, the output folder, and the function to call with its
parameters. That function returns a :class:`Finding`. Its keyword-only parameters without a default
are the YAML's, and their annotations are the types: numbers, ``str``, ``bool``, lists and
dictionaries of them, dataclasses and lists of them. It gets ``composed``, a
:class:`bstune.config.Composed`, ``console``, and ``log``, the units of the sweep that have ended
(:class:`bstune.sweeps.unit_log.UnitLog`), where it has parameters of these names.

A sweep that trains takes ``config`` into its defaults, so that every option of bstune is one of its
own. Any other has only the options under ``sweep``, and nothing composed.
"""

import functools
import inspect
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, fields, make_dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from filelock import FileLock, Timeout
from omegaconf import DictConfig, ListConfig, OmegaConf, open_dict
from omegaconf.errors import ConfigKeyError, OmegaConfBaseException, ValidationError
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from bstune.config import Composed, compose_known, expand_shorthands, validate
from bstune.core.errors import ConfigError, InputError, Interrupted, StudyError
from bstune.core.records import dump_json
from bstune.hydra_recipe import instantiate
from bstune.options import ReplayedOptions, flat_settings, kind_of_options
from bstune.report.drawing import save_figure
from bstune.sweeps.unit_log import PARAMETER_PREFIX, UnfinishedError, UnitLog, read_units
from bstune.system.console import format_number, quieten
from bstune.system.files import check_writable, expand_home, write_text
from bstune.system.git import git_commit
from bstune.system.inputs import parse_json, read_text
from bstune.system.secrets import redact, redact_values
from bstune.system.terminal import ArgumentParser, safe_console, write_out

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SWEEP_MODULE = "bstune.sweeps"
COMMAND = "python -m bstune sweep"
# The packages whose versions a result depends on. One of Lightning's two may not be installed.
VERSIONED_PACKAGES = (
    "bstune",
    "lightning",
    "pytorch-lightning",
    "numpy",
    "optuna",
    "scipy",
    "torch",
)
# The least width, in columns, of a table that goes into a file.
FILE_WIDTH = 118
# Options of bstune that training depends on, besides those that a study may not change.
TRAINING_OPTIONS = ("precision", "compile", "devices")
# The file in a sweep's folder that one command locks at a time.
LOCK_NAME = ".running"


@dataclass(frozen=True)
class Finding:
    """What a sweep found: a sentence, the numbers behind it, and one figure."""

    # Computed from the rows.
    sentence: str
    # Plain values, one per cell of the table; nested ones go to result.json alone.
    rows: Sequence[Mapping[str, object]]
    # The number of measurements behind each row: repeats, or seeds.
    n: int
    device: str
    # Draws on an empty figure.
    paint: Callable[["Figure"], None]
    inches: tuple[float, float]
    # Lines below the table.
    notes: Sequence[str] = ()
    # Further keys of result.json.
    details: Mapping[str, object] = field(default_factory=dict)


@dataclass
class SweepKeys:
    """The keys under ``sweep`` in a sweep's YAML, which has all of them."""

    source: str
    output: str
    experiment: Any


@dataclass(frozen=True)
class Sweep:
    """A checked sweep."""

    name: str
    source: str
    # The folder of its files.
    output: Path
    # The options of bstune, checked, and the recipe; None for a sweep without a workload.
    composed: Composed | None
    # The function that runs the sweep, and its parameters: each of its annotated type, and as the
    # YAML has them.
    experiment: functools.partial[Finding]
    parameters: Mapping[str, Any]
    plain_parameters: Mapping[str, Any]

    @property
    def result(self) -> Path:
        """The file of the finding: the sentence, the rows and all else but the figure."""
        return self.output / "result.json"

    @property
    def figure(self) -> Path:
        """The file of the figure."""
        return self.output / "figure.png"

    @property
    def runs(self) -> Path:
        """The file of the units that have ended, if the sweep keeps them."""
        return self.output / "runs.jsonl"

    def settings(self) -> dict[str, object]:
        """Collect the settings that measurements may depend on, by dotted key, without secrets."""
        settings = _flat(self.plain_parameters, PARAMETER_PREFIX)
        if self.composed is not None:
            options = self.composed.options
            settings |= flat_settings(options)
            # A study may go on with others, a sweep's measurements may not.
            settings |= {name: getattr(options, name) for name in TRAINING_OPTIONS}
        without_secrets: dict[str, object] = redact_values(settings)
        return without_secrets

    def open_log(self, console: Console) -> UnitLog:
        """Make the log of the sweep's units; its file is read when the experiment begins."""
        return UnitLog(
            path=self.runs,
            sweep=self.name,
            settings=self.settings(),
            versions=_versions(),
            commit=git_commit(),
            console=console,
        )

    def find(self, console: Console, **replaced: Any) -> Finding:
        """Run the experiment, and give its finding.

        Tests replace parameters that the YAML does not have, such as a clock.
        """
        function = self.experiment.func
        # An experiment gets those of these arguments that it has a parameter for.
        at_hand: dict[str, Callable[[], object]] = {
            "composed": lambda: self.composed,
            "console": lambda: console,
            "log": lambda: self.open_log(console),
        }
        parameters = inspect.signature(function).parameters
        given_arguments = dict[str, object]()
        for name, make in at_hand.items():
            if name in parameters and name not in replaced:
                given_arguments[name] = make()
        return function(**given_arguments, **self.parameters, **replaced)


def main(arguments: list[str]) -> None:
    """Run the sweep that is named, or list the sweeps."""
    parser = ArgumentParser(prog=COMMAND, description=str(__doc__).splitlines()[0], add_help=False)
    parser.add_argument("name", nargs="?", help="the sweep; without one, the sweeps are listed")
    parser.add_argument(
        "options", nargs="*", help="options of the sweep's file, as sweep.output=DIR"
    )
    parser.add_argument(
        "-h", "--help", action="store_true", help="after a name: list the options, as they are set"
    )
    parsed = parser.parse_args(arguments)
    if parsed.name is None:
        text = listing()
        if parsed.help:
            text = f"{parser.format_help()}\n{text}"
        sys.stdout.write(text)
    elif parsed.help:
        write_out(OmegaConf.to_yaml(compose_sweep(parsed.name, parsed.options)))
    else:
        run_sweep(parsed.name, parsed.options)


def sweep_names() -> list[str]:
    """Give the names of all sweeps, sorted."""
    names = list[str]()
    for file in files(SWEEP_MODULE).iterdir():
        if file.name.endswith(".yaml"):
            names.append(Path(file.name).stem)
    return sorted(names)


def listing() -> str:
    """List the sweeps, each with its source, and how one is run."""
    lines = list[str]()
    for name in sweep_names():
        lines.append(f"{name}\n    {compose_sweep(name, ()).sweep.source}")
    lines.append(f"run one with: {COMMAND} NAME [options]; its options: {COMMAND} NAME --help")
    return "\n".join(lines) + "\n"


def compose_sweep(name: str, options: Sequence[str]) -> DictConfig:
    """Compose the config of a sweep; only its name and the names of the options are checked."""
    if name not in sweep_names():
        raise ConfigError(f"there is no sweep {name!r}; sweeps: {', '.join(sweep_names())}")
    # Hydra itself does not know bstune's short forms, such as target=VALUE.
    config, unknown = compose_known(SWEEP_MODULE, name, expand_shorthands(options))
    if unknown:
        lines = [f"unknown option {option}; --help lists the options" for option in unknown]
        raise ConfigError("\n".join(lines))
    return config


def check_sweep(name: str, config: DictConfig) -> Sweep:
    """Check a composed sweep and its output folder, and give the sweep; nothing is written."""
    keys, experiment, stated_output = _keys_of_sweep(config)
    typed_parameters, plain_parameters = _typed_and_plain_parameters(experiment)
    # What remains is bstune's own, which knows no key named sweep.
    rest = config.copy()
    with open_dict(rest):
        del rest["sweep"]
    composed = _checked(name, rest)
    experiment_trains = "composed" in inspect.signature(experiment.func).parameters
    if experiment_trains and composed is None:
        raise ConfigError(f"the sweep {name} trains: its file needs config among its defaults")
    sweep = Sweep(
        name=name,
        source=keys.source,
        output=Path(keys.output),
        composed=composed,
        experiment=experiment,
        parameters=typed_parameters,
        plain_parameters=plain_parameters,
    )
    # An error names the option as it was stated, before ~ was replaced.
    check_writable(sweep.result, f"sweep.output={stated_output}")
    _check_own_files(sweep)
    return sweep


def _keys_of_sweep(
    config: DictConfig,
) -> tuple[DictConfig | ListConfig, functools.partial[Finding], str | None]:
    """Check the key ``sweep``: give the keys below it, the experiment, and the output as stated."""
    if not isinstance(config.get("sweep"), DictConfig):
        raise ConfigError(
            "sweep must have the keys source, output and experiment, but got "
            f"{config.get('sweep')!r}"
        )
    try:
        root = config.sweep.get("output")
        # The home directory is filled in before other keys refer to the folder.
        if isinstance(root, str):
            config.sweep.output = _expanded(root)
        # The experiment may refer to keys beside it.
        values = OmegaConf.to_container(config.sweep, resolve=True)
        keys = OmegaConf.merge(OmegaConf.structured(SweepKeys), values)
        experiment = instantiate(keys.experiment, "sweep.experiment")
    except ConfigKeyError as error:
        raise ConfigError(
            f"unknown option sweep.{error.full_key}; --help lists the options"
        ) from error
    except OmegaConfBaseException as error:
        raise ConfigError(f"sweep: {str(error).splitlines()[0]}") from error
    if not isinstance(experiment, functools.partial):
        raise ConfigError(
            "sweep.experiment must have _partial_: true: it is called once everything is checked"
        )
    return keys, experiment, root


def _expanded(root: str) -> str:
    """Replace ~ by the home directory; ConfigError if there is none."""
    try:
        return expand_home(root)
    except ValueError as error:
        raise ConfigError(f"sweep.output: {error}") from error


def _check_own_files(sweep: Sweep) -> None:
    """Refuse a folder with a result or a figure that is not an earlier one of this sweep."""
    if not sweep.result.exists() and not sweep.figure.exists():
        return
    try:
        result = parse_json(read_text(sweep.result, "the result"), sweep.result.name)
    except InputError:
        result = None
    is_own = isinstance(result, dict) and result.get("sweep") == sweep.name
    if not is_own:
        raise StudyError(
            f"sweep.output={sweep.output} has a {sweep.result.name} or a {sweep.figure.name} that "
            f"is not of the sweep {sweep.name}: choose another with sweep.output=DIR"
        )


def _checked(name: str, rest: DictConfig) -> Composed | None:
    """Check the options of bstune in a sweep's config; None if it has none.

    ``rest`` is the config without the key ``sweep``.
    """
    # A sweep that trains has conf/config.yaml among its defaults, and with it a protocol. Any other
    # sweep has no options of bstune's.
    if "protocol" not in rest:
        if rest:
            raise ConfigError(f"unknown option {next(iter(rest))!s}; --help lists the options")
        return None
    if "workload" not in rest:
        raise ConfigError(f"the sweep {name} needs a workload: add +workload=NAME")
    if kind_of_options(rest.workload) is ReplayedOptions:
        raise ConfigError(
            f"the sweep {name} trains, and recorded runs have no data: choose another workload"
        )
    return validate(rest)


def _flat(value: object, prefix: str) -> dict[str, object]:
    """Give nested parameters in one mapping, by dotted keys that begin with ``prefix``.

    Mappings in a list have their places in it as keys.
    """
    if isinstance(value, Mapping):
        by_key = value
    elif isinstance(value, list) and any(isinstance(element, Mapping) for element in value):
        by_key = dict(enumerate(value))
    else:
        return {prefix.removesuffix("."): value}
    flat = dict[str, object]()
    for key, inner in by_key.items():
        flat |= _flat(inner, f"{prefix}{key}.")
    return flat


def _refuse_nested_lists(parameters: object) -> None:
    """Refuse lists and mappings within lists of texts or numbers, which OmegaConf lets through."""
    for name, value in vars(parameters).items():
        if not isinstance(value, list):
            continue
        if any(isinstance(element, list | dict) for element in value):
            raise ConfigError(f"sweep.experiment.{name} must be a flat list, but got {value!r:.80}")


def _typed_and_plain_parameters(
    experiment: functools.partial[Finding],
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Give an experiment's parameters, in the types of its annotations, and as plain values."""
    yaml_parameters = list[tuple[str, type]]()
    for parameter in inspect.signature(experiment.func).parameters.values():
        # The YAML has all keyword arguments without a default. Those with one, such as a clock, are
        # for tests, and the harness gives the positional ones, such as the log.
        required = parameter.default is parameter.empty
        if required and parameter.kind is parameter.KEYWORD_ONLY:
            yaml_parameters.append((parameter.name, parameter.annotation))
    # A structured config is how OmegaConf checks and converts types, nested ones too.
    schema = make_dataclass("Parameters", yaml_parameters)
    try:
        merged = OmegaConf.merge(OmegaConf.structured(schema), experiment.keywords)
        missing = sorted(OmegaConf.missing_keys(merged))
        if missing:
            named = ", ".join(f"{PARAMETER_PREFIX}{name}" for name in missing)
            raise ConfigError(f"no value is given for {named}")
        typed = OmegaConf.to_object(merged)
        _refuse_nested_lists(typed)
    except ConfigKeyError as error:
        raise ConfigError(
            f"unknown option sweep.experiment.{error.full_key}; --help lists the options"
        ) from error
    except ValidationError as error:
        raise ConfigError(
            f"sweep.experiment.{error.full_key}: {str(error).splitlines()[0]}"
        ) from error
    plain = OmegaConf.to_container(merged)
    by_name = {parameter.name: getattr(typed, parameter.name) for parameter in fields(schema)}
    return by_name, dict(plain)  # type: ignore[arg-type]


@contextmanager
def _held_alone(folder: Path) -> Iterator[None]:
    """Hold a sweep's folder, which is made, while the body runs; StudyError if another does.

    A folder that was made for it and is empty afterwards goes.
    """
    choose = "choose another with sweep.output=DIR"
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = FileLock(folder / LOCK_NAME)
        lock.acquire(timeout=0)
    except Timeout as error:
        raise StudyError(
            f"sweep.output={folder} is in use by another process: wait for it, or {choose}"
        ) from error
    except OSError as error:
        raise StudyError(
            f"sweep.output={folder} cannot be written: {error.strerror}; {choose}"
        ) from error
    try:
        yield
    finally:
        # It goes while it is held: afterwards it may be another process's.
        (folder / LOCK_NAME).unlink(missing_ok=True)
        lock.release()
        # The deepest one comes first. From one that holds something on, all hold something.
        with suppress(OSError):
            for path in made:
                path.rmdir()


def run_sweep(name: str, options: Sequence[str]) -> None:
    """Run a sweep, write its result and its figure, and print its table and its sentence.

    Nothing is written where units were chosen and others are still to be measured.
    """
    sweep = check_sweep(name, compose_sweep(name, options))
    quieten(training=sweep.composed is not None)
    console = safe_console()
    # A file has no width of its own, and rich takes 80 columns for it.
    if not console.is_terminal:
        console = safe_console(width=max(FILE_WIDTH, console.width))
    # Two commands at once would write their units into the same file.
    with _held_alone(sweep.output):
        console.print(f"{name}: {sweep.source}", soft_wrap=True, markup=False)
        try:
            finding = sweep.find(console)
            write(sweep, finding, options)
        # Lightning turns a KeyboardInterrupt into a SystemExit.
        except (KeyboardInterrupt, SystemExit) as error:
            kept_text = "the sweep has written nothing"
            if sweep.runs.exists():
                kept_text = f"{sweep.runs} keeps what has ended; the same command goes on"
            raise Interrupted(f"interrupted: {kept_text}") from error
        except UnfinishedError as unfinished:
            console.print(str(unfinished), soft_wrap=True, markup=False)
            return
        show(sweep, finding, console)


def write(sweep: Sweep, finding: Finding, options: Sequence[str]) -> None:
    """Write ``result.json`` and ``figure.png`` into the sweep's folder, which is there.

    Both are written whole, or stay as they were.
    """
    values = {
        "sweep": sweep.name,
        "source": sweep.source,
        "sentence": finding.sentence,
        "n": finding.n,
        "device": finding.device,
        "versions": _versions(),
        **_measured_with(sweep),
        "command": redact(shlex.join([*COMMAND.split(), sweep.name, *options])),
        "parameters": sweep.plain_parameters,
        "rows": finding.rows,
        "notes": finding.notes,
        **finding.details,
    }
    # The figure gets its own name once the result is written, too.
    figure = sweep.output / ".figure.png"
    try:
        save_figure(finding.paint, finding.inches, figure)
        write_text(sweep.result, dump_json(values, indent=2) + "\n")
        figure.replace(sweep.figure)
    except OSError as error:
        raise StudyError(
            f"sweep.output={sweep.output} cannot be written: {error.strerror}; choose another with "
            "sweep.output=DIR"
        ) from error
    finally:
        figure.unlink(missing_ok=True)


def _measured_with(sweep: Sweep) -> dict[str, object]:
    """Give the devices, versions and commits that units were measured with, by any command.

    It is empty for a sweep without a log of units.
    """
    if "log" not in inspect.signature(sweep.experiment.func).parameters:
        return {}
    circumstances = list[dict[str, object]]()
    for header in read_units(sweep.runs).headers:
        circumstances.append(
            {"device": header.device, "versions": header.versions, "commit": header.commit}
        )
    return {"measured_with": circumstances}


def _versions() -> dict[str, str]:
    """Give the installed versions of the packages that a result depends on."""
    versions = dict[str, str]()
    for name in VERSIONED_PACKAGES:
        with suppress(PackageNotFoundError):
            versions[name] = version(name)
    return versions


def show(sweep: Sweep, finding: Finding, console: Console) -> None:
    """Print the rows as a table, the notes, the sentence, and where the files are."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1), pad_edge=False)
    columns = _plain_columns(finding.rows)
    for key, values in columns.items():
        # Numbers are aligned by their last digits.
        justify: Literal["left", "right"] = "right"
        if any(isinstance(value, str) for value in values):
            justify = "left"
        table.add_column(key.replace("_", " "), justify=justify, overflow="fold")
    for cells in zip(*columns.values(), strict=True):
        # Brackets of a text would be markup to rich.
        table.add_row(*map(escape, map(_text_of_cell, cells)))
    console.print(table)
    lines = [f"- {note}" for note in finding.notes]
    lines += [finding.sentence, f"result {sweep.result}", f"figure {sweep.figure}"]
    for line in lines:
        console.print(line, soft_wrap=True, markup=False)


def _plain_columns(rows: Sequence[Mapping[str, object]]) -> dict[str, list[object]]:
    """Give the columns of rows by key, without those that have a nested value in any row."""
    keys = dict[str, None]()
    for row in rows:
        keys |= dict.fromkeys(row)
    columns = dict[str, list[object]]()
    for key in keys:
        values = [row.get(key) for row in rows]
        if not any(isinstance(value, list | tuple | Mapping) for value in values):
            columns[key] = values
    return columns


def _text_of_cell(value: object) -> str:
    """Write a value for a cell of a table."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return format_number(value, 4)
    if value is None:
        return "-"
    return str(value)
