"""Chooses a part of the validation data, in small batches, for short trials."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

from torch.utils.data import BatchSampler, DataLoader

from bstune.trial.batches.loader import KEPT_OPTIONS, loaders_of
from bstune.trial.lightning.installed import sized_len

# The number of validation examples on which untrained weights are first compared with the target.
# Where they meet it on these, all of the data decide.
START_EXAMPLES = 128
# The number of examples in other evaluations. One would be too few, as some metrics are not defined
# on a single example.
FEW_EXAMPLES = 64


@dataclass(frozen=True)
class SmallEvaluations:
    """The validation batches that short trials evaluate.

    Args:
        batches: all of the data, in small batches where they can be cut.
        few: the number of these batches that an evaluation after training takes.
        few_share: the share of all the data in them.
        start: the batches on which untrained weights are evaluated.
        start_is_part: whether ``start`` is not all of the data.
    """

    batches: Iterable[Any]
    few: int
    few_share: float
    start: Iterable[Any]
    start_is_part: bool


def small_evaluations(validation_batches: Iterable[Any], examples: int) -> SmallEvaluations:
    """Choose the validation batches on which short trials are evaluated.

    An evaluation after training takes ``few`` of them, about ``FEW_EXAMPLES`` examples. Untrained
    weights are evaluated on ``start``, about ``START_EXAMPLES`` examples evenly over the data.

    Args:
        validation_batches: of the workload.
        examples: in all of them.
    """
    examples = max(1, examples)
    small = validation_batches
    start = validation_batches
    loaders = loaders_of(validation_batches)
    # Of several loaders none can stand for all, so their batches stay as they are.
    if len(loaders) == 1:
        small = in_small_batches(loaders[0], FEW_EXAMPLES)
        # Every n-th batch stands for all of the data, in whatever order they are.
        start = EveryNth(small, max(1, examples // START_EXAMPLES)).batches
        loaders = [small]
    # A loader without a length counts as one batch.
    count = sum(sized_len(loader) or 1 for loader in loaders)
    few = max(1, round(FEW_EXAMPLES * count / examples))
    return SmallEvaluations(
        batches=small,
        few=few,
        few_share=min(1.0, few / count),
        start=start,
        start_is_part=start is not validation_batches,
    )


def in_small_batches(batches: Any, batch_size: int) -> Any:
    """Give validation data in batches of at most ``batch_size`` examples, where that is possible.

    It is for bstune's own batches, and for a DataLoader that cuts batches off its sampler's order.
    Others are given as they are. Short trials then need not wait for a network that takes seconds
    to evaluate a batch of a thousand images.
    """
    if (sized_len(batches) or 0) == 0:
        return batches
    if hasattr(batches, "in_batches_of"):
        if batches.batch_size <= batch_size:
            return batches
        return batches.in_batches_of(batch_size)
    # A subclass of DataLoader may make batches by rules of its own.
    if type(batches) is not DataLoader or type(batches.batch_sampler) is not BatchSampler:
        return batches
    if batches.batch_sampler.batch_size <= batch_size:
        return batches
    kept = {name: getattr(batches, name) for name in KEPT_OPTIONS}
    return DataLoader(
        batches.dataset,
        batch_size=batch_size,
        sampler=batches.batch_sampler.sampler,
        drop_last=batches.batch_sampler.drop_last,
        **kept,
    )


class EveryNth:
    """Every n-th of the validation batches.

    Attributes:
        batches: these batches, as a DataLoader that reads no others where they come from one.
    """

    def __init__(self, batches: Iterable[object], n: int) -> None:
        self._whole = batches
        self._n = n
        self.batches: Iterable[object] = self
        if n == 1:
            self.batches = batches
        # A plain DataLoader can be told which batches to read. Of any others all are read, and
        # every n-th is given.
        elif (
            type(batches) is DataLoader
            and batches.batch_sampler is not None
            and sized_len(batches) is not None
        ):
            kept = {name: getattr(batches, name) for name in KEPT_OPTIONS}
            every_nth = list(batches.batch_sampler)[::n]
            self.batches = DataLoader(batches.dataset, batch_sampler=every_nth, **kept)

    def __iter__(self) -> Iterator[object]:
        return islice(self._whole, 0, None, self._n)

    def __len__(self) -> int:
        # Batches of unknown length count as one.
        return len(range(0, sized_len(self._whole) or 1, self._n))
