"""How often 90% intervals of S*(B) and of B_crit hold the truth, where schedules end with the trial.

    python tests/benchmarks/bench_horizon_coverage.py run --json FILE [--studies 14] [--kinds ...] [--seconds N]
    python tests/benchmarks/bench_horizon_coverage.py again --json FILE --trials FILE [--seconds N]
    python tests/benchmarks/bench_horizon_coverage.py show --json FILE

``run``: bstune's search on the laws of ``bench_horizon.py``, a user's own pair first, until 40 times the least cost of
any (B, lr, h) is spent. ``two terms`` is a law without a small-batch term, ``u-shape`` one with. Then the posterior of
a report is judged: its 90% interval of log S*(B) at 1, 2 and 4 times the best B against the law's own, and that of
B_crit, as the posterior has it and as the study would claim it. ``again`` infers anew from the trials of another file,
so that two likelihoods are compared on the same trials.

FILE has a line of JSON for each study, written as it ends, its trials in it. A command that is cut short, by a kill or
by ``--seconds``, goes on where the file ends. Each study runs in a process of its own, with one thread. No clock goes
into the results.
"""

import argparse
import json
import math
import os
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from dataclasses import replace
from functools import partial
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from typing import Any

# Before numpy is imported, here and in the processes: threads of theirs would fight over the cores.
os.environ["OMP_NUM_THREADS"] = "1"

import numpy as np
import optuna
from bench_coverage import draw_law
from bench_horizon import Frontier, HorizonLaw, draw
from numpy.typing import NDArray

from bstune.core.records import TrialResult
from bstune.search.frontier_findings import b_crit_quantiles
from bstune.search.frontier_law import frontier
from bstune.search.posterior import Posterior
from bstune.study.analysis.critical import INTERVAL, critical_batch
from bstune.study.analysis.model import MOVES, REPORT_PARTICLES

KINDS = {"two terms": "noise 10%", "u-shape": "u-shape"}
# S*(B) is judged at these multiples of the best batch size.
MULTIPLES = (1.0, 2.0, 4.0)
# In units of the least cost.
SPENDING = 40.0
MAX_TRIALS = 300
QUANTILES = (INTERVAL[0], 0.5, INTERVAL[1])


def law_of(kind: str, number: int) -> HorizonLaw:
    """The law of a study; the two kinds share all but the frontier."""
    return replace(draw(number, None), law=draw_law(number, KINDS[kind]))


def searched(law: HorizonLaw, number: int) -> tuple[list[TrialResult], Frontier]:
    """The trials of a whole search, and who asked for them."""
    search = Frontier(law, number, chooses=True, reference_first=True)
    trials = list[TrialResult]()
    spent = 0.0
    while spent < SPENDING * law.best[0] and len(trials) < MAX_TRIALS:
        trial, size, lr, horizon = search.ask(trials)
        # No two trials of any study share their noise: a study has at most 300.
        result = law.run(len(trials), size, lr, horizon, 10_000 * number + len(trials))
        search.tell(trial, result)
        trials.append(result)
        spent += result.train_seconds
    return trials, search


def judged(law: HorizonLaw, posterior: Posterior) -> dict[str, Any]:
    """Truths beside their intervals: lower end, median and upper end."""
    sizes = [multiple * law.best[1] for multiple in MULTIPLES]
    drawn = frontier(posterior.theta, posterior.prior.points_at(np.log2(sizes)), posterior.prior)
    claimed = critical_batch(posterior)
    ends = None
    # A study claims B_crit only where its trials tell it.
    if claimed is not None:
        ends = [claimed.low, claimed.value, claimed.high]
    return {
        "log_s": [math.log(law.law.frontier(size)) for size in sizes],
        "log_s_intervals": np.quantile(drawn, QUANTILES, axis=0).T.tolist(),
        "b_crit": law.law.b_crit,
        "b_crit_interval": b_crit_quantiles(posterior, QUANTILES).tolist(),
        "b_crit_claimed": ends,
    }


def study(job: tuple[str, int], before: dict[tuple[str, int], list[str]]) -> dict[str, Any]:
    """Run a study, or infer anew from the trials that one ran ``before``; return its line."""
    kind, number = job
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    law = law_of(kind, number)
    if job in before:
        trials = [TrialResult.from_json(line) for line in before[job]]
        # It only infers: nothing is asked of it.
        search = Frontier(law, number, chooses=True, reference_first=True)
    else:
        trials, search = searched(law, number)
    posterior = search.sampler.posterior(
        trials, particles=REPORT_PARTICLES, moves=MOVES, rng=np.random.default_rng(number)
    )
    assert posterior is not None
    own = {
        "kind": kind,
        "number": number,
        "reached": sum(trial.reached for trial in trials),
        "budget_factor": law.budget_factor,
        "best": law.best[1],
    }
    return own | judged(law, posterior) | {"trials": [trial.to_json() for trial in trials]}


