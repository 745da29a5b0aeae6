"""What the hardware allows for one workload: memory ceiling, step times, limits and a step's cost.

A survey is measured once a workload, device and versions, and cached: the ceiling ends the range of
the search, and tau(B) is half of its model of time.
"""

import hashlib
import json
import logging
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from pydantic import TypeAdapter, ValidationError

from bstune.config import Composed, compose
from bstune.core.errors import ConfigError, HardwareError, InputError, StudyError
from bstune.core.records import Budget, StepsOf, TrialProtocol, TrialSpec
from bstune.core.search_space import Space
from bstune.core.step_time import fit_step_times
from bstune.core.step_time_law import (
    StepTimeLaw,
    fit_step_time_law,
    leave_one_out,
)
from bstune.hardware import known_devices, roofline, timing
from bstune.hardware.memory import (
    BYTES_PER_MIB,
    Ceiling,
    ProbeOutcome,
    ProbeResult,
    memory_limit,
    resident_bytes,
)
from bstune.hardware.probe import DEVICE_LOST, largest_in_time, measure_ceiling
from bstune.hardware.several_devices import TimeTrial, shared_steps
from bstune.hardware.threads import (
    VISITS,
    ThreadChoice,
    choose_threads,
    counts_to_try,
    threads_of_torch,
)
from bstune.options import StepTimeOptions, StudyOptions
from bstune.recipe import Recipe
from bstune.system.console import format_seconds, plural, quieten
from bstune.system.failures import optional
from bstune.system.files import write_text
from bstune.system.inputs import read_bytes
from bstune.system.watchdog import waiting_for, watching
from bstune.trial.backend import make_space
from bstune.trial.batches.loader import loaders_of
from bstune.trial.checks.loaders import check_loaders
from bstune.trial.checks.preflight import PreflightFindings, preflight
from bstune.trial.checks.small_evaluations import FEW_EXAMPLES, in_small_batches
from bstune.trial.checks.start import at_start
from bstune.trial.devices.device import device_name, processor, processor_wait_of, versions
from bstune.trial.fast.take_steps import eager_steps
from bstune.trial.lightning.installed import LightningDataModule, LightningModule
from bstune.trial.loop import Workload
from bstune.trial.processes.workers import start_server
from bstune.trial.workload import (
    build_module,
    build_workload,
    check_largest,
    checked_protocol,
    load_data,
    on_device,
    resolve,
    train_examples,
)

if TYPE_CHECKING:
    from lightning.pytorch.plugins.precision import Precision

    from bstune.report.picture import Picture

logger = logging.getLogger(__name__)
# Of a step: where the roofline allows it in less, neither computing nor memory is what it waits
# for.
NEITHER_SHARE = 0.1
# Of the best throughput: from here on a larger batch gives next to nothing a second.
PLATEAU_SHARE = 0.95
# Of ``hardware.seconds``: what the probes of memory may take, and each kind of the device's own
# ceilings at most.
PROBES_SHARE = 0.5
CEILINGS_SHARE = 0.02
# Of what is left for timing steps: the first visit to the largest batch size, a visit without the
# framework, and the choice of the number of threads.
LARGEST_SHARE = 0.3
BARE_SHARE = 0.05
THREADS_SHARE = 0.15


