"""Sets an optimizer's beta2 and weight decay by half-lives in examples, so that they follow B.

``scaling.beta2_half_life`` and ``scaling.weight_decay_half_life`` change the optimizers that any
module has built, before its first step. The arithmetic is in :mod:`bstune.core.scaling`.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch.optim import SGD, Optimizer, RMSprop

from bstune.core.errors import ConfigError
from bstune.core.scaling import beta2_of, effective_lr_of, shrinkage_of


def follow_batch_size(
    configured: object,
    batch_size: int,
    beta2_half_life: float | None,
    weight_decay_half_life: float | None,
) -> None:
    """Set the beta2 and the weight decay of a module's optimizers, for a batch size.

    Weight decay shrinks a weight by a share in each step. The half-life is that of the parameter
    group that shrinks fastest, and the other groups keep their ratios to it, so that one without
    weight decay stays without. Where no group has any, all get the half-life.

    Args:
        configured: whatever ``configure_optimizers`` may return.
        batch_size: examples of a step.
        beta2_half_life: of a squared gradient in Adam's average of them, in examples; None: beta2
            stays.
        weight_decay_half_life: of a weight without gradient, in examples, at the learning rate
            before its schedule; None: the weight decay stays.

    Raises:
        ConfigError: if no optimizer has the option, or decays weights by way of Adam's averages,
            where they have no half-life.
    """
    optimizers = list(optimizers_in(configured))
    if beta2_half_life is not None:
        _set_beta2(optimizers, beta2_of(batch_size, beta2_half_life))
    if weight_decay_half_life is not None:
        _set_weight_decay(optimizers, shrinkage_of(batch_size, weight_decay_half_life))


def _set_beta2(optimizers: Sequence[Optimizer], beta2: float) -> None:
    """Set the beta2 of all parameter groups that have betas; a ConfigError where none has."""
    adams = list[dict[str, Any]]()
    for optimizer in optimizers:
        adams += [group for group in optimizer.param_groups if group.get("betas")]
    if not adams:
        raise ConfigError(
            "scaling.beta2_half_life is of optimizers with betas, such as Adam, but the "
            f"module's are {_names(optimizers)}: leave it out, or choose algorithm=adamw"
        )
    for group in adams:
        group["betas"] = (group["betas"][0], beta2)


def _set_weight_decay(optimizers: Sequence[Optimizer], shrinkage: float) -> None:
    """Set the weight decay of all parameter groups that have one.

    The group that shrinks fastest then loses the share ``shrinkage`` of a weight without gradient
    in each step.
    """
    groups = list[dict[str, Any]]()
    # Each group's effective learning rate, and the share of a weight that a step takes away by the
    # weight decay that the group has now.
    rates = list[float]()
    shares = list[float]()
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            if "weight_decay" not in group:
                continue
            if group.get("betas") and not _is_decoupled(optimizer, group):
                raise ConfigError(
                    "scaling.weight_decay_half_life: the weight decay of "
                    f"{type(optimizer).__name__} goes through its averages of gradients, where a "
                    "weight has no half-life: use AdamW, as algorithm=adamw does"
                )
            groups.append(group)
            rates.append(_effective_lr(optimizer, group))
            shares.append(rates[-1] * group["weight_decay"])
    if not groups:
        raise ConfigError(
            "scaling.weight_decay_half_life is of optimizers with a weight_decay, but the "
            f"module's are {_names(optimizers)}: leave it out"
        )
    fastest = max(shares)
    for group, rate, share in zip(groups, rates, shares, strict=True):
        # At a rate of 0 no decay would shrink a weight. Where no group decays, all get the same.
        if rate > 0.0:
            relative = share / fastest if fastest else 1.0
            group["weight_decay"] = shrinkage * relative / rate


def _names(optimizers: Iterable[Optimizer]) -> str:
    """List the optimizers' classes in words."""
    return ", ".join(type(optimizer).__name__ for optimizer in optimizers) or "none"


def effective_lr(optimizers: Sequence[Optimizer]) -> float | None:
    """Give lr/(1 - m) for the first parameter group of SGD or RMSprop with a momentum m.

    None where there is no such group.
    """
    for optimizer in optimizers:
        if not isinstance(optimizer, SGD | RMSprop):
            continue
        for group in optimizer.param_groups:
            if group["momentum"]:
                return _effective_lr(optimizer, group)
    return None


def optimizers_in(configured: object) -> Iterator[Optimizer]:
    """Yield the optimizers in what ``configure_optimizers`` returned.

    It may have returned an optimizer, a list, a dict, or a pair of lists.
    """
    if isinstance(configured, Optimizer):
        yield configured
    elif isinstance(configured, Mapping):
        yield from optimizers_in(configured.get("optimizer"))
    elif isinstance(configured, list | tuple):
        for part in configured:
            yield from optimizers_in(part)


def _effective_lr(optimizer: Optimizer, group: Mapping[str, Any]) -> float:
    """Give a group's learning rate times the sum of weights that momentum gives a gradient.

    The momentum of SGD and RMSprop sums up weight decay as it does a gradient. All others shrink a
    weight by the plain rate: AdamW and Muon do so beside their averages. The rate is that before
    any schedule; with OneCycleLR the largest one of the cycle. A ConfigError refuses a momentum of
    1 or more.
    """
    lr = float(group.get("max_lr", group.get("initial_lr", group["lr"])))
    # Muon steps such a group as SGD does.
    is_muons_sgd = group.get("orthogonalise") is False and not group.get("betas")
    if not is_muons_sgd and not isinstance(optimizer, SGD | RMSprop):
        return lr
    if group["momentum"] >= 1.0:
        raise ConfigError(
            f"the momentum of {type(optimizer).__name__} must be less than 1, but got "
            f"{group['momentum']:g}: from 1 on its steps never stop growing"
        )
    return effective_lr_of(lr, group["momentum"], group.get("dampening", 0.0))


def _is_decoupled(optimizer: Optimizer, group: Mapping[str, Any]) -> bool:
    """Whether a step shrinks a weight by lr x weight_decay of it, whatever the gradients were."""
    if "decoupled_weight_decay" in group:
        return bool(group["decoupled_weight_decay"])
    # Before torch 2.7 AdamW was a class of its own, and its groups did not have that key.
    is_adamw = any("AdamW" in base.__name__ for base in type(optimizer).__mro__)
    # The groups of bstune's Muon have this key. It steps those with betas as AdamW does.
    is_muon = "orthogonalise" in group
    return is_adamw or is_muon
