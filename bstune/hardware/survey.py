"""A workload's survey: which batch sizes fit, what a step takes at each, and what bounds it.

It is measured in the worker, once for a machine, a workload's code and its versions, and kept under
``~/.cache/bstune/surveys``; what was measured while other programs kept the processors is not kept.
"""

import hashlib
import inspect
import json
import math
import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError

from bstune.core.errors import InputError, StudyError, UserCodeError
from bstune.core.records import Frozen
from bstune.hardware.memory import Probe, find_largest_fit, memory_line
from bstune.hardware.roofline import Line, Roofline
from bstune.recipe.recipe import Recipe
from bstune.system.failures import is_users
from bstune.system.files import read_text, write_text
from bstune.trial.worker import Failure, Returned, Worker, call

# Batch sizes that are timed at most; there is one more than octaves, if these are fewer.
LADDER = 6
# Batch sizes above it are timed at multiples of 8.
ROUND_ABOVE = 16
# The machine is busy where training waited for a processor for such a share of the time.
BUSY_SHARE = 0.05
# Relative standard deviation of its timings then, at least: beside other programs steps took 1.1 to
# 1.9 times as long, waits left out, and visits agreed.
BUSY_DEVIATION = 0.4
# Steps of a probe of memory.
PROBE_STEPS = 3
# Shares of the seconds after which no probe of memory begins, and that the visits end at.
MEMORY_SHARE = 0.5
VISITS_SHARE = 0.9
# A survey that had too little time is used again unless there is so many times as much.
MORE_TIME = 1.5
# Visits take no longer than the baseline's run, but at least so many seconds.
LEAST_VISITS_SECONDS = 10.0
# The least relative standard deviation of a timing.
LEAST_DEVIATION = 0.02


class Timing(Frozen):
    """What a step takes at a batch size."""

    batch_size: int
    seconds: float
    """Median over visits."""
    deviation: float
    """Relative standard deviation of the median, from the visits' range."""
    visits: int


class Survey(Frozen):
    """What a machine allows a workload; the part of hardware.json."""

    schema_number: Literal[1] = 1
    threads: int | None
    """Of torch: the number with which steps are fastest, or the given one; None: torch's own."""
    timings: tuple[Timing, ...]
    """Ascending in batch size."""
    largest_fit: int
    smallest_unfit: int | None
    """The smallest size that was seen not to fit; None: none was."""
    limit: float
    """Bytes that a process may take."""
    memory: Line
    """Bytes over batch size."""
    refused: tuple[tuple[int, str], ...]
    """Batch sizes that the user's code does not take, with its error."""
    roofline: Roofline | None
    waited: float
    """The share of the time that training waited for a processor."""
    whole: bool
    """Whether there was time for all of it."""
    failure: str = ""
    """Why no step was timed, in a line."""
    seconds: float
    """That it took."""
    allowed: float
    """Seconds that it might take."""

    @property
    def fits(self) -> tuple[int, int | None]:
        """The largest batch size that fits, and the smallest that does not."""
        return self.largest_fit, self.smallest_unfit

    @property
    def step_times(self) -> tuple[tuple[float, float, float], ...]:
        """Batch size, seconds of a step and their relative standard deviation, ascending."""
        rows = []
        for one in self.timings:
            deviation = one.deviation
            if self.busy:
                deviation = max(deviation, BUSY_DEVIATION)
            rows.append((one.batch_size, one.seconds, deviation))
        return tuple(rows)

    @property
    def busy(self) -> bool:
        """Whether other programs kept the processors: timings are uncertain, and are not kept."""
        return self.waited > BUSY_SHARE


@dataclass(frozen=True)
class Timed:
    """What the visits told; its module imports no torch, as the main process reads it."""

    threads: int | None
    visits: dict[int, list[float]] = field(default_factory=dict)
    """Seconds of a step in each visit, by batch size."""
    refused: dict[int, str] = field(default_factory=dict)
    """Batch sizes that the user's code refused, with its error."""
    waited: float = 0.0
    """The share of the time that the training waited for a processor; no timing has it."""
    whole: bool = False
    """Whether every size got all of its visits."""
    failure: str = ""
    """Why no step was timed, in a line."""


