"""A sampler that stops trials and continues them, on recorded trainings."""

import optuna
import optunahub


problem = optunahub.load_module("benchmarks/batch_size").Problem("fashion_mlp", seed=0)
sampler = optunahub.load_module("samplers/frontier").FrontierSampler(
    target=problem.target, resumable=lambda number: problem.runs[number].can_go_on, seed=0
)


def objective(trial: optuna.Trial) -> float:
    """Train as far as the sampler says, from where it says."""
    params = problem.suggest(trial)
    continued = sampler.resumed_from(trial.number)
    trial.set_user_attr("bstune:resumed_from", continued)
    run = problem.run(params, sampler.max_steps(trial.number), problem.runs.get(continued))
    for step, value in run.history:
        trial.report(value, step)
    cost: float = problem.tell(trial, run)
    return cost


study = optuna.create_study(directions=problem.directions, sampler=sampler)
study.optimize(objective, n_trials=20)
print(study.best_params, study.best_value / problem.best_value, problem.spent)
