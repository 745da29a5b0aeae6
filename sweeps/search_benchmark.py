"""Searches compared on replay tables: ``python -m bstune.sweeps.search_benchmark`` (``--help`` lists the options).

Every (search, table, seed) is played once by :mod:`bstune.sweeps.contest` and appended to ``runs.jsonl`` in the output folder,
so that the same command goes on where an earlier one stopped. What they came to is printed, and written as
``bench.json`` and ``bench.png``.
"""

import argparse
import importlib
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from hashlib import sha256
from json import loads
from pathlib import Path
from typing import Any

import optuna

from bstune.core.errors import BstuneError, ConfigError, Interrupted, TableError
from bstune.core.files import check_writable, write_text
from bstune.core.records import Target, dump_json
from bstune.sweeps.baselines import OWN, Entry, baselines, own_searches
from bstune.sweeps.contest import MULTIPLES, Objective, Played, Task, make_task, play
from bstune.sweeps.search_benchmark_report import (
    GP_RULE,
    OWN_RULE,
    RULES,
    Standing,
    draw,
    print_tables,
    standing,
    summary,
)
from bstune.trial.replay import SHIPPED, Source, read_index, read_table

SEEDS, QUICK_SEEDS = 20, 3
QUICK = (OWN, "random/lr", "tpe/lr", "tpe/sqrt", "shallue", "zeus")


@dataclass(frozen=True)
class Loaded:
    """A task and a digest of the file that its table was read from."""

    task: Task
    digest: str


@dataclass(frozen=True)
class Settings:
    """What a result depends on besides search, table and seed."""

    objective: Objective
    lr_factor: float
    budget_factor: float


def searches() -> tuple[Entry, ...]:
    """Return all searches that are known by name."""
    return (*own_searches(), *baselines())


def chosen(names: Sequence[str], quick: bool) -> list[Entry]:
    """Return the searches that are named; of none, all, or the few of ``--quick``.

    A name is ``NAME``, ``NAME/AXIS`` or ``NAME/AXIS/FORM``, or ``MODULE:FUNCTION`` for a function of
    (:class:`bstune.sweeps.contest.Problem`, seed) that returns a :class:`bstune.sweeps.contest.Search`. ``bstune`` alone is the one
    with its usual rule.

    Raises:
        ConfigError: for a name that is not known.
    """
    known = searches()
    if not names:
        return [entry for entry in known if not quick or entry.group in QUICK]
    found: dict[str, Entry] = {}
    for name in names:
        matching = [entry for entry in known if name in (entry.group, entry.key)]
        matching = matching or [entry for entry in known if name == entry.name]
        if not matching and ":" in name:
            matching = [_imported(name)]
        if not matching:
            raise ConfigError(
                f"no search is named {name!r}: choose from {', '.join(dict.fromkeys(e.group for e in known))}, "
                "or give MODULE:FUNCTION"
            )
        found |= {entry.key: entry for entry in matching}
    return list(found.values())


def _imported(name: str) -> Entry:
    module, _, function = name.partition(":")
    try:
        make = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"the search {name!r} cannot be imported ({error}): give MODULE:FUNCTION") from error
    return Entry(name, None, None, make)


def load(names: Sequence[str], index: dict[str, Source], target: float | None, settings: Settings) -> list[Loaded]:
    """Return the tasks of the tables that are named, by their name in the index or the path of a file; of none, all.

    Raises:
        TableError: if there is no table, or one cannot be read or used.
        ConfigError: for a file without a target.
    """
    sources = dict(index)
    if names:
        sources = {}
        for name in names:
            source = index.get(name) or _file(name, index)
            stem = source.path.stem
            sources[str(source.path) if stem in sources else stem] = source
    if not sources:
        raise TableError(
            "no tables are installed in bstune.trial.tables: name a file with --tables FILE --target VALUE"
        )
    return [_load(name, source, target, settings) for name, source in sources.items()]


def _file(name: str, index: dict[str, Source]) -> Source:
    path = Path(name)
    if not path.exists():
        known = f", or one of {', '.join(index)}" if index else ""
        raise TableError(f"there is no table {name}: give the path of a file of JSON lines{known}")
    same = [source for source in index.values() if source.path.resolve() == path.resolve()]
    return same[0] if same else Source(path, None, None)


