"""The wall time that is advised where a study had no time for two trials."""

import pytest

from bstune.study.planning.next_command import START_SLACK, NextCommand


def command(**changes):
    """A study of nothing but a start of 100 s, unless changed."""
    nothing = {
        "charged": 0.0,
        "start": 100.0,
        "survey": lambda limit, left: 0.0,
        "trials": 2,
        "decision": 0.0,
        "trial": lambda limit: 0.0,
        "kept": lambda limit: 0.0,
        "report": 0.0,
    }
    return NextCommand(**{**nothing, **changes})


@pytest.mark.parametrize(
    ("changes", "advised"),
    [
        ({}, 150),
        ({"charged": 50.0}, 200),
        # Two trials of 4 s, each with a decision of 1 s, and the report.
        ({"trial": lambda limit: 4.0, "decision": 1.0, "report": 2.0}, 162),
        ({"trial": lambda limit: 4.0, "decision": 1.0, "report": 2.0, "trials": 1}, 157),
        # L = 150 + 0.1 (L - 150).
        ({"survey": lambda limit, left: 0.1 * left}, 150),
        # A survey of 20 s comes with 200 s.
        ({"charged": 49.5, "survey": lambda limit, left: 20.0 if limit >= 200 else 0.0}, 220),
        # L = 150 + 0.4 L.
        ({"kept": lambda limit: 0.4 * limit}, 250),
        # L = 150 + 0.1 (L - 150) + 0.25 L + 0.4 L, so 0.25 L = 135.
        (
            {
                "survey": lambda limit, left: 0.1 * left,
                "trial": lambda limit: 0.125 * limit,
                "kept": lambda limit: 0.4 * limit,
            },
            540,
        ),
    ],
)
def test_what_is_advised_covers_the_next_start_and_all_that_follows(changes, advised):
    assert START_SLACK == 1.5
    one = command(**changes)
    found = one.least_limit(above=90.0)
    assert found == pytest.approx(advised, abs=1)
    assert one.seconds(found) <= found


def test_what_is_advised_is_above_what_was_given():
    assert command(start=1.0).least_limit(above=90.0) == 91
    assert command(start=1.0).least_limit(above=90.5) == 91
