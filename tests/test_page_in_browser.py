"""The page of a study as it behaves: what is clicked, typed and pointed at, and names that are no markup."""

from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest
from browser import awaited, errors, opened_browser, resize
from test_page import NASTY, whole_study
from test_running_page import made as running_study

from bstune.report import running_page
from bstune.report.page import write_page

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("whole_pages")]
webdriver = pytest.importorskip("selenium.webdriver", reason="needs pip install 'bstune[browser]'")
DRAWN = "return !document.querySelector('figure.chart:not(:has(svg.main-svg))')"


@pytest.fixture(scope="module")
def opened(tmp_path_factory):
    """A browser, and the page of a study whose every name is markup."""
    folder = tmp_path_factory.mktemp("page")
    study = whole_study(
        train="bstune workload=w trial.lr=0.1",
        **dict.fromkeys(("study", "workload", "target", "metric"), NASTY),
        devices=(NASTY,),
    )
    named = {
        "device": NASTY,
        "message": NASTY,
        "versions": {NASTY: NASTY},
        "hyperparameters": {NASTY: 1.0},
    }
    trials = tuple(replace(trial, **named) for trial in study.files.trials)
    files = replace(study.files, trials=trials, notes=(NASTY,))
    write_page(replace(study, files=files), folder / "report.html")
    with opened_browser(folder / "profile", 1280, 900) as driver:
        yield driver, (folder / "report.html").as_uri()


@pytest.fixture
def driver(opened):
    """The browser with the page opened anew."""
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
    cells = (
        "return [...document.querySelectorAll('table.sortable tbody tr')].map(row => "
        f"row.cells[{at}].innerText)"
    )
    return driver.execute_script(cells)


def test_names_are_text_and_the_table_sorts(driver):
    assert errors(driver) == []
    assert NASTY in driver.find_element("tag name", "h1").text
    # A first click sorts from the least, by numbers, not by text.
    assert column(driver, "steps") == ["3", "66", "83", "90", "150", "154", "170", "435"]
    # A second click turns it round.
    assert column(driver, "steps")[0] == "435"
    # What is not known comes last, either way.
    assert column(driver, "time to target")[-3:] == ["-"] * 3
    assert column(driver, "time to target")[-3:] == ["-"] * 3


def test_it_opens_offline_without_errors_at_any_width(opened):
    driver, page = opened
    driver.execute_cdp_cmd("Network.enable", {})
    offline = {"offline": True, "latency": 0, "downloadThroughput": 0, "uploadThroughput": 0}
    driver.execute_cdp_cmd("Network.emulateNetworkConditions", offline)
    for width in (1280, 400):
        resize(driver, width, 900)
        driver.get(page)
        assert awaited(driver, DRAWN)
        assert driver.execute_script("return document.querySelectorAll('svg.main-svg').length") > 4
        asked = driver.execute_script(
            "return performance.getEntriesByType('resource').map(entry => entry.name)"
        )
        assert [name for name in asked if not name.startswith(("data:", "blob:"))] == []
        assert errors(driver) == []
        assert driver.execute_script("return document.documentElement.scrollWidth") <= width
        assert "USE" in driver.find_element("tag name", "body").text
    driver.execute_cdp_cmd("Network.disable", {})
    resize(driver, 1280, 900)


def test_a_trial_is_told_where_it_is_pointed_at(driver):
    dot = driver.find_elements("css selector", "figure.chart path.point")[0]
    driver.execute_script("arguments[0].scrollIntoView({block: 'center'})", dot)
    webdriver.ActionChains(driver).move_to_element(dot).perform()
    told = awaited(driver, "return document.querySelector('.hovertext')?.textContent")
    assert told.startswith("trial 0")
    assert NASTY in told


def test_heads_and_commands_are_reached_by_the_keyboard(driver):
    reached = list[str]()
    driver.execute_script("document.body.focus()")
    # More than the page has to stop at.
    for _ in range(80):
        webdriver.ActionChains(driver).send_keys(webdriver.Keys.TAB).perform()
        words, outline = driver.execute_script(
            "const one = document.activeElement; "
            "return [`${one.tagName} ${one.textContent}`, getComputedStyle(one).outlineStyle]"
        )
        if words.startswith("BODY"):
            break
        assert outline != "none", words
        reached.append(words)
    heads = [f"BUTTON {name}" for name in ("trial", "batch size", "learning rate", "status")]
    assert set(heads) <= set(reached)
    assert reached.count("BUTTON Copy") == 1
    # What zooms by the pointer alone is passed by.
    assert not [words for words in reached if words == "BUTTON "]


