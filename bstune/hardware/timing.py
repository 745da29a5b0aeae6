"""Times steps on a ladder of batch sizes in shuffled order, and measures the device's limits."""

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
from bstune.trial.lightning.trainer import without_recording_or_stopping
from bstune.trial.loop import Workload, run_trial
from bstune.trial.workload import on_device

# So small that no trial that is profiled is evaluated before its end.
SHARE_OF_EVALUATION = 1e-9
QUARTILES = (0.25, 0.75)
# A batch size is visited again if the upper quartile of its visits is so many times the lower one.
NOISY_QUARTILES = 1.5
# A batch size whose visits differ much gets at most so many times the visits that are asked for.
MOST_REPEATS = 4
# The fewest calls of a size: three to warm up, one to choose the block, one block.
TIMER_CALLS = 5


@dataclass(frozen=True)
class StepTiming:
    """Seconds per step at one batch size, over the means of all visits to it."""

    batch_size: int
    seconds: float
    """The median of the means."""
    low: float
    """Their lower quartile."""
    high: float
    """Their upper quartile."""
    drift: float
    """The largest mean over the smallest, less 1."""
    steps: int
    """How many steps were timed."""
    visits: int
    """How many visits they were timed in."""
    bare: float | None
    """The median seconds of a step in a loop without the framework; None if none was timed."""

    @property
    def throughput(self) -> float:
        """Examples per second."""
        return self.batch_size / self.seconds

    @property
    def overhead_share(self) -> float | None:
        """The share of the step's seconds that the framework takes; noise can put it below 0.

        None where no loop without the framework was timed.
        """
        if self.bare is None:
            return None
        return 1.0 - self.bare / self.seconds


@dataclass(frozen=True)
class Measured:
    """The timings of batch sizes, and the visits that there was no time for."""

    timings: tuple[StepTiming, ...]
    """The smallest batch size first."""
    left_out: tuple[int, ...]
    """Batch sizes without a visit."""
    cut: tuple[int, ...]
    """Batch sizes with fewer visits than were asked for."""
    waited: float = 0.0
    """The share of wall-clock time in which the timing waited for a processor. No timing has it."""


def ladder(low: int, ceiling: int, rungs: int, multiple: int) -> tuple[int, ...]:
    """Give at most ``rungs`` batch sizes, evenly spread over log B from ``low`` to ``ceiling``.

    Both ends are among them. The sizes between are multiples of ``multiple``.
    """
    sizes = {low, ceiling}
    for i in range(1, rungs - 1):
        even = low * (ceiling / low) ** (i / (rungs - 1))
        size = round(even / multiple) * multiple
        if low < size < ceiling:
            sizes.add(size)
    return tuple(sorted(sizes))


def visit_order(sizes: Sequence[int], repeats: int, seed: int) -> list[int]:
    """Give the order in which batch sizes are measured, each of them ``repeats`` times.

    The smallest and the largest come first, then the others, then all of them again and again. Each
    round is shuffled anew: a machine that slows down then slows all sizes, and does not bend
    tau(B).
    """
    # The generator is for an order, not for a secret.
    shuffle = random.Random(seed)  # noqa: S311
    both_ends = list(dict.fromkeys((min(sizes), max(sizes))))
    between = [size for size in sizes if size not in both_ends]
    # The later rounds are drawn before the first visits. In another order of the draws, a seed
    # would give another order of visits than it gave so far.
    rounds = list[int]()
    for _ in range(repeats - 1):
        rounds += shuffle.sample(list(sizes), len(sizes))
    return [*both_ends, *shuffle.sample(between, len(between)), *rounds]


