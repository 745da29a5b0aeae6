"""Searches compared on replay tables, at equal spending.

Every (search, table, seed) runs once (:mod:`bstune.sweeps.search_problem`) and is kept
(:mod:`bstune.sweeps.unit_log`), so that the same command goes on where an earlier one stopped.
"""

import functools
import importlib
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path

import optuna
from pydantic import TypeAdapter

from bstune.core.errors import ConfigError, TableError
from bstune.core.records import Target
from bstune.sweeps.baselines import FRONTIER, Entry, searches
from bstune.sweeps.harness import Finding
from bstune.sweeps.search_benchmark_report import Standing, make_finding, standing
from bstune.sweeps.search_problem import (
    MULTIPLES_OF_UNIT,
    Benchmark,
    SearchObjective,
    SearchRun,
    make_benchmark,
    run_search,
)
from bstune.sweeps.unit_log import UnitLog, UnitPlan, UnitRecord, check_only, is_chosen
from bstune.trial.replay import Table, TableSource, read_index, read_table

SEEDS = 20
QUICK_SEEDS = 3
QUICK_SEARCHES = (FRONTIER, "random/lr", "tpe/lr", "tpe/sqrt", "shallue", "zeus")
READ_RUN = TypeAdapter(SearchRun)
# Parameters that no search depends on: they choose searches. The target and the table's digest are
# kept with each search.
NOT_OF_A_SEARCH = ("tables", "target", "searches", "seeds", "quick", "again", "workers")


@dataclass(frozen=True)
class Case:
    """One search on one benchmark with one seed."""

    benchmark: Benchmark
    entry: Entry
    seed: int

    @property
    def unit(self) -> str:
        """The name of its unit: the table, the search and the seed."""
        return f"{self.benchmark.name}/{self.entry.key}/{self.seed}"

    def run(self) -> SearchRun:
        """Run the search, in whatever process this is."""
        # A new process begins with Optuna's own verbosity, which tells of every trial.
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        problem = self.benchmark.problem
        search = self.entry.make(problem, self.seed)
        # Each objective has its own unit of spending: the best cell's cost or, for ``curve``, the
        # frontier's, which is larger. Searches are compared at multiples of it that suit it.
        return run_search(
            search, self.benchmark, MULTIPLES_OF_UNIT[problem.objective], self.entry.max_trials
        )


def run(
    log: UnitLog,
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
    only: list[str],
) -> Finding:
    """Run each search on each table and seed, and compare what they found.

    Args:
        log: keeps the searches.
        tables: names or files; empty: all that ship.
        target: its value; None: that of each table.
        searches: names; empty: all.
        seeds: their number; None: SEEDS, or QUICK_SEEDS with ``quick``.
        objective: ``time``, ``steps`` or ``curve``, which compares estimates of B_crit.
        quick: whether only QUICK_SEARCHES run.
        lr_factor: multiplies the learning rate that a search starts from, for a harder problem.
        budget_factor: multiplies a trial's first budget, for a harder problem.
        again: names of searches to run again.
        workers: the number of processes.
        only: the units to run now; empty: all.
    """
    n = SEEDS
    if seeds is not None:
        n = seeds
    elif quick:
        n = QUICK_SEEDS
    if n < 1 or workers < 1:
        raise ConfigError(
            f"sweep.experiment.seeds and .workers must be at least 1, but got {n} and {workers}"
        )
    if objective not in MULTIPLES_OF_UNIT:
        raise ConfigError(
            f"sweep.experiment.objective must be one of {', '.join(MULTIPLES_OF_UNIT)}, but got "
            f"{objective!r}"
        )
    entries = choose(searches, quick)
    sources = _read_sources(tables, target, objective, lr_factor, budget_factor)
    planned = _plan_cases(sources, entries, n)
    cases = planned.cases
    check_only(only, list(cases))
    # Recorded runs are replayed: no device takes part. The parameters that may change choose the
    # searches, or are among a search's own inputs.
    log.begin(device=None, may_change=NOT_OF_A_SEARCH)
    # These searches lose their records, and so are run once more.
    log.drop(functools.partial(_is_of, again))
    plan = UnitPlan(
        names=list(cases),
        only=only,
        noun="search",
        read=READ_RUN.validate_python,
        inputs=planned.inputs,
    )

    def run_missing(names: Sequence[str]) -> Iterator[tuple[str, dict[str, object]]]:
        missing = [cases[name] for name in names]
        for case, search_run in run_cases(missing, workers):
            yield case.unit, asdict(search_run)

    runs = log.measure_as_they_end(plan, run_missing)
    log.check_finished(plan.names, runs)
    by_search = dict[tuple[str, str], list[SearchRun]]()
    for unit, search_run in runs.items():
        case = cases[unit]
        by_search.setdefault((case.benchmark.name, case.entry.key), []).append(search_run)
    standings = list[Standing]()
    for benchmark, entry in planned.compared:
        standings.append(standing(benchmark, entry, by_search[benchmark.name, entry.key]))
    benchmarks = [source.benchmark for source in sources]
    origins = [source.origin for source in sources]
    return make_finding(benchmarks, standings, planned.left_out, origins, n)


