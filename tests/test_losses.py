"""Losses against closed forms."""

import pytest
import torch

from bstune.config import compose
from bstune.sweeps.harness import compose_sweep
from bstune.workloads.losses import SquaredError

# Of a sweep: a change elsewhere seldom breaks it, and CI runs it.
pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("logits", "labels", "loss"),
    [
        ([[1.0, 0.0]], [0], 0.0),
        ([[0.0, 0.0]], [1], 0.5),
        # (3-1)^2 + (1-0)^2 halved, over two examples, of which the second is exact.
        ([[3.0, 1.0], [0.0, 1.0]], [0, 1], (4 + 1) / 2 / 2),
    ],
)
def test_squared_error(logits, labels, loss):
    found = SquaredError()(torch.tensor(logits, requires_grad=True), torch.tensor(labels))
    assert found.item() == pytest.approx(loss)
    assert found.requires_grad


def test_the_sweep_of_losses_composes_each_of_its_studies():
    experiment = compose_sweep("losses", ()).sweep.experiment
    losses = [
        compose([*experiment.common, *own]).options.workload.module["loss"]
        for own in experiment.studies.values()
    ]
    assert [(loss["_target_"], loss.get("label_smoothing")) for loss in losses] == [
        ("torch.nn.CrossEntropyLoss", 0.0),
        ("torch.nn.CrossEntropyLoss", 0.1),
        ("bstune.workloads.losses.SquaredError", None),
    ]
