"""One trial on several devices, a process each, under Lightning's DDP.

All processes run the same trial: same seed, same stream of batches, of which each takes its own
micro-batches, and the same evaluations on all validation data. Gradients are exchanged by gloo on
CPUs and by nccl on CUDA. What processes may see differently, a metric, a loss, a wish to stop, they
agree on at each evaluation, so that none goes on alone. The first one writes the files, and its
record is the trial's. Where one fails, :mod:`bstune.trial.processes.workers` ends the others, which
would wait for it.

* B is the whole batch. A device trains ceil(B/N) or floor(B/N) examples, and each loss counts by
  its share, so that the trial is that of one device to float error. Seconds of a step are those of
  all devices.
* Modules need no ``sync_dist``. Random numbers that a module draws are the same on every device;
  normalisation layers see a device's share.
* The survey probes ceil(B/N) examples on one device, times steps on all, and has no roofline and no
  noise scale.
* Refused are ``search.workers`` other than 1, ``compile``, manual optimization, parameters without
  a gradient, and ``train_batches`` of a data module's own that are not from ``TrainBatches``.

The tests train with two processes on a CPU. No machine with two CUDA devices was at hand.
"""

import logging
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed
from torch.distributed import FileStore, HashStore  # type: ignore[attr-defined]

from bstune.core.batch_split import split_batch
from bstune.core.errors import ConfigError
from bstune.options import StudyOptions, with_option

Value = TypeVar("Value")


@dataclass(frozen=True)
class Place:
    """One of the processes that train a trial together."""

    rank: int
    count: int


# None: it trains alone.
_place: Place | None = None


def place() -> Place | None:
    """Give this process's place among those of a trial; None if it trains alone."""
    return _place


def count() -> int:
    """Tell how many processes train a trial together with this one."""
    return 1 if _place is None else _place.count


def is_first() -> bool:
    """Say whether this process writes files: the only one, or the first."""
    return _place is None or _place.rank == 0


