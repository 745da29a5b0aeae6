"""Each figure of the READMEs is that of recorded rows, and a digit that changes is found."""

import re

import pytest
from figures import FIGURES, stands, written


@pytest.mark.parametrize(
    "readme, figure", [(readme, one) for readme, all_ in FIGURES.items() for one in all_]
)
def test_figures_are_those_of_their_rows(readme, figure):
    for text in written(*figure):
        assert stands(text, readme), text
        start, digit, end = re.fullmatch(r"(.*)(\d)(\D*)", text).groups()
        assert not stands(f"{start}{(int(digit) + 1) % 10}{end}", readme), text
