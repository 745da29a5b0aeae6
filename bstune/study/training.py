"""A workload that is trained: what a job needs of it, and what can be wrong with it on this machine."""

import functools
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Any

import torch
from lightning.fabric.utilities.data import sized_len
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningDataModule
from omegaconf import DictConfig, OmegaConf

from bstune.config import budget_of, flatten, overrides, plain, with_settings
from bstune.core.errors import ConfigError, StateError
from bstune.core.files import Output
from bstune.core.records import Budget, TrialProtocol, TrialResult, TrialSpec
from bstune.core.search_space import BUDGET, Space, corners
from bstune.hardware.memory import cap_cuda_memory
from bstune.hardware.report import headline
from bstune.hardware.survey import Survey, surveyed
from bstune.study.plan import SearchBudget, max_seconds, probe_step_time, rehearsal
from bstune.study.runner import Runner, Settled
from bstune.trial.batches import micro_batch_sizes
from bstune.trial.checkpoint import Stopped
from bstune.trial.device import device_name, resolve_device, versions
from bstune.trial.loop import Workload, make_trainer, met_before_training, metric, run_trial
from bstune.trial.workers import Workers
from bstune.trial.workload import build_workload, evaluate, load_data, train_examples

logger = logging.getLogger(__name__)
PRECISIONS = ("32-true", "bf16-mixed", "16-mixed", "bf16-true", "16-true")
# Arguments of the Trainer that bstune sets: another value would change what a trial is, and say nothing of it.
OWNED = frozenset(
    {"accelerator", "barebones", "callbacks", "check_val_every_n_epoch", "devices", "enable_checkpointing"}
    | {"accumulate_grad_batches", "enable_progress_bar", "fast_dev_run", "limit_train_batches", "limit_val_batches"}
    | {"logger", "max_epochs", "max_steps", "max_time", "min_epochs", "min_steps", "num_nodes", "num_sanity_val_steps"}
    | {"overfit_batches", "precision", "reload_dataloaders_every_n_epochs", "strategy", "val_check_interval"}
)
START_EXAMPLES = 2000  # validation examples that tell whether untrained weights meet the target
HORIZON_CAVEAT = (
    "The workload's schedule ends with the budget, so its trials take about as many examples at every batch size: "
    "the curve shows where this schedule stops working rather than the fewest steps."
)
ON_TEST_NOTE = "the target is measured on the test images, as the workload's source does"
ON_TEST_CAVEAT = "The target is measured on the test images, as the workload's source does: there is no other test."


def settle(config: DictConfig) -> Settled:
    """Return the config with its device and precision settled, and the Trainer's arguments that follow.

    Raises:
        ConfigError: for a device or precision that there is not, or an impossible micro-batch size.
    """
    config = config.copy()
    config.device = str(resolve_device(config.device, "device"))
    config.precision = resolve_precision(config.precision, config.device)
    if config.precision == "16-mixed" and OmegaConf.select(config, "workload.module.optimizer.fused"):
        raise ConfigError(
            "precision=16-mixed skips steps whose gradients overflow, after which the momentum of a fused optimizer is "
            "wrong: set workload.module.optimizer.fused=false, or use precision=bf16-mixed"
        )
    if config.protocol.micro_batch_size is not None:
        micro_batch_sizes(1, config.protocol.micro_batch_size)
    return Settled(config, open_runner, trainer_options(config))


def resolve_precision(precision: str, device: str) -> str:
    """Return the precision, with ``auto`` settled: bf16-mixed on CUDA, 32-true elsewhere.

    Raises:
        ConfigError: for an unknown precision, and for one that the device does not have. (Lightning would turn
            16-mixed on a CPU into bf16 and say nothing.)
    """
    cuda = device.startswith("cuda")
    if precision == "auto":
        return "bf16-mixed" if cuda and torch.cuda.is_bf16_supported(including_emulation=False) else "32-true"
    if precision not in PRECISIONS:
        raise ConfigError(f"precision must be one of auto, {', '.join(PRECISIONS)}, but got {precision!r}")
    kind, _, rest = precision.partition("-")
    if kind == "16" and not cuda:
        raise ConfigError(
            f"precision={precision} needs a CUDA device, but this is {device}: use bf16-{rest} or 32-true"
        )
    if kind == "bf16" and cuda and not torch.cuda.is_bf16_supported(including_emulation=False):
        raise ConfigError(
            f"precision={precision}: {torch.cuda.get_device_name()} has no bfloat16: use 16-{rest} or 32-true"
        )
    return precision


