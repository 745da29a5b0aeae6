"""Step times on synthetic numbers whose truth is known, with a clock of our own."""

import pytest

from bstune.errors import HardwareError
from bstune.hardware.step_time import (
    Steps,
    ladder,
    measure_step_times,
    summarize,
    visits,
)

SIZES = (8, 32, 128, 500)


def line(size: float) -> float:
    return 2e-3 + 3e-5 * size


def test_ladder_holds_both_ends():
    assert ladder(8, 500, 4, 8) == (8, 32, 128, 500)
    assert ladder(5, 5, 3, 1) == (5,)
    with pytest.raises(HardwareError, match="a ladder needs 1 <= low <= ceiling"):
        ladder(9, 8, 3, 1)


def test_each_round_visits_every_size_in_its_own_order():
    order = visits(SIZES, 6, 1)
    rounds = [tuple(order[i : i + 4]) for i in range(0, 24, 4)]
    assert all(sorted(each) == list(SIZES) for each in rounds)
    assert len(set(rounds)) > 1
    assert order == visits(SIZES, 6, 1)


class Machine:
    def __init__(self) -> None:
        self.time, self.visited = 0.0, []

    def __call__(self, size: int) -> Steps:
        self.visited.append(size)
        self.time += 100 * line(size)
        return Steps((line(size),) * 3, (0.5 * line(size),))

    def now(self) -> float:
        return self.time


def test_enough_time_measures_all():
    machine = Machine()
    found = measure_step_times(machine, SIZES, 3, 0, 1e9, machine.now)
    assert [t.batch_size for t in found.timings] == list(SIZES)
    assert (found.left_out, found.cut) == ((), ())
    assert [t.seconds for t in found.timings] == pytest.approx([line(size) for size in SIZES])
    assert found.timings[0].overhead_share == pytest.approx(0.5)
    assert found.timings[0].throughput == pytest.approx(8 / line(8))


def test_a_cap_says_what_it_left_out():
    machine = Machine()
    found = measure_step_times(machine, (8, 100_000), 2, 0, 0.0, machine.now)
    assert len(machine.visited) == 1
    assert (*found.left_out, *found.cut) in ((100_000, 8), (8, 100_000))


def test_a_run_without_steps_is_refused():
    with pytest.raises(HardwareError, match="no step was timed at batch size"):
        measure_step_times(lambda size: Steps(()), SIZES, 1, 0, 1.0, lambda: 0.0)


def test_summary():
    timing = summarize(8, [Steps((1.0, 2.0, 3.0)), Steps((4.0, 5.0))])
    assert (timing.seconds, timing.low, timing.high, timing.steps) == (3.0, 2.0, 4.0, 5)
    assert timing.drift == pytest.approx(1.25)
    assert timing.overhead_share is None
