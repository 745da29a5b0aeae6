"""The steps of a workload, timed over batch size, and their cost beside the device's own limits.

All is measured in the process that has the data and the module.
"""

import math
import os
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch

from bstune.core.errors import HardwareError
from bstune.core.records import StepsOf, TrialProtocol, TrialResult, TrialSpec
from bstune.core.search_space import Space
from bstune.core.step_time import fit_line, fit_step_times
from bstune.hardware import roofline, timing
from bstune.hardware.memory import Ceiling
from bstune.hardware.probe import DEVICE_LOST, cautious, largest_in_time
from bstune.hardware.several_devices import TimeTrial, shared_steps
from bstune.hardware.threads import (
    EXPECTED_VISITS,
    OMP_THREADS,
    ThreadChoice,
    choose_threads,
    counts_to_try,
    threads_of_torch,
)
from bstune.options import StepTimeOptions, StudyOptions
from bstune.recipe import Recipe
from bstune.system.console import format_seconds
from bstune.system.failures import optional
from bstune.system.watchdog import Wait, waiting_for
from bstune.trial.batches.loader import loaders_of
from bstune.trial.checks.preflight import PreflightFindings
from bstune.trial.checks.small_evaluations import FEW_EXAMPLES, in_small_batches
from bstune.trial.checks.start import at_start
from bstune.trial.devices.device import device_of, processor_wait_of
from bstune.trial.fast.take_steps import eager_steps
from bstune.trial.lightning.installed import LightningModule
from bstune.trial.loop import Workload
from bstune.trial.workload import on_device

if TYPE_CHECKING:
    from lightning.pytorch.plugins.precision import Precision

# Of ``hardware.seconds``: what each kind of the device's own ceilings takes at most.
CEILINGS_SHARE = 0.02
# What lines call the timing of steps.
TIMING = "the timing of steps"
# Of what is left for timing steps: the first visit to the largest batch size, a visit without the
# framework, and the choice of the number of threads.
LARGEST_SHARE = 0.3
BARE_SHARE = 0.05
# The largest batch size to time is raised where it becomes so many times as large at least.
LEAST_LADDER_RAISE = 1.5
THREADS_SHARE = 0.15
# Seconds that timed steps may take before a fit. Steps that are longer hide what threads wait for.
SECONDS_BEFORE_FIT = 10.0


@dataclass(frozen=True)
class TimedSteps:
    """The part of a survey that the process with the data and the module measures.

    The fields have the names and meanings of those of ``survey.Survey``.
    """

    measured: timing.Measured
    limits: roofline.DeviceLimits | None
    cost: roofline.StepCost | None
    misaligned: tuple[roofline.TensorCoreMisalignment, ...]
    notes: tuple[str, ...]
    threads: ThreadChoice | None


@dataclass(frozen=True)
class HowTimed:
    """How the steps of a survey are timed."""

    seconds_of: StepsOf
    """The loop whose steps are timed."""
    thread_counts: tuple[int, ...]
    """The numbers of threads to choose from. Where it is empty, torch keeps its own."""


def how_timed(options: StudyOptions, module: LightningModule) -> HowTimed:
    """Say how the steps of a module are timed: by which loop, and with which numbers of threads.

    ``options.seconds_of`` names the loop: ``trainer`` is Lightning's Trainer, and ``lean`` is
    bstune's own, which has less overhead. If it is ``auto``, the loop that will train the winner is
    taken: bstune's own for a module of bstune, else Lightning's Trainer.
    """
    seconds_of = options.seconds_of
    if seconds_of == "auto":
        is_of_bstune = type(module).__module__.partition(".")[0] == "bstune"
        seconds_of = "lean" if is_of_bstune else "trainer"
    return HowTimed(seconds_of, counts_to_try(options))


