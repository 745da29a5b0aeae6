import random
from dataclasses import replace
from functools import partial
from itertools import islice

import numpy as np
import pytest
import torch
from learners import Operators
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from bstune.core.errors import ConfigError
from bstune.trial.batches import (
    EvalBatches,
    IndexStream,
    Normalisation,
    TrainBatches,
    endless,
    endless_indices,
    epoch_length,
    micro_batch_sizes,
    rebatch,
    seeded_generators,
    stream_of,
)
from bstune.workloads.images import random_crop_flip

IMAGES = torch.randint(
    0, 256, (20, 3, 8, 6), generator=torch.Generator().manual_seed(1), dtype=torch.uint8
)
LABELS = torch.arange(20)
SCALE = torch.linspace(0.01, 0.03, 3).view(1, 3, 1, 1)
NORMALISE = Normalisation(SCALE, -100 * SCALE)
crop = partial(random_crop_flip, padding=2)
mirror_only = partial(random_crop_flip, padding=0)


def train_batches(
    batch_size=6, micro_batch_size=None, seed=0, images=IMAGES, normalise=NORMALISE, **options
):
    labels = torch.arange(len(images), device=images.device)
    options |= {"batch_size": batch_size, "micro_batch_size": micro_batch_size, "seed": seed}
    return TrainBatches(images, labels, normalise=normalise, **options)


