"""Steps that several devices share, timed in short trials, in processes as a study's trials."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

from bstune.core.errors import HardwareError
from bstune.core.records import TrialSpec
from bstune.core.search_space import Space
from bstune.core.step_time import StepTime, fit_line
from bstune.options import StudyOptions
from bstune.recipe import Recipe
from bstune.system.console import quieten
from bstune.system.files import Output
from bstune.system.watchdog import STEP_SECONDS, waiting_for
from bstune.trial.devices.distributed import options_of_process
from bstune.trial.loop import run_trial
from bstune.trial.processes.messages import Train
from bstune.trial.processes.workers import Workers
from bstune.trial.workload import load_workload

# The steps that are timed at each of two batch sizes, and those before them that are not.
SHARED_STEPS = 4
SHARED_WARMUP_STEPS = 1
# The larger of the two batch sizes over the smaller one.
SHARED_SPREAD = 4
TimeTrial = Callable[[int, float, int], tuple[float, ...]]
"""Gives seconds per step of a batch size, a learning rate and a number of steps."""


def open_short_trials(options: StudyOptions, recipe: Recipe, warmup_steps: int) -> Train:
    """Load the workload in a device's process, and give the function that trains short trials.

    The trials have no target: only their seconds per step count. They write no files and continue
    no other trial: the function takes no notice of the folder and the parent that it is given.
    """
    quieten()
    workload, protocol = load_workload(options_of_process(options), recipe)
    short = replace(
        protocol.for_steps_only(),
        warmup_steps=warmup_steps,
        trainer={**protocol.trainer, "num_sanity_val_steps": 0, "limit_val_batches": 1},
    )
    return lambda spec, output, parent: run_trial(workload, spec, short)


@contextmanager
def shared_steps(options: StudyOptions, recipe: Recipe, warmup_steps: int) -> Iterator[TimeTrial]:
    """Start a process for each device, and give the function that times steps on all of them.

    The function takes a batch size, a learning rate and a number of steps. It gives one number, the
    median of the steps' seconds. It raises HardwareError if the batch size cannot be trained.

    Args:
        options: resolved.
        recipe: what builds the workload's parts.
        warmup_steps: steps before the timed ones.
    """
    devices = options.devices
    opens = partial(open_short_trials, options, recipe, warmup_steps)
    # A trial that takes longer is ended.
    limit = options.protocol.trial_seconds or STEP_SECONDS * (warmup_steps + SHARED_STEPS)
    # One trial at a time, on all devices.
    with Workers(opens, 1, limit, devices) as workers:

        def time_trial(batch_size: int, lr: float, steps: int) -> tuple[float, ...]:
            spec = TrialSpec(
                number=0,
                trial_index=0,
                batch_size=batch_size,
                lr=lr,
                delta=None,
                seed=0,
                max_steps=warmup_steps + steps,
            )
            with waiting_for(f"steps at batch size {batch_size} on {devices} devices"):
                # A short trial writes no files and continues no other one.
                workers.start(spec, Output(Path()), None)
                finished = workers.wait()
            result = finished.result()
            # The trial has no target: where all goes well its last step stops it.
            if result.status != "stopped" or result.seconds_per_step is None:
                message = result.end_message or "its module stopped it"
                # With the frames of the user's code in which an error was raised, if one was.
                reason = f"{message} (status {result.status}, step {result.steps})"
                raise HardwareError(
                    f"batch size {batch_size} cannot be trained on {devices} devices: {reason}\n"
                    f"{finished.frames}".rstrip()
                )
            return (result.seconds_per_step,)

        yield time_trial


def shared_step_time(options: StudyOptions, recipe: Recipe, space: Space) -> StepTime:
    """Measure the seconds of a step that several devices share, as a line over batch size.

    The line goes through the times of a few steps at the smallest batch size, and at one that is
    ``SHARED_SPREAD`` times larger.
    """
    larger = min(space.high, space.low * SHARED_SPREAD)
    sizes = sorted({space.snap(space.low), space.snap(larger)})
    timed = list[tuple[int, float]]()
    with shared_steps(options, recipe, SHARED_WARMUP_STEPS) as time_trial:
        for size in sizes:
            # The lowest learning rate: nothing is trained here, and nothing must diverge.
            lr = space.lowest_rate_spec(size).lr
            (median_seconds,) = time_trial(size, lr, SHARED_STEPS)
            timed.append((size, median_seconds))
    return fit_line(timed)