def time_workload(
    options: StudyOptions,
    recipe: Recipe,
    space: Space,
    protocol: TrialProtocol,
    workload: Workload,
    tried: PreflightFindings | None,
    how: HowTimed,
    ceiling: Ceiling,
    seconds: float,
) -> TimedSteps:
    """Measure the device's roofline and the workload's steps, in this process, within ``seconds``.

    They are measured with the number of torch's threads that is fastest; afterwards torch has its
    former number again. ``tried`` is what a few steps have shown before; None: none were taken.
    """
    start = time.perf_counter()
    tried = cautious(tried, options.device)
    device = torch.device(options.device)
    timed_protocol = protocol
    # With bstune's own loop switched off, Lightning's Trainer takes the timed steps.
    if how.seconds_of == "trainer":
        timed_protocol = replace(protocol, fast="off")
    with _device_errors():
        workload = _with_small_evaluations(workload)
        threads = _choose_threads(
            options, space, timed_protocol, workload, tried, how, ceiling, seconds
        )
        with nullcontext() if threads is None else threads_of_torch(threads.threads):
            limits, cost, notes = _roofline(options, device, workload, protocol, space)
            seconds_left = seconds - (time.perf_counter() - start)
            measured, timing_notes = _time_ladder(
                options,
                recipe,
                space,
                timed_protocol,
                workload,
                ceiling,
                device,
                seconds_left,
                tried,
            )
    misaligned = _misaligned(device, limits, cost, ceiling.batch_size)
    return TimedSteps(
        measured=measured,
        limits=limits,
        cost=cost,
        misaligned=misaligned,
        notes=(*notes, *timing_notes),
        threads=threads,
    )


def _choose_threads(
    options: StudyOptions,
    space: Space,
    protocol: TrialProtocol,
    workload: Workload,
    tried: PreflightFindings | None,
    how: HowTimed,
    ceiling: Ceiling,
    seconds: float,
) -> ThreadChoice | None:
    """Choose torch's number of threads by timing steps at up to three batch sizes.

    More threads are not faster for every model. The steps take a share of ``seconds``. None where
    torch's threads are left alone: ``how`` then has no numbers of threads to choose from.
    """
    counts = how.thread_counts
    if not counts:
        return None
    step_time = options.hardware.step_time
    low = ceiling.smallest
    high = ceiling.batch_size
    middle = round(math.sqrt(low * high) / space.multiple) * space.multiple
    with_warmup = replace(protocol, warmup_steps=step_time.warmup_steps)

    def steps_at(batch_size: int) -> int:
        if tried is None:
            return step_time.min_steps
        return _steps_of_visit(step_time, tried.step_time(batch_size))

    # At the lowest rate searched: a high one might diverge at once.
    def time_step(batch_size: int) -> float:
        rate = space.lowest_rate_spec(batch_size).lr
        return _wall_seconds(workload, with_warmup, batch_size, rate, steps_at(batch_size))

    sizes = list[int]()
    seconds_left = THREADS_SHARE * seconds
    for batch_size in sorted({low, max(low, middle), high}):
        if tried is not None:
            # What timing all numbers of threads at this batch size is expected to take.
            steps = steps_at(batch_size) + step_time.warmup_steps
            seconds_left -= len(counts) * EXPECTED_VISITS * steps * tried.step_time(batch_size)
        # The smallest one is timed in any case.
        if sizes and seconds_left < 0.0:
            break
        sizes.append(batch_size)
    return choose_threads(time_step, counts, sizes)


def _wall_seconds(
    workload: Workload, protocol: TrialProtocol, batch_size: int, lr: float, steps: int
) -> float:
    """Measure the mean wall-clock seconds of a step, in which threads wait for each other, too."""
    now = timing.wall_seconds
    return statistics.mean(timing.time_trial(workload, protocol, batch_size, lr, steps, now))


def threads_of_fit(
    options: StudyOptions,
    workload: Workload,
    protocol: TrialProtocol,
    trial: TrialResult,
    most: int | None,
) -> int | None:
    """Choose torch's number of threads for a fit of a study's trial in this process.

    In the user's process OpenMP may keep waiting threads awake for milliseconds, in the study's
    own processes it does not (``system/openmp.py``): many threads may be slower here than they
    were there. So ``most`` threads are timed again, here, beside one.

    Args:
        options: the study's.
        workload: that the fit trains.
        protocol: of the fit.
        trial: that the fit repeats.
        most: the threads with which the study trained; None where no survey chose them.

    Returns:
        The number. None where torch's threads are left alone: where no CPU trains, or several
        processes do, and where OMP_NUM_THREADS says how many.
    """
    is_on_cpu = device_of(protocol.trainer).type == "cpu" and protocol.devices == 1
    if not is_on_cpu or OMP_THREADS in os.environ:
        return None
    if options.threads != "auto":
        return options.threads
    here = torch.get_num_threads()
    most = min(most or here, here)
    step_time = options.hardware.step_time
    step_seconds = trial.seconds_per_step
    steps = step_time.min_steps
    if step_seconds is not None:
        steps = _steps_of_visit(step_time, step_seconds)
    counts = tuple(sorted({1, most}))
    steps_in_all = len(counts) * EXPECTED_VISITS * (steps + step_time.warmup_steps)
    # Timing would take too long. In steps of such a length the waits between threads hardly count.
    if steps_in_all * (step_seconds or 0.0) > SECONDS_BEFORE_FIT:
        return most
    with_warmup = replace(protocol, warmup_steps=step_time.warmup_steps)

    # The fit's module, which has the trial's other hyper-parameters.
    def build_module(spec: TrialSpec) -> LightningModule:
        return workload.build_module(replace(spec, hyperparameters=trial.hyperparameters))

    timed = replace(_with_small_evaluations(workload), build_module=build_module)

    def time_step(batch_size: int) -> float:
        return _wall_seconds(timed, with_warmup, batch_size, trial.lr, steps)

    try:
        return choose_threads(time_step, counts, (trial.batch_size,)).threads
    # The module ends its own training after fewer steps than are to be timed.
    except HardwareError:
        return most


