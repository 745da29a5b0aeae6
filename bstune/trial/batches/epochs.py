"""Draws an epoch's examples: by a permutation, or as one of torch's samplers draws them."""

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
    """Make the function that draws the numbers 0 to n - 1, each once, in random order."""
    return lambda generator: torch.randperm(n, generator=generator, device=generator.device)


def epoch_of(loader: DataLoader[Any]) -> tuple[int, Epoch] | None:
    """Give the number of indices of a loader's epoch, and a function that draws an epoch.

    The function draws as the loader's sampler does; data that the sampler goes through in order are
    shuffled. None if the sampler is not one of torch's.
    """
    # Where a loader was given a batch_sampler, its ``sampler`` is not used.
    if type(loader.batch_sampler) is not BatchSampler:
        return None
    sampler = loader.batch_sampler.sampler
    if type(sampler) is SequentialSampler:
        n = len(sampler.data_source)
        return n, permutation(n)
    if type(sampler) is SubsetRandomSampler:
        chosen = torch.as_tensor(sampler.indices)
        draw_places = permutation(len(chosen))
        return len(chosen), lambda generator: chosen[draw_places(generator)]
    if type(sampler) is WeightedRandomSampler:
        weights = sampler.weights
        replacement = sampler.replacement
        count = sampler.num_samples
        return count, lambda generator: torch.multinomial(
            weights, count, replacement, generator=generator
        )
    if type(sampler) is RandomSampler:
        n = len(sampler.data_source)
        return sampler.num_samples, _random(n, sampler.num_samples, sampler.replacement)
    return None


def _random(n: int, count: int, replacement: bool) -> Epoch:
    """Make the function that draws ``count`` of the numbers 0 to n - 1 as RandomSampler does.

    It draws with replacement, or from one whole permutation after another.
    """
    if replacement:
        return lambda generator: torch.randint(n, (count,), generator=generator)
    draw_permutation = permutation(n)
    permutations = math.ceil(count / max(n, 1))

    def draw_epoch(generator: torch.Generator) -> Tensor:
        orders = [draw_permutation(generator) for _ in range(permutations)]
        return torch.cat(orders)[:count]

    return draw_epoch


def epoch_length(loader: DataLoader[Any]) -> int:
    """Give the number of examples in a loader's epoch: those that its sampler draws.

    For a sampler that is not torch's it is the length of the data set, which must have one.
    """
    drawn = epoch_of(loader)
    if drawn is None:
        return len(loader.dataset)  # type: ignore[arg-type]
    return drawn[0]
