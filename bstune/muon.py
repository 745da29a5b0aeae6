"""Muon: momentum whose updates of filters and matrices are orthogonalised, and plain SGD for what else there is."""

import math
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.sgd import sgd

from bstune.data.batches import check_size
from bstune.errors import ConfigError

# Of the quintic iteration: chosen for the slope at zero, so that a few steps bring every singular value near 1.
A, B, C = 3.4445, -4.7750, 2.0315
EPS = 1e-7


class Muon(Optimizer):
    """Steps groups of parameters with orthogonalised momentum, and the others as torch's SGD does.

    (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon, as in cifar10-airbench's airbench94_muon.) A group
    with ``orthogonalise`` holds filters and matrices only: m <- momentum x m + g, u = g + momentum x m (Nesterov) or m,
    w <- (1 - lr x weight_decay) w, w <- w - lr x O(u), where O makes the singular values of u near 1, a filter bank
    being a matrix with a row for each filter. The step's size is thus the learning rate's alone: the gradient's scale
    cancels. Where ``normalise_weights`` is set, w is first scaled to the norm sqrt(rows). Nothing waits for an
    accelerator.

    Args:
        params: parameters, or groups of them with options of their own.
        lr: learning rate.
        momentum: from 0 to below 1.
        nesterov: whether the momentum is Nesterov's.
        steps: of the iteration that orthogonalises; 3 in airbench94_muon, 5 elsewhere.
        normalise_weights: whether filters and matrices keep a norm of sqrt(rows), in place of a weight decay;
            airbench94_muon does.
        weight_decay: decoupled for orthogonalised groups, torch's own for the others.
        orthogonalise: whether a group's updates are orthogonalised, if it does not say itself.

    Raises:
        ConfigError: for a value out of its range, an orthogonalised vector, or if no group is orthogonalised.
    """

    def __init__(
        self,
        params: Any,
        lr: float,
        *,
        momentum: float,
        nesterov: bool,
        steps: int,
        normalise_weights: bool,
        weight_decay: float = 0.0,
        orthogonalise: bool = False,
    ) -> None:
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "nesterov": nesterov,
            "steps_of_iteration": steps,
            "normalise_weights": normalise_weights,
            "weight_decay": weight_decay,
            "orthogonalise": orthogonalise,
        }
        super().__init__(params, defaults)
        for group in self.param_groups:
            _check(group)
        if not any(group["orthogonalise"] for group in self.param_groups):
            raise ConfigError(
                "muon has nothing to orthogonalise: give a group of filters or matrices orthogonalise: true, such as "
                "module.groups.kinds.filters"
            )

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step, and return what the closure returned."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            trained = [parameter for parameter in group["params"] if parameter.grad is not None]
            if trained:
                (self._step_orthogonal if group["orthogonalise"] else self._step_plain)(group, trained)
        return loss

    def _step_orthogonal(self, group: dict[str, Any], trained: list[Tensor]) -> None:
        gradients = _gradients(trained)
        buffers = [self._buffer(parameter) for parameter in trained]
        torch._foreach_mul_(buffers, group["momentum"])
        torch._foreach_add_(buffers, gradients)
        updates = torch._foreach_add(gradients, buffers, alpha=group["momentum"]) if group["nesterov"] else buffers
        if group["normalise_weights"]:
            for parameter, norm in zip(trained, torch._foreach_norm(trained), strict=True):
                parameter.mul_(math.sqrt(len(parameter)) / norm.clamp(min=EPS))
        elif group["weight_decay"]:
            torch._foreach_mul_(trained, 1.0 - group["lr"] * group["weight_decay"])
        # Those of one shape together: a step's time is that of starting many small products.
        of_shape: dict[torch.Size, list[int]] = defaultdict(list)
        for place, update in enumerate(updates):
            of_shape[update.shape].append(place)
        for shape, places in of_shape.items():
            stacked = torch.stack([updates[place].reshape(len(updates[place]), -1) for place in places])
            for place, update in zip(places, orthogonalised(stacked, group["steps_of_iteration"]), strict=True):
                trained[place].add_(update.view(shape), alpha=-group["lr"])

    def _buffer(self, parameter: Tensor) -> Tensor:
        state = self.state[parameter]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(parameter)
        buffer: Tensor = state["momentum_buffer"]
        return buffer

    def _step_plain(self, group: dict[str, Any], trained: list[Tensor]) -> None:
        momentum = group["momentum"]
        buffers = [self.state[parameter].get("momentum_buffer") for parameter in trained] if momentum else []
        sgd(
            trained,
            _gradients(trained),
            buffers,
            weight_decay=group["weight_decay"],
            momentum=momentum,
            lr=group["lr"],
            dampening=0.0,
            nesterov=group["nesterov"],
            maximize=False,
        )
        for parameter, buffer in zip(trained, buffers, strict=False):
            self.state[parameter]["momentum_buffer"] = buffer


def orthogonalised(matrices: Tensor, steps: int) -> Tensor:
    """Return matrices with about the same singular vectors, and singular values near 1, by a Newton-Schulz iteration.

    X <- a X + (b X X' + c (X X')^2) X, from X = G/|G|. Its coefficients maximise the slope at zero, and the values end
    between about 0.7 and 1.2 rather than at 1; those that begin small need more steps (Jordan et al. 2024). It is done
    in bfloat16 on CUDA, which it was made for, and in float32 on a CPU.

    Args:
        matrices: (n, rows, columns); a matrix of zeros stays so.
        steps: of the iteration.

    Returns:
        Likewise, of the same type.
    """
    x = matrices.to(torch.bfloat16 if matrices.is_cuda else torch.float32)
    tall = x.shape[1] > x.shape[2]
    x = x.mT if tall else x  # so that the products are of the smaller side
    x = x / x.flatten(1).norm(dim=1).clamp(min=EPS).view(-1, 1, 1)
    for _ in range(steps):
        product = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(product, product, product, beta=B, alpha=C), x, beta=A)
    return (x.mT if tall else x).to(matrices.dtype)


def _gradients(trained: list[Tensor]) -> list[Tensor]:
    return [parameter.grad for parameter in trained if parameter.grad is not None]


def _check(group: dict[str, Any]) -> None:
    if not 0.0 <= group["lr"] < math.inf:
        raise ConfigError(f"a learning rate must be at least 0, but got {group['lr']}")
    if not 0.0 <= group["momentum"] < 1.0:
        raise ConfigError(f"momentum must lie in [0, 1), but got {group['momentum']}")
    if group["nesterov"] and not group["momentum"]:
        raise ConfigError("nesterov=true needs a momentum over 0")
    check_size("the steps of muon's iteration", group["steps_of_iteration"])
    vectors = [tuple(parameter.shape) for parameter in group["params"] if parameter.ndim < 2]
    if group["orthogonalise"] and vectors:
        raise ConfigError(
            f"muon orthogonalises filters and matrices, but a group with orthogonalise: true holds a parameter of the "
            f"shape {vectors[0]}: leave it to a group without"
        )
