import math
import subprocess
import sys
from collections import Counter

import optuna
import pytest
from optuna.distributions import FloatDistribution, IntDistribution
from optuna.samplers import BaseSampler
from optuna.trial import TrialState
from synthetic import Law, synthetic_table

from bstune.core.errors import ConfigError
from bstune.core.records import Target, TrialSpec
from bstune.sweeps.baselines import (
    AXES,
    MOST_GP_TRIALS,
    EachBatchSize,
    OptunaSearch,
    Zeus,
    baselines,
    next_to_prune,
    rule_of,
)
from bstune.sweeps.contest import make_task, play, stopping_step
from bstune.trial.replay import Run, Table, replay

TARGET = Target("error", 0.1, "min")
TASK = make_task("t", synthetic_table(Law(noise=0.1), (8, 32, 128, 512), (0.01, 0.1, 1.0)), TARGET, "time")
ENTRIES = {entry.key: entry for entry in baselines()}


@pytest.fixture(autouse=True)
def _quiet():
    before = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    yield
    optuna.logging.set_verbosity(before)


class Given(BaseSampler):
    """Suggests the given parameters, one dictionary a trial, and keeps the distributions that it saw."""

    def __init__(self, *params):
        self.params, self.seen = params, {}

    def infer_relative_search_space(self, study, trial):
        return {}

    def sample_relative(self, study, trial, search_space):
        return {}

    def sample_independent(self, study, trial, param_name, param_distribution):
        self.seen[param_name] = param_distribution
        return self.params[trial.number][param_name]


def answer(search, task, count):
    """Return what the first ``count`` trials of a search come to, and its study's trials after the next was asked."""
    finished = []
    for _ in range(count):
        spec = search.propose(finished)
        finished.append(replay(task.table, spec, task.problem.target, spec.max_steps))
    return finished


def run(batch_size, lr, reached, end=4000, tau=1.0, diverged=False):
    last = end if reached is None else reached
    return Run(batch_size, lr, 0, (last,), (0.3 if reached is None else 0.05,), tau, diverged=diverged)


# B 40 is fastest, 50 s; lr 1 never reaches the target, and diverges at B 40 after 5 steps
HAND = Table((run(10, 0.1, 100), run(10, 1.0, None), run(40, 0.1, 50), run(40, 1.0, None, end=5, diverged=True)))
REACHED, STOPPED, DIVERGED = (40, 0.1), (10, 1.0), (40, 1.0)


def told(form, *points):
    """Return the study's trials after trials at ``points`` were told."""
    task = make_task("t", HAND, TARGET, "time")
    params = [{"batch_size": size, "lr": lr} for size, lr in (*points, REACHED)]
    search = OptunaSearch(task.problem, 0, Given(*params), None, form)
    search.propose(answer(search, task, len(points)))
    return search.study.trials[:-1]


@pytest.mark.parametrize("form", ["pruned", "bound"])
def test_a_reached_trial_is_told_in_log_seconds(form):
    [trial] = told(form, REACHED)
    assert (trial.state, trial.value) == (TrialState.COMPLETE, pytest.approx(math.log(50)))


@pytest.mark.parametrize(
    ("points", "bound"),
    [
        ([STOPPED], 800),  # 8000 examples, the budget
        ([REACHED, STOPPED], 100),  # twice the fastest
        ([REACHED, DIVERGED], 100),  # not the 5 s that it lasted
    ],
)
def test_a_stopped_trial_is_told_in_either_form(points, bound):
    complete = told("bound", *points)[-1]
    assert (complete.state, complete.value) == (TrialState.COMPLETE, pytest.approx(math.log(bound)))
    pruned = told("pruned", *points)[-1]
    assert pruned.state == TrialState.PRUNED


def test_a_pruned_trial_is_ranked_by_its_distance_from_the_target():
    task = make_task("t", synthetic_table(Law(), (8, 128), (0.001, 0.01, 0.1)), TARGET, "time")
    search = OptunaSearch(task.problem, 0, Given(*[{"batch_size": 8, "lr": 0.001}] * 2), None, "pruned")
    finished = answer(search, task, 1)
    search.propose(finished)
    assert finished[0].status == "censored"
    gap = finished[0].history[-1][1] - 0.1
    assert search.study.trials[0].intermediate_values == {1: pytest.approx(gap)}
    assert 0.02 < gap < 0.5


