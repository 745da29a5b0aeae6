"""Everything that can be wrong with a job, found before anything is written."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.utilities.data import sized_len
from lightning.fabric.utilities.exceptions import MisconfigurationException
from omegaconf import DictConfig

from bstune.cadence import Cadence
from bstune.data.batches import micro_batch_sizes
from bstune.data.module import resolve_device
from bstune.errors import ConfigError
from bstune.estimate import StepTime, probe_step_time
from bstune.output import Output, check_writable
from bstune.records import Target, TrialSpec
from bstune.search.plan import Plan
from bstune.search.space import Space
from bstune.search.study import build_sampler, check_storage
from bstune.trial import Budget, Protocol, device_name, make_trainer, met_before_training, metric
from bstune.workload import Workload, build, build_workload, evaluate, plain

PRECISIONS = ("32-true", "bf16-mixed", "16-mixed")
# Arguments of the Trainer that bstune sets: another value would change what a trial is, and say nothing of it.
OWNED = frozenset(
    {"accelerator", "barebones", "callbacks", "check_val_every_n_epoch", "devices", "enable_checkpointing"}
    | {"accumulate_grad_batches", "enable_progress_bar", "fast_dev_run", "limit_train_batches", "limit_val_batches"}
    | {"logger", "max_epochs", "max_steps", "max_time", "min_epochs", "min_steps", "num_nodes", "num_sanity_val_steps"}
    | {"overfit_batches", "precision", "reload_dataloaders_every_n_epochs", "strategy", "val_check_interval"}
)
START_EXAMPLES = 2000  # validation examples that tell whether untrained weights meet the target
MIXED_MULTIPLE = 8  # tensor cores take 16-bit dimensions in multiples of 8


@dataclass(frozen=True)
class Job:
    """A checked job: what a study, or a trial by itself, needs.

    Args:
        config: the composed config, device and precision settled.
        plan, space, protocol, workload, output: see there.
        trial: the one trial to train instead of a study, or None.
        fingerprint: flat settings that must not change while a study goes on.
        step_time: seconds per step over batch size, from a few timed steps: good enough for an estimate.
        has_horizon: whether the workload's schedule ends with the budget.
    """

    config: DictConfig
    plan: Plan
    space: Space
    protocol: Protocol
    workload: Workload
    output: Output
    trial: TrialSpec | None
    fingerprint: Mapping[str, Any]
    step_time: StepTime
    has_horizon: bool


def prepare(config: DictConfig) -> Job:
    """Check a composed config against this machine, its data and its storage, and return the job.

    Raises:
        BstuneError: one of its kinds, with what was received and what to do.
    """
    config = config.copy()
    config.device = _device(config.device)
    config.precision = resolve_precision(config.precision, config.device)
    target = Target(config.workload.target.metric, config.workload.target.value, config.workload.target.mode)
    check_target(target, config.workload.target.bounds)
    plan = Plan(
        objective=config.search.objective,
        trials=config.search.trials,
        seconds=config.search.seconds,
        wall_seconds=config.search.wall_seconds,
        stratified=config.search.stratified,
        seed=config.seed,
    )
    space = _space(config)
    protocol = _protocol(config, target)
    output = Output(Path(config.output))
    check_writable(output.root / "trials.jsonl", f"output={config.output}")
    build_sampler(config.sampler, plan, 0)
    trial = _single_trial(config, plan)
    if trial is None:
        check_storage(config.storage)
    workload = build_workload(config)
    largest = space.high if trial is None else trial.batch_size
    if largest > workload.train_examples:
        option = "search.batch_size.high" if trial is None else "trial.batch_size"
        raise ConfigError(
            f"batch size {largest} is larger than the training data ({workload.train_examples} examples): "
            f"set {option} to at most {workload.train_examples}"
        )
    check_trainer(config, protocol)
    check_tracking(config)
    # The last check is a rehearsal: a few steps and an evaluation find what only training finds.
    step_time = probe_step_time(space, protocol, workload)
    check_start(workload, protocol, trial or TrialSpec(0, 0, space.low, space.lr(space.low, 0.0), 0.0, 0))
    settings = fingerprint(config, protocol)
    return Job(config, plan, space, protocol, workload, output, trial, settings, step_time, has_horizon(config))


def _device(name: str) -> str:
    try:
        return str(resolve_device(name))
    except ConfigError as error:
        raise ConfigError(str(error).replace("data.device", "device")) from error


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
    if precision == "16-mixed" and not cuda:
        raise ConfigError(f"precision=16-mixed needs a CUDA device, but this is {device}: use bf16-mixed or 32-true")
    if precision == "bf16-mixed" and cuda and not torch.cuda.is_bf16_supported(including_emulation=False):
        raise ConfigError(
            f"precision=bf16-mixed: {torch.cuda.get_device_name()} has no bfloat16: use 16-mixed or 32-true"
        )
    return precision


def check_target(target: Target, bounds: list[float] | None) -> None:
    """Refuse a target that no value of the metric meets, or that every value does.

    Raises:
        ConfigError: for such a target, or for bounds that are not two increasing numbers.
    """
    if bounds is None:
        return
    if len(bounds) != 2 or not bounds[0] < bounds[1]:
        raise ConfigError(f"workload.target.bounds must be two increasing numbers, but got {list(bounds)}")
    best, worst = bounds if target.mode == "min" else bounds[::-1]
    if target.gap(best) > 0:
        raise ConfigError(f"the target {target} cannot be reached: {target.metric} lies in {list(bounds)}")
    if target.gap(worst) <= 0:
        raise ConfigError(
            f"the target {target} is met by every value in {list(bounds)}: check workload.target.mode and value"
        )


def _space(config: DictConfig) -> Space:
    multiple = config.search.batch_size.multiple
    if multiple is None:
        multiple = MIXED_MULTIPLE if config.device.startswith("cuda") and config.precision != "32-true" else 1
    space = Space(
        low=config.search.batch_size.low,
        high=config.search.batch_size.high,
        multiple=multiple,
        sigma=config.scaling.sigma,
        rule=build(config.scaling.rule, "scaling"),
    )
    space.lr(space.low, 0.0)  # a rule that lacks its noise scale says so now
    return space


def _protocol(config: DictConfig, target: Target) -> Protocol:
    settings, device = config.protocol, torch.device(config.device)
    if settings.micro_batch_size is not None:
        micro_batch_sizes(1, settings.micro_batch_size)
    return Protocol(
        target=target,
        budget=Budget(config.budget.steps, config.budget.examples),
        cadence=Cadence(
            ratio=settings.evaluation_ratio,
            share=settings.evaluation_share,
            cost=settings.evaluation_cost,
            near=settings.near,
        ),
        micro_batch_size=settings.micro_batch_size,
        warmup_steps=settings.warmup_steps,
        divergence=settings.divergence,
        trainer={
            **plain(config.trainer),
            "accelerator": device.type,
            "devices": [device.index or 0] if device.type == "cuda" else 1,
            "precision": config.precision,
        },
    )


def check_trainer(config: DictConfig, protocol: Protocol) -> None:
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


def check_start(workload: Workload, protocol: Protocol, spec: TrialSpec) -> None:
    """Refuse a target that untrained weights meet on validation batches of ``START_EXAMPLES`` examples or a few more.

    Raises:
        ConfigError: if the target is met.
    """
    few = _EveryNth(workload.validation_batches, max(1, workload.validation_examples // START_EXAMPLES))
    trainer = evaluate(workload, workload.build_module(spec), protocol, val=few)
    value = metric(trainer, protocol.target.metric)
    if value is not None and protocol.target.reached(value):
        raise met_before_training(protocol.target, value)


def check_tracking(config: DictConfig) -> None:
    """Check that MLflow knows the kind of its URI, without connecting.

    Raises:
        ConfigError: if it does not.
    """
    if config.mlflow.enabled:
        from bstune.tracking import check_uri, tracking_uri

        check_uri(config.mlflow.uri or tracking_uri())


def _single_trial(config: DictConfig, plan: Plan) -> TrialSpec | None:
    batch_size, lr = config.trial.batch_size, config.trial.lr
    if batch_size is None and lr is None:
        return None
    if batch_size is None or lr is None or batch_size < 1 or not lr > 0:
        raise ConfigError(
            "to train one trial, give both trial.batch_size (at least 1) and trial.lr (positive), but got "
            f"trial.batch_size={batch_size} and trial.lr={lr}"
        )
    return TrialSpec(0, 0, batch_size, lr, None, config.trial.seed)


def fingerprint(config: DictConfig, protocol: Protocol) -> dict[str, Any]:
    """Return, flat, the settings that must not change while a study goes on.

    Budgets may, unless the schedule ends with them: trials that ran out of a smaller one are bounds all the same. So
    may the sampler and the storage.
    """
    own = config.copy()
    own.data.root = ""  # where the data lie does not matter: their checksums are pinned
    own.trial.batch_size, own.trial.lr, own.trial.total_steps = 1, 1.0, 1
    values = flatten({name: plain(own[name]) for name in ("workload", "scaling", "protocol", "trainer")})
    for name in ("low", "high", "multiple"):
        values[f"search.batch_size.{name}"] = config.search.batch_size[name]
    for name in ("trials", "budget.steps", "budget.examples"):
        values.pop(f"workload.{name}", None)
    if has_horizon(config):
        values |= flatten({"budget": plain(config.budget)})
    return {
        **values,
        "search.objective": config.search.objective,
        "precision": config.precision,
        "device": device_name(protocol.trainer),
        "seed": config.seed,
    }


def has_horizon(config: DictConfig) -> bool:
    """Return whether the workload's module depends on the trial's number of steps, as a schedule with an end does."""
    modules = []
    for total_steps in (1, 2):
        own = config.copy()
        own.trial.batch_size, own.trial.lr, own.trial.total_steps = 1, 1.0, total_steps
        modules.append(plain(own.workload.module))
    return modules[0] != modules[1]


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested mappings as one, its keys joined by dots."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        name = f"{prefix}{key}"
        flat.update(flatten(value, f"{name}.") if isinstance(value, Mapping) else {name: value})
    return flat
