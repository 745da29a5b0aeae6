"""What a few steps show before anything long.

Short trials at the smallest batch sizes, through the same code as every other trial: two batch
sizes are timed, two learning rates and two seeds compared, schedules stepped ahead; one of the
trials is stopped and continued, and compared with one that is not. Each mistake has a function that
finds it.

Refused, with status 2 and what to change, are rates that train alike, no validation, a metric that
is never logged, loaders that cannot be read in batches of another size, a target that untrained
weights meet, a checkpoint that does not load back, and a schedule that raises within the budget. A
module that seeds itself is named. One that keeps state that its checkpoint lacks is tuned, too: its
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
from bstune.trial.checks.continuation import Course, lost_state
from bstune.trial.checks.given_data import check_batches
from bstune.trial.checks.learning_rate import check_rates
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
from bstune.trial.loop import Workload
from bstune.trial.parts.checkpoint import Stopped

# After a stop: what changes a rate at the end of a step shows in the next one.
FOLLOWED_STEPS = 2
# Between the two batch sizes: small ones are cheap.
SPREAD = 4
# Between the two where so many steps of the smaller one take no longer than this on a CPU: the line
# through the two is extrapolated less far.
FAST_SPREAD = 32
FAST_SECONDS = 0.5


@dataclass(frozen=True)
class PreflightFindings:
    """What the short trials measured, and what the study does without."""

    # The batch size that was trained.
    smallest: int
    step_time: StepTime
    gradient_bytes: int
    notes: tuple[str, ...]
    # Predicted for an evaluation on all of the validation data.
    evaluation_seconds: float = 0.0
    # In which the validation data are read; 0: unknown.
    evaluation_batches: int = 0
    # Whether a stopped trial can go on; else it starts afresh.
    continues: bool = True
    # Of the module, as far as they are trained.
    parameters: int = 0


def preflight(
    workload: Workload,
    protocol: TrialProtocol,
    space: Space,
    trial: TrialSpec | None,
    *,
    continues: bool,
    survey: bool,
) -> PreflightFindings:
    """Refuse a workload that cannot be tuned, with what to change.

    The user's own errors are raised as they are.

    Args:
        workload: what is trained.
        protocol: of the study's trials.
        space: of batch sizes and learning rates.
        trial: the one to run instead of a study; None: a study.
        continues: whether trials are stopped and continued.
        survey: whether one will find the smallest batch size at which the module can be trained.
    """
    if trial is not None:
        # A single trial's batch size may be one at which the module can be built where the range's
        # smallest is none.
        space = replace(space, low=trial.batch_size, high=trial.batch_size)
    short = ShortRuns(workload, protocol)
    small = space.snap(space.low)
    large = space.snap(min(space.high, space.low * SPREAD))
    check_batches(workload, small, large)
    first = _first_trial(short, space, small, large, survey=survey)
    step_time = _measured_step_time(short, space, first, large, survey=survey)
    last_step = protocol.last_step(first.spec.batch_size)
    notes = [*manual_notes(first, protocol), *schedule_notes(first, last_step)]
    # Only a study runs its winner on other seeds.
    if trial is None:
        other_seed = replace(first.spec, seed=first.spec.seed + 1)
        notes += seed_notes(first, short.run(other_seed, RecordingPlan(steps=1)))
    other_rate = replace(first.spec, lr=space.lr(first.spec.batch_size, 0.0))
    if continues:
        compared = _compared_and_continued(short, workload, first, other_rate, last_step)
    else:
        compared = _compared(short, workload, first, other_rate)
    if compared.why_not_continued is not None:
        notes.append(
            f"a stopped trial cannot be continued, it starts afresh: {compared.why_not_continued}"
        )
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        garbage_collection_cuda()
    return PreflightFindings(
        smallest=first.spec.batch_size,
        step_time=step_time,
        gradient_bytes=first.module.gradient_bytes,
        notes=tuple(notes),
        evaluation_seconds=short.evaluation_seconds(compared.trial),
        evaluation_batches=short.evaluation_batches,
        continues=compared.why_not_continued is None,
        parameters=first.module.parameters,
    )


def _first_trial(
    short: ShortRuns, space: Space, small: int, large: int, *, survey: bool
) -> ShortTrial:
    """Run a trial at the smallest batch size, or at a larger one where a survey seeks the smallest.

    Its untrained weights must not meet the target.
    """
    try:
        return short.run_from_start(space.lowest_rate_spec(small))
    except BstuneError:
        raise
    # Such as batch normalisation's, of a batch of one.
    except Exception:
        if not survey or small == large:
            raise
        return short.run_from_start(space.lowest_rate_spec(large))


def _measured_step_time(
    short: ShortRuns, space: Space, first: ShortTrial, large: int, *, survey: bool
) -> StepTime:
    """Time a second batch size too, unless its steps are long and a survey will time them."""
    small = first.spec.batch_size
    alone = StepTime(0.0, first.seconds / small)
    if large == small:
        return alone
    if short.on_cpu and FAST_SPREAD * first.seconds <= FAST_SECONDS:
        large = space.snap(min(space.high, space.low * FAST_SPREAD))
    # The survey trains at further batch sizes, and times them: here it is not worth long steps.
    is_slow = SLOW_STEPS * first.seconds * large / small > PATIENCE_SECONDS
    if survey and is_slow:
        return alone
    larger = short.run(space.lowest_rate_spec(large))
    return _line_through(first, larger)


def _line_through(small: ShortTrial, large: ShortTrial) -> StepTime:
    """Draw the line through the seconds of a step at two batch sizes, no part negative."""
    small_size = small.spec.batch_size
    slope = (large.seconds - small.seconds) / (large.spec.batch_size - small_size)
    slope = max(0.0, slope)
    return StepTime(max(0.0, small.seconds - slope * small_size), slope)


def manual_notes(trial: ShortTrial, protocol: TrialProtocol) -> Iterator[str]:
    """Yield what a study does without where the module steps its optimizers itself."""
    if trial.module.automatic:
        return
    took = " and ".join(map(str, trial.optimizer_steps)) or "no"
    without = "" if protocol.noise_scale_every is None else ", without noise scale"
    yield (
        f"{trial.module.name} steps its optimizers itself (manual optimization): trained as it is, "
        f"one step of a trial a batch (in {trial.batches} batches its optimizers took {took} steps)"
        f"{without}"
    )


def schedule_notes(trial: ShortTrial, last_step: int) -> Iterator[str]:
    """Yield where schedules are at 0 before a trial's last step; refuse those that raise there."""
    for schedule in trial.schedules.to_end:
        end = end_of_schedule(schedule, last_step)
        if end is None:
            continue
        text = end.text(trial.module.name, trial.spec.batch_size, last_step)
        if end.error is not None:
            raise ConfigError(text)
        yield text


