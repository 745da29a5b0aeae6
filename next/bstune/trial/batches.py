"""The user's training data in batches of exactly B examples, in an order that a seed fixes.

The user's loader gives the data set, the collation and the loader's processes; only its batches are
replaced. They are an endless stream of epochs: one has n // B batches, and what is left over begins
the next.
"""

import copy
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
)

from bstune.core.errors import InputError
from bstune.recipe.recipe import epoch_examples
from bstune.trial.trial import BatchSizeRefused, check_batch_size, endless_batches

KEPT = (
    "collate_fn",
    "num_workers",
    "pin_memory",
    "worker_init_fn",
    "multiprocessing_context",
    "prefetch_factor",
    "persistent_workers",
    "timeout",
)

RngState = dict[str, Any]


def rng_state() -> RngState:
    """Get the states of Python's, numpy's and torch's generators.

    They are of types that ``torch.load(weights_only=True)`` accepts.
    """
    name, keys, *rest = np.random.get_state(legacy=True)
    state: RngState = {
        "python": random.getstate(),
        "numpy": (name, np.asarray(keys).tolist(), *rest),
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def set_rng_state(state: RngState) -> None:
    """Put the generators back into states that :func:`rng_state` gave."""
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    if "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"])


def seed_everything(seed: int) -> None:
    """Seed Python's, numpy's and torch's generators, those of devices too."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def _combined(*numbers: int) -> int:
    """A seed that follows from some integers."""
    return int(np.random.SeedSequence(numbers).generate_state(1)[0])


def _seed_cpu_generators(*numbers: int) -> None:
    """Seed Python's, numpy's and torch's CPU generator, not CUDA's, by some integers."""
    seed = _combined(*numbers)
    random.seed(seed)
    np.random.seed(seed)
    torch.default_generator.manual_seed(seed)


class _Epochs:
    """The examples of one epoch after another, as a user's sampler orders them.

    Args:
        sampler: of indices, or of batches of them, of which those of ``batch_size`` are taken.
        limit: of an epoch, as the Trainer's ``limit_train_batches``.
    """

    def __init__(
        self, sampler: Any, batch_size: int, gives_batches: bool, seed: int, limit: float
    ) -> None:
        self._sampler = sampler
        if type(sampler) is RandomSampler:
            # A generator of its own spares each epoch the state of all others: 0.1 ms of steps that
            # may take less than 1 ms.
            self._sampler = copy.copy(sampler)
            self._sampler.generator = torch.Generator()
        self._batch_size = batch_size
        self._gives_batches = gives_batches
        self._seed = seed
        self.limit = limit
        self._first = self._draw(0)
        self.examples = len(self._first)
        self.examples_of_epoch = epoch_examples(self.examples, batch_size, limit)

    def __call__(self, epoch: int) -> list[Any]:
        """Draw the order of an epoch; each but the first is drawn when it is asked for."""
        drawn = self._draw(epoch) if epoch > 0 else self._first
        return drawn[: self.examples_of_epoch]

    def _draw(self, epoch: int) -> list[Any]:
        """Iterate over the sampler, with random numbers that follow from the seed and the epoch."""
        if type(self._sampler) is RandomSampler:
            self._sampler.generator.manual_seed(_combined(self._seed, epoch))
            return list(self._sampler)
        state = rng_state()
        _seed_cpu_generators(self._seed, epoch)
        generator = getattr(self._sampler, "generator", None)
        if isinstance(generator, torch.Generator):
            generator.manual_seed(torch.initial_seed())
        if hasattr(self._sampler, "set_epoch"):
            self._sampler.set_epoch(epoch)
        drawn = list(self._sampler)
        set_rng_state(state)
        return self._whole_batches(drawn) if self._gives_batches else drawn

    def _whole_batches(self, batches: list[Any]) -> list[Any]:
        """Join the batches of exactly B examples; BatchSizeRefused where none has so many."""
        sizes = {len(batch) for batch in batches}
        if max(sizes, default=0) != self._batch_size:
            raise BatchSizeRefused(
                f"the loader's {type(self._sampler).__name__} gives batches of "
                f"{sorted(sizes)[:5]} examples where its batch_size is {self._batch_size}: let its "
                f"__iter__ give batches of self.batch_size"
            )
        indices = list[Any]()
        for batch in batches:
            if len(batch) == self._batch_size:
                indices.extend(batch)
        return indices


def micro_batches(
    batch_size: int, micro_batch_size: int | None, rank: int = 0, ranks: int = 1
) -> tuple[slice, ...]:
    """Cut the share that a device has of a batch into micro-batches; the last may be smaller.

    Args:
        batch_size: B, examples.
        micro_batch_size: examples that a device takes at once; None: its whole share.
        rank, ranks: the device's number, and how many share a batch.

    Returns:
        Each micro-batch's place in the batch.

    Raises:
        BatchSizeRefused: the devices' shares would not be equal.
    """
    if batch_size % ranks:
        raise BatchSizeRefused(
            f"{ranks} devices share each batch equally: batch sizes must be multiples of {ranks}, "
            f"but got {batch_size}"
        )
    share = batch_size // ranks
    size = micro_batch_size or share
    first = rank * share
    end = first + share
    return tuple(slice(start, min(start + size, end)) for start in range(first, end, size))


class EndlessBatches(Sampler[Any]):
    """The micro-batches of batches of exactly B indices; an iteration goes on to an epoch's end.

    Args:
        epochs: draws the order of an epoch.
        batch_size: B, examples.
        parts: of a batch, one after another, as :func:`micro_batches` gives them.
        numbered: whether to give pairs of a micro-batch's number and its indices.
    """

    def __init__(
        self, epochs: _Epochs, batch_size: int, parts: tuple[slice, ...], numbered: bool
    ) -> None:
        self.epochs = epochs
        self._batch_size = batch_size
        self.parts = parts
        self._numbered = numbered
        self.seek(0)

    def __len__(self) -> int:
        """Micro-batches of an epoch."""
        return self.epochs.examples_of_epoch // self._batch_size * len(self.parts)

    def seek(self, number: int) -> None:
        """Go on at the first micro-batch of a batch, by its number from the training's start."""
        self._number = number
        first = number // len(self.parts)
        self._batches = endless_batches(self.epochs, self._batch_size, first)

    def __iter__(self) -> Iterator[Any]:
        end = (self._number // len(self) + 1) * len(self)
        while self._number < end:
            batch = next(self._batches)
            for part in self.parts:
                number = self._number
                self._number += 1
                yield (number, batch[part]) if self._numbered else batch[part]


class _SeededInWorkers(Dataset[Any]):
    """A data set whose random numbers, in a loader's process, follow from the batch's number.

    So a resumed training augments as one that never stopped.
    """

    def __init__(self, dataset: Any, seed: int) -> None:
        self.dataset = dataset
        self._seed = seed

    def __getitems__(self, numbered: tuple[int, list[Any]]) -> list[Any]:
        number, indices = numbered
        _seed_cpu_generators(self._seed, number)
        if hasattr(self.dataset, "__getitems__"):
            return list(self.dataset.__getitems__(indices))
        return [self.dataset[index] for index in indices]


class TrialLoader(DataLoader[Any]):
    """A user's loader in micro-batches of batches of exactly B; it can be put at any batch."""

    batch_sampler: EndlessBatches

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        # As a generator: Lightning asks for iterators before it is known at which batch a training
        # goes on, and the loader's processes must not begin earlier.
        yield from super().__iter__()


def rebatch(
    loader: Any,
    batch_size: int,
    seed: int,
    parts: tuple[slice, ...] | None = None,
    limit: float = 1.0,
) -> TrialLoader:
    """Make a loader of the same data in batches of exactly ``batch_size``.

    Args:
        loader: the user's.
        batch_size: B, examples.
        seed: that the order follows from.
        parts: of a batch that are given one after another; None: the whole batch at once.
        limit: of an epoch's batches, as the Trainer's ``limit_train_batches``.

    Raises:
        InputError: the loader is of a kind whose batches cannot be replaced.
        BatchSizeRefused: B is larger than the data.
    """
    is_plain = isinstance(loader, DataLoader) and type(loader).__iter__ is DataLoader.__iter__
    if not is_plain or isinstance(loader.dataset, IterableDataset) or loader.batch_sampler is None:
        raise InputError(
            "the training loader must be a torch DataLoader of a data set with __getitem__ and a "
            f"batch_size, but got {_kind(loader)}"
        )
    sampler = loader.batch_sampler
    gives_batches = type(sampler) is not BatchSampler
    if not gives_batches:
        sampler = sampler.sampler
    elif hasattr(sampler, "batch_size"):
        sampler = copy.copy(sampler)
        sampler.batch_size = batch_size
    else:
        raise InputError(
            f"the loader's {type(sampler).__name__} has no attribute batch_size: its "
            "__iter__ must give batches of self.batch_size"
        )
    check_batch_size(batch_size, len(loader.dataset))
    epochs = _Epochs(sampler, batch_size, gives_batches, seed, limit)
    check_batch_size(batch_size, epochs.examples)
    parts = parts or micro_batches(batch_size, None)
    has_workers = loader.num_workers > 0
    return TrialLoader(
        _SeededInWorkers(loader.dataset, seed) if has_workers else loader.dataset,
        batch_sampler=EndlessBatches(epochs, batch_size, parts, numbered=has_workers),
        # The seeds of the loader's processes do not come from the trial's random numbers.
        generator=torch.Generator().manual_seed(seed),
        **{name: getattr(loader, name) for name in KEPT},
    )


def _kind(loader: Any) -> str:
    """Say what a loader is, as in ``DataLoader of StreamDataset with batch_size=None``."""
    if not isinstance(loader, DataLoader):
        return f"a {type(loader).__name__}"
    kind = f"a {type(loader).__name__} of {type(loader.dataset).__name__}"
    return f"{kind} with batch_size=None" if loader.batch_sampler is None else kind
