"""Fits S*(B) = S_min (1 + B_crit/B) to a few noisy points, some of them bounds, with an interval for B_crit.

The curve is McCandlish et al. 2018, arXiv 1812.06162, eq. 2.11. The error model is ours:

1. At a reference batch size B_ref the curve is S(B) = S(B_ref) (1 - p + p B_ref/B) with p = B_crit/(B_crit + B_ref).
   p = 0 (S constant) and p = 1 (perfect scaling) belong to the family, so that "B_crit is infinite" has a likelihood
   of its own and needs no large number in its place.
2. The residuals of log S are normal with standard deviation sigma, or, with probability ``OUTLIER_SHARE``, off by a
   further normal error of ``OUTLIER_SPREAD``: one bad point is outvoted and leaves sigma as it was. A censored point
   contributes the probability that S exceeds its bound.
3. sigma has a scaled inverse chi-square prior, as if ``PRIOR_WEIGHT`` residuals of size ``PRIOR_NOISE`` had been seen.
4. An end of the interval is where the deviance (-2 log likelihood, S(B_ref) and sigma profiled out) rises above its
   minimum by N log(1 + t^2/(N - 2)), with N = reached points + PRIOR_WEIGHT and t the two-sided quantile of Student's
   t with N - 2 degrees of freedom. That is exact for a linear model with normal residuals and no prior; here it is an
   approximation, chosen because a chi-square quantile is too small for few points. In simulations with six points
   up to B_crit/2 or nine up to 8 B_crit, the nominal 90% covered 91 to 93% at 10% noise (2000 curves a case), 96 to
   99% at 5% and 84 to 88% at 20% (500 curves each): the prior errs to the wide side when the noise is small.
"""

import csv
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike, NDArray
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
REACH = math.log(1e4)  # B_crit is sought within this factor of the batch sizes, and at 0 and infinity
MAX_POINTS = 1000  # the fit's arrays grow with the points; a frontier has one per half octave


class CurveError(BstuneError):
    """The points cannot be read or used, or are too few to fit a curve to."""


@dataclass(frozen=True)
class FrontierPoint:
    """A point of S*(B) or, where ``censored``, a step at which the target was still missed: S > steps."""

    batch_size: int | float
    steps: float  # the fit takes S to be this
    censored: bool
    steps_low: float | None  # the last step known to miss the target: S lies in (steps_low, steps]; None if unknown


@dataclass(frozen=True)
class CurveFit:
    """S*(B) = S_min (1 + B_crit/B) as far as the points determine it; None is what they do not determine."""

    s_min: float | None  # fewest steps, at unlimited batch size; None where B_crit may be infinite
    # The most likely critical batch size, in examples. None where 0 or infinity is nearly as likely (deviance at most 1
    # higher): then even a 68% interval is open.
    b_crit: float | None
    b_crit_low: float | None  # end of its interval; None where every smaller value fits the points
    b_crit_high: float | None  # likewise every larger one
    e_min: float | None  # fewest examples, S_min B_crit; None where B_crit may be 0
    perfect_scaling_below: float | None  # B_crit/9
    maximal_data_parallelism_above: float | None  # 9 B_crit
    level: float  # nominal coverage of the interval
    noise: float  # sigma, the standard deviation of log S around the curve; 0.1 is about 10%
    note: str | None  # what to run where an end is None
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
    censored: NDArray[np.bool_]
    log_reference: float


@dataclass(frozen=True)
class _Profile:
    """The deviance minimised over log S(B_ref) and log sigma; shape (m,), ``odds`` is log(B_crit/B_ref)."""

    odds: Array
    deviance: Array
    log_height: Array
    log_sigma: Array


def frontier_points(trials: Iterable[TrialResult]) -> list[FrontierPoint]:
    """Return the reached trial of least S x B in each half octave floor(2 log2 B), else the bound largest in S x B."""
    # That a censored trial bounds S* too, not only S at its own learning rate, is an assumption.

    def rank(trial: TrialResult) -> tuple[bool, int, int, int]:
        examples = trial.batch_size * (trial.steps if trial.reached else -trial.steps_low)
        return not trial.reached, examples, trial.batch_size, trial.number

    octaves: dict[int, list[TrialResult]] = {}
    for trial in trials:
        if trial.reached or (trial.status == "censored" and trial.steps_low > 0):
            # floor(log2(B^2)) in integers: 2 log2 B in floats can fall on the wrong side of an edge
            octaves.setdefault((trial.batch_size**2).bit_length() - 1, []).append(trial)
    best = [min(octaves[octave], key=rank) for octave in sorted(octaves)]
    return [
        FrontierPoint(t.batch_size, t.steps if t.reached else t.steps_low, not t.reached, t.steps_low) for t in best
    ]