@pytest.mark.parametrize(("batch_size", "delta", "expected"), [(64, 0, 0.1), (64, 1, 0.2), (16, 1, 0.1), (512, 3, 1.0)])
def test_the_axis_is_delta_around_the_rule_and_lr_is_clipped(batch_size, delta, expected):
    sampler = Given({"batch_size": batch_size, "delta": delta})
    search = OptunaSearch(TASK.problem, 0, sampler, rule_of(TASK.problem, "sqrt"), "bound")
    spec = search.propose([])  # the reference is B 64, lr 0.1
    assert (spec.batch_size, spec.delta) == (batch_size, delta)
    assert spec.lr == pytest.approx(expected)
    assert spec.max_steps == stopping_step(TASK.problem, batch_size, [])
    half = math.log2(100) / 2
    assert sampler.seen == {"batch_size": IntDistribution(8, 512, log=True), "delta": FloatDistribution(-half, half)}


def test_without_a_rule_the_axis_is_the_tables_learning_rates():
    sampler = Given({"batch_size": 8, "lr": 0.02})
    spec = OptunaSearch(TASK.problem, 0, sampler, None, "bound").propose([])
    assert (spec.lr, spec.delta) == (0.02, None)
    assert sampler.seen["lr"] == FloatDistribution(0.01, 1.0, log=True)


@pytest.mark.parametrize(
    ("axis", "ratio"),
    [("sqrt", 2.0), ("linear", 4.0), ("saturating", 4 * (64 + 100) / (256 + 100)), ("surge", 2 * (164) / (356))],
)
def test_rules_go_through_the_reference(axis, ratio):
    from dataclasses import replace

    problem = replace(TASK.problem, noise_scale=100.0)
    rule = rule_of(problem, axis)
    assert rule(64) == pytest.approx(0.1)
    assert rule(256) / rule(64) == pytest.approx(ratio)
    if axis in ("saturating", "surge"):
        with pytest.raises(ConfigError, match=f"the axis {axis} needs a noise scale"):
            rule_of(replace(problem, noise_scale=None), axis)


def test_a_sampler_may_stop_and_continue_its_trials():
    class Own(OptunaSearch):
        def ending(self, trial, batch_size, finished):
            return (10, None) if not finished else (60, 0)

    task = make_task("t", HAND, TARGET, "time")
    search = Own(task.problem, 0, Given({"batch_size": 40, "lr": 0.1}, {"batch_size": 10, "lr": 1.0}), None, "bound")
    first = search.propose([])
    finished = [replay(task.table, first, TARGET, first.max_steps)]
    second = search.propose(finished)
    assert (second.batch_size, second.lr, second.seed, second.max_steps, second.resumed_from) == (
        40,
        0.1,
        first.seed,
        60,
        0,
    )


def test_each_batch_size_gets_as_many_trials_spread_over_the_learning_rates():
    search = EachBatchSize(TASK.problem, 3)
    specs: list[TrialSpec] = []
    finished = []
    for _ in range(32):
        spec = search.propose(finished)
        specs.append(spec)
        finished.append(replay(TASK.table, spec, TARGET, 1))
    assert all(set(Counter(s.batch_size for s in specs[: 4 * k]).values()) == {k} for k in range(1, 9))
    rounds = [tuple(s.batch_size for s in specs[k : k + 4]) for k in range(0, 32, 4)]
    assert len(set(rounds)) > 1
    shares = {size: [math.log(s.lr / 0.01) / math.log(100) for s in specs if s.batch_size == size] for size in (8, 512)}
    for values in shares.values():  # quasi-random: after 8 terms no gap is wider than an eighth
        ordered = sorted(values)
        gaps = [b - a for a, b in zip(ordered, [*ordered[1:], ordered[0] + 1], strict=True)]
        assert max(gaps) == pytest.approx(1 / 8)
    assert min(abs(a - b) for a in shares[8] for b in shares[512]) > 1e-4  # independent of each other
    assert specs[-1].max_steps == stopping_step(TASK.problem, specs[-1].batch_size, finished[:-1])


def result(batch_size, reached):
    spec = TrialSpec(0, 0, batch_size, 0.1, None, 0)
    table = Table((run(batch_size, 0.1, 50 if reached else None), run(9999, 0.1, 50)))
    return replay(table, spec, TARGET, 100)


