"""One global batch over devices and their micro-batches, in whole examples, with the weights that keep its gradient.

Micro-batch i has n_i of the B examples. With each loss a mean over its own examples, the whole batch's gradient is

    grad L = sum_i (n_i / B) grad L_i

whatever the n_i are; the plain mean over micro-batches is that only where all of them are equally large.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction

from bstune.core.errors import ConfigError

LARGEST = 10**15  # of each number: a float holds it


@dataclass(frozen=True)
class BatchSplit:
    """A batch in ``devices`` x ``rounds`` micro-batches, whose sizes differ by one example at most.

    Every device runs as many micro-batches, as they all take part in each exchange of gradients.
    """

    batch_size: int
    devices: int
    rounds: int  # micro-batches of a device in one optimizer step

    @property
    def sizes(self) -> tuple[int, ...]:
        """All n_i: of the first round device by device, then of the next one; their sum is B."""
        parts = self.devices * self.rounds
        return tuple((self.batch_size + parts - 1 - part) // parts for part in range(parts))

    def counts(self, device: int) -> dict[int, int]:
        """Return how many micro-batches of which size one device runs, the larger ones first."""
        size, rest = divmod(self.batch_size, self.devices * self.rounds)
        larger = max(0, -(-(rest - device) // self.devices))
        return {
            n: count for n, count in ((size + 1, larger), (size, self.rounds - larger)) if count
        }

    def share(self, device: int) -> int:
        """Return the examples of one device."""
        return sum(size * count for size, count in self.counts(device).items())

    def weight(self, size: int) -> Fraction:
        """Return n_i/B, of a micro-batch of ``size`` examples in the sum of gradients."""
        return Fraction(size, self.batch_size)

    def factor(self, size: int) -> Fraction:
        """Return what to multiply its loss by where gradients are averaged, as DDP over devices does: n_i/B x parts."""
        return self.weight(size) * self.devices * self.rounds


def split_batch(batch_size: int, devices: int, largest: int | None = None) -> BatchSplit:
    """Return the split with the fewest rounds in which no micro-batch exceeds ``largest`` examples (None: one round).

    ConfigError if a number is not a positive integer, or if there are fewer examples than devices.
    """
    for name, value in (
        ("batch size", batch_size),
        ("number of devices", devices),
        ("memory ceiling", largest),
    ):
        if value is not None and (
            isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= LARGEST
        ):
            raise ConfigError(
                f"the {name} must be a whole number from 1 to {LARGEST}, but got {value!r}"
            )
    if batch_size < devices:
        raise ConfigError(
            f"a batch of {batch_size} leaves some of {devices} devices without an example: use at most {batch_size} "
            f"device{'s' * (batch_size > 1)}, or a batch size of at least {devices}"
        )
    return BatchSplit(
        batch_size, devices, 1 if largest is None else -(-batch_size // (devices * largest))
    )


def split_lines(split: BatchSplit, largest: int) -> Iterator[str]:
    """Yield the split as lines to read: what each device runs, and how to weight the losses."""
    total, devices, rounds = split.batch_size, split.devices, split.rounds
    plural = "s" * (devices > 1)
    yield f"global batch      {total} examples a step on {devices} device{plural}, at most {largest} at once on each"
    yield f"accumulation      {rounds} micro-batch{'es' * (rounds > 1)} a device and step"
    with_more = total % devices  # devices that have one example more than the others
    for first, last in ((0, with_more - 1), (with_more, devices - 1)):
        if first <= last:
            name = f"device {first}" if first == last else f"devices {first} to {last}"
            spelt = " + ".join(f"{count} x {size}" for size, count in split.counts(first).items())
            yield f"{name:<17} {split.share(first)} examples{' each' * (first < last)}: {spelt}"
    for size in sorted(
        {size for device in (0, devices - 1) for size in split.counts(device)}, reverse=True
    ):
        factor = split.factor(size)
        value = f"{factor}" if factor.denominator == 1 else f"{factor} = {float(factor):.10g}"
        yield f"loss of {size:<9} times {size}/{total} where gradients are summed, {value} where they are averaged"
    yield "                  over micro-batches and devices, as Lightning's accumulation and DDP do; so the gradient"
    yield "                  is the whole batch's, if each loss is the mean over its examples"
    if 0 in split.counts(devices - 1):
        yield "                  a micro-batch of 0 examples only takes part in the exchange, with gradients of 0"
