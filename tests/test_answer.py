"""The answer as text, its page, and the figure that it shows."""

import os
import re
from pathlib import Path

import pytest
from refusals import cases
from results import BASELINE, BEST, FAR, FEW_OCTAVES, STATES, STEP_TIMES, records, result

from bstune.core.records import Target, last_of_chains
from bstune.report.answer import answer, header, render
from bstune.report.figure import curve_figure
from bstune.report.page import page
from bstune.system import console

GOLDEN = Path(__file__).parent / "golden" / "answer.txt"
NUMBER = re.compile(r"(?<![\w.,/])\d[\d,]*\.?\d*(?:e-?\d+)?")


def numbers(text):
    # A file and line is no number of the answer.
    without_places = re.sub(r"\w+\.py:\d+", "", text)
    return [float(found.replace(",", "")) for found in NUMBER.findall(without_places)]


@pytest.mark.parametrize("state", STATES)
def test_text_is_80_columns_wide_with_at_most_30_numbers(state):
    text = render(STATES[state])
    assert max(len(line) for line in text.splitlines()) <= 80
    assert len(numbers(text)) <= 30


def test_words_of_all_states():
    blocks = [f"# {state}\n\n{render(study)}" for state, study in STATES.items()]
    words = "\n\n\n".join(blocks) + "\n"
    if os.environ.get("BSTUNE_GOLDEN"):
        GOLDEN.write_text(words)
    assert words == GOLDEN.read_text()


@cases("""
value | text
0.4 | '0.4'
12345 | 12,300
999.9 | 1,000
1230000.0 | '1.23e+06'
0 | '0'
""")
def test_number(value, text):
    assert console.number(value) == text


@cases("""
value | text
0.0331 | 33 ms
0.999 | 1 s
119 | 2 min
7640 | 2.1 h
7200000 | 2,000 h
""")
def test_seconds(value, text):
    assert console.seconds(value) == text


def test_a_long_path_stays_whole():
    path = "/home/me/" + "long-name/" * 10
    assert path in console.wrap("Page", f"see {path}", width=40).split()


ATTACK = "</svg><script>alert(1)</script>"


@cases("""
state
switch
keep
'nothing reached: failed'
curve
""")
def test_the_page_has_the_answer_and_is_small(state):
    study = STATES[state]
    text = page(study, records(), "workload: digits\n")
    assert len(text) < 400_000
    plain = text.replace("&lt;", "<").replace("&gt;", ">").replace("&#39;", "'")
    assert header(study) in plain
    for row in answer(study):
        assert row.text in plain
    assert text.count("<svg") == 1


def test_all_trials_and_the_config_are_there():
    text = page(result(), records(), "workload: digits\nlr: {low: 0.01}\n")
    rows = re.findall(r"<tr><td>(\d+)</td>", text)
    assert [int(row) for row in rows] == list(range(18))
    assert "RuntimeError: shapes do not match (model.py:40)" in text
    assert "lr: {low: 0.01}" in text


def test_warnings_beyond_two_stand_on_the_page_alone():
    study = result(warnings=(STEP_TIMES, FEW_OCTAVES, FAR))
    assert FAR.fix not in " ".join(row.text for row in answer(study))
    text = page(study, records(), "")
    for warning in study.warnings:
        assert text.count(warning.fix) == 1


def test_nothing_is_run_or_loaded():
    study = result(workload=ATTACK, device=ATTACK, train_command=ATTACK, warnings=(STEP_TIMES,))
    trials = [record.model_copy(update={"message": ATTACK}) for record in records()]
    text = page(study, trials, ATTACK)
    # The page's own, whose digest the policy names, sorts the trials.
    assert text.count("<script") == 1
    assert text.index("<script") > text.rindex("alert")
    assert not re.findall(r"(?:src|href)=\"(?!#)", text)
    assert "default-src 'none'" in text


def test_many_trials_are_one_bitmap_that_the_page_may_show():
    many = [
        record.model_copy(update={"number": number, "lr": record.lr * (1 + number / 1000)})
        for number, record in enumerate(40 * records())
    ]
    text = page(result(), many, "")
    assert "data:image/png;base64," in text
    assert "img-src data:" in text


def points(figure, panel, label):
    """What a panel has scattered under a label."""
    found = []
    for collection in figure.axes[panel].collections:
        if collection.get_label() == label:
            found += [(float(x), float(y)) for x, y in collection.get_offsets()]
    return found


DRAWN = ("switch", "keep", "baseline stopped", "nothing reached: flat", "curve: open above")


@pytest.mark.parametrize("state", [*DRAWN, "metric: switch"])
def test_the_axes_of_a_state(state):
    figure = curve_figure(STATES[state], records())
    scales = [(axes.get_xscale(), axes.get_yscale()) for axes in figure.axes]
    # The metric, the rate, and the evaluations of new seeds.
    metrics = [("log", "linear"), ("log", "log"), ("linear", "linear")]
    assert scales == (metrics if STATES[state].seeks_metric else [("log", "log")] * 3)


def test_the_metric_s_figure_has_the_runs_to_the_budget_s_end():
    study = STATES["metric: switch"]
    trials = [one.model_copy(update={"status": "finished"}) for one in records() if one.reached]
    figure = curve_figure(study, trials)
    assert points(figure, 0, "best") == [(24, 1.52)]
    assert points(figure, 0, "baseline") == [(64, 1.61)]
    # Nine trials of the search, and three new seeds each.
    assert len(points(figure, 0, "trial to its budget's end")) == 9
    assert len(figure.axes[2].lines) == 6


def test_marks_stand_at_the_values_of_the_result():
    figure = curve_figure(result(), records())
    # Trials are the ends of chains, without new seeds.
    trials = [
        one
        for one in last_of_chains(records())
        if one.role != "new seed" and one.status == "pruned"
    ]
    marks = [(one.batch_size, one.steps_to_target) for one in trials]
    assert points(figure, 0, "trial that ended earlier: a bound") == marks
    for panel, field in enumerate(("steps", "seconds", "lr")):
        assert points(figure, panel, "best") == [(118, getattr(BEST, field))]
        assert points(figure, panel, "baseline") == [(64, getattr(BASELINE, field))]


def test_the_curve_and_the_law_are_the_results():
    study = result(target=Target("val/$loss_{", 0.1, "min"))
    figure = curve_figure(study, records())
    # A metric is no formula.
    figure.draw_without_rendering()
    lines = {line.get_label(): line for line in figure.axes[0].lines}
    curve = lines["median at the best rate, with its 90% band"]
    assert list(curve.get_ydata()) == [point.steps for point in study.curve]
    # S*(B) = 26 (1 + 130.2/B), which is twice its floor at B_crit.
    law = lines["law S_min (1 + B_crit/B)"]
    assert law.get_ydata()[0] == pytest.approx(26 * (1 + 130.2 / 8))
    assert list(lines["2 S_min"].get_ydata()) == [52.0, 52.0]
    # Without a value neither the law nor its interval is drawn.
    for of, patches in ((study, 1), (STATES["largest size binds"], 0)):
        panel = curve_figure(of, []).axes[0]
        assert len(panel.patches) == patches
        labels = [line.get_label() for line in panel.lines]
        assert ("law S_min (1 + B_crit/B)" in labels) == bool(patches)
