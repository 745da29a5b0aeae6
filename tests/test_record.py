"""Tables written from real training and from studies, and what cannot be recorded."""

import math
from functools import partial
from itertools import product

import numpy as np
import pytest
from toolbox import end_as_lightning, entries, make_result, statuses, write_rows

from bstune.core.errors import TableError
from bstune.core.records import Target
from bstune.study.verbs.record import record_grid, rows_of_study, write_table
from bstune.trial import workload as training
from bstune.trial.replay import read_table

DIGITS = (
    "+workload=digits",
    "device=cpu",
    "workload.target.metric=val/error",
    "workload.target.value=0.1",
)
BUDGET = ("budget.steps=60", "budget.examples=6000")
SHAPE = ("--batch-sizes", "32,128", "--lrs", "0.05,0.4", "--seeds", "0,1")
TARGET = Target("val/error", 0.1, "min")
WRONG_FILES = ("other.txt", ".", "other.txt/t.jsonl")


@pytest.fixture
def record(bstune):
    """Run the verb; return its exit status and what it printed."""
    return partial(bstune, "record")


@pytest.fixture
def trained(monkeypatch, tmp_path):
    """Work in an empty folder; the list holds the records of the grid, as they are trained."""
    monkeypatch.chdir(tmp_path)
    train = training.run_trial
    records = []

    def keep(workload, spec, protocol, *others, **named):
        result = train(workload, spec, protocol, *others, **named)
        # The probe has another budget.
        if protocol.budget.steps == 60:
            records.append(result)
        return result

    monkeypatch.setattr(training, "run_trial", keep)
    return records


@pytest.mark.slow
def test_a_grid_is_recorded_resumed_and_replayed(trained, record, tmp_path, monkeypatch):
    command = ("grids/t.jsonl", *SHAPE, *DIGITS, *BUDGET)
    folder = tmp_path / "grids"
    keep = training.run_trial

    def interrupt_the_fourth(*arguments, **named):
        if len(trained) == 3:
            end_as_lightning()
        return keep(*arguments, **named)

    monkeypatch.setattr(training, "run_trial", interrupt_the_fourth)
    status, _, err = record(*command)
    assert (status, "the same command continues" in err) == (130, True)
    assert entries(folder) == ["t.jsonl.runs", "t.jsonl.settings"]
    assert len((folder / "t.jsonl.runs").read_text().splitlines()) == 3
    with (folder / "t.jsonl.runs").open("a") as file:
        # The last line was cut short.
        file.write('{"batch_size": 32, "lr": 0.')

    monkeypatch.setattr(training, "run_trial", keep)
    status, _, err = record(*command, "workload.target.value=0.2")
    assert (status, "workload.target.value: was 0.1, now 0.2" in err) == (2, True)
    status, out, _ = record(*command)
    assert status == 0
    assert "run 4/8  B 128  lr 0.4  seed 0  reached at" in out
    assert "run 3/8" not in out, "what is there is not trained again"
    assert "wrote grids/t.jsonl: bstune workload=replay workload.table=grids/t.jsonl" in out
    assert entries(folder) == ["t.jsonl"]
    assert entries(tmp_path) == ["grids"], "nothing else is written"
    assert len(trained) == 8
    assert set(statuses(trained)) == {"reached", "stopped"}

    runs = {(run.batch_size, run.lr, run.seed): run for run in read_table(folder / "t.jsonl").runs}
    assert len(runs) == 8
    for record in trained:
        run = runs[record.batch_size, record.lr, record.seed]
        # A table has six digits.
        history = {step: float(f"{value:.6g}") for step, value in record.history}
        kept = list(zip(run.steps, run.metric, strict=True))
        assert set(kept) <= set(history.items())
        assert kept[-1] == (record.steps, history[record.steps])
        assert (run.steps_to(TARGET) == record.steps) == record.reached
        # A table does not hold the noise scale.
        assert not record.noise_scale


def fake(status="reached", steps=40, history=((10, 0.5), (20, 0.3), (40, 0.1)), tau=0.01, **others):
    values = {"batch_size": 8, "lr": 0.1, "seed": 0, "seconds_per_step": tau, "history": history}
    return make_result(status=status, steps=steps, **(values | others))


