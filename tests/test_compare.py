"""Studies side by side: made ones of a known law, and whatever a folder may hold."""

import base64
import html
import math
import re
import subprocess
import sys

import numpy as np
import pytest
from browser import awaited, errors, opened_browser, resize
from builders import changed, hand_critical, make_baseline, make_confirmed, make_curve, result_of
from toolbox import column, make_trial

from bstune.core.errors import StudyError
from bstune.report.compare import compare, read_studies
from bstune.report.compare_figure import INCHES_WIDE, paint_comparison
from bstune.report.compare_page import comparison_page
from bstune.report.compared_pairs import compared_pairs
from bstune.report.compared_study import compared_study, gain_text
from bstune.report.drawing import figure_of
from bstune.report.one_law import collapse
from bstune.report.rows import curve_point
from bstune.result import SCHEMA_NUMBER, Gain, Reference, Spend

ODD = 'a b/<b>é</b> & "ü" $x^2$ 日本'
# 19 sizes over nine octaves: half an octave apart.
SIZES = np.geomspace(8, 4096, 19)


def summary(study="a", b_crit=100.0, low=50.0, high=200.0, s_min=80.0, bend=0.0, **changes):
    """The result of a study whose S*(B) is the law times B^bend, with an interval of 10%."""
    curve = None
    points = ()
    if b_crit is not None:
        steps = s_min * (1 + b_crit / SIZES) * SIZES**bend
        curve = make_curve(SIZES.tolist(), steps.tolist())
        points = tuple(map(point, SIZES[::3], steps[::3]))
    trial = make_trial(4, 128, 0.1, steps=110, device="cpu (1 thread)")
    made = result_of([trial])
    fresh = make_confirmed()
    winner = changed(made.best_by_time, steps=110.0, time_to_target=2.0, confirmed=fresh)
    known = {
        "study": study,
        "target": "val/loss <= 0.1",
        "points": points,
        "curve": curve,
        "critical_batch_size": hand_critical(b_crit, low, high, 8, 4096, s_min=s_min),
        "best_by_time": winner,
        "best_by_steps": None,
        "spend": Spend(trials=40, seconds=12.0, examples=1000),
    }
    return changed(made, **{**known, **changes})


def point(size, steps, **changes):
    return curve_point(make_trial(0, round(size), 0.1, steps=round(steps), **changes))


def studies(*summaries):
    compared_ones = []
    for place, one in enumerate(summaries):
        compared_ones.append(compared_study(one, f"outputs/{place}"))
    return compared_ones


# What such a study's file has.
UNREACHED = {
    "points": (),
    "curve": None,
    "critical_batch_size": None,
    "best_by_time": None,
    "use": None,
}
ONE_SIZE = {"points": (point(8, 90, tau=None),), "curve": None}
ALL_STOPPED = UNREACHED | {"points": (point(8, 90, status="stopped"),)}
FEW = make_confirmed(2, time_high=None, steps_high=None)


@pytest.mark.parametrize(
    ("bends", "deviation", "inside"),
    [((0.0,), 0.0, 1.0), ((0.0, 0.0), 0.0, 1.0), ((0.2,), None, 0.0), ((0.0, 0.2), None, 0.5)],
)
def test_the_collapse_says_how_far_curves_are_from_the_law(bends, deviation, inside):
    made = []
    for number, bend in enumerate(bends):
        made.append(summary(str(number), 100.0 * (number + 1), bend=bend))
    found = collapse(studies(*made))
    # The deviation is the root mean square of log S over the law.
    square = np.mean(np.outer(bends, np.log(SIZES)) ** 2)
    assert found.deviation == pytest.approx(
        math.expm1(math.sqrt(square)) if deviation is None else deviation, abs=1e-9
    )
    assert found.inside == pytest.approx(inside)
    # From 8 over the largest critical batch size to 4096 over the smallest, 100.
    assert (found.smallest, found.largest) == pytest.approx((8 / 100.0 / len(bends), 40.96))
    assert found.by_study.keys() == {study.study for study in made}


