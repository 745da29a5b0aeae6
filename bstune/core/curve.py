"""Fits S*(B) = S_min (1 + B_crit/B + (B_opt/B)^2) to a few noisy points, some of them bounds, with intervals.

The curve's first two terms are McCandlish et al. 2018, arXiv 1812.06162, eq. 2.11. The third, for small batches that
waste examples, and the error model are ours:

1. At a reference batch size B_ref the curve is S(B) = h (1 - p + p r + v r^2) with r = B_ref/B, p = B_crit/(B_crit +
   B_ref) and v (B_ref/B_opt)^2 = 1 - p. p = 0 (S constant but for the third term) and p = 1 (S_min is 0) belong to the
   family, so that "B_crit is infinite" has a likelihood of its own and needs no large number in its place.
2. The residuals of log S are normal with standard deviation sigma, or, with probability ``OUTLIER_SHARE``, off by a
   further normal error of ``OUTLIER_SPREAD``: one bad point is outvoted and leaves sigma as it was. A stopped point
   contributes the probability that S exceeds its bound.
3. sigma has a scaled inverse chi-square prior, as if ``PRIOR_WEIGHT`` residuals of size ``PRIOR_NOISE`` had been seen.
4. An end of an interval is where the deviance (-2 log likelihood, all else profiled out) rises above its minimum by
   N log(1 + t^2/(N - k)), with N = reached points + PRIOR_WEIGHT, k terms of the law, and t the two-sided quantile of
   Student's t with N - k degrees of freedom. That is exact for a linear model with normal residuals and no prior; here
   it is an approximation, chosen because a chi-square quantile is too small for few points. In simulations with six
   points up to B_crit/2 or nine up to 8 B_crit, the nominal 90% covered 91 to 93% at 10% noise (2000 curves a case), 96
   to 99% at 5% and 84 to 88% at 20% (500 curves each): the prior errs to the wide side when the noise is small.
5. The third term (v > 0) is fitted where it lowers the deviance by more than the rise of point 4 at the level
   ``EVIDENCE``: a likelihood-ratio test. Where it lowers it by ``DOUBT`` only, the points do not decide, and B_crit's
   interval holds both laws'. tests/benchmarks/README.md compares this rule with information criteria.
6. Points that contradict the law, by the same level, have no B_crit: steps that rise with B, and small batches that
   waste examples where the third term is not allowed or not testable.
"""

import csv
import io
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.special import log_expit, log_ndtr, stdtrit

from bstune.core.errors import BstuneError
from bstune.core.records import TrialResult

Array = NDArray[np.float64]
SLOPE_RATIO = 9.0  # the slope -B_crit/(B + B_crit) is -0.9 at B_crit/9 and -0.1 at 9 B_crit
PRIOR_NOISE = 0.11  # this and the weight: so that the coverage holds at 10% noise with 6 to 9 points, see the tests
PRIOR_WEIGHT = 1.0
OUTLIER_SHARE = 0.05
OUTLIER_SPREAD = 1.0  # in log S: a bad point is typically off by a factor of up to e
USABLE = "a positive, finite number (below 1e100)"
FLAGS = {"0": False, "false": False, "1": True, "true": True}
SLOPE_WIDTH = 1.0  # octaves over which a slope is averaged
LAWS = ("auto", "two-terms", "three-terms")
EVIDENCE = (
    0.98  # two-sided; as only v > 0 counts, a false alarm in 1% of the curves that two terms made
)
DOUBT = 2.0  # where the information criterion of Akaike 1974 prefers one more parameter
SCATTER = 0.4  # noise from which on it is said: three times what single, tuned runs have
REACH = math.log(
    1e4
)  # B_crit is sought within this factor of the batch sizes, and at 0 and infinity
MAX_POINTS = 1000  # the fit's arrays grow with the points; a frontier has one per half octave


class CurveError(BstuneError):
    """The points cannot be read or used, or are too few to fit a curve to."""


