"""What runs a study's trials: the interface, and what a config gives every backend.

That is the target, the protocol and the space.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import TYPE_CHECKING, Any

from bstune.core.errors import ConfigError
from bstune.core.evaluation_schedule import EvaluationSchedule
from bstune.core.records import CUDA_GRAPH_MODES, StepsOf, TrialProtocol, TrialResult, TrialSpec
from bstune.core.search_space import Space, Tunable
from bstune.hydra_recipe import instantiate, instantiate_partial
from bstune.options import StudyOptions, option_at
from bstune.recipe import Recipe
from bstune.system.files import Output

if TYPE_CHECKING:
    from optuna.samplers import BaseSampler

# Arguments of the Trainer that define a trial: what sets each instead. Another value would change a
# trial unseen.
_LENGTH = "how long a trial is, is set by budget.steps and budget.examples"
_DEVICE = "the device is set by device=cpu, cuda or cuda:N"
_DEVICES = "devices=N trains with DDP on so many"
_EVALUATION = (
    "when trials are evaluated is set by protocol.evaluation_ratio and protocol.evaluation_share"
)
_EXAMPLES = (
    "a trial trains on all of the training data; let workload.data hold those that it is to have"
)
_QUIET = "trials are quiet: leave it out"
OWNED = {
    "_target_": "here stand the arguments of a Trainer: leave its class out",
    **dict.fromkeys(("max_epochs", "max_steps", "min_epochs", "min_steps"), _LENGTH),
    "max_time": "the seconds of a trial are limited by protocol.trial_seconds",
    "accelerator": _DEVICE,
    **dict.fromkeys(("devices", "num_nodes", "strategy"), _DEVICES),
    "precision": "it is set by precision",
    "accumulate_grad_batches": (
        "batch sizes count all accumulated examples; see protocol.micro_batch_size"
    ),
    **dict.fromkeys(
        ("check_val_every_n_epoch", "val_check_interval", "num_sanity_val_steps"), _EVALUATION
    ),
    **dict.fromkeys(("fast_dev_run", "limit_train_batches", "overfit_batches"), _EXAMPLES),
    "reload_dataloaders_every_n_epochs": "the training data are read once",
    **dict.fromkeys(("barebones", "enable_model_summary", "enable_progress_bar"), _QUIET),
}
# Call-backs of Lightning that choose what a study does.
FINDERS = {
    "LearningRateFinder": "the learning rate",
    "BatchSizeFinder": "the batch size",
    "BatchSizeScaler": "the batch size",
}
# Tensor cores take 16-bit dimensions in multiples of 8.
MIXED_MULTIPLE = 8


@dataclass(frozen=True)
class Timed:
    """How a survey timed the steps whose seconds count."""

    seconds_of: StepsOf
    # The share of its seconds for which it waited for a processor.
    waited: float
    # Of torch; None where a CPU does not train.
    threads: int | None


class TrialBackend:
    """Runs a study's trials; give one of your own to :func:`bstune.study.prepare.prepare`.

    A subclass sets ``step_time`` and defines ``run``; the other attributes and methods have
    defaults.
    """

    # Seconds per training step at a batch size: the sampler's tau(B).
    step_time: Callable[[float], float]
    # Its name, as in the trials' records.
    device: str = ""
    # None: no survey.
    timed: Timed | None = None
    # What its seconds belong to: processors too have models.
    device_kind: str = ""
    # Where trials run, in words.
    description: str = ""
    # Of the packages that results depend on.
    versions: Mapping[str, str] = {}
    # Flat, which besides the config's must not change while a study goes on.
    frozen_settings: Mapping[str, object] = {}
    # Whether a trial may be stopped early; not where its schedule ends with it.
    stops: bool = True
    # Whether a stopped trial can go on from its checkpoint; else it is never asked to.
    continues: bool = True
    # Whether a trial's schedule ends with it: after the spec's max_steps, else with the budget.
    horizon: bool = False
    # Whether the target is measured on the published test set.
    validates_on_test: bool = False
    # Seconds of evaluation per second of training, for the estimate.
    evaluation_share: float = 0.0
    # Smallest and largest learning rate.
    lr_range: tuple[float, float] = (0.0, float("inf"))
    # Bytes that an all-reduce takes; None where nothing is trained.
    gradient_bytes: int | None = None
    # Of the training data; None where nothing is trained, or they have no length.
    train_examples: int | None = None
    # That are trained; None where nothing is.
    parameters: int | None = None
    # Further lines of the printed plan.
    notes: tuple[str, ...] = ()
    # Whether a step has been timed yet.
    knows_step_time: bool = True

    def run(
        self, spec: TrialSpec, folder: Output | None, resumed_from: TrialResult | None
    ) -> TrialResult:
        """Run one trial, which may continue the one that ``resumed_from`` records.

        The spec's ``max_steps`` replaces the budget; a checkpoint and the state of a stopped trial
        go to ``folder``. Both end with :func:`bstune.system.files.own_mark`: a file without it is
        no study's, and stays.
        """
        raise NotImplementedError

    def test(self, spec: TrialSpec, folder: Output) -> Mapping[str, float]:
        """Measure the test metrics of a trial that reached the target.

        Empty where there is nothing to test.
        """
        return {}

    def resumable(self, number: int, folder: Output) -> bool:
        """Say whether a stopped trial can be continued from what it left in the folder."""
        return True

    def look_back(self, done: Sequence[TrialResult], folder: Output) -> None:
        """Take in the finished trials of the study's earlier runs, before it goes on."""

    def check(self, space: Space, trial: TrialSpec | None) -> None:
        """Refuse a space, or the one trial to run instead of a study, that cannot be run."""

    def longest(self, batch_size: int, protocol: TrialProtocol) -> int:
        """Give the steps of a trial that never reaches the target, for the estimate."""
        return protocol.last_step(batch_size)


