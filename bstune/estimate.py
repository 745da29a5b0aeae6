"""How long a study may take, for the plan that is printed before it: from a few timed steps, or from its own trials."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from bstune.protocol import Budget, Protocol
from bstune.records import TrialResult, TrialSpec
from bstune.search.plan import Plan
from bstune.search.space import Space

PROBE_STEPS = 4
PROBE_WARMUP_STEPS = 1
PROBE_SPREAD = 4  # between the two batch sizes that are timed: small ones are cheap
QUADRATURE = 64  # batch sizes at which the mean over log B is taken


@dataclass(frozen=True)
class StepTime:
    """Seconds per training step as overhead + per_example x B."""

    overhead: float
    per_example: float

    def __call__(self, batch_size: float) -> float:
        """Return tau(B) in seconds."""
        return self.overhead + self.per_example * batch_size


def rehearsal(protocol: Protocol) -> Protocol:
    """Return a study's protocol for a trial of a few steps and an evaluation, which measures no noise."""
    return replace(
        protocol,
        budget=Budget(PROBE_STEPS, 1),
        warmup_steps=PROBE_WARMUP_STEPS,
        noise_scale_every=None,
        trainer={**protocol.trainer, "limit_val_batches": 1},
    )


def probe_step_time(space: Space, protocol: Protocol, train: Callable[[TrialSpec, Protocol], TrialResult]) -> StepTime:
    """Time a few steps at the smallest batch size and at one a few times larger.

    Args:
        space: what is searched.
        protocol: of the study.
        train: trains one trial.

    Raises:
        ConfigError: as ``train`` does: the first real training finds what no check can.
    """
    probe = rehearsal(protocol)
    sizes = sorted({space.snap(space.low), space.snap(min(space.high, space.low * PROBE_SPREAD))})
    seconds = []
    for batch_size in sizes:
        spec = TrialSpec(0, 0, batch_size, space.lr(batch_size, -space.delta_bound), None, 0)
        seconds.append(train(spec, probe).seconds_per_step or 0.0)
    if len(sizes) == 1:
        return StepTime(0.0, seconds[0] / sizes[0])
    slope = max(0.0, (seconds[1] - seconds[0]) / (sizes[1] - sizes[0]))
    return StepTime(max(0.0, seconds[0] - slope * sizes[0]), slope)


def most_seconds(
    plan: Plan,
    space: Space,
    last_step: Callable[[int], int],
    step_time: Callable[[float], float],
    evaluation_share: float,
) -> float:
    """Return the seconds of a study in which every trial runs to its end, evaluation included.

    The mean over batch sizes is taken evenly over log B; trials that reach the target end earlier.

    Args:
        plan: trials and limits of the study.
        space: batch sizes.
        last_step: steps at a batch size after which a trial gives up.
        step_time: seconds per step at a batch size.
        evaluation_share: of evaluation in training, in seconds.
    """
    shares = [(i + 0.5) / QUADRATURE for i in range(QUADRATURE)]
    sizes = [round(space.low * (space.high / space.low) ** share) for share in shares]
    training = [last_step(size) * step_time(size) for size in sizes]
    seconds = plan.trials * sum(training) / len(training)
    if plan.seconds is not None:
        seconds = min(seconds, plan.seconds + max(training))
    return seconds * (1.0 + evaluation_share)


def remaining_seconds(plan: Plan, results: Sequence[TrialResult]) -> float | None:
    """Return the seconds that the rest of a search takes if its trials go on as they did; None before the first."""
    done = [result.wall_seconds for result in results if result.status != "failed" and result.confirms is None]
    if not done:
        return None
    return max(0, plan.trials - len(done)) * sum(done) / len(done)
