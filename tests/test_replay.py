"""Reading between the cells of a table, trials answered from it, and tables that are refused."""

import json
import math
from dataclasses import replace as changed
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from builders import prepared_study
from toolbox import entries, evaluated_steps, made_table, make_spec, table_rows, write_rows

from bstune.core.errors import BstuneError, TableError
from bstune.core.records import Target, TrialResult
from bstune.sweeps.search_problem import median_time
from bstune.trial import replay as replay_module
from bstune.trial.recorded_run import Run
from bstune.trial.replay import Table, read_table, replay, unusable_target

TARGET = Target("val/error", 0.1, "min")


# Five evaluations, a fifth apart.
def run(batch_size=8, lr=0.1, seed=0, *, hit=100, end=None, tau=0.01, diverged=False):
    """A run with four evaluations before ``hit``, which meets the target, and ``end`` after it; ``hit=None`` misses."""
    last = hit if hit is not None else end
    steps = [max(1, last * part // 5) for part in (1, 2, 3, 4)] + [last]
    metric = [0.5, 0.4, 0.3, 0.2, 0.09 if hit is not None else 0.19]
    if hit is not None and end is not None:
        steps = [*steps, end]
        metric = [*metric, 0.12]
    return Run(batch_size, lr, seed, tuple(steps), tuple(metric), tau, diverged)


def spec(batch_size=8, lr=0.1, seed=0, **others):
    return make_spec(
        batch_size, lr, seed, **{"number": 7, "trial_index": 5, "delta": 0.25, **others}
    )


def grid(steps, tau=lambda size: 0.01, sizes=(8, 16, 64), lrs=(0.01, 0.1, 0.2)):
    cells = product(sizes, lrs)
    return Table(tuple(run(size, lr, hit=steps(size, lr), tau=tau(size)) for size, lr in cells))


def test_a_recorded_point_is_answered_as_it_was_recorded():
    # Any law: at the cells themselves nothing is interpolated.
    table = grid(lambda size, lr: round(1000 / size / lr) + 5, lambda size: 0.001 * size + 0.0123)
    for recorded in table.runs:
        outcome = table.outcome(recorded.batch_size, recorded.lr, 3, TARGET)
        assert outcome.steps == outcome.end == recorded.end
        assert outcome.seconds_per_step == recorded.seconds_per_step
        assert outcome.history == tuple(zip(recorded.steps, recorded.metric, strict=True))


def test_power_laws_are_recovered_between_the_cells():
    """Log-bilinear interpolation is exact where log S and log tau are linear in log B and log lr."""

    def steps(size, lr):
        return 1e6 * size**-0.5 * lr**-0.25

    table = grid(lambda size, lr: round(steps(size, lr)), lambda size: 1e-3 * size**0.7)
    for size, lr in product((9, 12.5, 17, 63), (0.011, 0.05, 0.15)):
        outcome = table.outcome(size, lr, 0, TARGET)
        assert outcome.steps == pytest.approx(steps(size, lr), rel=1e-4)
        assert outcome.seconds_per_step == pytest.approx(1e-3 * size**0.7)


@pytest.mark.parametrize(
    ("point", "steps", "end"),
    [
        # Of equally near corners the first counts: the one that missed.
        ((16, 0.2), None, 900),
        ((12, 0.13), None, 900),
        # The nearest corner reached the target, and another did not: it is not rescaled.
        ((12, 0.3), 100, 100),
        ((25, 0.13), 200, 200),
        # Both ends of this edge reached it.
        (
            (32, 0.2),
            round(math.sqrt(200 * 300)),
            round(math.sqrt(200 * 300)),
        ),
        # One end of this edge did not.
        ((8, 0.2), None, 900),
    ],
)
def test_where_a_corner_missed_the_target_the_nearest_one_speaks(point, steps, end):
    corners = (
        run(8, 0.1, hit=None, end=900),
        run(8, 0.4, hit=100),
        run(32, 0.1, hit=200),
        run(32, 0.4, hit=300),
    )
    outcome = Table(corners).outcome(*point, 0, TARGET)
    assert (outcome.steps, outcome.end) == (steps, end)
    assert outcome.history[-1][0] == end


def test_a_missing_cell_is_its_nearest_recorded_one_in_log_distance():
    # (8, 0.8) is missing: (8, 0.4) is one octave away, (32, 0.8) two.
    table = Table((run(8, 0.4, hit=100), run(32, 0.4, hit=50), run(32, 0.8, hit=40)))
    assert table.outcome(8, 0.8, 0, TARGET).steps == 100
    middle = table.outcome(16, math.sqrt(0.4 * 0.8), 0, TARGET).steps
    # The missing corner counts as its neighbour: the geometric mean of 100, 100, 50 and 40.
    assert middle == round((100 * 100 * 50 * 40) ** 0.25)


def test_outside_of_the_table_its_edge_speaks():
    table = grid(lambda size, lr: round(1000 / size / lr))
    for point, edge in (((1, 0.1), (8, 0.1)), ((999, 9.0), (64, 0.2)), ((12, 1e-9), (12, 0.01))):
        assert table.outcome(*point, 0, TARGET) == table.outcome(*edge, 0, TARGET)


def test_a_cells_runs_are_drawn_by_the_trials_seed_alike_in_every_cell():
    runs = []
    for size, seed in product((8, 16), (30, 10, 20)):
        runs.append(run(size, 0.1, seed, hit=size * 100 + seed))
    table = Table(tuple(runs))
    drawn = []
    for seed in range(300):
        first = table.outcome(8, 0.1, seed, TARGET).steps
        second = table.outcome(16, 0.1, seed, TARGET).steps
        # The same seed draws the same place among a cell's runs: 16 x 100 - 8 x 100.
        assert second - first == 800
        drawn.append(first)
    for steps in (810, 820, 830):
        # A third of 300 are 100, with a deviation of 8.2.
        assert 70 < drawn.count(steps) < 130


def test_a_history_is_the_nearest_corners_with_its_steps_rescaled():
    outcome = Table((run(8, 0.1, hit=100, end=110), run(32, 0.1, hit=400))).outcome(
        11, 0.1, 0, TARGET
    )
    # S is proportional to B between 8 and 32: 100 x 11/8.
    assert outcome.steps == round(100 * 11 / 8)
    steps = [round(step * outcome.steps / 100) for step in (20, 40, 60, 80, 100)]
    values = (0.5, 0.4, 0.3, 0.2, 0.09)
    assert outcome.history == tuple(zip(steps, values, strict=True))

    # What is recorded after the target does not matter.
    easier = Table((run(8, 0.1, hit=100, end=500),)).outcome(
        8, 0.1, 0, Target("val/error", 0.3, "min")
    )
    assert (easier.steps, easier.history) == (60, ((20, 0.5), (40, 0.4), (60, 0.3)))

    # Three evaluations whose steps are rescaled to 2 at most.
    fine = Run(8, 0.1, 0, (1, 2, 3), (0.5, 0.4, 0.05), 0.01, False)
    coarse = Run(32, 0.1, 0, (1,), (0.05,), 0.01, False)
    outcome = Table((fine, coarse)).outcome(12, 0.1, 0, TARGET)
    assert outcome.steps == 2
    assert outcome.history == ((1, 0.4), (2, 0.05)), (
        "of evaluations that fall together the last stays: the hit"
    )


@pytest.mark.parametrize(
    ("point", "last_step", "status", "steps", "steps_low", "evaluations"),
    [
        ((8, 0.1), 10_000, "reached", 100, 80, 5),
        ((8, 0.1), 100, "reached", 100, 80, 5),
        # It is a bound: the history has no evaluation at its end.
        ((8, 0.1), 99, "stopped", 99, 99, 4),
        ((8, 0.1), 1, "stopped", 1, 1, 0),
        # Past a record's end a trial is stopped there.
        ((8, 0.4), 10_000, "stopped", 300, 300, 5),
        ((8, 0.4), 250, "stopped", 250, 250, 4),
        ((32, 0.4), 10_000, "diverged", 50, 50, 5),
        ((32, 0.4), 50, "diverged", 50, 50, 5),
        ((32, 0.4), 49, "stopped", 49, 49, 4),
        # It diverged before its first evaluation.
        ((32, 0.1), 10_000, "diverged", 1, 1, 0),
    ],
)
def test_what_a_trial_comes_to(point, last_step, status, steps, steps_low, evaluations):
    # A run that diverged before its first evaluation.
    at_once = Run(32, 0.1, 0, (), (), 0.01, True)
    stopped = run(8, 0.4, hit=None, end=300)
    table = Table(
        (run(8, 0.1, hit=100), stopped, run(32, 0.4, hit=None, end=50, diverged=True), at_once)
    )
    result = replay(table, spec(*point), TARGET, last_step)
    assert (result.status, result.steps, result.steps_low) == (status, steps, steps_low)
    assert len(result.history) == evaluations
    assert result.train_seconds == result.wall_seconds == pytest.approx(steps * 0.01)
    assert result.examples == steps * point[0]
    assert (result.number, result.trial_index, result.delta, result.device) == (
        7,
        5,
        0.25,
        "replay",
    )
    assert (result.message is not None) == (status == "diverged")
    assert TrialResult.from_json(result.to_json()) == result


def test_steps_to_target_lie_in_an_interval_that_the_history_agrees_with():
    """Over random tables with holes, noise and several seeds, at random points."""
    rng = np.random.default_rng(0)
    for _ in range(15):
        runs = []
        for size, lr, seed in product((8, 16, 32, 64, 128, 256), (0.001, 0.01, 0.1, 1.0), range(2)):
            # A fifth of the cells is missing.
            if rng.random() < 0.8:
                steps = np.unique(rng.integers(1, 60, size=12)).tolist()
                metric = rng.uniform(0.05, 0.5, size=len(steps)).tolist()
                runs.append(Run(size, lr, seed, tuple(steps), tuple(metric), 0.01, False))
        table = Table(tuple(runs))
        for trial in range(30):
            size = round(2 ** rng.uniform(3, 8))
            lr = 10 ** rng.uniform(-3, 0)
            result = replay(table, spec(size, lr, trial), TARGET, int(rng.integers(1, 80)))
            steps = evaluated_steps(result)
            assert steps == sorted(set(steps))
            hits = [step for step, value in result.history if TARGET.reached(value)]
            assert hits == ([result.steps] if result.reached else [])
            assert (
                result.steps_low < result.steps
                if result.reached
                else result.steps_low == result.steps
            )


@pytest.mark.parametrize(
    ("point", "limits"),
    [
        ((8, 0.1), (30, 60)),
        ((8, 0.1), (80, 80)),
        ((8, 0.1), (50, 10_000)),
        ((12, 0.2), (1, 99)),
        # In none of these may the parts add up to more or less than the whole.
        ((8, 0.4), (30, 60)),
    ],
)
def test_a_trial_that_is_stopped_and_continued_comes_to_the_same_and_costs_what_was_added(
    limits, point
):
    table = Table(
        (
            run(8, 0.1, hit=100),
            run(8, 0.4, hit=None, end=120),
            run(16, 0.1, hit=90),
            run(16, 0.4, hit=70),
        )
    )
    whole = replay(table, spec(*point), TARGET, 10_000)
    first = replay(table, spec(*point), TARGET, limits[0])
    second = replay(
        table, changed(spec(*point), number=8, resumed_from=7), TARGET, limits[1], first
    )
    last = replay(table, changed(spec(*point), number=9, resumed_from=8), TARGET, 10_000, second)
    seconds = [first.train_seconds, second.train_seconds, last.train_seconds]
    assert min(seconds) >= 0.0
    assert sum(seconds) == pytest.approx(whole.train_seconds)
    costs = {"train_seconds": seconds[-1], "wall_seconds": seconds[-1]}
    assert last == changed(whole, number=9, resumed_from=8, **costs)


def test_the_median_time_counts_each_cells_seeds_alike():
    runs = [
        run(8, 0.1, 0, hit=50),
        run(8, 0.1, 1, hit=400),
        run(8, 0.1, 2, hit=500),
        run(16, 0.1, 0, hit=150, tau=0.02),
        run(16, 0.1, 1, hit=160, tau=0.02),
        run(16, 0.1, 2, hit=900, tau=0.02),
        run(32, 0.1, 0, hit=5, end=10, tau=0.001),
        run(32, 0.1, 1, hit=None, end=10, tau=0.001),
        run(32, 0.1, 2, hit=None, end=10, tau=0.001),
        # One seed counts as often as three.
        run(64, 0.1, hit=900),
    ]
    table = Table(tuple(runs))
    times = [median_time(table, size, 0.1, TARGET) for size in (8, 16, 32, 64)]
    # Most seeds of 32 missed the target.
    assert times == [
        pytest.approx(4.0),
        pytest.approx(3.2),
        None,
        pytest.approx(9.0),
    ]


POINT = {"batch_size": 8, "lr": 0.1, "seed": 0, "seconds_per_step": 0.01}
GOOD = POINT | {"steps": [10, 20], "metric": [0.5, 0.09]}


def test_a_table_is_read_back(tmp_path):
    none = GOOD | {"batch_size": 16, "steps": [], "metric": [], "status": "diverged"}
    whole = GOOD | {"batch_size": 32.0, "lr": 1, "seed": -1, "status": "reached"}
    table = read_table(write_rows(tmp_path / "t.jsonl", [GOOD, "", none, whole]))
    assert table.runs == (
        Run(8, 0.1, 0, (10, 20), (0.5, 0.09), 0.01, False),
        Run(16, 0.1, 0, (), (), 0.01, True),
        Run(32, 1.0, -1, (10, 20), (0.5, 0.09), 0.01, False),
    )
    assert (table.batch_sizes, table.lrs) == ((8, 16, 32), (0.1, 1.0))


# What is wrong with a value, and values of that kind.
BAD_VALUES = {
    "batch_size": ("a positive integer", (0, 8.5, True)),
    "lr": ("a positive number", (-0.1,)),
    "seed": ("an integer", (None,)),
    "seconds_per_step": ("a positive number", (math.nan, 10**400)),
    "metric": (
        "a list of finite numbers, which ends before any other",
        ([0.5, math.nan], [0, "1"], 0.5),
    ),
    "steps": ("a list of ascending positive integers", ([20, 10], [0, 10], [10, 20.5])),
}
BAD_ROWS = []
for name, (what, values) in BAD_VALUES.items():
    for value in values:
        # A long value is shown cut.
        said = f"line 2: {name} must be {what}, but got {value!r:.40}"
        BAD_ROWS.append(([GOOD | {name: value}], said))


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (
            [POINT | {"steps": [1]}],
            "line 2 lacks metric: a run has batch_size, lr, seed, steps, metric, seconds_per_step",
        ),
        (["[1, 2]"], "line 2 lacks batch_size, lr, seed, steps, metric, seconds_per_step"),
        (["{"], "line 2 is not JSON"),
        *BAD_ROWS,
        ([GOOD | {"metric": [0.5]}], "line 2 has 2 steps but 1 values of the metric"),
        (
            [GOOD | {"steps": [], "metric": []}],
            "line 2 has no evaluation: only a run whose status is diverged may",
        ),
        (
            [GOOD, GOOD | {"steps": [1, 2]}],
            "line 3: batch_size=8, lr=0.1, seed=0 is there twice: drop one of the two",
        ),
    ],
)
def test_a_bad_row_is_named(tmp_path, rows, message):
    with pytest.raises(BstuneError) as error:
        read_table(write_rows(tmp_path / "t.jsonl", [GOOD | {"batch_size": 16}, *rows]))
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "holds no evaluated run"),
        (b"\n\n", "holds no evaluated run"),
        (
            (json.dumps(GOOD) + "\n").encode(),
            "has batch size 8 only: a search over batch sizes needs two or more",
        ),
        (b"\xff\xfe\x00", "is not UTF-8 text"),
        (None, "cannot be read: No such file or directory"),
    ],
)
def test_a_file_that_is_no_table_is_refused(tmp_path, content, message):
    path = tmp_path / "t.jsonl"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(BstuneError) as error:
        read_table(path)
    assert message in str(error.value)