def _with_small_evaluations(workload: Workload) -> Workload:
    """Make evaluations short, by small batches: each trial that is timed ends with one batch."""
    loaders = loaders_of(workload.validation_batches)
    # One loader cannot be put in the place of several.
    if len(loaders) != 1:
        return workload
    return replace(workload, validation_batches=in_small_batches(loaders[0], FEW_EXAMPLES))


@contextmanager
def _device_errors() -> Iterator[None]:
    """Turn torch's error of a lost device into one line."""
    try:
        yield
    # torch's errors of the device are of this kind.
    except RuntimeError as error:
        if not DEVICE_LOST.search(str(error)):
            raise
        text = f"the device was lost while it was measured: {str(error).splitlines()[0]}"
        raise HardwareError(f"{text}. Check that it is there and free, then run again") from error


def _roofline(
    options: StudyOptions,
    device: torch.device,
    workload: Workload,
    protocol: TrialProtocol,
    space: Space,
) -> tuple[roofline.DeviceLimits | None, roofline.StepCost | None, tuple[str, ...]]:
    """Give the device's limits, the cost of a step, and notes.

    What could not be measured is None, and a note says why.
    """
    if options.devices > 1:
        note = f"no roofline: it is one device's, and {options.devices} share the steps"
        return None, None, (note,)
    ceilings = options.hardware.ceilings
    limits: roofline.DeviceLimits | None = None
    cost: roofline.StepCost | None = None
    notes = list[str]()
    # A module that cannot be built here leaves the device's own limits to be measured.
    module: LightningModule | None = None
    with optional("no roofline", notes):
        module, trainer = at_start(workload, space.lowest_rate_spec(space.low), protocol)
    convolves = module is not None and roofline.is_convolutional(module)
    with optional("no roofline", notes):
        arithmetic = roofline.arithmetic_of(options.precision, device, convolves)
        limits = timing.measure_limits(
            device,
            arithmetic,
            min(ceilings.seconds, CEILINGS_SHARE * options.hardware.seconds),
            ceilings.matrix_sizes,
            ceilings.copy_bytes,
        )
        if module is not None:
            loss = partial(_loss, trainer.precision_plugin)
            make_batch = partial(_batch, workload, module.to(device).train(), space, device)
            with waiting_for(f"the survey's trace of {type(module).__name__}", steps=True):
                cost = roofline.step_cost(
                    module, make_batch, loss, arithmetic, ceilings.traced_batch_sizes
                )
    # One note is enough: where the module fails, measuring the ceilings may fail, too.
    return limits, cost, tuple(notes[:1])


def _loss(precision: "Precision", module: LightningModule, batch: object) -> torch.Tensor:
    """Give the loss of a step, in the precision of its Trainer."""
    with precision.train_step_context():
        return roofline.training_loss(module, precision.convert_input(batch))


def _batch(
    workload: Workload,
    module: LightningModule,
    space: Space,
    device: torch.device,
    batch_size: int,
) -> object:
    """Give the first training batch of ``batch_size``, on the device."""
    batch = next(iter(workload.train_batches(space.lowest_rate_spec(batch_size))))
    return on_device(workload, module, batch, device)


def _steps_of_visit(step_time: StepTimeOptions, step_seconds: float) -> int:
    """How many steps a visit times, if a step takes ``step_seconds``."""
    wanted = round(step_time.visit_seconds / step_seconds)
    return min(max(wanted, step_time.min_steps), step_time.max_steps)


