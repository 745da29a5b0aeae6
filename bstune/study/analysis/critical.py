"""The critical batch size that a study ends with, its interval, and the trials that would narrow it.

There is one estimate, the same in the console, the figure, ``curve.json`` and MLflow: the median over the posterior of
all trials, stopped ones too, of where the slope of log S* over log B is -1/2
(:func:`bstune.search.acquisition.log_b_crit`). What lies more than an octave outside of the batch sizes that reached
the target is not claimed, nor is an end of the interval that the prior sets and not the trials.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtr

from bstune.core.curve import SLOPE_RATIO, batch_at
from bstune.core.records import Target, TrialResult
from bstune.result import (
    INTERVAL_LEVEL,
    INTERVAL_QUANTILE,
    CriticalAtTarget,
    CriticalBatchSize,
    Growth,
    NextTrial,
    finite,
)
from bstune.search.acquisition import b_crit_quantiles, log_b_crit, most_telling
from bstune.search.observations import Posterior
from bstune.search.posterior import B_CRIT, B_OPT, LEVEL, NOISE, Prior, draw_prior
from bstune.system.console import format_count, plural

INTERVAL = (0.05, 0.95)  # of B_crit's posterior, INTERVAL_LEVEL wide; search.precision stops by it
ROOM = 2.0  # times the largest batch size that reached the target, and of the smallest: as far as the curve is claimed
END_ODDS = 2.0  # least Bayes factor against what lies beyond an end of the interval; the prior's own end has 1
PRIOR_DRAWS = 2000
ODDS, SHARE = (
    10.0,
    0.9,
)  # of a small-batch term: least Bayes factor, and least posterior probability, to report it
NARROW = 3.0  # times the interval's low end: a wider interval asks for trials ...
NEXT_TRIALS = 3  # ... so many
EASIER = tuple(
    1.06**k for k in range(1, 21)
)  # targets, as multiples of the target's distance from the ideal value
MAX_EASIER = 5  # of those that enough trials passed
# Where schedules end with the trial: largest over smallest batch size that reached the target, at least.
HORIZON_SPAN = 10.0
# Of the posterior, that a small-batch term has and has not, where the trials do not tell ...
UNTOLD_SHARE = 0.1
# ... and the ratio of B_crit without it to B_crit with it, from which on that matters.
UNTOLD_FACTOR = 1.5
CONTRADICTION = 2.0  # standard deviations of the scatter from seed to seed, of two batch sizes
MIN_GROWTH = 3  # targets with B_crit and both ends of its interval, for the exponent of its growth
MIN_PASSED, MIN_SPAN = (
    8,
    8.0,
)  # trials that passed an easier target, and their batch sizes' largest over smallest
FINE, MAX_COARSE = (
    0.7,
    0.2,
)  # last miss over first hit, and the share of them whose evaluations may be further apart


def critical_batch(posterior: Posterior, in_seconds: bool = True) -> CriticalBatchSize | None:
    """Return the critical batch size by all trials; None where none reached the target."""
    sizes = [round(2.0**one.x) for one in posterior.observations if one.status == "reached"]
    if not sizes:
        return None
    smallest, largest = min(sizes), max(sizes)

    def claimed(value: float) -> float | None:  # one batch size alone says nothing of the others
        return value if smallest < largest and smallest / ROOM <= value <= largest * ROOM else None

    theta, prior = posterior.theta, posterior.prior
    low, middle, high = b_crit_quantiles(posterior, (INTERVAL[0], 0.5, INTERVAL[1])).tolist()
    middle_size = 2.0**prior.log_mid
    scale, opt = np.exp(theta[:, B_CRIT]), np.exp(theta[:, B_OPT])
    s_min = np.exp(theta[:, LEVEL]) / (1.0 + scale + opt**2)
    b_opt = _b_opt(posterior, smallest)
    fewest = s_min * middle_size * (scale + (0.0 if b_opt is None else 2.0 * opt))
    # Of an end beyond what is claimed it is claimed that it lies beyond.
    by_trials = _set_by_trials(prior, low, middle, high)
    claimed_low = claimed(min(low, largest * ROOM)) if by_trials[0] else None
    claimed_high = claimed(max(high, smallest / ROOM)) if by_trials[1] else None
    ends_open = (claimed_low is None) + (claimed_high is None)
    b_crit = (
        None if ends_open == 2 else claimed(middle)
    )  # of an interval without an end the prior chooses the middle
    small_batch = 0.0 if b_opt is None else b_opt[1]
    # Ends beyond a range whose own end was reached are shown by no trial of this search.
    bottom, top = 2.0**prior.log_low, 2.0**prior.log_high
    below = sum(end < bottom / ROOM for end in (low, high)) if smallest <= bottom * ROOM else 0
    above = sum(end > top * ROOM for end in (low, high)) if largest >= top / ROOM else 0
    wide = ends_open > below + above or (ends_open == 0 and high > NARROW * low)
    note = _beyond_search(below > 0, above > 0)
    reason = _undetermined(posterior)
    if reason is not None:
        b_crit = claimed_low = claimed_high = None
        wide = True
        note = reason
    return CriticalBatchSize(
        value=b_crit,
        low=claimed_low,
        high=claimed_high,
        level=INTERVAL_LEVEL,
        s_min=None if claimed_high is None else finite(float(np.median(s_min))),
        e_min=None if claimed_low is None else finite(float(np.median(fewest))),
        b_opt=None if b_opt is None else claimed(b_opt[1]),
        b_opt_low=None if b_opt is None else claimed(b_opt[0]),
        b_opt_high=None if b_opt is None else claimed(b_opt[2]),
        perfect_scaling_below=None
        if b_crit is None
        else batch_at(b_crit, small_batch, 1.0 / SLOPE_RATIO),
        maximal_data_parallelism_above=None
        if b_crit is None
        else batch_at(b_crit, small_batch, SLOPE_RATIO),
        smallest=smallest,
        largest=largest,
        next_trials=_next_trials(posterior, in_seconds) if wide else (),
        note=note,
    )


def _undetermined(posterior: Posterior) -> str | None:
    """Return why the trials do not determine B_crit whatever the posterior says, in words; None where they do.

    A posterior of runs whose schedules end with them is sure of B_crit from few batch sizes next to each other: what
    bends the curve there may be the law of the metric over horizons, or the small-batch term.
    """
    if not posterior.prior.horizon:
        return _contradiction(posterior)
    sizes = [2.0**one.x for one in posterior.observations if one.status == "reached"]
    span = max(sizes) / min(sizes)
    # One batch size alone is spoken of elsewhere.
    if 1.0 < span < HORIZON_SPAN:
        return (
            f"the batch sizes that reached the target span a factor of {format_count(span)}: under "
            f"a schedule that ends with the trial it takes {HORIZON_SPAN:g} to tell B_crit"
        )
    edge = math.log(min(sizes)) - posterior.prior.log_mid * math.log(2.0)
    has_term = posterior.theta[:, B_OPT] > edge
    if UNTOLD_SHARE <= has_term.mean() <= 1.0 - UNTOLD_SHARE:
        drawn = log_b_crit(posterior.theta, posterior.prior)
        ratio = np.median(drawn[~has_term]) - np.median(drawn[has_term])
        if abs(ratio) >= math.log(UNTOLD_FACTOR):
            return (
                "the trials do not tell whether small batch sizes waste examples, and B_crit is "
                f"{math.exp(abs(ratio)):.1f} times as large in one case as in the other"
            )
    return _contradiction(posterior)


def _contradiction(posterior: Posterior) -> str | None:
    """Return how the only two batch sizes that reached the target contradict every B_crit, in words; else None.

    The larger one takes more steps, or fewer examples, by more than seeds explain. Without a small-batch term neither
    can be, with one two points tell nothing.
    """
    fewest = dict[int, int]()
    for one in posterior.observations:
        if one.status == "reached":
            size = round(2.0**one.x)
            fewest[size] = min(one.steps, fewest.get(size, one.steps))
    if len(fewest) != 2:
        return None
    (small, small_steps), (large, large_steps) = sorted(fewest.items())
    scatter = math.exp(float(np.median(posterior.theta[:, NOISE])))
    surely = math.exp(CONTRADICTION * math.sqrt(2.0) * scatter)
    sizes = f"B = {format_count(large)} takes"
    if large_steps > surely * small_steps:
        return f"{sizes} more steps than B = {format_count(small)}, and no other reached the target"
    if large * large_steps * surely < small * small_steps:
        return f"{sizes} fewer examples than B = {format_count(small)}, and no other reached the target"
    return None


def _next_trials(posterior: Posterior, in_seconds: bool) -> tuple[NextTrial, ...]:
    """Trials that would narrow the interval, the most telling one for its cost first."""
    trials = list[NextTrial]()
    for log_size, log_lr, steps in most_telling(posterior, NEXT_TRIALS):
        seconds = None
        if in_seconds:
            seconds = steps * float(posterior.tau(np.exp2(log_size)))
        trials.append(
            NextTrial(
                batch_size=round(2.0**log_size),
                lr=2.0**log_lr,
                steps=steps,
                seconds=seconds,
            )
        )
    return tuple(trials)


def _beyond_search(below: bool, above: bool) -> str | None:
    """Tell what no trial of this search would show, in words: ends of the interval beyond its range."""
    options = list[str]()
    if below:
        options.append("a smaller search.batch_size.low")
    if above:
        options.append("a larger search.batch_size.high")
    if not options:
        return None
    return f"the interval reaches beyond the search: {' and '.join(options)} would show more"


def _set_by_trials(prior: Prior, low: float, middle: float, high: float) -> tuple[bool, bool]:
    """Return of either end of the interval whether the trials speak against what lies beyond it.

    It is the Bayes factor of what lies between the median and the end to what lies beyond the end.
    """
    draws = np.exp(log_b_crit(draw_prior(prior, PRIOR_DRAWS, np.random.default_rng(0)), prior))
    within, beyond = 0.5 - INTERVAL[0], INTERVAL[0]  # of the posterior

    def by_trials(is_within: NDArray[np.bool_], is_beyond: NDArray[np.bool_]) -> bool:
        odds = (is_beyond.sum() + 1) / (
            is_within.sum() + 1
        )  # the prior's; it may have no draw here
        return bool(within / beyond * odds >= END_ODDS)

    below, above = draws < low, draws > high
    return by_trials((draws < middle) & ~below, below), by_trials((draws > middle) & ~above, above)


def _b_opt(posterior: Posterior, smallest: float) -> list[float] | None:
    """Return the interval of B_opt, its median between, if the trials say that it lies above the smallest size."""
    prior = posterior.prior
    edge = math.log(smallest / 2.0**prior.log_mid)
    share = float(np.mean(posterior.theta[:, B_OPT] > edge))
    before = float(ndtr((prior.mean[B_OPT] - edge) / prior.spread[B_OPT]))
    # The Bayes factor of the two halves of the prior, to a draw's accuracy.
    odds = (share + 1e-3) / (1.0 - share + 1e-3) * (1.0 - before + 1e-3) / (before + 1e-3)
    if share < SHARE or odds < ODDS:
        return None
    quantiles = np.quantile(posterior.theta[:, B_OPT], (INTERVAL[0], 0.5, INTERVAL[1]))
    return [float(value) for value in 2.0**prior.log_mid * np.exp(quantiles)]


def easier_targets(
    done: Sequence[TrialResult], target: Target, ideal: float | None
) -> list[Target]:
    """Return a few targets, nearest first, that enough trials passed on their way; none without an ideal value."""
    if ideal is None:
        return []
    targets = [replace(target, value=ideal + times * (target.value - ideal)) for times in EASIER]
    passed = [easier for easier in targets if too_few_passed(done, easier) is None]
    if len(passed) <= MAX_EASIER:
        return passed
    return [
        passed[round(i * (len(passed) - 1) / (MAX_EASIER - 1))] for i in range(MAX_EASIER)
    ]  # the farthest too


def too_few_passed(done: Sequence[TrialResult], target: Target) -> str | None:
    """Return why the trials that passed a target on their way do not tell its B_crit, in words; None if they do."""
    passed = _passed(done, target)
    sizes = [trial.batch_size for trial in passed]
    coarse = sum(trial.steps_low < FINE * trial.steps for trial in passed)
    if len(passed) < MIN_PASSED:
        return f"{plural(len(passed), 'trial')} passed it, and it takes {MIN_PASSED}"
    if max(sizes) < MIN_SPAN * min(sizes):
        span = f"{format_count(min(sizes))} to {format_count(max(sizes))}"
        return (
            f"what passed it has batch sizes {span}, and it takes {MIN_SPAN:g} times the smallest"
        )
    if coarse > MAX_COARSE * len(passed):
        return f"{coarse} of {plural(len(passed), 'trial')} that passed it were not evaluated closely there"
    return None


def _passed(done: Sequence[TrialResult], easier: Target) -> list[TrialResult]:
    """Return the records at an easier target of those that passed it, of a trial in parts the last one."""
    continued = {trial.resumed_from for trial in done}
    return [
        one
        for one in (passing(trial, easier) for trial in done if trial.number not in continued)
        if one.reached
    ]


def no_easier_target(target: Target, ideal: float | None, horizon: bool = False) -> str:
    """Return why there is no easier target with enough trials, in words; ``horizon``: schedules end with the trial."""
    if horizon:
        return "a trial that passes an easier target on its way has a schedule for the harder one"
    if ideal is None:
        return f"{target.metric} has no best value to measure easier targets from: set workload.target.bounds"
    return (
        f"no easier target was passed by {MIN_PASSED} closely evaluated trials over {MIN_SPAN:g} times "
        "the batch size"
    )


def passing(trial: TrialResult, target: Target) -> TrialResult:
    """Return the record as it would stand had the trial ended where its history first meets ``target``."""
    before = 0
    for step, value in trial.history:
        if step > 0 and value is not None and target.gap(value) <= 0.0:
            return replace(trial, status="reached", steps_low=before, **trial.after(step))
        before = step
    return trial


def over_targets(
    done: Sequence[TrialResult],
    target: Target,
    ideal: float | None,
    infer: Callable[[Sequence[TrialResult], Target], Posterior],
) -> list[CriticalAtTarget]:
    """B_crit with its interval at easier targets, from the same histories: it grows as the target gets harder.

    (Kaplan et al. 2020, arXiv 2001.08361, section 5.1; McCandlish et al. 2018.)
    """
    rows = list[CriticalAtTarget]()
    for easier in easier_targets(done, target, ideal):
        passed = [passing(trial, easier) for trial in done]
        found = critical_batch(infer(passed, easier))
        if found is not None:
            rows.append(at_target_value(found, easier.value, len(_passed(done, easier))))
    return rows


def at_target_value(critical: CriticalBatchSize, target: float, passed: int) -> CriticalAtTarget:
    """Give a critical batch size as one of several over the target's value, which ``passed`` trials met."""
    return CriticalAtTarget(
        target=target,
        passed=passed,
        value=critical.value,
        low=critical.low,
        high=critical.high,
    )


