"""The steps of a workload, timed, and their cost beside the device's limits."""

import re
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from builders import resolved
from toolbox import FAST_SURVEY, make_probe_result, make_result, make_survey

from bstune.core.errors import HardwareError
from bstune.core.step_time import StepTime
from bstune.hardware import timing
from bstune.hardware.memory import MemoryModel
from bstune.hardware.threads import OMP_THREADS, threads_of_torch
from bstune.hardware.workload_steps import (
    HowTimed,
    _choose_threads,
    _device_errors,
    _Ladder,
    _longest_step,
    _raised,
    _roofline,
    _time_ladder,
    _untimed_note,
    _Visits,
    threads_of_fit,
)
from bstune.system.watchdog import Wait
from bstune.trial.backend import make_protocol, make_space
from bstune.trial.checks.preflight import PreflightFindings
from bstune.trial.workload import build_workload


class OddError(Exception):
    """No error that anyone expects."""


def test_a_module_that_runs_only_in_trials_costs_a_note_each(monkeypatch):
    def not_now(*arguments):
        raise OddError("not now")

    monkeypatch.setattr(timing, "time_trial", lambda *arguments: (0.01,) * 3)
    options, recipe = resolved("workload=digits", "device=cpu", *FAST_SURVEY)
    workload = replace(build_workload(options, recipe), build_module=not_now)
    space = make_space(options)
    protocol = make_protocol(options, recipe)
    arguments = options, torch.device("cpu"), workload, protocol, space
    limits, cost, notes = _roofline(*arguments)
    assert (limits.dtype, cost) == ("fp32", None)
    assert re.fullmatch(r"no roofline: OddError: not now \(test_workload_steps.py:\d+\)", *notes)
    with monkeypatch.context() as patch:
        patch.setattr(timing, "measure_limits", not_now)
        assert _roofline(*arguments) == (None, None, notes)
    ceiling = make_survey().ceiling
    device = torch.device("cpu")
    measured, notes = _time_ladder(
        options, recipe, space, protocol, workload, ceiling, device, 30.0, None
    )
    assert {row.bare for row in measured.timings} == {None}
    assert re.fullmatch(
        r"no share of overhead: OddError: not now \(test_workload_steps.py:\d+\)", *notes
    )


@pytest.mark.parametrize(
    ("fast", "device", "warmup_steps"),
    [("auto", "cuda", 1), ("graph", "cpu", 1), ("graph", "cuda", 3)],
)
def test_steps_are_timed_from_the_first_replay_on(monkeypatch, fast, device, warmup_steps):
    timed = []

    def time_trial(workload, protocol, *arguments):
        timed.append(protocol.warmup_steps)
        return (0.01,) * 3

    monkeypatch.setattr(timing, "time_trial", time_trial)
    monkeypatch.setattr(timing, "time_bare", lambda *arguments: (0.01,) * 3)
    overrides = (
        f"protocol.fast={fast}",
        "hardware.step_time.warmup_steps=1",
        "hardware.step_time.repeats=1",
    )
    options, recipe = resolved("workload=digits", "device=cpu", *FAST_SURVEY, *overrides)
    arguments = (
        make_space(options),
        make_protocol(options, recipe),
        None,
        make_survey().ceiling,
        torch.device(device),
    )
    _time_ladder(options, recipe, *arguments, 30.0, None)
    assert set(timed) == {warmup_steps}


