import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from synthetic import Law, synthetic_table

from bstune.core.curve import fit_curve
from bstune.core.errors import ConfigError, TableError
from bstune.core.records import Target, TrialResult, TrialSpec
from bstune.sweeps.contest import (
    MULTIPLES,
    Search,
    Task,
    dense_points,
    factor,
    fastest,
    make_task,
    percentile,
    play,
    ratio_after,
    spending_within,
    stopping_step,
)
from bstune.trial.replay import Run, Table

TARGET = Target("error", 0.1, "min")


def run(batch_size, lr, reached, tau=1.0, seed=0, end=1000, diverged=False):
    """Return a run that meets the target at step ``reached``, or misses it up to step ``end``."""
    last = end if reached is None else reached
    return Run(batch_size, lr, seed, (last // 2, last), (0.5, 0.5 if reached is None else 0.05), tau, diverged=diverged)


# B 40 is fastest with 50 s; the budget is 4 x 50 = 200 steps or 8000 examples, 800 steps at B 10.
TABLE = Table((run(10, 0.1, 100), run(10, 1.0, None), run(40, 0.1, 50), run(40, 1.0, 80)))


class Scripted(Search):
    """Asks for the given (batch size, lr, limit, parent), then for the first over and over."""

    def __init__(self, *script):
        self.script = script
        self.asked_for_b_crit: list[int] = []

    def propose(self, finished: Sequence[TrialResult]) -> TrialSpec:
        n = len(finished)
        size, lr, *rest = self.script[n] if n < len(self.script) else self.script[0]
        max_steps, resumed_from = rest or (None, None)
        return TrialSpec(n, n, size, lr, None, 0, max_steps, resumed_from)

    def b_crit(self, finished: Sequence[TrialResult]) -> float | None:
        self.asked_for_b_crit.append(len(finished))
        return 100.0 * len(finished) or None


def task(table: Table = TABLE, objective="time", **factors) -> Task:
    return make_task("t", table, TARGET, objective, **factors)


def trials(*script, table=TABLE, objective="time") -> list[TrialResult]:
    """Return what the trials of a script come to."""
    found: list[TrialResult] = []

    class Keeping(Scripted):
        def incumbent(self, finished):
            found[:] = finished

    play(Keeping(*script), task(table, objective), (math.inf,), most_trials=len(script))
    return found


def test_the_task_knows_the_best_cell_the_frontiers_cost_and_the_budget():
    t = task()
    assert t.best == (40, 0.1, 50.0)
    assert t.frontier_seconds == 150.0
    assert t.unit == 50.0
    assert [t.problem.budget.last_step(size) for size in (10, 20, 40, 80)] == [800, 400, 200, 200]
    assert (t.problem.reference_batch_size, t.problem.reference_lr) == pytest.approx((20.0, 0.1**0.5))
    assert t.b_crit is None  # two points


def test_factors_multiply_the_reference_and_the_budget():
    t = task(lr_factor=10, budget_factor=0.1)
    assert t.problem.reference_lr == pytest.approx(10 * 0.1**0.5)
    assert [t.problem.budget.last_step(size) for size in (10, 40)] == [80, 20]


def test_every_trial_is_charged_and_counts_from_when_it_has_finished():
    # 800 s until the budget ends the first (16 times 50 s), then 80 s and 50 s, then 800 s again
    script = (10, 1.0), (40, 1.0), (40, 0.1)
    played = play(Scripted(*script), task(), (20.0,))
    assert played.path == ((17.6, 1.6), (18.6, 1.0))
    assert (played.trials, played.spent, played.complete) == (3, 18.6, True)


@pytest.mark.parametrize(
    ("most", "expected"), [(18.6, 3), (18.59, 2), (17.6, 2), (17.59, 1), (16.0, 1), (15.9, 0), (34.6, 4)]
)
def test_a_trial_that_the_spending_cuts_through_is_not_in(most, expected):
    played = play(Scripted((10, 1.0), (40, 1.0), (40, 0.1)), task(), (most,))
    assert played.trials == expected
    assert played.spent <= most


def test_a_multiple_that_is_met_exactly_is_in_whatever_the_rounding():
    table = Table((run(10, 0.1, 100, tau=0.7), run(40, 0.1, 1, tau=0.7)))
    assert sum([0.7] * 6) > 6 * 0.7
    assert play(Scripted((40, 0.1)), task(table), (6.0,)).trials == 6


def test_a_limit_ends_a_trial_and_a_continued_one_pays_what_it_adds():
    script = (40, 1.0, 30, None), (40, 1.0, 60, 0), (40, 1.0, 90, 1)  # 30 s, 30 s more, 20 s more: reached at 80
    played = play(Scripted(*script), task(), (1.6,))
    assert played.spent == 1.6
    assert played.path == ((1.6, 1.6),)
    found = trials(*script)
    assert [(t.status, t.steps, t.train_seconds) for t in found] == [
        ("censored", 30, 30.0),
        ("censored", 60, 30.0),
        ("reached", 80, 20.0),
    ]
    assert found[-1].time_to_target == 80.0  # not the 20 s that it added


def test_the_cap_on_trials_ends_a_search_that_keeps_what_it_has():
    played = play(Scripted((40, 1.0)), task(), (5.0, 60.0), most_trials=4)
    assert (played.trials, played.complete, played.spent) == (4, False, 6.4)
    assert ratio_after(played.path, 60.0) == 1.6


def test_the_ratio_is_of_the_median_over_the_tables_seeds():
    # the trial may draw 20 s or 100 s at lr 1; its point's median is 60 s, the best cell's 50 s
    table = Table((*TABLE.runs[:3], run(40, 1.0, 20), run(40, 1.0, 100, seed=1)))
    played = play(Scripted((40, 1.0)), task(table), (5.0,))
    assert {ratio for _, ratio in played.path} == {1.2}


def test_a_point_that_most_seeds_miss_has_no_ratio():
    table = Table((*TABLE.runs[:3], run(40, 1.0, 20), run(40, 1.0, None, seed=1), run(40, 1.0, None, seed=2)))
    lucky = next(s for s in range(100) if np.random.default_rng(s).random() < 1 / 3)

    class Lucky(Scripted):
        def propose(self, finished):
            return replace(super().propose(finished), seed=lucky)

    played = play(Lucky((40, 1.0)), task(table), (2.0,))
    assert played.path == ((0.4, None),)
    assert ratio_after(played.path, 2.0) == math.inf


def test_a_search_may_name_its_own_incumbent():
    class First(Scripted):
        def incumbent(self, finished):
            return finished[0]

    played = play(First((40, 1.0), (40, 0.1)), task(), (3.0,))
    assert played.path == ((1.6, 1.6),)


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ([(40, 0.1, 20, None), (40, 0.1, 20, 0)], "limit past the 20 steps it has, but got 20"),
        ([(40, 0.1, 0, None)], "limit past the 0 steps"),
        ([(40, 0.1, 20, None), (40, 1.0, 40, 0)], "trial 1 continues trial 0, which is no stopped trial"),
        ([(40, 0.1), (40, 0.1, 80, 0)], "no stopped trial"),  # it had reached the target
        ([(40, 0.1, 20, 0)], "no stopped trial"),
    ],
)
def test_a_search_that_breaks_the_rules_is_told(script, message):
    with pytest.raises(ConfigError, match=message):
        play(Scripted(*script), task(), (60.0,))


