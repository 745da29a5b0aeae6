"""What is timed: steps on a ladder of batch sizes in shuffled order, and the device's own limits."""

import random
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from time import process_time
from typing import Any

import numpy as np
import torch
from torch.utils.benchmark import Timer

from bstune.core.clock import Phase, TrialClock
from bstune.core.errors import HardwareError
from bstune.core.records import Budget, TrialProtocol, TrialSpec
from bstune.core.step_time import fit_step_times
from bstune.hardware.roofline import (
    DTYPES,
    Arithmetic,
    DeviceLimits,
    tensor_core_multiple,
    training_loss,
)
from bstune.system.watchdog import Wait, waiting_for
from bstune.trial.batches.loader import endless
from bstune.trial.batches.micro_batches import micro_batch_sizes_of
from bstune.trial.checks.start import at_start
from bstune.trial.devices.device import device_of, processor_wait_of, products_in, synchronize
from bstune.trial.fast.compile import compiled
from bstune.trial.lightning.trainer import without_monitors
from bstune.trial.loop import Workload, run_trial
from bstune.trial.workload import on_device

SHARE_OF_EVALUATION = 1e-9  # no trial that is profiled is evaluated before its end
NOISY_QUARTILES = 1.5  # upper over lower, of the visits of a batch size that is visited again
MOST_REPEATS = 4  # times as many visits as are asked for, of a batch size whose visits differ much
TIMER_CALLS = 5  # of a size at least: three to warm up, one to choose the block, one block


@dataclass(frozen=True)
class StepTiming:
    """Seconds per step at one batch size, over the means of all repeats."""

    batch_size: int
    seconds: float  # median
    low: float  # lower quartile
    high: float  # upper quartile
    drift: float  # largest over smallest of them, less 1
    steps: int  # how many were timed
    visits: int  # at which they were timed
    bare: (
        float | None
    )  # likewise, of the bare forward, backward and optimizer step; None: not timed

    @property
    def throughput(self) -> float:
        """Examples per second."""
        return self.batch_size / self.seconds

    @property
    def overhead_share(self) -> float | None:
        """The share of the step that is the framework's; noise can put it below 0. None if not timed."""
        return None if self.bare is None else 1.0 - self.bare / self.seconds


@dataclass(frozen=True)
class Measured:
    """Timings by batch size, smallest first, and what there was no time for."""

    timings: tuple[StepTiming, ...]
    left_out: tuple[int, ...]  # batch sizes without a visit
    cut: tuple[int, ...]  # batch sizes with fewer visits than were asked for
    # The share of the wall's seconds for which the timing waited for a processor; it is in no timing.
    waited: float = 0.0


def ladder(low: int, ceiling: int, rungs: int, multiple: int) -> tuple[int, ...]:
    """Return at most ``rungs`` batch sizes evenly spread over log B, snapped to ``multiple``, both ends with them."""
    even = [low * (ceiling / low) ** (i / (rungs - 1)) for i in range(1, rungs - 1)]
    between = {round(size / multiple) * multiple for size in even}
    return tuple(sorted({low, ceiling} | {size for size in between if low < size < ceiling}))


def visits(sizes: Sequence[int], repeats: int, seed: int) -> list[int]:
    """Return the order of measurement: the smallest and the largest first, then all the others, then rounds of all.

    Each round is shuffled anew, so that a clock that drifts spreads over all sizes in place of bending tau(B).
    """
    shuffle = random.Random(seed)  # an order, not a secret  # noqa: S311
    ends = list(dict.fromkeys((min(sizes), max(sizes))))
    between = [size for size in sizes if size not in ends]
    rounds = [size for _ in range(repeats - 1) for size in shuffle.sample(list(sizes), len(sizes))]
    return [*ends, *shuffle.sample(between, len(between)), *rounds]