def measure_step_times(
    time_steps: Callable[[int], tuple[Sequence[float], Sequence[float]]],
    sizes: Sequence[int],
    repeats: int,
    seed: int,
    max_seconds: float,
    now: Callable[[], float] = time.perf_counter,
    resized: Callable[[float], Sequence[int]] | None = None,
) -> Measured:
    """Measure the seconds of a step at each batch size, in ``repeats`` visits to it.

    The smallest and the largest come first and are measured in any case. The others come in
    shuffled order if there is time. Batch sizes whose visits differ much are visited again, up to
    four times as often, while there is time.

    Args:
        time_steps: visits a batch size. It gives the seconds of single steps of a trial, at least
            one, and those of a loop without the framework, which may be none.
        sizes: the batch sizes.
        repeats: the number of visits to each.
        seed: of the order.
        max_seconds: what all visits may take.
        now: a clock.
        resized: gives the batch sizes anew after the first visits to both ends, from the seconds
            that are left. The smallest one is the same. None: they stay.
    """
    start = now()
    both_ends = {min(sizes), max(sizes)}
    # The batch size and the seconds of each visit so far.
    visits = list[tuple[float, float]]()
    # By batch size: the seconds of single steps, a sequence for each visit. They are of trials, and
    # of loops without the framework.
    trial_seconds: dict[int, list[Sequence[float]]] = {}
    bare_seconds: dict[int, list[Sequence[float]]] = {}

    def visit(size: int) -> None:
        began = now()
        # The seconds of a visit are predicted from those so far. Where this one would end too late,
        # one to a smaller batch size may still end in time.
        is_needed = size in both_ends and size not in trial_seconds
        if not is_needed:
            predicted = float(fit_step_times(visits, size)(np.array(float(size))))
            if began - start + predicted > max_seconds:
                return
        trial, bare = time_steps(size)
        trial_seconds.setdefault(size, []).append(trial)
        if bare:
            bare_seconds.setdefault(size, []).append(bare)
        visits.append((float(size), now() - began))

    order = visit_order(sizes, repeats, seed)
    for size in order[: len(both_ends)]:
        visit(size)
    order = order[len(both_ends) :]
    if resized is not None:
        new_sizes = resized(max_seconds - (now() - start))
        if max(new_sizes) != max(sizes):
            sizes = sorted({*new_sizes, *both_ends})
            both_ends = {min(sizes), max(sizes)}
            # The smallest one has had its first visit.
            order = visit_order(sizes, repeats, seed)[1:]
    for size in order:
        visit(size)
    # With these visits a batch size has MOST_REPEATS times as many as without.
    for _ in range((MOST_REPEATS - 1) * repeats):
        noisy = [size for size, repeated in trial_seconds.items() if _is_noisy(repeated)]
        visits_before = len(visits)
        for size in noisy:
            visit(size)
        # Nothing is noisy, or there is no time for another visit.
        if len(visits) == visits_before:
            break
    timings = list[StepTiming]()
    for size in sorted(trial_seconds):
        bare = bare_seconds.get(size, ())
        timings.append(summarize_visits(size, trial_seconds[size], bare))
    return Measured(
        timings=tuple(timings),
        left_out=tuple(size for size in sizes if size not in trial_seconds),
        cut=tuple(size for size in sizes if 0 < len(trial_seconds.get(size, ())) < repeats),
    )


def _is_noisy(repeats: Sequence[Sequence[float]]) -> bool:
    """Tell whether the mean seconds of a batch size's visits lie far apart."""
    means = [statistics.mean(repeat) for repeat in repeats]
    low, high = np.quantile(means, QUARTILES).tolist()
    return bool(high > NOISY_QUARTILES * low)


def summarize_visits(
    batch_size: int, repeats: Sequence[Sequence[float]], bare: Sequence[Sequence[float]] = ()
) -> StepTiming:
    """Give the median and quartiles, over a batch size's visits, of the mean seconds of a step.

    The steps of a visit are averaged first: some of them do work for several, such as making their
    batches. The drift is the slowest visit's mean over the fastest one's, less 1.

    Args:
        batch_size: at which the steps were timed.
        repeats: the seconds of single steps, a sequence for each visit.
        bare: the same of a loop without the framework.
    """
    means = [statistics.mean(repeat) for repeat in repeats]
    lower, upper = QUARTILES
    low, middle, high = np.quantile(means, (lower, 0.5, upper)).tolist()
    bare_seconds: float | None = None
    if bare:
        bare_seconds = statistics.median(map(statistics.mean, bare))
    return StepTiming(
        batch_size=batch_size,
        seconds=middle,
        low=low,
        high=high,
        drift=max(means) / min(means) - 1.0,
        steps=sum(map(len, repeats)),
        visits=len(repeats),
        bare=bare_seconds,
    )


