"""Studies of many processes that are killed, and whose storage goes away: nothing is lost, doubled or stuck."""

import itertools
import os
import threading
import time
from pathlib import Path

import fleet
import pytest

pytestmark = pytest.mark.soak
# The figures in benchmarks/README.md are of 500.
SLOTS = int(os.environ.get("BSTUNE_SOAK", "96"))
# Seconds that no study here takes unless it is stuck.
GUARD = 600


def soak(
    folder: Path, url: str, trials: int, workers: int, every: int, events=()
) -> tuple[int, int]:
    """Run a study whose workers are killed in turn, one every so many trials; return how many, and the owner's starts.

    At each share of the trials in ``events`` its function is called. A process that ended is replaced, by the same
    command; a worker's folder is its own.
    """
    options = (f"storage={url}", f"search.trials={trials}", "sampler=random")
    start = time.monotonic()
    events = list(events)
    watch = fleet.Watch(url)
    owner = None
    owners = 0
    killed = 0
    turn = itertools.cycle(range(workers))
    team = [None] * workers
    while time.monotonic() - start < GUARD:
        # It may end with an error where its server was restarted.
        if owner is None or (owner.exitcode is not None and owner.exitcode != 0):
            owner = fleet.start("owner", folder / "owner", *options, seconds=0.02)
            owners = owners + 1
        # The study is done.
        if owner.exitcode == 0:
            break
        done = watch.finished()
        if events and sum(done.values()) >= events[0][0] * trials:
            events.pop(0)[1]()
        for i, worker in enumerate(team):
            if 0 < sum(done.values()) < trials and (worker is None or not worker.is_alive()):
                team[i] = fleet.start("worker", folder / f"worker-{i}", *options, seconds=0.02)
        if sum(done.values()) >= every * (killed + 1) and (victim := team[next(turn)]) is not None:
            victim.kill()
            killed += 1
        threading.Event().wait(0.1)
    assert owner.exitcode == 0, (folder / "owner" / "log").read_text()[-2000:]
    for worker in team:
        worker.join(GUARD)
        assert worker.exitcode is not None, "a worker is stuck"
    assert watch.finished() == dict.fromkeys(range(trials), 1)
    assert watch.running() == 0
    assert not events
    print(
        f"{trials} trials in {time.monotonic() - start:.0f} s, {killed} workers killed, "
        f"{owners} owners"
    )
    return killed, owners


def test_workers_killed_and_a_server_restarted_lose_nothing(database_server, tmp_path):
    def restart():
        database_server.stop()
        database_server.start()

    killed, _ = soak(
        tmp_path, database_server.url(), SLOTS, 4, 12, [(0.3, restart), (0.6, restart)]
    )
    # One is due at every 12th trial; now and then it finds no worker to kill.
    assert killed >= SLOTS // 24


def test_workers_killed_on_sqlite_lose_nothing(tmp_path):
    killed, _ = soak(tmp_path, f"sqlite:///{tmp_path}/bstune.db", SLOTS // 2, 2, 12)
    # Half as many trials.
    assert killed >= SLOTS // 48
