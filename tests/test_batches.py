"""Batches of exactly B examples from loaders of every kind that is taken."""

import itertools
import random

import numpy as np
import pytest
import torch
from lightning.pytorch.utilities import CombinedLoader
from small import Batches
from torch.utils._pytree import tree_leaves
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    Sampler,
    SequentialSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from bstune.core.errors import InputError
from bstune.trial.batches import micro_batches, rebatch, rng_state, validation_in_batches
from bstune.trial.trial import BatchSizeRefused

# On a machine with one processor torch advises on the number of a loader's processes.
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")
EXAMPLES = 20
DATA = TensorDataset(torch.arange(EXAMPLES))


class OwnSampler(Sampler[int]):
    """One that has random numbers of its own."""

    def __init__(self):
        self.random = np.random.default_rng(5)

    def __iter__(self):
        return iter(self.random.permutation(EXAMPLES).tolist())


class EpochSampler(Sampler[int]):
    """One whose order follows from the epoch that it is told."""

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        return iter(np.random.default_rng(self.epoch).permutation(EXAMPLES).tolist())


class Buckets(Sampler[list[int]]):
    """Batches of even, then of odd numbers."""

    def __init__(self, batch_size):
        self.batch_size = batch_size

    def __iter__(self):
        for parity in (0, 1):
            order = [2 * k + parity for k in torch.randperm(EXAMPLES // 2).tolist()]
            for start in range(0, len(order), self.batch_size):
                yield order[start : start + self.batch_size]


class Deaf(Buckets):
    """Batches that do not follow ``batch_size``."""

    def __iter__(self):
        yield from ([0, 1], [2, 3])


class Stream(IterableDataset):
    def __iter__(self):
        yield from range(EXAMPLES)


class Graphs(Batches):
    """Its batches' tensors have other lengths than examples."""

    def __iter__(self):
        for (batch,) in super().__iter__():
            yield batch, batch.repeat(3)


class Halved(DataLoader):
    """A loader that changes what it yields."""

    def __iter__(self):
        for (batch,) in super().__iter__():
            yield batch / 2


def sampled(sampler):
    return DataLoader(DATA, batch_size=4, sampler=sampler)


# A loader, and whether each epoch has every example once.
LOADERS = {
    "shuffled": (lambda: DataLoader(DATA, 4, shuffle=True, drop_last=True), True),
    "sequential": (lambda: DataLoader(DATA, 4), True),
    "weighted": (lambda: sampled(WeightedRandomSampler([1.0] * EXAMPLES, EXAMPLES)), False),
    "own sampler": (lambda: sampled(OwnSampler()), True),
    "told its epoch": (lambda: sampled(EpochSampler()), True),
    "own batch sampler": (lambda: DataLoader(DATA, batch_sampler=Buckets(4)), False),
}


def three_epochs(loader):
    return [batch.tolist() for _ in range(3) for (batch,) in loader]


@pytest.mark.parametrize("case", LOADERS)
def test_three_epochs(case):
    build, every_example_once = LOADERS[case]
    batch_size = 7 if every_example_once else 3
    loader = rebatch(build(), batch_size, seed=1)
    before = rng_state()
    batches = three_epochs(loader)
    assert torch.equal(rng_state()["torch"], before["torch"])
    assert {len(batch) for batch in batches} == {batch_size}
    assert len(batches) == 3 * len(loader)
    if every_example_once:
        assert len(loader) == EXAMPLES // batch_size
        stream = list(itertools.chain(*batches))
        epochs = [stream[start : start + EXAMPLES] for start in (0, EXAMPLES)]
        assert [sorted(epoch) for epoch in epochs] == [list(range(EXAMPLES))] * 2
        assert (epochs[0] == epochs[1]) == (case == "sequential")
    if case == "own batch sampler":
        assert len(loader) == 2 * (EXAMPLES // 2 // 3)
        assert all(len({index % 2 for index in batch}) == 1 for batch in batches)
    assert three_epochs(rebatch(build(), batch_size, seed=1)) == batches
    if case not in ("sequential", "own sampler", "told its epoch"):
        assert three_epochs(rebatch(build(), batch_size, seed=2)) != batches
    first = len(loader) + 1
    resumed = rebatch(build(), batch_size, seed=1)
    resumed.batch_sampler.seek(first)
    rest = [batch.tolist() for _ in range(2) for (batch,) in resumed]
    assert rest == batches[first:]


REFUSED = [
    lambda: DataLoader(Batches(DATA, 4), batch_size=None),
    lambda: DataLoader(DATA, batch_size=None),
    lambda: [torch.zeros(4)],
    # It changes what it yields.
    lambda: Halved(DATA, 4),
    # Batches of another size, or of none that can be set.
    lambda: DataLoader(DATA, batch_sampler=Deaf(4)),
    lambda: DataLoader(DATA, batch_sampler=[[0, 1], [2, 3]]),
]


@pytest.mark.parametrize("build", REFUSED)
def test_loaders_that_are_refused(build):
    with pytest.raises(InputError):
        rebatch(build(), 4, seed=1)


@pytest.mark.parametrize("sampler", [None, BatchSampler(SequentialSampler(DATA), 4, False)])
def test_a_batch_is_at_most_the_data(sampler):
    loader = DataLoader(DATA, batch_sampler=sampler)
    assert len(rebatch(loader, EXAMPLES, seed=1)) == 1
    with pytest.raises(BatchSizeRefused):
        rebatch(loader, EXAMPLES + 1, seed=1)
    # Neither streams of smaller batches nor several loaders in parts, nor unequal shares.
    pair = [DataLoader(DATA, 8), DataLoader(DATA, 8)]
    for given, parts in ((Batches(DATA, 4), None), (pair, micro_batches(8, 4))):
        with pytest.raises(BatchSizeRefused):
            list(rebatch(given, 8, 1, parts, made_for_size=True))
    with pytest.raises(BatchSizeRefused, match="multiples of 2"):
        micro_batches(7, None, 0, 2)


FOLLOWS = {"made_for_size": True}


@pytest.mark.parametrize(
    "loader, options, sizes, epoch",
    [
        # Whole batches of B, whatever the loader's own size.
        (DataLoader(Stream(), 3), {}, [8, 8], (None, None)),
        (DataLoader(Batches(DATA, 8), batch_size=None), FOLLOWS, [8, 8], (None, None)),
        (Halved(DATA, 8), FOLLOWS, [8, 8], (24, 3)),
        (Batches(DATA, 8), FOLLOWS, [8, 8], (None, None)),
        # What cannot be counted is taken as it is.
        (DataLoader(Graphs(DATA, 8), batch_size=None), FOLLOWS, [8, 8, 4], (None, None)),
        (Halved(DATA, 8), FOLLOWS | {"limit": 0.7}, [8, 8], (24, 2)),
    ],
)
def test_streams_give_whole_batches(loader, options, sizes, epoch):
    given = rebatch(loader, 8, seed=1, **options)
    passes = [[tree_leaves(batch)[0] for batch in given] for _ in range(3)]
    assert [[len(batch) for batch in batches] for batches in passes] == 3 * [sizes]
    assert (given.epoch.examples, given.epoch.steps) == epoch
    rest = rebatch(loader, 8, seed=1, batches_had=len(sizes) + 1, **options)
    drawn = next(itertools.chain(rest, rest))
    assert torch.equal(tree_leaves(drawn)[0], passes[1][1])


def test_several_loaders():
    """The second one's batches are twice as large; both are shuffled, and cycle."""
    pair = {"a": DataLoader(DATA, 4, shuffle=True), "b": DataLoader(DATA, 8)}
    made, resumed = (rebatch(CombinedLoader(pair, "max_size_cycle"), 4, seed=1) for _ in range(2))
    assert (made.epoch.steps, made.epoch.examples) == (5, 20)
    batches = [batch for _ in range(4) for batch in made]
    assert [(len(batch["a"][0]), len(batch["b"][0])) for batch in batches] == 20 * [(4, 8)]
    for name, of_pass in (("a", 5), ("b", 2)):
        first = torch.cat([batch[name][0] for batch in batches[:of_pass]])
        assert len(set(first.tolist())) == len(first)
    resumed.seek(6)
    assert torch.equal(next(iter(resumed))["a"][0], batches[6]["a"][0])


def test_validation_in_other_batches():
    loaders = [DataLoader(DATA, 7, collate_fn=doubled), DataLoader(Stream(), 7)]
    assert [[len(batch) for batch in one] for one in validation_in_batches(loaders, 8)] == 2 * [
        [8, 8]
    ]
    with pytest.raises(BatchSizeRefused):
        validation_in_batches(loaders, 21)
    with pytest.raises(InputError):
        validation_in_batches(range(9), 8)


class Augmented(Dataset):
    """Examples with random numbers of each of the three generators."""

    def __len__(self):
        return EXAMPLES

    def __getitem__(self, index):
        return index, random.random(), np.random.rand(), torch.rand(()).item()


def doubled(examples):
    return 2 * torch.tensor(examples)


def test_the_loaders_settings_are_kept_and_workers_augment_by_the_batchs_number():
    kept = {"num_workers": 2, "persistent_workers": True, "prefetch_factor": 1, "timeout": 60}
    loader = rebatch(DataLoader(Augmented(), 5, collate_fn=doubled, **kept), 3, seed=1)
    assert {name: getattr(loader, name) for name in kept} == kept
    batches = [batch for _ in range(2) for batch in loader]
    assert len({batch[0, 1].item() for batch in batches}) == len(batches)
