"""B_crit: its law is twice its floor there, ends that trials do not bound are open."""

import math
from dataclasses import replace

import numpy as np
import pytest
from results import curve as drawn_curve
from search_records import QUESTION, SPACE, TARGET, Workload, record, step_time

from bstune.core.space import Space
from bstune.search.findings import CurvePoint, curve, curve_sizes
from bstune.search.law import B_CRIT, make_law
from bstune.search.posterior import Posterior, rows_of, sample_posterior
from bstune.study.critical import best_s_min, critical_batch_size
from bstune.study.result import Critical


def critical(
    sizes: tuple[int, ...], b_crit: float, factor: float, space: Space = SPACE
) -> Critical:
    """B_crit of draws, 90% of them within a factor, where trials of some sizes reached."""
    records = [record(number, batch_size=size) for number, size in enumerate(sizes)]
    law = make_law(space, QUESTION.budget, misfit=False)
    theta = np.tile(law.mean, (2001, 1))
    log_b_crit = math.log(b_crit / 2**law.middle)
    theta[:, B_CRIT] = log_b_crit + np.linspace(-1.0, 1.0, 2001) * math.log(factor) / 0.9
    posterior = Posterior(law, theta, rows_of(records, TARGET), tuple(records))
    points = curve(posterior, step_time, curve_sizes(space))
    return critical_batch_size(posterior, records, points)


def test_the_law_that_fits_a_curve_on_the_law_is_that_law():
    # S*(B) = 26 (1 + 130/B).
    assert best_s_min(drawn_curve(), 130.0) == pytest.approx(26.0)


def test_the_law_fits_best_in_log_steps():
    points = [
        CurvePoint(
            batch_size=size, steps=steps, steps_low=1, steps_high=1, lr=1, lr_low=1, lr_high=1,
            step_seconds=1,
        )
        for size, steps in ((10.0, 300.0), (40.0, 150.0), (160.0, 90.0))
    ]  # fmt: skip

    def squares(s_min: float) -> float:
        off = [math.log(it.steps / (s_min * (1.0 + 40.0 / it.batch_size))) for it in points]
        return sum(one**2 for one in off)

    best = best_s_min(points, 40.0)
    assert squares(best) < min(squares(0.99 * best), squares(1.01 * best))


def test_regimes_and_the_law_go_with_the_printed_value():
    found = critical((8, 32, 128, 512), 64.0, 1.5)
    value = found.interval.value
    assert (found.interval.low, value, found.interval.high) == pytest.approx((64 / 1.5, 64, 96))
    assert (found.linear_below, found.no_gain_above) == pytest.approx((64 / 9, 576))
    assert found.s_min is not None
    assert (found.smallest, found.largest) == (8, 512)


# Trials that reached, B_crit and its factor of uncertainty -> low and high of the interval.
OPEN = [
    ((8, 16), 64.0, 1.5, 16, None),  # all beyond the trials: no more than the largest is claimed
    ((8, 16, 32), 24.0, 8.0, 3, None),  # its high end, 192, lies over 4 times the largest
    ((256, 512), 64.0, 1.5, None, 256),
    ((64, 512), 64.0, 6.0, None, 384),
    ((64,), 64.0, 6.0, None, None),
]


@pytest.mark.parametrize(("sizes", "b_crit", "factor", "low", "high"), OPEN)
def test_an_end_that_no_trial_bounds_is_open(sizes, b_crit, factor, low, high):
    found = critical(sizes, b_crit, factor)
    assert found.interval.value is None
    assert (found.s_min, found.linear_below, found.no_gain_above) == (None, None, None)
    for end, expected in ((found.interval.low, low), (found.interval.high, high)):
        assert (end is None) == (expected is None)
        assert end is None or end == pytest.approx(expected)


# Batch sizes of the trials, all on the law with B_crit 40 and noise, and which ends are open.
WINDOWS = [
    ((8, 11, 16, 32, 64, 128, 256, 512), ()),
    ((8, 9, 10, 11), ("high",)),
    ((256, 320, 400, 512), ("low",)),
]


@pytest.mark.parametrize(("sizes", "open_ends"), WINDOWS)
@pytest.mark.parametrize("seed", range(4))
def test_ends_of_synthetic_studies_hold_the_truth(sizes, open_ends, seed):
    workload = Workload(b_crit=40.0, noise=0.1)
    records = []
    for number, size in enumerate(3 * sizes):
        lr = 0.1 * math.sqrt(size / 64)
        steps = round(workload.steps(size, lr, seed=100 * seed + number))
        records.append(
            record(number, batch_size=size, lr=lr, steps=steps, steps_low=int(0.97 * steps))
        )
    posterior = sample_posterior(
        QUESTION, SPACE, records, seed=seed, misfit=True, draws=300, moves=4
    )
    points = curve(posterior, step_time, curve_sizes(SPACE))
    interval = critical_batch_size(posterior, records, points).interval
    assert all(getattr(interval, end) is None for end in open_ends)
    assert (interval.value is None) == bool(open_ends)
    assert (interval.low or 0.0) < 40.0 < (interval.high or math.inf)


def test_where_the_curve_is_told_at_no_batch_size_among_the_trials_all_of_it_counts():
    space = replace(SPACE, multiple=256, low=256, high=512)
    found = critical((300, 310), 300.0, 1.01, space)
    assert found.s_min is not None
