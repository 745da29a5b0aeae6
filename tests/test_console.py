import math

import pytest

from bstune.core.console import format_count, format_number, format_seconds, plural, redact


@pytest.mark.parametrize(
    ("value", "digits", "text"),
    [
        (None, 3, "-"),
        (0.0, 3, "0"),
        (0.01234, 3, "0.0123"),
        (1e-5, 3, "1e-05"),
        (57.4, 2, "57"),
        (4613.0, 2, "4600"),
        (99999.0, 3, "100,000"),
        (12345.0, 3, "12,300"),
        (0.1, 3, "0.1"),
        (math.nan, 3, "nan"),
    ],
)
def test_numbers_have_their_significant_digits(value, digits, text):
    assert format_number(value, digits) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (None, "-"),
        (0.0, "0 s"),
        (0.0000351, "0.0351 ms"),
        (0.0123, "12.3 ms"),
        (0.99996, "1.00 s"),
        (29.0, "29.0 s"),
        (119.96, "2.00 min"),
        (3600.0, "60.0 min"),
        (7199.9, "2.00 h"),
        (1e6, "278 h"),
    ],
)
def test_durations_have_three_digits_and_a_unit(seconds, text):
    assert format_seconds(seconds) == text


def test_counts_are_exact():
    assert [format_count(n) for n in (None, 500, 4613, 12345)] == ["-", "500", "4613", "12,345"]
    assert [plural(n, "trial") for n in (0, 1, 12345)] == ["0 trials", "1 trial", "12,345 trials"]


def test_passwords_in_addresses_are_left_out():
    assert (
        redact("at mysql://me:secret@host/db and http://host:80/x@y")
        == "at mysql://me:***@host/db and http://host:80/x@y"
    )
