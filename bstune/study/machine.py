"""The machine that a study's seconds are of, as the worker sees it."""

import platform
from collections.abc import Mapping
from importlib.metadata import version
from typing import Self

from bstune import __version__
from bstune.core.errors import InputError
from bstune.core.records import Frozen
from bstune.hardware.survey import (
    Survey,
    cached_survey,
    code_and_layers,
    survey,
    survey_key,
)
from bstune.options import Options, space_of
from bstune.recipe.recipe import Recipe, resolve_device, resolve_precision
from bstune.study.deadline import Deadline
from bstune.study.loop import HangWatch
from bstune.trial.worker import AnyWorker, Worker, call, value_of

# Packages whose versions change a history or a step time.
PACKAGES = ("torch", "lightning", "numpy", "optuna")
# Of a trial whose length nobody knows yet.
STEPS = 1000
# The least seconds that a survey is made in.
LEAST_SURVEY_SECONDS = 3.0


class Machine(Frozen):
    """A device and what it runs; it is the study's hardware.json."""

    device: str
    """``cpu``, or the accelerator's name; ``2 x cpu`` where several share each batch."""
    precision: str = ""
    """Of training, as Lightning's Trainer names it; empty for recorded runs and loops."""
    threads: int
    """Of torch on the CPU."""
    processor: str
    python: str
    versions: dict[str, str]
    survey: Survey | None = None
    """What it allows the workload; None where no survey was made."""

    @property
    def fills_tensor_cores(self) -> bool:
        """Whether it trains under mixed precision on CUDA; nobody tells that of a loop."""
        return not self.device.endswith("cpu") and self.precision.endswith("-mixed")

    def with_survey(self, survey: Survey) -> Self:
        """The machine with its survey, which may have chosen the number of threads."""
        threads = survey.threads or self.threads
        return self.model_copy(update={"survey": survey, "threads": threads})


RECORDED = Machine(
    device="recorded runs",
    threads=0,
    processor="",
    python=platform.python_version(),
    versions={"bstune": __version__},
)


def describe_machine(
    device: str, threads: int | None, precision: str = "auto", devices: int = 1
) -> Machine:
    """Look at the machine; called in the worker's process, as it imports torch.

    Args:
        device: ``cpu``, ``cuda`` or ``auto``.
        threads: of torch; None: torch's own number.
        precision: of training, or ``auto``.
        devices: that share each batch.

    Raises:
        InputError: there is no such device, or it cannot do the precision.
    """
    import torch

    if device == "cuda" and not torch.cuda.is_available():
        raise InputError("device=cuda, but torch finds no CUDA device: give device=cpu")
    kind = resolve_device(device)
    uses_cuda = kind == "cuda"
    if uses_cuda and devices > (there := torch.cuda.device_count()):
        raise InputError(
            f"devices must be at most {there}, the CUDA devices there are, but got {devices}"
        )
    name = torch.cuda.get_device_name() if uses_cuda else "cpu"
    return Machine(
        device=name if devices == 1 else f"{devices} x {name}",
        precision=resolve_precision(precision, kind),
        threads=threads or torch.get_num_threads(),
        processor=platform.processor() or platform.machine(),
        python=platform.python_version(),
        versions={"bstune": __version__, **{name: version(name) for name in PACKAGES}},
    )


def machine_of(options: Options, worker: AnyWorker | None) -> Machine:
    """Ask the worker what it runs on; recorded runs have none."""
    if worker is None:
        return RECORDED
    # That a time limit is over meanwhile is told with what is enough.
    limit = HangWatch(trial_seconds=options.trial_seconds).limit
    of_machine = (options.device, options.threads, options.precision, options.devices)
    machine: Machine = value_of(call(worker, describe_machine, *of_machine, limit=limit))
    return machine


def survey_seconds(options: Options, deadline: Deadline | None, preflight: float) -> float:
    """Seconds that a survey may take; of a time limit's share the preflight has had its part."""
    if deadline is None:
        return options.survey_seconds
    return min(options.survey_seconds, max(deadline.preparation_seconds - preflight, 0.0))


def why_no_survey(options: Options, worker: AnyWorker | None, seconds: float) -> str:
    """Why no survey is made in so many seconds; empty: one is.

    Raises:
        InputError: ``micro_batch_size=auto``, ``memory_limit`` and ``budget.seconds`` need one.
    """
    why = ""
    if options.survey == "off":
        why = "survey=off"
    elif not isinstance(worker, Worker):
        why = "it needs workers=1 or more, and devices=1"
    elif seconds < LEAST_SURVEY_SECONDS:
        why = f"{seconds:.1f} s are too few, which survey_seconds and wall_seconds set"
    needs = {
        "micro_batch_size=auto": options.micro_batch_size == "auto",
        "memory_limit": options.memory_limit is not None,
        "budget.seconds": options.budget.seconds is not None,
    }
    for name, is_given in needs.items():
        if why and is_given:
            raise InputError(f"{name} needs the survey, which is left out: {why}")
    return why


def kept_or_new_survey(
    machine: Machine,
    worker: AnyWorker,
    recipe: Recipe,
    options: Options,
    settings: Mapping[str, object],
    seconds: float,
) -> tuple[Survey, bool]:
    """The survey of a workload, and whether it was kept from an earlier time.

    Args:
        machine: that the worker is on.
        worker: that measures.
        recipe: what is trained.
        options: of the study.
        settings: of the workload, as JSON; another survey is made where they change.
        seconds: that it may take.

    Raises:
        UserCodeError: what the user's code raises at the baseline's batch size.
        InputError: no batch size fits.
    """
    assert isinstance(worker, Worker)  # noqa: S101 (why_no_survey says so)
    space = space_of(options, machine.fills_tensor_cores)
    patience = HangWatch(options.wall_seconds, options.trial_seconds).limit
    size, lr = space.anchor
    baseline = round(size), lr
    # Where a schedule ends changes neither memory nor step times.
    steps = options.budget.last_step(size) if options.budget_is_in_steps else STEPS
    code = value_of(call(worker, code_and_layers, recipe, *baseline, steps, limit=patience))
    measured = (space.low, space.high, baseline, options.memory_limit)
    key = survey_key(code, recipe, settings, machine.model_dump(), measured)
    return cached_survey(
        key,
        options.survey == "refresh",
        seconds,
        lambda: survey(
            worker,
            recipe,
            (space.low, space.high),
            baseline,
            steps,
            seconds,
            patience,
            options.memory_limit,
            space.multiple,
        ),
    )
