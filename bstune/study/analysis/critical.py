"""The critical batch size that a study ends with, its interval, and trials that would narrow it.

There is one estimate, the same in the console, the figure, ``curve.json`` and MLflow: the median
over the posterior of all trials, stopped ones too, of where the slope of log S* over log B is -1/2
(:func:`bstune.search.frontier_findings.log_b_crit`). What lies more than an octave outside of the
batch sizes that reached the target is not claimed, nor is an end of the interval that the prior
sets and not the trials. Such an end is None, and ``next_trials`` names up to three trials that
would tell most. An interval without an end has no estimate in it: B_crit is undetermined.

B_opt, the batch size with the fewest examples, is reported where the trials raise its odds tenfold,
to nine to one at least. Easier targets that the same histories passed have critical batch sizes of
their own in ``over_target``; ``over_target_growth`` says how it rises as the target gets harder
(Kaplan et al. 2020, arXiv 2001.08361, eq. 5.3).
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtr

from bstune.core.curve import SLOPE_RATIO, batch_size_at_slope
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
from bstune.search.curve_decision import most_telling
from bstune.search.frontier_findings import b_crit_quantiles, log_b_crit
from bstune.search.frontier_law import B_CRIT, B_OPT, LEVEL, NOISE, Prior, draw_prior
from bstune.search.posterior import Posterior
from bstune.system.console import format_count, plural

# Quantiles of B_crit's posterior, INTERVAL_LEVEL apart; search.precision stops by them.
INTERVAL = (0.05, 0.95)
# The same two, with the median between them.
QUANTILES = (INTERVAL[0], 0.5, INTERVAL[1])
# The curve is claimed up to so many times the largest batch size that reached the target, and down
# to the smallest one over it.
ROOM = 2.0
# Least Bayes factor against what lies beyond an end of the interval; the prior's own end has 1.
END_ODDS = 2.0
CRITICAL_PRIOR_DRAWS = 2000
# Least Bayes factor, and least posterior probability, of a small-batch term that is reported: the
# term (B_opt/B)^2 of the law, by which batch sizes below B_opt take more examples.
TERM_ODDS = 10.0
TERM_SHARE = 0.9
# A share of draws is known to about this: it keeps odds of none of them finite.
DRAW_ACCURACY = 1e-3
# Upper end of the interval over its lower one: a wider interval asks for further trials.
WIDE_CRITICAL_RATIO = 3.0
# How many further trials are named.
NEXT_TRIALS = 3
# Easier targets, as multiples of the target's distance from the ideal value.
EASIER_TIMES = tuple(1.06**k for k in range(1, 21))
# The most of them that are read: each takes a posterior of its own.
MAX_EASIER = 5
# The least ratio of the largest to the smallest batch size that reached the target, where schedules
# end with the trial.
HORIZON_SPAN = 10.0
# Where at least this share of the posterior has a small-batch term, and at least this share has
# none, the trials do not tell whether there is one.
UNTOLD_SHARE = 0.1
# The ratio of B_crit without that term to B_crit with it, from which on that matters.
UNTOLD_FACTOR = 1.5
# Two batch sizes contradict each other beyond so many standard deviations of the scatter from seed
# to seed.
CONTRADICTION = 2.0
# The fewest targets with B_crit and both ends of its interval that tell the exponent of its growth.
MIN_GROWTH = 3
# The fewest trials that have to pass an easier target.
MIN_PASSED = 8
# The least ratio of the largest of their batch sizes to the smallest.
MIN_PASSED_SPAN = 8.0
# In a closely evaluated trial the step of the last miss is at least this share of that of the first
# hit.
FINE = 0.7
# The share of trials that may be evaluated less closely.
MAX_COARSE = 0.2


@dataclass(frozen=True)
class _ClaimedInterval:
    """B_crit with its interval, as far as they are claimed; a value is None where it is not."""

    b_crit: float | None
    low: float | None
    high: float | None
    is_wide: bool
    """Whether further trials would narrow the interval."""
    note: str | None
    """Why an end is open that no trial of this search would show, or B_crit is undetermined."""


def critical_batch(posterior: Posterior, in_seconds: bool = True) -> CriticalBatchSize | None:
    """Estimate the critical batch size from all trials; None where none reached the target.

    ``in_seconds``: whether the next trials that it names have their cost in seconds.
    """
    reached = _reached_sizes(posterior)
    if not reached:
        return None
    smallest = min(reached)
    largest = max(reached)
    interval = _claimed_interval(posterior, smallest, largest)
    b_opt_quantiles = _b_opt(posterior, smallest)
    s_min, e_min = _least_steps_and_examples(posterior, has_term=b_opt_quantiles is not None)
    # S_min belongs to batch sizes far above B_crit: it is claimed only with B_crit's upper end.
    if interval.high is None:
        s_min = None
    # E_min belongs to small ones: it is claimed only with the lower end.
    if interval.low is None:
        e_min = None
    b_opt_low: float | None = None
    b_opt: float | None = None
    b_opt_high: float | None = None
    # The regimes take the posterior's B_opt, even where that itself is not claimed.
    b_opt_of_regimes = 0.0
    if b_opt_quantiles is not None:
        b_opt_of_regimes = b_opt_quantiles[1]
        b_opt_low, b_opt, b_opt_high = (
            _claimed(size, smallest, largest) for size in b_opt_quantiles
        )
    perfect_scaling_below: float | None = None
    maximal_data_parallelism_above: float | None = None
    if interval.b_crit is not None:
        perfect_scaling_below = batch_size_at_slope(
            interval.b_crit, b_opt_of_regimes, 1.0 / SLOPE_RATIO
        )
        maximal_data_parallelism_above = batch_size_at_slope(
            interval.b_crit, b_opt_of_regimes, SLOPE_RATIO
        )
    next_trials: tuple[NextTrial, ...] = ()
    if interval.is_wide:
        next_trials = _next_trials(posterior, in_seconds)
    return CriticalBatchSize(
        value=interval.b_crit,
        low=interval.low,
        high=interval.high,
        level=INTERVAL_LEVEL,
        s_min=s_min,
        e_min=e_min,
        b_opt=b_opt,
        b_opt_low=b_opt_low,
        b_opt_high=b_opt_high,
        perfect_scaling_below=perfect_scaling_below,
        maximal_data_parallelism_above=maximal_data_parallelism_above,
        smallest=smallest,
        largest=largest,
        next_trials=next_trials,
        note=interval.note,
    )


def _claimed(size: float, smallest: int, largest: int) -> float | None:
    """Keep a batch size that lies where the curve is claimed; None for another one.

    ``smallest`` and ``largest`` are the batch sizes that reached the target.
    """
    # One batch size alone says nothing of the others.
    if smallest < largest and smallest / ROOM <= size <= largest * ROOM:
        return size
    return None


def _claimed_interval(posterior: Posterior, smallest: int, largest: int) -> _ClaimedInterval:
    """Estimate B_crit with its interval, as far as the trials determine them.

    ``smallest`` and ``largest`` are the batch sizes that reached the target.
    """
    reason = _undetermined(posterior)
    if reason is not None:
        return _ClaimedInterval(b_crit=None, low=None, high=None, is_wide=True, note=reason)
    prior = posterior.prior
    low, middle, high = b_crit_quantiles(posterior, QUANTILES).tolist()
    is_low_set, is_high_set = _set_by_trials(prior, low, middle, high)
    # The interval's end may lie farther out than is claimed: then the nearest claimed place stands.
    claimed_low: float | None = None
    if is_low_set:
        claimed_low = _claimed(min(low, largest * ROOM), smallest, largest)
    claimed_high: float | None = None
    if is_high_set:
        claimed_high = _claimed(max(high, smallest / ROOM), smallest, largest)
    ends_open = (claimed_low is None) + (claimed_high is None)
    # The middle of an interval without ends would be the prior's choice.
    b_crit: float | None = None
    if ends_open < 2:
        b_crit = _claimed(middle, smallest, largest)
    ends_below, ends_above = _ends_beyond_search(prior, low, high, smallest, largest)
    # An open end asks for further trials, unless it lies where this search has none.
    is_wide = ends_open > ends_below + ends_above
    if ends_open == 0 and high > WIDE_CRITICAL_RATIO * low:
        is_wide = True
    return _ClaimedInterval(
        b_crit=b_crit,
        low=claimed_low,
        high=claimed_high,
        is_wide=is_wide,
        note=_beyond_search(ends_below > 0, ends_above > 0),
    )


def _reached_sizes(posterior: Posterior) -> list[int]:
    """List the batch size of each trial that reached the target."""
    sizes = list[int]()
    for observation in posterior.observations:
        if observation.status == "reached":
            sizes.append(round(2.0**observation.x))
    return sizes


def _least_steps_and_examples(
    posterior: Posterior, has_term: bool
) -> tuple[float | None, float | None]:
    """Give the posterior's medians of S_min and of E_min; None where one is not finite.

    ``has_term``: whether a small-batch term is reported. With it E_min = S_min (B_crit + 2 B_opt),
    at B = B_opt, else E_min = S_min B_crit, for B towards 0.
    """
    theta = posterior.theta
    # Batch sizes count in the search's middle one here, at which LEVEL is log S*: the law S_min (1
    # + B_crit/B + (B_opt/B)^2) at B = 1.
    b_crit = np.exp(theta[:, B_CRIT])
    b_opt = np.exp(theta[:, B_OPT])
    s_min = np.exp(theta[:, LEVEL]) / (1.0 + b_crit + b_opt**2)
    middle_size = 2.0**posterior.prior.log_mid
    e_min = s_min * middle_size * b_crit
    if has_term:
        e_min = s_min * middle_size * (b_crit + 2.0 * b_opt)
    return finite(float(np.median(s_min))), finite(float(np.median(e_min)))


def _ends_beyond_search(
    prior: Prior, low: float, high: float, smallest: int, largest: int
) -> tuple[int, int]:
    """Count the interval's ends that lie below the search's range, and those that lie above it.

    They lie so far, by a factor ``ROOM``, that no trial of this search would show them. They count
    only where the target was reached at that end of the range.

    Args:
        prior: has the range of the search.
        low: the interval's lower end.
        high: the interval's upper end.
        smallest: the smallest batch size that reached the target.
        largest: the largest batch size that reached the target.
    """
    bottom = 2.0**prior.log_low
    top = 2.0**prior.log_high
    ends = (low, high)
    ends_below = 0
    if smallest <= bottom * ROOM:
        ends_below = sum(end < bottom / ROOM for end in ends)
    ends_above = 0
    if largest >= top / ROOM:
        ends_above = sum(end > top * ROOM for end in ends)
    return ends_below, ends_above


def _undetermined(posterior: Posterior) -> str | None:
    """Say why the trials do not determine B_crit, whatever the posterior says; None where they do.

    Under schedules that end with the trial the posterior is too sure. From few batch sizes close
    together it is certain of B_crit, although the curve there may bend for other reasons: how the
    metric depends on the length of the schedule, or the small-batch term.
    """
    if not posterior.prior.horizon:
        return _contradiction(posterior)
    sizes = [2.0**trial.x for trial in posterior.observations if trial.status == "reached"]
    span = max(sizes) / min(sizes)
    # With one batch size alone nothing is claimed anyway.
    if 1.0 < span < HORIZON_SPAN:
        return (
            f"the batch sizes that reached the target span a factor of {format_count(span)}: under "
            f"a schedule that ends with the trial it takes {HORIZON_SPAN:g} to tell B_crit"
        )
    log_edge = math.log(min(sizes)) - posterior.prior.log_mid * math.log(2.0)
    # The draws in which small batch sizes waste examples: B_opt lies above the smallest one.
    has_term = posterior.theta[:, B_OPT] > log_edge
    # Where the trials leave both cases open, B_crit must be nearly the same in both.
    if UNTOLD_SHARE <= has_term.mean() <= 1.0 - UNTOLD_SHARE:
        log_drawn = log_b_crit(posterior.theta, posterior.prior)
        log_ratio = np.median(log_drawn[~has_term]) - np.median(log_drawn[has_term])
        if abs(log_ratio) >= math.log(UNTOLD_FACTOR):
            return (
                "the trials do not tell whether small batch sizes waste examples, and B_crit is "
                f"{math.exp(abs(log_ratio)):.1f} times as large in one case as in the other"
            )
    return _contradiction(posterior)


def _contradiction(posterior: Posterior) -> str | None:
    """Say how the only two batch sizes that reached the target contradict the law.

    None if they do not, or if another number of batch sizes reached it.

    The larger one contradicts it if it takes more steps, or fewer examples, by more than seeds
    explain. Without a small-batch term the law allows neither. With one, two points determine no
    B_crit.
    """
    fewest = dict[int, int]()
    for observation in posterior.observations:
        if observation.status == "reached":
            # An observation has the logarithm of its batch size to base 2.
            size = round(2.0**observation.x)
            fewest[size] = min(observation.steps, fewest.get(size, observation.steps))
    if len(fewest) != 2:
        return None
    (small, small_steps), (large, large_steps) = sorted(fewest.items())
    scatter = math.exp(float(np.median(posterior.theta[:, NOISE])))
    # Each of the two runs has the scatter, so that their ratio has sqrt(2) times it.
    factor = math.exp(CONTRADICTION * math.sqrt(2.0) * scatter)
    takes = ""
    if large_steps > factor * small_steps:
        takes = "more steps"
    elif large * large_steps * factor < small * small_steps:
        takes = "fewer examples"
    if not takes:
        return None
    compared = f"B = {format_count(large)} takes {takes} than B = {format_count(small)}"
    return f"{compared}, and no other reached the target"


def _next_trials(posterior: Posterior, in_seconds: bool) -> tuple[NextTrial, ...]:
    """List trials that would narrow the interval, the most telling one for its cost first."""
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
    """Say which options would show the ends of the interval that lie beyond the search.

    It is None where no end lies beyond.
    """
    options = list[str]()
    if below:
        options.append("a smaller search.batch_size.low")
    if above:
        options.append("a larger search.batch_size.high")
    if not options:
        return None
    reaches = "the critical batch size's interval reaches beyond the search"
    # A study keeps its range of batch sizes.
    return f"{reaches}: {' and '.join(options)}, with another study=NAME, would show more"


def _set_by_trials(prior: Prior, low: float, middle: float, high: float) -> tuple[bool, bool]:
    """Tell for the lower and the upper end of B_crit's interval whether the trials have set it.

    The trials have set an end if the Bayes factor of what lies between the median and the end,
    against what lies beyond it, is at least ``END_ODDS``. Otherwise the prior has set it.
    """
    rng = np.random.default_rng(0)
    # The prior's draws of B_crit.
    draws = np.exp(log_b_crit(draw_prior(prior, CRITICAL_PRIOR_DRAWS, rng), prior))
    below = draws < low
    above = draws > high
    is_low_set = _speak_against((draws < middle) & ~below, below)
    is_high_set = _speak_against((draws > middle) & ~above, above)
    return is_low_set, is_high_set


def _speak_against(is_within: NDArray[np.bool_], is_beyond: NDArray[np.bool_]) -> bool:
    """Whether the trials speak against what lies beyond an end of the interval.

    Args:
        is_within: which of the prior's draws lie between the median and the end.
        is_beyond: which lie beyond the end.
    """
    # The posterior's shares, by the definition of its quantiles.
    share_within = 0.5 - INTERVAL[0]
    share_beyond = INTERVAL[0]
    # One is added to each count, as the prior may have no draw there.
    prior_odds = (is_beyond.sum() + 1) / (is_within.sum() + 1)
    # The posterior's odds of within to beyond, over the prior's.
    bayes_factor = share_within / share_beyond * prior_odds
    return bool(bayes_factor >= END_ODDS)


def _b_opt(posterior: Posterior, smallest: float) -> list[float] | None:
    """Give the lower end of B_opt's interval, its median and the upper end, in examples.

    B_opt is the batch size that takes the fewest examples to the target: smaller ones take more. It
    is None unless the trials show that there are smaller ones, that is, that B_opt lies above
    ``smallest``, the smallest batch size that reached the target. For that its probability must be
    at least ``TERM_SHARE``, and the odds at least ``TERM_ODDS`` times those of the prior: else the
    prior alone might say it.
    """
    prior = posterior.prior
    # Column ``B_OPT`` of theta has the log of B_opt over the middle batch size, 2^log_mid.
    log_edge = math.log(smallest / 2.0**prior.log_mid)
    chance_above = float(np.mean(posterior.theta[:, B_OPT] > log_edge))
    prior_chance = float(ndtr((prior.mean[B_OPT] - log_edge) / prior.spread[B_OPT]))
    # The posterior's odds of above the edge to below it. DRAW_ACCURACY, to which a share of draws
    # is known, keeps them finite where no draw lies on one side.
    odds = (chance_above + DRAW_ACCURACY) / (1.0 - chance_above + DRAW_ACCURACY)
    # These odds over the prior's are the Bayes factor.
    bayes_factor = odds * (1.0 - prior_chance + DRAW_ACCURACY) / (prior_chance + DRAW_ACCURACY)
    if chance_above < TERM_SHARE or bayes_factor < TERM_ODDS:
        return None
    quantiles = np.quantile(posterior.theta[:, B_OPT], QUANTILES)
    return [float(size) for size in 2.0**prior.log_mid * np.exp(quantiles)]


def easier_targets(
    done: Sequence[TrialResult], target: Target, ideal: float | None
) -> list[Target]:
    """Choose up to ``MAX_EASIER`` easier targets that enough trials passed, the nearest first.

    ``ideal``: the metric's best value; None: it has none, and there is no easier target.
    """
    if ideal is None:
        return []
    passed = list[Target]()
    for times in EASIER_TIMES:
        easier = replace(target, value=ideal + times * (target.value - ideal))
        if too_few_passed(done, easier) is None:
            passed.append(easier)
    if len(passed) <= MAX_EASIER:
        return passed
    # They are taken evenly among these, with the nearest and the farthest one.
    last_place = len(passed) - 1
    return [passed[round(i * last_place / (MAX_EASIER - 1))] for i in range(MAX_EASIER)]


def too_few_passed(done: Sequence[TrialResult], target: Target) -> str | None:
    """Say why the trials that passed a target do not tell its B_crit; None if they do."""
    passed = _passed(done, target)
    count = plural(len(passed), "trial")
    if len(passed) < MIN_PASSED:
        return f"{count} passed it, and it takes {MIN_PASSED}"
    sizes = [trial.batch_size for trial in passed]
    if max(sizes) < MIN_PASSED_SPAN * min(sizes):
        span = f"{format_count(min(sizes))} to {format_count(max(sizes))}"
        least = f"it takes {MIN_PASSED_SPAN:g} times the smallest"
        return f"what passed it has batch sizes {span}, and {least}"
    # In a coarse trial the last miss, at ``steps_low``, lies long before the step that met it.
    coarse = sum(trial.steps_low < FINE * trial.steps for trial in passed)
    if coarse > MAX_COARSE * len(passed):
        return f"{coarse} of {count} that passed it were not evaluated closely there"
    return None


def _passed(done: Sequence[TrialResult], easier: Target) -> list[TrialResult]:
    """Give the records, at an easier target, of the trials that passed it.

    Of a trial that was continued only the last part counts.
    """
    continued = {trial.resumed_from for trial in done}
    records = list[TrialResult]()
    for trial in done:
        if trial.number in continued:
            continue
        record = ended_where_met(trial, easier)
        if record.reached:
            records.append(record)
    return records


def no_easier_target(target: Target, ideal: float | None, horizon: bool = False) -> str:
    """Say why there is no critical batch size at easier targets.

    Args:
        target: of the study.
        ideal: the metric's best value; None where it has none.
        horizon: whether schedules end with the trial.
    """
    if horizon:
        return "a trial that passes an easier target on its way has a schedule for the harder one"
    if ideal is None:
        missing = f"{target.metric} has no best value to measure easier targets from"
        return f"{missing}: set workload.target.bounds"
    return (
        f"no easier target was passed by {MIN_PASSED} closely evaluated trials over "
        f"{MIN_PASSED_SPAN:g} times the batch size"
    )


def ended_where_met(trial: TrialResult, target: Target) -> TrialResult:
    """Give the record as if the trial had ended where it first met a target.

    A trial that never met it keeps its record.
    """
    # The step of the last evaluation that missed it; 0 before any.
    last_miss = 0
    for step, value in trial.history:
        if step > 0 and value is not None and target.gap(value) <= 0.0:
            return replace(trial, status="reached", steps_low=last_miss, **trial.fields_after(step))
        last_miss = step
    return trial


def over_targets(
    done: Sequence[TrialResult],
    target: Target,
    ideal: float | None,
    infer: Callable[[Sequence[TrialResult], Target], Posterior],
) -> list[CriticalAtTarget]:
    """Estimate B_crit with its interval at easier targets, from the same histories.

    B_crit grows as the target gets harder (Kaplan et al. 2020, arXiv 2001.08361, section 5.1;
    McCandlish et al. 2018).

    Args:
        done: the trials.
        target: of the study.
        ideal: the metric's best value; None where it has none.
        infer: samples the posterior of records at a target.
    """
    rows = list[CriticalAtTarget]()
    for easier in easier_targets(done, target, ideal):
        records = [ended_where_met(trial, easier) for trial in done]
        critical = critical_batch(infer(records, easier))
        if critical is not None:
            rows.append(at_target_value(critical, easier.value, len(_passed(done, easier))))
    return rows


def at_target_value(critical: CriticalBatchSize, target: float, passed: int) -> CriticalAtTarget:
    """Make the row of a target's value, with its critical batch size.

    ``passed``: how many trials met the target.
    """
    return CriticalAtTarget(
        target=target,
        passed=passed,
        value=critical.value,
        low=critical.low,
        high=critical.high,
    )


def growth_over_target(rows: Iterable[CriticalAtTarget], ideal: float) -> Growth | None:
    """Fit the exponent k of B_crit ~ d^k, over the distance d of targets from the ideal value.

    For a loss, whose ideal value is 0, this is Kaplan et al. 2020, arXiv 2001.08361, eq. 5.3:
    B_crit = B*/L^(1/alpha), where k = -1/alpha = -4.76. The fit is a least-squares line of log
    B_crit over log d, weighted by the intervals of B_crit, and wider where the points scatter more
    than those say. The same runs answer all targets, so that their errors go together and the
    interval is rather too wide than too narrow.

    Args:
        rows: a row whose interval has an open end is left out; of several at one target the last
            one counts.
        ideal: the metric's best value.

    Returns:
        None for fewer than three different targets with an interval.
    """
    intervals = dict[float, tuple[float, float, float]]()
    for row in rows:
        if row.low is None or row.value is None or row.high is None:
            continue
        intervals[row.target] = (row.low, row.value, row.high)
    if len(intervals) < MIN_GROWTH:
        return None
    distance = {target: abs(target - ideal) for target in intervals}
    log_distance = np.log(list(distance.values()))
    lows, b_crits, highs = zip(*intervals.values(), strict=True)
    log_low = np.log(lows)
    log_b_crit = np.log(b_crits)
    log_high = np.log(highs)
    z = INTERVAL_QUANTILE
    # A weight is 1/variance of log B_crit, whose standard deviation is (log high - log low)/(2 z).
    # An interval of no width would have an infinite one.
    weight = (2.0 * z / np.maximum(log_high - log_low, 1e-6)) ** 2
    centred_distance = log_distance - np.average(log_distance, weights=weight)
    centred_b_crit = log_b_crit - np.average(log_b_crit, weights=weight)
    spread = float(weight @ centred_distance**2)
    slope = float(weight @ (centred_distance * centred_b_crit)) / spread
    residual = centred_b_crit - slope * centred_distance
    # It is 1 where the points scatter as their intervals say. More widens the slope's interval, and
    # less does not narrow it.
    scatter = float(weight @ residual**2) / (len(log_distance) - 2)
    half_width = z * math.sqrt(max(1.0, scatter) / spread)
    return Growth(
        exponent=slope,
        low=slope - half_width,
        high=slope + half_width,
        level=INTERVAL_LEVEL,
        ideal=ideal,
        # From the easiest target to the hardest.
        start=max(distance, key=distance.__getitem__),
        end=min(distance, key=distance.__getitem__),
    )
