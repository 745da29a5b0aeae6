"""One rule ends trained and replayed trials: a table of what an evaluation found."""

import pytest

from bstune.core.trial_end import status_at, steps_low_of


@pytest.mark.parametrize(
    ("steps", "has_reached", "has_diverged", "status", "steps_low"),
    [
        (99, False, False, None, 99),
        (100, False, False, "stopped", 100),
        # A resumed trial may begin past the last step that it is given.
        (120, False, False, "stopped", 120),
        # The target comes before the last step, and a loss that is not finite before the target.
        (99, True, False, "reached", 80),
        (100, True, False, "reached", 80),
        (99, False, True, "diverged", 99),
        (100, True, True, "diverged", 100),
    ],
)
def test_how_a_trial_ends(steps, has_reached, has_diverged, status, steps_low):
    assert status_at(steps, 100, has_reached, has_diverged) == status
    assert steps_low_of(status, steps, last_missed=80) == steps_low
