"""Muon: matrices and filters move as by torch's Muon, the other weights as by AdamW."""

import pytest
import torch

from bstune.workloads.muon import Muon

SETTINGS = {"lr": 0.02, "weight_decay": 0.1}
SHAPES = [(6, 2, 3, 3), (6,), (5, 4)]


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch is older than 2.9")
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_weights_move_as_by_torchs_optimizers(memory_format):
    weights = [torch.randn(shape) for shape in SHAPES]
    weights[0] = weights[0].contiguous(memory_format=memory_format)
    flat = [weight.flatten(int(weight.ndim > 1)).clone() for weight in weights]
    optimizers = [
        Muon(weights, momentum=0.9, **SETTINGS),
        torch.optim.Muon(flat[::2], momentum=0.9, adjust_lr_fn="match_rms_adamw", **SETTINGS),
        torch.optim.AdamW(flat[1:2], **SETTINGS),
    ]
    for _ in range(5):
        for weight, one in zip(weights, flat, strict=True):
            weight.grad = torch.randn(weight.shape)
            one.grad = weight.grad.view(one.shape)
        for optimizer in optimizers:
            optimizer.step()
    for weight, one in zip(weights, flat, strict=True):
        assert weight.flatten().numpy() == pytest.approx(one.flatten().numpy(), rel=1e-5)
