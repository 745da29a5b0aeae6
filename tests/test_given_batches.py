"""Batches taken as the user's loaders give them: whole, in epochs where there are some, resumed by skipping."""

import random
from itertools import islice
from multiprocessing import active_children

import numpy as np
import pytest
import torch
from lightning.fabric.utilities.data import sized_len
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from toolbox import column
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from bstune.core.errors import ConfigError
from bstune.trial.batches.given_batches import (
    GivenBatches,
    GivenStream,
    first_tensor,
    length_of,
    shapes_in,
)
from bstune.trial.batches.index_stream import stream_of
from bstune.trial.devices.randomness import host_states

FIRST_TEN = list(range(10))


class Numbers(IterableDataset):
    """The numbers from 0 to 9, each with noise of all three generators if there is any."""

    def __init__(self, noise=0.0, count=10):
        super().__init__()
        self.noise = noise
        self.count = count

    def __iter__(self):
        for number in range(self.count):
            drawn = random.random() + np.random.randn() + torch.rand(()).item()
            yield torch.tensor(number + self.noise * drawn)


class Sized(Numbers):
    def __len__(self):
        return 10


def numbers_of(batch):
    return [round(float(one), 4) for one in batch]


def stream(open_loaders, batch_size=4, seed=0):
    return GivenStream(open_loaders, batch_size, seed)


def drawn(source, count):
    return [source.draw() for _ in range(count)]


def pairs(batch_size):
    for start in range(0, 10, batch_size):
        yield torch.arange(start, min(10, start + batch_size))


@pytest.mark.parametrize(
    ("open_loaders", "batch_size", "passes"),
    [
        # What is left over of ten is left out.
        (lambda: DataLoader(Numbers(), 4), 4, [[0, 1, 2, 3], [4, 5, 6, 7]]),
        (lambda: DataLoader(Numbers(), 5), 5, [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]),
        # A generator is made anew once it has ended.
        (lambda: pairs(4), 4, [[0, 1, 2, 3], [4, 5, 6, 7]]),
        # Its batches do not show how many examples they have.
        (lambda: DataLoader(Numbers(), 4), 64, [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]),
    ],
)
def test_a_stream_is_read_again_after_its_end_in_whole_batches(open_loaders, batch_size, passes):
    found = list(map(numbers_of, drawn(stream(open_loaders, batch_size), 7)))
    assert found == (passes * 7)[:7]


@pytest.mark.parametrize(
    ("loaders", "length"),
    [
        (DataLoader(Numbers(), 4), None),
        (DataLoader(Sized(), 4), 3),
        (DataLoader(Sized(), 4, drop_last=True), 2),
        (DataLoader(FIRST_TEN, batch_sampler=[[0], [1, 2]]), 2),
        ({"a": DataLoader(FIRST_TEN, 5), "b": DataLoader(FIRST_TEN, 2)}, 5),
        ([DataLoader(FIRST_TEN, 5), DataLoader(Numbers(), 2)], None),
        (CombinedLoader([DataLoader(FIRST_TEN, 5), DataLoader(Numbers(), 2)], "min_size"), 2),
        # Two and five, one after the other.
        (CombinedLoader([DataLoader(FIRST_TEN, 5), DataLoader(FIRST_TEN, 2)], "sequential"), 7),
        (pairs(4), None),
        ([], None),
    ],
)
def test_an_epoch_has_the_loaders_length(loaders, length):
    assert length_of(loaders) == length
    batches = GivenBatches(stream(lambda: loaders))
    assert sized_len(batches) == length
    if length is not None:
        assert len(list(batches)) == length
        assert batches.stream.drawn == length
        # It goes on amid an epoch.
        batches.stream.draw()
        assert len(list(batches)) == length - 1


def test_several_loaders_give_a_batch_of_each():
    loaders = {"a": DataLoader(FIRST_TEN, 5), "b": DataLoader(Numbers(), 4)}
    found = drawn(stream(lambda: loaders), 4)
    assert numbers_of(found[0]["a"]) == [0, 1, 2, 3, 4]
    assert numbers_of(found[1]["a"]) == [5, 6, 7, 8, 9]
    # Each begins anew by itself.
    assert list(map(len, column(found, "b"))) == [4, 4, 2, 4]


@pytest.mark.parametrize(
    ("done", "workers"), [(0, 0), (1, 0), (5, 0), pytest.param(5, 1, marks=pytest.mark.slow)]
)
def test_a_stream_that_goes_on_skips_what_was_seen(done, workers):
    def noisy():
        return DataLoader(Numbers(noise=0.1), 4, num_workers=workers)

    def fresh(seed=3):
        return GivenBatches(stream(noisy, seed=seed))

    whole = list(map(numbers_of, islice(fresh(), done + 4)))
    again = fresh()
    # The training draws numbers in between, which are none of the stream's.
    torch.rand(7)
    stream_of(again).resume(stream_of(fresh()).position(done))
    assert stream_of(again).drawn == done
    assert list(map(numbers_of, islice(again, 4))) == whole[done:]
    assert list(map(numbers_of, islice(fresh(seed=4), 2))) != whole[:2]


def test_a_stream_that_is_left_ends_the_processes_of_its_loader():
    before = set(active_children())
    source = stream(lambda: DataLoader(Numbers(), 4, num_workers=1))
    # One more than a pass has, so that the loader was begun anew.
    drawn(source, 3)
    assert len(set(active_children()) - before) == 1
    # No cycle holds it: the garbage collector is left alone.
    del source
    assert set(active_children()) == before


def test_reading_leaves_the_shared_generators_as_they_are():
    source = stream(lambda: DataLoader(Numbers(noise=1.0), 4))
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    before = host_states()
    drawn(source, 3)
    after = host_states()
    assert before[0] == after[0]
    assert np.array_equal(before[1][1], after[1][1])
    assert before[1][2] == after[1][2]
    assert torch.equal(before[2], after[2])


@pytest.mark.parametrize(
    "open_loaders", [lambda: DataLoader(Numbers(count=0), 4), lambda: iter(())]
)
def test_loaders_without_a_batch_are_refused(open_loaders):
    with pytest.raises(ConfigError, match="no batch at batch size 4"):
        stream(open_loaders).draw()


def test_a_stream_resumes_before_its_first_batch_alone():
    source = stream(lambda: DataLoader(Numbers(), 4))
    source.draw()
    with pytest.raises(ValueError, match="1 batches are drawn"):
        source.resume({"batches": 3, "random": None})


@pytest.mark.parametrize(
    ("batch", "shapes"),
    [
        (torch.zeros(3, 2), [(3, 2)]),
        ({"text": ["a", "b"], "x": (torch.zeros(2), [torch.zeros(2, 4)])}, [(2,), (2, 4)]),
        ("text", []),
    ],
)
def test_the_tensors_of_a_batch(batch, shapes):
    assert list(map(tuple, shapes_in(batch))) == shapes
    first = first_tensor(batch)
    assert (None if first is None else tuple(first.shape)) == next(iter(shapes), None)


def test_a_table_of_tensors_is_a_batch_of_its_rows():
    loader = DataLoader(TensorDataset(torch.arange(10), torch.arange(10)), batch_sampler=[[1, 2]])
    parts = stream(lambda: loader, 2).draw()
    assert list(map(numbers_of, parts)) == [[1, 2], [1, 2]]
