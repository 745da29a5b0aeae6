"""Batches of exactly B examples from an endless stream of shuffled epochs, on the device where the data live.

A batch larger than the micro-batch size comes as several micro-batches, in order; which examples a batch holds, and how
they are augmented, depends on the seed and on B alone.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, Sampler, SequentialSampler

from bstune.errors import ConfigError

Augment = Callable[[Tensor, torch.Generator], Tensor]


def endless_indices(n: int, batch_size: int, generator: torch.Generator) -> Iterator[Tensor]:
    """Return an endless stream of index tensors, int64, of exactly ``batch_size`` on the generator's device.

    The stream is one epoch after another, each a fresh permutation of 0 to n - 1. A batch may straddle two epochs, and
    may then hold an example twice. On an accelerator nothing waits for the device.

    Args:
        n: examples in the data set.
        batch_size: from 1 to n.
        generator: the source of the permutations.

    Raises:
        ConfigError: at once, if the batch size is not an integer from 1 to n.
    """
    check_size("batch size", batch_size)
    if batch_size > n:
        raise ConfigError(
            f"batch size {batch_size} is larger than the data set ({n} examples): lower the largest batch size"
        )
    return _endless_indices(n, batch_size, generator)


def _endless_indices(n: int, batch_size: int, generator: torch.Generator) -> Iterator[Tensor]:
    device = generator.device
    rest = torch.empty(0, dtype=torch.int64, device=device)
    while True:
        if len(rest) < batch_size:
            rest = torch.cat([rest, torch.randperm(n, generator=generator, device=device)])
        yield rest[:batch_size]
        rest = rest[batch_size:]


def micro_batch_sizes(batch_size: int, micro_batch_size: int | None) -> tuple[int, ...]:
    """Return the sizes n_i of the micro-batches of one batch: all equal but the last, which may be smaller.

    They sum to ``batch_size``. Without a micro-batch size, or with one that is not smaller, there is one.

    Raises:
        ConfigError: if one of the two is not a positive integer.
    """
    check_size("batch size", batch_size)
    if micro_batch_size is None:
        return (batch_size,)
    check_size("micro-batch size", micro_batch_size)
    whole, last = divmod(batch_size, micro_batch_size)
    return (micro_batch_size,) * whole + ((last,) if last else ())


def check_size(name: str, size: int) -> None:
    """Raise a ConfigError that says ``name`` if ``size`` is not a positive integer."""
    if not isinstance(size, int) or isinstance(size, bool) or size < 1:
        raise ConfigError(f"{name} must be a positive integer, but got {size!r}")


def seeded_generators(seed: int, device: torch.device | str, count: int) -> tuple[torch.Generator, ...]:
    """Return independent generators on ``device``, all a function of ``seed``.

    Raises:
        ConfigError: if the seed is negative.
    """
    if seed < 0:
        raise ConfigError(f"a seed must not be negative, but got {seed}")
    states = np.random.SeedSequence(seed).generate_state(count, np.uint64)
    return tuple(torch.Generator(device).manual_seed(int(state)) for state in states)


@dataclass(frozen=True)
class Normalisation:
    """Turns pixels into float32 by ``pixels * scale + shift``.

    Args:
        scale, shift: float32, (1, channels, 1, 1), on the images' device.
    """

    scale: Tensor
    shift: Tensor

    def __call__(self, images: Tensor) -> Tensor:
        """Return float32 images of the same shape; ``images`` itself is left as it is."""
        # One conversion, then in place: on a CPU faster than type promotion, and much faster than addcmul.
        return images.to(torch.float32, copy=True).mul_(self.scale).add_(self.shift)


class TrainBatches:
    """Endless training batches (x, y) from tensors on one device; there is no length, because there is no end.

    Each iterator goes on in the one stream where the last left off, at the next whole batch: iterating again, as
    Lightning does at what it takes for an epoch, repeats nothing.

    Args:
        images: uint8, (n, channels, height, width).
        labels: int64, (n,), on the same device.
        batch_size: B, examples per optimizer step, at most n.
        micro_batch_size: the most examples in one (x, y) pair; None for B.
        seed: of the order and of the augmentation, which do not depend on ``micro_batch_size``.
        normalise: applied last.
        augment: from uint8 images and a generator to images of the same shape; None for none.

    Raises:
        ConfigError: if a size is not a positive integer, or B is larger than the data set.
    """

    def __init__(
        self,
        images: Tensor,
        labels: Tensor,
        *,
        batch_size: int,
        micro_batch_size: int | None,
        seed: int,
        normalise: Normalisation,
        augment: Augment | None = None,
    ) -> None:
        self.batch_size = batch_size
        self.micro_batch_sizes = micro_batch_sizes(batch_size, micro_batch_size)
        # Two generators: the order must not depend on how many numbers the augmentation draws.
        order, self._augment_generator = seeded_generators(seed, images.device, 2)
        self._indices = endless_indices(len(images), batch_size, order)
        self._images, self._labels = images, labels
        self._normalise, self._augment = normalise, augment

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for index in self._indices:
            images = self._images.index_select(0, index)
            labels = self._labels.index_select(0, index)
            if self._augment is not None:  # the batch as a whole, so that its draws do not depend on micro-batches
                images = self._augment(images, self._augment_generator)
            start = 0
            for size in self.micro_batch_sizes:
                yield self._normalise(images[start : start + size]), labels[start : start + size]
                start += size


class EvalBatches:
    """Evaluation batches (x, y) in the order of the data; only the last may be smaller.

    Args:
        images: uint8, (n, channels, height, width); n may be 0, and then there are no batches.
        labels: int64, (n,), on the same device.
        batch_size: examples per batch; it stays fixed while the training batch varies.
        normalise: applied to each batch on the fly.

    Raises:
        ConfigError: if the batch size is not a positive integer.
    """

    def __init__(self, images: Tensor, labels: Tensor, *, batch_size: int, normalise: Normalisation) -> None:
        check_size("evaluation batch size", batch_size)
        self.batch_size = batch_size
        self._images, self._labels, self._normalise = images, labels, normalise

    def __len__(self) -> int:
        return -(-len(self._images) // self.batch_size)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for start in range(0, len(self._images), self.batch_size):
            stop = start + self.batch_size
            yield self._normalise(self._images[start:stop]), self._labels[start:stop]


class EndlessBatchSampler(Sampler[list[int]]):
    """Lists of indices, each one micro-batch of an endless stream of batches of exactly B, for a torch DataLoader.

    As with :class:`TrainBatches`, there is no length, and each iterator goes on at the next whole batch.
    """

    def __init__(self, n: int, batch_size: int, micro_batch_size: int | None, generator: torch.Generator) -> None:
        self.micro_batch_sizes = micro_batch_sizes(batch_size, micro_batch_size)
        self._indices = endless_indices(n, batch_size, generator)

    def __iter__(self) -> Iterator[list[int]]:
        for index in self._indices:
            batch, start = index.tolist(), 0
            for size in self.micro_batch_sizes:
                yield batch[start : start + size]
                start += size


def rebatch(loader: object, batch_size: int, micro_batch_size: int | None, seed: int) -> DataLoader[Any]:
    """Return a DataLoader like ``loader`` whose batches hold exactly B examples, shuffled and without end.

    The data set, collate function, workers and pinning are those of ``loader``; its batch size, ``drop_last`` and
    order are replaced. An iterator that is dropped loses what its workers had fetched ahead.

    Args:
        loader: a torch DataLoader over a map-style data set.
        batch_size: B, at most the size of the data set.
        micro_batch_size: the most examples in one item of the result; None for B.
        seed: of the order, and of the workers' own seeds.

    Raises:
        ConfigError: if ``loader`` is anything else, or if what it draws is more than an order: a sampler that weights,
            repeats or leaves out examples, or one of the project's own.
    """
    if not isinstance(loader, DataLoader):
        raise ConfigError(
            f"the training data must come from a torch DataLoader over a map-style data set, but got"
            f" {type(loader).__name__}: return one from train_dataloader(), or build batches of the wanted size there"
        )
    problem = _not_rebatchable(loader)
    if problem:
        raise ConfigError(
            f"the batch size of the training DataLoader cannot be set: {problem}. Return DataLoader(dataset,"
            " batch_size=..., shuffle=True) over a map-style data set, with a Subset to choose its examples"
        )
    order, workers = seeded_generators(seed, "cpu", 2)
    return DataLoader(
        loader.dataset,
        batch_sampler=EndlessBatchSampler(len(loader.dataset), batch_size, micro_batch_size, order),  # type: ignore[arg-type]
        num_workers=loader.num_workers,
        collate_fn=loader.collate_fn,
        pin_memory=loader.pin_memory,
        timeout=loader.timeout,
        worker_init_fn=loader.worker_init_fn,
        multiprocessing_context=loader.multiprocessing_context,
        generator=workers,
        prefetch_factor=loader.prefetch_factor if loader.num_workers else None,
        persistent_workers=loader.persistent_workers,
        pin_memory_device=loader.pin_memory_device,
        in_order=loader.in_order,
    )


def _not_rebatchable(loader: DataLoader[Any]) -> str | None:
    """Return why other batches from the same loader would not be the same problem; None if they would be."""
    if isinstance(loader.dataset, IterableDataset):
        return f"its data set, {type(loader.dataset).__name__}, is iterable and decides itself what comes next"
    if not hasattr(loader.dataset, "__len__"):
        return f"its data set, {type(loader.dataset).__name__}, has no length"
    if type(loader).__iter__ is not DataLoader.__iter__:
        return f"{type(loader).__name__} has an __iter__ of its own"
    if type(loader.batch_sampler) is not BatchSampler:
        return f"it has no batch size of its own (batch_sampler is {type(loader.batch_sampler).__name__})"
    sampler = loader.sampler
    shuffled = type(sampler) is RandomSampler and not sampler.replacement and len(sampler) == len(loader.dataset)
    if not shuffled and type(sampler) is not SequentialSampler:
        return f"its sampler, {type(sampler).__name__}, draws other examples than each one once an epoch"
    return None
