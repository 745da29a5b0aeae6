"""Further hyperparameters of a search: in records, in a trial's module, and in whole studies."""

import shlex
import subprocess
from importlib.resources import files

import pytest
import yaml
from toolbox import make_result, trials_of

from bstune.core.records import TrialResult, TrialSpec
from bstune.core.search_space import Tunable, corners
from bstune.study.prepare import compose_checked
from bstune.study.replicates import next_replicate
from bstune.trial.workload import build_module, build_workload

FAST = ("search.replicates=1", "search.candidates=1", "mlflow.enabled=false")
SCHEDULE = {
    "_target_": "bstune.workloads.schedules.piecewise_linear",
    "_partial_": True,
    "total_steps": "${trial.total_steps}",
    "knots": [0.0, 0.2, 1.0],
    "factors": [0.0, 1.0, 0.0],
}


def test_a_module_is_built_with_its_trials_own():
    config = compose_checked(["workload=digits", "search.tune=[momentum,average]"])
    module = build_module(config, TrialSpec(0, 0, 32, 0.1, None, 0, hyperparameters={"momentum": 0.25, "average": 0.5}))
    assert module.configure_optimizers()["optimizer"].param_groups[0]["momentum"] == 0.25
    assert module.average.fraction == 0.5


def test_corners_are_both_ends_at_once():
    first, second = Tunable("a", "budget.steps", 1.0, 8.0, True, True), Tunable("b", "", 0.0, 0.5, False, False)
    assert corners((first, second)) == [{"a": 1, "b": 0.0}, {"a": 8, "b": 0.5}]
    assert isinstance(corners((first,))[0]["a"], int)
    assert corners(()) == []


def test_a_record_keeps_them():
    result = make_result(hyperparameters={"momentum": 0.5})
    assert TrialResult.from_json(result.to_json()) == result
    old = make_result().to_json().replace(', "hyperparameters": {}', "")
    assert "hyperparameters" not in old
    assert TrialResult.from_json(old).hyperparameters == {}


def test_others_are_another_point():
    """The better one's neighbour is replicated by itself: fresh runs of other hyperparameters count for no other."""
    best = make_result(number=0, trial_index=0, steps=100, hyperparameters={"momentum": 0.9})
    near = make_result(number=1, trial_index=1, steps=101, hyperparameters={"momentum": 0.1})
    fresh = make_result(number=2, trial_index=9, steps=150, replicate_of=0, hyperparameters={"momentum": 0.9})
    assert next_replicate([best, near, fresh], "steps", 1, 2)[0].number == 1


@pytest.mark.slow
@pytest.mark.parametrize("sampler", ["frontier", "tpe"])
def test_a_study_searches_them_and_its_command_runs_the_winner_again(bstune, tmp_path, sampler):
    arguments = ["workload=digits", "search.tune=[momentum,average]", "search.objective=steps", f"sampler={sampler}"]
    arguments += [*FAST, "workload.target.value=0.3"]
    status, printed, errors = bstune(*arguments, "search.trials=14")
    assert status == 0, errors
    assert "searches momentum (0 to 0.95), average (0.02 to 0.5) as well" in printed
    folder = tmp_path / "outputs" / "digits"
    trials = trials_of(folder)
    fresh = [trial for trial in trials if trial.resumed_from is None and trial.replicate_of is None]
    values = [trial.hyperparameters["momentum"] for trial in fresh]
    assert len(set(values)) == len(values)
    assert all(0.0 <= value <= 0.95 for value in values)
    for trial in trials:
        source = trial.resumed_from if trial.resumed_from is not None else trial.replicate_of
        if source is not None:
            assert trial.hyperparameters == trials[source].hyperparameters
    winner = yaml.safe_load((folder / "best.yaml").read_text())["best_by_steps"]
    assert winner["hyperparameters"].keys() == {"momentum", "average"}
    again = subprocess.run(shlex.split(winner["command"]), capture_output=True, text=True, check=True)
    assert f"reached at step {winner['steps']} " in again.stdout
    status, printed, errors = bstune(*arguments, "search.trials=15")
    assert status == 0, errors
    assert "continues after" in printed
    status, _, errors = bstune(*arguments, "workload.tunable.momentum.high=0.9", "search.trials=16")
    assert status == 2
    assert "workload.tunable.momentum.high: was 0.95, now 0.9" in errors


def test_a_horizon_is_rebuilt_for_each_trial(bstune, tmp_path):
    """A trial ends with its own horizon, and its schedule with it."""
    (tmp_path / "conf" / "workload").mkdir(parents=True)
    own = yaml.safe_load(files("bstune.conf").joinpath("workload/digits.yaml").read_text())
    own |= {"name": "triangle", "budget": {"steps": 1, "examples": 24_000}}
    own["module"] |= {"schedule": SCHEDULE, "average": None}
    own["tunable"] = {
        "horizon": {"key": "budget.examples", "low": 12_000, "high": 60_000, "log": True, "integer": True}
    }
    (tmp_path / "conf" / "workload" / "triangle.yaml").write_text(yaml.safe_dump(own))
    arguments = ("--config-dir", "conf", "workload=triangle", "search.tune=[horizon]", "search.objective=steps")
    status, _, errors = bstune(*arguments, "search.trials=6", "search.batch_size.low=64", *FAST)
    assert status == 0, errors
    trials = trials_of(tmp_path / "outputs" / "triangle")
    ended = [trial for trial in trials if trial.status == "censored"]
    assert ended
    assert all(trial.steps == -(-trial.hyperparameters["horizon"] // trial.batch_size) for trial in ended)
    assert len({trial.hyperparameters["horizon"] for trial in trials if trial.replicate_of is None}) > 1


def test_what_comes_of_the_images_is_that_of_the_trial_s_own():
    """A second module of other hyperparameters must not get the first one's filters."""
    whitening = (
        "{_target_: bstune.workloads.layers.Whitening, kernel_size: 1, eps: 0.01, images: 100, signed: false, "
        "bias: false, padding: 0, channels: 1}"
    )
    model = f"{{_target_: torch.nn.Sequential, _args_: [{whitening}]}}"
    eps = "{key: workload.module.model._args_.0.eps, low: 0.01, high: 1}"
    own = ("~workload.module.model", f"+workload.module.model={model}", f"+workload.tunable.eps={eps}")
    workload = build_workload(compose_checked(["workload=digits", *own]))
    filters = [
        workload.build_module(TrialSpec(0, 0, 8, 0.1, None, 0, hyperparameters={"eps": eps})).model[0].weight.item()
        for eps in (0.01, 1.0, 0.01)
    ]
    assert filters[0] == filters[2] > 1.2 * filters[1]
