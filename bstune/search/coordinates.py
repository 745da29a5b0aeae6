"""Converts an Optuna study's parameters to the model's coordinates, and back."""

import math
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any

import numpy as np
from optuna.distributions import (
    BaseDistribution,
    CategoricalDistribution,
    FloatDistribution,
    IntDistribution,
)

from bstune.core.errors import ConfigError
from bstune.search.candidates import Array, Domain, Suggestion

BATCH_SIZE = "batch_size"
LR = "lr"
# log2(lr / rule(B)): octaves off a scaling rule; searched in place of LR where the study has no LR.
DELTA = "delta"
# The rule is tabulated over log2 batch sizes, as a decision asks for hundreds: so many octaves
# below and above the study's batch sizes, and between two places of the table.
RULE_BELOW = 1.0
RULE_ABOVE = 12.0
RULE_STEP = 0.25


class Coordinates:
    """The study's parameters as the model's: log2 B, log2 lr, and the others scaled to [0, 1].

    Args:
        space: the study's parameters.
        rule: from a batch size to a learning rate, no logarithms; None: the square-root rule
            through the middle of both ranges.
        snap: from a batch size to the nearest one that can be trained.
        lr_range: lowest and highest learning rate that may be asked for; None: any.
    """

    def __init__(
        self,
        space: Mapping[str, BaseDistribution],
        rule: Callable[[float], float] | None,
        snap: Callable[[float], int],
        lr_range: tuple[float, float] | None,
    ) -> None:
        self._space = dict(space)
        others = space.keys() - {BATCH_SIZE, LR, DELTA}
        # A parameter with a single value is not searched.
        self._names = sorted(name for name in others if not space[name].single())
        lowest, highest = lr_range or (0.0, math.inf)
        self._log_lr_low = math.log2(lowest) if lowest > 0 else -math.inf
        self._log_lr_high = math.log2(highest)
        self._snap = snap
        sizes = space[BATCH_SIZE]
        if not isinstance(sizes, IntDistribution):
            raise ConfigError(
                f"batch_size must be an integer parameter, but got {sizes}: use suggest_int"
            )
        self._sizes = sizes
        self.low = sizes.low
        self.high = sizes.high
        # A study without a learning rate has delta in its place: the octaves off the rule's rate.
        self._lr_parameter = LR if LR in space else DELTA
        rates = space[self._lr_parameter]
        if not isinstance(rates, FloatDistribution):
            raise ConfigError(
                f"{self._lr_parameter} must be a float parameter, but got {rates}: use "
                "suggest_float"
            )
        if self._lr_parameter == LR and rates.low <= 0:
            raise ConfigError(f"lr must lie above 0, but got {rates}: raise its lowest value")
        self._rates = rates
        self._rule = rule or self._square_root_rule

    def _square_root_rule(self, batch_size: float) -> float:
        """Give the learning rate at a batch size by the square-root rule.

        The rule goes through the geometric middle of the batch sizes and that of the learning
        rates. A study that searches ``delta`` has no range of learning rates: the middle one is 1.
        """
        middle_rate = 1.0
        if self._lr_parameter == LR:
            middle_rate = math.sqrt(self._rates.low * self._rates.high)
        return middle_rate * math.sqrt(batch_size / math.sqrt(self.low * self.high))

    @cached_property
    def log_rule(self) -> Callable[[Array], Array]:
        """Function that gives log2 of the rule's learning rate at log2 batch sizes (n,): (n,).

        It is read off a table, as a decision asks for hundreds of points, and is constant beyond
        the table's ends, far outside the study's batch sizes.
        """
        log_start = math.log2(self.low) - RULE_BELOW
        log_stop = math.log2(self.high) + RULE_ABOVE
        grid = np.arange(log_start, log_stop, RULE_STEP)
        values = [math.log2(self._rule(2.0**x)) for x in grid.tolist()]
        return lambda x: np.interp(x, grid, values)

    @property
    def columns(self) -> int:
        """How many columns the other parameters take: a category takes one for each choice."""
        return sum(_columns_of(self._space[name]) for name in self._names)

    def complete(self, params: Mapping[str, object]) -> bool:
        """Whether a trial's parameters include all of the study's."""
        return self._space.keys() <= params.keys()

    def point(self, params: Mapping[str, Any]) -> tuple[float, float]:
        """Convert a trial's parameters to log2 batch size and log2 learning rate."""
        batch_size = self._snap(params[BATCH_SIZE])
        if self._lr_parameter == LR:
            return math.log2(batch_size), math.log2(params[LR])
        return math.log2(batch_size), math.log2(self._rule(batch_size)) + params[DELTA]

    def others(self, params: Mapping[str, Any]) -> tuple[float, ...]:
        """Convert a trial's other parameters to columns, each in [0, 1]."""
        columns = list[float]()
        for name in self._names:
            columns += _scaled(params[name], self._space[name])
        return tuple(columns)

    def domain(self) -> Domain:
        """Describe where the search may go."""
        return Domain(
            low=self.low,
            high=self.high,
            snap=self._snapped,
            log_rate_bounds=self._rate_bounds,
            others=self.columns,
        )

    def _snapped(self, batch_size: float) -> int:
        """Round to a batch size that can be trained and that the study's parameter can take."""
        return int(nearest_value(self._snap(batch_size), self._sizes))

    def _rate_bounds(self, x: Array) -> tuple[Array, Array]:
        """Find the lowest and the highest log2 learning rate at n log2 batch sizes: (n,) each."""
        if self._lr_parameter == LR:
            bottom = np.full(x.shape, math.log2(self._rates.low))
            top = np.full(x.shape, math.log2(self._rates.high))
        else:
            log_rule = self.log_rule(x)
            bottom = log_rule + self._rates.low
            top = log_rule + self._rates.high
        allowed = (self._log_lr_low, self._log_lr_high)
        return np.clip(bottom, *allowed), np.clip(top, *allowed)

    def parameters(self, suggestion: Suggestion) -> dict[str, Any]:
        """Convert a suggestion to parameters of the study."""
        batch_size = self._snapped(2.0**suggestion.x)
        # The learning rate, or octaves off the rule where the study searches those.
        rate = 2.0**suggestion.z
        if self._lr_parameter == DELTA:
            rate = suggestion.z - math.log2(self._rule(batch_size))
        params: dict[str, Any] = {
            BATCH_SIZE: batch_size,
            self._lr_parameter: nearest_value(rate, self._rates),
        }
        columns = iter(suggestion.other)
        for name in self._names:
            distribution = self._space[name]
            values = [next(columns) for _ in range(_columns_of(distribution))]
            if isinstance(distribution, CategoricalDistribution):
                params[name] = distribution.choices[int(np.argmax(values))]
            elif isinstance(distribution, IntDistribution | FloatDistribution):
                params[name] = value_at(values[0], distribution)
        return params


