"""Gate *further values*: two values beside batch size and rate, in counted costs, no clock.

    python tests/benchmarks/further_values.py [--seeds 10] [--kinds parabolas] [--samplers tpe]

A row is a search, by bstune or by Optuna's TPE with its MedianPruner, of the least time on a
synthetic law: batch sizes 8 to 4,096, rates of 12 octaves, a momentum and a weight decay. It has
what had been spent at the first hit, and how many times the best cell's time its choice takes after
5, 10, 20 and 40 times what that cell costs, without noise. It holds where the median of bstune is
at most 1.10 after 20 times. The kinds of laws:

- parabolas: log S rises by a parabola in the coordinate of each value;
- coupled: the best rate falls as 1 - momentum, too;
- one-sided: weight decay below its best costs nothing.
"""

import math
import statistics
from dataclasses import dataclass, replace
from functools import cache, cached_property

import numpy as np
import optuna
from common import (
    MULTIPLES,
    Problem,
    add_rows,
    jobs_of,
    parser,
    path_of,
    ratio_after,
    read_rows,
    trial_seed,
)
from synthetic import draw_law, law_table

from bstune.core.records import Spec
from bstune.core.space import Tunable

TUNABLES = (Tunable("momentum", 0.5, 0.98), Tunable("weight_decay", 1e-6, 1e-2))
KINDS = ("parabolas", "coupled", "one-sided")
SAMPLERS = ("bstune", "tpe")
LIMIT = 1.10
LIMIT_AT = 20.0
# Steps at which TPE's trials report, so far apart in ratio: the pruner compares equal steps.
REPORTS = 1.2


@dataclass(frozen=True)
class FurtherValues(Problem):
    """A law's problem with two further values.

    Args:
        best: their best coordinates.
        widths: coordinates from there at which log S has risen by 1/2.
        slope: octaves that the best rate rises by over the first value's range.
        is_one_sided: whether the second one costs nothing below its best.
    """

    best_places: tuple[float, float] = (0.5, 0.5)
    widths: tuple[float, float] = (0.5, 0.5)
    slope: float = 0.0
    is_one_sided: bool = False

    @cached_property
    def space(self):
        """All of the table, and the values' ranges."""
        return replace(super().space, tunables=TUNABLES)

    def law_at(self, values):
        """The law over batch size and rate at some values."""
        off = np.subtract(self.space.places(values), self.best_places)
        moved = 2.0 ** (self.slope * off[0])
        if self.is_one_sided:
            off[1] = max(off[1], 0.0)
        cost = math.exp(0.5 * ((off / self.widths) ** 2).sum())
        law = self.table.law
        return replace(law, s_min=law.s_min * cost, lr=law.lr * moved)

    def outcome(self, spec):
        """How a trial ends."""
        table = replace(self.table, law=self.law_at(spec.values))
        return table.outcome(spec.batch_size, spec.lr, spec.seed, self.table.target)

    def ratio_of(self, chosen):
        """How many times the best cell's time a configuration takes, without noise."""
        steps = self.law_at(chosen.values).steps(chosen.batch_size, chosen.lr)
        if steps is None:
            return math.inf
        return steps * self.step_time(chosen.batch_size) / self.best[2]


@cache
def problem_of(kind, seed):
    """The problem of a kind and a seed."""
    rng = np.random.default_rng([seed, 7])
    slope = 0.0
    if kind == "coupled":
        slope = math.log2((1.0 - TUNABLES[0].high) / (1.0 - TUNABLES[0].low))
    return FurtherValues(
        law_table(draw_law("noise 10%", seed)),
        best_places=tuple(rng.uniform(0.15, 0.85, 2)),
        widths=tuple(rng.uniform(0.25, 0.75, 2)),
        slope=slope,
        is_one_sided=kind == "one-sided",
    )


def tpe_path(problem, seed):
    """As :func:`common.path_of`, by Optuna's TPE: trials run to the target, pruned by medians."""
    sampler = optuna.samplers.TPESampler(seed=seed)
    study = optuna.create_study(sampler=sampler, pruner=optuna.pruners.MedianPruner())
    best = (math.inf, None)
    path = []
    spent = 0.0
    number = 0
    while True:
        trial = study.ask()
        spec = suggested(problem, trial, trial_seed(seed, number))
        steps, has_reached = trained(problem, trial, spec)
        cost = steps * problem.step_time(spec.batch_size)
        spent += cost / problem.best[2]
        if spent > MULTIPLES[-1]:
            break
        number += 1
        if has_reached:
            study.tell(trial, cost)
            best = min(best, (cost, spec), key=lambda one: one[0])
            path.append((spent, problem.ratio_of(best[1])))
        else:
            study.tell(trial, state=optuna.trial.TrialState.PRUNED)
    return {
        "trials": number,
        "first": path[0][0] if path else None,
        "ratios": [ratio_after(path, multiple) for multiple in MULTIPLES],
    }


def suggested(problem, trial, seed):
    """A trial's configuration; TPE searches the same coordinates as bstune."""
    space = problem.space
    size = trial.suggest_int("batch_size", space.low, space.high, log=True)
    lr = trial.suggest_float("lr", space.lr_low, space.lr_high, log=True)
    places = [trial.suggest_float(one.name, 0.0, 1.0) for one in space.tunables]
    return Spec(
        number=trial.number, place=f"search/{trial.number}", role="search", batch_size=size, lr=lr,
        values=space.values_at(places), seed=seed,
        max_steps=problem.question.budget.last_step(size),
    )  # fmt: skip


def trained(problem, trial, spec):
    """Steps that a trial takes, and whether it reached the target."""
    outcome = problem.outcome(spec)
    last = min(outcome.end, spec.max_steps)
    at = 10
    for step, value in outcome.history:
        if step > last:
            break
        while at <= step:
            trial.report(value, at)
            if trial.should_prune():
                return at, False
            at = max(at + 1, round(at * REPORTS))
    return last, outcome.steps is not None and outcome.steps <= last


def measure(kind, sampler, seed):
    """One search."""
    problem = problem_of(kind, seed)
    return path_of(problem, seed) if sampler == "bstune" else tpe_path(problem, seed)


def main():
    options = parser(__doc__, "further_values.jsonl", seeds=10)
    options.add_argument("--kinds", nargs="+", default=KINDS)
    options.add_argument("--samplers", nargs="+", default=SAMPLERS)
    given = options.parse_args()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    seeds = range(given.seeds)
    add_rows(given, jobs_of(seed=seeds, kind=given.kinds, sampler=given.samplers), measure)
    for line in summary(read_rows(given.rows)):
        print(*line, sep="   ")
    print(f"bstune's medians are to be at most {LIMIT:.2f} after {LIMIT_AT:g} times")


def summary(rows):
    """Each kind of law, with median/90th percentile after ``MULTIPLES`` of each sampler."""
    for kind in KINDS:
        told = []
        for sampler in SAMPLERS:
            own = [
                row["ratios"] for row in rows if (row["kind"], row["sampler"]) == (kind, sampler)
            ]
            both = []
            for ratios in zip(*own, strict=True):
                known = [ratio or math.inf for ratio in ratios]
                ninety = np.quantile(known, 0.9, method="inverted_cdf")
                both.append(f"{statistics.median(known):.2f}/{ninety:.2f}")
            told.append(", ".join(both))
        yield kind, *told


if __name__ == "__main__":
    main()
