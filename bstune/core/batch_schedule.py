"""Batch sizes that change while training: a schedule's parts, each with its batch size and its first batch.

A trial that starts at B_0 trains its part i at B_i = B_0 factor^i. Part i + 1 begins with the first batch before which
``switch_examples[i]`` x ``stretch`` examples were trained on, so that every batch is whole. The learning rate of part i
is the trial's own, times (B_i/B_0)^lr_exponent: 1/2 keeps the noise of Adam's steps, 1 that of SGD's (Malladi et al.
2022, arXiv 2205.10287; Smith et al. 2018, arXiv 1711.00489, raise B in place of lowering the rate, which is 0).
"""

import math
from bisect import bisect_right
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

from bstune.core.errors import ConfigError


@dataclass(frozen=True)
class BatchPlan:
    """The batch sizes of one trial: part i has batches of ``sizes[i]`` examples, from batch ``first[i]`` on."""

    sizes: tuple[int, ...]
    first: tuple[int, ...] = (0,)  # batches are counted from 0, over all parts
    lr_factors: tuple[float, ...] = (1.0,)

    @property
    def changes(self) -> bool:
        """Whether there is more than one batch size."""
        return len(self.sizes) > 1

    @property
    def largest(self) -> int:
        """The batch size of the last part, none of which falls."""
        return self.sizes[-1]

    def part(self, batch: int) -> int:
        """Return the part, from 0, that a batch is in."""
        return bisect_right(self.first, batch) - 1

    def examples(self, batches: int) -> int:
        """Return how many examples the first ``batches`` batches have."""
        return sum(size * count for size, count in self.counts(batches))

    def counts(self, batches: int) -> tuple[tuple[int, int], ...]:
        """Return batch size and number of batches of each part that the first ``batches`` of them reach into."""
        ends = (*self.first[1:], batches)
        parts = zip(self.sizes, self.first, ends, strict=True)
        return tuple(
            (size, min(end, batches) - first) for size, first, end in parts if first < batches
        )

    def batches_until(self, examples: float, share: float = 1.0) -> int:
        """Return the least number of batches whose examples, times ``share``, are ``examples`` or more."""
        before, part = 0, 0
        while True:
            size, first = self.sizes[part], self.first[part]
            batches = first + math.ceil((examples - share * before) / (share * size))
            if part == len(self.sizes) - 1 or batches <= self.first[part + 1]:
                return batches
            before += size * (self.first[part + 1] - first)
            part += 1

    def epoch(self, examples: int, batch: int) -> range:
        """Return the batches of the epoch that ``batch`` is in, each epoch as many whole ones as ``examples`` make.

        What a data set's epoch leaves over is in the first batch of the next one. No batch has more examples.
        """
        start = 0
        while self.part(start) < len(self.sizes) - 1:
            stop = self._batches_within(self.examples(start) + examples)
            if batch < stop:
                return range(start, stop)
            start = stop
        length = examples // self.largest
        start += (batch - start) // length * length
        return range(start, start + length)

    def _batches_within(self, examples: int) -> int:
        """Return the largest number of batches with at most so many examples."""
        batches = self.batches_until(examples)
        return batches if self.examples(batches) == examples else batches - 1


@dataclass(frozen=True)
class BatchSchedule:
    """How the batch size of a trial grows from the one that it starts at; see the module's docstring.

    Args:
        factor: times the present batch size, at each switch; at least 1.
        switch_examples: rising numbers of examples, trained on before each switch.
        stretch: times all of these numbers, over 0.
        lr_exponent: of the learning rate's growth with the batch size.
        largest: batch sizes stay at most this; None: they have no limit but the data's length.

    Raises:
        ConfigError: for a factor below 1, which would end below the start, or switches that do not rise.
    """

    factor: float
    switch_examples: tuple[int, ...]
    stretch: float
    lr_exponent: float
    largest: int | None

    def __post_init__(self) -> None:
        if self.factor < 1.0:
            raise ConfigError(
                f"batch_schedule.factor={self.factor:g} ends below the batch size that it starts at, but batch sizes "
                "only grow: give a factor of at least 1"
            )
        if any(later <= earlier for earlier, later in pairwise((0, *self.switch_examples))):
            raise ConfigError(
                "batch_schedule.switch_examples must be rising numbers of examples, over 0, but got "
                f"{list(self.switch_examples)}"
            )

    def __str__(self) -> str:
        switches = ", ".join(f"{round(switch * self.stretch):,}" for switch in self.switch_examples)
        return f"{self.factor:.3g} times as large after {switches} examples"

    def plan(self, batch_size: int) -> BatchPlan:
        """Return the parts of a trial that starts at a batch size; ConfigError if the largest one is below it."""
        if self.largest is not None and self.largest < batch_size:
            raise ConfigError(
                f"batch_schedule.largest={self.largest} ends below the batch size that the trial starts at, "
                f"{batch_size}: raise it, or lower trial.batch_size or search.batch_size.high"
            )
        return _plan(self, batch_size)


@lru_cache(maxsize=1024)
def _plan(schedule: BatchSchedule, batch_size: int) -> BatchPlan:
    limit = math.inf if schedule.largest is None else schedule.largest
    sizes, first, examples = [batch_size], [0], 0
    for number, switch in enumerate(schedule.switch_examples, start=1):
        size = int(min(limit, round(batch_size * schedule.factor**number)))
        batches = max(0, math.ceil((switch * schedule.stretch - examples) / sizes[-1]))
        if batches == 0:  # within the batch after which the one before comes
            sizes[-1] = size
        elif size > sizes[-1]:
            examples += batches * sizes[-1]
            sizes.append(size)
            first.append(first[-1] + batches)
    factors = tuple((size / batch_size) ** schedule.lr_exponent for size in sizes)
    return BatchPlan(tuple(sizes), tuple(first), factors)


def constant(batch_size: int) -> BatchPlan:
    """Return the plan of a trial that keeps its batch size."""
    return BatchPlan((batch_size,))