def survey(
    worker: Worker,
    recipe: Recipe,
    sizes: tuple[int, int],
    baseline: tuple[int, float],
    steps: int,
    seconds: float,
    patience: float,
    memory_limit: int | None = None,
    multiple: int = 1,
) -> Survey:
    """Measure a workload on this machine.

    Args:
        worker: whose processes measure; each probe of memory has one of its own.
        recipe: what is trained. Its threads are chosen where they are None.
        sizes: the smallest and the largest batch size.
        baseline: batch size and rate that train, where the survey begins.
        steps: of a trial, where a schedule ends.
        seconds: that it may take.
        patience: seconds that the worker may say nothing for.
        memory_limit: bytes that a process may take, at most.
        multiple: of which batch sizes are.

    Raises:
        UserCodeError: the user's code does not train at the baseline's batch size.
        InputError: no batch size fits.
    """
    measurement = _Measurement(worker, recipe, baseline, steps, seconds, patience, memory_limit)
    low, high = sizes
    baseline_size, _ = baseline
    memory = find_largest_fit(
        measurement.probe, low, high, baseline_size, multiple, measurement.has_time
    )
    line = memory_line(memory.probes)
    if memory.largest_fit is None or line is None:
        limit = min(one.limit for one in memory.probes.values())
        # A process that dies does not tell how much there is.
        room = f"{limit / 1e6:,.0f} MB" if math.isfinite(limit) else "memory"
        raise InputError(
            f"no batch size from {low} on fits into {room}: raise memory_limit, or lower "
            f"batch_size.low"
        )
    measurement.end_process()
    timed = measurement.time_steps(
        ladder_of(low, memory.largest_fit, baseline_size, multiple),
        memory.probes[baseline_size].step,
    )
    roofline = measurement.roofline(sorted(timed.visits))
    measurement.end_process()
    return Survey(
        threads=timed.threads,
        timings=tuple(_timing_of_visits(size, timed.visits[size]) for size in sorted(timed.visits)),
        largest_fit=memory.largest_fit,
        smallest_unfit=memory.smallest_unfit,
        limit=min(one.limit for one in memory.probes.values() if one.fits),
        memory=line,
        refused=tuple(sorted((measurement.refused | timed.refused).items())),
        roofline=roofline,
        waited=timed.waited,
        whole=memory.whole and timed.whole,
        failure=timed.failure,
        seconds=measurement.passed,
        allowed=seconds,
    )


@dataclass
class _Measurement:
    """The measurements of one survey, each by a function of :mod:`bstune.hardware.timing`.

    Args:
        worker, recipe, baseline, steps, seconds, patience, memory_limit: as of :func:`survey`.
    """

    worker: Worker
    recipe: Recipe
    baseline: tuple[int, float]
    steps: int
    seconds: float
    patience: float
    memory_limit: int | None

    def __post_init__(self) -> None:
        self.refused: dict[int, str] = {}
        self._began = time.monotonic()
        # Of the probe before: its size, its seconds, and those of a step.
        self._last_probe = self.baseline[0], 0.0, 0.0

    @property
    def passed(self) -> float:
        """Seconds since the survey began."""
        return time.monotonic() - self._began

    def _call_in_worker(
        self, timing: Callable[..., Any], sizes: object, *more: object
    ) -> Returned | Failure:
        """Call a function of the timing module; it dies or is silent: a Failure."""
        args = self.recipe, sizes, self.baseline, self.steps, *more
        return call(self.worker, timing, *args, limit=self.patience)

    def end_process(self) -> None:
        """Let the worker's next function run in a fresh process."""
        call(self.worker, os._exit, 0, limit=self.patience)

    def probe(self, size: int) -> Probe:
        """Probe memory at a batch size, in a fresh process; one that dies shows it too large.

        UserCodeError where the user's code refuses the baseline's size.
        """
        self.end_process()
        start = self.passed
        outcome = self._call_in_worker(_probe_memory_in_worker, size, self.memory_limit)
        if isinstance(outcome, Failure):
            if outcome.refusal is not None:
                raise outcome.refusal
            # Its process died: of too much memory, as far as anyone can see.
            return Probe(fits=False, peak=math.inf, limit=self.memory_limit or math.inf)
        found: Probe = outcome.value
        self._last_probe = size, self.passed - start, found.step
        if found.refused:
            self.refused[size] = found.refused
            if size == self.baseline[0]:
                raise UserCodeError(found.refused)
        return found

    def has_time(self, size: int) -> bool:
        """Whether a probe at a batch size is predicted to end in its share of the seconds."""
        before, last_seconds, step = self._last_probe
        predicted = last_seconds + PROBE_STEPS * step * size / before
        return self.passed + predicted < MEMORY_SHARE * self.seconds

    def time_steps(self, sizes: Sequence[int], step: float) -> Timed:
        """Time steps at some batch sizes; where that fails, the trials' own step times have to do.

        Args:
            sizes: ascending.
            step: seconds of one at the baseline's size.
        """
        of_baseline = max(LEAST_VISITS_SECONDS, self.steps * step)
        left = min(VISITS_SHARE * self.seconds - self.passed, of_baseline)
        outcome = self._call_in_worker(_time_sizes_in_worker, sizes, left)
        if isinstance(outcome, Failure):
            if outcome.refusal is not None:
                raise outcome.refusal
            return Timed(threads=self.recipe.threads, failure=outcome.reason)
        timed: Timed = outcome.value
        return timed

    def roofline(self, sizes: Sequence[int]) -> Roofline | None:
        """The roofline, by steps at the smallest and the largest of the sizes that were timed.

        None without a time, and where steps cannot be counted: these train.
        """
        if not sizes or self.passed >= VISITS_SHARE * self.seconds:
            return None
        outcome = self._call_in_worker(_measure_roofline_in_worker, (sizes[0], sizes[-1]))
        if isinstance(outcome, Failure):
            return None
        roofline: Roofline | None = outcome.value
        return roofline


