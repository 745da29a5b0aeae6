"""What the hardware allows for one workload: memory ceiling, step times, limits and a step's cost.

The ceiling ends the range of the search, and tau(B), the seconds of a step, is half of its model of
time.
"""

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from bstune.core.errors import ConfigError
from bstune.core.records import Budget, StepsOf, TrialProtocol
from bstune.core.search_space import Space
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
from bstune.hardware.probe import measure_ceiling
from bstune.hardware.threads import ThreadChoice
from bstune.hardware.workload_steps import HowTimed, TimedSteps, how_timed, time_workload
from bstune.options import StudyOptions
from bstune.recipe import Recipe
from bstune.system.console import format_seconds
from bstune.trial.checks.preflight import PreflightFindings, preflight
from bstune.trial.devices.device import device_name, versions
from bstune.trial.fast.take_steps import eager_steps
from bstune.trial.loop import Workload
from bstune.trial.workload import build_module

if TYPE_CHECKING:
    from bstune.report.picture import Picture

# Where the roofline allows a step in less than this share of its measured seconds, the step waits
# for something that is neither computing nor memory.
NEITHER_SHARE = 0.1
# From this share of the best throughput on, a larger batch gives hardly more examples a second.
PLATEAU_SHARE = 0.95
# The share of ``hardware.seconds`` that the probes of memory may take.
PROBES_SHARE = 0.5


@dataclass(frozen=True, repr=False)
class Survey:
    """What a machine allows for a workload: what was measured, and what follows from it."""

    workload: str
    device: str
    """The name of the device, as in the trials' records."""
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
    """The device's own ceilings. None where they could not be measured; a note says why."""
    cost: roofline.StepCost | None
    """FLOPs and bytes of a step. None where they are not known; a note says why."""
    seconds: float
    """The seconds that the survey took."""
    allowed: float
    """The seconds that it was to take at most."""
    notes: tuple[str, ...] = ()
    misaligned: tuple[roofline.TensorCoreMisalignment, ...] = ()
    """Dimensions that miss the tensor cores' multiple at the ceiling."""
    threads: ThreadChoice | None = None
    """The number of torch's threads with which the steps were timed; None on CUDA."""
    seconds_of: StepsOf = "lean"
    """The loop whose steps were timed."""

    def __repr__(self) -> str:
        timed = ", ".join(f"{size}: {format_seconds(seconds)}" for size, seconds in self.pairs)
        largest = self.ceiling.batch_size
        return f"Survey({self.workload} on {self.device}: B up to {largest}; steps {timed})"

    def plot(self) -> "Picture":
        """Draw ``roofline.png`` as a figure that a notebook shows as a cell's value.

        HardwareError where the roofline is not known; the notes say why.
        """
        # Imported here: that module imports this one, and draws, which a study has no use for.
        from bstune.hardware.report import survey_figure

        return survey_figure(self)

    def _repr_html_(self) -> str:
        """Show in a notebook what ``bstune survey`` prints, and the roofline where it is known."""
        # Imported here, as that module imports this one.
        from bstune.hardware.report import survey_html

        return survey_html(self)

    @property
    def pairs(self) -> list[tuple[int, float]]:
        """The measured batch sizes, each with the seconds of a step."""
        return [(row.batch_size, row.seconds) for row in self.measured.timings]

    @cached_property
    def step_time(self) -> StepTimeLaw | None:
        """The seconds of a step over batch size, with their error.

        None where only one batch size was measured.
        """
        if len(self.pairs) < 2:
            return None
        of_trainer = self.seconds_of == "trainer"
        return fit_step_time_law(self.measured.timings, self.measured.waited, of_trainer)

    @property
    def left_out_error(self) -> float | None:
        """The median relative error of a measured step time that the others predict.

        None for fewer than three batch sizes.
        """
        if len(self.pairs) < 3:
            return None
        return statistics.median(leave_one_out(self.measured.timings))

    @property
    def turning_batch_size(self) -> float | None:
        """The batch size from which on the step is compute-bound by its shapes.

        None if it never is, or if the roofline is not known.
        """
        if self.cost is None or self.limits is None:
            return None
        return roofline.turning_batch_size(self.cost, self.limits.ridge)

    @property
    def achieved(self) -> list[roofline.Achieved]:
        """How near each timed step came to the roofline; empty where that is not known."""
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
        """The number that dimensions should be multiples of for tensor cores.

        None where no tensor cores are used.
        """
        if self.limits is None:
            return None
        return roofline.tensor_core_multiple(self.limits.dtype, self.device_type)

    @property
    def elsewhere(self) -> list[known_devices.Prediction]:
        """What bounds a step on other devices, by their makers' figures.

        The seconds are those of the largest batch size that was timed here.
        """
        if self.cost is None or self.limits is None or not self.pairs:
            return []
        largest, _ = self.pairs[-1]
        return known_devices.predictions(self.cost, self.limits.dtype, largest)

    @property
    def bound_by_neither(self) -> list[roofline.Achieved]:
        """The timed steps that neither computing nor memory bounds, the smallest batch size first.

        The roofline accounts for less than a tenth of their measured seconds. The list ends before
        the first batch size of which it accounts for more.
        """
        return list(takewhile(lambda row: row.share_of_roofline < NEITHER_SHARE, self.achieved))

    @property
    def plateau(self) -> timing.StepTiming:
        """The smallest measured batch size with 95% of the best measured throughput."""
        timings = self.measured.timings
        enough = PLATEAU_SHARE * max(row.throughput for row in timings)
        return next(row for row in timings if row.throughput >= enough)


