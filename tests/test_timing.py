"""Step times on synthetic numbers whose truth is known, with a clock of our own."""

import time as clock
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from builders import loaded, options_and_recipe

from bstune.core.errors import HardwareError
from bstune.hardware import timing
from bstune.hardware.timing import (
    StepTiming,
    ladder,
    measure_step_times,
    summarize_visits,
    time_bare,
    time_trial,
    visit_order,
)
from bstune.trial.backend import make_protocol
from tests.toolbox import FakeTime

SIZES = (8, 32, 128, 500)


def line(size: float) -> float:
    return 2e-3 + 3e-5 * size


def test_a_ladder_has_both_ends_and_each_round_visits_every_size_in_its_own_order():
    assert ladder(8, 500, 4, 8) == SIZES
    assert ladder(5, 5, 3, 1) == (5,)
    order = visit_order(SIZES, 6, 1)
    rounds = np.array(order[:24]).reshape(6, 4)
    for each in rounds:
        assert sorted(each) == list(SIZES)
    assert len(np.unique(rounds, axis=0)) > 1
    # Both ends come first.
    assert order[:2] == [8, 500]
    assert visit_order((5,), 2, 1) == [5, 5]
    assert order == visit_order(SIZES, 6, 1)


def measured(sizes, repeats, max_seconds):
    """The measurement where a visit takes 100 steps."""
    time = FakeTime()

    def run(size):
        time.sleep(100 * line(size))
        return (line(size),) * 3, (0.5 * line(size),)

    return measure_step_times(run, sizes, repeats, 0, max_seconds, time)


def sizes_of(found):
    return [timing.batch_size for timing in found.timings]


def test_enough_time_measures_all_and_without_time_both_ends_are_visited():
    found = measured(SIZES, 3, 1e9)
    assert sizes_of(found) == list(SIZES)
    assert (found.left_out, found.cut) == ((), ())
    seconds = [timing.seconds for timing in found.timings]
    assert seconds == pytest.approx([line(size) for size in SIZES])
    assert found.timings[0].overhead_share == pytest.approx(0.5)
    assert found.timings[0].throughput == pytest.approx(8 / line(8))
    found = measured(SIZES, 2, 0.0)
    assert sizes_of(found) == [8, 500]
    assert found.left_out == (32, 128)
    assert found.cut == (8, 500)
    assert measured((8,), 2, 0.0).cut == (8,)


def test_the_largest_size_may_be_raised_after_the_first_visits_to_both_ends():
    time = FakeTime()
    visited = []
    left = []

    def run(size):
        visited.append(size)
        time.sleep(line(size))
        return (line(size),) * 3, ()

    def resized(seconds_left):
        left.append(seconds_left)
        return [8, 90, 1000]

    found = measure_step_times(run, SIZES, 2, 0, 1e9, time, resized=resized)
    assert visited[:3] == [8, 500, 1000]
    assert left == [pytest.approx(1e9 - line(8) - line(500))]
    # The size that was the largest one has been timed as well.
    assert sizes_of(found) == [8, 90, 500, 1000]
    # Both ends that stay leave the visits as they are.
    orders = []
    for same in (None, lambda seconds_left: SIZES):
        visited.clear()
        measure_step_times(run, SIZES, 2, 0, 1e9, time, resized=same)
        orders.append(list(visited))
    assert orders[0] == orders[1]


def test_summary():
    # Means of 2 and 4.5: their middle and quartiles, and a rise by 125%.
    timing = summarize_visits(8, [(1.0, 2.0, 3.0), (4.0, 5.0)])
    assert timing == StepTiming(
        8, seconds=3.25, low=2.625, high=3.875, drift=1.25, steps=5, visits=2, bare=None
    )
    assert timing.overhead_share is None


# Real trials, by a clock that moves only when batches are drawn


class Passing:
    """Batches that let time pass before each one."""

    def __init__(self, batches, seconds, time):
        self.batches = batches
        self.seconds = seconds
        self.time = time

    def __iter__(self):
        for number, batch in enumerate(self.batches):
            self.time.sleep(self.seconds(number))
            yield batch


def trial_of(time, training, *overrides, change=lambda module: None):
    """A workload whose n-th batch takes ``training(n)`` seconds, one for evaluation 1000; and its protocol.

    Nearly every step is followed by an evaluation. ``change`` is called with each module.
    """
    workload, protocol = loaded(
        "workload=digits", "device=cpu", "protocol.evaluation_cost=1e-9", *overrides
    )

    def build_module(spec):
        module = workload.build_module(spec)
        change(module)
        return module

    return replace(
        workload,
        build_module=build_module,
        train_batches=lambda spec: Passing(workload.train_batches(spec), training, time),
        validation_batches=Passing(workload.validation_batches, lambda number: 1000.0, time),
    ), protocol