def _misaligned(
    device: torch.device,
    limits: roofline.DeviceLimits | None,
    cost: roofline.StepCost | None,
    batch_size: int,
) -> tuple[roofline.TensorCoreMisalignment, ...]:
    """Give the dimensions that miss the tensor cores' multiple; none where no roofline is known."""
    if limits is None or cost is None:
        return ()
    multiple = roofline.tensor_core_multiple(limits.dtype, device.type)
    if multiple is None:
        return ()
    return tuple(roofline.misalignments(cost, limits, multiple, batch_size))


def _time_ladder(
    options: StudyOptions,
    recipe: Recipe,
    space: Space,
    protocol: TrialProtocol,
    workload: Workload,
    ceiling: Ceiling,
    device: torch.device,
    seconds: float,
    tried: PreflightFindings | None,
) -> tuple[timing.Measured, tuple[str, ...]]:
    """Time steps at batch sizes that are evenly spread over log B up to the ceiling.

    All of it takes ``seconds`` at most. The user's own batch size is one more of the sizes where it
    lies outside the range.

    Returns:
        What was measured, and notes on what was not: large batch sizes, shares of overhead.
    """
    step_time = options.hardware.step_time
    # The steps before a graph is captured are not like the replays that follow, which are timed.
    warmup_steps = max(step_time.warmup_steps, eager_steps(protocol.fast, device))
    with_warmup = replace(protocol, warmup_steps=warmup_steps)
    ladder = _sizes_to_time(options, space, workload, ceiling, warmup_steps, seconds, tried)
    # Gives the seconds in which this process has waited for a processor so far.
    waited = processor_wait_of(device)
    start = time.perf_counter()
    waited_before = waited()
    is_shared = protocol.devices > 1
    # Opens what times a trial's steps: this process or, below, one process for each device.
    timers: AbstractContextManager[TimeTrial] = nullcontext(
        partial(timing.time_trial, workload, with_warmup)
    )
    overhead_notes = list[str]()

    def time_bare(batch_size: int, lr: float, steps: int) -> tuple[float, ...]:
        return timing.time_bare(workload, with_warmup, batch_size, lr, steps, device)

    if is_shared:
        timers = shared_steps(options, recipe, warmup_steps)
        # With a note on overhead no bare loop is timed.
        overhead_notes.append(f"no share of overhead: {protocol.devices} devices share the steps")
    with timers as time_trial, waiting_for(TIMING, whole=True) as wait:
        visits = _Visits(
            wait=wait,
            planned=len(ladder.sizes) * step_time.repeats,
            ends_at=start + seconds,
            space=space,
            step_time=step_time,
            warmup_steps=warmup_steps,
            bare_seconds=BARE_SHARE * seconds,
            time_trial=time_trial,
            time_bare=time_bare,
            tried=tried,
            overhead_notes=overhead_notes,
        )
        if is_shared:
            # The processes start with the first trial, which is no part of a step.
            smallest = ladder.sizes[0]
            time_trial(smallest, space.lowest_rate_spec(smallest).lr, 1)

        def resized(seconds_left: float) -> tuple[int, ...]:
            """Raise the largest size, where the first visits were faster than the steps before."""
            nonlocal ladder
            ladder = _raised(ladder, visits, ceiling, seconds_left)
            return ladder.sizes

        measured = timing.measure_step_times(
            visits.visit, ladder.sizes, step_time.repeats, options.seed, seconds, resized=resized
        )
        wait.what = TIMING
    notes = list[str]()
    if ladder.largest < ceiling.batch_size:
        notes.append(_untimed_note(ladder.largest, ladder.longest_step))
    notes += [*ladder.notes, *overhead_notes]
    share_waited = (waited() - waited_before) / (time.perf_counter() - start)
    return replace(measured, waited=share_waited), tuple(notes)


@dataclass(frozen=True)
class _Ladder:
    """The batch sizes at which steps are timed.

    Args:
        sizes: the batch sizes, from the smallest.
        largest: of them, in the range; the user's own may lie outside.
        longest_step: the seconds that a step may take.
        notes: on what is not timed besides.
    """

    sizes: tuple[int, ...]
    largest: int
    longest_step: float
    notes: tuple[str, ...] = ()


