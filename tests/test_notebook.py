import re
from dataclasses import replace

import pytest
from builders import result_of
from rich.text import Text
from toolbox import make_survey, make_trial

from bstune.core.errors import HardwareError
from bstune.report.answer import Answer
from bstune.report.compare import compare
from bstune.report.compared_study import compared_study
from bstune.report.drawing import figure_of
from bstune.report.notebook import answer_html, printed_html, table_html

PICTURE = "src='data:image/png;base64,iVBOR"


def picture():
    return figure_of(lambda figure: None, (1.0, 1.0), 20)


def rows(html):
    return [re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row) for row in html.split("<tr>")[1:]]


def test_an_answer_is_a_row_a_line_and_its_picture():
    lines = (("USE", ("B = 64", "lr = 0.1")), ("CAUTION", tuple("abcdefghi")))
    actions = (("NEXT", ("bstune x",)), ("MORE", ("left out",)))
    html = answer_html(Answer("asked", "answered", lines, actions, ()), picture(), "it's")
    labels, texts = zip(*rows(html), strict=True)
    # What a page has besides is left out.
    assert labels == ("USE", "CAUTION", "NEXT")
    # A row's lines stay lines.
    assert texts[0] == "B = 64<br>lr = 0.1"
    assert re.fullmatch(r"(\w<br>)+\d more in the page", texts[1])
    assert PICTURE in html
    assert "alt='it&#x27;s'" in html


@pytest.mark.parametrize(
    "show",
    [
        lambda text: table_html([text], [[text]]),
        lambda text: printed_html(Text(text)),
        lambda text: answer_html(Answer(text, "", ((text, (text,)),), (), ()), picture(), text),
    ],
)
def test_texts_of_a_folder_are_no_html(show):
    html = show("<script>\x1b")
    assert "<script>" not in html
    assert "\x1b" not in html
    assert "&lt;script&gt;" in html


@pytest.mark.slow
def test_a_survey_shows_its_tables_and_its_roofline(monkeypatch):
    # As a kernel of Jupyter has it.
    monkeypatch.setenv("FORCE_COLOR", "1")
    survey = make_survey()
    assert "x1b" not in survey._repr_html_()
    assert PICTURE in survey._repr_html_()
    assert "1,000" in survey._repr_html_()
    assert len(survey.plot().axes) == 2
    # A notebook shows a text beside the HTML.
    assert len(repr(survey)) < 100


def test_a_survey_without_a_roofline_shows_its_tables():
    survey = replace(make_survey(), cost=None, notes=("no roofline: it failed",))
    assert "<img" not in survey._repr_html_()
    with pytest.raises(HardwareError, match="no roofline: it failed"):
        survey.plot()


def test_a_comparison_shows_a_row_a_study_and_its_picture():
    found = compare(
        [
            compared_study(result_of([make_trial(0)]), "outputs/a"),
            compared_study(result_of([make_trial(0)]), "outputs/b"),
        ]
    )
    html = found._repr_html_()
    # The heads and two studies.
    assert len(rows(html)) == 1 + 2
    assert PICTURE in html
    assert len(found.plot().subfigs) == 2
    assert len(repr(found)) < 100
