"""The preflight: short trials that find mistakes in a workload before any long trial.

They are trials of a few steps at the smallest batch sizes, through the same code as every other
trial. Two batch sizes are timed, two learning rates and two seeds compared, and schedules stepped
ahead. One of the trials is stopped and continued, and compared with one that is not stopped. Each
mistake has a function that finds it.

Refused, with status 2 and advice, are rates that train alike, no validation, a metric that is never
logged, loaders that cannot be read in batches of another size, a target that untrained weights
meet, a checkpoint that does not load back, and a schedule that raises within the budget. A module
that seeds itself is named. One that keeps state which its checkpoint lacks is tuned, too: its
trials start afresh, and the plan names the attribute.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from bstune.core.errors import BstuneError, ConfigError, StateError
from bstune.core.records import TrialProtocol, TrialSpec
from bstune.core.search_space import Space
from bstune.core.step_time import StepTime
from bstune.system.failures import cause, described
from bstune.system.interruption import temporary_folder
from bstune.trial.batches.accumulation import cannot_accumulate
from bstune.trial.batches.micro_batches import micro_batch_sizes_of
from bstune.trial.checks.continuation import Course, lost_state
from bstune.trial.checks.doubled_batch import doubled_notes
from bstune.trial.checks.given_data import check_batches
from bstune.trial.checks.learning_rate import check_rates
from bstune.trial.checks.monitors import monitors_of
from bstune.trial.checks.recorder import (
    COMPARED_STEPS,
    PATIENCE_SECONDS,
    SLOW_STEPS,
    RecordingPlan,
)
from bstune.trial.checks.schedule_end import end_of_schedule
from bstune.trial.checks.seeds import seed_notes
from bstune.trial.checks.short_runs import ShortRuns
from bstune.trial.checks.short_trial import ShortTrial
from bstune.trial.lightning.installed import garbage_collection_cuda
from bstune.trial.lightning.trainer import as_list
from bstune.trial.loop import Workload
from bstune.trial.parts.checkpoint import Stopped

# The steps that are compared after a stop. They are two, as a rate that changes at the end of a
# step shows in the next one.
FOLLOWED_STEPS = 2
# The factor between the two batch sizes that are timed: small ones are cheap.
SPREAD = 4
# The factor where so many steps of the smaller batch size take no longer than this on a CPU. The
# line through the two then has to be extrapolated less far.
FAST_SPREAD = 32
FAST_SECONDS = 0.5


@dataclass(frozen=True)
class PreflightFindings:
    """The measurements of the short trials, and their notes for the user."""

    # The smallest batch size that was trained.
    smallest: int
    # The seconds of a step over the batch size.
    step_time: StepTime
    # Lines on what the study does without.
    notes: tuple[str, ...]
    # The predicted seconds of an evaluation on all of the validation data.
    evaluation_seconds: float = 0.0
    # The number of batches of such an evaluation; 0: unknown.
    evaluation_batches: int = 0
    # Whether a stopped trial can go on; else it starts afresh.
    continues: bool = True
    # The number of trained parameters.
    parameters: int = 0
    # The target's metric of the untrained weights, on a part of the data; None: it is not known.
    start_metric: float | None = None


def preflight(
    workload: Workload,
    protocol: TrialProtocol,
    space: Space,
    trial: TrialSpec | None,
    *,
    continues: bool,
    survey: bool,
) -> PreflightFindings:
    """Run short trials of a workload, and refuse it if it cannot be tuned.

    Args:
        workload: what is trained.
        protocol: of the study's trials.
        space: of batch sizes and learning rates.
        trial: the only trial to run, where there is to be no study; None: a study.
        continues: whether trials are stopped and continued.
        survey: whether a survey will find the smallest batch size that can be trained.

    Raises:
        ConfigError: says why the workload cannot be tuned, and what to change. Errors of the user's
            code are raised as they are.
    """
    if trial is not None:
        # The module may be built for this trial's batch size, and not for the range's smallest.
        space = replace(space, low=trial.batch_size, high=trial.batch_size)
    short = ShortRuns(workload, protocol)
    small = space.snap(space.low)
    # The second batch size is not much larger, so that its steps are short, too.
    large = space.snap(min(space.high, space.low * SPREAD))
    check_batches(workload, small, large)
    first = _first_trial(short, space, small, large, survey=survey)
    _check_accumulation(first, protocol, space)
    step_time = _measured_step_time(short, space, first, large, survey=survey)
    last_step = protocol.last_step(first.spec.batch_size)
    notes = [
        *manual_notes(first, protocol),
        *schedule_notes(first, last_step),
        *_monitor_notes(first, protocol),
    ]
    # Seeds need to differ only in a study, which runs its winner on fresh ones.
    if trial is None:
        other_seed = replace(first.spec, seed=first.spec.seed + 1)
        other = short.run(other_seed, RecordingPlan(steps=1, doubles_batch=True))
        notes += seed_notes(first, other)
        notes += doubled_notes(first.module.name, other.losses)
    # The first trial has the lowest rate; this one has that of the study's scaling rule.
    other_rate = replace(first.spec, lr=space.lr(first.spec.batch_size, delta=0.0))
    if continues:
        compared = _compare_rates_and_continue(short, workload, first, other_rate, last_step)
    else:
        compared = _compare_rates(short, workload, first, other_rate)
    if compared.why_not_continued is not None:
        notes.append(
            f"a stopped trial cannot be continued, it starts afresh: {compared.why_not_continued}"
        )
    # The study's processes need the device's memory that the short trials still hold.
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        garbage_collection_cuda()
    return PreflightFindings(
        smallest=first.spec.batch_size,
        step_time=step_time,
        notes=tuple(notes),
        evaluation_seconds=short.evaluation_seconds(compared.trial),
        evaluation_batches=short.evaluation_batches,
        continues=compared.why_not_continued is None,
        parameters=first.module.parameters,
        start_metric=first.start_metric,
    )


def _first_trial(
    short: ShortRuns, space: Space, small: int, large: int, *, survey: bool
) -> ShortTrial:
    """Run the first short trial, at the batch size ``small``.

    If the module fails there, it runs at ``large``, where a survey (which times steps at several
    batch sizes before the study) will look for the smallest size that trains.

    Raises:
        ConfigError: from :meth:`ShortRuns.run_from_start`, where the untrained weights meet the
            target.
    """
    try:
        return short.run_from_start(space.lowest_rate_spec(small))
    except BstuneError:
        raise
    # A module may refuse the smallest batch size, as batch normalisation does a batch of one.
    except Exception:
        if not survey or small == large:
            raise
        return short.run_from_start(space.lowest_rate_spec(large))


def _check_accumulation(trial: ShortTrial, protocol: TrialProtocol, space: Space) -> None:
    """Refuse micro-batches for a module that steps its optimizers itself.

    A short trial's batch may be a single micro-batch: the largest batch size of all decides.
    """
    largest = micro_batch_sizes_of(space.high, protocol.micro_batch_size)
    if not trial.module.automatic and len(largest) > 1:
        raise cannot_accumulate(trial.module.name)


def _measured_step_time(
    short: ShortRuns, space: Space, first: ShortTrial, large: int, *, survey: bool
) -> StepTime:
    """Give the seconds of a step over the batch size, from the first trial and a larger one.

    The larger one is left out where its steps would be long and a survey will time steps at several
    batch sizes. The seconds are then taken as proportional to the batch size.
    """
    small = first.spec.batch_size
    from_first_alone = StepTime(overhead=0.0, per_example=first.seconds / small)
    if large == small:
        return from_first_alone
    # Where steps are fast the second batch is much larger, so that the line through both holds
    # for more batch sizes.
    if short.on_cpu and FAST_SPREAD * first.seconds <= FAST_SECONDS:
        large = space.snap(min(space.high, space.low * FAST_SPREAD))
    # A short trial takes ``SLOW_STEPS`` steps at least, however long they are.
    is_slow = SLOW_STEPS * first.seconds * large / small > PATIENCE_SECONDS
    if survey and is_slow:
        return from_first_alone
    larger = short.run(space.lowest_rate_spec(large))
    return _line_through(first, larger)


def _line_through(small: ShortTrial, large: ShortTrial) -> StepTime:
    """Give the line through the seconds of a step at two batch sizes; no part of it is negative."""
    small_size = small.spec.batch_size
    slope = (large.seconds - small.seconds) / (large.spec.batch_size - small_size)
    slope = max(0.0, slope)
    overhead = max(0.0, small.seconds - slope * small_size)
    return StepTime(overhead=overhead, per_example=slope)


def manual_notes(trial: ShortTrial, protocol: TrialProtocol) -> Iterator[str]:
    """Yield a line on a module that steps its optimizers itself; nothing for any other."""
    if trial.module.automatic:
        return
    taken_steps = " and ".join(map(str, trial.optimizer_steps)) or "no"
    unmeasured = "" if protocol.noise_scale_every is None else ", without noise scale"
    yield (
        f"{trial.module.name} steps its optimizers itself (manual optimization): trained as it is, "
        f"one step of a trial a batch (in {trial.batches} batches its optimizers took "
        f"{taken_steps} steps){unmeasured}"
    )


def schedule_notes(trial: ShortTrial, last_step: int) -> Iterator[str]:
    """Yield a line on each schedule that is at 0 long before a trial's last step.

    A ConfigError refuses a schedule that raises an error before that step.
    """
    for schedule in trial.schedules.to_end:
        end = end_of_schedule(schedule, last_step)
        if end is None:
            continue
        text = end.text(trial.module.name, trial.spec.batch_size, last_step)
        if end.error is not None:
            raise ConfigError(text)
        yield text


def _monitor_notes(trial: ShortTrial, protocol: TrialProtocol) -> Iterator[str]:
    """Yield a line on call-backs that stop a training early or save it; nothing without any."""
    # A short trial leaves out those that the Trainer was given, and has seen the module's own.
    monitors = monitors_of(as_list(protocol.trainer.get("callbacks"))) + trial.monitors
    note = monitors.note(target_is_open=protocol.target.is_open, has_epochs=trial.has_epochs)
    if note is not None:
        yield note


@dataclass(frozen=True)
class _Compared:
    """A trial at another learning rate than the first one's, which was compared with that."""

    trial: ShortTrial
    # Why it cannot be continued once it was stopped; None: it can be, or this was not tried.
    why_not_continued: str | None


