"""The user's training data in batches of exactly B examples, in an order that a seed fixes.

The user's loader gives the data set, the collation and the loader's processes; only its batches are
replaced. They are an endless stream of epochs: one has n // B batches, and what is left over begins
the next. A loader that makes its own batches is used as it is, where it is made for each batch
size.
"""

import copy
import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from lightning.fabric.utilities.data import sized_len
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten
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

# Steps that no training comes to.
NEVER = 10**18
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


def _combined_seed(*numbers: int) -> int:
    """A seed that follows from some integers."""
    return int(np.random.SeedSequence(numbers).generate_state(1)[0])


def _seed_cpu_generators(*numbers: int) -> None:
    """Seed Python's, numpy's and torch's CPU generator, not CUDA's, by some integers."""
    seed = _combined_seed(*numbers)
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
        self.examples_of_epoch = epoch_examples(self.examples, batch_size, limit) or self.examples

    def __call__(self, epoch: int) -> list[Any]:
        """Draw the order of an epoch; each but the first is drawn when it is asked for."""
        drawn = self._draw(epoch) if epoch > 0 else self._first
        return drawn[: self.examples_of_epoch]

    def _draw(self, epoch: int) -> list[Any]:
        """Iterate over the sampler, with random numbers that follow from the seed and the epoch."""
        if type(self._sampler) is RandomSampler:
            self._sampler.generator.manual_seed(_combined_seed(self._seed, epoch))
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
        """The examples of a micro-batch: torch asks with what the sampler gave."""
        number, indices = numbered
        _seed_cpu_generators(self._seed, number)
        if hasattr(self.dataset, "__getitems__"):
            return list(self.dataset.__getitems__(indices))
        return [self.dataset[index] for index in indices]


@dataclass(frozen=True)
class Epoch:
    """What an epoch of a trial's training data is; None: a stream does not tell."""

    examples: int | None
    """Of the training set."""
    steps: int | None
    limit: float
    """Of its batches, as the Trainer's ``limit_train_batches``."""


