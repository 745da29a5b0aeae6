"""How well one law fits the curves of several studies.

If S(B) = S_min (1 + B_crit/B) holds, then the curves of all studies are one: S/S_min over
B/B_crit. Their distance from it is the root mean square of log(S*(B)/S_min) - log(1 + B_crit/B). It
is taken over the batch sizes that reached the target, evenly in log B, and each study counts alike.
S*(B) is the posterior's, at the best learning rate: the law, and a smooth curve that may be added
to it. Where trials are few the posterior lies near the law by itself. So a second number stands
beside the distance: the share of the batch sizes at which the law lies in the study's own interval
of S*(B). Far below the interval's level the trials speak against the law.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from bstune.report.compared_study import Array, Compared
from bstune.system.console import format_number


@dataclass(frozen=True)
class Collapse:
    """How well the curves of several studies lie on the law S/S_min = 1 + B_crit/B."""

    deviation: float
    """Root mean square of the studies' deviations, as a share: 0.1 is 10%."""
    by_study: Mapping[str, float]
    """The deviation of each study from the law, as a share, by the study's name."""
    inside: float
    """Share of the batch sizes at which the law lies in a study's interval of S*(B)."""
    level: float
    """The level of these intervals."""
    smallest: float
    """The least B/B_crit at which the law is judged."""
    largest: float
    """The largest B/B_crit at which the law is judged."""

    def __str__(self) -> str:
        """Say how far the curves lie from the law, and how often their intervals hold it."""
        span = f"{format_number(self.smallest, 2)} to {format_number(self.largest, 2)}"
        text = f"S*(B) lies within {self.deviation:.0%} of it (root mean square, B/B_crit = {span}"
        # A single study's deviation is the one that was just said.
        if len(self.by_study) > 1:
            deviation_of = self.by_study.__getitem__
            best = min(self.by_study, key=deviation_of)
            worst = max(self.by_study, key=deviation_of)
            text += f"; {deviation_of(best):.0%} for {best}, {deviation_of(worst):.0%} for {worst}"
        inside = f"{self.level:.0%} intervals of S*(B) hold it at {self.inside:.0%}"
        return f"{text}); {inside} of the batch sizes"


def collapse(studies: Sequence[Compared]) -> Collapse | None:
    """Measure how well the studies' curves lie on the law S = S_min (1 + B_crit/B).

    Studies without a curve, B_crit or S_min are left out. None where no study remains.
    """
    squares: dict[str, float] = {}
    inside = list[float]()
    spans = list[float]()
    levels = list[float]()
    for study in studies:
        if study.b_crit is None or study.s_min is None or not study.steps.size:
            continue
        # The law is not fitted to the curve: both are of one posterior, so that only the curve's
        # shape is judged.
        law = study.s_min * (1.0 + study.b_crit / study.batch_size)
        squares[study.name] = float(np.mean(np.log(study.steps / law) ** 2))
        is_inside = (study.steps_low <= law) & (law <= study.steps_high)
        inside.append(float(np.mean(is_inside)))
        spans.append(float(study.batch_size[0]) / study.b_crit)
        spans.append(float(study.batch_size[-1]) / study.b_crit)
        levels.append(study.level)
    if not squares:
        return None
    return Collapse(
        deviation=_typical_deviation(sum(squares.values()) / len(squares)),
        by_study={name: _typical_deviation(square) for name, square in squares.items()},
        inside=sum(inside) / len(inside),
        # The level that the intervals of every study have at least.
        level=min(levels),
        smallest=min(spans),
        largest=max(spans),
    )


def points_over_law(study: Compared) -> tuple[Array, Array] | None:
    """Give a study's points in units of its law: B/B_crit and S/S_min, each of shape (n,).

    None where the study has no B_crit, no S_min or no points.
    """
    if study.b_crit is None or study.s_min is None or not study.points:
        return None
    batch_size = np.array([point.batch_size for point in study.points])
    steps = np.array([point.steps for point in study.points])
    return batch_size / study.b_crit, steps / study.s_min


def _typical_deviation(mean_square: float) -> float:
    """Turn a mean square of log ratios into a typical deviation: 0.1 for ratios of 1.1."""
    return math.expm1(math.sqrt(mean_square))
