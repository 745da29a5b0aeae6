"""Which batch sizes fit: into memory, and to what the user's code takes.

Sizes that ran fit, sizes that failed do not. In between the largest size that fits is log-uniform:
where ``low`` ran and ``high`` failed, B fits with the chance log(high/B) / log(high/low). A size
that the user's code refused may be too small as well; or it is no multiple of what the code wants,
where such a multiple explains what ran and what was refused.
"""

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from bstune.core.records import Records
from bstune.core.space import Space

# The largest multiple that is inferred.
MOST_MULTIPLE = 32


class SurveyedSizes(NamedTuple):
    """What a survey has found of batch sizes."""

    largest_fit: int | None = None
    smallest_unfit: int | None = None
    """For memory."""
    ran: tuple[int, ...] = ()
    refused: tuple[int, ...] = ()
    """By the user's code."""


NOTHING = SurveyedSizes()


@dataclass(frozen=True)
class _Limits:
    """What fits: all from ``smallest`` to ``largest``, nothing beyond ``too_small``, ``too_large``.

    Limits of which nothing is known are 0 and infinite.
    """

    too_small: float
    smallest: float
    largest: float
    too_large: float
    multiple: int
    failed: frozenset[int]
    """Sizes that failed: none has a chance, also where it lies within the limits."""


def chance_to_fit(
    batch_sizes: ArrayLike, records: Records, fits: SurveyedSizes = NOTHING
) -> NDArray[np.float64]:
    """The chance that each of n batch sizes fits, (n,); 1 where nothing has failed.

    Args:
        batch_sizes: (n,).
        records: of all finished trials.
        fits: what a survey has found.
    """
    limits = _limits_of_fit(records, fits)
    sizes = np.asarray(batch_sizes, dtype=float)
    chance = np.ones(sizes.shape)
    if math.isfinite(limits.too_large):
        chance *= _chance_between(sizes, limits.too_large, limits.largest)
    if limits.too_small:
        chance *= _chance_between(sizes, limits.too_small, limits.smallest)
    chance[sizes % limits.multiple != 0] = 0.0
    chance[np.isin(sizes, list(limits.failed))] = 0.0
    return chance


def _chance_between(sizes: NDArray[np.float64], failed: float, ran: float) -> NDArray[np.float64]:
    """The chance by one limit, log-uniform between a size that failed and one that ran."""
    return np.clip(np.log(sizes / failed) / math.log(ran / failed), 0.0, 1.0)


def sizes_to_try(space: Space, records: Records, fits: SurveyedSizes = NOTHING) -> Space:
    """Narrow a space to the batch sizes that are worth a trial.

    Beyond what ran they reach to the geometric mean with what failed, where the chance is a half;
    all are multiples of what was inferred.
    """
    limits = _limits_of_fit(records, fits)
    low = math.sqrt(limits.too_small * limits.smallest)
    return _narrow_space(space, low, math.sqrt(limits.largest * limits.too_large), limits.multiple)


def sizes_that_fit(space: Space, records: Records, fits: SurveyedSizes = NOTHING) -> Space:
    """Narrow a space to the batch sizes that fit as far as is known: none beyond what ran."""
    limits = _limits_of_fit(records, fits)
    low = limits.smallest if limits.too_small else 0
    high = limits.largest if math.isfinite(limits.too_large) else math.inf
    return _narrow_space(space, low, high, limits.multiple)


def _narrow_space(space: Space, low: float, high: float, multiple: int) -> Space:
    """A space between two sizes, all multiples; one size at least is left."""
    multiple = math.lcm(space.multiple, multiple)
    top = max(math.floor(min(high, space.high) / multiple) * multiple, space.low)
    bottom = math.ceil(max(low, space.low) / multiple) * multiple
    return replace(space, low=min(bottom, top), high=top, multiple=multiple)


def trained_sizes(records: Records) -> set[int]:
    """The batch sizes at which a trial has trained."""
    return {one.batch_size for one in records if one.steps > 0 and not one.is_unfit}


def _limits_of_fit(records: Records, fits: SurveyedSizes) -> _Limits:
    """What trials and a survey tell of the sizes that fit."""
    trained = trained_sizes(records)
    taken = trained.union(fits.ran)
    refused = {one.batch_size for one in records if one.status == "refused"}
    refused = refused.union(fits.refused) - taken
    out_of_memory = {one.batch_size for one in records if one.status == "out of memory"} - trained
    multiple = inferred_multiple(taken, refused)
    smallest = min(taken, default=1)
    # Those that the multiple does not explain; while nothing has trained, a refusal tells no side.
    unexplained = {size for size in refused if size % multiple == 0 and taken}
    # What the survey ran shows what the user's code takes; of memory its largest_fit tells.
    largest = max(trained, default=1)
    failed_above = {size for size in unexplained if size > max(taken)} | out_of_memory
    failed_above.add(fits.smallest_unfit or 0)
    too_large = min((size for size in failed_above if size > largest), default=math.inf)
    if fits.largest_fit is not None and fits.largest_fit < too_large:
        largest = max(largest, fits.largest_fit)
    return _Limits(
        too_small=max((size for size in unexplained if size < smallest), default=0),
        smallest=smallest,
        largest=largest,
        too_large=too_large,
        multiple=multiple,
        failed=frozenset(out_of_memory | refused),
    )


def inferred_multiple(trained: set[int], refused: set[int]) -> int:
    """The multiple that explains what trained and what was refused; 1: none does.

    It is the smallest number, up to ``MOST_MULTIPLE``, that divides all sizes which trained and
    none that was refused. A refused size of 1 tells nothing: many a layer wants two examples.
    """
    refused = refused - {1}
    if not refused or not trained:
        return 1
    common = math.gcd(*trained)
    for multiple in range(2, MOST_MULTIPLE + 1):
        if common % multiple == 0 and all(size % multiple for size in refused):
            return multiple
    return 1
