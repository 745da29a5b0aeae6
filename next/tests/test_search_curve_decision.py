"""The objective ``curve``: which trial tells most of B_crit, and what a search of it finds."""

import math

import numpy as np
import pytest
from search_records import BUDGET, SPACE

from bstune.search.curve_decision import GIVE_UP, choose_for_curve
from bstune.search.law import B_CRIT, LEVEL, make_law
from bstune.search.posterior import Posterior


def test_a_trial_stops_at_a_multiple_of_its_expected_steps_and_is_not_resumed_from_there():
    """Draws at the prior's means, but for B_crit; what the middle batch size takes is known."""
    law = make_law(SPACE, BUDGET, misfit=False)
    theta = np.tile(law.mean, (4000, 1))
    theta[:, B_CRIT] = 0.3 * np.random.default_rng(0).standard_normal(4000)
    theta[:, LEVEL] = 4.0
    posterior = Posterior(law, theta, rows=None, chains=())

    def choose(sizes, ran):
        x = np.log2(sizes)
        z = law.best_rate(theta, x).mean(axis=0)
        return choose_for_curve(posterior, x, z, np.array(ran), np.ones(len(sizes)))

    # The middle one, 64, tells nothing of B_crit.
    chosen, last = choose([8, 64], [0.0, 0.0])
    expected = math.exp(np.median(law.curve(theta, np.array([3.0]))))
    assert chosen == 0
    assert last == pytest.approx(GIVE_UP * expected)
    assert choose([8, 8, 64], [math.ceil(last), 0.0, 0.0])[0] == 1
