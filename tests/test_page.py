import json
import math
import re
from dataclasses import replace
from html.parser import HTMLParser

import numpy as np
import pytest
from builders import (
    changed,
    hand_critical,
    make_baseline,
    make_curve,
    make_growth,
    make_law,
    make_plan,
    result_of,
)
from toolbox import column, entries, make_trial

from bstune.report.charts.learning_curves import CURVE_POINTS
from bstune.report.page import study_page, write_page
from bstune.report.schema import HardwareFile, parse_checked
from bstune.report.study_folder import StudyFiles, StudyFolder
from bstune.result import CriticalAtTarget, Reference

# It would end a script, run another one, and break attributes and encodings.
NASTY = "</script><script>alert(1)</script><b>x</b> \"'& ü/批"
SIZES = (16, 64, 256, 1024)
# Three points of a curve: seconds and rates have other values at each.
CURVE = make_curve(
    (16.0, 128.0, 1024.0),
    (700.0, 150.0, 80.0),
    seconds_per_step=(0.01, 0.01, 0.02),
    lr_low=(0.05, 0.15, 0.25),
    lr=(0.1, 0.3, 0.5),
    lr_high=(0.2, 0.6, 1.0),
)
HARDWARE = {
    "device": "cpu",
    "precision": "32-true",
    "high": 1024,
    "ceiling": {
        "smallest": 16,
        "at": {"batch_size": 1024, "limit": 2**30},
        "model": {"base": 1e8, "per_example": 1e4},
        "probes": [{"batch_size": 16, "outcome": "fits", "peak_bytes": 2**27}],
    },
    "measured": {
        "timings": [{"batch_size": b, "seconds": 0.01, "low": 0.009, "high": 0.011} for b in SIZES]
    },
    "limits": {"flops_per_second": 1e12, "bytes_per_second": 1e11},
    "derived": {
        "achieved": [{"batch_size": b, "share_of_peak": 0.1, "intensity": b / 10} for b in SIZES],
        "advice": ["pad the batch"],
    },
}


class Page(HTMLParser):
    """What a browser sees of a page: its headings, texts, tags, charts and rows of the table of trials."""

    def __init__(self, whole):
        super().__init__()
        self.tags = []
        self.texts = []
        self.headings = []
        self.charts = []
        self.told = []
        self.drawn = []
        self._tag = ""
        self.feed(whole)
        inside = re.findall(
            r'<figure class="chart">.*?<script type="application/json">(.*?)</script>', whole
        )
        self.charts = list(map(json.loads, inside))
        self.traces = []
        for chart in self.charts:
            self.traces += chart["data"]
        self.names = {trace.get("name") for trace in self.traces}

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        # A picture's label is its text for who cannot see it, and its shapes are counted.
        self._tag = tag
        known = dict(attributes)
        if known.get("role") == "img":
            self.told.append(known["aria-label"])
            self.drawn.append(0)
        elif self.drawn and tag in ("path", "circle", "polygon") and known.get("class") != "grid":
            self.drawn[-1] += 1

    def handle_data(self, data):
        self.texts.append(data)
        if self._tag == "h2":
            self.headings.append(data)
            self._tag = ""


def hardware_of(**changes):
    return parse_checked(HardwareFile, json.dumps({**HARDWARE, **changes}), "hardware.json")


def study_of(trials, critical=None, path="/nowhere", notes=(), hardware=None, **changes):
    """The study of these trials, its result as a study's is, with ``changes``."""
    result = result_of(trials, critical=critical, **{"workload": "w", **changes})
    best = {"best_by_time": {"lr": 1}}
    files = StudyFiles(path, tuple(trials), hardware, {"seed": 0}, best, tuple(notes))
    return StudyFolder(result, files)


def whole_study(**changes):
    trials = []
    for number, size in enumerate(SIZES):
        # S*(B) of a B_crit of 100.
        trials.append(make_trial(number, size, steps=round(60 * (1 + 100 / size))))
    # Two parts of one trial, a trial that diverged, and a fresh seed of trial 1.
    trials += [make_trial(4, 64, status="stopped", steps=90, steps_low=90)]
    trials += [make_trial(5, 64, status="stopped", steps=150, steps_low=150, resumed_from=4)]
    trials += [make_trial(6, 16, lr=9.0, status="diverged", steps=3, steps_low=3)]
    trials += [make_trial(7, 64, steps=170, replicate_of=1)]
    row = CriticalAtTarget(target=0.2, passed=9, value=70.0, low=50.0, high=None)
    known = {
        "curve": CURVE,
        "over_target": (row,),
        "scale_out": (make_plan(1),),
        "reference": Reference(batch_size=64, lr=0.2, rule="sqrt"),
        "lr_exponent": make_law(),
    }
    critical = hand_critical(100.0, 60.0, 150.0)
    return study_of(trials, critical, hardware=hardware_of(), **{**known, **changes})


