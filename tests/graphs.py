"""A stand-in for CUDA graphs on a CPU: what a step asks of torch, recorded and repeated on the same memory."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from bstune.workloads.datasets import ImageDataset, Images


class Recording(TorchDispatchMode):
    """Notes each operator below autograd with what it was given, as a capture notes kernels.

    As in a capture no value may be read; unlike in one, the operators run.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, tuple[Any, ...], dict[str, Any], dict[int, Tensor]]] = []

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        if operator is torch.ops.aten._local_scalar_dense.default:
            raise RuntimeError("CUDA error: operation not permitted when stream is capturing")
        result = operator(*args, **(kwargs or {}))
        made = _made(result, (args, kwargs))
        # All other operators are views.
        if made or operator._schema.is_mutable:
            self.calls.append((operator, args, kwargs or {}, made))
        return result

    @torch.no_grad()
    def replay(self) -> None:
        """Run the operators again; what they make goes to where it went at first."""
        # Arguments are the same tensors as then: a replay reads their memory.
        for operator, args, kwargs, made in self.calls:
            again = _tensors(operator(*args, **kwargs))
            for place, tensor in made.items():
                tensor.copy_(again[place])


def record(step: Callable[[], None], generators: Sequence[torch.Generator]) -> Callable[[], None]:
    """Do as :func:`bstune.trial.fast.graph.record` does, on a CPU."""
    with Recording() as recording:
        step()
    return recording.replay


def _made(result: Any, inputs: Any) -> dict[int, Tensor]:
    """The tensors that an operator has made, by their place among all that it returned."""
    given = {tensor.untyped_storage().data_ptr() for tensor in _tensors(inputs)}
    places = enumerate(_tensors(result))
    return {
        place: tensor
        for place, tensor in places
        if tensor.untyped_storage().data_ptr() not in given
    }


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def random_images(shape: tuple[int, int, int], root: str = "") -> ImageDataset:
    """A data set of random images, in place of one that would have to be read."""
    random = np.random.default_rng(0)
    train, test = (
        Images(random.integers(0, 256, (n, *shape), np.uint8), random.integers(0, 10, n, np.int64))
        for n in (256, 64)
    )
    return ImageDataset("random images", 255, train, test)
