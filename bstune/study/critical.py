"""The critical batch size: the law's parameter with its interval, open where no trial bounds it.

B_crit is sampled together with the piecewise-linear misfit (:mod:`bstune.search.law`), so that its
interval knows how far the law is wrong.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from bstune.core.curve import REGIME_RATIO
from bstune.core.noise_scale import NoiseScaleEstimate, Terms, estimate_noise_scale
from bstune.core.records import Record, Records, last_of_chains
from bstune.search.findings import b_crit_quantiles
from bstune.search.posterior import Posterior
from bstune.study.estimates import step_time_of
from bstune.study.plan import Plan
from bstune.study.result import Critical, Interval

Array = NDArray[np.float64]

# An interval of B_crit may reach so many times beyond the batch sizes at which trials reached the
# target. On 270 synthetic studies (nine kinds, trials around a size up to 2.5 octaves off B_crit)
# intervals hold as often with 2 as with 4, 245 times, and have a value in 169 and in 201 studies.
# As many hold where a Bayes factor of 2 against what lies beyond is asked for, too.
ROOM = 4.0
OCTAVE = 2.0
# Upper over lower end of a narrow interval.
NARROW = 2.0
# The noise scale is of trials that took at most so many times what the best one did.
NEAR_BEST = 2.0
# Batch sizes among the trials at which the law that is drawn is fitted to the curve.
SIZES = 33


def critical_batch_size(posterior: Posterior, records: Records) -> Critical:
    """B_crit with its 90% interval; arguments as of :func:`critical_among`."""
    return critical_among(posterior, [one.batch_size for one in records if one.reached])


def critical_among(posterior: Posterior, sizes: Sequence[int]) -> Critical:
    """B_crit with its 90% interval.

    An end that trials do not bound is None, and so is the value then: "above 812". The end that is
    left lies among the trials, an octave from the last one: a slope is not seen from one side, and
    of 20 studies of ``digits`` some had put B_crit below all of their trials, wrongly.

    Args:
        posterior: of all trials, with the misfit.
        sizes: batch sizes at which trials reached the target, one at least.
    """
    low, value, high = b_crit_quantiles(posterior)
    smallest, largest = min(sizes), max(sizes)
    is_open_above = high > largest * ROOM
    is_open_below = low < smallest / ROOM
    if is_open_above or is_open_below:
        # Both ends open: nothing is known. One end alone still bounds it.
        interval = Interval(
            value=None,
            low=None if is_open_below else min(low, largest / OCTAVE),
            high=None if is_open_above else max(high, smallest * OCTAVE),
        )
        return Critical(interval=interval, smallest=smallest, largest=largest)
    among = np.geomspace(smallest, largest, SIZES)
    log_steps = np.median(posterior.law.curve(posterior.theta, np.log2(among)), axis=0)
    return Critical(
        interval=Interval(value=value, low=low, high=high),
        s_min=best_s_min(among, np.exp(log_steps), value),
        linear_below=value / REGIME_RATIO,
        no_gain_above=value * REGIME_RATIO,
        smallest=smallest,
        largest=largest,
    )


def is_narrow(interval: Interval) -> bool:
    """Whether both ends of B_crit are bounded and close to each other: then no trial is missing."""
    if interval.low is None or interval.high is None:
        return False
    return interval.high <= NARROW * interval.low


def best_s_min(batch_sizes: Array, steps: Array, b_crit: float) -> float:
    """S_min of the law S_min (1 + B_crit/B) that fits a curve best, in steps, B_crit being given.

    It is the least-squares fit in log steps. The median of S_min over the posterior would not do:
    B_crit and S_min hang together, and their medians are no law that fits.

    Args:
        batch_sizes, steps: of the curve, (n,).
        b_crit: in examples.
    """
    return float(np.exp(np.mean(np.log(steps) - np.log1p(b_crit / batch_sizes))))


def noise_scale(plan: Plan, records: Records) -> NoiseScaleEstimate | None:
    """The gradient noise scale of the trials near the best, in the later half of their steps.

    None where it was not measured, or too rarely: it is not known then whether |G|^2 is 0.

    Args:
        plan: with the question, by which a trial is near the best.
        records: of all trials.
    """
    reached = [
        record for record in last_of_chains(records) if record.reached and record.noise_scale
    ]
    if not reached:
        return None
    step_time = step_time_of(plan, records)

    def value(record: Record) -> float:
        return plan.question.value(record.steps_to_target, record.batch_size, step_time)

    most = NEAR_BEST * min(map(value, reached))
    measured = list[Terms]()
    for record in reached:
        if value(record) <= most:
            # It grows during a training.
            late = [one for one in record.noise_scale if 2 * one[0] > record.steps]
            measured += [(gradient, trace) for _, gradient, trace in late]
    return estimate_noise_scale(measured)
