"""Which batch sizes fit, by what has run and what has failed."""

import pytest
from refusals import cases
from search_records import SPACE, record

from bstune.core.space import Space
from bstune.search.fit import (
    SurveyedSizes,
    chance_to_fit,
    inferred_multiple,
    sizes_that_fit,
    sizes_to_try,
)

STATUS = {"m": "out of memory", "r": "refused"}


def records_of(text):
    """Trials by their batch sizes: ``64`` ran, ``512m`` was out of memory, ``36r`` refused."""
    records = []
    for number, word in enumerate(text.split()):
        status = STATUS.get(word[-1], "reached")
        size = int(word.rstrip("mr"))
        steps = 100 if status == "reached" else 0
        records.append(record(number, status, batch_size=size, steps=steps))
    return records


@cases("""
trials | fits | low | high
null | {} | 8 | 512
# One example always fits.
512m | {} | 8 | 22
# Another process took the memory.
64m 128 | {} | 8 | 512
# Too small for the user's code: it is a multiple of all that divides 128.
32r 128 | {} | 64 | 512
# A survey's ends, and what a trial found beside them.
null | {largest_fit: 100, smallest_unfit: 400} | 8 | 200
64 90m | {largest_fit: 100, smallest_unfit: 400} | 8 | 75
# Sizes that the user's code refused in a survey: too small a multiple, and too large.
null | {largest_fit: 256, ran: [16, 64], refused: [8]} | 16 | 512
null | {largest_fit: 64, ran: [16, 64], refused: [256]} | 8 | 128
""")
def test_the_sizes_that_are_worth_a_trial(trials, fits, low, high):
    narrowed = sizes_to_try(SPACE, records_of(trials or ""), SurveyedSizes(**fits))
    assert (narrowed.low, narrowed.high) == (low, high)


@cases("""
trials | low | high
64 512m | 8 | 64
32r 64r 128 | 128 | 512
""")
def test_the_sizes_that_fit_as_far_as_is_known(trials, low, high):
    narrowed = sizes_that_fit(SPACE, records_of(trials), SurveyedSizes())
    assert (narrowed.low, narrowed.high) == (low, high)


@cases("""
trials | chances
64 512m 256m | {8: 1, 64: 1, 128: 0.5, 256: 0, 512: 0}
128 32r 64r | {32: 0, 64: 0, 91: 0.5077, 128: 1, 500: 1}
# What failed between sizes that ran is left out itself.
40 48r 56 50m | {40: 1, 47: 1, 48: 0, 50: 0, 52: 1}
""")
def test_the_chance_is_log_uniform_between_what_ran_and_what_failed(trials, chances):
    found = chance_to_fit(list(chances), records_of(trials))
    assert found == pytest.approx(list(chances.values()), abs=1e-4)


def test_an_inferred_multiple_is_one_of_the_space_too():
    space = Space(6, 500, 0.001, 1.0, "sqrt", (48, 0.05), multiple=6)
    narrowed = sizes_to_try(space, records_of("48 30r"))
    assert (narrowed.low, narrowed.high, narrowed.multiple) == (12, 492, 12)


@cases("""
trained | refused | multiple
[64] | [42] | 4
[64, 24] | [42, 20] | 8
# BatchNorm at one example says nothing of multiples.
[64] | [1] | 1
# 7 divides both that ran, and what was refused; so does no other number up to 32.
[49, 98] | [70] | 1
""")
def test_a_multiple_explains_what_ran_and_what_was_refused(trained, refused, multiple):
    assert inferred_multiple(set(trained), set(refused)) == multiple