@dataclass(frozen=True)
class _Compared:
    """A trial at another rate than the first one's, from which it differs as it should."""

    trial: ShortTrial
    # None: it can be, or nobody asks.
    why_not_continued: str | None


def _compared(
    short: ShortRuns, workload: Workload, first: ShortTrial, spec: TrialSpec
) -> _Compared:
    trial = short.run(spec, RecordingPlan(compared_steps=first.weights.steps))
    check_rates(first, trial, workload)
    return _Compared(trial, None)


def _compared_and_continued(
    short: ShortRuns, workload: Workload, first: ShortTrial, spec: TrialSpec, last_step: int
) -> _Compared:
    """Let one trial serve both checks: it is stopped where it is compared, and goes on.

    The budget ends a trial after ``last_step``.
    """
    stop = first.weights.steps
    with temporary_folder() as folder:
        state = Path(folder) / "stopped.ckpt"
        spec = replace(spec, max_steps=stop)
        stopped = short.run(spec, RecordingPlan(compared_steps=stop), state=state)
        check_rates(first, stopped, workload)
        # A trial that ended by itself before its last step leaves no state.
        if not state.exists():
            return _Compared(stopped, None)
        return _Compared(stopped, _why_not_continued(short, stopped, state, last_step))


def _why_not_continued(
    short: ShortRuns, stopped: ShortTrial, state: Path, last_step: int
) -> str | None:
    """Continue a stopped trial beside one that is not stopped; None if the two are the same.

    What the user's code cannot load is refused.
    """
    done = stopped.weights.steps
    # Steps that take seconds are few.
    followed = FOLLOWED_STEPS if done >= COMPARED_STEPS else 1
    spec = replace(stopped.spec, max_steps=max(done + 1, min(done + followed, last_step)))
    resumed_spec = replace(spec, number=1, resumed_from=0)
    resume = Stopped(stopped.result, state)

    def resumed() -> Course | None:
        return short.run(resumed_spec, RecordingPlan(followed_after=0), resume=resume).course

    def straight() -> Course | None:
        return short.run(spec, RecordingPlan(followed_after=done)).course

    try:
        gone_on = resumed()
    except StateError as error:
        # The note says itself what cannot be continued, and that it starts afresh.
        message = str(error)
        reason = message.partition("cannot be read: ")[2].removesuffix("; it starts afresh")
        return (reason or message).splitlines()[0]
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
    # Both are run again where they differ: a training may differ from itself.
    lost = lost_state(not_stopped, gone_on, lambda: (straight(), resumed()))
    if lost is None:
        return None
    return lost.text(stopped.module.name)