def test_a_whole_study_shows_all_that_is_known():
    found = Page(study_page(whole_study()))
    assert found.headings == [
        "Steps and time to target",
        "What the trials say besides",
        "Learning rate",
        "Critical batch size over the target",
        "Learning curves",
        "Progress of the search",
        "Hardware",
        "Several devices",
        "Trials",
        "Config and versions",
        "Glossary",
    ]
    assert len(found.charts) == 9
    assert {
        "S*(B), all trials",
        "reached the target",
        "stopped before it",
        "use",
        "the square root",
    } <= found.names
    steps = found.charts[0]
    reached = trace_of(steps, "reached the target")
    # 60 (1 + 100/B) at the four sizes, and the fresh seed's own 170 steps.
    assert (reached["x"], reached["y"]) == ([*SIZES, 64], [435, 154, 83, 66, 170])
    assert reached["text"][4].startswith(
        "trial 7, 1 again on a fresh seed<br>B = 64, lr = 0.1<br>170 steps"
    )
    # The critical batch size stands at its value, on a logarithmic axis.
    line = next(shape for shape in steps["layout"]["shapes"] if shape["type"] == "line")
    assert line["x0"] == 100.0
    assert steps["layout"]["annotations"][0]["x"] == math.log10(100.0)


def trace_of(one, name):
    """The trace of a chart by its name."""
    (found,) = (trace for trace in one["data"] if trace.get("name") == name)
    return found


def over_steps(page):
    """The chart of learning curves, whose x-axis is steps."""
    for chart in page.charts:
        if "steps" in chart["layout"]["xaxis"]["title"]["text"]:
            return chart
    raise LookupError("no chart over steps")


def test_each_chart_has_a_picture_and_a_text_of_what_it_shows():
    found = Page(study_page(whole_study()))
    assert len(found.told) == len(found.charts) == len(found.drawn)
    # No picture is empty.
    assert 0 not in found.drawn
    steps, seconds, rates, over, curves = found.told[:5]
    assert "5 trials" in steps
    assert "700 steps at batch size 16 to 80 steps at 1024" in steps
    assert "7.00 s at batch size 16" in seconds
    assert "0.1 at batch size 16 to 0.5 at 1024" in rates
    assert "val/error 0.2: 70" in over
    assert "7 trials" in curves


def test_the_baseline_and_the_winner_to_use_are_in_steps_and_in_time():
    study = whole_study(baseline=make_baseline(number=1, batch_size=64, lr=0.1, status="reached"))
    steps, seconds, rates = Page(study_page(study)).charts[:3]
    own = study.files.trials[1]
    use = study.result.winner
    assert (trace_of(steps, "yours")["x"], trace_of(steps, "yours")["y"]) == ([64], [own.steps])
    assert trace_of(seconds, "yours")["y"] == [pytest.approx(own.time_to_target, rel=1e-4)]
    assert trace_of(rates, "yours")["y"] == [0.1]
    for one in (steps, seconds):
        star = trace_of(one, "use")
        assert (star["x"], star["text"]) == ([use.batch_size], ["use"])
        assert trace_of(one, "yours")["text"] == ["yours"]
    # Without a baseline nothing is called yours.
    assert "yours" not in Page(study_page(whole_study())).names


def test_the_page_has_the_rules_through_the_point_of_the_picture():
    rates = Page(study_page(whole_study())).charts[2]
    # All rules meet in the middle of the curve.
    middle = len(CURVE.batch_size) // 2
    through = CURVE.batch_size[middle], CURVE.lr[middle]
    dashes = set()
    names = {"a constant rate": 0.0, "the square root": 0.5, "linear scaling": 1.0}
    law = make_law()
    names |= {f"the trials' own law, B^{law.exponent:.2f}": law.exponent}
    for name, exponent in names.items():
        line = trace_of(rates, name)
        for size, lr in zip(line["x"], line["y"], strict=True):
            assert lr == pytest.approx(through[1] * (size / through[0]) ** exponent, rel=1e-3)
        dashes.add(line["line"]["dash"])
    # Four lines at one point can be told apart by their dashes alone.
    assert len(dashes) == 4