@dataclass(frozen=True, repr=False)
class Survey:
    """What a machine allows for a workload: what was measured, and what follows from it."""

    workload: str
    device: str
    """Its name, as in the trials' records."""
    device_type: str
    """cpu or cuda."""
    precision: str
    versions: Mapping[str, str]
    high: int
    """The largest batch size that was asked for."""
    ceiling: Ceiling
    measured: timing.Measured
    """Seconds per step over batch size."""
    limits: roofline.DeviceLimits | None
    """None where they could not be measured, as the notes say."""
    cost: roofline.StepCost | None
    """FLOPs and bytes of a step; None where they are not known, as the notes say."""
    seconds: float
    """That the survey took."""
    notes: tuple[str, ...] = ()
    misaligned: tuple[roofline.TensorCoreMisalignment, ...] = ()
    """Dimensions that miss the tensor cores' multiple at the ceiling."""
    threads: ThreadChoice | None = None
    """Of torch, with which the steps were timed; None on CUDA."""
    seconds_of: StepsOf = "lean"
    """Whose seconds the steps' are."""

    def __repr__(self) -> str:
        timed = ", ".join(f"{size}: {format_seconds(taken)}" for size, taken in self.pairs)
        largest = self.ceiling.batch_size
        return f"Survey({self.workload} on {self.device}: B up to {largest}; steps {timed})"

    def plot(self) -> "Picture":
        """Draw ``roofline.png`` as a figure that a notebook shows as a cell's value.

        HardwareError where the roofline is not known; the notes say why.
        """
        # It needs this module, and a study's survey is not drawn.
        from bstune.hardware.report import survey_figure

        return survey_figure(self)

    def _repr_html_(self) -> str:
        """Show in a notebook what ``bstune survey`` prints, and the roofline where it is known."""
        # It needs this module, too.
        from bstune.hardware.report import survey_html

        return survey_html(self)

    @property
    def pairs(self) -> list[tuple[int, float]]:
        """Measured (B, tau(B) in seconds)."""
        return [(row.batch_size, row.seconds) for row in self.measured.timings]

    @cached_property
    def step_time(self) -> StepTimeLaw | None:
        """tau(B) with its error; None where only one batch size was measured."""
        if len(self.pairs) < 2:
            return None
        return fit_step_time_law(self.measured.timings, self.measured.waited)

    @property
    def left_out_error(self) -> float | None:
        """Median relative error of tau at measured sizes, each predicted from the others.

        None below three sizes.
        """
        if len(self.pairs) < 3:
            return None
        return statistics.median(leave_one_out(self.measured.timings))

    @property
    def turning_batch_size(self) -> float | None:
        """From where on the step is compute-bound by its shapes.

        None for never, or if it is not known.
        """
        if self.cost is None or self.limits is None:
            return None
        return roofline.turning_batch_size(self.cost, self.limits.ridge)

    @property
    def achieved(self) -> list[roofline.Achieved]:
        """How near the measured steps came to the roofline; empty where it is not known."""
        if self.cost is None or self.limits is None:
            return []
        rows = list[roofline.Achieved]()
        for size, seconds in self.pairs:
            flops_per_second = self.cost.flops.at(size) / seconds
            allowed = roofline.allowed_seconds(self.cost, self.limits, size)
            rows.append(
                roofline.Achieved(
                    batch_size=size,
                    share_of_peak=flops_per_second / self.limits.flops_per_second,
                    share_of_roofline=allowed / seconds,
                    intensity=roofline.intensity(self.cost, size),
                )
            )
        return rows

    @property
    def multiple(self) -> int | None:
        """What tensor cores take dimensions in multiples of here; None where they are not used."""
        if self.limits is None:
            return None
        return roofline.tensor_core_multiple(self.limits.dtype, self.device_type)

    @property
    def elsewhere(self) -> list[known_devices.Prediction]:
        """What bounds the step on devices known by their makers' figures.

        Its seconds are of the largest batch size that was timed here.
        """
        if self.cost is None or self.limits is None or not self.pairs:
            return []
        largest, _ = self.pairs[-1]
        return known_devices.predictions(self.cost, self.limits.dtype, largest)

    @property
    def bound_by_neither(self) -> list[roofline.Achieved]:
        """The smallest batch sizes, in a row, of whose steps the roofline accounts for little.

        That is, for less than a tenth of the measured seconds.
        """
        return list(takewhile(lambda row: row.share_of_roofline < NEITHER_SHARE, self.achieved))

    @property
    def plateau(self) -> timing.StepTiming:
        """The smallest measured batch size with 95% of the best measured throughput."""
        timings = self.measured.timings
        enough = PLATEAU_SHARE * max(row.throughput for row in timings)
        return next(row for row in timings if row.throughput >= enough)