def read(path: Path) -> list[dict[str, Any]]:
    """The lines of a file; none where there is no file, a last one that was cut short left out."""
    if not path.exists():
        return []
    whole, _, _ = path.read_text(encoding="utf-8").rpartition("\n")
    return [json.loads(line) for line in whole.splitlines()]


def ended(
    run: Callable[[tuple[str, int]], dict[str, Any]],
    jobs: Iterable[tuple[str, int]],
    processes: int,
    seconds: float,
) -> Iterator[dict[str, Any]]:
    """Yield the lines of studies as they end; none begins after so many seconds."""
    start = time.monotonic()
    left = iter(jobs)
    with ProcessPoolExecutor(processes, get_context("spawn")) as pool:
        # No more at a time than there are processes: what has been submitted cannot be left out.
        running = {pool.submit(run, job) for _, job in zip(range(processes), left, strict=False)}
        while running:
            done, running = wait(running, return_when=FIRST_COMPLETED)
            for one in done:
                yield one.result()
                job = next(left, None)
                if job is not None and time.monotonic() - start < seconds:
                    running.add(pool.submit(run, job))


def columns_of(pairs: Sequence[tuple[float, Sequence[float]]]) -> NDArray[np.float64]:
    """Give truths, and lower ends, medians and upper ends of their intervals, (4, n)."""
    return np.array([(truth, *interval) for truth, interval in pairs], dtype=np.float64).T


def show(rows: Sequence[dict[str, Any]]) -> None:
    """Print coverage, median width and median error of each kind of law and of all."""
    for kind in (*KINDS, None):
        some = [row for row in rows if kind in (None, row["kind"])]
        if not some:
            continue
        trials = statistics.median(len(row["trials"]) for row in some)
        print(f"{kind or 'all'}: n = {len(some)}, {trials:g} trials (median)")
        for place, multiple in enumerate(MULTIPLES):
            pairs = [(row["log_s"][place], row["log_s_intervals"][place]) for row in some]
            truths, low, middle, high = columns_of(pairs)
            covered = ((low <= truths) & (truths <= high)).sum()
            width = np.median(high - low)
            off = np.median(middle - truths)
            print(
                f"   log S* at {multiple:g} times the best B: covers {covered} of {len(pairs)}, "
                f"width {width:.2f}, median off by {off:+.2f}"
            )
        truths, low, middle, high = columns_of(
            [(row["b_crit"], row["b_crit_interval"]) for row in some]
        )
        covered = ((low <= truths) & (truths <= high)).sum()
        width = np.median(high / low)
        off = np.median(middle / truths)
        print(f"   B_crit: covers {covered} of {len(some)}, width {width:.1f}, off {off:.2f}")
        # An interval alone, without a value, is no claim.
        claimed = 0
        for row in some:
            ends = row["b_crit_claimed"]
            claimed += ends is not None and ends[1] is not None
        print(f"   B_crit: claimed in {claimed} of {len(some)}")


def main() -> None:
    """Run what is asked for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("run", "again", "show"))
    parser.add_argument("--json", type=Path, required=True, help="a line for each study")
    parser.add_argument("--trials", type=Path, help="of again: the file that has the trials")
    parser.add_argument("--studies", type=int, default=14, help="of each kind of law")
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), choices=list(KINDS))
    parser.add_argument("--seconds", type=float, default=math.inf, help="no study begins after")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    options = parser.parse_args()
    rows = read(options.json)
    if options.what == "show":
        show(rows)
        return
    before: dict[tuple[str, int], list[str]] = {}
    # Number by number, so that a command that is cut short has judged every kind as often.
    jobs = list[tuple[str, int]]()
    for number, kind in product(range(options.studies), options.kinds):
        jobs.append((kind, number))
    if options.what == "again":
        if options.trials is None:
            parser.error("again needs --trials FILE")
        before = {(row["kind"], row["number"]): row["trials"] for row in read(options.trials)}
        jobs = list(before)
    known = {(row["kind"], row["number"]) for row in rows}
    jobs = [job for job in jobs if job not in known]
    # A last line that was cut short goes, so that the next one begins a line.
    whole = "".join(json.dumps(row) + "\n" for row in rows)
    options.json.write_text(whole, encoding="utf-8")
    with options.json.open("a", encoding="utf-8") as file:
        for row in ended(partial(study, before=before), jobs, options.jobs, options.seconds):
            file.write(json.dumps(row) + "\n")
            file.flush()
            rows.append(row)
    show(rows)


if __name__ == "__main__":
    main()