def sampler_factory(options: StudyOptions) -> "partial[BaseSampler]":
    """Give the sampler without what a study gives it: its space, its seed, its state."""
    factory: partial[BaseSampler] = instantiate_partial(options.sampler, "sampler")
    return factory


def stops_trials(options: StudyOptions) -> bool:
    """Say whether the sampler stops and continues trials, as one with ``max_steps`` does."""
    return hasattr(sampler_class(options), "max_steps")


def chooses_horizons(options: StudyOptions) -> bool:
    """Say whether the sampler chooses each trial's ``max_steps``.

    It does so where the schedule ends with them.
    """
    return "horizon" in getattr(sampler_class(options), "context", ())


def chooses_batch_sizes(options: StudyOptions) -> bool:
    """Say whether the sampler goes through the batch sizes itself, so that none is stratified."""
    return bool(getattr(sampler_class(options), "chooses_batch_sizes", False))


def sampler_class(options: StudyOptions) -> object:
    """Give the sampler's class, or the function that makes it."""
    return getattr(sampler_factory(options), "func", None)


def make_protocol(options: StudyOptions, recipe: Recipe | None) -> TrialProtocol:
    """Make what stays fixed in every trial.

    Args:
        options: whose device and precision are resolved.
        recipe: which builds the user's arguments of the Trainer; None: nothing is trained.
    """
    protocol = options.protocol
    replays_graphs = options.device.startswith("cuda") and options.compile in CUDA_GRAPH_MODES
    if replays_graphs and protocol.micro_batch_size is not None:
        raise ConfigError(
            f"compile={options.compile} replays CUDA graphs, which overwrite the gradients of one "
            "micro-batch with the next one's: set compile=max-autotune-no-cudagraphs or default, "
            "or protocol.micro_batch_size=null"
        )
    trainer: dict[str, Any] = {}
    if recipe is not None:
        kind, _, index = options.device.partition(":")
        devices = [int(index or 0)] if kind == "cuda" else 1
        trainer = {**trainer_arguments(options, recipe), "accelerator": kind, "devices": devices}
        if not _has_precision(trainer.get("plugins")):
            # Lightning refuses it beside a plug-in of its kind.
            trainer["precision"] = options.precision
    # torch.compile captures the graphs itself.
    captured_by_torch = protocol.fast == "graph" and options.compile in CUDA_GRAPH_MODES
    target = options.workload.target.target
    if options.search.objective == "loss":
        # Only the budget ends a trial.
        target = target.never_met
    return TrialProtocol(
        target=target,
        budget=options.budget.budget,
        evaluation_schedule=EvaluationSchedule(
            ratio=protocol.evaluation_ratio,
            share=protocol.evaluation_share,
            cost=protocol.evaluation_cost,
            near=protocol.close_to_target,
        ),
        micro_batch_size=protocol.micro_batch_size,
        warmup_steps=protocol.warmup_steps,
        divergence=protocol.divergence,
        noise_scale_every=protocol.noise_scale_every,
        compile=options.compile,
        trainer=trainer,
        fast="auto" if captured_by_torch else protocol.fast,
        devices=options.devices,
    )


