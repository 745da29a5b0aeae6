"""What :class:`bstune.Study` assumes for arguments that are left out: the project's own values.

Each assumption is printed.

>>> bstune.tune(MyModule, MyData())  # doctest: +SKIP
assumed: reference=(64, 0.001): MyData's own batch size, and lr of MyModule; the gain is over these
...
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

from bstune.core.errors import ConfigError
from bstune.core.metric_names import mode_of, parse_target
from bstune.core.records import Budget, Target
from bstune.study.given import (
    PAIR_NEEDED,
    Data,
    GivenObjects,
    Module,
    checked_reference,
    middles_of,
    sorted_trainer,
    without_own_value,
)
from bstune.study.planning.assumed_budget import SCHEDULE_SHARE_IN_WORDS
from bstune.study.planning.plan import QUICK_SECONDS
from bstune.system.console import format_count, format_seconds, listing
from bstune.trial.backend import refuse_rate_and_batch_size_finders
from bstune.trial.lightning.installed import LightningModule
from bstune.trial.own_project.own_values import (
    MOST_EPOCHS,
    OF_NO_EPOCH,
    REFERENCE,
    OwnBatches,
    OwnMetric,
    check_trained_size,
    own_batches,
    own_examples,
    own_metric,
    own_rate,
    rate_of_optimizers,
    rates_by_other_names,
    refusal,
)
from bstune.trial.own_project.python_recipe import (
    OVERRIDE,
    Loaders,
    Trial,
    data_module,
    default_batch_size,
    is_function,
    module_builder,
)

# Batch sizes that are searched begin at this part of the project's own.
SMALLEST_PART = 16
# The budget of a trial for the objective loss, where nothing says how long it is: twenty trials fit
# into the study's time.
BUDGET_SECONDS = QUICK_SECONDS / 20.0
# Arguments of the Trainer that say how the project itself trains, and what is made of them.
TRAINER_LENGTHS = ("max_epochs", "max_steps")
ACCUMULATED = "accumulate_grad_batches"
# What a study of the user's own loop is to be given, as it may stand in a call.
EXAMPLES = {
    "target": 'target="val_loss<=0.1"',
    "batch_sizes": "batch_sizes=(8, 512)",
    "reference": "reference=(32, 0.001)",
    "budget": "budget=bstune.Budget(examples=100_000)",
}
# The batch size with which data are made once, to ask them for their own.
ANY_BATCH_SIZE = 32


@dataclass(frozen=True)
class Stated:
    """The arguments of a study as they were given; None: left out."""

    module: Module | None
    data: Data | None
    target: Target | str | None
    batch_sizes: tuple[int, int] | None
    reference: tuple[int, float] | None
    budget: Budget | None
    trainer: Mapping[str, Any] | None
    tunable: Mapping[str, Any] | None
    seed: int | None
    device: str | None
    # Whether the study's seconds end it.
    is_timed: bool
    objective: str | None = None
    # Whether the options give the budget of the objective loss.
    has_budget: bool = False
    # Whether a rate is set in the module's optimizers.
    overrides_lr: bool = False


@dataclass(frozen=True)
class Completed:
    """The arguments of a study with nothing left out.

    Args:
        given: the arguments.
        quick: whether the study's time is assumed as well, that of ``quick=true``.
        lines: what was assumed, a line each, with the argument that changes it.
        budget_seconds: ``budget.seconds``, which was assumed as well; None: it was not.
    """

    given: GivenObjects
    quick: bool
    lines: tuple[str, ...]
    budget_seconds: float | None = None


def complete(stated: Stated) -> Completed:
    """Complete the arguments of a study: take what is left out from module, data and Trainer.

    Raises:
        ConfigError: where these do not tell; it names the argument to give.
    """
    # What is left out is assumed about the reference, so that it is checked first.
    if stated.reference is not None:
        checked_reference(stated.reference)
    target = _target(stated.target)
    if stated.objective == "loss" and target is not None and not target.is_open:
        raise ConfigError(
            f"objective='loss' seeks the best {target.metric} within a budget, and "
            f"target={str(target)!r} a target: leave one of them out, or give "
            f"target={target.metric!r}"
        )
    needed = {
        "target": target,
        "batch_sizes": stated.batch_sizes,
        "reference": stated.reference,
        "budget": stated.budget,
    }
    left_out = [name for name, value in needed.items() if value is None]
    if left_out and stated.module is not None and stated.data is not None:
        return _from_project(stated, stated.module, stated.data)
    if left_out and (stated.module is None) != (stated.data is None):
        raise ConfigError(PAIR_NEEDED)
    # Without module and data there is nothing to take an argument from.
    sizes = stated.batch_sizes
    reference = stated.reference
    budget = stated.budget
    if target is None or sizes is None or reference is None or budget is None:
        examples = ", ".join(EXAMPLES[name] for name in left_out)
        alone = ""
        if target is None:
            alone = "; a metric alone, as 'val_loss', seeks what your own configuration comes to"
        raise ConfigError(
            f"a study of a loop of yours needs {', '.join(left_out)}, such as {examples}{alone}; "
            "bstune finds these by itself only where it is given module and data"
        )
    given = _given_objects(stated, target, sizes, reference, budget)
    return Completed(given, quick=False, lines=tuple(_lines_on_tunables(stated)))


def _from_project(stated: Stated, module: Module, data: Data) -> Completed:
    """Complete the arguments of a study that has module and data from these."""
    # Arguments of the Trainer that bstune sets are refused here. Those that say how the project
    # itself trains are let through: they become arguments of the study.
    taken = list[str]()
    if stated.budget is None:
        taken += TRAINER_LENGTHS
    if stated.reference is None:
        taken.append(ACCUMULATED)
    sorted_trainer(stated.trainer, taken)
    # Finding out which metric is logged runs the user's call-backs. Those that set the batch size
    # or the rate would change what is to be searched: they are refused first.
    refuse_rate_and_batch_size_finders((stated.trainer or {}).get("callbacks"))
    project = _project_of(stated, module, data)
    _check_batches(project, stated)
    lines = list(_lines_on_tunables(stated))
    reference = stated.reference
    if reference is None:
        reference = _assume_reference(project, stated, lines)
    batch_size = round(reference[0])
    _check_reference(project, stated, batch_size)
    sizes = stated.batch_sizes
    if sizes is None:
        sizes = _assume_batch_sizes(project, batch_size, lines)
    limits = _limits_of_trial(project, stated, batch_size, lines)
    target = _target(stated.target)
    if target is None:
        steps = limits.budget.last_step(batch_size)
        trial = _any_trial(batch_size, reference[1], steps, stated.tunable)
        target = _assume_target(project, stated, trial, lines)
    with_own_trainer = replace(stated, trainer=project.trainer)
    given = _given_objects(with_own_trainer, target, sizes, reference, limits.budget)
    return Completed(
        given=replace(given, assumed_epoch=limits.assumed_epoch),
        quick=limits.quick,
        lines=tuple(lines),
        budget_seconds=limits.budget_seconds,
    )


def _lines_on_tunables(stated: Stated) -> Iterator[str]:
    """Say of each further hyper-parameter with which value the user's own configuration runs."""
    for name, middle in without_own_value(stated.tunable, stated.module).items():
        own = f"{name}={middle:g} in your own configuration, the middle of its range"
        how = f"tunable={{{name!r}: {{..., 'own': VALUE}}}}"
        if stated.module is None:
            yield f"{own}: {how} says another, and your loop trains with trial.{name}"
        else:
            yield f"{own}: the module's class has no default of it there; {how} says it"


