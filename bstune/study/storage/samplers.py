"""Builds the sampler of one trial."""

import copy
import inspect
import warnings
from collections.abc import Mapping
from functools import partial

from optuna.exceptions import ExperimentalWarning
from optuna.samplers import BaseSampler, QMCSampler, RandomSampler

from bstune.core.errors import ConfigError
from bstune.options import StudyOptions
from bstune.study.planning.plan import SearchBudget
from bstune.trial.backend import sampler_factory


def build_sampler(
    options: StudyOptions,
    budget: SearchBudget,
    trial_index: int,
    context: Mapping[str, object] | None = None,
    attempt: int = 0,
    factory: partial[BaseSampler] | None = None,
) -> BaseSampler:
    """Build the sampler of one trial, with a seed of its own.

    Args:
        options: name the sampler.
        budget: of the search, which has its seeds.
        trial_index: for which it suggests.
        context: arguments that the study offers a sampler, by name. It gets those that its class
            lists in ``context``.
        attempt: how many points were given up at the index, as their trials failed.
        factory: what ``sampler_factory`` makes of the options; None: it is made here, which takes
            Hydra longer than a suggestion takes.

    Raises:
        ConfigError: where the options name no sampler, or one that does not take its arguments.
    """
    # It is a copy, so that no trial finds a sampler's arguments, such as another sampler, already
    # used.
    factory = sampler_factory(options) if factory is None else copy.deepcopy(factory)
    sampler = getattr(factory, "func", None)
    if not (inspect.isclass(sampler) and issubclass(sampler, BaseSampler)):
        raise ConfigError(
            "sampler must name an optuna.samplers.BaseSampler in _target_, but got "
            f"{options.sampler}"
        )
    seed = budget.sampler_seed(trial_index, attempt)
    of_trial = {"trial_index": trial_index, "attempt": attempt, "study_seed": budget.seed}
    offered: dict[str, object] = {**(context or {}), **of_trial}
    wanted = getattr(sampler, "context", ())
    arguments = {name: value for name, value in offered.items() if name in wanted}
    # QMCSampler has one seed for all trials, as its place in the sequence is kept in the storage.
    if issubclass(sampler, QMCSampler):
        arguments |= {"seed": budget.seed, "independent_sampler": RandomSampler(seed=seed)}
    elif "seed" in inspect.signature(sampler).parameters:
        arguments["seed"] = seed
    try:
        with warnings.catch_warnings(action="ignore", category=ExperimentalWarning):
            built: BaseSampler = factory(**arguments)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"sampler cannot be built: {error}") from error
    return built
