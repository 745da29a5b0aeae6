"""Muon, with SGD or AdamW for other parameters, and groups of parameters with their own rates."""

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import Optimizer
from torch.optim.adamw import adamw
from torch.optim.optimizer import ParamsT
from torch.optim.sgd import sgd

from bstune.core.errors import ConfigError, check_positive_integer
from bstune.workloads.layers import Whitening

# Parameters and their options, as torch's optimizers have them.
Group = dict[str, Any]
# The coefficients of the quintic iteration (Jordan et al. 2024). They are chosen for the slope at
# zero, so that a few steps bring every singular value near 1.
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
EPS = 1e-7


class Muon(Optimizer):
    """Steps groups of parameters with orthogonalised momentum, the others as SGD or AdamW does.

    (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon, as in cifar10-airbench's
    airbench94_muon.) A group with ``orthogonalise`` holds filters and matrices: m <- momentum x m +
    g, u = g + momentum x m (Nesterov) or m, w <- (1 - lr x weight_decay) w, w <- w - lr x O(u),
    where O makes the singular values of u near 1, a filter bank being a matrix with a row for each
    filter. The gradient's scale cancels. Another group with ``betas`` and ``eps`` is stepped as
    AdamW does. Nothing waits for an accelerator. A group's ``lr`` may become a tensor without
    dimensions, which a CUDA graph of the step reads (bstune.trial.fast.graph).

    Args:
        params: parameters, or groups of them with options of their own.
        lr: learning rate.
        momentum: in [0, 1).
        nesterov: whether the momentum is Nesterov's.
        steps: of the iteration that orthogonalises; 3 in airbench94_muon, 5 elsewhere.
        normalise_weights: whether w is first scaled to the norm sqrt(rows), in place of a weight
            decay, as in airbench94_muon.
        weight_decay: decoupled for orthogonalised groups, torch's own for the others.
        coefficients: a, b and c of the iteration, a polynomial of odd powers; Jordan et al.'s
            unless given.
        orthogonalise: for groups that do not set it.

    Raises:
        ConfigError: for a value out of its range, an orthogonalised vector, or if no group is
            orthogonalised.
    """

    capturable = True

    def __init__(
        self,
        params: ParamsT,
        lr: float,
        *,
        momentum: float,
        nesterov: bool,
        steps: int,
        normalise_weights: bool,
        weight_decay: float = 0.0,
        coefficients: Sequence[float] = COEFFICIENTS,
        orthogonalise: bool = False,
    ) -> None:
        if len(coefficients) != 3:
            raise ConfigError(
                f"muon's iteration takes three coefficients, but got {list(coefficients)}"
            )
        defaults: dict[str, Any] = {
            "lr": lr,
            "momentum": momentum,
            "nesterov": nesterov,
            "weight_decay": weight_decay,
            "steps_of_iteration": steps,
            "coefficients": tuple(coefficients),
            "normalise_weights": normalise_weights,
            "orthogonalise": orthogonalise,
            "betas": None,
            "eps": None,
        }
        super().__init__(params, defaults)
        for group in self.param_groups:
            _check_group(group)
        if not any(group["orthogonalise"] for group in self.param_groups):
            raise ConfigError(
                "muon has nothing to orthogonalise: give a group of filters or matrices "
                "orthogonalise: true, such as module.groups.kinds.filters"
            )

    @torch.no_grad()
    def step(  # type: ignore[override]
        self, closure: Callable[[], float] | None = None
    ) -> float | None:
        """Take one step, and give what the closure returned."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            trained = [parameter for parameter in group["params"] if parameter.grad is not None]
            gradients = [parameter.grad for parameter in trained]
            if not trained:
                continue
            if group["orthogonalise"]:
                self._step_orthogonal(group, trained, gradients)
            elif group.get("betas"):
                self._step_adam(group, trained, gradients)
            else:
                self._step_plain(group, trained, gradients)
        return loss

    def _step_orthogonal(
        self, group: Group, trained: list[Tensor], gradients: list[Tensor]
    ) -> None:
        """Step a group of matrices and filters by their orthogonalised momentum."""
        for parameter in trained:
            if "momentum_buffer" not in self.state[parameter]:
                self.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
        buffers = [self.state[parameter]["momentum_buffer"] for parameter in trained]
        torch._foreach_mul_(buffers, group["momentum"])
        torch._foreach_add_(buffers, gradients)
        updates: Sequence[Tensor] = buffers
        if group["nesterov"]:
            updates = torch._foreach_add(gradients, buffers, alpha=group["momentum"])
        if group["normalise_weights"]:
            # Each weight tensor is brought to the norm sqrt(rows), in place of weight decay, which
            # holds norms down as well: the factor is sqrt(rows) over its norm.
            factors = torch._foreach_norm(trained)
            torch._foreach_clamp_min_(factors, EPS)
            torch._foreach_reciprocal_(factors)
            torch._foreach_mul_(factors, [math.sqrt(len(parameter)) for parameter in trained])
            torch._foreach_mul_(trained, factors)
        elif group["weight_decay"]:
            torch._foreach_mul_(trained, 1.0 - group["lr"] * group["weight_decay"])
        # Matrices of one shape are one batch: launching many small products would take most of a
        # step's time.
        by_shape: dict[torch.Size, list[int]] = defaultdict(list)
        for index, update in enumerate(updates):
            by_shape[update.shape].append(index)
        for shape, indices in by_shape.items():
            matrices = [updates[index].reshape(len(updates[index]), -1) for index in indices]
            updated = orthogonalised(
                torch.stack(matrices), group["steps_of_iteration"], group["coefficients"]
            )
            for index, update in zip(indices, updated, strict=True):
                _subtract(trained[index], update.view(shape), group["lr"])

    def _step_plain(self, group: Group, trained: list[Tensor], gradients: list[Tensor]) -> None:
        """Step a group as torch's SGD does."""
        options = {name: group[name] for name in ("lr", "momentum", "nesterov", "weight_decay")}
        buffers = list[Tensor | None]()
        if group["momentum"]:
            # There is none at a first step; sgd makes it.
            buffers = [self.state[parameter].get("momentum_buffer") for parameter in trained]
        # torch's fused SGD alone takes a rate that is a tensor without reading it on the host.
        fused = True if isinstance(group["lr"], Tensor) else None
        sgd(trained, gradients, buffers, **options, dampening=0.0, maximize=False, fused=fused)
        # Without momentum there are no buffers.
        for parameter, buffer in zip(trained, buffers, strict=False):
            self.state[parameter]["momentum_buffer"] = buffer

    def _step_adam(self, group: Group, trained: list[Tensor], gradients: list[Tensor]) -> None:
        """Step a group as torch's AdamW does."""
        # A CUDA graph of the step, for which lr is a tensor, must read nothing on the host.
        is_captured = isinstance(group["lr"], Tensor)
        averages = list[Tensor]()
        squares = list[Tensor]()
        counts = list[Tensor]()
        for parameter in trained:
            state = self.state[parameter]
            if not state:
                # Counts lie where torch's own AdamW has them.
                device = parameter.device if is_captured else "cpu"
                state["exp_avg"] = torch.zeros_like(parameter)
                state["exp_avg_sq"] = torch.zeros_like(parameter)
                state["step"] = torch.zeros((), dtype=torch.float32, device=device)
            averages.append(state["exp_avg"])
            squares.append(state["exp_avg_sq"])
            counts.append(state["step"])
        # The largest squares so far are only kept for AMSGrad.
        largest_squares = list[Tensor]()
        # torch looks for the counts among the positional arguments.
        adamw(
            trained,
            gradients,
            averages,
            squares,
            largest_squares,
            counts,
            fused=True if is_captured else None,
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )


def _check_group(group: Group) -> None:
    """Refuse a group's values that are out of range, and vectors in an orthogonalised group."""
    if not 0.0 <= group["lr"] < math.inf:
        raise ConfigError(f"a learning rate must be at least 0, but got {group['lr']}")
    if not 0.0 <= group["momentum"] < 1.0:
        raise ConfigError(f"momentum must lie in [0, 1), but got {group['momentum']}")
    if group["nesterov"] and not group["momentum"]:
        raise ConfigError("nesterov=true needs a momentum over 0")
    check_positive_integer("the steps of muon's iteration", group["steps_of_iteration"])
    if not group["orthogonalise"]:
        return
    for parameter in group["params"]:
        if parameter.ndim < 2:
            raise ConfigError(
                "muon orthogonalises filters and matrices, but a group with orthogonalise: true "
                f"holds a parameter of the shape {tuple(parameter.shape)}: leave it to a group "
                "without"
            )


def muon_and_adam(
    params: ParamsT,
    lr: float,
    *,
    adam_matrices: Sequence[int],
    adam_rate: float,
    betas: Sequence[float],
    eps: float,
    weight_decay: float,
    **options: Any,
) -> Muon:
    """Make Muon for a network's matrices and filters, with AdamW for its other parameters.

    Where a given group sets ``orthogonalise``, the groups are taken as they are.

    Args:
        params: parameters in the network's order, or groups of them with options of their own.
        lr: Muon's learning rate.
        adam_matrices: places, among the parameters of two or more dimensions, of those that AdamW
            takes: -1 is the last layer's, 0 an embedding's, as Jordan et al. 2024 advise.
        adam_rate: factor of the learning rate for AdamW, over 0.
        betas: of AdamW.
        eps: of AdamW, over 0.
        weight_decay: decoupled, for all parameters: a step takes lr x weight_decay of each weight.
        **options: of :class:`Muon`.

    Raises:
        ConfigError: for a value out of its range, or if no parameter is left for Muon.
    """
    listed: list[Any] = list(params)
    options |= {"weight_decay": weight_decay}
    if any(isinstance(group, Mapping) and "orthogonalise" in group for group in listed):
        return Muon(listed, lr, normalise_weights=False, **options)
    are_betas = all(0.0 <= beta < 1.0 for beta in betas)
    if not 0.0 < adam_rate < math.inf or not eps > 0.0 or not are_betas:
        raise ConfigError(
            "adam_rate and eps must be over 0 and betas lie in [0, 1), but got "
            f"adam_rate={adam_rate}, eps={eps}, betas={list(betas)}"
        )
    given_groups: list[Group] = [{"params": listed}]
    if listed and isinstance(listed[0], Mapping):
        given_groups = [dict(group) for group in listed]
    matrices = list[Parameter]()
    for group in given_groups:
        for parameter in group["params"]:
            if parameter.ndim >= 2:
                matrices.append(parameter)
    # Tensors are told apart by identity: their == compares values.
    ids_for_muon = {id(parameter) for parameter in matrices}
    for place in adam_matrices:
        if not -len(matrices) <= place < len(matrices):
            raise ConfigError(
                f"adam_matrices names the place {place}, but the network has {len(matrices)} "
                "matrices"
            )
        ids_for_muon.discard(id(matrices[place]))
    options_of_adam = {"betas": tuple(betas), "eps": eps, "orthogonalise": False}
    # Each given group becomes up to two, one for Muon and one for AdamW.
    groups = list[Group]()
    for group in given_groups:
        muon_parameters = list[Parameter]()
        adam_parameters = list[Parameter]()
        for parameter in group["params"]:
            takes_muon = id(parameter) in ids_for_muon
            chosen = muon_parameters if takes_muon else adam_parameters
            chosen.append(parameter)
        if muon_parameters:
            groups.append({**group, "params": muon_parameters, "orthogonalise": True})
        if adam_parameters:
            adam_lr = group.get("lr", lr) * adam_rate
            groups.append({**group, "params": adam_parameters, "lr": adam_lr, **options_of_adam})
    return Muon(groups, lr, normalise_weights=False, **options)


