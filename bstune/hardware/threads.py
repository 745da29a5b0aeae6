"""How many threads of torch train a workload fastest on a CPU.

Each further thread has to be waited for at every operation. A small network is often faster with
one, above all where other programs keep the processors busy.
"""

import math
import os
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from bstune.options import StudyOptions
from bstune.system.console import plural

# OpenMP's own option, which a user may have set.
OMP_THREADS = "OMP_NUM_THREADS"
# How often each number of threads is timed at each batch size; the least seconds count.
VISITS = 2


@dataclass(frozen=True)
class ThreadTiming:
    """Seconds of a step at one batch size with some threads: the least of the visits."""

    threads: int
    batch_size: int
    seconds: float


@dataclass(frozen=True)
class ThreadChoice:
    """The number of threads to train with, and the timings that chose it; none if it was given."""

    threads: int
    timings: tuple[ThreadTiming, ...] = ()


def counts_to_try(options: StudyOptions) -> tuple[int, ...]:
    """Give the numbers of threads to choose from: one, half of torch's and all of torch's.

    It is one number if the user has given it. It is empty if torch's threads are left alone: on
    CUDA, where they do not train, and where several processes share them.
    """
    most = torch.get_num_threads()
    if options.device != "cpu" or options.devices > 1:
        return ()
    if options.threads != "auto":
        return (options.threads,)
    # The user's environment gives the number, too: torch has taken it.
    if OMP_THREADS in os.environ:
        return (most,)
    return tuple(sorted({1, max(1, most // 2), most}))


@contextmanager
def threads_of_torch(count: int) -> Iterator[None]:
    """Give torch ``count`` threads within a ``with`` block; then it has as many as before."""
    count_before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(count_before)


def choose_threads(
    time_step: Callable[[int], float], counts: Sequence[int], batch_sizes: Sequence[int]
) -> ThreadChoice:
    """Time steps with each number of threads, in turns, and choose the fastest.

    Args:
        time_step: gives the seconds of a step at a batch size, with the threads that torch has.
        counts: the numbers of threads. If there is one, it is chosen without timing.
        batch_sizes: the batch sizes at which steps are timed.
    """
    if len(counts) == 1:
        return ThreadChoice(counts[0])
    # Other processes can only make a step longer: the least seconds of several visits count.
    least: dict[tuple[int, int], float] = {}
    for _ in range(VISITS):
        for batch_size in batch_sizes:
            for count in counts:
                with threads_of_torch(count):
                    seconds = time_step(batch_size)
                visited = (count, batch_size)
                least[visited] = min(seconds, least.get(visited, math.inf))
    timings = tuple(ThreadTiming(*visited, seconds) for visited, seconds in least.items())
    return ThreadChoice(_best_count(timings), timings)


def _best_count(timings: Sequence[ThreadTiming]) -> int:
    """Give the number of threads with the least geometric mean of seconds over batch sizes.

    Of equally fast numbers it is the smallest.
    """
    means = mean_seconds(timings)
    return min(means, key=lambda count: (means[count], count))


def mean_seconds(timings: Sequence[ThreadTiming]) -> Mapping[int, float]:
    """Give the geometric mean over batch sizes of a step's seconds, by number of threads."""
    logs: dict[int, list[float]] = {}
    for timing in timings:
        logs.setdefault(timing.threads, []).append(math.log(timing.seconds))
    return {count: math.exp(statistics.fmean(values)) for count, values in logs.items()}


def threads_text(choice: ThreadChoice) -> str | None:
    """Write the choice as ``1 thread; 2 take 4.5 times as long``.

    None where fewer than two numbers of threads were timed.
    """
    means = mean_seconds(choice.timings)
    if len(means) < 2:
        return None
    texts = list[str]()
    for count, seconds in sorted(means.items()):
        if count != choice.threads:
            verb = "takes" if count == 1 else "take"
            texts.append(f"{count} {verb} {seconds / means[choice.threads]:.2g} times as long")
    return f"{plural(choice.threads, 'thread')}; {', '.join(texts)}"
