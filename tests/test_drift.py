"""How far behind a trial will be at its budget's end: closed forms of a normal prior and of normal errors."""

import math
from dataclasses import replace

import numpy as np
import pytest

from bstune.search.budget_runs import BudgetRun
from bstune.search.drift import (
    DRIFT_MISREAD,
    RATE_DRIFT,
    SIZE_DRIFT,
    fit_drift,
    stopped_spread,
)
from bstune.search.ruler import Ruler, RunningBest
from bstune.search.sampler import default_policy

POLICY = replace(default_policy(), loss_first_share=0.125, loss_spread=0.1, loss_drift=0.3)
# The first share is an eighth: this is log(1/s) there.
LEFT = math.log(8.0)
# It has the height -log s at the share s.
RULER = Ruler(np.array([-5.0, 0.0]), np.array([5.0, 0.0]), slope=1.0, first_slope=1.0)


def full_run(x=7.0, z=-3.0, then=0.0, behind=0.0, log_shares=(-LEFT, 0.0)):
    """A full trial that is so far behind the ruler at its first evaluation, and at the end."""
    heights = np.array([then - log_shares[0], behind])
    curve = RunningBest(np.array(log_shares), heights)
    return BudgetRun(0, x, z, (), 1000, 1.0, False, curve, behind)


@pytest.mark.parametrize("left", [0.0, 0.5, LEFT])
@pytest.mark.parametrize(("octaves", "of_rate"), [(0.0, 0.0), (2.0, 0.0), (-1.0, 3.0)])
def test_without_other_full_trials_it_is_the_prior(left, octaves, of_rate):
    drift = fit_drift([full_run()], RULER, POLICY)
    mean, variance = drift.until_the_end(full_run(7.0 + octaves, -3.0 + of_rate), left)
    assert mean == pytest.approx(left * (octaves * SIZE_DRIFT[0] + of_rate * RATE_DRIFT[0]))
    scatter = (octaves * SIZE_DRIFT[1]) ** 2 + (of_rate * RATE_DRIFT[1]) ** 2
    assert variance == pytest.approx(left**2 * scatter)


@pytest.mark.parametrize("then", [-0.4, 0.0, 0.6])
@pytest.mark.parametrize("behind", [-0.2, 0.3])
@pytest.mark.parametrize("count", [1, 20])
def test_a_full_trial_at_another_batch_size_shows_how_behind_moves(then, behind, count):
    trials = [full_run(9.0, then=then, behind=behind)] * count
    drift = fit_drift([full_run(), *trials], RULER, POLICY)
    misread = DRIFT_MISREAD * max(then, behind, 0.0)
    variance = stopped_spread(LEFT, POLICY) ** 2 + misread**2
    away = 2.0 * LEFT
    prior_precision = SIZE_DRIFT[1] ** -2
    precision = prior_precision + count * away**2 / variance
    shown = count * away * (behind - then) / variance
    expected = (prior_precision * SIZE_DRIFT[0] + shown) / precision
    assert drift.mean == pytest.approx([expected, RATE_DRIFT[0]])
    assert drift.covariance == pytest.approx(np.diag([1.0 / precision, RATE_DRIFT[1] ** 2]))


@pytest.mark.parametrize(
    "silent",
    [
        # It was first evaluated after that share.
        full_run(9.0, behind=1.0, log_shares=(-0.5, 0.0)),
        replace(full_run(9.0, behind=1.0), curve=None),
        replace(full_run(9.0, then=1.0), behind=None),
    ],
)
def test_a_trial_that_does_not_say_where_it_was_changes_nothing(silent):
    with_it = fit_drift([full_run(), silent], RULER, POLICY)
    without = fit_drift([full_run()], RULER, POLICY)
    assert with_it.mean.tolist() == without.mean.tolist()


def test_what_a_trial_wanders_grows_with_what_is_left_of_its_budget():
    assert stopped_spread(0.0, POLICY) == pytest.approx(0.1)
    # 0.3 sqrt(4) = 0.6.
    assert stopped_spread(4.0, POLICY) == pytest.approx(math.hypot(0.1, 0.6))