def _load(name: str, source: Source, value: float | None, settings: Settings) -> Loaded:
    target = source.target
    if value is not None:
        target = Target(target.metric if target is not None else "error", value, "min")
    if target is None:
        raise ConfigError(f"{source.path} is not one of bstune's own tables: say what to reach with --target VALUE")
    table = read_table(source.path)
    task = make_task(name, table, target, settings.objective, settings.lr_factor, settings.budget_factor)
    return Loaded(task, sha256(source.path.read_bytes()).hexdigest()[:16])


@dataclass(frozen=True)
class Options:
    """How to run: searches whose recorded results are dropped, and the number of processes."""

    again: tuple[str, ...] = ()
    workers: int = 1


def key_of(job: "Job", settings: Settings) -> dict[str, Any]:
    """Return what a line of ``runs.jsonl`` is known by: same key, same result, while a search stays the same."""
    task = job.loaded.task
    return {
        "search": job.entry.key,
        "table": task.name,
        "digest": job.loaded.digest,
        "target": [task.problem.target.metric, task.problem.target.value],
        "seed": job.seed,
        **asdict(settings),
    }


def read_results(path: Path, again: Iterable[str] = ()) -> dict[str, Played]:
    """Return the results in ``runs.jsonl`` by their keys; those of the searches ``again`` are dropped from the file.

    So is a last line that a killed process left half written. No file, no results.

    Raises:
        TableError: for another line that is no result.
    """
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    known, kept = {}, ""
    for number, line in enumerate(text[: text.rfind("\n") + 1].splitlines(), start=1):
        try:
            values = loads(line)
            played = values["played"]
            played["path"] = tuple((spent, ratio) for spent, ratio in played["path"])
            played["b_crit"] = tuple(played["b_crit"])
            result, search = Played(**played), values["key"]["search"]
        except (ValueError, KeyError, TypeError) as error:
            raise TableError(
                f"{path}, line {number} is no result of the bench ({error!r}): drop the line, or choose another --out"
            ) from error
        if not set(again) & _names(search):
            known[dump_json(values["key"])] = result
            kept += line + "\n"
    if kept != text:
        write_text(path, kept)
    return known


def append_result(path: Path, key: dict[str, Any], played: Played) -> None:
    """Append a result as one line."""
    with path.open("a", encoding="utf-8") as file:
        file.write(dump_json({"key": key, "played": asdict(played)}) + "\n")


def _names(key: str) -> set[str]:
    parts = key.split("/")
    return {"/".join(parts[:count]) for count in range(1, len(parts) + 1)}


@dataclass(frozen=True)
class Job:
    """One search on one task with one seed."""

    loaded: Loaded
    entry: Entry
    seed: int

    def run(self) -> Played:
        """Play it."""
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        task = self.loaded.task
        search = self.entry.make(task.problem, self.seed)
        return play(search, task, MULTIPLES[task.problem.objective], self.entry.most_trials)


def run_jobs(jobs: Sequence[Job], workers: int) -> Iterator[tuple[Job, Played]]:
    """Yield the jobs and their results as they come, from this process or from ``workers`` of its own."""
    if workers == 1:
        for job in jobs:
            yield job, job.run()
        return
    with ProcessPoolExecutor(workers) as pool:
        pending = {pool.submit(job.run): job for job in jobs}
        try:
            for future in as_completed(pending):
                yield pending[future], future.result()
        finally:
            pool.shutdown(cancel_futures=True)


def run(
    tasks: Sequence[Loaded], entries: Sequence[Entry], seeds: int, settings: Settings, path: Path, options: Options
) -> tuple[list[Standing], list[str]]:
    """Play what ``path`` lacks; return how every search did on every table, and a note for each that was left out."""
    known = read_results(path, options.again)
    usable = [(loaded, entry) for loaded in tasks for entry in entries if _usable(loaded.task, entry)]
    jobs = [Job(loaded, entry, seed) for loaded, entry in usable for seed in range(seeds)]
    missing = [job for job in jobs if dump_json(key_of(job, settings)) not in known]
    began = time.perf_counter()
    for done, (job, played) in enumerate(run_jobs(missing, options.workers), start=1):
        key = key_of(job, settings)
        append_result(path, key, played)
        known[dump_json(key)] = played
        if sys.stderr.isatty():
            text = (
                f"{done}/{len(missing)}  {time.perf_counter() - began:.0f} s  {job.loaded.task.name}  {job.entry.key}"
            )
            print(f"\r\x1b[K{text}", end="" if done < len(missing) else "\n", file=sys.stderr, flush=True)
    played_by: dict[tuple[str, str], list[Played]] = {}
    for job in jobs:
        found = known[dump_json(key_of(job, settings))]
        played_by.setdefault((job.loaded.task.name, job.entry.key), []).append(found)
    return (
        [standing(loaded.task, entry, played_by[loaded.task.name, entry.key]) for loaded, entry in usable],
        [
            f"{loaded.task.name}: {entry.key} is left out: its rule takes a noise scale, and this table determines no "
            "B_crit that could be given for one"
            for loaded in tasks
            for entry in entries
            if not _usable(loaded.task, entry)
        ],
    )