def _subtract(weight: Tensor, update: Tensor, rate: float | Tensor) -> None:
    """Subtract rate x update from a weight. A rate that is a tensor is not read on the host."""
    if isinstance(rate, Tensor):
        weight.addcmul_(update, rate, value=-1.0)
    else:
        weight.add_(update, alpha=-rate)


def orthogonalised(
    matrices: Tensor, steps: int, coefficients: Sequence[float] = COEFFICIENTS
) -> Tensor:
    """Give matrices (n, rows, columns) with the same singular vectors, and singular values near 1.

    A matrix of zeros stays zero. The Newton-Schulz iteration below takes ``steps`` steps.
    """
    # The iteration is X <- a X + (b X X' + c (X X')^2) X, from X = G/|G|, and was made for bfloat16
    # on CUDA. The singular values end between about 0.7 and 1.2 rather than at 1; small ones need
    # more steps (Jordan et al. 2024).
    x = matrices.to(torch.bfloat16 if matrices.is_cuda else torch.float32)
    # Tall matrices are turned, so that the products are of the smaller side.
    is_tall = x.shape[1] > x.shape[2]
    if is_tall:
        x = x.mT
    x = x / x.flatten(1).norm(dim=1).clamp(min=EPS).view(-1, 1, 1)
    a, b, c = coefficients
    for _ in range(steps):
        product = x @ x.mT
        polynomial = torch.baddbmm(product, product, product, beta=b, alpha=c)
        x = torch.baddbmm(x, polynomial, x, beta=a)
    if is_tall:
        x = x.mT
    return x.to(matrices.dtype)


KINDS_OF_PARAMETERS = ("norm_bias", "whitening_bias", "head", "filters", "rest")
NORMS = (nn.modules.batchnorm._NormBase, nn.GroupNorm, nn.LayerNorm)