def test_steps_to_any_target_survive_the_thinning(tmp_path):
    rng = np.random.default_rng(0)
    runs = []
    for seed in range(20):
        steps = np.unique(np.round(np.geomspace(10, 5000, 60)).astype(int))
        metric = 0.5 * steps**-0.2 + rng.normal(0, 0.02, len(steps))
        history = tuple(zip(steps.tolist(), metric.tolist(), strict=True))
        runs.append(
            fake("stopped", int(steps[-1]), history, seed=seed, batch_size=8 + 8 * (seed % 2))
        )
    write_table(tmp_path / "t.jsonl", rows_of_study(runs))
    found = {(run.batch_size, run.seed): run for run in read_table(tmp_path / "t.jsonl").runs}
    # An evaluation that is no best so far, whichever way is better, decides no target.
    kept = sum(len(run.steps) for run in found.values())
    assert kept < 0.8 * sum(len(run.history) for run in runs)
    for run, goal, mode in product(runs, np.linspace(0.05, 0.4, 50).tolist(), ("min", "max")):
        target = Target("metric", goal, mode)
        first = next((step for step, value in run.history if target.reached(value)), None)
        assert found[run.batch_size, run.seed].steps_to(target) == first


def test_a_step_takes_the_median_time_of_its_batch_size(tmp_path):
    runs = [
        fake(tau=0.0123456, seed=0),
        fake(tau=0.01, seed=1),
        fake(tau=99.0, seed=2),
        fake(tau=None, seed=3),
    ]
    write_table(tmp_path / "t.jsonl", rows_of_study([*runs, fake(batch_size=16, tau=0.5)]))
    # The median of three to four digits, whatever a single slow run took.
    for recorded in read_table(tmp_path / "t.jsonl").runs:
        assert recorded.seconds_per_step == {8: 0.01235, 16: 0.5}[recorded.batch_size]
    assert len(read_table(tmp_path / "t.jsonl").batch_sizes) == 2


def test_of_a_study_what_can_be_used_is_recorded(record, tmp_path):
    stopped = fake("stopped", 20, ((10, 0.5), (20, 0.3)), number=1)
    study = [
        fake(batch_size=16, lr=0.2),
        stopped,
        # The second part continues the first: they are one run.
        fake(number=2, resumed_from=1),
        fake("failed", 0, (), None, number=3, batch_size=16),
        fake("out of memory", 10, ((10, 0.5),), number=4, batch_size=512),
        fake("diverged", 10, ((10, None),), number=5, batch_size=16, lr=9.0),
        fake("stopped", 20, ((10, 0.5), (20, math.nan)), number=6, batch_size=16, lr=0.01),
    ]
    path = write_rows(tmp_path / "trials.jsonl", [trial.to_json() for trial in study])
    assert record(tmp_path / "t.jsonl", "--trials", path)[0] == 0
    runs = {(run.batch_size, run.lr): run for run in read_table(tmp_path / "t.jsonl").runs}
    assert set(runs) == {(8, 0.1), (16, 0.2), (16, 9.0), (16, 0.01)}
    assert runs[8, 0.1].steps == (10, 20, 40)
    assert (runs[16, 9.0].steps, runs[16, 9.0].diverged) == ((), True)
    assert runs[16, 0.01].steps == (10,)


def test_a_study_of_schedules_that_end_with_the_trial_is_refused(record, tmp_path):
    study = [fake(batch_size=16, lr=0.2), fake(number=7, horizon=60)]
    path = write_rows(tmp_path / "trials.jsonl", [trial.to_json() for trial in study])
    status, _, error = record(tmp_path / "t.jsonl", "--trials", path)
    assert (status, (tmp_path / "t.jsonl").exists()) == (2, False)
    assert (
        "the schedule of trial 7 ends with the trial, at step 60: its history does not replay"
        in error
    )


def test_what_was_searched_besides_stands_in_the_table_and_comes_back(tmp_path):
    study = [
        fake(batch_size=16, lr=0.2, hyperparameters={"momentum": 0.9}),
        fake(number=7, hyperparameters={"momentum": 0.5}),
    ]
    path = tmp_path / "t.jsonl"
    write_table(path, rows_of_study(study))
    found = {run.batch_size: run.hyperparameters for run in read_table(path).runs}
    assert found == {trial.batch_size: trial.hyperparameters for trial in study}


def test_a_table_that_could_not_be_replayed_is_not_written(tmp_path):
    with pytest.raises(
        TableError,
        match=r"1 usable runs at 1 batch size\(s\): a table needs two batch sizes or more",
    ):
        write_table(
            tmp_path / "t.jsonl",
            rows_of_study([fake(), fake("out of memory", 0, (), None, batch_size=16)]),
        )
    assert entries(tmp_path) == []


