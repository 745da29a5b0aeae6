import re

from toolbox import make_trial

from bstune.core.records import CUT_SHORT
from bstune.study.showing.live_table import LAST_TRIALS, curve_rows, live_html


def test_the_curve_so_far_has_the_best_of_each_octave():
    trials = [
        make_trial(0, 64, steps=400, tau=0.01),
        make_trial(1, 127, steps=300, tau=0.02),
        make_trial(2, 100, steps=50, status="stopped"),
        make_trial(3, 128, steps=40, status="stopped"),
        make_trial(4, 1, steps=9000, tau=None),
    ]
    # Of 64 to 127 trial 1 has the fewest steps, and trial 0 the least time, 400 x 0.01 s.
    assert curve_rows(trials) == [
        ("1 to 1", "1", "1", "9000", "-"),
        ("64 to 127", "3", "2", "300", "4.00 s"),
        ("128 to 255", "1", "0", "-", "-"),
    ]
    assert curve_rows([]) == []


def test_a_trial_that_was_cut_short_has_not_failed():
    trials = [
        make_trial(0, status="failed", message=CUT_SHORT),
        make_trial(1, status="failed", message="ValueError: no"),
    ]
    assert [trial.outcome for trial in trials] == ["cut short", "failed"]
    assert "cut short" in live_html(trials, "no best yet")


def test_the_newest_trials_come_first_and_the_line_above_them():
    trials = [make_trial(number) for number in range(LAST_TRIALS + 3)]
    trials.append(make_trial(LAST_TRIALS + 3, resumed_from=1))
    html = live_html(trials, "best <1 s")
    assert html.startswith("<p>best &lt;1 s</p>")
    numbers = re.findall(r"<tr><td [^>]*>(\d+)(?:, continues 1)?</td>", html)
    assert list(map(int, numbers)) == list(range(LAST_TRIALS + 3, 3, -1))
    assert "continues 1<" in html
    assert live_html([], "no trial yet") == "<p>no trial yet</p>"