def _raised(ladder: _Ladder, visits: "_Visits", ceiling: Ceiling, seconds_left: float) -> _Ladder:
    """Raise the largest batch size as far as the first visits to both ends show that time allows.

    The first steps of a process, on which the sizes were chosen, may be many times as slow as those
    that follow. A raise by less than ``LEAST_LADDER_RAISE`` is not worth another visit.
    """
    largest = ladder.sizes[-1]
    # One outside the range, the user's own, stays the largest one.
    if ladder.largest != largest or largest >= ceiling.batch_size:
        return ladder
    step_time = visits.step_time
    longest_step = _longest_step(step_time, visits.warmup_steps, seconds_left)
    law = fit_line(visits.timed)
    in_time = largest_in_time(ceiling.batch_size, ceiling.smallest, longest_step, law)
    multiple = visits.space.multiple
    if in_time < ceiling.batch_size:
        in_time = in_time // multiple * multiple
    # A step that is long even at the smallest size may take twice as long, if there is time for it.
    has_time = LARGEST_SHARE * law(in_time) <= longest_step
    if not has_time or in_time < LEAST_LADDER_RAISE * largest:
        # What is longer than that is told as predicted, or as the end of the time.
        if law(largest + 1) > ladder.longest_step:
            return ladder
        longest_timed = law(largest) if has_time and in_time > largest else 0.0
        return replace(ladder, longest_step=longest_timed)
    sizes = timing.ladder(ceiling.smallest, in_time, step_time.rungs, multiple)
    # A smaller size of the user's own stays, which the ladder does not have.
    sizes = tuple(sorted({*sizes, ladder.sizes[0]}))
    return replace(ladder, sizes=sizes, largest=in_time, longest_step=longest_step)


def _sizes_to_time(
    options: StudyOptions,
    space: Space,
    workload: Workload,
    ceiling: Ceiling,
    warmup_steps: int,
    seconds: float,
    tried: PreflightFindings | None,
) -> _Ladder:
    """Choose the batch sizes at which steps are timed.

    The arguments are those of :func:`_time_ladder`, and the warm-up steps of a visit.
    """
    step_time = options.hardware.step_time
    longest_step = _longest_step(step_time, warmup_steps, seconds)
    largest = _largest_to_time(step_time, warmup_steps, space, ceiling, seconds, tried)
    notes = list[str]()
    sizes = timing.ladder(ceiling.smallest, largest, step_time.rungs, space.multiple)
    reference = reference_outside(options, space)
    if reference is not None:
        if _can_be_timed(reference, space, workload, ceiling, longest_step, tried):
            sizes = tuple(sorted({*sizes, reference}))
        else:
            notes.append(f"steps at your own batch size {reference} are not timed but predicted")
    return _Ladder(sizes, largest, longest_step, tuple(notes))


def reference_outside(options: StudyOptions, space: Space) -> int | None:
    """Give the user's own batch size, the reference's, where it lies outside the range; else None.

    None, too, where the search does not run the reference as its baseline.
    """
    batch_size = options.scaling.whole_batch_size
    if not options.search.baseline or space.low <= batch_size <= space.high:
        return None
    return batch_size


def _can_be_timed(
    batch_size: int,
    space: Space,
    workload: Workload,
    ceiling: Ceiling,
    longest_step: float,
    tried: PreflightFindings | None,
) -> bool:
    """Whether steps at a batch size outside the range run, as far as is known, and end in time.

    ``longest_step``: the seconds that a step may take. The other arguments are those of
    :func:`_time_ladder`.
    """
    if batch_size < space.low:
        # If the range's smallest size fails, a smaller one will fail as well.
        return ceiling.smallest == space.low
    # A larger one was not probed: it must not have been shown to be too large, and take less than
    # half of the memory by prediction.
    if ceiling.above is not None or not ceiling.is_far_below_limit(batch_size):
        return False
    if workload.train_examples and batch_size > workload.train_examples:
        return False
    if tried is None:
        return True
    in_time = largest_in_time(batch_size, ceiling.smallest, longest_step, tried.step_time)
    return in_time >= batch_size


def _untimed_note(largest: int, step_seconds: float) -> str:
    """Say why batch sizes past ``largest`` are not timed.

    ``step_seconds`` are those that a step may take: 0 where no time is left.
    """
    reason = "the survey's time was used up before"
    if step_seconds > 0.0:
        reason = f"each takes longer than {format_seconds(step_seconds)}"
    return (
        f"steps past batch size {largest} are not timed but predicted: {reason} "
        "(hardware.seconds, at most a tenth of search.wall_seconds)"
    )


def _longest_step(step_time: StepTimeOptions, warmup_steps: int, seconds: float) -> float:
    """Give the seconds that a step may take for a first visit to keep to its share of time."""
    return LARGEST_SHARE * seconds / (warmup_steps + step_time.min_steps)


