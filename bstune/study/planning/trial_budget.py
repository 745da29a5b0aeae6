"""The budget of one trial: in steps, of a trial by itself, and as the study's time allows it."""

import math
from collections.abc import Callable

from bstune.core.errors import ConfigError
from bstune.core.records import TrialSpec
from bstune.core.step_time import seconds_between
from bstune.options import StudyOptions, shown, with_option
from bstune.recipe import Recipe
from bstune.study.planning.assumed_budget import SecondsLeft, budget_in_time
from bstune.study.planning.plan import most_start_seconds, wall_limit
from bstune.study.storage.opening import stored_budget_times
from bstune.system.console import format_number
from bstune.trial.backend import TrialBackend, chooses_horizons, make_protocol
from bstune.trial.replay import ReplayBackend


def single_trial(options: StudyOptions) -> TrialSpec | None:
    """Give the one trial that ``trial.batch_size`` and ``trial.lr`` ask for; None for a study."""
    asked = options.trial
    if asked.batch_size is None or asked.lr is None:
        return None
    # delta is None, as no scaling rule gives the rate.
    return TrialSpec(
        number=0,
        trial_index=0,
        batch_size=asked.batch_size,
        lr=asked.lr,
        delta=None,
        seed=asked.seed,
    )


def steps_at_budget(
    options: StudyOptions, batch_size: int, seconds_per_step: Callable[[float], float]
) -> int:
    """Give the step at which a trial of the objective loss has spent its budget.

    ``seconds_per_step``: gives the seconds of a step at a batch size, for a budget of seconds.
    """
    budget = options.budget
    if budget.seconds is not None:
        # The margin keeps a whole number of steps whole where the division falls just below it.
        steps = budget.seconds / seconds_per_step(batch_size)
        return max(1, math.floor(steps * (1.0 + 1e-9)))
    if budget.counts_examples:
        return math.ceil(budget.examples / batch_size)
    return budget.steps


def with_budget_in_time(
    options: StudyOptions,
    backend: TrialBackend,
    trial: TrialSpec | None,
    elapsed: Callable[[], float],
) -> tuple[StudyOptions, str | None]:
    """Shorten a trial's budget that bstune has assumed, and give the plan's note on it.

    A schedule that ends with its trial is as long as the budget. A trial that the study's time cuts
    off tells nothing, so that its budget must end earlier. The budget stays as it is where the user
    has stated it, where no schedule ends with it, and for a sampler that does not choose the length
    of schedules: there the budget is part of the workload.
    """
    stated = options.workload.budget
    epoch = stated.assumed_epoch
    # The user has stated the workload's budget, or another one with the options budget.*.
    if epoch is None or options.budget.budget != stated.budget:
        return options, None
    # A single trial runs as it is stated, and the objective loss compares at the budget's end.
    if trial is not None or options.search.objective == "loss":
        return options, None
    # ``horizon``: whether schedules end with their trials.
    if not backend.horizon or not chooses_horizons(options):
        return options, None
    batch_size = options.scaling.whole_batch_size
    wall_left: float | None = None
    limit = wall_limit(options)
    if limit is not None:
        wall_left = limit - min(elapsed(), most_start_seconds(options))
    left = SecondsLeft(
        training=options.search.seconds,
        wall=wall_left,
        wall_per_training=1.0 + backend.evaluation_share,
    )
    shortened = budget_in_time(
        stated.budget, epoch, batch_size, backend.step_time(batch_size), left
    )
    if shortened == stated.budget:
        return options, None
    options = with_option(options, "budget.steps", shortened.steps)
    options = with_option(options, "budget.examples", shortened.examples)
    epochs = format_number(shortened.examples / epoch, 2)
    return options, (
        f"assumed: budget.examples={shortened.examples}, {epochs} epochs in place of "
        f"{format_number(stated.examples / epoch, 2)}, as the schedule ends with its trial and the "
        "study's time would cut a longer one; budget.examples=N sets another"
    )


def with_single_budget(options: StudyOptions, recipe: Recipe | None) -> StudyOptions:
    """Turn the budget of a single trial for the objective loss into steps.

    They are as many as in a study: its stored seconds of a step turn a budget of seconds into
    steps. ConfigError where the study has stored none. Options of a study stay as they are.
    """
    trial = single_trial(options)
    if trial is None or options.search.objective != "loss":
        return options
    # The step's seconds are asked for at the trial's batch size alone.
    steps = steps_at_budget(
        options, trial.batch_size, lambda size: _single_step_seconds(options, recipe)
    )
    options = with_option(options, "budget.seconds", None)
    # A budget lasts until both its steps and its examples are spent. The first step spends a single
    # example, so that the steps alone decide; the option takes no number below that, nor null.
    options = with_option(options, "budget.examples", 1)
    return with_option(options, "budget.steps", steps)


def _single_step_seconds(options: StudyOptions, recipe: Recipe | None) -> float:
    """Give the seconds of a step at a single trial's batch size, as its study has stored them.

    Without a recipe they are those of the table.

    Raises:
        ConfigError: where the study has stored none.
    """
    batch_size = options.trial.batch_size
    assert batch_size is not None  # noqa: S101 (the caller has looked)
    if recipe is None:
        return ReplayBackend(options, make_protocol(options, None)).step_time(batch_size)
    times = stored_budget_times(options.study, options.storage)
    if times is None:
        raise ConfigError(
            f"budget.seconds={shown(options.budget.seconds)} of a single trial are counted by the "
            f"seconds of a step that study={options.study} has measured, and it has measured none: "
            "run the study first, or give budget.steps=N budget.examples=1"
        )
    return seconds_between(times, batch_size)
