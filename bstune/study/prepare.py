"""Everything that can be wrong with a job, found before anything is written."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from bstune.config import budget_of, build, flatten, is_replayed, plain, tuned
from bstune.core.errors import ConfigError
from bstune.core.files import Output, check_writable
from bstune.core.records import EvaluationSchedule, Target, TrialProtocol, TrialSpec
from bstune.core.search_space import Space
from bstune.core.step_time import fit_sync
from bstune.study.plan import SearchBudget
from bstune.study.runner import Runner, Settled
from bstune.study.storage import build_sampler, check_storage, is_own

MIXED_MULTIPLE = 8  # tensor cores take 16-bit dimensions in multiples of 8


@dataclass(frozen=True)
class Job:
    """A checked job: what a study, or a trial by itself, needs.

    Args:
        config: the composed config, device and precision settled.
        plan, space, protocol, output, runner: see there.
        trial: the one trial to run instead of a study, or None.
        fingerprint: flat settings that must not change while a study goes on.
    """

    config: DictConfig
    plan: SearchBudget
    space: Space
    protocol: TrialProtocol
    output: Output
    runner: Runner
    trial: TrialSpec | None
    fingerprint: Mapping[str, Any]


def prepare(config: DictConfig, say: Callable[[str], None] = lambda line: None) -> Job:
    """Check a composed config against this machine, its data and its storage, and return the job.

    Args:
        config: the composed config.
        say: is told, in lines, what takes long.

    Raises:
        BstuneError: one of its kinds, with what was received and what to do.
    """
    settled = _settle(config)
    config = settled.config
    target = make_target(config)
    check_target(target, config.workload.target.bounds)
    plan = SearchBudget(
        objective=config.search.objective,
        trials=config.search.trials,
        seconds=config.search.seconds,
        wall_seconds=config.search.wall_seconds,
        stratified=config.search.stratified,
        seed=config.seed,
        precision=config.search.precision,
        confirmations=config.search.confirmations,
        finalists=config.search.finalists,
    )
    space = make_space(config, settled.lr_range)
    protocol = make_protocol(config, target, settled.trainer)
    output = Output(Path(config.output))
    check_writable(output.root / "trials.jsonl", f"output={config.output}")
    build_sampler(config.sampler, plan, 0)
    trial = _single_trial(config)
    if trial is None:
        check_storage(config.storage)
    check_tracking(config)
    check_hardware(config)
    check_workers(config, search=trial is None)
    runner = settled.open(config, plan, space, protocol, trial, say)
    if runner.batch_sizes is not None:
        space = replace(space, low=runner.batch_sizes[0], high=runner.batch_sizes[1])
    return Job(config, plan, space, protocol, output, runner, trial, fingerprint(config, runner.identity))


def _settle(config: DictConfig) -> Settled:
    """Settle the workload by its kind; torch and lightning are imported for one that is trained."""
    if is_replayed(config):
        from bstune.study import replaying

        return replaying.settle(config)
    from bstune.study import training

    return training.settle(config)


def make_target(config: DictConfig) -> Target:
    """Return the workload's target. ConfigError is raised for an impossible one."""
    return Target(config.workload.target.metric, config.workload.target.value, config.workload.target.mode)


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


def make_space(config: DictConfig, lr_range: tuple[float, float]) -> Space:
    """Return what is searched.

    Raises:
        ConfigError: for an impossible range, or a rule that cannot be used.
    """
    multiple = config.search.batch_size.multiple
    if multiple is None:
        multiple = MIXED_MULTIPLE if config.device.startswith("cuda") and config.precision != "32-true" else 1
    space = Space(
        low=config.search.batch_size.low,
        high=config.search.batch_size.high,
        multiple=multiple,
        sigma=config.scaling.sigma,
        rule=build(config.scaling.rule, "scaling"),
        octaves=config.scaling.octaves if is_own(config.sampler) else None,
        lr_low=lr_range[0],
        lr_high=lr_range[1],
        tunables=tuned(config),
    )
    space.lr(space.low, 0.0)  # a rule that lacks its noise scale says so now
    for name in (
        "level_sigma",
        "exponent_sigma",
        "noise_scale",
    ):  # the report's posterior takes them whatever the sampler
        value = config.scaling[name]
        if value is not None and not (math.isfinite(value) and value > 0):
            raise ConfigError(f"scaling.{name} must be a positive number, but got {value}")
    return space


def make_protocol(config: DictConfig, target: Target, trainer: Mapping[str, Any]) -> TrialProtocol:
    """Return what stays fixed in every trial.

    Raises:
        ConfigError: for an impossible budget or evaluation rule.
    """
    settings = config.protocol
    return TrialProtocol(
        target=target,
        budget=budget_of(config),
        evaluation_schedule=EvaluationSchedule(
            ratio=settings.evaluation_ratio,
            share=settings.evaluation_share,
            cost=settings.evaluation_cost,
            near=settings.near,
        ),
        micro_batch_size=settings.micro_batch_size,
        warmup_steps=settings.warmup_steps,
        divergence=settings.divergence,
        noise_scale_every=settings.noise_scale_every,
        compile=config.compile,
        trainer=trainer,
    )


