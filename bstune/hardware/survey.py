"""What the hardware allows for one workload: memory ceiling, step times, the device's limits and the step's cost.

A survey is measured once a workload, device and versions, and cached: the ceiling ends the range of the search, and
tau(B) is half of its model of time.
"""

import hashlib
import json
import logging
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch import LightningDataModule, LightningModule
from omegaconf import DictConfig, OmegaConf
from pydantic import TypeAdapter, ValidationError

from bstune.config import compose, to_dict
from bstune.core.errors import ConfigError, HardwareError, InputError, StudyError
from bstune.core.records import Budget, TrialProtocol, TrialSpec
from bstune.core.search_space import Space
from bstune.core.step_time import StepTimeModel, fit_step_model, fit_step_times, leave_one_out
from bstune.hardware import known_devices, roofline, timing
from bstune.hardware.memory import Ceiling, ProbeResult, memory_limit, resident_bytes
from bstune.hardware.probe import DEVICE_LOST, largest_in_time, measure_ceiling
from bstune.hardware.several import shared_steps
from bstune.system.console import format_seconds, quieten
from bstune.system.failures import optional
from bstune.system.files import write_text
from bstune.system.inputs import read_bytes
from bstune.system.watchdog import waiting_for, watching
from bstune.trial.backend import OBJECTS, make_space
from bstune.trial.batches import loaders_of
from bstune.trial.device import device_name, processor, versions
from bstune.trial.graph import eager_steps
from bstune.trial.loop import Workload
from bstune.trial.preflight import (
    FEW_EXAMPLES,
    Findings,
    check_loaders,
    in_small_batches,
    preflight,
)
from bstune.trial.start import at_start
from bstune.trial.workers import start_server
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

logger = logging.getLogger(__name__)
NEITHER = 0.1  # of a step: where the roofline allows it in less, neither computing nor memory is what it waits for
PLATEAU = 0.95  # of the best throughput: from here on a larger batch gives next to nothing a second
# Of ``hardware.seconds``: what the probes of memory may take, each kind of the device's own ceilings
# at most, and of what is left for timing steps, the first visit to the largest batch size.
PROBES_SHARE = 0.5
CEILINGS_SHARE = 0.02
LARGEST_SHARE = 0.3
BARE_SHARE = 0.05  # likewise, a visit without the framework


@dataclass(frozen=True)
class Survey:
    """What was measured, and what follows from it."""

    workload: str
    device: str  # its name, as in the trials' records
    device_type: str  # cpu or cuda
    precision: str
    versions: Mapping[str, str]
    high: int  # the largest batch size that was asked for
    ceiling: Ceiling
    measured: timing.Measured  # seconds per step over batch size
    limits: roofline.DeviceLimits | None  # None: they could not be measured, as the notes say
    cost: roofline.StepCost | None  # FLOPs and bytes of a step; None: not known, as the notes say
    seconds: float  # that the survey took
    notes: tuple[str, ...] = ()
    # Dimensions that miss the tensor cores' multiple at the ceiling.
    misaligned: tuple[roofline.TensorCoreMisalignment, ...] = ()

    @property
    def pairs(self) -> list[tuple[int, float]]:
        """Measured (B, tau(B) in seconds)."""
        return [(row.batch_size, row.seconds) for row in self.measured.timings]

    @cached_property
    def step_time(self) -> StepTimeModel | None:
        """tau(B); None where only one batch size was measured."""
        return fit_step_model(self.pairs) if len(self.pairs) > 1 else None

    @property
    def left_out_error(self) -> float | None:
        """Median relative error of tau at measured sizes that are predicted from the others; None below three sizes."""
        return statistics.median(leave_one_out(self.pairs)) if len(self.pairs) > 2 else None

    @property
    def turning_batch_size(self) -> float | None:
        """From where on the step is compute-bound by its shapes; None for never, or if it is not known."""
        return (
            roofline.turning_batch_size(self.cost, self.limits.ridge)
            if self.cost and self.limits
            else None
        )

    @property
    def achieved(self) -> list[roofline.Achieved]:
        """How near the measured steps came to the roofline; empty where it is not known."""
        if not self.cost or not self.limits:
            return []
        return [
            roofline.Achieved(
                size,
                share_of_peak=self.cost.flops.at(size) / seconds / self.limits.flops_per_second,
                share_of_roofline=roofline.allowed_seconds(self.cost, self.limits, size) / seconds,
                intensity=roofline.intensity(self.cost, size),
            )
            for size, seconds in self.pairs
        ]

    @property
    def multiple(self) -> int | None:
        """The multiple that tensor cores take dimensions in at this precision; None: they are not used."""
        return (
            None
            if self.limits is None
            else roofline.tensor_core_multiple(self.limits.dtype, self.device_type)
        )

    @property
    def elsewhere(self) -> list[known_devices.Prediction]:
        """From where on the step is compute-bound on devices that are known by their makers' figures."""
        return (
            known_devices.predictions(self.cost, self.limits.dtype)
            if self.cost and self.limits
            else []
        )

    @property
    def bound_by_neither(self) -> list[roofline.Achieved]:
        """The smallest batch sizes, in a row, of whose measured steps the roofline accounts for less than a tenth."""
        return list(takewhile(lambda row: row.share_of_roofline < NEITHER, self.achieved))

    @property
    def plateau(self) -> timing.StepTiming:
        """The smallest measured batch size with 95% of the best measured throughput."""
        best = max(row.throughput for row in self.measured.timings)
        return next(row for row in self.measured.timings if row.throughput >= PLATEAU * best)


