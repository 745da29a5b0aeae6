"""The endless stream of indices: shuffled epochs, cut into batches."""

from itertools import islice

import pytest
import torch

from bstune.core.errors import ConfigError
from bstune.trial.batches.index_stream import IndexStream, endless_indices


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
    # The order does not depend on the batch size.
    assert torch.equal(whole, stream)
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