@dataclass(frozen=True)
class FrontierPoint:
    """A point of S*(B) or, where ``stopped``, a step at which the target was still missed: S > steps."""

    batch_size: int | float
    steps: float  # the fit takes S to be this
    stopped: bool
    steps_low: (
        float | None
    )  # the last step known to miss the target: S lies in (steps_low, steps]; None if unknown


@dataclass(frozen=True)
class CurveFit:
    """S*(B) = S_min (1 + B_crit/B + (B_opt/B)^2) as far as the points determine it, else None."""

    law: str  # two-terms or three-terms
    s_min: float | None  # fewest steps, at unlimited batch size; None where B_crit may be infinite
    # The most likely critical batch size, in examples. None where 0 or infinity is nearly as likely (deviance at most 1
    # higher: then even a 68% interval is open), and, as its ends, where the points contradict the law.
    critical_batch_size: float | None
    critical_batch_size_low: (
        float | None
    )  # end of its interval; None where every smaller value fits the points
    critical_batch_size_high: float | None  # likewise every larger one
    # The batch size with the fewest examples, likewise; of three terms only: of two, the smaller the fewer.
    b_opt: float | None
    b_opt_low: float | None
    b_opt_high: float | None
    e_min: (
        float | None
    )  # fewest examples, S_min (B_crit + 2 B_opt), at B_opt; None where they may be 0
    # Where the slope of log S* is -0.9 and -0.1: B_crit/9 and 9 B_crit of two terms, both larger of three. There the
    # slope is under -1 below B_opt, where perfect scaling says only that a smaller batch is no better.
    perfect_scaling_below: float | None
    maximal_data_parallelism_above: float | None
    level: float  # nominal coverage of the interval
    noise: float  # sigma, the standard deviation of log S around the curve; 0.1 is about 10%
    note: str | None  # what is not known, and what to run for it
    points: tuple[FrontierPoint, ...]  # that were fitted


@dataclass(frozen=True)
class CurveBand:
    """The most likely S*(B) and its pointwise interval, arrays of one shape; further trials scatter around it."""

    batch_size: Array
    steps: Array
    low: Array
    high: Array


@dataclass(frozen=True)
class _Observed:
    """The points as the likelihood takes them, arrays of shape (n,); x is log(B/B_ref)."""

    x: Array
    log_steps: Array
    stopped: NDArray[np.bool_]
    log_reference: float


@dataclass(frozen=True)
class _Profile:
    """The deviance minimised over the other parameters, shape (m,); ``odds`` is log(B_crit/B_ref), ``small`` log v."""

    odds: Array
    small: Array
    deviance: Array
    log_height: Array
    log_sigma: Array


@dataclass(frozen=True)
class _Chosen:
    """The law that is fitted, and the ends of log(B_crit/B_ref), None where they are open."""

    law: str
    profile: _Profile
    rise: float  # of the deviance, to an end of an interval
    ends: tuple[float | None, float | None]
    gain: float = 0.0  # by how much the third term lowers the deviance
    doubt: str | None = None
    contradiction: str | None = None


def frontier_points(trials: Iterable[TrialResult]) -> list[FrontierPoint]:
    """Return the reached trial of least S x B in each half octave floor(2 log2 B), else the bound largest in S x B."""
    # That a stopped trial bounds S* too, not only S at its own learning rate, is an assumption.

    def rank(trial: TrialResult) -> tuple[bool, int, int, int]:
        examples = trial.batch_size * (trial.steps if trial.reached else -trial.steps_low)
        return not trial.reached, examples, trial.batch_size, trial.number

    octaves: dict[int, list[TrialResult]] = {}
    for trial in trials:
        if trial.reached or (trial.status == "stopped" and trial.steps_low > 0):
            # floor(log2(B^2)) in integers: 2 log2 B in floats can fall on the wrong side of an edge
            octaves.setdefault((trial.batch_size**2).bit_length() - 1, []).append(trial)
    best = [min(octaves[octave], key=rank) for octave in sorted(octaves)]
    return [
        FrontierPoint(
            t.batch_size, t.steps if t.reached else t.steps_low, not t.reached, t.steps_low
        )
        for t in best
    ]


