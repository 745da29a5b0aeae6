import math
import os
import random
import struct
import subprocess
import sys
from itertools import chain, combinations, pairwise

import matplotlib
import numpy as np
import pytest
from matplotlib.figure import Figure
from toolbox import best_of, hand_critical, make_trial

from bstune.core.console import format_number
from bstune.core.curve import CurveBand
from bstune.core.figures import FIGURE_DPI
from bstune.core.records import Target
from bstune.report.answer import critical_text
from bstune.report.figure import FIGURE_INCHES, draw_curve, paint_curve
from bstune.study.summary import summarize

TARGET = Target("val/error", 0.1, "min")


def simulated(n=40, seed=1, largest=8192, budget=8000, all_censored=False, with_delta=True):
    """Trials over S = 100 (1 + 300/B) x penalty(delta) with noise, tau(B) = 4 ms + B/40000 s."""
    draw = random.Random(seed)
    trials = []
    for number in range(n):
        batch_size = round(math.exp(draw.uniform(math.log(8), math.log(largest))))
        delta = draw.gauss(0, 1.3)
        penalty = math.exp((0.25 if delta < 0 else 0.4) * delta**2 + draw.gauss(0, 0.05))
        steps = round(100 * (1 + 300 / batch_size) * penalty)
        ends = {"status": "reached", "steps": steps, "steps_low": int(steps / 1.05), "tau": 0.004 + batch_size / 40000}
        if batch_size > 6000:
            ends = {"status": "oom", "steps": 0, "steps_low": 0, "tau": None}
        elif delta > 2.1:
            ends |= {"status": "diverged", "steps": 37, "steps_low": 20}
        elif all_censored or steps > budget:
            ends |= {"status": "censored", "steps": min(budget, steps), "steps_low": min(budget, steps)}
        lr = 0.1 * math.sqrt(batch_size / 256) * 2**delta
        trials.append(make_trial(number, batch_size, lr, **ends, delta=delta if with_delta else None))
    return trials


def answered(trials):
    """Return the critical batch size and the band of the law that simulated() follows, if trials reached the target."""
    sizes = [trial.batch_size for trial in trials if trial.reached]
    if not sizes:
        return None, None
    x = np.geomspace(min(sizes), max(sizes), 20)
    steps = 100.0 * (1.0 + 300.0 / x)
    return hand_critical(300.0, 190.0, 480.0, min(sizes), max(sizes)), CurveBand(x, steps, 0.9 * steps, 1.1 * steps)


def drawn(trials, critical=None):
    known, band = answered(trials)
    summary = summarize(trials, TARGET, "no fit", critical=critical or known, best=best_of(trials))
    figure = Figure(figsize=FIGURE_INCHES, dpi=FIGURE_DPI, layout="constrained")
    paint_curve(figure, trials, summary, band, "a workload")
    return summary, figure


def test_figure_has_the_curve_the_points_and_their_labels():
    trials = simulated(budget=1500)
    summary, figure = drawn(trials)
    left, right = figure.axes[:2]
    for axes in (left, right):
        assert (axes.get_xscale(), axes.get_yscale()) == ("log", "log")
        assert axes.get_xlabel() == "batch size B (examples per optimizer step)"
        assert {"8", "32", "128", "512", "2048", "8192"} <= {label.get_text() for label in axes.get_xticklabels()}
    assert left.get_ylabel() == "steps to target S (optimizer steps)"
    assert right.get_ylabel() == "time to target T = S x tau(B) (s of training)"
    counts = {status: n for status, n in summary["statuses"].items() if n}
    assert set(counts) == {"reached", "censored", "diverged", "oom"}
    marks, timed = (dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True)) for axes in (left, right))
    censored = [[point["batch_size"], point["steps_low"]] for point in summary["points"] if point["censored"]]
    assert len(censored) == 3
    assert marks["frontier bound: target not reached by then"].get_offsets().tolist() == censored
    for label, count in {
        "frontier point, (last miss, first hit]": len(summary["points"]) - len(censored),
        "trial that reached the target": counts["reached"],
        "trial stopped before the target": counts["censored"],
        "diverged (at the foot)": counts["diverged"],
        "out of memory (at the foot)": counts["oom"],
    }.items():
        assert len(marks[label].get_offsets()) == count
    critical = marks[f"critical batch size {critical_text(summary['critical'])}"]
    assert list(critical.get_xdata()) == [300.0, 300.0]
    guide = marks["perfect scaling: slope -1"].get_xydata()
    assert guide[:, 0] * guide[:, 1] == pytest.approx(30_000.0)
    best = summary["best_by_time"]
    assert f"B = {best['batch_size']}, lr = {format_number(best['lr'])}" in right.texts[0].get_text()
    assert timed["winner, predicted, not run again on fresh seeds"].get_offsets().tolist() == [
        [best["batch_size"], best["time_to_target"]]
    ]
    title = figure.get_suptitle()
    assert title.startswith("a workload\ntarget val/error <= 0.1; NVIDIA H200; 29 reached the target, 7 stopped before")


