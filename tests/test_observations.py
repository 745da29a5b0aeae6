import math
from dataclasses import replace

import numpy as np
import pytest
from toolbox import make_result

from bstune.core.step_time import StepTime, StepTimes
from bstune.search.frontier_law import LEVEL, NOISE, OTHER, make_prior
from bstune.search.observations import Observation, likelihood_data, weight_of_histories
from bstune.search.posterior import Posterior
from bstune.search.predictions import fresh_steps

STUDY = {"log_budget": 7.0, "sigma": 1.0, "exponent_sigma": 0.3, "noise_scale": None, "others": 1}
PRIOR = make_prior(low=8, high=4096, rule=lambda x: 0.5 * x, **STUDY)


@pytest.mark.parametrize(
    ("status", "log_factor", "spread", "low", "high", "bound"),
    [
        # A run that reached the target stands in the middle of its interval.
        (
            "reached",
            None,
            0.0,
            0.5 * math.log(0.8),
            0.5 * math.log(0.8),
            False,
        ),
        ("diverged", None, 0.0, 0.0, 0.0, False),
        # It is not extrapolated: S is above the steps done.
        ("stopped", None, 0.0, 0.0, 0.0, True),
        ("stopped", 0.5, 0.2, 0.5, 0.5, False),
        # Far and unsure, it is a bound, below the estimate.
        ("stopped", 4.0, 3.5, 0.0, 4.0, True),
        ("stopped", 4.0, 9.0, 0.0, 0.0, True),
    ],
)
def test_the_likelihood_of_an_observation(status, log_factor, spread, low, high, bound):
    one = Observation(
        0, status, 1000, 800, 1e-3, 7.0, -3.0, (0.5,), log_factor, spread, stuck=False
    )
    data = likelihood_data([one], PRIOR)
    assert low - 1e-9 <= data.y[0] - math.log(1000) <= high + 1e-9
    at = data.points
    assert (at.x[0], at.z[0], bool(data.bound[0]), at.other.tolist()) == (7.0, -3.0, bound, [[0.5]])
    assert bool(data.diverged[0]) == (status == "diverged")
    # A uniform distribution from log 800 to log 1,000.
    assert status != "reached" or data.spread[0] == pytest.approx(math.log(1.25) / math.sqrt(12.0))
    # An estimate is known to lie above what has run.
    assert data.log_steps_missed[0] == (math.log(1000) if log_factor == 0.5 else -math.inf)


def test_a_trial_that_reached_the_target_at_its_first_evaluation_is_an_estimate():
    one = Observation(0, "reached", 1000, 0, 1e-3, 7.0, -3.0, (0.5,), None, 0.0, stuck=False)
    data = likelihood_data([one], PRIOR)
    # Where nothing tells the lower end, it is half of the steps.
    assert data.y[0] == pytest.approx(math.log(1000 * math.sqrt(0.5)))
    assert data.spread[0] == pytest.approx(math.log(2.0) / math.sqrt(12.0))


@pytest.mark.parametrize(
    # Of one place where the posterior expects log S = 0, at a noise of 0.1 as large as POINT_MISFIT.
    ("runs", "log_steps"),
    [
        ([("reached", 0.1)], 0.05),
        ([("reached", 0.1), ("reached", 0.1)], 0.1 * 2 / 3),
        ([("reached", 0.1), ("stopped", 0.5)], 0.6 / 3),
        ([("reached", 0.0), ("diverged", 9.0)], math.log(4.0) / 3),
        ([("reached", -0.4)], -0.2),
        ([("reached", -0.4), ("reached", 0.1), ("reached", 0.1)], -0.2 / 4),
        ([("stopped", 0.1)], None),
    ],
)
def test_what_a_fresh_seed_is_predicted_to_take_in_closed_form(runs, log_steps):
    seen = tuple(
        Observation(
            i,
            status,
            1,
            0,
            0.01,
            PRIOR.log_mid,
            0.5 * PRIOR.log_mid,
            (0.5,),
            None,
            0.0,
            stuck=False,
        )
        for i, (status, _) in enumerate(runs)
    )
    data = replace(likelihood_data(seen, PRIOR), y=np.array([y for _, y in runs]))
    theta = PRIOR.mean[None].copy()
    theta[0, [LEVEL, NOISE]] = (0.0, math.log(0.1))
    theta[0, OTHER] = 0.5
    posterior = Posterior(seen, data, theta, StepTimes(StepTime(0.0, 1.0)), 1.0, PRIOR, math.inf)
    numbers = [one.number for one in seen if one.status == "reached"]
    assert [*fresh_steps(posterior)] == numbers
    assert all(
        math.log(steps) == pytest.approx(log_steps, abs=0.005)
        for steps in fresh_steps(posterior).values()
    )


def test_a_recorded_run_that_chains_repeat_at_other_lengths_counts_once():
    run = ((1, 0.9), (2, 0.5), (4, 0.3), (8, 0.1))
    other = ((1, 0.9), (2, 0.6))
    histories = (run[:2], run, (), run[:3], other, run, (), other[:1])
    trials = [make_result(number=i, history=history) for i, history in enumerate(histories)]
    # The last one begins both: it counts with the longer.
    expected = [0.2, 0.2, 1.0, 0.2, 1.0, 0.2, 1.0, 0.2]
    assert weight_of_histories(trials).tolist() == expected
    assert weight_of_histories([]).tolist() == []