BAD_VALUES = []
for option, what, bad in (
    ("--batch-sizes", "integers from 1 to 1e+15", ("8,1.5", "8,0", "8,16,8")),
    ("--lrs", "numbers from 1e-15 to 1e+15", ("0.1,fast", "0.1,nan", "0", "", "1e300")),
    ("--seeds", "integers from 0 to 4294967295", ("-1,0", "4294967296")),
):
    said = f"argument {option}: takes different {what} with commas between, but got "
    for values in bad:
        BAD_VALUES.append(((f"{option}={values}",), said))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "a grid needs --batch-sizes and --lrs; or give --trials=TRIALS_JSONL of a study"),
        *BAD_VALUES,
        (
            ("--batch-sizes", "8", "--lrs", "0.1"),
            "a table needs two batch sizes or more, but got --batch-sizes 8",
        ),
        (("--batch-sizes", "8,5000", "--lrs", "0.1", *DIGITS), "set --batch-sizes to at most 1200"),
        (
            (*SHAPE, *DIGITS, "devices=2"),
            "a table is recorded on one device, but got devices=2: use devices=1",
        ),
        (
            (*SHAPE, *DIGITS, "schedule=one_cycle"),
            (
                "the workload's schedule ends with its budget, so that no run replays at another "
                "length"
            ),
        ),
        (("--trials", "no.jsonl"), "--trials no.jsonl cannot be read: No such file or directory"),
        (
            ("--trials", "other.txt"),
            "--trials=other.txt is no trials.jsonl of this version of bstune: ",
        ),
        (
            ("other.txt", *SHAPE, *DIGITS),
            "other.txt is there already: choose another name, or delete it",
        ),
        ((".", *SHAPE, *DIGITS), ". is there already"),
        (("other.txt/t.jsonl", *SHAPE, *DIGITS), "other.txt is not a folder"),
        (
            ("--trials", "other.txt", "--lrs", "0.1"),
            "--trials takes a study as it is: leave out the grid and",
        ),
    ],
)
def test_bad_input_ends_in_a_plain_line_and_writes_nothing(
    record, tmp_path, monkeypatch, arguments, message
):
    other = write_rows(tmp_path / "other.txt", [{"steps": 3}])
    monkeypatch.chdir(tmp_path)
    file = [] if arguments and arguments[0] in WRONG_FILES else ["t.jsonl"]
    status, out, err = record(*file, *arguments)
    assert status == 2
    assert message in err
    assert "Traceback" not in out + err
    assert entries(tmp_path) == ["other.txt"]
    assert other.read_text() == '{"steps": 3}\n'


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("runs", "other\n"),
        pytest.param("runs", '{"steps": 3}\n{"and', marks=pytest.mark.slow),
        pytest.param("settings", "other", marks=pytest.mark.slow),
        ("settings", '{"budget": 3}'),
    ],
)
def test_files_beside_the_table_that_are_not_its_own_are_refused_and_stay(
    record, tmp_path, name, content
):
    other = tmp_path / f"t.jsonl.{name}"
    other.write_text(content)
    status, _, err = record(tmp_path / "t.jsonl", *SHAPE, *DIGITS)
    assert (status, f"t.jsonl.{name} holds other " in err) == (2, True)
    assert (entries(tmp_path), other.read_text()) == ([other.name], content)


def test_a_grid_leaves_out_a_batch_size_that_does_not_fit_and_records_the_metric_as_it_is(tmp_path):
    def train(spec):
        point = {"batch_size": spec.batch_size, "lr": spec.lr, "seed": spec.seed}
        rises = ((10, 0.2), (20, 0.7), (40, 0.91))
        return (
            fake(history=rises, **point)
            if spec.batch_size < 512
            else fake("out of memory", 10, ((10, 0.5),), **point)
        )

    # It is not trained again.
    earlier = {
        "batch_size": 8,
        "lr": 0.1,
        "seed": 0,
        "steps": [10],
        "metric": [0.5],
        "seconds_per_step": 0.1,
    }
    write_rows(tmp_path / "t.jsonl.runs", [earlier | {"status": "stopped"}])
    record_grid([(8, 0.1, 0), (16, 0.1, 0), (512, 0.1, 0)], train, tmp_path / "t.jsonl")
    table = read_table(tmp_path / "t.jsonl")
    small, large = table.runs
    assert (small.batch_size, small.metric) == (8, (0.5,))
    assert (large.batch_size, large.metric) == (16, (0.2, 0.7, 0.91))
    assert table.outcome(16, 0.1, 0, Target("accuracy", 0.9, "max")).steps == 40
