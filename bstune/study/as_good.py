"""Which other batch sizes are as good as the best one: the range that a user may choose from."""

from bstune.core.records import Merit, TrialResult
from bstune.result import AsGood, Curve

# By how much more time, or how many more steps, than the least a batch size is as good.
AS_GOOD_WITHIN = 0.1


def as_good(curve: Curve | None, winner: TrialResult | None, merit: Merit) -> AsGood | None:
    """Give the batch sizes around the curve's best that take at most a tenth more.

    They are those of one range of the curve's ladder, so that all between its ends are as good;
    the winner, which fresh seeds have chosen, is always one of them.

    Args:
        curve: S*(B), tau(B) and the best learning rates; None: there is none.
        winner: the trial to use.
        merit: whether seconds or steps count.
    """
    if curve is None or winner is None:
        return None
    values = curve.steps
    if merit == "time":
        if curve.seconds_per_step is None:
            return None
        pairs = zip(curve.steps, curve.seconds_per_step, strict=True)
        values = tuple(steps * seconds for steps, seconds in pairs)
    best = values.index(min(values))
    most = (1.0 + AS_GOOD_WITHIN) * values[best]
    first = best
    while first > 0 and values[first - 1] <= most:
        first -= 1
    last = best
    while last < len(values) - 1 and values[last + 1] <= most:
        last += 1
    own = (winner.batch_size, winner.lr)
    low, lr_low = min((round(curve.batch_size[first]), curve.lr[first]), own)
    high, lr_high = max((round(curve.batch_size[last]), curve.lr[last]), own)
    return AsGood(
        merit=merit,
        within=AS_GOOD_WITHIN,
        low=low,
        high=high,
        lr_low=lr_low,
        lr_high=lr_high,
    )