# The worker calls these: what they import imports torch.
def _probe_memory_in_worker(*arguments: Any) -> Probe:
    from bstune.hardware.timing import probe_memory

    return probe_memory(*arguments)


def _time_sizes_in_worker(*arguments: Any) -> Timed:
    from bstune.hardware.timing import time_sizes

    return time_sizes(*arguments)


def _measure_roofline_in_worker(*arguments: Any) -> Roofline | None:
    from bstune.hardware.timing import measure_roofline

    return measure_roofline(*arguments)


def _timing_of_visits(batch_size: int, visits: list[float]) -> Timing:
    """Summarize visits; the median of two or three deviates by about half of their range."""
    middle = statistics.median(visits)
    deviation = 0.5 * (max(visits) - min(visits)) / middle
    return Timing(
        batch_size=batch_size,
        seconds=middle,
        deviation=max(deviation, LEAST_DEVIATION),
        visits=len(visits),
    )


def ladder_of(low: int, high: int, baseline: int, multiple: int = 1) -> list[int]:
    """Batch sizes to time, evenly spread over log B; both ends are among them, and the baseline's.

    Between the ends they are of ``multiple``, and larger ones of 8, which more code takes.
    """
    gaps = min(LADDER - 1, max(math.ceil(math.log2(high / low)), 1))
    sizes = {low, high}
    for number in range(1, gaps):
        size = low * (high / low) ** (number / gaps)
        step = multiple
        if size > ROUND_ABOVE:
            step = math.lcm(multiple, 8)
        sizes.add(round(size / step) * step)
    # The baseline's stands for the size next to it.
    between = [size for size in sizes if low < size < high]
    if low < baseline < high and between:
        sizes.remove(min(between, key=lambda size: abs(math.log(size / baseline))))
    if low <= baseline <= high:
        sizes.add(baseline)
    return sorted(size for size in sizes if low <= size <= high)


def cached_survey(
    key: str, refresh: bool, seconds: float, measure: Callable[[], Survey]
) -> tuple[Survey, bool]:
    """The survey that is kept under a key, or a new one; and whether it was kept.

    Args:
        key: of :func:`survey_key`.
        refresh: measure in any case.
        seconds: that a new one may take.
        measure: measures it.
    """
    path = cache_folder() / f"{key}.json"
    if not refresh and path.is_file():
        try:
            kept = Survey.model_validate_json(read_text(path))
        # Another version wrote it.
        except (InputError, ValidationError):
            kept = None
        if kept is not None and (kept.whole or seconds < MORE_TIME * kept.allowed):
            return kept, True
    found = measure()
    if not found.busy and not found.failure:
        # Without it the next study measures again.
        with suppress(StudyError):
            write_text(path, found.model_dump_json(indent=1) + "\n")
    return found, False


def cache_folder() -> Path:
    """The folder of surveys, in the user's cache (XDG)."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "bstune" / "surveys"


def survey_key(
    code: str,
    recipe: Recipe,
    settings: Mapping[str, object],
    machine: Mapping[str, object],
    measured: object,
) -> str:
    """A name that changes with all that a survey depends on.

    Args:
        code: of :func:`code_and_layers`.
        recipe: whose plain settings count.
        settings: of the workload, as JSON.
        machine: device and versions.
        measured: range, baseline and limits.
    """
    kept = {}
    for setting in fields(recipe):
        value = getattr(recipe, setting.name)
        if not callable(value):
            kept[setting.name] = value
    place = (platform.node(), os.cpu_count(), sorted(os.sched_getaffinity(0)))
    threads = os.environ.get("OMP_NUM_THREADS")
    text = json.dumps(
        [code, kept, settings, machine, place, threads, measured], sort_keys=True, default=str
    )
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def code_and_layers(recipe: Recipe, batch_size: int, lr: float, steps: int) -> str:
    """The user's source files that a module's and its data's classes are in, and its layers.

    It is called in the worker, which builds both at the baseline's batch size and rate.
    """
    from bstune.hardware.timing import settings_at

    trial = settings_at(batch_size, (batch_size, lr), steps)
    module: Any = recipe.module(trial)
    parts = [repr(module)]
    parts += [f"{name} {tuple(value.shape)}" for name, value in module.named_parameters()]
    data = recipe.data(trial)
    loaders = data if isinstance(data, tuple) else ()
    datasets = [getattr(loader, "dataset", None) for loader in loaders]
    objects = (*module.modules(), data, *datasets)
    files = set()
    for kind in {base for one in objects for base in type(one).__mro__}:
        # A class of the script itself knows no file here, but its methods do.
        methods = filter(inspect.isfunction, vars(kind).values())
        files |= {method.__code__.co_filename for method in methods}
    for file in sorted(files):
        # Cells of a notebook are no files.
        if is_users(file) and Path(file).is_file():
            parts.append(Path(file).read_text())
    return "\n".join(parts)
