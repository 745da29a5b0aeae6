"""Puts a choice of ``schedule`` or ``algorithm`` in the place of a part of the workload's module.

The optimizer's node is the one below ``workload.module`` that is called ``optimizer`` or builds one
of torch's; it is written as Hydra does or as LightningCLI does. A module that builds its optimizer
itself has none, and is refused.
"""

import inspect
from collections.abc import Iterator, Mapping, Sequence

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.utils import get_object
from omegaconf import DictConfig, OmegaConf, open_dict

from bstune.core.errors import ConfigError
from bstune.core.search_space import HALF_LIVES, OVERRIDE_LR
from bstune.hydra_recipe import target_of
from bstune.options import Node

MODULE_KEY = "workload.module"
# Any choice changes parts of these.
ALWAYS_CHANGED = ("workload.tunable", "workload.reference")
SCHEDULE_KEYS = frozenset({"rate", "average"})
ALGORITHM_KEYS = frozenset({"lr", "optimizer", "tunable"})
# The arguments of an optimizer that make an algorithm. The others, such as a weight decay, stay
# those of the workload if its optimizer is of the same class.
OF_ALGORITHM = ("_target_", "_partial_", "momentum", "nesterov", "dampening", "betas")


def with_choices_of(
    config: DictConfig,
    nothing_to_choose: str | None,
    arguments: Sequence[str],
    unknown: Sequence[str],
) -> tuple[DictConfig, list[str]]:
    """Put the chosen schedule and algorithm into a config's workload.

    Arguments of the command line that set a value in a replaced part are applied again after it.
    (Hydra would merge a choice with the workload's own part.)

    Args:
        config: composed by Hydra; it is changed.
        nothing_to_choose: why the workload has no place for a choice; None where it may have one.
        arguments: of the command line.
        unknown: options that Hydra refused, as the workload's own part has no such key.

    Returns:
        The config, and the names of ``unknown`` that no choice has, either.

    Raises:
        ConfigError: for a choice of other keys, or one that the workload has no place for.
    """
    with open_dict(config):
        schedule = config.pop("schedule", None)
        algorithm = config.pop("algorithm", None)
        if nothing_to_choose is not None:
            _refuse_choices(config, schedule, algorithm, nothing_to_choose)
        algorithm_keys = _given_keys_of_algorithm(arguments)
        replaced = [
            *_put_schedule(config, schedule),
            *_put_algorithm(config, algorithm, algorithm_keys),
        ]
        if not replaced:
            return config, list(unknown)
        # Any choice changes the workload's tunables and its reference, too.
        prefixes = tuple(f"{key}." for key in [*replaced, *ALWAYS_CHANGED])
        for argument in arguments:
            sets_changed_part = argument.lstrip("+").startswith(prefixes) and "=" in argument
            if sets_changed_part:
                override = OverridesParser.create().parse_override(argument)
                OmegaConf.update(config, override.key_or_group, override.value(), force_add=True)
    # Unknown options of the changed parts have just been set.
    return config, [name for name in unknown if not name.startswith(prefixes)]


def _given_keys_of_algorithm(arguments: Sequence[str]) -> list[str]:
    """Give the keys below ``algorithm`` that arguments of the command line set."""
    keys = list[str]()
    for argument in arguments:
        name = argument.lstrip("+").partition("=")[0]
        if name.startswith("algorithm."):
            keys.append(name.removeprefix("algorithm."))
    return keys


def _refuse_choices(config: DictConfig, schedule: object, algorithm: object, why: str) -> None:
    """Refuse choices, and options of the optimizer, that a workload has no place for.

    It is called for a replayed workload, and for one of Python objects. ``why`` begins the message.
    """
    for name, chosen in (("schedule", schedule), ("algorithm", algorithm)):
        if chosen is not None:
            raise ConfigError(f"{why}, so it has no {name}: leave out {name}=...")
    # Options of the optimizer hold for a Python object, too: they are set in the optimizers that it
    # has built. A replayed workload, which has a table, has none.
    if "workload" not in config or "table" not in config.workload:
        return
    for name in (*HALF_LIVES, OVERRIDE_LR):
        if OmegaConf.select(config, name):
            raise ConfigError(f"{why}, so that {name} changes nothing: leave it out")


