"""Checks that a workload trains by the trial's learning rate, by short trials at two of them."""

from collections.abc import Mapping

import torch
from torch import Tensor

from bstune.core.errors import ConfigError
from bstune.system.console import format_number, listing
from bstune.trial.checks.proportion import are_in_proportion, schedule_out_of_proportion
from bstune.trial.checks.short_trial import ShortTrial
from bstune.trial.loop import Workload


def check_rates(slow: ShortTrial, fast: ShortTrial, workload: Workload) -> None:
    """Raise a ConfigError for a workload that does not follow its learning rate.

    Args:
        slow: a short trial.
        fast: another one at a higher learning rate.
        workload: that both have trained.
    """
    # A range of a single rate has nothing to compare.
    if slow.spec.lr == fast.spec.lr:
        return
    # ``override`` is the option by which bstune sets the rate in the module's optimizers.
    problem = rate_problem(slow, fast, workload.overrides_lr, workload.override)
    # Otherwise the module itself takes the rate, and makes of it the rates that it wants.
    if problem is None and workload.overrides_lr:
        problem = proportion_problem(slow, fast, workload.override)
    if problem is not None:
        raise ConfigError(problem)


def rate_problem(
    slow: ShortTrial, fast: ShortTrial, is_overridden: bool = False, override: str = ""
) -> str | None:
    """Say why two learning rates train a module alike, in words; None if they do not.

    None also where a few steps cannot show it. They cannot at a rate of zero, with which a warm-up
    may begin. Nor can they where no weight moves but the optimizers' rates follow the trial's.

    Args:
        slow: a short trial.
        fast: another one, at a higher learning rate.
        is_overridden: whether bstune sets the rate in the optimizer.
        override: the option that lets it do so.
    """
    slow_rates = slow.weights.rates
    fast_rates = fast.weights.rates
    if slow.weights.after is None or fast.weights.after is None:
        return None
    # The weights after the compared steps. Where they differ, the rate has had an effect.
    if not _are_equal(slow.weights.after, fast.weights.after):
        return None
    # Whether the optimizers' rates follow the trial's.
    follows = slow_rates != fast_rates
    has_moved = not _are_equal(slow.weights.before, slow.weights.after)
    is_at_zero = all(rate.lr == 0.0 for rate in (*slow_rates, *fast_rates))
    shows_nothing = is_at_zero or (follows and not has_moved)
    if slow_rates and shows_nothing:
        return None
    return _no_effect_text(slow, fast, is_overridden, override)


def _no_effect_text(slow: ShortTrial, fast: ShortTrial, is_overridden: bool, override: str) -> str:
    """Say that two learning rates train a module alike, with what its optimizers show, and advice.

    The arguments are those of :func:`rate_problem`.
    """
    slow_rates = slow.weights.rates
    same = (
        f"trial.lr has no effect: at {format_number(slow.spec.lr)} and at "
        f"{format_number(fast.spec.lr)} the first {slow.weights.steps} steps of "
        f"{slow.module.name} are the same"
    )
    if not slow_rates:
        return (
            f"{same}, as it has no optimizer with a learning rate: return one from "
            "configure_optimizers"
        )
    if slow_rates != fast.weights.rates:
        return (
            f"{same}, though the rates of its optimizers are not: train the weights by these "
            "optimizers' steps"
        )
    # Many groups of parameters may have one rate, which is shown once.
    named = [f"{rate.optimizer} {format_number(rate.lr)}" for rate in slow_rates]
    shown = ", ".join(dict.fromkeys(named))
    same += f", with these rates of its optimizers at both: {shown}"
    if is_overridden:
        return (
            f"{same}. {override} sets the rate in the optimizer, and a hook of the module or a "
            "schedule sets one of its own after that: let it use the rate that the module is given"
        )
    return (
        f"{same}. Let configure_optimizers{slow.module.place}, and any schedule that sets rates of "
        "its own (as OneCycleLR's max_lr), use the rate that the module was given; or give "
        f"{override}, which sets it in the optimizer"
    )


def _are_equal(weights: Mapping[str, Tensor], others: Mapping[str, Tensor]) -> bool:
    """Whether weights are equal to others of the same names, to the bit."""
    return all(torch.equal(weight, others[name]) for name, weight in weights.items())


def proportion_problem(slow: ShortTrial, fast: ShortTrial, override: str) -> str | None:
    """Say which rates do not move in proportion to the one that bstune sets, in words.

    None if all do. Compared are the rates at the ends of two short trials, and those that their
    schedules would set later.

    Args:
        slow: a short trial.
        fast: another one, at a higher learning rate.
        override: the option by which bstune sets the rates of the optimizer.
    """
    module = f"{slow.module.name}{slow.module.place}"
    advice = "let the module take the rate, and use it there"
    if slow.schedules.unknown:
        return (
            f"{override} sets the rate in torch's own schedules, and "
            f"{module} has {listing(slow.schedules.unknown)}: {advice}"
        )
    factor = fast.spec.lr / slow.spec.lr
    name = schedule_out_of_proportion(slow.schedules.to_compare, fast.schedules.to_compare, factor)
    if name is not None:
        return (
            f"{override} moves all rates in proportion, and {name} of "
            f"{module} has rates of its own ahead: {advice}"
        )
    slow_rates = [rate.lr for rate in slow.weights.rates]
    fast_rates = [rate.lr for rate in fast.weights.rates]
    # The module may make other parameter groups at another rate. Then these cannot be compared.
    comparable = len(slow_rates) == len(fast_rates)
    if comparable and not are_in_proportion(slow_rates, fast_rates, factor):
        return (
            f"{override} moves all rates in proportion, and after {slow.weights.steps} steps "
            f"those of {module} are not: a hook of the module sets some; {advice}"
        )
    return None