def fit_curve(points: Iterable[FrontierPoint], level: float = 0.90, law: str = "auto") -> CurveFit:
    """Return the fit of S*(B) in log S, with profile-likelihood intervals for B_crit and B_opt.

    Args:
        points: batch sizes in examples and steps to target. Three or more that are not stopped, at two or more batch
            sizes, and any number of bounds; the third term takes four, at three batch sizes.
        level: nominal coverage of the intervals, between 0 and 1.
        law: ``two-terms``, ``three-terms``, or ``auto``: three where the points ask for them.

    Returns:
        S_min in steps, B_crit and B_opt in examples with their intervals, E_min in examples, the bounds of the regimes
        and the noise; None for each that the points do not determine.

    Raises:
        CurveError: for fewer points, for values that are not positive and finite (NaN too), and for another level.
    """
    points = tuple(points)
    if law not in LAWS:
        raise CurveError(f"the law must be one of {', '.join(LAWS)}, but got {law}")
    observed = _observe(points)
    chosen = _choose_law(observed, law, level)
    best, rise, three = chosen.profile, chosen.rise, chosen.law == "three-terms"
    b_opt, b_opt_low, b_opt_high = _b_opt(observed, best, rise) if three else (0.0, None, None)
    b_opt_low = b_opt_low if chosen.gain > rise else None
    k = int(best.deviance.argmin())
    nearly = best.deviance[k] + min(1.0, rise)  # 1 is the 68% quantile of chi-square
    open_below, open_above = bool(best.deviance[0] <= nearly), bool(best.deviance[-1] <= nearly)
    # S_min = h (1 - p), and E(B) = h B_ref (p + (1 - p)/r + v r) is least where r^2 = (1 - p)/v; at the limit p = 0 or
    # 1 where the points allow it
    at = 0 if open_below else -1 if open_above else k
    log_s_min = best.log_height[at] + log_expit(-best.odds[at])
    fewest = np.logaddexp(
        log_expit(best.odds), math.log(2.0) + 0.5 * (best.small + log_expit(-best.odds))
    )
    log_e_min = best.log_height[at] + fewest[at] + observed.log_reference
    if open_below and three and (b_opt_low is None or b_opt_high is None):
        log_e_min = -math.inf  # B_opt decides it, and may be 0 or infinite
    b_crit = None if open_below or open_above else math.exp(best.odds[k] + observed.log_reference)
    low, high = (
        None if end is None else math.exp(end + observed.log_reference) for end in chosen.ends
    )
    fit = CurveFit(
        law=chosen.law,
        s_min=None if open_above else math.exp(log_s_min),
        critical_batch_size=b_crit,
        critical_batch_size_low=low,
        critical_batch_size_high=high,
        b_opt=b_opt if three and not open_above and chosen.gain > min(1.0, rise) else None,
        b_opt_low=b_opt_low,
        b_opt_high=b_opt_high,
        e_min=math.exp(log_e_min) if log_e_min > -math.inf else None,
        perfect_scaling_below=None
        if b_crit is None
        else batch_at(b_crit, b_opt, 1.0 / SLOPE_RATIO),
        maximal_data_parallelism_above=None
        if b_crit is None
        else batch_at(b_crit, b_opt, SLOPE_RATIO),
        level=level,
        noise=math.exp(best.log_sigma[k]),
        note=None,
        points=points,
    )
    if chosen.contradiction is None:
        return replace(fit, note=_note(fit, chosen.doubt))
    kept = ("law", "level", "noise", "points")
    unknown: dict[str, Any] = {name: None for name in vars(fit) if name not in kept}
    return replace(fit, **unknown | {"note": chosen.contradiction})