def test_a_search_that_numbers_its_trials_otherwise_is_told():
    class Wrong(Scripted):
        def propose(self, finished):
            return replace(super().propose(finished), number=7)

    with pytest.raises(ConfigError, match="expected 0, but got 7"):
        play(Wrong((40, 0.1)), task(), (60.0,))


# B_crit = 400, S_min = 200: 10200, 1450, 600, 400, 300 steps at B 8, 64, 200, 400, 800
CURVE = synthetic_table(Law(exponent=0.0, overhead=1.0, per_example=1e-9), (8, 64, 200, 400, 800), (0.05, 0.1, 0.2))


def test_b_crit_is_asked_for_at_each_multiple_with_what_had_finished():
    t = task(CURVE, "curve")
    assert t.b_crit == pytest.approx(400, rel=0.1)
    assert t.unit == t.frontier_seconds > t.best[2]
    search = Scripted((800, 0.1))
    played = play(search, t, (1.0, 3.0))
    seconds = trials((800, 0.1), table=CURVE, objective="curve")[0].train_seconds
    expected = [int(multiple * t.unit / seconds) for multiple in (1.0, 3.0)]
    assert search.asked_for_b_crit == expected
    assert played.b_crit == pytest.approx([100 * n / t.b_crit for n in expected])


def test_b_crit_without_points_is_none():
    class Default(Scripted):
        b_crit = Search.b_crit

    assert play(Default((800, 0.1)), task(CURVE, "curve"), MULTIPLES["curve"]).b_crit == (None, None, None)