@pytest.mark.parametrize(("micro", "of_step"), [("null", 1), ("16", 3)])
def test_a_trials_steps_are_timed_without_warm_up_and_evaluation(micro, of_step):
    time = FakeTime()
    workload, protocol = trial_of(
        time, lambda n: 1.0 + n // of_step, f"protocol.micro_batch_size={micro}"
    )
    steps = time_trial(workload, protocol, 48, 0.01, 6, time)
    # Each step takes longer than the one before by as many seconds as it has batches, from one
    # request to the next.
    assert len(steps) == 6
    first = protocol.warmup_steps + 1
    assert min(steps) >= first * of_step
    assert max(steps) <= 1000
    assert np.diff(steps).tolist() == [float(of_step)] * 5


def test_a_trial_that_ends_early_says_why():
    class Full(torch.nn.Linear):
        def forward(self, images):
            raise torch.OutOfMemoryError("no memory for it\nand a long list")

    workload, protocol = trial_of(
        FakeTime(), lambda n: 1.0, change=lambda module: setattr(module, "model", Full(1, 1))
    )
    text = (
        r"at batch size 48, but the trial ended after 0 of 13 \(out of memory\): no memory for it$"
    )
    with pytest.raises(HardwareError, match=text):
        time_trial(workload, replace(protocol, warmup_steps=5), 48, 0.01, 6)


@pytest.mark.parametrize(
    ("precision", "mode", "weights", "logits"),
    [
        ("32-true", "null", torch.float32, torch.float32),
        ("bf16-mixed", "null", torch.float32, torch.bfloat16),
        pytest.param(
            *("bf16-true", "default", torch.bfloat16, torch.bfloat16), marks=pytest.mark.slow
        ),
    ],
)
def test_the_bare_loop_is_in_the_trials_precision_and_compiled_as_it(
    monkeypatch, precision, mode, weights, logits
):
    seen = set()
    graphs = []
    built = []

    def watch(module):
        module.loss.register_forward_pre_hook(lambda loss, inputs: seen.add(inputs[0].dtype))
        built.append(module)

    compiling = partial(
        torch.compile, backend=lambda graph, inputs: graphs.append(graph) or graph.forward
    )
    monkeypatch.setattr(torch, "compile", compiling)
    options = (f"precision={precision}", f"compile={mode}")
    workload, protocol = trial_of(FakeTime(), lambda n: 1.0, *options, change=watch)
    assert len(time_bare(workload, protocol, 48, 0.01, 4, torch.device("cpu"))) == 4
    assert seen == {logits}
    for parameter in built[0].parameters():
        assert parameter.dtype == weights
    assert len(graphs) == (mode != "null")
    for part in built[0].modules():
        assert part._compiled_call_impl is None


def test_the_seconds_of_a_devices_own_work(monkeypatch):
    """On CUDA: kernels take 2 ms a step, and 5 ms before and after them; on a CPU: seconds of all its threads."""
    protocol = make_protocol(*options_and_recipe("workload=digits", "device=cpu"))
    profiled = []

    class Profile:
        def __init__(self, activities):
            profiled.append(self)

        def __enter__(self):
            return self

        def __exit__(self, *error):
            return None

        def key_averages(self):
            times = (5e3, 2e3 * self.steps)
            return [SimpleNamespace(self_device_time_total=time) for time in times]

    def time_trial(workload, protocol, batch_size, lr, steps, now=None):
        if now is None:
            profiled[-1].steps = steps
        return (0.5, 0.1, 0.3)

    monkeypatch.setattr(timing, "time_trial", time_trial)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    # The median, 0.3, over two threads.
    assert timing.busy_seconds(None, protocol, 8, 0.1, 4) == pytest.approx(0.15)
    monkeypatch.setattr(timing, "device_of", lambda trainer: torch.device("cuda"))
    monkeypatch.setattr(torch.profiler, "profile", Profile)
    assert timing.busy_seconds(None, protocol, 8, 0.1, 4) == pytest.approx(2e-3)


@pytest.mark.parametrize(
    ("now", "is_left_out"), [(clock.perf_counter, True), (timing.wall_seconds, False)]
)
def test_only_the_walls_clock_counts_what_a_step_waits_for_a_processor(
    monkeypatch, now, is_left_out
):
    waited = iter([0.0, 1e6])
    monkeypatch.setattr(timing, "processor_wait_of", lambda device: lambda: next(waited))
    mark, seconds_between = timing._marker(torch.device("cpu"), now)
    assert (seconds_between((mark(), mark())) < 0.0) is is_left_out
