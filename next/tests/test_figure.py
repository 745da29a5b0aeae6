import pytest
from results import BASELINE, BEST, STATES, records, result

from bstune.core.records import Target, last_of_chains
from bstune.report.figure import curve_figure


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
