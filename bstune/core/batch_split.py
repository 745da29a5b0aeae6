"""One global batch over devices and micro-batches, in whole examples.

Micro-batch i has n_i of the B examples. With each loss a mean over its own examples, the whole
batch's gradient is

    grad L = sum_i (n_i / B) grad L_i

whatever the n_i are; the plain mean over micro-batches is that only where all of them are equally
large.
"""

from dataclasses import dataclass

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