def parameter_groups(
    module: nn.Module,
    lr: float,
    weight_decay: float,
    batch_size: int,
    kinds: Mapping[str, Mapping[str, Any]],
) -> list[Group]:
    """Sort the parameters of a module into groups, as torch's optimizers take them.

    Each parameter is in exactly one group, by its kind. The kinds are ``norm_bias`` (of
    normalisation layers), ``whitening_bias``, ``head`` (all of the last linear layer), ``filters``
    (of convolutions) and ``rest``, which a kind that is not named joins. Frozen parameters are in
    none.

    A group's learning rate is lr x rate, its weight decay weight_decay x decay / rate: as an
    optimizer multiplies the two, all weights shrink by the same share a step unless ``decay`` says
    otherwise. David Page's network (2019, "How to train your ResNet 8": norm biases learn 64 times
    as fast, with a 64th of the decay) and cifar10-airbench's do the same.

    Args:
        module: the network.
        lr: the trial's learning rate.
        weight_decay: that of a group of rate 1, at least 0.
        batch_size: examples per step.
        kinds: for each kind ``rate`` (1), ``decay`` (1), ``examples`` (None) and ``fade`` (False),
            and any further option of the optimizer's groups, such as ``momentum``. A group is
            frozen after ``examples`` examples; with ``fade`` its rate falls to zero by a straight
            line over them; see :mod:`bstune.workloads.schedules`.

    Returns:
        A group for each kind that is named, then one for the rest unless it is empty.

    Raises:
        ConfigError: for an unknown kind, one of which the network has no parameters, or a value out
            of its range.
    """
    unknown = sorted(set(kinds) - set(KINDS_OF_PARAMETERS))
    if unknown:
        raise ConfigError(
            f"there is no kind of parameter {unknown[0]!r}: the kinds are "
            f"{', '.join(KINDS_OF_PARAMETERS)}"
        )
    if not 0.0 <= weight_decay < math.inf:
        raise ConfigError(f"weight decay must be at least 0, but got {weight_decay}")
    by_kind: dict[str, list[Parameter]] = {kind: [] for kind in (*kinds, "rest")}
    for kind, parameter in _kinds_of_parameters(module):
        named = kind if kind in kinds else "rest"
        by_kind[named].append(parameter)
    for kind in kinds:
        if kind != "rest" and not by_kind[kind]:
            raise ConfigError(
                f"the network has no parameters of the kind {kind}: leave its group out"
            )
    groups = list[Group]()
    for kind, parameters in by_kind.items():
        if parameters:
            options = kinds.get(kind, {})
            groups.append(_group(kind, parameters, lr, weight_decay, batch_size, **options))
    return groups


def _kinds_of_parameters(module: nn.Module) -> Iterator[tuple[str, Parameter]]:
    """Yield each trained parameter once, in the module's order, with its kind.

    A parameter of several kinds gets the first of them in KINDS_OF_PARAMETERS, and one of none gets
    ``rest``.
    """
    members: dict[str, list[Any]] = {kind: [] for kind in KINDS_OF_PARAMETERS}
    for layer in module.modules():
        if isinstance(layer, NORMS):
            members["norm_bias"].append(layer.bias)
        if isinstance(layer, Whitening):
            members["whitening_bias"].append(layer.bias)
        if isinstance(layer, nn.Linear):
            # The parameters of the last linear layer replace those before.
            members["head"] = list(layer.parameters())
        if isinstance(layer, nn.Conv1d | nn.Conv2d | nn.Conv3d):
            members["filters"].append(layer.weight)
    kinds = dict[int, str]()
    # A later entry replaces an earlier one: the first kind of a parameter is entered last.
    for kind in reversed(KINDS_OF_PARAMETERS):
        kinds.update(dict.fromkeys(map(id, members[kind]), kind))
    for parameter in module.parameters():
        if parameter.requires_grad:
            yield kinds.get(id(parameter), "rest"), parameter


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
    **options: object,
) -> Group:
    """Make the optimizer's group of a kind; for the options see :func:`parameter_groups`."""
    if not 0.0 < rate < math.inf:
        raise ConfigError(
            f"groups.kinds.{kind}.rate is a factor of the learning rate, over 0, but got {rate}"
        )
    if not 0.0 <= decay < math.inf:
        raise ConfigError(
            f"groups.kinds.{kind}.decay is a factor of the weight decay, at least 0, but got "
            f"{decay}"
        )
    # An optimizer multiplies decay and rate: by the division weights shrink alike in all groups.
    group: Group = {
        "params": parameters,
        "lr": lr * rate,
        "weight_decay": weight_decay * decay / rate,
        **options,
    }
    if examples is not None:
        check_positive_integer(f"groups.kinds.{kind}.examples", examples)
        group |= {"steps": math.ceil(examples / batch_size), "fade": fade}
    elif fade:
        raise ConfigError(
            f"groups.kinds.{kind}.fade needs {kind}.examples, over which its rate falls"
        )
    return group
