"""The command of the sweeps, the rows that they keep, and what each measures, in small."""

import json
import os

import numpy as np
import pytest
import torch
from pandas import DataFrame, read_csv
from refusals import refused, text_cases
from scipy import stats
from torch import nn

from bstune.__main__ import main
from bstune.config import compose
from bstune.core.errors import InputError
from bstune.core.records import Target
from bstune.recipe.recipe import settings_of
from bstune.search.decide import Proposal
from bstune.sweeps import alignment, minibatch_sgd, roofline, vectorization
from bstune.sweeps.powers_of_two import summary, with_neighbours
from bstune.sweeps.record_table import run as record_table
from bstune.sweeps.rows import measure_units
from bstune.sweeps.search_benchmark import Problem, path_of, search
from bstune.sweeps.studies import study
from bstune.trial.batches import seed_everything
from bstune.trial.table import Run, Table, find_table

UNITS = [{"size": 1}, {"size": 2}, {"size": 3}]


def squares(calls):
    def measure(unit):
        calls.append(unit["size"])
        if unit["size"] in (2, 3) and len(calls) < 4:
            raise KeyboardInterrupt
        return {"square": unit["size"] ** 2}

    return measure


def test_rows_of_a_sweep_that_is_interrupted_twice(tmp_path):
    path, calls = tmp_path / "new" / "rows.jsonl", []
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            measure_units(path, {"seed": 0}, UNITS, squares(calls))
    # What a kill in the midst of a line leaves.
    with path.open("a") as file:
        file.write('{"size": 2, "squ')
    table = measure_units(path, {"seed": 0}, UNITS, squares(calls))
    assert calls == [1, 2, 2, 2, 3]
    assert table.to_dict("list") == {"size": [1, 2, 3], "square": [1, 4, 9]}
    assert [json.loads(line) for line in path.read_text().splitlines()][1:] == [
        {"size": size, "square": size**2} for size in (1, 2, 3)
    ]


def test_rows_of_other_settings_are_refused(tmp_path):
    measure_units(tmp_path / "rows", {"seed": 0}, UNITS, lambda unit: {})
    with pytest.raises(InputError, match="other settings"):
        measure_units(tmp_path / "rows", {"seed": 1}, UNITS, lambda unit: {})


@pytest.mark.parametrize("line", ["[1]", "{", "3", "[" * 3000])
def test_what_is_no_row_is_refused(tmp_path, line):
    settings = {"command": ["data.token=pw"]}
    measure_units(tmp_path / "rows", settings, UNITS, lambda unit: {})
    assert "pw" not in (tmp_path / "rows").read_text()
    with (tmp_path / "rows").open("a") as file:
        file.write(line + "\n")
    with refused("rows"):
        measure_units(tmp_path / "rows", settings, UNITS, lambda unit: {})


@text_cases("""
arguments
nothing
vectorization sise=3
vectorization size=-3
vectorization size=[3
vectorization size
vectorization run=3
vectorization output=null
""")
def test_what_is_no_sweep_and_no_setting_is_refused(arguments, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["sweep", *arguments.split()]) == 2
    assert arguments.split()[0] in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_study_of_other_settings_is_refused(tmp_path):
    (tmp_path / "a.json").write_text('["+workload=digits"]')
    with pytest.raises(InputError, match="other settings"):
        study("a", tmp_path, ["+workload=digits", "trials=3"])


def test_sweeps_are_listed_with_their_sources(capsys):
    assert main(["sweep"]) == 0
    assert "Dive into Deep Learning" in capsys.readouterr().out


# The best cell takes 10 steps of 3 s, the other one 60 of 1 s.
CELLS = {32: ((5, 10), 3.0), 8: ((30, 60), 1.0)}