def compose_survey(arguments: Sequence[str]) -> Composed:
    """Compose the options and the recipe of a command line.

    ConfigError for a workload that is not trained.
    """

    def refuse(workload: Mapping[str, object]) -> dict[str, object]:
        raise ConfigError(
            "recorded runs have no hardware to survey: name a workload that is trained"
        )

    return compose(arguments, refuse)


def survey_of(
    options: StudyOptions, recipe: Recipe, log: Callable[[str], None]
) -> tuple[Survey, bool]:
    """Give the survey of a workload, and whether it was cached; ``log`` takes lines of progress."""
    quieten()
    # The server of processes imports torch while this process reads the data.
    start_server()
    options, recipe = resolve(options, recipe)
    space = make_space(options)
    protocol = checked_protocol(options, recipe)
    with watching(log, options.protocol.trial_seconds) as say:
        data = load_data(options, recipe)
        check_loaders(data, is_given=recipe.data_at is not None)
        check_largest(space.high, data)
        build = partial(build_workload, options, recipe, data)
        return cached_survey(options, recipe, space, protocol, data, build, say)


@dataclass(frozen=True)
class TimedSteps:
    """What the process that has the data and the module measured of the workload's steps."""

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
    thread_counts: tuple[int, ...]
    """Numbers of threads to choose from; empty: torch's are left as they are."""

    def differs(self, survey: "Survey") -> str | None:
        """Say in what a survey from before was timed otherwise; None: it was timed like this."""
        if survey.seconds_of != self.seconds_of:
            return f"its seconds are those of {survey.seconds_of}, not of {self.seconds_of}"
        return self._other_threads(survey.threads)

    def _other_threads(self, choice: ThreadChoice | None) -> str | None:
        """Say in what a choice of threads from before was another; None: it stands here, too."""
        counts = self.thread_counts
        if choice is None:
            return "its number of threads was left alone" if counts else None
        threads = plural(choice.threads, "thread")
        if not counts:
            return f"its steps ran on {threads}, which is left alone here"
        if choice.threads not in counts:
            wanted = " or ".join(str(count) for count in counts)
            return f"its steps ran on {threads}, and this study's run on {wanted}"
        # One that was given says nothing of the others.
        was_chosen = len(choice.timings) > 0 or len(counts) == 1
        if not was_chosen:
            return f"its steps ran on {threads}, and no other number was tried"
        return None


def how_timed(options: StudyOptions, module: LightningModule) -> HowTimed:
    """Tell how the steps of a module are timed.

    It is by the loop that trains the winner, unless the options say.
    """
    seconds_of = options.seconds_of
    if seconds_of == "auto":
        is_of_bstune = type(module).__module__.partition(".")[0] == "bstune"
        seconds_of = "lean" if is_of_bstune else "trainer"
    return HowTimed(seconds_of, counts_to_try(options))


TimeSteps = Callable[[Ceiling, float], TimedSteps]
"""Times steps up to the memory ceiling, within the seconds that there are."""


def measure(
    options: StudyOptions,
    recipe: Recipe,
    space: Space,
    protocol: TrialProtocol,
    train_examples: int,
    build: Callable[[], Workload],
    log: Callable[[str], None],
    tried: PreflightFindings | None = None,
) -> Survey:
    """Measure what the hardware allows for a workload, in this process but for probes of memory.

    The options are resolved. ``tried`` is what a few steps have shown before; None: none were taken
    yet.
    """
    if tried is None:
        tried = _few_steps(build(), protocol, space)
    how = how_timed(options, build_module(options, recipe, space.lowest_rate_spec(space.low)))

    def time_steps(ceiling: Ceiling, seconds: float) -> TimedSteps:
        workload = build()
        return time_workload(
            options, recipe, space, protocol, workload, tried, how, ceiling, seconds
        )

    return measure_with(
        options, recipe, space, protocol, train_examples, tried, how, time_steps, log
    )


