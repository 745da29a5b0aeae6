"""The interface of what runs a study's trials, and what every such backend takes from a config.

A config gives the protocol (with the target), the Trainer's arguments and the search space.
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
from bstune.hydra_recipe import instantiate, instantiate_partial, named_target
from bstune.options import StudyOptions, option_at
from bstune.recipe import Recipe
from bstune.result.values import TrialPoint
from bstune.system.console import listing
from bstune.system.files import Output

if TYPE_CHECKING:
    from optuna.samplers import BaseSampler

# Arguments of the Trainer that bstune sets, each with the option that the user sets instead. A
# value of the user's would change a trial unseen.
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
# Those of the project's own training that no option of a study replaces. They say how long a
# training lasts and how it is watched, which a study decides by itself. No step computes anything
# else for them, so that bstune.tune leaves them out, as bstune lightning does.
LEFT_OUT = frozenset(
    {
        "min_epochs",
        "min_steps",
        "max_time",
        "check_val_every_n_epoch",
        "val_check_interval",
        "num_sanity_val_steps",
        "reload_dataloaders_every_n_epochs",
        "barebones",
        "enable_model_summary",
        "enable_progress_bar",
    }
)
# Call-backs of Lightning that choose a value which the study searches, each with that value.
FINDERS = {
    "LearningRateFinder": "the learning rate",
    "BatchSizeFinder": "the batch size",
    "BatchSizeScaler": "the batch size",
}
# Tensor cores take 16-bit dimensions in multiples of 8.
MIXED_MULTIPLE = 8


@dataclass(frozen=True)
class Timed:
    """How a survey timed the steps whose seconds the study uses."""

    # The loop that was timed.
    seconds_of: StepsOf
    # The share of the timed seconds in which the process waited for a processor.
    waited: float
    # Torch's number of threads; None where training is not on a CPU.
    threads: int | None


# Writes the command that trains a point, in at most so many steps.
JobCommand = Callable[[TrialPoint, int], str]


class TrialBackend:
    """Runs a study's trials; give one of your own to :func:`bstune.study.prepare.prepare`.

    A subclass sets ``step_time`` and defines ``run``; the other attributes and methods have
    defaults.
    """

    # The seconds of a training step at a batch size: the sampler's tau(B).
    step_time: Callable[[float], float]
    # The device's name, as the trials' records have it.
    device: str = ""
    # How a survey timed the steps; None where there was no survey.
    timed: Timed | None = None
    # The device that the seconds belong to; on a CPU the processor's model is part of it.
    device_kind: str = ""
    # Where trials run, in words for the printed plan.
    description: str = ""
    # The version of each package that results depend on.
    versions: Mapping[str, str] = {}
    # Settings beside the config's that must not change while a study goes on, by dotted name.
    frozen_settings: Mapping[str, object] = {}
    # Whether a trial may be stopped early. It may not where its schedule ends with the trial.
    stops: bool = True
    # Whether a stopped trial can go on from its checkpoint. Where it cannot, none is asked to.
    continues: bool = True
    # Whether a trial's learning rate schedule ends with the trial: after the spec's max_steps, or
    # with the budget where the spec has none.
    horizon: bool = False
    # Whether the target is measured on the published test set.
    validates_on_test: bool = False
    # Whether the user's own loop trains, in the program that has the study.
    trains_in_loop: bool = False
    # Writes the command that trains a point, where trials are jobs of a Hydra application.
    job_command: JobCommand | None = None
    # Seconds of evaluation per second of training, by which a study's seconds are estimated.
    evaluation_share: float = 0.0
    # The smallest and the largest learning rate that trials can have.
    lr_range: tuple[float, float] = (0.0, float("inf"))
    # Examples in the training data; None where nothing is trained, or they have no length.
    train_examples: int | None = None
    # The number of trained parameters; None where nothing is trained.
    parameters: int | None = None
    # Further lines of the printed plan.
    notes: tuple[str, ...] = ()
    # Whether any step has been timed yet. Before, ``step_time`` is no more than a placeholder.
    knows_step_time: bool = True
    # Whether an objective of time may yet become one of steps, as no trial has told seconds so far.
    objective_is_open: bool = False

    def run(
        self, spec: TrialSpec, folder: Output | None, resumed_from: TrialResult | None
    ) -> TrialResult:
        """Run one trial and give its record.

        The spec's ``max_steps``, where it has one, replaces the budget.

        Args:
            spec: of the trial.
            folder: gets the checkpoint of a trial that reached the target, and the state of one
                that was stopped. Both files end with :func:`bstune.system.files.own_mark`: a study
                removes no file without it. None: nothing is written.
            resumed_from: the record of the stopped trial that this one continues; None: the trial
                starts afresh.
        """
        raise NotImplementedError

    def test(self, spec: TrialSpec, folder: Output) -> Mapping[str, float]:
        """Measure the test metrics, by name, of a trial that reached the target.

        They are empty where there is nothing to test.
        """
        return {}

    def resumable(self, number: int, folder: Output) -> bool:
        """Whether the stopped trial ``number`` can be continued from what it left in the folder."""
        return True

    def look_back(self, done: Sequence[TrialResult], folder: Output) -> None:
        """Take in the finished trials of the study's earlier runs, before it goes on."""

    def check(self, space: Space, trial: TrialSpec | None) -> None:
        """Raise a ConfigError for a space that cannot be searched.

        ``trial`` is the only trial to run, where there is to be no study: then it is checked.
        """

    def longest(self, batch_size: int, protocol: TrialProtocol) -> int:
        """Give the steps of a trial that never reaches the target.

        A study's time is estimated from them.
        """
        return protocol.last_step(batch_size)