def compose_survey(arguments: Sequence[str]) -> DictConfig:
    """Return the config of a command line; a workload that is not trained is refused."""

    def refuse(config: DictConfig) -> DictConfig:
        raise ConfigError(
            "recorded runs have no hardware to survey: name a workload that is trained"
        )

    return compose(arguments, refuse)


def survey_of(config: DictConfig, log: Callable[[str], None]) -> tuple[Survey, bool]:
    """Return the survey of a composed config, and whether it was cached; ``log`` takes lines of progress."""
    quieten()
    start_server()  # it imports while this process reads the data
    config = resolve(config)
    space, protocol = make_space(config), checked_protocol(config)
    with watching(log, config.protocol.trial_seconds) as say:
        data = load_data(config)
        check_loaders(data)
        check_largest(space.high, data)
        build = partial(build_workload, config, data)
        return cached_survey(config, space, protocol, data, build, say)


def measure(
    config: DictConfig,
    space: Space,
    protocol: TrialProtocol,
    train_examples: int,
    build: Callable[[], Workload],
    log: Callable[[str], None],
    tried: Findings | None = None,
) -> Survey:
    """Measure what the hardware allows for a workload; ``config`` is checked and resolved.

    ``tried`` is what a few steps have shown before; None: none were taken yet.
    """
    start, options = time.perf_counter(), config.hardware.memory
    if tried is None:
        tried = _few_steps(build(), protocol, space)

    def seconds_left() -> float:
        return float(config.hardware.seconds) - (time.perf_counter() - start)

    device = torch.device(config.device)
    log(
        "surveying the hardware: probes of memory in processes of their own, then steps, "
        f"at most {config.hardware.seconds:g} s"
    )
    largest, unused = usable(space.high, protocol.budget)
    ceiling = measure_ceiling(
        config,
        space.low,
        max(space.low, largest),
        train_examples,
        tried=tried,
        limit=_trial_limit(config, device),
        multiple=space.multiple,
        relative=options.relative[device.type],
        steps=max(
            options.steps, eager_steps(protocol.fast, device) + 1
        ),  # a captured graph holds memory of its own
        seconds=options.probe_seconds,
        wanted_seconds=PROBES_SHARE * config.hardware.seconds,
        is_late=lambda: seconds_left() < (1.0 - PROBES_SHARE) * config.hardware.seconds,
        largest_first=True,
        verify=options.verify,
        report=lambda result: log(probe_text(result)),
    )
    with _device_errors():
        workload = _with_small_evaluations(build())
        limits, cost, notes = _roofline(config, device, workload, protocol, space)
        log("timing steps")
        measured, more = _time_ladder(
            config, space, protocol, workload, ceiling, device, seconds_left(), tried
        )
    return Survey(
        workload=config.workload.name,
        device=device_name(protocol.trainer, protocol.devices),
        device_type=device.type,
        precision=config.precision,
        versions=versions(),
        high=space.high,
        ceiling=ceiling,
        measured=measured,
        limits=limits,
        cost=cost,
        seconds=time.perf_counter() - start,
        notes=(*unused, *ceiling.notes, *notes, *more),
        misaligned=_misaligned(device, limits, cost, ceiling.batch_size),
    )