def trainer_options(config: DictConfig) -> dict[str, Any]:
    """Return the arguments of the Lightning Trainer for a settled device and precision."""
    device = torch.device(config.device)
    return {
        **plain(config.trainer),
        "accelerator": device.type,
        "devices": [device.index or 0] if device.type == "cuda" else 1,
        "precision": config.precision,
    }


def open_runner(
    config: DictConfig,
    plan: SearchBudget,
    space: Space,
    protocol: TrialProtocol,
    trial: TrialSpec | None,
    say: Callable[[str], None],
) -> Runner:
    """Build the workload, survey what the hardware allows for it, rehearse it, and return how its trials are run.

    Raises:
        DataError: if the data cannot be had.
        HardwareError: if no batch size fits, or the device is lost.
        ConfigError: for whatever else is found: the last check is a few steps and an evaluation, which find what only
            training finds.
    """
    data = load_data(config)
    check_largest(space.high if trial is None else trial.batch_size, data, trial is None)
    check_trainer(config, protocol)
    build = functools.cache(lambda: build_workload(config, data))
    found: Survey | None = None
    notes: tuple[str, ...] = ()
    if trial is None and config.hardware.enabled:
        found, kept = surveyed(config, space, protocol, data, build, say)
        space = replace(space, low=found.ceiling.smallest, high=found.ceiling.batch_size)
        notes = headline(found, kept)
    workload = build()
    # A single trial may be of a batch size at which the module can be built where the range's smallest is none.
    sizes = space if trial is None else replace(space, low=trial.batch_size, high=trial.batch_size)
    rehearsed = probe_step_time(sizes, protocol, lambda spec, probe: run_trial(workload, spec, probe))
    first = trial or TrialSpec(0, 0, space.low, space.lr(space.low, 0.0), 0.0, 0)
    check_start(workload, protocol, first)
    check_tunables(config, workload, protocol, space)
    step_time = rehearsed if found is None or found.step_time is None else found.step_time
    module = workload.build_module(first)
    stops = not has_horizon(config)
    workers = None
    if trial is None and config.search.workers > 1:
        workers, note = side_by_side(config, found)
        notes += (note,)
    device = device_name(protocol.trainer)
    on_test = workload.validates_on_test
    return Runner(
        train=partial(run_limited, config, workload, protocol),
        test=lambda spec, output: test_metrics(workload, protocol, spec, output),
        resumable=lambda number, output: output.state(number).exists(),
        step_time=step_time,
        max_seconds=max_seconds(plan, space, protocol.budget.last_step, step_time, protocol.evaluation_schedule.share),
        device=device,
        place=f"{device} in {config.precision}",
        versions=versions(),
        identity=identity(config, device),
        notes=(*notes, ON_TEST_NOTE) if on_test else notes,
        caveats=(() if stops else (HORIZON_CAVEAT,)) + ((ON_TEST_CAVEAT,) if on_test else ()),
        gradient_bytes=sum(p.numel() * p.element_size() for p in module.parameters() if p.requires_grad),
        train_examples=workload.train_examples,
        stops=stops,
        batch_sizes=None if found is None else (space.low, space.high),
        survey=found,
        workers=workers,
    )