@pytest.mark.parametrize(
    "asked, path",
    [
        ([(32, 40, None)], [(1.0, 1.0)]),
        ([(32, 5, None), (32, 40, 0)], [(1.0, 1.0)]),
        ([(8, 200, None), (32, 40, None)], [(2.0, 2.0), (3.0, 1.0)]),
    ],
)
def test_spending_and_ratio_of_a_search_that_asks_for_known_cells(asked, path):
    cell = {"lr": 0.1, "seed": 0, "metric": (1.0, 0.1)}
    runs = []
    for size, (steps, seconds) in CELLS.items():
        runs.append(Run(batch_size=size, steps=steps, seconds_per_step=seconds, **cell))

    def asks(problem, seed):
        for size, max_steps, resumed_from in [*asked, (8, 999, None)]:
            yield Proposal(batch_size=size, lr=0.1, max_steps=max_steps, resumed_from=resumed_from)

    problem = Problem(Table(tuple(runs), Target("error", 0.1, "min")))
    assert path_of(problem, 0, path[-1][0], asks)["path"] == path


def test_the_search_resumes_recorded_runs():
    *_, (_, records) = search(Problem(find_table("cifar_mlp"), "steps"), 0, 6.0)
    resumed = [one for one in records if one.resumed_from is not None]
    assert resumed
    assert all(one.steps > records[one.resumed_from].steps for one in resumed)


def test_small_sweep(tmp_path):
    command = [
        "sweep", "search_benchmark", "tables=[cifar_mlp]", "objectives=[steps]", "times=[2, 4]",
        "searches=[bstune,tpe,random hyperband,gp sqrt,qmc]", "seeds=1", f"output={tmp_path}",
    ]  # fmt: skip
    assert main(command) == 0
    table = read_csv(tmp_path / "table.csv")
    assert len(table) == 5
    assert table["4"].between(1.0, 5.0).any()
    rows = (tmp_path / "rows.jsonl").read_text()
    assert main(command) == 0
    assert (tmp_path / "rows.jsonl").read_text() == rows


def test_recorded_runs_are_those_of_a_table(tmp_path):
    options = ["target=val/loss <= 0.5", "budget.steps=40"]
    grid = {"batch_sizes": [64], "lrs": [0.2, 1e-4], "seeds": [0]}
    rows, _ = record_table(tmp_path, workload="digits", options=options, **grid)
    assert list(rows["status"]) == ["reached", "missed"]
    table = find_table(str(tmp_path / "table.jsonl"))
    found = table.outcome(64, 0.2, 0, Target("val/loss", 0.5, "min"))
    assert found.steps == rows["steps"][0]


DATA = os.environ.get("BSTUNE_DATA", "")
SIZE, KIB = 12, 2


def test_ways_to_multiply_and_to_gather(tmp_path):
    calls = [call for _, call in vectorization.products(SIZE, block=4).values()]
    whole = calls[-1]().clone()
    for call in calls:
        torch.testing.assert_close(call(), whole)
        call().zero_()
    for _, call in vectorization.gathers(KIB).values():
        assert call().sort().values.equal(torch.arange(KIB * 256.0))
    settings = {"size": SIZE, "block": 4, "gathered_kib": KIB, "rounds": 2, "seconds": 1e-3}
    table, _ = vectorization.run(tmp_path, device="cpu", **settings)
    work = [2e-9 * SIZE**3] * 5 + [1e-9 * KIB * 2**10] * 3
    np.testing.assert_allclose(table["rate"] * table["seconds"], work)
    assert table["seconds"].between(table["low"], table["high"]).all()


def test_a_layer_s_step_has_the_gradients_of_its_products():
    linear, x, of_outputs = nn.Linear(3, 5), torch.randn(7, 3, requires_grad=True), torch.ones(7, 5)
    expected = of_outputs @ linear.weight, of_outputs.T @ x, of_outputs.sum(0)
    torch.testing.assert_close(alignment.gradients(linear, x, of_outputs), expected)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("sweep", ["alignment", "speedrun"])
