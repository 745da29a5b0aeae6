"""A recipe of Python objects: a module's class or function, and data in the form that they have."""

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from torch import nn

from bstune.core.errors import InputError
from bstune.options import Options
from bstune.recipe.recipe import RATES, Recipe, TrialSettings

# Arguments that are the trial's value of the same name.
TRIAL_VALUES = ("batch_size", "seed", "max_steps", "total_steps")


def recipe_of_project(
    module: Any, data: Any, options: Options, trainer: Mapping[str, Any] | None = None
) -> Recipe:
    """Make the recipe of a project's own module and data.

    Args:
        module: a LightningModule's class, or a function that makes one, with an argument ``lr`` or
            ``learning_rate``; or a function of the trial, ``lambda trial: Net(trial.lr, width=8)``.
            Arguments called ``batch_size``, ``seed``, ``max_steps`` or ``total_steps`` get the
            trial's values, too.
        data: a LightningDataModule or its class, a pair of a train and a validation loader, or a
            function that makes one of these, which takes arguments as ``module`` does.
        options: of the study.
        trainer: further arguments of Lightning's Trainer, such as ``callbacks``.

    Raises:
        InputError: with what to write instead, for a module that is built already or does not get
            the trial's rate, and for data in another form.
    """
    if isinstance(module, nn.Module):
        name = type(module).__name__
        raise InputError(
            f"module must be a class or a function, so that each trial starts untrained, but got "
            f"an instance: give {name}, or lambda trial: {name}(lr=trial.lr)"
        )
    build_module = _builder(module, "module")
    if isinstance(data, tuple | list) and len(data) == 2:
        build_data: Callable[[TrialSettings], Any] = partial(_given, tuple(data))
    elif hasattr(data, "train_dataloader") and not isinstance(data, type):
        build_data = partial(_given, data)
    else:
        build_data = _builder(data, "data")
    return Recipe(
        module=build_module,
        data=build_data,
        trainer=partial(_given, dict(trainer or {})),
        device=options.device,
        precision=options.precision,
        threads=options.threads,
        compile=options.compile,
        micro_batch_size=options.given_micro_batch_size,
        devices=options.devices,
        noise_scale=options.noise_scale,
    )


def _given(value: Any, trial: TrialSettings) -> Any:
    """Give a value that is the same in each trial; the worker gets a copy for each."""
    return value


def _called(function: Callable[..., Any], values: dict[str, str], trial: TrialSettings) -> Any:
    """Call a function with the trial's values, by the names of its arguments.

    One that is None is left to the function's own default.
    """
    given = {argument: getattr(trial, name) for argument, name in values.items()}
    return function(**{name: value for name, value in given.items() if value is not None})


def _builder(function: Any, what: str) -> Callable[[TrialSettings], Any]:
    """Choose how a class or a function is called for a trial.

    Args:
        function: of the user's.
        what: ``module``, which has to get the rate, or ``data``.

    Raises:
        InputError: if it cannot be called, lacks an argument for the rate, or needs others.
    """
    if not callable(function):
        raise InputError(f"{what} must be a class or a function, but got {function!r:.100}")
    values = {}
    others = []
    for name, parameter in inspect.signature(function).parameters.items():
        is_needed = parameter.default is parameter.empty
        if name in RATES:
            values[name] = "lr"
        elif name in TRIAL_VALUES:
            values[name] = name
        elif is_needed and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            others.append(name)
    name = getattr(function, "__name__", what)
    is_class = isinstance(function, type)
    # A function of one argument is a function of the trial.
    if len(others) == 1 and not values and not is_class:
        return function  # type: ignore[no-any-return]
    if others:
        arguments = ", ".join(f"{other}=..." for other in others)
        raise InputError(
            f"{what}={name} needs {', '.join(others)}: give them, as "
            f"lambda trial: {name}(lr=trial.lr, {arguments})"
        )
    if what == "module" and "lr" not in values.values():
        raise InputError(
            f"module={name} must get the trial's rate, but has no argument lr or learning_rate: "
            f"add one that its optimizer gets, or give lambda trial: {name}(...) with trial.lr in "
            f"its place"
        )
    return partial(_called, function, values)
