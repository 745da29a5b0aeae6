"""A workload that is answered from a table of recorded runs: what a job needs of it. Nothing here trains."""

import hashlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import yaml
from omegaconf import DictConfig, OmegaConf

import bstune
from bstune.core.errors import ConfigError, TableError
from bstune.core.files import Output
from bstune.core.records import Target, TrialProtocol, TrialResult, TrialSpec
from bstune.core.search_space import Space
from bstune.study.plan import SearchBudget, max_seconds
from bstune.study.runner import Runner, Settled
from bstune.trial.replay import DEVICE, Table, always_reached, never_reached, read_table, replay

SHIPPED = Path(__file__).parents[1] / "trial" / "tables"


@dataclass(frozen=True)
class Source:
    """A table's file, the target that it was recorded for, and the command that made it."""

    path: Path
    target: Target | None
    command: str | None


def shipped_tables() -> list[str]:
    """Return the names of the tables that come with bstune."""
    return sorted(path.stem for path in SHIPPED.glob("*.jsonl"))


def find_table(name: str) -> Path:
    """Return the path of a table: a file, relative to the working directory, or a shipped table's bare name.

    Raises:
        TableError: if there is neither.
    """
    try:
        path = Path(name).expanduser()
        if path.is_file():
            return path
        reason = "is a folder" if path.is_dir() else "is no file"
    except (OSError, ValueError, RuntimeError) as error:  # no permission; a null byte or too long; no such user
        raise TableError(f"workload.table={name!r} cannot be read: {error}") from error
    if name in shipped_tables():
        return SHIPPED / f"{name}.jsonl"
    others = f", or name a shipped one: {', '.join(shipped_tables())}" if shipped_tables() else ""
    raise TableError(f"workload.table={name} {reason}: give a file of recorded runs as JSON lines{others}")


def read_index(folder: Path) -> dict[str, Source]:
    """Return the tables that ``tables.yaml`` in a folder lists, by name.

    It maps the name of each file, without ``.jsonl``, to ``metric``, ``target`` (the value; the metric is an error) and
    ``command`` (that made it); further keys are not read. A folder without an index has no tables.

    Raises:
        TableError: for an index that is no such mapping, or lists a file that is missing.
    """
    path = folder / "tables.yaml"
    if not path.exists():
        return {}
    try:
        listed = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise TableError(f"{path} cannot be read ({error}): it lists the tables beside it") from error
    if not isinstance(listed, dict):
        raise TableError(f"{path} must map the name of each table to metric, target and command")
    found = {}
    for name, values in listed.items():
        missing = [key for key in ("metric", "target", "command") if not isinstance(values, dict) or key not in values]
        if missing:
            raise TableError(f"{path}: {name} lacks {', '.join(missing)}")
        if not isinstance(values["target"], int | float):
            raise TableError(f"{path}: {name} needs a number as target, but got {values['target']!r}")
        file = folder / f"{name}.jsonl"
        if not file.exists():
            raise TableError(f"{path} lists {name}, but {file} does not exist")
        found[str(name)] = Source(
            file, Target(str(values["metric"]), float(values["target"]), "min"), values["command"]
        )
    return found


def shipped_target(path: Path) -> Target | None:
    """Return the target that a table was recorded for, if it is one of those that ship.

    Raises:
        TableError: if their index cannot be read.
    """
    sources = read_index(SHIPPED).values()
    return next((source.target for source in sources if source.path.resolve() == path.resolve()), None)


def complete(config: DictConfig) -> DictConfig:
    """Return a replayed workload's config with what it leaves open (``???``) taken from its table.

    These are the range of batch sizes; the reference of the scaling rule, the geometric middle of the batch sizes and
    of the learning rates; a budget that no recorded run exceeds, so that it is the records that end trials; and, of a
    table that ships, the target that it was recorded for.

    Raises:
        TableError: if the table cannot be read.
        ConfigError: if no table is named, or one that does not ship without a target.
    """
    config = config.copy()
    if OmegaConf.is_missing(config.workload, "table"):
        raise ConfigError("workload.table is missing: name a file of recorded runs, workload.table=FILE")
    path = find_table(config.workload.table)
    table = read_table(path)
    low, high = table.batch_sizes[0], table.batch_sizes[-1]
    steps, examples = _recorded_budget(table)
    own: Mapping[str, Mapping[str, Any]] = {
        "batch_size": {"low": low, "high": high},
        "reference": {"batch_size": math.sqrt(low * high), "lr": math.sqrt(table.lrs[0] * table.lrs[-1])},
        "budget": {"steps": steps, "examples": examples},
    }
    for group, values in own.items():
        for name, value in values.items():
            if OmegaConf.is_missing(config.workload[group], name):
                config.workload[group][name] = value
    if OmegaConf.is_missing(config.workload.target, "value"):
        target = shipped_target(path)
        if target is not None:
            config.workload.target.value = target.value
            return config
        seen = [value for run in table.runs for value in run.metric]
        raise ConfigError(
            "workload.target.value is missing: give the value to reach, such as workload.target.value=0.1 "
            f"(this table's values lie between {min(seen):g} and {max(seen):g})"
        )
    return config


