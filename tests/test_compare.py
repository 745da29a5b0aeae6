"""Studies beside each other: ratios, the power law, and what cannot be compared."""

import math

import numpy as np
import pytest
from refusals import cases, refused
from results import critical, of_curve
from scipy.stats import linregress
from scipy.stats import t as student

import bstune
from bstune.__main__ import main
from bstune.core.errors import InputError
from bstune.core.records import Target
from bstune.report.compare import compare_results, quotient
from bstune.study.result import Interval


def a_study(value=None, metric="val/loss", **changes):
    """A result of ``curve``, whose B_crit has an interval of a factor of 1.5."""
    found = None if value is None else critical(value, value / 1.5, value * 1.5)
    target = changes.pop("target", Target(metric, 0.1, "min"))
    return of_curve(critical=found, target=target, **changes)


# Value, low and high of two intervals, and the quotient's ends: sqrt(2) octaves off 4 are 1.5009.
@cases("""
above | below | low | high
[8, 4, 16] | [2, 1, 4] | 1.5009 | 10.6604
[8, 8, 8] | [2, 1, 4] | 2 | 8
[8, 4, null] | [2, 1, 4] | 1.5009 | null
[8, 4, 16] | [2, null, 4] | 1.5009 | null
""")
def test_a_quotient_adds_the_squared_distances_of_the_ends(above, below, low, high):
    ends = [dict(zip(("value", "low", "high"), one, strict=True)) for one in (above, below)]
    found = quotient(*(Interval(**one) for one in ends))
    assert found.value == pytest.approx(4)
    for end, expected in ((found.low, low), (found.high, high)):
        assert end == (expected and pytest.approx(expected, rel=1e-4))


def test_the_power_law_is_a_regression_of_logs():
    sizes, values = [1e5, 3e5, 1e6, 4e6], [50, 120, 140, 400]
    studies = {f"s{k}": a_study(value) for k, value in enumerate(values)} | {"none": a_study()}
    law = compare_results(studies, "width", {f"s{k}": size for k, size in enumerate(sizes)}).law
    reference = linregress(np.log(sizes), np.log(values))
    half = student.ppf(0.95, 2) * reference.stderr
    ends = reference.slope, reference.slope - half, reference.slope + half
    assert (law.exponent.value, law.exponent.low, law.exponent.high) == pytest.approx(ends)
    assert law.furthest == pytest.approx(1.6e7)
    on_line = math.exp(reference.intercept + reference.slope * math.log(1.6e7))
    assert law.at_furthest.value == pytest.approx(on_line)


def test_ratios_and_differences():
    second = a_study(100, workload="v", target=Target("val/loss", 0.2, "min"))
    found = compare_results({"a": a_study(50), "b": second})
    ((value, low, high),) = [
        (one.ratio.value, one.ratio.low, one.ratio.high) for one in found.ratios
    ]
    factor = 1.5 ** math.sqrt(2)
    assert (value, low, high) == pytest.approx((2.0, 2.0 / factor, 2.0 * factor))
    assert found.differences == {
        "workload": ("digits", "v"),
        "target": ("val/loss <= 0.1", "val/loss <= 0.2"),
    }


@pytest.mark.parametrize(
    "second, over, values",
    [
        (None, None, None),
        (a_study(50, metric="val/error"), None, None),
        (a_study(60, target=Target("val/loss", None, "min"), objective="metric"), None, None),
        (a_study(60), "parameters", None),
        # A line needs three.
        (a_study(60), "width", {"a": 1.0, "b": 2.0}),
        (a_study(60), "width", {"d": 1.0}),
    ],
)
def test_what_cannot_be_compared(second, over, values):
    studies = {"a": a_study(50)} | ({"b": second} if second else {})
    with pytest.raises(InputError):
        compare_results(studies, over, values)


@pytest.mark.parametrize(
    "call, words",
    [
        (lambda: bstune.load(3), "path, 3"),
        (lambda: bstune.compare(3), "list, 3"),
        (lambda: bstune.compare("ab"), "list, ab"),
        (lambda: bstune.compare(["a", None], values=3), "values, 3"),
    ],
)
def test_arguments_of_other_kinds(call, words):
    with refused(words):
        call()


def test_the_verb_and_the_call(tmp_path, capsys):
    folders = []
    for name, value in (("a", 50), ("b", 100)):
        folder = tmp_path / name
        folder.mkdir()
        # Names are no mathematics.
        study = a_study(value, study=f"{name} $\\frac{{$")
        (folder / "curve.json").write_text(study.model_dump_json())
        folders.append(str(folder))
    assert main(["compare", *folders, "--json", "--output", str(tmp_path / "out")]) == 0
    text = capsys.readouterr().out
    assert text.strip() == bstune.compare(folders).model_dump_json(indent=1)
    with refused("a, twice"):
        bstune.compare([*folders, folders[0]])
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names == {"compare.json", "compare.png", "compare.html"}
    assert main(["compare", *folders, "--over"]) == 2
    assert main(["compare"]) == 2
    assert main(["compare", folders[0], str(tmp_path / "none")]) == 2
