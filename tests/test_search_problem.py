import numpy as np
import pytest
from searches import CURVE, TABLE, TARGET, Scripted, first_trials, posed, recorded
from synthetic import Law, synthetic_table

from bstune.core.errors import ConfigError, TableError
from bstune.sweeps import search_problem
from bstune.sweeps.search_problem import (
    Search,
    SearchRun,
    dense_b_crit,
    least,
    run_search,
    stopping_step,
)
from bstune.trial.replay import Table

# Of a sweep: a change elsewhere seldom breaks it, and CI runs it.
pytestmark = pytest.mark.slow


def scripted_trials(*script, table=TABLE, objective="time"):
    return first_trials(Scripted(*script), posed(table, objective), len(script))


def test_the_benchmark_has_the_best_cell_the_frontiers_cost_and_the_budget():
    benchmark = posed()
    assert (benchmark.best, benchmark.frontier_cost, benchmark.unit) == (
        (40, 0.1, 50.0),
        150.0,
        50.0,
    )
    assert [benchmark.problem.budget.last_step(size) for size in (10, 20, 40, 80)] == [
        800,
        400,
        200,
        200,
    ]
    assert (
        benchmark.problem.reference_batch_size,
        benchmark.problem.reference_lr,
    ) == pytest.approx((20.0, 0.1**0.5))
    # Two points determine no fit.
    assert benchmark.b_crit is None
    tau = posed(
        Table((recorded(10, 0.1, 100, tau=1.0), recorded(40, 0.1, 50, tau=4.0)))
    ).problem.tau
    assert [tau(size) for size in (5, 10, 20, 40, 80)] == pytest.approx([1, 1, 2, 4, 4])
    off = posed(lr_factor=10, budget_factor=0.1).problem
    assert off.reference_lr == pytest.approx(10 * 0.1**0.5)
    assert [off.budget.last_step(size) for size in (10, 40)] == [80, 20]


def test_every_trial_is_charged_and_counts_from_when_it_has_finished():
    # 800 s until the budget ends the first (16 times 50 s), then 80 s and 50 s, then 800 s again
    script = (10, 1.0), (40, 1.0), (40, 0.1)
    result = run_search(Scripted(*script), posed(), (20.0,))
    assert result == SearchRun(((17.6, 1.6), (18.6, 1.0)), (None,), 3, 18.6, True)
    # A trial that the multiple cuts through is left out.
    for multiple, expected in ((18.6, 3), (18.59, 2), (15.9, 0), (34.6, 4)):
        assert run_search(Scripted(*script), posed(), (multiple,)).trials == expected
    # a multiple that is met exactly counts, whatever the rounding
    table = Table((recorded(10, 0.1, 100, tau=0.7), recorded(40, 0.1, 1, tau=0.7)))
    assert run_search(Scripted((40, 0.1)), posed(table), (6.0,)).trials == 6
    # the cap on trials ends a search, which keeps its result
    result = run_search(Scripted((40, 1.0)), posed(), (5.0, 60.0), max_trials=4)
    assert (result.path, result.trials, result.complete, result.spent) == (
        ((1.6, 1.6),),
        4,
        False,
        6.4,
    )
    finished = scripted_trials(*script, (40, 0.1))
    # The first of equals.
    assert least(finished) == finished[2]
    assert least(finished[:1]) is None


def test_a_continued_trial_pays_what_it_adds():
    # 30 s, 30 s more, 20 s more: reached at 80.
    script = ((40, 1.0, 30, None), (40, 1.0, 60, 0), (40, 1.0, 90, 1))
    result = run_search(Scripted(*script), posed(), (1.6,))
    assert (result.spent, result.path) == (1.6, ((1.6, 1.6),))
    trials = scripted_trials(*script)
    paid = [(trial.status, trial.steps, trial.train_seconds) for trial in trials]
    assert paid == [("stopped", 30, 30.0), ("stopped", 60, 30.0), ("reached", 80, 20.0)]
    # Of the whole trial, not the 20 s that it added.
    assert trials[-1].time_to_target == 80.0


def test_the_ratio_is_of_the_median_over_the_tables_seeds():
    # the trial may draw 20 s or 100 s at lr 1; its point's median is 60 s, the best cell's 50 s
    table = Table((*TABLE.runs[:3], recorded(40, 1.0, 20), recorded(40, 1.0, 100, seed=1)))
    path = run_search(Scripted((40, 1.0)), posed(table), (5.0,)).path
    assert {ratio for _, ratio in path} == {1.2}
    missed = (recorded(40, 1.0, None, seed=seed) for seed in (1, 2))
    table = Table((*TABLE.runs[:3], recorded(40, 1.0, 20), *missed))
    lucky = next(seed for seed in range(100) if np.random.default_rng(seed).random() < 1 / 3)
    search = Scripted((40, 1.0), seed=lucky)
    # Most seeds miss the target there.
    assert run_search(search, posed(table), (2.0,)).path == ((0.4, None),)


@pytest.mark.parametrize(
    ("batch_size", "lr", "steps"),
    [
        # A cell.
        (40, 0.1, 50),
        # Halfway in log B between 100 and 50 steps.
        (20, 0.1, 71),
        # Beside a cell that misses the target the nearest one's steps count.
        (30, 0.5, 80),
    ],
)
def test_a_step_costs_its_own_batch_size_in_examples(batch_size, lr, steps):
    run = run_search(Scripted((batch_size, lr)), posed(objective="steps"), (20.0,), max_trials=1)
    # The best cell takes 50 steps, and 2,000 examples.
    assert run.spent == pytest.approx(steps * batch_size / 2000)
    assert run.path == ((run.spent, pytest.approx(steps / 50)),)