def measure_step_times(
    run: Callable[[int], tuple[Sequence[float], Sequence[float]]],
    sizes: Sequence[int],
    repeats: int,
    seed: int,
    max_seconds: float,
    now: Callable[[], float] = time.perf_counter,
) -> Measured:
    """Measure each batch size ``repeats`` times, both ends first and always, others in shuffled order if there is time.

    Batch sizes whose visits differ much are visited again, up to four times as often, while there is time.
    ``run`` returns the seconds of single steps of a trial, at least one, and of a bare loop.
    """
    start, ends = now(), (min(sizes), max(sizes))
    taken: list[tuple[float, float]] = []
    trials: dict[int, list[Sequence[float]]] = {}
    bares: dict[int, list[Sequence[float]]] = {size: [] for size in sizes}

    def visit(size: int) -> None:
        began = now()
        # What a visit takes is predicted from those so far; a smaller one may still end in time where this does not.
        needed = size in ends and size not in trials
        if not needed:
            predicted = float(fit_step_times(taken, size)(np.array(float(size))))
            if began - start + predicted > max_seconds:
                return
        trial, bare = run(size)
        trials.setdefault(size, []).append(trial)
        bares[size] += [bare] if bare else []
        taken.append((float(size), now() - began))

    for size in visits(sizes, repeats, seed):
        visit(size)
    for _ in range((MOST_REPEATS - 1) * repeats):
        noisy = [size for size, found in trials.items() if _is_noisy(found)]
        visited = sum(map(len, trials.values()))
        for size in noisy:
            visit(size)
        if sum(map(len, trials.values())) == visited:
            break
    return Measured(
        timings=tuple(summarize(size, trials[size], bares[size]) for size in sorted(trials)),
        left_out=tuple(size for size in sizes if size not in trials),
        cut=tuple(size for size in sizes if 0 < len(trials.get(size, ())) < repeats),
    )


def _is_noisy(repeats: Sequence[Sequence[float]]) -> bool:
    """Tell whether the visits of a batch size lie far apart."""
    low, high = np.quantile([statistics.mean(repeat) for repeat in repeats], (0.25, 0.75)).tolist()
    return bool(high > NOISY_QUARTILES * low)


def summarize(
    batch_size: int, repeats: Sequence[Sequence[float]], bare: Sequence[Sequence[float]] = ()
) -> StepTiming:
    """Return median and quartiles over the means of repeats, in seconds; ``bare`` are those of a bare loop.

    Means, as what some steps alone do, such as making the batches of several, is part of them all.
    """
    means = [statistics.mean(repeat) for repeat in repeats]
    low, middle, high = np.quantile(means, (0.25, 0.5, 0.75)).tolist()
    drift = max(means) / min(means) - 1.0
    steps = sum(map(len, repeats))
    return StepTiming(
        batch_size,
        middle,
        low,
        high,
        drift,
        steps,
        len(repeats),
        statistics.median(map(statistics.mean, bare)) if bare else None,
    )


def _marker(
    device: torch.device, now: Callable[[], float]
) -> tuple[Callable[[], Any], Callable[[tuple[Any, Any]], float]]:
    """Return what marks a moment of the device's work, and what tells the seconds between two such marks.

    On CUDA the marks are events of its stream: to set one does not wait, so that the host prepares the next step while
    the device computes, as in training; the seconds are read once the device has been waited for.
    On a CPU the clock stands still while this thread waits for a processor.
    """
    if device.type != "cuda":
        # Another clock, such as the processor's own, knows of no wait.
        if now is not time.perf_counter:
            return now, lambda pair: pair[1] - pair[0]
        waited = processor_wait_of(device)
        return lambda: now() - waited(), lambda pair: pair[1] - pair[0]

    def mark() -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(device))
        return event

    return mark, lambda pair: pair[0].elapsed_time(pair[1]) / 1000.0


class _StepClock(TrialClock):
    """A trial's clock that marks when the first micro-batch of a step is drawn, and where the training pauses."""

    def __init__(
        self,
        now: Callable[[], float],
        synchronize: Callable[[], None],
        mark: Callable[[], Any],
        wait: Wait,
    ) -> None:
        super().__init__(now, synchronize)
        self._wait = wait
        self.steps: list[
            list[tuple[Any, Any]]
        ] = []  # of each step the marks around its stretches of training
        self._mark, self._begin = mark, None

    def enter(self, phase: Phase) -> float:
        """End a stretch of training, and begin another one with the phase."""
        self._wait.progress()
        if self._phase is Phase.TRAINING:
            self._end_stretch(self._mark())
        elapsed = super().enter(phase)
        if phase is Phase.TRAINING:
            self._begin = self._mark()
        return elapsed

    def tick(self) -> None:
        """Begin a step, if the training runs."""
        self._wait.progress()
        if self._phase is Phase.TRAINING:
            moment = self._mark()
            self._end_stretch(moment)
            self.steps.append([])
            self._begin = moment

    def _end_stretch(self, moment: Any) -> None:
        if self.steps:
            self.steps[-1].append((self._begin, moment))


