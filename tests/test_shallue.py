"""Sweeps after Shallue et al. 2018: their numbers, and each once, small."""

import math

import numpy as np
import pytest
import torch
import yaml
from pandas import DataFrame, Series
from scipy.stats import t as student

from bstune.config import compose
from bstune.sweeps import shallue, shallue_error
from bstune.sweeps.command import SWEEPS
from bstune.workloads.losses import squared_error

FAST = ["workers=0", "mlflow.uri=null"]


@pytest.mark.parametrize("times", [1.0, 2.0])
def test_points_off_the_law(times):
    sizes = np.array([1.0, 90.0, 5000.0])
    points = DataFrame({"batch_size": sizes, "steps": times * (7.0 + 630.0 / sizes)})
    assert shallue.off_law(points, 90.0, 7.0) == pytest.approx(math.log(times))


def test_welch_of_two_groups_and_a_group_of_one():
    found = shallue.over_first(Series([0.0, 4.0, 1.0, 1.5, 2.0, 9.0]), Series([*"aabbbc"]))
    # The variance of each mean: 8/2 and 0.25/3.
    error = 4.0 + 0.25 / 3.0
    half = student.ppf(0.95, error**2 / (4.0**2 + (0.25 / 3.0) ** 2 / 2.0)) * math.sqrt(error)
    assert found.loc["b"].tolist() == pytest.approx([-0.5, -0.5 - half, -0.5 + half])
    assert found.loc["c"].tolist() == pytest.approx([7.0, math.nan, math.nan], nan_ok=True)


@pytest.mark.parametrize(
    "name", [name for name in SWEEPS if name.startswith("shallue")] + ["losses"]
)
def test_studies_of_a_sweep_compose(name):
    settings = yaml.safe_load(SWEEPS[name].read_text())
    for own in (settings.get("studies") or settings["variants"]).values():
        assert compose([*settings["common"], *own]).options.target is not None


@pytest.mark.slow
def test_two_studies_and_a_folder(tmp_path):
    names = ["cifar_mlp", "shakespeare_lstm"]
    table, figure = shallue.compare(
        tmp_path,
        factor="network",
        seeds=[0],
        common=["+workload=replay", "objective=curve", *FAST],
        studies={name: [f"table={name}"] for name in names},
        folders=[tmp_path / "cifar_mlp-0"],
        options=["trials=6"],
    )
    assert table["ratio_mean"][1] == pytest.approx(table["b_crit"][1] / table["b_crit"][0])
    assert (table["slope_small"] < table["slope_large"]).all()
    assert table["off_law"][0] == table["off_law"][2]
    assert len(figure.axes[0].collections) == 3


@pytest.mark.slow
def test_the_best_error_within_budgets(tmp_path):
    table, _ = shallue_error.run(
        tmp_path,
        common=["+workload=digits", *FAST],
        variants={"none": []},
        batch_sizes=[16, 128],
        lrs=[0.1, 0.8],
        seeds=[0, 1],
        steps=8,
        examples=512,
    )
    assert table["steps"].tolist() == [32, 4, 8, 8, 32, 8]
    assert table["mean"][0] == table["mean"][4] < table["mean"][2]
    assert table["over_first_mean"][1] == pytest.approx(table["mean"][1] - table["mean"][0])


def test_squared_error():
    logits = torch.tensor([[1.0, 0.0, 2.0], [0.0, 0.0, 1.0]])
    assert squared_error(logits, torch.tensor([0, 2])).item() == (4 / 2 + 0) / 2
