"""Validation data without a length: a stream with an end, whose batches are counted once."""

from collections.abc import Iterator

from torch.utils.data import DataLoader

from bstune.core.errors import ConfigError
from bstune.trial.batches.given_batches import first_tensor
from bstune.trial.lightning.installed import sized_len


class CountedStream:
    """The batches of a stream, with the length that is found by reading it to its end.

    A batch has as many examples as its first tensor has along dimension 0. A batch without a tensor
    counts as one example.

    Args:
        loader: of the stream, which begins anew each time that it is read.

    Attributes:
        examples: in all batches.

    Raises:
        ConfigError: for a stream without any batch, or one that can be read once alone.
    """

    def __init__(self, loader: DataLoader[object]) -> None:
        self._loader = loader
        self._batches = 0
        self.examples = 0
        for batch in loader:
            tensor = first_tensor(batch)
            self._batches += 1
            # A batch without a tensor that has the examples along it counts as one example.
            self.examples += len(tensor) if tensor is not None and tensor.dim() else 1
        if self._batches == 0:
            raise ConfigError(
                "the validation data, which have no length, give no batch: let the loader have one"
            )
        if next(iter(loader), None) is None:
            raise ConfigError(
                "the validation data, which have no length, can be read once alone, and each "
                "evaluation reads them: let the data set's __iter__ begin anew"
            )

    def __len__(self) -> int:
        return self._batches

    def __iter__(self) -> Iterator[object]:
        return iter(self._loader)


def has_no_length(loaders: object) -> bool:
    """Whether there is a single DataLoader, of a stream whose length is not known."""
    return isinstance(loaders, DataLoader) and sized_len(loaders) is None
