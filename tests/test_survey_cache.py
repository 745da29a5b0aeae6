"""The cache of surveys: what it depends on, and what is measured again."""

from dataclasses import replace

import pytest
import torch
from builders import resolved
from toolbox import entries, make_survey

from bstune.hardware import survey_cache
from bstune.hardware.survey_cache import SURVEYS, cached_survey, read_survey
from bstune.hardware.threads import ThreadChoice
from bstune.trial.backend import make_protocol, make_space
from bstune.trial.workload import load_data

# One batch size was not timed, another one once alone.
IN_HASTE = replace(make_survey().measured, left_out=(64,), cut=(4,))


@pytest.fixture
def cached(monkeypatch, tmp_path):
    """The survey of digits under overrides: the cached one, or else ``found``; and whether it was cached."""
    data = load_data(*resolved("workload=digits", "device=cpu"))

    def of(found, log, *overrides):
        monkeypatch.setattr(survey_cache, "measure", lambda *arguments: found)
        options, recipe = resolved(
            "workload=digits", "device=cpu", "threads=1", f"hardware.cache={tmp_path}", *overrides
        )
        space = make_space(options)
        protocol = make_protocol(options, recipe)
        return cached_survey(options, recipe, space, protocol, data, None, log)

    return of


@pytest.mark.slow
def test_what_a_survey_depends_on(cached, tmp_path):
    found = make_survey()
    same = ("workload.target.value=0.2", "search.trials=3", "hardware.seconds=90")
    other = (
        "search.workers=2",
        "workload.module.model.hidden=[64]",
        "search.batch_size.high=600",
        "protocol.micro_batch_size=64",
        "precision=bf16-mixed",
        "compile=default",
        "hardware.memory.limit=1000000000",
        "workload.data.eval_batch_size=100",
        # It lies outside the range, and is timed as well.
        "scaling.batch_size=2",
    )
    assert not cached(found, print)[1]
    assert [option for option in (*same, *other) if cached(found, print, option)[1]] == list(same)
    assert len(entries(tmp_path)) == 1 + len(other)
    assert not cached(found, print, "hardware.refresh=true")[1]
    assert len(entries(tmp_path)) == 1 + len(other)


@pytest.mark.parametrize(
    ("changes", "options", "why"),
    [
        (
            {"threads": ThreadChoice(2)},
            (),
            "its steps ran on 2 threads, and this study's run on 1",
        ),
        # One number that was given says nothing of the others.
        ({}, ("threads=auto",), "its steps ran on 1 thread, and no other number was tried"),
        ({"threads": None}, (), "its number of threads was left alone"),
        ({"seconds_of": "trainer"}, (), "its seconds are those of trainer, not of lean"),
        ({}, ("seconds_of=trainer",), "its seconds are those of lean, not of trainer"),
        (
            {"measured": IN_HASTE, "allowed": 12.0},
            (),
            "in 12.0 s it had no time for 2 batch sizes, or for several visits to them",
        ),
    ],
)
def test_a_survey_that_was_timed_otherwise_is_measured_again_and_a_line_says_why(
    cached, tmp_path, monkeypatch, changes, options, why
):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    path = tmp_path / "digits-0123.json"
    monkeypatch.setattr(survey_cache, "cache_key", lambda *arguments: "0123")
    made = make_survey(notes=("made",))
    path.write_bytes(SURVEYS.dump_json(replace(make_survey(), **changes)))
    lines = list[str]()
    assert cached(made, lines.append, *options) == (made, False)
    line = f"the cached survey of the hardware is not used, it is measured again: {why}"
    assert lines == [line]


def test_a_survey_in_haste_is_kept_where_no_more_time_is_given(cached, tmp_path, monkeypatch):
    path = tmp_path / "digits-0123.json"
    monkeypatch.setattr(survey_cache, "cache_key", lambda *arguments: "0123")
    in_haste = make_survey(measured=IN_HASTE, allowed=12.0)
    path.write_bytes(SURVEYS.dump_json(in_haste))
    assert cached(make_survey(), print, "hardware.seconds=15") == (in_haste, True)


def test_the_cache(cached, tmp_path):
    path = tmp_path / "digits-0123.json"
    path.write_text('{"ceiling": {"limit": 0.1}}')
    made = make_survey(notes=("so",))
    assert cached(made, print) == (made, False)
    assert cached(made, print) == (made, True)
    for broken in (
        b"",
        b"{}",
        SURVEYS.dump_json(made).replace(b'"fp32"', b'"fp31"'),
        b'{"workload": 3}',
    ):
        path.write_bytes(broken)
        assert read_survey(path) is None
    assert read_survey(tmp_path / "nowhere") is None