# Far below all values, below zero, and above all values.
@pytest.mark.parametrize(("goal", "history"), [(0.001, 0.5), (-4.0, -1.0), (0.9, 0.2)])
def test_the_target_that_nothing_reached_lies_within_the_axis(goal, history):
    history = ((10, history), (90, 0.9 * history))
    trials = []
    for number in range(4):
        trials.append(make_trial(number, 2**number, status="stopped", steps=90, history=history))
    study = study_of(trials, target_value=goal)
    curves = next(one for one in Page(study_page(study)).charts if "shapes" in one["layout"])
    low, high = curves["layout"]["yaxis"]["range"]
    # A metric below zero has a linear axis.
    at = math.log10(goal) if curves["layout"]["yaxis"]["type"] == "log" else goal
    assert low < at < high
    assert curves["layout"]["shapes"][0]["y0"] == pytest.approx(goal)


def test_learning_curves_are_told_apart_by_classes_of_batch_sizes():
    # B = 8 to 2048.
    trials = [make_trial(i, 2**i, steps=90) for i in range(3, 12)]
    curves = over_steps(Page(study_page(study_of(trials))))
    named = [trace for trace in curves["data"] if trace["showlegend"]]
    lines = column(named, "line")
    # Both the colour and the dash tell a class from each other one.
    assert len(set(column(lines, "color"))) == len(named) == 4
    assert len(set(column(lines, "dash"))) == 4
    assert (named[0]["name"], named[-1]["name"]) == ("B = 8 to 16", "B = 512 to 2048")
    # Each trial has a curve, though classes share their looks.
    assert len(curves["data"]) == 9


def test_a_trial_that_was_continued_is_shown_once():
    stopped = trace_of(Page(study_page(whole_study())).charts[0], "stopped before it")
    # Its parts are one trial, which ended at step 150.
    assert (stopped["x"], stopped["y"]) == ([64], [150])


def test_what_bounds_a_step_is_said_as_the_survey_says_it():
    derived = {**HARDWARE["derived"], "bound": "a step is memory-bound below batch size 64"}
    found = Page(study_page(replace_hardware(whole_study(), hardware_of(derived=derived))))
    assert derived["bound"] in found.texts
    assert derived["bound"] in "\n".join(found.told)


def test_the_line_of_memory_is_the_models_between_its_ends_too():
    page = Page(study_page(whole_study()))
    (line,) = (trace for trace in page.traces if trace.get("name") == "base + B x an example's")
    # As it is drawn: straight from point to point between logarithmic axes.
    drawn = np.interp(math.log(128), np.log(line["x"]), np.log(line["y"]))
    # The model's bytes in MiB, as the axis has them.
    assert math.exp(drawn) == pytest.approx((1e8 + 1e4 * 128) / 2**20, rel=1e-3)


def replace_hardware(study, hardware):
    return StudyFolder(study.result, replace(study.files, hardware=hardware))


def test_commands_are_apart_from_words():
    train = "bstune workload=w trial.batch_size=64 trial.lr=0.1"
    whole = study_page(whole_study(train=train))
    assert re.findall(r'<pre class="command">(.*?)</pre>', whole) == [train]


def test_how_the_critical_batch_size_grows_is_said_below_its_chart():
    growth = make_growth(exponent=-4.3, start=0.2, end=0.1)
    said = (
        "It rises as the target gets harder: as val/error^-4.3 (90%: -5.0 to -3.5) from 0.2 to 0.1."
    )
    assert said in study_page(whole_study(over_target_growth=growth))
    assert "gets harder" not in study_page(whole_study())


@pytest.mark.parametrize(
    ("critical", "shapes", "name", "said"),
    [
        (
            hand_critical(100.0, 60.0, 150.0),
            ["rect", "line"],
            "critical batch size 100",
            "size, 100 (90%: 60 to 150). Hollow",
        ),
        (
            hand_critical(100.0, 60.0, None),
            ["rect", "line"],
            "critical batch size 100",
            "size, 100 (90%: above 60). Hollow",
        ),
        (
            hand_critical(None, 60.0, None),
            ["rect"],
            "critical batch size above 60",
            "size, undetermined (90%: above 60). Hollow",
        ),
        (hand_critical(None, None, None), [], None, None),
        # One batch size alone has no critical one.
        (hand_critical(64.0, 60.0, 70.0, 64, 64), [], None, None),
    ],
)
def test_what_is_open_of_the_critical_batch_size_is_drawn_open(critical, shapes, name, said):
    study = whole_study()
    whole = study_page(replace(study, result=changed(study.result, critical_batch_size=critical)))
    layout = Page(whole).charts[0]["layout"]
    assert column(layout.get("shapes", ()), "type") == shapes
    assert column(layout.get("annotations", ()), "text") == ([] if name is None else [name])
    assert ("Shaded: the critical batch" in whole) == (said is not None)
    assert said is None or said in whole
    # An open end is drawn up to the edge of the chart.
    if shapes and critical.high is None:
        assert math.log10(layout["shapes"][0]["x1"]) == pytest.approx(
            layout["xaxis"]["range"][1], abs=1e-4
        )


