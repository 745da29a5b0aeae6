import math

from bstune.system.console import format_count, format_number, format_seconds, plain_console, plural


def test_numbers_have_their_significant_digits():
    values = (None, 0.0, 0.01234, 1e-5, 0.1, 12345.0, 99999.0, math.nan)
    texts = ["-", "0", "0.0123", "1e-05", "0.1", "12,300", "100,000", "nan"]
    assert [format_number(value) for value in values] == texts
    assert [format_number(value, 2) for value in (57.4, 4613.0)] == ["57", "4600"]


def test_durations_have_three_digits_and_a_unit():
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
    assert [format_seconds(one) for one in seconds] == texts


def test_counts_are_exact():
    assert [format_count(n) for n in (None, 500, 4613, 12345)] == ["-", "500", "4613", "12,345"]
    assert [plural(n, "trial") for n in (0, 1, 12345)] == ["0 trials", "1 trial", "12,345 trials"]


def test_names_are_printed_as_they_are(capsys):
    plain_console().print("größe [red]x[/red] :heart: <b> 12", soft_wrap=True)
    assert capsys.readouterr().out == "größe [red]x[/red] :heart: <b> 12\n"
