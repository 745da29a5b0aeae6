"""The sweep powers_of_two: its comparisons on known step times, and a small run."""

import json

import numpy as np
import pytest
from pandas import DataFrame, read_csv

from bstune.__main__ import main
from bstune.sweeps.powers_of_two import summary, with_neighbours

SIZES = [119, 120, 121, 127, 128, 129, 255, 256, 257]


@pytest.mark.parametrize("percent", [-3.0, 0.0, 2.0])
def test_intervals_hold_a_known_difference(percent):
    rng = np.random.default_rng(0)
    # Rounds differ by tens of percents, visits by one.
    rounds = np.exp(rng.normal(0.0, 0.3, (40, 1)) + rng.normal(0.0, 0.01, (40, len(SIZES))))
    seconds = DataFrame(rounds * (1e-3 + 1e-5 * np.array(SIZES)), columns=SIZES)
    seconds[128] *= 1.0 + percent / 100.0
    table = summary(seconds, with_neighbours(SIZES), confidence=0.95)
    compared = table[table.unit == "%"].set_index("batch_size")
    assert list(compared.index) == ["120", "128", "256", "128, 256"]
    expected = [0.0, percent, 0.0, percent / 2.0]
    assert ((compared.low < expected) & (expected < compared.high)).all()
    assert (compared.high - compared.low).max() < 1.5
    is_seen = compared.low["128"] * compared.high["128"] > 0.0
    assert is_seen == (percent != 0.0)


# What a survey has found before.
KEPT = [
    {"settings": {"command": ["+workload=digits", "survey_seconds=600", "batch_size.multiple=1"]}},
    {"memory_limit": 9, "largest_fit": 64, "threads": 1},
]


def test_a_small_run_times_the_largest_batch_size_that_fits(tmp_path):
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(one) + "\n" for one in KEPT))
    small = ["workload=digits", "batch_sizes=[64]", "pairs=[]", "rounds=2", "memory_limit=9"]
    assert main(["sweep", "powers_of_two", *small, f"output={tmp_path}"]) == 0
    table = read_csv(tmp_path / "table.csv", keep_default_na=False)
    assert list(table.batch_size) == [32, 64, 64]
    assert list(table.against) == ["", "", "32"]
    assert (table.low <= table.value).all()
    assert (table.value <= table.high).all()