def measure_with(
    options: StudyOptions,
    recipe: Recipe,
    space: Space,
    protocol: TrialProtocol,
    train_examples: int,
    tried: PreflightFindings | None,
    how: HowTimed,
    time_steps: TimeSteps,
    log: Callable[[str], None],
) -> Survey:
    """Measure what the hardware allows, with steps that ``time_steps`` times in whatever process.

    For the other arguments see :func:`measure`.
    """
    start = time.perf_counter()
    hardware = options.hardware

    def seconds_left() -> float:
        return hardware.seconds - (time.perf_counter() - start)

    device = torch.device(options.device)
    log(
        "surveying the hardware: probes of memory in processes of their own, then steps, "
        f"at most {hardware.seconds:g} s"
    )
    largest, unused = usable_sizes(space.high, protocol.budget)
    # A captured graph holds memory of its own.
    steps = max(hardware.memory.steps, eager_steps(protocol.fast, device) + 1)
    ceiling = measure_ceiling(
        options,
        recipe,
        space.low,
        max(space.low, largest),
        train_examples,
        tried=tried,
        limit=_trial_limit(options, device),
        multiple=space.multiple,
        relative=getattr(hardware.memory.relative, device.type),
        steps=steps,
        seconds=hardware.memory.probe_seconds,
        wanted_seconds=PROBES_SHARE * hardware.seconds,
        is_late=lambda: seconds_left() < (1.0 - PROBES_SHARE) * hardware.seconds,
        largest_first=True,
        verify=hardware.memory.verify,
        report=lambda result: log(probe_text(result)),
    )
    log("timing steps")
    timed = time_steps(ceiling, seconds_left())
    return Survey(
        workload=options.workload.name,
        device=device_name(protocol.trainer, protocol.devices),
        device_type=device.type,
        precision=options.precision,
        versions=versions(),
        high=space.high,
        ceiling=ceiling,
        measured=timed.measured,
        limits=timed.limits,
        cost=timed.cost,
        seconds=time.perf_counter() - start,
        notes=(*unused, *ceiling.notes, *timed.notes),
        misaligned=timed.misaligned,
        threads=timed.threads,
        seconds_of=how.seconds_of,
    )


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
    """Measure the device's roofline and the workload's steps, in this process, within some seconds.

    They are measured with the number of threads that is fastest; torch then has its own again.
    """
    start = time.perf_counter()
    device = torch.device(options.device)
    timed_protocol = protocol
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
    """Choose the number of threads at up to three batch sizes, within a share of the seconds."""
    counts = how.thread_counts
    if not counts:
        return None
    step_time = options.hardware.step_time
    low = ceiling.smallest
    high = ceiling.batch_size
    middle = round(math.sqrt(low * high) / space.multiple) * space.multiple
    short = replace(protocol, warmup_steps=step_time.warmup_steps)

    def steps_at(batch_size: int) -> int:
        if tried is None:
            return step_time.min_steps
        return _steps_of_visit(step_time, tried.step_time(batch_size))

    def time_step(batch_size: int) -> float:
        rate = space.lowest_rate_spec(batch_size).lr
        steps = timing.time_trial(workload, short, batch_size, rate, steps_at(batch_size))
        return statistics.mean(steps)

    sizes = list[int]()
    seconds_left = THREADS_SHARE * seconds
    for batch_size in sorted({low, max(low, middle), high}):
        if tried is not None:
            steps = steps_at(batch_size) + step_time.warmup_steps
            seconds_left -= len(counts) * VISITS * steps * tried.step_time(batch_size)
        # The smallest one is timed in any case.
        if sizes and seconds_left < 0.0:
            break
        sizes.append(batch_size)
    return choose_threads(time_step, counts, sizes)


