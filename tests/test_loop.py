"""The loop of a study: what it does with hanging, dying and interrupted trials."""

from contextlib import closing
from dataclasses import replace

import pytest
from refusals import cases
from test_storage import QUESTION, SPACE, open_study, record_of

from bstune.core.errors import UserCodeError
from bstune.core.space import Configuration
from bstune.study.deadline import Deadline
from bstune.study.loop import HangWatch, asked_batches, train_in_worker
from bstune.study.plan import Plan
from bstune.system.files import StudyFolder
from bstune.trial.worker import Failure, InProcess, Returned

PLAN = Plan(QUESTION, SPACE, Configuration(batch_size=64, lr=0.1), trials=3, seeds=1, seed=0)


@cases("""
wall_seconds | trial_seconds | longest | limit
# Nothing was evaluated yet: data may be downloaded.
null | null | 0.0 | 600.0
null | null | 10.0 | 200.0
# A fifth of the limit, and the user's own.
100.0 | null | 10.0 | 20.0
100.0 | 50.0 | 10.0 | 50.0
""")
def test_how_long_a_trial_may_be_silent(wall_seconds, trial_seconds, longest, limit):
    assert HangWatch(wall_seconds, trial_seconds, longest).limit == limit


def asked_trials(plan, storage, folder, observers=(), **options):
    """The trials of a plan, one after another."""
    with closing(asked_batches(plan, storage, folder, observers, **options)) as batches:
        for (asked,) in batches:
            yield asked


def test_trials_that_run_at_once_are_stored_and_told_as_they_end(tmp_path):
    told = []

    class Observer:
        def finished(self, record):
            told.append(record.number)

    storage = open_study(tmp_path)
    most = 0
    plan, folder = replace(PLAN, trials=6), StudyFolder(tmp_path)
    for running in asked_batches(plan, storage, folder, [Observer()], jobs=3):
        assert [asked.spec for asked in running] == storage.running()
        most = max(most, len(running))
        running[len(running) // 2].record = record_of(running[len(running) // 2].spec)
    assert most == 3
    records = storage.records()
    assert sorted(told) == [record.number for record in records]
    assert len({(one.batch_size, one.lr) for one in records if one.role == "search"}) == 6
    assert len({record.place for record in records}) == len(records)


def fail_all(trials, status):
    for asked in trials:
        asked.record = record_of(asked.spec, status, steps=0, message="wrong path", history=())


@pytest.mark.parametrize("status", ["failed", "refused"])
def test_what_failed_in_an_earlier_call_is_asked_again(tmp_path, status):
    storage = open_study(tmp_path)
    with pytest.raises(UserCodeError, match="wrong path"):
        fail_all(asked_trials(PLAN, storage, StudyFolder(tmp_path)), status)
    assert len({record.batch_size for record in storage.records()}) == 3
    places = []
    for asked in asked_trials(PLAN, storage, StudyFolder(tmp_path)):
        places.append(asked.spec.place)
        asked.record = record_of(asked.spec)
    assert places[:4] == ["baseline", "search/0", "search/1", "search/2"]


@cases("""
signal | status
SIGKILL | out of memory
SIGSEGV | failed
""")
def test_a_process_that_linux_ends_was_short_of_memory(tmp_path, signal, status):
    class Dead(InProcess):
        def poll(self, seconds):
            return Failure(f"its process was ended by {signal}")

    asked = next(asked_trials(PLAN, open_study(tmp_path), StudyFolder(tmp_path)))
    *_, record = train_in_worker(Dead(), asked, print, HangWatch())
    assert record.status == status


def test_the_longest_silence_of_a_trial_counts(tmp_path):
    asked = next(asked_trials(PLAN, open_study(tmp_path), StudyFolder(tmp_path)))
    silences = [9.0, 30.0, 1.0]

    class Silent(InProcess):
        silent_seconds = property(lambda self: silences.pop(0))

        def poll(self, seconds):
            return None if silences else Returned(record_of(asked.spec))

    watch = HangWatch()
    *_, record = train_in_worker(Silent(), asked, print, watch)
    assert (record.status, watch.longest_silence) == ("reached", 30.0)


def test_only_a_size_that_has_not_trained_is_refused(tmp_path):
    storage = open_study(tmp_path)
    plan = replace(PLAN, space=replace(SPACE, low=63, high=64), trials=9)
    trials = asked_trials(plan, storage, StudyFolder(tmp_path))
    first = next(trials)
    first.record = record_of(first.spec)
    with pytest.raises(UserCodeError, match="wrong path"):
        fail_all(trials, "refused")
    ended = {(one.batch_size, one.status) for one in storage.records()[1:]}
    assert ended == {(63, "refused"), (64, "failed")}


def test_a_new_seed_that_the_time_limit_cut_off_is_asked_again(tmp_path):
    storage, folder = open_study(tmp_path), StudyFolder(tmp_path)
    limited = replace(PLAN, deadline=Deadline(0.0, 100.0))
    for asked in asked_trials(limited, storage, folder, now=lambda: 10.0):
        steps = 80 if (asked.spec.batch_size, asked.spec.lr) == (64, 0.1) else 20
        asked.record = record_of(asked.spec, steps=steps, history=((steps, 0.05),))
        if asked.spec.role == "new seed":
            asked.record = record_of(asked.spec, "pruned", steps=40)
            break
    asked = next(asked_trials(PLAN, storage, folder))
    assert (asked.spec.role, asked.spec.resumed_from) == ("new seed", None)
    assert asked.spec.place not in [record.place for record in storage.records()]