def join(rank: int, count: int, file: str | None = None) -> None:
    """Make this process one of ``count``, which find each other through an empty file.

    It is called once in a process's life.
    """
    global _place
    torch.set_num_threads(max(1, torch.get_num_threads() // count))
    # The first process warns for all.
    if rank > 0:
        logging.disable(logging.WARNING)
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    store = HashStore() if file is None else FileStore(file, count)
    torch.distributed.init_process_group(backend, store=store, rank=rank, world_size=count)
    # By these Lightning knows that the processes have been started.
    os.environ |= {"LOCAL_RANK": str(rank), "NODE_RANK": "0"}
    _place = Place(rank, count)


def options_of_process(options: StudyOptions) -> StudyOptions:
    """Give options with this process's device: from ``cuda`` or ``cuda:N`` on, one each."""
    kind, _, first = options.device.partition(":")
    if _place is None or kind != "cuda":
        return options
    return with_option(options, "device", f"cuda:{int(first or 0) + _place.rank}")


def explain_ddp(error: BaseException) -> None:
    """Raise a ConfigError in place of DDP's error for a module that does not go with it."""
    if "Expected to have finished reduction" in str(error):
        raise ConfigError(
            "some parameters take no part in the loss, which DDP does not take: freeze them "
            "(requires_grad=False), or set devices=1"
        ) from None


def trainer_options(options: Mapping[str, Any], strategy: Callable[[], object]) -> dict[str, Any]:
    """Give the Trainer's arguments for this process.

    They are those of one device, or of all with a ``strategy``, DDP.
    """
    if _place is None:
        return dict(options)
    devices: int | list[int] = _place.count
    if options.get("accelerator") == "cuda":
        first = options["devices"][0] - _place.rank
        devices = list(range(first, first + _place.count))
    return {**options, "devices": devices, "strategy": strategy(), "use_distributed_sampler": False}


def check_count(devices: int) -> None:
    """Refuse to train on other devices than a protocol says."""
    if devices != count():
        raise ConfigError(
            f"devices={devices}, but here {count()} would train the trial: use devices={count()}"
        )


def check_share(batches: object, micro_batch_sizes: Sequence[int]) -> None:
    """Refuse a trial's batches, on several devices, that are not this process's part of them."""
    source = getattr(batches, "batch_sampler", None) or batches
    if _place is not None and getattr(source, "micro_batch_sizes", None) != micro_batch_sizes:
        raise ConfigError(
            f"devices={_place.count}: the batches of {type(batches).__name__} are not split over "
            "devices: take them from TrainBatches or a DataLoader, or set devices=1"
        )


def agree(value: float | None, loss: float, stop: bool) -> tuple[float | None, float, bool]:
    """Agree with the other processes on the first one's metric and loss.

    One that is not finite anywhere counts for all, and any one that wants to stop stops all.
    ``value`` is None where the metric is not finite.
    """
    seen = gather((value, loss, stop))
    if seen is None:
        return value, loss, stop
    values, losses, stops = zip(*seen, strict=True)
    not_finite = [seen_loss for seen_loss in losses if not math.isfinite(seen_loss)]
    agreed_value = None if None in values else values[0]
    agreed_loss = not_finite[0] if not_finite else losses[0]
    return agreed_value, agreed_loss, any(stops)


def gather(value: Value) -> list[Value] | None:
    """Collect every process's ``value``, by rank; None where this process trains alone."""
    if _place is None:
        return None
    values: list[Any] = [None] * _place.count
    torch.distributed.all_gather_object(values, value)
    return values


def threads_each(devices: int) -> int:
    """Tell how many threads of torch each of ``devices`` processes on a CPU has."""
    threads = torch.get_num_threads()
    # One of several was given its part when it joined them.
    if _place is not None:
        return threads
    return max(1, threads // devices)


def check_devices(options: StudyOptions) -> None:
    """Refuse a number of devices that this machine lacks, or that other options do not go with."""
    count = options.devices
    if count == 1 or _place is not None:
        return
    kind, _, index = options.device.partition(":")
    there = os.cpu_count() or 1
    what = "processors"
    if kind == "cuda":
        there = torch.cuda.device_count() - int(index or 0)
        what = f"CUDA devices from {options.device} on"
    smallest = options.search.batch_size.low
    option = "search.batch_size.low"
    if options.trial.batch_size is not None:
        smallest = options.trial.batch_size
        option = "trial.batch_size"
    problems = (
        (count > there, f"but there are {there} {what}: set devices to at most {max(1, there)}"),
        (
            smallest < count,
            f"but {option}={smallest} leaves some without an example: set {option} to at least "
            f"{count}",
        ),
        (
            options.search.workers != 1,
            "trains one trial at a time, in processes of its own: set search.workers=1",
        ),
        (
            options.compile is not None,
            f"does not go with compile={options.compile}, which is untested: set compile=null",
        ),
        (
            options.protocol.micro_batch_size == 1,
            "may leave a device without an example: set protocol.micro_batch_size to 2 or more",
        ),
    )
    for wrong, line in problems:
        if wrong:
            raise ConfigError(f"devices={count} {line}")


def micro_batch_sizes_of_process(
    batch_size: int, micro_batch_size: int | None
) -> tuple[tuple[int, ...], slice]:
    """Give the sizes of all micro-batches of a batch over several devices.

    And which of them are this process's.
    """
    assert _place is not None  # noqa: S101 (it is one of several)
    sizes = split_batch(batch_size, _place.count, micro_batch_size).sizes
    if 0 in sizes:
        raise ConfigError(
            f"batch size {batch_size} in micro-batches of {micro_batch_size} leaves one of "
            f"{_place.count} devices without an example: raise protocol.micro_batch_size"
        )
    return sizes, slice(_place.rank, None, _place.count)
