"""Sweeps after Shallue et al. 2018: their numbers, and each once, small."""

import itertools
import math

import numpy as np
import pytest
import torch
from pandas import DataFrame, Series
from scipy.stats import t as student

from bstune.sweeps import shallue, shallue_error
from bstune.workloads.losses import squared_error

FAST = ["workers=0", "mlflow.uri=null"]


@pytest.mark.parametrize("times", [1.0, 2.0])
def test_points_off_the_law(times):
    sizes = np.array([1.0, 10.0, 90.0, 5000.0])
    points = DataFrame({"batch_size": sizes, "steps": times * 7.0 * (1.0 + 90.0 / sizes)})
    assert shallue.off_law(points, 90.0, 7.0) == pytest.approx(math.log(times))


def test_welch_of_two_groups_and_a_group_of_one():
    samples = {"a": [0.0, 0.1, math.nan], "b": [1.0, 2.0, 4.0], "c": [0.5]}
    values = Series([*itertools.chain(*samples.values())])
    groups = Series([*"aaabbbc"])
    found = shallue.over_first(values, groups)
    one, other = values[3:6], values[:2]
    parts = one.var() / 3, other.var() / 2
    freedom = sum(parts) ** 2 / (parts[0] ** 2 / 2 + parts[1] ** 2)
    half = student.ppf(0.95, freedom) * math.sqrt(sum(parts))
    mean = one.mean() - other.mean()
    assert found.loc["b"].tolist() == pytest.approx([mean, mean - half, mean + half])
    assert found.loc["c"].tolist() == pytest.approx([0.45, math.nan, math.nan], nan_ok=True)


def test_two_studies_and_their_panel(tmp_path):
    names = ["cifar_mlp", "shakespeare_lstm"]
    table, _ = shallue.compare(
        tmp_path,
        factor="network",
        seeds=[0],
        common=["+workload=replay", "objective=curve", *FAST],
        studies={name: [f"table={name}"] for name in names},
        options=["trials=12"],
    )
    first, second = table["b_crit"]
    assert table["network"].tolist() == names
    assert table["ratio_mean"].tolist()[1] == pytest.approx(second / first)
    assert (table["slope_small"] < table["slope_large"]).all()
    folders = [tmp_path / f"{name}-0" for name in names]
    again, figure = shallue.panel(tmp_path, folders=folders, tables=[], options=[])
    assert again["off_law"].tolist() == table["off_law"].tolist()
    assert len(figure.axes[0].collections) == 2


def test_the_best_error_within_budgets(tmp_path):
    table, _ = shallue_error.run(
        tmp_path,
        common=["+workload=digits", *FAST],
        variants={"none": []},
        batch_sizes=[16, 128],
        lrs=[0.1, 0.8],
        seeds=[0, 1, 2],
        steps=8,
        examples=512,
    )
    assert table["steps"].tolist() == [32, 4, 8, 8, 32, 8]
    assert table["mean"][0] == table["mean"][4] < table["mean"][2]
    assert table["over_first_mean"][1] == pytest.approx(table["mean"][1] - table["mean"][0])


def test_squared_error():
    logits = torch.tensor([[1.0, 0.0, 2.0], [0.0, 0.0, 1.0]])
    assert squared_error(logits, torch.tensor([0, 2])).item() == pytest.approx((4 / 2 + 0) / 2)
