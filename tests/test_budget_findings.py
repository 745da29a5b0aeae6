"""What a fixed-budget search finds: when its winner has the baseline's metric, and how batch sizes grow."""

import math
from dataclasses import replace

import numpy as np
import pytest
from test_fixed_budget import HIGH, read, trial
from test_ruler import ERROR, LAST, history, power

from bstune.search.budget_findings import (
    BUDGET_SHARES,
    findings_of,
    gain_left_of,
    share_to_match,
    size_growth,
)
from bstune.search.fixed_budget import rank_full_trials
from bstune.search.frontier_law import B_CRIT, B_OPT, NOISE, frontier, log_steps
from bstune.search.ruler import RunningBest, running_best


def test_when_the_winner_has_what_the_baseline_ends_with():
    baseline = running_best(history(power(2.5)), LAST, ERROR)
    winner = running_best(history(power(1.0)), LAST, ERROR)
    # The baseline's end is the winner's at 1/2.5 of its budget.
    assert share_to_match([winner], [baseline]) == pytest.approx(0.4, rel=0.01)
    assert share_to_match([baseline], [winner]) is None
    assert share_to_match([], [baseline]) is None
    # Two seeds count by their geometric mean: 0.5 x 2 = 1.
    seeds = [
        running_best(history(power(0.5)), LAST, ERROR),
        running_best(history(power(2.0)), LAST, ERROR),
    ]
    assert share_to_match(seeds, [baseline]) == pytest.approx(0.4, rel=0.01)
    # It was better from its first evaluation on, at a quarter.
    at_once = RunningBest(np.log([0.25, 1.0]), np.array([-9.0, -9.0]))
    assert share_to_match([at_once], [baseline]) == pytest.approx(0.25)


def certain(share):
    """A posterior without doubt: S = 1 + B_crit/B, tau = 1 + B/128.

    B_crit is 1024 times the share. S(B) tau(B) is least at B = sqrt(128 B_crit).
    """
    posterior = read([trial(0, power(1.0))])
    theta = np.repeat(posterior.prior.mean[None], 5, axis=0)
    # The prior centres B_crit on the middle of the batch sizes.
    theta[:, B_CRIT] = math.log(1024.0 * share) - posterior.prior.log_mid * math.log(2.0)
    # A small-batch term of e^-30 is none.
    theta[:, B_OPT] = -30.0
    return replace(
        # The budget of seconds over tau(B).
        posterior,
        theta=theta,
        budget=lambda batch_size: share * 1e6 / (1.0 + batch_size / 128.0),
    )


def test_how_the_best_batch_size_grows_with_the_budget():
    growth = size_growth({share: certain(share) for share in BUDGET_SHARES})
    # B = sqrt(128 B_crit), and B_crit grows as the share.
    assert growth.exponent == pytest.approx(0.5, abs=0.02)
    # Without doubt the interval is a point.
    assert (growth.low, growth.high) == pytest.approx((growth.exponent, growth.exponent))
    expected = np.sqrt(128.0 * 1024.0 * np.array(BUDGET_SHARES))
    found = [best.batch_size for best in growth.best_sizes]
    # Optima are sought at 16 batch sizes per octave: 2^(1/16) = 1.044.
    assert found == pytest.approx(expected, rel=0.04)
    assert True not in {best.at_end for best in growth.best_sizes}
    # At four times the budget sqrt(4) times the batch.
    assert growth.longer.batch_size == pytest.approx(2.0 * expected[0], rel=0.05)
    assert growth.longer.share == 4.0
    # A single budget has no growth.
    assert size_growth({1.0: certain(1.0)}) is None


def test_a_best_batch_size_at_the_end_of_those_searched_is_said():
    # B_crit so large that all that was searched lies below the best.
    growth = size_growth({1.0: certain(1e6), 0.5: certain(1e6)})
    for best in growth.best_sizes:
        assert best.at_end
    assert len(growth.best_sizes) == 2
    found = findings_of({1.0: certain(1e6)})
    assert (found.as_good.high, found.as_good.high_open) == (HIGH, True)
    assert not found.as_good.low_open
    assert found.growth is None


@pytest.mark.parametrize(
    ("metrics", "same"),
    [
        # At chance throughout: nothing says which budget would show a difference.
        ([lambda share: 0.9, lambda share: 0.9], (0.9, None)),
        # Both come to the same, one of them later.
        ([lambda share: 0.1, lambda share: 0.1 + 0.2 * (share < 0.2)], (0.1, 0.01)),
        (
            [lambda share: 0.3 - 0.2 * (share > 0.2), lambda share: 0.3 - 0.2 * (share > 0.4)],
            # Between a fifth and two fifths one of them was ahead; the larger is what shows it.
            (0.1, 0.2),
        ),
        ([power(1.0), power(2.0)], None),
        ([power(1.0)], None),
    ],
)
def test_the_smallest_budget_that_shows_a_difference(metrics, same):
    trials = [trial(number, metric, 64 + number) for number, metric in enumerate(metrics)]
    found = findings_of({1.0: read(trials)})
    # Runs of one batch size and learning rate say nothing of others.
    at_one_point = [trial(number, metric) for number, metric in enumerate(metrics)]
    assert findings_of({1.0: read(at_one_point)}).no_difference is None
    if same is None:
        assert found.no_difference is None
        return
    assert found.no_difference.metric == pytest.approx(same[0])
    if same[1] is None:
        assert found.no_difference.differs_at is None
    else:
        # Evaluations are 1.105 apart.
        assert found.no_difference.differs_at == pytest.approx(same[1], rel=0.11)


def test_what_is_left_to_gain_is_the_laws_own_difference_whatever_luck_a_trial_had():
    """Of a law that is known: from its place to the best batch size and rate, along the ruler's slope."""
    found = certain(1.0)
    # One draw is a law that is known.
    known = replace(found, theta=found.theta[:1])
    left = gain_left_of(known)
    run = known.runs[0]
    places = known.prior.points_at(np.array([run.x]), np.array([run.z]))
    now = log_steps(known.theta, places, known.prior)[0] - known.log_budget(np.array([run.x]))
    # At 200 batch sizes the least of the frontier.
    x = np.linspace(known.prior.log_low, known.prior.log_high, 200)
    least = frontier(known.theta, known.prior.points_at(x), known.prior)[0] - known.log_budget(x)
    noise = math.exp(float(known.theta[0, NOISE]))
    # Behind by its place, at the best place, and with a standard deviation of luck.
    behind = np.array([now[0], least.min(), now[0] - noise])
    own, best, luckier = known.scale.metric(known.ruler.height(-behind)).tolist()
    assert left.at_most == pytest.approx(own - best, rel=0.02)
    assert left.next_point == pytest.approx(left.at_most, rel=1e-6)
    assert left.seed_scatter == pytest.approx(own - luckier, rel=1e-6)
    # A trial with luck lies ahead of its law, which changes nothing of what is left.
    lucky = replace(known, data=replace(known.data, y=known.data.y - 0.3))
    assert rank_full_trials(lucky)[0].behind < rank_full_trials(known)[0].behind - 0.2
    assert gain_left_of(lucky) == left