def _few_steps(
    workload: Workload, protocol: TrialProtocol, space: Space
) -> PreflightFindings | None:
    """Take a few steps and give what they show; None where it can be trained, but not tuned."""
    alone = replace(protocol, devices=1)
    try:
        return preflight(workload, alone, space, None, continues=False, survey=True)
    except ConfigError:
        return None


def _with_small_evaluations(workload: Workload) -> Workload:
    """Let the workload's evaluations take small batches: a trial that is timed ends with one."""
    loaders = loaders_of(workload.validation_batches)
    # Of several none can be put in the place of all.
    if len(loaders) != 1:
        return workload
    return replace(workload, validation_batches=in_small_batches(loaders[0], FEW_EXAMPLES))


def usable_sizes(high: int, budget: Budget) -> tuple[int, tuple[str, ...]]:
    """Give the largest batch size that a trial's budget can use; a note where it is not ``high``.

    A batch larger than all examples of the budget would be the trial's only one.
    """
    if budget.steps > 1 or high <= budget.examples or budget.examples <= 1:
        return high, ()
    beyond = f"batch sizes past budget.examples={budget.examples}"
    return budget.examples, (f"{beyond} are left out: a trial would be one step",)


def _trial_limit(options: StudyOptions, device: torch.device) -> int | None:
    """Give the bytes that one of ``search.workers`` trials may take.

    None: all that the CUDA device has.
    """
    memory = options.hardware.memory
    workers = options.search.workers
    limit = memory.limit
    if limit is None and device.type == "cpu":
        # A trial that takes all that is free ends its process.
        limit = int(memory.free_share * memory_limit(Path("/"), resident_bytes()))
    if device.type == "cpu" and limit is not None:
        # CUDA devices have their own each.
        limit //= options.devices
    if workers == 1:
        return limit
    if limit is None:
        limit = int(torch.cuda.get_device_properties(device).total_memory)
    # This process is one more: it has the data, and trained at the largest batch size.
    return limit // (workers + 1)


def probe_text(result: ProbeResult) -> str:
    """Write a probe in a line."""
    taken = ""
    if result.peak_bytes is not None:
        peak = result.peak_bytes / BYTES_PER_MIB
        limit = result.limit / BYTES_PER_MIB
        taken = f" ({peak:,.0f} of {limit:,.0f} MiB)"
    outcomes: dict[ProbeOutcome, str] = {
        "fits": "fits",
        "startup": "does not fit: data and model alone",
        "training": "does not fit",
        "evaluation": "trains, but its evaluation does not fit",
        "error": f"fails: {result.message}",
        "device": "lost the device",
    }
    return f"batch size {result.batch_size:,} {outcomes[result.outcome]}{taken}"


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
    """Measure the device's limits and trace a step's cost; notes say what failed."""
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
            draw = partial(_batch, workload, module.to(device).train(), space, device)
            with waiting_for(f"the survey's trace of {type(module).__name__}", steps=True):
                cost = roofline.step_cost(
                    module, draw, loss, arithmetic, ceilings.traced_batch_sizes
                )
    # It is said once: where the module fails, the ceilings may as well.
    return limits, cost, tuple(notes[:1])


def _loss(precision: "Precision", module: LightningModule, batch: object) -> torch.Tensor:
    """Give a step's loss in the precision of its Trainer: batches may come in half of it."""
    with precision.train_step_context():
        return roofline.training_loss(module, precision.convert_input(batch))


def _batch(
    workload: Workload, module: LightningModule, space: Space, device: torch.device, size: int
) -> object:
    """Draw a training batch of a size, on the device."""
    batch = next(iter(workload.train_batches(space.lowest_rate_spec(size))))
    return on_device(workload, module, batch, device)


def _steps_of_visit(step_time: StepTimeOptions, seconds: float) -> int:
    """Say how many steps a visit times, where one takes so many seconds."""
    wanted = round(step_time.visit_seconds / seconds)
    return min(max(wanted, step_time.min_steps), step_time.max_steps)


