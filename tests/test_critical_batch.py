"""What a dense table says of the critical batch size: made tables, whose laws are given."""

import json
import math

import numpy as np
import pytest
from toolbox import write_rows
from unit_logs import StoppedError, log_at, stopping_after, units_in, unkept

from bstune.core.errors import ConfigError, TableError
from bstune.core.records import Target
from bstune.sweeps import critical_batch
from bstune.sweeps.critical_batch import best_rates, lr_exponent, row, sentence, too_coarse
from bstune.trial.replay import find_table, read_table

# Of a sweep: a change elsewhere seldom breaks it, and CI runs it.
pytestmark = pytest.mark.slow

SIZES = tuple(2**k for k in range(1, 12))
HORIZONS = str(find_table("digits_linear"))
EXPONENT = 0.5  # of the best learning rate


def made(power, every=1.03):
    """Return the rows of runs whose B_crit is 60 at the loss 2 and goes with that power of it."""
    evaluations = round(math.log(3.2 / 1.9) / math.log(every)) + 1
    losses = 3.2 / every ** np.arange(evaluations)
    b_crit = 60.0 * (losses / 2.0) ** power
    s_min = 3000.0 * (losses / 2.0) ** -6.0
    rows = []
    for size in SIZES:
        best_lr = 0.01 * size**EXPONENT
        for octaves in (-1.3, -0.3, 0.7):
            steps = s_min * (1.0 + b_crit / size) * 2.0 ** (octaves**2)
            rows.append(
                {
                    "batch_size": size,
                    "lr": best_lr * 2.0**octaves,
                    "seed": 0,
                    "seconds_per_step": 0.1,
                    "status": "reached",
                    "steps": np.round(steps).astype(int).tolist(),
                    "metric": losses.tolist(),
                }
            )
    return rows


def find(log=None, **options):
    return critical_batch.run(log or unkept(), **{"only": [], **options})


def test_a_sweep_that_is_stopped_goes_on(tmp_path, monkeypatch):
    table = write_rows(tmp_path / "made.jsonl", made(-4.0))
    path = tmp_path / "runs.jsonl"
    # A target of 4.5 x 2 = 9 is passed at the first evaluation: that cell is left out.
    options = {"tables": [str(table)], "target": 2.0, "easier": [1.0, 1.2, 1.5, 4.5], "level": 0.9}
    whole = find(**options)
    assert (len(whole.rows), len(whole.notes)) == (3, 1)
    read_cell = critical_batch.table_record
    for _ in range(2):
        with monkeypatch.context() as patched:
            patched.setattr(critical_batch, "table_record", stopping_after(1, read_cell))
            with pytest.raises(StoppedError):
                find(log_at(path), **options)
    finding = find(log_at(path), **options)
    assert units_in(path) == ["made/1", "made/1.2", "made/1.5", "made/4.5"]
    assert (finding.sentence, finding.rows, finding.notes) == (
        whole.sentence,
        whole.rows,
        whole.notes,
    )
    monkeypatch.setattr(critical_batch, "table_record", None)
    assert find(log_at(path), **options).details == whole.details
    with pytest.raises(ConfigError, match=r"names made/7, .*units: made/1; made/1\.2"):
        find(log_at(path), **options, only=["made/7"])
    # A table that has changed is read again.
    write_rows(table, made(-3.0))
    with pytest.raises(TypeError):
        find(log_at(path), **options)


def table_of(tmp_path, power, every=1.03):
    return read_table(write_rows(tmp_path / "made.jsonl", made(power, every)))


@pytest.mark.parametrize(("power", "loss"), [(-4.76, 2.0), (3.0, 2.4)])
def test_a_laws_numbers_are_found_at_every_target(tmp_path, power, loss):
    found = row("power", table_of(tmp_path, power), Target("val/loss", loss, "min"), 0.9)
    b_crit = 60.0 * (loss / 2.0) ** power
    assert found["b_crit"] == pytest.approx(b_crit, rel=0.15)
    assert found["b_crit_low"] < b_crit < found["b_crit_high"]
    assert (found["smallest"], found["largest"]) == (2, 2048)
    # At the middle one of three.
    slopes = [-b_crit / (size + b_crit) for size in (4, 1024)]
    assert [found["slope_small"], found["slope_large"]] == pytest.approx(slopes, abs=0.05)
    assert found["lr_exponent"] == pytest.approx(EXPONENT, abs=0.02)