def wall_seconds() -> float:
    """Read a clock that goes on while training waits for a processor.

    :func:`time_trial` leaves that wait out if its clock ``now`` is ``time.perf_counter`` itself.
    Given this function instead, it counts the wait.
    """
    return time.perf_counter()


def _marker(
    device: torch.device, now: Callable[[], float]
) -> tuple[Callable[[], object], Callable[[tuple[Any, Any]], float]]:
    """Give a function that marks a moment of the device's work, and one for the seconds of a pair.

    The pair is of two marks. On CUDA they are events of the device's stream. Setting one does not
    wait, so the host prepares the next step while the device computes, as in training. The seconds
    may be read only once the host has waited for the device. On a CPU with the default clock, the
    seconds in which this thread waited for a processor are left out.
    """
    if device.type != "cuda":
        # Another clock than the default one is taken as it is.
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
    """A trial's clock that marks the edges of each step, and leaves out what is not training."""

    def __init__(
        self,
        now: Callable[[], float],
        synchronize: Callable[[], None],
        mark: Callable[[], object],
        wait: Wait,
    ) -> None:
        super().__init__(now, synchronize)
        # Warns the user of a step that never ends. It is told of each step that has ended.
        self._wait = wait
        # Gives a mark, a moment of the device's work: two of them tell seconds.
        self._mark = mark
        # For each step, the marks at the beginning and the end of its stretches of training.
        self.steps: list[list[tuple[object, object]]] = []
        # The mark at which the running stretch began.
        self._begin: object = None

    def enter(self, phase: Phase) -> float:
        """Enter a phase of the trial: a running stretch of training ends, and one may begin.

        Gives the seconds of the phase that ends.
        """
        # Tells the watch over steps that never end that this one goes on.
        self._wait.progress()
        if self._phase is Phase.TRAINING:
            self._end_stretch(self._mark())
        elapsed = super().enter(phase)
        if phase is Phase.TRAINING:
            self._begin = self._mark()
        return elapsed

    def tick(self) -> None:
        """Begin a step, as its first micro-batch is drawn; outside of training, mark nothing."""
        # Tells the watch over steps that never end that this one goes on.
        self._wait.progress()
        if self._phase is Phase.TRAINING:
            moment = self._mark()
            self._end_stretch(moment)
            self.steps.append([])
            self._begin = moment

    def _end_stretch(self, moment: object) -> None:
        """Add the running stretch of training, which ends at the mark ``moment``, to its step."""
        # A stretch before the first step belongs to no step.
        if self.steps:
            self.steps[-1].append((self._begin, moment))


@dataclass(frozen=True)
class _Watched:
    """Batches, or their micro-batches, whose clock ticks at the first one of each step."""

    batches: Iterable[object]
    every: int
    clock: _StepClock

    @property
    def ends_by_steps(self) -> bool:
        """Whether a Trainer is to end the training by its steps, as the batches themselves say.

        Those of an endless stream of the user's do.
        """
        return getattr(self.batches, "ends_by_steps", False)

    def __len__(self) -> int:
        # Batches without an end have no length: a TypeError, by which the Trainer knows them.
        return len(self.batches)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[object]:
        for number, batch in enumerate(self.batches):
            if number % self.every == 0:
                self.clock.tick()
            yield batch


def _step_text(batch_size: int) -> str:
    """Name a step in the message that tells the user of one that never ends."""
    return f"a training step of the survey at batch size {batch_size}"


