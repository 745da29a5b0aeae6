"""Fingerprints of a training's plain attributes, which no checkpoint of Lightning's holds.

They are attributes of the module and its layers, of call-backs and of optimizers: schedules,
counters, generators, tensors, and objects and containers of these. Weights and buffers, which a
checkpoint holds, are left out. A fingerprint takes limited work: it reads a sample of a large
tensor and the first parts of a deep object, and leaves out code, Trainers and modules of Python.
"""

import functools
import random
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from itertools import islice
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from bstune.trial.lightning.installed import Callback, LightningModule, Trainer
from bstune.trial.lightning.packages import is_lightning, is_overridden

# About so many elements of a large tensor or array are read, evenly over all of them.
MAX_SAMPLE = 2**16
# The most parts of an object that are read.
MAX_PARTS = 5_000
# How deep objects within objects are read.
MAX_OBJECT_DEPTH = 6
PLAIN_VALUES = (
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    type(None),
    np.generic,
    torch.dtype,
    torch.device,
)
CODE = (FunctionType, MethodType, BuiltinFunctionType, ModuleType, type)
CONTAINERS = (list, tuple, set, frozenset, deque)
GENERATORS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)
# Attributes of an optimizer that Lightning's checkpoint holds.
HELD_OF_OPTIMIZERS = ("state", "param_groups", "defaults")


@dataclass(frozen=True)
class Attribute:
    """A value as it was at one moment of a training.

    Args:
        kind: the name of its class.
        rank: the lower, the likelier a training depends on a value of this kind.
        fingerprint: of all that is read of the value.
        has_state: whether it is a call-back's that gives the checkpoint a state by ``state_dict``.
    """

    kind: str
    rank: int
    fingerprint: str
    has_state: bool = False


def attributes_of(trainer: Trainer, module: LightningModule) -> dict[str, Attribute]:
    """Fingerprint a training's plain attributes, by their paths such as ``encoder.noise``."""
    with_state = set[str]()
    for callback in _callbacks_of(trainer):
        if is_overridden("state_dict", callback):
            with_state |= {path for path, _ in _values_of_callback(callback)}
    attributes = dict[str, Attribute]()
    for path, value in plain_values(trainer, module):
        attributes[path] = Attribute(
            kind=type(value).__name__,
            rank=_rank(value),
            fingerprint=fingerprint(value),
            has_state=path in with_state,
        )
    return attributes


def plain_values(trainer: Trainer, module: LightningModule) -> Iterator[tuple[str, object]]:
    """Yield the path and the value of each plain attribute of module, call-backs and optimizers.

    A plain attribute is one that no checkpoint of Lightning's holds.
    """
    for name, layer in module.named_modules():
        # The states of metrics begin anew with each epoch.
        if not _is_metric(layer):
            yield from _under(name, _values_of_module(layer))
    for callback in _callbacks_of(trainer):
        yield from _values_of_callback(callback)
    for optimizer in trainer.optimizers:
        plain = dict[str, object]()
        # Private attributes are torch's own bookkeeping.
        for name, value in vars(optimizer).items():
            if name not in HELD_OF_OPTIMIZERS and not name.startswith("_"):
                plain[name] = value
        yield from _under(type(optimizer).__name__, plain.items())


def _callbacks_of(trainer: Trainer) -> list[Callback]:
    """List a trainer's call-backs but for bstune's own.

    These keep clocks and records, on which no training depends.
    """
    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
    return [one for one in callbacks if not type(one).__module__.startswith("bstune.")]


def _values_of_callback(callback: Callback) -> Iterator[tuple[str, object]]:
    """Yield the attributes of a call-back, by their paths."""
    yield from _under(type(callback).__name__, vars(callback).items())


def _under(path: str, values: Iterable[tuple[str, object]]) -> Iterator[tuple[str, object]]:
    """Yield values with their names put below a path, but for functions and classes."""
    for name, value in values:
        if isinstance(value, CODE):
            continue
        # The path of the outermost module is empty.
        full_name = f"{path}.{name}" if path else name
        yield full_name, value


def _is_metric(layer: nn.Module) -> bool:
    """Whether a layer is a metric of torchmetrics."""
    return any(base.__module__.startswith("torchmetrics.") for base in type(layer).__mro__)


def _values_of_module(layer: nn.Module) -> Iterator[tuple[str, object]]:
    """Yield the attributes of a layer, by name, but for layers, weights and saved buffers in it."""
    of_every_module = _names_of_every_module()
    for name, value in vars(layer).items():
        if name not in of_every_module:
            yield name, value
    for name in sorted(layer._non_persistent_buffers_set):
        yield name, layer._buffers.get(name)


