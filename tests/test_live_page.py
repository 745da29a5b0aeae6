"""A study's page while it runs: when it is written, what it says, and what becomes of it at the study's end."""

import errno
import re
from contextlib import nullcontext
from dataclasses import replace
from datetime import UTC, datetime

import pytest
from builders import prepared_study
from rich.console import Console
from test_run import REPLAY, STEPS, end_at
from toolbox import FakeTime, made_table, make_trial, trials_of

import bstune
from bstune.report.running_page import is_running_page
from bstune.study.planning.baseline import Baseline
from bstune.study.run import run_study
from bstune.study.showing import live_page
from bstune.study.showing.live_page import LEAST_SECONDS, SHARE, LivePage, PagePace, so_far
from bstune.system.files import write_text_once
from bstune.trial.processes.workers import InProcess

WRITTEN = datetime(2026, 11, 26, 17, 24, 27, tzinfo=UTC)
STUDY = (*REPLAY, STEPS, "search.trials=6", "search.replicates=0", "sampler=random", "study=s")


@pytest.fixture
def prepared(tmp_path, monkeypatch):
    """A study of recorded runs that has begun nothing."""
    monkeypatch.chdir(tmp_path)
    made_table(tmp_path)
    return prepared_study(*STUDY)


@pytest.mark.parametrize(
    ("took", "due"),
    [(0.0, LEAST_SECONDS / SHARE), (0.2, 10.0), (3.0, 150.0)],
)
def test_the_next_writing_waits_fifty_times_as_long_as_the_last_one_took(took, due):
    pace = PagePace()
    # A first page is due after five seconds.
    assert [pace.is_due(now) for now in (4.9, 5.1)] == [False, True]
    pace.wrote(100.0, 100.0 + took)
    start = 100.0 + took
    assert [pace.is_due(start + 0.99 * due), pace.is_due(start + 1.01 * due)] == [False, True]


def test_writing_takes_its_share_of_a_study_at_most():
    pace = PagePace()
    now = 0.0
    spent = 0.0
    for trial in range(2000):
        now += 0.7
        if pace.is_due(now):
            # A page grows with its trials.
            took = 0.05 + 0.0005 * trial
            pace.wrote(now, now + took)
            now = now + took
            spent = spent + took
            assert spent <= 1.1 * SHARE * now or now < 2 * LEAST_SECONDS / SHARE
    assert 0.5 * SHARE < spent / now <= SHARE


class Written:
    """Pages in place of files, each of which takes so many seconds to write, or fails."""

    def __init__(self, clock, seconds=0.2):
        self.clock = clock
        self.seconds = seconds
        self.pages = []
        self.error = None

    def __call__(self, path, text):
        self.clock.sleep(self.seconds)
        if self.error is not None:
            raise self.error
        self.pages.append(text)
        write_text_once(path, text)


@pytest.fixture
def live(tmp_path, monkeypatch):
    """A page on a made clock, the clock, what is written and what is said."""
    clock = FakeTime()
    said = []
    written = Written(clock)
    monkeypatch.setattr(live_page, "write_text_once", written)
    page = LivePage(tmp_path / "report.html", clock, said.append, lambda: WRITTEN)
    return page, clock, written, said


def test_it_is_written_as_trials_end_and_it_is_due(prepared, live):
    page, clock, written, said = live
    seen = []
    # 0.2 s of writing are followed by 10 s; at 40 no trial has ended since.
    for now, count in [(1.0, 0), (6.0, 1), (7.0, 2), (17.0, 2), (40.0, 2), (41.0, 3)]:
        clock.now = now
        page.show(prepared, [make_trial(number) for number in range(count)], None)
        seen.append(len(written.pages))
    assert seen == [0, 1, 1, 2, 2, 3]
    assert len(said) == 1
    assert said[0].endswith("report.html")