def time_trial(
    workload: Workload,
    protocol: TrialProtocol,
    batch_size: int,
    lr: float,
    steps: int,
    now: Callable[[], float] = time.perf_counter,
) -> tuple[float, ...]:
    """Give the seconds of each of ``steps`` steps of a real trial, after the protocol's warm-up.

    Evaluation is left out. A step lasts from one request for a batch to the next. The host waits
    for the device at the end alone, as in training. HardwareError where the trial ended before
    these steps. ``now`` is the clock; with the default one, the seconds in which a CPU's step
    waited for a processor are left out.
    """
    device = device_of(protocol.trainer)
    mark, seconds_between = _marker(device, now)
    micro_batches = len(micro_batch_sizes_of(batch_size, protocol.micro_batch_size))
    # Two steps more than are timed: the first batch may be requested before training begins, where
    # the clock marks nothing, and the last step ends without a request for another batch.
    budget = Budget(steps=protocol.warmup_steps + steps + 2)
    trainer = {
        **without_recording_or_stopping(protocol.trainer),
        "num_sanity_val_steps": 0,
        "limit_val_batches": 1,
    }
    steps_only = replace(
        protocol.for_steps_only(budget),
        noise_scale_every=None,
        trainer=trainer,
    )
    with waiting_for(_step_text(batch_size), steps=True) as wait:
        clock = _StepClock(now, partial(synchronize, device), mark, wait)

        def watched(spec: TrialSpec) -> _Watched:
            return _Watched(workload.train_batches(spec), micro_batches, clock)

        result = run_trial(
            replace(workload, train_batches=watched),
            TrialSpec(number=0, trial_index=0, batch_size=batch_size, lr=lr, delta=None, seed=0),
            steps_only,
            clock=clock,
            # A schedule that ends with the trial has the length that it would have in a study.
            horizon=max(budget.steps, protocol.budget.last_step(batch_size)),
        )
    synchronize(device)
    finished = clock.steps[protocol.warmup_steps : -1][:steps]
    # A step in which an evaluation falls has several stretches of training.
    timed = tuple(sum(map(seconds_between, stretches)) for stretches in finished)
    if len(timed) < steps:
        ended = f"the trial ended after {result.steps} of {budget.steps} ({result.status})"
        raise HardwareError(
            f"{steps} steps were to be timed at batch size {batch_size}, but {ended}: "
            f"{result.end_message or 'its module stopped it'}"
        )
    return timed