@pytest.mark.parametrize(
    ("seconds_per_example", "largest", "first_steps"),
    [
        # All of them are in time, and the first visit times as many steps as fill it.
        (1e-4, 512, 31),
        # 0.3 of 50 s are five steps of 3 s.
        (0.01, 300, 3),
        # Steps of twice the smallest size are in time.
        (10.0, 64, 3),
    ],
)
def test_a_batch_size_whose_steps_would_not_end_in_time_is_not_timed(
    monkeypatch, seconds_per_example, largest, first_steps
):
    timed = []
    counts = []
    bare = []

    def time_trial(workload, protocol, size, lr, steps):
        timed.append(size)
        counts.append(steps)
        return (seconds_per_example * size,) * steps

    def time_bare(workload, protocol, size, *arguments):
        bare.append(size)
        return (0.01,)

    monkeypatch.setattr(timing, "time_trial", time_trial)
    monkeypatch.setattr(timing, "time_bare", time_bare)
    options, recipe = resolved(
        "workload=digits",
        "device=cpu",
        "search.batch_size.low=32",
        "hardware.step_time.warmup_steps=2",
        "hardware.step_time.min_steps=3",
        "hardware.step_time.rungs=3",
    )
    found = PreflightFindings(32, StepTime(0.0, seconds_per_example), ())
    device = torch.device("cpu")
    space = make_space(options)
    protocol = make_protocol(options, recipe)
    ceiling = replace(make_survey().ceiling, smallest=32)
    ceiling = replace(ceiling, at=replace(ceiling.at, batch_size=512))
    _, notes = _time_ladder(options, recipe, space, protocol, None, ceiling, device, 50.0, found)
    assert max(timed) == largest
    assert (timed[0], counts[0]) == (32, first_steps)
    assert len(notes) == (largest < 512)
    # Without the framework no visit takes more than 2.5 s.
    assert all(5 * seconds_per_example * size <= 2.5 for size in bare)
    assert bool(bare) == (seconds_per_example < 1.0)


@pytest.mark.parametrize(
    ("of_first_steps", "seconds_of_survey", "largest", "is_told"),
    [
        # The steps that were tried were as slow as those that are timed.
        (0.01, 50.0, 300, True),
        # They were ten times as slow: more is timed, up to the ceiling.
        (0.1, 500.0, 512, False),
        (0.1, 50.0, 298, True),
    ],
)
def test_slow_first_steps_do_not_limit_what_is_timed(
    monkeypatch, of_first_steps, seconds_of_survey, largest, is_told
):
    timed = []

    def time_trial(workload, protocol, size, lr, steps):
        timed.append(size)
        return (0.01 * size,) * steps

    monkeypatch.setattr(timing, "time_trial", time_trial)
    monkeypatch.setattr(timing, "time_bare", lambda *arguments: (0.01,))
    options, recipe = resolved(
        "workload=digits",
        "device=cpu",
        "search.batch_size.low=2",
        "hardware.step_time.warmup_steps=2",
        "hardware.step_time.min_steps=3",
    )
    found = PreflightFindings(2, StepTime(0.0, of_first_steps), ())
    ceiling = replace(make_survey().ceiling, smallest=2)
    ceiling = replace(ceiling, at=replace(ceiling.at, batch_size=512))
    space = make_space(options)
    protocol = make_protocol(options, recipe)
    device = torch.device("cpu")
    measured, notes = _time_ladder(
        options, recipe, space, protocol, None, ceiling, device, seconds_of_survey, found
    )
    assert max(timed) == measured.timings[-1].batch_size == pytest.approx(largest, abs=3)
    assert len(notes) == is_told
    # What the note says is true of the steps that were timed.
    for note in notes:
        assert "each takes longer than 3.00 s" in note


def fake_time_trial(monkeypatch, running, waiting):
    """Let steps run and wait for given seconds by number of threads; list the calls' threads."""
    calls = []

    def time_trial(workload, protocol, size, lr, steps, now):
        threads = torch.get_num_threads()
        calls.append(threads)
        # A CPU's other clock leaves out what a step waits.
        waited = waiting[threads] if now is timing.wall_seconds else 0.0
        return (running[threads] + waited,) * steps

    monkeypatch.setattr(timing, "time_trial", time_trial)
    return calls


QUIET_RUN = {1: 2.0, 2: 1.1}
NO_WAIT = {1: 0.0, 2: 0.0}


