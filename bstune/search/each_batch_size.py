"""A sampler that tunes each batch size alone, with as many trials: as Shallue et al. 2018 did."""

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from optuna import Study
from optuna.distributions import BaseDistribution, FloatDistribution, IntDistribution
from optuna.samplers import BaseSampler
from optuna.trial import FrozenTrial

from bstune.core.errors import ConfigError
from bstune.core.search_space import van_der_corput
from bstune.search.coordinates import BATCH_SIZE

# Bases of the sequence, one for each parameter.
PRIMES = (2, 3, 5, 7, 11, 13, 17, 19, 23, 29)
# A point that takes the place of one that failed lies so many places further on in the sequence.
AGAIN = 2**20


class EachBatchSize(BaseSampler):
    """Tries every batch size in turn, each with a quasi-random sequence of the other parameters.

    This is the protocol of Shallue et al. 2018 (arXiv 1811.03600, section 4). The sequence is
    Halton's, shifted at random by another shift for each batch size (Bousquet et al. 2017, arXiv
    1706.03200). The sampler looks at no trial: n batch sizes with k trials each are
    ``search.trials`` = n k. A trial's parameters are a function of the study's seed and the trial's
    index.

    Args:
        ratio: the most between neighbouring batch sizes, over 1: they lie evenly in log B, both
            ends of the range included.
        search_space: the study's parameters, ``batch_size`` among them.
        snap: returns the batch size that a trial uses.
        trial_index: the trial's place in the study's plan, from 0.
        attempt: how many points failed at this index.
        study_seed: the study's seed.

    Raises:
        ConfigError: for a ratio that is not over 1, or more parameters than there are bases.
    """

    # By this search.stratified leaves the batch sizes alone.
    chooses_batch_sizes = True
    context: tuple[str, ...] = ("search_space", "snap", "trial_index", "attempt", "study_seed")

    def __init__(
        self,
        *,
        ratio: float,
        search_space: Mapping[str, BaseDistribution] | None = None,
        snap: Callable[[float], int] = round,
        trial_index: int = 0,
        attempt: int = 0,
        study_seed: int = 0,
    ) -> None:
        if not 1.0 < ratio < math.inf:
            raise ConfigError(
                f"sampler.ratio is of neighbouring batch sizes and must be over 1, but got {ratio}"
            )
        self._space = dict(search_space or {})
        # Each parameter but the batch size takes a prime; one of them is the learning rate.
        if len(self._space) > len(PRIMES) + 1:
            raise ConfigError(
                f"sampler=each_batch_size takes at most {len(PRIMES) - 1} names in search.tune, "
                f"but got {len(self._space) - 2}"
            )
        self._ratio = ratio
        self._snap = snap
        self._trial_index = trial_index
        self._attempt = attempt
        self._study_seed = study_seed

    def infer_relative_search_space(
        self, study: Study, trial: FrozenTrial
    ) -> dict[str, BaseDistribution]:
        """Give the study's parameters: all of them are sampled together."""
        return self._space

    def sample_relative(
        self, study: Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        """Choose the parameters of the trial at this index; none where there is no batch size."""
        sizes = search_space.get(BATCH_SIZE)
        if not isinstance(sizes, IntDistribution):
            return {}
        grid = batch_sizes(sizes.low, sizes.high, self._ratio, self._snap)
        # All batch sizes are tried in each turn.
        turn, place = divmod(self._trial_index, len(grid))
        params: dict[str, Any] = {BATCH_SIZE: grid[place]}
        others = sorted(search_space.keys() - {BATCH_SIZE})
        # Each batch size has another shift for each parameter.
        shifts = np.random.default_rng([self._study_seed, place]).random(len(others)).tolist()
        for name, base, shift in zip(others, PRIMES, shifts, strict=False):
            # Where points failed at this index, another one is taken, from far on in the sequence.
            share = (van_der_corput(turn + self._attempt * AGAIN, base) + shift) % 1.0
            params[name] = _value_at_equal_share(share, search_space[name])
        return params

    def sample_independent(
        self,
        study: Study,
        trial: FrozenTrial,
        param_name: str,
        param_distribution: BaseDistribution,
    ) -> Any:
        """Refuse a parameter that was not given: the sequence has no place for it."""
        raise ConfigError(
            f"sampler=each_batch_size has no parameter {param_name}, but {', '.join(self._space)}"
        )


def batch_sizes(low: int, high: int, ratio: float, snap: Callable[[float], int]) -> list[int]:
    """List the batch sizes that are tuned, in ascending order.

    They lie evenly in log B from ``low`` to ``high``, at most a factor ``ratio`` apart, and are
    rounded by ``snap``.
    """
    # Rounding in the logarithms must not add an interval.
    intervals = math.ceil(math.log(high / low) / math.log(ratio) - 1e-9)
    sizes = set[int]()
    for i in range(intervals + 1):
        # A range of one batch size has no interval.
        sizes.add(snap(low * (high / low) ** (i / max(1, intervals))))
    return sorted(sizes)


def _value_at_equal_share(share: float, distribution: BaseDistribution) -> int | float:
    """Find the value at a share in [0, 1] of a parameter's range, on its linear or log scale.

    Each whole number of an integer parameter has as large a share as any other.
    """
    if not isinstance(distribution, IntDistribution | FloatDistribution):
        raise ConfigError(f"a parameter has a distribution of unknown kind, {distribution}")
    low = float(distribution.low)
    high = float(distribution.high)
    if isinstance(distribution, IntDistribution):
        low -= 0.5
        high += 0.5
    value = low + share * (high - low)
    if distribution.log:
        value = low * (high / low) ** share
    value = min(max(value, distribution.low), distribution.high)
    return round(value) if isinstance(distribution, IntDistribution) else value
