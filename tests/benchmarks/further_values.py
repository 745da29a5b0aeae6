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
from functools import cache, cached_property, partial

import numpy as np
import optuna
from common import run_gate, search_row
from synthetic import draw_law, law_table

from bstune.core.space import Tunable
from bstune.sweeps.search_benchmark import Problem, by_bstune, by_optuna

TUNABLES = (Tunable("momentum", 0.5, 0.98), Tunable("weight_decay", 1e-6, 1e-2))
KINDS = ("parabolas", "coupled", "one-sided")


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

    def outcome(self, asked, seed):
        """How a trial ends."""
        table = replace(self.table, law=self.law_at(asked.values))
        return table.outcome(asked.batch_size, asked.lr, seed, self.target)

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


# TPE's trials run to the target, or are pruned by medians.
SEARCHES = {
    "bstune": by_bstune,
    "tpe": partial(by_optuna, sampler=optuna.samplers.TPESampler, patience=math.inf),
}


def measure(kind, sampler, seed):
    """One search."""
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    return search_row(problem_of(kind, seed), seed, SEARCHES[sampler])


def summary(rows):
    """Each kind of law, with median/90th percentile after ``MULTIPLES`` of each sampler."""
    for kind in KINDS:
        told = []
        for sampler in SEARCHES:
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
    run_gate(
        __doc__,
        "further_values.jsonl",
        measure,
        summary,
        seeds=10,
        kinds=("kind", KINDS),
        samplers=("sampler", (*SEARCHES,)),
    )
