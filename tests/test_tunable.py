import json
import shlex
import subprocess
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path

import pytest
import yaml
from omegaconf import DictConfig

from bstune.config import overrides, with_hyperparameters
from bstune.core.records import TrialResult, TrialSpec
from bstune.core.search_space import Tunable, corners
from bstune.study.prepare import compose_checked
from bstune.study.replicates import next_replicate
from bstune.trial.workload import build_module, build_workload

Run = Callable[..., tuple[object, str, str]]
FAST = ("search.replicates=1", "search.candidates=1", "mlflow.enabled=false")
SCHEDULE = {
    "_target_": "bstune.workloads.schedules.piecewise_linear",
    "_partial_": True,
    "total_steps": "${trial.total_steps}",
    "knots": [0.0, 0.2, 1.0],
    "factors": [0.0, 1.0, 0.0],
}


def config(*arguments: str) -> DictConfig:
    return compose_checked(["+workload=digits", *arguments])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("search.tune=[momentum]", "workload.tunable.momentum.low=-1"), "the module does not take"),
        (
            ("search.tune=[h]", "+workload.tunable.h={key: budget.examples, low: 1000, high: 9000}"),
            "no schedule of digits ends with its budget",
        ),
    ],
)
def test_bad_input_ends_in_a_line(bstune: Run, tmp_path: Path, arguments: tuple[str, ...], words: str) -> None:
    status, _, errors = bstune("+workload=digits", *arguments, *FAST)
    assert status == 2
    assert words in errors
    assert "Traceback" not in errors
    assert not list(tmp_path.iterdir())


def test_settings_stand_at_their_keys_in_a_copy() -> None:
    own = config("search.tune=[momentum,average]")
    changed = with_hyperparameters(own, {"momentum": 0.5, "average": 0.3})
    assert changed.workload.module.optimizer.momentum == 0.5
    assert own.workload.module.optimizer.momentum == 0.0
    module = build_module(own, TrialSpec(0, 0, 32, 0.1, None, 0, hyperparameters={"momentum": 0.25, "average": 0.5}))
    assert module.configure_optimizers()["optimizer"].param_groups[0]["momentum"] == 0.25
    assert module.average.fraction == 0.5
    assert overrides(own, {"momentum": 0.25}) == ["workload.module.optimizer.momentum=0.25"]


def test_corners_are_both_ends_at_once() -> None:
    both = (
        Tunable("a", "budget.steps", 1.0, 8.0, True, True),
        Tunable("b", "workload.module.x", 0.0, 0.5, False, False),
    )
    assert corners(both) == [{"a": 1, "b": 0.0}, {"a": 8, "b": 0.5}]
    assert isinstance(corners(both)[0]["a"], int)
    assert corners(()) == []


def test_a_record_keeps_its_settings(make_result: Callable[..., TrialResult]) -> None:
    result = make_result(hyperparameters={"momentum": 0.5})
    assert TrialResult.from_json(result.to_json()) == result
    old = json.loads(make_result().to_json())
    del old["hyperparameters"]
    assert TrialResult.from_json(json.dumps(old)).hyperparameters == {}


def test_other_settings_are_another_point(make_result: Callable[..., TrialResult]) -> None:
    """The better one's neighbour is confirmed by itself: fresh runs of other settings tell nothing of it."""
    best = make_result(number=0, trial_index=0, steps=100, hyperparameters={"momentum": 0.9})
    near = make_result(number=1, trial_index=1, steps=101, hyperparameters={"momentum": 0.1})
    fresh = make_result(number=2, trial_index=9, steps=150, replicate_of=0, hyperparameters={"momentum": 0.9})
    due = next_replicate([best, near, fresh], "steps", 1, 2)
    assert due is not None
    assert due[0].number == 1


