"""What a choice of ``schedule`` or ``algorithm`` puts in the place of a part of the workload's module.

The optimizer's node is the one below ``workload.module`` that is called ``optimizer`` or builds one
of torch's; it is written as Hydra does or as LightningCLI does. A module that builds its optimizer
itself has none, and is refused.
"""

import inspect
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.utils import get_object
from omegaconf import DictConfig, OmegaConf, open_dict

from bstune.core.errors import ConfigError
from bstune.core.search_space import HALF_LIVES, MODULE, OVERRIDE_LR

ALWAYS = ("workload.tunable", "workload.reference")  # of which a choice changes parts
# What makes the algorithm; the rest, such as a weight decay, stays the workload's where its
# optimizer is of that class.
OF_ALGORITHM = ("_target_", "_partial_", "momentum", "nesterov", "dampening", "betas")


def with_choices_of(
    config: DictConfig,
    nothing_to_choose: str | None,
    arguments: Sequence[str],
    unknown: Sequence[str],
) -> tuple[DictConfig, list[str]]:
    """Put the chosen schedule and algorithm into a config's workload, then what the command line sets in them.

    Args:
        config: composed by Hydra, which would merge a choice with what the workload has; it is
            changed.
        nothing_to_choose: why the workload has no place for a choice; None where it may have one.
        arguments: of the command line; those that set a part of what a choice replaced are applied
            again.
        unknown: options that Hydra refused, as the workload's own part has no such key.

    Returns:
        The config, and those of ``unknown`` that are so still.

    Raises:
        ConfigError: for a choice of other keys, or one that the workload has no place for.
    """
    with open_dict(config):
        schedule, algorithm = config.pop("schedule", None), config.pop("algorithm", None)
        for name, chosen in (("schedule", schedule), ("algorithm", algorithm)):
            if chosen is not None and nothing_to_choose is not None:
                raise ConfigError(f"{nothing_to_choose}, so it has no {name}: leave out {name}=...")
        replayed = "table" in config.workload if "workload" in config else False
        for name in (*HALF_LIVES, OVERRIDE_LR):
            if replayed and OmegaConf.select(config, name):
                raise ConfigError(
                    f"{nothing_to_choose}, so that {name} changes nothing: leave it out"
                )
        names = [argument.lstrip("+").partition("=")[0] for argument in arguments]
        own = [name.removeprefix("algorithm.") for name in names if name.startswith("algorithm.")]
        places = [*_put_schedule(config, schedule), *_put_algorithm(config, algorithm, own)]
        below = tuple(f"{place}." for place in [*places, *ALWAYS]) if places else ()
        for argument in arguments:
            if argument.lstrip("+").startswith(below) and "=" in argument:
                override = OverridesParser.create().parse_override(argument)
                OmegaConf.update(config, override.key_or_group, override.value(), force_add=True)
    return config, [name for name in unknown if not name.startswith(below)]


def _put_schedule(config: DictConfig, chosen: Any) -> list[str]:
    if chosen is None:
        return []
    if not isinstance(chosen, DictConfig) or not {"rate", "average"} <= set(chosen) <= {
        "rate",
        "average",
        "tunable",
    }:
        raise ConfigError(
            f"a schedule has the keys rate and average, and may have tunable, but got {chosen}"
        )
    module, place = OmegaConf.select(config, "workload.module"), MODULE
    if module is None:
        return []
    target = _target(module)
    if "class_path" in module:
        module.setdefault("init_args", {})
        module, place = module.init_args, f"{MODULE}init_args."
    arguments = {"schedule": chosen.rate, "average": chosen.average}
    for name, value in arguments.items():
        if _takes(target, name):
            module[name] = value
        elif value is not None:
            raise ConfigError(
                f"schedule=... sets the argument {name} of a workload's module, but that of "
                f"{config.workload.get('name')}, {target}, takes none: let it take schedule and "
                "average, as bstune.workloads.classifier.Classifier does, or leave out schedule=..."
            )
    places = [f"{place}{name}" for name in arguments]
    _put_tunables(config, chosen.get("tunable"), places, places[0])
    return places


def _takes(target: str, name: str) -> bool:
    """Return whether a class takes an argument.

    True where that cannot be found out before it is built.
    """
    try:
        parameters = inspect.signature(get_object(target)).parameters.values()
    except (ImportError, AttributeError, TypeError, ValueError):
        return True
    return any(one.name == name or one.kind is one.VAR_KEYWORD for one in parameters)


