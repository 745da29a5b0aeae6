"""A global batch over devices and micro-batches: exact integers, and the whole batch's gradient in exact fractions."""

from collections import Counter
from fractions import Fraction
from itertools import product

import pytest

from bstune.core.batch_split import split_batch, split_lines
from bstune.core.errors import ConfigError
from bstune.core.scaling import lr_of

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
def test_each_example_is_in_one_micro_batch_and_the_gradient_is_the_whole_batchs(
    batch_size, devices, largest
):
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
        assert split.share(device) == sum(own) in (batch_size // devices, -(-batch_size // devices))
        assert split.counts(device) == Counter(own)
    # d/dw of the mean of (w x - y)^2 / 2, at w = 3
    gradients = [
        Fraction((3 * x - y) * x) for x, y in ((e % 11 - 5, e % 7) for e in range(batch_size))
    ]
    whole = sum(gradients) / batch_size
    summed = averaged = Fraction(0)
    start = 0
    for size in sizes:
        mean = sum(gradients[start : start + size], Fraction(0)) / max(1, size)
        start += size
        summed += split.weight(size) * mean
        averaged += split.factor(size) * mean / (devices * split.rounds)
    assert summed == averaged == whole


def test_numbers_far_beyond_memory_are_split_at_once():
    split = split_batch(10**15 - 7, 10**6, 3)
    # The first of the million devices have a whole share, the last seven one example less.
    assert split.share(0) == split.share(10**6 - 8) == 10**9
    assert split.share(10**6 - 7) == split.share(10**6 - 1) == 10**9 - 1


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


@pytest.mark.parametrize(
    ("rule", "values", "lr"),
    [
        ("none", (64, 0.2, None), 0.2),
        ("sqrt", (64, 0.2, None), 0.4),
        ("saturating", (64, 0.2, 500), None),
    ],
)
def test_a_rule_by_name(rule, values, lr):
    found = lr_of(rule, 256, *values)
    assert found == pytest.approx(
        0.2 * (1 + 500 / 64) / (1 + 500 / 256) if lr is None else lr, rel=1e-12
    )


@pytest.mark.parametrize(
    "values", [(0, 0.2, None), (64, float("nan"), None), (64, -1.0, None), (64, 0.2, 0.0)]
)
def test_a_rule_of_bad_numbers_is_refused(values):
    with pytest.raises(ConfigError, match="must be a positive number, but got"):
        lr_of("sqrt", 256, *values)


def test_the_command(bstune):
    status, out, err = bstune(
        "plan", "33", "--devices", "2", "--memory-ceiling", "8", "--lr", "0.1"
    )
    assert (status, err) == (0, "")
    assert out.splitlines() == [
        "global batch      33 examples a step on 2 devices, at most 8 at once on each",
        "accumulation      3 micro-batches a device and step",
        "device 0          17 examples: 2 x 6 + 1 x 5",
        "device 1          16 examples: 1 x 6 + 2 x 5",
        (
            "loss of 6         times 6/33 where gradients are summed, 12/11 = 1.090909091 where "
            "they are averaged"
        ),
        (
            "loss of 5         times 5/33 where gradients are summed, 10/11 = 0.9090909091 where "
            "they are averaged"
        ),
        (
            "                  over micro-batches and devices, as Lightning's accumulation and DDP "
            "do; so the gradient"
        ),
        "                  is the whole batch's, if each loss is the mean over its examples",
        "learning rate     0.1: the global batch's, whatever the number of devices",
    ]
    arguments = (
        "--devices",
        "64",
        "--memory-ceiling",
        "16",
        "--lr",
        "0.1",
        "--reference-batch-size",
        "256",
    )
    out = bstune("plan", "4100", *arguments)[1]
    # 4100 = 64 x 64 + 4.
    assert "devices 0 to 3    65 examples each: " in out
    assert "devices 4 to 63   64 examples each: " in out
    # 0.1 sqrt(4100/256).
    assert "learning rate     0.400195 (sqrt from 0.1 at 256): " in out
    lines = "\n".join(split_lines(split_batch(3, 2, 1), 1))
    assert "a micro-batch of 0 examples" in lines


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("8 --devices 2", "the following arguments are required: --memory-ceiling"),
        ("x --devices 2 --memory-ceiling 4", "argument B: invalid int value: 'x'"),
        (
            "3 --devices 4 --memory-ceiling 4",
            "error: a batch of 3 leaves some of 4 devices without an example",
        ),
        (
            "8 --devices 2 --memory-ceiling 4 --lr inf",
            "error: the learning rate must be a positive number, but got inf",
        ),
        (
            "8 --devices 2 --memory-ceiling 4 --reference-batch-size 4",
            "needs the learning rate that goes with it",
        ),
        (
            "8 --devices 2 --memory-ceiling 4 --lr 1 --scaling surge",
            "--scaling surge needs --noise-scale, in examples",
        ),
    ],
)
def test_bad_input_ends_in_a_line(bstune, arguments, message):
    status, out, err = bstune("plan", *arguments.split())
    assert (status, out) == (2, "")
    assert message in err
