import json
import math
from pathlib import Path

import pytest
from synthetic import Law, synthetic_table

from bstune.core.records import TrialSpec
from bstune.sweeps import search_benchmark as bench
from bstune.sweeps.contest import Search, stopping_step
from bstune.trial.replay import Table


def small_table(law: Law) -> Table:
    return synthetic_table(law, (8, 32, 128, 512, 2048), (0.01, 0.03, 0.1, 0.3))


@pytest.fixture
def folder(tmp_path, monkeypatch, write_table):
    """Two shipped tables with their index; the working directory is another one."""
    shipped = tmp_path / "shipped"
    shipped.mkdir()
    write_table(shipped / "easy.jsonl", small_table(Law(noise=0.1)), "censored")
    write_table(shipped / "flat.jsonl", small_table(Law(exponent=0.0, noise=0.1)), "censored")
    (shipped / "tables.yaml").write_text(
        "easy: {metric: val/error, target: 0.1, command: make easy}\n"
        "flat: {metric: val/error, target: 0.1, command: make flat}\n"
    )
    monkeypatch.setattr(bench, "SHIPPED", shipped)
    monkeypatch.chdir(tmp_path)
    return shipped


def go(*arguments):
    return bench.main([str(argument) for argument in arguments])


def keys(out):
    return [json.loads(line)["key"] for line in (out / "runs.jsonl").read_text().splitlines()]


def best_point(problem, seed):
    """Return a search that knows the best point of the table ``easy``."""

    class Knowing(Search):
        def propose(self, finished):
            limit = stopping_step(problem, 128, finished)
            return TrialSpec(len(finished), len(finished), 128, 0.1, None, seed, limit)

    return Knowing()


def test_all_tables_by_default_and_three_files(folder, tmp_path, capsys):
    assert go("--searches", "random/lr,zeus", "--seeds", 4) == 0
    shown = json.loads((tmp_path / "bench" / "bench.json").read_text())
    assert [table["table"] for table in shown["tables"]] == ["easy", "flat"]
    assert shown["tables"][0]["command"] == "make easy"
    assert shown["tables"][0]["target"] == "val/error <= 0.1"
    assert {(row["table"], row["search"], row["seeds"]) for row in shown["results"]} == {
        (table, search, 4) for table in ("easy", "flat") for search in ("random/lr", "zeus")
    }
    assert (tmp_path / "bench" / "bench.png").exists()
    assert len(keys(tmp_path / "bench")) == 16
    out = capsys.readouterr().out
    assert "easy: val/error <= 0.1; 4 seeds" in out
    assert "Optuna's GP is ended" not in out


def test_what_is_recorded_is_not_played_again(folder, tmp_path, monkeypatch, write_table):
    out = tmp_path / "out"
    arguments = "--searches", "random/lr,zeus", "--tables", "easy", "--out", out
    assert go(*arguments, "--seeds", 2) == 0
    first = (out / "bench.json").read_text()
    played = []
    run = bench.Job.run
    monkeypatch.setattr(bench.Job, "run", lambda job: played.append((job.entry.key, job.seed)) or run(job))
    assert go(*arguments, "--seeds", 2) == 0
    assert played == []
    assert (out / "bench.json").read_text() == first
    assert go(*arguments, "--seeds", 3) == 0
    assert played == [("random/lr", 2), ("zeus", 2)]
    assert go(*arguments, "--seeds", 1) == 0  # fewer seeds are those of the first ones
    assert json.loads((out / "bench.json").read_text())["results"][0]["seeds"] == 1
    assert len(played) == 2
    for changed in (("--lr-factor", 10), ("--budget-factor", 0.5), ("--target", 0.2), ("--objective", "curve")):
        played.clear()
        assert go(*arguments, "--seeds", 1, *changed) == 0
        assert played == [("random/lr", 0), ("zeus", 0)], changed
    played.clear()
    assert go(*arguments, "--seeds", 1, "--again", "zeus") == 0
    assert played == [("zeus", 0)]
    assert sum(key["search"] == "zeus" for key in keys(out)) == 1  # of all settings: the search has changed
    played.clear()
    write_table(folder / "easy.jsonl", small_table(Law(noise=0.2)), "censored")
    assert go(*arguments, "--seeds", 1) == 0
    assert played == [("random/lr", 0), ("zeus", 0)]


