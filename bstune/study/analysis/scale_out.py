"""Time and cost to target for 1 to N data-parallel devices, from S*(B) and seconds per step tau(B).

With n devices of b examples each the batch is B = n b, and T(n, b) = S*(n b) tau(b). For each n the
plan takes the b that makes T least. Assumptions: every device is as fast as the one measured, tau
does not change with n, so that communication is not counted, and S* depends on B alone (the
learning rate is at its best for B, and normalisation sees its usual batch on each device).
"""

import math
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
from numpy.typing import NDArray

from bstune.core.curve import CurveBand
from bstune.core.step_time import fit_step_times
from bstune.result import DevicePlan
from bstune.search.frontier_findings import best_learning_rate, steps_band
from bstune.search.posterior import Posterior
from bstune.study.analysis.critical import INTERVAL
from bstune.study.prepared import PreparedStudy

# Gives the seconds of a step at batch sizes, in their shape.
StepTimesOfSizes = Callable[[NDArray[np.float64]], NDArray[np.float64]]


def scale_out(
    prepared: PreparedStudy, posterior: Posterior, tau: StepTimesOfSizes | None, largest: int
) -> tuple[DevicePlan, ...]:
    """Plan for several devices; the plan is empty where nothing was timed.

    Args:
        prepared: the study.
        posterior: of its frontier.
        tau: gives the seconds of a step on one device; None: nothing was timed.
        largest: batch size up to which the curve is claimed; no plan has a larger one.
    """
    # Without seconds there is no time to compare.
    if tau is None:
        return ()
    settings = prepared.options.hardware.scale_out
    space = prepared.space
    all_sizes = size_ladder(space.high, space.multiple, settings.candidate_ratio)
    sizes = [size for size in all_sizes if size >= space.low]
    rows = plan(
        predict=lambda batches: steps_band(posterior, batches, INTERVAL),
        step_seconds=lambda size: float(tau(np.array(float(size)))),
        best_lr=partial(best_learning_rate, posterior),
        devices=list(settings.devices),
        device_batch_sizes=sizes,
        max_examples=min(largest, prepared.backend.train_examples or largest),
    )
    return tuple(rows)


def step_times(
    posterior: Posterior, high: int, surveyed: Callable[[float], float] | None
) -> StepTimesOfSizes | None:
    """Fit tau(B) in seconds: the survey's, corrected by the trials' own seconds.

    It is None where nothing was timed.

    Args:
        posterior: has the trials.
        high: largest batch size.
        surveyed: gives the seconds of a step by the survey; None without one.
    """
    timed = list[tuple[float, float]]()
    for observation in posterior.observations:
        if observation.seconds_per_step is not None:
            timed.append((2.0**observation.x, observation.seconds_per_step))
    if not timed and surveyed is None:
        return None
    return fit_step_times(timed, float(high), surveyed)


def plan(
    predict: Callable[[Sequence[int]], CurveBand],
    step_seconds: Callable[[int], float],
    best_lr: Callable[[float], float],
    devices: Sequence[int],
    device_batch_sizes: Sequence[int],
    max_examples: int | None = None,
) -> list[DevicePlan]:
    """Choose the batch size with which each number of devices is fastest, in rising order.

    A number of devices that is no faster than a smaller one is left out, as is one too large for
    the data.

    Args:
        predict: gives S*(B), the steps to the target, with its interval at batch sizes.
        step_seconds: gives tau(b), the seconds of a step of one device.
        best_lr: gives the best learning rate at a batch size.
        devices: the numbers of devices to plan for.
        device_batch_sizes: candidates for b, the batch size of each device.
        max_examples: of a batch, n b; None: any.
    """
    sizes = sorted(set(device_batch_sizes))
    # One device is the yardstick of the others.
    counts = sorted({1, *devices})
    # Rows are numbers of devices, columns batch sizes of each.
    batches = np.outer(counts, sizes)
    bands = predict(batches.ravel().tolist())
    steps = np.reshape(bands.steps, batches.shape)
    low = np.reshape(bands.low, batches.shape)
    high = np.reshape(bands.high, batches.shape)
    seconds_per_step = np.array([step_seconds(size) for size in sizes])
    most_examples = math.inf if max_examples is None else max_examples
    fits = batches <= most_examples
    # The column of the fastest batch size, in each row.
    fastest = np.where(fits, steps * seconds_per_step, math.inf).argmin(axis=1)
    rows = list[DevicePlan]()
    for i, (count, k) in enumerate(zip(counts, fastest.tolist(), strict=True)):
        # The data do not suffice for so many devices, nor for more.
        if not fits[i, k]:
            break
        per_step = float(seconds_per_step[k])
        seconds = float(steps[i, k]) * per_step
        # Fewer devices are as fast.
        if rows and seconds >= rows[-1].seconds:
            continue
        seconds_of_one = seconds
        if rows:
            seconds_of_one = rows[0].seconds
        speed_up = seconds_of_one / seconds
        rows.append(
            DevicePlan(
                devices=count,
                device_batch_size=sizes[k],
                batch_size=count * sizes[k],
                lr=best_lr(count * sizes[k]),
                steps=float(steps[i, k]),
                seconds_per_step=per_step,
                seconds=seconds,
                seconds_low=float(low[i, k]) * per_step,
                seconds_high=float(high[i, k]) * per_step,
                device_seconds=count * seconds,
                speed_up=speed_up,
                efficiency=speed_up / count,
            )
        )
    # One device is the yardstick even where it was not asked for.
    return [row for row in rows if row.devices in devices]


def size_ladder(ceiling: int, multiple: int, ratio: float) -> list[int]:
    """List the batch sizes of a device to compare: multiples below the ceiling, and the ceiling.

    Each is at most ``ratio`` times the one before, or the next multiple where that is farther.
    """
    sizes = list[int]()
    size = multiple
    while size < ceiling:
        sizes.append(size)
        # At least one multiple further: near small sizes the ratio itself makes no step.
        size = max(size + multiple, int(size * ratio) // multiple * multiple)
    return [*sizes, ceiling]
