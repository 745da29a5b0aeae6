"""How points, intervals and devices are written: in the answer, in charts and in comparisons.

winner_text(result.winner)  # batch size 204, learning rate 1.13
"""

import re
from collections.abc import Mapping

from bstune.core.records import Merit
from bstune.result import (
    INTERVAL_LEVEL,
    BaselineResult,
    Confirmed,
    CriticalAtTarget,
    CriticalBatchSize,
    StudyResult,
    WinnerResult,
)
from bstune.system.console import format_count, format_number, format_seconds, plural, time_unit

PREDICTED = "predicted, not run again on fresh seeds"
# From this share of the steps on, an evaluation that missed the target is near the one that met it.
NEAR_EVALUATIONS = 0.9


def device_text(device: str) -> str:
    """Write ``cpu, 1 thread`` for ``cpu (1 thread)``, and ``replayed`` for a replayed study."""
    if device == "replay":
        return "replayed"
    return device.replace(" (", ", ").removesuffix(")")


def name_and_threads(device: str) -> tuple[str, int | None]:
    """Split ``cpu (2 threads)`` into the device's name and its threads; None: they are not known.

    The threads of a loop of the user's are not known, and a GPU has none.
    """
    stated = re.fullmatch(r"(.*) \((\d+) threads?\)", device)
    if stated is None:
        return device, None
    return stated[1], int(stated[2])


def winner_text(winner: WinnerResult, tokens: int | None = None) -> str:
    """Write ``batch size 204, learning rate 1.13``, and further hyper-parameters and the horizon.

    ``tokens``: tokens of an example, if it has some: then ``batch size 204 (13,056 tokens)``.
    """
    return point_text(winner.batch_size, winner.lr, winner.hyperparameters, winner.horizon, tokens)


def met_between(steps_low: int, steps: int) -> str | None:
    """Write after which steps a target was met that is evaluated rarely: ``300 to 400 steps``.

    None where the evaluations tell the steps well enough, and where the first one met it.

    Args:
        steps_low: of the last evaluation that missed the target.
        steps: of the first one that met it.
    """
    if steps_low == 0 or steps_low > NEAR_EVALUATIONS * steps:
        return None
    return f"{steps_low} to {steps} steps"


def baseline_text(baseline: BaselineResult) -> str:
    """Write ``batch size 32, learning rate 0.1``: the user's own configuration.

    Its horizon, the length of a schedule that ends with the trial, follows where there is one: the
    gain depends on it.
    """
    return point_text(
        baseline.batch_size, baseline.lr, baseline.hyperparameters, horizon=baseline.horizon
    )


def point_text(
    batch_size: int,
    lr: float,
    hyperparameters: Mapping[str, float | None],
    horizon: int | None = None,
    tokens: int | None = None,
) -> str:
    """Write ``batch size 204, learning rate 1.13``, and further hyper-parameters and the horizon.

    ``horizon``: steps after which the schedule ends, or None. ``tokens``: tokens of an example, or
    None.
    """
    size = f"batch size {format_count(batch_size)}"
    if tokens is not None:
        size += f" ({format_count(batch_size * tokens)} tokens)"
    parts = [size, f"learning rate {format_number(lr)}"]
    for name, value in hyperparameters.items():
        parts.append(f"{name} {format_number(value)}")
    if horizon is not None:
        parts.append(f"a schedule of {plural(horizon, 'step')}")
    return ", ".join(parts)


def trials_text(result: StudyResult) -> str:
    """Write ``64 configurations, 6 fresh seeds``: the number of trials of each kind.

    Failed ones come last. An older file does not tell kinds apart: then ``70 trials``.
    """
    if result.configurations is None:
        return plural(result.trials, "trial")
    parts = [plural(result.configurations, "configuration")]
    failed = result.statuses.get("failed", 0)
    fresh = result.trials - result.configurations - failed
    if fresh > 0:
        parts.append(plural(fresh, "fresh seed"))
    if failed:
        parts.append(f"{format_count(failed)} failed")
    return ", ".join(parts)


