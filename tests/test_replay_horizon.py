"""Trials whose schedule ends with them, answered from a table of runs with horizons.

The made law: after the share f of a horizon of h steps the metric is ``0.1 (S/h)^P f^-Q``, with log S linear in log B
and log lr. What is linear in these logarithms is read between the runs without an error, so that the target, 0.1, is
met at step ``h (S/h)^(P/Q)`` if h is at least S.
"""

import json
from dataclasses import replace as changed
from itertools import product

import numpy as np
import pytest
from builders import prepared_study
from toolbox import column, evaluated_steps, make_spec, read_rows, write_rows

from bstune.core.errors import TableError
from bstune.core.records import Target
from bstune.trial.recorded_run import Run
from bstune.trial.replay import Table, read_table, replay, unusable_target

TARGET = Target("val/error", 0.1, "min")
# The law's exponent over horizons, P.
POWER = 0.5
# The law's exponent within a run, Q.
IN_RUN = 0.8
LRS = {8: (0.1, 0.2, 0.4), 32: (0.2, 0.4, 0.8)}
HORIZONS = (100, 300, 1000, 6000)
SHARES = (*(0.05 * 1.1 ** np.arange(31)).tolist(), 1.0)


def shortest(batch_size, lr):
    """S(B, lr), in steps: 1000 at B = 16 and a rate of 0.3."""
    return 1000.0 * (batch_size / 16) ** -0.6 * (lr / 0.3) ** -0.4


def law(batch_size, lr, horizon, share):
    return 0.1 * (shortest(batch_size, lr) / horizon) ** POWER * share**-IN_RUN


def run(batch_size=8, lr=0.2, horizon=1000, seed=0, *, times=1.0, diverged=False, metric=law):
    """A run of the law, its metric ``times`` as high."""
    steps = sorted({max(1, round(share * horizon)) for share in SHARES})
    values = [times * metric(batch_size, lr, horizon, step / horizon) for step in steps]
    tau = 0.001 * batch_size
    return Run(batch_size, lr, seed, tuple(steps), tuple(values), tau, diverged, horizon=horizon)


def table(**others):
    runs = []
    for size, lrs in LRS.items():
        for lr, horizon in product(lrs, HORIZONS):
            runs.append(run(size, lr, horizon, **others))
    return Table(tuple(runs))


def read(runs, batch_size, lr, horizon, target=TARGET, share=0.0):
    return runs.horizon_table.read(batch_size, lr, horizon, target, share)


@pytest.mark.parametrize("point", [(8, 0.2), (16, 0.3), (11, 0.25), (32, 0.7)])
@pytest.mark.parametrize("over", [0.3, 0.7, 0.99, 1.01, 1.5, 3.0])
def test_the_law_is_recovered_between_the_runs(point, over):
    s = shortest(*point)
    horizon = round(over * s)
    outcome = read(table(), *point, horizon)
    assert outcome.seconds_per_step == pytest.approx(0.001 * point[0])
    if over < 1.0:
        assert (outcome.steps, outcome.end, outcome.diverged) == (None, horizon, False)
        assert outcome.history[-1] == (horizon, pytest.approx(law(*point, horizon, 1.0), rel=1e-3))
        return
    met = horizon * (s / horizon) ** (POWER / IN_RUN)
    assert outcome.steps == outcome.end == pytest.approx(met, rel=0.01)
    assert outcome.history[-1] == (outcome.steps, 0.1)
    before = [value for _, value in outcome.history[:-1]]
    assert min(before) > 0.1


def test_at_a_recorded_run_the_end_is_as_it_was_recorded():
    runs = table()
    for recorded in runs.runs:
        outcome = read(runs, recorded.batch_size, recorded.lr, recorded.horizon)
        hit = recorded.steps_to(TARGET)
        assert outcome.seconds_per_step == pytest.approx(recorded.seconds_per_step)
        if hit is None:
            assert outcome.history[-1][0] == recorded.horizon
            assert outcome.history[-1][1] == pytest.approx(recorded.metric[-1], rel=1e-12)
        else:
            before = recorded.steps[recorded.steps.index(hit) - 1]
            assert before < outcome.steps <= hit


def test_a_metric_that_rises_is_read_likewise():
    target = Target("val/accuracy", 0.5, "max")

    def rises(*point):
        return 0.05 / law(*point)

    runs = table(metric=rises)
    s = shortest(16, 0.3)
    assert read(runs, 16, 0.3, round(0.9 * s), target).steps is None
    # h (S/h)^(P/Q) at h = 2 S.
    met = 2 * s * 0.5 ** (POWER / IN_RUN)
    assert read(runs, 16, 0.3, round(2 * s), target).steps == pytest.approx(met, rel=0.01)
    # This is half of the shortest horizon.
    half = rises(8, 0.2, 100, 1.0) / 2.0
    assert read(runs, 8, 0.2, 50, target).history[-1] == (50, pytest.approx(half))


