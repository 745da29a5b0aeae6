"""Which batch sizes fit, by what has run and what has failed."""

import numpy as np
import pytest
from search_records import SPACE, record

from bstune.core.space import Space
from bstune.search.fit import Ends, chance_to_fit, inferred_multiple, sizes_that_fit, sizes_to_try


def records_of(trials):
    """Records of (batch size, status) pairs."""
    records = []
    for number, (batch_size, status) in enumerate(trials):
        steps = 0 if status in ("out of memory", "refused", "failed") else 100
        records.append(record(number, status, batch_size=batch_size, steps=steps))
    return records


OOM = "out of memory"


@pytest.mark.parametrize(
    ("trials", "fits", "low", "high"),
    [
        ([], Ends(), 8, 512),
        ([(512, OOM)], Ends(), 8, 22),  # one example always fits
        # Another process took the memory.
        ([(64, OOM), (128, "reached")], Ends(), 8, 512),
        # Too small for the user's code: it is a multiple of all that divides 128.
        ([(32, "refused"), (128, "reached")], Ends(), 64, 512),
        # A survey's ends, and what a trial found beside them.
        ([], Ends(100, 400), 8, 200),
        ([(64, "reached"), (90, OOM)], Ends(100, 400), 8, 75),
        # Sizes that the user's code refused in a survey: too small a multiple, and too large.
        ([], Ends(256, ran=(16, 64), refused=(8,)), 16, 512),
        ([], Ends(64, ran=(16, 64), refused=(256,)), 8, 128),
    ],
)
def test_the_sizes_that_are_worth_a_trial(trials, fits, low, high):
    narrowed = sizes_to_try(SPACE, records_of(trials), fits)
    assert (narrowed.low, narrowed.high) == (low, high)


@pytest.mark.parametrize(
    ("trials", "fits", "low", "high"),
    [
        ([(64, "reached"), (512, OOM)], Ends(), 8, 64),
        ([(32, "refused"), (64, "refused"), (128, "reached")], Ends(), 128, 512),
    ],
)
def test_the_sizes_that_fit_as_far_as_is_known(trials, fits, low, high):
    narrowed = sizes_that_fit(SPACE, records_of(trials), fits)
    assert (narrowed.low, narrowed.high) == (low, high)


def test_the_chance_is_log_uniform_between_what_ran_and_what_failed():
    records = records_of([(64, "reached"), (512, OOM), (256, OOM)])
    assert chance_to_fit([8, 64, 128, 256, 512], records) == pytest.approx([1, 1, 0.5, 0, 0])
    records = records_of([(128, "reached"), (32, "refused"), (64, "refused")])
    assert chance_to_fit([32, 64, 91, 128, 500], records) == pytest.approx(
        [0, 0, 0.5077, 1, 1], abs=1e-4
    )
    assert np.all(chance_to_fit([1, 500], []) == 1.0)
    # What failed between sizes that ran is left out itself.
    records = records_of([(40, "reached"), (48, "refused"), (56, "reached"), (50, OOM)])
    assert chance_to_fit([40, 47, 48, 50, 52], records).tolist() == [1, 1, 0, 0, 1]


def test_an_inferred_multiple_is_one_of_the_space_too():
    space = Space(6, 500, 0.001, 1.0, "sqrt", (48, 0.05), multiple=6)
    narrowed = sizes_to_try(space, records_of([(48, "reached"), (30, "refused")]))
    assert (narrowed.low, narrowed.high, narrowed.multiple) == (12, 492, 12)


@pytest.mark.parametrize(
    ("trained", "refused", "multiple"),
    [
        ({64}, {42}, 4),
        ({64, 24}, {42, 20}, 8),
        # BatchNorm at one example says nothing of multiples.
        ({64}, {1}, 1),
        # 7 divides both that ran, and what was refused; so does no other number up to 32.
        ({49, 98}, {70}, 1),
    ],
)
def test_a_multiple_explains_what_ran_and_what_was_refused(trained, refused, multiple):
    assert inferred_multiple(trained, refused) == multiple
