"""The critical batch size: the law's parameter with its interval, open where no trial bounds it.

B_crit is sampled together with the piecewise-linear misfit (:mod:`bstune.search.law`), so that its
interval knows how far the law is wrong.
"""

import math
import statistics
from collections.abc import Sequence

from bstune.core.records import Record
from bstune.search.findings import CurvePoint, b_crit_quantiles
from bstune.search.posterior import Posterior
from bstune.study.result import Critical, Interval

# An interval of B_crit may reach so many times beyond the batch sizes at which trials reached the
# target. On 270 synthetic studies (nine kinds, trials around a size up to 2.5 octaves off B_crit)
# intervals hold as often with 2 as with 4, 245 times, and have a value in 169 and in 201 studies.
# As many hold where a Bayes factor of 2 against what lies beyond is asked for, too.
ROOM = 4.0
# Between B_crit over this and this times B_crit returns diminish: the slope of log S* over log B is
# -0.9 and -0.1 there (regimes of Shallue et al. 2018, arXiv 1811.03600).
REGIME = 9.0


def critical_batch_size(
    posterior: Posterior, records: Sequence[Record], points: Sequence[CurvePoint]
) -> Critical:
    """B_crit with its 90% interval.

    An end that trials do not bound is None, and so is the value then: "above 812". The end that is
    left lies among the trials, as the law tells nothing of what is beyond them.

    Args:
        posterior: of all trials, with the misfit.
        records: of all trials, of which one at least reached the target.
        points: of the curve, which the law is drawn beside.
    """
    sizes = [record.batch_size for record in records if record.reached]
    low, value, high = b_crit_quantiles(posterior)
    smallest, largest = min(sizes), max(sizes)
    is_open_above = high > largest * ROOM
    is_open_below = low < smallest / ROOM
    if is_open_above or is_open_below:
        # Both ends open: nothing is known. One end alone still bounds it.
        interval = Interval(
            value=None,
            low=None if is_open_below else min(low, largest),
            high=None if is_open_above else max(high, smallest),
        )
        return Critical(
            interval=interval,
            s_min=None,
            linear_below=None,
            no_gain_above=None,
            smallest=smallest,
            largest=largest,
        )
    among = [point for point in points if smallest <= point.batch_size <= largest]
    return Critical(
        interval=Interval(value=value, low=low, high=high),
        s_min=best_s_min(among or points, value),
        linear_below=value / REGIME,
        no_gain_above=value * REGIME,
        smallest=smallest,
        largest=largest,
    )


def best_s_min(points: Sequence[CurvePoint], b_crit: float) -> float:
    """S_min of the law S_min (1 + B_crit/B) that fits a curve best, in steps, B_crit being given.

    It is the least-squares fit in log steps. The median of S_min over the posterior would not do:
    B_crit and S_min hang together, and their medians are no law that fits.

    Args:
        points: of the curve, at least one, evenly spaced in log B.
        b_crit: in examples.
    """
    off = [math.log(point.steps) - math.log1p(b_crit / point.batch_size) for point in points]
    return math.exp(statistics.fmean(off))