@dataclass(frozen=True)
class _Watched:
    """Batches, or their micro-batches, whose clock ticks at the first one of each step."""

    batches: Iterable[Any]
    every: int
    clock: _StepClock

    @property
    def ends_by_steps(self) -> bool:
        """Whether they are a stream of the user's, as :class:`bstune.trial.batches.given_batches.GivenBatches`."""
        return getattr(self.batches, "ends_by_steps", False)

    def __len__(self) -> int:
        return len(self.batches)  # type: ignore[arg-type]  # a TypeError: they have no end

    def __iter__(self) -> Iterator[Any]:
        for number, batch in enumerate(self.batches):
            if number % self.every == 0:
                self.clock.tick()
            yield batch


def _step_at(batch_size: int) -> str:
    return f"a training step of the survey at batch size {batch_size}"


def time_trial(
    workload: Workload,
    protocol: TrialProtocol,
    batch_size: int,
    lr: float,
    steps: int,
    now: Callable[[], float] = time.perf_counter,
) -> tuple[float, ...]:
    """Return the seconds of each of ``steps`` steps of a real trial, after the protocol's warm-up, evaluation left out.

    A step lasts from one request for a batch to the next, as the device gets to it: it is waited for at the end alone.
    """
    device = device_of(protocol.trainer)
    mark, seconds_between = _marker(device, now)
    micro_batch_sizes = micro_batch_sizes_of(batch_size, protocol.micro_batch_size)
    # The first step's edge is the first tick within training, and the last step ends without one.
    budget = Budget(protocol.warmup_steps + steps + 2, 1)
    trainer = {
        **without_monitors(protocol.trainer),
        "num_sanity_val_steps": 0,
        "limit_val_batches": 1,
    }
    with waiting_for(_step_at(batch_size), steps=True) as wait:
        clock = _StepClock(now, partial(synchronize, device), mark, wait)
        result = run_trial(
            replace(
                workload,
                train_batches=lambda spec: _Watched(
                    workload.train_batches(spec), len(micro_batch_sizes), clock
                ),
            ),
            TrialSpec(0, 0, batch_size, lr, None, 0),
            replace(
                protocol.for_steps_only(budget),
                noise_scale_every=None,
                trainer=trainer,
            ),
            clock=clock,
            horizon=max(budget.steps, protocol.budget.last_step(batch_size)),
        )
    synchronize(device)
    finished = clock.steps[protocol.warmup_steps : -1][:steps]
    timed = tuple(sum(map(seconds_between, stretches)) for stretches in finished)
    if len(timed) < steps:
        raise HardwareError(
            f"{steps} steps were to be timed at batch size {batch_size}, but the trial ended after {result.steps} of "
            f"{budget.steps} ({result.status}): {result.message or 'its module stopped it'}"
        )
    return timed


def busy_seconds(
    workload: Workload, protocol: TrialProtocol, batch_size: int, lr: float, steps: int
) -> float:
    """Return the seconds of a training step in which the device itself is at work.

    On a CPU they are the process's CPU seconds over its threads, the median of ``steps`` steps. On CUDA they are the
    seconds of kernels and copies: those of a profiled trial of twice the steps less those of one of them, over their
    number, so that start, warm-up and evaluation drop out.
    """
    schedule = replace(protocol.evaluation_schedule, share=SHARE_OF_EVALUATION)
    time = partial(
        time_trial, workload, replace(protocol, evaluation_schedule=schedule), batch_size, lr
    )
    if device_of(protocol.trainer).type != "cuda":
        return statistics.median(time(steps, process_time)) / torch.get_num_threads()

    def profiled(count: int) -> float:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
            time(count)
        return sum(float(event.self_device_time_total) for event in profiler.key_averages()) / 1e6

    return (profiled(2 * steps) - profiled(steps)) / steps


