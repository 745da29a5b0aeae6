"""Muon: momentum whose updates of filters and matrices are orthogonalised, and plain SGD for what else there is.

Groups of a network's parameters by their kind, each with its own share of the learning rate and of the decay.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import Optimizer
from torch.optim.sgd import sgd

from bstune.core.errors import ConfigError
from bstune.trial.batches import check_size
from bstune.workloads.layers import Whitening

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


# In the order in which a parameter is given its kind: it is of the first that fits.
KINDS = ("norm_bias", "whitening_bias", "head", "filters", "rest")
NORMS = (nn.modules.batchnorm._NormBase, nn.GroupNorm, nn.LayerNorm)
CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


def parameter_groups(
    module: nn.Module, lr: float, weight_decay: float, batch_size: int, kinds: Mapping[str, Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Return the parameters of a module in groups, as torch's optimizers take them; each is in exactly one.

    The kinds are ``norm_bias`` (of normalisation layers), ``whitening_bias``, ``head`` (all of the last linear layer),
    ``filters`` (of convolutions) and ``rest``. What is frozen is in none. A kind that is not named is with the rest.

    A group's learning rate is lr x rate. An optimizer multiplies its weight decay by that rate, so the group's is
    weight_decay x decay / rate: unless ``decay`` says otherwise, all weights shrink by the same share a step, whatever
    their rate. So do David Page's (2019, "How to train your ResNet 8": norm biases learn 64 times as fast, with a 64th
    of the weight decay) and cifar10-airbench's (``weight_decay=wd/lr``).

    Args:
        module: the network.
        lr: the trial's learning rate.
        weight_decay: that of a group of rate 1, at least 0.
        batch_size: examples a step.
        kinds: for each kind ``rate`` (1), ``decay`` (1), ``examples`` and ``fade`` (None and False), and any further
            option of the optimizer's groups, such as ``momentum``. ``examples`` is how many a group is trained on
            before it stays as it is, and ``fade`` that its rate falls to zero by a straight line over them, in place of
            the schedule; see :mod:`bstune.workloads.schedules`. So airbench trains the bias of its whitening for 3 epochs.

    Returns:
        A group for each kind that is named, then one for the rest unless it is empty.

    Raises:
        ConfigError: for a kind that there is not, or of which the network has nothing; for a factor or a number that
            cannot be.
    """
    unknown = sorted(set(kinds) - set(KINDS))
    if unknown:
        raise ConfigError(f"there is no kind of parameter {unknown[0]!r}: the kinds are {', '.join(KINDS)}")
    if not 0.0 <= weight_decay < math.inf:
        raise ConfigError(f"weight decay must be at least 0, but got {weight_decay}")
    sorted_in: dict[str, list[Parameter]] = {kind: [] for kind in (*kinds, "rest")}
    for kind, parameter in kinds_of(module):
        sorted_in[kind if kind in kinds else "rest"].append(parameter)
    for kind in kinds:
        if not sorted_in[kind] and kind != "rest":
            raise ConfigError(f"the network has no parameters of the kind {kind}: leave its group out")
    return [
        _group(kind, parameters, lr, weight_decay, batch_size, **kinds.get(kind, {}))
        for kind, parameters in sorted_in.items()
        if parameters
    ]


def kinds_of(module: nn.Module) -> Iterator[tuple[str, Parameter]]:
    """Return each parameter that is trained, once, in the module's order, with its kind."""
    modules = list(module.modules())
    head = [found for found in modules if isinstance(found, nn.Linear)][-1:]
    norm_biases = _ids(found.bias for found in modules if isinstance(found, NORMS))
    whitening = _ids(found.bias for found in modules if isinstance(found, Whitening))
    last = _ids(parameter for found in head for parameter in found.parameters())
    filters = _ids(found.weight for found in modules if isinstance(found, CONVOLUTIONS))
    places = (norm_biases, whitening, last, filters)
    for parameter in module.parameters():
        if parameter.requires_grad:
            fits = (kind for kind, place in zip(KINDS, places, strict=False) if id(parameter) in place)
            yield next(fits, "rest"), parameter


def _ids(found: Iterable[Any]) -> set[int]:
    return {id(parameter) for parameter in found if parameter is not None}


def _group(
    kind: str,
    parameters: list[Parameter],
    lr: float,
    weight_decay: float,
    batch_size: int,
    *,
    rate: float = 1.0,
    decay: float = 1.0,
    examples: int | None = None,
    fade: bool = False,
    **options: Any,
) -> dict[str, Any]:
    if not 0.0 < rate < math.inf:
        raise ConfigError(f"groups.kinds.{kind}.rate is a factor of the learning rate, over 0, but got {rate}")
    if not 0.0 <= decay < math.inf:
        raise ConfigError(f"groups.kinds.{kind}.decay is a factor of the weight decay, at least 0, but got {decay}")
    group = {"params": parameters, "lr": lr * rate, "weight_decay": weight_decay * decay / rate, **options}
    if examples is not None:
        check_size(f"groups.kinds.{kind}.examples", examples)
        group |= {"steps": math.ceil(examples / batch_size), "fade": fade}
    elif fade:
        raise ConfigError(f"groups.kinds.{kind}.fade needs {kind}.examples, over which its rate falls")
    return group