@pytest.mark.parametrize("ends", [(None, None, None), (None, 190.0, None), (300.0, 190.0, None)])
def test_the_legend_has_the_critical_batch_size_however_little_is_known(ends):
    summary, figure = drawn(simulated(), hand_critical(*ends))
    _, labels = figure.axes[0].get_legend_handles_labels()
    assert labels.count(f"critical batch size {critical_text(summary['critical'])}") == 1


def test_intervals_span_last_miss_to_first_hit():
    trials = [make_trial(0, 64, steps=400, steps_low=300), make_trial(1, 512, steps=90, steps_low=80)]
    _, figure = drawn(trials)
    (lines,) = (artist for artist in figure.axes[0].collections if hasattr(artist, "get_segments"))
    assert [line.tolist() for line in lines.get_segments()] == [[[64, 300], [64, 400]], [[512, 80], [512, 90]]]


CASES = {
    "rich": simulated(),
    "budget": simulated(budget=1500),
    "open": simulated(24, seed=6, largest=64),
    "few": simulated(4, seed=2),
    "learning rate as colour": simulated(9, seed=5, with_delta=False),
    "all censored": simulated(20, seed=4, all_censored=True),
    "one": [make_trial()],
    "first evaluation hit": [make_trial(steps=1, steps_low=0)],
    "no step time": [make_trial(tau=None), make_trial(1, 128, status="censored", tau=None)],
    "nothing measured": [make_trial(status="oom", steps=0, steps_low=0, tau=None)],
    "none": [],
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_no_text_is_clipped_and_regime_names_do_not_collide(name):
    trials = CASES[name]
    _, figure = drawn(trials)
    figure.draw_without_rendering()
    left, right = figure.axes[:2]
    ticks = [axis.get_ticklabels() for axes in (left, right) for axis in (axes.xaxis, axes.yaxis)]
    texts = [*left.texts, *right.texts, *figure.texts, left.yaxis.label, right.yaxis.label, *chain(*ticks)]
    width, height = figure.bbox.size
    for shown in [*figure.legends, *(text for text in texts if text.get_text())]:
        box = shown.get_window_extent()
        assert 0 <= box.x0 <= box.x1 <= width, shown
        assert 0 <= box.y0 <= box.y1 <= height, shown
    for labels in ticks:
        boxes = [label.get_window_extent() for label in labels if label.get_text()]
        assert len(boxes) >= 2
        assert not any(a.overlaps(b) for a, b in pairwise(boxes))
    boxes = [text.get_window_extent() for text in left.texts if "B = " not in text.get_text()]
    assert not any(a.overlaps(b) for a, b in combinations(boxes, 2))


@pytest.mark.parametrize(
    ("smallest", "largest", "first", "last"), [(4, 16384, 0, 3), (30, 16384, 1, 3), (30, 2800, 1, 2)]
)
def test_a_regime_name_wider_than_its_span_is_left_out(smallest, largest, first, last):
    trials = [make_trial(i, b, steps=s) for i, (b, s) in enumerate([(smallest, 1100), (300, 200), (largest, 110)])]
    _, figure = drawn(trials)
    names = ["perfect\nscaling", "diminishing\nreturns", "maximal\ndata parallelism"][first:last]
    assert [text.get_text() for text in figure.axes[0].texts if "B = " not in text.get_text()] == names


def test_curve_is_written_as_a_png_and_nothing_else(tmp_path):
    trials = simulated()
    critical, band = answered(trials)
    summary = summarize(trials, TARGET, "no fit", critical=critical)
    before = dict(matplotlib.rcParams)
    path = tmp_path / "curve.png"
    path.write_bytes(b"an older figure")
    draw_curve(trials, summary, band, r"a title is text, not mathematics: $\nosuch$", path)
    head = path.read_bytes()[:24]
    assert head[:8] == b"\x89PNG\r\n\x1a\n"
    assert struct.unpack(">II", head[16:24]) == (1950, 975)
    assert os.listdir(tmp_path) == ["curve.png"]
    assert dict(matplotlib.rcParams) == before
    path.unlink()
    path.mkdir()  # which cannot be written
    with pytest.raises(OSError, match=r"curve\.png"):
        draw_curve([], summarize([], TARGET, "no fit"), None, "a workload", path)
    assert os.listdir(tmp_path) == ["curve.png"]


def test_a_figure_needs_no_display_and_an_import_no_matplotlib(tmp_path):
    code = (
        "import sys, pathlib, bstune.study.summary as s, bstune.report.figure as f\n"
        "from bstune.core.records import Target\n"
        "loaded = {'matplotlib', 'torch', 'lightning'} & sys.modules.keys()\n"
        "summary = s.summarize([], Target('val/error', 0.1, 'min'), 'no points')\n"
        "f.draw_curve([], summary, None, 'none', pathlib.Path(sys.argv[1]))\n"
        "print(loaded | {'matplotlib.pyplot', 'torch', 'lightning'} & sys.modules.keys())"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "curve.png")]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "set()\n"
