"""Reads a user's DataLoader in batches of another size."""

import gc
import multiprocessing
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeVar

from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from bstune.core.errors import ConfigError, check_positive_integer
from bstune.recipe import HOW_TO_GIVE
from bstune.system.console import plural
from bstune.trial.batches.batch_sampler import StreamBatchSampler
from bstune.trial.batches.epochs import epoch_of
from bstune.trial.devices.randomness import seeded_generators

Batch = TypeVar("Batch")
# Options of the user's DataLoader that one with other batches keeps.
KEPT_OPTIONS = (
    "collate_fn",
    "in_order",
    "multiprocessing_context",
    "num_workers",
    "persistent_workers",
    "pin_memory",
    "pin_memory_device",
    "prefetch_factor",
    "timeout",
    "worker_init_fn",
)


def rebatch(
    loader: object,
    batch_size: int,
    micro_batch_size: int | None,
    seed: int,
) -> DataLoader[Any]:
    """Make a DataLoader of the same data whose batches have exactly ``batch_size`` examples.

    An epoch of n examples has n // batch_size batches. It continues an endless stream of shuffled
    examples, so that all batches are whole. A sampler of torch's that draws a part of the examples,
    or draws with replacement or weights, still does so.

    A resumed trial reads the same examples, and draws the same numbers from Python's, numpy's and
    torch's generators, though not in worker processes, nor from generators of the data set.

    Args:
        loader: of the user's.
        batch_size: examples of a batch.
        micro_batch_size: the most examples that are handed out at once; None: a whole batch.
        seed: of the order.

    Raises:
        ConfigError: for a loader that cannot be read in this way (:func:`not_rebatchable`).
    """
    if not isinstance(loader, DataLoader):
        raise ConfigError(
            "the training data must come from a torch DataLoader over a map-style data set, but "
            f"got {type(loader).__name__}: return one from train_dataloader(), or {HOW_TO_GIVE}"
        )
    # Loaders of an earlier trial, with their worker processes, may wait for Python's garbage
    # collector. A worker that is forked from here would collect them too, and torch would print a
    # traceback there, as the old workers are not its children.
    if loader.num_workers > 0:
        gc.collect()
    problem = not_rebatchable(loader)
    if problem:
        raise ConfigError(
            f"the batch size of the training DataLoader cannot be set: {problem}. Return "
            "DataLoader(dataset, batch_size=..., shuffle=True) over a map-style data set, with a "
            f"Subset to choose its examples, or {HOW_TO_GIVE}"
        )
    order, workers = seeded_generators(seed, "cpu", count=2)
    drawn = epoch_of(loader)
    assert drawn is not None  # noqa: S101  # it would have been refused
    n, epoch = drawn
    check_positive_integer("batch size", batch_size)
    sampler = StreamBatchSampler(
        n,
        batch_size,
        micro_batch_size,
        generator=order,
        in_process=loader.num_workers == 0,
        epoch=epoch,
    )
    # The user's options that do not say which examples make a batch.
    kept = {name: getattr(loader, name) for name in KEPT_OPTIONS}
    # Workers are kept over epochs, which are short with large batches.
    kept["persistent_workers"] = loader.num_workers > 0
    return DataLoader(loader.dataset, batch_sampler=sampler, generator=workers, **kept)


def not_rebatchable(loader: object) -> str | None:
    """Say why a loader cannot be read in batches of another size, in words; None if it can."""
    several = loaders_of(loader)
    if not any(one is loader for one in several):
        return (
            f"it returns {plural(len(several), 'loader')} in a {type(loader).__name__}, not one "
            "batch of B examples"
        )
    if not isinstance(loader, DataLoader):
        return f"it returns a {type(loader).__name__}, not a torch DataLoader"
    if isinstance(loader.dataset, IterableDataset):
        return (
            f"its data set, {type(loader.dataset).__name__}, is iterable and decides itself what "
            "comes next"
        )
    if not hasattr(loader.dataset, "__len__"):
        return f"its data set, {type(loader.dataset).__name__}, has no length"
    if type(loader).__iter__ is not DataLoader.__iter__:
        return f"{type(loader).__name__} has an __iter__ of its own"
    if type(loader.batch_sampler) is not BatchSampler:
        if loader.batch_sampler is None:
            return "it has no batch size (batch_size=None)"
        return f"its batch_sampler, {type(loader.batch_sampler).__name__}, makes the batches itself"
    if epoch_of(loader) is None:
        name = type(loader.batch_sampler.sampler).__name__
        return f"its sampler, {name}, is not one of torch's, whose epochs can be drawn again"
    return None


def loaders_of(loaders: object) -> list[Any]:
    """List the loaders that a data module has returned: one, or a collection of several."""
    if isinstance(loaders, Mapping):
        return list(loaders.values())
    if isinstance(loaders, list | tuple):
        return list(loaders)
    # Lightning's CombinedLoader has them flattened.
    return list(getattr(loaders, "flattened", [loaders]))


def worker_starts(loader: object) -> str:
    """Say how a loader starts its workers, where that takes long; empty where it does not.

    Unless they are forked, each imports the project anew.
    """
    if not isinstance(loader, DataLoader) or not loader.num_workers:
        return ""
    context = loader.multiprocessing_context or multiprocessing.get_context()
    method = context.get_start_method()
    if method == "fork":
        return ""
    return f", whose loader starts {plural(loader.num_workers, 'worker')} by {method}"


def endless(batches: Iterable[Batch]) -> Iterator[Batch]:
    """Yield the batches of one epoch after another, until an epoch has none."""
    has_any = True
    while has_any:
        has_any = False
        for batch in batches:
            has_any = True
            yield batch