# Both intervals are the median times or over a factor. The ratio's is wider by the root of the sum
# of squares.
@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        # 4 with a factor of 2 on both: e^(sqrt(2) log 2) = 2.67 on either side.
        ((400, 200, 800), (100, 50, 200), (4.0, 4 / 2**2**0.5, 4 * 2**2**0.5, True)),
        ((100, 50, 200), (200, 100, 400), (2.0, 2 / 2**2**0.5, 2 * 2**2**0.5, False)),
        # The halves that face each other count.
        (
            (400, 100, 500),
            # 4 e^-hypot(log 4, log 1.05) = 0.9991 and 4 e^hypot(log 1.25, log(1/0.95)) = 5.029.
            (100, 95, 105),
            (4.0, 0.9991, 5.029, False),
        ),
        ((400, 390, 4000), (100, 10, 110), (4.0, 3.624, 103.8, True)),
        ((400, None, 800), (100, 50, 200), (4.0, None, 4 * 2**2**0.5, None)),
        # Only its lower end is known: 400/200 = 2.
        ((None, 400, None), (100, 50, 200), (None, 2.0, None, True)),
        ((None, 400, None), (300, 150, 600), (None, None, None, None)),
        # Its upper end: 150/40 = 3.75.
        ((None, None, 40), (300, 150, 600), (None, 3.75, None, True)),
        ((None, None, None), (300, 150, 600), (None, None, None, None)),
    ],
)
def test_two_critical_batch_sizes_differ_where_the_ratio_is_not_one(one, other, expected):
    (pair,) = compared_pairs(studies(summary("a", *one), summary("b", *other)))
    assert pair.differ is expected[3]
    for value, wanted in zip((pair.ratio, pair.low, pair.high), expected[:3], strict=True):
        # The figures above have four digits.
        assert value == (None if wanted is None else pytest.approx(wanted, rel=2e-3))


@pytest.mark.parametrize(
    ("one", "other", "text"),
    [
        ((400, 200, 800), (100, 50, 200), "a over b: 4 times (1.5 to 10.7), differ"),
        ((100, 50, 200), (200, 100, 400), "b over a: 2 times (0.75 to 5.33), not shown to differ"),
        ((400, None, 800), (100, 50, 200), "a over b: 4 times (below 10.7), not known"),
        ((400, None, None), (100, None, None), "a over b: 4 times (open), not known"),
        ((None, 400, None), (100, 50, 200), "a over b: above 2 times, differ"),
        ((None, None, None), (100, 50, 200), "b over a: not known"),
    ],
)
def test_a_pair_in_words(one, other, text):
    assert str(*compared_pairs(studies(summary("a", *one), summary("b", *other)))) == text


@pytest.mark.parametrize(
    ("changes", "unlike", "notes"),
    [
        # Two studies of everything alike.
        ({}, (), ()),
        ({"workload": "airfoil"}, ("workload",), ("the workloads differ (airfoil, digits)",)),
        (
            {"workload": "airfoil", "target": "val/loss <= 0.05"},
            ("workload", "target"),
            ("the workloads differ (airfoil, digits)", "the targets differ"),
        ),
        ({"target": "val/loss <= 0.05"}, ("target",), ("the targets differ",)),
        # Steps do not depend on the device, so nothing is unlike.
        ({"devices": ("NVIDIA H200",)}, (), ("the devices differ",)),
        # The threads of a loop of the user's are not known.
        ({"devices": ("cpu",)}, (), ()),
        ({"devices": ("cpu (4 threads)",)}, (), ("the threads differ (1, 4)",)),
        ({"devices": ("2 x cpu (1 thread)",)}, (), ("the devices differ",)),
        # Nothing has trained.
        ({"devices": ()}, (), ()),
        (
            {"reference": Reference(batch_size=8, lr=0.1, rule="sqrt")},
            (),
            ("the references differ",),
        ),
        # Of other workloads they differ in any case.
        (
            {"workload": "airfoil", "reference": Reference(batch_size=8, lr=0.1, rule="sqrt")},
            ("workload",),
            ("the workloads differ (airfoil, digits)",),
        ),
        ({"tokens": 256}, (), ("an example has not the same number of tokens in all studies (64",)),
    ],
)
def test_what_differs_between_studies_is_said(changes, unlike, notes):
    found = compare(studies(summary("a", tokens=64), summary("b", **{"tokens": 64, **changes})))
    (pair,) = found.pairs
    assert pair.unlike == unlike
    assert all(f"another {name}" in str(pair) for name in unlike)
    assert len(found.notes) == len(notes)
    for note, start in zip(found.notes, notes, strict=True):
        assert note.startswith(start)
        assert html.escape(note) in page_of(found)
    differ = any(note.startswith("the devices differ") for note in found.notes)
    assert found.title.endswith("2 devices" if differ else "1 device")


def test_of_two_ends_alone_none_is_said_to_differ_among_many():
    open_one = summary("a", None, 210, None)
    others = [summary("100", 100, 50.0, 200), summary("90", 90, 45.0, 180)]
    (pair,) = compared_pairs(studies(open_one, others[0]))
    assert (pair.differ, pair.low) == (True, pytest.approx(1.05))
    among_three = 0
    for found in compared_pairs(studies(open_one, *others)):
        if "a" in (found.larger, found.smaller):
            among_three += 1
            # Three pairs at one joint level: what told two apart does not tell three.
            assert (found.differ, found.low) == (None, None)
    assert among_three == 2