def _misaligned(
    device: torch.device,
    limits: roofline.DeviceLimits | None,
    cost: roofline.StepCost | None,
    batch_size: int,
) -> tuple[roofline.TensorCoreMisalignment, ...]:
    """Find what misses the tensor cores' multiple; nothing without a roofline."""
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
    """Time steps within ``seconds``; give what was measured, and notes."""
    step_time = options.hardware.step_time
    warmup_steps = max(step_time.warmup_steps, eager_steps(protocol.fast, device))
    short = replace(protocol, warmup_steps=warmup_steps)
    timed = list[tuple[float, float]]()
    compared = set[int]()
    is_shared = protocol.devices > 1
    overhead_notes = list[str]()
    if is_shared:
        overhead_notes.append(f"no share of overhead: {protocol.devices} devices share the steps")

    def run(size: int) -> tuple[Sequence[float], Sequence[float]]:
        lr = space.lowest_rate_spec(size).lr
        expected = step_time.visit_seconds
        if timed:
            expected = float(fit_step_times(timed, size)(np.array(float(size))))
        steps = _steps_of_visit(step_time, expected)
        trial = time_trial(size, lr, steps)
        timed.append((float(size), statistics.mean(trial)))
        # A module that cannot be compared is not tried again.
        if overhead_notes:
            return trial, ()
        # A long step's overhead is not worth another one.
        if size in compared and steps <= step_time.min_steps:
            return trial, ()
        compared.add(size)
        if (warmup_steps + steps) * statistics.mean(trial) > BARE_SHARE * seconds:
            return trial, ()
        bare: Sequence[float] = ()
        with optional("no share of overhead", overhead_notes):
            bare = timing.time_bare(workload, short, size, lr, steps, device)
        return trial, bare

    notes = list[str]()
    largest = ceiling.batch_size
    if tried is not None:
        step_seconds = LARGEST_SHARE * seconds / (warmup_steps + step_time.min_steps)
        in_time = largest_in_time(largest, ceiling.smallest, step_seconds, tried.step_time)
        if in_time < largest:
            largest = max(in_time // space.multiple * space.multiple, ceiling.smallest)
            notes.append(
                f"steps past batch size {largest} are not timed but predicted: each takes longer "
                f"than {format_seconds(step_seconds)} "
                f"(hardware.seconds={options.hardware.seconds:g})"
            )
    sizes = timing.ladder(ceiling.smallest, largest, step_time.rungs, space.multiple)
    waited = processor_wait_of(device)
    start = time.perf_counter()
    waited_before = waited()
    timers: AbstractContextManager[TimeTrial] = nullcontext(
        partial(timing.time_trial, workload, short)
    )
    if is_shared:
        timers = shared_steps(options, recipe, warmup_steps)
    with timers as time_trial:
        if is_shared:
            # The processes start with it, which is no part of a step.
            time_trial(sizes[0], space.lowest_rate_spec(sizes[0]).lr, 1)
        measured = timing.measure_step_times(run, sizes, step_time.repeats, options.seed, seconds)
    share_waited = (waited() - waited_before) / (time.perf_counter() - start)
    return replace(measured, waited=share_waited), (*notes, *overhead_notes)


SURVEYS = TypeAdapter(Survey)
# What of a workload's options changes nothing that is measured.
IRRELEVANT = {"trials", "budget", "target", "reference", "tunable"}


def cached_survey(
    options: StudyOptions,
    recipe: Recipe,
    space: Space,
    protocol: TrialProtocol,
    data: LightningDataModule,
    build: Callable[[], Workload],
    log: Callable[[str], None],
    tried: PreflightFindings | None = None,
) -> tuple[Survey, bool]:
    """Give the survey of this workload, device and versions, and whether it was cached.

    ``tried`` is what a few steps have shown before, see :func:`measure`.
    """
    examples = train_examples(data)
    key, how = survey_key(options, recipe, space, protocol, examples)

    def measured() -> Survey:
        return measure(options, recipe, space, protocol, examples, build, log, tried)

    return cached(options, key, how, measured, log)


def survey_key(
    options: StudyOptions,
    recipe: Recipe,
    space: Space,
    protocol: TrialProtocol,
    examples: int,
) -> tuple[str, HowTimed]:
    """Give the key of a workload's survey in the cache, and how its steps are timed.

    A module is built for it.
    """
    spec = TrialSpec(
        number=0,
        trial_index=0,
        batch_size=space.low,
        lr=space.lr(space.low, 0.0),
        delta=None,
        seed=0,
    )
    module = build_module(options, recipe, spec)
    return cache_key(options, space, protocol, module, examples), how_timed(options, module)


def cached(
    options: StudyOptions,
    key: str,
    how: HowTimed,
    measured: Callable[[], Survey],
    log: Callable[[str], None],
) -> tuple[Survey, bool]:
    """Give the survey of a key, and whether it was in the cache; else it is measured, and kept.

    One with another number of threads, or of another loop, is measured again, and a line says so.
    """
    # The workload's name is for people: the key alone tells surveys apart.
    path = Path(options.hardware.cache) / f"{options.workload.name}-{key}.json"
    known: Survey | None = None
    if not options.hardware.refresh:
        known = read_survey(path)
    if known is not None:
        difference = how.differs(known)
        if difference is None:
            return known, True
        log(f"the cached survey of the hardware is not used, it is measured again: {difference}")
    survey = measured()
    # A study goes on without it: the next one then measures again.
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, SURVEYS.dump_json(survey).decode())
    except (OSError, StudyError) as error:
        logger.warning("the survey of the hardware is not cached: %s", error)
    return survey, False