def test_the_two_forms_are_kept_apart(folder, tmp_path):
    out = tmp_path / "out"
    assert go("--searches", "tpe/lr", "--tables", "easy", "--seeds", 2, "--out", out) == 0
    assert [(key["search"], key["seed"]) for key in keys(out)] == [
        (f"tpe/lr/{form}", seed) for form in ("pruned", "bound") for seed in (0, 1)
    ]


def test_a_line_that_was_half_written_is_dropped_and_played_again(folder, tmp_path):
    arguments = "--searches", "zeus", "--tables", "easy", "--seeds", 3, "--out", tmp_path / "out"
    assert go(*arguments) == 0
    path = tmp_path / "out" / "runs.jsonl"
    whole = path.read_text()
    path.write_text(whole[:-40])
    assert go(*arguments) == 0
    assert path.read_text() == whole
    path.write_text("{}\n" + whole)
    assert go(*arguments) == 2


def test_results_come_back_as_they_were(tmp_path):
    played = bench.Played(((1.5, None), (2.0, 1.25)), (None, 1.5), 7, 2.5, False)
    path = tmp_path / "runs.jsonl"
    key = {"search": "tpe/lr/bound", "seed": 0}
    bench.append_result(path, key, played)
    assert bench.read_results(path) == {bench.dump_json(key): played}
    assert bench.read_results(path, ("tpe/sqrt", "random", "tpe/l")) != {}
    assert bench.read_results(path, ("tpe/lr",)) == {}
    assert path.read_text() == ""


def test_processes_find_the_same(folder, tmp_path):
    arguments = "--searches", "tpe/lr,zeus", "--tables", "easy", "--seeds", 3
    assert go(*arguments, "--out", tmp_path / "one") == go(*arguments, "--out", tmp_path / "two", "--workers", 2) == 0
    assert (tmp_path / "one" / "bench.json").read_text() == (tmp_path / "two" / "bench.json").read_text()


def test_quick_has_few_searches_and_seeds(folder, tmp_path, monkeypatch):
    monkeypatch.setitem(bench.MULTIPLES, "time", (1.0, 5.0))
    assert go("--quick", "--tables", "easy", "--out", tmp_path / "out") == 0
    shown = json.loads((tmp_path / "out" / "bench.json").read_text())
    assert {row["search"] for row in shown["results"]} == set(bench.QUICK)
    assert {row["seeds"] for row in shown["results"]} == {bench.QUICK_SEEDS}


def test_anyones_search_can_take_part(folder, tmp_path):
    name = f"{__name__}:best_point"
    assert go("--searches", name, "--tables", "easy", "--seeds", 2, "--out", tmp_path / "out") == 0
    [row] = json.loads((tmp_path / "out" / "bench.json").read_text())["results"]
    assert row["search"] == name
    assert row["after"][0] == {"spending": 5.0, "median": 1.0, "p90": 1.0}
    assert 0.7 < row["within"]["median"] < 1.4  # its first trial, with the noise of one run


def test_the_curve(folder, tmp_path, capsys):
    assert go("--searches", "shallue", "--tables", "easy", "--seeds", 3, "--objective", "curve", "--out", "o") == 0
    [row] = json.loads(Path("o/bench.json").read_text())["results"]
    assert [mark["spending"] for mark in row["after"]] == [1, 3, 10]
    assert 1 <= row["after"][2]["median"] < 2
    assert "B_crit over the table's dense fit" in capsys.readouterr().out


