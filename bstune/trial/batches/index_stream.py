"""Endless streams of examples' indices, in whole batches, that can be resumed after any batch."""

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
    """A position in a stream, as plain data: batches before it, and its generators' states."""

    batches: int
    random: Any


def endless_indices(
    n: int,
    batch_size: int,
    generator: torch.Generator,
    first: int = 0,
    epoch: Epoch | None = None,
) -> Iterator[Tensor]:
    """Yield the indices of one batch after another, (batch_size,) int64, without end.

    They are of one epoch after another. A batch may straddle two epochs, and may then contain an
    example twice.

    Args:
        n: indices of an epoch.
        batch_size: indices of a batch.
        generator: from which epochs are drawn, on the device of the indices.
        first: the number of batches to pass over.
        epoch: draws the indices of an epoch; None: a permutation of 0 to n - 1.
    """
    device = generator.device
    draw_epoch = permutation(n) if epoch is None else epoch
    # Indices that are drawn and not yielded yet.
    rest = torch.empty(0, dtype=torch.int64, device=device)
    passed_over = first * batch_size
    epochs = math.ceil(passed_over / n)
    # Epochs are drawn to be passed over, as each one moves the generator on.
    for _ in range(epochs):
        rest = draw_epoch(generator)
    # The last epoch that is drawn here is passed over in part.
    left = epochs * n - passed_over
    rest = rest[len(rest) - left :]
    while True:
        # A batch is no larger than an epoch, so that one more is enough.
        if len(rest) < batch_size:
            rest = torch.cat([rest, draw_epoch(generator)])
        yield rest[:batch_size]
        rest = rest[batch_size:]


class IndexStream:
    """A stream of batches of :func:`endless_indices` that can be resumed at a position.

    A position includes the state of further generators, such as those of an augmentation. The state
    before the last group is remembered, as Lightning fetches, and so augments, one batch ahead.
    Where a group is one batch, it is remembered only while ``remembers`` is set.

    Where each group is a single batch, the stream can be iterated over. Where groups have several
    batches, whoever uses it calls :meth:`draw` once for each group, counts the batches of the group
    in ``drawn`` as they are handed out, and splits the group's indices.

    Args:
        n: indices of an epoch.
        batch_size: indices of a batch.
        order: the generator from which epochs are drawn.
        get_random: gives the state of the further generators.
        set_random: sets it.
        batches_together: batches of a group, which are drawn at once.
        epoch: draws the indices of an epoch; None: a permutation of 0 to n - 1.

    Attributes:
        remembers: whether the position before the next batch is remembered.
        drawn: batches that were handed out, from the first of the stream.
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
        self.drawn = 0
        self.batches_together = batches_together
        self._start = functools.partial(endless_indices, n, group_size, order, epoch=epoch)
        self._get_random = get_random
        self._set_random = set_random
        self._indices = self._start(first=0)
        # The number of batches before the last group, and the generators' state there.
        self._remembered: tuple[int, Any] | None = None
        # The generators' state to set before the next draw; None: it is left alone.
        self._resumed: Any = None

    def __iter__(self) -> Iterator[Tensor]:
        """Yield the indices of one batch after another, where batches are drawn one by one."""
        while True:
            index = self.draw()
            self.drawn += 1
            yield index

    def draw(self) -> Tensor:
        """Draw the indices of the group that the next batch is in.

        A group is ``batches_together`` batches, which are drawn at once. After a resume, earlier
        batches of the group may have been handed out already.
        """
        if self._resumed is not None:
            self._set_random(self._resumed)
            self._resumed = None
        # A trial may stop amid a group, and is then resumed from the state before the group. For
        # groups of one batch ``remembers`` says when the state is needed.
        if self.remembers or self.batches_together > 1:
            self._remembered = self._first_of_group(self.drawn), self._get_random()
        return next(self._indices)

    def position(self, batches: int) -> Position:
        """Give the position after ``batches`` batches, as plain data.

        It has the state of further generators (of an augmentation) before the next batch's group,
        which is the ``batches_together`` batches that are drawn at once. That state is known for
        the group that was drawn last, and for the one after it. A ValueError refuses any other
        position.
        """
        state = self._get_random()
        first = self._first_of_group(batches)
        # Without further generators the number of batches is enough. Where the next group begins
        # at ``drawn``, the generators' state is the one before it.
        if state is not None and first != self.drawn:
            if self._remembered is None or self._remembered[0] != first:
                raise ValueError(
                    f"the position after {batches} batches is not remembered: {self.drawn} are "
                    "drawn"
                )
            state = self._remembered[1]
        return {"batches": batches, "random": state}

    def _first_of_group(self, batches: int) -> int:
        """Give the number of batches before the group that batch number ``batches`` is in."""
        return batches - batches % self.batches_together

    def resume(self, position: Position) -> None:
        """Go on from a position of an equal stream; a ValueError once a batch is drawn."""
        if self.drawn:
            raise ValueError(
                f"only a fresh stream can be resumed, but {self.drawn} batches are drawn"
            )
        self.drawn = position["batches"]
        self._resumed = position["random"]
        # The indices come in groups, of which those before the next batch's group are passed over.
        self._indices = self._start(first=self.drawn // self.batches_together)


@runtime_checkable
class Stream(Protocol):
    """A stream of batches from which a trial can go on later.

    Attributes:
        remembers: whether the position before the next batch is remembered; a trial sets it.
    """

    remembers: bool

    def position(self, batches: int) -> Position:
        """Give the position after so many batches, as plain data."""

    def resume(self, position: Position) -> None:
        """Go on from a position, before any batch is drawn."""


def stream_of(batches: object) -> Stream:
    """Find the stream that a trial's batches come from.

    It is there for TrainBatches, GivenBatches and the DataLoaders of ``rebatch``. A ConfigError
    says that other batches have none, so that the trial cannot be stopped and continued.
    """
    source = batches.batch_sampler if isinstance(batches, DataLoader) else batches
    stream = getattr(source, "stream", None)
    if isinstance(stream, Stream):
        return stream
    raise ConfigError(
        f"a trial on batches from {type(batches).__name__} cannot be stopped to go on later: take "
        "them from TrainBatches, or from a DataLoader through rebatch()"
    )
