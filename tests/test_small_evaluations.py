"""Evaluations of short trials take a part of the validation data, or small batches of them."""

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from bstune.trial.checks.small_evaluations import (
    START_EXAMPLES,
    EveryNth,
    in_small_batches,
    small_evaluations,
)

DATA = TensorDataset(torch.arange(64.0).view(64, 1).sin(), torch.arange(64) % 3)


@pytest.mark.parametrize(("every", "kept"), [(1, [0, 1, 2, 3, 4, 5, 6]), (3, [0, 3, 6])])
@pytest.mark.parametrize("batches", [DataLoader(range(7)), [[i] for i in range(7)]])
def test_a_part_of_the_validation_data_is_every_nth_batch(batches, every, kept):
    part = EveryNth(batches, every).batches
    assert len(part) == len(kept)
    for _ in range(2):
        assert [int(batch[0]) for batch in part] == kept


def test_validation_batches_are_cut_where_that_can_be_done():
    cut = in_small_batches(DataLoader(DATA, batch_size=40), 16)
    assert [len(batch[0]) for batch in cut] == [16, 16, 16, 16]
    small = DataLoader(DATA, batch_size=8)
    chosen = DataLoader(DATA, batch_sampler=[[0, 1], [2, 3]])
    for batches in (small, chosen, [1, 2]):
        assert in_small_batches(batches, 16) is batches


EXAMPLES = 4 * START_EXAMPLES


def loader(batch_size):
    return DataLoader(range(EXAMPLES), batch_size=batch_size)


@pytest.mark.parametrize(
    ("loaders", "few", "batches", "starts_with"),
    [
        # One of 8 batches of 64 examples is evaluated, and every fourth at the start.
        (loader(64), 1, 8, 2),
        (loader(16), 4, 32, 8),
        # Larger batches are cut.
        (loader(512), 1, 8, 2),
    ],
)
def test_short_trials_evaluate_few_examples(loaders, few, batches, starts_with):
    chosen = small_evaluations(loaders, EXAMPLES)
    assert (chosen.few, chosen.few_share) == (few, few / batches)
    assert (len(chosen.start), chosen.start_is_part) == (starts_with, True)


def test_of_several_loaders_all_are_evaluated_as_they_are():
    several = [loader(64), loader(512)]
    chosen = small_evaluations(several, 2 * EXAMPLES)
    assert chosen.batches is several
    assert chosen.start is several
    assert not chosen.start_is_part
    # Of 9 batches.
    assert (chosen.few, chosen.few_share) == (1, 1 / 9)
