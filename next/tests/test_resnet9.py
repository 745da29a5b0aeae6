"""Page's network for CIFAR-10: its layers beside numpy and torch, and his ladder in small."""

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf
from torch import nn
from torch.optim import SGD

from bstune.sweeps.command import SWEEPS
from bstune.sweeps.dawnbench import Rung, run
from bstune.workloads.datasets import LabelledImages
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


def test_all_tricks_at_once(tmp_path):
    rungs = OmegaConf.to_container(OmegaConf.load(SWEEPS["dawnbench"]).rungs)
    last = {**rungs[-1], "set": [option for rung in rungs for option in rung["set"]]}
    size = {"width": 4, "epochs": 2, "train_examples": 1024}
    size["options"] = ["data.images._target_=test_resnet9.coloured"]
    table, _ = run(tmp_path, rungs=[Rung(**last)], seeds=1, **size)
    row = table.iloc[0]
    assert (row.steps, row.source_seconds) == (4, 26)
    assert row.accuracy > 0.12
    assert row.seconds > 0
