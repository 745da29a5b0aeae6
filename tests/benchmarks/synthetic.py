"""Laws whose critical batch size is known, and tables whose trials follow them, each with noise.

Kinds, draws and streams of random numbers are those of the benchmark of bstune 0.1: a kind and
a seed are the same law, and a trial's seed the same run.
"""

import math
from dataclasses import dataclass, replace
from itertools import product

import numpy as np

from bstune.core.records import Target
from bstune.trial.table import Outcome, Run, Table

BATCH_SIZES = tuple(2**octave for octave in range(3, 13))
LRS = tuple(2.0**octave for octave in np.arange(-11.0, 1.25, 0.5).tolist())
# The geometric middle of the batch sizes, about.
MIDDLE = 181.0
# Runs are this many times S*(B) long, and evaluated at steps this ratio apart.
LONGEST = 8.0
CADENCE = 1.05
# A run at too high a rate diverges after this share of S*(B), at this many times the first metric.
DIVERGES_AFTER = 0.1
DIVERGED = 2.0
# The metric: FLOOR + (START - FLOOR) (1 + steps/t0)^-STEEPNESS.
START, GOAL, FLOOR = 0.9, 0.1, 0.05
STEEPNESS = 0.7
# Standard deviation of log(metric - FLOOR) at an evaluation.
METRIC_NOISE = 0.05
TARGET = Target("error", GOAL, "min")


@dataclass(frozen=True)
class Law:
    """Steps and seconds of every batch size and rate.

    With r = B_crit/B, S*(B) over S_min is ``1 + r`` (McCandlish et al. 2018, eq. 2.11), or of shape
    ``power`` ``1 + r^p/(2p - 1)``, ``knee`` ``(1 + r^p)^(1/p)``, ``u`` ``1 + r + (p r)^2``.
    """

    s_min: float
    b_crit: float
    lr: float
    """The best rate at ``MIDDLE``; it grows as B^exponent."""
    exponent: float
    left: float
    """What log S rises by, per squared octave below the best rate."""
    right: float
    edge: float
    """Octaves above the best rate from which runs diverge."""
    overhead: float
    """Seconds of a step that do not depend on its batch size."""
    per_example: float
    noise: float = 0.1
    """Standard deviation of log S from run to run."""
    shape: str = "two terms"
    p: float = 1.0
    luck: float = 0.0
    """Share of the runs that reach the target at half of their steps."""
    cadence: float = CADENCE

    def curve(self, batch_size):
        """S*(B)."""
        r, p = self.b_crit / batch_size, self.p
        if self.shape == "power":
            return self.s_min * (1.0 + r**p / (2.0 * p - 1.0))
        if self.shape == "knee":
            return self.s_min * (1.0 + r**p) ** (1.0 / p)
        return self.s_min * (1.0 + r + ((p * r) ** 2 if self.shape == "u" else 0.0))

    @property
    def half_slope(self):
        """The batch size at which the slope of log S* over log B is -1/2: B_crit but for ``u``.

        There the slope is -(r + 2 p^2 r^2)/(1 + r + p^2 r^2), which is -1/2 at 3 p^2 r^2 + r = 1.
        """
        if self.shape != "u":
            return self.b_crit
        a = 3.0 * self.p**2
        return self.b_crit * 2.0 * a / (math.sqrt(1.0 + 4.0 * a) - 1.0)

    def best_lr(self, batch_size):
        """lr*(B)."""
        return self.lr * float((batch_size / MIDDLE) ** self.exponent)

    def steps(self, batch_size, lr):
        """S(B, lr) without noise; None where runs diverge."""
        octaves = math.log2(lr / self.best_lr(batch_size))
        if octaves >= self.edge:
            return None
        curvature = self.left if octaves < 0 else self.right
        return self.curve(batch_size) * math.exp(curvature * octaves**2)

    def run(self, batch_size, lr, seed, metric_noise=0.0):
        """A run that ends at the target, or at the first evaluation behind it."""
        bits = np.frombuffer(np.float64(lr).tobytes(), dtype=np.uint32)
        rng = np.random.default_rng([seed, batch_size, *bits.tolist()])
        steps = self.steps(batch_size, lr)
        factor = math.exp(self.noise * rng.standard_normal())
        if self.luck and rng.random() < self.luck:
            factor *= 0.5
        if steps is None:
            evaluated = _evaluated(max(1, round(self.curve(batch_size) * DIVERGES_AFTER)))
            metric = np.linspace(START, START * DIVERGED, len(evaluated))
        else:
            reached = max(1, round(steps * factor))
            end = min(reached, max(1, round(self.curve(batch_size) * LONGEST)))
            if self.cadence > CADENCE:
                # On a grid of its own, which no run's end moves.
                place = math.log(max(end, 10) / 10.0) / math.log(self.cadence)
                end = math.ceil(10.0 * self.cadence ** math.ceil(place))
            evaluated = _evaluated(end, self.cadence)
            metric = _metric(np.array(evaluated, dtype=float), reached, metric_noise, rng)
        return Run(
            batch_size=batch_size,
            lr=lr,
            seed=seed,
            steps=evaluated,
            metric=tuple(metric.tolist()),
            seconds_per_step=self.overhead + self.per_example * batch_size,
            status="diverged" if steps is None else None,
        )