@dataclass(frozen=True)
class _Source:
    """A benchmark, and where its table comes from."""

    benchmark: Benchmark
    # The table's digest, and the command that recorded it, None for a table of somebody's own.
    origin: dict[str, str | None]


def _read_sources(
    tables: Sequence[str],
    target: float | None,
    objective: SearchObjective,
    lr_factor: float,
    budget_factor: float,
) -> list[_Source]:
    """Read the tables, and make a benchmark of each.

    ``tables`` are names or files; empty: all that ship. ``target`` is its value; None: that of each
    table. The two factors multiply the learning rate and the budget that a search starts from.
    """
    sources = list[_Source]()
    for name, (file, shipped) in find_sources(tables, read_index()).items():
        goal = find_target(file, shipped, target)
        table = read_stoppable_runs(file)
        benchmark = make_benchmark(name, table, goal, objective, lr_factor, budget_factor)
        # The digest tells tables of one name apart that were recorded at different times.
        digest = sha256(file.read_bytes()).hexdigest()[:16]
        command: str | None = None
        if shipped is not None:
            command = shipped.command
        sources.append(_Source(benchmark, {"digest": digest, "command": command}))
    return sources


@dataclass(frozen=True)
class _PlannedCases:
    """The searches of a comparison.

    Args:
        cases: one for each table, search and seed, by the names of their units.
        inputs: what each case depends on, by the same names.
        compared: the pairs of benchmark and entry to compare, in the order of the tables.
        left_out: a line for each search that cannot run on a table.
    """

    cases: dict[str, Case]
    inputs: dict[str, object]
    compared: list[tuple[Benchmark, Entry]]
    left_out: list[str]


def _plan_cases(sources: Sequence[_Source], entries: Sequence[Entry], n: int) -> _PlannedCases:
    """Pair each table with each search on ``n`` seeds.

    A search whose rule needs a noise scale is left out on a table that determines none.
    """
    cases = dict[str, Case]()
    inputs = dict[str, object]()
    compared = list[tuple[Benchmark, Entry]]()
    left_out = list[str]()
    for source in sources:
        benchmark = source.benchmark
        goal = benchmark.problem.target
        for entry in entries:
            if not _usable(benchmark, entry):
                left_out.append(
                    f"{benchmark.name}: {entry.key} is left out: its rule takes a noise scale, "
                    "and this table determines no B_crit"
                )
                continue
            compared.append((benchmark, entry))
            for seed in range(n):
                case = Case(benchmark, entry, seed)
                cases[case.unit] = case
                # With another table or target the search is run again.
                inputs[case.unit] = {
                    "search": entry.key,
                    "digest": source.origin["digest"],
                    "target": [goal.metric, goal.value],
                }
    return _PlannedCases(cases=cases, inputs=inputs, compared=compared, left_out=left_out)


def _is_of(searches: Sequence[str], record: UnitRecord) -> bool:
    """Tell whether a record is of one of ``searches``, each NAME, NAME/AXIS or NAME/AXIS/FORM."""
    inputs = record.inputs
    # Without ``searches`` it is of none of them, though is_chosen would take that for all.
    if not searches or not isinstance(inputs, Mapping):
        return False
    return is_chosen(str(inputs.get("search")), searches)


def _usable(benchmark: Benchmark, entry: Entry) -> bool:
    """Tell whether a benchmark has a noise scale, if the search needs one."""
    return benchmark.problem.noise_scale is not None or not entry.needs_noise_scale


