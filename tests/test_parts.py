"""The parts of a trial that begins: what each is given."""

from dataclasses import replace

import pytest
from made_parts import make_stopped
from toolbox import FakeTime, make_protocol, make_result, make_spec

from bstune.core.clock import TrialClock
from bstune.core.errors import ConfigError
from bstune.trial.devices import distributed
from bstune.trial.parts import assemble
from bstune.trial.parts.checkpoint import Stopped

RECORD = make_result(number=1, steps=20, steps_low=20, history=((20, 0.9),), status="stopped")


def begin(tmp_path=None, protocol=None, stopped=None, horizon=None, monkeypatch=None, **changes):
    """The parts of a trial; one that goes on from ``stopped`` finds that in its file."""
    resume = None
    if stopped is not None:
        monkeypatch.setattr(assemble, "read_state", lambda *arguments: stopped)
        resume = Stopped(RECORD, tmp_path / "1.state")
    return assemble.parts_of(
        make_spec(4, **changes),
        protocol or make_protocol(50),
        10,
        TrialClock(FakeTime()),
        resume,
        horizon,
        {"torch": "2.13.0"},
    )


def test_a_fresh_trial_begins_at_step_0():
    made = begin()
    assert (made.state.first_step, made.state.steps, made.state.last_step) == (0, 0, 50)
    assert made.verdict.start_gap is None
    assert made.resume.stopped is None
    assert made.cadence.due_step == 1
    assert made.snapshot.writer is None
    assert made.micro_batch_sizes == (4,)


def test_a_trial_that_goes_on_takes_up_what_was_left(monkeypatch, tmp_path):
    stopped = make_stopped(20, skipped=2, start_gap=0.7, due_step=33, near=True)
    made = begin(tmp_path, stopped=stopped, monkeypatch=monkeypatch)
    assert (made.state.first_step, made.state.steps, made.state.skipped) == (20, 20, 2)
    assert made.verdict.start_gap == 0.7
    assert made.resume.stopped is stopped
    # The evaluation at its end was not due.
    assert (made.cadence.due_step, made.cadence.forced, made.cadence.near) == (33, (20,), True)


def test_a_trial_without_a_step_left_is_refused(monkeypatch, tmp_path):
    with pytest.raises(ConfigError, match="a trial that has 20 steps cannot be trained until step"):
        begin(tmp_path, stopped=make_stopped(20), monkeypatch=monkeypatch, max_steps=20)


def test_micro_batches_are_the_protocols():
    protocol = replace(make_protocol(50), micro_batch_size=3)
    assert begin(protocol=protocol).micro_batch_sizes == (3, 1)


@pytest.mark.parametrize(("alone", "last_step"), [(True, 1), (False, 50)])
def test_of_several_processes_none_goes_by_its_own_time(monkeypatch, alone, last_step):
    place = None if alone else distributed.Place(rank=0, count=2)
    monkeypatch.setattr(distributed, "place", lambda: place)
    monkeypatch.setattr(assemble, "micro_batch_sizes_of", lambda *sizes: (2,))
    # More than no time has passed.
    made = begin(max_seconds=-1.0)
    made.last_step.bring_forward()
    assert made.state.last_step == last_step