def log_slope(points: Iterable[FrontierPoint]) -> float:
    """Return the slope of log S over log B by ordinary least squares, bounds left out; -1 is perfect scaling."""
    reached = [point for point in points if not point.stopped]
    x, y = (
        _log((p.batch_size for p in reached), "batch_size"),
        _log((p.steps for p in reached), "steps"),
    )
    if np.unique(x).size < 2:
        raise CurveError(
            f"a slope needs reached points at two or more batch sizes, but got {np.unique(x).size}"
        )
    x = x - x.mean()
    return float(x @ (y - y.mean()) / (x @ x))


def half_slope(log_batch: Array, log_steps: Array) -> Array:
    """Return log B where the slope of log S over log B is -1/2: B_crit of S_min (1 + B_crit/B).

    The slope is that of a least-squares line with normal weights, ``SLOPE_WIDTH`` octaves wide, so that one batch size
    does not decide; where it crosses -1/2 more than once, the answer is the mean of where it falls and where it rises.

    Args:
        log_batch: rising at even distances, shape (n,), well beyond the batch sizes that are asked about.
        log_steps: curves, shape (m, n).

    Returns:
        Shape (m,); an end of ``log_batch`` where the slope does not cross.
    """
    away = log_batch[None, :] - log_batch[:, None]
    weight = np.exp(-0.5 * (away / (SLOPE_WIDTH * math.log(2.0))) ** 2)
    weight /= weight.sum(axis=1, keepdims=True)
    away = away - (weight * away).sum(axis=1, keepdims=True)
    line = weight * away / (weight * away**2).sum(axis=1, keepdims=True)
    slope = log_steps @ line.T
    low, high = np.minimum(slope[:, :-1], slope[:, 1:]), np.maximum(slope[:, :-1], slope[:, 1:])
    # The share of each step of log B in which the slope, linear between its ends, is steeper.
    steeper = np.clip((-0.5 - low) / np.maximum(high - low, 1e-12), 0.0, 1.0)
    return np.asarray(log_batch[0] + (log_batch[1] - log_batch[0]) * steeper.sum(axis=1))


def _usable(value: float, name: str) -> float:
    if (
        not 1e-100 < value < 1e100
    ):  # NaN fails this too; the width keeps every exp of a sum of logs finite
        raise CurveError(f"{name} must be {USABLE}, but got {value}")
    return value


def _log(values: Iterable[float], name: str) -> Array:
    return np.log(np.array([_usable(value, name) for value in values], dtype=np.float64))


def _observe(points: tuple[FrontierPoint, ...]) -> _Observed:
    log_batch, log_steps = (
        _log((p.batch_size for p in points), "batch_size"),
        _log((p.steps for p in points), "steps"),
    )
    stopped = np.array([point.stopped for point in points], dtype=np.bool_)
    reached, sizes = int((~stopped).sum()), np.unique(log_batch[~stopped]).size
    if reached < 3 or sizes < 2:
        known = [
            f"{over}{_span(p.steps for p in some)} steps to target at batch size {_span(p.batch_size for p in some)}"
            for over, stopped in (("", False), ("more than ", True))
            if (some := [point for point in points if point.stopped == stopped])
        ]
        got = f"{reached} at {sizes}: known is {' and '.join(known) or 'nothing'}; run more batch sizes to the target"
        raise CurveError(
            f"the curve needs at least 3 points that reached the target, at 2 batch sizes, but got {got}"
        )
    if len(points) > MAX_POINTS:
        raise CurveError(
            f"the curve takes at most {MAX_POINTS} points, but got {len(points)}: keep the best per B"
        )
    log_reference = float(log_batch[~stopped].mean())
    return _Observed(log_batch - log_reference, log_steps, stopped, log_reference)


def _span(values: Iterable[float]) -> str:
    ends = [f"{end:.6g}" for end in sorted(set(values))]
    return ends[0] if len(ends) == 1 else f"{ends[0]} to {ends[-1]}"


