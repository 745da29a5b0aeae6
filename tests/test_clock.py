import pytest
from toolbox import FakeTime

from bstune.core.clock import Phase, TrialClock, seconds_per_step


def test_each_phase_gets_its_seconds():
    fake = FakeTime(50.0)
    clock = TrialClock(fake)
    phases = (
        Phase.TRAINING,
        Phase.EVALUATION,
        Phase.TRAINING,
        Phase.EVALUATION,
        Phase.CLOSING,
        Phase.CLOSING,
    )
    for seconds, phase in zip((3.0, 5.0, 0.5, 7.0, 0.25, 1.0), phases, strict=True):
        before = clock.total_seconds
        fake.sleep(seconds)
        # The running phase is left out.
        assert clock.total_seconds == before
        assert clock.enter(phase) == seconds
    # Startup 3, training 5 + 7, evaluation 0.5 + 0.25, closing 1.
    assert [clock.seconds(phase) for phase in Phase] == [3.0, 12.0, 0.75, 1.0]
    assert clock.total_seconds == 16.75


def test_segments_hold_the_steps_of_training_alone_and_go_on_after_an_interruption():
    fake = FakeTime()
    clock = TrialClock(fake)
    clock.enter(Phase.TRAINING)
    # Two steps of a second, each with an evaluation of its own, then two in two seconds.
    for _ in range(2):
        fake.sleep(1.0)
        with clock.interrupt_segment(Phase.EVALUATION):
            fake.sleep(16.0)
    fake.sleep(2.0)
    with pytest.raises(ValueError, match="on its way"), clock.interrupt_segment(Phase.EVALUATION):
        raise ValueError("on its way")
    clock.end_segment(4, Phase.EVALUATION)
    clock.enter(Phase.TRAINING)
    fake.sleep(1.0)
    # Every step of this segment was skipped.
    clock.end_segment(0, Phase.TRAINING)
    fake.sleep(3.0)
    clock.end_segment(1, Phase.CLOSING)
    assert clock.segments == [(4, 4.0), (1, 3.0)]
    # The skipped steps' second is training all the same: 4 + 1 + 3.
    assert (clock.seconds(Phase.TRAINING), clock.seconds(Phase.EVALUATION)) == (8.0, 32.0)


def test_it_waits_for_the_device_at_the_edges_alone_and_counts_the_wait_before():
    fake = FakeTime()
    # The device has work left, and the clock waits for it.
    clock = TrialClock(fake, lambda: fake.sleep(0.5))
    fake.sleep(1.0)
    clock.enter(Phase.TRAINING)
    fake.sleep(1.0)
    clock.end_segment(1, Phase.EVALUATION)
    # Two seconds, and two waits of half a second.
    assert fake.now == 3.0
    assert clock.segments == [(1, 1.5)]
    assert clock.seconds(Phase.STARTUP) == 1.5


@pytest.mark.parametrize(
    ("segments", "warmup_steps", "expected"),
    [
        ([], 1, None),
        # A single segment counts.
        ([(4, 2.0)], 1, 0.5),
        # The first segment is left out in any case.
        ([(1, 100.0), (4, 2.0)], 0, 0.5),
        # Of an even number of segments it is the mean of the middle two.
        ([(1, 100.0), (4, 2.0), (2, 8.0)], 1, 2.25),
        # Segments count once each, whatever their number of steps.
        (
            [(1, 100.0), (1, 1.0), (10, 20.0), (2, 1000.0)],
            1,
            2.0,
        ),
        # Several short segments make up the warm-up.
        (
            [(1, 100.0), (1, 50.0), (3, 30.0), (10, 20.0), (10, 10.0)],
            5,
            1.5,
        ),
        # Where there is nothing but warm-up, the last segment counts.
        ([(1, 100.0), (1, 50.0), (1, 30.0)], 5, 30.0),
    ],
)
def test_seconds_per_step(segments, warmup_steps, expected):
    assert seconds_per_step(segments, warmup_steps) == expected
