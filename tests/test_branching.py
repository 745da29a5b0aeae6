"""Where branches of a run begin to lose, over log B and over seeds."""

import math

import pytest

from bstune.core.branching import Crossing, LargestBatch, crossing, largest_batch


@pytest.mark.parametrize(
    ("losses", "tolerance", "expected"),
    [
        # Half of the way over log B.
        ({8: 0.0, 16: 0.0, 32: 0.02}, 0.01, Crossing(16 * math.sqrt(2), 16, 32, False)),
        # At the tolerance nothing is lost.
        ({8: 0.0, 16: -0.5, 32: 0.01}, 0.01, None),
        # The first size that loses counts, whatever comes later.
        ({8: 0.0, 16: math.inf, 32: 0.0}, 0.01, Crossing(8 * math.sqrt(2), 8, 16, True)),
        ({8: 0.0, 16: 0.04, 32: 0.0}, 0.01, Crossing(8 * 2**0.25, 8, 16, False)),
        # A rise of more than four tolerances.
        ({256: 0.0, 1024: 0.455}, 0.1, Crossing(512, 256, 1024, True)),
        # Without a tolerance any rise is a jump.
        ({8: 0.0, 32: 0.001}, 0.0, Crossing(16, 8, 32, True)),
    ],
)
def test_where_a_branch_begins_to_lose(losses, tolerance, expected):
    found = crossing(losses, tolerance)
    if expected is None:
        assert found is None
        return
    assert (found.below, found.above, found.jumps) == (
        expected.below,
        expected.above,
        expected.jumps,
    )
    assert found.batch_size == pytest.approx(expected.batch_size)


def lost_at(size):
    """Give losses that pass a tolerance of 0.01 right after twice the size."""
    return {8: 0.0, size: 0.0, 2 * size: 0.01, 4 * size: 0.02}


def test_the_interval_over_seeds_is_students():
    found = largest_batch([lost_at(16), lost_at(32), lost_at(64)], 0.01, 0.9)
    # Of log2 of 32, 64, 128: mean 6, deviation 1, and t(0.95, 2) = 2.92.
    assert (found.unbounded, found.between) == (0, None)
    assert found.batch_size == pytest.approx(64)
    assert math.log2(found.high / 64) == pytest.approx(2.92 / math.sqrt(3), abs=1e-3)
    assert found.low * found.high == pytest.approx(64**2)


def test_two_seeds_tell_no_interval():
    found = largest_batch([lost_at(16), lost_at(32)], 0.01, 0.9)
    assert (found.low, found.high) == (None, None)


def test_seeds_that_lose_nothing_leave_the_end_open():
    nothing = {8: 0.0, 16: 0.0}
    found = largest_batch([nothing] * 3, 0.01, 0.9)
    assert found == LargestBatch(pytest.approx(16), pytest.approx(16), None, 3)


def test_a_jump_is_told_by_the_sizes_around_it():
    jumping = {64: 0.0, 256: 0.054, 1024: 0.455}
    found = largest_batch([jumping] * 3, 0.06, 0.9)
    assert found.between == (256, 1024)
    assert (found.low, found.high) == (256, 1024)
    # Another seed's jump widens it.
    found = largest_batch([jumping, jumping, {64: 0.0, 256: math.inf}], 0.06, 0.9)
    assert found.between == (64, 1024)
