"""What a decision compares: pruned trials that may be resumed, and new configurations."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from bstune.core.question import Question
from bstune.core.records import Records, Spec, StepTime
from bstune.core.space import Configuration, Space
from bstune.search.findings import Prediction
from bstune.search.fit import SurveyedSizes, chance_to_fit, sizes_to_try
from bstune.search.law import NO_VALUES, NOISE
from bstune.search.limits import GIVE_UP
from bstune.search.posterior import BOUND, Posterior, Rows, places_of

Array = NDArray[np.float64]

# New configurations that are compared, of which so many lie around the best ones; and how many of
# the best these are.
CANDIDATES = 90
AROUND_BEST = 30
BEST = 4
# Standard deviation of candidates, in octaves: of rates around a draw's best one, and of batch size
# and rate around the best configurations.
OCTAVES = 0.5
# The same of further values, in shares of their ranges.
SHARE = 0.1
# A candidate's value is divided by the chance that its batch size fits; where none fits, by this.
LEAST_CHANCE = 1e-3
# A pruned trial that has used this share of the give-up cost is not resumed.
WORTH_RESUMING = 0.95


class New(NamedTuple):
    """New configurations, (n,) each."""

    x: Array
    """log2 of the batch size."""
    z: Array
    """log2 of the rate."""
    u: Array
    """Coordinates of the further values, (n, values)."""
    chance: Array
    """That the batch size fits."""


@dataclass(frozen=True)
class Choices:
    """What a decision compares, (n,) each: pruned trials that wait, then new configurations."""

    x: Array
    """log2 of the batch size."""
    z: Array
    """log2 of the rate."""
    ran: Array
    """Steps that a pruned trial has run; 0 for a new one."""
    log_steps: Array
    """log S in one draw."""
    value_per_step: Array
    """What is minimised, of a step."""
    cost_per_step: Array
    """Training seconds of a step."""
    longest: Array
    """Steps of the budget."""
    chance: Array
    """That the batch size fits."""
    u: Array = field(default_factory=lambda: NO_VALUES)
    """Coordinates of the further values, (n, values)."""


def choices_in_draw(
    question: Question,
    step_time: StepTime,
    posterior: Posterior,
    draw: Array,
    waiting: Sequence[int],
    new: New,
) -> Choices:
    """Read pruned trials and new configurations by one draw of the posterior.

    Args:
        question: what is minimised.
        step_time: tau(B).
        posterior: of the study.
        draw: of it, (1, parameters).
        waiting: places of the pruned trials among the posterior's chains, as of
            :func:`waiting_places`.
        new: the new configurations, as of :func:`new_configurations`.
    """
    rows = posterior.rows
    count = len(waiting)
    x = np.concatenate([rows.x[waiting], new.x])
    z = np.concatenate([rows.z[waiting], new.z])
    u = np.concatenate([rows.u[waiting], new.u])
    log_steps = posterior.law.log_steps(draw, x, z, u)[0]
    log_steps[:count] = with_histories(log_steps[:count], rows, waiting, draw[0])
    ran = np.zeros(x.size)
    ran[:count] = [posterior.chains[place].steps for place in waiting]
    # Pruned trials have run: their batch sizes fit.
    fitting = np.ones(x.size)
    fitting[count:] = np.maximum(new.chance, LEAST_CHANCE)
    # Values and costs are in proportion to steps.
    of_sizes = []
    for batch_size in 2.0**x:
        value = question.value(1.0, batch_size, step_time)
        cost = question.cost(1.0, batch_size, step_time)
        of_sizes.append((value, cost, question.last_step(batch_size)))
    value_per_step, cost_per_step, longest = np.array(of_sizes, dtype=float).T
    return Choices(x, z, ran, log_steps, value_per_step, cost_per_step, longest, fitting, u)


def with_histories(of_law: Array, rows: Rows, waiting: Sequence[int], theta: Array) -> Array:
    """log S of n pruned trials by the law and their own histories, (n,), or of m draws, (m, n).

    What a history says of the trial's own seed counts the more, the more exactly it says it.

    Args:
        of_law: log S by the law, of the same shape.
        rows: which have what the histories say, or the least that they leave.
        waiting: places of the trials among these.
        theta: the draw, (p,), or the draws, (m, p).
    """
    own = rows.log_steps[waiting]
    noise_variance = np.exp(2.0 * theta[..., [NOISE]])
    share_of_own = noise_variance / (noise_variance + rows.deviation[waiting] ** 2)
    by_both = of_law + share_of_own * (own - of_law)
    return np.where(rows.kind[waiting] == BOUND, np.maximum(of_law, own), by_both)


def waiting_places(
    question: Question,
    step_time: StepTime,
    posterior: Posterior,
    best_value: float | None,
    resumable: Callable[[int], bool],
) -> list[int]:
    """Places of the pruned chains that have room in their budget and may still beat the best.

    Args:
        question: what is minimised, within which budget.
        step_time: tau(B).
        posterior: whose chains they are.
        best_value: predicted, of the best configuration; None: nothing has reached the target.
        resumable: whether a pruned trial, by its number, can be resumed.
    """
    most = math.inf
    if best_value is not None:
        most = WORTH_RESUMING * GIVE_UP * best_value
    places = []
    for place, chain in enumerate(posterior.chains):
        value = question.value(chain.steps, chain.batch_size, step_time)
        has_room = chain.steps < question.last_step(chain.batch_size)
        if chain.status == "pruned" and has_room and value < most and resumable(chain.number):
            places.append(place)
    return places


def new_configurations(
    posterior: Posterior,
    space: Space,
    records: Records,
    running: Sequence[Spec],
    fits: SurveyedSizes,
    best: Sequence[Prediction],
    rng: np.random.Generator,
) -> New:
    """Configurations that nobody has tried, and the chance that each fits.

    Where none of the candidates is new and may fit, those that are likeliest to fit.

    Args:
        posterior: whose draws tell which rates are good.
        space: the configurations that are allowed.
        records: of all finished trials.
        running: trials that run elsewhere.
        fits: what a survey has found of batch sizes.
        best: predictions, the best first.
        rng: of the decision.
    """
    x, z, u = _candidates(posterior, sizes_to_try(space, records, fits), best[:BEST], rng)
    tried = tried_keys(records, running)
    sizes = []
    is_new = []
    for candidate in zip(x, z, u, strict=True):
        configuration = configuration_of(space, *candidate)
        sizes.append(configuration.batch_size)
        is_new.append(key_of(configuration) not in tried)
    chance = chance_to_fit(sizes, records, fits)
    kept = np.array(is_new) & (chance > 0.0)
    if not kept.any():
        kept = chance >= chance.max()
    return New(x[kept], z[kept], u[kept], chance[kept])


def _candidates(
    posterior: Posterior,
    space: Space,
    best: Sequence[Prediction],
    rng: np.random.Generator,
) -> tuple[Array, Array, Array]:
    """log2 batch sizes and rates, and coordinates of further values, of new configurations.

    They lie within a space that may be narrowed. Most lie anywhere in the batch sizes, both ends
    included, near the best rate and the best further values of some draw; the others around the
    best configurations.
    """
    law = posterior.law
    x = rng.uniform(law.low, law.high, CANDIDATES)
    x[:2] = law.low, law.high
    theta = posterior.theta[rng.integers(len(posterior.theta), size=CANDIDATES)]
    u = law.best_places(theta)
    u = np.clip(u + rng.normal(0.0, SHARE, u.shape), 0.0, 1.0)
    _, moved = law.effect_of_values(theta, u[:, None])
    # Each draw's rate at a batch size of its own.
    best_rate = (law.best_rate(theta, x[:, None]) + moved)[:, 0]
    z = best_rate + rng.normal(0.0, OCTAVES, CANDIDATES)
    if best:
        around = [best[place % len(best)].record for place in range(AROUND_BEST)]
        sizes, rates, places = places_of(space, around)
        x[-AROUND_BEST:] = sizes + rng.normal(0.0, OCTAVES, AROUND_BEST)
        z[-AROUND_BEST:] = rates + rng.normal(0.0, OCTAVES, AROUND_BEST)
        u[-AROUND_BEST:] = places + rng.normal(0.0, SHARE, places.shape)
    snapped = np.log2([space.snap(2.0**size) for size in x])
    rates = np.clip(z, math.log2(space.lr_low), math.log2(space.lr_high))
    return snapped, rates, _allowed_coordinates(space, u)


def _allowed_coordinates(space: Space, u: Array) -> Array:
    """The nearest coordinates, (n, values), of values that are allowed."""
    rows = [space.places(space.values_at(row)) for row in np.clip(u, 0.0, 1.0)]
    return np.array(rows, dtype=float).reshape(u.shape)


def key_of(one: Configuration | Spec) -> tuple[int | float, ...]:
    """Batch size, rate and further values: what tells a configuration from others."""
    return one.batch_size, one.lr, *one.values.values()


def tried_keys(records: Records, running: Sequence[Spec]) -> set[tuple[int | float, ...]]:
    """The keys of the configurations that trials have run or run."""
    return {key_of(spec) for spec in (*records, *running)}


def configuration_of(space: Space, x: float, z: float, u: Array) -> Configuration:
    """The configuration that is allowed at log2 of batch size and rate, and other coordinates."""
    return Configuration(
        batch_size=space.snap(2.0**x), lr=space.snap_lr(float(2.0**z)), values=space.values_at(u)
    )
