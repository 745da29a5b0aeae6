"""bstune.tune and the command run the same trials of the small projects in tests/projects/, bit for bit."""

from functools import partial
from pathlib import Path

import pytest
import yaml
from hydra.utils import get_object, instantiate
from toolbox import trials_of

import bstune as package

PROJECTS = Path(__file__).parent / "projects"
NAMES = sorted(path.stem for path in (PROJECTS / "conf" / "workload").glob("*.yaml"))
OPTIONS = ["search.objective=steps", "search.replicates=0"]
FAST = {"early_stopping"}
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # the projects' own


def arguments_of(name):
    """Return the arguments of tune() that say what a project's YAML says."""
    text = (PROJECTS / "conf" / "workload" / f"{name}.yaml").read_text()
    values = yaml.safe_load(text.replace("${trial.lr}", "given"))
    node = values["module"]
    (rate,) = (key for key, value in node.items() if value == "given")
    rest = {key: value for key, value in node.items() if key not in ("_target_", rate)}
    trainer = dict(values.get("trainer", {}))
    if "callbacks" in trainer:
        nodes = [{"_target_": one["class_path"], **one["init_args"]} for one in trainer["callbacks"]]
        trainer["callbacks"] = [instantiate(one) for one in nodes]
    return {
        "module": partial(build, get_object(node["_target_"]), rate, rest),
        "data": instantiate(values["data"]),
        "target": package.Target(**values["target"]),
        "batch_sizes": (values["batch_size"]["low"], values["batch_size"]["high"]),
        "reference": (values["reference"]["batch_size"], values["reference"]["lr"]),
        "budget": package.Budget(**values["budget"]),
        "trainer": trainer,
    }


def build(kind, rate, rest, trial):
    return kind(**{rate: trial.lr}, **{key: instantiate(value) for key, value in rest.items()})


def records(trials):
    return [(one.batch_size, one.lr, one.seed, one.status, one.steps, one.history) for one in trials]


@pytest.mark.parametrize("name", [n if n in FAST else pytest.param(n, marks=pytest.mark.slow) for n in NAMES])
def test_tune_runs_the_commands_trials(name, bstune, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(PROJECTS))
    status, _, err = bstune(
        *("--config-dir", str(PROJECTS / "conf"), f"workload={name}", "search.trials=3", "search.workers=0"),
        *("mlflow.enabled=false", *OPTIONS),
    )
    assert status == 0, err
    own = {"trials": 3, "workers": 0, "survey": False, "mlflow": False, "options": OPTIONS}
    result = package.tune(**arguments_of(name), **own, name="mine")
    assert records(result.findings.trials) == records(trials_of(tmp_path / "outputs" / name))
    assert all(trial.status != "failed" for trial in result.findings.trials)
