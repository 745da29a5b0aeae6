"""Groups of a network's parameters by their kind, each with its own share of the learning rate and of the decay."""

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch import nn
from torch.nn import Parameter

from bstune.data.batches import check_size
from bstune.errors import ConfigError
from bstune.workloads.whitening import Whitening

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
            the schedule; see :mod:`bstune.schedules`. So airbench trains the bias of its whitening for 3 epochs.

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
