"""The workload ``replay`` on the command line: whole studies that train nothing, and bad input."""

import json
import math
import shlex
import subprocess
import sys
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
import yaml
from omegaconf import OmegaConf

from bstune.core.errors import TableError
from bstune.core.records import TrialResult, TrialSpec
from bstune.study.prepare import compose_checked
from bstune.trial import replay as replaying
from bstune.trial.replay import read_table

SIZES, LRS = (8, 32, 128, 512), (0.01, 0.04, 0.16, 0.64)
REPLAY = ("+workload=replay", "workload.table=t.jsonl", "workload.target.value=0.14", "mlflow.enabled=false")


def steps_to_target(size, lr):
    """A frontier with its critical batch size at 64, and an optimum of the learning rate that grows as its root."""
    return round(200 * (1 + 64 / size) * (1 + math.log2(lr / (0.16 * (size / 128) ** 0.5)) ** 2))


def rows(sizes=SIZES, lrs=LRS, seeds=(0, 1)):
    found = []
    for size, lr, seed in product(sizes, lrs, seeds):
        hit = steps_to_target(size, lr) + 5 * seed
        steps = [hit // 4, hit // 2, hit - 3, hit]
        row = {"batch_size": size, "lr": lr, "seed": seed, "steps": steps, "metric": [0.4, 0.2, 0.16, 0.13]}
        found.append(row | {"seconds_per_step": 0.01 + 0.0001 * size})
    return found


def write(path: Path, lines) -> Path:
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


@pytest.fixture
def table(tmp_path):
    return write(tmp_path / "t.jsonl", rows())


def entries(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def trials_of(folder: Path) -> list[TrialResult]:
    return [TrialResult.from_json(line) for line in (folder / "trials.jsonl").read_text().splitlines()]


def test_a_study_from_end_to_end(bstune, tmp_path, table):
    arguments = ("sampler=random", "search.confirmations=0", "search.precision=null")
    status, out, err = bstune(*REPLAY, "study=small", "seed=3", "search.trials=30", *arguments)
    assert (status, err) == (0, "")
    assert "study small: val/error <= 0.14, objective time, on recorded runs (t)" in out
    assert "batch sizes 8 to 512, learning rates within a factor of 8 of rule sqrt through B = 64, lr = 0.08" in out
    assert "answered from 32 recorded runs at 4 batch sizes and 4 learning rates" in out
    folder = tmp_path / "outputs" / "small"
    assert {"trials.jsonl", "curve.json", "curve.png", "config.yaml", "best.yaml"} <= set(entries(folder))

    trials = trials_of(folder)
    assert [trial.number for trial in trials] == list(range(30))
    assert {trial.status for trial in trials} == {"reached"}
    for trial in trials:
        assert 8 <= trial.batch_size <= 512
        assert 0.01 <= trial.lr <= 0.64
        rule = 0.08 * (trial.batch_size / 64) ** 0.5
        assert trial.delta == pytest.approx(math.log2(trial.lr / rule))  # of the rate that was used
        assert trial.train_seconds == trial.wall_seconds == pytest.approx(trial.steps * trial.seconds_per_step)
    assert any(trial.lr in (0.01, 0.64) for trial in trials), "none was clipped: the study cannot show it"

    curve = json.loads((folder / "curve.json").read_text())
    assert 16 < curve["fit"]["b_crit"] < 256
    assert curve["test"] == {}
    best = yaml.safe_load((folder / "best.yaml").read_text())["best_by_time"]
    assert best["checkpoint"] is None
    status, out, _ = bstune(*shlex.split(best["command"])[3:])
    assert status == 0
    (record,) = folder.glob("trial-B*/trial.json")
    again = TrialResult.from_json(record.read_text())
    winner = trials[best["number"]]
    assert replace(again, number=winner.number, trial_index=winner.trial_index, delta=winner.delta) == winner


@pytest.mark.slow
def test_a_study_imports_no_training_library(tmp_path, table):
    code = """
import json, sys
from bstune.__main__ import main
status = main()
print(json.dumps([status, [name for name in ("torch", "lightning", "mlflow") if name in sys.modules]]))
"""
    command = [sys.executable, "-c", code, *REPLAY, "search.trials=12", "search.confirmations=0"]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert json.loads(ended.stdout.splitlines()[-1]) == [0, []]
    assert len(trials_of(tmp_path / "outputs" / "replay")) == 12


@pytest.mark.slow
@pytest.mark.parametrize(
    ("limit", "words"),
    [
        ("search.seconds=20", "search.seconds=20 of training are"),
        ("search.wall_seconds=20", "search.wall_seconds=20 are"),
    ],
)
def test_simulated_seconds_end_a_study(bstune, tmp_path, table, limit, words):
    status, out, _ = bstune(*REPLAY, limit, "search.confirmations=0")
    assert status == 0
    assert f"stopped: {words} spent" in out
    seconds = [trial.train_seconds for trial in trials_of(tmp_path / "outputs" / "replay")]
    assert sum(seconds) >= 20 > sum(seconds[:-1])


def test_the_estimate_counts_simulated_seconds_up_to_the_end_of_the_records(table, monkeypatch, tmp_path):
    from bstune.study.prepare import prepare

    monkeypatch.chdir(tmp_path)
    runner = prepare(compose_checked([*REPLAY, "search.trials=2"])).backend
    runs = read_table(table).runs
    longest = [max(run.end * run.seconds_per_step for run in runs if run.batch_size == size) for size in SIZES]
    assert 2 * min(longest) < runner.max_seconds < 2 * max(longest)
    assert runner.step_time(128) == pytest.approx(0.0228)
    assert runner.step_time(64) == pytest.approx(math.sqrt(0.0132 * 0.0228))


@pytest.mark.slow
def test_a_study_continues_and_knows_its_table_by_content(bstune, tmp_path, table):
    assert bstune(*REPLAY, "search.trials=3")[0] == 0
    first = (tmp_path / "outputs" / "replay" / "trials.jsonl").read_text()
    table.rename(tmp_path / "moved.jsonl")
    status, out, _ = bstune(*REPLAY, "workload.table=moved.jsonl", "search.trials=5")
    assert status == 0
    assert "continues after 3 trials" in out
    assert (tmp_path / "outputs" / "replay" / "trials.jsonl").read_text().startswith(first)

    write(table, rows(seeds=(0, 1, 2)))
    status, _, err = bstune(*REPLAY, "search.trials=7")
    assert status == 2
    assert "workload.table: was 'sha256 " in err


def test_a_trial_by_itself(bstune, tmp_path, table):
    status, out, err = bstune(*REPLAY, "trial.batch_size=128", "trial.lr=0.16")
    assert (status, err) == (0, "")
    assert "reached at step 3" in out
    (record,) = tmp_path.glob("outputs/replay/trial-B*/trial.json")
    result = TrialResult.from_json(record.read_text())
    assert result.steps in (steps_to_target(128, 0.16), steps_to_target(128, 0.16) + 5)
    assert result.delta is None
    assert entries(tmp_path) == ["outputs", "t.jsonl"]


def test_a_batch_size_range_may_be_narrower(bstune, tmp_path, table):
    assert bstune(*REPLAY, "search.batch_size.low=20", "search.batch_size.high=100", "search.trials=6")[0] == 0
    assert all(20 <= trial.batch_size <= 100 for trial in trials_of(tmp_path / "outputs" / "replay"))


@pytest.mark.slow
def test_mlflow_holds_a_replayed_study(bstune, tmp_path, table):
    from mlflow import MlflowClient

    assert bstune(*REPLAY[:-1], "search.trials=3", "search.confirmations=0")[0] == 0
    client = MlflowClient(f"sqlite:///{tmp_path}/mlflow.db")
    runs = client.search_runs([client.get_experiment_by_name("bstune").experiment_id])
    assert len(runs) == 4
    parent = next(run for run in runs if "mlflow.parentRunId" not in run.data.tags)
    assert parent.data.params["workload.table"] == "t.jsonl"


def test_a_study_that_reaches_nothing_says_what_to_change(bstune, table):
    status, out, _ = bstune(*REPLAY, "sampler=tpe", "search.trials=3", "budget.steps=1", "budget.examples=1")
    assert status == 0
    text = " ".join(out.split())
    assert "val/error <= 0.14 was never reached in 3 trials" in text
    assert "try a larger budget (budget.steps, budget.examples), an easier target" in text


def test_a_metric_that_rises_is_replayed_with_mode_max(bstune, tmp_path):
    accuracy = [row | {"metric": [1 - value for value in row["metric"]]} for row in rows()]
    write(tmp_path / "t.jsonl", accuracy)
    rises = ("workload.target.metric=accuracy", "workload.target.mode=max", "workload.target.value=0.86")
    status, out, _ = bstune(*REPLAY, *rises, "sampler=tpe", "search.trials=3", "search.confirmations=0")
    assert status == 0
    assert "target accuracy >= 0.86: reached by 3 of 3 trials" in " ".join(out.split())


@pytest.mark.parametrize("scaling", ["none", "sqrt", "linear", "saturating", "surge"])
@pytest.mark.parametrize("sampler", ["frontier", "tpe", "gp", "qmc", "random"])
def test_every_config_composes(table, monkeypatch, tmp_path, sampler, scaling):
    monkeypatch.chdir(tmp_path)
    config = compose_checked([*REPLAY, f"sampler={sampler}", f"scaling={scaling}"])
    assert config.scaling.lr == pytest.approx(0.08)


def test_the_budget_is_one_that_no_record_exceeds(table, monkeypatch, tmp_path):
    from bstune.core.records import Budget

    monkeypatch.chdir(tmp_path)
    config = compose_checked(list(REPLAY))
    budget = Budget(config.budget.steps, config.budget.examples)
    assert all(budget.last_step(run.batch_size) >= run.end for run in read_table(table).runs)
    largest = [run.end for run in read_table(table).runs if run.batch_size == SIZES[-1]]
    assert OmegaConf.select(config, "budget.steps") == max(largest)


def test_a_spec_may_be_limited_and_continued(table, monkeypatch, tmp_path):
    from bstune.study.prepare import prepare

    monkeypatch.chdir(tmp_path)
    train = prepare(compose_checked(list(REPLAY))).backend.run
    spec = TrialSpec(0, 0, 32, 0.04, None, 5)
    whole = train(spec, None, None)
    first = train(replace(spec, max_steps=100), None, None)
    rest = train(replace(spec, number=1, resumed_from=0), None, first)
    assert (first.status, first.steps) == ("censored", 100)
    assert (rest.steps, rest.history) == (whole.steps, whole.history)
    assert first.train_seconds + rest.train_seconds == pytest.approx(whole.train_seconds)
    budgeted = prepare(compose_checked([*REPLAY, "budget.steps=60", "budget.examples=1"])).backend.run
    assert budgeted(spec, None, None).steps == 60
    assert budgeted(replace(spec, max_steps=100), None, None).steps == 100  # a limit takes the budget's place


def test_a_shipped_table_has_a_bare_name(monkeypatch, tmp_path):
    shipped = tmp_path / "shipped"
    shipped.mkdir()
    write(shipped / "some.jsonl", rows())
    monkeypatch.setattr(replaying, "SHIPPED", shipped)
    monkeypatch.chdir(tmp_path)
    assert replaying.find_table("some") == shipped / "some.jsonl"
    (tmp_path / "some").mkdir()
    assert replaying.find_table("some") == shipped / "some.jsonl"  # a folder is no table
    (tmp_path / "some").rmdir()
    write(tmp_path / "some", rows())
    assert replaying.find_table("some") == Path("some")  # a file comes first
    with pytest.raises(TableError, match=r"workload.table=other is no file: .*, or name a shipped one: some"):
        replaying.find_table("other")


@pytest.mark.parametrize("name", replaying.shipped_tables())
def test_what_ships_can_be_read(name):
    table = read_table(replaying.find_table(name))
    assert len(table.batch_sizes) > 2


NAN_ROW = '{"batch_size": 8, "lr": 9, "seed": 0, "steps": [1], "metric": [NaN], "seconds_per_step": 1}'
ONE = rows()[0]
BAD_TABLES = [
    ([{k: v for k, v in ONE.items() if k != "metric"}], "line 33 lacks metric: a run has batch_size, lr, seed, steps"),
    ([ONE], "line 33: batch_size=8, lr=0.01, seed=0 is there twice"),
    ([NAN_ROW], "line 33: metric must hold finite numbers, but got nan"),
    ([NAN_ROW.replace("NaN", "null")], "line 33: metric must hold finite numbers, but got None"),
    ([NAN_ROW.replace("NaN", '"low"')], "line 33: metric must hold finite numbers, but got 'low'"),
    ([NAN_ROW.replace("NaN", "0.5, 0.4")], "line 33 has 1 steps but 2 values of the metric"),
    (["steps,metric"], "line 33 is not JSON"),
]


@pytest.mark.parametrize(("lines", "message"), BAD_TABLES)
def test_a_bad_table_ends_in_a_plain_line_and_writes_nothing(bstune, tmp_path, lines, message):
    write(tmp_path / "t.jsonl", [*rows(), *lines])
    _refused(bstune, tmp_path, REPLAY, message)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "t.jsonl holds no evaluated run"),
        ("".join(json.dumps(row) + "\n" for row in rows(sizes=(8,))), "t.jsonl has batch size 8 only"),
    ],
)
def test_a_file_without_a_search_in_it_is_refused(bstune, tmp_path, content, message):
    (tmp_path / "t.jsonl").write_text(content)
    _refused(bstune, tmp_path, REPLAY, message)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("+workload=replay",), "workload.table is missing: name a file of recorded runs, workload.table=FILE"),
        (
            ("+workload=replay", "workload.table=no.jsonl"),
            "workload.table=no.jsonl is no file: give a file of recorded",
        ),
        (("+workload=replay", "workload.table=."), "workload.table=. is a folder: give a file of recorded runs"),
        (("+workload=replay", "workload.table="), "workload.table= is a folder"),
        (("+workload=replay", "workload.table='~nobody-here/t.jsonl'"), "/t.jsonl' cannot be read: "),
        (("+workload=replay", f"workload.table={'t' * 300}"), "cannot be read: "),
        (
            ("+workload=replay", "workload.table=t.jsonl"),
            "workload.target.value is missing: give the value to reach, such as workload.target.value=0.1 "
            "(this table's values lie between 0.13 and 0.4)",
        ),
        (
            (*REPLAY, "workload.target.value=0.12"),
            "val/error <= 0.12 is never reached in this table; lowest val/error 0.13, at batch size 8 and learning",
        ),
        ((*REPLAY, "workload.target.value=0.4"), "val/error <= 0.4 is met by every run in this table at its first"),
        ((*REPLAY, "workload.target.mode=max"), "val/error >= 0.14 is met by every run in this table at its first"),
        ((*REPLAY, "workload.target.mode=up"), "target.mode must be min or max, but got 'up'"),
        ((*REPLAY, "search.batch_size.low=4"), "search.batch_size.low=4 lies outside of the table's batch sizes, 8 to"),
        ((*REPLAY, "search.batch_size.high=600"), "search.batch_size.high=600 lies outside of the table's batch sizes"),
        ((*REPLAY, "search.batch_size.low=99", "search.batch_size.high=9"), "search.batch_size needs 1 <= low <= high"),
        ((*REPLAY, "trial.batch_size=600", "trial.lr=0.1"), "trial.batch_size=600 lies outside of the table's batch"),
        ((*REPLAY, "trial.batch_size=60", "trial.lr=1"), "trial.lr=1 lies outside of the table's learning rates, 0.01"),
        (
            (*REPLAY, "trial.batch_size=60", "trial.lr=0.1", "trial.seed=-1"),
            "trial.seed must be at least 0, but got -1",
        ),
        ((*REPLAY, "budget.steps=0"), "budget.steps and budget.examples must be at least 1, but got 0"),
        ((*REPLAY, "scaling=surge"), "the scaling rule surge needs a noise scale"),
        ((*REPLAY, "+workload.data=1"), "a workload is trained (workload.data and workload.module) or replayed"),
        ((*REPLAY, "storage=sqlite:////nowhere/x.db"), "the folder /nowhere does not exist"),
    ],
)
def test_bad_input_ends_in_a_plain_line_and_writes_nothing(bstune, tmp_path, table, arguments, message):
    _refused(bstune, tmp_path, arguments, message)


def _refused(bstune, folder, arguments, message):
    before = entries(folder)
    status, out, err = bstune(*arguments)
    assert status == 2
    assert err.startswith("error: ")
    assert message in err
    assert "Traceback" not in out + err
    assert entries(folder) == before


def test_a_table_that_cannot_be_read_at_last_is_refused_too(table, monkeypatch, tmp_path):
    """Checked and prepared are two readings: what changed between them is found."""
    from bstune.study.prepare import prepare

    monkeypatch.chdir(tmp_path)
    config = compose_checked(list(REPLAY))
    table.unlink()
    with pytest.raises(TableError, match="is no file"):
        prepare(config)


def test_a_config_file_that_is_no_yaml_is_named(bstune, tmp_path):
    (tmp_path / "conf" / "workload").mkdir(parents=True)
    (tmp_path / "conf" / "workload" / "mine.yaml").write_text("name: {")
    status, _, err = bstune("--config-dir", "conf", "+workload=mine")
    assert status == 2
    assert err.startswith("error: a config file is not YAML: ")
    assert "mine.yaml" in err