@pytest.mark.parametrize(
    ("running", "waiting", "best"),
    [
        (QUIET_RUN, NO_WAIT, 2),
        # On a busy machine two threads wait for each other, and one only for a processor.
        (QUIET_RUN, {1: 0.5, 2: 3.0}, 1),
        # Waiting alike, more threads are as useful as on a quiet one.
        (QUIET_RUN, {1: 2.0, 2: 1.1}, 2),
    ],
)
def test_waiting_counts_in_the_choice_of_threads(monkeypatch, running, waiting, best):
    fake_time_trial(monkeypatch, running, waiting)
    options, recipe = resolved("workload=digits", "device=cpu", *FAST_SURVEY)
    choice = _choose_threads(
        options,
        make_space(options),
        make_protocol(options, recipe),
        build_workload(options, recipe),
        None,
        HowTimed("trainer", (1, 2)),
        make_survey().ceiling,
        30.0,
    )
    assert choice.threads == best


@pytest.mark.parametrize(
    ("option", "environment", "here", "of_study", "step_seconds", "best", "timed"),
    [
        # As the study's, where they are faster in this process, too.
        ("auto", {}, 2, 2, 0.01, 2, {1, 2}),
        ("auto", {}, 2, 1, 0.01, 1, set()),
        # No survey chose any.
        ("auto", {}, 2, None, None, 2, {1, 2}),
        # Never more than torch has here.
        ("auto", {}, 1, 2, 0.01, 1, set()),
        # Who sets the variable has chosen, and torch has taken it.
        ("auto", {OMP_THREADS: "2"}, 2, 1, 0.01, None, set()),
        ("1", {}, 2, 2, 0.01, 1, set()),
        # Long steps take too long to try.
        ("auto", {}, 2, 2, 60.0, 2, set()),
    ],
)
def test_the_threads_of_a_fit(
    monkeypatch, option, environment, here, of_study, step_seconds, best, timed
):
    monkeypatch.delenv(OMP_THREADS, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    calls = fake_time_trial(monkeypatch, QUIET_RUN, NO_WAIT)
    fit = fit_of_digits(option, step_seconds)
    with threads_of_torch(here):
        assert threads_of_fit(*fit, of_study) == best
    assert set(calls) == timed


def fit_of_digits(option, step_seconds):
    """Options, workload, protocol and trial of a fit."""
    options, recipe = resolved("workload=digits", "device=cpu", f"threads={option}")
    trial = make_result(seconds_per_step=step_seconds)
    return options, build_workload(options, recipe), make_protocol(options, recipe), trial


def test_a_fit_has_one_thread_where_two_wait_for_each_other(monkeypatch):
    monkeypatch.delenv(OMP_THREADS, raising=False)
    fake_time_trial(monkeypatch, QUIET_RUN, {1: 0.5, 2: 200.0})
    with threads_of_torch(2):
        assert threads_of_fit(*fit_of_digits("auto", 0.01), 2) == 1


def test_a_fit_whose_steps_cannot_be_timed_has_the_threads_of_the_study(monkeypatch):
    def ended(*arguments):
        raise HardwareError("the trial ended")

    monkeypatch.delenv(OMP_THREADS, raising=False)
    monkeypatch.setattr(timing, "time_trial", ended)
    with threads_of_torch(2):
        assert threads_of_fit(*fit_of_digits("auto", 0.01), 2) == 2


@pytest.mark.parametrize(
    ("options", "changes", "ends"),
    [
        # The range is 32 to 512.
        ((), {}, (32, 512)),
        (("scaling.batch_size=8",), {}, (8, 512)),
        (("scaling.batch_size=1024",), {}, (32, 1024)),
        # It is not run.
        (("scaling.batch_size=8", "search.baseline=false"), {}, (32, 512)),
        # The range's own smallest size fails; its largest does not fit; half of the memory is not
        # enough for the size; a step of 20 s would not end in time.
        (("scaling.batch_size=8",), {"smallest": 64}, (64, 512)),
        (("scaling.batch_size=1024",), {"above": make_probe_result(513, "training")}, (32, 512)),
        (("scaling.batch_size=1024",), {"model": MemoryModel(500 * 2.0**20, 1.0)}, (32, 512)),
        (("scaling.batch_size=1024",), {"model": None}, (32, 512)),
        (("scaling.batch_size=20000",), {}, (32, 512)),
    ],
)
def test_a_reference_outside_the_range_is_timed_where_it_runs(monkeypatch, options, changes, ends):
    timed = []

    def time_trial(workload, protocol, size, lr, steps):
        timed.append(size)
        return (1e-3 * size,) * steps

    monkeypatch.setattr(timing, "time_trial", time_trial)
    monkeypatch.setattr(timing, "time_bare", lambda *arguments: (0.01,))
    own = ("search.batch_size.low=32", "search.batch_size.high=512", "hardware.step_time.repeats=1")
    resolved_options, recipe = resolved("workload=digits", "device=cpu", *own, *options)
    found = PreflightFindings(32, StepTime(0.0, 1e-3), ())
    ceiling = replace(make_survey().ceiling, smallest=32, above=None)
    ceiling = replace(ceiling, at=make_probe_result(512), model=MemoryModel(2.0**20, 1.0))
    ceiling = replace(ceiling, **changes)
    _time_ladder(
        resolved_options,
        recipe,
        make_space(resolved_options),
        make_protocol(resolved_options, recipe),
        SimpleNamespace(train_examples=100_000),
        ceiling,
        torch.device("cpu"),
        50.0,
        found,
    )
    assert (min(timed), max(timed)) == ends


def test_a_device_that_is_lost():
    with (
        pytest.raises(HardwareError, match=r"the device was lost .*CUDA error: GPU is lost"),
        _device_errors(),
    ):
        raise RuntimeError("CUDA error: GPU is lost\nmore")
    with pytest.raises(RuntimeError, match="another"), _device_errors():
        raise RuntimeError("another")


def test_a_visit_says_its_number_and_how_long_others_may_take():
    visits = _Visits(
        wait=Wait("the timing of steps"),
        planned=6,
        ends_at=time.perf_counter() + 100.0,
        space=None,
        step_time=None,
        warmup_steps=0,
        bare_seconds=0.0,
        time_trial=None,
        time_bare=None,
        tried=None,
        overhead_notes=[],
        timed=[(8.0, 0.1)] * 2,
    )
    text = visits._in_words(64)
    seconds = float(re.search(r"batch size 64, visit 3 of at most 6, about (\S+) s more", text)[1])
    assert 90.0 < seconds <= 100.0
    visits.ends_at = time.perf_counter()
    assert "visit 3, no time for others" in visits._in_words(64)


@pytest.mark.parametrize(
    ("largest", "timed", "seconds_left", "raised", "why"),
    [
        # The first visits were fast.
        (64, [(4, 0.01), (64, 0.02)], 20.0, 1024, None),
        # A step at 81 would be in time, which is not worth another visit.
        (64, [(4, 0.1), (64, 0.95)], 25.0, 64, "longer than 950 ms"),
        # With 5 s left a first visit may take 1.5 s, which is 250 ms a step.
        (64, [(4, 0.1), (64, 0.95)], 5.0, 64, "used up"),
        # Six steps of twice the shortest are in time, and then they are not.
        (8, [(4, 1.0), (8, 1.05)], 14.7, 84, "longer than 735 ms"),
        (8, [(4, 1.5), (8, 1.55)], 8.7, 8, "longer than 1.35 s"),
    ],
)
def test_the_largest_size_is_raised_as_far_as_a_visit_ends_in_time(
    largest, timed, seconds_left, raised, why
):
    step_time = SimpleNamespace(min_steps=4, rungs=6)
    space = SimpleNamespace(multiple=1)
    visits = SimpleNamespace(step_time=step_time, warmup_steps=2, timed=timed, space=space)
    ceiling = SimpleNamespace(batch_size=1024, smallest=4)
    ladder = _Ladder((4, largest), largest, _longest_step(step_time, 2, 27.0))
    found = _raised(ladder, visits, ceiling, seconds_left)
    assert max(found.sizes) == found.largest == raised
    if why is not None:
        assert why in _untimed_note(found.largest, found.longest_step)
