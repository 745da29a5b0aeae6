"""What a program asks of fake CUDA tensors: operators, values read on the host, copies, synchronisations.

Each is noted with the phase of bstune's clock, and with the function of bstune, Lightning or torch.optim that asked.
"""

import collections
import difflib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

HERE = str(Path(__file__).parent)
READS = {"_local_scalar_dense", "equal", "is_nonzero"}
# Their size is unknown until they ran.
SHAPES = {
    "nonzero",
    "masked_select",
    "_unique2",
    "unique_dim",
    "repeat_interleave",
}
# Nothing is computed: views, empty tensors, questions.
FREE = set(
    """
    view _unsafe_view reshape _reshape_alias expand slice select t transpose permute detach alias unsqueeze squeeze
    as_strided unfold split split_with_sizes unbind lift_fresh diagonal view_as_real narrow chunk empty empty_like
    empty_strided new_empty new_empty_strided set_ _has_compatible_shallow_copy_type is_same_size resize_
    record_stream sym_size is_pinned result_type device dim size stride requires_grad layout is_contiguous
    prim_layout storage_offset numel is_non_overlapping_and_dense sym_numel sym_stride sym_storage_offset
    """.split()  # noqa: SIM905 (a column of quotes is harder to read)
)
# With images first, whose memory format the others follow.
FORMATTED = {
    "convolution",
    "cudnn_convolution",
    "convolution_backward",
    "cudnn_batch_norm",
    "native_batch_norm",
}
# Callers that are named beside bstune's: part of their path, and the name that stands for it.
CALLERS = {
    "/lightning/": "lightning/",
    "/torch/optim/": "torch/optim/",
    "/torch/amp/": "torch/amp/",
}


@dataclass(frozen=True)
class Operator:
    """One call of an aten operator on the device."""

    name: str
    # Its arguments, tensors as their shapes: in a captured graph they stay what they were.
    plain: str
    place: str


@dataclass
class Log:
    """What was seen so far."""

    phase: str = "startup"
    # (phase, kind, what, place): times.
    events: collections.Counter = field(default_factory=collections.Counter)
    # (phase, name): times.
    operators: collections.Counter = field(default_factory=collections.Counter)
    # Of training, up to each optimizer's step.
    steps: list[list[Operator]] = field(default_factory=lambda: [[]])

    def note(self, kind: str, what: str) -> None:
        self.events[self.phase, kind, what, place()] += 1

    def operator(self, name: str, args: Any, kwargs: Any) -> None:
        self.operators[self.phase, name] += 1
        if self.phase == "training":
            plain = []
            for argument in tree_leaves((args, kwargs)):
                plain.append(tuple(argument.shape) if isinstance(argument, Tensor) else argument)
            self.steps[-1].append(Operator(name, repr(plain), place()))

    def end_step(self) -> None:
        if self.phase == "training":
            self.steps.append([])


LOG = Log()


def place() -> str:
    """The innermost function of bstune that is running, and those of other packages that it called."""
    import bstune

    top = str(Path(bstune.__file__).parent)
    names = []
    frame = sys._getframe(1)
    while frame is not None:
        path = frame.f_code.co_filename
        name = frame.f_code.co_qualname
        if path.startswith(f"{top}/"):
            names.append(f"bstune{path.removeprefix(top)}:{name}")
            break
        for part, short in CALLERS.items():
            if part in path and not any(one.startswith(short) for one in names):
                names.append(f"{short}{path.rpartition(part)[2]}:{name}")
        frame = frame.f_back
    return " < ".join(names) or "?"


class FakeCuda(FakeTensorMode):
    """Fake tensors that never ask for a device, whatever torch.cuda says."""

    avoid_device_init = True


