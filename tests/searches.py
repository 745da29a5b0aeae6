"""Problems posed by small tables, and a search that follows a script."""

import math
from dataclasses import replace

from synthetic import Law, synthetic_table

from bstune.core.records import Target, TrialResult, TrialSpec
from bstune.sweeps.search_problem import Search, make_benchmark, run_search
from bstune.trial.recorded_run import Run
from bstune.trial.replay import Table

TARGET = Target("error", 0.1, "min")


def recorded(batch_size, lr, reached, tau=1.0, seed=0, end=1000, diverged=False):
    """A run that meets the target at step ``reached``, or misses it up to step ``end``."""
    last = end if reached is None else reached
    return Run(
        batch_size,
        lr,
        seed,
        (last // 2, last),
        (0.5, 0.5 if reached is None else 0.05),
        tau,
        diverged=diverged,
    )


# B 40 is fastest with 50 s; the budget is 4 x 50 = 200 steps or 8000 examples, 800 steps at B 10.
TABLE = Table(
    (recorded(10, 0.1, 100), recorded(10, 1.0, None), recorded(40, 0.1, 50), recorded(40, 1.0, 80))
)
# B_crit = 400, S_min = 200: 10200, 1450, 600, 400, 300 steps at B 8, 64, 200, 400, 800
CURVE = synthetic_table(
    Law(exponent=0.0, overhead=1.0, per_example=1e-9), (8, 64, 200, 400, 800), (0.05, 0.1, 0.2)
)


class Scripted(Search):
    """Proposes the given (batch size, lr, max_steps, resumed_from), then the first again and again."""

    def __init__(self, *script, **changes):
        self.script = script
        self.changes = changes
        self.asked_for_b_crit: list[int] = []

    def propose(self, finished):
        n = len(finished)
        size, lr, *rest = self.script[n] if n < len(self.script) else self.script[0]
        max_steps, resumed_from = rest or (None, None)
        return replace(TrialSpec(n, n, size, lr, None, 0, max_steps, resumed_from), **self.changes)

    def b_crit(self, finished):
        self.asked_for_b_crit.append(len(finished))
        return 100.0 * len(finished) or None


def posed(table=TABLE, objective="time", **factors):
    return make_benchmark("t", table, TARGET, objective, **factors)


def first_trials(search, benchmark, count):
    """The results of the first ``count`` trials of a search."""
    kept: list[TrialResult] = []
    # The incumbent is asked for after each trial.
    search.incumbent = lambda finished: kept.append(finished[-1])
    run_search(search, benchmark, (math.inf,), count)
    return kept
