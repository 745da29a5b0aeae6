"""The plan for several devices after a study: from the frontier that its trials tell, and the seconds of its steps."""

import functools
from collections.abc import Callable

import numpy as np

from bstune.hardware.scale_out import ScaleOut, candidates, no_all_reduce, plan, ring_all_reduce
from bstune.hardware.step_model import fit_sync, sync_seconds
from bstune.preflight import Job
from bstune.search.known import Known
from bstune.search.mapping import best_learning_rate, steps_band
from bstune.search.steptime import fit_step_times

INTERVAL = (0.05, 0.95)


def scale_out(job: Job, known: Known) -> tuple[list[ScaleOut], list[ScaleOut]]:
    """Return the plan without an all-reduce, and the one with the all-reduce that the config states (empty if none).

    The batch size per device is chosen from the study's range, up to the memory ceiling; tau(B) is what was measured
    before the study, corrected by its trials.

    Args:
        job: the study.
        known: the posterior after its trials, at least one of which reached the target.
    """
    settings, space = job.config.hardware.scale_out, job.space
    sizes = [size for size in candidates(space.high, space.multiple, settings.candidate_ratio) if size >= space.low]
    timed = [(2.0**arm.x, arm.seconds_per_step) for arm in known.arms if arm.seconds_per_step is not None]
    tau = fit_step_times(timed, float(space.high), job.runner.step_time)

    def made(all_reduce_seconds: Callable[[int], float]) -> list[ScaleOut]:
        return plan(
            lambda batch_sizes: steps_band(known, batch_sizes, INTERVAL, np.random.default_rng(job.plan.seed)),
            lambda size: float(tau(np.array(float(size)))),
            list(settings.devices),
            sizes,
            all_reduce_seconds,
            functools.partial(best_learning_rate, known),
            settings.all_reduce.overlap,
            job.runner.train_examples,
        )

    ideal = made(no_all_reduce)
    reduce = settings.all_reduce
    if reduce.seconds is not None:
        alpha, beta = fit_sync([(int(count), float(seconds)) for count, seconds in reduce.seconds.items()])
        return ideal, made(lambda count: sync_seconds(count, alpha, beta))
    if reduce.bytes_per_second is not None and job.runner.gradient_bytes is not None:
        ring = functools.partial(
            ring_all_reduce,
            gradient_bytes=job.runner.gradient_bytes,
            bytes_per_second=reduce.bytes_per_second,
            latency=reduce.latency,
        )
        return ideal, made(ring)
    return ideal, []
