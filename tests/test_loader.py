"""A user's DataLoader in other batches: the same examples and options, resumed where it was stopped."""

import gc
import random
import weakref
from itertools import chain, islice

import numpy as np
import pytest
import torch
from learners import Stream
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from bstune.core.errors import ConfigError
from bstune.trial.batches.epochs import epoch_length
from bstune.trial.batches.index_stream import stream_of
from bstune.trial.batches.loader import endless, rebatch, worker_starts
from bstune.trial.batches.micro_batches import micro_batch_sizes_of


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
    sizes = micro_batch_sizes_of(batch_size, micro_batch_size)
    assert len(result) == len(list(result)) == 10 // batch_size * len(sizes)
    result = rebatch(loader(shuffle=shuffle, drop_last=True), batch_size, micro_batch_size, seed=5)
    items = list(islice(endless(result), 10 * len(sizes)))
    assert list(map(len, items)) == list(sizes) * 10
    stream = list(chain.from_iterable(items))
    for start in range(0, len(stream) - 9, 10):
        assert sorted(stream[start : start + 10]) == list(range(10))
    again = islice(
        endless(rebatch(loader(shuffle=shuffle), batch_size, micro_batch_size, seed=5)), len(items)
    )
    assert list(again) == items
    half = rebatch(loader(), 5, None, seed=0)
    # It goes on where the last iterator left off.
    assert sorted(next(iter(half)) + next(iter(half))) == list(range(10))


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
    drawn = list(chain.from_iterable(islice(endless(result), 600)))
    epochs = [drawn[k : k + n] for k in range(0, len(drawn) - n + 1, n)]
    assert all(map(right, epochs))
    assert len(set(map(tuple, epochs))) > 5, "each epoch is drawn anew"
    for value, share in (shares or {}).items():
        # Of 1200 numbers that are drawn a share has a standard error of 0.015 at most.
        assert drawn.count(value) / len(drawn) == pytest.approx(share, abs=0.04)
    assert shares is None or set(drawn) == set(shares)
    resumed = rebatch(source, 2, None, seed=5)
    stream_of(resumed).resume(stream_of(result).position(600))
    after = list(chain.from_iterable(islice(endless(result), 20)))
    assert list(chain.from_iterable(islice(endless(resumed), 20))) == after


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


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({}, ""),
        ({"num_workers": 2, "multiprocessing_context": "fork"}, ""),
        (
            {"num_workers": 2, "multiprocessing_context": "spawn"},
            ", whose loader starts 2 workers by spawn",
        ),
        (
            {"num_workers": 1, "multiprocessing_context": "forkserver"},
            ", whose loader starts 1 worker by forkserver",
        ),
    ],
)
def test_workers_that_import_the_project_anew_are_told(options, said):
    assert worker_starts(loader(**options)) == said


@pytest.mark.parametrize(("workers", "left"), [(0, True), (2, False)])
def test_what_an_earlier_trial_left_is_gone_before_workers_are_forked(workers, left):
    class Trial:
        pass

    earlier = Trial()
    # A cycle, as a trainer and its loops are.
    earlier.loop = earlier
    seen = weakref.ref(earlier)
    gc.disable()
    try:
        del earlier
        rebatch(loader(num_workers=workers), 3, None, seed=0)
        assert (seen() is not None) == left
    finally:
        gc.enable()


def test_what_is_no_loader_starts_no_workers():
    assert worker_starts([1, 2]) == ""


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
            r"no batch size \(batch_size=None\)",
        ),
        (DataLoader([1, 2], batch_sampler=[[0], [1]]), "its batch_sampler, list, makes"),
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
        # The call leaves a second number for the next one.
        np.random.randn()
        return rebatch(loader(collate_fn=noisy), 7, micro_batch_size, seed=5)

    parts = len(micro_batch_sizes_of(7, micro_batch_size))
    whole = list(islice(endless(fresh()), (done + 3) * parts))
    batches = fresh()
    stream_of(batches).remembers = True
    list(islice(endless(batches), done * parts + 1))
    position = stream_of(batches).position(done)
    again = fresh()
    noisy([(0,)] * 3)
    stream_of(again).resume(position)
    assert list(islice(endless(again), 3 * parts)) == whole[done * parts :]


@pytest.fixture(scope="module")
def three_epochs():
    """Seven batches that a worker read, three an epoch."""
    return list(islice(endless(rebatch(loader(num_workers=1), 3, None, seed=5)), 7))


@pytest.mark.parametrize("done", [3, pytest.param(4, marks=pytest.mark.slow)])
def test_with_workers_a_position_is_a_number_of_batches(done, three_epochs):
    source = loader(num_workers=1)
    batches = rebatch(source, 3, None, seed=5)
    list(islice(endless(batches), done))
    # Its workers have been given more than was drawn.
    position = stream_of(batches).position(done)
    assert position == {"batches": done, "random": None}
    again = rebatch(source, 3, None, seed=5)
    stream_of(again).resume(position)
    if done % 3 == 0:
        # Nothing is left of the epoch that ended there.
        assert list(again) == []
    # Into the epoch that follows.
    assert list(islice(endless(again), 3)) == three_epochs[done : done + 3]
