"""Numbers of somebody else's code: what counts as one, and what is said of what does not."""

import math
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest
import torch

from bstune.core.numbers import as_float, as_int, is_finite_number, shown

FLOATS = [
    (2, 2.0),
    (0.1, 0.1),
    (math.inf, math.inf),
    (Decimal("0.25"), 0.25),
    (Fraction(1, 4), 0.25),
    (np.float32(0.5), 0.5),
    (np.int64(3), 3.0),
    (np.array([0.5]), 0.5),
    (torch.tensor(0.5), 0.5),
    (torch.tensor([[3]]), 3.0),
    # A truth value is a number to Python, not to anyone who reads a loss.
    (True, None),
    (np.bool_(True), None),
    (torch.tensor(True), None),
    (None, None),
    ("0.5", None),
    (b"1", None),
    (1j, None),
    (torch.tensor(1j), None),
    (10**400, None),
    # A signalling NaN raises where it becomes a float.
    (Decimal("sNaN"), None),
    ([0.5], None),
    (np.array([0.5, 1.0]), None),
    (torch.ones(2), None),
    # It has no value.
    (torch.empty(1, device="meta"), None),
]
INTEGERS = [
    (2, 2),
    (10**400, 10**400),
    (np.int64(3), 3),
    (torch.tensor(3), 3),
    (torch.tensor([3]), 3),
    (True, None),
    (np.bool_(True), None),
    (torch.tensor(True), None),
    # A count may have become a float, as by a division.
    (2.0, 2),
    (np.float64(2.0), 2),
    (torch.tensor(2.0), 2),
    (2.5, None),
    (torch.tensor(2.5), None),
    (math.inf, None),
    (math.nan, None),
    (torch.tensor([1, 2]), None),
    ("2", None),
    (None, None),
]


@pytest.mark.parametrize(("value", "number"), FLOATS, ids=lambda value: shown(value)[:20])
def test_what_is_a_number(value, number):
    assert as_float(value) == number


@pytest.mark.parametrize("value", [math.nan, np.float64("nan"), torch.tensor(math.nan)])
def test_nan_is_a_number(value):
    assert math.isnan(as_float(value))


@pytest.mark.parametrize(("value", "number"), INTEGERS, ids=lambda value: shown(value)[:20])
def test_what_is_a_whole_number(value, number):
    found = as_int(value)
    assert (found, type(found)) == (number, type(number))


def test_what_is_shown_fits_into_a_line():
    assert shown("ab") == "'ab'"
    assert len(shown(10**400)) == 60
    # Python writes no more than 4300 digits.
    assert shown(10**5000) == "one of type int"


@pytest.mark.parametrize(
    ("value", "is_one"),
    [
        (2, True),
        (-1e308, True),
        (10**308, True),
        # A float ends at 1.8e308.
        (10**309, False),
        (math.inf, False),
        (math.nan, False),
        (True, False),
        ("2", False),
        (None, False),
    ],
)
def test_what_of_a_parsed_file_is_a_finite_number(value, is_one):
    assert is_finite_number(value) is is_one