def _few_steps(workload: Workload, protocol: TrialProtocol, space: Space) -> Findings | None:
    """Return what a few steps show; None of a workload that can be trained, but not tuned."""
    alone = replace(protocol, devices=1, batch_schedule=None)
    try:
        return preflight(workload, alone, space, None, continues=False, survey=True)
    except ConfigError:
        return None


def _with_small_evaluations(workload: Workload) -> Workload:
    """Let the workload's evaluations take small batches: a trial that is timed ends with one of them."""
    loaders = loaders_of(workload.validation_batches)
    if len(loaders) != 1:
        return workload
    return replace(workload, validation_batches=in_small_batches(loaders[0], FEW_EXAMPLES))


def usable(high: int, budget: Budget) -> tuple[int, tuple[str, ...]]:
    """Return the largest batch size that a trial's budget can use, and a note where that is not ``high``.

    A batch larger than all examples of the budget would be the trial's only one.
    """
    if budget.steps > 1 or high <= budget.examples or budget.examples <= 1:
        return high, ()
    note = f"batch sizes past budget.examples={budget.examples} are left out: a trial would be one step"
    return budget.examples, (note,)


def _trial_limit(config: DictConfig, device: torch.device) -> int | None:
    """Return the bytes that one of ``search.workers`` trials may take; None: all that the CUDA device has."""
    options, workers = config.hardware.memory, int(config.search.workers)
    limit: int | None = options.limit
    if (
        limit is None and device.type == "cpu"
    ):  # a trial that takes all that is free ends its process
        limit = int(options.free_share * memory_limit(Path("/"), resident_bytes()))
    if device.type == "cpu" and limit is not None:  # CUDA devices have their own each
        limit //= config.devices
    if workers == 1:
        return limit
    whole = int(torch.cuda.get_device_properties(device).total_memory) if limit is None else limit
    return whole // (
        workers + 1
    )  # this process is one more: it has the data, and trained at the largest batch size


def probe_text(result: ProbeResult) -> str:
    """Return a probe in a line."""
    peak, limit = result.peak_bytes, result.limit / 2**20
    taken = "" if peak is None else f" ({peak / 2**20:,.0f} of {limit:,.0f} MiB)"
    what = {
        "fits": "fits",
        "startup": "does not fit: data and model alone",
        "training": "does not fit",
        "evaluation": "trains, but its evaluation does not fit",
        "error": f"fails: {result.message}",
        "device": "lost the device",
    }[result.outcome]
    return f"batch size {result.batch_size:,} {what}{taken}"


@contextmanager
def _device_errors() -> Iterator[None]:
    """Turn torch's error of a lost device into one line."""
    try:
        yield
    except RuntimeError as error:  # torch's errors of the device are of this kind
        if not DEVICE_LOST.search(str(error)):
            raise
        text = f"the device was lost while it was measured: {str(error).splitlines()[0]}"
        raise HardwareError(f"{text}. Check that it is there and free, then run again") from error


