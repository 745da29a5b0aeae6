"""Replay tables made from formulas, so that the answer to a search on them is known.

A law says how many steps and seconds every (batch size, learning rate) takes; :func:`synthetic_table` writes runs that
follow it into a :class:`bstune.trial.replay.Table`, in place of recorded ones.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product

import numpy as np

from bstune.core.records import Target
from bstune.trial.recorded_run import Outcome, Run
from bstune.trial.replay import Table

# The steps of a run, in units of S*(B).
LONGEST = 8.0
# The ratio of evaluated steps.
CADENCE = 1.05
# A share of the steps that the best learning rate needs.
DIVERGES_AFTER = 0.1
# In units of the metric at the start.
DIVERGED_METRIC = 2.0
BATCH_SIZES = tuple(2**k for k in range(3, 13))
LRS = tuple(2.0**k for k in range(-11, 2))
# Of the metric: its first value, the target's and the best that it can have.
START, TARGET, FLOOR = (0.9, 0.1, 0.05)
# The steepness of the metric's power law in steps.
STEEPNESS = 0.7


@dataclass(frozen=True)
class Law:
    """Steps and seconds of every (batch size B, learning rate lr); all that is needed to know the best of them.

    S*(B) = S_min (1 + B_crit/B) (McCandlish et al. 2018, eq. 2.11), or another of ``kind``, whose slope of log S* over
    log B is -1/2 at B_crit too: ``power`` S_min (1 + (k/B)^p), ``knee`` S_min (1 + (B_crit/B)^p)^(1/p), and
    ``u_shape`` S_min (1 + B_crit/B + (p B_crit/B)^2), which is judged by its own B_crit. Off the best learning rate,
    with delta = log2(lr/lr*(B)) octaves, log S rises by ``left`` or ``right`` times delta^2: an assumption. The fastest
    batch size of the first is sqrt(B_crit overhead/per_example), a stationary point of S*(B) tau(B).
    """

    # The fewest steps, at unlimited batch size.
    s_min: float = 200.0
    b_crit: float = 400.0
    # The best learning rate at ``batch_size``.
    lr: float = 0.1
    batch_size: float = 128.0
    # The best learning rate is lr (B/batch_size)^exponent.
    exponent: float = 0.5
    # Curvature of log S below the best learning rate, per squared octave.
    left: float = 0.12
    # The same above it.
    right: float = 0.5
    # Octaves above the best learning rate from which a run diverges.
    edge: float = 3.0
    # Standard deviation of log S from run to run.
    noise: float = 0.0
    # Seconds per step that do not depend on the batch size.
    overhead: float = 1e-3
    # Seconds per step and example.
    per_example: float = 5e-6
    kind: str = "two_terms"
    # p of another kind.
    parameter: float = 1.0
    # The share of the runs that reach the target at half of their steps.
    luck: float = 0.0
    # The ratio of evaluated steps.
    cadence: float = CADENCE

    def best_lr(self, batch_size: float) -> float:
        return self.lr * float((batch_size / self.batch_size) ** self.exponent)

    def frontier(self, batch_size: float) -> float:
        ratio = self.b_crit / batch_size
        p = self.parameter
        # The slope is -p r/(1 + r), r = (k/B)^p.
        if self.kind == "power":
            return self.s_min * (1.0 + ratio**p / (2.0 * p - 1.0))
        if self.kind == "knee":
            return self.s_min * float((1.0 + ratio**p) ** (1.0 / p))
        return self.s_min * (1.0 + ratio + (0.0 if self.kind == "two_terms" else (p * ratio) ** 2))

    def steps(self, batch_size: float, lr: float) -> float | None:
        """Steps to target S(B, lr) without noise; None where the run diverges."""
        delta = math.log2(lr / self.best_lr(batch_size))
        if delta >= self.edge:
            return None
        return self.frontier(batch_size) * math.exp(
            (self.left if delta < 0 else self.right) * delta**2
        )

    def tau(self, batch_size: float) -> float:
        return self.overhead + self.per_example * batch_size


def metric_history(
    steps: Sequence[int], reached_at: int, noise: float, rng: np.random.Generator
) -> tuple[float, ...]:
    """A metric that reaches TARGET at step S: FLOOR + (START - FLOOR) (1 + steps/t0)^-STEEPNESS.

    ``noise`` is the standard deviation of log(metric - FLOOR) from evaluation to evaluation; it never moves S.
    """
    height = (START - FLOOR) / (TARGET - FLOOR)
    scale = reached_at / (height ** (1.0 / STEEPNESS) - 1.0)
    at = np.asarray(steps, dtype=np.float64)
    above = (START - FLOOR) * (1.0 + at / scale) ** -STEEPNESS
    values = FLOOR + above * np.exp(noise * rng.standard_normal(at.size))
    missed = math.nextafter(TARGET, math.inf)
    values = np.where(at < reached_at, np.maximum(values, missed), np.minimum(values, TARGET))
    return tuple(values.tolist())


def synthetic_table(
    law: Law,
    batch_sizes: Sequence[int] = BATCH_SIZES,
    lrs: Sequence[float] = LRS,
    seeds: Sequence[int] = (0, 1),
    metric_noise: float = 0.0,
) -> Table:
    """A table of runs that follow ``law``, stopped at LONGEST times S*(B) steps."""
    return Table(tuple(_run(law, metric_noise, *cell) for cell in product(batch_sizes, lrs, seeds)))


@dataclass(frozen=True)
class LawTable(Table):
    """A table of a law without noise, for what is judged; a trial draws a run of its own from the law, by its seed."""

    law: Law
    metric_noise: float

    def outcome(self, batch_size: float, lr: float, seed: int, target: Target) -> Outcome:
        run = _run(self.law, self.metric_noise, round(batch_size), lr, seed)
        steps = run.steps_to(target)
        pairs = zip(run.steps, run.metric, strict=True)
        end = run.end if steps is None else steps
        history = tuple((step, value) for step, value in pairs if step <= end)
        tau = self.read(batch_size, lr, target, 0.5).seconds_per_step
        return Outcome(steps, end, tau, history, run.diverged and steps is None)


def law_table(law: Law, lrs: Sequence[float] = LRS, metric_noise: float = 0.0) -> LawTable:
    """The table of a law whose trials scatter as real ones do: no two of them share their noise."""
    quiet = synthetic_table(replace(law, noise=0.0, luck=0.0), lrs=lrs, seeds=(0,))
    return LawTable(quiet.runs, law, metric_noise)


def _run(law: Law, metric_noise: float, batch_size: int, lr: float, seed: int) -> Run:
    cell = np.frombuffer(np.float64(lr).tobytes(), dtype=np.uint32)
    rng = np.random.default_rng([seed, batch_size, *cell.tolist()])
    steps = law.steps(batch_size, lr)
    scatter = math.exp(law.noise * rng.standard_normal())
    if law.luck and rng.random() < law.luck:
        scatter *= 0.5
    if steps is None:
        end = max(1, round(law.frontier(batch_size) * DIVERGES_AFTER))
        evaluated = _evaluated(end)
        values = tuple(np.linspace(START, START * DIVERGED_METRIC, len(evaluated)).tolist())
    else:
        reached_at = max(1, round(steps * scatter))
        end = min(reached_at, max(1, round(law.frontier(batch_size) * LONGEST)))
        # On a grid that does not know the run, it ends after it has reached the target.
        if law.cadence > CADENCE:
            end = math.ceil(
                10.0
                * law.cadence ** math.ceil(math.log(max(end, 10) / 10.0) / math.log(law.cadence))
            )
        evaluated = _evaluated(end, law.cadence)
        values = metric_history(evaluated, reached_at, metric_noise, rng)
    return Run(batch_size, lr, seed, evaluated, values, law.tau(batch_size), diverged=steps is None)


def _evaluated(end: int, cadence: float = CADENCE) -> tuple[int, ...]:
    """Steps at most ``cadence`` apart in ratio, or one step, the last of them ``end``."""
    count = math.ceil(math.log(end) / math.log(cadence))
    return tuple(sorted({max(1, round(end * cadence**-k)) for k in range(count + 1)}))
