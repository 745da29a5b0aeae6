import math
import os
import random
import struct
import subprocess
import sys
from itertools import combinations, pairwise

import matplotlib
import numpy as np
import pytest
from builders import (
    changed,
    hand_critical,
    make_baseline,
    make_confirmed,
    make_curve,
    make_law,
    result_of,
)
from toolbox import make_trial

from bstune.core.scaling import RULES, NamedRule, sqrt
from bstune.report.answer import answer
from bstune.report.charts.learning_rates import _rule_traces
from bstune.report.figure import (
    OTHER_TEXT,
    POINT_TEXT,
    SLOPE_TEXT,
    STOPPED_TEXT,
    curve_figure,
    draw_curve,
)
from bstune.report.rows import LAW, rate_lines
from bstune.report.words import critical_text

# It ends above all batch sizes: no second law lies beyond B_crit.
LAW_OF_TRIALS = make_law(exponent=0.5, low=0.4, high=0.6, end=9e9)


def simulated(n=40, seed=1, largest=8192, budget=8000, all_censored=False, with_delta=True):
    """Trials over S = 100 (1 + 300/B) x penalty(delta) with noise, tau(B) = 4 ms + B/40000 s."""
    draw = random.Random(seed)
    trials = []
    for number in range(n):
        batch_size = round(math.exp(draw.uniform(math.log(8), math.log(largest))))
        delta = draw.gauss(0, 1.3)
        # A parabola in octaves, steeper above the best rate than below, with 5% of noise.
        penalty = math.exp((0.25 if delta < 0 else 0.4) * delta**2 + draw.gauss(0, 0.05))
        steps = round(100 * (1 + 300 / batch_size) * penalty)
        ends = {
            "status": "reached",
            "steps": steps,
            "steps_low": int(steps / 1.05),
            "tau": 0.004 + batch_size / 40000,
        }
        # As on a device whose memory ends there.
        if batch_size > 6000:
            ends = {"status": "out of memory", "steps": 0, "steps_low": 0, "tau": None}
        elif delta > 2.1:
            ends |= {"status": "diverged", "steps": 37, "steps_low": 20}
        elif all_censored or steps > budget:
            ends |= {
                "status": "stopped",
                "steps": min(budget, steps),
                "steps_low": min(budget, steps),
            }
        lr = 0.1 * math.sqrt(batch_size / 256) * 2**delta
        trials.append(
            make_trial(number, batch_size, lr, **ends, delta=delta if with_delta else None)
        )
    return trials


def summed(trials, critical=None, name="digits", **further):
    """The summary of trials that follow the law of simulated(), as far as they reached the target."""
    reached = [trial for trial in trials if trial.reached]
    sizes = [trial.batch_size for trial in reached]
    timed = all(trial.seconds_per_step for trial in reached)
    known = {}
    if sizes:
        x = np.unique(np.geomspace(min(sizes), max(sizes), 20).round())
        lr = 0.1 * np.sqrt(x / 256)
        known["curve"] = make_curve(
            x.tolist(),
            (100.0 * (1.0 + 300.0 / x)).tolist(),
            lr_low=tuple((0.7 * lr).tolist()),
            lr=tuple(lr.tolist()),
            lr_high=tuple((1.4 * lr).tolist()),
            seconds_per_step=tuple((0.004 + x / 40000).tolist()) if timed else None,
        )
        known["lr_exponent"] = LAW_OF_TRIALS
        critical = critical or hand_critical(300.0, 190.0, 480.0, min(sizes), max(sizes))
    return result_of(trials, critical=critical, workload=name, **known, **further)


def fresh_range(result, reached=3):
    """The result with fresh runs of its winners around what was predicted of them."""
    winners = {}
    for name in ("best_by_time", "best_by_steps"):
        winner = getattr(result, name)
        seconds = winner.time_to_target
        steps = winner.steps
        # Fresh runs scatter by 0.8 to 1.5 of the prediction.
        fresh = make_confirmed(
            reached,
            time_low=0.8 * seconds,
            time_high=1.5 * seconds,
            steps_low=0.8 * steps,
            steps_high=1.5 * steps,
        )
        winners[name] = changed(winner, confirmed=fresh)
    return changed(result, **winners)


def no_seed_reached(result):
    ends = dict.fromkeys(("time_low", "time_high", "steps_low", "steps_high"))
    missed = make_confirmed(0, **ends)
    winner = changed(result.best_by_time, steps=None, time_to_target=None, confirmed=missed)
    return changed(result, best_by_time=winner)


