"""What :class:`bstune.Study` takes for granted where an argument is left out: the project's own values, each said.

>>> bstune.tune(MyModule, MyData())  # doctest: +SKIP
assumed: reference=(64, 0.001): MyData's own batch size, and lr of MyModule; the gain is over these
...
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from bstune.core.errors import ConfigError
from bstune.core.metric_names import mode_of, parse_target
from bstune.core.records import Budget, Target
from bstune.study.given import Data, GivenObjects, Module, middles_of
from bstune.study.prepare import QUICK_SECONDS
from bstune.system.console import format_count, format_seconds
from bstune.trial.own_values import (
    OwnBatches,
    OwnMetric,
    own_batches,
    own_examples,
    own_metric,
    own_rate,
)
from bstune.trial.python_recipe import Trial, data_module, module_builder

# Batch sizes that are searched begin at this part of the project's own.
SMALLEST_PART = 16
# Epochs after which a trial gives up, where the study's time is what limits it.
MOST_EPOCHS = 100
# Arguments of the Trainer that say how the project itself trains, and what is made of them.
LENGTHS = ("max_epochs", "max_steps")
ACCUMULATED = "accumulate_grad_batches"
# Of a data set that is read once, to ask it for its batch size.
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
    # Whether search.seconds or search.wall_seconds ends the study.
    is_timed: bool


@dataclass(frozen=True)
class Completed:
    """A study's objects with nothing left out.

    Args:
        given: them.
        wall_seconds: ``search.wall_seconds``, which the study has to have with them; None: none.
        lines: what was assumed, a line each, with the argument that changes it.
    """

    given: GivenObjects
    wall_seconds: float | None
    lines: tuple[str, ...]


def complete(stated: Stated) -> Completed:
    """Take what is left out from the module, the data and the Trainer's arguments.

    Raises:
        ConfigError: where these do not tell, with the argument to give.
    """
    needed = {
        "target": stated.target,
        "batch_sizes": stated.batch_sizes,
        "reference": stated.reference,
        "budget": stated.budget,
    }
    left_out = [name for name, value in needed.items() if value is None]
    if stated.module is None or stated.data is None:
        if left_out:
            raise ConfigError(
                f"a study without module and data needs {', '.join(left_out)} besides: with them these "
                "are taken from the project"
            )
        return Completed(_given(stated, _target(stated.target), stated.trainer), None, ())
    if not left_out:
        return Completed(_given(stated, _target(stated.target), stated.trainer), None, ())
    return _from_project(stated)


def _from_project(stated: Stated) -> Completed:
    """Take what is left out from the project itself."""
    assert stated.module is not None and stated.data is not None  # noqa: S101 (the caller has looked)
    if stated.trainer is not None and not isinstance(stated.trainer, Mapping):
        raise ConfigError(
            f"trainer must be a dict of the Trainer's arguments, but got {type(stated.trainer).__name__}"
        )
    trainer = dict(stated.trainer or {})
    lines = list[str]()
    data = data_module(stated.data, ANY_BATCH_SIZE)
    name = type(data).__name__
    batches: OwnBatches | None = None
    if None in (stated.reference, stated.batch_sizes, stated.budget):
        batches = own_batches(data, name)
    reference = stated.reference
    if reference is None:
        assert batches is not None  # noqa: S101 (read just now)
        accumulated = int(trainer.pop(ACCUMULATED, None) or 1)
        reference = batches.batch_size * accumulated, _own_rate(stated.module, stated.tunable)
        lines.append(
            f"reference={reference}: the batch size of {name} and the learning rate of your module, as "
            "you run it today; the gain is over these"
        )
    sizes = stated.batch_sizes
    if sizes is None:
        assert batches is not None  # noqa: S101 (read just now)
        sizes = max(1, int(reference[0]) // SMALLEST_PART), batches.examples
        lines.append(
            f"batch_sizes={sizes}: from 1/{SMALLEST_PART} of yours to the whole training data, or what memory holds"
        )
    budget = stated.budget
    wall_seconds: float | None = None
    if budget is None:
        assert batches is not None  # noqa: S101 (read just now)
        examples = own_examples(trainer, int(reference[0]), batches.examples)
        if examples is None and not stated.is_timed:
            wall_seconds = QUICK_SECONDS
            lines.append(
                f"wall_seconds={wall_seconds:g}: the study takes {format_seconds(wall_seconds)}, as "
                "neither it nor trainer={'max_epochs': N} says how long"
            )
        why = "the Trainer's own length"
        if examples is None:
            examples = MOST_EPOCHS * batches.examples
            why = f"{MOST_EPOCHS} epochs"
        budget = Budget(examples=examples)
        lines.append(
            f"budget=bstune.Budget(examples={examples}): {why} of {format_count(batches.examples)} "
            "examples, after which a trial gives up"
        )
        for length in LENGTHS:
            trainer.pop(length, None)
    target: Target
    if isinstance(stated.target, Target):
        target = stated.target
    elif stated.target is not None:
        target = _target(stated.target)
    else:
        found = _own_metric(stated, reference, budget, data, trainer)
        target = Target(found.name, 0.0, found.mode).never_met
        others = f", not {', '.join(found.others)}" if found.others else ""
        lines.append(
            f"target={found.name!r}: what your own configuration comes to, by {found.name}{others}, as "
            f"{found.why}; target={_example(found)!r} sets another"
        )
    completed = Stated(
        **{**vars(stated), "batch_sizes": sizes, "reference": reference, "budget": budget}
    )
    return Completed(_given(completed, target, trainer), wall_seconds, tuple(lines))


def _given(
    stated: Stated, target: Target | None, trainer: Mapping[str, Any] | None
) -> GivenObjects:
    assert target is not None and stated.batch_sizes is not None  # noqa: S101 (complete)
    assert stated.reference is not None and stated.budget is not None  # noqa: S101 (complete)
    return GivenObjects(
        target=target,
        batch_sizes=stated.batch_sizes,
        reference=stated.reference,
        budget=stated.budget,
        module=stated.module,
        data=stated.data,
        trainer=trainer,
        tunable=stated.tunable,
        seed=stated.seed,
    )


def _target(target: Target | str | None) -> Target | None:
    """Read a target from a text: ``val_loss<=0.1``, or a metric alone, whose goal is open."""
    if not isinstance(target, str):
        return target
    if any(sign in target for sign in "<>="):
        return Target(*parse_target(target, "target"))
    mode = mode_of(target)
    if mode is None:
        raise ConfigError(
            f"target={target!r}: the name does not say which way is better: give "
            f"bstune.Target({target!r}, VALUE, mode='min') or mode='max'"
        )
    return Target(target, 0.0, mode).never_met


def _example(found: OwnMetric) -> str:
    sign = "<=" if found.mode == "min" else ">="
    return f"{found.name}{sign}VALUE"


def _own_rate(module: Module, tunable: Mapping[str, Any] | None) -> float:
    """Give the learning rate of the user's module; a function's module is built to see its class."""
    rate = own_rate(module)
    function = module.func if isinstance(module, partial) else module
    if rate is None and not isinstance(function, type):
        built = module_builder(module)(_any_trial(ANY_BATCH_SIZE, 1e-3, 1, tunable))
        rate = own_rate(type(built))
    if rate is None:
        raise ConfigError(
            "which learning rate do you run today? The module's class has no default of lr or "
            "learning_rate: give reference=(batch size, learning rate)"
        )
    return rate


def _any_trial(
    batch_size: int, lr: float, total_steps: int, tunable: Mapping[str, Any] | None
) -> Trial:
    values: dict[str, float] = {"batch_size": batch_size, "lr": lr, "seed": 0}
    values["total_steps"] = total_steps
    return Trial({**values, **middles_of(tunable)})


def _own_metric(
    stated: Stated,
    reference: tuple[int, float],
    budget: Budget,
    data: Any,
    trainer: Mapping[str, Any],
) -> OwnMetric:
    """Choose the metric by a module as the reference builds it."""
    batch_size, lr = int(reference[0]), float(reference[1])
    trial = _any_trial(batch_size, lr, budget.last_step(batch_size), stated.tunable)
    module = module_builder(stated.module, list(stated.tunable or ()))(trial)
    accelerator = "cpu" if stated.device == "cpu" else "auto"
    return own_metric(module, data, trainer, accelerator)