def _usable(task: Task, entry: Entry) -> bool:
    return task.problem.noise_scale is not None or not entry.needs_noise_scale


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    made = argparse.ArgumentParser(
        prog="python -m bstune.sweeps.search_benchmark",
        description="Compare searches on replay tables: what each has found after spending as much as the others.",
    )
    add = made.add_argument
    add("--tables", nargs="+", default=[], metavar="FILE", help="tables; default: all that bstune ships, by name")
    add("--target", type=float, help="value to reach; default: what the shipped table was recorded for")
    add("--searches", default="", metavar="NAME,...", help="NAME, NAME/AXIS, NAME/AXIS/FORM or MODULE:FUNCTION")
    add("--seeds", type=int, help=f"default {SEEDS}, with --quick {QUICK_SEEDS}")
    add("--objective", choices=list(MULTIPLES), default="time", help="least time to target, or B_crit")
    add("--quick", action="store_true", help="few seeds, few searches: under a minute")
    add("--out", type=Path, default=Path("bench"), metavar="DIR", help="folder of the results; default: bench")
    add("--lr-factor", type=float, default=1.0, help="the rules' reference learning rate is off by this factor")
    add("--budget-factor", type=float, default=1.0, help="so is the settings' first budget")
    add(
        "--again", default="", metavar="NAME,...", help="searches that have changed: their recorded results are dropped"
    )
    add("--workers", type=int, default=1, help="processes; default 1")
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Run the bench; return the exit status: 2 for input that cannot be used, 130 if it was interrupted."""
    arguments = parser().parse_args(argv)
    try:
        compare(arguments, read_index(SHIPPED))
    except BstuneError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_status
    except KeyboardInterrupt:
        print(f"interrupted; finished results are in {arguments.out}: the same command goes on", file=sys.stderr)
        return Interrupted.exit_status
    return 0


def compare(arguments: argparse.Namespace, index: dict[str, Source]) -> None:
    """Do what the command line asks for, with the shipped tables in ``index``.

    Raises:
        BstuneError: for input that cannot be used, before anything is run.
    """
    settings = Settings(arguments.objective, arguments.lr_factor, arguments.budget_factor)
    seeds = arguments.seeds if arguments.seeds is not None else QUICK_SEEDS if arguments.quick else SEEDS
    if seeds < 1 or arguments.workers < 1:
        raise ConfigError(f"--seeds and --workers must be at least 1, but got {seeds} and {arguments.workers}")
    entries = chosen(_listed(arguments.searches), arguments.quick)
    tasks = load(arguments.tables, index, arguments.target, settings)
    out: Path = arguments.out
    check_writable(out / "runs.jsonl", f"--out {out}")
    out.mkdir(parents=True, exist_ok=True)
    options = Options(tuple(_listed(arguments.again)), arguments.workers)
    found, notes = run(tasks, entries, seeds, settings, out / "runs.jsonl", options)
    report(tasks, found, notes, settings, out, index)


def report(
    tasks: Sequence[Loaded],
    found: Sequence[Standing],
    notes: Sequence[str],
    settings: Settings,
    out: Path,
    index: dict[str, Source],
) -> None:
    """Print the tables; write ``bench.json`` and ``bench.png``."""
    capped = [GP_RULE] if any(one.entry.name == "gp" for one in found) else []
    own = [OWN_RULE] if any(one.entry.name == OWN for one in found) else []
    notes = [*RULES[settings.objective], *own, *capped, *notes]
    plain = [loaded.task for loaded in tasks]
    print_tables(plain, found, notes)
    shown = summary(plain, found, notes) | asdict(settings)
    for row, loaded in zip(shown["tables"], tasks, strict=True):
        source = index.get(loaded.task.name)
        row |= {"digest": loaded.digest, "command": None if source is None else source.command}
    write_text(out / "bench.json", dump_json(shown, indent=2) + "\n")
    draw(plain, found, out / "bench.png")
    print(f"written: {out / 'bench.json'}, {out / 'bench.png'}")


def _listed(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


if __name__ == "__main__":
    sys.exit(main())