def sampler_factory(options: StudyOptions) -> "partial[BaseSampler]":
    """Give the config's sampler as a factory, to be called with the study's space and seed."""
    factory: partial[BaseSampler] = instantiate_partial(options.sampler, "sampler")
    return factory


def stops_trials(options: StudyOptions) -> bool:
    """Whether the sampler stops and continues trials: one that has ``max_steps`` does."""
    return hasattr(sampler_class(options), "max_steps")


def chooses_horizons(options: StudyOptions) -> bool:
    """Whether the sampler chooses the step at which each trial's schedule ends, its horizon."""
    # A sampler lists what it asks of the study in ``context``. One that asks whether schedules end
    # with their trials (``horizon``) chooses where.
    return "horizon" in getattr(sampler_class(options), "context", ())


def chooses_batch_sizes(options: StudyOptions) -> bool:
    """Whether the sampler itself goes through the batch sizes.

    For one that does not, and that stops no trials, the study fixes each trial's batch size.
    """
    return bool(getattr(sampler_class(options), "chooses_batch_sizes", False))


def sampler_class(options: StudyOptions) -> object:
    """Give the config's sampler class, or the function that makes a sampler."""
    return named_target(options.sampler, "sampler")


def make_protocol(options: StudyOptions, recipe: Recipe | None) -> TrialProtocol:
    """Make the protocol, which holds all that stays fixed in every trial.

    Args:
        options: whose device and precision are resolved.
        recipe: builds the user's arguments of the Trainer; None: nothing is trained.

    Raises:
        ConfigError: for CUDA graphs together with accumulated micro-batches, and for an argument
            of the Trainer that bstune sets.
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
        trainer = _all_trainer_arguments(options, recipe)
    # Where torch.compile captures CUDA graphs itself, bstune must not capture the steps as well.
    captured_by_torch = protocol.fast == "graph" and options.compile in CUDA_GRAPH_MODES
    target = options.workload.target.target
    if options.search.objective == "loss":
        # Trials are compared at the end of the budget, so no value of the metric ends one.
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
    """Whether one of the Trainer's plug-ins, given alone or in a list, sets the precision."""
    several = plugins if isinstance(plugins, list | tuple) else [plugins]
    names = set[str]()
    for plugin in several:
        # They are known by name, as Lightning's two packages have different classes.
        names.update(base.__name__ for base in type(plugin).__mro__)
    return "Precision" in names


def _all_trainer_arguments(options: StudyOptions, recipe: Recipe) -> dict[str, Any]:
    """Give the user's arguments of the Trainer, with those of the device and the precision."""
    kind, _, index = options.device.partition(":")
    # Lightning takes the numbers of CUDA devices, but a count of processes on a CPU.
    devices = [int(index or 0)] if kind == "cuda" else 1
    trainer = {**trainer_arguments(options, recipe), "accelerator": kind, "devices": devices}
    # Lightning refuses the argument ``precision`` beside a plug-in that sets the precision.
    if not _has_precision(trainer.get("plugins")):
        trainer["precision"] = options.precision
    return trainer


