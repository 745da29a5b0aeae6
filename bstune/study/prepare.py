"""Everything that can be wrong with a job, found before anything is written."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from bstune.config import budget_of, compose, flatten, instantiate, is_replayed, to_dict, tuned
from bstune.core.errors import ConfigError
from bstune.core.files import Output, check_writable
from bstune.core.records import CUDA_GRAPH_MODES, EvaluationSchedule, Target, TrialProtocol, TrialSpec
from bstune.core.search_space import Space
from bstune.study.plan import SearchBudget
from bstune.study.replaying import complete
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


def compose_checked(arguments: Sequence[str]) -> DictConfig:
    """Return the config of a command line, composed and validated; ConfigError lists all mistakes."""
    return compose(arguments, complete)


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
    plan = SearchBudget(
        objective=config.search.objective,
        trials=config.search.trials,
        seconds=config.search.seconds,
        wall_seconds=config.search.wall_seconds,
        stratified=config.search.stratified,
        seed=config.seed,
        precision=config.search.precision,
        confirmations=config.search.replicates,
        finalists=config.search.candidates,
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
    """Return the workload's target."""
    return Target(config.workload.target.metric, config.workload.target.value, config.workload.target.mode)


def make_space(config: DictConfig, lr_range: tuple[float, float]) -> Space:
    """Return what is searched.

    Raises:
        ConfigError: for a rule that cannot be used.
    """
    multiple = config.search.batch_size.multiple
    if multiple is None:
        multiple = MIXED_MULTIPLE if config.device.startswith("cuda") and config.precision != "32-true" else 1
    space = Space(
        low=config.search.batch_size.low,
        high=config.search.batch_size.high,
        multiple=multiple,
        sigma=config.scaling.lr_octaves_sigma,
        rule=instantiate(config.scaling.rule, "scaling"),
        octaves=config.scaling.lr_octaves if is_own(config.sampler) else None,
        lr_low=lr_range[0],
        lr_high=lr_range[1],
        tunables=tuned(config),
    )
    space.lr(space.low, 0.0)  # a rule that lacks its noise scale says so now
    return space


def make_protocol(config: DictConfig, target: Target, trainer: Mapping[str, Any]) -> TrialProtocol:
    """Return what stays fixed in every trial; ConfigError for CUDA graphs of accumulated gradients."""
    settings = config.protocol
    graphs = trainer.get("accelerator") == "cuda" and config.compile in CUDA_GRAPH_MODES
    if graphs and settings.micro_batch_size is not None:
        raise ConfigError(
            f"compile={config.compile} replays CUDA graphs, which overwrite the gradients of one micro-batch with the"
            " next one's: set compile=max-autotune-no-cudagraphs or default, or protocol.micro_batch_size=null"
        )
    return TrialProtocol(
        target=target,
        budget=budget_of(config),
        evaluation_schedule=EvaluationSchedule(
            ratio=settings.evaluation_ratio,
            share=settings.evaluation_share,
            cost=settings.evaluation_cost,
            near=settings.close_to_target,
        ),
        micro_batch_size=settings.micro_batch_size,
        warmup_steps=settings.warmup_steps,
        divergence=settings.divergence,
        noise_scale_every=settings.noise_scale_every,
        compile=config.compile,
        trainer=trainer,
    )


def check_tracking(config: DictConfig) -> None:
    """Check that MLflow knows the kind of its URI, without connecting.

    Raises:
        ConfigError: if it does not.
    """
    if config.mlflow.enabled:
        from bstune.study.tracking import check_uri, tracking_uri

        check_uri(config.mlflow.uri or tracking_uri())


def _single_trial(config: DictConfig) -> TrialSpec | None:
    batch_size, lr, seed = config.trial.batch_size, config.trial.lr, config.trial.seed
    if batch_size is None:
        return None
    return TrialSpec(0, 0, batch_size, lr, None, seed)


def fingerprint(config: DictConfig, identity: Mapping[str, Any]) -> dict[str, Any]:
    """Return, flat, the settings that must not change while a study goes on.

    Budgets may, unless ``identity`` (the runner's) holds them: trials that ran out of a smaller one are bounds all the
    same. So may the sampler and the storage.
    """
    own = config.copy()
    own.data.root = ""  # where the data lie does not matter: their checksums are pinned
    own.trial.batch_size, own.trial.lr, own.trial.total_steps = 1, 1.0, 1
    values = flatten({name: to_dict(own[name]) for name in ("workload", "scaling", "prior", "protocol", "trainer")})
    for name in ("low", "high", "multiple"):
        values[f"search.batch_size.{name}"] = config.search.batch_size[name]
    for name in ("trials", "budget.steps", "budget.examples"):
        values.pop(f"workload.{name}", None)
    # What may be searched is no matter of a study that does not.
    tuned = tuple(f"workload.tunable.{name}." for name in config.search.tune)
    values = {key: v for key, v in values.items() if not key.startswith("workload.tunable") or key.startswith(tuned)}
    return {**values, "search.objective": config.search.objective, "seed": config.seed, **identity}
