"""Searches compared on replay tables, at equal spending.

Every (search, table, seed) runs once (:mod:`bstune.sweeps.search_problem`) and is appended to ``runs.jsonl``, so the
same command goes on where an earlier one stopped.
"""

import importlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from hashlib import sha256
from json import loads
from pathlib import Path
from typing import Any

import optuna
from pydantic import TypeAdapter
from rich.console import Console
from rich.progress import track

from bstune.core.errors import ConfigError, InputError, Interrupted, TableError
from bstune.core.records import Target, dump_json
from bstune.sweeps.baselines import FRONTIER, Entry, searches
from bstune.sweeps.harness import Finding
from bstune.sweeps.search_benchmark_report import Standing, make_finding, standing
from bstune.sweeps.search_problem import MULTIPLES, Benchmark, SearchRun, make_benchmark, run_search
from bstune.system.files import check_writable, write_text
from bstune.system.inputs import parse_json, read_text
from bstune.trial.replay import Table, TableSource, read_index, read_table

SEEDS = 20
QUICK_SEEDS = 3
QUICK_SEARCHES = (FRONTIER, "random/lr", "tpe/lr", "tpe/sqrt", "shallue", "zeus")
READ_RUN = TypeAdapter(SearchRun)


@dataclass(frozen=True)
class Case:
    """One search on one benchmark with one seed; ``key`` is the JSON that its line in ``runs.jsonl`` is known by."""

    benchmark: Benchmark
    entry: Entry
    seed: int
    key: str

    def run(self) -> SearchRun:
        """Run the search."""
        # Here too: it may be another process.
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        problem = self.benchmark.problem
        search = self.entry.make(problem, self.seed)
        return run_search(
            search, self.benchmark, MULTIPLES[problem.objective], self.entry.max_trials
        )


def run(
    console: Console,
    *,
    tables: list[str],
    target: float | None,
    searches: list[str],
    seeds: int | None,
    objective: str,
    quick: bool,
    lr_factor: float,
    budget_factor: float,
    again: list[str],
    workers: int,
    runs: str,
) -> Finding:
    """Run each search on each table and seed, without those that ``runs`` has, and compare what they found."""
    n = seeds
    if n is None:
        n = QUICK_SEEDS if quick else SEEDS
    if n < 1 or workers < 1:
        raise ConfigError(
            f"sweep.experiment.seeds and .workers must be at least 1, but got {n} and {workers}"
        )
    if objective not in MULTIPLES:
        raise ConfigError(
            f"sweep.experiment.objective must be one of {', '.join(MULTIPLES)}, but got "
            f"{objective!r}"
        )
    entries = choose(searches, quick)
    benchmarks = list[Benchmark]()
    origins = list[dict[str, str | None]]()
    for name, (file, shipped) in find_sources(tables, read_index()).items():
        goal = find_target(file, shipped, target)
        table = read_without_horizons(file)
        benchmarks.append(make_benchmark(name, table, goal, objective, lr_factor, budget_factor))
        digest = sha256(file.read_bytes()).hexdigest()[:16]
        command = None if shipped is None else shipped.command
        origins.append({"digest": digest, "command": command})
    path = Path(runs)
    check_writable(path, f"sweep.experiment.runs={runs}")
    cases = list[Case]()
    left_out = list[str]()
    # Standings are made of these: (benchmark, entry) in the order of the tables.
    compared = list[tuple[Benchmark, Entry]]()
    for benchmark, origin in zip(benchmarks, origins, strict=True):
        for entry in entries:
            if not _usable(benchmark, entry):
                left_out.append(
                    f"{benchmark.name}: {entry.key} is left out: its rule takes a noise scale, "
                    "and this table determines no B_crit"
                )
                continue
            compared.append((benchmark, entry))
            for seed in range(n):
                key = {
                    "search": entry.key,
                    "table": benchmark.name,
                    "digest": origin["digest"],
                    "target": [benchmark.problem.target.metric, benchmark.problem.target.value],
                    "seed": seed,
                    "objective": objective,
                    "lr_factor": lr_factor,
                    "budget_factor": budget_factor,
                }
                cases.append(Case(benchmark, entry, seed, dump_json(key)))
    kept = _run_missing(cases, path, again, workers, console)
    by_search = dict[tuple[str, str], list[SearchRun]]()
    for case in cases:
        by_search.setdefault((case.benchmark.name, case.entry.key), []).append(kept[case.key])
    standings = list[Standing]()
    for benchmark, entry in compared:
        standings.append(standing(benchmark, entry, by_search[benchmark.name, entry.key]))
    return make_finding(benchmarks, standings, left_out, origins, n)


def _run_missing(
    cases: Sequence[Case], path: Path, again: Sequence[str], workers: int, console: Console
) -> Mapping[str, SearchRun]:
    """Run the cases that the file at ``path`` lacks, and append them to it; give all of its runs by their keys."""
    path.parent.mkdir(parents=True, exist_ok=True)
    kept = read_runs(path, again)
    missing = [case for case in cases if case.key not in kept]
    progress = track(
        run_cases(missing, workers),
        "searching",
        total=len(missing),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )
    try:
        for case, result in progress:
            append_run(path, case.key, result)
            kept[case.key] = result
    except KeyboardInterrupt as error:
        raise Interrupted(
            f"interrupted: finished runs are kept in {path}; the same command goes on"
        ) from error
    return kept