@pytest.mark.parametrize(("n", "batch_size"), [(10, 1), (10, 3), (10, 10), (1, 1)])
def test_indices_are_shuffled_epochs_cut_into_equal_batches(n, batch_size):
    def indices(size, first=0):
        return endless_indices(n, size, torch.Generator().manual_seed(0), first)

    batches = list(islice(indices(batch_size), 3 * n))
    assert {batch.shape for batch in batches} == {(batch_size,)}
    stream = torch.cat(batches)
    assert stream.dtype == torch.int64
    epochs = stream[: len(stream) // n * n].view(-1, n)
    assert torch.equal(epochs.sort(dim=1).values, torch.arange(n).expand_as(epochs))
    if n > 1:
        assert len({tuple(epoch) for epoch in epochs.tolist()}) > 1
    whole = torch.cat(list(islice(indices(n), 3 * batch_size)))
    assert torch.equal(whole, stream)  # the order does not depend on the batch size
    for first in (0, 1, 3, 10, 2 * n):
        later = islice(indices(batch_size, first), n)
        assert all(torch.equal(a, b) for a, b in zip(batches[first:], later, strict=False))


@pytest.mark.parametrize(
    ("batch_size", "text"),
    [
        (70000, r"batch size 70000 is larger than the data set \(55000 examples\)"),
        (0, "batch size must be a positive integer, but got 0"),
        (32.0, "batch size must be a positive integer, but got 32.0"),
        (True, "batch size must be a positive integer, but got True"),
    ],
)
def test_batch_size_is_checked_at_once(batch_size, text):
    with pytest.raises(ConfigError, match=text):
        IndexStream(55000, batch_size, torch.Generator())


@pytest.mark.parametrize(
    ("batch_size", "micro_batch_size", "sizes"),
    [(8, None, (8,)), (8, 8, (8,)), (8, 100, (8,)), (8, 3, (3, 3, 2)), (3, 1, (1, 1, 1))],
)
def test_micro_batch_sizes(batch_size, micro_batch_size, sizes):
    assert micro_batch_sizes(batch_size, micro_batch_size) == sizes


def test_seeded_generators_differ_from_each_other_and_from_the_next_seed():
    numbers = [
        torch.rand(1, generator=g).item()
        for seed in (0, 1)
        for g in seeded_generators(seed, "cpu", 2)
    ]
    assert len(set(numbers)) == 4
    assert [torch.rand(1, generator=g).item() for g in seeded_generators(0, "cpu", 2)] == numbers[
        :2
    ]


@pytest.mark.parametrize("batch_size", [1, 6, 20])
def test_train_batches_are_those_of_a_loop_over_examples(batch_size):
    order, _ = seeded_generators(0, "cpu", 2)
    indices = endless_indices(20, batch_size, order)
    for (x, y), index in zip(islice(train_batches(batch_size), 10), indices, strict=False):
        expected = torch.stack(
            [IMAGES[i].double() * SCALE[0] - 100 * SCALE[0] for i in index.tolist()]
        )
        assert (x.dtype, y.dtype) == (torch.float32, torch.int64)
        torch.testing.assert_close(x.double(), expected, rtol=0, atol=1e-6)
        assert torch.equal(y, LABELS[index])


@pytest.mark.parametrize(("micro_batch_size", "augment"), [(1, None), (4, crop), (9, None)])
def test_micro_batches_are_the_batch_bit_for_bit(micro_batch_size, augment):
    sizes = micro_batch_sizes(9, micro_batch_size)
    stream = iter(train_batches(9, micro_batch_size, augment=augment))
    for x, y in islice(train_batches(9, augment=augment), 8):
        images, labels = zip(*islice(stream, len(sizes)), strict=True)
        assert tuple(map(len, images)) == sizes
        assert torch.equal(torch.cat(images), x)
        assert torch.equal(torch.cat(labels), y)


def test_train_batches_are_a_function_of_the_seed_and_augmentation_keeps_their_order():
    first, again, other = (
        list(islice(train_batches(seed=seed, augment=crop), 9)) for seed in (0, 0, 1)
    )
    assert all(
        torch.equal(a[0], b[0]) and torch.equal(a[1], b[1])
        for a, b in zip(first, again, strict=True)
    )
    assert not any(torch.equal(a[1], b[1]) for a, b in zip(first, other, strict=True))
    plain = list(islice(train_batches(), 9))
    assert all(torch.equal(a[1], b[1]) for a, b in zip(first, plain, strict=True))
    assert not any(torch.equal(a[0], b[0]) for a, b in zip(first, plain, strict=True))


def test_train_batches_have_no_length_and_go_on_at_a_whole_batch():
    batches = train_batches(6, 4)
    with pytest.raises(TypeError, match="len"):
        len(batches)
    reference = [y for _, y in islice(train_batches(6), 3)]
    assert torch.equal(next(iter(batches))[1], reference[0][:4])
    assert torch.equal(
        next(iter(batches))[1], reference[1][:4]
    )  # the rest of the first batch is not repeated
    assert torch.equal(torch.cat([y for _, y in islice(batches, 2)]), reference[2])


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
@pytest.mark.parametrize(
    ("n", "batch_size", "sizes"), [(20, 8, [8, 8, 4]), (20, 50, [20]), (0, 5, [])]
)
def test_eval_batches_are_all_examples_in_order(n, batch_size, sizes, dtype):
    images = IMAGES[:n].to(dtype)
    batches = EvalBatches(images, LABELS[:n], batch_size=batch_size, normalise=NORMALISE)
    for _ in range(2):  # normalising leaves the images as they are
        pairs = list(batches)
        assert [len(y) for _, y in pairs] == sizes
        assert len(batches) == len(sizes)
        if n:
            assert torch.equal(torch.cat([y for _, y in pairs]), LABELS)
            assert torch.equal(torch.cat([x for x, _ in pairs]), NORMALISE(IMAGES))


def test_what_is_cut_out_is_the_mean_and_becomes_zero():
    x, _ = next(iter(train_batches(augment=partial(mirror_only, cutout=6))))
    cut = (x - NORMALISE(NORMALISE.mean.round())).abs().amax(dim=1) < 1e-6
    assert cut.flatten(1).sum(1).ge(36).all()
    torch.testing.assert_close(
        NORMALISE(NORMALISE.mean.expand(1, 3, 8, 6)), torch.zeros(1, 3, 8, 6)
    )


# Batches that are made together


def equal(batches, expected):
    pairs = list(zip(batches, expected, strict=True))
    return all(torch.equal(a, b) for one, other in pairs for a, b in zip(one, other, strict=True))


def own_crop(images, generator):
    """A user's augmentation, which knows one batch."""
    return crop(images, generator)


@pytest.mark.parametrize("at_once", [5, 7, 20, 1000])
@pytest.mark.parametrize(
    ("batch_size", "micro_batch_size", "options"),
    [
        (3, None, {}),
        (3, 2, {"augment": crop}),
        (1, None, {"augment": partial(crop, cutout=3), "alternating_flip": True}),
        (3, None, {"alternating_flip": True}),
        (2, None, {"augment": own_crop}),
        (9, 4, {"augment": crop, "alternating_flip": True}),
    ],
)
def test_batches_made_together_are_those_made_one_by_one(
    batch_size, micro_batch_size, options, at_once
):
    one_by_one, together = (
        islice(train_batches(batch_size, micro_batch_size, at_once=at, **options), 70)
        for at in (1, at_once)
    )
    assert equal(together, one_by_one)


@pytest.mark.parametrize("remembers", [False, True])
@pytest.mark.parametrize("done", range(9))
def test_they_are_resumed_within_a_group(done, remembers):
    fresh = partial(
        train_batches, 3, 2, augment=crop, alternating_flip=True, at_once=12
    )  # four at a time
    whole = list(islice(fresh(), 2 * (done + 9)))
    batches = fresh()
    batches.stream.remembers = remembers
    list(islice(batches, 2 * done + 1))  # Lightning fetches one ahead
    position = batches.stream.position(done)
    assert position == batches.stream.position(done)
    again = fresh()
    again.stream.resume(position)
    assert equal(islice(again, 18), whole[2 * done :])


def test_they_take_the_operators_of_one():
    def taken(batches, count):
        with Operators() as operators:
            list(islice(batches, count))
        return len(operators.names)

    options = {"augment": partial(crop, cutout=3), "alternating_flip": True}
    one, ten = taken(train_batches(2, **options), 1), taken(train_batches(2, **options), 10)
    together = taken(train_batches(2, at_once=20, **options), 10)
    assert ten > 9 * one > 270
    assert together <= one + 3 * 9 + 4  # three draws a batch, and what joins them


def test_batches_come_in_the_type_and_the_memory_format_that_are_asked_for():
    half = replace(NORMALISE, dtype=torch.bfloat16, memory_format=torch.channels_last)
    for at_once in (1, 20):
        batches = train_batches(normalise=half, augment=crop, at_once=at_once)
        for (x, y), (same_x, same_y) in zip(
            islice(batches, 9), train_batches(augment=crop), strict=False
        ):
            assert x.dtype == torch.bfloat16
            assert x.is_contiguous(memory_format=torch.channels_last)
            assert torch.equal(x, same_x.bfloat16())
            assert torch.equal(y, same_y)


# Alternating flip

ARROWS = torch.zeros(101, 1, 4, 4, dtype=torch.uint8)
ARROWS[:, :, :, 0] = 200  # bright on the left, unless it is mirrored
IDENTITY = Normalisation(torch.ones(1, 1, 1, 1), torch.zeros(1, 1, 1, 1))
arrows = partial(train_batches, images=ARROWS, normalise=IDENTITY, alternating_flip=True)


def mirrored(batches, epochs):
    """Return, for each epoch and image, whether it was mirrored: bool, (epochs, 101)."""
    parts = islice(batches, epochs * 101)  # more than enough
    seen, labels = zip(*((x[:, 0, 0, 3] > 100, y) for x, y in parts), strict=True)
    seen, labels = (torch.cat(parts)[: epochs * 101].view(epochs, 101) for parts in (seen, labels))
    return seen.gather(1, labels.argsort(dim=1))


@pytest.mark.parametrize(
    ("batch_size", "augment"), [(1, None), (7, mirror_only), (50, None), (101, mirror_only)]
)
def test_an_image_is_mirrored_every_other_time(batch_size, augment):
    seen = mirrored(arrows(batch_size, augment=augment), 5)
    assert (seen[:-1] ^ seen[1:]).all()
    assert 30 < seen[0].sum() < 71  # four standard deviations around a half
    squares = mirrored(arrows(batch_size, augment=partial(mirror_only, cutout=1)), 5)
    assert (squares[:-1] ^ squares[1:]).float().mean() > 0.7  # the square may hide an arrow's end


def test_which_are_mirrored_first_is_a_function_of_the_seed_and_of_nothing_else():
    first = [mirrored(arrows(size, micro), 3) for size, micro in ((50, None), (50, 7), (8, 3))]
    assert torch.equal(first[0], first[1])
    assert torch.equal(first[0], first[2])
    assert not torch.equal(first[0], mirrored(arrows(50, seed=1), 3))
    # The order, what is cropped and what is cut out stay those of the same seed without it.
    for (_, y), (_, other) in islice(
        zip(arrows(50), arrows(50, alternating_flip=False), strict=False), 9
    ):
        assert torch.equal(y, other)


def test_without_it_mirroring_is_drawn_anew_each_time():
    seen = mirrored(arrows(50, alternating_flip=False, augment=mirror_only), 4)
    assert 0.3 < (seen[:-1] ^ seen[1:]).float().mean() < 0.7
    assert not mirrored(arrows(50, alternating_flip=False), 4).any()


# Batches of any DataLoader


def integers(examples):
    return [int(x) for (x,) in examples]


def loader(**options):
    size = {} if "batch_sampler" in options else {"batch_size": 4}
    return DataLoader(
        TensorDataset(torch.arange(10)), **(size | {"collate_fn": integers} | options)
    )


@pytest.mark.parametrize(
    ("batch_size", "micro_batch_size", "shuffle"), [(3, None, False), (7, 3, True), (10, 10, True)]
)
def test_rebatch_gives_epochs_of_an_endless_stream_of_the_same_data(
    batch_size, micro_batch_size, shuffle
):
    result = rebatch(loader(shuffle=shuffle, drop_last=True), batch_size, micro_batch_size, seed=5)
    sizes = micro_batch_sizes(batch_size, micro_batch_size)
    assert len(result) == len(list(result)) == 10 // batch_size * len(sizes)
    result = rebatch(loader(shuffle=shuffle, drop_last=True), batch_size, micro_batch_size, seed=5)
    items = list(islice(endless(result), 10 * len(sizes)))
    assert [len(item) for item in items] == list(sizes) * 10
    stream = [value for item in items for value in item]
    assert all(sorted(stream[k : k + 10]) == list(range(10)) for k in range(0, len(stream) - 9, 10))
    again = islice(
        endless(rebatch(loader(shuffle=shuffle), batch_size, micro_batch_size, seed=5)), len(items)
    )
    assert list(again) == items
    half = rebatch(loader(), 5, None, seed=0)
    assert sorted(next(iter(half)) + next(iter(half))) == list(
        range(10)
    )  # goes on where the last iterator left off


def of_subset(epoch):
    return sorted(epoch) == [2, 5, 7]


def distinct(epoch):
    return len(set(epoch)) == len(epoch)


@pytest.mark.parametrize(
    ("sampler", "n", "right", "shares"),
    [
        (SubsetRandomSampler([7, 2, 5]), 3, of_subset, {2: 1 / 3, 5: 1 / 3, 7: 1 / 3}),
        (SubsetRandomSampler(np.array([7, 2, 5])), 3, of_subset, {2: 1 / 3, 5: 1 / 3, 7: 1 / 3}),
        (
            WeightedRandomSampler([0, 1, 0, 3, 0, 0, 0, 0, 0, 0], 6),
            6,
            lambda epoch: True,
            {1: 0.25, 3: 0.75},
        ),
        (WeightedRandomSampler([1, 1, 1, 9] + [0] * 6, 3, replacement=False), 3, distinct, None),
        (
            RandomSampler(range(10), replacement=True),
            10,
            lambda epoch: True,
            dict.fromkeys(range(10), 0.1),
        ),
        (RandomSampler(range(10), num_samples=5), 5, distinct, dict.fromkeys(range(10), 0.1)),
        (RandomSampler(range(10), num_samples=15), 15, lambda epoch: distinct(epoch[:10]), None),
        (RandomSampler(range(4)), 4, distinct, dict.fromkeys(range(4), 0.25)),
        (SequentialSampler(range(4)), 4, distinct, dict.fromkeys(range(4), 0.25)),
    ],
)
@pytest.mark.parametrize("in_batches", [False, True])
def test_rebatch_draws_what_the_loaders_own_sampler_draws(in_batches, sampler, n, right, shares):
    source = (
        loader(batch_sampler=BatchSampler(sampler, 4, False))
        if in_batches
        else loader(sampler=sampler)
    )
    assert epoch_length(source) == n
    result = rebatch(source, 2, None, seed=5)
    assert len(result) == n // 2
    drawn = [value for batch in islice(endless(result), 1500) for value in batch]
    epochs = [drawn[k : k + n] for k in range(0, len(drawn) - n + 1, n)]
    assert all(map(right, epochs))
    assert len({tuple(epoch) for epoch in epochs}) > 5, "each epoch is drawn anew"
    for value, share in (shares or {}).items():
        assert drawn.count(value) / len(drawn) == pytest.approx(
            share, abs=0.04
        )  # 3 standard errors at most
    assert shares is None or set(drawn) == set(shares)
    resumed = rebatch(source, 2, None, seed=5)
    stream_of(resumed).resume(stream_of(result).position(1500))
    after = [value for batch in islice(endless(result), 20) for value in batch]
    assert [value for batch in islice(endless(resumed), 20) for value in batch] == after


def test_rebatch_keeps_the_loaders_options():
    options = {
        "num_workers": 2,
        "timeout": 3.0,
        "worker_init_fn": print,
        "prefetch_factor": 5,
        "in_order": False,
    }
    source = loader(**options, persistent_workers=True, multiprocessing_context="fork")
    result = rebatch(source, 5, None, seed=0)
    for name in (
        *options,
        "persistent_workers",
        "multiprocessing_context",
        "collate_fn",
        "pin_memory",
        "dataset",
    ):
        assert getattr(result, name) == getattr(source, name), name


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(3))


