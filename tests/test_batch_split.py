"""A global batch over devices and micro-batches, in exact integers."""

from itertools import product

import pytest

from bstune.core.batch_split import split_batch
from bstune.core.errors import ConfigError

TABLE = list(product((1, 2, 7, 32, 33, 100, 257), (1, 2, 3, 8), (1, 2, 5, 16, 1000, None)))


@pytest.mark.parametrize(
    ("numbers", "sizes"),
    [
        ((33, 2, None), [(17,), (16,)]),
        # 17 and 16 in as many micro-batches of at most 8.
        ((33, 2, 8), [(6, 6, 5), (6, 5, 5)]),
        ((32, 2, 8), [(8, 8), (8, 8)]),
        ((33, 1, 16), [(11, 11, 11)]),
        # Three examples fill no two micro-batches on each of two devices.
        ((3, 2, 1), [(1, 1), (1, 0)]),
        ((4096, 8, 128), [(128,) * 4] * 8),
    ],
)
def test_closed_forms(numbers, sizes):
    split = split_batch(*numbers)
    assert [split.sizes[device :: split.devices] for device in range(split.devices)] == sizes


@pytest.mark.parametrize(
    ("batch_size", "devices", "largest"), [row for row in TABLE if row[0] >= row[1]]
)
def test_each_example_is_in_one_micro_batch(batch_size, devices, largest):
    split = split_batch(batch_size, devices, largest)
    sizes = split.sizes
    assert sum(sizes) == batch_size
    assert max(sizes) - min(sizes) <= 1
    assert max(sizes) <= (largest or batch_size)
    # Only where micro-batches are of one example may one be empty.
    assert 0 not in sizes or largest == 1
    fewer = devices * (split.rounds - 1) * (largest or batch_size)
    assert fewer < batch_size, "no fewer rounds would do"
    for device in range(devices):
        own = split.sizes[device::devices]
        assert len(own) == split.rounds
        assert sum(own) in (batch_size // devices, -(-batch_size // devices))


def test_numbers_far_beyond_memory_are_split_at_once():
    assert split_batch(10**15 - 7, 10**6, 3).rounds == 333_333_334


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        ((0, 1, 2), "the batch size must be a whole number from 1 to 1000000000000000, but got 0"),
        ((8, -1, 2), "the number of devices must be a whole number .* but got -1"),
        ((8, 1, True), "the memory ceiling must be a whole number .* but got True"),
        ((8, 2.5, 1), "the number of devices must be a whole number .* but got 2.5"),
        (
            (3, 4, 2),
            (
                "a batch of 3 leaves some of 4 devices without an example: use at most 3 devices, "
                "or a batch size"
            ),
        ),
    ],
)
def test_bad_numbers_are_refused(numbers, message):
    with pytest.raises(ConfigError, match=message):
        split_batch(*numbers)