def _roofline(
    config: DictConfig,
    device: torch.device,
    workload: Workload,
    protocol: TrialProtocol,
    space: Space,
) -> tuple[roofline.DeviceLimits | None, roofline.StepCost | None, tuple[str, ...]]:
    if config.devices > 1:
        return (
            None,
            None,
            (f"no roofline: it is one device's, and {config.devices} share the steps",),
        )
    options, limits, cost, notes = config.hardware.ceilings, None, None, list[str]()
    module: LightningModule | None = None
    with optional("no roofline", notes):
        module, trainer = at_start(workload, _spec(space.low, space), protocol)
    convolves = module is not None and roofline.is_convolutional(module)
    with optional("no roofline", notes):
        arithmetic = roofline.arithmetic_of(config.precision, device, convolves)
        limits = timing.measure_limits(
            device,
            arithmetic,
            min(options.seconds, CEILINGS_SHARE * config.hardware.seconds),
            list(options.matrix_sizes),
            list(options.copy_bytes),
        )
        if module is not None:
            loss = partial(_loss, trainer.precision_plugin)
            draw = partial(_batch, workload, module.to(device).train(), space, device)
            with waiting_for(f"the survey's trace of {type(module).__name__}", steps=True):
                cost = roofline.step_cost(
                    module, draw, loss, arithmetic, list(options.traced_batch_sizes)
                )
    return (
        limits,
        cost,
        tuple(notes[:1]),
    )  # said once: where the module fails, the ceilings may as well


def _loss(precision: Any, module: LightningModule, batch: Any) -> torch.Tensor:
    """Return a training step's loss in the precision of its Trainer's plug-in: batches may come in half of it."""
    with precision.train_step_context():
        return roofline.training_loss(module, precision.convert_input(batch))


def _batch(
    workload: Workload, module: LightningModule, space: Space, device: torch.device, size: int
) -> Any:
    return on_device(
        workload, module, next(iter(workload.train_batches(_spec(size, space)))), device
    )


def _misaligned(
    device: torch.device,
    limits: roofline.DeviceLimits | None,
    cost: roofline.StepCost | None,
    batch_size: int,
) -> tuple[roofline.TensorCoreMisalignment, ...]:
    """Return what misses the tensor cores' multiple; nothing where no roofline says what runs there."""
    multiple = None if limits is None else roofline.tensor_core_multiple(limits.dtype, device.type)
    if limits is None or cost is None or multiple is None:
        return ()
    return tuple(roofline.misalignments(cost, limits, multiple, batch_size))


def _spec(batch_size: int, space: Space) -> TrialSpec:
    # The lowest learning rate: a survey trains nothing, and must not diverge.
    return TrialSpec(0, 0, batch_size, space.lr(batch_size, -space.delta_bound), None, 0)


