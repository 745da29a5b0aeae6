"""How a batch is cut into micro-batches."""

import pytest
import torch

from bstune.core.errors import ConfigError
from bstune.trial.batches.micro_batches import micro_batch_sizes_of, splitter


@pytest.mark.parametrize(
    ("batch_size", "micro_batch_size", "sizes"),
    [(8, None, (8,)), (8, 8, (8,)), (8, 100, (8,)), (8, 3, (3, 3, 2)), (3, 1, (1, 1, 1))],
)
def test_micro_batch_sizes(batch_size, micro_batch_size, sizes):
    assert micro_batch_sizes_of(batch_size, micro_batch_size) == sizes


@pytest.mark.parametrize("micro_batch_size", [None, 3, 8])
def test_a_batch_is_cut_in_the_order_of_its_examples(micro_batch_size):
    micro_batches = splitter(8, micro_batch_size)(torch.arange(8))
    assert tuple(map(len, micro_batches)) == micro_batch_sizes_of(8, micro_batch_size)
    assert torch.equal(torch.cat(list(micro_batches)), torch.arange(8))


@pytest.mark.parametrize(
    ("batch_size", "micro_batch_size", "text"),
    [(0, None, "batch size must be"), (8, 0, "micro-batch size must be")],
)
def test_sizes_are_positive_integers(batch_size, micro_batch_size, text):
    with pytest.raises(ConfigError, match=f"{text} a positive integer, but got 0"):
        micro_batch_sizes_of(batch_size, micro_batch_size)
