"""The seconds that a thread waits for a processor, and the clock that leaves them out."""

import os
import threading
import time
from pathlib import Path

import pytest

from bstune.core.clock import LEAST_RUNNING, Phase, TrialClock
from bstune.system.processor_wait import processor_wait, processors

HAS_SCHEDSTAT = Path("/proc/thread-self/schedstat").exists()


@pytest.mark.skipif(not HAS_SCHEDSTAT, reason="this system does not count the wait")
def test_waiting_is_no_sleep():
    """What sleeps is not ready to run; what competes for one processor waits about as long as it runs."""
    waited = processor_wait()
    before = waited()
    time.sleep(0.05)
    assert waited() - before < 0.05
    if not hasattr(os, "sched_setaffinity"):
        return
    allowed = os.sched_getaffinity(0)
    processor = {min(allowed)}
    child = os.fork()
    # It competes for the processor until it is killed.
    if not child:
        os.sched_setaffinity(0, processor)
        while True:
            pass
    try:
        os.sched_setaffinity(0, processor)
        before = waited()
        end = time.process_time() + 0.2
        while time.process_time() < end:
            pass
        # A tenth of the 0.2 s that it ran: two that compete would share alike.
        assert waited() - before > 0.02
    finally:
        os.sched_setaffinity(0, allowed)
        os.kill(child, 9)
        os.waitpid(child, 0)


def test_it_is_the_wait_of_the_thread_that_asked():
    found = []
    thread = threading.Thread(target=lambda: found.append(processor_wait()()))
    thread.start()
    thread.join()
    assert found[0] >= 0.0
    assert processors() >= 1


def test_a_segment_leaves_the_wait_out_and_a_phase_does_not():
    moments = iter([0.0, 1.0, 5.0, 6.0])
    waits = iter([0.0, 0.5, 3.5, 3.5])
    clock = TrialClock(lambda: next(moments), waited=lambda: next(waits))
    clock.enter(Phase.TRAINING)
    clock.end_segment(2, Phase.EVALUATION)
    # From 1 to 5 s, of which it waited 3.
    assert clock.segments == [(2, pytest.approx(1.0))]
    assert clock.seconds(Phase.TRAINING) == pytest.approx(4.0)
    clock.enter(Phase.CLOSING)
    assert clock.total_seconds == pytest.approx(6.0)


def test_a_wait_as_long_as_the_segment_leaves_some_of_it():
    moments = iter([0.0, 0.0, 1.0])
    waits = iter([0.0, 0.0, 2.0])
    clock = TrialClock(lambda: next(moments), waited=lambda: next(waits))
    clock.enter(Phase.TRAINING)
    clock.end_segment(1, Phase.CLOSING)
    assert clock.segments == [(1, LEAST_RUNNING)]