def test_of_three_equal_ones_two_differ_as_often_as_it_says():
    rng = np.random.default_rng(0)
    wrong = 0
    # Of 90% of a normal distribution.
    deviations = 1.6449
    for _ in range(200):
        middles = np.exp(math.log(100.0) + rng.normal(0.0, (0.2, 0.4, 0.6)))
        made = []
        for middle, spread in zip(middles, (0.2, 0.4, 0.6), strict=True):
            factor = math.exp(deviations * spread)
            made.append(summary(str(len(made)), middle, middle / factor, middle * factor))
        wrong += any(pair.differ for pair in compared_pairs(studies(*made)))
    # It is 0.1 or less, as the three pairs depend on each other.
    assert 0.03 < wrong / 200 < 0.13


@pytest.mark.parametrize(
    ("changes", "note"),
    [
        (UNREACHED, "reached"),
        (ALL_STOPPED, "reached"),
        (ONE_SIZE, "at one batch size"),
        ({"best_by_time": changed(summary().best_by_time, confirmed=FEW)}, "2 of 3"),
    ],
)
def test_what_a_study_lacks_is_said_beside_what_there_is(changes, note):
    found = compare(studies(summary("a"), summary("b", **changes)))
    notes = found.studies[1].notes
    assert note in "\n".join(notes)
    # The page escapes what stands in angle brackets.
    assert f"b: {found.studies[1].notes[0]}" in page_of(found).replace("&lt;", "<")


def test_what_studies_lack_is_left_out_of_the_picture():
    lacking = (UNREACHED, ALL_STOPPED, ONE_SIZE)
    made = [summary(f"b{number}", **changes) for number, changes in enumerate(lacking)]
    found = compare(studies(summary("a"), *made))
    figure_of(
        lambda figure: paint_comparison(figure, found), (INCHES_WIDE, 7.0)
    ).draw_without_rendering()


def with_use(study, **hyperparameters):
    """The result of a study whose winner has these further hyper-parameters."""
    made = summary(study)
    return changed(made, best_by_time=changed(made.best_by_time, hyperparameters=hyperparameters))


def gain(ratio=1.45, low=1.3, high=1.7, **changes):
    known = {"level": 0.9, "merit": "time", "at_least": False}
    seeds = {"seeds": 3, "baseline_seeds": 3, "winner_seeds": 3}
    return Gain(ratio=ratio, low=low, high=high, **{**known, **seeds, **changes})


def test_all_hyperparameters_of_a_winner_are_shown():
    made = (
        with_use("a", momentum=0.95, weight_decay=5e-4),
        with_use("b", momentum=0.9),
        summary("c"),
    )
    found = compare(studies(*made))
    assert str(found.studies[0].use) == "B = 128, lr = 0.1, momentum = 0.95, weight_decay = 0.0005"
    rows = cells_of(page_of(found))
    assert column(rows, "momentum") == ["0.95", "0.9", "-"]
    assert column(rows, "weight_decay") == ["0.0005", "-", "-"]
    drawn = figure_of(lambda figure: paint_comparison(figure, found), (INCHES_WIDE, 7.0))
    shown = texts_of(drawn)
    assert {"momentum = 0.95, weight_decay = 0.0005", "momentum = 0.9"} <= shown


def page_of(comparison):
    return comparison_page(comparison, b"a picture")


def texts_of(figure):
    """All texts of a figure that was drawn."""
    found = figure.findobj(match=lambda part: hasattr(part, "get_text"))
    return {text.get_text() for text in found}


def cells_of(page):
    """The rows of the table of studies, by their heads."""
    table = re.search(r"<table.*?</table>", page, flags=re.DOTALL)[0]
    heads = re.findall(r"<th[^>]*>(.*?)</th>", table)
    rows = re.findall(r"<tr>(<td.*?)</tr>", table)
    cells = re.compile(r"<td[^>]*>(.*?)</td>")
    return [dict(zip(heads, cells.findall(row), strict=True)) for row in rows]


