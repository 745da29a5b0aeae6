"""Does GAIN's 90% interval hold the true gain, and are the ends of AS GOOD as good as said?

    python tests/benchmarks/bench_gain.py [--studies 40] [--first 0] [--noise 0.3] [--json FILE]

Each study searches a made law (``bench_coverage.py`` draws it), every trial with noise of its own: a
normal deviation of log S of ``--noise``. It has a reference of a batch size of 32 to 256, whose rate
lies from two octaves below the best one to one above. It is a whole study: baseline, search, up to
``search.candidates`` finalists on fresh seeds, the reference on those of the winner. The true gain is
the law's own seconds at the reference over those at the pair that USE names. An end of AS GOOD is
judged by the law's seconds there, at the rate that is advised, over the least. No clock goes in.
"""

import json
import math
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, replace
from io import StringIO
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
from bench_coverage import LRS, draw_law
from common import machine, options_of, write
from synthetic import BATCH_SIZES, TARGET, Law, law_table

from bstune.__main__ import main as bstune
from bstune.sweeps.search_problem import percentile
from bstune.trial import replay
from bstune.trial.replay import Table

# Of the best point's steps and examples, and of the reference's steps: a trial gives up there.
BUDGET_OF_BEST = 4
BUDGET_OF_REFERENCE = 3


@dataclass(frozen=True)
class Reference:
    """The configuration that a user of the law runs today."""

    batch_size: int
    lr: float


def reference_of(law: Law, seed: int) -> Reference:
    """Draw a reference whose runs reach the target."""
    rng = np.random.default_rng(seed)
    batch_size = round(2 ** rng.uniform(5, 8))
    lr = law.best_lr(batch_size) * 2 ** rng.uniform(-2, 1)
    if law.steps(batch_size, lr) is None:
        lr = law.best_lr(batch_size) / 2
    return Reference(batch_size, lr)


def seconds(law: Law, batch_size: int, lr: float) -> float:
    """Give the law's own seconds to the target, the median over seeds; infinite where runs diverge."""
    steps = law.steps(batch_size, lr)
    if steps is None:
        return math.inf
    return steps * law.tau(batch_size)


def options_for(law: Law, table: Table, reference: Reference) -> list[str]:
    """Give the options of a study of the law."""
    fastest = min(table.batch_sizes, key=lambda size: seconds(law, size, law.best_lr(size)))
    of_best = BUDGET_OF_BEST * seconds(law, fastest, law.best_lr(fastest)) / law.tau(fastest)
    own_steps = seconds(law, reference.batch_size, reference.lr) / law.tau(reference.batch_size)
    of_reference = BUDGET_OF_REFERENCE * own_steps
    return [
        f"workload.reference.batch_size={reference.batch_size}",
        f"workload.reference.lr={reference.lr}",
        f"workload.batch_size.low={table.batch_sizes[0]}",
        f"workload.batch_size.high={table.batch_sizes[-1]}",
        f"workload.budget.steps={round(max(of_best, of_reference))}",
        f"workload.budget.examples="
        f"{round(max(of_best * fastest, of_reference * reference.batch_size))}",
        "workload.target.metric=error",
        f"workload.target.value={TARGET}",
        "workload.name=law",
        "mlflow.enabled=false",
    ]


@contextmanager
def table_in_place(table: Table) -> Iterator[None]:
    """Let a study that replays a file read this table: a law's draws do not fit into a file."""
    with patch.object(replay, "read_table", lambda path: table):
        yield


def study(seed: int, noise: float) -> dict[str, Any]:
    """Run one study; give its gain beside the true one."""
    law = replace(draw_law(seed, "noise 10%"), noise=noise)
    table = law_table(law, LRS, metric_noise=0.05)
    reference = reference_of(law, seed)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        file = folder / "table.jsonl"
        # It is never read.
        file.write_text("")
        sys.argv = [
            "bstune",
            "+workload=replay",
            f"workload.table={file}",
            f"output={folder / 'study'}",
            f"storage=sqlite:///{folder / 'study.db'}",
            f"seed={seed}",
            *options_for(law, table, reference),
        ]
        with table_in_place(table), redirect_stdout(StringIO()):
            status = bstune()
        if status:
            raise SystemExit(f"the study of law {seed} ended with status {status}")
        result = json.loads((folder / "study" / "curve.json").read_text())
    return row(law, reference, seed, result)


def row(law: Law, reference: Reference, seed: int, result: dict[str, Any]) -> dict[str, Any]:
    """Give what is kept of a study's result; the gain is None where the study named none."""
    winner = result["best_by_time"]
    gain = result["gain"]
    kept: dict[str, Any] = {
        "seed": seed,
        "noise": law.noise,
        "reference": [reference.batch_size, reference.lr],
        "use": None,
        "truth": None,
        "gain": None,
        "as_good": None,
    }
    if winner is not None:
        kept["use"] = [winner["batch_size"], winner["lr"]]
        own = seconds(law, reference.batch_size, reference.lr)
        kept["truth"] = own / seconds(law, winner["batch_size"], winner["lr"])
    if gain is not None:
        kept["gain"] = [gain["ratio"], gain["low"], gain["high"]]
    good = result["as_good"]
    if good is not None:
        least = least_seconds(law)
        ends = list[list[float]]()
        for end in ("low", "high"):
            batch_size = good[end]
            ends.append([batch_size, seconds(law, batch_size, good[f"lr_{end}"]) / least])
        kept["as_good"] = ends
    return kept


def least_seconds(law: Law) -> float:
    """Give the law's least seconds to the target, over whole batch sizes at their best rates."""
    sizes = range(BATCH_SIZES[0], BATCH_SIZES[-1] + 1)
    return min(seconds(law, size, law.best_lr(size)) for size in sizes)


def show(rows: Sequence[dict[str, Any]]) -> None:
    """Print how many intervals hold the truth, how far off the estimate is, how wide they are."""
    held = list[bool]()
    log_errors = list[float]()
    widths = list[float]()
    for kept in rows:
        if kept["gain"] is None or kept["gain"][1] is None:
            continue
        ratio, low, high = kept["gain"]
        held.append(low <= kept["truth"] <= high)
        log_errors.append(math.log(ratio / kept["truth"]))
        widths.append(high / low)
    if not held:
        print(f"no gain with an interval in {len(rows)} studies")
        return
    print(
        f"{sum(held)} of {len(held)} intervals hold the true gain (of {len(rows)} studies); the "
        f"estimate is {math.exp(statistics.fmean(log_errors)):.2f} of it, by the geometric mean; "
        f"median width {statistics.median(widths):.2f}"
    )
    over_least = sorted(excess for kept in rows for _, excess in kept["as_good"] or [])
    if over_least:
        print(
            f"an end of AS GOOD takes {statistics.median(over_least):.2f} times the least seconds "
            f"(median of {len(over_least)}; 90th percentile {percentile(over_least, 0.9):.2f})"
        )


def main() -> None:
    """Run the studies one after another."""
    options = options_of(
        __doc__,
        ("--studies", {"type": int, "default": 40}),
        ("--first", {"type": int, "default": 0, "help": "seed of the first law"}),
        ("--noise", {"type": float, "default": 0.3, "help": "of log S from run to run"}),
    )
    about = machine(options.device, options.studies)
    rows = list[dict[str, Any]]()
    for seed in range(options.first, options.first + options.studies):
        rows.append(study(seed, options.noise))
        write(options.json, about, rows)
    show(rows)


if __name__ == "__main__":
    main()
