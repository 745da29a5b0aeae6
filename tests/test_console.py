import math
from io import StringIO

import pytest
from rich.console import Console

from bstune.system.console import (
    MIN_WIDTH,
    WIDTH,
    format_count,
    format_number,
    format_seconds,
    line_width,
    listing,
    plain_console,
    plural,
    print_line,
    to_go_text,
    wrapped,
)


def test_numbers_have_their_significant_digits():
    texts = {
        None: "-",
        0.0: "0",
        0.01234: "0.01234",
        1e-5: "1e-05",
        0.1: "0.1",
        12345.0: "12,340",
        # Four digits of it are those of 100,000.
        99999.0: "100,000",
        -999_900_000.0: "-999,900,000",
        # A loss that has diverged.
        999_990_000.0: "1e+09",
        -2.94699e57: "-2.947e+57",
        math.inf: "inf",
        math.nan: "nan",
    }
    for value, text in texts.items():
        assert format_number(value) == text
    assert format_number(57.4, 2) == "57"
    assert format_number(4613.0, 2) == "4600"


def test_durations_have_three_digits_and_a_unit():
    # Some round up to the next unit's edge: 0.99996 to 1.00 s, 119.96 to 2.00 min.
    seconds = (None, 0.0, 0.0000351, 0.0123, 0.99996, 29.0, 119.96, 3600.0, 7199.9, 1e6)
    texts = [
        "-",
        "0 s",
        "0.0351 ms",
        "12.3 ms",
        "1.00 s",
        "29.0 s",
        "2.00 min",
        "60.0 min",
        "2.00 h",
        "278 h",
    ]
    assert list(map(format_seconds, seconds)) == texts


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(None, None), (0.0, None), (0.0085, None), (0.99, None), (1.0, "about 1.00 s to go")],
)
def test_less_than_a_second_to_go_is_not_told(seconds, text):
    assert to_go_text(seconds) == text


def test_counts_are_exact():
    assert list(map(format_count, (None, 500, 4613, 12345))) == ["-", "500", "4613", "12,345"]
    assert plural(0, "trial") == "0 trials"
    assert plural(1, "trial") == "1 trial"
    assert plural(12345, "trial") == "12,345 trials"


def test_several_names_are_listed_as_in_a_sentence():
    assert listing(["a"]) == "a"
    assert listing(["a", "b"]) == "a and b"
    assert listing(["a", "b", "c"]) == "a, b and c"


def test_names_are_printed_as_they_are(capsys):
    plain_console().print("größe [red]x[/red] :heart: <b> 12", soft_wrap=True)
    assert capsys.readouterr().out == "größe [red]x[/red] :heart: <b> 12\n"


@pytest.mark.parametrize("width", [20, 40, 60])
def test_a_number_stays_with_its_unit_and_a_path_whole(width):
    text = "it took 12.3 ms and 400 steps; see outputs/a-very-long-name/of-a-study/report.html"
    rows = wrapped(text, width)
    assert " ".join(rows) == text
    # No row ends between a number and its unit.
    lines = "\n".join(rows)
    assert "12.3 ms" in lines
    assert "400 steps" in lines
    # A path stands whole, and alone where it is wider than a row.
    assert rows[-1] == text.split()[-1]
    assert max(map(len, rows[:-1]), default=0) <= width


@pytest.mark.parametrize("is_terminal", [True, False])
def test_lines_are_broken_on_a_terminal_alone(is_terminal):
    out = StringIO()
    console = Console(file=out, width=50, force_terminal=is_terminal)
    print_line(console, "word " * 40)
    lines = out.getvalue().splitlines()
    assert (len(lines) > 1) == is_terminal
    assert (max(map(len, lines)) <= 50) == is_terminal


@pytest.mark.parametrize(
    ("columns", "width"), [("20", MIN_WIDTH), ("40", 40), ("60", 60), ("200", WIDTH)]
)
@pytest.mark.parametrize("term", ["dumb", "xterm"])
def test_a_line_is_as_wide_as_the_terminal_within_bounds(monkeypatch, columns, width, term):
    monkeypatch.setenv("COLUMNS", columns)
    monkeypatch.setenv("TERM", term)
    assert line_width(Console(force_terminal=True)) == width
