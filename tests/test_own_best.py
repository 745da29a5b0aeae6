"""Whether the user's own configuration, the winner of a search that ended early, is the best one."""

import math

import numpy as np
import pytest
from toolbox import make_trial

from bstune.core.records import Target
from bstune.search.frontier_law import make_prior
from bstune.search.posterior import infer
from bstune.study.analysis.own_best import untold_others
from bstune.study.planning.baseline import BaselineRuns
from bstune.study.planning.replicates import Winner

TARGET = Target("val/loss", 2.4, "min")


def run(number, batch_size, lr, to_target, end, status="stopped", **changes):
    """A trial that would meet the target at some step and ended at another one."""
    steps = range(5, end + 1, 5)
    history = tuple((step, 2.4 * (to_target / step) ** 0.3) for step in steps)
    return make_trial(
        number,
        batch_size,
        lr,
        status=status,
        steps=end,
        steps_low=end - 5,
        history=history,
        **changes,
    )


def untold_of(others, merit="time"):
    own = run(0, 1024, 0.003, 160, 160, status="reached")
    done = [own, *others]
    prior = make_prior(
        low=128,
        high=8192,
        rule=lambda x: 0.5 * (x - 10.0) + math.log2(0.003),
        log_budget=math.log(600.0),
        sigma=2.0,
        exponent_sigma=0.3,
        noise_scale=None,
        others=0,
    )
    posterior = infer(
        done,
        {},
        prior=prior,
        target=TARGET,
        ideal=0.0,
        step_time=None,
        in_examples=False,
        particles=200,
        moves=5,
        rng=np.random.default_rng(0),
    )
    winner = Winner(own, steps=160.0)
    return untold_others(done, BaselineRuns(own), winner, posterior, merit, law=None)


@pytest.mark.parametrize("merit", ["time", "steps"])
def test_others_that_were_stopped_far_ahead_leave_the_own_one_untold(merit):
    ahead = [run(1, 2301, 0.13, 20, 10), run(2, 649, 0.015, 52, 25), run(3, 1113, 0.0003, 600, 50)]
    ahead.append(run(4, 2048, 2.0, 600, 5, status="diverged"))
    found = untold_of(ahead, merit)
    assert found.chance > 0.9
    assert (found.reached, found.stopped, found.diverged, found.out_of_memory) == (0, 3, 1, 0)


def test_others_that_were_stopped_far_behind_leave_the_own_one_the_best():
    behind = [
        run(1, 2301, 0.0004, 900, 300),
        run(2, 649, 0.0003, 900, 300),
        run(3, 1113, 0.0003, 900, 200),
        run(4, 1024, 0.3, 900, 200, status="diverged"),
    ]
    assert untold_of(behind) is None


@pytest.mark.parametrize(("reached", "is_told"), [(4, True), (3, False)])
def test_once_several_others_reached_the_target_the_own_one_is_told_as_the_best(reached, is_told):
    """Those that a search has stopped since may be better, and it has stopped them for a reason."""
    others = [run(1 + i, 900 + 20 * i, 0.0025, 220, 60) for i in range(24)]
    for i in range(reached):
        others.append(run(40 + i, 700 + 50 * i, 0.002, 200, 200, status="reached"))
    assert (untold_of(others) is None) == is_told


def test_of_another_winner_nothing_is_untold():
    ahead = [run(1, 2301, 0.13, 20, 10)]
    own = ahead[0]
    assert untold_others(ahead, None, Winner(own, steps=20.0), None, "time", None) is None
    beaten = BaselineRuns(run(0, 1024, 0.003, 160, 160, status="reached"))
    assert untold_others(ahead, beaten, Winner(own, steps=20.0), None, "time", None) is None