def trainer_arguments(options: StudyOptions, recipe: Recipe) -> dict[str, Any]:
    """Give the user's arguments of the Trainer, by name.

    Where ``trainer`` and ``workload.trainer`` set the same one, the workload's is taken. A
    ConfigError refuses an argument that would change what a trial is.
    """
    # Arguments that bstune sets itself, each with the reason to leave it out.
    owned = dict[str, str]()
    for name in ("trainer", "workload.trainer"):
        given = option_at(options, name)
        assert isinstance(given, Mapping)  # noqa: S101 (an option that is a node)
        for argument in given:
            if argument in OWNED:
                owned[f"{name}.{argument}"] = OWNED[argument]
    if owned:
        raise ConfigError(owned_in_words(owned))
    arguments: dict[str, Any] = recipe.trainer()
    for name in ("callbacks", "logger"):
        # Hydra merges such groups as mappings from names to objects.
        if isinstance(arguments.get(name), Mapping):
            arguments[name] = list(arguments[name].values())
    refuse_rate_and_batch_size_finders(arguments.get("callbacks"))
    if arguments.get("limit_val_batches", 1) == 0:
        raise ConfigError(
            "trainer.limit_val_batches=0 leaves nothing to evaluate, and a trial ends by its "
            "metric: leave it out"
        )
    return arguments


def owned_in_words(reasons: Mapping[str, str]) -> str:
    """Say that arguments of the Trainer are bstune's own, those of one reason together.

    ``reasons``: from :data:`OWNED`, by the argument's name.
    """
    names_of = dict[str, list[str]]()
    for name, reason in reasons.items():
        names_of.setdefault(reason, []).append(name)
    parts = list[str]()
    for reason, names in names_of.items():
        verb = "is" if len(names) == 1 else "are"
        parts.append(f"{listing(names)} {verb} bstune's own: {reason}")
    return "; ".join(parts)


def refuse_rate_and_batch_size_finders(callbacks: object) -> None:
    """Raise a ConfigError for a call-back, alone or in a list, that sets a value of bstune's.

    These are the learning rate and the batch size, which Lightning's finders set.
    """
    several = callbacks if isinstance(callbacks, list | tuple) else [callbacks]
    for callback in several:
        # They are known by name, as Lightning's two packages have different classes.
        for base in type(callback).__mro__:
            if base.__name__ in FINDERS:
                raise ConfigError(
                    f"trainer: the call-back {type(callback).__name__} sets "
                    f"{FINDERS[base.__name__]}, which bstune sets: leave it out"
                )


def make_space(options: StudyOptions, lr_range: tuple[float, float] = (0.0, float("inf"))) -> Space:
    """Make the search space: the batch sizes, the learning rates and what is tuned besides.

    Args:
        options: whose device and precision are resolved.
        lr_range: the smallest and the largest learning rate that trials can have.

    Raises:
        ConfigError: for a scaling rule that gives no positive rate at the smallest or the largest
            batch size, as one without the noise scale that it needs.
    """
    searched = options.search.batch_size
    multiple = searched.multiple
    # Left open, it suits the device: in mixed precision a GPU is fast at some multiples only.
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
        # The standard deviation of learning rates around the rule's, in octaves.
        sigma=options.scaling.lr_octaves_sigma,
        # A call of the rule through Hydra takes 0.1 ms, so that its rates are remembered.
        rule=cache(instantiate(options.scaling.rule, "scaling")),
        # How far learning rates may lie from the rule's, in octaves; None: three sigma. Only
        # bstune's own sampler, which stops trials, has a bound of its own.
        octaves=options.scaling.lr_octaves if stops_trials(options) else None,
        lr_low=lr_range[0],
        lr_high=lr_range[1],
        tunables=tuple(tunables),
    )
    _check_rule(space)
    return space


def _check_rule(space: Space) -> None:
    """Raise a ConfigError for a scaling rule without a positive rate at both ends of the space."""
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
