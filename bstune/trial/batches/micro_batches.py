"""Cuts a batch into micro-batches.

Everywhere in a trial ``batch_size`` is the number of examples of a step, over all devices, and
``micro_batch_size`` is the number of them that are in memory at once.
"""

from collections.abc import Callable, Sequence

from torch import Tensor

from bstune.core.errors import check_positive_integer
from bstune.trial.devices import distributed


def micro_batch_sizes_of(batch_size: int, micro_batch_size: int | None) -> tuple[int, ...]:
    """Give the number of examples in each micro-batch of a batch.

    All are ``micro_batch_size`` but the last, which may be smaller; None: there is one micro-batch.
    For a trial on several devices they are this process's micro-batches, and differ by one example
    at most.
    """
    check_positive_integer("batch size", batch_size)
    if micro_batch_size is not None:
        check_positive_integer("micro-batch size", micro_batch_size)
    if distributed.place() is not None:
        sizes, own_slice = distributed.micro_batch_sizes_of_process(batch_size, micro_batch_size)
        return sizes[own_slice]
    if micro_batch_size is None:
        return (batch_size,)
    count, left_over = divmod(batch_size, micro_batch_size)
    whole = (micro_batch_size,) * count
    if left_over:
        return (*whole, left_over)
    return whole


def splitter(batch_size: int, micro_batch_size: int | None) -> Callable[[Tensor], Sequence[Tensor]]:
    """Make the function that cuts a whole batch into micro-batches.

    For a trial on several devices it gives those of this process alone.
    """
    if distributed.place() is not None:
        sizes, own_slice = distributed.micro_batch_sizes_of_process(batch_size, micro_batch_size)
        return lambda batch: batch.split_with_sizes(sizes)[own_slice]
    micro_batch_sizes = micro_batch_sizes_of(batch_size, micro_batch_size)
    return lambda batch: batch.split_with_sizes(micro_batch_sizes)
