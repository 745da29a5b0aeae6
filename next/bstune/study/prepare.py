"""What is found out of a project in the worker before a study begins, and the options it fills."""

from collections.abc import Callable, Mapping

from bstune.core.errors import InputError
from bstune.core.records import Budget, Record, Target
from bstune.options import Options, space_of
from bstune.recipe import found as project
from bstune.recipe.found import Found
from bstune.recipe.recipe import Recipe
from bstune.study.deadline import pilot_seconds
from bstune.system.ticker import say
from bstune.trial.checks import Checks, unreachable
from bstune.trial.worker import AnyWorker, call, value_of


def looked_up(
    worker: AnyWorker,
    recipe: Recipe,
    options: Options,
    command: Callable[[Mapping[str, object]], str],
    limit: float,
) -> tuple[Options, Found]:
    """Fill the options that nobody gave by what the project tells, but for the target.

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
    found: Found = value_of(call(worker, _look_up, recipe, *own, limit=limit))
    options, lines = project.completed(options, found, command)
    for line in lines:
        say(line)
    return options, found


def checked(
    worker: AnyWorker, recipe: Recipe, options: Options, found: Found, limit: float
) -> Checks:
    """See that the project trains as a study takes it to, and say what is to be known.

    Without a baseline nothing is checked but at the middle of the ranges.

    Raises:
        InputError: it does not; with what to write.
        UserCodeError: the project cannot be trained.
    """
    target = options.target or unreachable(*found.meant)
    batch_size, lr = _pair(options)
    sizes = (options.batch_size.low, batch_size, options.batch_size.high)
    budget = None if options.is_open("budget.steps") else options.budget
    arguments = (recipe, sizes, lr, budget, target)
    checks: Checks = value_of(call(worker, _preflight, *arguments, limit=limit))
    for line in checks.lines:
        say(line)
    return checks


def piloted(
    worker: AnyWorker, recipe: Recipe, options: Options, found: Found, limit: float
) -> Options:
    """Fill a target that nobody gave, and a budget that nothing tells, by a short run.

    Raises:
        InputError: the baseline did not improve.
        UserCodeError: the project cannot be trained.
    """
    has_length = not options.is_open("budget.steps")
    if has_length and not options.is_open("target"):
        return options
    seconds = pilot_seconds(options.wall_seconds)
    target = options.target or unreachable(*found.meant)
    batch_size, lr = _pair(options)
    length = options.budget.last_step(batch_size) if has_length else None
    say(f"pilot: batch size {batch_size} and lr {lr:g} for {seconds:.0f} s of training")
    arguments = (recipe, batch_size, lr, seconds, target, length)
    record: Record = value_of(call(worker, _pilot, *arguments, limit=limit))
    if record.status in ("diverged", "failed"):
        raise InputError(f"batch size {batch_size} and lr {lr:g} {record.status}: {record.message}")
    options, line = project.piloted(options, found, record.finite_history)
    say(line)
    return options


def _pair(options: Options) -> tuple[int, float]:
    """The baseline or, without one, the geometric middle of the ranges."""
    if options.baseline.pair is not None:
        return options.baseline.pair
    batch_size, lr = space_of(options, "cpu").anchor
    return round(batch_size), lr


# They are sent to the worker, which has imported torch.


def _look_up(recipe: Recipe, batch_size: int | None, lr: float | None) -> Found:
    from bstune.trial.look_up import look_up

    return look_up(recipe, batch_size, lr)


def _preflight(
    recipe: Recipe, sizes: tuple[int, int, int], lr: float, budget: Budget | None, target: Target
) -> Checks:
    from bstune.trial.preflight import preflight

    return preflight(recipe, sizes, lr, budget, target)


def _pilot(
    recipe: Recipe,
    batch_size: int,
    lr: float,
    seconds: float,
    target: Target,
    length: int | None,
) -> Record:
    from bstune.trial.preflight import pilot

    return pilot(recipe, batch_size, lr, seconds, target, length)