def _has_precision(plugins: object) -> bool:
    """Say whether a plug-in, or one of several, sets the precision."""
    several = plugins if isinstance(plugins, list | tuple) else [plugins]
    names = set[str]()
    for plugin in several:
        # By name: the classes of Lightning's two packages are different ones.
        names.update(base.__name__ for base in type(plugin).__mro__)
    return "Precision" in names


def trainer_arguments(options: StudyOptions, recipe: Recipe) -> dict[str, Any]:
    """Give the user's arguments of the Trainer; those of the workload stand over the others.

    ConfigError for an argument that would change what a trial is.
    """
    for name in ("trainer", "workload.trainer"):
        given = option_at(options, name)
        assert isinstance(given, Mapping)  # noqa: S101 (an option that is a node)
        for argument in given:
            if argument in OWNED:
                raise ConfigError(f"{name}.{argument} is bstune's own: {OWNED[argument]}")
    arguments: dict[str, Any] = recipe.trainer()
    for name in ("callbacks", "logger"):
        # By name, as Hydra's groups are merged.
        if isinstance(arguments.get(name), Mapping):
            arguments[name] = list(arguments[name].values())
    refuse_finders(arguments.get("callbacks"))
    if arguments.get("limit_val_batches", 1) == 0:
        raise ConfigError(
            "trainer.limit_val_batches=0 leaves nothing to evaluate, and a trial ends by its "
            "metric: leave it out"
        )
    return arguments


def refuse_finders(callbacks: object) -> None:
    """Refuse call-backs, one or a list of them, that set what bstune sets."""
    several = callbacks if isinstance(callbacks, list | tuple) else [callbacks]
    for callback in several:
        for base in type(callback).__mro__:
            if base.__name__ in FINDERS:
                raise ConfigError(
                    f"trainer: the call-back {type(callback).__name__} sets "
                    f"{FINDERS[base.__name__]}, which bstune sets: leave it out"
                )


def make_space(options: StudyOptions, lr_range: tuple[float, float] = (0.0, float("inf"))) -> Space:
    """Make what is searched; a rule that lacks its noise scale raises ConfigError."""
    searched = options.search.batch_size
    multiple = searched.multiple
    if multiple is None:
        is_mixed = options.device.startswith("cuda") and options.precision != "32-true"
        multiple = MIXED_MULTIPLE if is_mixed else 1
    tunables = []
    for name in options.search.tune:
        tunables.append(Tunable(name, **options.workload.tunable[name].model_dump()))
    space = Space(
        low=searched.low,
        high=searched.high,
        multiple=multiple,
        sigma=options.scaling.lr_octaves_sigma,
        # A call through Hydra takes 0.1 ms.
        rule=cache(instantiate(options.scaling.rule, "scaling")),
        octaves=options.scaling.lr_octaves if stops_trials(options) else None,
        lr_low=lr_range[0],
        lr_high=lr_range[1],
        tunables=tuple(tunables),
    )
    for batch_size in (space.low, space.high):
        try:
            lr = space.rule(batch_size)
            usable = 0.0 < lr < math.inf
        except (ArithmeticError, TypeError, ValueError) as error:
            raise ConfigError(
                f"scaling.rule cannot be used at batch size {batch_size}: {error}"
            ) from error
        if not usable:
            raise ConfigError(
                f"scaling.rule must return a positive number, but got {lr} at batch size "
                f"{batch_size}"
            )
    return space
