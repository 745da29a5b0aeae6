"""What people see of their studies in MLflow, in a browser. Read from the pages alone."""

import contextlib
import io
import sys

import pytest
from browser import awaited, errors, mlflow_server, opened_browser, skip_without_chromium

from bstune.__main__ import main

pytestmark = pytest.mark.slow
TABLES = ("fashion_mlp", "cifar_mlp")
# Of each chart: its title, the kinds of its axes, and for each run how many pixels its curve spans,
# across and down.
CHARTS = """
return [...document.querySelectorAll('.js-plotly-plot')].filter(plot => plot._fullLayout).map(plot => ({
  title: plot.closest('[data-testid="experiment-view-compare-runs-card"]').innerText.split('\\n')[0],
  axes: [plot._fullLayout.xaxis.type, plot._fullLayout.yaxis.type],
  drawn: Object.fromEntries([...plot.querySelectorAll('.scatterlayer .trace')].map(trace => {
    const box = trace.querySelector('path.js-line').getBoundingClientRect();
    return [trace.__data__[0].trace.name.split(' · ')[0], [box.width, box.height]];
  })),
}))
"""
# What pages of MLflow 3.17.2 log as errors on a server without users, and of sizes that change as
# they are drawn.
OF_MLFLOW = ("/users/current", "ResizeObserver loop")


@pytest.fixture(scope="module")
def studies(tmp_path_factory):
    """Replay two studies, by a sampler that decides at once, and serve them.

    Yield a browser, MLflow's address and the page that each study printed.
    """
    skip_without_chromium()
    folder = tmp_path_factory.mktemp("studies")
    printed = []
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.delenv("MLFLOW_TRACKING_URI", raising=False)
        for table in TABLES:
            arguments = (
                "workload=replay",
                f"workload.table={table}",
                f"study={table}",
                "search.trials=10",
            )
            patch.setattr(
                sys, "argv", ["bstune", *arguments, "sampler=random", "search.replicates=1"]
            )
            with contextlib.redirect_stdout(io.StringIO()) as out:
                assert main() == 0
            printed += [word for word in out.getvalue().split() if "/#/experiments/" in word]
    assert len({*printed}) == 1
    with (
        mlflow_server(folder) as address,
        opened_browser(folder / "profile", 1280, 1000) as driver,
    ):
        yield driver, address, printed[0].partition("/#")[2]


def test_the_view_that_a_study_prints_shows_the_curves_over_each_other_on_log_axes(studies):
    driver, address, page = studies
    driver.get(f"{address}/#{page}")
    charts = awaited(
        driver,
        CHARTS,
        lambda found: sum(len(chart["drawn"]) for chart in found) >= 4 * len(TABLES),
    )
    drawn = {chart["title"]: chart["drawn"] for chart in charts}
    ends = ("over batch size", "of the best trials")
    assert {*drawn} == {f"{unit} to target {end}" for unit in ("Steps", "Seconds") for end in ends}
    for chart in charts:
        assert chart["axes"] == ["log", "log"]
        assert sorted(name.removeprefix("replay-") for name in chart["drawn"]) == sorted(TABLES)
        assert all(min(pixels) > 20 for pixels in chart["drawn"].values())
    assert "bstune: curves over batch size" in driver.find_element("tag name", "body").text
    assert [line for line in errors(driver) if not any(one in line for one in OF_MLFLOW)] == []


def test_a_studys_run_shows_the_answer_and_the_figure(studies):
    driver, address, page = studies
    driver.get(f"{address}/#{page}")
    run = awaited(driver, "return document.querySelector('a[href*=\"/runs/\"]')?.href")
    driver.get(run)
    note = awaited(driver, "return document.querySelector('pre')?.innerText")
    assert "USE" in note
    assert "DEVICES" in note
    picture = (
        "return [...document.images].find(image => image.src.includes('curve.png'))?.naturalWidth"
    )
    assert awaited(driver, picture) >= 900
    link = 'return [...document.links].find(link => link.innerText == "the study\'s trials").href'
    driver.get(driver.execute_script(link))
    assert awaited(
        driver,
        "return [...document.links].some(link => /^B [0-9,]+ · lr /.test(link.innerText))",
    )