def test_outside_of_the_learning_rates_and_batch_sizes_their_edge_speaks():
    runs = table()
    edges = {(8, 0.8): (8, 0.4), (8, 0.01): (8, 0.1), (2, 0.2): (8, 0.2), (99, 0.1): (32, 0.2)}
    for point, edge in edges.items():
        assert read(runs, *point, 700) == read(runs, *edge, 700)


@pytest.mark.parametrize("over", [1.5, 4.0])
def test_a_longer_horizon_than_all_has_the_longest_ones_course_step_by_step(over):
    runs = table()
    outcome = read(runs, 8, 0.2, round(6000 * over))
    assert outcome.steps == pytest.approx(read(runs, 8, 0.2, 6000).steps, abs=1)
    never = Target("val/error", 1e-9, "min")
    last = read(runs, 8, 0.2, round(6000 * over), never).history[-2:]
    end = law(8, 0.2, 6000, 1.0)
    assert last == ((6000, pytest.approx(end)), (round(6000 * over), pytest.approx(end)))


def test_a_shorter_horizon_than_all_has_a_metric_as_many_times_as_high():
    runs = table()
    outcome = read(runs, 8, 0.2, 50)
    assert outcome.history[-1] == (50, pytest.approx(2.0 * law(8, 0.2, 100, 1.0)))
    # A table has no higher value than that of the shortest horizon at its first evaluation.
    highest = max(max(run.metric) for run in runs.runs)
    assert read(runs, 8, 0.2, 1).history == ((1, pytest.approx(highest)),)


def test_a_horizon_of_a_step_has_one_evaluation():
    outcome = read(table(), 16, 0.3, 1)
    assert evaluated_steps(outcome) == [1]
    assert outcome.end == 1


def test_between_two_runs_that_dip_below_the_target_at_steps_of_their_own_it_is_met():
    first = changed(run(8), steps=(100, 400, 500, 1000), metric=(0.3, 0.09, 0.2, 0.2))
    second = changed(run(32), steps=(100, 600, 700, 1000), metric=(0.3, 0.09, 0.2, 0.2))
    assert 400 <= read(Table((first, second)), 16, 0.2, 1000).steps <= 600


def test_a_run_that_met_the_target_before_it_diverged_met_it():
    early = changed(run(8, 0.2), steps=(100, 200), metric=(0.09, 9.0), diverged=True)
    outcome = read(Table((early, run(32, 0.2))), 8, 0.2, 1000)
    assert (outcome.steps, outcome.diverged) == (100, False)


def test_where_the_nearest_run_diverged_the_trial_does_and_others_do_not_count():
    whole = table()
    early = changed(run(8, 0.4, 1000), steps=(100,), metric=(9.0,), diverged=True)
    runs = list(whole.runs)
    runs[runs.index(run(8, 0.4, 1000))] = early
    runs = Table(tuple(runs))
    outcome = read(runs, 8, 0.4, 900)
    assert (outcome.diverged, outcome.steps, outcome.end) == (True, None, 100)
    assert outcome.history == ((100, pytest.approx(9.0)),)
    # Nearer to 300 steps than to 1000: the run of 300 alone speaks.
    alone = read(runs, 8, 0.4, 500)
    expected = read(runs, 8, 0.4, 300)
    assert (alone.steps, alone.end) == (None, 500)
    assert alone.history[-1][1] == pytest.approx(expected.history[-1][1])
    # Nearer to a learning rate of 0.2 than to the one that diverged: that one alone speaks.
    assert read(runs, 8, 0.25, 900) == read(whole, 8, 0.2, 900)


def test_a_seed_draws_one_of_a_cells_seeds_alike_in_every_cell():
    """The second seed's metric is 1.2 times as high, so that its S is 1.2^(1/P) = 1.44 times as long."""
    runs = Table((*table().runs, *table(seed=7, times=1.2).runs))
    s = shortest(16, 0.3)
    horizon = round(1.2 * s)
    drawn = []
    for seed in range(300):
        drawn.append(runs.horizon_table.outcome(16, 0.3, horizon, seed, TARGET).steps)
    assert 120 < drawn.count(None) < 180
    assert len(set(drawn)) == 2
    longer = round(1.5 * s)
    met = longer * (1.44 * s / longer) ** (POWER / IN_RUN)
    assert read(runs, 16, 0.3, longer, share=0.9).steps == pytest.approx(met, rel=0.01)


