"""Fits S*(B) = S_min (1 + B_crit/B + (B_opt/B)^2) to a few noisy points and bounds, with intervals.

The curve's first two terms are McCandlish et al. 2018, arXiv 1812.06162, eq. 2.11. The third, for
small batches that waste examples, and the error model are ours:

1. At a reference batch size B_ref the curve is S(B) = h (1 - p + p r + v r^2) with r = B_ref/B, p =
   B_crit/(B_crit + B_ref) and v (B_ref/B_opt)^2 = 1 - p. p = 0 (S constant but for the third term)
   and p = 1 (S_min is 0) belong to the family, so that "B_crit is infinite" has a likelihood of its
   own and needs no large number in its place.
2. The residuals of log S are normal with standard deviation sigma, or, with probability
   ``POINT_OUTLIER_SHARE``, off by a further normal error of ``POINT_OUTLIER_SPREAD``: one bad point
   is outvoted and leaves sigma as it was. A stopped point contributes the probability that S
   exceeds its bound.
3. sigma has a scaled inverse chi-square prior, as if ``PRIOR_WEIGHT`` residuals of size
   ``PRIOR_NOISE`` had been seen.
4. An end of an interval is where the deviance (-2 log likelihood, all else profiled out) rises
   above its minimum by N log(1 + t^2/(N - k)), with N = reached points + PRIOR_WEIGHT, k terms of
   the law, and t the two-sided quantile of Student's t with N - k degrees of freedom. That is exact
   for a linear model with normal residuals and no prior; here it is an approximation, chosen
   because a chi-square quantile is too small for few points. In simulations with six points up to
   B_crit/2 or nine up to 8 B_crit, the nominal 90% covered 91 to 93% at 10% noise (2000 curves a
   case), 96 to 99% at 5% and 84 to 88% at 20% (500 curves each): the prior errs to the wide side
   when the noise is small.
5. The third term (v > 0) is fitted where it lowers the deviance by more than the rise of point 4 at
   the level ``EVIDENCE``: a likelihood-ratio test. Where it lowers it by ``GAIN_OF_DOUBT`` only,
   the points do not decide, and B_crit's interval holds both laws'.
6. Points that contradict the law, by the same level, have no B_crit: steps that rise with B, and
   small batches that waste examples where the third term is not allowed or not testable.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.special import log_expit, stdtrit

from bstune.core.curve_likelihood import (
    PRIOR_NOISE,
    PRIOR_WEIGHT,
    Observed,
    Profile,
    compute_profile,
    minimise_deviance,
)
from bstune.core.errors import BstuneError
from bstune.core.interval import INTERVAL_LEVEL
from bstune.core.records import TrialResult

Array = NDArray[np.float64]

LAWS = ("auto", "two-terms", "three-terms")
USABLE_VALUE = "a positive, finite number (below 1e100)"
# The slope -B_crit/(B + B_crit) is -0.9 at B_crit/9 and -0.1 at 9 B_crit.
SLOPE_RATIO = 9.0
# Octaves over which a slope is averaged.
SLOPE_WIDTH = 1.0
# Two-sided level of the test for a third term. As only v > 0 counts, it is a false alarm in 1% of
# the curves that two terms made.
EVIDENCE = 0.98
# Fall of the deviance from which on the information criterion of Akaike 1974 prefers one more
# parameter.
GAIN_OF_DOUBT = 2.0
# Rise of the deviance: the 68% quantile of chi-square with one degree of freedom.
NEARLY_AS_LIKELY = 1.0
# Noise from which on a note says so: three times what single, tuned runs have.
LARGE_SCATTER = 0.4
# The fit's arrays grow with the points; a frontier has one per half octave.
MAX_POINTS = 1000
NOT_TESTABLE = (
    "whether small batches waste examples is not known: that takes 4 points at 3 batch sizes"
)


class CurveError(BstuneError):
    """The points cannot be read or used, or are too few to fit a curve to."""


@dataclass(frozen=True)
class FrontierPoint:
    """A point for :func:`fit_curve`: steps to the target at a batch size, or a bound of them.

    Args:
        batch_size: in examples.
        steps: the steps to the target, which the fit takes S to be.
        stopped: whether the target was still missed after ``steps``: they are then a bound, S >
            steps.
        steps_low: the last step known to miss the target, so that S lies in (steps_low, steps];
            None if unknown.
    """

    batch_size: int | float
    steps: float
    stopped: bool
    steps_low: float | None


@dataclass(frozen=True)
class CurveFit:
    """A fitted S*(B) = S_min (1 + B_crit/B + (B_opt/B)^2); None for what the points do not tell."""

    law: str
    """``two-terms`` or ``three-terms``."""
    s_min: float | None
    """Fewest steps, at unlimited batch size; None where B_crit may be infinite."""
    critical_batch_size: float | None
    """The most likely critical batch size, in examples.

    None where 0 or infinity is nearly as likely (deviance at most 1 higher: then even a 68%
    interval is open), and, as its ends, where the points contradict the law.
    """
    critical_batch_size_low: float | None
    """Lower end of its interval; None where every smaller value fits the points."""
    critical_batch_size_high: float | None
    """Upper end of its interval; None where every larger value fits the points."""
    b_opt: float | None
    """The batch size with the fewest examples.

    None of two terms: by them, the smaller the batch size, the fewer the examples.
    """
    b_opt_low: float | None
    b_opt_high: float | None
    e_min: float | None
    """Fewest examples, S_min (B_crit + 2 B_opt), at B_opt; None where they may be 0."""
    perfect_scaling_below: float | None
    """Where the slope of log S* is -0.9: B_crit/9 of two terms, larger of three.

    There the slope is under -1 below B_opt, where perfect scaling says only that a smaller batch is
    no better.
    """
    maximal_data_parallelism_above: float | None
    """Where the slope of log S* is -0.1: 9 B_crit of two terms, larger of three."""
    level: float
    """Nominal coverage of the intervals."""
    noise: float
    """sigma, the standard deviation of log S around the curve; 0.1 is about 10%."""
    note: str | None
    """What is not known, and what to run for it."""
    points: tuple[FrontierPoint, ...]
    """The points that were fitted."""


@dataclass(frozen=True)
class CurveBand:
    """The most likely S*(B) and its pointwise interval, at n batch sizes: arrays of shape (n,).

    The interval is of the curve: further trials scatter around it.
    """

    batch_size: Array
    steps: Array
    low: Array
    high: Array


class _Likely(NamedTuple):
    """Where in a profile B_crit is most likely, and whether a limit is nearly as likely."""

    place: int
    """Place of the most likely B_crit in the profile."""
    may_be_zero: bool
    """Whether B_crit = 0 is nearly as likely."""
    may_be_infinite: bool
    """Whether an infinite B_crit is nearly as likely."""


class _BOpt(NamedTuple):
    """B_opt, the batch size with the fewest examples."""

    most_likely: float
    """0 of two terms."""
    reported: float | None
    """None where the points hardly ask for a third term."""
    low: float | None
    """Lower end of its interval; None where it is open."""
    high: float | None
    """Upper end; None where it is open."""


@dataclass(frozen=True)
class _ChosenLaw:
    """A law as it is fitted to the points."""

    law: str
    """``two-terms`` or ``three-terms``."""
    profile: Profile
    rise: float
    """Rise of the deviance from its minimum to an end of an interval."""
    low: float | None
    """Lower end of log(B_crit/B_ref); None where it is open."""
    high: float | None
    """Upper end; None where it is open."""
    gain: float = 0.0
    """How much the third term lowers the deviance."""
    doubt: str | None = None
    """Why another law may hold as well; None: no doubt."""
    contradiction: str | None = None
    """Why the points contradict the law; None: they do not."""


def frontier_points(trials: Iterable[TrialResult]) -> list[FrontierPoint]:
    """Choose the trial of each half octave of B, floor(2 log2 B), as a point of the curve.

    It is the trial that reached the target after the fewest examples S x B. Where none reached it,
    it is the stopped one with the largest bound of S x B. That a stopped trial bounds S* too, not
    only S at its own learning rate, is an assumption.
    """

    def rank(trial: TrialResult) -> tuple[bool, int, int, int]:
        """Order trials of a half octave: the one to choose comes first."""
        # Of trials that reached the target the fewest steps are best, of stopped ones the most.
        steps = trial.steps if trial.reached else -trial.steps_low
        return not trial.reached, trial.batch_size * steps, trial.batch_size, trial.number

    octaves: dict[int, list[TrialResult]] = {}
    for trial in trials:
        if trial.reached or (trial.status == "stopped" and trial.steps_low > 0):
            # floor(log2(B^2)) in integers: 2 log2 B in floats can be on the wrong side of an edge.
            half_octave = (trial.batch_size**2).bit_length() - 1
            octaves.setdefault(half_octave, []).append(trial)
    points = list[FrontierPoint]()
    for half_octave in sorted(octaves):
        trial = min(octaves[half_octave], key=rank)
        steps = trial.steps if trial.reached else trial.steps_low
        points.append(
            FrontierPoint(
                batch_size=trial.batch_size,
                steps=steps,
                stopped=not trial.reached,
                steps_low=trial.steps_low,
            ),
        )
    return points


def fit_curve(
    points: Iterable[FrontierPoint], level: float = INTERVAL_LEVEL, law: str = "auto"
) -> CurveFit:
    """Fit S*(B) = S_min (1 + B_crit/B + (B_opt/B)^2) to points of batch size and steps.

    The fit is to log S, by the likelihood of this module's docstring, and the intervals are
    profiles of it.

    >>> points = [(16, 2150), (64, 640), (256, 260), (1024, 170)]  # batch size, steps to target
    >>> fit = fit_curve(FrontierPoint(size, steps, False, None) for size, steps in points)
    >>> round(fit.critical_batch_size), round(fit.critical_batch_size_low)
    (233, 180)

    Args:
        points: batch sizes in examples and steps to target. Three or more that are not stopped, at
            two or more batch sizes, and any number of bounds; the third term takes four, at three
            batch sizes.
        level: nominal coverage of the intervals, between 0 and 1.
        law: ``two-terms``, ``three-terms``, or ``auto``: three where the points ask for them.

    Returns:
        S_min in steps, B_crit and B_opt in examples with their intervals, E_min in examples, the
        bounds of the regimes and the noise; None for each that the points do not determine.

    Raises:
        CurveError: for fewer points, for values that are not positive and finite (NaN too), and for
            another level.
    """
    points = tuple(points)
    if law not in LAWS:
        raise CurveError(f"the law must be one of {', '.join(LAWS)}, but got {law}")
    observed = _observe(points)
    chosen = _choose_law(observed, law, level)
    if chosen.contradiction is not None:
        return _contradicted_fit(chosen, level, points)
    likely = _likely(chosen)
    b_opt = _b_opt(observed, chosen, likely)
    log_s_min, log_e_min = _log_fewest(observed, chosen, likely, b_opt)
    b_crit = None
    perfect_scaling_below = None
    maximal_data_parallelism_above = None
    # B_crit and the ends of the regimes, where the slope of log S* is -0.9 and -0.1, are known only
    # if neither limit of B_crit is nearly as likely.
    if not likely.may_be_zero and not likely.may_be_infinite:
        b_crit = math.exp(chosen.profile.log_odds[likely.place] + observed.log_reference)
        perfect_scaling_below = batch_size_at_slope(b_crit, b_opt.most_likely, 1.0 / SLOPE_RATIO)
        maximal_data_parallelism_above = batch_size_at_slope(b_crit, b_opt.most_likely, SLOPE_RATIO)
    # If B_crit may be infinite, steps may fall without an end, so that S_min is not known.
    fit = CurveFit(
        law=chosen.law,
        s_min=None if likely.may_be_infinite else math.exp(log_s_min),
        critical_batch_size=b_crit,
        critical_batch_size_low=_b_crit_at(chosen.low, observed.log_reference),
        critical_batch_size_high=_b_crit_at(chosen.high, observed.log_reference),
        b_opt=b_opt.reported,
        b_opt_low=b_opt.low,
        b_opt_high=b_opt.high,
        e_min=math.exp(log_e_min) if log_e_min > -math.inf else None,
        perfect_scaling_below=perfect_scaling_below,
        maximal_data_parallelism_above=maximal_data_parallelism_above,
        level=level,
        noise=math.exp(chosen.profile.log_sigma[likely.place]),
        note=None,
        points=points,
    )
    return replace(fit, note=_note(fit, chosen.doubt))


def _likely(chosen: _ChosenLaw) -> _Likely:
    """Find the most likely B_crit, and whether 0 and infinity are nearly as likely."""
    # The profile's first place is B_crit = 0, and its last one an infinite B_crit.
    deviance = chosen.profile.deviance
    most_likely = int(deviance.argmin())
    nearly_as_likely = deviance[most_likely] + _nearly_as_likely(chosen)
    return _Likely(
        place=most_likely,
        may_be_zero=bool(deviance[0] <= nearly_as_likely),
        may_be_infinite=bool(deviance[-1] <= nearly_as_likely),
    )


def _nearly_as_likely(chosen: _ChosenLaw) -> float:
    """Choose the rise of the deviance up to which a value is nearly as likely as the best one.

    It is that of a 68% interval, or of the reported interval if that is a narrower one.
    """
    return min(NEARLY_AS_LIKELY, chosen.rise)


def _b_opt(observed: Observed, chosen: _ChosenLaw, likely: _Likely) -> _BOpt:
    """Find B_opt, the batch size with the fewest examples, and its interval.

    The law's third term makes B_opt: without it, the smaller the batch, the fewer the examples.
    """
    # The law of two terms is that of three with a B_opt of 0.
    if chosen.law != "three-terms":
        return _BOpt(most_likely=0.0, reported=None, low=None, high=None)
    value, low, high = _b_opt_range(observed, chosen.profile, chosen.rise)
    # The gain is how much the third term lowers the deviance. If that is within the interval's
    # rise, the interval holds a B_opt of 0, and has no lower end.
    reported_low = None
    if chosen.gain > chosen.rise:
        reported_low = low
    # If a B_opt of 0 is nearly as likely, or B_crit may be infinite, no value is reported.
    reported = None
    if chosen.gain > _nearly_as_likely(chosen) and not likely.may_be_infinite:
        reported = value
    return _BOpt(most_likely=value, reported=reported, low=reported_low, high=high)


def _log_fewest(
    observed: Observed, chosen: _ChosenLaw, likely: _Likely, b_opt: _BOpt
) -> tuple[float, float]:
    """Find the logs of the fewest steps S_min and the fewest examples E_min.

    Where B_crit = 0 or infinity is nearly as likely as the best value, they are taken at that
    limit: S_min is known at 0, and E_min at infinity. log E_min is -inf where E_min may be 0.
    """
    # B_crit = 0 stands first in the profile, and an infinite one last.
    place = likely.place
    if likely.may_be_infinite:
        place = -1
    if likely.may_be_zero:
        place = 0
    log_s_min, log_e_min = _log_fewest_at(chosen.profile, place, observed.log_reference)
    # With B_crit = 0 the fewest examples are 2 S_min B_opt. They are not known where the interval
    # of B_opt is open.
    is_open = b_opt.low is None or b_opt.high is None
    if likely.may_be_zero and chosen.law == "three-terms" and is_open:
        log_e_min = -math.inf
    return log_s_min, log_e_min


def _log_fewest_at(profile: Profile, place: int, log_reference: float) -> tuple[float, float]:
    """Compute log S_min (steps) and log E_min (examples) at a place in the profile.

    The curve there is S = h (1 - p + p r + v r^2), with r = B_ref/B and p = B_crit/(B_crit +
    B_ref). ``log_reference`` is log B_ref.
    """
    # S is least at r = 0: S_min = h (1 - p).
    log_s_min = profile.log_height[place] + log_expit(-profile.log_odds[place])
    # E(B) = h B_ref (p + (1 - p)/r + v r) is least where r^2 = (1 - p)/v: there it is h B_ref (p +
    # 2 sqrt(v (1 - p))).
    log_relative_e_min = np.logaddexp(
        log_expit(profile.log_odds),
        math.log(2.0) + 0.5 * (profile.log_small + log_expit(-profile.log_odds)),
    )
    log_e_min = profile.log_height[place] + log_relative_e_min[place] + log_reference
    return float(log_s_min), float(log_e_min)


def _contradicted_fit(
    chosen: _ChosenLaw, level: float, points: tuple[FrontierPoint, ...]
) -> CurveFit:
    """Make the fit to points that contradict the law: it has their noise and a note alone."""
    profile = chosen.profile
    return CurveFit(
        law=chosen.law,
        s_min=None,
        critical_batch_size=None,
        critical_batch_size_low=None,
        critical_batch_size_high=None,
        b_opt=None,
        b_opt_low=None,
        b_opt_high=None,
        e_min=None,
        perfect_scaling_below=None,
        maximal_data_parallelism_above=None,
        level=level,
        noise=math.exp(profile.log_sigma[int(profile.deviance.argmin())]),
        note=chosen.contradiction,
        points=points,
    )


def _b_crit_at(log_odds: float | None, log_reference: float) -> float | None:
    """Convert log(B_crit/B_ref) to B_crit in examples; None stays None."""
    if log_odds is None:
        return None
    return math.exp(log_odds + log_reference)


def log_slope(points: Iterable[FrontierPoint]) -> float:
    """Fit the slope of log S over log B by ordinary least squares, without the stopped points.

    A slope of -1 is perfect scaling.

    Raises:
        CurveError: for reached points at fewer than two batch sizes.
    """
    reached = [point for point in points if not point.stopped]
    log_batch = _checked_logs((point.batch_size for point in reached), "batch_size")
    log_steps = _checked_logs((point.steps for point in reached), "steps")
    sizes = np.unique(log_batch).size
    if sizes < 2:
        raise CurveError(
            f"a slope needs reached points at two or more batch sizes, but got {sizes}"
        )
    centred = log_batch - log_batch.mean()
    return float(centred @ (log_steps - log_steps.mean()) / (centred @ centred))


def half_slope(log_batch: Array, log_steps: Array) -> Array:
    """Find the log B at which m curves' slope of log S over log B is -1/2: (m,).

    That is B_crit of S_min (1 + B_crit/B). The slope is that of a least-squares line with normal
    weights, ``SLOPE_WIDTH`` octaves wide, so that one batch size does not decide. The answer is
    where the slope would cross -1/2 if all of log B at which it is steeper came first. Where it
    never crosses, that is an end of ``log_batch``.

    Args:
        log_batch: ascending at even distances, (n,), well beyond the batch sizes of interest.
        log_steps: the curves, (m, n).
    """
    distance = log_batch[None, :] - log_batch[:, None]
    weight = np.exp(-0.5 * (distance / (SLOPE_WIDTH * math.log(2.0))) ** 2)
    weight /= weight.sum(axis=1, keepdims=True)
    # The slope of the line at each log B is a sum of all log S, weighed by these factors.
    centred = distance - (weight * distance).sum(axis=1, keepdims=True)
    factors = weight * centred / (weight * centred**2).sum(axis=1, keepdims=True)
    slope = log_steps @ factors.T
    low = np.minimum(slope[:, :-1], slope[:, 1:])
    high = np.maximum(slope[:, :-1], slope[:, 1:])
    # The fraction of each step of log B in which the slope, linear between its ends, is steeper
    # than -1/2.
    steeper = np.clip((-0.5 - low) / np.maximum(high - low, 1e-12), 0.0, 1.0)
    # As the slope mostly gets flatter with B, what is steeper lies below the log B that is sought.
    return np.asarray(log_batch[0] + (log_batch[1] - log_batch[0]) * steeper.sum(axis=1))


def batch_size_at_slope(b_crit: float, b_opt: float, factor: float) -> float:
    """Compute the batch size at which the slope of log S* over log B is -1/(1 + factor).

    Without a small-batch term (``b_opt`` 0) it is ``factor`` times B_crit.
    """
    # It is the positive root of B^2 - factor B_crit B - (1 + 2 factor) B_opt^2 = 0.
    small_batch = 2.0 * b_opt * math.sqrt(1.0 + 2.0 * factor) / factor
    return 0.5 * factor * (b_crit + math.hypot(b_crit, small_batch))


def usable(value: float, name: str) -> float:
    """Check a batch size or a number of steps, which messages call ``name``, and give it back.

    Raises:
        CurveError: if it is not positive and finite.
    """
    # NaN fails this too. The width keeps every exp of a sum of logs finite.
    if not 1e-100 < value < 1e100:
        raise CurveError(f"{name} must be {USABLE_VALUE}, but got {value}")
    return value


def _checked_logs(values: Iterable[float], name: str) -> Array:
    """Check values, as :func:`usable` does, and take their logs: (n,)."""
    return np.log(np.array([usable(value, name) for value in values], dtype=np.float64))


def _observe(points: tuple[FrontierPoint, ...]) -> Observed:
    """Check that the points suffice for a fit, and convert them for the likelihood."""
    log_batch = _checked_logs((point.batch_size for point in points), "batch_size")
    log_steps = _checked_logs((point.steps for point in points), "steps")
    stopped = np.array([point.stopped for point in points], dtype=np.bool_)
    reached = int((~stopped).sum())
    sizes = np.unique(log_batch[~stopped]).size
    if reached < 3 or sizes < 2:
        known = _known_in_words(points)
        got = f"{reached} at {sizes}: known is {known}; run more batch sizes to the target"
        raise CurveError(
            "the curve needs at least 3 points that reached the target, at 2 batch sizes, but got "
            f"{got}"
        )
    if len(points) > MAX_POINTS:
        raise CurveError(
            f"the curve takes at most {MAX_POINTS} points, but got {len(points)}: keep the best "
            "per B"
        )
    log_reference = float(log_batch[~stopped].mean())
    return Observed(
        log_batch=log_batch - log_reference,
        log_steps=log_steps,
        stopped=stopped,
        log_reference=log_reference,
    )


def _known_in_words(points: tuple[FrontierPoint, ...]) -> str:
    """Write what too few points tell, for a message."""
    phrases = list[str]()
    for stopped, over in ((False, ""), (True, "more than ")):
        alike = [point for point in points if point.stopped == stopped]
        if alike:
            steps = _span(point.steps for point in alike)
            batch_sizes = _span(point.batch_size for point in alike)
            phrases.append(f"{over}{steps} steps to target at batch size {batch_sizes}")
    return " and ".join(phrases) or "nothing"


def _span(values: Iterable[float]) -> str:
    """Write the range of values: ``8 to 64``, or ``8`` where all are the same."""
    ends = [f"{end:.6g}" for end in sorted(set(values))]
    if len(ends) == 1:
        return ends[0]
    return f"{ends[0]} to {ends[-1]}"


def _choose_law(observed: Observed, law: str, level: float) -> _ChosenLaw:
    """Fit the law that is asked for; ``auto`` takes three terms where the points ask for them.

    The third term is for small batches that waste examples. The points ask for it where it lowers
    the deviance enough, by a likelihood-ratio test. Where it lowers it only somewhat, ``auto``
    stays with two terms and widens B_crit's interval.

    Raises:
        CurveError: for three terms that too few points could test.
    """
    reached = int((~observed.stopped).sum())
    sizes = np.unique(observed.log_batch[~observed.stopped]).size
    # Three terms fit any three points, at three batch sizes: only a fourth one tests them.
    testable = reached >= 4 and sizes >= 3
    if law == "three-terms" and not testable:
        got = f"{reached} at {sizes}: run more, or fit two terms"
        raise CurveError(
            "three terms need at least 4 points that reached the target, at 3 batch sizes, but got "
            f"{got}"
        )
    # A note, which goes with either fit, if no such law can have these points.
    contradiction = _contradiction(observed, may_have_third_term=testable and law != "two-terms")
    two = _fit_law(observed, 2, level, contradiction)
    if not testable:
        if law == "auto":
            return replace(two, doubt=NOT_TESTABLE)
        return two
    three = _fit_law(observed, 3, level, contradiction)
    # The gain is how much the third term lowers the deviance.
    gain = float(two.profile.deviance.min() - three.profile.deviance.min())
    three = replace(three, gain=gain)
    is_significant = gain > _interval_rise(observed, 3, EVIDENCE)
    if law == "three-terms" or (law == "auto" and is_significant):
        return three
    if law == "auto" and gain > GAIN_OF_DOUBT:
        return _widened(two, three)
    # The points ask for the third term, but two terms alone are allowed.
    if is_significant:
        note = (
            "small batches waste examples, so by two terms B_crit is not known: let the law be auto"
        )
        return replace(two, contradiction=note)
    return two


def _fit_law(observed: Observed, terms: int, level: float, contradiction: str | None) -> _ChosenLaw:
    """Fit a law of two terms or three, with the interval of B_crit at this level.

    ``contradiction`` is the note on points that contradict the law, which goes with the fit.
    """
    law = {2: "two-terms", 3: "three-terms"}[terms]
    rise = _interval_rise(observed, terms, level)
    profile = compute_profile(observed, terms, rise)
    low, high = _interval_ends(profile, rise)
    return _ChosenLaw(
        law=law, profile=profile, rise=rise, low=low, high=high, contradiction=contradiction
    )


def _widened(two: _ChosenLaw, three: _ChosenLaw) -> _ChosenLaw:
    """Widen the interval of a law of two terms to hold that of three, as the points do not decide.

    The third term, (B_opt/B)^2, is of examples that small batches waste. An end, of log
    B_crit/B_ref, is None, open, where either law leaves it open.
    """
    low = None
    high = None
    if two.low is not None and three.low is not None:
        low = min(two.low, three.low)
    if two.high is not None and three.high is not None:
        high = max(two.high, three.high)
    doubt = (
        "small batches may waste examples, so the interval of B_crit holds that of a law in which "
        "they do, too: run them again"
    )
    return replace(two, low=low, high=high, doubt=doubt)


def _contradiction(observed: Observed, may_have_third_term: bool) -> str | None:
    """Tell why the points contradict the law, as a note; None where they do not.

    They do where the slope of log S over log B is significantly above 0, or below -1 without a
    third term. The slope is that of a straight line, fitted by least squares.
    """
    # log(B/B_ref), whose mean is 0 by the choice of B_ref.
    x = observed.log_batch[~observed.stopped]
    log_steps = observed.log_steps[~observed.stopped]
    slope = float(x @ log_steps / (x @ x))
    residual = log_steps - log_steps.mean() - slope * x
    # The prior of the noise counts as PRIOR_WEIGHT further residuals of the size PRIOR_NOISE.
    degrees = x.size - 2 + PRIOR_WEIGHT
    error = math.sqrt((residual @ residual + PRIOR_WEIGHT * PRIOR_NOISE**2) / degrees / (x @ x))
    margin = error * stdtrit(degrees, (1.0 + EVIDENCE) / 2.0)
    if slope > margin:
        return (
            "steps rise with the batch size, so B_crit is not known: tune the learning rate at "
            "each batch size"
        )
    if slope < -1.0 - margin and not may_have_third_term:
        return (
            "small batches waste examples, so B_crit is not known: that takes 4 points at 3 batch "
            "sizes"
        )
    return None


def _interval_rise(observed: Observed, terms: int, level: float) -> float:
    """Compute how far the deviance rises from its minimum to an end of an interval.

    It is N log(1 + t^2/(N - k)), point 4 of the module's docstring. N are the reached points and
    the prior's weight, k the law's terms, and t is the quantile of Student's t at this level.
    """
    if not 0.0 < level < 1.0:
        raise CurveError(
            f"the level of an interval must be between 0 and 1, such as 0.9, but got {level}"
        )
    n = float((~observed.stopped).sum()) + PRIOR_WEIGHT
    t = stdtrit(n - terms, (1.0 + level) / 2.0)
    return float(n * np.log1p(t * t / (n - terms)))


def _interval_ends(profile: Profile, rise: float) -> tuple[float | None, float | None]:
    """Find the ends of the interval of log(B_crit/B_ref).

    There the deviance is ``rise`` above its minimum. An end is None where B_crit = 0 or infinity,
    or the end of the grid, lies within the interval.
    """
    excess = profile.deviance - profile.deviance.min() - rise
    # The first and the last log odds are infinite.
    crossings = _crossings(profile.log_odds[1:-1], excess[1:-1])
    low: float | None = crossings[0]
    high: float | None = crossings[1]
    if excess[0] <= 0 or crossings[0] <= profile.log_odds[1]:
        low = None
    if excess[-1] <= 0 or crossings[1] >= profile.log_odds[-2]:
        high = None
    return low, high


def _crossings(x: Array, excess: Array) -> tuple[float, float]:
    """Find the outermost two x at which ``excess`` crosses 0, by interpolation.

    Between them it is at most 0. Where it does not cross, an end of ``x`` stands in.
    """
    inside = np.flatnonzero(excess <= 0)
    # Only rounding leaves none: the minimum touches the threshold.
    if inside.size == 0:
        inside = np.array([excess.argmin()])
    low = _crossing(x, excess, inside[0], inside[0] - 1)
    high = _crossing(x, excess, inside[-1], inside[-1] + 1)
    return low, high


def _crossing(x: Array, excess: Array, inside: int, outside: int) -> float:
    """Interpolate the x at which ``excess`` is 0 between two neighbouring positions.

    At ``inside`` it is at most 0, at ``outside`` above. Where ``outside`` is beyond the array, the
    answer is the x of ``inside``.
    """
    if not 0 <= outside < x.size:
        return float(x[inside])
    # By rounding it may be just above 0 at ``inside``, too: the x stays between the two.
    fraction = min(max(excess[inside] / (excess[inside] - excess[outside]), 0.0), 1.0)
    return float(x[inside] + fraction * (x[outside] - x[inside]))


def _b_opt_range(
    observed: Observed, profile: Profile, rise: float
) -> tuple[float, float, float | None]:
    """Find B_opt, and the range within which the deviance is ``rise`` above its minimum at most.

    B_opt is the batch size with the fewest examples, by the law's third term.

    Returns:
        B_opt, the lower end and the upper one, which is None where every larger value fits.
    """
    most_likely = int(profile.deviance.argmin())
    threshold = profile.deviance[most_likely] + rise
    inside = np.flatnonzero(profile.deviance <= threshold)
    # The ends of log v take a search at each of the log odds. Fifteen of these, spread over the
    # range, suffice.
    inside = inside[np.linspace(0, inside.size - 1, 15).astype(int)]
    log_odds = profile.log_odds[inside]
    log_small_low, log_small_high = _log_small_ends(
        observed, log_odds, profile.log_small[inside], threshold
    )
    # B_opt^2 = B_ref^2 v/(1 - p), with v the third term's factor and 1 - p = expit(-log odds).
    log_low = 0.5 * (log_small_low - log_expit(-log_odds)) + observed.log_reference
    log_high = 0.5 * (log_small_high - log_expit(-log_odds)) + observed.log_reference
    log_value = (
        0.5 * (profile.log_small[most_likely] - log_expit(-profile.log_odds[most_likely]))
        + observed.log_reference
    )
    # With an infinite B_crit, p is 1, and B_opt has no upper end.
    upper_end = None
    if log_odds[-1] != np.inf:
        upper_end = math.exp(log_high.max())
    return math.exp(log_value), math.exp(log_low.min()), upper_end


def _log_small_ends(
    observed: Observed, log_odds: Array, log_small: Array, threshold: float
) -> tuple[Array, Array]:
    """Find the smallest and the largest log v whose deviance is below the threshold: (m,) each.

    v is the factor of the law's third term, for small batches. The ends are found at each of m
    ``log_odds``, at which ``log_small`` is the best log v.
    """
    # The first grid looks within 8 of the best log v: that is a factor of 55 in B_opt, either way.
    log_low = log_small - 8.0
    log_high = log_small + 8.0
    # The second grid spans what the first one found, with a margin of 0.5. It is mostly finer.
    for count in (25, 13):
        grid = np.linspace(log_low, log_high, count, axis=1)
        profile = minimise_deviance(observed, np.repeat(log_odds, count), grid.reshape(-1))
        excess = profile.deviance.reshape(grid.shape) - threshold
        crossings = np.array([_crossings(*row) for row in zip(grid, excess, strict=True)])
        log_low = crossings[:, 0] - 0.5
        log_high = crossings[:, 1] + 0.5
    return crossings[:, 0], crossings[:, 1]


def _note(fit: CurveFit, doubt: str | None) -> str | None:
    """Write what the fit does not tell, and what to run for it; None where nothing is missing.

    ``doubt`` is the reason why another law may hold as well; None: there is no doubt.
    """
    notes = list[str]()
    if doubt is not None:
        notes.append(doubt)
    reached = sum(not point.stopped for point in fit.points)
    terms = 2 if fit.law == "two-terms" else 3
    # With fewer than two residual degrees of freedom the prior decides how large the noise is.
    if reached - terms < 2:
        notes.append(
            f"{reached} points hardly show their noise: the intervals assume {PRIOR_NOISE:.0%}"
        )
    if fit.noise > LARGE_SCATTER:
        notes.append(f"the points scatter by a factor of {math.exp(fit.noise):.1f}: repeat them")
    note_on_ends = _ends_note(fit)
    if note_on_ends is not None:
        notes.append(note_on_ends)
    return "; ".join(notes) or None


def _ends_note(fit: CurveFit) -> str | None:
    """Name the batch sizes that would give B_crit's interval the ends that it lacks, if any."""
    sizes = [point.batch_size for point in fit.points]
    above = f"above {max(sizes):.10g}"
    below = f"below {min(sizes):.10g}"
    no_low = fit.critical_batch_size_low is None
    no_high = fit.critical_batch_size_high is None
    if no_low and no_high:
        return (
            f"the points do not bracket B_crit: run batch sizes {below} and {above}, or more trials"
        )
    if no_high:
        return f"no point near or above B_crit, so it has no upper end: run batch sizes {above}"
    if no_low:
        return f"no point near or below B_crit, so it has no lower end: run batch sizes {below}"
    return None