def _columns_of(distribution: BaseDistribution) -> int:
    """Count the columns that a parameter takes: one, or one for each choice of a category."""
    return len(distribution.choices) if isinstance(distribution, CategoricalDistribution) else 1


def _scaled(value: Any, distribution: BaseDistribution) -> list[float]:
    """Scale a parameter's value to columns in [0, 1]: one, or one for each choice of a category."""
    if isinstance(distribution, CategoricalDistribution):
        return [float(choice == value) for choice in distribution.choices]
    if not isinstance(distribution, IntDistribution | FloatDistribution):
        raise ConfigError(f"a parameter has a distribution of unknown kind, {distribution}")
    low = float(distribution.low)
    high = float(distribution.high)
    if distribution.log:
        return [math.log(value / low) / math.log(high / low)]
    return [(value - low) / (high - low)]


def value_at(share: float, distribution: IntDistribution | FloatDistribution) -> int | float:
    """Find the value at a share in [0, 1] of a parameter's range, on its linear or log scale."""
    low = float(distribution.low)
    high = float(distribution.high)
    if distribution.log:
        return nearest_value(low * (high / low) ** share, distribution)
    return nearest_value(low + share * (high - low), distribution)


def nearest_value(value: float, distribution: IntDistribution | FloatDistribution) -> int | float:
    """Round to the nearest value that a parameter can take.

    Optuna silently drops a value that is not on the parameter's grid.
    """
    if distribution.step is not None:
        steps = round((value - distribution.low) / distribution.step)
        value = distribution.low + steps * distribution.step
    value = min(max(value, distribution.low), distribution.high)
    return round(value) if isinstance(distribution, IntDistribution) else value
