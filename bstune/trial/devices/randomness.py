"""Generators of random numbers: new ones from a seed, and the states of the global ones."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch

# The states of global generators, as plain data: by library, such as "torch".
GeneratorStates = dict[str, Any]


class HostStates(NamedTuple):
    """The states of the global generators on the host, as Python, numpy and torch give them."""

    of_python: tuple[Any, ...]
    of_numpy: Any
    of_torch: torch.Tensor


def seeded_generators(
    seed: int, device: torch.device | str, count: int
) -> tuple[torch.Generator, ...]:
    """Make ``count`` independent generators on ``device``, all determined by ``seed``."""
    states = np.random.SeedSequence(seed).generate_state(count, np.uint64)
    return tuple(torch.Generator(device).manual_seed(int(state)) for state in states)


def host_states() -> HostStates:
    """Read the states of the global generators on the host."""
    return HostStates(random.getstate(), np.random.get_state(), torch.get_rng_state())


def set_host_states(states: HostStates) -> None:
    """Set the global generators on the host to states that :func:`host_states` gave."""
    random.setstate(states.of_python)
    np.random.set_state(states.of_numpy)
    torch.set_rng_state(states.of_torch)


class OwnRandomNumbers:
    """A sequence of random numbers of its own from Python's, numpy's and torch's generators.

    Within :meth:`used` the global generators on the host continue this sequence, which depends on
    the seed alone. Outside of it they go on as if nothing had been drawn there.

    Args:
        seed: of all three generators.
    """

    def __init__(self, seed: int) -> None:
        shared = host_states()
        random.seed(seed)
        np.random.seed(seed)
        # torch.manual_seed would seed CUDA's generators as well.
        torch.default_generator.manual_seed(seed)
        self._states = host_states()
        set_host_states(shared)

    @contextmanager
    def used(self) -> Iterator[None]:
        """Within the context, the global generators draw from this sequence."""
        shared = host_states()
        set_host_states(self._states)
        try:
            yield
        finally:
            self._states = host_states()
            set_host_states(shared)


def random_state() -> GeneratorStates:
    """Read the states of the global generators as plain data: Python, numpy, torch and CUDA.

    CUDA's state, of the current device, is there only where CUDA is in use.
    """
    name, keys, position, has_gauss, gauss = np.random.get_state()
    # They become a tensor, as torch does not load arrays as plain data.
    key_tensor = torch.from_numpy(np.asarray(keys, np.int64))
    state: GeneratorStates = {
        "python": random.getstate(),
        "numpy": (name, key_tensor, int(position), int(has_gauss), float(gauss)),
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def set_random_state(state: GeneratorStates) -> None:
    """Set the global generators to states that :func:`random_state` gave."""
    random.setstate(state["python"])
    name, keys, *rest = state["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), *rest))
    torch.set_rng_state(state["torch"])
    if "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"])