def test_goals_that_a_table_says_nothing_of():
    table = Table((run(8, 0.1, hit=100), run(16, 0.1, hit=None, end=100)))
    assert unusable_target(table, TARGET) is None
    assert unusable_target(table, Target("val/accuracy", 0.9, "max")) == (
        "val/accuracy >= 0.9 is never reached in this table; highest val/accuracy 0.5, at batch "
        "size 8 and "
        "learning rate 0.1: set workload.target.value to one that some run reached"
    )


REPLAY = (
    "workload=replay",
    "workload.table=t.jsonl",
    "workload.target.value=0.14",
    "mlflow.enabled=false",
)


@pytest.fixture
def table(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return made_table(tmp_path)


def test_what_a_config_leaves_open_comes_from_the_table(table):
    prepared = prepared_study(*REPLAY)
    options = prepared.options
    # sqrt(0.01 x 0.64) of the table's rates.
    assert options.scaling.lr == pytest.approx(0.08)
    budget = options.budget.budget
    runs = read_table(table).runs
    of_largest = []
    for recorded in runs:
        # No record exceeds the budget.
        assert recorded.end <= budget.last_step(recorded.batch_size)
        if recorded.batch_size == 512:
            of_largest.append(recorded.end)
    assert budget.steps == max(of_largest)
    # 0.01 + 0.0001 x 128.
    assert prepared.backend.step_time(128) == pytest.approx(0.0228)
    # Half way in logs between 32 and 128.
    assert prepared.backend.step_time(64) == pytest.approx(math.sqrt(0.0132 * 0.0228))
    for size in (8, 30, 512):
        nearest = {8: 8, 30: 32, 512: 512}[size]
        longest = max(run.end for run in runs if run.batch_size == nearest)
        assert prepared.backend.longest(size, prepared.protocol) == longest
    budgeted = prepared_study(*REPLAY, "budget.steps=60", "budget.examples=1").backend.run
    assert budgeted(spec(32, 0.04), None, None).steps == 60
    assert budgeted(spec(32, 0.04, max_steps=100), None, None).steps == 100, (
        "a trial's own limit comes first"
    )


def test_a_shipped_table_has_a_bare_name(monkeypatch, tmp_path):
    shipped = replay_module.SHIPPED / "fashion_mlp.jsonl"
    monkeypatch.chdir(tmp_path)
    (tmp_path / "fashion_mlp").mkdir()
    # A folder is no table.
    assert replay_module.find_table("fashion_mlp") == shipped
    (tmp_path / "fashion_mlp").rmdir()
    write_rows(tmp_path / "fashion_mlp", table_rows())
    # A file comes before a shipped table.
    assert replay_module.find_table("fashion_mlp") == Path("fashion_mlp")
    with pytest.raises(
        TableError,
        match=r"workload.table=other is no file: .*, or name a shipped one: .*fashion_mlp",
    ):
        replay_module.find_table("other")


BARE = REPLAY[:2]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (BARE[:1], "workload.table is missing: name a file of recorded runs, workload.table=FILE"),
        (
            (BARE[0], "workload.table=."),
            "workload.table=. is a folder: give a file of recorded runs",
        ),
        ((BARE[0], "workload.table='~nobody-here/t.jsonl'"), "/t.jsonl' cannot be read: "),
        ((BARE[0], f"workload.table={'t' * 300}"), "cannot be read: "),
        (
            BARE,
            (
                "workload.target.value is missing: give the value to reach, such as "
                "workload.target.value=0.1 (this"
            ),
        ),
        (
            # The made table's lowest error is 0.13.
            (*REPLAY, "workload.target.value=0.12"),
            "val/error <= 0.12 is never reached in this table; lowest val/error",
        ),
        (
            (*REPLAY, "workload.target.value=0.7"),
            "val/error <= 0.7 is met by every run in this table at its first",
        ),
        (
            (*REPLAY, "search.batch_size.low=4"),
            "search.batch_size.low=4 lies outside of the table's batch sizes, 8 to",
        ),
        (
            (*REPLAY, "search.batch_size.high=600"),
            "search.batch_size.high=600 lies outside of the table's batch sizes",
        ),
        (
            (*REPLAY, "trial.batch_size=600", "trial.lr=0.1"),
            "trial.batch_size=600 lies outside of the table's batch",
        ),
        (
            (*REPLAY, "trial.batch_size=60", "trial.lr=1"),
            "trial.lr=1 lies outside of the table's learning rates, 0.01",
        ),
        (
            (*REPLAY, "compile=default"),
            "compile=default does not apply to recorded runs: leave it out",
        ),
        ((*REPLAY, "scaling=surge"), "the scaling rule surge needs a noise scale"),
    ],
)
def test_bad_input_ends_in_a_plain_line_and_writes_nothing(
    bstune, tmp_path, table, arguments, message
):
    status, out, err = bstune(*arguments)
    assert (status, err.startswith("error: ")) == (2, True)
    assert message in err
    assert "Traceback" not in out + err
    assert entries(tmp_path) == ["t.jsonl"]
