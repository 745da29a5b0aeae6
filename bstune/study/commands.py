"""The commands that run a study's winners again, and ``best.yaml``, which has one for each."""

import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from bstune.core.records import Merit, TrialResult
from bstune.core.search_space import Space
from bstune.options import overrides
from bstune.result import WINNERS, StudyResult, WinnerName, WinnerResult
from bstune.study.planning.replicates import Winner
from bstune.study.prepared import PreparedStudy
from bstune.system.files import is_own
from bstune.system.processor_wait import processors
from bstune.system.secrets import redact_values

# Options that a single trial has no use for begin with these.
OF_A_STUDY = (
    "trial.",
    "search.",
    "mlflow.",
    "hardware.",
    "sampler",
    "prior.",
    "seed=",
    "debug=",
)


def best_yaml(
    best: Mapping[Merit, Winner],
    result: StudyResult,
    arguments: Sequence[str] | None,
    prepared: PreparedStudy,
) -> str:
    """Write the winners as YAML, each with its checkpoint and the command that runs it again.

    Their numbers are those of ``result``, which every other file has.

    The checkpoint is null where the winner left none, the command where ``arguments`` are None, as
    for a study of Python objects.
    """
    of_study = _with_known_target(study_arguments(arguments or ()), prepared)
    values: dict[str, Any] = {}
    told: dict[WinnerName, WinnerResult | None] = {
        "best_by_time": result.best_by_time,
        "best_by_steps": result.best_by_steps,
    }
    for name, of_result in told.items():
        if of_result is None:
            continue
        winner = best[WINNERS[name].merit]
        path = prepared.files.checkpoint(winner.trial.number)
        checkpoint: str | None = None
        if is_own(path):
            checkpoint = str(path.absolute())
        command: str | None = None
        if arguments is not None:
            of_trial = _trial_arguments(winner, prepared)
            command = shlex.join([sys.executable, "-m", "bstune", *of_study, *of_trial])
        values[name] = {
            **of_result.model_dump(mode="json"),
            "checkpoint": checkpoint,
            "command": command,
        }
    variables = sorted(set(re.findall(r"oc\.env:(\w+)", " ".join(of_study))))
    comment = ""
    if variables:
        comment = f"# The commands read the environment: first set {', '.join(variables)}.\n"
    return comment + yaml.safe_dump(redact_values(values), sort_keys=False)


def _trial_arguments(winner: Winner, prepared: PreparedStudy) -> list[str]:
    """Give the options that run the winner again, with the same result to the bit.

    It is the winner's trial, or a run of it on a fresh seed that had the schedule to train with.
    """
    trial = winner.run_to_train
    options = [
        f"trial.batch_size={trial.batch_size}",
        f"trial.lr={trial.lr!r}",
        f"trial.seed={trial.seed}",
    ]
    # A trial whose schedule ends with it is limited to that schedule. Where trials stop early, the
    # steps that this one took are the limit: when a trial is evaluated depends on its limit.
    limit = winner.advised_horizon
    if prepared.backend.stops:
        limit = trial.steps
    if limit is not None:
        options += _limited_to(limit)
    return options + overrides(prepared.options, trial.hyperparameters)


def _limited_to(steps: int) -> list[str]:
    """Give the options of a budget in steps alone.

    A trial ends once both its steps and its examples are spent. The first step spends a single
    example, so that the steps alone decide.
    """
    return [f"budget.steps={steps}", "budget.examples=1"]


