"""A recorded run: its steps to a target, its history, and the weights of what was recorded around a value."""

import math

import pytest

from bstune.core.records import Target
from bstune.trial.recorded_run import Run, at_share, weights_around

RUN = Run(8, 0.1, 0, (10, 20, 40), (0.5, 0.2, 0.3), 0.01, diverged=False)


@pytest.mark.parametrize(
    ("target", "steps"),
    [
        (Target("e", 0.5, "min"), 10),
        (Target("e", 0.25, "min"), 20),
        (Target("e", 0.1, "min"), None),
        (Target("a", 0.4, "max"), 10),
        (Target("a", 0.6, "max"), None),
    ],
)
def test_steps_are_those_of_the_first_evaluation_that_meets_the_target(target, steps):
    assert RUN.steps_to(target) == steps


@pytest.mark.parametrize(
    ("options", "history"),
    [
        ({}, ((10, 0.5), (20, 0.2), (40, 0.3))),
        ({"end": 20}, ((10, 0.5), (20, 0.2))),
        ({"scale": 0.5}, ((5, 0.5), (10, 0.2), (20, 0.3))),
        # Of evaluations that fall together the last stays, and none is before the first step.
        ({"scale": 0.04}, ((1, 0.2), (2, 0.3))),
    ],
)
def test_a_history_ends_where_it_is_asked_to_and_its_steps_are_scaled(options, history):
    assert RUN.history_to(**options) == history


def test_a_run_that_diverged_before_any_evaluation_ends_at_its_first_step():
    run = Run(8, 0.1, 0, (), (), 0.01, diverged=True)
    assert (run.end, run.history_to()) == (1, ())


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (8, [(8, 1.0)]),
        (32, [(32, 1.0)]),
        (4, [(8, 1.0)]),
        (500, [(128, 1.0)]),
        (16, [(8, 0.5), (32, 0.5)]),
        # A quarter of the way from 32 to 128, in logarithms.
        (32 * math.sqrt(2), [(32, 0.75), (128, 0.25)]),
    ],
)
def test_weights_are_linear_in_the_logarithm_and_end_at_the_edges(value, expected):
    found = weights_around((8, 32, 128), value)
    assert [size for size, _ in found] == [size for size, _ in expected]
    assert [weight for _, weight in found] == pytest.approx([weight for _, weight in expected])


def test_a_share_of_some_items():
    assert [at_share("abc", share) for share in (0.0, 0.3, 0.34, 0.99, 1.0)] == list("aabcc")
