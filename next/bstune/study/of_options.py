"""What follows from a study's options: its plan, and what must stay as it began."""

from collections.abc import Callable

from bstune.core.question import Question
from bstune.core.records import StepTime
from bstune.core.space import Configuration
from bstune.options import Options, space_of
from bstune.search.fit import NOTHING, Ends
from bstune.study.deadline import OTHERS, Deadline
from bstune.study.machine import Machine
from bstune.study.plan import Plan
from bstune.system.console import count, seconds

# Configurations of the search where nobody says how many; under a time limit as many as there is
# time for, up to so many: with more, decisions take longer than 0.3 s.
TRIALS = 32
TRIALS_IN_TIME = 1000
# Options that a study keeps to.
FIXED = {
    *("objective", "target", "budget", "batch_size", "lr", "baseline", "scaling", "tune"),
    *("schedule_ends", "compile", "micro_batch_size", "devices", "seed"),
}


def fixed_options(options: Options) -> dict[str, object]:
    """What must not change while a study goes on, as JSON."""
    return {**options.model_dump(mode="json", include=FIXED), "target": str(options.target)}


def fixed_place(machine: Machine) -> dict[str, object]:
    """What of a machine must not change while a study goes on, as JSON."""
    return machine.model_dump(include={"device", "threads", "precision"})


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
        fits = Ends(*survey.fits, ran, refused=tuple(size for size, _ in survey.refused))
    return Plan(
        question=Question(options.target, options.budget, options.objective, options.schedule_ends),
        space=space_of(options, machine.kind),
        baseline=baseline,
        trials=options.trials or (TRIALS if deadline is None else TRIALS_IN_TIME),
        seeds=options.seeds,
        seed=options.seed,
        deadline=deadline,
        step_time=step_time,
        fits=fits,
        timings=survey.step_times if survey else (),
        resumable=resumable,
    )


def plan_line(name: str, options: Options, plan: Plan, machine: Machine) -> str:
    """Say in a line what a study of a workload does, and what it may take."""
    what = (
        f"{name}: {options.target}, batch sizes {plan.space.low} to {plan.space.high} "
        f"(scaling: {plan.space.rule}), {machine.device}"
    )
    for tunable in plan.space.tunables:
        what += f", {tunable}"
    if plan.deadline is None or options.trials is not None:
        what += f", {count(plan.trials, 'configuration')}"
    if plan.deadline is None:
        return what
    of_baseline, shared = plan.deadline.baseline_seconds, plan.deadline.shared
    what += f", {seconds(shared)}: the baseline at most {seconds(of_baseline)}"
    # Without new seeds others have the rest.
    return (
        f"{what}, others at least {seconds(OTHERS * shared)}" if plan.question.seeks_best else what
    )
