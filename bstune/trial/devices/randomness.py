"""Generators of random numbers: new ones from a seed, and those that everyone shares."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch

# By library, as plain data.
GeneratorStates = dict[str, Any]


class HostStates(NamedTuple):
    """The states of the generators of Python, numpy and torch on the host, as these have them."""

    of_python: tuple[Any, ...]
    of_numpy: Any
    of_torch: torch.Tensor


def seeded_generators(
    seed: int, device: torch.device | str, count: int
) -> tuple[torch.Generator, ...]:
    """Make independent generators on ``device``, all a function of ``seed``."""
    states = np.random.SeedSequence(seed).generate_state(count, np.uint64)
    return tuple(torch.Generator(device).manual_seed(int(state)) for state in states)


def host_states() -> HostStates:
    """Read the states of the generators on the host."""
    return HostStates(random.getstate(), np.random.get_state(), torch.get_rng_state())


def set_host_states(states: HostStates) -> None:
    """Set the generators to what :func:`host_states` returned."""
    random.setstate(states.of_python)
    np.random.set_state(states.of_numpy)
    torch.set_rng_state(states.of_torch)


class OwnRandomNumbers:
    """Random numbers of Python, numpy and torch on the host that nobody else draws from.

    What is drawn within :meth:`used` depends on the seed and on what was drawn there before, alone;
    outside of it the generators go on as if nothing had been drawn.

    Args:
        seed: of all three.
    """

    def __init__(self, seed: int) -> None:
        shared = host_states()
        random.seed(seed)
        np.random.seed(seed)
        # The host's alone: torch.manual_seed would seed CUDA's as well.
        torch.default_generator.manual_seed(seed)
        self._states = host_states()
        set_host_states(shared)

    @contextmanager
    def used(self) -> Iterator[None]:
        """Let the shared generators be these meanwhile."""
        shared = host_states()
        set_host_states(self._states)
        try:
            yield
        finally:
            self._states = host_states()
            set_host_states(shared)


def random_state() -> GeneratorStates:
    """Read the states of the generators of Python, numpy, torch and, where it is in use, CUDA."""
    name, keys, position, has_gauss, gauss = np.random.get_state()
    # torch loads tensors as plain data, and no arrays.
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
    """Set the generators to what :func:`random_state` returned."""
    random.setstate(state["python"])
    name, keys, *rest = state["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), *rest))
    torch.set_rng_state(state["torch"])
    if "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"])