TimeSteps = Callable[[Ceiling, float], TimedSteps]
"""Times steps at batch sizes up to a memory ceiling, within a number of seconds."""


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
    """Measure what the hardware allows for a workload.

    Probes of memory run in processes of their own, all else in this one.

    Args:
        options: resolved.
        recipe: what builds the workload's parts.
        space: the batch sizes that are asked for.
        protocol: of the study's trials.
        train_examples: how many there are.
        build: builds the workload.
        log: takes lines of progress.
        tried: what a few steps have shown before; None: they are taken first.
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
    """Measure what the hardware allows for a workload, by a function that times its steps.

    The survey has ``hardware.seconds`` in all. Probes of memory begin only within their share of
    it, ``PROBES_SHARE``. The steps are timed in the seconds that are left after them.

    ``time_steps`` times the steps, in this process or in another one, and ``how`` says how. For the
    other arguments see :func:`measure`.
    """
    start = time.perf_counter()
    hardware = options.hardware

    def seconds_left() -> float:
        return hardware.seconds - (time.perf_counter() - start)

    def is_late_for_probes() -> bool:
        return seconds_left() < (1.0 - PROBES_SHARE) * hardware.seconds

    device = torch.device(options.device)
    log(
        "surveying the hardware: probes of memory in processes of their own, then steps, "
        f"at most {format_seconds(hardware.seconds)}"
    )
    largest, notes_on_range = usable_sizes(space.high, protocol.budget)
    # A captured graph holds memory of its own: a probe goes past the steps before its capture.
    steps = max(hardware.memory.steps, eager_steps(protocol.fast, device) + 1)
    ceiling = measure_ceiling(
        options,
        recipe,
        space.low,
        # A budget of fewer examples than the smallest batch leaves that one size.
        max(space.low, largest),
        train_examples,
        tried=tried,
        limit=_trial_limit(options, device),
        multiple=space.multiple,
        # A CPU and CUDA have a precision each, as the memory of like trials differs on a CPU.
        relative=getattr(hardware.memory.relative, device.type),
        steps=steps,
        # A probe is ended after these seconds.
        seconds=hardware.memory.probe_seconds,
        # This ends nothing: sizes whose probe is predicted to take longer are not probed.
        wanted_seconds=PROBES_SHARE * hardware.seconds,
        is_late=is_late_for_probes,
        # If the largest size fits, only the smallest one is probed besides.
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
        allowed=options.hardware.seconds,
        notes=(*notes_on_range, *ceiling.notes, *timed.notes),
        misaligned=timed.misaligned,
        threads=timed.threads,
        seconds_of=how.seconds_of,
    )


def _few_steps(
    workload: Workload, protocol: TrialProtocol, space: Space
) -> PreflightFindings | None:
    """Take a few steps on one device, and give what they show.

    None where they show that the workload cannot be tuned. It may be surveyed all the same.
    """
    alone = replace(protocol, devices=1)
    # The preflight raises ConfigError for what cannot be tuned: that ends a study, but no survey.
    # Nothing is continued here, and the survey itself finds the smallest batch size that trains.
    try:
        return preflight(workload, alone, space, trial=None, continues=False, survey=True)
    except ConfigError:
        return None


def usable_sizes(high: int, budget: Budget) -> tuple[int, tuple[str, ...]]:
    """Give the largest batch size up to ``high`` that a trial's budget can use.

    A batch larger than all examples of the budget would be the trial's only one. Such sizes are
    left out.

    Returns:
        The batch size, and a note that sizes are left out; no note where none are.
    """
    # With more than one step in the budget, a trial takes that many at any batch size.
    has_several_steps = budget.steps > 1
    # A single step at any batch size, the smallest included: no size is better than another.
    is_single_step = budget.examples <= 1
    if has_several_steps or is_single_step or high <= budget.examples:
        return high, ()
    beyond = f"batch sizes past budget.examples={budget.examples}"
    return budget.examples, (f"{beyond} are left out: a trial would be one step",)


def _trial_limit(options: StudyOptions, device: torch.device) -> int | None:
    """Give the bytes that one of the ``search.workers`` trials at once may take.

    None where it may take all that the CUDA device has.
    """
    memory = options.hardware.memory
    workers = options.search.workers
    limit = memory.limit
    if limit is None and device.type == "cpu":
        # The system ends a process that takes all that is free.
        limit = int(memory.free_share * memory_limit(Path("/"), resident_bytes()))
    if device.type == "cpu" and limit is not None:
        # The processes of one trial share the memory; CUDA devices have their own each.
        limit //= options.devices
    if workers == 1:
        return limit
    if limit is None:
        limit = int(torch.cuda.get_device_properties(device).total_memory)
    # This process is one more: it has the data, and trained at the largest batch size.
    return limit // (workers + 1)


def probe_text(result: ProbeResult) -> str:
    """Give the line of progress that says how a probe ended."""
    memory = ""
    if result.peak_bytes is not None:
        peak = result.peak_bytes / BYTES_PER_MIB
        limit = result.limit / BYTES_PER_MIB
        memory = f" ({peak:,.0f} of {limit:,.0f} MiB)"
    outcomes: dict[ProbeOutcome, str] = {
        "fits": "fits",
        "startup": "does not fit: data and model alone",
        "training": "does not fit",
        "evaluation": "trains, but its evaluation does not fit",
        "error": f"fails: {result.message}",
        "device": "lost the device",
    }
    return f"batch size {result.batch_size:,} {outcomes[result.outcome]}{memory}"