def _time_ladder(
    config: DictConfig,
    space: Space,
    protocol: TrialProtocol,
    workload: Workload,
    ceiling: Ceiling,
    device: torch.device,
    seconds: float,
    tried: Findings | None,
) -> tuple[timing.Measured, tuple[str, ...]]:
    """Time steps within ``seconds``; return what was measured, and notes."""
    options = config.hardware.step_time
    warmup_steps = max(options.warmup_steps, eager_steps(protocol.fast, device))
    short = replace(protocol, warmup_steps=warmup_steps)
    timed: list[tuple[float, float]] = []
    compared: set[int] = set()
    several = protocol.devices > 1
    notes = [f"no share of overhead: {protocol.devices} devices share the steps"] if several else []

    def run(size: int) -> tuple[Sequence[float], Sequence[float]]:
        lr = _spec(size, space).lr
        expected = (
            float(fit_step_times(timed, size)(np.array(float(size))))
            if timed
            else options.visit_seconds
        )
        steps = min(
            max(round(options.visit_seconds / expected), options.min_steps), options.max_steps
        )
        trial = time_trial(size, lr, steps)
        timed.append((float(size), statistics.mean(trial)))
        # A long step's overhead is not worth another one; a module that cannot be compared is not tried again.
        if notes or (size in compared and steps <= options.min_steps):
            return trial, ()
        compared.add(size)
        if (warmup_steps + steps) * statistics.mean(trial) > BARE_SHARE * seconds:
            return trial, ()
        bare: Sequence[float] = ()
        with optional("no share of overhead", notes):
            bare = timing.time_bare(workload, short, size, lr, steps, device)
        return trial, bare

    largest, more = ceiling.batch_size, list[str]()
    if tried is not None:
        step_seconds = LARGEST_SHARE * seconds / (warmup_steps + options.min_steps)
        in_time = largest_in_time(largest, ceiling.smallest, step_seconds, tried.step_time)
        if in_time < largest:
            largest = max(in_time // space.multiple * space.multiple, ceiling.smallest)
            more.append(
                f"steps past batch size {largest} are not timed but predicted: each takes longer than "
                f"{format_seconds(step_seconds)} (hardware.seconds={config.hardware.seconds:g})"
            )
    sizes = timing.ladder(ceiling.smallest, largest, options.rungs, space.multiple)
    alone = nullcontext(partial(timing.time_trial, workload, short))
    with shared_steps(config, warmup_steps) if several else alone as time_trial:
        if several:  # while the processes start
            time_trial(sizes[0], _spec(sizes[0], space).lr, 1)
        measured = timing.measure_step_times(run, sizes, options.repeats, config.seed, seconds)
    return measured, (*more, *notes)


SURVEYS = TypeAdapter(Survey)
IRRELEVANT = {
    "trials",
    "budget",
    "target",
    "reference",
    "tunable",
}  # of a workload, to what is measured


def cached_survey(
    config: DictConfig,
    space: Space,
    protocol: TrialProtocol,
    data: LightningDataModule,
    build: Callable[[], Workload],
    log: Callable[[str], None],
    tried: Findings | None = None,
) -> tuple[Survey, bool]:
    """Return the cached survey of this workload, device and versions, or a new one, and whether it was cached.

    ``tried`` is what a few steps have shown before, see :func:`measure`.
    """
    module = build_module(config, TrialSpec(0, 0, space.low, space.lr(space.low, 0.0), None, 0))
    key = cache_key(config, space, protocol, module, train_examples(data))
    path = Path(config.hardware.cache) / f"{config.workload.name}-{key}.json"
    cached = None if config.hardware.refresh else read(path)
    if cached is not None:
        return cached, True
    found = measure(config, space, protocol, train_examples(data), build, log, tried)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, SURVEYS.dump_json(found).decode())
    except (OSError, StudyError) as error:
        logger.warning("the survey of the hardware is not cached: %s", error)
    return found, False


def read(path: Path) -> Survey | None:
    """Return the survey in a file; None where there is none, or one that cannot be read."""
    try:
        return SURVEYS.validate_json(read_bytes(path, "the survey"))
    except (InputError, ValidationError, HardwareError):
        return None


def cache_key(
    config: DictConfig,
    space: Space,
    protocol: TrialProtocol,
    module: LightningModule,
    train_examples: int,
) -> str:
    """Return 16 hexadecimal digits that change with whatever the survey depends on."""
    workload: Any = OmegaConf.to_container(config.workload, resolve=False)
    options = to_dict(config.hardware)
    # Not what the nodes of the user's arguments built: the nodes are in the workload, or in the config.
    given = workload.get("trainer", {})
    nodes = {*given, *(given["of"] if given.get("_target_") == OBJECTS else ())}
    trainer = {name: value for name, value in protocol.trainer.items() if name not in nodes}
    depends: dict[str, Any] = {
        "workload": {name: value for name, value in workload.items() if name not in IRRELEVANT},
        # shows edits of the model's code
        "module": [
            repr(module),
            *(f"{name} {tuple(p.shape)}" for name, p in module.named_parameters()),
        ],
        "examples": train_examples,
        "range": [space.low, usable(space.high, protocol.budget)[0], space.multiple],
        "device": [device_name(protocol.trainer, protocol.devices), processor()],
        "trainer": {key: str(value) for key, value in (trainer | to_dict(config.trainer)).items()},
        "micro_batch_size": protocol.micro_batch_size,
        "compile": protocol.compile,
        "fast": protocol.fast,
        "versions": dict(versions()),
        "survey": {
            name: options[name] for name in options.keys() - {"cache", "enabled", "refresh"}
        },
    }
    if config.search.workers > 1:  # they share the memory
        depends["workers"] = config.search.workers
    return hashlib.sha256(json.dumps(depends, sort_keys=True, default=str).encode()).hexdigest()[
        :16
    ]