# A gain that is a bound has no interval.
def test_the_gain_has_a_column_with_its_interval():
    least = gain(2.4, None, None, at_least=True)
    own = summary("d")
    best = own.best_by_time
    baseline = make_baseline(batch_size=best.batch_size, lr=best.lr)
    own = changed(own, baseline=baseline, configurations=6)
    made = (summary("a", gain=gain()), summary("b", gain=least), summary("c"), own)
    found = compare(studies(*made))
    ratios = [study.gain for study in found.studies]
    assert ratios == [1.45, 2.4, None, None]
    shown = column(cells_of(page_of(found)), "gain")
    # The best that the last study found is the reference itself.
    assert shown == ["1.4 times (1.3 to 1.7)", "at least 2.4 times", "not known", "none"]
    assert gain_text(gain(merit="steps")).endswith("in steps")


def test_critical_batch_sizes_of_like_studies_are_named_apart():
    made = (summary("a", 100.0), summary("b", 101.0), summary("c", 102.0))
    # 100, 101 and 102 are 100 in two digits.
    assert legend_of(compare(studies(*made)).plot()) == ["a: 100", "b: 100", "c: 100"]


def legend_of(figure):
    (legend,) = figure.subfigs[0].legends
    return [text.get_text() for text in legend.get_texts()]


def test_names_are_text_and_differ():
    changed = summary(ODD, workload=ODD, target="val/acc >= 0.9", devices=("H200",))
    # A name with signs of its own, twice; a very long one; letters that fonts lack.
    found = compare(studies(summary(), changed, changed, summary("c" * 300), summary("$x^2$ 日本")))
    names = [study.name for study in found.studies]
    assert names[:3] == ["a", f"{ODD} (outputs/1)", f"{ODD} (outputs/2)"]
    page = page_of(found)
    assert "<b>é" not in page
    assert "a b/&lt;b&gt;é&lt;/b&gt; &amp; &quot;ü&quot; $x^2$ 日本" in page
    workloads, targets, devices = found.notes
    assert workloads.startswith("the workloads differ")
    assert targets.startswith("the targets differ")
    assert devices.startswith("the devices differ")
    drawn = figure_of(lambda figure: paint_comparison(figure, found), (INCHES_WIDE, 7.0))
    texts = []
    for axes in drawn.findobj(match=lambda part: hasattr(part, "texts")):
        texts += [text.get_text() for text in axes.texts]
    shown = "\n".join(texts)
    for part in ("a b/<b>é</b>", "outputs/1)", "$x^2$ 日本", "val/acc >= 0.9", "H200"):
        assert part in shown


@pytest.mark.slow
def test_the_names_of_curves_cover_no_curve_and_no_other_name():
    made = []
    for i in range(6):
        made.append(summary(f"workload {i}", 30.0 * 2**i, s_min=60.0 + 25 * i))
    drawn = compare(studies(*made)).plot()
    drawn.draw_without_rendering()
    (legend,) = drawn.subfigs[0].legends
    assert legend_of(drawn)[::5] == ["workload 0: 30", "workload 5: 960"]
    panel = drawn.subfigs[0].axes[0].get_tightbbox()
    boxes = [text.get_window_extent() for text in legend.get_texts()]
    for i, box in enumerate(boxes):
        assert not any(box.overlaps(other) for other in [panel, *boxes[:i]])
        assert drawn.bbox.x0 <= box.x0 < box.x1 <= drawn.bbox.x1


@pytest.fixture
def folders(tmp_path, monkeypatch):
    """A function that writes studies' folders below outputs/, each with the curve.json of its name."""
    monkeypatch.chdir(tmp_path)

    def write(**texts):
        for name, text in texts.items():
            folder = tmp_path / "outputs" / name
            folder.mkdir(parents=True)
            # None: a folder without the file.
            if text is not None:
                (folder / "curve.json").write_text(
                    text if isinstance(text, str) else text.to_json()
                )
        return [f"outputs/{name}" for name in texts]

    return write


def test_what_is_no_study_is_left_out_with_a_line(folders):
    other = (
        # A file of an earlier schema.
        summary("other")
        .to_json()
        .replace(f'"schema_number": {SCHEMA_NUMBER}', '"schema_number": 0')
    )
    paths = folders(a=summary("a"), empty=None, half='{"study": ', list="[]", other=other)
    # The same study by three paths is one.
    (a,), left_out = read_studies([*paths, "outputs/a/", "outputs/a/curve.json"])
    assert a.name == "a"
    for line in left_out:
        assert line.startswith("left out: outputs/")
    assert len(left_out) == 4
    assert left_out[3] == (
        "left out: outputs/other/curve.json has schema 0, and this version of bstune reads "
        f"{SCHEMA_NUMBER}: "
        "run the same command under another name, study=NAME"
    )
    found = compare([a], left_out)
    page = page_of(found)
    for line in left_out:
        # The beginning of each name.
        assert line.split("outputs/")[1][:4] in page
    with pytest.raises(
        StudyError, match=r"no study to compare\nleft out: outputs/empty has no curve.json"
    ):
        compare(*read_studies(["outputs/empty"]))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "name studies, such as outputs/"),
        (("outputs/nowhere",), "error: there is no outputs/nowhere: give studies' output folders"),
        (("outputs/a", "--output", "outputs/a/curve.json"), "--output outputs/a/curve.json"),
    ],
)
def test_bad_input_ends_in_one_line_with_nothing_written(
    bstune, folders, tmp_path, arguments, message
):
    folders(a=summary())
    status, out, err = bstune("compare", *arguments)
    assert (status, out) == (2, "")
    assert message in err
    assert not [*tmp_path.rglob("comparison*")]


