"""An endless stream of examples' indices, in whole batches, that can be resumed at any of them."""

import functools
import math
from collections.abc import Callable, Iterator
from typing import Any, Protocol, TypedDict, runtime_checkable

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from bstune.core.errors import ConfigError, check_positive_integer
from bstune.trial.batches.epochs import Epoch, permutation


class Position(TypedDict):
    """A position in a stream, as data: batches before it, and the states of its generators."""

    batches: int
    random: Any


def endless_indices(
    n: int,
    batch_size: int,
    generator: torch.Generator,
    first: int = 0,
    epoch: Epoch | None = None,
) -> Iterator[Tensor]:
    """Yield index tensors (B,), int64, from batch ``first`` on, on the generator's device.

    They are of one epoch after another. Each epoch is a new permutation of 0 to n - 1, unless
    ``epoch`` draws its n indices in another way; a batch may straddle two, and may then contain an
    example twice.
    """
    device = generator.device
    epoch = permutation(n) if epoch is None else epoch
    rest = torch.empty(0, dtype=torch.int64, device=device)
    drawn = first * batch_size
    epochs = math.ceil(drawn / n)
    for _ in range(epochs):
        rest = epoch(generator)
    rest = rest[len(rest) - (epochs * n - drawn) :]
    while True:
        if len(rest) < batch_size:
            rest = torch.cat([rest, epoch(generator)])
        yield rest[:batch_size]
        rest = rest[batch_size:]


class IndexStream:
    """Batches of :func:`endless_indices` that can be resumed at a position.

    The generators of the augmentation are, too. ``batches_together`` batches, a group, are drawn at
    once, and the generators' states before the last group are kept. Where a group is one batch,
    that is done only while ``remembers`` is set: Lightning fetches, and so augments, one batch
    ahead.
    """

    def __init__(
        self,
        n: int,
        batch_size: int,
        order: torch.Generator,
        get_random: Callable[[], object] = lambda: None,
        set_random: Callable[[Any], object] = lambda state: None,
        batches_together: int = 1,
        epoch: Epoch | None = None,
    ) -> None:
        check_positive_integer("batch size", batch_size)
        if batch_size > n:
            raise ConfigError(
                f"batch size {batch_size} is larger than the data set ({n} examples): lower the "
                "largest batch size"
            )
        group_size = batch_size * batches_together
        self.remembers = False
        # Batches that were handed out, from the first of the stream.
        self.drawn = 0
        self.batches_together = batches_together
        self._start = functools.partial(endless_indices, n, group_size, order, epoch=epoch)
        self._get_random = get_random
        self._set_random = set_random
        self._indices = self._start(0)
        self._remembered: tuple[int, Any] | None = None
        self._resumed: Any = None

    def __iter__(self) -> Iterator[Tensor]:
        """Yield the indices of one batch after another, where they are not drawn together."""
        while True:
            index = self.draw()
            self.drawn += 1
            yield index

    def draw(self) -> Tensor:
        """Draw the indices of the group of batches that the next one is in.

        Its first ones may be handed out.
        """
        if self._resumed is not None:
            self._set_random(self._resumed)
            self._resumed = None
        if self.remembers or self.batches_together > 1:
            self._remembered = self._first_of_group(self.drawn), self._get_random()
        return next(self._indices)

    def position(self, batches: int) -> Position:
        """Give the position after ``batches`` batches.

        They are all that are drawn, or all but a remembered one.
        """
        state = self._get_random()
        first = self._first_of_group(batches)
        if state is not None and first != self.drawn:
            if self._remembered is None or self._remembered[0] != first:
                raise ValueError(
                    f"the position after {batches} batches is not remembered: {self.drawn} are "
                    "drawn"
                )
            state = self._remembered[1]
        return {"batches": batches, "random": state}

    def _first_of_group(self, batches: int) -> int:
        return batches - batches % self.batches_together

    def resume(self, position: Position) -> None:
        """Go on from a position of a stream of the same arguments, before any batch is drawn."""
        if self.drawn:
            raise ValueError(
                f"only a fresh stream can be resumed, but {self.drawn} batches are drawn"
            )
        self.drawn = position["batches"]
        self._resumed = position["random"]
        self._indices = self._start(self.drawn // self.batches_together)


@runtime_checkable
class Stream(Protocol):
    """What a trial asks of the stream that its batches are from, so that it can go on later.

    Attributes:
        remembers: whether the position before the batch that is drawn next is to be kept.
    """

    remembers: bool

    def position(self, batches: int) -> Position:
        """Give the position after so many batches, as data."""

    def resume(self, position: Position) -> None:
        """Go on from a position, before any batch is drawn."""


def stream_of(batches: object) -> Stream:
    """Find the stream behind a trial's batches.

    They are :class:`TrainBatches`, :class:`GivenBatches`, or what :func:`rebatch` returned.
    """
    source = batches.batch_sampler if isinstance(batches, DataLoader) else batches
    stream = getattr(source, "stream", None)
    if isinstance(stream, Stream):
        return stream
    raise ConfigError(
        f"a trial on batches from {type(batches).__name__} cannot be stopped to go on later: take "
        "them from TrainBatches, or from a DataLoader through rebatch()"
    )