def _put_algorithm(config: DictConfig, chosen: Any, own: Sequence[str]) -> list[str]:
    """Put an optimizer in the place of the workload's, and its reference learning rate.

    Between optimizers of one class lr/(1 - momentum) of the reference is kept, else it is the
    algorithm's ``lr``; what the command line sets of the algorithm, ``own``, always is.
    """
    if chosen is None:
        return []
    if not isinstance(chosen, DictConfig) or set(chosen) != {"lr", "optimizer", "tunable"}:
        raise ConfigError(f"an algorithm has the keys lr, optimizer and tunable, but got {chosen}")
    place = _optimizer_place(config.workload)
    former = OmegaConf.select(config, place)
    arguments, optimizer = _arguments(former), _plain(chosen.optimizer)
    reference = OmegaConf.select(config, "workload.reference.lr")
    same_class = _target(former) == optimizer["_target_"]
    if same_class:
        kept = [
            name
            for name in arguments
            if name not in OF_ALGORITHM and f"optimizer.{name}" not in own
        ]
        optimizer |= {name: arguments[name] for name in kept}
    if same_class and "lr" not in own:
        if isinstance(reference, int | float):
            lr = reference * _share_of_gradient(optimizer) / _share_of_gradient(arguments)
            config.workload.reference.lr = float(f"{lr:.12g}")
    else:
        config.workload.reference.lr = chosen.lr
    if "lr" in arguments:
        optimizer["lr"] = arguments["lr"]  # which the module does not give
    prefix = place
    if "class_path" in former:
        prefix = f"{place}.init_args"
        rest = {
            name: value
            for name, value in optimizer.items()
            if name not in ("_target_", "_partial_")
        }
        optimizer = {"class_path": optimizer["_target_"], "init_args": rest}
    node: Any = config
    for part in place.split(".")[:-1]:
        if OmegaConf.is_interpolation(
            node, part
        ):  # setting a value below would cut it off from the rest
            node[part] = _plain(node[part])
        node = node[part]
    OmegaConf.update(config, place, optimizer, merge=False)
    _put_tunables(config, chosen.tunable, [place], prefix)
    return [place]


def _put_tunables(config: DictConfig, added: Any, replaced: Sequence[str], place: str) -> None:
    """Add tunables, their keys below a place or of a half-life, and drop those of what was replaced."""
    below = tuple(f"{one}." for one in replaced)
    former = config.workload.get("tunable") or {}
    kept = {name: one for name, one in former.items() if not str(one.get("key")).startswith(below)}
    tunables = {} if added is None else _plain(added)
    for one in tunables.values():
        one["key"] = one["key"] if one["key"] in HALF_LIVES else f"{place}.{one['key']}"
    config.workload.tunable = {**kept, **tunables}


def _optimizer_place(workload: DictConfig) -> str:
    """Return the key of the one node that builds an optimizer."""
    module = OmegaConf.select(workload, "module")
    found = list(_optimizers(module, MODULE.rstrip(".")))
    if len(found) == 1:
        return found[0]
    what = (
        f"the module of the workload {workload.get('name')}, "
        f"{_target(module) if module else 'none'}"
    )
    if found:
        raise ConfigError(
            f"algorithm=... takes the place of one optimizer, but {what}, has {', '.join(found)}: "
            "leave out algorithm=..., and change them one by one"
        )
    raise ConfigError(
        f"algorithm=... takes the place of an optimizer that the config names, but {what}, is "
        "given none, so that it builds its own: let it take one, optimizer: {_target_: "
        "torch.optim.SGD, _partial_: true}, or leave out algorithm=..."
    )


def _optimizers(node: Any, key: str) -> Iterator[str]:
    """Yield the keys of the nodes that build optimizers, below a node."""
    for name in map(str, node if isinstance(node, DictConfig) else ()):
        if OmegaConf.is_missing(node, name) or not isinstance(one := node[name], DictConfig):
            continue
        target = _target(one)
        torchs = target.startswith("torch.optim.") and not target.startswith(
            "torch.optim.lr_scheduler."
        )
        if torchs or (target and name == "optimizer"):
            yield f"{key}.{name}"
        else:
            yield from _optimizers(one, f"{key}.{name}")


def _target(node: DictConfig) -> str:
    """Return what a node builds; empty where it builds nothing."""
    return str(node.get("_target_") or node.get("class_path") or "")


def _arguments(node: DictConfig) -> dict[str, Any]:
    """Return what a node gives its target, references as they are."""
    values = _plain(node)
    return dict(values.get("init_args") or {}) if "class_path" in values else values


def _plain(node: DictConfig) -> dict[str, Any]:
    values = OmegaConf.to_container(node)
    return {str(key): value for key, value in values.items()} if isinstance(values, Mapping) else {}


def _share_of_gradient(arguments: Mapping[str, Any]) -> float:
    """Return 1 - momentum; 1 where there is none."""
    momentum = arguments.get("momentum")
    return 1.0 - momentum if isinstance(momentum, int | float) and 0.0 <= momentum < 1.0 else 1.0