def choose(names: Sequence[str], quick: bool) -> list[Entry]:
    """Choose the searches that are named; without names all, or with ``quick`` QUICK_SEARCHES.

    A search has the key NAME/AXIS/FORM, such as ``tpe/sqrt/pruned``: its name; its axis, which is
    the coordinate that it has for the learning rate; and its form, the way in which a stopped trial
    is told to it. A name is such a key, its beginning, ``tpe/sqrt`` or ``tpe``, or MODULE:FUNCTION,
    such as ``my_package.searches:make``, which makes a search of one's own.
    """
    entries = searches()
    if not names:
        return [entry for entry in entries if not quick or entry.group in QUICK_SEARCHES]
    chosen: dict[str, Entry] = {}
    for name in names:
        # An entry's group is NAME/AXIS, such as ``tpe/sqrt``: it chooses all of its forms. bstune's
        # search with its usual rule has no axis, so that its name is a group.
        matching = [entry for entry in entries if name in (entry.group, entry.key)]
        # A bare name, such as ``tpe``, chooses all of its axes.
        if not matching:
            matching = [entry for entry in entries if name == entry.name]
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
    """Import a search given as MODULE:FUNCTION, such as ``my_package.searches:make``.

    ConfigError if that fails.
    """
    module, _, function = name.partition(":")
    try:
        make = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"the search {name!r} cannot be imported ({error}): give MODULE:FUNCTION"
        ) from error
    # Only Optuna's samplers have a choice of axes and of forms.
    return Entry(name, axis=None, form=None, make=make)


def find_sources(
    names: Sequence[str], index: Mapping[str, TableSource]
) -> dict[str, tuple[Path, TableSource | None]]:
    """Find the tables that are named or given by path; without names all that ship.

    ``index`` has those that ship. Gives by name the file, and the source of a table that ships,
    None for another one.
    """
    sources: dict[str, tuple[Path, TableSource | None]] = {}
    if not names:
        sources = {name: (source.path, source) for name, source in index.items()}
        if not sources:
            raise TableError(
                "bstune ships no tables here: name a file with sweep.experiment.tables=[FILE], and "
                "a target"
            )
    for name in names:
        path = Path(name)
        if name not in index and not path.exists():
            others = ""
            if index:
                others = f", or one of {', '.join(index)}"
            raise TableError(
                f"there is no table {name}: give the path of a file of JSON lines{others}"
            )
        # A path may lead to the file of a table that ships.
        shipped = index.get(name) or _shipped_at(path, index)
        if shipped is not None:
            path = shipped.path
        # The later one of two files with one name is known by its path.
        known_as = path.stem
        if path.stem in sources:
            known_as = str(path)
        sources[known_as] = path, shipped
    return sources


def _shipped_at(path: Path, index: Mapping[str, TableSource]) -> TableSource | None:
    """Give the source of the table that ships as this file; None for another file."""
    for source in index.values():
        if source.path.resolve() == path.resolve():
            return source
    return None


def read_stoppable_runs(path: Path) -> Table:
    """Read a table of runs that may be stopped at any step.

    TableError if the runs have horizons, the steps at which their schedules ended: such a run tells
    nothing of a shorter one.
    """
    table = read_table(path)
    if table.has_horizons:
        raise TableError(
            f"the schedules of the runs in {path} end with them, and here trials are stopped on "
            "the way: name a table whose runs have no horizon"
        )
    return table


def find_target(path: Path, shipped: TableSource | None, value: float | None) -> Target:
    """Give a table's target: that with ``value``, else the one that the table was recorded for."""
    if value is not None:
        # A table of somebody's own does not name its metric, here an error or a loss.
        metric = "error"
        if shipped is not None:
            metric = shipped.target.metric
        return Target(metric, value, "min")
    if shipped is None:
        raise ConfigError(
            f"{path} is not one of bstune's own tables: give what to reach as "
            "sweep.experiment.target=VALUE"
        )
    return shipped.target


def run_cases(cases: Sequence[Case], workers: int) -> Iterator[tuple[Case, SearchRun]]:
    """Yield cases and their runs as they finish, from this process or from ``workers`` others."""
    if workers == 1:
        for case in cases:
            yield case, case.run()
        return
    with ProcessPoolExecutor(workers) as pool:
        pending = {pool.submit(case.run): case for case in cases}
        try:
            # They come as they end, so that each is kept at once.
            for future in as_completed(pending):
                yield pending[future], future.result()
        # An interruption does not wait for cases that have not begun.
        finally:
            pool.shutdown(cancel_futures=True)