@pytest.mark.parametrize(
    ("search", "message"),
    [
        (
            Scripted((40, 0.1, 20, None), (40, 0.1, 20, 0)),
            "max_steps past the 20 steps it has, but got 20",
        ),
        (
            Scripted((40, 0.1, 20, None), (40, 1.0, 40, 0)),
            "trial 1 continues trial 0, which is no stopped trial",
        ),
        # It had reached the target.
        (Scripted((40, 0.1), (40, 0.1, 80, 0)), "no stopped trial"),
        (Scripted((40, 0.1), number=7), "expected 0, but got 7"),
    ],
)
def test_a_search_that_breaks_the_rules_is_refused(search, message):
    with pytest.raises(ConfigError, match=message):
        run_search(search, posed(), (60.0,))


def test_b_crit_is_asked_for_at_each_multiple():
    benchmark = posed(CURVE, "curve")
    assert benchmark.b_crit == pytest.approx(400, rel=0.1)
    assert benchmark.unit == benchmark.frontier_cost > benchmark.best[2]
    search = Scripted((800, 0.1))
    result = run_search(search, benchmark, (1.0, 3.0))
    finished = scripted_trials((800, 0.1), table=CURVE, objective="curve")
    expected = [
        int(multiple * benchmark.unit / finished[0].train_seconds) for multiple in (1.0, 3.0)
    ]
    assert search.asked_for_b_crit == expected
    assert result.b_crit == pytest.approx([100 * n / benchmark.b_crit for n in expected])
    # One point determines no fit.
    assert Search.b_crit(search, finished) is None


TAU_3 = Table((recorded(10, 0.1, 100, tau=3.0), *TABLE.runs[2:]))
FRACTIONAL = Table((recorded(10, 0.1, 100, tau=0.7), recorded(40, 0.1, 29, tau=0.7)))


@pytest.mark.parametrize(
    ("table", "script", "batch_size", "expected"),
    [
        (TABLE, [], 10, 800),
        # Nothing has reached the target: the budget ends it.
        (TABLE, [(10, 1.0)], 40, 200),
        # Twice 50 s.
        (TABLE, [(40, 1.0), (40, 0.1)], 10, 100),
        # Twice 100 s, but no further than the budget.
        (TABLE, [(10, 0.1)], 40, 200),
        # Twice all that the continued trial needed.
        (TABLE, [(40, 1.0, 60, None), (40, 1.0, 90, 0)], 40, 160),
        # In floats 2 x (29 x 0.7 / 0.7) is under 58.
        (FRACTIONAL, [(40, 0.1)], 40, 58),
        # Seconds count, not steps.
        (TAU_3, [(40, 0.1)], 10, 33),
        # Twice the 600 steps at a smaller batch size.
        (CURVE, [(200, 0.1)], 400, 1200),
        # Twice the 120,000 examples at a larger one.
        (CURVE, [(200, 0.1), (64, 0.1)], 100, 2400),
        # Twice the larger one's examples are 2 x 1,200 steps, less than 2 x 1,450 of the smaller.
        (CURVE, [(64, 0.1), (800, 0.1)], 200, 2400),
    ],
)
def test_the_common_stopping_rule(table, script, batch_size, expected):
    objective = "curve" if table is CURVE else "time"
    problem = posed(table, objective).problem
    finished = scripted_trials(*script, table=table, objective=objective) if script else []
    assert stopping_step(problem, batch_size, finished) == min(
        expected, problem.budget.last_step(batch_size)
    )


def test_dense_points_are_the_medians_of_the_cheapest_cells():
    runs = (
        *(recorded(10, 0.1, steps, seed=k) for k, steps in enumerate((90, 100, 200))),
        recorded(10, 1.0, 120),
        recorded(40, 0.1, 50),
        *(recorded(40, 0.1, None, seed=seed, end=end) for seed, end in ((1, 300), (2, 400))),
        recorded(40, 1.0, None, end=250),
        recorded(160, 0.1, None, end=20, diverged=True),
    )
    points = search_problem.dense_points(Table(runs), TARGET)
    assert [(p.batch_size, p.steps, p.stopped) for p in points] == [
        (10, 100, False),
        (40, 250, True),
    ]


KINDS = (("two_terms", 1.0), ("power", 0.7), ("power", 1.5), ("knee", 4.0), ("u_shape", 0.25))


@pytest.mark.parametrize(("kind", "parameter"), KINDS)
def test_a_tables_b_crit_is_where_the_slope_is_a_half_whatever_its_law(kind, parameter):
    table = synthetic_table(
        Law(exponent=0.0, kind=kind, parameter=parameter), [2**k for k in range(3, 14)], (0.1,)
    )
    # It is averaged over octaves.
    assert dense_b_crit(table, TARGET) == pytest.approx(400.0, rel=0.12)
    assert posed(table).b_crit == dense_b_crit(table, TARGET)


@pytest.mark.parametrize(
    ("runs", "options", "error", "message"),
    [
        (
            (
                recorded(10, 0.1, None),
                recorded(40, 0.1, 50),
                *(recorded(40, 0.1, None, seed=k) for k in (1, 2)),
            ),
            {},
            TableError,
            "in no cell do more than half the runs reach error <= 0.1",
        ),
        (TABLE.runs, {"objective": "curve"}, TableError, "do not determine B_crit"),
        (
            TABLE.runs,
            {"lr_factor": 0.0},
            ConfigError,
            "experiment.lr_factor must be a positive number, but got 0.0",
        ),
    ],
)
def test_a_table_that_poses_no_problem_is_refused(runs, options, error, message):
    with pytest.raises(error, match=message):
        posed(Table(runs), **options)
