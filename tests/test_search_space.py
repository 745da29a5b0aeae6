import math
from functools import partial
from itertools import pairwise

import pytest

from bstune.core import scaling
from bstune.core.search_space import Space, Tunable, corners, van_der_corput


def space(low=8, high=500, multiple=1, sigma=1.0, **others):
    return Space(
        low,
        high,
        multiple,
        sigma,
        partial(scaling.sqrt, reference_batch_size=64, reference_lr=0.1),
        **others,
    )


@pytest.mark.parametrize(
    ("low", "high", "multiple", "wanted", "snapped"),
    [
        (8, 500, 1, 37.4, 37),
        (8, 500, 8, 37.4, 40),
        (8, 500, 8, 3.0, 8),
        (8, 500, 8, 495.0, 496),
        # The ceiling itself is a candidate: 500 when 512 does not fit.
        (8, 500, 8, 499.0, 500),
        (8, 500, 8, 10_000.0, 500),
        # The first multiple within the range counts.
        (10, 500, 8, 1.0, 16),
        # There is no multiple in the range: the ceiling is left.
        (3, 5, 8, 4.0, 5),
        (7, 7, 1, 7.0, 7),
    ],
)
def test_snap(low, high, multiple, wanted, snapped):
    assert (
        space(low, high, multiple).snap(wanted)
        == space(low, high, multiple).snap(snapped)
        == snapped
    )


@pytest.mark.parametrize(
    ("batch_size", "asked", "lr", "delta"),
    [
        (64, 1.0, 0.2, 1.0),
        # The rate is the rule's, in octaves.
        (16, 1.5, 0.05 * 2**1.5, 1.5),
        # The rate is clipped to what can be had, and the delta with it.
        (64, 2.5, 0.3, math.log2(3)),
        (64, -3.0, 0.025, -2.0),
        (6400, 0.0, 0.3, math.log2(0.3)),
    ],
)
def test_learning_rates(batch_size, asked, lr, delta):
    some = space(lr_low=0.025, lr_high=0.3)
    assert some.lr(batch_size, asked) == pytest.approx(lr)
    assert some.delta(batch_size, some.lr(batch_size, asked)) == pytest.approx(delta)
    assert (space(sigma=1.5).delta_bound, space(sigma=1.5, octaves=10.0).delta_bound) == (4.5, 10.0)


@pytest.mark.parametrize("offset", [0.0, 0.3])
def test_strata_spread_evenly_over_log_b(offset):
    assert [van_der_corput(i) for i in range(8)] == [
        0,
        1 / 2,
        1 / 4,
        3 / 4,
        1 / 8,
        5 / 8,
        3 / 8,
        7 / 8,
    ]
    shares = sorted(math.log(space(1, 4096).stratum(i, offset)) / math.log(4096) for i in range(64))
    # Integers near 1 are far apart in log B.
    assert max(b - a for a, b in pairwise(shares)) < 3 / 64 + 0.1
    assert shares[0] < 0.05
    assert shares[-1] > 0.95


def test_corners_are_both_ends_at_once():
    first = Tunable("a", "budget.steps", 1.0, 8.0, True, True)
    second = Tunable("b", "", 0.0, 0.5, False, False)
    assert corners((first, second)) == [{"a": 1, "b": 0.0}, {"a": 8, "b": 0.5}]
    assert isinstance(corners((first,))[0]["a"], int)
    assert corners(()) == []