def test_a_command_is_copied(driver):
    driver.execute_cdp_cmd("Browser.grantPermissions", {"permissions": ["clipboardReadWrite"]})
    copy = driver.find_element("css selector", "button.copy")
    copy.click()
    assert awaited(driver, "return document.querySelector('button.copy').textContent === 'Copied'")
    taken = driver.execute_async_script(
        "navigator.clipboard.readText().then(arguments[0], (error) => arguments[0](String(error)))"
    )
    assert taken == driver.find_element("css selector", "pre.command").text


def test_heads_are_words_while_a_page_is_printed(driver):
    heads = "return document.querySelectorAll('table.sortable th button').length"
    count = driver.execute_script(heads)
    assert count > 10
    driver.execute_script("dispatchEvent(new Event('beforeprint'))")
    # Buttons do not print.
    assert driver.execute_script(heads) == 0
    assert driver.execute_script("return document.querySelector('table.sortable th').innerText")
    driver.execute_script("dispatchEvent(new Event('afterprint'))")
    assert driver.execute_script(heads) == count


SEEN = """
const seen = (one) => { const box = one.getBoundingClientRect(); return box.width > 50 && box.height > 5; };
return [...document.querySelectorAll(arguments[0])].map(seen);
"""


def test_on_paper_charts_are_whole_pictures_and_all_trials_are_there(driver):
    for width in (1280, 700):
        resize(driver, width, 900)
        driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "print"})
        pictures = driver.execute_script(SEEN, "figure.chart .static > svg")
        assert (len(pictures), all(pictures)) == (9, True)
        # The charts that scripts draw give way to the pictures.
        assert not any(driver.execute_script(SEEN, "figure.chart .plot"))
        cut = (
            "return [...document.querySelectorAll('.static > svg, .tall')].filter((one) => "
            "one.getBoundingClientRect().right > innerWidth || getComputedStyle(one).overflowY "
            "=== 'auto')"
        )
        assert driver.execute_script(cut) == []
        assert not any(driver.execute_script(SEEN, "button.copy"))
    resize(driver, 1280, 900)
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": ""})


def test_without_scripts_no_box_is_empty(driver):
    driver.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": True})
    try:
        driver.refresh()
        evaluated = {"expression": f"(function() {{ {SEEN} }})", "returnByValue": True}
        # Nothing is shown that would do nothing.
        for selector, count in (("figure.chart .static > svg", 9), ("button, input", 0)):
            evaluated["expression"] = f"(function() {{ {SEEN} }})({selector!r})"
            seen = driver.execute_cdp_cmd("Runtime.evaluate", evaluated)["result"]["value"]
            assert sum(seen) == count
    finally:
        driver.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": False})


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
    # The fixture has reset what media the page sees.
    light = driver.execute_script(fill)
    dark = {"features": [{"name": "prefers-color-scheme", "value": "dark"}]}
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", dark)
    assert awaited(driver, f"const now = (() => {{ {fill} }})(); return now !== '{light}' && now")
    assert errors(driver) == []


def test_the_page_of_a_running_study_looks_for_a_newer_one_and_stays_in_place(
    opened, tmp_path, monkeypatch
):
    # In place of 15.
    monkeypatch.setattr(running_page, "REFRESH_SECONDS", 1)
    driver = opened[0]
    path = tmp_path / "report.html"
    now = datetime.now(UTC)
    lines = [[("SO FAR", (f"{count} of 9 configurations tried",))] for count in (4, 5)]
    pages = [replace(running_study(), lines=told, written=now) for told in lines]
    path.write_text(running_page.running_page(pages[0]))
    driver.get(path.as_uri())
    assert "4 of 9" in driver.find_element("tag name", "dl").text
    assert " ago" in driver.find_element("id", "age").text
    assert driver.find_element("css selector", ".static svg").is_displayed()
    driver.execute_script("scrollTo(0, 400)")
    path.write_text(running_page.running_page(pages[1]))
    awaited(driver, "return document.querySelector('dl').textContent.includes('5 of 9')")
    # The reader is where they were.
    assert awaited(driver, "return scrollY") == 400
    write_page(whole_study(), path)
    awaited(driver, "return document.querySelector('h1').textContent.includes('configurations')")
    # The report has taken its place: it has an answer and no age.
    assert not driver.find_elements("id", "age")
    assert errors(driver) == []


def test_the_page_of_a_study_that_was_killed_says_how_old_it_is(opened, tmp_path):
    driver = opened[0]
    path = tmp_path / "report.html"
    old = replace(running_study(), written=datetime.now(UTC) - timedelta(days=2))
    path.write_text(running_page.running_page(old))
    driver.get(path.as_uri())
    assert ", 48 h ago; reload it" in driver.find_element("id", "age").text
