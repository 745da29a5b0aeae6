"""Searches compared at equal cost: the best value so far over that of the best recorded training.

The median over seeds. Without a pruner each trial runs to the target or the end of its record.
"""

from __future__ import annotations

from statistics import median

import optuna
import optunahub


TABLE = "fashion_mlp"
SEEDS = 3
# What a search may spend, as multiples of the cost of the best recorded training.
COSTS = (25, 50, 100, 200)
SEARCHES = {
    "random": (optuna.samplers.RandomSampler, optuna.pruners.NopPruner),
    "tpe": (optuna.samplers.TPESampler, optuna.pruners.NopPruner),
    "tpe, median": (optuna.samplers.TPESampler, optuna.pruners.MedianPruner),
}

optuna.logging.set_verbosity(optuna.logging.WARNING)
batch_size = optunahub.load_module("benchmarks/batch_size")


def best_after(search: str, seed: int) -> list[float]:
    """Give the best value that a search has found once it has spent each of ``COSTS``.

    A value is the cost of a training to the target, in seconds. Costs and values are multiples of
    ``Problem.best_value``, the value of the best recorded point.
    """
    problem = batch_size.Problem(TABLE, seed=seed)
    sampler, pruner = SEARCHES[search]
    study = optuna.create_study(
        directions=problem.directions, sampler=sampler(seed=seed), pruner=pruner()
    )
    while problem.spent < COSTS[-1] * problem.best_value:
        study.optimize(problem, n_trials=1)
    # A pruned trial's value is the metric that it had.
    complete = study.get_trials(states=[optuna.trial.TrialState.COMPLETE])
    best_values = list[float]()
    for cost in COSTS:
        limit = cost * problem.best_value
        # Before any trial has reached the target, a search has what a miss counts as.
        best = problem.penalty
        for trial in complete:
            if trial.value is not None and trial.user_attrs["spent"] <= limit:
                best = min(best, trial.value)
        best_values.append(best / problem.best_value)
    return best_values


print(f"{'cost':12}" + "".join(f"{cost:8}" for cost in COSTS))
for search in SEARCHES:
    rows = [best_after(search, seed) for seed in range(SEEDS)]
    medians = [median(column) for column in zip(*rows, strict=True)]
    print(f"{search:12}" + "".join(f"{value:8.2f}" for value in medians))