def _choose_law(observed: _Observed, law: str, level: float) -> _Chosen:
    """Return the fit of two terms, or that of three where ``law`` asks for it or, if that is auto, the points do."""
    reached, sizes = int((~observed.stopped).sum()), np.unique(observed.x[~observed.stopped]).size
    testable = reached >= 4 and sizes >= 3
    if law == "three-terms" and not testable:
        got = f"{reached} at {sizes}: run more, or fit two terms"
        raise CurveError(
            f"three terms need at least 4 points that reached the target, at 3 batch sizes, but got {got}"
        )
    contradiction = _contradiction(observed, testable and law != "two-terms")
    profile, rise = _locate(observed, 2, level), _rise(observed, 2, level)
    two = _Chosen("two-terms", profile, rise, _ends(profile, rise), contradiction=contradiction)
    if not testable:
        doubt = "whether small batches waste examples is not known: that takes 4 points at 3 batch sizes"
        return replace(two, doubt=doubt) if law == "auto" else two
    profile, rise = _locate(observed, 3, level), _rise(observed, 3, level)
    gain = float(two.profile.deviance.min() - profile.deviance.min())
    asked = gain > _rise(observed, 3, EVIDENCE)
    three = _Chosen(
        "three-terms", profile, rise, _ends(profile, rise), gain, contradiction=contradiction
    )
    if law == "three-terms" or (law == "auto" and asked):
        return three
    if law == "auto" and gain > DOUBT:
        (low, high), (low_of_three, high_of_three) = two.ends, three.ends
        ends = (
            None if low is None or low_of_three is None else min(low, low_of_three),
            None if high is None or high_of_three is None else max(high, high_of_three),
        )
        doubt = "small batches may waste examples, so the interval of B_crit holds that law's too: run them again"
        return replace(two, ends=ends, doubt=doubt)
    if asked:
        wasted = (
            "small batches waste examples, so by two terms B_crit is not known: let the law be auto"
        )
        return replace(two, contradiction=wasted)
    return two


def _note(fit: CurveFit, doubt: str | None) -> str | None:
    """Return what is not known, and what to run for it."""
    reached = sum(not point.stopped for point in fit.points)
    assumed = reached - (2 if fit.law == "two-terms" else 3) < 2
    notes = [
        doubt,
        f"{reached} points hardly show their noise: the intervals assume {PRIOR_NOISE:.0%}"
        if assumed
        else None,
        f"the points scatter by a factor of {math.exp(fit.noise):.1f}: repeat them"
        if fit.noise > SCATTER
        else None,
        _ends_note(
            fit.points, fit.critical_batch_size_low is None, fit.critical_batch_size_high is None
        ),
    ]
    return "; ".join(note for note in notes if note) or None


def _contradiction(observed: _Observed, third_term: bool) -> str | None:
    """Return what no curve of the law explains: a slope of log S over log B above 0 or, of two terms, below -1."""
    x, y = observed.x[~observed.stopped], observed.log_steps[~observed.stopped]
    slope = float(x @ y / (x @ x))  # x is 0 in the mean
    residual, degrees = y - y.mean() - slope * x, x.size - 2 + PRIOR_WEIGHT
    error = math.sqrt((residual @ residual + PRIOR_WEIGHT * PRIOR_NOISE**2) / degrees / (x @ x))
    margin = error * stdtrit(degrees, (1.0 + EVIDENCE) / 2.0)
    if slope > margin:
        return "steps rise with the batch size, so B_crit is not known: tune the learning rate at each batch size"
    if slope < -1.0 - margin and not third_term:
        return "small batches waste examples, so B_crit is not known: that takes 4 points at 3 batch sizes"
    return None


def _rise(observed: _Observed, terms: int, level: float) -> float:
    """Return by how much the deviance rises to an end of the interval (point 4 of the module's docstring)."""
    if not 0.0 < level < 1.0:
        raise CurveError(
            f"the level of an interval must be between 0 and 1, such as 0.9, but got {level}"
        )
    n = float((~observed.stopped).sum()) + PRIOR_WEIGHT
    t = stdtrit(n - terms, (1.0 + level) / 2.0)
    return float(n * np.log1p(t * t / (n - terms)))


