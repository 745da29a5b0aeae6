"""What it costs a study that its files reach the disk, in pairs of studies with os.fsync and without it.

    python tests/benchmarks/bench_fsync.py [--repeats 5] [--study NAME] [--json FILE]

Each study is a fork of this process, in a new folder below the working directory, whose file system is what counts.
SQLite syncs its database by itself, on both sides. Beside the seconds of the whole study, those within os.fsync are
summed up: on a busy machine the two sides of a pair differ by more.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from common import machine, options_of, write
from toolbox import table_rows, write_rows

from bstune.__main__ import main as command

REPLAY = ("workload=replay", "workload.table=t.jsonl", "workload.target.value=0.14")
DIGITS = ("workload=digits", "device=cpu", "hardware.enabled=false", "search.workers=0")
EACH = ("mlflow.enabled=false", "search.objective=steps", "search.replicates=0", "sampler=random")
STUDIES = {"replay": (*REPLAY, *EACH), "digits": (*DIGITS, *EACH)}
TRIALS = {"replay": 40, "digits": 6}


def measured(arguments: tuple[str, ...], syncs: bool) -> dict[str, float]:
    """Run a study in a fork; return its seconds, and the number of its syncs and their seconds."""
    # /tmp may be in memory, where nothing is synced.
    with tempfile.TemporaryDirectory(dir=".") as name:
        child = os.fork()
        if child == 0:
            os.chdir(name)
            _run(arguments, syncs)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if status:
            raise RuntimeError(f"the study ended with {status}")
        found: dict[str, float] = json.loads(Path(name, "found.json").read_text())
        return found


def _run(arguments: tuple[str, ...], syncs: bool) -> None:
    fsync = os.fsync
    spent = list[float]()

    def timed(descriptor: Any) -> None:
        start = time.perf_counter()
        if syncs:
            fsync(descriptor)
        spent.append(time.perf_counter() - start)

    os.fsync = timed
    write_rows(Path("t.jsonl"), table_rows())
    # What the study prints would stand between the results.
    output = os.open("log", os.O_WRONLY | os.O_CREAT)
    os.dup2(output, 1)
    os.dup2(output, 2)
    sys.argv = ["bstune", *arguments]
    start = time.perf_counter()
    status = command()
    found = {"seconds": time.perf_counter() - start, "syncs": len(spent), "in_sync": sum(spent)}
    Path("found.json").write_text(json.dumps(found))
    os._exit(status)


def main() -> None:
    """Run pairs of studies in turns, and print medians and ranges."""
    options = options_of(
        __doc__,
        ("--repeats", {"type": int, "default": 5}),
        ("--study", {"choices": list(STUDIES), "help": "one of them (default: both)"}),
    )
    about = machine(options.device, options.repeats)
    kind = subprocess.check_output(["stat", "-f", "-c", "%T", "."], text=True).strip()
    rows: list[dict[str, Any]] = []
    for name in [options.study] if options.study else list(STUDIES):
        arguments = (*STUDIES[name], f"search.trials={TRIALS[name]}")
        # All that is read for the first time is in memory from here on.
        measured(arguments, syncs=True)
        pairs = []
        for number in range(options.repeats):
            # Which of a pair comes first alternates: a drift of the machine cancels out.
            order = (True, False) if number % 2 else (False, True)
            pair = {syncs: measured(arguments, syncs) for syncs in order}
            pairs.append((pair[True], pair[False]))
        shares = [on["in_sync"] / on["seconds"] for on, _ in pairs]
        ratios = [on["seconds"] / off["seconds"] for on, off in pairs]
        each = [1000 * on["in_sync"] / TRIALS[name] for on, _ in pairs]
        shown = {"on / off": ratios, "share in fsync": shares, "ms in fsync a trial": each}
        print(f"{name} on {kind}: {pairs[0][0]['syncs']:.0f} syncs in {TRIALS[name]} trials")
        for what, values in shown.items():
            low = min(values)
            middle = statistics.median(values)
            high = max(values)
            print(f"  {what}: {low:.4g}, {middle:.4g}, {high:.4g}")
        rows.append({"study": name, "file system": kind, "pairs": pairs, **shown})
    write(options.json, about, rows)


if __name__ == "__main__":
    main()