def _compare_rates(
    short: ShortRuns, workload: Workload, first: ShortTrial, spec: TrialSpec
) -> _Compared:
    """Run a trial at another learning rate, and refuse a workload that trains alike at both."""
    # The weights of both are compared after as many steps as the first trial kept its own.
    trial = short.run(spec, RecordingPlan(compared_steps=first.weights.steps))
    check_rates(first, trial, workload)
    return _Compared(trial, why_not_continued=None)


def _compare_rates_and_continue(
    short: ShortRuns, workload: Workload, first: ShortTrial, spec: TrialSpec, last_step: int
) -> _Compared:
    """Run a trial at another learning rate, and refuse a workload that trains alike at both.

    The trial stops at the step after which the two are compared, and is then continued.
    ``last_step`` is that of the budget, which no trial goes past.
    """
    stop = first.weights.steps
    with temporary_folder() as folder:
        state = Path(folder) / "stopped.ckpt"
        spec = replace(spec, max_steps=stop)
        stopped = short.run(spec, RecordingPlan(compared_steps=stop), state=state)
        check_rates(first, stopped, workload)
        # A trial that has ended by itself before its last step leaves no state.
        if not state.exists():
            return _Compared(stopped, why_not_continued=None)
        return _Compared(stopped, _why_not_continued(short, stopped, state, last_step))


