"""What is found out of a project in the worker before a study begins, and the options it fills."""

import time
from typing import Any

from bstune.core.errors import InputError
from bstune.core.records import Frozen, Record
from bstune.hardware.survey import Survey
from bstune.options import Options, space_of
from bstune.recipe.found import Found, fill_by_found, fill_by_pilot
from bstune.recipe.recipe import Recipe
from bstune.study.commands import Command
from bstune.study.deadline import Deadline, pilot_seconds
from bstune.study.loop import HangWatch
from bstune.study.result import ResultWarning
from bstune.system.ticker import say
from bstune.trial.checks import Checks
from bstune.trial.worker import AnyWorker, call, value_of


class OfProject(Frozen):
    """What a study keeps of its project, beside the options; by itself that of recorded runs."""

    resumes: bool = True
    """Whether a resumed trial equals one that was never stopped."""
    examples: int | None = None
    """Of the training set."""
    parameters: int | None = None
    """Of the module, that are trained."""
    warnings: tuple[ResultWarning, ...] = ()
    """Of each schedule that moves too rarely."""
    schedule_follows: bool = False
    """Whether a schedule follows the trial's length, so that its budget sets it."""
    survey: Survey | None = None
    """By which a budget of seconds is one of steps, also when the study goes on."""


def prepare_project(
    worker: AnyWorker,
    recipe: Recipe,
    options: Options,
    command: Command,
    deadline: Deadline | None,
) -> tuple[Options, OfProject, float]:
    """See that a project can be tuned, and fill all options that nobody gave.

    A new study begins with it; one that goes on has all of this in its storage.

    Args:
        worker: that builds and trains the project.
        recipe: of it.
        options: as given.
        command: what runs the study with further options.
        deadline: that limits the preflight.

    Returns:
        The options, what the project told, and the seconds of look-ups and preflight.

    Raises:
        InputError: for what has to be given or written.
        UserCodeError: the project cannot be built or trained.
    """
    began = time.monotonic()
    limit = HangWatch(options.wall_seconds, options.trial_seconds).limit
    has_rule = options.scaling is not None
    options, found = fill_from_project(worker, recipe, options, command, limit)
    until = None if deadline is None else deadline.preflight_until
    checks = _check_project(worker, recipe, options, found, limit, until)
    project = OfProject(
        resumes=checks.resumes,
        examples=found.examples,
        parameters=found.parameters,
        warnings=tuple(
            ResultWarning(kind="schedule", fix=one.remedy, state=one.state)
            for one in checks.schedules
            if one.is_unmoved
        ),
        schedule_follows=any(one.follows for one in checks.schedules),
    )
    if checks.is_sum and not has_rule:
        options = options.model_copy(update={"scaling": "none"})
    took = time.monotonic() - began
    return _fill_from_pilot(worker, recipe, options, found, limit), project, took


def fill_from_project(
    worker: AnyWorker,
    recipe: Recipe,
    options: Options,
    command: Command,
    limit: float,
) -> tuple[Options, Found]:
    """Fill the options that nobody gave by what the project tells, but for the target.

    The first part of :func:`prepare_project`, and all that a survey without a study needs.

    Args:
        worker: that builds the project.
        recipe: of it.
        options: as given.
        command: what runs the study with further options.
        limit: seconds that the worker may say nothing for.

    Raises:
        InputError: for what has to be given.
        UserCodeError: the project cannot be built.
    """
    baseline = options.baseline
    own = baseline.batch_size, baseline.lr
    found: Found = value_of(call(worker, _look_up_in_worker, recipe, *own, limit=limit))
    options, lines = fill_by_found(options, found, command)
    for line in lines:
        say(line)
    return options, found


def _check_project(
    worker: AnyWorker,
    recipe: Recipe,
    options: Options,
    found: Found,
    limit: float,
    until: float | None,
) -> Checks:
    """See that the project trains as a study takes it to, and say what is to be known.

    Without a baseline nothing is checked but at the middle of the ranges.
    """
    target = options.target or found.without_goal
    batch_size, lr = _pair_to_check(options)
    sizes = (options.batch_size.low, batch_size, options.batch_size.high)
    budget = options.budget if options.budget_is_in_steps else None
    arguments = (recipe, sizes, lr, budget, target, until)
    checks: Checks = value_of(call(worker, _preflight_in_worker, *arguments, limit=limit))
    for line in checks.lines:
        say(line)
    return checks


def _fill_from_pilot(
    worker: AnyWorker, recipe: Recipe, options: Options, found: Found, limit: float
) -> Options:
    """Fill a target that nobody gave, and a budget that nothing tells, by a short run."""
    if not (options.is_open("budget.steps") or options.is_open("target")):
        return options
    seconds = pilot_seconds(options.wall_seconds)
    target = options.target or found.without_goal
    batch_size, lr = _pair_to_check(options)
    length = options.budget.last_step(batch_size) if options.budget_is_in_steps else None
    say(f"pilot: batch size {batch_size} and lr {lr:g} for {seconds:.0f} s of training")
    arguments = (recipe, batch_size, lr, seconds, target, length)
    record: Record = value_of(call(worker, _pilot_in_worker, *arguments, limit=limit))
    if record.status in ("diverged", "failed"):
        raise InputError(f"batch size {batch_size} and lr {lr:g} {record.status}: {record.message}")
    options, line = fill_by_pilot(options, found, record.finite_history)
    say(line)
    return options


def _pair_to_check(options: Options) -> tuple[int, float]:
    """The baseline or, without one, the geometric middle of the ranges."""
    if options.baseline.pair is not None:
        return options.baseline.pair
    batch_size, lr = space_of(options, fills_tensor_cores=False).anchor
    return round(batch_size), lr


# The worker calls these: what they import imports torch.
def _look_up_in_worker(*arguments: Any) -> Found:
    from bstune.trial.look_up import look_up

    return look_up(*arguments)


def _preflight_in_worker(*arguments: Any) -> Checks:
    from bstune.trial.preflight import preflight

    return preflight(*arguments)


def _pilot_in_worker(*arguments: Any) -> Record:
    from bstune.trial.preflight import pilot

    return pilot(*arguments)
