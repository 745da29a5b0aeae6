"""What of an optimizer may follow the batch size besides its learning rate: half-lives in examples.

``scaling.beta2_half_life`` and ``scaling.weight_decay_half_life`` set options of the optimizers that a module has
built, whoever wrote it, before its first step. The arithmetic is in :mod:`bstune.core.scaling`.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch.optim import SGD, Optimizer, RMSprop

from bstune.core.errors import ConfigError
from bstune.core.scaling import beta2_of, effective_lr_of, shrinkage_of


def follow_batch_size(
    configured: Any,
    batch_size: int,
    beta2_half_life: float | None,
    weight_decay_half_life: float | None,
) -> None:
    """Set the beta2 and the weight decay of what ``configure_optimizers`` returned, for a batch size.

    Groups keep the ratios between the shares by which their weights shrink in a step, so that one without weight decay
    stays without; the half-life is that of the group that shrinks fastest. Where none has any, all get it.

    Args:
        configured: whatever ``configure_optimizers`` may return.
        batch_size: examples a step.
        beta2_half_life: of a squared gradient in Adam's average of them, in examples; None: beta2 stays.
        weight_decay_half_life: of a weight without gradient, in examples, at the learning rate before its schedule;
            None: the weight decay stays.

    Raises:
        ConfigError: if no optimizer has the option, or decays weights by way of Adam's averages, where they have no
            half-life.
    """
    optimizers = list(optimizers_in(configured))
    groups = [(optimizer, group) for optimizer in optimizers for group in optimizer.param_groups]
    names = ", ".join(type(optimizer).__name__ for optimizer in optimizers) or "none"
    if beta2_half_life is not None:
        adams = [group for _, group in groups if group.get("betas")]
        if not adams:
            raise ConfigError(
                f"scaling.beta2_half_life is of optimizers with betas, such as Adam, but the module's are {names}: "
                "leave it out, or choose algorithm=adamw"
            )
        for group in adams:
            group["betas"] = (group["betas"][0], beta2_of(batch_size, beta2_half_life))
    if weight_decay_half_life is not None:
        decaying = [(optimizer, group) for optimizer, group in groups if "weight_decay" in group]
        if not decaying:
            raise ConfigError(
                f"scaling.weight_decay_half_life is of optimizers with a weight_decay, but the module's are {names}: "
                "leave it out"
            )
        for optimizer, group in decaying:
            if group.get("betas") and not _is_decoupled(optimizer, group):
                raise ConfigError(
                    f"scaling.weight_decay_half_life: the weight decay of {type(optimizer).__name__} goes through its "
                    "averages of gradients, where a weight has no half-life: use AdamW, as algorithm=adamw does"
                )
        rates = [_effective_lr(optimizer, group) for optimizer, group in decaying]
        shares = [
            rate * group["weight_decay"] for rate, (_, group) in zip(rates, decaying, strict=True)
        ]
        fastest, wanted = max(shares), shrinkage_of(batch_size, weight_decay_half_life)
        for rate, share, (_, group) in zip(rates, shares, decaying, strict=True):
            if rate > 0.0:
                group["weight_decay"] = wanted * (share / fastest if fastest else 1.0) / rate


def effective_lr(optimizers: Sequence[Optimizer]) -> float | None:
    """Return lr/(1 - m) of the first group of a momentum SGD's parameters (RMSprop's too); None where there is none."""
    for optimizer in optimizers:
        for group in optimizer.param_groups if isinstance(optimizer, SGD | RMSprop) else ():
            if group["momentum"]:
                return _effective_lr(optimizer, group)
    return None


def optimizers_in(configured: Any) -> Iterator[Optimizer]:
    """Yield the optimizers in what ``configure_optimizers`` returned: one, a list, a dict, or a pair of lists."""
    if isinstance(configured, Optimizer):
        yield configured
    elif isinstance(configured, Mapping):
        yield from optimizers_in(configured.get("optimizer"))
    elif isinstance(configured, list | tuple):
        for one in configured:
            yield from optimizers_in(one)


def _effective_lr(optimizer: Optimizer, group: Mapping[str, Any]) -> float:
    """Return the rate at which a gradient acts in the end, before any schedule; ConfigError for a momentum from 1.

    Of a OneCycleLR it is the largest one, which it is given, and not the one that it starts at.
    """
    lr = float(group.get("max_lr", group.get("initial_lr", group["lr"])))
    of_muon = group.get("orthogonalise") is False and not group.get(
        "betas"
    )  # which its step takes as SGD does
    if not (of_muon or isinstance(optimizer, SGD | RMSprop)):
        return lr
    if group["momentum"] >= 1.0:
        raise ConfigError(
            f"the momentum of {type(optimizer).__name__} must be less than 1, but got {group['momentum']:g}: from 1 on "
            "its steps never stop growing"
        )
    return effective_lr_of(lr, group["momentum"], group.get("dampening", 0.0))


def _is_decoupled(optimizer: Optimizer, group: Mapping[str, Any]) -> bool:
    """Return whether a step takes lr x weight_decay of a weight, whatever the gradients were."""
    # Before torch 2.7 AdamW was a class of its own, without the group's word for it.
    adamw = any("AdamW" in base.__name__ for base in type(optimizer).__mro__)
    return bool(
        group.get("decoupled_weight_decay", adamw or "orthogonalise" in group)
    )  # the last is Muon's
