"""Searches compared on recorded runs, and the recorder of such runs."""

import pandas as pd
import pytest

from bstune.__main__ import main
from bstune.core.records import Target
from bstune.search.decide import Proposal
from bstune.sweeps.record_table import run as record_table
from bstune.sweeps.search_benchmark import Problem, path_of
from bstune.trial.table import Run, Table, find_table

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


def test_small_sweep(tmp_path):
    command = [
        "sweep", "search_benchmark", "tables=[cifar_mlp]", "objectives=[steps]", "times=[2, 4]",
        "searches=[bstune,tpe,random hyperband,gp sqrt,qmc]", "seeds=1", f"output={tmp_path}",
    ]  # fmt: skip
    assert main(command) == 0
    table = pd.read_csv(tmp_path / "table.csv")
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
