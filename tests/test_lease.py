import json
import os
import subprocess
from contextlib import ExitStack, suppress
from dataclasses import replace

import optuna
import pytest
from toolbox import FakeTime

from bstune.core.errors import StudyError
from bstune.study.storage import lease as module
from bstune.study.storage.lease import PREFIX, Leases, process_started

SECONDS = 60.0


@pytest.fixture
def study():
    return optuna.create_study(study_name="s")


def leases(study, role, clock, machine=None, join=None, **changes):
    """Leases of a process; one of another machine if it is named."""
    made = Leases(study, role, SECONDS, clock, join=join)
    made.own = replace(made.own, machine=machine or made.own.machine, **changes)
    return made


def last_beat(study, one):
    return json.loads(study.user_attrs[PREFIX + one.own.id])


def test_owner_of_another_machine_is_waited_for_once_and_taken_over_when_it_gives_no_sign(study):
    clock = FakeTime()
    lines = []
    dead = leases(study, "owner", clock, machine="elsewhere")
    # This process writes once, and never again.
    dead._write(dead.own)
    ours = leases(study, "owner", clock)
    with ours.acquired(lines.append, clock.sleep):
        assert SECONDS <= clock.now <= 1.2 * SECONDS
        assert last_beat(study, dead)["ended"]
        assert ours.living() == {ours.own.id}
    assert last_beat(study, ours)["ended"]
    assert lines == [f"waiting up to 60 s for a sign of {dead.own.name}, which began this study"]
    # The process was only stopped for long.
    dead.beat()
    with pytest.raises(StudyError, match="gave no sign for 60 s"):
        dead.check()
    assert last_beat(study, dead)["ended"]


@pytest.mark.parametrize("join", ["bstune worker storage=x study=s", None])
def test_owner_of_another_machine_that_lives_is_named(study, join):
    clock = FakeTime()
    other = leases(study, "owner", clock, machine="elsewhere")
    other._write(other.own)

    def sleep(seconds):
        clock.sleep(seconds)
        other.beat()

    ours = leases(study, "owner", clock, join=join)
    with (
        pytest.raises(StudyError, match=r"is run by .*@.*: wait for it, ") as refused,
        ours.acquired(sleep=sleep),
    ):
        pytest.fail("two owners")
    # No worker joins a study of Python objects.
    assert ("worker" in str(refused.value)) == (join is not None)
    assert (join or "begin another one") in str(refused.value)
    assert clock.now < SECONDS / 2


@pytest.mark.parametrize("ended", ["gone", "recycled", "killed and not waited for"])
def test_process_of_this_machine_is_dead_at_once(study, ended):
    clock = FakeTime()
    process = subprocess.Popen(["sleep", "60"])
    started = process_started(process.pid)
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    if ended != "killed and not waited for":
        process.wait()
    pid = os.getpid() if ended == "recycled" else process.pid
    dead = leases(study, "owner", clock, pid=pid, started=started)
    dead._write(dead.own)
    with leases(study, "owner", clock).acquired(sleep=clock.sleep):
        assert clock.now == 0
    process.wait()


def test_owner_on_this_machine_is_refused_at_once_and_workers_join(study):
    clock = FakeTime()
    first, second, worker = (leases(study, role, clock) for role in ("owner", "owner", "worker"))
    with first.acquired(sleep=clock.sleep):
        with pytest.raises(StudyError, match="is run by"), second.acquired(sleep=clock.sleep):
            pytest.fail("two owners")
        with worker.acquired(sleep=clock.sleep):
            assert first.living() == worker.living() == {first.own.id, worker.own.id}
        assert first.living() == {first.own.id}
    assert clock.now == 0


def test_of_two_owners_in_the_same_moment_one_stays(study, monkeypatch):
    clock = FakeTime()
    pair = [leases(study, "owner", clock) for _ in range(2)]
    # Neither has seen the other.
    monkeypatch.setattr(Leases, "_wait_alone", lambda *arguments: None)
    for one in pair:
        one._write(one.own)
    stayed = []
    with ExitStack() as stack:
        for one in pair:
            with suppress(StudyError):
                stack.enter_context(one.acquired())
                stayed.append(one.own.id)
    assert stayed == [min(one.own.id for one in pair)]


def test_lease_is_renewed_until_it_ends_and_survives_a_storage_that_is_away(study, monkeypatch):
    # So many in a lease that none is waited for.
    monkeypatch.setattr(module, "BEATS", 1e6)
    beaten = []
    one = Leases(study, "worker", SECONDS)

    def beat():
        beaten.append(True)
        if len(beaten) == 2:
            raise StudyError("away")
        if len(beaten) == 5:
            done.set()

    done = module.threading.Event()
    monkeypatch.setattr(one, "beat", beat)
    with one.acquired():
        assert done.wait(60)