class NoLength:
    pass


class OwnWeights(WeightedRandomSampler):
    """It may draw in another way."""


class OwnIterator(DataLoader):
    def __iter__(self):
        return iter(())


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ([1, 2], "but got list"),
        (DataLoader(Stream()), "Stream, is iterable"),
        (DataLoader(NoLength(), sampler=[0, 1]), "NoLength, has no length"),
        (OwnIterator([1, 2]), "OwnIterator has an __iter__ of its own"),
        (
            DataLoader([1, 2], batch_size=None),
            r"no batch size of its own \(batch_sampler is NoneType\)",
        ),
        (DataLoader([1, 2], batch_sampler=[[0], [1]]), "batch_sampler is list"),
        (
            loader(sampler=OwnWeights([1.0] * 10, 10)),
            "its sampler, OwnWeights, is not one of torch's",
        ),
        (loader(sampler=[0, 1, 2]), "its sampler, list, is not one of torch's"),
        (
            loader(batch_sampler=BatchSampler([0, 1, 2], 2, False)),
            "its sampler, list, is not one of torch's",
        ),
    ],
)
def test_rebatch_refuses(source, text):
    with pytest.raises(ConfigError, match=text):
        rebatch(source, 1, None, seed=0)


# Positions in a stream


def noisy(examples):
    return [
        float(x) + random.random() + np.random.randn() + torch.rand(()).item() for (x,) in examples
    ]


