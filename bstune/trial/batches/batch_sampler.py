"""A batch sampler for a DataLoader, whose batches come from an endless stream of indices."""

from collections.abc import Iterator
from itertools import islice
from typing import Any

import torch
from torch.utils.data import Sampler

from bstune.trial.batches.epochs import Epoch
from bstune.trial.batches.index_stream import IndexStream
from bstune.trial.batches.micro_batches import micro_batch_sizes_of, splitter
from bstune.trial.devices.randomness import random_state, set_random_state


class StreamBatchSampler(Sampler[list[int]]):
    """Yields lists of indices, one micro-batch each, in epochs of n // batch_size batches.

    Examples that an epoch leaves over are in the first batch of the next one.

    Args:
        n: indices of an epoch.
        batch_size: indices of a batch.
        micro_batch_size: the most indices in a list; None: a whole batch.
        generator: from which epochs are drawn.
        in_process: whether this process reads the examples, so that the states of its global
            random generators belong to a position in the stream.
        epoch: draws the indices of an epoch; None: a permutation.
    """

    def __init__(
        self,
        n: int,
        batch_size: int,
        micro_batch_size: int | None,
        generator: torch.Generator,
        in_process: bool,
        epoch: Epoch | None = None,
    ) -> None:
        self.micro_batch_sizes = micro_batch_sizes_of(batch_size, micro_batch_size)
        self._split = splitter(batch_size, micro_batch_size)
        random_states: dict[str, Any] = {}
        # Worker processes read examples with generators of their own.
        if in_process:
            random_states = {"get_random": random_state, "set_random": set_random_state}
        self.stream = IndexStream(n, batch_size, generator, epoch=epoch, **random_states)
        # The batches of an epoch.
        self._batches_of_epoch = n // batch_size
        self._in_process = in_process
        # Whether Lightning has taken no iterator yet.
        self._is_fresh = True

    def __len__(self) -> int:
        return self._batches_of_epoch * len(self.micro_batch_sizes)

    def __iter__(self) -> Iterator[list[int]]:
        drawn = self.stream.drawn
        # Where a trial goes on after a whole epoch, Lightning first takes an iterator of the ended
        # epoch and reads nothing of it. Worker processes read ahead, and would draw batches of the
        # next epoch for it. So this iterator is empty where there are workers.
        is_at_epoch_end = drawn > 0 and drawn % self._batches_of_epoch == 0
        is_of_ended_epoch = self._is_fresh and not self._in_process and is_at_epoch_end
        self._is_fresh = False
        left = self._batches_of_epoch - drawn % self._batches_of_epoch
        if is_of_ended_epoch:
            left = 0
        for index in islice(self.stream, left):
            for micro_batch in self._split(index):
                yield micro_batch.tolist()
