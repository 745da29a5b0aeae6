"""What follows from a study's options: its plan, and what must stay as it began."""

import os
import time
from collections.abc import Callable

from bstune.core.errors import InputError
from bstune.core.question import Question
from bstune.core.records import StepTime
from bstune.core.space import Configuration, Space
from bstune.core.step_time import fit_step_time
from bstune.options import Options, space_of
from bstune.search.fit import NOTHING, SurveyedSizes
from bstune.search.grid import usual_trials
from bstune.study.commands import Commands
from bstune.study.deadline import Deadline
from bstune.study.machine import Machine
from bstune.study.plan import Plan
from bstune.system.console import count, seconds

# Configurations of the search where nobody says how many; under a time limit as many as there is
# time for, up to so many: with more, decisions take longer than 0.3 s.
TRIALS = 32
TRIALS_IN_TIME = 1000
# Without a time limit a trial of so many seconds is worth a line before it begins.
LONG_TRIAL = 3600.0
# The least steps of a budget whose best metric is sought.
LEAST_STEPS = 10
# Options that a study keeps to.
FIXED = {
    *("objective", "target", "budget", "batch_size", "lr", "baseline", "scaling", "tune"),
    *("schedule_ends", "compile", "micro_batch_size", "devices", "seed"),
    *("override_lr", "validation_batch_size", "algorithm", "schedule"),
}
# Options that whoever joins a study has of its own: those of a machine, and what would be code.
OF_MACHINE = {
    *("workload", "study", "data", "module", "trainer", "algorithm", "schedule", "trial"),
    *("device", "threads", "workers", "survey_seconds", "memory_limit"),
    *("output", "storage", "data_root", "mlflow", "debug"),
}


def with_threads(options: Options) -> Options:
    """The options with torch's threads where several trials run at once: they share the cores."""
    if options.threads is not None or options.workers <= 1:
        return options
    cores = len(os.sched_getaffinity(0))
    return options.model_copy(update={"threads": max(cores // options.workers, 1)})


def fixed_options(options: Options) -> dict[str, object]:
    """What must not change while a study goes on, as JSON."""
    return {**options.model_dump(mode="json", include=FIXED), "target": str(options.target)}


def fixed_place(machine: Machine) -> dict[str, object]:
    """What of a machine must not change while a study goes on, as JSON."""
    return machine.model_dump(include={"device", "threads", "precision"})


def what_joining_needs(
    options: Options, machine: Machine, commands: Commands, began: float
) -> dict[str, object]:
    """What a process on another machine needs to join a study, as JSON; nothing of it is code.

    Args:
        options: of the study, complete.
        machine: that it began on.
        commands: that run it again.
        began: when, by ``time.monotonic()``.
    """
    values = options.model_dump(mode="json", exclude=OF_MACHINE)
    return {
        "workload": options.workload,
        "options": values | {"precision": machine.precision or options.precision},
        "command": commands.study({}),
        "way": commands.way,
        "began": time.time() - (time.monotonic() - began),
    }


def plan_of(
    options: Options,
    machine: Machine,
    deadline: Deadline | None,
    step_time: StepTime | None,
    resumable: Callable[[int], bool],
) -> Plan:
    """The plan of a study.

    Args:
        options: of the study, complete.
        machine: with its survey.
        deadline, step_time, resumable: as in :class:`bstune.study.plan.Plan`.
    """
    baseline = None
    if options.baseline.pair is not None:
        batch_size, lr = options.baseline.pair
        baseline = Configuration(batch_size=batch_size, lr=lr, values=options.baseline.values or {})
    survey = machine.survey
    fits = NOTHING
    # With micro-batches larger batches are accumulated of what fits.
    if survey is not None and options.micro_batch_size != "auto":
        ran = tuple(one.batch_size for one in survey.timings)
        fits = SurveyedSizes(*survey.fits, ran, refused=tuple(size for size, _ in survey.refused))
    space = space_of(options, machine.fills_tensor_cores)
    timings = survey.step_times if survey else ()
    question = Question(
        options.target,
        options.budget,
        options.objective,
        options.schedule_ends,
        # A study keeps to the steps that a budget of seconds is by its survey.
        budget_step_time=step_time or fit_step_time((), timings),
    )
    _check_budget(question, space)
    trials = TRIALS if deadline is None else TRIALS_IN_TIME
    if options.sampler == "grid" and deadline is None:
        trials = usual_trials(space)
    return Plan(
        question=question,
        space=space,
        baseline=baseline,
        trials=options.trials or trials,
        seeds=options.seeds,
        seed=options.seed,
        sampler=options.sampler,
        deadline=deadline,
        step_time=step_time,
        fits=fits,
        timings=timings,
        resumable=resumable,
    )


def _check_budget(question: Question, space: Space) -> None:
    """InputError where a budget of seconds is in no steps, or the best metric sought in a few."""
    if question.budget.seconds is not None and question.budget_step_time is None:
        raise InputError(
            f"budget.seconds={question.budget.seconds:g} needs the survey's step times, and it had "
            f"no time to take any: raise survey_seconds, or give budget.steps"
        )
    steps = question.last_step(space.low)
    if question.seeks_metric and steps < LEAST_STEPS and not question.budget.is_whole_run:
        raise InputError(
            f"a budget of {question.budget} is {count(steps, 'step')} of batch size {space.low}, "
            f"the smallest: give at least {LEAST_STEPS / steps:.2g} times as much"
        )


def plan_text(name: str, options: Options, plan: Plan, machine: Machine) -> str:
    """Write what a study of a workload does, and what would make it fit where a trial is long."""
    what = (
        f"{name}: {options.target}, batch sizes {plan.space.low} to {plan.space.high} "
        f"(scaling: {plan.space.rule}), {machine.device}"
    )
    for tunable in plan.space.tunables:
        what += f", {tunable}"
    if plan.deadline is None or options.trials is not None:
        what += f", {count(plan.trials, 'configuration')}"
    if plan.deadline is not None:
        what += f", {seconds(plan.deadline.shared)}"
    step_time = plan.question.budget_step_time
    if step_time is None:
        return what
    batch_size = plan.space.anchor[0]
    whole = plan.question.last_step(round(batch_size)) * step_time(batch_size)
    if whole <= (plan.deadline.shared if plan.deadline else LONG_TRIAL):
        return what
    return (
        f"{what}\na trial of the whole budget takes {seconds(whole)} at batch size "
        f"{batch_size:,.0f}: a smaller model or budget or a faster device fits"
    )