def _usable(benchmark: Benchmark, entry: Entry) -> bool:
    return benchmark.problem.noise_scale is not None or not entry.needs_noise_scale


def choose(names: Sequence[str], quick: bool) -> list[Entry]:
    """Choose the searches that are named; of none, all, or those of ``quick``. ``bstune`` alone has its usual rule."""
    entries = searches()
    if not names:
        return [entry for entry in entries if not quick or entry.group in QUICK_SEARCHES]
    chosen: dict[str, Entry] = {}
    for name in names:
        matching = [entry for entry in entries if name in (entry.group, entry.key)]
        matching = matching or [entry for entry in entries if name == entry.name]
        if not matching and ":" in name:
            matching = [_imported(name)]
        if not matching:
            groups = dict.fromkeys(entry.group for entry in entries)
            raise ConfigError(
                f"no search is named {name!r}: choose from {', '.join(groups)}, or give "
                "MODULE:FUNCTION"
            )
        for entry in matching:
            chosen[entry.key] = entry
    return list(chosen.values())


def _imported(name: str) -> Entry:
    module, _, function = name.partition(":")
    try:
        make = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"the search {name!r} cannot be imported ({error}): give MODULE:FUNCTION"
        ) from error
    return Entry(name, None, None, make)


def find_sources(
    names: Sequence[str], index: Mapping[str, TableSource]
) -> dict[str, tuple[Path, TableSource | None]]:
    """Find file and, if it ships, source of the tables that are named or given by path; of none, all that ship."""
    sources: dict[str, tuple[Path, TableSource | None]] = {}
    if not names:
        sources = {name: (source.path, source) for name, source in index.items()}
    for name in names:
        path = Path(name)
        if name not in index and not path.exists():
            others = f", or one of {', '.join(index)}" if index else ""
            raise TableError(
                f"there is no table {name}: give the path of a file of JSON lines{others}"
            )
        shipped = index.get(name) or _shipped_at(path, index)
        if shipped is not None:
            path = shipped.path
        # Of two files of one name the later one goes by its path.
        known_as = str(path) if path.stem in sources else path.stem
        sources[known_as] = path, shipped
    if not sources:
        raise TableError(
            "bstune ships no tables here: name a file with sweep.experiment.tables=[FILE], and a "
            "target"
        )
    return sources


def _shipped_at(path: Path, index: Mapping[str, TableSource]) -> TableSource | None:
    """Give the source of the table that ships as this file."""
    for source in index.values():
        if source.path.resolve() == path.resolve():
            return source
    return None


def read_without_horizons(path: Path) -> Table:
    """Read a table whose trials may be stopped anywhere; TableError for one whose runs have horizons."""
    table = read_table(path)
    if table.has_horizons:
        raise TableError(
            f"the schedules of the runs in {path} end with them, and here trials are stopped on "
            "the way: name a table whose runs have no horizon"
        )
    return table


def find_target(path: Path, shipped: TableSource | None, value: float | None) -> Target:
    """Give a table's target: the value that is given, or what a table that ships was recorded for."""
    if value is not None:
        metric = "error" if shipped is None else shipped.target.metric
        return Target(metric, value, "min")
    if shipped is None:
        raise ConfigError(
            f"{path} is not one of bstune's own tables: give what to reach as "
            "sweep.experiment.target=VALUE"
        )
    return shipped.target


def read_runs(path: Path, again: Iterable[str] = ()) -> dict[str, SearchRun]:
    """Read the kept runs by their keys, and drop those of the searches ``again`` from the file.

    A last line that a killed process left half written is dropped too; any other that cannot be read is an error.
    """
    text = read_text(path, "the file of runs") if path.exists() else ""
    whole_lines = text[: text.rfind("\n") + 1].splitlines()
    dropped = set(again)
    runs = dict[str, SearchRun]()
    kept = ""
    for number, line in enumerate(whole_lines, start=1):
        try:
            values: Any = parse_json(line, "it")
            result = READ_RUN.validate_python(values["run"])
            names = _names_of(values["key"]["search"])
        except (InputError, ValueError, LookupError, TypeError, AttributeError) as error:
            reason = " ".join(str(error).split())
            raise TableError(
                f"{path}, line {number} is no run of a search ({reason}): drop the line, or choose "
                "another sweep.output"
            ) from error
        if dropped.isdisjoint(names):
            runs[dump_json(values["key"])] = result
            kept += line + "\n"
    if kept != text:
        write_text(path, kept)
    return runs


def _names_of(key: str) -> list[str]:
    """Give all names that a search goes by: of ``tpe/sqrt/bound`` also ``tpe`` and ``tpe/sqrt``."""
    parts = key.split("/")
    return ["/".join(parts[:count]) for count in range(1, len(parts) + 1)]


def append_run(path: Path, key: str, result: SearchRun) -> None:
    """Append a run as one line."""
    with path.open("a", encoding="utf-8") as file:
        file.write(dump_json({"key": loads(key), "run": asdict(result)}) + "\n")


def run_cases(cases: Sequence[Case], workers: int) -> Iterator[tuple[Case, SearchRun]]:
    """Yield the cases and their runs as they finish, from this process or from ``workers`` others."""
    if workers == 1:
        for case in cases:
            yield case, case.run()
        return
    with ProcessPoolExecutor(workers) as pool:
        pending = {pool.submit(case.run): case for case in cases}
        try:
            for future in as_completed(pending):
                yield pending[future], future.result()
        finally:
            pool.shutdown(cancel_futures=True)