def _largest_to_time(
    step_time: StepTimeOptions,
    warmup_steps: int,
    space: Space,
    ceiling: Ceiling,
    seconds: float,
    tried: PreflightFindings | None,
) -> int:
    """Give the largest batch size whose first visit, with a few steps, is predicted to end in time.

    A first visit may take a share of ``seconds``, which is the time for all visits. The prediction
    is made from the steps that were ``tried`` before. Without them the ceiling is timed.
    """
    highest = ceiling.batch_size
    if tried is None:
        return highest
    step_seconds = _longest_step(step_time, warmup_steps, seconds)
    in_time = largest_in_time(highest, ceiling.smallest, step_seconds, tried.step_time)
    # The ceiling need not be a multiple.
    if in_time >= highest:
        return highest
    return max(in_time // space.multiple * space.multiple, ceiling.smallest)


@dataclass
class _Visits:
    """Visits to batch sizes: each times a few steps of a trial, and of a bare loop if it pays."""

    wait: Wait
    """Named by the lines that are printed meanwhile."""
    planned: int
    """How many visits there are to be at first."""
    ends_at: float
    """When all of them are to have ended, in seconds of ``time.perf_counter``."""
    space: Space
    step_time: StepTimeOptions
    warmup_steps: int
    bare_seconds: float
    """A visit to the bare loop takes at most so many."""
    time_trial: TimeTrial
    time_bare: TimeTrial
    """Times steps without the framework."""
    tried: PreflightFindings | None
    """What the steps that were tried before have told; None: none were."""
    overhead_notes: list[str]
    """Why the share of overhead is not known. Once it has a line, no bare loop is timed."""
    timed: list[tuple[float, float]] = field(default_factory=list)
    """Batch size and mean seconds of a step, of the visits so far."""
    compared: set[int] = field(default_factory=set)
    """The batch sizes at which a bare loop was to be timed."""

    def visit(self, batch_size: int) -> tuple[Sequence[float], Sequence[float]]:
        """Give the seconds of single steps of a trial, and those of a bare loop.

        A bare loop is plain PyTorch: what a trial's step takes more is the framework's overhead.
        Its seconds are empty where it was not timed.
        """
        self.wait.what = self._in_words(batch_size)
        # The lowest rate searched: a high one might diverge at once, which ends the trial.
        lr = self.space.lowest_rate_spec(batch_size).lr
        steps = _steps_of_visit(self.step_time, self._expected_seconds(batch_size))
        trial_step_seconds = self.time_trial(batch_size, lr, steps)
        mean_seconds = statistics.mean(trial_step_seconds)
        self.timed.append((float(batch_size), mean_seconds))
        # A note says that this module cannot be trained in a bare loop: that is not tried again.
        if self.overhead_notes:
            return trial_step_seconds, ()
        # Steps are long where a visit takes the fewest of them. One comparison is enough then, as
        # overhead is a small share of each.
        if batch_size in self.compared and steps <= self.step_time.min_steps:
            return trial_step_seconds, ()
        self.compared.add(batch_size)
        # Bare steps take about as long as a trial's: more than their share of time is not spent.
        if (self.warmup_steps + steps) * mean_seconds > self.bare_seconds:
            return trial_step_seconds, ()
        bare_step_seconds: Sequence[float] = ()
        with optional("no share of overhead", self.overhead_notes):
            bare_step_seconds = self.time_bare(batch_size, lr, steps)
        return trial_step_seconds, bare_step_seconds

    def _in_words(self, batch_size: int) -> str:
        """Say which visit begins, of how many, and for how long there may be others."""
        number = len(self.timed) + 1
        text = f"{TIMING} (batch size {batch_size}, visit {number}"
        left = self.ends_at - time.perf_counter()
        if left <= 0.0:
            return f"{text}, no time for others)"
        most = max(number, self.planned)
        return f"{text} of at most {most}, about {format_seconds(left)} more)"

    def _expected_seconds(self, batch_size: int) -> float:
        """Predict the seconds of a step by the visits so far, else by the steps tried before.

        Without either a step is expected to fill a visit, so that the visit has the fewest steps.
        """
        if self.timed:
            return float(fit_step_times(self.timed, batch_size)(np.array(float(batch_size))))
        if self.tried is not None:
            return float(self.tried.step_time(batch_size))
        return self.step_time.visit_seconds