def _recorded_budget(table: Table) -> tuple[int, int]:
    """Return the least budget, in steps and in examples, that no recorded run exceeds: so many of the one or the other.

    Steps are those of the longest run at the largest batch size, examples the most in a run that took more steps.
    """
    steps = max(run.end for run in table.runs if run.batch_size == table.batch_sizes[-1])
    return steps, max((run.end * run.batch_size for run in table.runs if run.end > steps), default=1)


def settle(config: DictConfig) -> Settled:
    """Read the table and return the config, the range of learning rates, and how to go on.

    Raises:
        TableError: if the table cannot be read.
        ConfigError: if it is to be compiled.
    """
    if config.compile is not None:
        raise ConfigError(f"compile={config.compile} does not apply to recorded runs: leave it out")
    config = config.copy()
    config.device = DEVICE
    path = find_table(config.workload.table)
    table = read_table(path)
    return Settled(config, partial(open_runner, table, path), lr_range=(table.lrs[0], table.lrs[-1]))


def open_runner(
    table: Table,
    path: Path,
    config: DictConfig,
    plan: SearchBudget,
    space: Space,
    protocol: TrialProtocol,
    trial: TrialSpec | None,
    say: Callable[[str], None],
) -> Runner:
    """Check the target and the range against the table, and return how trials are answered from it.

    Raises:
        TableError: if no run reaches the target, or all do at once.
        ConfigError: for batch sizes or learning rates outside of the table.
    """
    check_goal(table, protocol.target)
    check_range(table, space, trial)
    step_time = _step_time(table)

    def run(spec: TrialSpec, output: Output | None = None, parent: TrialResult | None = None) -> TrialResult:
        last_step = protocol.budget.last_step(spec.batch_size) if spec.max_steps is None else spec.max_steps
        return replay(table, spec, protocol.target, last_step, parent)

    def longest(batch_size: int) -> int:
        nearest = min(table.batch_sizes, key=lambda size: abs(math.log(size / batch_size)))
        longest = max(run.end for run in table.runs if run.batch_size == nearest)
        return min(longest, protocol.budget.last_step(batch_size))

    return Runner(
        train=run,
        test=lambda spec, output: {},
        resumable=lambda number, output: True,
        step_time=step_time,
        max_seconds=max_seconds(plan, space, longest, step_time, 0.0),
        device=DEVICE,
        place=f"recorded runs ({path.stem})",
        versions={"bstune": bstune.__version__},
        identity={
            "workload.table": f"sha256 {hashlib.sha256(path.read_bytes()).hexdigest()[:16]}",  # wherever it lies
            "device": DEVICE,
        },
        notes=(
            f"answered from {len(table.runs)} recorded runs at {len(table.batch_sizes)} batch sizes and "
            f"{len(table.lrs)} learning rates: seconds are simulated, and a trial also ends where its record does",
        ),
    )


def check_goal(table: Table, target: Target) -> None:
    """Refuse a target that no recorded run reaches, or that every one meets at its first evaluation.

    Raises:
        TableError: for such a target.
    """
    reason = never_reached(table, target) or always_reached(table, target)
    if reason is not None:
        raise TableError(reason)


def check_range(table: Table, space: Space, trial: TrialSpec | None) -> None:
    """Refuse what lies outside of the recorded batch sizes and learning rates.

    Raises:
        ConfigError: with the option and the range.
    """
    sizes, lrs = (table.batch_sizes[0], table.batch_sizes[-1]), (table.lrs[0], table.lrs[-1])
    asked: list[tuple[str, float, str, tuple[float, float]]]
    if trial is None:
        asked = [
            ("search.batch_size.low", space.low, "batch sizes", sizes),
            ("search.batch_size.high", space.high, "batch sizes", sizes),
        ]
    else:
        asked = [
            ("trial.batch_size", trial.batch_size, "batch sizes", sizes),
            ("trial.lr", trial.lr, "learning rates", lrs),
        ]
    for option, value, what, (low, high) in asked:
        if not low <= value <= high:
            raise ConfigError(f"{option}={value:g} lies outside of the table's {what}, {low:g} to {high:g}")


def _step_time(table: Table) -> Callable[[float], float]:
    """Return the median seconds per step at each recorded batch size, linear in the logarithms between them."""
    taus = [median(run.seconds_per_step for run in table.runs if run.batch_size == size) for size in table.batch_sizes]
    sizes, seconds = np.log(np.array(table.batch_sizes, dtype=np.float64)), np.log(taus)
    return lambda batch_size: float(np.exp(np.interp(math.log(batch_size), sizes, seconds)))