@functools.cache
def _names_of_every_module() -> frozenset[str]:
    """Give the names of the attributes that each LightningModule has from Lightning."""
    return frozenset(vars(LightningModule()))


def _rank(value: object) -> int:
    """Give an attribute's rank, from 0 to 3: the lower, the likelier a training depends on it."""
    if isinstance(value, LRScheduler):
        return 0
    if isinstance(value, GENERATORS):
        return 1
    if isinstance(value, int | float):
        return 2
    return 3


def fingerprint(value: object) -> str:
    """Give a short text that two values share if all that is read of them is the same.

    An object that cannot be read has a fingerprint too, up to the part that raises an error.
    """
    digest = blake2b(digest_size=16)
    try:
        for part in islice(_parts(value, depth=MAX_OBJECT_DEPTH, seen={}), MAX_PARTS):
            digest.update(part)
    except Exception:  # noqa: BLE001 (an object of any library may refuse to be read)
        digest.update(b"unreadable")
    return digest.hexdigest()


def _parts(value: object, depth: int, seen: dict[int, object]) -> Iterator[bytes]:
    """Yield the bytes of a value, part by part.

    Args:
        value: of any kind.
        depth: how deep objects in it are read.
        seen: the objects read before, by their ids, which are not read again. It keeps them alive,
            as others could get their ids.
    """
    yield f"{type(value).__name__};".encode()
    if isinstance(value, PLAIN_VALUES):
        yield f"{value!r};".encode()
        return
    if depth == 0 or id(value) in seen or isinstance(value, CODE) or _is_lightning(value):
        return
    seen[id(value)] = value
    if isinstance(value, Tensor):
        yield _sample_of_tensor(value)
    elif isinstance(value, np.ndarray):
        yield _sample_of_array(value)
    else:
        for name, part in _inside(value):
            yield f"{name}:".encode()
            yield from _parts(part, depth - 1, seen)


def _is_lightning(value: object) -> bool:
    """Whether it is a Trainer, a module or a data module of Lightning's."""
    names = ("Trainer", "LightningModule", "LightningDataModule")
    return any(is_lightning(value, name) for name in names)


def _sample_of_tensor(tensor: Tensor) -> bytes:
    """Give the bytes of a tensor's shape, and of a sample of its elements, evenly over it."""
    flat = tensor.detach().reshape(-1)
    stride = max(1, flat.numel() // MAX_SAMPLE)
    sample = flat[::stride].to("cpu").contiguous()
    return f"{tuple(tensor.shape)};".encode() + sample.view(torch.uint8).numpy().tobytes()


def _sample_of_array(array: NDArray[np.generic]) -> bytes:
    """Give the bytes of an array's shape, and of a sample of its elements, evenly over it."""
    shape = f"{array.shape};".encode()
    # The bytes of such elements are addresses, which differ from run to run.
    if array.dtype.hasobject:
        return shape
    flat = array.reshape(-1)
    return shape + flat[:: max(1, flat.size // MAX_SAMPLE)].tobytes()


def _inside(value: Any) -> Iterable[tuple[str, object]]:
    """Give the parts of an object, each with a name: its state, contents or attributes."""
    if isinstance(value, torch.Generator):
        return [("state", value.get_state())]
    if isinstance(value, np.random.Generator):
        return [("state", value.bit_generator.state)]
    if isinstance(value, np.random.RandomState):
        return [("state", value.get_state())]
    if isinstance(value, random.Random):
        return [("state", value.getstate())]
    if isinstance(value, Optimizer):
        return [("groups", value.param_groups)]
    if isinstance(value, functools.partial):
        return [("arguments", value.args), ("keywords", value.keywords)]
    if isinstance(value, nn.Module):
        weights = [*value.named_parameters(), *value.named_buffers()]
        return [*weights, *_values_of_module(value)]
    if isinstance(value, Mapping):
        return _inside_mapping(value)
    if isinstance(value, CONTAINERS):
        return _inside_container(value)
    return list(getattr(value, "__dict__", {}).items())


def _inside_container(value: Collection[object]) -> Iterator[tuple[str, object]]:
    """Yield a container's length and its parts, one after another, as there may be millions."""
    yield "length", len(value)
    for index, part in enumerate(value):
        yield str(index), part


def _inside_mapping(value: Mapping[object, object]) -> Iterator[tuple[str, object]]:
    """Yield a mapping's values, each named by its key."""
    for index, (key, part) in enumerate(value.items()):
        # The texts of other keys, such as parameters, hold addresses, which differ each time.
        name = repr(key) if isinstance(key, PLAIN_VALUES) else str(index)
        yield name, part