def test_a_rule_without_a_noise_scale_is_left_out_and_said_so(tmp_path, capsys, monkeypatch):
    table = synthetic_table(Law(), (8, 32), (0.03, 0.1))  # two batch sizes: no B_crit
    rows = [
        {k: getattr(run, k) for k in ("batch_size", "lr", "seed", "steps", "metric", "seconds_per_step")}
        for run in table.runs
    ]
    (tmp_path / "two.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.chdir(tmp_path)
    arguments = "--tables", "two.jsonl", "--target", 0.1, "--searches", "random/surge,random/lr", "--seeds", 1
    assert go(*arguments, "--out", tmp_path / "out") == 0
    assert "two: random/surge is left out: its rule takes a noise scale" in capsys.readouterr().out
    [row] = json.loads((tmp_path / "out" / "bench.json").read_text())["results"]
    assert row["search"] == "random/lr"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--searches", "nonsense"],
            "no search is named 'nonsense': choose from bstune, bstune/none, bstune/linear, random/lr",
        ),
        (["--searches", "nowhere:make"], "the search 'nowhere:make' cannot be imported"),
        (["--searches", "math:nothing"], "cannot be imported"),
        (["--tables", "missing.jsonl"], "there is no table missing.jsonl: give the path of a file"),
        (["--tables", "own.jsonl"], "own.jsonl is not one of bstune's own tables: say what to reach with --target"),
        (["--tables", "easy", "--target", "0.01"], "is never reached in this table; lowest val/error 0.1"),
        (["--target", "nan"], "target.value must be a finite number, but got nan"),
        (["--seeds", "0"], "--seeds and --workers must be at least 1, but got 0"),
        (["--lr-factor", "-1"], "--lr-factor must be a positive number, but got -1.0"),
        (["--out", "own.jsonl"], "--out own.jsonl"),
    ],
)
def test_what_cannot_be_used_is_said_in_a_line(folder, arguments, message, capsys, write_table):
    write_table(Path("own.jsonl"), small_table(Law()), "censored")
    assert go(*arguments) == 2
    err = capsys.readouterr().err
    assert message in err
    assert err.count("\n") == 1
    assert not Path("bench").exists()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("- easy", "must map the name of each table"),
        ("easy: {metric: val/error}", "easy lacks target, command"),
        ("easy: 3", "easy lacks metric, target, command"),
        ("easy: {metric: val/error, target: low, command: x}", "easy needs a number as target, but got 'low'"),
        ("other: {metric: val/error, target: 0.1, command: x}", "lists other, but"),
        ("easy: [", "cannot be read"),
    ],
)
def test_an_index_that_is_none_is_refused(folder, text, message, capsys):
    (folder / "tables.yaml").write_text(text)
    assert go() == 2
    assert message in capsys.readouterr().err


def test_the_index_is_read(folder, tmp_path):
    index = bench.read_index(folder)
    assert list(index) == ["easy", "flat"]
    easy = index["easy"]
    assert (easy.path, easy.command) == (folder / "easy.jsonl", "make easy")
    assert (easy.target.metric, easy.target.value, easy.target.mode) == ("val/error", 0.1, "min")
    assert bench.read_index(tmp_path) == {}


def test_no_tables_at_all(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(bench, "SHIPPED", tmp_path)
    assert go() == 2
    assert "name a file with --tables FILE --target VALUE" in capsys.readouterr().err


def test_the_path_of_a_shipped_table_has_its_target(folder, tmp_path):
    loaded = bench.load([str(folder / "easy.jsonl")], bench.read_index(folder), None, bench.Settings("time", 1.0, 1.0))
    assert loaded[0].task.problem.target.metric == "val/error"
    assert math.isfinite(loaded[0].task.unit)


def test_an_interruption_says_how_to_go_on(folder, tmp_path, monkeypatch, capsys):
    def interrupted(job):
        raise KeyboardInterrupt

    monkeypatch.setattr(bench.Job, "run", interrupted)
    assert go("--tables", "easy", "--searches", "zeus") == 130
    assert "the same command goes on" in capsys.readouterr().err
