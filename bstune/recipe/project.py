"""A recipe of Python objects: a module's class or function, and data in the form that they have."""

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any

from torch import nn

from bstune.core.errors import InputError
from bstune.options import RATES, TRIAL_VALUES, Options
from bstune.recipe.hydra import recipe_arguments
from bstune.recipe.recipe import Recipe, TrialSettings, value_of_today


def recipe_of_project(
    module: Any, data: Any, options: Options, trainer: Mapping[str, Any] | None = None
) -> Recipe:
    """Make the recipe of a project's own module and data.

    Args:
        module: a LightningModule's class, or a function that makes one, with an argument ``lr`` or
            ``learning_rate``; or a function of the trial, ``lambda trial: Net(trial.lr, width=8)``;
            with ``override_lr`` also one that gets no rate.
            Arguments called ``batch_size``, ``seed``, ``total_steps``, or as a value that is tuned,
            get the trial's values, too.
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
    if trainer is not None and not isinstance(trainer, Mapping):
        raise InputError(f"trainer must be arguments by their names, but got {trainer!r:.100}")
    usual = {one.name: one.value(0.5) for one in options.tunables} | (options.baseline.values or {})
    is_given = hasattr(data, "train_dataloader") and not isinstance(data, type)
    if isinstance(data, tuple | list) and len(data) == 2:
        data, is_given = tuple(data), True
    build_data = partial(_same_for_each_trial, data) if is_given else _builder(data, "data", usual)
    of_data, others = ({}, []) if is_given else _trial_arguments(data, usual)
    # What nothing else takes is left to the module's **kwargs.
    left = [name for name in usual if name not in of_data]
    build_module = _builder(module, "module", usual, left, needs_rate=not options.override_lr)
    parts = [module] if is_given else [data, module]
    return Recipe(
        module=build_module,
        data=build_data,
        trainer=partial(_same_for_each_trial, dict(trainer or {})),
        # A function of the trial has one argument of another name.
        data_follows="batch_size" in of_data or bool(others),
        own_values=partial(dict, _defaults_of_tuned(parts, usual, left)),
        **recipe_arguments(options),
    )


def _same_for_each_trial(value: Any, trial: TrialSettings) -> Any:
    """Give a value that is the same in each trial; the worker gets a copy for each."""
    return value


def _call_with_values(
    function: Callable[..., Any],
    values: Mapping[str, str],
    usual: Mapping[str, int | float],
    trial: TrialSettings,
) -> Any:
    """Call a function with the trial's values, by the names of its arguments.

    One that is None is left to the function's own default. Further values that have none are the
    usual ones where the trial has none.
    """
    trial_values = {**usual, **trial.values}
    given = {}
    for argument, name in values.items():
        given[argument] = trial_values.get(name, getattr(trial, name, None))
    return function(**{name: value for name, value in given.items() if value is not None})


def _call_with_trial(
    function: Callable[..., Any], usual: Mapping[str, int | float], trial: TrialSettings
) -> Any:
    """Call a function of the trial; a trial without further values gets the usual ones."""
    trial.values = trial.values or usual
    return function(trial)


def _defaults_of_tuned(
    parts: Sequence[Any], names: Collection[str], left: Collection[str]
) -> dict[str, int | float | None]:
    """The defaults of the arguments that are tuned; None where there is none.

    InputError for a value that the project does not take; a function of the trial may read any.

    Args:
        parts: data and module, or the module alone.
        names, left: as of :func:`_trial_arguments`.
    """
    own: dict[str, int | float | None] = {}
    takes_trial = False
    for part in parts:
        values, others = _trial_arguments(part, names, left)
        takes_trial |= not values and len(others) == 1
        arguments = inspect.signature(part).parameters
        for name in names:
            if name in arguments:
                own[name] = value_of_today(name, arguments[name].default)
            elif name in values:
                own[name] = None
    for name in names:
        if name not in own and not takes_trial:
            hint = "" if len(parts) > 1 else "; data gets it where its class or a function is given"
            raise InputError(
                f"module={_name_of(part, 'module')} does not take {name}: it takes "
                f"{', '.join(arguments)}{hint}"
            )
    return {name: own.get(name) for name in names}


def _trial_arguments(
    function: Any, names: Collection[str], left: Collection[str] = ()
) -> tuple[dict[str, str], list[str]]:
    """The arguments that get values of the trial, with their names, and others that are needed.

    Args:
        function: of the user's.
        names: of the further values that are tuned.
        left: those of them that its ``**kwargs`` gets.
    """
    values = {}
    others = []
    for name, parameter in inspect.signature(function).parameters.items():
        is_needed = parameter.default is parameter.empty
        if name in RATES:
            values[name] = "lr"
        elif name in (*TRIAL_VALUES, *names):
            values[name] = name
        elif parameter.kind is parameter.VAR_KEYWORD:
            values |= {name: name for name in left}
        elif is_needed and parameter.kind is not parameter.VAR_POSITIONAL:
            others.append(name)
    return values, others


def _name_of(function: Any, what: str) -> str:
    name: str = getattr(function, "__name__", what)
    return name


def _builder(
    function: Any,
    what: str,
    usual: Mapping[str, int | float],
    left: Collection[str] = (),
    *,
    needs_rate: bool = False,
) -> Callable[[TrialSettings], Any]:
    """Choose how a class or a function is called for a trial.

    Args:
        function: of the user's.
        what: ``module`` or ``data``.
        usual: further values that are tuned, where a trial has none.
        left: as of :func:`_trial_arguments`.
        needs_rate: whether it has to get the trial's rate.

    Raises:
        InputError: if it cannot be called, lacks an argument for the rate, or needs others.
    """
    try:
        values, others = _trial_arguments(function, usual, left)
    # What cannot be called, and a class of Python's own, tell no arguments.
    except (TypeError, ValueError) as error:
        raise InputError(
            f"{what} must be a class or a function, but got {function!r:.100}"
        ) from error
    name = _name_of(function, what)
    is_class = isinstance(function, type)
    # A function of one argument is a function of the trial.
    if len(others) == 1 and not values and not is_class:
        return partial(_call_with_trial, function, usual)
    if others:
        written = ", ".join(f"{other}=..." for other in others)
        raise InputError(
            f"{what}={name} needs {', '.join(others)}: give them, as "
            f"lambda trial: {name}(lr=trial.lr, {written})"
        )
    if needs_rate and "lr" not in values.values():
        raise InputError(
            f"module={name} must get the trial's rate, but has no argument lr or learning_rate: "
            f"add one that its optimizer gets, or give override_lr=True, which puts it there"
        )
    arguments = inspect.signature(function).parameters
    needed = {}
    for name, value in usual.items():
        if name in arguments and arguments[name].default is inspect.Parameter.empty:
            needed[name] = value
    return partial(_call_with_values, function, values, needed)