def test_without_a_gpu_there_is_one_line(sweep, tmp_path, capsys):
    assert main(["sweep", sweep, "device=cuda", f"output={tmp_path}/new"]) == 2
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.skipif(not DATA, reason="BSTUNE_DATA is not set")
def test_gradient_descent_has_the_loss_of_numpy_s(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    recipe, trial = compose(["+workload=airfoil"]).recipe, settings_of(1500, 0.5, 8)
    x, y = (rows.numpy() for rows in recipe.data(trial).rows.tensors)
    seed_everything(0)
    weights = np.append(recipe.module(trial).linear.weight.detach(), 0.0)
    x, losses = np.insert(x, 5, 1.0, axis=1), []
    for _ in range(8):
        weights -= 0.5 * (x @ weights - y) @ x / 1500
        losses.append(np.mean((x @ weights - y) ** 2) / 2)
    run = minibatch_sgd.Run(batch_size=1500, lr=0.5, steps=8)
    options = {"runs": [run], "row_by_row": True, "level": losses[4] + 1e-6, "seeds": 1}
    table, _ = minibatch_sgd.run(tmp_path, **options)
    assert table["last loss"].item() == pytest.approx(losses[-1], rel=1e-5)
    assert table.filter(like="steps to").iloc[0, 0] == 5


def test_steps_on_both_sides_of_ops_byte(tmp_path):
    flops, moved = {"constant": 0, "per_example": 200}, {"constant": 1000, "per_example": 10}
    limits = {"peak": 100e9, "bandwidth": 10e9, "precision": "32-true"}
    survey = {
        "workload": "net",
        "roofline": {"flops": flops, "bytes": moved, **limits},
        "timings": [{"batch_size": size, "seconds": 2e-6} for size in (50, 400)],
    }
    (tmp_path / "rows.jsonl").write_text(
        f'{{"settings": {{"options": []}}}}\n{json.dumps(survey)}\n'
    )
    table, _ = roofline.run(tmp_path, workloads=["net"], options=[])
    # 10,000 FLOPs for 1,500 bytes, and 80,000 for 5,000, where 10 a byte are the ridge.
    assert table["bound by memory"].tolist() == [True, False]
    np.testing.assert_allclose(table[["attained", "attainable"]], [[5, 1000 / 15], [40, 100]])


SIZES = [119, 120, 121, 127, 128, 129, 255, 256, 257]


@pytest.mark.parametrize("percent", [-3.0, 0.0, 2.0])
def test_intervals_hold_a_known_difference(percent):
    rng = np.random.default_rng(0)
    # Rounds differ by tens of percents, visits by one.
    rounds = np.exp(rng.normal(0.0, 0.3, (40, 1)) + rng.normal(0.0, 0.01, (40, len(SIZES))))
    seconds = DataFrame(rounds * (1e-3 + 1e-5 * np.array(SIZES)), columns=SIZES)
    seconds[128] *= 1.0 + percent / 100.0
    table = summary(seconds, with_neighbours(SIZES), confidence=0.95)
    compared = table[table.unit == "%"].set_index("batch_size")
    assert list(compared.index) == ["120", "128", "256", "128, 256"]
    expected = [0.0, percent, 0.0, percent / 2.0]
    assert ((compared.low < expected) & (expected < compared.high)).all()
    assert (compared.high - compared.low).max() < 1.5
    is_seen = compared.low["128"] * compared.high["128"] > 0.0
    assert is_seen == (percent != 0.0)
    # Four intervals hold together in 95% of all cases, each in 98.75%.
    logs = np.log(seconds / SIZES)
    more = logs[128] - logs[[127, 129]].mean(axis=1)
    interval = stats.ttest_1samp(more, 0.0).confidence_interval(0.9875)
    assert compared.high["128"] == pytest.approx(100.0 * np.expm1(interval.high))


# What a survey has found before.
KEPT = [
    {"settings": {"command": ["+workload=digits", "survey_seconds=600", "batch_size.multiple=1"]}},
    {"memory_limit": 9, "largest_fit": 64, "threads": 1},
]


@pytest.mark.slow
def test_a_small_run_times_the_largest_batch_size_that_fits(tmp_path):
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(one) + "\n" for one in KEPT))
    small = ["workload=digits", "batch_sizes=[64]", "pairs=[]", "rounds=2", "memory_limit=9"]
    assert main(["sweep", "powers_of_two", *small, f"output={tmp_path}"]) == 0
    table = read_csv(tmp_path / "table.csv", keep_default_na=False)
    assert list(table.batch_size) == [32, 64, 64]
    assert list(table.against) == ["", "", "32"]
    assert (table.low <= table.value).all()
    assert (table.value <= table.high).all()