def test_a_trial_that_ended_before_it_was_due_is_shown_before_the_next_begins(prepared, live):
    page, clock, written, _ = live
    page.catch_up()
    clock.now = 6.0
    page.show(prepared, [make_trial(0)], None)
    clock.now = 10.0
    page.show(prepared, [make_trial(0), make_trial(1)], None)
    assert len(written.pages) == 1
    # Asking the next trial has taken its time: the long one that follows is not waited for.
    clock.now = 17.0
    page.catch_up()
    assert len(written.pages) == 2
    assert "2 of 6 configurations tried" in written.pages[-1]
    # It costs nothing where nothing has ended since, and what is not due waits.
    clock.now = 60.0
    page.catch_up()
    assert len(written.pages) == 2
    page.show(prepared, [make_trial(0), make_trial(1), make_trial(2)], None)
    clock.now += 1.0
    page.show(prepared, [make_trial(number) for number in range(4)], None)
    page.catch_up()
    assert len(written.pages) == 3


@pytest.mark.parametrize(
    "error", [OSError(errno.ENOSPC, "No space left on device"), ValueError("a bug of a chart's")]
)
def test_what_cannot_be_written_is_said_once_and_tried_again(prepared, live, error):
    page, clock, written, said = live
    written.error = error
    for number in range(4):
        clock.sleep(60.0)
        page.show(prepared, [make_trial(i) for i in range(number + 1)], None)
    assert len(said) == 1
    assert str(error.args[-1]) in said[0]
    written.error = None
    clock.sleep(60.0)
    page.show(prepared, [make_trial(i) for i in range(9)], None)
    assert len(written.pages) == 1


def test_a_study_that_is_left_has_no_page_that_runs(prepared, live):
    page, _, written, said = live
    path = page._path
    page.leave()
    page.show(prepared, [make_trial()], None)
    page.leave()
    assert written.pages == []
    # As a run that was killed left it.
    path.write_text('<meta name="bstune" content="a running study">')
    page.leave()
    assert (len(written.pages), is_running_page(path)) == (1, False)
    page.leave()
    assert (len(written.pages), said) == (1, [])


@pytest.mark.parametrize(
    ("trials", "best"),
    [
        ([make_trial(0, 64, steps=400, tau=0.01)], "4.00 s, 400 steps at batch size 64"),
        (
            [
                make_trial(0, 64, steps=400, tau=0.01),
                make_trial(1, 128, steps=100, tau=0.05),
                make_trial(2, 8, steps=1, status="stopped"),
            ],
            "4.00 s, 400 steps at batch size 64",
        ),
        (
            [make_trial(0, 64, steps=400, tau=0.01), make_trial(1, 64, steps=9, tau=None)],
            "4.00 s, 400 steps at batch size 64",
        ),
        (
            [make_trial(3, 32, status="stopped", history=((5, 0.9), (9, 0.3), (12, 0.5)))],
            "none has reached the target yet; the closest came to 0.3, at batch size 32",
        ),
        ([make_trial(0, status="failed", history=())], "no trial has a metric yet"),
    ],
)
def test_the_best_so_far(prepared, trials, best):
    timed = replace(prepared, budget=replace(prepared.budget, objective="time"))
    found = dict(so_far(timed, trials, None, WRITTEN, True).lines)
    assert found["BEST"][0].startswith(best)


def test_the_best_by_steps_and_how_far_it_has_come(prepared):
    trials = [make_trial(0, 64, steps=400, tau=0.01), make_trial(1, 128, steps=100, tau=0.05)]
    trials.append(make_trial(2, 128, steps=120, tau=0.05, replicate_of=1))
    lines = dict(so_far(prepared, trials, 90.0, WRITTEN, True).lines)
    assert lines["BEST"][0].startswith("5.00 s, 100 steps at batch size 128")
    assert lines["SO FAR"] == ("2 of 6 configurations tried, in 3 runs; about 90.0 s to go",)
    left = dict(so_far(prepared, [], 90.0, WRITTEN, False).lines)
    assert left == {"SO FAR": ("0 of 6 configurations tried",)}


def test_of_a_budget_the_best_metric_at_its_end(prepared):
    budget = replace(prepared.budget, objective="loss")
    within = replace(prepared, budget=budget, budget_times=())
    end = within.last_step(64)
    value = {"status": "stopped", "steps": end, "steps_low": end}
    trials = [
        make_trial(0, 64, **value, history=((1, 0.9), (end, 0.5))),
        make_trial(1, 64, **value, history=((1, 0.9), (end, 0.4))),
        make_trial(2, 64, status="stopped", steps=1, steps_low=1, history=((1, 0.1),)),
    ]
    found = so_far(within, trials, None, WRITTEN, True)
    assert re.search(r" 0\.4 at batch size 64.*\(trial 1\)", dict(found.lines)["BEST"][0])
    assert found.curve_rows == [("64 to 127", "3", "2", "0.4")]
    none = so_far(within, trials[2:], None, WRITTEN, True)
    baseline = Baseline(64, 0.1, {})
    own = dict(so_far(replace(within, baseline=baseline), trials, None, WRITTEN, True).lines)
    assert own["YOURS"][0].endswith(
        f"0.5 after {end} steps at batch size 64, learning rate 0.1 (trial 0)"
    )
    assert dict(none.lines)["BEST"] == ("no trial has come to its budget's end yet",)


