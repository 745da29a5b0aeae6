"""B_crit: its law is twice its floor there, ends that trials do not bound are open."""

import math

import numpy as np
import pytest
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
@pytest.mark.parametrize(
    "sizes, factor, low, high",
    [
        ((8, 16), 1.5, 8, None),  # all beyond the trials: an octave below the largest is claimed
        ((8, 16, 32), 8.0, 8, None),  # its high end lies over 4 times the largest
        ((256, 512), 1.5, None, 512),
        ((64,), 6.0, None, None),
    ],
)
def test_an_end_that_no_trial_bounds_is_open(sizes, factor, low, high):
    found = critical(sizes, 64.0, factor)
    assert (found.interval.value, found.s_min, found.linear_below) == (None, None, None)
    assert (found.interval.low, found.interval.high) == pytest.approx((low, high))


class Bent(Workload):
    """Its best rate rises up to batch size 64 and falls beyond; higher ones soon cost a lot."""

    def steps(self, batch_size, lr, seed=0):
        octaves = math.log2(lr / self.lr) + abs(math.log2(batch_size / 64))
        off = 2.0 * octaves**2 if octaves > 0.0 else 0.05 * octaves**2
        return self.s_min * (1.0 + self.b_crit / batch_size) * math.exp(off)


def test_a_grid_reads_it_off_what_it_measured():
    """The law of other rates, which these trials contradict, takes no part."""
    records = [record(0, role="baseline", batch_size=48, steps=300, steps_low=299)]
    for number in range(1, 50):
        proposal = propose_of_grid(QUESTION, SPACE, step_time, records)
        records.append(Bent(b_crit=60.0).train(number, proposal, records))
    plan = Plan(QUESTION, SPACE, baseline=None, trials=49, seeds=3, seed=0, sampler="grid")
    posterior = answer_posterior(plan, records)
    assert posterior.chains == tuple(best_of_grid(SPACE, records))
    assert [one.batch_size for one in posterior.chains] == [8, 16, 32, 64, 128, 256, 512]
    interval = critical_batch_size(posterior, records).interval
    assert interval.low < 60.0 < interval.high < 2.5 * interval.low
    assert interval.value == pytest.approx(60.0, rel=0.2)