def time_bare(
    workload: Workload,
    protocol: TrialProtocol,
    batch_size: int,
    lr: float,
    steps: int,
    device: torch.device,
    now: Callable[[], float] = time.perf_counter,
) -> tuple[float, ...]:
    """Return the seconds of steps of a bare loop in the trial's precision, compiled as it, without a Trainer.

    Each is a batch of B, even where trials accumulate, zero_grad, forward, backward and optimizer step; no schedule.
    The device is waited for at the end alone.
    """
    spec = TrialSpec(0, 0, batch_size, lr, None, 0)
    module, trainer = at_start(workload, spec, protocol)
    precision, optimizers = trainer.precision_plugin, trainer.optimizers
    module.to(device).train()
    if len(optimizers) != 1 or not module.automatic_optimization:
        raise HardwareError(
            f"{type(module).__name__} does not leave its steps to Lightning and one optimizer: no bare loop is like it"
        )
    (optimizer,) = optimizers
    stream = endless(workload.train_batches(spec))
    mark, seconds_between = _marker(device, now)
    marks: list[Any] = []

    def loss() -> torch.Tensor:
        batch = on_device(workload, module, precision.convert_input(next(stream)), device)
        optimizer.zero_grad()
        with precision.train_step_context():
            return training_loss(module, batch, len(marks))

    bare = waiting_for(_step_at(batch_size), steps=True)
    with compiled(protocol.compile, module, loss), bare as wait:
        synchronize(device)
        for _ in range(protocol.warmup_steps + steps):
            wait.progress()
            marks.append(mark())
            loss().backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        marks.append(mark())
        synchronize(device)
    return tuple(map(seconds_between, pairwise(marks)))[protocol.warmup_steps :]


def measure_limits(
    device: torch.device,
    arithmetic: Arithmetic,
    seconds: float,
    matrix_sizes: Sequence[int],
    copy_bytes: Sequence[int],
) -> DeviceLimits:
    """Return the limits of ``device``, the best over a few sizes, warmed up; ``seconds`` are shared evenly."""
    multiple = tensor_core_multiple(arithmetic, device.type)
    share = seconds / (2.0 if multiple is None else 3.0)
    dtype = DTYPES[arithmetic]

    def product(size: int) -> Callable[[], object]:
        left = torch.randn(size, size, device=device).to(dtype)
        right, out = left.clone(), torch.empty_like(left)
        return lambda: torch.mm(left, right, out=out)

    def copy(size: int) -> Callable[[], object]:
        source = torch.ones(
            size, dtype=torch.uint8, device=device
        )  # ones: untouched pages of a host are not memory
        target = torch.ones_like(source)
        return lambda: target.copy_(source)

    try:
        with products_in(tf32=arithmetic == "tf32"):
            flops = _best_rate(product, 3, device, share, matrix_sizes)
            odd = [size + 1 for size in matrix_sizes]
            misaligned = None if multiple is None else _best_rate(product, 3, device, share, odd)
        bandwidth = _best_rate(copy, 1, device, share, copy_bytes)
    except (RuntimeError, AssertionError) as error:  # torch without CUDA asserts
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise HardwareError(
            f"the ceilings of {device} cannot be measured in {arithmetic}: {reason}"
        ) from error
    return DeviceLimits(arithmetic, flops, bandwidth, misaligned)


def _best_rate(
    prepare: Callable[[int], Callable[[], object]],
    power: int,
    device: torch.device,
    seconds: float,
    sizes: Sequence[int],
    clock: Callable[[], float] = time.perf_counter,
) -> float:
    """Return the highest rate of 2 n^power operations, or bytes, a second over sizes n.

    The smallest size is timed in any case, a larger one only where the seconds left are enough for it. What the
    device's libraries take to load is no part of them: on a GPU it is longer than all the rest.
    """

    def read() -> (
        float
    ):  # the Timer's own clock waits for the current CUDA device, whichever is measured
        synchronize(device)
        return clock()

    prepare(min(sizes))()
    end = read() + seconds
    best = per_work = 0.0
    for left, size in zip(range(len(sizes), 0, -1), sorted(sizes), strict=True):
        work = 2.0 * size**power
        if best and TIMER_CALLS * per_work * work > end - clock():
            break
        call = prepare(size)
        call()  # libraries choose their kernels here
        timer = Timer(
            "call()", timer=read, globals={"call": call}, num_threads=torch.get_num_threads()
        )
        per_work = (
            min(timer.blocked_autorange(min_run_time=max(0.0, (end - read()) / left)).times) / work
        )
        best = max(best, 1.0 / per_work)
    return best
