import base64
import gzip
import hashlib
import json
import re
from html.parser import HTMLParser

import pytest

from bstune.report.html import (
    Cell,
    Section,
    anchor,
    axis,
    chart,
    label,
    page,
    paragraph,
    picture,
    table,
    text,
)

NASTY = "a</script><script>alert('1')</script><b>\"'&ü — 批"
DOT = {"x": [1], "y": [2]}


class Elements(HTMLParser):
    """The tags and the texts of a page, as a browser sees them."""

    def __init__(self, whole):
        super().__init__()
        self.tags = []
        self.texts = []
        self.feed(whole)

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))

    def handle_data(self, data):
        self.texts.append(data)


def scripts(whole):
    return re.findall(r"<script>(.*?)</script>", whole, flags=re.DOTALL)


def test_what_a_study_names_is_text_everywhere():
    body = (
        paragraph(NASTY)
        + table([NASTY], [[NASTY], [Cell(NASTY, NASTY)]])
        + f'<p title="{text(NASTY)}"></p>'
    )
    body += chart(
        [{"x": [1], "y": [2], "name": label(NASTY), "text": [NASTY]}],
        {"xaxis": axis(NASTY)},
        caption=NASTY,
        alt=NASTY,
    )
    found = Elements(page(NASTY, [Section(NASTY, body), Section("", "<p>x</p>")]))
    tags = [tag for tag, _ in found.tags]
    assert "b" not in tags
    # The scripts are plotly's, the page's, and the chart's data.
    assert tags.count("script") == 3
    # These are the title, headings, link, paragraph, cells, caption, the picture's axis and legend.
    assert found.texts.count(NASTY) == 11
    pictures = []
    titles = []
    for _, attributes in found.tags:
        if attributes.get("role") == "img":
            pictures.append(attributes.get("aria-label"))
        if "title" in attributes:
            titles.append(attributes["title"])
    assert pictures == [NASTY]
    assert titles == [NASTY]


def test_a_picture_lies_in_the_page_with_its_text():
    found = Elements(page("t", [Section("a", picture(b"png", NASTY, NASTY))]))
    (image,) = [attributes for tag, attributes in found.tags if tag == "img"]
    assert image == {"alt": NASTY, "src": "data:image/png;base64,cG5n"}
    assert NASTY in found.texts


def test_a_charts_data_come_back_and_name_nothing_as_markup():
    spec = chart(
        [{"x": [1.23456789, None, float("nan")], "y": [1, 2, 3], "text": [NASTY]}],
        {"yaxis": axis(NASTY, log=False)},
    )
    inside = re.search(r'<script type="application/json">(.*?)</script>', spec, flags=re.DOTALL)[1]
    found = json.loads(inside)
    assert found["data"] == [{"x": [1.2346, None, None], "y": [1, 2, 3], "text": [NASTY]}]
    assert found["layout"]["yaxis"]["title"]["text"] == label(NASTY)
    assert "<" not in label(NASTY)
    assert "<" not in inside


@pytest.mark.usefixtures("whole_pages")
def test_only_the_pages_own_scripts_may_run_and_nothing_may_be_asked_for():
    whole = page("t", [Section("a", chart([DOT], {}))], ["let x = 1;"])
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', whole)[1]
    rules = dict(rule.split(" ", 1) for rule in policy.split("; "))
    assert rules["default-src"] == "'none'"
    assert set(re.findall(r"blob:|data:|https?:", policy)) == {"data:", "blob:"}
    packed = re.search(r'<script id="plotly" type="application/gzip">(.*?)</script>', whole)[1]
    run = [*map(str.encode, scripts(whole)), gzip.decompress(base64.b64decode(packed))]
    hashes = []
    for script in run:
        digest = base64.b64encode(hashlib.sha256(script).digest())
        hashes.append(f"'sha256-{digest.decode()}'")
    assert rules["script-src"].split() == hashes
    assert len(hashes) == 3
    assert not re.search(
        r"<(?:script|link|img|iframe)[^>]*(?:src|href)=[\"']?(?:https?:)?//", whole
    )
    # A browser would turn it into another byte than was hashed.
    assert "\r" not in whole


@pytest.mark.usefixtures("whole_pages")
def test_plotly_is_inside_once_and_only_where_there_is_a_chart():
    assert len(page("t", [Section("a", paragraph("x"))])) < 20_000
    two = page("t", [Section("a", chart([DOT], {}) + chart([DOT], {}))])
    assert 1_000_000 < len(two.encode()) < 2_100_000
    assert two.count('type="application/gzip"') == 1


def test_a_chart_of_no_points_is_none():
    assert chart([], {}) == chart([{"x": [], "name": "a"}], {}) == ""
    assert json.loads(re.search(r"json\">(.*?)</script>", chart([{"x": []}, DOT], {}))[1])[
        "data"
    ] == [DOT]


@pytest.mark.parametrize(
    ("values", "changes", "dtick"),
    [
        ([1, 2000], {}, 1),
        ([1, 200], {}, "D2"),
        # Neither 20 nor 50 lies between them.
        ([26, 45, None, 0], {}, None),
        ([26, 45], {"range": [0, 2.3]}, "D2"),
        ([1, 2000], {"range": [1.4, 1.6]}, None),
        ([None], {}, None),
    ],
)
def test_an_axis_of_less_than_two_decades_has_plotlys_own_ticks(values, changes, dtick):
    spec = chart([{"x": [1] * len(values), "y": values}], {"yaxis": axis("seconds", **changes)})
    found = json.loads(re.search(r'json">(.*?)</script>', spec)[1])["layout"]["yaxis"]
    assert (found.get("dtick"), "nticks" in found) == (dtick, dtick is None)


@pytest.mark.parametrize(
    ("title", "found"), [("Config and versions", "config-and-versions"), ("S(B) & T", "s-b-t")]
)
def test_anchors(title, found):
    assert anchor(title) == found


def test_a_table_sorts_by_values_and_sets_words_to_the_left():
    whole = table(["n", "w"], [(Cell("12,000", 12000), "x"), (Cell("-", None), "y")])
    # Its heads become buttons by the page's script: without that, they would do nothing.
    assert '<th scope="col">n</th><th scope="col" class="words">w</th>' in whole
    assert "<button" not in whole
    assert re.findall(r'<td[^>]*data-value="([^"]*)"', whole) == ["12000", "x", "", "y"]
    assert "sortable" not in table(["n"], [["x"]], sortable=False)
