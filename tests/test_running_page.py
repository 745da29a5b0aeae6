"""The page of a study that runs: what it shows, that it looks for a newer one, and that no answer stands on it."""

import re
from datetime import UTC, datetime

import pytest
from test_page import NASTY, SIZES, Page, study_of
from toolbox import make_trial

from bstune.report.running_page import (
    HEAD_BYTES,
    RUNNING_PAGE_TAG,
    StudySoFar,
    is_running_page,
    running_page,
)

WRITTEN = datetime(2026, 11, 26, 17, 24, 27, tzinfo=UTC)
TRIALS = [make_trial(i, size, steps=round(60 * (1 + 100 / size))) for i, size in enumerate(SIZES)]


def made(trials=TRIALS, is_running=True, **changes):
    lines = [("SO FAR", ("4 of 64 configurations tried",))]
    heads = ("batch sizes", "trials")
    rows = [("16 to 31", "1")] if trials else []
    study = study_of(trials, **changes)
    return StudySoFar(study, lines, heads, rows, WRITTEN, is_running)


def test_it_shows_what_there_is_and_no_answer():
    found = Page(running_page(made()))
    headings = ["The curve so far", "Learning curves", "Progress of the search", "Trials"]
    assert found.headings == headings
    # Four charts, each with something on it.
    assert [count > 0 for count in found.drawn] == [True] * 4
    assert "4 of 64 configurations tried" in found.texts
    assert not {"USE", "GAIN", "NEXT", "CAUTION"} & {*found.texts}
    # Before the first trial has ended there is nothing to draw.
    assert Page(running_page(made(trials=[]))).headings == []


@pytest.mark.parametrize("is_running", [True, False])
def test_it_looks_for_a_newer_one_only_while_the_study_runs(is_running, tmp_path):
    whole = running_page(made(is_running=is_running))
    assert (whole.count('http-equiv="refresh"'), whole.count("location.reload()")) == (
        (1, 1) if is_running else (0, 0)
    )
    # The only script that the policy lets run is the page's own.
    assert whole.count("'sha256-") == whole.count("</script>") - len(Page(whole).charts)
    assert '<time datetime="2026-11-26T17:24:27+00:00"' in whole
    path = tmp_path / "report.html"
    path.write_text(whole)
    assert is_running_page(path) == is_running
    assert not is_running_page(tmp_path / "none.html")


def test_names_are_text_and_the_mark_stands_within_what_is_read():
    names = dict.fromkeys(("study", "workload", "target", "metric"), NASTY)
    whole = running_page(made(**names))
    assert "<b>x</b>" not in whole
    assert len(re.findall("<script>", whole)) == 1
    assert RUNNING_PAGE_TAG.strip() in whole[:HEAD_BYTES]
