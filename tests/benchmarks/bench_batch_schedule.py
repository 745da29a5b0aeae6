"""Does a batch size that grows while training beat the best constant one? By hand; see README.md beside this file.

    python tests/benchmarks/bench_batch_schedule.py OUT.jsonl [WORKLOAD] [--halves H,...] [--trials N]
        [--kept N] [OPTION=VALUE]...

A trial that takes S steps and E examples costs E + h S, in the time of one example, on a device whose step takes
tau(B) = tau_1 (h + B): h is the batch size at which half a step is overhead. So every trial tells what it would have
cost on any device, whatever this machine does meanwhile. Three ways to choose are searched with as many trials each,
on one seed: a constant batch size, one that doubles three times, and one whose factor and switch points are free as
well. The best of each at each h (four, or --kept) run again on three seeds, and the best of those on five fresh ones.
OUT.jsonl keeps the trials: what it has is not run again.
"""

import argparse
import json
import math
import statistics
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from scipy.stats import qmc, t

from bstune.core.batch_schedule import BatchSchedule
from bstune.core.records import TrialSpec
from bstune.study.prepare import compose_checked
from bstune.system.console import quieten
from bstune.trial.loop import run_trial
from bstune.trial.workload import load

HALVES = "0,32,256,2048"  # h, in examples; 0 counts examples alone
AGAIN = (
    1,
    2,
    3,
)  # seeds of the best of the search, which has seed 0; the best of these runs on ...
FRESH = (4, 5, 6, 7, 8)  # ... these, of which the figures are
SWITCHES = 3
LEVEL = 0.9  # of the intervals of means over seeds


@dataclass(frozen=True)
class Point:
    """What is chosen of a trial."""

    way: str
    batch_size: int  # at the start
    lr: float
    factor: float = 1.0
    first_switch: int = 1  # in examples; each next one at twice as many
    lr_exponent: float = 0.5

    @property
    def schedule(self) -> BatchSchedule | None:
        if self.way == "constant":
            return None
        switches = tuple(self.first_switch * 2**i for i in range(SWITCHES))
        return BatchSchedule(self.factor, switches, 1.0, self.lr_exponent, None)


def log_between(share: float, low: float, high: float) -> float:
    return low * (high / low) ** share


def points(way, trials, config):
    """Return the points of a way's search, spread evenly over its ranges by a Sobol sequence of its own seed."""
    low, high = config.search.batch_size.low, config.search.batch_size.high
    examples, reference = config.budget.examples, config.scaling
    for b, r, f, s, e in qmc.Sobol(5, seed=3).random(64)[:trials].tolist():
        size = round(log_between(b, low, high))
        lr = reference.lr * math.sqrt(size / reference.batch_size) * 2 ** (3 * r - 1.5)
        if way == "constant":
            yield Point(way, size, lr)
            continue
        first = round(log_between(s, examples / 256, examples / 8))
        start = round(size / 2)  # the doubled sizes lie around the constant ones
        if way == "doubling":
            yield Point(way, start, lr / math.sqrt(2), 2.0, first)
        else:
            yield Point(way, start, lr / math.sqrt(2), log_between(f, 1.0, 4.0), first, e)


def cost(record, half):
    return (
        record["examples"] + half * record["steps"] if record["status"] == "reached" else math.inf
    )


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("workload", nargs="?", default="fashion_mlp")
    parser.add_argument("--halves", default=HALVES)
    parser.add_argument(
        "--trials", type=int, default=40, help="of the search of each way, at most 64"
    )
    parser.add_argument(
        "--kept", type=int, default=4, help="points of each way that run on further seeds"
    )
    own, options = parser.parse_known_args()
    quieten()
    config = compose_checked([f"workload={own.workload}", "mlflow.enabled=false", *options])
    prepared, protocol = load(config)
    protocol = replace(protocol, noise_scale_every=None)
    file, kept = own.out, {}
    for line in file.read_text().splitlines() if file.exists() else ():
        row = json.loads(line)
        kept[Point(**row["point"]), row["seed"]] = row

    def run(point, seed):
        if (point, seed) not in kept:
            spec = TrialSpec(0, 0, point.batch_size, point.lr, None, seed)
            schedule = point.schedule
            if schedule is not None:
                schedule = replace(schedule, largest=prepared.train_examples)
            record = run_trial(prepared, spec, replace(protocol, batch_schedule=schedule))
            row = {"point": asdict(point), "seed": seed, "sizes": record.batch_parts}
            row |= {name: getattr(record, name) for name in ("status", "steps", "examples")}
            kept[point, seed] = row
            with file.open("a") as stream:
                stream.write(json.dumps(row) + "\n")
        return kept[point, seed]

    ways = {way: list(points(way, own.trials, config)) for way in ("constant", "doubling", "tuned")}
    for number in range(own.trials):
        for way in ways:
            run(ways[way][number], 0)
    print("| h | way | start | lr | switches | steps | examples | cost | over constant |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- | --- |")
    for half in map(float, own.halves.split(",")):
        base = None
        for way, searched in ways.items():
            ranked = sorted(searched, key=lambda point: cost(kept[point, 0], half))[: own.kept]
            again = {point: [cost(run(point, seed), half) for seed in AGAIN] for point in ranked}
            best = min(ranked, key=lambda point: statistics.fmean(again[point]))
            rows = [run(best, seed) for seed in FRESH]
            costs = [math.log(cost(row, half)) for row in rows]
            mean, spread = (
                statistics.fmean(costs),
                statistics.stdev(costs) if math.isfinite(sum(costs)) else math.inf,
            )
            base = base or (mean, spread)
            error = (
                math.hypot(spread, base[1])
                * t.ppf((1 + LEVEL) / 2, 2 * len(FRESH) - 2)
                / math.sqrt(len(FRESH))
            )
            ratio = [math.exp(mean - base[0] + sign * error) for sign in (0, -1, 1)]
            steps, examples = ([row[name] for row in rows] for name in ("steps", "examples"))
            grown = [size for size, *_ in rows[0]["sizes"]]
            print(
                f"| {half:g} | {way} | {best.batch_size}{f' to {grown[-1]}' if grown else ''} | {best.lr:.3g} | "
                f"{'' if way == 'constant' else f'{best.factor:.2f}x from {best.first_switch:,}'} | "
                f"{min(steps)} to {max(steps)} | {min(examples):,} to {max(examples):,} | {math.exp(mean):,.0f} | "
                f"{'1' if way == 'constant' else f'{ratio[0]:.2f} ({ratio[1]:.2f} to {ratio[2]:.2f})'} |"
            )


if __name__ == "__main__":
    main()
