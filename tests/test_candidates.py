import math
from dataclasses import replace

import numpy as np
from test_acquisition import tried
from test_frontier_findings import around, curve, learned

from bstune.search.candidates import Candidates, candidate_log_steps
from bstune.search.frontier_law import NOISE, log_steps


def test_a_stopped_trial_takes_what_its_own_history_says_as_far_as_it_says_it():
    stopped = []
    for number in (30, 31, 32):
        stopped.append(replace(tried(number, 64, 0.05), status="stopped", steps=500))
    posterior = learned([*around(curve().items()), *stopped])
    data = posterior.data
    last = posterior.observations[-3:]
    # An estimate that is sure, one that says nothing, and a bound far above what the law says.
    data = replace(data, y=data.y.copy(), spread=data.spread.copy(), bound=data.bound.copy())
    data.y[-3:] = (9.0, 9.0, 9.0)
    data.spread[-3:] = (1e-3, 1e3, 0.05)
    data.bound[-3:] = (False, False, True)
    posterior = replace(posterior, data=data)
    x = np.array([6.0] * 3 + [8.0])
    z = np.array([math.log2(0.05)] * 3 + [-3.0])
    candidates = Candidates(tuple(last), x, z, np.zeros((4, 0)), np.array([500.0] * 3 + [0.0]))
    found = candidate_log_steps(posterior, candidates, posterior.theta)
    law = log_steps(posterior.theta, candidates.points(posterior), posterior.prior)
    np.testing.assert_allclose(found[:, 0], 9.0, atol=0.01)
    np.testing.assert_allclose(found[:, [1, 3]], law[:, [1, 3]], atol=1e-4)
    np.testing.assert_array_equal(found[:, 2], np.maximum(law[:, 2], 9.0))
    noise = posterior.theta[:, NOISE]
    data.spread[-3] = 0.2
    share = 1.0 / (1.0 + 0.2**2 * np.exp(-2.0 * noise))
    np.testing.assert_allclose(
        candidate_log_steps(posterior, candidates, posterior.theta)[:, 0],
        law[:, 0] + share * (9.0 - law[:, 0]),
    )
