"""What the arguments of the samplers that ship may be."""

from dataclasses import fields

import pytest

from bstune.options.lookup import PlainLookup
from bstune.options.sampler import POLICY_NUMBERS, check_sampler
from bstune.search.acquisition import Policy
from bstune.search.sampler import default_policy

OWN = "bstune.search.sampler.FrontierSampler"


class References(PlainLookup):
    """The lookup of a config in which every argument of the sampler is a reference."""

    def is_reference(self, section, name):
        return True


def test_every_number_of_the_policy_has_a_type_and_its_default_is_one_of_it():
    assert set(POLICY_NUMBERS) == {field.name for field in fields(Policy)}
    policy = vars(default_policy())
    check_sampler({"_target_": OWN, "policy": policy}, PlainLookup({}))


@pytest.mark.parametrize(
    ("arguments", "option", "received"),
    [
        ({"sigma": 0.0}, "sampler.sigma", "0.0"),
        ({"noise_scale": "x"}, "sampler.noise_scale", "'x'"),
        ({"ratio": 1}, "sampler.ratio", "1"),
        ({"n_startup_trials": -1}, "sampler.n_startup_trials", "-1"),
        ({"policy": 3}, "sampler.policy", "3"),
        ({"policy": {"moves": True}}, "sampler.policy.moves", "True"),
        ({"sigma": None, "policy": {"steps_cost_power": 1.5}}, "sampler.policy.steps_cost", "1.5"),
        ({"policy": {"stop_factor": 1.0}}, "sampler.policy.stop_factor", "1.0"),
    ],
)
def test_a_number_that_cannot_be_is_refused(arguments, option, received):
    node = {"_target_": OWN} | arguments
    with pytest.raises(ValueError, match=rf"^{option}.* but got {received}$"):
        check_sampler(node, PlainLookup({}))
    # A reference is checked where it leads, and another project's sampler checks its own arguments.
    check_sampler(node, References({}))
    check_sampler(node | {"_target_": "own.Sampler"}, PlainLookup({}))


@pytest.mark.parametrize("arguments", [{}, {"sigma": None, "policy": None}, {"seed": "x"}])
def test_what_is_not_given_or_has_no_type_is_not_checked(arguments):
    check_sampler({"_target_": OWN} | arguments, PlainLookup({}))
