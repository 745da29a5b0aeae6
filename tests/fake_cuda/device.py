"""A torch whose CUDA device is not there: torch.cuda's functions, generators, copies and files are replaced.

Only in a process of its own: nothing is put back.
"""

import zipfile
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.cuda.amp.common
import torch.optim.optimizer as optimizers
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_map
from watch import LOG

GIB = 2**30
# Those of an H100.
PROPERTIES = SimpleNamespace(
    name="fake GPU", major=9, minor=0, total_memory=80 * GIB, multi_processor_count=132
)


class Event:
    """A CUDA event; each one is a millisecond after the one before."""

    recorded = 0

    def __init__(self, enable_timing: bool = False) -> None:
        assert enable_timing

    def record(self, stream: Any = None) -> None:
        Event.recorded += 1
        self.milliseconds = Event.recorded

    def elapsed_time(self, end: "Event") -> float:
        return float(end.milliseconds - self.milliseconds)

    def synchronize(self) -> None:
        LOG.note("synchronize", "Event.synchronize")


class Generator(torch.Generator):
    """torch.Generator, whose generators of device cuda are the CPU's and say otherwise."""

    def __new__(cls, device: Any = "cpu") -> "Generator":
        return torch._C.Generator.__new__(
            CudaGenerator if torch.device(device).type == "cuda" else Generator
        )


class CudaGenerator(Generator):
    @property
    def device(self) -> torch.device:
        return torch.device("cuda", 0)


def replace_torch_cuda() -> None:
    """Replace what would ask for a device; bstune and Lightning are imported before, with torch as it is."""
    state = torch.zeros(16, dtype=torch.uint8)
    functions = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "_lazy_init": lambda: None,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "set_device": lambda device: None,
        "is_bf16_supported": lambda including_emulation=True: True,
        "get_device_name": lambda device=None: PROPERTIES.name,
        "get_device_properties": lambda device=None: PROPERTIES,
        "get_device_capability": lambda device=None: (PROPERTIES.major, PROPERTIES.minor),
        "empty_cache": lambda: LOG.note("empty_cache", "torch.cuda"),
        "synchronize": lambda device=None: LOG.note("synchronize", "torch.cuda"),
        "mem_get_info": lambda device=None: (79 * GIB, 80 * GIB),
        "memory_reserved": lambda device=None: GIB,
        "max_memory_reserved": lambda device=None: GIB,
        "memory_stats": lambda device=None: {},
        "reset_peak_memory_stats": lambda device=None: None,
        "reset_accumulated_memory_stats": lambda device=None: None,
        "current_stream": lambda device=None: None,
        "set_per_process_memory_fraction": lambda share, device=None: None,
        "manual_seed": lambda seed: None,
        "manual_seed_all": lambda seed: None,
        "get_rng_state": lambda device="cuda": state,
        "set_rng_state": lambda new, device="cuda": None,
        "Event": Event,
    }
    for name, function in functions.items():
        setattr(torch.cuda, name, function)
    torch.cuda.amp.common.amp_definitely_not_available = lambda: False
    torch._C._cuda_clearCublasWorkspaces = lambda: None
    torch.Generator = Generator  # type: ignore[misc]
    torch.autograd.set_multithreading_enabled(False)
    # Of a GPU's plain parameters the implementation by foreach is chosen, and so it is of fake
    # ones.
    optimizers._foreach_supported_types = [torch.Tensor, torch.nn.Parameter, FakeTensor]
    optimizers.register_optimizer_step_post_hook(lambda *arguments: LOG.end_step())
    _replace_copies()
    _replace_files()
    _replace_generators_state()
    _follow_phases()


def _replace_copies() -> None:
    """Let modules move, and tensors be copied: torch swaps what a tensor holds, which fake ones do not allow."""

    def apply(self: torch.nn.Module, function: Any, recurse: bool = True) -> torch.nn.Module:
        for child in self.children() if recurse else ():
            child._apply(function)
        with torch.no_grad():
            for name, parameter in self._parameters.items():
                if parameter is not None:
                    moved = torch.nn.Parameter(function(parameter), parameter.requires_grad)
                    self._parameters[name] = moved
        for name, buffer in self._buffers.items():
            if buffer is not None:
                self._buffers[name] = function(buffer)
        return self

    plain = torch.Tensor.__deepcopy__

    def deepcopy(self: torch.Tensor, memo: dict[int, Any]) -> torch.Tensor:
        if not isinstance(self, FakeTensor):
            return plain(self, memo)
        copied = self.detach().clone()
        if isinstance(self, torch.nn.Parameter):
            copied = torch.nn.Parameter(copied, self.requires_grad)
        memo[id(self)] = copied
        return copied

    def tolist(self: torch.Tensor) -> Any:
        # It is one copy, where fake tensors would ask for each number.
        if self.is_cuda:
            LOG.note("read", "tolist")
        return np.full(tuple(self.shape), 0.5).tolist()

    FakeTensor.tolist = tolist  # type: ignore[method-assign]
    torch.nn.Module._apply = apply  # type: ignore[method-assign]
    torch.Tensor.__deepcopy__ = FakeTensor.__deepcopy__ = deepcopy  # type: ignore[method-assign]


def _replace_files() -> None:
    """Keep in memory what is saved: fake tensors have no bytes."""
    saved: list[Any] = []

    def save(thing: Any, file: Any) -> None:
        with zipfile.ZipFile(file, "w") as archive:
            archive.writestr("number", str(len(saved)))
        saved.append(thing)

    def load(file: Any, map_location: Any = None, weights_only: bool | None = None) -> Any:
        with zipfile.ZipFile(file) as archive:
            thing = saved[int(archive.read("number"))]
        move = map_location is not None
        return tree_map(
            lambda one: one.to(map_location) if move and isinstance(one, torch.Tensor) else one,
            thing,
        )

    torch.save = save
    torch.load = load


def _replace_generators_state() -> None:
    """Leave the host's generators alone: numpy wants real tensors."""
    from bstune.trial import noise_scale
    from bstune.trial.batches import batch_sampler
    from bstune.trial.devices import randomness
    from bstune.trial.parts import generators

    for module in (randomness, batch_sampler, generators, noise_scale):
        module.random_state = lambda: {"none": 0}
        module.set_random_state = lambda state: None


def _follow_phases() -> None:
    """Let ``LOG`` follow the phases of every clock."""
    from bstune.core.clock import Phase, TrialClock

    enter = TrialClock.enter

    def followed(self: TrialClock, phase: Phase) -> float:
        elapsed = enter(self, phase)
        LOG.phase = phase.value
        return elapsed

    TrialClock.enter = followed  # type: ignore[method-assign]
