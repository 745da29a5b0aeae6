import json
import math
from collections import Counter

import numpy as np
import pytest
from refusals import refused
from search_records import spec

from bstune.core.errors import InputError
from bstune.core.records import Budget, Target
from bstune.trial.table import Run, Table, find_table, train
from bstune.trial.trial import Trial, run_trial

TARGET = Target("val/error", 0.1, "min")


def run(batch_size=8, lr=0.1, seed=0, steps=(10, 20, 40), metric=(0.4, 0.2, 0.1), **fields):
    values = {"batch_size": batch_size, "lr": lr, "seed": seed, "steps": steps, "metric": metric}
    return Run(**({"seconds_per_step": 0.5} | values | fields))


MISSED = {"metric": (0.4, 0.3, 0.2)}
DIVERGED = {"steps": (10, 20), "metric": (0.4, 5.0), "status": "diverged"}
# Steps to the target: 40 and 160 at batch size 8, 20 and 80 at 32; 0.5 and 2 seconds a step.
SQUARE = Table(
    (
        run(8, 0.1),
        run(8, 0.4, steps=(10, 20, 160)),
        run(32, 0.1, steps=(5, 10, 20), seconds_per_step=2.0),
        run(32, 0.4, steps=(20, 40, 80), seconds_per_step=2.0),
    )
)


def outcome(table, batch_size, lr, seed=0):
    return table.outcome(batch_size, lr, seed, TARGET)


@pytest.mark.parametrize(
    ("batch_size", "lr", "steps", "seconds"),
    [
        # The geometric middle of two and of four.
        (16, 0.1, round(math.sqrt(40 * 20)), 1.0),
        (16, 0.2, round((40 * 160 * 20 * 80) ** 0.25), 1.0),
        # A quarter of the way in log B.
        (8 * math.sqrt(2), 0.4, round(160**0.75 * 80**0.25), 0.5 * math.sqrt(2)),
        # Beyond the table the value at its edge.
        (2, 0.01, 40, 0.5),
        (100, 9.0, 80, 2.0),
    ],
)
def test_interpolation_is_bilinear_in_logs(batch_size, lr, steps, seconds):
    got = outcome(SQUARE, batch_size, lr)
    assert (got.steps, got.end) == (steps, steps)
    assert got.seconds_per_step == pytest.approx(seconds)
    assert got.history[-1] == (steps, 0.1)


def test_one_rate_a_size_needs_no_rectangle():
    table = Table((run(8, 0.1), run(32, 0.4, steps=(5, 10, 20))))
    # The two missing corners are stood in for by the recorded ones nearest to them.
    assert outcome(table, 16, 0.2).steps == round(math.sqrt(40 * 20))


def test_the_seed_draws_the_run_at_one_place_in_every_cell():
    hits = [(size, seed, 40 + 10 * seed) for size in (8, 32) for seed in range(4)]
    table = Table(tuple(run(size, seed=seed, steps=(10, 20, hit)) for size, seed, hit in hits))
    drawn = [outcome(table, 16, 0.1, seed).steps for seed in range(200)]
    assert outcome(table, 16, 0.1, 7) == outcome(table, 16, 0.1, 7)
    counts = Counter(drawn)
    assert sorted(counts) == [40, 50, 60, 70]
    assert min(counts.values()) > 25


def test_step_time_and_budget():
    # Linear in logs.
    got = [SQUARE.step_time(size) for size in (4, 8, 16, 32, 64)]
    np.testing.assert_allclose(got, [0.5, 0.5, 1.0, 2.0, 2.0])
    assert Table((run(7.5), run(30.5))).range == (8, 30)
    # 80 steps at batch size 32, and 160 at 8.
    assert SQUARE.budget == Budget(steps=80, examples=1280)


def answer(table, max_steps, total_steps=1000, earlier=None):
    of = spec(max_steps=max_steps, resumed_from=earlier.number if earlier else None)
    trial = Trial(of, TARGET, total_steps=total_steps, earlier=earlier)
    return run_trial(lambda trial: train(table, trial), trial)


@pytest.mark.parametrize(
    ("fields", "max_steps", "status", "steps", "last"),
    [
        ({}, 500, "reached", 40, 0.1),
        # It stops at the first recorded evaluation from its last step on.
        ({}, 15, "pruned", 20, 0.2),
        # A run that ended goes on with its last value.
        (MISSED, 500, "pruned", 500, 0.2),
        (MISSED, 1000, "missed", 1000, 0.2),
        ({"steps": (), "metric": (), "status": "diverged"}, 500, "diverged", 2, None),
    ],
)
def test_a_trial_is_answered(fields, max_steps, status, steps, last):
    got = answer(Table((run(**fields),)), max_steps)
    assert (got.status, got.steps, got.history[-1]) == (status, steps, (steps, last))
    assert got.train_seconds == pytest.approx(0.5 * steps)
    assert got.seconds_per_step == pytest.approx(0.5)


