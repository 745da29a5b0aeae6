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
# How often each number of threads is timed at each batch size, at most.
VISITS = 3
# Few choices need every turn: the time for so many is reckoned with.
EXPECTED_VISITS = 2
# More threads are chosen where fewer take over so many times as long.
MARGIN = 1.15


@dataclass(frozen=True)
class ThreadTiming:
    """Seconds of a step at one batch size with some threads: the median of the visits."""

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
    """Time steps with each number of threads, in turns, and choose among them.

    The fewest threads are chosen, unless more are faster by ``MARGIN`` in every turn. A turn times
    each number once at each batch size. A number that is not so much faster in one turn is not
    timed again.

    Args:
        time_step: gives the seconds of a step at a batch size, with the threads that torch has.
            They are wall-clock seconds: waiting for a processor, or for another thread, counts.
        counts: the numbers of threads. If there is one, it is chosen without timing.
        batch_sizes: the batch sizes at which steps are timed.
    """
    if len(counts) == 1:
        return ThreadChoice(counts[0])
    fewest, *more = sorted(counts)
    # The mean seconds of each number of threads, turn by turn.
    turns = list[Mapping[int, float]]()
    # The seconds in all turns, by number of threads and batch size.
    visits: dict[tuple[int, int], list[float]] = {}
    while more and len(turns) < VISITS:
        turn = list[ThreadTiming]()
        for batch_size in batch_sizes:
            for count in (fewest, *more):
                with threads_of_torch(count):
                    seconds = time_step(batch_size)
                turn.append(ThreadTiming(count, batch_size, seconds))
                visits.setdefault((count, batch_size), []).append(seconds)
        turns.append(mean_seconds(turn))
        more = [count for count in more if _is_faster(count, fewest, turns[-1:])]
    best = fewest
    for count in more:
        if _is_faster(count, best, turns):
            best = count
    timings = list[ThreadTiming]()
    for visited, seconds_of_visits in visits.items():
        timings.append(ThreadTiming(*visited, statistics.median(seconds_of_visits)))
    return ThreadChoice(best, tuple(timings))


def _is_faster(count: int, fewer: int, turns: Sequence[Mapping[int, float]]) -> bool:
    """Whether ``count`` threads beat ``fewer`` ones by the factor ``MARGIN`` in each of the turns.

    A turn gives a step's seconds by number of threads.
    """
    return all(turn[fewer] > MARGIN * turn[count] for turn in turns)


def mean_seconds(timings: Sequence[ThreadTiming]) -> Mapping[int, float]:
    """Give the geometric mean over batch sizes of a step's seconds, by number of threads."""
    logs: dict[int, list[float]] = {}
    for timing in timings:
        logs.setdefault(timing.threads, []).append(math.log(timing.seconds))
    return {count: math.exp(statistics.fmean(values)) for count, values in logs.items()}


def threads_text(choice: ThreadChoice) -> str | None:
    """Write the choice as ``1 thread; 2 take 4.5 times as long``.

    Where more threads are faster, it says that they are not by enough. None where fewer than two
    numbers of threads were timed.
    """
    means = mean_seconds(choice.timings)
    if len(means) < 2:
        return None
    texts = list[str]()
    for count, seconds in sorted(means.items()):
        ratio = seconds / means[choice.threads]
        if count != choice.threads:
            verb = "takes" if count == 1 else "take"
            texts.append(f"{count} {verb} {ratio:.2g} times as long")
        if count > choice.threads and ratio < 1.0:
            texts[-1] += f" (not {MARGIN - 1.0:.0%} faster in every turn)"
    return f"{plural(choice.threads, 'thread')}; {', '.join(texts)}"
