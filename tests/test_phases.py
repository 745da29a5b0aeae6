"""What a trial's seconds go to: each phase of a made trial takes its own number of seconds."""

from contextlib import contextmanager

import pytest
from made_parts import make_state
from toolbox import FakeTime

from bstune.core.clock import Phase, TrialClock
from bstune.trial.parts.phases import Phases, aside

STARTUP = 100.0
SANITY = 10.0
EVALUATION = 20.0
CLOSING = 7.0


def run(evaluated, steps, warmup_steps=0, first_step=0, trains=True):
    """The clock of a trial that takes ``steps`` steps of 1 s, and is evaluated after those that are named."""
    fake = FakeTime()
    clock = TrialClock(fake)
    state = make_state(first_step, first_step=first_step)
    phases = Phases(state, clock, warmup_steps)
    fake.sleep(STARTUP / 2)
    phases.begin_sanity_check()
    fake.sleep(SANITY)
    phases.end_sanity_check()
    fake.sleep(STARTUP / 2)
    phases.begin_training()
    for _ in range(steps):
        fake.sleep(1.0)
        state.steps += 1
        if state.steps not in evaluated:
            phases.close_warmup_segment()
            continue
        phases.begin_evaluation()
        fake.sleep(EVALUATION)
        phases.end_evaluation(stops=state.steps == max(evaluated), trains=trains)
    fake.sleep(CLOSING)
    clock.enter(Phase.CLOSING)
    return clock


@pytest.mark.parametrize(
    ("evaluated", "warmup_steps", "first_step", "segments"),
    [
        ((10,), 0, 0, [(10, 10.0)]),
        ((4, 10), 0, 0, [(4, 4.0), (6, 6.0)]),
        # The warm-up is a segment of its own, unless an evaluation comes before its end.
        ((10,), 3, 0, [(3, 3.0), (7, 7.0)]),
        ((4, 10), 3, 0, [(3, 3.0), (1, 1.0), (6, 6.0)]),
        ((3, 10), 3, 0, [(3, 3.0), (7, 7.0)]),
        ((2, 10), 3, 0, [(2, 2.0), (8, 8.0)]),
        # Of a trial that goes on, too: its steps before are not this clock's.
        ((30,), 3, 20, [(3, 3.0), (7, 7.0)]),
        ((24, 30), 0, 20, [(4, 4.0), (6, 6.0)]),
    ],
)
def test_segments_are_the_steps_between_evaluations(evaluated, warmup_steps, first_step, segments):
    clock = run(evaluated, 10, warmup_steps, first_step)
    assert clock.segments == segments
    assert clock.seconds(Phase.TRAINING) == 10.0
    assert clock.seconds(Phase.STARTUP) == STARTUP
    assert clock.seconds(Phase.EVALUATION) == SANITY + EVALUATION * len(evaluated)
    assert clock.seconds(Phase.CLOSING) == CLOSING


def test_what_the_loop_does_after_an_evaluation_is_no_training_where_it_starts_the_clock_itself():
    """Nothing here starts it again, so that the steps after the first evaluation count to that."""
    clock = run((4, 10), 10, trains=False)
    assert clock.seconds(Phase.TRAINING) == 4.0
    assert clock.seconds(Phase.EVALUATION) == SANITY + 2 * EVALUATION + 6.0


def test_the_stopped_trials_evaluation_runs_again_before_the_first_step():
    fake = FakeTime()
    clock = TrialClock(fake)
    state = make_state(20, first_step=20)
    phases = Phases(state, clock, 0)
    phases.begin_training()
    phases.repeat_evaluation()
    fake.sleep(EVALUATION)
    phases.end_evaluation(stops=False, trains=True)
    fake.sleep(1.0)
    state.steps += 1
    phases.begin_evaluation()
    assert clock.segments == [(1, 1.0)]
    assert clock.seconds(Phase.EVALUATION) == EVALUATION


def test_steps_that_are_all_skipped_make_no_segment():
    fake = FakeTime()
    clock = TrialClock(fake)
    phases = Phases(make_state(), clock, 0)
    phases.begin_training()
    fake.sleep(5.0)
    phases.begin_evaluation()
    assert (clock.segments, clock.seconds(Phase.TRAINING)) == ([], 5.0)


class Compiled:
    """Stands for what compiles; notes whether its code is left aside."""

    def __init__(self):
        self.is_eager = False

    @contextmanager
    def eagerly(self):
        self.is_eager = True
        yield
        self.is_eager = False


def test_what_is_done_aside_is_no_training_and_not_compiled():
    fake = FakeTime()
    clock = TrialClock(fake)
    compiled = Compiled()
    clock.enter(Phase.TRAINING)
    fake.sleep(1.0)
    with aside(clock, compiled):
        assert compiled.is_eager
        fake.sleep(30.0)
    assert not compiled.is_eager
    fake.sleep(2.0)
    clock.end_segment(1, Phase.CLOSING)
    assert clock.segments == [(1, 3.0)]
    assert clock.seconds(Phase.EVALUATION) == 30.0
