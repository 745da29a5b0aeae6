"""The objective ``curve``: which trial tells most of B_crit, and what a search of it finds."""

import math
from dataclasses import replace

import numpy as np
import pytest
from search_records import BUDGET, QUESTION, SPACE, Workload, step_time

from bstune.search.curve_decision import GIVE_UP, choose_for_curve
from bstune.search.decide import propose
from bstune.search.findings import b_crit_quantiles
from bstune.search.law import B_CRIT, LEVEL, NOISE, make_law
from bstune.search.posterior import Posterior, sample_posterior

CURVE = replace(QUESTION, objective="curve")


def posterior_of(columns, draws=4000):
    """Draws at the prior's means, but for some columns: mean and standard deviation of each."""
    law = make_law(SPACE, BUDGET, misfit=False)
    theta = np.tile(law.mean, (draws, 1))
    rng = np.random.default_rng(0)
    for column, (mean, deviation) in columns.items():
        theta[:, column] = mean + deviation * rng.standard_normal(draws)
    theta[:, NOISE] = math.log(0.1)
    return Posterior(law, theta, rows=None, chains=())


def choose(posterior, sizes, ran=None, cost_per_step=None):
    x = np.log2(np.array(sizes, dtype=float))
    z = posterior.law.best_rate(posterior.theta, x).mean(axis=0)
    ran = np.zeros(len(sizes)) if ran is None else np.array(ran, dtype=float)
    cost = np.ones(len(sizes)) if cost_per_step is None else np.array(cost_per_step)
    return choose_for_curve(posterior, x, z, ran, cost)


def test_the_middle_tells_nothing_where_the_level_is_known():
    # log S at the middle batch size, 64, is the level whatever B_crit is.
    posterior = posterior_of({B_CRIT: (0.0, 0.3), LEVEL: (4.0, 1e-6)})
    steps = np.exp(np.median(posterior.law.curve(posterior.theta, np.log2([8.0, 64, 512])), axis=0))
    equal_cost = 1.0 / steps
    assert choose(posterior, (8, 64, 512), cost_per_step=equal_cost)[0] != 1


def test_few_trials_are_preferred_to_many_cheap_ones():
    """Of 8 and 32 examples the first tells 4.03 times as much, at 4.35 times the steps' cost.

    A fifth of the least cost is added to both: 4.55/1.2 is less than 4.03.
    """
    posterior = posterior_of({B_CRIT: (0.0, 0.3), LEVEL: (4.0, 1e-6)})
    steps = np.exp(np.median(posterior.law.curve(posterior.theta, np.log2([8.0, 32.0])), axis=0))
    for ratio, chosen in ((4.35, 0), (5.5, 1)):
        assert choose(posterior, (8, 32), cost_per_step=[ratio, 1.0] / steps)[0] == chosen


def test_a_trial_stops_at_a_multiple_of_its_expected_steps_and_is_not_resumed_from_there():
    posterior = posterior_of({B_CRIT: (0.0, 0.3), LEVEL: (4.0, 1e-6)})
    chosen, last = choose(posterior, (8, 64))
    expected = math.exp(np.median(posterior.law.curve(posterior.theta, np.array([3.0]))))
    assert chosen == 0
    assert last == pytest.approx(GIVE_UP * expected)
    assert choose(posterior, (8, 8, 64), ran=[math.ceil(last), 0, 0])[0] == 1


def test_a_search_of_the_curve_finds_b_crit():
    workload = Workload(b_crit=40.0, noise=0.1)
    held = 0
    for seed in range(3):
        records = []
        for number in range(24):
            proposal = propose(CURVE, SPACE, step_time, records, seed)
            records.append(workload.train(number, proposal, records))
        posterior = sample_posterior(CURVE, SPACE, records, seed=seed, misfit=True, draws=400)
        low, _, high = b_crit_quantiles(posterior)
        held += low <= 40.0 <= high
        assert high / low < 3.0
        sizes = [one.batch_size for one in records if one.reached]
        assert min(sizes) <= 40 / 3
        assert max(sizes) >= 40 * 3
    assert held >= 2