@pytest.mark.slow
@pytest.mark.parametrize("sampler", ["frontier", "tpe"])
def test_a_study_searches_them_and_its_command_runs_the_winner_again(bstune: Run, tmp_path: Path, sampler: str) -> None:
    arguments = ["+workload=digits", "search.tune=[momentum,average]", "search.objective=steps", f"sampler={sampler}"]
    arguments.append("workload.target.value=0.3")
    status, printed, errors = bstune(*arguments, "search.trials=14", *FAST)
    assert status == 0, errors
    assert "searches momentum (0 to 0.95), average (0.02 to 0.5) as well" in printed
    trials = [TrialResult.from_json(line) for line in Path("outputs/digits/trials.jsonl").read_text().splitlines()]
    values = [
        trial.hyperparameters["momentum"]
        for trial in trials
        if trial.resumed_from is None and trial.replicate_of is None
    ]
    assert len(set(values)) == len(values)
    assert all(0.0 <= value <= 0.95 for value in values)
    for trial in trials:
        source = trial.resumed_from if trial.resumed_from is not None else trial.replicate_of
        if source is not None:
            assert trial.hyperparameters == trials[source].hyperparameters
    winner = yaml.safe_load(Path("outputs/digits/best.yaml").read_text())["best_by_steps"]
    assert winner["hyperparameters"].keys() == {"momentum", "average"}
    command = shlex.split(winner["command"])
    again = subprocess.run(command, capture_output=True, text=True, check=True)
    assert f"reached at step {winner['steps']} " in again.stdout
    # the same command with more trials goes on; other ranges are another study
    status, printed, errors = bstune(*arguments, "search.trials=15", *FAST)
    assert status == 0, errors
    assert "continues after" in printed
    status, _, errors = bstune(*arguments, "workload.tunable.momentum.high=0.9", "search.trials=16", *FAST)
    assert status == 2
    assert "workload.tunable.momentum.high: was 0.95, now 0.9" in errors


def test_a_horizon_is_rebuilt_for_each_trial(bstune: Run, tmp_path: Path) -> None:
    """A trial ends with its own horizon, and its schedule with it."""
    folder = tmp_path.parent / f"{tmp_path.name}_conf"
    (folder / "workload").mkdir(parents=True)
    own = yaml.safe_load(files("bstune.conf").joinpath("workload/digits.yaml").read_text())
    own |= {"name": "triangle", "budget": {"steps": 1, "examples": 24_000}}
    own["module"] |= {"schedule": SCHEDULE, "average": None}
    own["tunable"] = {
        "horizon": {"key": "budget.examples", "low": 12_000, "high": 60_000, "log": True, "integer": True}
    }
    (folder / "workload" / "triangle.yaml").write_text(yaml.safe_dump(own))
    arguments = ["--config-dir", str(folder), "+workload=triangle", "search.tune=[horizon]", "search.objective=steps"]
    status, _, errors = bstune(*arguments, "search.trials=6", "search.batch_size.low=64", *FAST)
    assert status == 0, errors
    trials = [TrialResult.from_json(line) for line in Path("outputs/triangle/trials.jsonl").read_text().splitlines()]
    ended = [trial for trial in trials if trial.status == "censored"]
    assert ended
    for trial in ended:
        assert trial.steps == -(-trial.hyperparameters["horizon"] // trial.batch_size)
    assert len({trial.hyperparameters["horizon"] for trial in trials if trial.replicate_of is None}) > 1
    status, _, errors = bstune(*arguments, "workload.tunable.horizon.low=0", *FAST, "study=other")
    assert status == 2
    assert "low must be over 0" in errors


def test_what_comes_of_the_images_is_that_of_the_trial_s_own_settings() -> None:
    """A second module of other settings must not get the first one's filters."""
    whitening = (
        "+workload.module.model.whitening={_target_: bstune.workloads.layers.Whitening, kernel_size: 1, eps: 0.01, "
        "images: 100, signed: false, bias: false, padding: 0, channels: 1}"
    )
    own = compose_checked(
        [
            "+workload=digits",
            "workload.module.model={_target_: torch.nn.Sequential}",
            "~workload.module.model.inputs",
            "~workload.module.model.hidden",
            "~workload.module.model.classes",
            "~workload.tunable.average",
            whitening.replace("model.whitening=", "model._args_=[").replace("channels: 1}", "channels: 1}]"),
            "+workload.tunable.eps={key: workload.module.model._args_.0.eps, low: 0.01, high: 1}",
        ]
    )
    workload = build_workload(own)
    filters = [
        workload.build_module(TrialSpec(0, 0, 8, 0.1, None, 0, hyperparameters={"eps": eps})).model[0].weight.item()
        for eps in (0.01, 1.0, 0.01)
    ]
    assert filters[0] == filters[2] > 1.2 * filters[1]