def _evaluated(end, cadence=CADENCE):
    """Steps at most ``cadence`` apart in ratio, the last of them ``end``."""
    count = math.ceil(math.log(end) / math.log(cadence))
    return tuple(sorted({max(1, round(end * cadence**-place)) for place in range(count + 1)}))


def _metric(steps, reached, noise, rng):
    """The metric at some steps; it meets the goal from step ``reached`` on, whatever the noise."""
    height = (START - FLOOR) / (GOAL - FLOOR)
    scale = reached / (height ** (1.0 / STEEPNESS) - 1.0)
    above = (START - FLOOR) * (1.0 + steps / scale) ** -STEEPNESS
    values = FLOOR + above * np.exp(noise * rng.standard_normal(steps.size))
    missed = math.nextafter(GOAL, math.inf)
    return np.where(steps < reached, np.maximum(values, missed), np.minimum(values, GOAL))


# What sets a kind of laws apart.
KINDS = {
    "noise 10%": {},
    "noise 20%": {"noise": 0.2},
    "noise 30%": {"noise": 0.3},
    "exponent 0.7": {"shape": "power", "p": 0.7},
    "exponent 1.5": {"shape": "power", "p": 1.5},
    "sharp knee": {"shape": "knee", "p": 4.0},
    "u-shape": {"shape": "u"},
    "lucky hits": {"luck": 0.1},
    "coarse cadence": {"cadence": 1.25},
}


def draw_law(kind, seed):
    """A law that a real table could have, its B_crit well within the batch sizes."""
    rng = np.random.default_rng([seed, 1])

    def log_uniform(low, high):
        return math.exp(rng.uniform(math.log(low), math.log(high)))

    per_example = log_uniform(1e-6, 1e-4)
    law = Law(
        s_min=log_uniform(50.0, 500.0),
        b_crit=log_uniform(32.0, 1024.0),
        lr=2.0 ** rng.uniform(-6.5, -4.5),
        exponent=float(rng.choice((0.0, 0.5, 1.0))),
        left=rng.uniform(0.06, 0.2),
        right=rng.uniform(0.2, 0.6),
        edge=rng.uniform(2.0, 3.5),
        overhead=per_example * log_uniform(20.0, 2000.0),
        per_example=per_example,
        **KINDS[kind],
    )
    if kind == "u-shape":
        # Where the examples are fewest.
        b_opt = log_uniform(24.0, 96.0)
        b_crit = max(law.b_crit, 2.0 * b_opt)
        law = replace(law, b_crit=b_crit, p=b_opt / b_crit)
    return law


@dataclass(frozen=True)
class LawTable(Table):
    """Runs of a law without noise, for what is judged; a trial draws a run of its own."""

    law: Law | None = None

    def outcome(self, batch_size, lr, seed, target):
        """The trial's own run, by its seed."""
        assert self.law is not None
        run = self.law.run(round(batch_size), lr, seed, METRIC_NOISE)
        steps = run.steps_to(target)
        end = run.end if steps is None else steps
        seconds = self.outcome_at(batch_size, lr, 0.5, target).seconds_per_step
        return Outcome(steps, end, seconds, run.history(end), run.diverged and steps is None)


def law_table(law):
    """The table of a law."""
    quiet = replace(law, noise=0.0, luck=0.0)
    runs = [quiet.run(size, lr, seed=0) for size, lr in product(BATCH_SIZES, LRS)]
    return LawTable(tuple(runs), TARGET, law)