@pytest.mark.parametrize(
    ("power", "word"), [(-4.76, "rises"), (0.0, "neither surely rises nor falls")]
)
def test_the_sign_of_its_growth_is_said(tmp_path, power, word):
    path = write_rows(tmp_path / "made.jsonl", made(power))
    options = {"tables": [str(path)], "target": 2.0, "easier": [1.0, 1.2, 1.5], "level": 0.9}
    finding = find(**options)
    assert f"made: from error 3 to 2 B_crit {word}, as its power " in finding.sentence
    assert float(finding.sentence.split("power ")[1].split(" ")[0]) == pytest.approx(power, abs=0.3)
    assert [one["B_crit"] for one in finding.rows] == [
        critical_batch.row_as_texts(one)["B_crit"] for one in finding.details["numbers"]
    ]
    assert json.dumps(finding.details["numbers"])
    assert len(finding.rows) == 3


def test_the_best_rate_lies_between_the_cells(tmp_path):
    best = best_rates(table_of(tmp_path, -4.0), Target("val/loss", 2.0, "min"))
    assert best == pytest.approx({size: 0.01 * size**EXPONENT for size in SIZES}, rel=0.02)
    assert lr_exponent(best, 0.9) == pytest.approx((0.5, 0.5, 0.5), abs=0.01)
    assert lr_exponent(dict(list(best.items())[:2]), 0.9) == (None, None, None)


def test_targets_that_were_not_evaluated_closely_are_left_out(tmp_path):
    close, coarse = table_of(tmp_path, -4.0), table_of(tmp_path, -4.0, every=1.2)
    target = Target("val/loss", 2.0, "min")
    assert too_coarse(close, target) is None
    # 11 batch sizes at three rates.
    assert (
        too_coarse(coarse, target)
        == "33 of 33 runs that passed it were not evaluated closely there"
    )
    # At its first evaluation.
    assert too_coarse(close, Target("val/loss", 9.0, "min")).startswith("33 of 33")
    options = {
        "tables": [str(tmp_path / "made.jsonl")],
        "target": 2.0,
        "easier": [1.0],
        "level": 0.9,
    }
    with pytest.raises(
        TableError, match=r"no table determines anything: made, error <= 2 is left out: 33 of 33"
    ):
        find(**options)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"easier": []}, r"easier must be multiples of the target, 1 or more, but got \[\]"),
        (
            {"easier": [1.0, 0.9]},
            r"easier must be multiples of the target, 1 or more, but got \[1.0, 0.9\]",
        ),
        ({"level": 1.0}, r"level must be between 0 and 1, but got 1.0"),
        ({"tables": ["nowhere"]}, r"there is no table nowhere: give the path of a file"),
        ({"tables": [HORIZONS], "target": 0.1}, r"name a table whose runs have no horizon"),
    ],
)
def test_mistakes(changes, message):
    options = {"tables": [], "target": None, "easier": [1.0], "level": 0.9} | changes
    with pytest.raises((ConfigError, TableError), match=message):
        find(**options)


def test_too_few_targets_tell_no_growth():
    known = {
        "table": "a",
        "metric": "val/loss",
        "b_crit": 30.0,
        "b_crit_low": 20.0,
        "b_crit_high": 40.0,
    }
    rows = [{**known, "target": 2.0}, {**known, "target": 2.2, "b_crit_high": None}]
    assert sentence(rows) == "a: too few targets have a critical batch size with both ends."


def test_tables_that_ship_and_the_sign_of_their_growth():
    """On recorded runs, too: harder targets have larger critical batch sizes."""
    options = {"tables": ["fashion_mlp"], "target": None, "easier": [1.0, 1.2, 1.5], "level": 0.9}
    finding = find(**options)
    sizes = [one["b_crit"] for one in finding.details["numbers"]]
    assert sizes == sorted(sizes, reverse=True)
    assert "B_crit rises" in finding.sentence
