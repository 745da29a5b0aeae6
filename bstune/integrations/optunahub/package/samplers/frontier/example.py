"""Finds the fastest batch size and learning rate, on a made law of steps and seconds."""

from __future__ import annotations

import math

import optuna
import optunahub


sampler = optunahub.load_module("samplers/frontier").FrontierSampler(objective="time", seed=0)
study = optuna.create_study(sampler=sampler)


def objective(trial: optuna.Trial) -> float:
    """Stand in for a training: steps to a target times seconds per step, both by a formula.

    A trial that the sampler stops before the target is pruned.
    """
    batch_size = trial.suggest_int("batch_size", 8, 4096, log=True)
    lr = trial.suggest_float("lr", 1e-3, 10.0, log=True)
    octaves_off = math.log2(lr / (0.01 * math.sqrt(batch_size)))  # from the best learning rate
    steps = round(200 * (1 + 128 / batch_size) * 2 ** (0.2 * octaves_off**2))
    seconds_per_step = 1e-3 + 1e-5 * batch_size
    max_steps = sampler.max_steps(trial.number)  # None: as long as it takes
    trial.set_user_attr("seconds_per_step", seconds_per_step)
    trial.set_user_attr("steps", steps if max_steps is None else min(steps, max_steps))
    if max_steps is not None and steps > max_steps:
        raise optuna.TrialPruned
    return steps * seconds_per_step


study.optimize(objective, n_trials=30)
print(study.best_params, study.best_value)
