"""The shares of a time limit, and what is said of the time that is left."""

from dataclasses import replace

import pytest
from refusals import cases
from test_plan import SEARCHED, plan

from bstune.study.deadline import Deadline, least_limit, pilot_seconds
from bstune.study.progress import Progress
from bstune.system.ticker import Ticker

# 100 s from second 10 on; the start took 4, and the answer is expected to take 5.2.
LIMIT = Deadline(began=10.0, seconds=100.0, start=4.0)


def test_the_shares_of_what_the_start_leaves():
    assert (LIMIT.end, LIMIT.shared) == pytest.approx((104.8, 90.8))
    assert LIMIT.preparation_seconds == pytest.approx(9.08)
    assert LIMIT.baseline_seconds == pytest.approx(18.16)
    assert LIMIT.preflight_until == pytest.approx(32.16)


@cases("""
preparation | baseline | confirmation | end
# Half as long again as expected, a tenth at least; others have half.
0.0 | 1.0 | 10.0 | 89.8
0.0 | 1.0 | 0.1 | 95.72
0.0 | 1.0 | 90.0 | 60.4
9.08 | 99.0 | 90.0 | 86.64
""")
def test_the_search_leaves_time_for_new_seeds(preparation, baseline, confirmation, end):
    limit = replace(LIMIT, preparation=preparation)
    assert limit.search_end(baseline, confirmation) == pytest.approx(end)


@pytest.mark.parametrize("now, until", [(16.0, 41.0), (90.0, 90.0 + 90.8 / 30), (104.0, 104.8)])
def test_a_trial_has_a_third_of_what_is_left(now, until):
    assert LIMIT.trial_until(now, search_end=91.0) == pytest.approx(until)


def test_a_start_that_takes_the_limit_leaves_nothing():
    assert Deadline(0.0, 10.0, start=12.0).shared == 0.0
    assert Deadline(0.0, 1000.0, start=60.0).end == 985.0
    assert (pilot_seconds(None), pilot_seconds(30.0)) == pytest.approx((10.0, 2.0))
    # 10 s late with the 3.2 s that MLflow takes.
    assert LIMIT.allows_mlflow(116.0)
    assert not LIMIT.allows_mlflow(117.0)


@cases("""
start | trials | limit
3.0 | [] | 20.0
12.0 | [40, 40] | 107.0
""")
def test_the_least_limit(start, trials, limit):
    assert least_limit(start, trials) == pytest.approx(limit)


def test_what_goes_on_is_the_running_trial():
    lines = []
    ticker = Ticker(lines.append)
    progress = Progress(ticker, plan(), [], lines.append)
    progress.trial_begins(SEARCHED[1], lambda: "step 30 of 60, val/loss 0.21")
    assert "step 30 of 60, val/loss 0.21" in ticker.doing()
    progress.finished(SEARCHED[1])
    assert "step 30" not in ticker.doing()
    # The heads of the columns, and the trial.
    assert len(lines) == 2