def fit_curve(points: Iterable[FrontierPoint], level: float = 0.90) -> CurveFit:
    """Return the fit of S*(B) = S_min (1 + B_crit/B) in log S, with a profile-likelihood interval for B_crit.

    Args:
        points: batch sizes in examples and steps to target. Three or more that are not censored, at two or more batch
            sizes, and any number of bounds.
        level: nominal coverage of the interval, between 0 and 1.

    Returns:
        S_min in steps, B_crit in examples and its interval, E_min in examples, the bounds of the regimes and the noise;
        None for each that the points do not determine.

    Raises:
        CurveError: for fewer points, for values that are not positive and finite (NaN too), and for another level.
    """
    points = tuple(points)
    observed = _observe(points)
    rise = _rise(observed, level)
    profile = _locate(observed, rise)
    k = int(profile.deviance.argmin())
    low, high = _ends(profile, rise)
    nearly = profile.deviance[k] + min(1.0, rise)  # 1 is the 68% quantile of chi-square
    open_below, open_above = bool(profile.deviance[0] <= nearly), bool(profile.deviance[-1] <= nearly)
    # S_min = S(B_ref) (1 - p) and E_min = S(B_ref) B_ref p, at the limit p = 0 or 1 where the points allow it
    at = 0 if open_below else -1 if open_above else k
    log_s_min = profile.log_height[at] + log_expit(-profile.odds[at])
    log_e_min = profile.log_height[at] + log_expit(profile.odds[at]) + observed.log_reference
    b_crit = None if open_below or open_above else math.exp(profile.odds[k] + observed.log_reference)
    return CurveFit(
        s_min=None if open_above else math.exp(log_s_min),
        b_crit=b_crit,
        b_crit_low=None if low is None else math.exp(low + observed.log_reference),
        b_crit_high=None if high is None else math.exp(high + observed.log_reference),
        e_min=None if open_below else math.exp(log_e_min),
        perfect_scaling_below=None if b_crit is None else b_crit / SLOPE_RATIO,
        maximal_data_parallelism_above=None if b_crit is None else b_crit * SLOPE_RATIO,
        level=level,
        noise=math.exp(profile.log_sigma[k]),
        note=_note(points, low is None, high is None),
        points=points,
    )


def predict_steps(fit: CurveFit, batch_sizes: ArrayLike) -> CurveBand:
    """Return S*(B) and its range over the likelihood region, finite where B_crit is undetermined, in any shape."""
    batch = np.asarray(batch_sizes, dtype=np.float64)
    log_batch = _log(batch.reshape(-1).tolist(), "batch_size")
    observed = _observe(fit.points)
    rise = _rise(observed, fit.level)
    profile = _locate(observed, rise)
    k = int(profile.deviance.argmin())
    inside = np.flatnonzero(profile.deviance <= profile.deviance[k] + rise)
    # heights around the most likely one, sigma minimised again at each: shape (curves, heights)
    offsets = np.linspace(-6.0, 6.0, 49)
    heights = profile.log_height[inside, None] + offsets * np.exp(profile.log_sigma[inside, None])
    flat = _profile(observed, np.repeat(profile.odds[inside], offsets.size), heights.reshape(-1))
    excess = flat.deviance.reshape(heights.shape) - profile.deviance[k] - rise
    edges = [_crossings(line, gap) for line, gap in zip(heights, excess, strict=True)]
    bottom, top = (np.array([edge[side] for edge in edges]) for side in (0, 1))
    shape = _shape(profile.odds[inside], log_batch - observed.log_reference)
    best = np.exp(profile.log_height[k] + shape[inside.tolist().index(k)])
    low, high = np.exp(shape + bottom[:, None]).min(0), np.exp(shape + top[:, None]).max(0)
    return CurveBand(batch, *(values.reshape(batch.shape) for values in (best, low, high)))


def log_slope(points: Iterable[FrontierPoint]) -> float:
    """Return the slope of log S over log B by ordinary least squares, bounds left out; -1 is perfect scaling."""
    reached = [point for point in points if not point.censored]
    x, y = _log((p.batch_size for p in reached), "batch_size"), _log((p.steps for p in reached), "steps")
    if np.unique(x).size < 2:
        raise CurveError(f"a slope needs reached points at two or more batch sizes, but got {np.unique(x).size}")
    x = x - x.mean()
    return float(x @ (y - y.mean()) / (x @ x))


