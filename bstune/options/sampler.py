"""``sampler``: the numbers of the samplers that ship, as ``conf/sampler/`` sets them."""

from typing import Annotated

from pydantic import Field, ValidationError

from bstune.options.lookup import Lookup
from bstune.options.refusal import refusal
from bstune.options.values import (
    NUMBER,
    Factor,
    Few,
    Node,
    OneTo1000,
    OpenSection,
    OverOne,
    PositiveFinite,
    PositiveShare,
    Share,
    Sigma,
    Weight,
)


class PolicyNumbers(OpenSection):
    """How bstune's sampler chooses the next trial from its posterior."""

    particles: Annotated[int, Field(ge=10, le=10_000), NUMBER] = 10
    moves: OneTo1000 = 1
    candidates: Annotated[int, Field(ge=10, le=2000), NUMBER] = 10
    initial_fraction: Factor = 1
    max_growth: Factor = 1
    max_first_growth: Factor = 1
    probe_fraction: Factor = 1
    max_predicted_fraction: Factor = 1
    stop_factor: OverOne = 2
    cost_weight: Weight = 0
    random_fraction: Share = 0
    curve_after: Weight = 0
    curve_share: Share = 0
    curve_cost: Factor = 1
    curve_width: OverOne = 2
    loss_first_share: PositiveShare = 1
    loss_sure: Weight = 0
    loss_early: Weight = 0
    loss_cost_weight: Weight = 0
    loss_fresh_after: Factor = 1
    loss_drift: Factor = 1
    loss_spread: Factor = 1
    loss_least_slope: Factor = 1


class SamplerNumbers(OpenSection):
    """The arguments of the samplers that ship."""

    sigma: Sigma | None = None
    exponent_sigma: Sigma | None = None
    noise_scale: PositiveFinite | None = None
    n_startup_trials: Few = 0
    ratio: OverOne = 2
    policy: PolicyNumbers | None = None


def check_sampler(sampler: Node, lookup: Lookup) -> None:
    """Check the numbers of a sampler that ships: a ValueError for one that is out of its range.

    A reference is left out: the value that it refers to is checked where it stands.
    """
    if not str(sampler.get("_target_")).startswith(("bstune.search.", "optuna.samplers.")):
        return
    try:
        SamplerNumbers.model_validate(sampler)
    except ValidationError as error:
        for details in error.errors():
            if not lookup.is_reference("sampler", str(details["loc"][0])):
                option = ".".join(["sampler", *map(str, details["loc"])])
                raise ValueError(refusal(option, details)) from error
