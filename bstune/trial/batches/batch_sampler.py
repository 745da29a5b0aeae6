"""The batches of a DataLoader, of which an endless stream of indices says what is in them."""

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
    """Yields lists of indices, one micro-batch each, in epochs of n // B batches.

    What an epoch leaves over of its n examples is in the first batch of the next one. What reading
    the indices ``in_process`` draws is part of the stream's position. ``epoch`` draws the indices
    of one; None: a permutation.
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
        if in_process:
            random_states = {"get_random": random_state, "set_random": set_random_state}
        self.stream = IndexStream(n, batch_size, generator, epoch=epoch, **random_states)
        # Of one epoch, in batches.
        self._length = n // batch_size
        self._in_process = in_process
        self._fresh = True

    def __len__(self) -> int:
        return self._length * len(self.micro_batch_sizes)

    def __iter__(self) -> Iterator[list[int]]:
        drawn = self.stream.drawn
        # Where a trial goes on after a whole epoch, Lightning takes an iterator of that one too,
        # and reads none of it; worker processes would read ahead.
        has_ended = drawn > 0 and drawn % self._length == 0
        is_ended = self._fresh and not self._in_process and has_ended
        self._fresh = False
        left = 0 if is_ended else self._length - drawn % self._length
        for index in islice(self.stream, left):
            for micro_batch in self._split(index):
                yield micro_batch.tolist()