def _put_schedule(config: DictConfig, chosen: object) -> list[str]:
    """Put a schedule into the workload's module, and give the keys that a schedule replaces.

    They are those of its rate and of its average of weights, in this order.
    """
    if chosen is None:
        return []
    known = {*SCHEDULE_KEYS, "tunable"}
    if not isinstance(chosen, DictConfig) or not SCHEDULE_KEYS <= set(chosen) <= known:
        raise ConfigError(
            f"a schedule has the keys rate and average, and may have tunable, but got {chosen}"
        )
    module = OmegaConf.select(config, MODULE_KEY)
    # The checks of options refuse a workload without a module.
    if module is None:
        return []
    target = target_of(module)
    # The module's arguments stand beside its target. LightningCLI writes them below init_args.
    node = module
    key = MODULE_KEY
    if "class_path" in module:
        module.setdefault("init_args", {})
        node = module.init_args
        key = f"{MODULE_KEY}.init_args"
    arguments = {"schedule": chosen.rate, "average": chosen.average}
    for name, value in arguments.items():
        if _takes(target, name):
            node[name] = value
        elif value is not None:
            raise ConfigError(
                f"schedule=... sets the argument {name} of a workload's module, but that of "
                f"{config.workload.get('name')}, {target}, takes none: let it take schedule and "
                "average, as bstune.workloads.classifier.Classifier does, or leave out schedule=..."
            )
    replaced = [f"{key}.{name}" for name in arguments]
    tunables = chosen.get("tunable")
    # The keys of a schedule's tunables are below its rate.
    _put_tunables(config, added=tunables, replaced=replaced, place=f"{key}.schedule")
    return replaced


def _takes(target: str, name: str) -> bool:
    """Whether a class or function, given by its import path, takes an argument of this name.

    True also where it cannot be told beforehand: it cannot be imported or inspected here, or takes
    any argument by ``**``. A call then shows a mistake.
    """
    try:
        parameters = inspect.signature(get_object(target)).parameters
    except (ImportError, AttributeError, TypeError, ValueError):
        return True
    kinds = [parameter.kind for parameter in parameters.values()]
    return name in parameters or inspect.Parameter.VAR_KEYWORD in kinds


def _put_algorithm(config: DictConfig, chosen: object, given_keys: Sequence[str]) -> list[str]:
    """Put the chosen optimizer in the place of the workload's, and give the key that it replaced.

    The reference learning rate changes to the algorithm's own ``lr``. But between optimizers of one
    class lr/(1 - momentum) is kept instead, unless the command line gives ``algorithm.lr``.

    Args:
        config: it is changed.
        chosen: the algorithm: lr, the optimizer's node and its tunables; None: no choice.
        given_keys: the keys below ``algorithm`` that the command line sets.

    Returns:
        A list of the one key; empty without a choice.

    Raises:
        ConfigError: for a choice of other keys, or a workload without one place for an optimizer.
    """
    if chosen is None:
        return []
    if not isinstance(chosen, DictConfig) or set(chosen) != ALGORITHM_KEYS:
        raise ConfigError(f"an algorithm has the keys lr, optimizer and tunable, but got {chosen}")
    place = _optimizer_place(config.workload)
    former = OmegaConf.select(config, place)
    former_arguments = _arguments(former)
    optimizer = _plain(chosen.optimizer)
    reference = OmegaConf.select(config, "workload.reference.lr")
    is_same_class = target_of(former) == optimizer["_target_"]
    if is_same_class:
        optimizer |= _kept_arguments(former_arguments, given_keys)
    if not is_same_class or "lr" in given_keys:
        config.workload.reference.lr = chosen.lr
    elif isinstance(reference, int | float):
        lr = reference * _one_minus_momentum(optimizer) / _one_minus_momentum(former_arguments)
        # Twelve digits are kept: the last ones of the quotient are rounding.
        config.workload.reference.lr = float(f"{lr:.12g}")
    # If the former node sets the learning rate, the new one must: the module then passes none.
    if "lr" in former_arguments:
        optimizer["lr"] = former_arguments["lr"]
    place_of_arguments = place
    # LightningCLI writes an optimizer with class_path and init_args.
    if "class_path" in former:
        place_of_arguments = f"{place}.init_args"
        target = optimizer.pop("_target_")
        optimizer.pop("_partial_", None)
        optimizer = {"class_path": target, "init_args": optimizer}
    # A node that is a reference would lose its other values if one below it were set.
    _copy_referenced_nodes(config, place)
    OmegaConf.update(config, place, optimizer, merge=False)
    _put_tunables(config, added=chosen.tunable, replaced=[place], place=place_of_arguments)
    return [place]