def side_by_side(config: DictConfig, found: Survey | None) -> tuple[Callable[[], Workers], str]:
    """Return what opens the processes that train side by side, and what the plan says of them.

    Args:
        config: the composed and checked config, device and precision settled.
        found: what the hardware allows.

    Raises:
        ConfigError: if the steps were not timed alone over batch size.
    """
    count = config.search.workers
    if found is None or found.step_time is None:
        raise ConfigError(
            f"search.workers={count} needs steps that are timed at two batch sizes or more, with nothing beside them: "
            "widen search.batch_size, or use search.workers=1"
        )
    cuda = str(config.device).startswith("cuda")
    threads = None if cuda else max(1, torch.get_num_threads() // count)
    limit = found.ceiling.at.limit
    opens = partial(open_trials, OmegaConf.to_container(config, resolve=False), threads, limit if cuda else None)
    own = "" if threads is None else f" with {threads} thread{'s' if threads > 1 else ''}"
    note = (
        f"{count} trials at once, each{own} within {limit / 2**20:,.0f} MiB; seconds per step are the survey's, "
        "measured alone; which trial comes next depends on which ends first; winners run again alone"
    )
    if config.search.tune:
        note += f"; they are those of the config's own {', '.join(config.search.tune)}, whatever a trial's"
    return partial(Workers, opens, count), note


def open_trials(
    config: Any, threads: int | None, limit: int | None
) -> Callable[[TrialSpec, Output, TrialResult | None], TrialResult]:
    """Return what trains a trial in this process, a worker's: :func:`run_limited` of a workload that is built now.

    Args:
        config: the composed and checked config as plain values, device and precision settled, references unresolved.
        threads: of torch; None: as they are.
        limit: bytes of the CUDA device's memory, so that a trial that takes more ends as one that runs out of it
            instead of those beside it; None: not limited.

    Raises:
        DataError, ConfigError: as in the process that checked the same config.
    """
    from bstune.core.console import quieten
    from bstune.study.prepare import make_protocol, make_target

    quieten()
    if threads is not None:
        torch.set_num_threads(threads)
    settled = settle(OmegaConf.create(config))
    if limit is not None:
        device = torch.device(settled.config.device)
        cap_cuda_memory(device, limit / torch.cuda.get_device_properties(device).total_memory)
    protocol = make_protocol(settled.config, make_target(settled.config), settled.trainer)
    return partial(run_limited, settled.config, build_workload(settled.config), protocol)


def check_largest(largest: int, data: LightningDataModule, of_range: bool) -> None:
    """Refuse a batch size over the data's length.

    Raises:
        ConfigError: with the option to change: the range's end, or the one trial's batch size.
    """
    examples = train_examples(data)
    if largest > examples:
        option = "search.batch_size.high" if of_range else "trial.batch_size"
        raise ConfigError(
            f"batch size {largest} is larger than the training data ({examples} examples): "
            f"set {option} to at most {examples}"
        )


def check_tunables(config: DictConfig, workload: Workload, protocol: TrialProtocol, space: Space) -> None:
    """Train a few steps at the smallest batch size with all further hyper-parameters at either end of their ranges.

    Raises:
        ConfigError: for a value that the module does not take, or for a budget that no schedule ends with.
    """
    for one in space.tunables:
        if one.key.startswith(BUDGET) and not has_horizon(config):
            raise ConfigError(
                f"workload.tunable.{one.name} sets {one.key}, but no schedule of {config.workload.name} ends with its "
                "budget: it would change nothing but when a trial gives up"
            )
    for settings in corners(space.tunables):
        spec = TrialSpec(0, 0, space.low, space.lr(space.low, -space.delta_bound), None, 0, hyperparameters=settings)
        try:
            run_trial(workload, spec, rehearsal(protocol))
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f"workload.tunable: the module does not take {', '.join(overrides(config, settings))} at batch size "
                f"{space.low}: {str(error).splitlines()[0]}"
            ) from error


