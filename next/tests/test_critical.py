"""B_crit: its law is twice its floor there, ends that trials do not bound are open."""

import math

import numpy as np
import pytest
from refusals import cases
from search_records import BUDGET, QUESTION, SPACE, TARGET, Workload, record, step_time

from bstune.search.grid import best_of_grid, propose_of_grid
from bstune.search.law import B_CRIT, make_law
from bstune.search.posterior import Posterior, rows_of
from bstune.study.critical import critical_batch_size
from bstune.study.estimates import answer_posterior
from bstune.study.plan import Plan


def critical(sizes, b_crit, factor):
    """B_crit of draws, 90% of them within a factor, where trials of some sizes reached."""
    records = [record(number, batch_size=size) for number, size in enumerate(sizes)]
    law = make_law(SPACE, BUDGET, misfit=False)
    theta = np.tile(law.mean, (2001, 1))
    log_b_crit = math.log(b_crit / 2**law.middle)
    theta[:, B_CRIT] = log_b_crit + np.linspace(-1.0, 1.0, 2001) * math.log(factor) / 0.9
    posterior = Posterior(law, theta, rows_of(records, TARGET), tuple(records))
    return critical_batch_size(posterior, records)


def test_the_law_is_fitted_over_all_batch_sizes_that_reached():
    """The misfit tilts the curve about the middle, by 10% at both ends: S_min stays the law's."""
    records = [record(number, batch_size=size) for number, size in enumerate((8, 64, 512))]
    law = make_law(SPACE, BUDGET, misfit=True)
    theta = np.array(
        [[math.log(200), 0.0, 0.0, 0.0, -1.0, 0.2, -2.0, 0.0, -0.1, -0.05, 0.0, 0.05, 0.1]]
    )
    posterior = Posterior(law, theta, rows_of(records, TARGET), tuple(records))
    # 200 steps at 64 examples, which B_crit is.
    assert critical_batch_size(posterior, records).s_min == pytest.approx(100.0)


def test_regimes_and_the_law_go_with_the_printed_value():
    found = critical((8, 32, 128, 512), 64.0, 1.5)
    ends = found.interval.low, found.interval.value, found.interval.high
    assert ends == pytest.approx((64 / 1.5, 64, 96))
    assert (found.linear_below, found.no_gain_above) == pytest.approx((64 / 9, 576))
    assert (found.smallest, found.largest) == (8, 512)


# Trials that reached, B_crit's factor of uncertainty about 64 -> low and high of the interval.
@cases("""
sizes | factor | low | high
# All beyond the trials: an octave below the largest is claimed.
[8, 16] | 1.5 | 8 | null
# Its high end lies over 4 times the largest.
[8, 16, 32] | 8.0 | 8 | null
[256, 512] | 1.5 | null | 512
[64] | 6.0 | null | null
""")
def test_an_end_that_no_trial_bounds_is_open(sizes, factor, low, high):
    found = critical(sizes, 64.0, factor)
    assert (found.interval.value, found.s_min, found.linear_below) == (None, None, None)
    assert (found.interval.low, found.interval.high) == (
        low and pytest.approx(low),
        high and pytest.approx(high),
    )


def test_of_a_grid_the_best_of_each_batch_size_counts():
    """The law of other rates takes no part."""
    records = []
    for number in range(30):
        proposal = propose_of_grid(QUESTION, SPACE, step_time, records)
        records.append(Workload().train(number, proposal, records))
    plan = Plan(QUESTION, SPACE, baseline=None, trials=30, seeds=3, seed=0, sampler="grid")
    assert answer_posterior(plan, records).chains == tuple(best_of_grid(SPACE, records))