def u_shaped(trials):
    critical = hand_critical(300.0, 190.0, 480.0, b_opt=30.0, b_opt_low=20.0, b_opt_high=50.0)
    return summed(trials, critical)


RICH = simulated(budget=1500)
STOPPED = simulated(20, seed=4, all_censored=True)
# Letters that fonts lack, TeX that does not exist, markup, and length.
LONG = r"Größe_x $\nosuch$ <b>日本</b> " + "a/rather long name " * 8
STUDIES = {
    "rich": (RICH, fresh_range(summed(RICH))),
    "a seed missed": (RICH, fresh_range(summed(RICH), 2)),
    "no seed reached": (RICH, no_seed_reached(summed(RICH))),
    "200 trials": (many := simulated(200), fresh_range(summed(many))),
    "fewest examples": (RICH, u_shaped(RICH)),
    "open interval": (RICH, summed(RICH, hand_critical(300.0, 190.0, None))),
    "undetermined": (RICH, summed(RICH, hand_critical(None, None, None))),
    "beyond the plot": (RICH, summed(RICH, hand_critical(1e6, 9e5, None))),
    "few": (few := simulated(4, seed=2), summed(few)),
    "names": (RICH, changed(summed(RICH, name=LONG), target=r"val_$\loss$_é <= 0.1")),
    "all stopped": (STOPPED, summed(STOPPED)),
    "one batch size": (same := [make_trial(i, 64, 0.05 * 2**i, steps=300 + 40 * i) for i in range(5)], summed(same)),
    "one trial": ([make_trial()], summed([make_trial()])),
    "first evaluation hit": (first := [make_trial(steps=1, steps_low=0)], summed(first)),
    "no step time": (untimed := [make_trial(tau=None), make_trial(1, 128, status="stopped", tau=None)],
                     summed(untimed)),
    "nothing measured": (oom := [make_trial(status="out of memory", steps=0, steps_low=0, tau=None)], summed(oom)),
    "none": ([], summed([])),
}  # fmt: skip


# Each of these has all labels of another one: 200 trials, no seed reached, an open interval, a few trials.
ALIKE = ("rich", "a seed missed", "undetermined", "first evaluation hit", "one trial")


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in STUDIES if name not in ALIKE])
def test_names_are_apart_and_no_text_is_clipped(name):
    figure = curve_figure(*STUDIES[name])
    figure.draw_without_rendering()
    width, height = figure.bbox.size
    # 900 pixels, as wide as the page.
    assert width == 900
    panels = [axes for axes in figure.axes if axes.axison]
    texts = list(figure.texts)
    for axes in panels:
        labels = [text for text in axes.texts if text.get_text()]
        extents = extents_of(labels)
        for box, other in combinations(extents, 2):
            assert not box.overlaps(other), name
        inside = axes.get_window_extent()
        for text, box in zip(labels, extents, strict=True):
            assert inside.x0 <= box.x0 <= box.x1 <= inside.x1, text
            # No label leaves its panel.
            assert inside.y0 <= box.y0 <= box.y1 <= inside.y1, text
        for axis in (axes.xaxis, axes.yaxis):
            ticks = [label for label in axis.get_ticklabels() if label.get_text()]
            for box, other in pairwise(extents_of(ticks)):
                assert not box.overlaps(other)
        assert axes.get_title(loc="left")
        texts += [axes.xaxis.label, axes._left_title]
    for axes in figure.axes:
        if axes.get_legend():
            texts.append(axes.get_legend())
    for shown in texts:
        box = shown.get_window_extent()
        assert 0 <= box.x0 <= box.x1 <= width, shown
        assert 0 <= box.y0 <= box.y1 <= height, shown
    # The key covers no panel.
    key = figure.axes[3].get_legend()
    if key is not None:
        for axes in panels:
            assert not key.get_window_extent().overlaps(axes.get_tightbbox())


def extents_of(labels):
    return [label.get_window_extent() for label in labels]


def texts_of(axes):
    return [text.get_text() for text in axes.texts]


def shown_marks(axes):
    return dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))


def star_at(axes, heading):
    """Where the star of a winner stands, by what it is called."""
    marks = shown_marks(axes).items()
    (star,) = (mark for text, mark in marks if text.startswith(f"{heading}: "))
    return star.get_offsets().tolist()