@pytest.mark.usefixtures("rendered")
def test_the_command_writes_both_files_and_says_where(bstune, folders, tmp_path):
    folders(a=summary("a"), b=summary("b", 900.0, 800.0, 1000.0), broken="{")
    status, out, err = bstune(
        "compare", "outputs/a", "outputs/b", "outputs/broken", "--output", "shown"
    )
    assert (status, err) == (0, "")
    for line in (
        "a · digits · val/loss <= 0.1 · cpu, 1 thread",
        (
            "use B = 128, lr = 0.1: 2.00 s, 110 steps (3 of 3 fresh seeds reached it; 90%: 1 to 3 "
            "s, 90"
        ),
        "critical batch size 900 (90%: 800 to 1000)",
        "LAW       S = S_min (1 + B_crit/B): S*(B) lies within 0% of it",
        # 9 e^-hypot(log(900/800), log 2) = 4.46, and 9 e^hypot(log(1000/900), log 2) = 18.1.
        "CRITICAL  b over a: 9 times (4.46 to 18.1), differ",
        "left out: outputs/broken/curve.json is not JSON",
        "page      shown/comparison.html",
    ):
        assert line in out, out
    figure = (tmp_path / "shown/comparison.png").read_bytes()
    assert figure[:4] == b"\x89PNG"
    page = (tmp_path / "shown/comparison.html").read_text()
    assert base64.b64encode(figure).decode() in page
    assert page.endswith("</html>\n")


# Which room imports which is held by test_layers.py, and that replaying a study imports none by
# test_run.py.
@pytest.mark.slow
def test_comparing_imports_no_training_library(folders, tmp_path):
    paths = folders(a=summary("a"), b=summary("b"))
    script = (
        "import sys; from bstune.__main__ import main; sys.argv = ['bstune', 'compare', "
        f"*{paths}]; status = main(); "
        "assert (status, {'torch', 'lightning', 'mlflow', 'optuna', 'hydra'} & "
        "set(sys.modules)) == (0, set())"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, cwd=tmp_path, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.slow
@pytest.mark.usefixtures("rendered")
def test_the_page_shows_its_picture_in_a_browser_and_asks_nothing_of_the_network(
    bstune, folders, tmp_path
):
    folders(
        a=changed(with_use(ODD, momentum=0.95, weight_decay=5e-4), gain=gain()),
        b=summary("b", 900.0, 800.0, 1000.0),
        c=summary("c", **UNREACHED),
        d=summary("d", **ONE_SIZE),
    )
    paths = ("outputs/a", "outputs/b", "outputs/c", "outputs/d")
    assert bstune("compare", *paths)[0] == 0
    # A picture that cannot be shown has no width.
    drawn = "return document.querySelector('img').naturalWidth === 900"
    with opened_browser(tmp_path / "profile", 1280, 900) as driver:
        # A screen and a phone.
        for width in (1280, 390):
            resize(driver, width, 900)
            driver.get((tmp_path / "comparison.html").as_uri())
            assert awaited(driver, drawn)
            assert errors(driver) == []
            # Nothing but the table may be scrolled sideways.
            assert driver.execute_script("return document.documentElement.scrollWidth") == width
            fetched = driver.execute_script(
                "return performance.getEntriesByType('resource').map(one => one.name)"
            )
            for name in fetched:
                assert name.startswith(("data:", "blob:"))
            shown = driver.find_element("tag name", "body").text
            for part in (ODD, "c: ", "d: ", "differ"):
                assert part in shown
            # On a wide screen the last column is seen, on a phone it is scrolled to.
            box = "const box = document.querySelector('.scroll'); "
            beyond = driver.execute_script(f"{box}return box.scrollWidth - box.clientWidth")
            assert (beyond > 0) == (width == 390)
            scrolled = f"{box}box.scrollLeft = 9999; return box.scrollLeft"
            assert driver.execute_script(scrolled) == beyond
