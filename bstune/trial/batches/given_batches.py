"""Batches that are taken as the user's loaders give them at a batch size.

The loaders come from a function of the batch size. They may be streams, several loaders, or have
samplers of their own. A trial that goes on opens them anew and skips the batches that it has seen,
whose random numbers are drawn again.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader

from bstune.core.errors import ConfigError, check_positive_integer
from bstune.trial.batches.index_stream import Position
from bstune.trial.batches.loader import loaders_of
from bstune.trial.devices.randomness import OwnRandomNumbers
from bstune.trial.lightning.installed import CombinedLoader, sized_len
from bstune.trial.lightning.internals import mode_of_loaders

# For each mode in which loaders are combined, the function that gives an epoch's number of batches
# from those of the loaders. A loader without a length has infinitely many.
LENGTHS_OF_MODES: dict[str, Callable[[list[float]], float]] = {
    "min_size": min,
    "max_size": max,
    "max_size_cycle": max,
    "sequential": sum,
}


class GivenStream:
    """An endless stream of the batches of loaders.

    After their last batch the loaders are read from the first one again. Random numbers that they
    draw in this process, from Python's, numpy's and torch's generators, depend on the seed alone. A
    batch at the end of a pass that has fewer examples than the others is left out.

    Args:
        open_loaders: makes the loaders: one, or a dict, a list or a CombinedLoader of several.
        batch_size: for which the loaders are made.
        seed: of the random numbers.

    Attributes:
        remembers: not used; a trial sets it in each kind of stream.
        drawn: batches that were handed out, from the first of the stream.
        length: the number of batches of an epoch; None: it has no end.

    Raises:
        ConfigError: for loaders without any batch, at the first batch.
    """

    def __init__(self, open_loaders: Callable[[], object], batch_size: int, seed: int) -> None:
        check_positive_integer("batch size", batch_size)
        # Loaders have no position to go back to: a resume draws and skips the batches before it.
        self.remembers = False
        self.drawn = 0
        self._random = OwnRandomNumbers(seed)
        loaders = open_loaders()
        self.length = length_of(loaders)
        # Batches to skip before the next one, after a resume.
        self._to_skip = 0
        # The generator is made by a function, as one that a method makes would refer to the stream,
        # and the stream to it. In such a cycle the loaders' processes would outlive the stream by
        # torch's timeout of five seconds.
        self._batches = _endless(open_loaders, loaders, batch_size)

    def draw(self) -> object:
        """Give the next batch, drawn with the stream's own random numbers.

        After a resume the batches before its position are drawn first, and dropped.
        """
        with self._random.used():
            while self._to_skip:
                next(self._batches)
                self._to_skip -= 1
            batch = next(self._batches)
        self.drawn += 1
        return batch

    def position(self, batches: int) -> Position:
        """Give the position after so many batches, as plain data."""
        # A resume draws all of these batches again, which also moves the random numbers on.
        return {"batches": batches, "random": None}

    def resume(self, position: Position) -> None:
        """Go on from a position of an equal stream; a ValueError once a batch is drawn."""
        if self.drawn:
            raise ValueError(
                f"only a fresh stream can be resumed, but {self.drawn} batches are drawn"
            )
        self.drawn = position["batches"]
        self._to_skip = position["batches"]


class GivenBatches:
    """A trial's batches from a :class:`GivenStream`.

    They come in epochs of the stream's length; without a length they have no end.

    Args:
        stream: of the trial.
    """

    # Where there are no epochs, Lightning ends such a training by its steps.
    ends_by_steps = True

    def __init__(self, stream: GivenStream) -> None:
        self.stream = stream

    def __len__(self) -> int:
        if self.stream.length is None:
            raise TypeError("a stream has no length")
        return self.stream.length

    def __iter__(self) -> Iterator[object]:
        length = self.stream.length
        if length is None:
            while True:
                yield self.stream.draw()
        # A trial that goes on may begin amid an epoch.
        for _ in range(length - self.stream.drawn % length):
            yield self.stream.draw()


def length_of(loaders: object) -> int | None:
    """Give the number of batches in an epoch of one or several loaders.

    None where it has no end, or the number is not known.
    """
    lengths = list[float]()
    for loader in loaders_of(loaders):
        length = sized_len(loader)
        lengths.append(math.inf if length is None else length)
    if not lengths:
        return None
    batches = LENGTHS_OF_MODES[mode_of_loaders(loaders)](lengths)
    # Without any batch there is no length: the error comes when the first batch is drawn.
    return int(batches) if 0 < batches < math.inf else None


def examples_of(loaders: object, batch_size: int | None) -> int | None:
    """Give the examples in an epoch of one or several loaders.

    The number is exact where a plain sampler tells it. A sampler of batches that has as many as the
    data set fills is taken to draw each example once. Otherwise it counts the batches that are
    certainly full. None where an epoch has no end, its length is not known, or the number is 0.

    Args:
        loaders: as a function of the batch size gives them.
        batch_size: examples of a batch; None: it is not known.
    """
    if isinstance(loaders, DataLoader) and type(loaders.batch_sampler) is BatchSampler:
        # A sampler may draw an example more than once, or only some of them.
        return sized_len(loaders.batch_sampler.sampler) or None
    batches = length_of(loaders)
    if batches is None or batch_size is None:
        return None
    if isinstance(loaders, DataLoader):
        rows = sized_len(loaders.dataset) or 0
        if batches == math.ceil(rows / batch_size):
            return rows or None
        # It leaves out a smaller batch at the end.
        if batches == rows // batch_size:
            return batches * batch_size or None
    # All but the last batch are full; the last one, which may have as little as one example, is
    # not counted.
    return (batches - 1) * batch_size or None


def first_tensor(batch: object) -> Tensor | None:
    """Find the first tensor in a batch of nested dicts, lists and tuples; None if it has none."""
    return next(_tensors_in(batch), None)


def shapes_in(batch: object) -> tuple[torch.Size, ...]:
    """List the shapes of all tensors in a batch, in their order."""
    return tuple(tensor.shape for tensor in _tensors_in(batch))


def _tensors_in(batch: object) -> Iterator[Tensor]:
    """Yield the tensors in a batch, which may be nested in dicts, lists and tuples."""
    if isinstance(batch, Tensor):
        yield batch
    elif isinstance(batch, Mapping):
        for part in batch.values():
            yield from _tensors_in(part)
    elif isinstance(batch, list | tuple):
        for part in batch:
            yield from _tensors_in(part)


def _endless(
    open_loaders: Callable[[], object], loaders: object, batch_size: int
) -> Iterator[object]:
    """Yield the whole batches of loaders without an end.

    The loaders are read again and again. Where a second pass gives nothing, as with an iterator,
    they are opened anew. A ConfigError says that they give no batch at all.
    """
    while True:
        gave_any = False
        for batch in _until_empty(loaders, batch_size):
            gave_any = True
            yield batch
        if not gave_any:
            raise ConfigError(
                f"the training data give no batch at batch size {batch_size}: let the loader "
                "that is made for it have one, or search smaller batch sizes"
            )
        loaders = open_loaders()


def _until_empty(loaders: object, batch_size: int) -> Iterator[object]:
    """Yield the whole batches of loaders in one pass after another, until a pass has none."""
    gave_any = True
    while gave_any:
        gave_any = False
        for batch in _whole_batches(_batches_of(loaders), batch_size):
            gave_any = True
            yield batch


def _whole_batches(batches: Iterable[object], batch_size: int) -> Iterator[object]:
    """Yield the batches of exactly ``batch_size`` examples.

    Where the first batch does not have that length, the first dimension is taken for another one,
    such as the length of sequences, and all batches are yielded.
    """
    counts_examples = False
    for number, batch in enumerate(batches):
        first = first_tensor(batch)
        is_whole = first is not None and first.dim() > 0 and len(first) == batch_size
        if number == 0:
            counts_examples = is_whole
        if is_whole or not counts_examples:
            yield batch


def _batches_of(loaders: Any) -> Iterator[object]:
    """Yield the batches of one pass over the loaders.

    Several loaders are read together: a batch is then a collection like theirs, with one of each.
    """
    several = loaders_of(loaders)
    if len(several) == 1 and several[0] is loaders:
        yield from loaders
        return
    # Lightning's CombinedLoader yields each batch with its number and that of its loader.
    is_combined = hasattr(loaders, "flattened")
    combined = loaders if is_combined else CombinedLoader(loaders, mode_of_loaders(loaders))
    for batch, _, _ in combined:
        yield batch
