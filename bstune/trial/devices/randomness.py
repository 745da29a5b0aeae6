"""Generators of random numbers: new ones from a seed, and the state of those that everyone shares."""

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch


def seeded_generators(
    seed: int, device: torch.device | str, count: int
) -> tuple[torch.Generator, ...]:
    """Return independent generators on ``device``, all a function of ``seed``."""
    states = np.random.SeedSequence(seed).generate_state(count, np.uint64)
    return tuple(torch.Generator(device).manual_seed(int(state)) for state in states)


def random_state() -> dict[str, Any]:
    """Return the state of the generators of Python, numpy, torch and, where it is in use, CUDA, as plain data."""
    name, keys, position, has_gauss, gauss = np.random.get_state()
    state = {
        "python": random.getstate(),
        "numpy": (
            name,
            torch.from_numpy(np.asarray(keys, np.int64)),
            int(position),
            int(has_gauss),
            float(gauss),
        ),
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def set_random_state(state: Mapping[str, Any]) -> None:
    """Set the generators to what :func:`random_state` returned."""
    random.setstate(state["python"])
    name, keys, *rest = state["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), *rest))
    torch.set_rng_state(state["torch"])
    if "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"])