def _project_of(stated: Stated, module: Module, data: Data) -> "_Project":
    """Join the user's module, data and Trainer's arguments; a function of the data is called.

    It is called with the user's own batch size. Where that is not stated, any batch size makes data
    that show the rest, such as the number of examples.
    """
    made_for_batch_size: int | None = None
    default: int | None = None
    if is_function(data):
        default = default_batch_size(data)
        made_for_batch_size = default or ANY_BATCH_SIZE
        if stated.reference is not None:
            made_for_batch_size = round(stated.reference[0])
    return _Project(
        module=module,
        data=data_module(data, made_for_batch_size or ANY_BATCH_SIZE),
        made_for_batch_size=made_for_batch_size,
        states_batch_size=default is not None,
        trainer=dict(stated.trainer or {}),
    )


def _check_batches(project: "_Project", stated: Stated) -> None:
    """Refuse data that do not tell the arguments that are left out, and name all of these at once.

    Data that have a batch size of their own must tell it, and allow to be read in another one. Data
    that a function makes for a batch size tell the one that the user runs today by its default.
    """
    # The data need to tell none of the three.
    if stated.reference and stated.batch_sizes and stated.budget:
        return
    batches = project.batches
    if project.has_own_batch_size and batches.problem is None:
        return
    # Data of one batch size tell it, and a function can say it as its default.
    default: int | None = None
    if project.has_own_batch_size and stated.reference is None and _states_rate(stated):
        default = batches.batch_size
    says_batch_size = project.states_batch_size or default is not None
    lacks_reference = stated.reference is None and not says_batch_size
    needed = list[str]()
    if lacks_reference:
        needed.append(_reference_in_words(project, stated))
    # Both are taken from the examples of an epoch.
    if batches.examples is None and not (stated.batch_sizes and stated.budget):
        needed.append(OF_NO_EPOCH)
    if project.has_own_batch_size:
        raise refusal(project.data_name, batches, needed, default)
    arguments = ", ".join(needed)
    if lacks_reference:
        raise ConfigError(
            f"which batch size do you run today? data is a function of it: give {arguments}"
        )
    if needed:
        raise ConfigError(f"give {arguments}: {batches.problem}")


