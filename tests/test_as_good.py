"""The range of batch sizes that are as good as the best one."""

import pytest
from builders import make_curve
from toolbox import make_trial

from bstune.study.as_good import AS_GOOD_WITHIN, as_good

SIZES = (16, 32, 64, 128, 256, 512)
# tau(B) = 1 + B/64 seconds, S(B) = 100 (1 + 64/B): T = 100 (2 + B/64 + 64/B) is least at B = 64.
STEPS = [100.0 * (1.0 + 64.0 / size) for size in SIZES]
TAU = tuple(1.0 + size / 64.0 for size in SIZES)
WINNER = make_trial(0, 64, 0.1)


def curve(steps=STEPS, tau=TAU, sizes=SIZES):
    return make_curve(sizes, steps).model_copy(update={"seconds_per_step": tau})


@pytest.mark.parametrize(
    ("tau", "merit", "low", "high"),
    [
        (TAU, "time", 64, 64),
        # Within 10% of a least that is flat.
        ((1.0, 1.0, 1.0, 4 / 3, 1.6, 16 / 9), "time", 64, 512),
        # Steps fall to the end: 112.5 at 512 and 125 at 256.
        (TAU, "steps", 512, 512),
        (None, "steps", 512, 512),
    ],
)
def test_the_range_is_where_at_most_a_tenth_more_is_taken(tau, merit, low, high):
    winner = make_trial(0, low, 0.1)
    found = as_good(curve(tau=tau), winner, merit)
    assert (found.low, found.high, found.within) == (low, high, AS_GOOD_WITHIN)


def test_the_winner_is_one_of_them_and_so_is_its_rate():
    found = as_good(curve(), make_trial(0, 300, 7.0), "time")
    assert (found.low, found.high) == (64, 300)
    assert (found.lr_low, found.lr_high) == (0.1, 7.0)


def test_a_second_least_beyond_a_hill_is_not_joined():
    steps = [100.0, 150.0, 99.0, 100.0, 150.0, 99.5]
    found = as_good(curve(steps=steps, tau=(1.0,) * 6), WINNER, "time")
    assert (found.low, found.high) == (64, 128)


@pytest.mark.parametrize(
    ("known", "winner", "merit"),
    [(None, WINNER, "time"), (curve(), None, "time"), (curve(tau=None), WINNER, "time")],
)
def test_nothing_is_said_of_what_is_not_known(known, winner, merit):
    assert as_good(known, winner, merit) is None
