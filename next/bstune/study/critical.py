"""The critical batch size: the law's parameter with its interval, open where no trial bounds it.

B_crit is sampled together with the piecewise-linear misfit (:mod:`bstune.search.law`), so that its
interval knows how far the law is wrong.
"""

from collections.abc import Sequence

import numpy as np

from bstune.core.records import Record
from bstune.search.findings import b_crit_quantiles, s_min
from bstune.search.law import B_CRIT
from bstune.search.posterior import Posterior
from bstune.study.result import Critical, Interval

# B_crit is claimed up to so many times the batch sizes at which trials reached the target.
ROOM = 2.0
# Least Bayes factor against what lies beyond an end; the prior's own end has 1.
END_ODDS = 2.0
PRIOR_DRAWS = 4000
# Keeps odds finite where no draw lies beyond an end.
LEAST_SHARE = 1e-3


def critical_batch_size(
    posterior: Posterior, records: Sequence[Record], seed: int
) -> Critical | None:
    """B_crit with its 90% interval; None where no trial reached the target.

    An end that trials do not bound is None, and so is the value then: "above 812".

    Args:
        posterior: of all trials, with the misfit.
        records: of all trials.
        seed: of the draws of the prior.
    """
    sizes = [record.batch_size for record in records if record.reached]
    if not sizes:
        return None
    low, value, high = b_crit_quantiles(posterior)
    smallest, largest = min(sizes), max(sizes)
    middle = posterior.law.middle
    ours = posterior.theta[:, B_CRIT] / np.log(2.0) + middle
    prior = posterior.law.sample_prior(PRIOR_DRAWS, np.random.default_rng(seed))
    before = prior[:, B_CRIT] / np.log(2.0) + middle
    top = np.log2(largest * ROOM)
    bottom = np.log2(smallest / ROOM)
    is_open_above = high > largest * ROOM or _odds(ours > top, before > top) < END_ODDS
    is_open_below = low < smallest / ROOM or _odds(ours < bottom, before < bottom) < END_ODDS
    # Both ends open: nothing is known. One end alone still bounds it.
    interval = Interval(
        value=None if is_open_above or is_open_below else value,
        low=None if is_open_below else low,
        high=None if is_open_above else high,
    )
    has_value = interval.value is not None
    return Critical(
        interval=interval,
        s_min=s_min(posterior) if has_value else None,
        smallest=smallest,
        largest=largest,
    )


def _odds(after: np.ndarray, before: np.ndarray) -> float:
    """The Bayes factor of the trials against a region, given draws that lie in it."""
    share_after = min(max(float(after.mean()), LEAST_SHARE), 1.0 - LEAST_SHARE)
    share_before = min(max(float(before.mean()), LEAST_SHARE), 1.0 - LEAST_SHARE)
    return (1.0 - share_after) / share_after * share_before / (1.0 - share_before)