def test_the_title_is_the_answer_and_the_panels_have_curve_points_and_winners():
    trials, summary = STUDIES["rich"]
    figure = curve_figure(trials, summary)
    found = answer(summary)
    # The headline names the workload already.
    assert " ".join(figure.get_suptitle().split()) == f"{found.headline} {found.title}".replace(
        "digits · ", ""
    )
    left, right, rates, _ = figure.axes
    curve = summary.curve
    assert left.lines[0].get_ydata() == pytest.approx(curve.steps)
    seconds = np.multiply(curve.steps, curve.seconds_per_step)
    assert right.lines[0].get_ydata() == pytest.approx(seconds)
    reached = []
    for point in summary.points:
        if not point.stopped:
            reached.append([point.batch_size, point.steps])
    points = shown_marks(left)[POINT_TEXT]
    assert points.get_offsets().tolist() == reached
    others = shown_marks(left)[OTHER_TEXT]
    assert len(others.get_offsets()) == summary.statuses["reached"] - len(reached)
    assert texts_of(right) == ["use"]
    assert f"critical batch size {critical_text(summary.critical_batch_size)}" in shown_marks(left)
    use = summary.best_by_time
    assert star_at(right, "use") == [[use.batch_size, use.time_to_target]]
    guide = shown_marks(left)[SLOPE_TEXT].get_xydata()
    # Perfect scaling: S x B = E_min = 100 x 300.
    assert guide[:, 0] * guide[:, 1] == pytest.approx(30_000.0)
    assert rates.get_title(loc="left").startswith("learning rate grew as B^0.50 (0.40 to 0.60)")


def test_the_baseline_is_drawn_where_its_run_ended():
    trials, summary = STUDIES["rich"]
    own = next(trial for trial in trials if trial.reached)
    baseline = make_baseline(number=own.number, batch_size=own.batch_size, lr=own.lr)
    left, right, rates, _ = curve_figure(trials, changed(summary, baseline=baseline)).axes
    assert star_at(left, "yours") == [[own.batch_size, own.steps]]
    assert star_at(right, "yours") == [[own.batch_size, pytest.approx(own.time_to_target)]]
    assert sorted(texts_of(left)) == ["use", "yours"]
    squares = [some.get_offsets().tolist() for some in rates.collections]
    assert [[own.batch_size, own.lr]] in squares
    # A number that no trial has.
    diverged = changed(summary, baseline=changed(baseline, number=10_000))
    assert "yours" not in texts_of(curve_figure(trials, diverged).axes[0])


def test_rules_and_the_trials_own_law_go_through_one_point():
    trials, summary = STUDIES["rich"]
    lines = rate_lines(summary, 8.0, 8192.0)
    assert [line.name for line in lines] == ["none", "sqrt", "linear", LAW]
    curve = summary.curve
    middle = len(curve.batch_size) // 2
    for line in lines:
        assert line.lr_at(curve.batch_size[middle]) == pytest.approx(curve.lr[middle])
        slope = math.log(line.lr_at(200.0) / line.lr_at(50.0)) / math.log(4.0)
        assert slope == pytest.approx(line.exponent)
    # The law of the trials is drawn where they are, and no further.
    assert (lines[-1].start, lines[-1].end) == (curve.batch_size[0], curve.batch_size[-1])
    drawn = curve_figure(trials, summary).axes[2].lines[-4:]
    # Matplotlib keeps the pattern of a dash apart from its style.
    assert len({str(line.get_linestyle()) + str(line._dash_pattern) for line in drawn}) == 4
    unknown = changed(summary, lr_exponent=changed(LAW_OF_TRIALS, identified=False))
    assert [line.name for line in rate_lines(unknown, 8.0, 64.0)] == ["none", "sqrt", "linear"]


def test_a_rule_that_is_added_is_drawn(monkeypatch):
    """A row of ``RULES`` is all that a rule needs: it has a line on the page and in the figure."""
    steep = NamedRule(sqrt, "three quarters", exponent=0.75)
    monkeypatch.setitem(RULES, "three_quarters", steep)
    trials, summary = STUDIES["rich"]
    assert "three_quarters" in [line.name for line in rate_lines(summary, 8.0, 8192.0)]
    # The four lines and the new one.
    drawn = curve_figure(trials, summary).axes[2].lines[-5:]
    assert len({str(line.get_linestyle()) + str(line._dash_pattern) for line in drawn}) == 5
    dashes = [trace["line"]["dash"] for trace in _rule_traces(summary, trials)]
    assert len(set(dashes)) == 5