class Watch(TorchDispatchMode):
    """Notes in ``LOG`` what runs on the device, and answers what is read there with made-up values."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name.split("::")[-1]
        tensors = [one for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor)]
        given = {one.device.type for one in tensors}
        if "cuda" in given:
            self._note_waits(name, args)
            if name in FORMATTED:
                check_formats(name, args)
        if name in READS and any(isinstance(one, FakeTensor) for one in tensors):
            return {"equal": False, "is_nonzero": True}.get(name, self._made_up(tensors[0]))
        # They do not run on fake tensors.
        if name.startswith("_fused_") and name.endswith(("sgd_", "adam_", "adamw_")):
            check_fused(name, args)
            LOG.operator(name, args, kwargs)
            return None
        out = func(*args, **kwargs)
        made = [one for one in tree_leaves(out) if isinstance(one, Tensor)]
        both = given | {one.device.type for one in made}
        if name in ("_to_copy", "copy_", "_copy_from") and both >= {"cuda", "cpu"}:
            target = made[0] if name == "_to_copy" else args[0]
            waits = (
                ""
                if kwargs.get("non_blocking") or (name == "copy_" and len(args) > 2 and args[2])
                else "waiting "
            )
            kind = "copy to host" if target.device.type == "cpu" else "copy to device"
            LOG.note(f"{waits}{kind}", f"{name} {tuple(target.shape)}")
        elif given >= {"cuda", "cpu"}:
            LOG.note("scalar of the host", name)
        if "cuda" in both and name not in FREE:
            LOG.operator(name, args, kwargs)
        return out

    def _note_waits(self, name: str, args: Any) -> None:
        masks = tree_leaves(args[1]) if name in ("index", "index_put_", "index_put") else ()
        if name in READS:
            LOG.note("read", name)
        elif name in SHAPES or any(
            isinstance(m, Tensor) and m.dtype in (torch.bool, torch.uint8) for m in masks
        ):
            LOG.note("shape read", name)

    def _made_up(self, tensor: Tensor) -> bool | int | float:
        if tensor.dtype == torch.bool:
            return True
        # Nothing has overflowed.
        if place().startswith("torch/amp/"):
            return 0.0
        return 0.5 if tensor.dtype.is_floating_point else 1


def check_fused(name: str, args: Any) -> None:
    """Note lists of a fused optimizer that differ in type, device or strides for one parameter: its kernel refuses."""
    lists = []
    for one in args:
        if isinstance(one, list | tuple) and one and isinstance(one[0], Tensor):
            lists.append(one)
    of_parameters = [one for one in lists if len(one) == len(lists[0])]
    for first, *others in zip(*of_parameters, strict=True):
        for other in others:
            if other.dim() and _layout(other) != _layout(first):
                LOG.note("fused mismatch", f"{name} {_layout(first)} {_layout(other)}")


def check_formats(name: str, args: Any) -> None:
    """Note images of several memory formats for one operator: cuDNN then copies some of them, each step."""
    images = [one for one in args if isinstance(one, Tensor) and one.dim() == 4]
    formats = set()
    for image in images:
        is_last = image.is_contiguous(memory_format=torch.channels_last)
        # Of an image with one channel or one pixel both are true, and it is of either.
        if is_last != image.is_contiguous():
            formats.add(is_last)
    if len(formats) > 1:
        layouts = [(tuple(image.shape), image.stride()) for image in images]
        LOG.note("several memory formats", f"{name} {layouts}")


def _layout(tensor: Tensor) -> tuple[Any, ...]:
    strides = []
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        # The stride of a dimension of one element means nothing.
        if size != 1:
            strides.append(stride)
    return tensor.dtype, tensor.device, *strides


@contextmanager
def watching() -> Iterator[Log]:
    """Make tensors fake, and note what is asked of them; ``device.replace_torch_cuda`` has to be called before."""
    LOG.__init__()  # type: ignore[misc]
    with FakeCuda(), Watch():
        yield LOG


def changes(steps: list[list[Operator]], first: int) -> dict[str, int]:
    """The differences between consecutive steps from number ``first`` on: a captured graph would get them wrong."""
    seen: collections.Counter = collections.Counter()
    whole = steps[first:]
    for before, after in pairwise(whole):
        names = [one.name for one in before], [one.name for one in after]
        for tag, i, i_end, j, j_end in difflib.SequenceMatcher(
            None, *names, autojunk=False
        ).get_opcodes():
            if tag != "equal":
                for one in (*before[i:i_end], *after[j:j_end]):
                    seen[f"in some steps: {one.name} at {one.place}"] += 1
                continue
            for old, new in zip(before[i:i_end], after[j:j_end], strict=True):
                if old.plain != new.plain:
                    seen[f"other arguments: {new.name} at {new.place}"] += 1
    return dict(seen.most_common())
