"""The page of a study as it behaves: what is clicked, typed and pointed at, and names that are no markup."""

from dataclasses import replace

import pytest
from browser import awaited, errors, opened_browser
from test_page import NASTY, whole_study

from bstune.report.page import write_page

pytestmark = pytest.mark.slow
webdriver = pytest.importorskip("selenium.webdriver", reason="needs pip install 'bstune[browser]'")
DRAWN = "return !document.querySelector('figure.chart:not(:has(svg.main-svg))')"


@pytest.fixture(scope="module")
def opened(tmp_path_factory):
    """Return a browser, and the page of a study whose every name is markup."""
    folder = tmp_path_factory.mktemp("page")
    study = whole_study(
        **dict.fromkeys(("study", "workload", "target", "metric"), NASTY), devices=(NASTY,)
    )
    named = {
        "device": NASTY,
        "message": NASTY,
        "versions": {NASTY: NASTY},
        "hyperparameters": {NASTY: 1.0},
    }
    trials = tuple(replace(trial, **named) for trial in study.files.trials)
    beside = replace(study.files, trials=trials, notes=(NASTY,))
    write_page(replace(study, files=beside), folder / "report.html")
    with opened_browser(folder / "profile", 1280, 900) as driver:
        yield driver, (folder / "report.html").as_uri()


@pytest.fixture
def driver(opened):
    """Return the browser with the page opened anew."""
    driver, page = opened
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})
    driver.get(page)
    assert awaited(driver, DRAWN)
    return driver


def column(driver, name):
    """Click on a column's head; return the cells below it."""
    heads = driver.find_elements("css selector", "table.sortable th button")
    at = [head.text for head in heads].index(name)
    driver.execute_script("arguments[0].click()", heads[at])
    cells = f"return [...document.querySelectorAll('table.sortable tbody tr')].map(row => row.cells[{at}].innerText)"
    return driver.execute_script(cells)


def test_names_are_text_and_the_table_sorts(driver):
    assert errors(driver) == []
    assert NASTY in driver.find_element("tag name", "h1").text
    assert column(driver, "steps") == ["3", "66", "83", "90", "150", "154", "170", "435"]
    assert column(driver, "steps")[0] == "435"
    assert (
        column(driver, "time to target")[-3:] == ["-"] * 3
    )  # what is not known comes last, either way
    assert column(driver, "time to target")[-3:] == ["-"] * 3


def test_a_trial_is_told_where_it_is_pointed_at(driver):
    dot = driver.find_elements("css selector", "figure.chart path.point")[0]
    driver.execute_script("arguments[0].scrollIntoView({block: 'center'})", dot)
    webdriver.ActionChains(driver).move_to_element(dot).perform()
    told = awaited(driver, "return document.querySelector('.hovertext')?.textContent")
    assert told.startswith("trial 0")
    assert NASTY in told


def test_the_calculator_says_what_devices_can_do(driver):
    said = "return document.querySelector('output').textContent"
    assert driver.execute_script(said).startswith("B = ")
    devices = driver.find_element("name", "devices")
    for typed, expected in (
        ("1", "efficiency 100%"),
        ("100000", "more than the curve's largest"),
        ("0", "Give a number"),
    ):
        devices.clear()
        devices.send_keys(typed)
        assert expected in driver.execute_script(said)


def test_colours_follow_the_readers(driver):
    fill = "return document.querySelector('figure.chart .xtitle').style.fill"
    light = driver.execute_script(fill)
    dark = {"features": [{"name": "prefers-color-scheme", "value": "dark"}]}
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", dark)
    assert awaited(driver, f"const now = (() => {{ {fill} }})(); return now !== '{light}' && now")
    assert errors(driver) == []
