"""How an epoch's examples are drawn: by a permutation, or as one of torch's samplers draws them."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

# Draws the int64 indices of one epoch, (n,), on the generator's device.
Epoch = Callable[[torch.Generator], Tensor]


def permutation(n: int) -> Epoch:
    """Make what draws the numbers 0 to n - 1, each once, in random order."""
    return lambda generator: torch.randperm(n, generator=generator, device=generator.device)


def epoch_of(loader: DataLoader[Any]) -> tuple[int, Epoch] | None:
    """Tell how many indices a loader's sampler draws an epoch, and what draws them.

    None if it is not torch's.

    One that goes through the data in their order is shuffled: see :func:`rebatch`.
    """
    # Of a loader that was given its batch_sampler, loader.sampler goes through the whole data set,
    # and is not used.
    if type(loader.batch_sampler) is not BatchSampler:
        return None
    sampler = loader.batch_sampler.sampler
    if type(sampler) is SequentialSampler:
        n = len(sampler.data_source)
        return n, permutation(n)
    if type(sampler) is SubsetRandomSampler:
        chosen = torch.as_tensor(sampler.indices)
        places = permutation(len(chosen))
        return len(chosen), lambda generator: chosen[places(generator)]
    if type(sampler) is WeightedRandomSampler:
        weights = sampler.weights
        replacement = sampler.replacement
        drawn = sampler.num_samples
        return drawn, lambda generator: torch.multinomial(
            weights, drawn, replacement, generator=generator
        )
    if type(sampler) is RandomSampler:
        n = len(sampler.data_source)
        return sampler.num_samples, _random(n, sampler.num_samples, sampler.replacement)
    return None


def _random(n: int, count: int, replacement: bool) -> Epoch:
    """Make what draws ``count`` of n numbers as RandomSampler does.

    That is with replacement, or by whole permutations.
    """
    if replacement:
        return lambda generator: torch.randint(n, (count,), generator=generator)
    order = permutation(n)
    permutations = math.ceil(count / max(n, 1))

    def epoch(generator: torch.Generator) -> Tensor:
        orders = [order(generator) for _ in range(permutations)]
        return torch.cat(orders)[:count]

    return epoch


def epoch_length(loader: DataLoader[Any]) -> int:
    """Count the examples of an epoch of a loader: those that its sampler draws.

    Its data set has a length.
    """
    drawn = epoch_of(loader)
    if drawn is None:
        return len(loader.dataset)  # type: ignore[arg-type]
    return drawn[0]
