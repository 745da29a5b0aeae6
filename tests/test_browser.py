"""What people see in a browser: the studies' curves in MLflow. Read from the pages, not from what was sent."""

import contextlib
import io
import sys

import pytest
from browser import awaited, errors, mlflow_server, opened_browser, skip_without_chromium

from bstune.__main__ import main

pytestmark = pytest.mark.slow
TABLES = ("fashion_mlp", "cifar_mlp", "mnist_cnn")
# Of each chart: its title, the kinds of its axes, and for each run how many points of its curve lie apart on the page.
CHARTS = """
return [...document.querySelectorAll('.js-plotly-plot')].filter(plot => plot._fullLayout).map(plot => ({
  title: plot.closest('[data-testid="experiment-view-compare-runs-card"]')?.innerText.split('\\n')[0],
  axes: [plot._fullLayout.xaxis.type, plot._fullLayout.yaxis.type],
  drawn: Object.fromEntries([...plot.querySelectorAll('.scatterlayer .trace')].map(trace => [
    trace.__data__[0].trace.name, trace.querySelector('path.js-line').getAttribute('d').split(/[LHV]/).length
  ])),
}))
"""
# What pages of MLflow 3.17.2 log as errors on a server without users, and of sizes that change as they are drawn.
OF_MLFLOW = ("/users/current", "ResizeObserver loop")


@pytest.fixture(scope="module")
def studies(tmp_path_factory):
    """Replay three studies and serve them; return MLflow's address and the page that each study printed."""
    skip_without_chromium()
    folder, printed = tmp_path_factory.mktemp("studies"), []
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.delenv("MLFLOW_TRACKING_URI", raising=False)
        for table in TABLES:
            arguments = ("workload=replay", f"workload.table={table}", f"study={table}", "search.trials=40")
            patch.setattr(sys, "argv", ["bstune", *arguments, "search.replicates=1"])
            with contextlib.redirect_stdout(io.StringIO()) as out:
                assert main() == 0
            printed += [word for word in out.getvalue().split() if "/#/experiments/" in word]
    assert len({*printed}) == 1
    with mlflow_server(folder) as address:
        yield address, printed[0].partition("/#")[2]


def test_the_view_that_a_study_prints_shows_the_curves_over_each_other_on_log_axes(studies, tmp_path):
    address, page = studies
    with opened_browser(tmp_path / "profile", 1280, 1000) as driver:
        driver.get(f"{address}/#{page}")
        ready = "return document.querySelectorAll('.js-plotly-plot .scatterlayer .trace').length >= 12"
        awaited(driver, ready)
        charts = {chart["title"]: chart for chart in driver.execute_script(CHARTS)}
        steps = charts["curve/steps_to_target_fit"]
        assert steps["axes"] == ["log", "log"]
        assert sorted(name.split(" · ")[0] for name in steps["drawn"]) == sorted(TABLES)
        assert all(points > 10 for points in steps["drawn"].values())
        assert charts["curve/time_to_target_fit"]["axes"] == ["log", "log"]
        assert "bstune: curves over batch size" in driver.find_element("tag name", "body").text
        assert [line for line in errors(driver) if not any(one in line for one in OF_MLFLOW)] == []


def test_a_studys_run_shows_the_answer_and_the_figure(studies, tmp_path):
    address, page = studies
    with opened_browser(tmp_path / "profile", 1280, 1000) as driver:
        driver.get(f"{address}/#{page}")
        run = awaited(driver, "return document.querySelector('a[href*=\"/runs/\"]')?.href")
        driver.get(run)
        note = awaited(driver, "return document.querySelector('pre')?.innerText")
        assert "USE" in note
        assert "CRITICAL" in note
        picture = "return [...document.images].find(image => image.src.includes('curve.png'))?.naturalWidth"
        assert awaited(driver, picture) >= 900
        trials = driver.find_element("partial link text", "the study's trials")
        driver.get(trials.get_attribute("href"))
        assert awaited(driver, "return [...document.links].some(link => /^B \\\\d+ · lr /.test(link.innerText))")
