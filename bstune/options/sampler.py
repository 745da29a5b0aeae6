"""``sampler``: what the arguments of the samplers that ship may be.

Their values stand in ``conf/sampler/``.
"""

from collections.abc import Mapping
from functools import cache
from typing import Annotated, Any

from pydantic import Field, TypeAdapter, ValidationError

from bstune.options.lookup import Lookup
from bstune.options.refusal import refusal
from bstune.options.values import (
    NUMBER,
    Factor,
    Few,
    Node,
    OneTo1000,
    OverOne,
    PositiveFinite,
    PositiveShare,
    Share,
    Sigma,
    Weight,
)

# The type of each argument of ``sampler``; other arguments are not checked.
SAMPLER_NUMBERS: dict[str, object] = {
    "sigma": Sigma | None,
    "exponent_sigma": Sigma | None,
    "noise_scale": PositiveFinite | None,
    "n_startup_trials": Few,
    "ratio": OverOne,
    "policy": Node | None,
}
# The type of each number of ``sampler.policy``: how bstune's sampler chooses among what its
# posterior says.
POLICY_NUMBERS: dict[str, object] = {
    "particles": Annotated[int, Field(ge=10, le=10_000), NUMBER],
    "moves": OneTo1000,
    "candidates": Annotated[int, Field(ge=10, le=2000), NUMBER],
    "initial_fraction": Factor,
    "max_growth": Factor,
    "max_first_growth": Factor,
    "max_horizon_growth": Factor,
    "probe_fraction": Factor,
    "max_predicted_fraction": Factor,
    "stop_factor": OverOne,
    "cost_weight": Weight,
    "steps_cost_power": Share,
    "random_fraction": Share,
    "curve_after": Weight,
    "curve_share": Share,
    "curve_cost": Factor,
    "curve_width": OverOne,
    "loss_first_share": PositiveShare,
    "loss_sure": Weight,
    "loss_early": Weight,
    "loss_cost_weight": Weight,
    "loss_fresh_after": Factor,
    "loss_drift": Factor,
    "loss_spread": Factor,
    "loss_least_slope": Factor,
}
# The types of the numbers of each section.
SECTIONS = {"sampler": SAMPLER_NUMBERS, "sampler.policy": POLICY_NUMBERS}


def check_sampler(sampler: Node, lookup: Lookup) -> None:
    """Check the numbers of one of bstune's or Optuna's samplers; others' are not known.

    A value that refers to another option is left out, as that option is checked itself.

    Raises:
        ValueError: for the first number of a wrong type or out of its range, which it names.
    """
    if not str(sampler.get("_target_")).startswith(("bstune.search.", "optuna.samplers.")):
        return
    given = dict[str, object]()
    for name, value in sampler.items():
        if not lookup.is_reference("sampler", name):
            given[name] = value
    _check_types(given, "sampler")
    # Further numbers of bstune's own sampler, by which it chooses among its proposals.
    policy = given.get("policy")
    if isinstance(policy, Mapping):
        _check_types(policy, "sampler.policy")


@cache
def _adapter(section: str, name: str) -> TypeAdapter[object]:
    """Build the check of one number of a section. It is cached, as building takes far longer."""
    kind: Any = SECTIONS[section][name]
    return TypeAdapter(kind)


def _check_types(values: Mapping[str, object], section: str) -> None:
    """Raise ValueError for the first of a section's values that its type refuses."""
    for name, value in values.items():
        if name not in SECTIONS[section]:
            continue
        try:
            _adapter(section, name).validate_python(value)
        except ValidationError as error:
            raise ValueError(refusal(f"{section}.{name}", error.errors()[0])) from error
