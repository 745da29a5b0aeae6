"""Sweeps that time calls, train single runs, or place steps under the roofline."""

import json
import os

import numpy as np
import pytest
import torch
from torch import nn

from bstune.__main__ import main
from bstune.config import compose
from bstune.recipe.recipe import settings_of
from bstune.sweeps import alignment, minibatch_sgd, roofline, vectorization
from bstune.trial.batches import seed_everything

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
def test_without_a_gpu_there_is_one_line(tmp_path, capsys):
    assert main(["sweep", "alignment", "device=cuda", f"output={tmp_path}/new"]) == 2
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