def test_a_resumed_trial_ends_as_one_that_was_never_stopped():
    table = Table((run(),))
    first = answer(table, 10)
    second = answer(table, 500, earlier=first)
    whole = answer(table, 500)
    assert (first.status, first.steps, second.resumed_from) == ("pruned", 10, 0)
    assert (second.status, second.steps) == ("reached", 40)
    assert second.history == whole.history
    assert (second.steps_low, second.train_seconds) == (20, 15.0)


def line(**fields):
    values = {"batch_size": 8, "lr": 0.1, "seed": 0, "steps": [10, 20], "metric": [0.4, 0.2]}
    return json.dumps(values | {"seconds_per_step": 0.5} | fields)


def test_a_file_is_read(tmp_path):
    path = tmp_path / "runs.jsonl"
    extra = line(seed=1, hyperparameters={"momentum": 0.9}, status="diverged")
    path.write_text(f"{line()}\n\n{extra}\n")
    table = find_table(str(path))
    assert table == Table.read(path)
    assert table.target is None
    assert [run.seed for run in table.cells[8.0, 0.1]] == [0, 1]
    assert table.runs[1].diverged


@pytest.mark.parametrize(
    ("text", "place", "what"),
    [
        ("{", "line 1", "JSON"),
        ("[]", "line 1", "run"),
        (line() + "\n" + line(lr=0), "line 2", "lr"),
        (line(steps=[20, 10]), "line 1", "steps"),
        (line(steps=[10]), "line 1", "metric"),
        (line(steps=[], metric=[]), "line 1", "steps"),
        (json.dumps({"batch_size": 8}), "line 1", "lr"),
        (line() + "\n\n" + line(), "line 3", "seed 0"),
        (line() + "\n" + line(seed=1, horizon=20), "line 2", "horizon"),
        (line(horizon=20, metric=[0.4, 0.0]), "line 1", "horizon"),
        ("", "runs.jsonl", "run"),
        (line(steps=[], metric=[], status="diverged"), "runs.jsonl", "run"),
    ],
)
def test_a_file_that_cannot_be_used(tmp_path, text, place, what):
    path = tmp_path / "runs.jsonl"
    path.write_text(text)
    with refused(f"{path}, {place}, {what}"):
        Table.read(path)


@pytest.mark.parametrize("name", ["no_such_table", "."])
def test_a_table_that_is_not_there(name):
    with pytest.raises(InputError):
        find_table(name)


def of_length(length, reached_at, batch_size=8, seed=0, **fields):
    """A run whose metric falls to the target at a step, and no further."""
    steps = tuple(sorted({round(length * share) for share in (0.25, 0.5, 0.75, 1.0)}))
    metric = tuple(0.1 * max(reached_at / step, 1.0) for step in steps)
    values = {"batch_size": batch_size, "seed": seed, "steps": steps, "metric": metric}
    return run(**(values | {"horizon": length} | fields))


LENGTHS = Table(
    (
        of_length(100, reached_at=200),
        of_length(400, reached_at=400),
        of_length(100, reached_at=200, batch_size=32, seconds_per_step=2.0),
        of_length(400, reached_at=400, batch_size=32, seconds_per_step=2.0),
    )
)


@pytest.mark.parametrize(
    ("length", "steps", "end", "last"),
    [
        # What was recorded.
        (100, None, 100, 0.2),
        # At each share of the schedule the metric is the geometric mean.
        (200, None, 200, 0.1 * math.sqrt(2.0)),
        # A tenth as long as the shortest, but no worse than the worst that was recorded.
        (10, None, 10, 0.8),
        # Longer than the longest: its values at the same steps.
        (4000, 400, 400, 0.1),
    ],
)
def test_metrics_are_interpolated_over_the_length_of_the_schedule(length, steps, end, last):
    got = LENGTHS.outcome(8, 0.1, 0, TARGET, total_steps=length)
    assert (got.steps, got.end) == (steps, end)
    assert got.history[-1] == (end, pytest.approx(last))
    assert got.history == tuple(sorted(got.history))


def test_a_shipped_table_of_schedules_that_end():
    table = find_table("digits_linear")
    assert table.schedule_ends
    size = table.batch_sizes[4]
    last = table.budget.last_step(size)
    # Some rate reaches the target in its budget, and none in 5 steps.
    reached = {
        length: any(table.outcome(size, lr, 0, table.target, length).steps for lr in table.lrs)
        for length in (5, last)
    }
    assert reached == {5: False, last: True}
