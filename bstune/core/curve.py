"""Facts of a steps-to-target curve S*(B): where its slope is -1/2, and its regimes.

On the law S_min (1 + B_crit/B) (McCandlish et al. 2018, arXiv 1812.06162, eq. 2.11) the slope of
log S* over log B is -1/2 at B_crit; of recorded runs and of other formulas that is the truth.
"""

import math
from collections.abc import Sequence

import numpy as np

SLOPE_AT_B_CRIT = -0.5
# The law's slope is -0.9 at B_crit/9 and -0.1 at 9 B_crit: between perfect scaling and maximal data
# parallelism (names: Shallue et al. 2018).
REGIME_RATIO = 9.0
# The slope is that of a line weighed by a normal distribution so many octaves wide, so that one
# batch size does not decide.
OCTAVES = 1.0
# The curve is drawn on over so many octaves beyond the points, so that the line has both sides.
BEYOND = 7.0
GRID = 600


def slope_b_crit(points: Sequence[tuple[float, float]]) -> float | None:
    """The batch size at which the slope of log S* over log B is -1/2, for tests and benchmarks.

    The curve is the law S_min (1 + B_crit/B) that fits the points best, times their distance from
    it, which is linear in log B between them and constant beyond. Where a noisy curve has the slope
    several times, all of log B at which it is steeper counts as coming first.

    Args:
        points: (B, S*(B)), positive, in any order, one a batch size.

    Returns:
        None where the slope is not reached between the points, and for fewer than two. Within an
        octave of an end it is drawn towards the law's.
    """
    if len(points) < 2:
        return None
    x, y = np.log(np.array(sorted(points), dtype=float)).T
    beyond = BEYOND * math.log(2.0)
    grid = np.linspace(x[0] - beyond, x[-1] + beyond, GRID)
    # B_crit is sought on the grid itself; for each the best S_min is the mean distance.
    distances = y - np.logaddexp(0.0, grid[:, None] - x)
    best = int(distances.var(axis=1).argmin())
    curve = np.logaddexp(0.0, grid[best] - grid) + np.interp(grid, x, distances[best])

    offset = grid - grid[:, None]
    weight = np.exp(-0.5 * (offset / (OCTAVES * math.log(2.0))) ** 2)
    weight /= weight.sum(axis=1, keepdims=True)
    centred = offset - (weight * offset).sum(axis=1, keepdims=True)
    slope = (weight * centred) @ curve / (weight * centred**2).sum(axis=1)

    # The share of each step of the grid in which the slope, linear in it, is steeper.
    low = np.minimum(slope[:-1], slope[1:])
    high = np.maximum(slope[:-1], slope[1:])
    steeper = np.clip((SLOPE_AT_B_CRIT - low) / np.maximum(high - low, 1e-12), 0.0, 1.0)
    found = grid[0] + (grid[1] - grid[0]) * steeper.sum()
    return math.exp(found) if x[0] <= found <= x[-1] else None