@pytest.mark.parametrize(
    ("script", "batch_size", "expected"),
    [
        ([], 10, 800),
        ([(10, 1.0)], 40, 200),  # nothing has reached the target: the budget
        ([(40, 1.0)], 40, 160),  # twice 80 s
        ([(40, 1.0)], 10, 160),
        ([(40, 1.0), (40, 0.1)], 10, 100),
        ([(40, 1.0), (10, 0.1)], 40, 160),
        ([(10, 0.1)], 40, 200),  # twice 100 s, no further than the budget
    ],
)
def test_stopped_at_twice_the_seconds_of_the_fastest(script, batch_size, expected):
    assert stopping_step(task().problem, batch_size, trials(*script) if script else []) == expected


def test_the_rule_has_no_trial_outlive_the_budget():
    table = Table((run(10, 0.1, 300), *TABLE.runs[2:]))
    assert stopping_step(task(table).problem, 40, trials((10, 0.1), table=table)) == 200


def test_the_rule_takes_all_that_a_continued_trial_needed():
    found = trials((40, 1.0, 60, None), (40, 1.0, 90, 0))
    assert stopping_step(task().problem, 40, found) == 160


def test_the_rule_survives_rounding():
    table = Table((run(10, 0.1, 100, tau=0.7), run(40, 0.1, 29, tau=0.7)))
    assert int(2 * (29 * 0.7 / 0.7)) == 57
    assert stopping_step(task(table).problem, 40, trials((40, 0.1), table=table)) == 58


@pytest.mark.parametrize(("tau", "expected"), [(1.0, 100), (2.0, 50), (3.0, 33), (1000.0, 1)])
def test_the_rule_counts_seconds_not_steps(tau, expected):
    table = Table((run(10, 0.1, 100, tau=tau), *TABLE.runs[2:]))
    assert stopping_step(task(table).problem, 10, trials((40, 0.1), table=table)) == expected


@pytest.mark.parametrize(
    ("script", "batch_size", "expected"),
    [
        ([(200, 0.1)], 400, 1200),  # twice the 600 steps at a smaller batch size
        ([(200, 0.1)], 100, 2400),  # twice the 120000 examples at a larger one
        ([(200, 0.1), (64, 0.1)], 100, 2400),  # 2 x 1450 steps is more
        ([(64, 0.1), (800, 0.1)], 200, 2400),  # 2 x 1200, of 2 x 1450
        ([(64, 0.1), (800, 0.1)], 8, 2 * 1450 * 8),
    ],
)
def test_for_the_curve_stopped_at_twice_what_the_frontier_can_need(script, batch_size, expected):
    t = task(CURVE, "curve")
    budget = t.problem.budget.last_step(batch_size)
    assert stopping_step(t.problem, batch_size, trials(*script, table=CURVE, objective="curve")) == min(
        expected, budget
    )