def test_without_a_curve_rules_go_through_the_reference():
    result = STUDIES["all stopped"][1]
    reference = result.reference
    for line in rate_lines(result, 8.0, 64.0):
        assert line.lr_at(reference.batch_size) == pytest.approx(reference.lr)


def test_a_winner_that_no_fresh_seed_confirms_is_shown_at_its_own_run():
    summary = STUDIES["no seed reached"][1]
    use = summary.best_by_time
    right = curve_figure(*STUDIES["no seed reached"]).axes[1]
    single = [use.batch_size, use.single_run.time_to_target]
    # Its own run in the search is all that is known.
    assert star_at(right, "use") == [single]


def test_one_batch_size_claims_neither_a_slope_nor_a_critical_batch_size():
    left = curve_figure(*STUDIES["one batch size"]).axes[0]
    assert texts_of(left) == ["use"]
    for line in left.lines:
        assert line.get_linestyle() != "--"
    for text in shown_marks(left):
        assert not text.startswith("critical")


@pytest.mark.slow
def test_stopped_trials_are_shown_only_where_they_bound_the_curve():
    trials = [
        make_trial(0, 64, steps=500),
        make_trial(1, 512, steps=150),
        make_trial(2, 64, 9.0, "stopped", 300),
    ]
    trials += [
        make_trial(3, 200, 0.1, "stopped", 900, 900),
        make_trial(4, 300, 0.1, "stopped", 3, 3),
    ]
    # They lie beyond the batch sizes that reached the target.
    trials += [make_trial(5, 8, 0.1, "stopped", 700, 700)]
    marks = shown_marks(curve_figure(trials, summed(trials)).axes[0])
    # 900 steps at B = 200 are no news where 500 were enough.
    assert STOPPED_TEXT not in marks
    trials[3] = make_trial(3, 200, 0.1, "stopped", 400, 400)
    marks = shown_marks(curve_figure(trials, summed(trials)).axes[0])
    assert marks[STOPPED_TEXT].get_offsets().tolist() == [[200, 400]]
    marks = shown_marks(curve_figure(*STUDIES["all stopped"]).axes[0])
    assert len(marks[STOPPED_TEXT].get_offsets()) == len(STUDIES["all stopped"][1].points)


@pytest.mark.usefixtures("rendered")
def test_the_curve_is_written_as_a_png_and_as_svg_and_nothing_else(tmp_path):
    trials, summary = STUDIES["names"]
    before = dict(matplotlib.rcParams)
    paths = tmp_path / "curve.png", tmp_path / "curve.svg"
    paths[0].write_bytes(b"an older figure")
    draw_curve(trials, summary, *paths)
    head = paths[0].read_bytes()[:24]
    assert head[:8] == b"\x89PNG\r\n\x1a\n"
    # Width and height stand in the file's first chunk.
    assert struct.unpack(">II", head[16:24]) == (900, 760)
    assert paths[1].read_text().startswith("<?xml")
    assert sorted(os.listdir(tmp_path)) == ["curve.png", "curve.svg"]
    # A figure must not change how the user's own are drawn.
    assert dict(matplotlib.rcParams) == before
    paths[1].unlink()
    # A folder of that name lets no file be written.
    paths[1].mkdir()
    with pytest.raises(OSError, match=r"curve\.svg"):
        draw_curve(*STUDIES["none"], *paths)
    assert sorted(os.listdir(tmp_path)) == ["curve.png", "curve.svg"]


# In a process of its own; test_picture.py has one that draws without pyplot.
@pytest.mark.slow
def test_a_figure_needs_no_display_and_an_import_no_matplotlib(tmp_path):
    code = (
        "import sys, pathlib\n"
        "import bstune.study.analysis.summary, bstune.report.figure as f\n"
        "loaded = {'matplotlib', 'torch', 'lightning'} & sys.modules.keys()\n"
        "text = pathlib.Path(sys.argv[2]).read_text()\n"
        "from bstune.report.schema import read_result\n"
        "f.draw_curve([], read_result(text, 'it'), pathlib.Path(sys.argv[1]))\n"
        "print(loaded | {'matplotlib.pyplot', 'torch', 'lightning'} & sys.modules.keys())"
    )
    (tmp_path / "curve.json").write_text(result_of([]).to_json())
    command = [
        sys.executable,
        "-c",
        code,
        str(tmp_path / "curve.png"),
        str(tmp_path / "curve.json"),
    ]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "set()\n"
