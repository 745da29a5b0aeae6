import json
from collections import Counter
from functools import partial

import numpy as np
import pytest
from refusals import cases, refused
from search_records import spec

from bstune.core.errors import InputError
from bstune.core.records import Budget, Target
from bstune.trial.table import Run, Table, find_table, train
from bstune.trial.trial import Trial, run_trial

TARGET = Target("val/error", 0.1, "min")


def run(batch_size=8, lr=0.1, seed=0, steps=(10, 20, 40), metric=(0.4, 0.2, 0.1), **fields):
    values = {"batch_size": batch_size, "lr": lr, "seed": seed, "steps": steps, "metric": metric}
    return Run(**({"seconds_per_step": 0.5} | values | fields))


# Steps to the target: 40 and 160 at batch size 8, 20 and 80 at 32; 0.5 and 2 seconds a step.
SQUARE = Table(
    (
        run(8, 0.1),
        run(8, 0.4, steps=(10, 20, 160)),
        run(32, 0.1, steps=(5, 10, 20), seconds_per_step=2.0),
        run(32, 0.4, steps=(20, 40, 80), seconds_per_step=2.0),
    )
)
# The two missing corners are stood in for by the recorded ones nearest to them.
DIAGONAL = Table((SQUARE.runs[0], run(32, 0.4, steps=(5, 10, 20), seconds_per_step=2.0)))


def outcome(table, batch_size, lr, seed=0):
    return table.outcome(batch_size, lr, seed, TARGET)


@cases("""
table | batch_size | lr | steps | seconds
# The geometric middle of two and of four.
SQUARE | 16 | 0.1 | 28 | 1.0
SQUARE | 16 | 0.2 | 57 | 1.0
DIAGONAL | 16 | 0.2 | 28 | 1.0
# A quarter of the way in log B.
SQUARE | 11.3137085 | 0.4 | 135 | 0.7071068
# Beyond the table the value at its edge.
SQUARE | 2 | 0.01 | 40 | 0.5
SQUARE | 100 | 9.0 | 80 | 2.0
""")
def test_interpolation_is_bilinear_in_logs(table, batch_size, lr, steps, seconds):
    got = outcome({"SQUARE": SQUARE, "DIAGONAL": DIAGONAL}[table], batch_size, lr)
    assert (got.steps, got.end) == (steps, steps)
    assert got.seconds_per_step == pytest.approx(seconds)
    assert got.history[-1] == (got.end, 0.1)


def test_the_seed_draws_the_run_at_one_place_in_every_cell():
    table = Table(
        tuple(
            run(size, seed=seed, steps=(10, 20, 40 + 10 * seed))
            for size in (8, 32)
            for seed in range(4)
        )
    )
    counts = Counter(outcome(table, 16, 0.1, seed).steps for seed in range(200))
    assert sorted(counts) == [40, 50, 60, 70]
    assert min(counts.values()) > 25
    assert outcome(table, 16, 0.1, 7) == outcome(table, 16, 0.1, 7)


def test_step_time_and_budget():
    # Linear in logs.
    got = [SQUARE.step_time(size) for size in (4, 8, 16, 32, 64)]
    np.testing.assert_allclose(got, [0.5, 0.5, 1.0, 2.0, 2.0])
    assert Table((run(7.5), run(30.5))).range == (8, 30)
    # 80 steps at batch size 32, and 160 at 8.
    assert SQUARE.budget == Budget(steps=80, examples=1280)


@cases("""
fields | max_steps | status | steps | last
{} | 500 | reached | 40 | 0.1
# It stops at the first recorded evaluation from its last step on.
{} | 15 | pruned | 20 | 0.2
# A run that ended goes on with its last value.
{metric: [0.4, 0.3, 0.2]} | 500 | pruned | 500 | 0.2
{metric: [0.4, 0.3, 0.2]} | 1000 | missed | 1000 | 0.2
{steps: [], metric: [], status: diverged} | 500 | diverged | 2 | null
""")
def test_a_trial_is_answered(fields, max_steps, status, steps, last):
    trial = Trial(spec(max_steps=max_steps), TARGET, total_steps=1000)
    got = run_trial(partial(train, Table((run(**fields),))), trial)
    assert (got.status, got.steps, got.history[-1]) == (status, steps, (steps, last))
    assert (got.train_seconds, got.seconds_per_step) == pytest.approx((0.5 * steps, 0.5))


def line(**fields):
    values = {"batch_size": 8, "lr": 0.1, "seed": 0, "steps": [10, 20], "metric": [0.4, 0.2]}
    return json.dumps(values | {"seconds_per_step": 0.5} | fields)


def test_a_file_is_read(tmp_path):
    path = tmp_path / "runs.jsonl"
    extra = line(seed=1, hyperparameters={"momentum": 0.9}, status="diverged")
    path.write_text(f"{line()}\n\n{extra}\n")
    table = find_table(str(path))
    assert table.target is None
    assert [run.seed for run in table.cells[8.0, 0.1]] == [0, 1]
    assert table.runs[1].diverged
    for nothing in ("no_such_table", ".", "x" * 300, "~nobody/table"):
        with pytest.raises(InputError):
            find_table(nothing)


@cases("""
lines | words
['{'] | line 1, JSON
['[]'] | line 1, run
[{}, {lr: 0}] | line 2, lr
[{}, {lr: 5.0e-324}] | line 2, lr
[{steps: [20, 10]}] | line 1, steps
[{steps: [10]}] | line 1, metric
[{steps: [10, 100000000000000000000]}] | line 1, steps
[{steps: [], metric: []}] | line 1, steps
[{}, '', {}] | line 3, seed 0
[{}, {seed: 1, horizon: 20}] | line 2, horizon
[] | run
[{steps: [], metric: [], status: diverged}] | run
""")
def test_a_file_that_cannot_be_used(tmp_path, lines, words):
    path = tmp_path / "table.jsonl"
    path.write_text("\n".join(one if isinstance(one, str) else line(**one) for one in lines))
    with refused(f"{path}, {words}"):
        Table.read(path)


def of_length(length, reached_at, **fields):
    """A run whose metric falls to the target at a step, and no further."""
    steps = tuple(round(length * share) for share in (0.25, 0.5, 0.75, 1.0))
    metric = tuple(0.1 * max(reached_at / step, 1.0) for step in steps)
    return run(steps=steps, metric=metric, horizon=length, **fields)


LENGTHS = Table((of_length(100, reached_at=200), of_length(400, reached_at=400)))


@cases("""
length | steps | end | last
# What was recorded.
100 | null | 100 | 0.2
# At each share of the schedule the metric is the geometric mean.
200 | null | 200 | 0.1414214
# A tenth as long as the shortest, but no worse than the worst that was recorded.
10 | null | 10 | 0.8
# Longer than the longest: its values at the same steps.
4000 | 400 | 400 | 0.1
""")
def test_metrics_are_interpolated_over_the_length_of_the_schedule(length, steps, end, last):
    got = LENGTHS.outcome(8, 0.1, 0, TARGET, total_steps=length)
    assert (got.steps, got.end) == (steps, end)
    assert got.history[-1] == (end, pytest.approx(last))
    assert got.history == tuple(sorted(got.history))


def test_a_shipped_table_of_schedules_that_end():
    """Some rate reaches the target in its budget, and none in 5 steps."""
    table = find_table("digits_linear")
    assert table.schedule_ends
    size = table.batch_sizes[4]
    for length, reaches in ((5, False), (table.budget.last_step(size), True)):
        of = [table.outcome(size, lr, 0, table.target, length).steps for lr in table.lrs]
        assert any(of) == reaches
