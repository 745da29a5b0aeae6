import math
from functools import partial

import pytest

from bstune.core import scaling
from bstune.core.records import Budget, EvaluationSchedule, Target, TrialProtocol
from bstune.core.search_space import Space
from bstune.core.step_time import StepTime
from bstune.study.plan import SearchBudget, max_seconds, probe_step_time, remaining_seconds


def space(low=8, high=512, multiple=1):
    rule = partial(scaling.linear, reference_batch_size=64, reference_lr=0.1)
    return Space(low=low, high=high, multiple=multiple, sigma=1.0, rule=rule)


def plan(trials=10, seconds=None):
    return SearchBudget(objective="time", trials=trials, seconds=seconds, wall_seconds=None, stratified=0.5, seed=0)


def protocol(steps=100, examples=1, share=0.25):
    return TrialProtocol(
        target=Target("val/error", 0.1, "min"),
        budget=Budget(steps, examples),
        evaluation_schedule=EvaluationSchedule(ratio=1.05, share=share, cost=0.5, near=1.5),
        micro_batch_size=16,
        warmup_steps=5,
        divergence=2.0,
        noise_scale_every=None,
        compile=None,
        trainer={"accelerator": "cpu", "precision": "32-true"},
    )


@pytest.fixture
def probe(make_result):
    """Return a function that probes a made-up machine; its attribute holds what was asked of it."""
    asked = []

    def run(tau, **sizes):
        asked.clear()

        def train(spec, rules):
            asked.append((spec, rules))
            return make_result(seconds_per_step=tau(spec.batch_size))

        return probe_step_time(space(**sizes), protocol(), train)

    run.asked = asked
    return run


@pytest.mark.parametrize(("overhead", "per_example"), [(0.01, 0.001), (0.0, 0.5), (0.3, 0.0)])
def test_a_probe_recovers_a_straight_line(probe, overhead, per_example):
    step_time = probe(lambda batch_size: overhead + per_example * batch_size)
    for batch_size in (8, 100, 512):
        assert step_time(batch_size) == pytest.approx(overhead + per_example * batch_size)


def test_a_probe_is_short_cheap_and_leaves_the_rest_of_the_protocol(probe):
    probe(lambda batch_size: 1.0)
    assert [spec.batch_size for spec, _ in probe.asked] == [8, 32]
    for spec, rules in probe.asked:
        assert spec.lr == pytest.approx(0.1 * spec.batch_size / 64 / 8)  # the lowest rate searched: three octaves down
        assert rules.budget.last_step(spec.batch_size) < 10
        assert rules.warmup_steps < rules.budget.steps
        assert rules.trainer == {"accelerator": "cpu", "precision": "32-true", "limit_val_batches": 1}
        assert (rules.target, rules.evaluation_schedule, rules.micro_batch_size) == (
            protocol().target,
            protocol().evaluation_schedule,
            16,
        )


@pytest.mark.parametrize(
    ("sizes", "probed"),
    [
        ({"low": 8, "high": 512}, [8, 32]),
        ({"low": 8, "high": 20}, [8, 20]),  # not past the largest
        ({"low": 3, "high": 512, "multiple": 8}, [8, 16]),
        ({"low": 64, "high": 64}, [64]),
    ],
)
def test_the_batch_sizes_that_are_timed(probe, sizes, probed):
    probe(lambda batch_size: 1.0, **sizes)
    assert [spec.batch_size for spec, _ in probe.asked] == probed


def test_one_batch_size_is_all_slope(probe):
    assert probe(lambda batch_size: 0.64, low=64, high=64) == StepTime(0.0, 0.01)


def test_noise_makes_neither_part_negative(probe):
    assert probe(lambda batch_size: {8: 0.5, 32: 0.4}[batch_size]) == StepTime(0.5, 0.0)
    steep = probe(lambda batch_size: {8: 0.1, 32: 4.9}[batch_size])
    assert steep == StepTime(0.0, pytest.approx(0.2))


def test_where_steps_decide_a_study_takes_trials_times_steps():
    seconds = max_seconds(plan(12), space(), Budget(100, 1).last_step, StepTime(0.02, 0.0), 0.25)
    assert seconds == pytest.approx(12 * 100 * 0.02 * 1.25)  # and a quarter on top for evaluation


def test_where_examples_decide_a_study_takes_trials_times_examples():
    seconds = max_seconds(plan(12), space(), Budget(1, 1_000_000).last_step, StepTime(0.0, 1e-4), 0.5)
    assert seconds == pytest.approx(12 * 1_000_000 * 1e-4 * 1.5, rel=0.01)


def test_the_mean_is_taken_evenly_over_the_logarithm():
    """Half the octaves of 8 to 512 spend their steps, half their examples; against a much finer sum."""
    budget, step_time = Budget(100, 6400), StepTime(0.01, 0.001)
    n = 20_000
    sizes = [8 * 64 ** ((i + 0.5) / n) for i in range(n)]
    exact = sum(max(100, 6400 / size) * step_time(size) for size in sizes) / n
    assert max_seconds(plan(1), space(), budget.last_step, step_time, 0.25) == pytest.approx(1.25 * exact, rel=0.02)


@pytest.mark.parametrize("low", [1, 3, 8])
def test_a_bound_is_no_lower_for_small_batches(low):
    seconds = max_seconds(plan(1), space(low, 4 * low), Budget(1, 100_000).last_step, StepTime(0.0, 1e-4), 0.25)
    assert seconds == pytest.approx(100_000 * 1e-4 * 1.25, rel=1e-3)


@pytest.mark.parametrize(
    ("limit", "expected"),
    [
        (None, 10 * 200.0),
        (1e9, 10 * 200.0),
        (500.0, 500.0 + 200.0),  # the last trial may begin just before the limit
    ],
)
def test_a_limit_in_seconds_binds_with_one_trial_on_top(limit, expected):
    seconds = max_seconds(plan(10, limit), space(), Budget(100, 1).last_step, StepTime(2.0, 0.0), 0.25)
    assert seconds == pytest.approx(expected * 1.25)


@pytest.mark.parametrize(
    ("trials", "done", "expected"),
    [
        (10, [], None),
        (10, [("failed", 5.0)], None),  # says nothing of the others
        (10, [("reached", 4.0), ("censored", 6.0)], 8 * 5.0),
        (10, [("reached", 4.0), ("failed", 100.0)], 9 * 4.0),
        (10, [("diverged", 1.0), ("oom", 2.0), ("reached", 6.0)], 7 * 3.0),
        (2, [("reached", 4.0)] * 2, 0.0),
        (2, [("reached", 4.0)] * 3, 0.0),
    ],
)
def test_remaining_seconds(trials, done, expected, make_result):
    results = [make_result(status=status, wall_seconds=seconds) for status, seconds in done]
    remaining = remaining_seconds(plan(trials), results)
    assert remaining == (None if expected is None else pytest.approx(expected))
    assert remaining is None or math.isfinite(remaining)
    fresh = make_result(wall_seconds=1000.0, replicate_of=0)
    assert remaining_seconds(plan(trials), [*results, fresh]) == remaining  # it takes no slot of the plan