def _shape(odds: Array, small: Array, x: Array) -> Array:
    """Return log(1 - p + p r + v r^2), r = B_ref/B, p = expit(odds) and v = exp(small), infinite ones too."""
    two = np.logaddexp(log_expit(-odds)[..., None], log_expit(odds)[..., None] - x)
    return np.asarray(np.logaddexp(two, small[..., None] - 2.0 * x))


def _deviance(gap: Array, stopped: NDArray[np.bool_], log_sigma: Array) -> Array:
    """Return -2 log likelihood up to a constant, shape (m, k), for errors of log S (m, k, n) and log_sigma (m, k)."""
    sigma = np.exp(log_sigma)[..., None]
    wide = np.hypot(sigma, OUTLIER_SPREAD)
    square = gap[..., ~stopped] ** 2
    core = math.log1p(-OUTLIER_SHARE) - log_sigma[..., None] - square / (2.0 * sigma**2)
    bad = math.log(OUTLIER_SHARE) - np.log(wide) - square / (2.0 * wide**2)
    likelihood = np.logaddexp(core, bad).sum(-1)
    if stopped.any():  # the probability that S exceeds the bound
        over = gap[..., stopped]
        core = math.log1p(-OUTLIER_SHARE) + log_ndtr(-over / sigma)
        likelihood += np.logaddexp(core, math.log(OUTLIER_SHARE) + log_ndtr(-over / wide)).sum(-1)
    prior = PRIOR_WEIGHT * (log_sigma + 0.5 * (PRIOR_NOISE / sigma[..., 0]) ** 2)
    return np.asarray(2.0 * (prior - likelihood))


def _profile(
    observed: _Observed, odds: Array, small: Array | None = None, log_height: Array | None = None
) -> _Profile:
    """Minimise the deviance over sigma, and over the small-batch term and the height unless given, for all of odds."""
    # A pattern search of shrinking steps, from the best of a grid of starts: the outlier mixture has several minima.
    odds, rows = odds[:, None], np.arange(odds.size)
    if small is None:  # from a tenth of the steps at the smallest batch size to nearly all of them
        edge = observed.x.min(keepdims=True)
        third = (
            _shape(odds, np.array([-np.inf]), edge)[..., 0]
            + 2.0 * edge
            + np.array([-2.0, 1.0, 4.0, 7.0])
        )
    else:
        third = small[:, None]
    shape = _shape(odds, third, observed.x)  # (m, k, n)
    if log_height is None:
        height = np.quantile(
            (observed.log_steps - shape)[..., ~observed.stopped], np.linspace(0.0, 1.0, 9), axis=-1
        )
        height = np.moveaxis(height, 0, -1).reshape(odds.size, -1)
        third, shape = np.repeat(third, 9, axis=1), np.repeat(shape, 9, axis=1)
    else:
        height = log_height[:, None]
    sigmas = np.log([0.03, 0.1, 0.3, 1.0])
    log_sigma = np.tile(sigmas, height.shape)
    height, third, shape = (
        np.repeat(values, sigmas.size, axis=1) for values in (height, third, shape)
    )
    free = (small is None, log_height is None, True)
    moves = np.array(list(product(*((-1.0, 0.0, 1.0) if one else (0.0,) for one in free))))
    step = 0.6
    for turn in range(22 if small is not None else 34):
        deviance = _deviance(
            observed.log_steps - shape - height[..., None], observed.stopped, log_sigma
        )
        k = deviance.argmin(1)
        best = _Profile(
            odds[:, 0], third[rows, k], deviance[rows, k], height[rows, k], log_sigma[rows, k]
        )
        scale = step * np.exp(best.log_sigma)
        height = best.log_height[:, None] + scale[:, None] * moves[:, 1]
        log_sigma = best.log_sigma[:, None] + step * moves[:, 2]
        shape = np.repeat(shape[rows, k][:, None], len(moves), axis=1)
        third = best.small[:, None] + 2.0 * step * moves[:, 0]
        if small is None:  # the height gives way, so that the curve stays among the points
            middle = shape.mean(-1)
            shape = _shape(odds, third, observed.x)
            height += middle - shape.mean(-1)
        step = (
            0.3 if small is None and turn == 11 else 0.7 * step
        )  # three parameters take a second search
    return best


