"""Further hyperparameters of a search: in a trial's module, and in whole studies."""

import shlex

import pytest
import yaml
from builders import loaded
from toolbox import make_spec, trials_of

FAST = ("workload=digits", "search.objective=steps", "search.replicates=1", "search.candidates=1")
FAST += ("mlflow.enabled=false",)
LENGTH = (
    "+workload.tunable.length={key: budget.examples, low: 12e3, high: 60e3, log: true, "
    "integer: true}"
)
WHITENING = (
    "{_target_: bstune.workloads.layers.Whitening, kernel_size: 1, eps: 0.01, images: 100, "
    "signed: false, "
    "bias: false, padding: 0, channels: 1}"
)


@pytest.mark.slow
@pytest.mark.parametrize("sampler", ["frontier", pytest.param("tpe", marks=pytest.mark.soak)])
def test_a_study_searches_them_and_its_command_runs_the_winner_again(bstune, tmp_path, sampler):
    arguments = [
        *FAST,
        "search.tune=[momentum,average]",
        f"sampler={sampler}",
        "workload.target.value=0.3",
    ]
    status, printed, errors = bstune(*arguments, "search.trials=6")
    assert status == 0, errors
    assert "searches momentum (0 to 0.95), average (0.02 to 0.5) as well" in printed
    folder = tmp_path / "outputs" / "digits"
    # A configuration has its own momentum; continued and repeated trials have that of theirs.
    values = set()
    trials = trials_of(folder)
    for trial in trials:
        source = trial.replicate_of if trial.resumed_from is None else trial.resumed_from
        assert 0.0 <= trial.hyperparameters["momentum"] <= 0.95
        if source is None:
            assert trial.hyperparameters["momentum"] not in values
            values.add(trial.hyperparameters["momentum"])
        else:
            assert trial.hyperparameters == trials[source].hyperparameters
    winner = yaml.safe_load((folder / "best.yaml").read_text())["best_by_steps"]
    assert winner["hyperparameters"].keys() == {"momentum", "average"}
    # The words before these are python -m bstune.
    status, again, errors = bstune(*shlex.split(winner["command"])[3:])
    assert status == 0, errors
    assert f" after {winner['single_run']['steps']} steps" in again
    assert "continues after" in bstune(*arguments, "search.trials=7")[1]
    status, _, errors = bstune(*arguments, "workload.tunable.momentum.high=0.9", "search.trials=8")
    assert status == 2
    assert "workload.tunable.momentum.high: was 0.95, now 0.9" in errors


@pytest.mark.slow
def test_a_sampler_that_chooses_no_horizon_searches_the_budget(bstune, tmp_path):
    """A trial ends with its own budget, and its schedule with it."""
    arguments = (
        *FAST,
        "schedule=triangle",
        LENGTH,
        "search.tune=[length]",
        "budget.steps=1",
        "budget.examples=24000",
    )
    status, _, errors = bstune(*arguments, "search.trials=4")
    assert status == 2
    assert "the search itself chooses how long each schedule of digits is" in errors
    status, _, errors = bstune(
        *arguments, "search.trials=4", "search.batch_size.low=64", "sampler=tpe"
    )
    assert status == 0, errors
    trials = trials_of(tmp_path / "outputs" / "digits")
    ended = [trial for trial in trials if trial.status == "stopped"]
    assert ended
    assert all(
        trial.steps == trial.horizon == -(-trial.hyperparameters["length"] // trial.batch_size)
        for trial in ended
    )
    assert (
        len({trial.hyperparameters["length"] for trial in trials if trial.replicate_of is None}) > 1
    )


def test_what_comes_of_the_images_is_that_of_the_trial_s_own():
    """A second module of other hyperparameters must not get the first one's filters."""
    model = f"+workload.module.model={{_target_: torch.nn.Sequential, _args_: [{WHITENING}]}}"
    eps = "+workload.tunable.eps={key: workload.module.model._args_.0.eps, low: 0.01, high: 1}"
    workload, _ = loaded("workload=digits", "~workload.module.model", model, eps)
    modules = [
        workload.build_module(make_spec(8, hyperparameters={"eps": eps}))
        for eps in (0.01, 1.0, 0.01)
    ]
    # A larger eps makes a smaller filter: 1/sqrt(eigenvalue + eps).
    filters = [module.model[0].weight.item() for module in modules]
    assert filters[0] == filters[2] > 1.2 * filters[1]
