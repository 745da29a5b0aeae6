"""A workload's survey: which batch sizes fit, what a step takes at each, and what bounds it.

It is measured in the worker, once for a machine, a workload's code and its versions, and kept under
``~/.cache/bstune/surveys``; what was measured while other programs kept the processors is not kept.
"""

import hashlib
import importlib
import inspect
import json
import math
import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, fields
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
from bstune.trial.worker import Answer, Failure, Worker, call

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
        least = BUSY_DEVIATION if self.busy else 0.0
        return tuple(
            (one.batch_size, one.seconds, max(one.deviation, least)) for one in self.timings
        )

    @property
    def busy(self) -> bool:
        """Whether other programs kept the processors: timings are uncertain, and are not kept."""
        return self.waited > BUSY_SHARE


@dataclass(frozen=True)
class Timed:
    """What the visits told; its module imports no torch, as the main process reads it."""

    threads: int
    visits: dict[int, list[float]]
    """Seconds of a step in each visit, by batch size."""
    refused: dict[int, str]
    """Batch sizes that the user's code refused, with its error."""
    waited: float
    """The share of the time that the training waited for a processor; no timing has it."""
    whole: bool
    """Whether every size got all of its visits."""


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
    began = time.monotonic()
    low, high = sizes
    refused: dict[int, str] = {}
    # Of the probe before: its size, its seconds, and those of a step.
    last = (baseline[0], 0.0, 0.0)

    def passed() -> float:
        return time.monotonic() - began

    def ask(name: str, *args: object) -> Answer | Failure:
        return call(worker, _in_worker, name, *args, limit=patience)

    def probe(size: int) -> Probe:
        nonlocal last
        _end_process(worker, patience)
        start = passed()
        outcome = ask("probe_memory", recipe, size, baseline, steps, memory_limit)
        if isinstance(outcome, Failure):
            if outcome.refusal is not None:
                raise outcome.refusal
            # Its process died: of too much memory, as far as anyone can see.
            return Probe(fits=False, peak=math.inf, limit=math.inf)
        found: Probe = outcome.value
        last = size, passed() - start, found.step
        if found.refused:
            refused[size] = found.refused
            if size == baseline[0]:
                raise UserCodeError(found.refused)
        return found

    def has_time(size: int) -> bool:
        before, took, step = last
        predicted = took + PROBE_STEPS * step * size / before
        return passed() + predicted < MEMORY_SHARE * seconds

    memory = find_largest_fit(probe, low, high, baseline[0], multiple, has_time)
    line = memory_line(memory.probes)
    if memory.largest_fit is None or line is None:
        limit = min(one.limit for one in memory.probes.values())
        raise InputError(
            f"no batch size from {low} on fits into {limit / 1e6:,.0f} MB: raise memory_limit, or "
            f"lower batch_size.low"
        )
    _end_process(worker, patience)
    ladder = ladder_of(low, memory.largest_fit, baseline[0], multiple)
    of_baseline = steps * memory.probes[baseline[0]].step
    left = min(VISITS_SHARE * seconds - passed(), max(LEAST_VISITS_SECONDS, of_baseline))
    of_visits = ask("time_sizes", recipe, ladder, baseline, steps, left)
    if isinstance(of_visits, Failure) and of_visits.refusal is not None:
        raise of_visits.refusal
    # Without timings the trials' own step times have to do.
    timed: Timed | None = of_visits.value if isinstance(of_visits, Answer) else None
    visits = {} if timed is None else timed.visits
    timings = tuple(_timing(size, visits[size]) for size in sorted(visits))
    roofline = None
    if timings and passed() < VISITS_SHARE * seconds:
        ends = timings[0].batch_size, timings[-1].batch_size
        outcome = ask("measure_roofline", recipe, ends, baseline, steps)
        # A step that cannot be counted has no roofline, and trains.
        roofline = outcome.value if isinstance(outcome, Answer) else None
    _end_process(worker, patience)
    return Survey(
        threads=recipe.threads if timed is None else timed.threads,
        timings=timings,
        largest_fit=memory.largest_fit,
        smallest_unfit=memory.smallest_unfit,
        limit=min(one.limit for one in memory.probes.values() if one.fits),
        memory=line,
        refused=tuple(sorted((refused | (timed.refused if timed else {})).items())),
        roofline=roofline,
        waited=timed.waited if timed else 0.0,
        whole=memory.whole and timed is not None and timed.whole,
        failure=of_visits.reason if isinstance(of_visits, Failure) else "",
        seconds=passed(),
        allowed=seconds,
    )


def _in_worker(name: str, *args: Any) -> Any:
    """Call a function of the module that imports torch, which this process does not."""
    return getattr(importlib.import_module("bstune.hardware.timing"), name)(*args)


def _end_process(worker: Worker, patience: float) -> None:
    """Let the worker's next function run in a fresh process."""
    call(worker, os._exit, 0, limit=patience)


def _timing(batch_size: int, visits: list[float]) -> Timing:
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
        step = math.lcm(multiple, 8 if size > ROUND_ABOVE else 1)
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
        code: of :func:`code_of`.
        recipe: whose plain settings count.
        settings: of the workload, as JSON.
        machine: device and versions.
        measured: range, baseline and limits.
    """
    plain = {field.name: getattr(recipe, field.name) for field in fields(recipe)}
    kept = {name: value for name, value in plain.items() if not callable(value)}
    place = (platform.node(), os.cpu_count(), sorted(os.sched_getaffinity(0)))
    threads = os.environ.get("OMP_NUM_THREADS")
    text = json.dumps(
        [code, kept, settings, machine, place, threads, measured], sort_keys=True, default=str
    )
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def code_of(recipe: Recipe, batch_size: int, lr: float, steps: int) -> str:
    """The source of a module's and its data's own classes, and the module's layers.

    It is called in the worker, as it builds them.
    """
    from bstune.hardware.timing import settings

    trial = settings(batch_size, (batch_size, lr), steps)
    module: Any = recipe.module(trial)
    parts = [repr(module)]
    parts += [f"{name} {tuple(value.shape)}" for name, value in module.named_parameters()]
    objects = [*module.modules(), recipe.data(trial)]
    files = set()
    for kind in {base for part in objects for base in type(part).__mro__}:
        try:
            files.add(inspect.getsourcefile(kind) or "")
        # Classes of Python itself, and those of an interactive session.
        except (TypeError, OSError):
            continue
    for file in sorted(files):
        if file and is_users(file):
            parts.append(Path(file).read_text())
    return "\n".join(parts)
