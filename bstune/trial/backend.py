"""What runs a study's trials: the interface, and the target, protocol and space that a config gives every backend."""

from collections.abc import Callable, Mapping
from typing import Any

from omegaconf import DictConfig

from bstune.config import budget_of, build, is_replayed, plain, tuned
from bstune.core.files import Output
from bstune.core.records import EvaluationSchedule, Target, TrialProtocol, TrialResult, TrialSpec
from bstune.core.search_space import Space

MIXED_MULTIPLE = 8  # tensor cores take 16-bit dimensions in multiples of 8
FRONTIER = "bstune.search.sampler.FrontierSampler"


class TrialBackend:
    """Runs a study's trials; give one of your own to :func:`bstune.study.prepare.prepare`.

    A subclass sets ``step_time`` and defines ``run``; the other attributes and methods have defaults.

    Attributes:
        step_time: seconds per training step at a batch size; the sampler's tau(B) and the printed estimate use it.
        device: name of the device, as in the trials' records.
        description: where trials run, in words.
        versions: of the packages that results depend on.
        frozen_settings: flat settings that, besides the config's own, must not change while a study goes on.
        stops: whether a trial may be stopped early; not where a schedule ends with the budget.
        validates_on_test: whether the target is measured on the published test set.
        evaluation_share: seconds of evaluation per second of training, for the estimate.
        lr_range: smallest and largest learning rate.
        gradient_bytes: bytes that an all-reduce takes; None where nothing is trained.
        train_examples: length of the training data; None where nothing is trained.
        notes: further lines of the printed plan.
    """

    step_time: Callable[[float], float]
    device: str = ""
    description: str = ""
    versions: Mapping[str, str] = {}
    frozen_settings: Mapping[str, Any] = {}
    stops: bool = True
    validates_on_test: bool = False
    evaluation_share: float = 0.0
    lr_range: tuple[float, float] = (0.0, float("inf"))
    gradient_bytes: int | None = None
    train_examples: int | None = None
    notes: tuple[str, ...] = ()

    def run(self, spec: TrialSpec, folder: Output | None, resumed_from: TrialResult | None) -> TrialResult:
        """Run one trial and return its record.

        Args:
            spec: batch size, learning rate, seed and further hyperparameters; ``max_steps`` replaces the budget.
            folder: for a checkpoint and the state of a stopped trial; None: nothing is written.
            resumed_from: record of the trial that this one continues; None: it starts afresh.
        """
        raise NotImplementedError

    def test(self, spec: TrialSpec, folder: Output) -> Mapping[str, float]:
        """Return the test metrics of a trial that reached the target; empty where there is nothing to test."""
        return {}

    def resumable(self, number: int, folder: Output) -> bool:
        """Return whether stopped trial ``number`` can be continued from what it left in the folder."""
        return True

    def longest(self, batch_size: int, protocol: TrialProtocol) -> int:
        """Return the steps of a trial that never reaches the target, for the estimate."""
        return protocol.budget.last_step(batch_size)


def make_target(config: DictConfig) -> Target:
    """Return the workload's target."""
    return Target(config.workload.target.metric, config.workload.target.value, config.workload.target.mode)


def make_protocol(config: DictConfig) -> TrialProtocol:
    """Return what stays fixed in every trial of a config whose device and precision are resolved."""
    options = config.protocol
    return TrialProtocol(
        target=make_target(config),
        budget=budget_of(config),
        evaluation_schedule=EvaluationSchedule(
            ratio=options.evaluation_ratio,
            share=options.evaluation_share,
            cost=options.evaluation_cost,
            near=options.near,
        ),
        micro_batch_size=options.micro_batch_size,
        warmup_steps=options.warmup_steps,
        divergence=options.divergence,
        noise_scale_every=options.noise_scale_every,
        compile=config.compile,
        trainer={} if is_replayed(config) else _trainer_options(config),
    )


def _trainer_options(config: DictConfig) -> dict[str, Any]:
    kind, _, index = str(config.device).partition(":")
    return {
        **plain(config.trainer),
        "accelerator": kind,
        "devices": [int(index or 0)] if kind == "cuda" else 1,
        "precision": config.precision,
    }


def make_space(config: DictConfig, lr_range: tuple[float, float] = (0.0, float("inf"))) -> Space:
    """Return what is searched; a rule that lacks its noise scale raises ConfigError."""
    multiple = config.search.batch_size.multiple
    if multiple is None:
        multiple = MIXED_MULTIPLE if config.device.startswith("cuda") and config.precision != "32-true" else 1
    space = Space(
        low=config.search.batch_size.low,
        high=config.search.batch_size.high,
        multiple=multiple,
        sigma=config.scaling.sigma,
        rule=build(config.scaling.rule, "scaling"),
        octaves=config.scaling.octaves if config.sampler.get("_target_") == FRONTIER else None,
        lr_low=lr_range[0],
        lr_high=lr_range[1],
        tunables=tuned(config),
    )
    space.lr(space.low, 0.0)
    return space