def test_fastest_is_the_least_time_and_the_first_of_equals():
    found = trials((10, 1.0), (40, 1.0), (40, 0.1), (40, 0.1))
    assert fastest(found) == found[2]
    assert fastest(found[:1]) is None


@pytest.mark.parametrize(
    ("spent", "expected"),
    [(1.0, math.inf), (1.9, math.inf), (2.0, 3.0), (4.9, 3.0), (5.0, 1.2), (9.0, 1.3), (11, math.inf)],
)
def test_ratio_after_a_spending(spent, expected):
    path = ((2.0, 3.0), (5.0, 1.2), (9.0, 1.3), (10.0, None))
    assert ratio_after(path, spent) == expected
    assert spending_within(path) == 5.0
    assert spending_within(path, 1.1) == math.inf
    assert ratio_after((), spent) == spending_within(()) == math.inf


@pytest.mark.parametrize(("ratio", "expected"), [(None, math.inf), (2.0, 2.0), (0.5, 2.0), (1.0, 1.0), (0.0, math.inf)])
def test_factor(ratio, expected):
    assert factor(ratio) == expected


@pytest.mark.parametrize(
    ("values", "share", "expected"),
    [
        (range(1, 21), 0.9, 18),  # 18 of 20 are at most 18
        (range(1, 21), 0.5, 10),
        (range(1, 21), 0.1, 2),
        ([3.0], 0.9, 3.0),
        ([1.0, math.inf], 0.9, math.inf),
        ([math.inf, 1.0], 0.5, 1.0),
        (range(1, 101), 0.07, 7),  # 0.07 x 100 is more than 7 in floats
    ],
)
def test_percentile_is_a_value_that_this_share_does_not_exceed(values, share, expected):
    assert percentile(list(values), share) == expected


def test_dense_points_are_the_medians_of_the_cheapest_cells():
    runs = (
        *(run(10, 0.1, steps, seed=k) for k, steps in enumerate((90, 100, 200))),
        run(10, 1.0, 120),
        run(40, 0.1, 50),
        run(40, 0.1, None, seed=1, end=300),
        run(40, 0.1, None, seed=2, end=400),
        run(40, 1.0, None, end=250),
        run(160, 0.1, None, end=20, diverged=True),
    )
    points = dense_points(Table(runs), TARGET)
    assert [(p.batch_size, p.steps, p.censored) for p in points] == [(10, 100, False), (40, 250, True)]


def test_the_dense_fit_finds_the_law():
    table = synthetic_table(Law(b_crit=300), lrs=[Law(b_crit=300).best_lr(2**k) for k in range(3, 13)])
    assert fit_curve(dense_points(table, TARGET)).b_crit == pytest.approx(300, rel=0.02)


def test_tau_between_and_beyond_the_batch_sizes():
    table = Table((run(10, 0.1, 100, tau=1.0), run(40, 0.1, 50, tau=4.0)))
    problem = task(table).problem
    assert [problem.tau(size) for size in (5, 10, 20, 40, 80)] == pytest.approx([1, 1, 2, 4, 4])


@pytest.mark.parametrize(
    ("table", "options", "error", "message"),
    [
        (
            Table((run(10, 0.1, None), run(40, 0.1, None))),
            {},
            TableError,
            "never reached in this table; lowest error 0.5",
        ),
        (
            Table((run(10, 0.1, None), run(40, 0.1, 50), *(run(40, 0.1, None, seed=k) for k in (1, 2)))),
            {},
            TableError,
            "in no cell do more than half the runs reach error <= 0.1",
        ),
        (TABLE, {"objective": "curve"}, TableError, "do not determine B_crit"),
        (TABLE, {"lr_factor": 0.0}, ConfigError, "--lr-factor must be a positive number, but got 0.0"),
        (TABLE, {"budget_factor": math.nan}, ConfigError, "--budget-factor must be a positive number, but got nan"),
    ],
)
def test_a_table_that_poses_no_task_is_refused(table, options, error, message):
    with pytest.raises(error, match=message):
        task(table, **options)