def busy_seconds(
    workload: Workload, protocol: TrialProtocol, batch_size: int, lr: float, steps: int
) -> float:
    """Measure the seconds of a training step in which the device itself is at work.

    On a CPU they are the process's CPU seconds divided by its threads, the median of ``steps``
    steps. On CUDA they are the seconds of kernels and copies. Two trials are profiled, of ``steps``
    steps and of twice as many, and their difference is divided by ``steps``: so start, warm-up and
    evaluation drop out.
    """
    # With evaluations at so small a share of the time, a trial has only the one at its end.
    schedule = replace(protocol.evaluation_schedule, share=SHARE_OF_EVALUATION)
    unevaluated = replace(protocol, evaluation_schedule=schedule)
    time_steps = partial(time_trial, workload, unevaluated, batch_size, lr)
    if device_of(protocol.trainer).type != "cuda":
        return statistics.median(time_steps(steps, process_time)) / torch.get_num_threads()

    def profiled(count: int) -> float:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
            time_steps(count)
        microseconds = sum(float(event.self_device_time_total) for event in profiler.key_averages())
        return microseconds / 1e6

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
    """Give the seconds of each of ``steps`` steps of a plain loop, without a Trainer.

    The loop has the trial's precision and compilation. A step is zero_grad, forward, backward and
    the optimizer's step, on a whole batch even where trials accumulate micro-batches. There is no
    learning-rate schedule. The host waits for the device at the end alone, as in training.
    HardwareError where the module steps its optimizers itself, or has several.
    """
    spec = TrialSpec(number=0, trial_index=0, batch_size=batch_size, lr=lr, delta=None, seed=0)
    module, trainer = at_start(workload, spec, protocol)
    precision = trainer.precision_plugin
    module.to(device).train()
    if len(trainer.optimizers) != 1 or not module.automatic_optimization:
        raise HardwareError(
            f"{type(module).__name__} does not leave its steps to Lightning and one optimizer: no "
            "bare loop is like it"
        )
    (optimizer,) = trainer.optimizers
    stream = endless(workload.train_batches(spec))
    mark, seconds_between = _marker(device, now)
    marks = list[object]()

    # A mark is set before each step, so that their count numbers the steps.
    def loss() -> torch.Tensor:
        batch = on_device(workload, module, precision.convert_input(next(stream)), device)
        optimizer.zero_grad()
        with precision.train_step_context():
            return training_loss(module, batch, index=len(marks))

    bare_steps = waiting_for(_step_text(batch_size), steps=True)
    with compiled(protocol.compile, module, loss), bare_steps as wait:
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
    """Measure the limits of ``device``: the best rates of matrix products and of copies.

    ``seconds`` are shared evenly between products, copies and, on tensor cores, products of sizes
    that miss their multiple. HardwareError where the device cannot compute in ``arithmetic``.
    """
    has_tensor_cores = tensor_core_multiple(arithmetic, device.type) is not None
    share = seconds / 2.0
    if has_tensor_cores:
        share = seconds / 3.0
    dtype = DTYPES[arithmetic]

    def product(size: int) -> Callable[[], object]:
        matrix = torch.randn(size, size, device=device).to(dtype)
        factor = matrix.clone()
        out = torch.empty_like(matrix)
        return lambda: torch.mm(matrix, factor, out=out)

    def copy(size: int) -> Callable[[], object]:
        # Filled with ones: a host gives memory only to the pages that are written.
        source = torch.ones(size, dtype=torch.uint8, device=device)
        target = torch.ones_like(source)
        return lambda: target.copy_(source)

    misaligned: float | None = None
    try:
        # A product of n x n matrices takes 2 n^3 operations; a copy of n bytes moves 2 n.
        with products_in(tf32=arithmetic == "tf32"):
            flops = _best_rate(product, matrix_sizes, device, share, power=3)
            if has_tensor_cores:
                odd_sizes = [size + 1 for size in matrix_sizes]
                misaligned = _best_rate(product, odd_sizes, device, share, power=3)
        bandwidth = _best_rate(copy, copy_bytes, device, share, power=1)
    # A torch that was built without CUDA raises an AssertionError.
    except (RuntimeError, AssertionError) as error:
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise HardwareError(
            f"the ceilings of {device} cannot be measured in {arithmetic}: {reason}"
        ) from error
    return DeviceLimits(
        dtype=arithmetic,
        flops_per_second=flops,
        bytes_per_second=bandwidth,
        misaligned_flops_per_second=misaligned,
    )


def _best_rate(
    prepare: Callable[[int], Callable[[], object]],
    sizes: Sequence[int],
    device: torch.device,
    seconds: float,
    *,
    power: int,
    clock: Callable[[], float] = time.perf_counter,
) -> float:
    """Give the highest rate over sizes n, in operations or bytes a second.

    A call of size n does 2 n^``power`` operations, or moves as many bytes: a matrix product has the
    power 3, a copy, which reads and writes n bytes, the power 1. The smallest size is timed in any
    case, a larger one only if enough of ``seconds`` is left. The time in which the device's
    libraries load does not count: on a GPU it is longer than all the rest.

    Args:
        prepare: makes the call of a size.
        sizes: the sizes n.
        device: on which it runs.
        seconds: what all calls may take.
        power: of the size.
        clock: in seconds; tests replace it.
    """

    # The Timer's own clock waits for the current CUDA device, even if another one is measured.
    def read() -> float:
        synchronize(device)
        return clock()

    # The libraries load here.
    prepare(min(sizes))()
    end = read() + seconds
    best = 0.0
    seconds_per_work = 0.0
    for i, size in enumerate(sorted(sizes)):
        work = 2.0 * size**power
        # A size whose calls would take more than the seconds left is not timed, but for the first.
        if best and TIMER_CALLS * seconds_per_work * work > end - clock():
            break
        call = prepare(size)
        # Libraries choose their kernels here.
        call()
        timer = Timer(
            "call()", timer=read, globals={"call": call}, num_threads=torch.get_num_threads()
        )
        sizes_left = len(sizes) - i
        share = max(0.0, (end - read()) / sizes_left)
        times = timer.blocked_autorange(min_run_time=share).times
        seconds_per_work = min(times) / work
        best = max(best, 1.0 / seconds_per_work)
    return best