@pytest.mark.parametrize(
    ("horizon", "status", "steps"),
    [(800, "stopped", 800), (1600, "reached", round(1600 * (1000 / 1600) ** (POWER / IN_RUN)))],
)
def test_a_trials_record_has_its_horizon_and_costs_what_it_ran(horizon, status, steps):
    spec = make_spec(16, 0.3, 5, number=4, max_steps=horizon)
    result = replay(table(), spec, TARGET, horizon)
    assert (result.status, result.horizon) == (status, horizon)
    assert result.steps == pytest.approx(steps, abs=5)
    assert result.examples == 16 * result.steps
    assert result.train_seconds == pytest.approx(result.steps * result.seconds_per_step)
    low = result.steps if status == "stopped" else result.history[-2][0]
    assert result.steps_low == low


ROW = {"batch_size": 8, "lr": 0.1, "seed": 0, "seconds_per_step": 0.01}
ROW |= {"steps": [10, 20], "metric": [0.5, 0.09], "horizon": 20}
WITHOUT_HORIZON = dict(ROW)
del WITHOUT_HORIZON["horizon"]


def test_horizons_are_read_back_and_are_part_of_what_a_run_is(tmp_path):
    longer = ROW | {"horizon": 40, "steps": [10, 40]}
    early = ROW | {"batch_size": 16, "steps": [3], "metric": [0.5], "status": "diverged"}
    runs = read_table(write_rows(tmp_path / "t.jsonl", [ROW, longer, early])).runs
    assert [run.horizon for run in runs] == [20, 40, 20]
    assert [run.diverged for run in runs] == [False, False, True]
    assert Table(runs).has_horizons
    without = [{**row, "horizon": None} for row in (ROW, longer | {"seed": 1}, early)]
    assert not read_table(write_rows(tmp_path / "w.jsonl", without)).has_horizons


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (ROW | {"horizon": 0}, "line 2: horizon must be a positive integer, but got 0"),
        (ROW | {"horizon": 20.5}, "line 2: horizon must be a positive integer, but got 20.5"),
        (ROW | {"horizon": True}, "line 2: horizon must be a positive integer, but got True"),
        (ROW | {"horizon": 30}, "must be at the horizon's end, step 30, but got 20: go on"),
        (ROW | {"horizon": 15, "status": "diverged"}, "the horizon's end, step 15, but got 20"),
        (ROW | {"metric": [0.5, 0.0]}, "line 2: between horizons the log of the metric is read"),
        (ROW | {"batch_size": 16}, "seed=0, horizon=20 is there twice: drop one of the two"),
        (
            WITHOUT_HORIZON,
            "of the 2 runs in the table {path} 1 lack horizon, and the others have one",
        ),
    ],
)
def test_a_table_with_a_wrong_horizon_is_refused(tmp_path, row, message):
    path = write_rows(tmp_path / "t.jsonl", [ROW | {"batch_size": 16}, row])
    with pytest.raises(TableError) as error:
        read_table(path)
    assert message.format(path=path) in str(error.value)


@pytest.fixture
def file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rows = []
    for one in table().runs:
        names = ("batch_size", "lr", "seed", "horizon", "seconds_per_step", "steps", "metric")
        rows.append({name: getattr(one, name) for name in names})
    return write_rows(tmp_path / "t.jsonl", json.loads(json.dumps(rows)))


REPLAY = ("workload=replay", "workload.table=t.jsonl", "workload.target.value=0.1")


def test_it_is_a_workload_whose_schedule_ends_with_the_trial(file):
    prepared = prepared_study(*REPLAY, "mlflow.enabled=false")
    backend = prepared.backend
    protocol = prepared.protocol
    assert (backend.horizon, backend.stops) == (True, False)
    assert unusable_target(backend.table, protocol.target) is None
    assert backend.longest(8, protocol) == protocol.budget.last_step(8) == 6000
    assert backend.run(make_spec(16, 0.3, max_steps=900), None, None).horizon == 900
    assert backend.run(make_spec(16, 0.3), None, None).horizon == 6000
    assert "a trial's schedule ends with it" in backend.notes[0]


@pytest.mark.parametrize(("sampler", "frozen"), [("frontier", False), ("tpe", True)])
def test_the_budget_is_part_of_the_workload_unless_horizons_are_chosen(file, sampler, frozen):
    prepared = prepared_study(*REPLAY, "mlflow.enabled=false", f"sampler={sampler}")
    assert ("budget.steps" in prepared.backend.frozen_settings) == frozen


@pytest.mark.slow
def test_a_study_of_it_chooses_a_horizon_for_each_trial(bstune, file):
    status, _, err = bstune(
        *REPLAY, "mlflow.enabled=false", "search.trials=8", "search.replicates=0", "output=out"
    )
    assert (status, err) == (0, "")
    trials = read_rows(file.parent / "out/trials.jsonl")
    assert len(set(column(trials, "horizon"))) > 3
    for trial in trials:
        assert trial["steps"] <= trial["horizon"]
    reached = [trial for trial in trials if trial["status"] == "reached"]
    assert reached
    for trial in reached:
        s = shortest(min(max(trial["batch_size"], 8), 32), trial["lr"])
        assert trial["horizon"] > 0.6 * s
