"""Muon for matrices and filters, AdamW for the other weights, as one optimizer with one rate."""

from collections.abc import Callable
from typing import Any

import torch
from torch.optim import AdamW, Optimizer
from torch.optim.optimizer import ParamsT

from bstune.core.errors import InputError


class Muon(Optimizer):
    """Moves matrices by ``torch.optim.Muon``, which takes nothing else, other weights by AdamW.

    A filter bank is a matrix with a row for each filter. A matrix's step is scaled to the size of
    AdamW's (Liu et al. 2025, arXiv 2502.16982, eq. 4), so that one rate serves both.

    Args:
        params: parameters, or groups of them.
        lr: learning rate.
        momentum: of matrices.
        betas: of AdamW.
        weight_decay: decoupled, of all.

    Raises:
        InputError: torch is older than 2.9.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        momentum: float = 0.95,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0.0,
    ) -> None:
        if not hasattr(torch.optim, "Muon"):
            raise InputError(f"Muon needs torch 2.9, but got {torch.__version__}: update torch")
        defaults = {"lr": lr, "momentum": momentum, "betas": betas, "weight_decay": weight_decay}
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step, and give what the closure returned."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            common = {"lr": group["lr"], "weight_decay": group["weight_decay"]}
            trained = [weight for weight in group["params"] if weight.grad is not None]
            others = [weight for weight in trained if weight.ndim < 2]
            if others:
                adamw = AdamW(others, betas=group["betas"], **common)
                adamw.state = self.state
                adamw.step()
            matrices = {}
            for weight in trained:
                if weight.ndim >= 2:
                    matrix = weight.detach().flatten(1)
                    matrix.grad = weight.grad.flatten(1)
                    matrices[matrix] = weight
            if matrices:
                muon = torch.optim.Muon(
                    matrices, momentum=group["momentum"], adjust_lr_fn="match_rms_adamw", **common
                )
                muon.state.update({one: self.state[weight] for one, weight in matrices.items()})
                muon.step()  # type: ignore[no-untyped-call]
            for matrix, weight in matrices.items():
                # Those of filters in another memory format are copies.
                weight.copy_(matrix.view_as(weight))
        return loss
