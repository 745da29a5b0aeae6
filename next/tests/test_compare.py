"""Studies beside each other: ratios, the power law, and what cannot be compared."""

import math

import numpy as np
import pytest
from scipy.stats import linregress
from scipy.stats import t as student

import bstune
from bstune.__main__ import main
from bstune.core.errors import InputError
from bstune.core.records import Budget, Target
from bstune.report.compare import compared, quotient
from bstune.study.result import Critical, Interval, Spent, StudyResult


def a_study(critical=None, metric="val/loss", **parts):
    """A result of ``curve``, whose B_crit has an interval of a factor of 1.5."""
    if critical is not None:
        parts["critical"] = Critical(
            interval=Interval(value=critical, low=critical / 1.5, high=critical * 1.5),
            s_min=10.0,
            linear_below=critical / 9,
            no_gain_above=9 * critical,
            smallest=1,
            largest=1024,
        )
    values = {
        "bstune": "1",
        "workload": "w",
        "study": "w",
        "objective": "curve",
        "target": Target(metric, 0.1, "min"),
        "budget": Budget(steps=100),
        "device": "cpu",
        "threads": 1,
        "seeds": 3,
        "configurations": 8,
        "trials": 8,
        "verdict": None,
        "reached": True,
        "spent": Spent(training=1.0, other=1.0),
    }
    return StudyResult(**values | parts)


@pytest.mark.parametrize(
    ("above", "below", "expected"),
    [
        ((8, 4, 16), (2, 1, 4), (4, 4 / 2 ** math.sqrt(2), 4 * 2 ** math.sqrt(2))),
        ((8, 8, 8), (2, 1, 4), (4, 2, 8)),
        ((8, 4, None), (2, 1, 4), (4, 4 / 2 ** math.sqrt(2), None)),
        ((8, 4, 16), (2, None, 4), (4, 4 / 2 ** math.sqrt(2), None)),
    ],
)
def test_a_quotient_adds_the_squared_distances_of_the_ends(above, below, expected):
    names = ("value", "low", "high")
    found = quotient(*(Interval(**dict(zip(names, one, strict=True))) for one in (above, below)))
    assert [getattr(found, name) for name in names] == pytest.approx(expected)


def test_the_power_law_is_a_regression_of_logs():
    sizes, criticals = [1e5, 3e5, 1e6, 4e6], [50, 120, 140, 400]
    studies = {
        f"s{size:.0f}": a_study(critical) for size, critical in zip(sizes, criticals, strict=True)
    }
    studies["without"] = a_study()
    law = compared(studies, "width", {f"s{size:.0f}": size for size in sizes}).law
    reference = linregress(np.log(sizes), np.log(criticals))
    half = student.ppf(0.95, 2) * reference.stderr
    ends = reference.slope, reference.slope - half, reference.slope + half
    assert (law.exponent.value, law.exponent.low, law.exponent.high) == pytest.approx(ends)
    assert law.furthest == pytest.approx(1.6e7)
    on_line = math.exp(reference.intercept + reference.slope * math.log(1.6e7))
    assert law.at_furthest.value == pytest.approx(on_line)


def test_ratios_and_differences():
    first = a_study(50)
    second = a_study(100, workload="v", target=Target("val/loss", 0.2, "min"))
    found = compared({"a": first, "b": second})
    (ratio,) = found.ratios
    factor = 1.5 ** math.sqrt(2)
    ends = (ratio.ratio.value, ratio.ratio.low, ratio.ratio.high)
    assert ends == pytest.approx((2.0, 2.0 / factor, 2.0 * factor))
    assert found.differences == {
        "workload": ("w", "v"),
        "target": ("val/loss <= 0.1", "val/loss <= 0.2"),
    }


@pytest.mark.parametrize(
    ("studies", "over", "values"),
    [
        ({"a": a_study(50)}, None, None),
        ({"a": a_study(50), "b": a_study(50, metric="val/error")}, None, None),
        ({"a": a_study(50), "b": a_study(60), "c": a_study(70)}, "parameters", None),
        ({"a": a_study(50), "b": a_study(60)}, "width", {"a": 1.0, "b": 2.0}),
        ({"a": a_study(50), "b": a_study(60)}, "width", {"d": 1.0}),
    ],
)
def test_what_cannot_be_compared(studies, over, values):
    with pytest.raises(InputError):
        compared(studies, over, values)


def test_the_verb_and_the_call(tmp_path, capsys):
    folders = []
    for table in ("fashion_mlp", "mnist_mlp"):
        folders.append(str(tmp_path / table))
        main(
            [
                "+workload=replay",
                f"table={table}",
                f"study={table}",
                "trials=8",
                "mlflow.uri=null",
                f"storage=sqlite:///{tmp_path}/o.db",
                f"output={folders[-1]}",
            ]
        )
    capsys.readouterr()
    assert main(["compare", *folders, "--json", "--output", str(tmp_path / "out")]) == 0
    text = capsys.readouterr().out
    assert text.strip() == bstune.compare(folders).model_dump_json(indent=1)
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names == {"compare.json", "compare.png", "compare.html"}
    assert main(["compare", *folders, "--over"]) == 2
    assert main(["compare", folders[0], str(tmp_path / "none")]) == 2
