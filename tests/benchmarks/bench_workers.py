"""What several processes on one study gain, and what the search loses by them.

    python tests/benchmarks/bench_workers.py sleep [--workers 1 2 8] [--trials 32] [--seconds 3]
    python tests/benchmarks/bench_workers.py busy [--workers 1 4 16] [--trials 10000] [--seconds 0.5]
    python tests/benchmarks/bench_workers.py regret [--seeds 5]

``sleep`` and ``busy`` run studies of trials that sleep, with the random sampler, on a PostgreSQL server of their own
(``sleep`` on SQLite where there is none): from the first trial's start to the last one's end, the share of that time in
which the processes slept, and decisions a second. ``regret`` plays bstune's search on the shipped tables with one and
with four workers in simulated time, and compares the incumbent's time over the best after the same spending.
"""

import argparse
import heapq
import statistics
import sys
import tempfile
import time
from pathlib import Path

import optuna

sys.path.append(str(Path(__file__).parents[1]))
import fleet
from postgres import Postgres, program

from bstune.study.analysis.model import sampler_context
from bstune.study.prepare import compose_checked, prepare
from bstune.study.storage.asking import ask
from bstune.study.storage.samplers import build_sampler
from bstune.study.storage.telling import tell
from bstune.study.storage.trials import results
from bstune.study.storage.turns import ended_below_limit, free_turn
from bstune.sweeps.search_problem import least, make_benchmark, median_time
from bstune.trial.replay import read_index, read_table

# Of the spending, in units of the best trial's cost.
MULTIPLES = (10.0, 20.0, 40.0)


def run_fleet(
    workers: int, trials: int, seconds: float, folder: Path, url: str
) -> tuple[float, float, float]:
    """Wall seconds from the first start to the last end, the share of them slept, and decisions a second."""
    options = (f"storage={url}", f"search.trials={trials}", "sampler=random")
    watch = fleet.Watch(url)
    owner = fleet.start("owner", folder / "0", *options, seconds=seconds)
    # Workers need the owner's study in the storage.
    while not watch.running():
        time.sleep(0.1)
    for number in range(1, workers):
        fleet.start("worker", folder / str(number), *options, seconds=seconds)
    while sum(watch.finished().values()) < trials:
        time.sleep(0.5)
    done = watch.trials(*fleet.DONE)
    wall = max(one.datetime_complete for one in done) - min(one.datetime_start for one in done)
    # The owner's report is no part of the fleet's time.
    owner.kill()
    return (
        wall.total_seconds(),
        # What all trials slept, over the wall seconds of all processes.
        trials * seconds / workers / wall.total_seconds(),
        trials / wall.total_seconds(),
    )


def fleets(options: argparse.Namespace) -> None:
    """Run a fleet of each size, one after the other."""
    first = None
    for workers in options.workers:
        with (
            tempfile.TemporaryDirectory(prefix="bstune-postgresql-") as at,
            tempfile.TemporaryDirectory() as folder,
        ):
            server = None if program("initdb") is None else Postgres(Path(at))
            url = f"sqlite:///{folder}/bstune.db" if server is None else server.url()
            try:
                wall, busy, rate = run_fleet(
                    workers, options.trials, options.seconds, Path(folder), url
                )
            finally:
                if server is not None:
                    server.stop("immediate")
        # The first number of processes is what the others are compared with.
        first = first or wall
        print(
            f"{workers} processes, {options.trials} trials of {options.seconds:g} s: {wall:.1f} "
            f"s, {wall / first:.3f} "
            f"of the first; busy {busy:.1%}; {rate:.2f} decisions a second",
            flush=True,
        )


def play(table: str, workers: int, seed: int, most: float) -> list[float]:
    """The incumbent's time over the best after each spending; workers train side by side in simulated time."""
    source = read_index()[table]
    bench = make_benchmark(table, read_table(source.path), source.target, "time")
    arguments = (
        "workload=replay",
        f"workload.table={table}",
        "search.objective=time",
        "search.trials=1000",
    )
    with tempfile.TemporaryDirectory() as folder:
        own = (f"seed={seed}", "mlflow.enabled=false", f"output={folder}", "storage='sqlite://'")
        composed = compose_checked([*arguments, *own])
        prepared = prepare(composed.options, composed.recipe)
    study = optuna.create_study()
    now = 0.0
    spent = 0.0
    running = []
    found = []
    ratio = float("inf")
    due = [multiple for multiple in MULTIPLES if multiple <= most]
    while due:
        while len(running) < workers:
            turn = free_turn(study, 1000)
            context = sampler_context(prepared, ended_below_limit(study))
            sampler = build_sampler(prepared.options, prepared.budget, turn.trial_index, context)
            asked = ask(study, turn, prepared.budget, prepared.space, sampler, True)
            spec = asked[1]
            parent = next((one for one in results(study) if one.number == spec.resumed_from), None)
            record = prepared.backend.run(spec, None, parent)
            # By when they end; the number keeps two of the same time apart.
            heapq.heappush(running, (now + record.train_seconds, spec.number, asked, record))
        # Nothing is told of a trial before it ends, as with real workers.
        now, _, asked, record = heapq.heappop(running)
        spent += record.train_seconds / bench.unit
        while due and spent > due[0]:
            found.append(ratio)
            due.pop(0)
        tell(study, asked, record, "time")
        best = least(results(study))
        if best is not None:
            seconds = median_time(bench.table, best.batch_size, best.lr, source.target)
            ratio = float("inf") if seconds is None else seconds / bench.best[2]
    return found


def regret(options: argparse.Namespace) -> None:
    """Compare one worker's search with four workers'."""
    for table in options.tables:
        runs = {
            n: [play(table, n, seed, options.most) for seed in range(options.seeds)] for n in (1, 4)
        }
        for place, multiple in enumerate(one for one in MULTIPLES if one <= options.most):
            ratios = {n: [run[place] for run in found] for n, found in runs.items()}
            middle = {n: statistics.median(found) for n, found in ratios.items()}
            print(
                f"{table} after {multiple:g}x: median {middle[1]:.3f} with one, {middle[4]:.3f} "
                f"with four; {ratios}"
            )
        sys.stdout.flush()


def main() -> None:
    """Run what is asked for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    kinds = parser.add_subparsers(required=True)
    for name, trials, seconds, workers in (
        ("sleep", 32, 3.0, [1, 2, 8]),
        ("busy", 10000, 0.5, [1, 4, 16]),
    ):
        kind = kinds.add_parser(name)
        kind.add_argument("--workers", type=int, nargs="+", default=workers)
        kind.add_argument("--trials", type=int, default=trials)
        kind.add_argument("--seconds", type=float, default=seconds)
        kind.set_defaults(run=fleets)
    kind = kinds.add_parser("regret")
    kind.add_argument("--seeds", type=int, default=5)
    kind.add_argument("--most", type=float, default=MULTIPLES[-1])
    kind.add_argument("--tables", nargs="+", default=list(read_index()))
    kind.set_defaults(run=regret)
    options = parser.parse_args()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    # Not above: each of the fleet's processes imports this file, and a trial that sleeps needs no
    # torch.
    from common import machine
    from torch import device

    machine(device("cpu"), 1)
    options.run(options)


if __name__ == "__main__":
    main()