def check_hardware(config: DictConfig) -> None:
    """Check the settings of the hardware's survey.

    Raises:
        ConfigError: for a number that cannot be.
    """
    settings = flatten({"hardware": plain(config.hardware)})
    least = {
        "hardware.memory.steps": 1,
        "hardware.memory.verify": 0,
        "hardware.step_time.rungs": 2,
        "hardware.step_time.repeats": 1,
        "hardware.step_time.min_steps": 1,
        "hardware.step_time.max_steps": 1,
        "hardware.step_time.warmup_steps": 0,
    }
    for name, value in least.items():
        if settings[name] < value:
            raise ConfigError(f"{name} must be at least {value}, but got {settings[name]}")
    positive = ("seconds", "memory.limit", "memory.probe_seconds", "step_time.visit_seconds", "ceilings.seconds")
    for name in (f"hardware.{name}" for name in positive):
        if settings[name] is not None and not (math.isfinite(settings[name]) and settings[name] > 0):
            raise ConfigError(f"{name} must be positive, but got {settings[name]}")
    if not 0.0 < config.hardware.memory.free_share <= 1.0:
        raise ConfigError(
            f"hardware.memory.free_share must be a share up to 1, but got {config.hardware.memory.free_share}"
        )
    check_scale_out(config.hardware.scale_out)
    shares = dict(config.hardware.memory.relative)
    if not {"cpu", "cuda"} <= shares.keys() or not all(0.0 <= share < 1.0 for share in shares.values()):
        raise ConfigError(f"hardware.memory.relative must be shares under 1 for cpu and cuda, but got {shares}")


def check_workers(config: DictConfig, search: bool) -> None:
    """Check how many trials train side by side.

    Args:
        config: the composed config.
        search: whether there is a search; a trial by itself trains in this process.

    Raises:
        ConfigError: for a number below 1, or several where nothing is trained or no steps are timed alone.
    """
    workers = config.search.workers
    if workers < 1:
        raise ConfigError(f"search.workers must be at least 1, but got {workers}")
    if workers == 1 or not search:
        return
    if is_replayed(config):
        raise ConfigError(
            f"search.workers={workers}: workload {config.workload.name} is answered from recorded runs, in no time: "
            "there is nothing to train side by side; use search.workers=1"
        )
    if not config.hardware.enabled:
        raise ConfigError(
            f"search.workers={workers} needs hardware.enabled=true: trials slow each other down, so that their seconds "
            "per step are those that the survey timed alone; survey the hardware, or use search.workers=1"
        )


def check_scale_out(settings: DictConfig) -> None:
    """Check the settings of the plan for several devices.

    Raises:
        ConfigError, HardwareError: for a number that cannot be.
    """
    if not settings.devices or min(settings.devices) < 1:
        raise ConfigError(f"hardware.scale_out.devices must be numbers of at least 1, but got {list(settings.devices)}")
    if not settings.candidate_ratio > 1:
        raise ConfigError(f"hardware.scale_out.candidate_ratio must be above 1, but got {settings.candidate_ratio}")
    link, wait, seconds = (settings.all_reduce[name] for name in ("bytes_per_second", "latency", "seconds"))
    if link is not None and seconds is not None:
        raise ConfigError("hardware.scale_out.all_reduce: give bytes_per_second or seconds, not both")
    if link is not None and not (math.isfinite(link) and link > 0):
        raise ConfigError(f"hardware.scale_out.all_reduce.bytes_per_second must be positive, but got {link}")
    if not (math.isfinite(wait) and wait >= 0):
        raise ConfigError(f"hardware.scale_out.all_reduce.latency must be at least 0, but got {wait}")
    if not settings.all_reduce.overlap >= 1:
        raise ConfigError(
            f"hardware.scale_out.all_reduce.overlap must be at least 1, but got {settings.all_reduce.overlap}"
        )
    if seconds is not None:
        fit_sync(list(dict(seconds).items()))


def check_tracking(config: DictConfig) -> None:
    """Check that MLflow knows the kind of its URI, without connecting.

    Raises:
        ConfigError: if it does not.
    """
    if config.mlflow.enabled:
        from bstune.study.tracking import check_uri, tracking_uri

        check_uri(tracking_uri(config.mlflow))


def _single_trial(config: DictConfig) -> TrialSpec | None:
    batch_size, lr, seed = config.trial.batch_size, config.trial.lr, config.trial.seed
    if batch_size is None and lr is None:
        return None
    if batch_size is None or lr is None or batch_size < 1 or not lr > 0:
        raise ConfigError(
            "to train one trial, give both trial.batch_size (at least 1) and trial.lr (positive), but got "
            f"trial.batch_size={batch_size} and trial.lr={lr}"
        )
    if seed < 0:
        raise ConfigError(f"trial.seed must be at least 0, but got {seed}")
    return TrialSpec(0, 0, batch_size, lr, None, seed)


def fingerprint(config: DictConfig, identity: Mapping[str, Any]) -> dict[str, Any]:
    """Return, flat, the settings that must not change while a study goes on.

    Budgets may, unless ``identity`` (the runner's) holds them: trials that ran out of a smaller one are bounds all the
    same. So may the sampler and the storage.
    """
    own = config.copy()
    own.data.root = ""  # where the data lie does not matter: their checksums are pinned
    own.trial.batch_size, own.trial.lr, own.trial.total_steps = 1, 1.0, 1
    values = flatten({name: plain(own[name]) for name in ("workload", "scaling", "protocol", "trainer")})
    for name in ("low", "high", "multiple"):
        values[f"search.batch_size.{name}"] = config.search.batch_size[name]
    for name in ("trials", "budget.steps", "budget.examples"):
        values.pop(f"workload.{name}", None)
    # What may be searched is no matter of a study that does not.
    tuned = tuple(f"workload.tunable.{name}." for name in config.search.tune)
    values = {key: v for key, v in values.items() if not key.startswith("workload.tunable") or key.startswith(tuned)}
    return {**values, "search.objective": config.search.objective, "seed": config.seed, **identity}