def growth(rows: Iterable[CriticalAtTarget], ideal: float) -> Growth | None:
    """Give the exponent k of B_crit ~ d^k over the distance d of targets from the ideal value, with its interval.

    Of a loss, whose ideal value is 0, it is Kaplan et al. 2020, arXiv 2001.08361, eq. 5.3: B_crit = B*/L^(1/alpha),
    where k = -1/alpha = -4.76. It is a least-squares line of log B_crit over log d, weighted by the intervals of
    B_crit, and wider where the points scatter more than those say. The same runs answer all targets, so that their
    errors go together and the interval is rather too wide than too narrow.

    Args:
        rows: a row whose interval has an open end is left out; of several at one target the last one counts.
        ideal: the metric's best value.

    Returns:
        None for fewer than three different targets with an interval.
    """
    ends = dict[float, tuple[float, float, float]]()
    for row in rows:
        if row.low is None or row.value is None or row.high is None:
            continue
        ends[row.target] = (row.low, row.value, row.high)
    if len(ends) < MIN_GROWTH:
        return None
    distance = {value: abs(value - ideal) for value in ends}
    x = np.log(list(distance.values()))
    low, y, high = np.log(np.ascontiguousarray(np.transpose(list(ends.values()))))
    weight = (2.0 * INTERVAL_QUANTILE / np.maximum(high - low, 1e-6)) ** 2
    away = x - np.average(x, weights=weight)
    gap = y - np.average(y, weights=weight)
    spread = float(weight @ away**2)
    slope = float(weight @ (away * gap)) / spread
    scatter = float(weight @ (gap - slope * away) ** 2) / (len(x) - 2)
    error = INTERVAL_QUANTILE * math.sqrt(max(1.0, scatter) / spread)
    return Growth(
        exponent=slope,
        low=slope - error,
        high=slope + error,
        level=INTERVAL_LEVEL,
        ideal=ideal,
        start=max(distance, key=distance.__getitem__),
        end=min(distance, key=distance.__getitem__),
    )