def test_a_curve_that_was_not_timed_is_shown_in_steps_alone():
    found = Page(study_page(whole_study(curve=changed(CURVE, seconds_per_step=None))))
    assert "S*(B), all trials" in found.names
    assert "S*(B) tau(B)" not in found.names
    # The form asks for seconds, which are not known.
    assert "form" not in found.tags


def test_learning_curves_are_joined_and_thinned():
    history = tuple((step, 1.0 / step) for step in range(1, 2000))
    trials = [
        make_trial(0, 64, status="stopped", steps=90, steps_low=90),
        make_trial(1, 64, resumed_from=0),
    ]
    trials += [make_trial(2, 128, steps=1999, history=history)]
    curves = over_steps(Page(study_page(study_of(trials))))
    # The two parts of the first trial are one curve.
    assert len(curves["data"]) == 2
    x = curves["data"][1]["x"]
    y = curves["data"][1]["y"]
    # The last evaluation is always kept.
    assert len(x) <= CURVE_POINTS + 1
    assert (x[0], x[-1], y[-1]) == (1, 1999, pytest.approx(1 / 1999, rel=1e-3))
    # Steps ascend, and none stands twice.
    assert x == sorted(set(x))


@pytest.mark.parametrize(
    "place", ["workload", "study", "target", "metric", "devices", "notes", "stop_reason"]
)
def test_a_name_in_the_summary_is_text(place):
    value = (NASTY,) if place in ("devices", "notes") else NASTY
    # A study's name and its metric stand in charts alone.
    assert_text(study_page(whole_study(**{place: value})), shown=place not in ("study", "metric"))


def test_a_name_in_a_trial_or_a_file_is_text():
    trials = [
        make_trial(
            0, device=NASTY, versions={NASTY: NASTY}, message=NASTY, hyperparameters={NASTY: 1.0}
        )
    ]
    study = study_of(
        trials,
        notes=(NASTY,),
        hardware=hardware_of(device=NASTY, derived={"advice": [NASTY]}),
    )
    assert_text(study_page(study))


def assert_text(whole, shown=True):
    assert "<script>alert" not in whole
    assert "<b>x" not in whole
    # In a chart it is escaped for plotly, too.
    assert "\\u003cscript" not in whole
    assert any(NASTY in text for text in Page(whole).texts) or not shown


@pytest.mark.parametrize(
    ("trials", "absent"),
    [
        (
            [],
            {
                "Steps and time to target",
                "What the trials say besides",
                "Learning rate",
                "Learning curves",
                "Trials",
            },
        ),
        (
            [make_trial(0, status="failed", steps=0, steps_low=0, tau=None, history=())],
            {"Learning curves"},
        ),
        (
            [make_trial(i, 2**i, status="stopped", steps=9, steps_low=9) for i in range(5)],
            {"Progress of the search"},
        ),
        (
            [
                make_trial(i, status="diverged", steps=2, steps_low=0, history=((2, None),))
                for i in range(2)
            ],
            set(),
        ),
        ([make_trial(i, 64, lr=0.1 * 2**i) for i in range(3)], set()),
        ([make_trial(0, tau=None)], set()),
        # This metric falls below zero, where there is no logarithm.
        ([make_trial(0, history=((1, 0.0), (400, -2.0)))], set()),
    ],
)
def test_what_there_is_is_shown(trials, absent):
    found = Page(study_page(study_of(trials)))
    assert not absent & set(found.headings)
    assert "Glossary" in found.headings
    for one in found.charts:
        assert one["data"]


def test_the_page_of_200_trials_is_small(tmp_path):
    history = tuple((step, 2.0 / (1 + step)) for step in range(1, 300))
    trials = [make_trial(i, 8 + i, steps=299, history=history) for i in range(200)]
    path = tmp_path / "report.html"
    write_page(study_of(trials), path)
    # 200 trials of 299 evaluations each.
    assert path.stat().st_size < 5_000_000
    assert entries(tmp_path) == ["report.html"]