def _states_rate(stated: Stated) -> bool:
    """Whether the module's class, or its optimizers, state the rate that the user runs today."""
    return stated.overrides_lr or (callable(stated.module) and own_rate(stated.module) is not None)


def _check_reference(project: "_Project", stated: Stated, batch_size: int) -> None:
    """Refuse a reference batch size of more examples than the training data.

    Nobody runs it today, and without its run there is nothing to compare with.
    """
    # What is given in full is not looked at here.
    if stated.reference and stated.batch_sizes and stated.budget:
        return
    given: str | None = None
    if stated.reference is not None:
        given = f"reference={stated.reference}"
    check_trained_size(batch_size, project.examples, given)


def _reference_in_words(project: "_Project", stated: Stated) -> str:
    """Write the argument ``reference`` for a refusal: ``reference=(64, learning rate)``.

    Of its two values those stand there that the project tells: the data's batch size, and the rate
    that the module's class has as a default.
    """
    batch_size: int | None = None
    if project.has_own_batch_size:
        batch_size = project.batches.batch_size
    rate: float | None = None
    # A rate that bstune overrides stands in the optimizers, and not in the class.
    if not stated.overrides_lr and callable(stated.module):
        rate = own_rate(stated.module)
    if batch_size is None and rate is None:
        return REFERENCE
    if batch_size is not None:
        batch_size *= int(project.trainer.get(ACCUMULATED) or 1)
    return f"reference=({batch_size or 'batch size'}, {rate or 'learning rate'})"


def _assume_reference(project: "_Project", stated: Stated, lines: list[str]) -> tuple[int, float]:
    """Take the batch size and the learning rate that the project trains with.

    ``lines`` gets a line that says so.
    """
    batch_size = project.take_batch_size()
    reference = batch_size, _rate_run_today(project.module, stated, batch_size)
    lines.append(
        f"reference={reference}: the batch size of {project.data_name} and the learning rate "
        "of your module, as you run it today; the gain is over these"
    )
    return reference