def _usable(value: float, name: str) -> float:
    if not 1e-100 < value < 1e100:  # NaN fails this too; the width keeps every exp of a sum of logs finite
        raise CurveError(f"{name} must be {USABLE}, but got {value}")
    return value


def _log(values: Iterable[float], name: str) -> Array:
    return np.log(np.array([_usable(value, name) for value in values], dtype=np.float64))


def _observe(points: tuple[FrontierPoint, ...]) -> _Observed:
    log_batch, log_steps = _log((p.batch_size for p in points), "batch_size"), _log((p.steps for p in points), "steps")
    censored = np.array([point.censored for point in points], dtype=np.bool_)
    reached, sizes = int((~censored).sum()), np.unique(log_batch[~censored]).size
    if reached < 3 or sizes < 2:
        got = f"{reached} at {sizes} (and {len(points) - reached} censored): run more batch sizes to the target"
        raise CurveError(f"the curve needs at least 3 points that reached the target, at 2 batch sizes, but got {got}")
    if len(points) > MAX_POINTS:
        raise CurveError(f"the curve takes at most {MAX_POINTS} points, but got {len(points)}: keep the best per B")
    log_reference = float(log_batch[~censored].mean())
    return _Observed(log_batch - log_reference, log_steps, censored, log_reference)


def _rise(observed: _Observed, level: float) -> float:
    """Return by how much the deviance rises to an end of the interval (point 4 of the module's docstring)."""
    if not 0.0 < level < 1.0:
        raise CurveError(f"the level of an interval must be between 0 and 1, such as 0.9, but got {level}")
    n = float((~observed.censored).sum()) + PRIOR_WEIGHT
    t = stdtrit(n - 2.0, (1.0 + level) / 2.0)
    return float(n * np.log1p(t * t / (n - 2.0)))


def _shape(odds: Array, x: Array) -> Array:
    """Return log(S(B)/S(B_ref)) = log(1 - p + p B_ref/B), shape (m, n), for p = expit(odds), infinite ones too."""
    return np.asarray(np.logaddexp(log_expit(-odds)[:, None], log_expit(odds)[:, None] - x))


def _deviance(residual: Array, censored: NDArray[np.bool_], log_height: Array, log_sigma: Array) -> Array:
    """Return -2 log likelihood up to a constant, shape (m, k), for residuals (m, n) and parameters (m, k)."""
    sigma = np.exp(log_sigma)[..., None]
    wide = np.hypot(sigma, OUTLIER_SPREAD)
    gap = residual[:, None, :] - log_height[..., None]
    square = gap[..., ~censored] ** 2
    core = math.log1p(-OUTLIER_SHARE) - log_sigma[..., None] - square / (2.0 * sigma**2)
    bad = math.log(OUTLIER_SHARE) - np.log(wide) - square / (2.0 * wide**2)
    likelihood = np.logaddexp(core, bad).sum(-1)
    if censored.any():  # the probability that S exceeds the bound
        over = gap[..., censored]
        core = math.log1p(-OUTLIER_SHARE) + log_ndtr(-over / sigma)
        likelihood += np.logaddexp(core, math.log(OUTLIER_SHARE) + log_ndtr(-over / wide)).sum(-1)
    prior = PRIOR_WEIGHT * (log_sigma + 0.5 * (PRIOR_NOISE / sigma[..., 0]) ** 2)
    return np.asarray(2.0 * (prior - likelihood))


def _profile(observed: _Observed, odds: Array, log_height: Array | None = None) -> _Profile:
    """Minimise the deviance over sigma, and over S(B_ref) unless it is given, for each of ``odds`` at once."""
    # A pattern search of shrinking steps, from the best of a grid of starts: the outlier mixture has several minima.
    residual = observed.log_steps - _shape(odds, observed.x)
    if log_height is None:
        heights = np.quantile(residual[:, ~observed.censored], np.linspace(0.0, 1.0, 9), axis=1).T
        moves = np.array([(i, j) for i in (-1.0, 0.0, 1.0) for j in (-1.0, 0.0, 1.0)])
    else:
        heights, moves = log_height[:, None], np.array([(0.0, -1.0), (0.0, 0.0), (0.0, 1.0)])
    sigmas = np.log([0.03, 0.1, 0.3, 1.0])
    height = np.repeat(heights, sigmas.size, axis=1)
    log_sigma = np.tile(sigmas, (odds.size, heights.shape[1]))
    rows = np.arange(odds.size)
    step = 0.6
    for _ in range(22):
        deviance = _deviance(residual, observed.censored, height, log_sigma)
        k = deviance.argmin(1)
        best = _Profile(odds, deviance[rows, k], height[rows, k], log_sigma[rows, k])
        scale = step * np.exp(best.log_sigma)
        height = best.log_height[:, None] + scale[:, None] * moves[:, 0]
        log_sigma = best.log_sigma[:, None] + step * moves[:, 1]
        step *= 0.7
    return best