def train_command(winner: Winner, arguments: Sequence[str], prepared: PreparedStudy) -> str:
    """Write the command that trains the winner's point to the target, on the config's own seed.

    Where a schedule ends with the trial, a seed may miss the target at its end: the command then
    has the seed of a run that reached it, if there is one, and exact values.

    For the objective loss it trains to the budget's end.
    """
    trial = winner.run_to_train
    space = prepared.space
    is_for_loss = prepared.budget.objective == "loss"
    of_study = _arguments_without_search(arguments, prepared)
    # The length of a schedule that ends with its trial. A trial that can be stopped early needs
    # none: it just stops once it meets the target.
    horizon: int | None = None
    if not prepared.backend.stops:
        horizon = winner.advised_horizon
    is_proven = horizon is not None and trial.reached and trial.horizon == horizon
    lr = trial.lr
    hyperparameters = dict(trial.hyperparameters)
    if not is_proven:
        lr = rounded_within(trial.lr, space.lr_low, space.lr_high)
        hyperparameters = _rounded_hyperparameters(trial, space)
    of_trial = [f"trial.batch_size={trial.batch_size}", f"trial.lr={lr!r}"]
    if is_proven:
        of_trial.append(f"trial.seed={trial.seed}")
    if is_for_loss:
        of_trial.append("search.objective=loss")
        of_trial += _limited_to(prepared.last_step(trial.batch_size))
    elif horizon is not None:
        of_trial += _limited_to(horizon)
    # A single trial makes no survey, which chose the study's number of threads.
    of_trial += _threads_option(prepared, of_study)
    of_trial += overrides(prepared.options, hyperparameters)
    return shlex.join(["bstune", *of_study, *of_trial])


def _arguments_without_search(arguments: Sequence[str], prepared: PreparedStudy) -> list[str]:
    """Give those of a study's arguments that its winner is trained with, and the known target."""
    kept = list[str]()
    for argument in study_arguments(arguments):
        # Hydra's + and ~ before an option add and delete it.
        if not argument.lstrip("+~").startswith(OF_A_STUDY):
            kept.append(argument)
    # A target that the study took from its first trial is not in its arguments, and the command
    # has no such trial to take it from.
    kept = _with_known_target(kept, prepared)
    if prepared.budget.objective == "loss":
        # The command gives the budget in steps, even where the study's is in seconds or examples.
        kept = [argument for argument in kept if not argument.startswith("budget.")]
    return kept


def _rounded_hyperparameters(trial: TrialResult, space: Space) -> dict[str, float]:
    """Give a trial's further hyper-parameters, with those that were searched rounded to be read."""
    tunables = {tunable.name: tunable for tunable in space.tunables}
    values = dict[str, float]()
    for name, value in trial.hyperparameters.items():
        values[name] = value
        if name in tunables:
            values[name] = rounded_within(value, tunables[name].low, tunables[name].high)
    return values


def _threads_option(prepared: PreparedStudy, arguments: Sequence[str]) -> list[str]:
    """Give the option ``threads=N`` that sets the number of threads a survey chose.

    It is empty where a single trial has as many by itself, where no survey chose them, and where
    the study's ``arguments`` have it.
    """
    timed = prepared.backend.timed
    is_given = any(argument.startswith("threads=") for argument in arguments)
    if timed is None or timed.threads is None or is_given:
        return []
    if timed.threads == processors():
        return []
    return [f"threads={timed.threads}"]


def rounded_within(value: float, low: float, high: float) -> float:
    """Round a value to the four digits that are shown, unless that takes it out of its range."""
    # A whole number stays exact.
    if isinstance(value, int):
        return value
    shown = float(f"{value:.3e}")
    if low <= shown <= high:
        return shown
    return value


def study_arguments(arguments: Sequence[str]) -> list[str]:
    """Give the arguments that begin the study again: all but those of a single trial."""
    return [argument for argument in arguments if not argument.startswith("trial.")]


def _with_known_target(arguments: Sequence[str], prepared: PreparedStudy) -> list[str]:
    """Give the arguments, with the target's value in them if the first trial has set it."""
    if prepared.goal is None:
        return list(arguments)
    named = ("target=", "workload.target.value=")
    others = [argument for argument in arguments if not argument.lstrip("+").startswith(named)]
    # Later options override earlier ones: it follows the workload, whose target it replaces.
    return [*others, f"target={prepared.goal.value!r}"]
