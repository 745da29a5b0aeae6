"""What of an optimizer may follow the batch size besides its learning rate: half-lives in examples.

``scaling.beta2_half_life`` and ``scaling.weight_decay_half_life`` set options of the optimizers
that a module has built, whoever wrote it, before its first step. The arithmetic is in
:mod:`bstune.core.scaling`.
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

    Groups keep the ratios between the shares by which their weights shrink in a step, so that one
    without weight decay stays without; the half-life is that of the group that shrinks fastest.
    Where none has any, all get it.

    Args:
        configured: whatever ``configure_optimizers`` may return.
        batch_size: examples a step.
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
    """Let the group that shrinks fastest lose this share of a weight without gradient in a step."""
    groups = list[dict[str, Any]]()
    # The rate at which a gradient acts in each of them, and the share that a step takes of a
    # weight.
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
        # A rate of 0 takes nothing of a weight, whatever its decay is.
        if rate > 0.0:
            relative = share / fastest if fastest else 1.0
            group["weight_decay"] = shrinkage * relative / rate


def _names(optimizers: Iterable[Optimizer]) -> str:
    return ", ".join(type(optimizer).__name__ for optimizer in optimizers) or "none"


def effective_lr(optimizers: Sequence[Optimizer]) -> float | None:
    """Give lr/(1 - m) of the first group of a momentum SGD's parameters (RMSprop's too).

    None where there is none.
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

    That is one, a list, a dict, or a pair of lists.
    """
    if isinstance(configured, Optimizer):
        yield configured
    elif isinstance(configured, Mapping):
        yield from optimizers_in(configured.get("optimizer"))
    elif isinstance(configured, list | tuple):
        for part in configured:
            yield from optimizers_in(part)


def _effective_lr(optimizer: Optimizer, group: Mapping[str, Any]) -> float:
    """Give the rate at which a gradient acts in the end, before any schedule.

    ConfigError for a momentum from 1.

    Of a OneCycleLR it is the largest one, which it is given, and not the one that it starts at.
    """
    lr = float(group.get("max_lr", group.get("initial_lr", group["lr"])))
    # A group of Muon's that its step takes as SGD does.
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
    """Tell whether a step takes lr x weight_decay of a weight, whatever the gradients were."""
    if "decoupled_weight_decay" in group:
        return bool(group["decoupled_weight_decay"])
    # Before torch 2.7 AdamW was a class of its own, without the group's word for it.
    is_adamw = any("AdamW" in base.__name__ for base in type(optimizer).__mro__)
    is_muon = "orthogonalise" in group
    return is_adamw or is_muon