def read_survey(path: Path) -> Survey | None:
    """Read the survey in a file; None where there is none, or one that cannot be read."""
    try:
        return SURVEYS.validate_json(read_bytes(path, "the survey"))
    except (InputError, ValidationError, HardwareError):
        return None


def _device_kind(options: StudyOptions, protocol: TrialProtocol) -> str:
    """Name the device without its threads, which a survey chooses."""
    if options.device == "cpu" and options.devices == 1:
        return "cpu"
    return device_name(protocol.trainer, protocol.devices)


def cache_key(
    options: StudyOptions,
    space: Space,
    protocol: TrialProtocol,
    module: LightningModule,
    train_examples: int,
) -> str:
    """Give 16 hexadecimal digits that change with whatever the survey depends on."""
    # Not what the nodes of the user's arguments built: the nodes are among the options.
    given = {**options.trainer, **options.workload.trainer}
    given |= getattr(options.workload, "given_trainer", {})
    trainer = {name: value for name, value in protocol.trainer.items() if name not in given}
    trainer |= options.trainer
    # It shows edits of the model's code.
    module_text = [repr(module)]
    for name, parameter in module.named_parameters():
        module_text.append(f"{name} {tuple(parameter.shape)}")
    largest, _ = usable_sizes(space.high, protocol.budget)
    depends: dict[str, object] = {
        "workload": options.workload.model_dump(exclude=IRRELEVANT),
        "module": module_text,
        "examples": train_examples,
        "range": [space.low, largest, space.multiple],
        "device": [_device_kind(options, protocol), processor()],
        "trainer": {name: str(value) for name, value in trainer.items()},
        "micro_batch_size": protocol.micro_batch_size,
        "compile": protocol.compile,
        "fast": protocol.fast,
        "versions": dict(versions()),
        "survey": options.hardware.model_dump(exclude={"cache", "enabled", "refresh"}),
    }
    if options.search.workers > 1:
        # They share the memory.
        depends["workers"] = options.search.workers
    document = json.dumps(depends, sort_keys=True, default=str)
    return hashlib.sha256(document.encode()).hexdigest()[:16]