def _locate(observed: _Observed, terms: int, level: float) -> _Profile:
    """Return the profile on a grid that resolves its minimum and the interval; its first and last odds are infinite."""

    def minimise(odds: Array) -> _Profile:
        return _profile(observed, odds, np.full(odds.size, -np.inf) if terms == 2 else None)

    rise = _rise(observed, terms, level)
    first, last = observed.x.min() - REACH, observed.x.max() + REACH
    limits = minimise(np.array([-np.inf, np.inf]))
    inner = minimise(np.linspace(first, last, 96))
    for _ in range(2):  # twice: the first grid may see the interval as a single point
        lowest = min(inner.deviance.min(), limits.deviance.min())
        inside = np.flatnonzero(inner.deviance <= max(lowest + rise, inner.deviance.min()))
        low, high = (
            inner.odds[max(inside[0] - 1, 0)],
            inner.odds[min(inside[-1] + 1, inner.odds.size - 1)],
        )
        inner = minimise(np.linspace(low, high, 41))
    finer = inner
    for _ in range(3):
        k = int(finer.deviance.argmin())
        low, high = finer.odds[max(k - 1, 0)], finer.odds[min(k + 1, finer.odds.size - 1)]
        finer = minimise(np.linspace(low, high, 9))
    columns = [
        np.concatenate(parts)
        for parts in zip(*(vars(g).values() for g in (limits, inner, finer)), strict=True)
    ]
    order = np.argsort(columns[0], kind="stable")
    return _Profile(*(column[order] for column in columns))


def _small_ends(
    observed: _Observed, odds: Array, small: Array, threshold: float
) -> tuple[Array, Array]:
    """Return the smallest and largest small-batch term at each of odds whose deviance is below the threshold."""
    low, high = small - 8.0, small + 8.0
    for count in (25, 13):
        grid = np.linspace(low, high, count, axis=1)
        deviance = _profile(observed, np.repeat(odds, count), grid.reshape(-1)).deviance.reshape(
            grid.shape
        )
        ends = np.array(
            [_crossings(line, d - threshold) for line, d in zip(grid, deviance, strict=True)]
        )
        low, high = ends[:, 0] - 0.5, ends[:, 1] + 0.5
    return ends[:, 0], ends[:, 1]


def _b_opt(
    observed: _Observed, profile: _Profile, rise: float
) -> tuple[float, float, float | None]:
    """Return B_opt and its range in the likelihood region, with None for an end where every larger one fits."""
    k = int(profile.deviance.argmin())
    inside = np.flatnonzero(profile.deviance <= profile.deviance[k] + rise)
    inside = inside[np.linspace(0, inside.size - 1, 15).astype(int)]
    ends = _small_ends(
        observed, profile.odds[inside], profile.small[inside], profile.deviance[k] + rise
    )
    # B_opt^2 = B_ref^2 v/(1 - p)
    low, high = (
        0.5 * (end - log_expit(-profile.odds[inside])) + observed.log_reference for end in ends
    )
    best = 0.5 * (profile.small[k] - log_expit(-profile.odds[k])) + observed.log_reference
    return (
        math.exp(best),
        math.exp(low.min()),
        None if profile.odds[inside[-1]] == np.inf else math.exp(high.max()),
    )


def batch_at(b_crit: float, b_opt: float, factor: float) -> float:
    """Return the batch size at which the slope of log S* is -1/(1 + factor): factor B_crit without a B_opt."""
    return (
        0.5
        * factor
        * (b_crit + math.hypot(b_crit, 2.0 * b_opt * math.sqrt(1.0 + 2.0 * factor) / factor))
    )


