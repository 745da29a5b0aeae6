"""Two ways to train CIFAR-10 fast: their parts beside numpy and torch, and each in small."""

import json
import os

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf
from pydantic import TypeAdapter
from torch import nn
from torch.optim import SGD

from bstune.__main__ import main
from bstune.sweeps.airbench import Recipe, batches
from bstune.sweeps.command import SWEEPS
from bstune.sweeps.dawnbench import Rung, run
from bstune.workloads.batches import WholeBatches
from bstune.workloads.datasets import LabelledImages
from bstune.workloads.images import Split
from bstune.workloads.resnet9 import BatchNorm, whitening_filters
from bstune.workloads.schedules import piecewise_linear


def test_whitened_patches_are_not_correlated():
    images = torch.randn(600, 3, 7, 7).cumsum(dim=3)
    windows = np.lib.stride_tricks.sliding_window_view(images.double().numpy(), (2, 2), (2, 3))
    patches = windows.transpose(0, 2, 3, 1, 4, 5).reshape(-1, 12)
    values = np.linalg.eigvalsh(patches.T @ patches / len(patches))[::-1]
    whitened = patches @ whitening_filters(images, 2, eps=0.01).flatten(1).double().numpy().T
    moments = whitened.T @ whitened / len(patches)
    assert moments == pytest.approx(np.diag(values / (values + 0.01)), abs=1e-4)


def test_groups_are_normalised_alone():
    images = torch.randn(6, 2, 4, 4) * torch.arange(1.0, 7.0).view(6, 1, 1, 1)
    of_group = [nn.BatchNorm2d(2), nn.BatchNorm2d(2)]
    layer = BatchNorm(2, ghost_size=3, scale=0.5)
    for first, reference in enumerate(of_group):
        expected = 0.5 * reference(images[first::2])
        torch.testing.assert_close(layer.train()(images)[first::2], expected)
    layer.load_state_dict(BatchNorm(2, 3, 0.5).state_dict())
    layer(images)
    means = torch.stack([reference.running_mean for reference in of_group]).mean(dim=0)
    variances = torch.stack([reference.running_var for reference in of_group]).mean(dim=0)
    torch.testing.assert_close([layer.running_mean, layer.running_var], [means, variances])
    with pytest.raises(ValueError, match="multiple=3"):
        layer(images[:5])


def test_a_triangle_wastes_no_step():
    optimizer = SGD([torch.zeros(1)], lr=2.0)
    schedule = piecewise_linear(optimizer, 8, [0.0, 0.25, 1.0], [0.0, 1.0, 0.0])
    rates = []
    for _ in range(8):
        rates += schedule.get_last_lr()
        optimizer.step()
        schedule.step()
    assert rates == pytest.approx([1, 2, 5 / 3, 4 / 3, 1, 2 / 3, 1 / 3, 0])


def coloured(root):
    """Noise whose shade is the label's, in the place of CIFAR-10."""
    labels = torch.arange(1024) % 10
    shades = 25 * labels.view(-1, 1, 1, 1) + torch.randint(25, (1024, 3, 32, 32))
    images = shades.to(torch.uint8)
    return LabelledImages(images, labels, (images[:200], labels[:200]))


@pytest.mark.slow
def test_all_tricks_at_once(tmp_path):
    rungs = OmegaConf.to_container(OmegaConf.load(SWEEPS["dawnbench"]).rungs)
    last = {**rungs[-1], "set": [option for rung in rungs for option in rung["set"]]}
    size = {"width": 4, "epochs": 2, "train_examples": 1024}
    size["options"] = ["data.images._target_=test_cifar10.coloured"]
    table, _ = run(tmp_path, rungs=[Rung(**last)], seeds=1, **size)
    row = table.iloc[0]
    assert (row.steps, row.source_seconds) == (4, 26)
    assert row.accuracy > 0.12
    assert row.seconds > 0


SMALL = ["device=cpu", "width=4", "train_examples=1024", "test_examples=500", "runs=1"]
SMALL += ["recipe.batch_size=64", "recipe.epochs=3"]


def recipe(name):
    return TypeAdapter(Recipe).validate_python(
        OmegaConf.to_container(OmegaConf.load(SWEEPS[name]).recipe)
    )


def test_an_image_is_mirrored_in_every_other_epoch():
    images = torch.zeros(40, 3, 32, 32, dtype=torch.uint8)
    images[..., 16:] = 255
    labels = torch.arange(40)
    data = Split(WholeBatches(images, labels), WholeBatches(), torch.ones(3, 1, 1), torch.zeros(1))
    stream = batches(data, 20, recipe("airbench94"))
    epochs = []
    assert recipe("airbench94_muon").muon
    for _ in range(3):
        is_mirrored = np.empty(40, dtype=bool)
        for _ in range(2):
            batch, rows = next(stream)
            is_mirrored[rows] = (batch[..., 0] > 0).all(dim=2).all(dim=1)
        epochs.append(is_mirrored)
    assert 0 < epochs[0].sum() < 40
    assert (epochs[1] == ~epochs[0]).all()
    assert (epochs[2] == epochs[0]).all()


@pytest.mark.skipif("BSTUNE_DATA" not in os.environ, reason="BSTUNE_DATA is not set")
# The recipe of airbench94_muon has no part that neither of these has.
@pytest.mark.parametrize("name, least", [("airbench94", 15), ("speedrun", 25)])
@pytest.mark.slow
def test_a_record_in_small(name, least, tmp_path, capsys):
    assert main(["sweep", name, *SMALL, f"output={tmp_path}"]) == 0
    assert "94.01%" in capsys.readouterr().out
    row = json.loads((tmp_path / "rows.jsonl").read_text().splitlines()[1])
    assert row["steps"] == 48
    assert [step for step, _ in row["errors"]] == [16, 32, 48]
    assert row["accuracy"] == pytest.approx(100 - 100 * row["errors"][-1][1])
    assert row["accuracy"] > least
