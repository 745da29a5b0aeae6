"""The study whose figure and numbers stand in the README, from its recorded trials."""

from pathlib import Path

import pytest

from bstune.core.curve import fit_curve, frontier_points
from bstune.core.records import Target, TrialResult
from bstune.study.summary import summarize

RECORDED = Path(__file__).parent / "recorded" / "fashion_cnn.jsonl"


def test_the_readmes_numbers_follow_from_the_recorded_trials():
    trials = [TrialResult.from_json(line) for line in RECORDED.read_text().splitlines()]
    fit = fit_curve(frontier_points(trials))
    summary = summarize(trials, Target("val/error", 0.10, "min"), fit)
    assert summary["statuses"]["reached"] == len(trials) == 13
    assert (fit.b_crit, fit.b_crit_low, fit.b_crit_high) == pytest.approx((337, 127, 1158), rel=0.01)
    assert summary["small_end"]["batch_sizes"] == [39, 60, 93, 133]
    assert summary["small_end"]["slope"] == pytest.approx(-1.07, abs=0.005)
    assert [(row["batch_size"], row["steps"]) for row in summary["pareto"]] == [
        (60, 667),
        (220, 319),
        (613, 316),
        (779, 223),
    ]