@pytest.mark.parametrize(("done", "micro_batch_size"), [(0, 4), (1, None), (7, 4)])
def test_a_loader_is_resumed_with_what_reading_draws_from_python_numpy_and_torch(
    done, micro_batch_size
):
    def fresh():
        for seed in (random.seed, np.random.seed, torch.manual_seed):
            seed(0)
        np.random.randn()  # leaves a second one for the next call
        return rebatch(loader(collate_fn=noisy), 7, micro_batch_size, seed=5)

    parts = len(micro_batch_sizes(7, micro_batch_size))
    whole = list(islice(endless(fresh()), (done + 3) * parts))
    batches = fresh()
    stream_of(batches).remembers = True
    list(islice(endless(batches), done * parts + 1))
    position = stream_of(batches).position(done)
    again = fresh()
    noisy([(0,)] * 3)
    stream_of(again).resume(position)
    assert list(islice(endless(again), 3 * parts)) == whole[done * parts :]


@pytest.mark.parametrize("done", [2, 3, 4])  # of three batches an epoch
def test_with_workers_a_position_is_a_number_of_batches(done):
    source = loader(num_workers=1)
    whole = list(islice(endless(rebatch(source, 3, None, seed=5)), 12))
    batches = rebatch(source, 3, None, seed=5)
    list(islice(endless(batches), done))
    position = stream_of(batches).position(done)  # its workers have been given more
    assert position == {"batches": done, "random": None}
    again = rebatch(source, 3, None, seed=5)
    stream_of(again).resume(position)
    if done % 3 == 0:
        assert list(again) == []  # of the epoch that ended there
    assert list(islice(endless(again), 8)) == whole[done : done + 8]


def test_a_position_that_is_past_is_refused():
    stream = train_batches(augment=crop).stream
    list(islice(stream, 3))
    assert stream.position(3)["batches"] == 3
    with pytest.raises(
        ValueError, match="the position after 2 batches is not remembered: 3 are drawn"
    ):
        stream.position(2)
    with pytest.raises(
        ValueError, match="only a fresh stream can be resumed, but 3 batches are drawn"
    ):
        stream.resume(stream.position(3))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
def test_cuda_batches_never_wait_for_the_device():
    normalise = Normalisation(NORMALISE.scale.cuda(), NORMALISE.shift.cuda())
    options = {"images": IMAGES.cuda(), "normalise": normalise, "alternating_flip": True}
    fresh = partial(train_batches, 8, 3, augment=partial(crop, cutout=3), **options)
    stream = iter(fresh())
    next(stream)
    torch.cuda.set_sync_debug_mode("error")
    try:
        batches = list(islice(stream, 29))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert {x.device.type for x, _ in batches} == {"cuda"}
    assert all(
        torch.equal(a[0], b[0]) for a, b in zip(batches, islice(fresh(), 1, 30), strict=True)
    )
