"""A trial that is reported to: tables of reports and how it ends."""

import errno
import itertools

import numpy as np
import pytest
from refusals import cases
from search_records import history, spec

from bstune.core.clock import TrainingClock
from bstune.core.errors import InputError, Interrupted
from bstune.core.records import Record, Target
from bstune.trial.evaluations import Evaluations
from bstune.trial.trial import BatchSizeRefused, Trial, run_trial

TARGET = Target("val/loss", 0.1, "min")


# What is reported, the last step -> goes on after each, status, steps, steps_low. In turn: beyond
# the last step, pruned, left near its budget, NaN, infinite, an untrained start, after its end, a
# step twice, never reported.
@cases("""
reports | max_steps | answers | status | steps | steps_low
40 0.3, 60 0.1 | 50 | [true, false] | reached | 60 | 40
20 0.3, 50 0.2 | 50 | [true, false] | pruned | 50 | 50
45 0.3, 90 0.2 | 100 | [true, true] | missed | 90 | 90
5 0.3, 9 nan | 50 | [true, false] | diverged | 9 | 5
5 0.3, 9 -inf | 50 | [true, false] | diverged | 9 | 5
0 0.9, 5 0.1 | 50 | [true, false] | reached | 5 | 0
5 0.1, 9 0.3 | 50 | [false, false] | reached | 5 | 0
9 0.3, 9 0.1 | 50 | [true, false] | failed | 9 | 9
null | 50 | [] | failed | 0 | 0
""")
def test_reports_end_a_trial(reports, max_steps, answers, status, steps, steps_low):
    trial = Trial(spec(max_steps=max_steps), TARGET, total_steps=100)
    assert [trial.report(step, value) for step, value in history(reports)] == answers
    record = trial.record()
    assert (record.status, record.steps, record.steps_low) == (status, steps, steps_low)
    is_told = status in ("failed", "diverged", "missed")
    assert (record.message != "") == is_told
    assert Record.model_validate_json(record.model_dump_json()) == record


def resumed(earlier, **arguments):
    """A trial that is resumed from a pruned one of this history."""
    steps = earlier[-1][0]
    of = {"steps": steps, "steps_low": steps, "history": earlier}
    parent = Record(**spec(1).model_dump(), status="pruned", **of)
    fields = {"resumed_from": 1} | arguments.pop("fields", {})
    return Trial(spec(**fields), TARGET, total_steps=100, earlier=parent, **arguments)


def test_a_resumed_trial_is_evaluated_where_one_that_never_stopped_is():
    never = Evaluations(Trial(spec(), TARGET, total_steps=100))
    never.begin(0, 100, on_cuda=False)
    for _ in range(3):
        never.on_schedule.append((never.next, 0.3))
    # It was evaluated once more as it stopped, off schedule.
    again = Evaluations(resumed([*never.on_schedule, (never.next - 1, 0.3)]))
    again.begin(never.next - 1, 100, on_cuda=False)
    assert again.on_schedule == never.on_schedule
    assert again.due == never.next


def test_a_resumed_trial_goes_on_from_its_earlier_history():
    trial = resumed(history("20 0.4, 40 0.3"), clock=ticking_clock())
    assert trial.first_step == 40
    assert trial.report(60, 0.2)
    assert not trial.report(80, 0.1)
    record = trial.record()
    assert (record.status, record.steps, record.steps_low) == ("reached", 80, 60)
    assert record.history == history("20 0.4, 40 0.3, 60 0.2, 80 0.1")
    assert record.train_seconds == 2.0  # its own two segments of a second each


def ticking_clock():
    """A clock of which a second passes between two readings."""
    return TrainingClock(now=itertools.count().__next__, waited=lambda: 0.0)


def test_seconds_are_the_callers_or_the_time_between_reports():
    timed = Trial(spec(), TARGET, total_steps=100)
    untimed = Trial(spec(), TARGET, total_steps=100, clock=ticking_clock())
    for step, seconds in ((10, 8.0), (20, 10.0), (40, 16.0)):
        timed.report(step, 0.5, seconds=seconds)
        untimed.report(step, 0.5)
    record = timed.record()
    # The median of 2/10 and 6/20: warm-up left out.
    assert (record.train_seconds, record.seconds_per_step) == pytest.approx((16.0, 0.25))
    record = untimed.record()
    assert (record.train_seconds, record.seconds_per_step) == pytest.approx((3.0, 0.075))
    assert record.other_seconds >= 0.0


def test_a_value_of_single_precision_meets_the_goal_that_it_prints():
    trial = Trial(spec(), Target("val/accuracy", 0.9, "max"), total_steps=100)
    assert not trial.report(np.int64(5), np.float32(0.9))
    record = trial.record()
    assert (record.status, record.history) == ("reached", ((5, 0.9),))


def test_an_error_after_the_first_batch_does_not_refuse_the_size():
    for batches, status in ((1, "refused"), (2, "failed")):
        trial = Trial(spec(batch_size=8), TARGET, total_steps=100)
        list(itertools.islice(trial.batches(40), batches))
        trial.fail(ValueError("a multiple of 3"))
        assert trial.record().status == status


@pytest.mark.parametrize("examples, batch_size", [(23, 5), (8, 8)])
def test_batches_are_endless_epochs_of_exact_size(examples, batch_size):
    def batches(**fields):
        of = spec(batch_size=batch_size, **fields)
        return Trial(of, TARGET, total_steps=100).batches(examples)

    taken = list(itertools.islice(batches(), 3 * examples))
    assert not np.array_equal(taken[0], next(batches(seed=4)))
    assert {len(batch) for batch in taken} == {batch_size}
    epochs = np.concatenate(taken)[: 3 * examples].reshape(3, examples)
    assert np.array_equal(np.sort(epochs, axis=1), np.tile(np.arange(examples), (3, 1)))
    assert not np.array_equal(epochs[0], epochs[1])
    rest = resumed(history("7 0.4"), fields={"batch_size": batch_size}).batches(examples)
    assert all(map(np.array_equal, taken[7:20], rest))


def test_a_batch_is_at_most_the_data():
    larger = Trial(spec(batch_size=9), TARGET, total_steps=9)
    assert len(next(larger.batches(8))) == 9
    assert not larger.report(1, 0.3)
    assert larger.record().status == "refused"


class OutOfMemoryError(RuntimeError):
    """As torch's, by its name."""


RAISED = {
    "sys.exit": (SystemExit(3), "failed"),
    "torch's": (OutOfMemoryError("tried to allocate 3 GiB"), "out of memory"),
    "Python's": (MemoryError(), "out of memory"),
    "a loader's": (OSError(errno.ENOMEM, "Cannot allocate memory"), "out of memory"),
    "a CPU's": (RuntimeError("DefaultCPUAllocator: can't allocate memory"), "out of memory"),
    "a refused size": (BatchSizeRefused("at most 8"), "refused"),
}


@pytest.mark.parametrize("case", RAISED)
def test_what_a_loop_raises_is_a_result(case):
    error, status = RAISED[case]

    def train(trial):
        trial.report(5, 0.4)
        raise error

    record = run_trial(train, Trial(spec(), TARGET, total_steps=100))
    assert (record.status, record.steps) == (status, 5)
    assert str(error) in record.message
    assert ("test_trial.py:" in record.message) == (status != "refused")


@pytest.mark.parametrize("error", [KeyboardInterrupt, Interrupted, InputError])
def test_an_interruption_or_a_mistake_of_the_study_is_no_result(error):
    def train(trial):
        raise error

    with pytest.raises(error):
        run_trial(train, Trial(spec(), TARGET, total_steps=100))