def _assume_batch_sizes(project: "_Project", batch_size: int, lines: list[str]) -> tuple[int, int]:
    """Take a range about the project's own ``batch_size``, up to the whole training data.

    ``lines`` gets a line that says so.
    """
    sizes = max(1, batch_size // SMALLEST_PART), project.examples
    lines.append(
        f"batch_sizes={sizes}: from 1/{SMALLEST_PART} of yours to the whole training data, or "
        "what memory holds"
    )
    return sizes


@dataclass(frozen=True)
class _Limits:
    """The budget of a trial, and what is assumed with it; None: it is not assumed."""

    budget: Budget
    quick: bool = False
    """Whether the study has the time of ``quick=true``."""
    budget_seconds: float | None = None
    """``budget.seconds``, of a trial for the objective loss."""
    assumed_epoch: int | None = None
    """Examples of an epoch; None where the user has stated how long a trial is."""


def _limits_of_trial(
    project: "_Project", stated: Stated, batch_size: int, lines: list[str]
) -> _Limits:
    """Take the budget of a trial from the Trainer's length, or from the time of a short study.

    A budget that is given is taken as it is. ``lines`` gets a line for each thing that is assumed.
    """
    if stated.budget is not None:
        return _Limits(stated.budget)
    length = project.take_length(batch_size)
    # The options may give the seconds of a budget, for the objective loss.
    lacks_budget = not stated.has_budget
    # Neither the call nor the project's Trainer says how long a training is.
    lacks_length = lacks_budget and not length.is_own
    quick = lacks_length and not stated.is_timed
    if quick:
        lines.append(
            f"wall_seconds={QUICK_SECONDS:g}: the study takes {format_seconds(QUICK_SECONDS)}, "
            "as neither it nor trainer={'max_epochs': N} says how long"
        )
    budget_seconds: float | None = None
    if stated.objective == "loss" and lacks_length:
        budget_seconds = BUDGET_SECONDS
        lines.append(
            f"budget.seconds={budget_seconds:g}: of training, after which trials are compared; "
            "options=['budget.seconds=SECONDS'] sets others"
        )
    elif lacks_budget:
        limit = ""
        if lacks_length:
            limit = f"; a schedule that ends with its trial has {SCHEDULE_SHARE_IN_WORDS} at most"
        lines.append(
            f"budget=bstune.Budget(examples={length.examples}), after which a trial gives up: "
            f"{length.why}{limit}"
        )
    # A budget that the user has not stated may be shortened to fit into the study's time.
    assumed_epoch: int | None = None
    if lacks_length:
        assumed_epoch = project.examples
    return _Limits(
        budget=Budget(examples=length.examples),
        quick=quick,
        budget_seconds=budget_seconds,
        assumed_epoch=assumed_epoch,
    )


def _assume_target(project: "_Project", stated: Stated, trial: Trial, lines: list[str]) -> Target:
    """Find the metric that the module of a trial logs, and make it a target without a value.

    ``lines`` gets a line that says so.
    """
    build = module_builder(
        project.module, list(stated.tunable or ()), overrides_lr=stated.overrides_lr
    )
    built = build(trial)
    accelerator = "cpu" if stated.device == "cpu" else "auto"
    metric = own_metric(built, project.data, project.trainer, accelerator)
    lines.append(_line_on(metric, stated.objective))
    # The first trial will set the goal. Until then it is one that no value meets, in place of 0.
    return Target(metric.name, 0.0, metric.mode).never_met


@dataclass(frozen=True)
class _Length:
    """How long a trial is.

    Args:
        examples: on which it trains at most.
        is_own: whether the Trainer's arguments say so.
        why: why it is so long, in words.
    """

    examples: int
    is_own: bool
    why: str


@dataclass(frozen=True)
class _Project:
    """The user's module and data, and the arguments of the Trainer.

    The methods ``take_...`` remove the arguments that bstune itself acts on.
    """

    module: Module
    data: Any
    # The batch size for which the user's function has made the data. None where the user gave the
    # data themselves, which have a batch size of their own.
    made_for_batch_size: int | None
    # Whether the user's function says by its default which batch size is run today.
    states_batch_size: bool
    trainer: dict[str, Any]

    @property
    def has_own_batch_size(self) -> bool:
        """Whether the data have a batch size of their own: no function made them for one."""
        return self.made_for_batch_size is None

    @property
    def data_name(self) -> str:
        """The name of the data module's class, or "your data" for loaders."""
        return "your data" if isinstance(self.data, Loaders) else type(self.data).__name__

    @cached_property
    def batches(self) -> OwnBatches:
        """The batches on which the project trains. The data are set up to see them."""
        return own_batches(self.data, self.data_name, self.made_for_batch_size)

    @property
    def examples(self) -> int:
        """The examples of an epoch."""
        examples = self.batches.examples
        assert examples is not None  # noqa: S101 (_check_batches has refused it)
        return examples

    def take_batch_size(self) -> int:
        """Give the project's batch size: the data's, times the Trainer's accumulated batches."""
        # A trial takes whole batches of this size: its Trainer must not accumulate once more.
        accumulated = self.trainer.pop(ACCUMULATED, None) or 1
        batch_size = self.batches.batch_size
        assert batch_size is not None  # noqa: S101 (_check_batches has refused it)
        return batch_size * int(accumulated)

    def take_length(self, batch_size: int) -> _Length:
        """Give the length of a trial by the Trainer's arguments, and take them out of these.

        Where they set no length, a trial is so long that the study's time ends it.
        """
        examples = own_examples(self.trainer, batch_size, self.examples)
        # The study ends trials by its budget and target: the Trainer's own limits must not.
        for length in TRAINER_LENGTHS:
            self.trainer.pop(length, None)
        epoch = f"epochs of {format_count(self.examples)} examples"
        if examples is not None:
            return _Length(examples, is_own=True, why=f"the Trainer's own length, in {epoch}")
        longest = MOST_EPOCHS * self.examples
        return _Length(longest, is_own=False, why=f"{MOST_EPOCHS} {epoch}")


def _line_on(metric: OwnMetric, objective: str | None) -> str:
    """Say which metric a study goes by, why, and which value is its target."""
    others = f", not {', '.join(metric.others)}" if metric.others else ""
    if objective == "loss":
        return f"target={metric.name!r}: the metric that is compared{others}, as {metric.why}"
    sign = "<=" if metric.mode == "min" else ">="
    return (
        f"target={metric.name!r}: what your own configuration comes to, by {metric.name}{others}, "
        f"as {metric.why}; target='{metric.name}{sign}VALUE' sets another"
    )


def _given_objects(
    stated: Stated,
    target: Target,
    batch_sizes: tuple[int, int],
    reference: tuple[int, float],
    budget: Budget,
) -> GivenObjects:
    """Join the completed arguments with those that were given."""
    return GivenObjects(
        target=target,
        batch_sizes=batch_sizes,
        reference=reference,
        budget=budget,
        module=stated.module,
        data=stated.data,
        trainer=stated.trainer,
        tunable=stated.tunable,
        seed=stated.seed,
        overrides_lr=stated.overrides_lr,
    )


def _target(target: Target | str | None) -> Target | None:
    """Read a target from a text such as ``val_loss<=0.1``; leave any other value as it is.

    The name of a metric alone gives a target whose value is open.
    """
    if not isinstance(target, str):
        return target
    if any(sign in target for sign in "<>="):
        return Target(*parse_target(target, "target"))
    mode = mode_of(target)
    if mode is None:
        raise ConfigError(
            f"target={target!r}: the name does not say which way is better: correct it, or give "
            f"bstune.Target({target!r}, VALUE, mode='min') or mode='max'"
        )
    # The first trial will set the goal. Until then it is one that no value meets, in place of 0.
    return Target(target, 0.0, mode).never_met


def _rate_run_today(module: Module, stated: Stated, batch_size: int) -> float:
    """Find the learning rate that the user runs today.

    It is the default of the module's class. Of a function that builds modules, the class is that of
    a module which it builds here. With ``override_lr`` it is the rate that the optimizers of such a
    module have.

    Raises:
        ConfigError: where there is no default. It offers those of other names, as base_lr, beside
            the project's own ``batch_size``.
    """
    module_class: Any = module
    rate: float | None
    if stated.overrides_lr:
        built = _any_module(module, stated)
        module_class = type(built)
        rate = rate_of_optimizers(built)
    else:
        rate = own_rate(module)
        function = module.func if isinstance(module, partial) else module
        is_class = isinstance(function, type)
        # Of a function the class is known only by a module that it builds.
        if rate is None and not is_class:
            module_class = type(_any_module(module, stated))
            rate = own_rate(module_class)
    if rate is None:
        raise _no_rate(module_class, batch_size)
    return rate


def _any_module(module: Module, stated: Stated) -> LightningModule:
    """Build the module of any trial.

    It shows the default rate of its class, and the rate that its optimizers set themselves: neither
    depends on the trial's.
    """
    trial = _any_trial(ANY_BATCH_SIZE, lr=1e-3, total_steps=1, tunable=stated.tunable)
    return module_builder(module, overrides_lr=stated.overrides_lr)(trial)


def _no_rate(module_class: Any, batch_size: int) -> ConfigError:
    """Make the error that asks for the learning rate, and offers those of other names."""
    others = rates_by_other_names(module_class)
    offered = f"reference=({batch_size}, learning rate)"
    alike = ""
    if others:
        offered = f"reference=({batch_size}, {next(iter(others.values())):g})"
        named = listing([f"{name}={value:g}" for name, value in others.items()])
        verb = "looks" if len(others) == 1 else "look"
        alike = f"; {named} {verb} like it"
    return ConfigError(
        "which learning rate do you run today? The module's class has no default of lr or "
        f"learning_rate{alike}: give {offered}, or {OVERRIDE} where it stands in "
        "configure_optimizers"
    )


def _any_trial(
    batch_size: int, lr: float, total_steps: int, tunable: Mapping[str, Any] | None
) -> Trial:
    """Make a trial with which a module can be built, to look at it."""
    values: dict[str, float] = {"batch_size": batch_size, "lr": lr, "seed": 0}
    values["total_steps"] = total_steps
    return Trial({**values, **middles_of(tunable)})
