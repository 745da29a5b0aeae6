"""One global batch over devices and micro-batches, in whole examples, with weights of their losses.

The weights keep the whole batch's gradient. Micro-batch i has n_i of the B examples. With each loss
a mean over its own examples, the whole batch's gradient is

    grad L = sum_i (n_i / B) grad L_i

whatever the n_i are; the plain mean over micro-batches is that only where all of them are equally
large. ``bstune plan 33 --devices 2 --memory-ceiling 8 --lr 0.1`` prints a split::

    global batch      33 examples a step on 2 devices, at most 8 at once on each
    accumulation      3 micro-batches a device and step
    device 0          17 examples: 2 x 6 + 1 x 5
    device 1          16 examples: 1 x 6 + 2 x 5
    loss of 6         times 6/33 where gradients are summed, 12/11 = 1.090909091 where they are ...
    loss of 5         times 5/33 where gradients are summed, 10/11 = 0.9090909091 where they are ...

and, with ``--reference-batch-size B0 --scaling RULE``, the learning rate of B0, scaled.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction

from bstune.core.errors import ConfigError

# The largest number that a split takes: a float holds each of them exactly.
LARGEST_WHOLE = 10**15


@dataclass(frozen=True)
class BatchSplit:
    """A batch in ``devices`` x ``rounds`` micro-batches, whose sizes differ by one example at most.

    Every device runs as many micro-batches, as they all take part in each exchange of gradients.
    """

    batch_size: int
    """Examples of the whole batch, B."""
    devices: int
    rounds: int
    """Micro-batches that each device runs in one optimizer step."""

    @property
    def sizes(self) -> tuple[int, ...]:
        """Sizes n_i of all micro-batches, round by round, device by device; their sum is B."""
        count = self.devices * self.rounds
        # Part i has ceil((B - i)/count) examples: the first ones have one more than the others.
        return tuple((self.batch_size + count - 1 - part) // count for part in range(count))

    def counts(self, device: int) -> dict[int, int]:
        """Count the micro-batches that one device runs, by their size, the larger ones first."""
        size, remainder = divmod(self.batch_size, self.devices * self.rounds)
        # The first ``remainder`` micro-batches are larger by one. This device runs those with the
        # numbers device, device + devices, ... So ceil((remainder - device)/devices) of its own are
        # larger.
        larger = max(0, -(-(remainder - device) // self.devices))
        by_size = {size + 1: larger, size: self.rounds - larger}
        return {n: count for n, count in by_size.items() if count}

    def share(self, device: int) -> int:
        """Count the examples of one device, by its number from 0."""
        return sum(size * count for size, count in self.counts(device).items())

    def weight(self, size: int) -> Fraction:
        """Factor of a micro-batch's loss where gradients are summed: n_i/B, with n_i = ``size``."""
        return Fraction(size, self.batch_size)

    def factor(self, size: int) -> Fraction:
        """Factor of a micro-batch's loss where gradients are averaged, as DDP does.

        It is n_i/B times the number of micro-batches, with n_i = ``size``.
        """
        return self.weight(size) * self.devices * self.rounds


def split_batch(batch_size: int, devices: int, largest: int | None = None) -> BatchSplit:
    """Split a batch into the fewest rounds in which no micro-batch exceeds ``largest`` examples.

    One round where ``largest`` is None.

    Raises:
        ConfigError: if a number is not a positive integer, or there are fewer examples than
            devices.
    """
    _check_whole("batch size", batch_size)
    _check_whole("number of devices", devices)
    rounds = 1
    if largest is not None:
        _check_whole("memory ceiling", largest)
        # The quotient is rounded up.
        rounds = -(-batch_size // (devices * largest))
    if batch_size < devices:
        plural = "s" * (batch_size > 1)
        raise ConfigError(
            f"a batch of {batch_size} leaves some of {devices} devices without an example: use at "
            f"most {batch_size} device{plural}, or a batch size of at least {devices}"
        )
    return BatchSplit(batch_size, devices, rounds)


def _check_whole(name: str, value: object) -> None:
    """Refuse what is no whole number; a truth value is an int in Python, but none here."""
    is_whole = isinstance(value, int) and not isinstance(value, bool)
    if not is_whole or not 1 <= value <= LARGEST_WHOLE:  # type: ignore[operator]
        raise ConfigError(
            f"the {name} must be a whole number from 1 to {LARGEST_WHOLE}, but got {value!r}"
        )


def split_lines(split: BatchSplit, largest: int) -> Iterator[str]:
    """Yield the split as lines to read: what each device runs, and how to weight the losses."""
    total = split.batch_size
    devices = split.devices
    plural = "s" * (devices > 1)
    yield (
        f"global batch      {total} examples a step on {devices} device{plural}, "
        f"at most {largest} at once on each"
    )
    plural = "es" * (split.rounds > 1)
    yield f"accumulation      {split.rounds} micro-batch{plural} a device and step"
    # The first of the devices have one example more than the others.
    with_more = total % devices
    for first_device, last_device in ((0, with_more - 1), (with_more, devices - 1)):
        if first_device <= last_device:
            yield _line_of_devices(split, first_device, last_device)
    # The first device has the largest micro-batch, the last one the smallest.
    sizes = split.counts(0).keys() | split.counts(devices - 1).keys()
    for size in sorted(sizes, reverse=True):
        factor = split.factor(size)
        value = f"{factor}"
        if factor.denominator != 1:
            value = f"{factor} = {float(factor):.10g}"
        yield (
            f"loss of {size:<9} times {size}/{total} where gradients are summed, "
            f"{value} where they are averaged"
        )
    # Further rows of a line begin below its values.
    margin = 18 * " "
    yield (
        f"{margin}over micro-batches and devices, as Lightning's accumulation and DDP do; "
        "so the gradient"
    )
    yield f"{margin}is the whole batch's, if each loss is the mean over its examples"
    if 0 in split.counts(devices - 1):
        yield (
            f"{margin}a micro-batch of 0 examples only takes part in the exchange, "
            "with gradients of 0"
        )


def _line_of_devices(split: BatchSplit, first_device: int, last_device: int) -> str:
    """Write the line of neighbouring devices that run micro-batches of the same sizes."""
    name = (
        f"device {first_device}"
        if first_device == last_device
        else f"devices {first_device} to {last_device}"
    )
    each = " each" * (first_device < last_device)
    spelt = " + ".join(f"{count} x {size}" for size, count in split.counts(first_device).items())
    return f"{name:<17} {split.share(first_device)} examples{each}: {spelt}"