@pytest.mark.parametrize(
    ("tried", "expected"),
    [
        ([], 32),
        ([(32, True)], 16),
        ([(32, True), (16, True)], 8),
        ([(32, True), (16, False)], 64),  # no smaller one
        ([(32, True), (16, True), (8, True)], 64),
        ([(32, False)], 64),
        ([(32, False), (64, False)], None),
        ([(32, True), (16, False), (64, True)], 128),
        ([(32, True), (16, False), (64, True), (128, True)], None),
    ],
)
def test_pruning_goes_down_then_up_each_to_the_first_failure(tried, expected):
    assert next_to_prune((8, 16, 32, 64, 128), 32, [result(*each) for each in tried]) == expected


@pytest.mark.parametrize(
    ("steps", "expected", "left"),
    [
        # 8 costs more than twice the least and 128 never gets there; the second round starts at the cheapest
        ({8: 300, 16: 80, 32: 60, 64: 50, 128: None}, [32, 16, 8, 64, 128, 64, 32, 16, 64, 64, 64], (16, 32, 64)),
        # 16 took 90 s when the least was 60 s; in the second round 64 has set it to 40 s
        ({8: None, 16: 90, 32: 60, 64: 40, 128: None}, [32, 16, 8, 64, 128, 64, 32, 16, 64, 64, 64], (32, 64)),
        # 32 fails at once, upwards goes on
        ({8: 60, 16: 60, 32: None, 64: 50, 128: 40}, [32, 64, 128, 128, 64, 128, 128], (64, 128)),
    ],
)
def test_zeus_prunes_twice_then_takes_the_cheapest(steps, expected, left):
    task = make_task("t", Table(tuple(run(size, 0.1, s) for size, s in steps.items())), TARGET, "time")
    search = Zeus(task.problem, 0)
    assert [trial.batch_size for trial in answer(search, task, len(expected))] == expected
    assert search.left == left


def test_zeus_starts_over_where_nothing_reaches_the_target():
    task = make_task("t", HAND, TARGET, "time")
    search = Zeus(task.problem, 0)
    finished = []
    for _ in range(6):
        spec = search.propose(finished)
        finished.append(replay(task.table, spec, TARGET, 1))
    assert [t.batch_size for t in finished] == [10, 40, 10, 40, 10, 40]


def test_zeus_goes_on_trying_arms_that_may_be_as_good():
    task = make_task("t", synthetic_table(Law(noise=0.2, right=0, left=0), seeds=range(8)), TARGET, "time")
    tried = Counter(t.batch_size for t in answer(Zeus(task.problem, 1), task, 120)[20:])
    law = Law()
    times = {size: law.frontier(size) * law.tau(size) for size in task.problem.batch_sizes}
    best = sorted(times, key=lambda size: times[size])[:3]
    assert len(tried) > 1
    assert sum(tried[size] for size in best) > 0.6 * sum(tried.values())


def test_zeus_takes_the_learning_rate_of_the_square_root_rule():
    for trial in answer(Zeus(TASK.problem, 0), TASK, 6):
        assert trial.lr == pytest.approx(min(max(0.1 * math.sqrt(trial.batch_size / 64), 0.01), 1.0))


def test_all_of_them_are_there():
    groups = {entry.group for entry in ENTRIES.values()}
    assert groups == {f"{name}/{axis}" for name in ("random", "qmc", "tpe", "gp") for axis in AXES} | {
        "shallue",
        "zeus",
    }
    forms = Counter(entry.group for entry in ENTRIES.values())
    assert {group for group, count in forms.items() if count == 2} == {g for g in groups if g[:2] in ("tp", "gp")}


@pytest.mark.parametrize("key", ["random/lr", "qmc/linear", "tpe/sqrt/pruned", "tpe/surge/bound", "shallue", "zeus"])
def test_the_same_seed_plays_the_same_game(key):
    def once(seed):
        return play(ENTRIES[key].make(TASK.problem, seed), TASK, (30.0,))

    assert once(1) == once(1)
    assert key == "zeus" or once(1) != once(2)  # Zeus's pruning has nothing to draw
    assert once(1).trials > 5


def test_the_gp_runs_and_is_capped():
    entry = ENTRIES["gp/sqrt/bound"]
    assert entry.most_trials == MOST_GP_TRIALS
    played = play(entry.make(TASK.problem, 0), TASK, (1000.0,), most_trials=12)
    assert (played.trials, played.complete) == (12, False)


def test_imports_neither_torch_nor_lightning():
    code = "import sys, bstune.sweeps.search_benchmark; print(sorted({'torch', 'lightning', 'matplotlib.pyplot'} & set(sys.modules)))"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.strip() == "[]"
