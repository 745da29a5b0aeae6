"""The loop of CIFAR-10's speed records: its parts beside closed forms, and each recipe in small."""

import json
import os

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf
from pydantic import TypeAdapter

from bstune.__main__ import main
from bstune.sweeps.airbench import Recipe, batches
from bstune.sweeps.command import SWEEPS
from bstune.workloads.batches import WholeBatches
from bstune.workloads.images import Split

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
def test_a_record_in_small(name, least, tmp_path, capsys):
    assert main(["sweep", name, *SMALL, f"output={tmp_path}"]) == 0
    assert "94.01%" in capsys.readouterr().out
    row = json.loads((tmp_path / "rows.jsonl").read_text().splitlines()[1])
    assert row["steps"] == 48
    assert [step for step, _ in row["errors"]] == [16, 32, 48]
    assert row["accuracy"] == pytest.approx(100 - 100 * row["errors"][-1][1])
    assert row["accuracy"] > least


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_cuda_without_a_gpu_is_refused_in_a_line(tmp_path, capsys):
    assert main(["sweep", "speedrun", "device=cuda", f"output={tmp_path}"]) == 2
    assert "device=cpu" in capsys.readouterr().err