def run_limited(
    config: DictConfig,
    workload: Workload,
    protocol: TrialProtocol,
    spec: TrialSpec,
    output: Output | None,
    parent: TrialResult | None,
) -> TrialResult:
    """Train one trial up to its own limit, which takes the budget's place, from where its parent was stopped.

    Without a limit the budget is the trial's own: a setting may be its horizon.

    A parent whose state is gone, or cannot be used, is trained again from the start.
    """
    checkpoint = None if output is None else output.checkpoint(spec.number)
    if spec.max_steps is None or output is None:
        own = replace(protocol, budget=budget_of(with_settings(config, spec.hyperparameters)))
        return run_trial(workload, spec, own, checkpoint)
    output.states.mkdir(exist_ok=True)
    limited = replace(protocol, budget=Budget(spec.max_steps, 1))
    stopped = None if parent is None else Stopped(parent, output.state(parent.number))
    try:
        return run_trial(workload, spec, limited, checkpoint, state=output.state(spec.number), resume=stopped)
    except StateError as error:
        logger.warning("%s", error)
        if stopped is not None:
            stopped.state.unlink(missing_ok=True)  # it would be tried again and again
    afresh = replace(spec, resumed_from=None)
    return run_trial(workload, afresh, limited, checkpoint, state=output.state(spec.number))


def test_metrics(workload: Workload, protocol: TrialProtocol, spec: TrialSpec, output: Output) -> dict[str, float]:
    """Return a trial's metrics on the test set, from its checkpoint; empty if there is no such set or checkpoint."""
    checkpoint = output.checkpoint(spec.number)
    if workload.test_batches is None or not checkpoint.exists():
        return {}
    module = workload.build_module(spec)
    module.load_state_dict(torch.load(checkpoint, map_location="cpu", weights_only=True)["state_dict"])
    trainer = evaluate(workload, module, protocol, test=workload.test_batches)
    return {name: float(value) for name, value in trainer.callback_metrics.items()}


def check_trainer(config: DictConfig, protocol: TrialProtocol) -> None:
    """Build a Trainer, to find arguments that it does not take.

    Raises:
        ConfigError: with Lightning's own words, or for an argument that would break the protocol.
    """
    owned = sorted(OWNED & set(config.trainer))
    if owned:
        raise ConfigError(f"trainer.{owned[0]} is bstune's own: see device, precision, budget and protocol")
    try:
        make_trainer(protocol.trainer)
    except (TypeError, ValueError, MisconfigurationException) as error:
        raise ConfigError(f"trainer: {str(error).splitlines()[0]}") from error


class _EveryNth:
    """Every n-th of some batches, so that a few of them stand for all, in whatever order the data are."""

    def __init__(self, batches: Iterable[Any], n: int) -> None:
        self._batches, self._n = batches, n

    def __iter__(self) -> Iterator[Any]:
        return islice(self._batches, 0, None, self._n)

    def __len__(self) -> int:
        return -(-(sized_len(self._batches) or 1) // self._n)


def check_start(workload: Workload, protocol: TrialProtocol, spec: TrialSpec) -> None:
    """Refuse a target that untrained weights meet on validation batches of ``START_EXAMPLES`` examples or a few more.

    Raises:
        ConfigError: if the target is met.
    """
    few = _EveryNth(workload.validation_batches, max(1, workload.validation_examples // START_EXAMPLES))
    trainer = evaluate(workload, workload.build_module(spec), protocol, val=few)
    value = metric(trainer, protocol.target.metric)
    if value is not None and protocol.target.reached(value):
        raise met_before_training(protocol.target, value)


def identity(config: DictConfig, device: str) -> Mapping[str, Any]:
    """Return device, precision and how it is compiled, and the budget if the schedule ends with it, flat."""
    budget = flatten({"budget": plain(config.budget)}) if has_horizon(config) else {}
    return {"precision": config.precision, "device": device, "compile": config.compile, **budget}


def has_horizon(config: DictConfig) -> bool:
    """Return whether the workload's module depends on the trial's number of steps, as a schedule with an end does."""
    modules = []
    for total_steps in (1, 2):
        own = config.copy()
        own.trial.batch_size, own.trial.lr, own.trial.total_steps = 1, 1.0, total_steps
        modules.append(plain(own.workload.module))
    return modules[0] != modules[1]
