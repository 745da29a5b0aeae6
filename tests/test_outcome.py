"""What a training came to, beside its target."""

import pytest

from bstune.core.records import Target
from bstune.study.showing.outcome import outcome_line

ACCURACY = Target("val_acc", 0.74, "max")


@pytest.mark.parametrize(
    ("target", "value", "told"),
    [
        (ACCURACY, 0.738, "val_acc 0.738 after 287 steps: it misses the target, val_acc >= 0.74"),
        (ACCURACY, 0.74, "val_acc 0.74 after 287 steps: it meets the target, val_acc >= 0.74"),
        # Rounded to four digits it would look like the target.
        (ACCURACY, 0.73998, "val_acc 0.73998 after 287 steps: it misses the target, val_acc >= 0.74"),
        (ACCURACY, None, "val_acc has no value after 287 steps"),
        (ACCURACY.never_met, 0.738, "val_acc 0.738 after 287 steps"),
    ],
)  # fmt: skip
def test_a_line_says_whether_the_target_is_met(target, value, told):
    assert outcome_line(target, value, 287) == told
