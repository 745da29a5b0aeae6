"""Intervals of the speedup and of times, over synthetic studies whose truth is known.

    python tests/benchmarks/speedup.py [--seeds 500]

A study has 1 to 6 new seeds of a best configuration and of a baseline: steps to target are
lognormal over seeds, and seen at evaluations up to 40% of them apart. Runs of the best end at 4
times its median, and in two of three studies those of the baseline at 4 times the best's. In one of
four studies some seeds never reach. The deviation over seeds is known to a factor of about 1.3 from
the search, and each step time with its error. A line is a study.
"""

import json
import math

import numpy as np
from common import add_rows, parser, read_rows
from scipy.stats import norm

from bstune.core.records import Record
from bstune.study.confirm import Run, median_interval, median_run, pooled_deviation, speedup_of
from bstune.study.new_seeds import NEW_SEED_LIMIT


def run_of(steps, apart, limit, tau):
    """A run of so many steps, evaluated every ``apart`` steps; its value in seconds."""
    evaluated = apart * math.ceil(steps / apart) if math.isfinite(steps) else math.inf
    reached = evaluated <= limit
    ended = int(evaluated if reached else limit)
    record = Record(
        number=0, place="seed/0/0", role="new seed", batch_size=1, lr=1, seed=0, max_steps=limit,
        status="reached" if reached else "pruned", steps=ended, steps_low=max(ended - apart, 0),
    )  # fmt: skip
    return Run(record.steps_to_target * tau, reached, record.steps_error)


def study(seed):
    """A study's claims and truths."""
    rng = np.random.default_rng(seed)
    seeds = int(rng.integers(1, 7))
    median = {"best": 10 ** rng.uniform(1.5, 3)}
    median["baseline"] = median["best"] * 2.0 ** rng.uniform(-0.5, 3.5)
    deviation = math.exp(rng.uniform(math.log(0.05), math.log(0.4)))
    expected = deviation * math.exp(rng.normal(0, 0.25))
    tau_error = rng.choice([0.0, 0.05, 0.1])
    misses = rng.choice([0.0, 0.0, 0.0, 0.15])
    stops = rng.random() < 2 / 3
    runs, truth = {}, {}
    for name in ("best", "baseline"):
        tau = math.exp(rng.normal(0, tau_error))
        apart = max(1, round(rng.choice([0.05, 0.05, 0.2, 0.4]) * median[name]))
        steps = np.ceil(median[name] * np.exp(deviation * rng.standard_normal(seeds)))
        steps[rng.random(seeds) < misses] = math.inf
        limit = NEW_SEED_LIMIT * median[name]
        if name == "baseline" and stops:
            limit = NEW_SEED_LIMIT * median_run(runs["best"])[0]
        runs[name] = [run_of(one, apart, math.ceil(limit), 1.0) for one in steps]
        # The median over all seeds, those that never reach included.
        truth[name] = median[name] * math.exp(deviation * norm.ppf(0.5 / (1 - misses))) * tau
    reached = [[math.log(run.value) for run in runs[name] if run.reached] for name in runs]
    pooled = pooled_deviation(reached, expected)
    row = {"seeds": seeds, "truth": truth["baseline"] / truth["best"], "speedup": None}
    if not median_run(runs["best"])[1]:
        error = math.sqrt(2.0) * tau_error
        found = speedup_of(runs["best"], runs["baseline"], pooled, error)
        row["speedup"] = found.model_dump()
    row["time"] = [*median_interval(runs["best"], pooled, tau_error), truth["best"]]
    # Five digits are enough to tell whether an interval holds.
    return json.loads(json.dumps(row), parse_float=lambda digits: float(f"{float(digits):.5g}"))


def holds(low, high, truth):
    return low <= truth and (high is None or truth <= high)


def summary(rows):
    claims = [(row["speedup"], row["truth"]) for row in rows if row["speedup"]]
    kinds = {
        "speedup": [one for one in claims if not one[0]["at_least"]],
        "at least": [one for one in claims if one[0]["at_least"]],
    }
    for kind, of_kind in kinds.items():
        hits = [holds(speedup["low"], speedup["high"], truth) for speedup, truth in of_kind]
        off = [math.log(speedup["value"] / truth) for speedup, truth in of_kind]
        print(f"{kind}: {sum(hits)} of {len(hits)} ({100 * np.mean(hits):.0f}%) hold the truth; "
              f"the median stated is {math.exp(np.median(off)):.2f} times it")  # fmt: skip
    times = [row["time"] for row in rows if row["time"][1] is not None]
    hits = [holds(*time) for time in times]
    print(f"time: {sum(hits)} of {len(hits)} ({100 * np.mean(hits):.0f}%)")


def main():
    options = parser(__doc__, "speedup.jsonl", 500).parse_args()
    add_rows(options, ({"seed": seed} for seed in range(options.seeds)), study)
    summary(read_rows(options.rows))


if __name__ == "__main__":
    main()
