"""Checks that a workload can be trained at each end of the further hyperparameters' ranges."""

from dataclasses import replace

from bstune.core.errors import ConfigError
from bstune.core.records import TrialProtocol
from bstune.core.search_space import BUDGET, Space, Tunable, corners
from bstune.options import StudyOptions, overrides
from bstune.trial.backend import chooses_horizons
from bstune.trial.checks.short_runs import ShortRuns
from bstune.trial.loop import Workload


def check_tunables(
    options: StudyOptions, workload: Workload, protocol: TrialProtocol, space: Space, *, stops: bool
) -> None:
    """Train a few steps with the further hyperparameters at each combination of their ends.

    That is at the smallest batch size.

    Args:
        options: of the study.
        workload: what is trained.
        protocol: of the study's trials.
        space: has the hyperparameters.
        stops: whether trials may be stopped early, which they may where no schedule ends with them.

    Raises:
        ConfigError: for values that the module does not take, and for a hyperparameter that sets
            the budget and must not.
    """
    for tunable in space.tunables:
        if tunable.key.startswith(BUDGET):
            _check_budget_tunable(options, tunable, stops=stops)
    short = ShortRuns(workload, protocol)
    for values in corners(space.tunables):
        # At the lowest learning rate a failure comes from these values, not from the rate.
        spec = replace(space.lowest_rate_spec(space.low), hyperparameters=values)
        try:
            short.run(spec)
        except (TypeError, ValueError, ConfigError) as error:
            raise ConfigError(
                "workload.tunable: the module does not take "
                f"{', '.join(overrides(options, values))} at batch size {space.low}: "
                f"{str(error).splitlines()[0]}"
            ) from error


def _check_budget_tunable(options: StudyOptions, tunable: Tunable, *, stops: bool) -> None:
    """Refuse to search over a trial's budget where no schedule ends with it, or the search sets it.

    ``stops``: as in :func:`check_tunables`.
    """
    name = options.workload.name
    if stops:
        raise ConfigError(
            f"workload.tunable.{tunable.name} sets {tunable.key}, but no schedule of {name} "
            "ends with its budget: it would change nothing but when a trial gives up"
        )
    if chooses_horizons(options):
        raise ConfigError(
            f"workload.tunable.{tunable.name} sets {tunable.key}, but the search itself "
            f"chooses how long each schedule of {name} is, within the budget: leave "
            f"{tunable.name} out of search.tune"
        )
