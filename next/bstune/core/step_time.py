"""tau(B), the seconds of a step, as a robust law through the trials' own step times.

``tau(B) = overhead + per_example B``, both at least 0: what each step costs, and each example. A
survey's timings will take its place as the first source.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import least_squares

from bstune.core.records import Record, StepTime

# Beyond so many (in log tau) a timing counts as an outlier: 10% is what quiet machines scatter.
OUTLIER = 0.1
# Least relative standard deviation that is claimed: no step is a straight line in B.
LEAST_DEVIATION = 0.05
# The relative standard deviation that a single timing counts as having.
UNSEEN_DEVIATION = 0.2
# A median absolute residual, times this, is a normal distribution's standard deviation.
TO_DEVIATION = 1.4826
# The pull of both parts of the law to a half of the step, in residuals of log tau: it decides where
# timings do not, as of one batch size alone.
PULL = 0.01
# Octaves between a batch size and the nearest timed one over which the error doubles.
OCTAVES_TO_DOUBLE = 2.0


@dataclass(frozen=True)
class StepTimeLaw:
    """tau(B) = overhead + per_example B, in seconds."""

    overhead: float
    per_example: float
    deviation: float
    """Relative standard deviation of the law at the batch sizes that were timed."""
    timed: tuple[float, ...]
    """The batch sizes that were timed, ascending."""

    def __call__(self, batch_size: float) -> float:
        """Seconds of a step."""
        return self.overhead + self.per_example * batch_size

    def error(self, batch_size: float) -> float:
        """Relative standard deviation of tau at a batch size; it grows away from timed ones."""
        octaves = min(abs(math.log2(batch_size / size)) for size in self.timed)
        return float(self.deviation * 2.0 ** (octaves / OCTAVES_TO_DOUBLE))


def step_time_of_trials(records: Iterable[Record], middle: float) -> StepTime:
    """tau(B), in seconds, by the trials' own step times.

    Before the first one it is an overhead as large as what the ``middle`` batch size's examples
    take: a guess in no unit, which only ranks batch sizes.
    """
    timings = []
    for record in records:
        if record.seconds_per_step is not None:
            timings.append((record.batch_size, record.seconds_per_step))
    return fit_step_time(timings) or (lambda batch_size: 1.0 + batch_size / middle)


def fit_step_time(timings: Sequence[tuple[float, float]]) -> StepTimeLaw | None:
    """Fit the law to (batch size, seconds of a step), one a trial; None without a timing.

    The residuals are those of log tau, with the loss ``soft_l1`` beyond ``OUTLIER``, so that a busy
    minute does not bend the law. One batch size alone gives half of the step to each part.
    """
    if not timings:
        return None
    sizes = np.array([size for size, _ in timings], dtype=float)
    logs = np.log([seconds for _, seconds in timings])
    middle = float(np.exp(np.log(sizes).mean()))
    start = math.log(0.5) + float(np.median(logs))

    def residuals(log_parts: np.ndarray) -> np.ndarray:
        """Residuals of log tau, (n,), and the pull of both parts to a half of the step, (2,)."""
        overhead, per_middle = np.exp(log_parts)
        predicted = np.log(overhead + per_middle * sizes / middle)
        return np.concatenate([predicted - logs, PULL * (log_parts - start)])

    fit = least_squares(residuals, [start, start], loss="soft_l1", f_scale=OUTLIER)
    overhead, per_middle = np.exp(fit.x)
    # What a single timing counts as having is one more residual.
    off = np.append(np.abs(residuals(fit.x)[: len(logs)]), UNSEEN_DEVIATION / TO_DEVIATION)
    deviation = max(LEAST_DEVIATION, TO_DEVIATION * float(np.median(off)))
    return StepTimeLaw(
        overhead=float(overhead),
        per_example=float(per_middle / middle),
        deviation=deviation if len(timings) > 2 else UNSEEN_DEVIATION,
        timed=tuple(sorted(set(sizes.tolist()))),
    )