def _why_not_continued(
    short: ShortRuns, stopped: ShortTrial, state: Path, last_step: int
) -> str | None:
    """Continue a stopped trial, and compare it with one that is not stopped.

    A ConfigError says that the user's code cannot load its checkpoint.

    Args:
        short: runs short trials.
        stopped: the stopped trial.
        state: the file with its state.
        last_step: the budget's, which no trial goes past.

    Returns:
        Why a stopped trial cannot be continued, in words; None if the two do not differ.
    """
    done = stopped.weights.steps
    # A trial that was stopped before ``COMPARED_STEPS`` has slow steps. Then a single further step
    # is compared.
    followed = FOLLOWED_STEPS if done >= COMPARED_STEPS else 1
    spec = replace(stopped.spec, max_steps=max(done + 1, min(done + followed, last_step)))
    # The stopped trial has number 0.
    resumed_spec = replace(spec, number=1, resumed_from=0)
    resume = Stopped(stopped.result, state)

    # A course is the record of the steps that are compared; None: the trial has not taken them.
    def resumed() -> Course | None:
        return short.run(resumed_spec, RecordingPlan(followed_after=0), resume=resume).course

    def straight() -> Course | None:
        return short.run(spec, RecordingPlan(followed_after=done)).course

    try:
        gone_on = resumed()
    except StateError as error:
        return _reason_of(error)
    except Exception as error:
        _, frames = described(error)
        raise ConfigError(
            f"a stopped trial of {stopped.module.name} cannot be continued from its checkpoint: "
            f"{cause(error)}; let it load what it saves, make in __init__ what "
            "on_train_epoch_start makes (not called again amid an epoch), or set sampler=tpe, "
            f"which continues no trial\n{frames}".rstrip()
        ) from error
    not_stopped = straight()
    if gone_on is None or not_stopped is None:
        return None
    # Where they differ, both are run again, as a training may differ from itself.
    lost = lost_state(not_stopped, gone_on, lambda: (straight(), resumed()))
    if lost is None:
        return None
    return lost.text(stopped.module.name)


def _reason_of(error: StateError) -> str:
    """Give the reason in an error about a state; the preflight's note says the rest itself."""
    message = str(error)
    reason = message.partition("cannot be read: ")[2].removesuffix("; it starts afresh")
    return (reason or message).splitlines()[0]