@pytest.fixture
def always_due(monkeypatch):
    """Let the page be written as often as trials end."""
    monkeypatch.setattr(PagePace, "is_due", lambda pace, now: True)


@pytest.mark.usefixtures("always_due")
def test_a_study_has_its_page_while_it_runs_and_its_answer_at_the_end(prepared, monkeypatch):
    pages = []

    def write(path, text):
        write_text_once(path, text)
        pages.append(is_running_page(path))

    begun = []
    looks = []
    shown = []
    start = InProcess.start
    catch_up = LivePage.catch_up
    show = LivePage.show

    def noted(runner, spec, files, resumed_from):
        begun.append(spec.number)
        start(runner, spec, files, resumed_from)

    def showing(page, *trials):
        shown.append(page)
        show(page, *trials)
        shown.pop()

    def looked(page):
        # To show a page catches up, too.
        if not shown:
            looks.append(len(begun))
        catch_up(page)

    monkeypatch.setattr(live_page, "write_text_once", write)
    monkeypatch.setattr(InProcess, "start", noted)
    monkeypatch.setattr(LivePage, "catch_up", looked)
    monkeypatch.setattr(LivePage, "show", showing)
    files = prepared.files
    run_study(prepared, [], Console(quiet=True))
    # It catches up before each trial.
    assert looks == list(range(len(begun)))
    assert len(begun) == len(trials_of(files.root))
    # Before the first trial, and after each.
    assert len(pages) == 1 + len(trials_of(files.root))
    assert all(pages)
    assert not is_running_page(files.report)
    assert 'http-equiv="refresh"' not in files.report.read_text()
    assert "USE" in files.report.read_text()


@pytest.mark.usefixtures("always_due")
@pytest.mark.parametrize("killed", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_study_that_is_cut_short(prepared, monkeypatch, killed):
    report = prepared.files.report
    with monkeypatch.context() as patch:
        end_at(patch, 3, killed)
        if killed:
            # What a killed process does not come to do.
            patch.setattr("bstune.study.run.left_unless_ended", lambda page: nullcontext())
        with pytest.raises(SystemExit):
            run_study(prepared, [], Console(quiet=True))
    assert is_running_page(report) == killed
    run_study(prepared_study(*STUDY), [], Console(quiet=True))
    assert not is_running_page(report)


@pytest.mark.slow
@pytest.mark.usefixtures("always_due")
def test_a_final_page_that_cannot_be_made_leaves_none_that_runs(prepared, monkeypatch):
    def fail(*_):
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr("bstune.study.report.write_page", fail)
    found = run_study(prepared, [], Console(quiet=True))
    assert not prepared.files.report.exists()
    assert any("no page of the study" in note for note in found.result.notes)


@pytest.mark.slow
@pytest.mark.usefixtures("always_due")
def test_a_loop_of_ones_own_has_the_page_too(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    own = {"target": "val_loss<=0.5", "batch_sizes": (8, 64), "reference": (16, 0.1)}
    own |= {"budget": bstune.Budget(steps=20), "objective": "steps", "trials": 3, "name": "loop"}
    study = bstune.Study(**own, mlflow=False, options=["search.replicates=0"])
    report = tmp_path / "outputs" / "loop" / "report.html"
    seen = []
    for trial in study:
        seen.append(is_running_page(report))
        for step in range(trial.first_step + 1, trial.max_steps + 1):
            if not trial.report(step, 0.9 if step < 5 else 0.4):
                break
        trial.finish(seconds=0.1)
        if len(seen) == 2:
            break
    assert seen == [True, True]
    assert not is_running_page(report)
    assert "was left before its end" in report.read_text()
