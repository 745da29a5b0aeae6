"""The parts of a trial, one job each, and the state that they share."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

from bstune.core.clock import TrialClock
from bstune.core.records import TrialProtocol, TrialSpec
from bstune.trial.batches.micro_batches import micro_batch_sizes_of
from bstune.trial.devices import distributed
from bstune.trial.devices.device import device_name
from bstune.trial.fast.compile import Compiling
from bstune.trial.parts.agreed_stop import AgreedStop
from bstune.trial.parts.cadence import Cadence
from bstune.trial.parts.checkpoint import Stopped, StoppedState, read_state
from bstune.trial.parts.epoch_ends import EpochEnds
from bstune.trial.parts.forks import OneProcess
from bstune.trial.parts.generators import Generators
from bstune.trial.parts.last_step import LastStep, last_step_of
from bstune.trial.parts.metric import LoggedMetric
from bstune.trial.parts.phases import Phases, aside
from bstune.trial.parts.resume import Resume
from bstune.trial.parts.snapshot import Snapshot
from bstune.trial.parts.state import TrialState, state_after
from bstune.trial.parts.step_count import StepCount
from bstune.trial.parts.trial_noise import TrialNoiseScale
from bstune.trial.parts.verdict import Verdict


@dataclass(frozen=True)
class Parts:
    """The parts of a trial, one for each job.

    :class:`bstune.trial.parts.trial_callback.TrialCallback` calls them in Lightning's hooks.
    """

    spec: TrialSpec
    protocol: TrialProtocol
    clock: TrialClock
    state: TrialState
    # Examples in each micro-batch of a step.
    micro_batch_sizes: tuple[int, ...]
    one_process: OneProcess
    agreed_stop: AgreedStop
    step_count: StepCount
    last_step: LastStep
    cadence: Cadence
    epoch_ends: EpochEnds
    phases: Phases
    generators: Generators
    snapshot: Snapshot
    resume: Resume
    compiling: Compiling
    noise_scale: TrialNoiseScale
    metric: LoggedMetric
    verdict: Verdict


def parts_of(
    spec: TrialSpec,
    protocol: TrialProtocol,
    validation_examples: int,
    clock: TrialClock,
    resume: Stopped | None,
    horizon: int | None,
    versions: Mapping[str, str],
) -> Parts:
    """Make the parts of a trial that begins.

    Args:
        spec: of the trial.
        protocol: of all trials.
        validation_examples: examples in an evaluation.
        clock: counts the trial's seconds.
        resume: the stopped trial from which this one goes on; None: it starts afresh.
        horizon: steps after which the Trainer ends by itself; None: the trial's parts keep it going
            until the trial has its steps.
        versions: of the packages, which must be those of a resumed state.

    Raises:
        StateError: says that the stopped trial cannot be resumed.
        ConfigError: says that no step is left.
    """
    # Whether this process trains the trial by itself.
    alone = distributed.place() is None
    start = _start_of(spec, protocol, resume, versions)
    state = start.state
    cadence = Cadence(spec, protocol, validation_examples)
    if start.stopped is not None:
        cadence.go_on(start.stopped, state.history)
    # A Trainer with a horizon ends there by itself; any other one is kept going by these parts.
    is_kept_going = horizon is None
    compiling = Compiling(protocol.compile, clock)
    # Each of several processes would see another time, so none has a limit.
    max_seconds = spec.max_seconds if alone else None
    return Parts(
        spec=spec,
        protocol=protocol,
        clock=clock,
        state=state,
        micro_batch_sizes=micro_batch_sizes_of(spec.batch_size, protocol.micro_batch_size),
        one_process=OneProcess(),
        agreed_stop=AgreedStop(alone),
        step_count=StepCount(state, adds_steps=is_kept_going),
        last_step=LastStep(state, max_seconds),
        cadence=cadence,
        epoch_ends=EpochEnds(state, adds_epochs=is_kept_going),
        phases=Phases(state, clock, protocol.warmup_steps),
        generators=start.generators,
        snapshot=Snapshot(spec, protocol, versions),
        resume=Resume(start.stopped),
        compiling=compiling,
        noise_scale=TrialNoiseScale(
            protocol.noise_scale_every, partial(aside, clock, compiling), alone
        ),
        metric=LoggedMetric(protocol.target.metric),
        verdict=Verdict(
            state,
            protocol.target,
            protocol.divergence,
            start.gap,
            # ``spec.goal`` is the value that the study's first trial reached. Another seed's
            # untrained weights may already meet it, which must not be refused.
            may_start_at_target=spec.goal is not None,
            sets_goal=spec.sets_goal,
        ),
    )


@dataclass(frozen=True)
class _Start:
    """What a trial begins with: afresh, or as a stopped trial left it."""

    state: TrialState
    generators: Generators
    # The stopped trial's state; None: the trial starts afresh.
    stopped: StoppedState | None = None
    # How far from the target untrained weights are; None: the trial measures it as it starts.
    gap: float | None = None


def _start_of(
    spec: TrialSpec, protocol: TrialProtocol, resume: Stopped | None, versions: Mapping[str, str]
) -> _Start:
    """Read what a trial begins with, if it goes on from a stopped one; else make it afresh.

    The arguments and errors are those of :func:`parts_of`.
    """
    if resume is None:
        state = TrialState(first_step=0, last_step=last_step_of(spec, protocol, steps=0), steps=0)
        return _Start(state, Generators())
    device = device_name(protocol.trainer, protocol.devices)
    stopped = read_state(resume, spec, device, versions)
    last_step = last_step_of(spec, protocol, stopped.steps)
    return _Start(
        state=state_after(resume.record, stopped.skipped, last_step),
        generators=Generators(stopped.generators),
        stopped=stopped,
        gap=stopped.start_gap,
    )
