import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from bstune.core.errors import ConfigError
from bstune.trial.batches.counted_stream import CountedStream, has_no_length


class Stream(IterableDataset):
    """``count`` examples, each of ``width`` numbers; ``once``: they can be read once alone."""

    def __init__(self, count, width=2, once=False):
        self.examples = [torch.full((width,), float(number)) for number in range(count)]
        self.left = iter(self.examples) if once else None

    def __iter__(self):
        return iter(self.examples) if self.left is None else self.left


@pytest.mark.parametrize(
    ("count", "batch_size", "batches"), [(12, 5, 3), (12, 4, 3), (1, 5, 1), (3, None, 3)]
)
def test_batches_and_examples_are_those_that_were_read(count, batch_size, batches):
    width = 2 if batch_size else 1  # without batches dimension 0 is an example's own
    stream = CountedStream(DataLoader(Stream(count, width), batch_size=batch_size))
    assert (len(stream), stream.examples) == (batches, count)
    # It can be read again.
    for _ in range(2):
        assert len(list(stream)) == batches


def test_a_batch_without_a_tensor_is_an_example():
    # Two batches, of what nobody can count.
    stream = CountedStream(DataLoader(["a", "b", "c"], batch_size=2))
    assert (len(stream), stream.examples) == (2, 2)


@pytest.mark.parametrize(
    ("stream", "message"), [(Stream(0), "give no batch"), (Stream(3, once=True), "read once alone")]
)
def test_a_stream_that_cannot_be_evaluated_is_refused(stream, message):
    with pytest.raises(ConfigError, match=message):
        CountedStream(DataLoader(stream, batch_size=2))


@pytest.mark.parametrize(
    ("loaders", "expected"),
    [
        (DataLoader(Stream(3)), True),
        (DataLoader(TensorDataset(torch.zeros(3))), False),
        ([DataLoader(Stream(3))], False),
        (Stream(3), False),
    ],
)
def test_one_loader_of_a_stream_has_no_length(loaders, expected):
    assert has_no_length(loaders) == expected