def _kept_arguments(former: Mapping[str, object], given_keys: Sequence[str]) -> Node:
    """Give the former optimizer's arguments that a chosen one of its class keeps.

    They are those that make no algorithm, such as a weight decay, as far as the command line does
    not give them.

    Args:
        former: its arguments.
        given_keys: the keys below ``algorithm`` that the command line sets.
    """
    kept: Node = {}
    for name, value in former.items():
        if name not in OF_ALGORITHM and f"optimizer.{name}" not in given_keys:
            kept[name] = value
    return kept


def _copy_referenced_nodes(config: DictConfig, place: str) -> None:
    """Replace references by copies of their values, in the nodes above the key ``place``.

    Setting a value below a reference would replace the reference by a node with that value alone.
    """
    node = config
    for part in place.split(".")[:-1]:
        if OmegaConf.is_interpolation(node, part):
            node[part] = _plain(node[part])
        node = node[part]


def _put_tunables(config: DictConfig, added: object, replaced: Sequence[str], place: str) -> None:
    """Add a choice's tunables to the workload, and drop those of the parts that it replaced.

    Args:
        config: whose workload is changed.
        added: the choice's tunables by name. A key of theirs is below ``place``, unless it is a
            half-life. None: there are none.
        replaced: the keys of the parts that were replaced.
        place: the key that those of the added tunables are below.
    """
    below = tuple(f"{key}." for key in replaced)
    tunables = dict[str, object]()
    for name, tunable in (config.workload.get("tunable") or {}).items():
        if not str(tunable.get("key")).startswith(below):
            tunables[name] = tunable
    for name, tunable in ({} if added is None else _plain(added)).items():
        # A half-life is an option of the section ``scaling``, outside of the workload.
        if tunable["key"] not in HALF_LIVES:
            tunable["key"] = f"{place}.{tunable['key']}"
        tunables[name] = tunable
    config.workload.tunable = tunables


def _optimizer_place(workload: DictConfig) -> str:
    """Give the key of the one node that builds an optimizer. ConfigError for none or several."""
    module = OmegaConf.select(workload, "module")
    keys = list(_optimizers(module, MODULE_KEY))
    if len(keys) == 1:
        return keys[0]
    target = target_of(module) if module else "none"
    module_text = f"the module of the workload {workload.get('name')}, {target}"
    if keys:
        raise ConfigError(
            f"algorithm=... takes the place of one optimizer, but {module_text}, has "
            f"{', '.join(keys)}: leave out algorithm=..., and change them one by one"
        )
    raise ConfigError(
        f"algorithm=... takes the place of an optimizer that the config names, but {module_text}, "
        "is given none, so that it builds its own: let it take one, optimizer: {_target_: "
        "torch.optim.SGD, _partial_: true}, or leave out algorithm=..."
    )


def _optimizers(node: object, key: str) -> Iterator[str]:
    """Yield the dotted keys of the nodes below ``node`` that build optimizers.

    They are nodes of torch.optim, and any that is called ``optimizer``. ``key`` is the key of
    ``node`` itself.
    """
    if not isinstance(node, DictConfig):
        return
    for name in map(str, node):
        below = None if OmegaConf.is_missing(node, name) else node[name]
        if not isinstance(below, DictConfig):
            continue
        target = target_of(below)
        is_schedule = target.startswith("torch.optim.lr_scheduler.")
        is_torch_optimizer = target.startswith("torch.optim.") and not is_schedule
        if is_torch_optimizer or (target and name == "optimizer"):
            yield f"{key}.{name}"
        else:
            yield from _optimizers(below, f"{key}.{name}")


def _arguments(node: object) -> Node:
    """Give the arguments that a node has for its target, with references as they are written.

    LightningCLI writes them apart, below ``init_args``. Hydra writes them beside ``_target_``: the
    answer then has all keys of the node, ``_target_`` included.
    """
    values = _plain(node)
    if "class_path" in values:
        return dict(values.get("init_args") or {})
    return values


def _plain(node: object) -> Node:
    """Copy a node as plain values, with references as they are written."""
    values = OmegaConf.to_container(node)
    if not isinstance(values, Mapping):
        return {}
    return {str(key): value for key, value in values.items()}


def _one_minus_momentum(arguments: Mapping[str, object]) -> float:
    """Give 1 - momentum of an optimizer's arguments; 1 where it has none."""
    momentum = arguments.get("momentum")
    if isinstance(momentum, int | float) and 0.0 <= momentum < 1.0:
        return 1.0 - momentum
    return 1.0
