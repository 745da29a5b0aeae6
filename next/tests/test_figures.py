"""Each figure of the READMEs is that of recorded rows, and a digit that changes is found."""

import re
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).with_name("benchmarks")))
from figures import FIGURES, stands, written


@pytest.mark.parametrize(("readme", "text", "rows", "values"), FIGURES)
def test_figures_are_those_of_their_rows(readme, text, rows, values):
    for figure in written(text, rows, values):
        assert stands(figure, readme), figure
        start, digit, end = re.fullmatch(r"(.*)(\d)(\D*)", figure).groups()
        assert not stands(f"{start}{(int(digit) + 1) % 10}{end}", readme), figure


def test_a_row_that_changes_is_found():
    row = {"storage": "sqlite", "workers": 1, "failed": 0, "kills": 30, "records": 724, "lost": 1}
    (values,) = [values for _, _, rows, values in FIGURES if rows == "kills.jsonl"]
    (one,) = values([row | {"doubled": 0}])
    assert list(one) == [30, 1, 724, 1, 0]