def _locate(observed: _Observed, rise: float) -> _Profile:
    """Return the profile on a grid that resolves its minimum and the interval; its first and last odds are infinite."""
    first, last = observed.x.min() - REACH, observed.x.max() + REACH
    limits = _profile(observed, np.array([-np.inf, np.inf]))
    inner = _profile(observed, np.linspace(first, last, 96))
    for _ in range(2):  # twice: the first grid may see the interval as a single point
        lowest = min(inner.deviance.min(), limits.deviance.min())
        inside = np.flatnonzero(inner.deviance <= max(lowest + rise, inner.deviance.min()))
        low, high = inner.odds[max(inside[0] - 1, 0)], inner.odds[min(inside[-1] + 1, inner.odds.size - 1)]
        inner = _profile(observed, np.linspace(low, high, 41))
    finer = inner
    for _ in range(3):
        k = int(finer.deviance.argmin())
        low, high = finer.odds[max(k - 1, 0)], finer.odds[min(k + 1, finer.odds.size - 1)]
        finer = _profile(observed, np.linspace(low, high, 9))
    columns = [np.concatenate(parts) for parts in zip(*(vars(g).values() for g in (limits, inner, finer)), strict=True)]
    order = np.argsort(columns[0], kind="stable")
    return _Profile(*(column[order] for column in columns))


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


def _note(points: tuple[FrontierPoint, ...], no_low: bool, no_high: bool) -> str | None:
    sizes = [point.batch_size for point in points if not point.censored]
    above, below = f"above {max(sizes):.10g}", f"below {min(sizes):.10g}"
    if no_low and no_high:
        return f"the points do not bracket B_crit: run batch sizes {below} and {above}, or more trials"
    if no_high:
        return f"no point near or above B_crit, so it has no upper end: run batch sizes {above}"
    return f"no point near or below B_crit, so it has no lower end: run batch sizes {below}" if no_low else None


def read_points(path: Path) -> list[FrontierPoint]:
    """Return the points of a CSV file with columns batch_size, steps and optionally censored; others are ignored."""
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            return list(_parse(csv.DictReader(file, strict=True), path))
    except OSError as error:
        raise CurveError(f"cannot read {path}: {error.strerror}; give a CSV file of points") from error
    except (UnicodeDecodeError, csv.Error) as error:
        raise CurveError(f"{path} is not a CSV file in UTF-8 ({error}); export the points as plain CSV") from error


def _parse(reader: "csv.DictReader[str]", path: Path) -> Iterator[FrontierPoint]:
    header = [name.strip() for name in reader.fieldnames or ()]
    if header.count("batch_size") != 1 or header.count("steps") != 1 or header.count("censored") > 1:
        needs = "needs the columns batch_size and steps, and may have censored, each once, but got"
        raise CurveError(f"{path}, line 1: {needs} {','.join(header)[:80]!r}: name the columns in the first line")
    reader.fieldnames = header
    for row in reader:
        place = f"{path}, line {reader.line_num}"
        if None in row or None in row.values():
            raise CurveError(f"{place}: needs {len(header)} values, as line 1 has columns: fix or drop the line")
        size, steps = (_number(row[name], name, place) for name in ("batch_size", "steps"))
        flag = row.get("censored", "0").strip().lower()
        if flag not in FLAGS:
            raise CurveError(f"{place}: censored must be 0, 1, true or false, but got {flag[:80]!r}")
        batch_size = int(size) if size.is_integer() else size
        yield FrontierPoint(batch_size, steps, censored=FLAGS[flag], steps_low=steps if FLAGS[flag] else None)


def _number(cell: str, name: str, place: str) -> float:
    try:
        return _usable(float(cell), name)
    except (ValueError, CurveError):
        raise CurveError(f"{place}: {name} must be {USABLE}, but got {cell[:80]!r}: fix or drop the line") from None
