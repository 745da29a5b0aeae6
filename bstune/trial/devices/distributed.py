"""Trains one trial on several devices, with a process for each, under Lightning's DDP.

All processes run the same trial: with the same seed, the same stream of batches, of which each
takes its own micro-batches, and the same evaluations on all validation data. Gradients are
exchanged by gloo on CPUs and by nccl on CUDA. A metric, a loss or a wish to stop may differ between
processes: they agree on it at each evaluation, so that none goes on alone. The first process writes
the files, and its record is the trial's. Where one fails, :mod:`bstune.trial.processes.team`
ends the others, which would wait for it.

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
    """A process's place among ``count`` that train a trial together: its rank, from 0."""

    rank: int
    count: int


# This process's place; None: it trains alone.
_place: Place | None = None


def place() -> Place | None:
    """Give this process's place among those of a trial; None if it trains alone."""
    return _place


def count() -> int:
    """Give the number of processes that train a trial together, this one included."""
    return 1 if _place is None else _place.count


def is_first() -> bool:
    """Whether this process writes files: it is the only one, or the first."""
    return _place is None or _place.rank == 0


def join(rank: int, count: int, file: str | None = None) -> None:
    """Make this process one of several that train together; call it once in a process's life.

    Args:
        rank: the process's number among them, from 0.
        count: the number of them.
        file: an empty file, by which they find each other; None: there is this one alone.
    """
    global _place
    # The processes share the processor's cores.
    torch.set_num_threads(max(1, torch.get_num_threads() // count))
    # Only the first process warns.
    if rank > 0:
        logging.disable(logging.WARNING)
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    store = HashStore() if file is None else FileStore(file, count)
    torch.distributed.init_process_group(backend, store=store, rank=rank, world_size=count)
    # By these Lightning knows that the processes have been started.
    os.environ |= {"LOCAL_RANK": str(rank), "NODE_RANK": "0"}
    _place = Place(rank, count)


def options_of_process(options: StudyOptions) -> StudyOptions:
    """Give the options with this process's own device.

    On CUDA the processes take the devices from ``cuda`` or ``cuda:N`` on, by their ranks.
    """
    kind, _, first = options.device.partition(":")
    if _place is None or kind != "cuda":
        return options
    return with_option(options, "device", f"cuda:{int(first or 0) + _place.rank}")


def explain_ddp(error: BaseException) -> None:
    """Raise a ConfigError in place of DDP's error about parameters without a gradient.

    Any other error is left alone.
    """
    if "Expected to have finished reduction" in str(error):
        raise ConfigError(
            "some parameters take no part in the loss, which DDP does not take: freeze them "
            "(requires_grad=False), or set devices=1"
        ) from None


def trainer_options(options: Mapping[str, Any], strategy: Callable[[], object]) -> dict[str, Any]:
    """Give the Trainer's arguments for this process.

    Where it trains alone they are ``options``. Otherwise the arguments name the devices of all
    processes that train together, and the strategy that ``strategy`` makes.
    """
    if _place is None:
        return dict(options)
    # On a CPU Lightning takes the number of processes.
    devices: int | list[int] = _place.count
    if options.get("accelerator") == "cuda":
        # The options name this process's own device (:func:`options_of_process`).
        first = options["devices"][0] - _place.rank
        devices = list(range(first, first + _place.count))
    # The batches are split over the processes already, so Lightning must not split them again.
    return {**options, "devices": devices, "strategy": strategy(), "use_distributed_sampler": False}


def check_count(devices: int) -> None:
    """Raise a ConfigError where a protocol's number of devices is not the number of processes."""
    if devices != count():
        raise ConfigError(
            f"devices={devices}, but here {count()} would train the trial: use devices={count()}"
        )


def check_share(batches: object, micro_batch_sizes: Sequence[int]) -> None:
    """Raise a ConfigError for batches that are not split over processes that train together.

    Split batches state the sizes of this process's micro-batches (``micro_batch_sizes``); for a
    DataLoader its batch sampler does.
    """
    source = getattr(batches, "batch_sampler", None) or batches
    if _place is not None and getattr(source, "micro_batch_sizes", None) != micro_batch_sizes:
        raise ConfigError(
            f"devices={_place.count}: the batches of {type(batches).__name__} are not split over "
            "devices: take them from TrainBatches or a DataLoader, or set devices=1"
        )


def agree(value: float | None, loss: float, stop: bool) -> tuple[float | None, float, bool]:
    """Agree with the other processes on a metric, a loss and whether to stop.

    Args:
        value: of the metric in this process; None if it is not finite.
        loss: in this process.
        stop: whether this process wants to stop.

    Returns:
        The metric's value and the loss: those of the first process, unless they are not finite in
        some process (None, or the first such loss). And whether any process wants to stop.
    """
    gathered = gather((value, loss, stop))
    if gathered is None:
        return value, loss, stop
    values, losses, stops = zip(*gathered, strict=True)
    not_finite = [other_loss for other_loss in losses if not math.isfinite(other_loss)]
    agreed_value = None if None in values else values[0]
    agreed_loss = not_finite[0] if not_finite else losses[0]
    return agreed_value, agreed_loss, any(stops)


def gather(value: Value) -> list[Value] | None:
    """Collect every process's ``value``, in order of rank; None where this one trains alone."""
    if _place is None:
        return None
    values: list[Any] = [None] * _place.count
    torch.distributed.all_gather_object(values, value)
    return values


def threads_each(devices: int) -> int:
    """Give the number of torch's threads that each of ``devices`` processes on a CPU has."""
    threads = torch.get_num_threads()
    # A process that has joined others has only its part of the threads already.
    if _place is not None:
        return threads
    return max(1, threads // devices)


def check_devices(options: StudyOptions) -> None:
    """Raise a ConfigError for more devices than there are, or options that exclude several."""
    count = options.devices
    # In a process that shares a trial with others, the study has checked the options before.
    if count == 1 or _place is not None:
        return
    kind, _, index = options.device.partition(":")
    present = os.cpu_count() or 1
    devices = "processors"
    if kind == "cuda":
        present = torch.cuda.device_count() - int(index or 0)
        devices = f"CUDA devices from {options.device} on"
    smallest = options.search.batch_size.low
    option = "search.batch_size.low"
    if options.trial.batch_size is not None:
        smallest = options.trial.batch_size
        option = "trial.batch_size"
    problems = (
        (
            count > present,
            f"but there are {present} {devices}: set devices to at most {max(1, present)}",
        ),
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
    for is_problem, line in problems:
        if is_problem:
            raise ConfigError(f"devices={count} {line}")


def micro_batch_sizes_of_process(
    batch_size: int, micro_batch_size: int | None
) -> tuple[tuple[int, ...], slice]:
    """Cut a batch into micro-batches over several devices.

    Returns:
        The sizes of all micro-batches, and the slice of them that are this process's.
    """
    assert _place is not None  # noqa: S101 (it is one of several)
    sizes = split_batch(batch_size, _place.count, micro_batch_size).sizes
    if 0 in sizes:
        raise ConfigError(
            f"batch size {batch_size} in micro-batches of {micro_batch_size} leaves one of "
            f"{_place.count} devices without an example: raise protocol.micro_batch_size"
        )
    # The micro-batches go to the processes in turn.
    return sizes, slice(_place.rank, None, _place.count)
