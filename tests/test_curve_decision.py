import math
from dataclasses import replace

import numpy as np
import pytest
from test_acquisition import LAW, decisions, tried
from test_frontier_findings import around, curve, learned

from bstune.search.candidates import Candidates, candidate_log_steps
from bstune.search.curve_decision import choose_for_curve, unseen_regime
from bstune.search.frontier_findings import log_b_crit


def asked(posterior, x, done, pending=()):
    """The one of the log2 batch sizes, each at the rule's rate, that is asked for, and the steps expected there."""
    x, nothing = np.array(x), np.zeros((len(x), 0))
    candidates = Candidates((), x, posterior.prior.rule(x), nothing, np.array(done))
    return choose_for_curve(posterior, candidates, pending, 0.0)


def test_what_is_asked_tells_of_b_crit_for_its_cost():
    posterior = learned(around(curve((64, 90, 128)).items()))
    x = [3.0, 6.0, 6.5, 7.0, 12.0]
    place, expected = asked(posterior, x, [0.0] * 5)
    # Nothing is known of either end, and this one is cheaper.
    assert place == 4
    assert 100 < expected < 1500
    # Where it is running already, the other end tells more if it costs only what it still takes.
    running = [(12.0, float(posterior.prior.rule(12.0)), None)]
    assert asked(posterior, x, [8000.0, 0.0, 0.0, 0.0, 0.0], running)[0] == 0


@pytest.mark.parametrize("flat", [False, True])
def test_a_trial_whose_metric_has_flattened_is_not_continued_for_the_curve(flat):
    size = 20
    stopped = replace(tried(30, size, LAW.best_lr(size)), status="stopped", steps=2800)
    posterior = learned([*around(curve((64, 90, 128, 1024, 4096)).items()), stopped])
    seen = (*posterior.observations[:-1], replace(posterior.observations[-1], flat=flat))
    posterior = replace(posterior, observations=seen, spent=1e9)
    chosen = decisions(posterior, 5, objective="curve")
    is_continued = 30 in {suggestion.resumed_from for suggestion in chosen}
    assert is_continued != flat


@pytest.mark.parametrize("steps", [30_000, 3_000_000])
def test_a_trial_that_is_past_what_was_expected_of_it_is_given_up(steps):
    # As where a model overfits: its error rises for ever, and every continuation would be longer
    # than all before.
    stopped = replace(tried(30, 18, LAW.best_lr(18)), status="stopped", steps=steps)
    posterior = learned([*around(curve().items()), stopped])
    assert asked(posterior, [math.log2(18), 4.5, 8.0, 11.0], [float(steps), 0.0, 0.0, 0.0])[0] != 0


@pytest.mark.parametrize(
    ("sizes", "allowed", "place"),
    [
        # B_crit/9 is 33 and 9 B_crit 2700: the large end is cheaper to look at.
        (
            (64, 128, 256, 512, 1024),
            1e6,
            4,
        ),
        ((64, 128, 256, 512, 1024, 4096), 1e6, 1),
        ((16, 64, 256, 1024), 1e6, 4),
        # Both ends are seen already.
        ((16, 64, 256, 1024, 4096), 1e6, None),
        # A look would cost more than is allowed.
        ((64, 128, 256, 512, 1024), 0.2, None),
    ],
)
def test_a_regime_in_which_nothing_has_reached_the_target_is_looked_at(sizes, allowed, place):
    posterior = learned(around(curve(sizes).items()))
    x = np.array([3.0, 4.5, 6.0, 8.0, 12.0])
    candidates = Candidates((), x, posterior.prior.rule(x), np.zeros((5, 0)), np.zeros(5))
    draws = (
        candidate_log_steps(posterior, candidates, posterior.theta),
        log_b_crit(posterior.theta, posterior.prior),
    )
    found = unseen_regime(posterior, candidates, [], *draws, allowed)
    assert (found and found[0]) == place
    running = [] if place is None else [(float(x[place]), 0.0, None)]
    assert (
        place is None
        or (unseen_regime(posterior, candidates, running, *draws, allowed) or (None,))[0] != place
    )
    # A look that has cost too much already, like one at far too high a learning rate, is not
    # followed by more.
    dear = replace(posterior.observations[0], status="stopped", steps=10**10, x=4.0)
    posterior = replace(posterior, observations=(*posterior.observations, dear))
    found = unseen_regime(posterior, candidates, [], *draws, allowed)
    # The other end may still be looked at.
    assert found is None or found[0] == 4
