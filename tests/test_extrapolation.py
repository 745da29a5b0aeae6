"""What is shown of an extrapolation: the schedule of batch sizes, the card, the table and the cautions."""

import re

import pytest
import yaml

from bstune.core.scale_law import Estimate, ScalePoint, fit_scale_law
from bstune.report.extrapolation import (
    WARN_BEYOND,
    Extrapolation,
    QuantityLaw,
    Reading,
    ScaleRow,
    SizeStep,
    card,
    extrapolation_cautions,
    extrapolation_lines,
    extrapolation_table,
    megatron_flags,
    rounded_batch_size,
    size_schedule,
)


def law_of(exponent, error=0.02):
    """The law of 16 (s/100)^exponent within one study, or of several where errors are large."""
    points = list[ScalePoint]()
    for scale in (100.0, 400.0, 1600.0, 6400.0):
        # Points of one study share what is common to them, and tell the exponent better.
        study = "one" if error < 1.0 else str(scale)
        points.append(ScalePoint(scale, 16.0 * (scale / 100.0) ** exponent, error, study))
    return fit_scale_law(points)


def found_of(wanted=1e4, low=50.0, high=130.0, **changes):
    """Two quantities extrapolated to a scale, from studies up to 1000."""
    exponent = Estimate(0.5, 0.3, 0.7)
    values = {
        "scale": "examples",
        "meaning": "examples of the training data",
        "wanted": wanted,
        "rows": tuple(
            ScaleRow(f"n{n:g}", n, {"critical_batch_size": Reading(8.0, 4.0, None)})
            for n in (10.0, 100.0, 1000.0)
        ),
        "laws": {
            "critical_batch_size": QuantityLaw(exponent, Estimate(81.0, low, high), 3, 1000.0),
            "lr": QuantityLaw(exponent, Estimate(0.12345, 0.05, 0.3), 3, 1000.0),
        },
        "size_to_use": "critical_batch_size",
        "fixed": {},
        "schedule": (),
        "notes": ("seen",),
    }
    return Extrapolation(**{**values, **changes})


def test_the_batch_size_doubles_where_the_critical_one_has():
    steps = size_schedule(law_of(0.5), 1e5)
    assert [step.batch_size for step in steps] == [16, 32, 64, 128, 256]
    assert steps[0].start == 0.0
    # B_crit doubles where the examples are four times as many.
    starts = [step.start for step in steps[1:]]
    assert starts == pytest.approx([400, 1600, 6400, 25600], rel=0.1)


@pytest.mark.parametrize(
    ("exponent", "error", "wanted"),
    # It falls; it stays; nobody knows; below the smallest scale; before the first doubling at 400.
    [(-0.5, 0.02, 1e5), (0.0, 0.02, 1e5), (0.5, 2.0, 1e5), (0.5, 0.02, 99.0), (0.5, 0.02, 300.0)],
)
def test_there_is_no_schedule_where_growth_is_not_sure_or_too_little(exponent, error, wanted):
    assert size_schedule(law_of(exponent, error), wanted) == ()


@pytest.mark.parametrize(
    # From 32 on to multiples of 8.
    ("value", "rounded"),
    [(0.2, 1), (5.4, 5), (31.2, 31), (33.0, 32), (81.0, 80), (1e300, 10**15)],
)
def test_a_card_rounds_batch_sizes_as_a_person_would(value, rounded):
    assert rounded_batch_size(value) == rounded


def test_the_flags_are_megatrons_own():
    schedule = (SizeStep(0.0, 16), SizeStep(400.0, 32))
    assert megatron_flags(schedule, 1) == '--step-batch-size-schedule "0:16 400:32"'
    # In tokens: 400 x 512.
    assert megatron_flags(schedule, 512) == '--step-batch-size-schedule "0:16 204800:32"'


@pytest.mark.parametrize(
    ("scale", "tokens", "unit", "threshold"),
    [
        ("examples", None, "samples", 400),
        ("examples", 512, "tokens", 400 * 512),
        ("tokens", 512, "tokens", 400),
    ],
)
def test_a_card_is_yaml_and_says_what_it_is(scale, tokens, unit, threshold):
    found = found_of(scale=scale, schedule=(SizeStep(0.0, 16), SizeStep(400.0, 32)))
    text = card(found, tokens)
    values = yaml.safe_load(text)
    assert values["scale"] == {scale: 1e4, "times_the_largest": 10.0}
    assert (values["batch_size"], values["batch_size_interval"]) == (80, [48, 128])
    assert (values["lr"], values["lr_interval"]) == (0.1235, [0.05, 0.3])
    assert values["batch_size_schedule"][1] == {"start": 400.0, "batch_size": 32}
    assert values["megatron_lm"] == f'--step-batch-size-schedule "0:16 {threshold}:32"'
    assert f"thresholds are in {unit}" in " ".join(re.sub("# ", "", text).split())
    assert max(map(len, text.splitlines())) <= 100


def test_a_card_without_a_law_of_the_rate_has_none():
    laws = {"critical_batch_size": found_of().laws["critical_batch_size"]}
    values = yaml.safe_load(card(found_of(laws=laws, fixed={"beta2_half_life": 1e4}), None))
    assert "lr" not in values
    # A half-life of 10,000 examples at a batch size of 80.
    assert values["beta2"] == pytest.approx(2.0 ** (-80 / 1e4), abs=1e-6)


@pytest.mark.parametrize(
    ("changes", "count"),
    [
        ({}, 0),
        ({"wanted": 1000.0 * WARN_BEYOND}, 0),
        ({"wanted": 1001.0 * WARN_BEYOND}, 1),
        ({"low": 1.0}, 1),
        ({"low": 1.0, "wanted": 1e6}, 2),
        ({"laws": {}}, 0),
    ],
)
def test_far_and_wide_answers_come_with_a_caution(changes, count):
    found = found_of(**changes)
    assert len(extrapolation_cautions(found)) == count
    lines = extrapolation_lines(found)
    assert sum(line.startswith("CAUTION") for line in lines) == count
    assert lines[-1] == "NOTE      seen"


def test_the_table_has_a_row_a_study_the_prediction_and_the_exponents():
    table = extrapolation_table(found_of())
    cells = [list(column.cells) for column in table.columns]
    assert cells[0] == ["n10", "n100", "n1000", "predicted", "exponent"]
    critical = ["8 (4 to open)"] * 3 + ["81 (50 to 130)", "0.50 (0.30 to 0.70)"]
    assert cells[2] == critical