def expected_text(winner: WinnerResult) -> str:
    """Write the time and steps that a winner takes: medians over fresh seeds, with intervals.

    ``613 ms, 53 steps (3 of 3 fresh seeds reached it; 90%: 480 to 737 ms, 48 to 88 steps)``
    """
    medians = list[str]()
    if winner.time_to_target is not None:
        medians.append(format_seconds(winner.time_to_target))
    if winner.steps is not None:
        medians.append(plural(round(winner.steps), "step"))
    expected = ", ".join(medians)
    fresh = winner.confirmed
    if fresh is None:
        return f"{expected} ({PREDICTED})"
    reached = fresh_text(fresh)
    ranges = [range_text("time", fresh), range_text("steps", fresh)]
    interval = ", ".join(text for text in ranges if text)
    # Where no fresh seed reached the target there is no time to tell.
    if not interval:
        return f"not known: {reached} reached the target"
    # Where half of the seeds missed the target the median is one that missed it.
    if not expected:
        return f"not known: only {reached} reached the target ({interval})"
    seeds = f"{reached} reached it"
    if winner.reaching is not None:
        seeds += f", predicted for {winner.reaching.chance:.0%} of further ones"
    return f"{expected} ({seeds}; {INTERVAL_LEVEL:.0%}: {interval})"


def fresh_text(fresh: Confirmed) -> str:
    """Write ``3 of 3 fresh seeds``."""
    return f"{fresh.reached} of {plural(fresh.runs, 'fresh seed')}"


def range_text(merit: Merit, fresh: Confirmed) -> str | None:
    """Write the interval over fresh seeds, ``480 to 737 ms`` or ``48 to 88 steps``.

    None where its lower end is not known, as where no seed reached the target.
    """
    low, high = fresh.interval_by(merit)
    if low is None:
        return None
    first = format_count(low)
    last = format_count(high)
    unit = "steps"
    if merit == "time":
        # Both ends have the median's unit, so that they are compared at a glance.
        scale, unit = time_unit(fresh.time_median or low)
        first = format_number(low / scale, 3)
        if high is not None:
            last = format_number(high / scale, 3)
    if high is None:
        return f"{first} {unit} and more"
    # Ends that are the same in the digits that are shown become one number.
    if first == last:
        return f"{first} {unit}"
    return f"{first} to {last} {unit}"


def critical_text(critical: CriticalBatchSize | CriticalAtTarget) -> str:
    """Write ``67 (90%: 41 to 110)``: B_crit in examples and its interval."""
    value = "undetermined"
    if critical.value is not None:
        value = format_number(critical.value, 2)
    return f"{value} ({interval_text(critical)})"


def interval_text(critical: CriticalBatchSize | CriticalAtTarget) -> str:
    """Write ``90%: 41 to 110``, ``90%: above 41``, ...: the interval of B_crit."""
    return span_text(critical.low, critical.high, critical.level)


def b_opt_text(critical: CriticalBatchSize) -> str:
    """Write the interval of the batch size with the fewest examples."""
    return span_text(critical.b_opt_low, critical.b_opt_high, critical.level)


def span_text(low: float | None, high: float | None, level: float, digits: int = 2) -> str:
    """Write an interval: ``90%: 41 to 110``, or ``90%: above 41`` where an end is open.

    ``digits``: significant digits of its ends.
    """
    if low is None and high is None:
        return f"{level:.0%} interval open at both ends"
    if low is None:
        return f"{level:.0%}: below {format_number(high, digits)}"
    if high is None:
        return f"{level:.0%}: above {format_number(low, digits)}"
    return f"{level:.0%}: {format_number(low, digits)} to {format_number(high, digits)}"


def sizes_that_reached(result: StudyResult) -> set[int]:
    """Collect the batch sizes that reached the target, one for each half octave, and both ends."""
    sizes = {point.batch_size for point in result.points if not point.stopped}
    critical = result.critical_batch_size
    # The frontier has one point for each half octave: the smallest and the largest batch size that
    # reached the target need not be among them.
    if critical is not None:
        sizes |= {critical.smallest, critical.largest}
    return sizes


def memory_text(result: StudyResult) -> str:
    """Write, as the end of a line on batch sizes, which one ran out of memory; else empty.

    A survey has looked for such a batch size before the trials. Without one, they find it.
    """
    size = result.smallest_out_of_memory
    if size is None:
        return ""
    return f"; batch size {format_count(size)} ran out of memory"


def beyond_text(is_low_open: bool, is_high_open: bool, what: str) -> str:
    """Write, for a range's open ends, ``; smaller and larger ones are not known``.

    ``what`` is the verb that is said of the batch sizes beyond. Empty where no end is open.
    """
    beyond = list[str]()
    if is_low_open:
        beyond.append("smaller")
    if is_high_open:
        beyond.append("larger")
    if not beyond:
        return ""
    return f"; {' and '.join(beyond)} ones {what}"