def _ends(profile: _Profile, rise: float) -> tuple[float | None, float | None]:
    """Return the ends of the interval of log(B_crit/B_ref), None where the limit or the grid's end lies inside."""
    excess = profile.deviance - profile.deviance.min() - rise
    low, high = _crossings(profile.odds[1:-1], excess[1:-1])
    return (
        None if excess[0] <= 0 or low <= profile.odds[1] else low,
        None if excess[-1] <= 0 or high >= profile.odds[-2] else high,
    )


def _crossings(x: Array, excess: Array) -> tuple[float, float]:
    """Return the outermost x between which ``excess`` is at most 0, interpolated, or the ends of ``x``."""
    inside = np.flatnonzero(excess <= 0)
    if inside.size == 0:  # only rounding leaves none: the minimum touches the threshold
        inside = np.array([excess.argmin()])
    ends = []
    for k, neighbour in ((inside[0], inside[0] - 1), (inside[-1], inside[-1] + 1)):
        if not 0 <= neighbour < x.size:
            ends.append(float(x[k]))
            continue
        share = min(max(excess[k] / (excess[k] - excess[neighbour]), 0.0), 1.0)
        ends.append(float(x[k] + share * (x[neighbour] - x[k])))
    return ends[0], ends[1]


def _ends_note(points: tuple[FrontierPoint, ...], no_low: bool, no_high: bool) -> str | None:
    sizes = [point.batch_size for point in points]
    above, below = f"above {max(sizes):.10g}", f"below {min(sizes):.10g}"
    if no_low and no_high:
        return (
            f"the points do not bracket B_crit: run batch sizes {below} and {above}, or more trials"
        )
    if no_high:
        return f"no point near or above B_crit, so it has no upper end: run batch sizes {above}"
    if no_low:
        return f"no point near or below B_crit, so it has no lower end: run batch sizes {below}"
    return None


def parse_points(text: str, file: str) -> list[FrontierPoint]:
    """Parse a CSV file's text: columns batch_size, steps and optionally stopped; others are ignored.

    ``file`` names it in messages. CurveError for text that cannot be used.
    """
    lines = io.StringIO(text, newline="")
    try:
        return list(_parse(csv.DictReader(lines, strict=True), file))
    except csv.Error as error:
        raise CurveError(
            f"{file} is not a CSV file ({error}); export the points as plain CSV"
        ) from error


def _parse(reader: "csv.DictReader[str]", file: str) -> Iterator[FrontierPoint]:
    header = [name.strip() for name in reader.fieldnames or ()]
    if header.count("batch_size") != 1 or header.count("steps") != 1 or header.count("stopped") > 1:
        needs = "needs the columns batch_size and steps, and may have stopped, each once, but got"
        raise CurveError(
            f"{file}, line 1: {needs} {','.join(header)[:80]!r}: name the columns in the first line"
        )
    reader.fieldnames = header
    for row in reader:
        place = f"{file}, line {reader.line_num}"
        if None in row or None in row.values():
            raise CurveError(
                f"{place}: needs {len(header)} values, as line 1 has columns: fix or drop the line"
            )
        size, steps = (_number(row[name], name, place) for name in ("batch_size", "steps"))
        flag = row.get("stopped", "0").strip().lower()
        if flag not in FLAGS:
            raise CurveError(f"{place}: stopped must be 0, 1, true or false, but got {flag[:80]!r}")
        batch_size = int(size) if size.is_integer() else size
        yield FrontierPoint(
            batch_size, steps, stopped=FLAGS[flag], steps_low=steps if FLAGS[flag] else None
        )


def _number(cell: str, name: str, place: str) -> float:
    try:
        return _usable(float(cell), name)
    except (ValueError, CurveError):
        raise CurveError(
            f"{place}: {name} must be {USABLE}, but got {cell[:80]!r}: fix or drop the line"
        ) from None