class TrialLoader(DataLoader[Any]):
    """A user's loader in micro-batches of batches of exactly B; it can be put at any batch."""

    batch_sampler: EndlessBatches

    @property
    def parts(self) -> tuple[slice, ...]:
        """Micro-batches of a batch."""
        return self.batch_sampler.parts

    @property
    def epoch(self) -> Epoch:
        """Of whole batches."""
        epochs = self.batch_sampler.epochs
        return Epoch(epochs.examples, len(self) // len(self.parts), epochs.limit)

    def seek(self, number: int) -> None:
        """Go on at a micro-batch, by its number from the training's start."""
        self.batch_sampler.seek(number)

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        # As a generator: Lightning asks for iterators before it is known at which batch a training
        # goes on, and the loader's processes must not begin earlier.
        yield from super().__iter__()


class TrialStream:
    """A loader whose batches come as they are; those of exactly B are taken, a pass is an epoch.

    A pass begins with random numbers that follow from the seed and its number.

    Args:
        loader: the user's, made for this batch size.
        batch_size: B, examples.
        seed: of the passes.
        limit: of an epoch's batches, as the Trainer's ``limit_train_batches``.
        left_out: batches that are drawn, but not given: a training that is resumed has had them.
    """

    def __init__(
        self, loader: Any, batch_size: int, seed: int, limit: float, left_out: int
    ) -> None:
        self._loader = loader
        self._batch_size = batch_size
        self.parts = micro_batches(batch_size, None)
        self._seed = seed
        self._left_out = left_out
        self._passes = 0
        length = sized_len(loader)
        examples = length and length * batch_size
        of_epoch = epoch_examples(examples, batch_size, limit)
        self.epoch = Epoch(examples, of_epoch and of_epoch // batch_size, limit)

    def seek(self, number: int) -> None:
        """Do nothing: a stream is put at its place before it begins."""

    def __iter__(self) -> Iterator[Any]:
        """Give a pass, the first one from where a resumed training was.

        At a pass's end that is an empty one: Lightning ends the old epoch with it.
        """
        while True:
            for batch in self._pass():
                if self._left_out == 0:
                    yield batch
                else:
                    self._left_out -= 1
            if self._left_out == 0:
                return

    def _pass(self) -> Iterator[Any]:
        """The batches of a pass; BatchSizeRefused where the first has another size."""
        state = rng_state()
        _seed_cpu_generators(self._seed, self._passes)
        self._passes += 1
        batches = iter(self._loader)
        first = next(batches, None)
        set_rng_state(state)
        sizes = (None, self._batch_size)
        if first is None or count_examples(first) not in sizes:
            raise BatchSizeRefused(
                f"the training loader, {_kind(self._loader)}, gives batches of "
                f"{count_examples(first) or 0} examples where the batch size is "
                f"{self._batch_size}: let it make batches of that size"
            )
        taken = (one for one in itertools.chain([first], batches) if count_examples(one) in sizes)
        return itertools.islice(taken, self.epoch.steps)


class TrialLoaders:
    """Several loaders, of each of which a step gets a batch, in the form that the user gave.

    An epoch is that of the longest, where the others begin again, or of the shortest.

    Args:
        loaders: of one trial, in any nesting.
        ratios: of each one's batch size to the first's.
        is_shortest: whether the shortest one ends the epoch.
    """

    def __init__(self, loaders: Any, ratios: Sequence[float], *, is_shortest: bool) -> None:
        self._loaders, self._spec = tree_flatten(loaders)
        self.parts = self._loaders[0].parts
        epochs = [one.epoch for one in self._loaders]
        pairs = zip(epochs, ratios, strict=True)
        examples = [int(one.examples / ratio) for one, ratio in pairs if one.examples]
        choose = min if is_shortest else max
        self._steps = choose((one.steps for one in epochs if one.steps), default=NEVER)
        self.epoch = Epoch(choose(examples, default=None), self._steps, epochs[0].limit)
        self._number = 0
        repeated = map(itertools.repeat, self._loaders)
        self._endless = [itertools.chain.from_iterable(one) for one in repeated]

    def __len__(self) -> int:
        """Steps of an epoch."""
        return self._steps

    def seek(self, number: int) -> None:
        """Go on at a batch, by its number from the training's start."""
        self._number = number
        for loader in self._loaders:
            loader.seek(number)

    def __iter__(self) -> Iterator[Any]:
        end = (self._number // len(self) + 1) * len(self)
        while self._number < end:
            self._number += 1
            yield tree_unflatten([next(one) for one in self._endless], self._spec)


AnyLoader = TrialLoader | TrialStream | TrialLoaders


def count_examples(batch: Any) -> int | None:
    """Examples of a batch: the length that all of its tensors have; None where they differ."""
    tensors = [leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor) and leaf.ndim]
    lengths = {len(tensor) for tensor in tensors}
    return lengths.pop() if len(lengths) == 1 else None


def own_batch_size(loader: Any) -> int | None:
    """The batch size that a loader, or the first of several, has by itself; None: it has none."""
    for part in (loader, getattr(loader, "batch_sampler", None)):
        size = getattr(part, "batch_size", None)
        if isinstance(size, int):
            return size
    return None


def rebatch(
    loaders: Any,
    batch_size: int,
    seed: int,
    parts: tuple[slice, ...] | None = None,
    limit: float = 1.0,
    *,
    made_for_size: bool = False,
    batches_had: int = 0,
) -> AnyLoader:
    """Make a loader of the same data in batches of exactly ``batch_size``.

    Of several loaders the first has batches of that size; the others' keep their ratio to it.

    Args:
        loaders: the user's, one or a nesting of several.
        batch_size: B, examples.
        seed: that the order follows from.
        parts: of a batch that are given one after another; None: the whole batch at once.
        limit: of an epoch's batches, as the Trainer's ``limit_train_batches``.
        made_for_size: whether they were made for this batch size.
        batches_had: by a training that is resumed: a stream leaves them out; another loader is put
            there by ``seek``.

    Raises:
        InputError: a loader is of a kind whose batches cannot be replaced.
        BatchSizeRefused: B is larger than the data.
    """
    leaves, spec = tree_flatten(getattr(loaders, "iterables", loaders))
    if not spec.is_leaf():
        _refuse_cut_batches(parts, batch_size)
        sizes = [own_batch_size(leaf) for leaf in leaves]
        ratios = [size / sizes[0] if size and sizes[0] else 1.0 for size in sizes]
        made = []
        for leaf, ratio in zip(leaves, ratios, strict=True):
            size = max(1, round(ratio * batch_size))
            made.append(
                rebatch(
                    leaf,
                    size,
                    seed,
                    limit=limit,
                    made_for_size=made_for_size,
                    batches_had=batches_had,
                )
            )
        is_shortest = getattr(loaders, "_mode", "") == "min_size"
        return TrialLoaders(tree_unflatten(made, spec), ratios, is_shortest=is_shortest)
    loader = loaders
    is_plain = isinstance(loader, DataLoader) and type(loader).__iter__ is DataLoader.__iter__
    sampler = loader.batch_sampler if is_plain else None
    streams = sampler is not None and isinstance(loader.dataset, IterableDataset)
    if streams:
        loader = DataLoader(loader.dataset, batch_size, drop_last=True, **_kept_arguments(loader))
    if streams or (made_for_size and not hasattr(sampler, "batch_size")):
        _refuse_cut_batches(parts, batch_size)
        return TrialStream(loader, batch_size, seed, limit, batches_had)
    if sampler is None:
        raise InputError(
            f"the training loader makes its own batches ({_kind(loader)}): let data follow the "
            f"trial's batch size, as data=lambda batch_size: (train_loader, val_loader), in YAML "
            f"by ${{trial.batch_size}}"
        )
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
        **_kept_arguments(loader),
    )


def _refuse_cut_batches(parts: tuple[slice, ...] | None, batch_size: int) -> None:
    """BatchSizeRefused where batches of several loaders, or of a stream, would have to be cut."""
    if parts not in (None, micro_batches(batch_size, None)):
        raise BatchSizeRefused(
            "batches of a stream, or of several loaders, are taken whole by one device: leave out "
            "micro_batch_size and devices"
        )


def _kept_arguments(loader: DataLoader[Any]) -> dict[str, Any]:
    """A loader's arguments that one in other batches keeps."""
    return {name: getattr(loader, name) for name in KEPT}


def validation_in_batches(loaders: Any, batch_size: int) -> Any:
    """Make validation loaders of the same data in batches of exactly another size.

    Args:
        loaders: the user's, one or a nesting of several.
        batch_size: of the trial.

    Raises:
        InputError: a loader's batches cannot be replaced.
        BatchSizeRefused: no batch has so many examples.
    """

    def remade(loader: Any) -> DataLoader[Any]:
        """One loader, which stays in its order."""
        if not isinstance(loader, DataLoader) or loader.batch_sampler is None:
            raise InputError(
                f"validation_batch_size needs a torch DataLoader with a batch_size, but got "
                f"{_kind(loader)}: leave it out"
            )
        sampler: Any = None if isinstance(loader.dataset, IterableDataset) else loader.sampler
        if sampler is not None and batch_size > len(sampler):
            raise BatchSizeRefused(
                f"validation_batch_size=trial: the validation data have {len(sampler)} examples, "
                f"no batch of {batch_size}"
            )
        return DataLoader(
            loader.dataset, batch_size, sampler=sampler, drop_last=True, **_kept_arguments(loader)
        )

    return tree_map(remade, loaders)


def _kind(loader: Any) -> str:
    """Say what a loader is, as in ``DataLoader of StreamDataset with batch_size=None``."""
    if not isinstance(loader, DataLoader):
        return f"a {type(loader).__name__}"
    kind = f"a {type(loader).__name__} of {type(loader.dataset).__name__}"
    return f"{kind} with batch_size=None" if loader.batch_sampler is None else kind
