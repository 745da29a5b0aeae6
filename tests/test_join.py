"""Who shares a study's storage and folder: ``bstune worker``, one run, other programs."""

import json

import optuna
import pytest
from refusals import text_cases
from test_run import own, places

from bstune.__main__ import main
from bstune.core.records import Record


@pytest.fixture(scope="module")
def begun(tmp_path_factory):
    """A folder with one run, a study of the same project that has ended, and others' studies."""
    folder = tmp_path_factory.mktemp("begun")
    url = f"sqlite:///{folder}/study.db"
    own(folder)
    one_run(folder)
    assert main([*command(folder), "trials=1", "seeds=1"]) == 0
    # A worker may come before the study has begun.
    optuna.create_study(study_name="starts", storage=url)
    for name in ("foreign", "later", "python"):
        optuna.create_study(study_name=name, storage=url).set_user_attr("by", "someone")
    study = optuna.load_study(study_name="later", storage=url)
    study.set_user_attr("settings", {"schema": 99})
    study = optuna.load_study(study_name="python", storage=url)
    study.set_user_attr("settings", {"schema": 1})
    study.set_user_attr("shared", {"command": "bstune.tune(...)", "way": "tune", "options": {}})
    study = optuna.create_study(study_name="untold", storage=url)
    study.set_user_attr("settings", {"schema": 1})
    study.set_user_attr("shared", [1])
    return folder


def command(folder):
    """The command line of the study."""
    config = ["--config-dir", f"{folder}/conf", "+workload=own"]
    return [*config, *places(folder), "workers=0", "mlflow.uri=null"]


def one_run(folder):
    """Train a configuration once; its history."""
    assert main([*command(folder), "trial.batch_size=32", "trial.lr=0.05"]) == 0
    (of_run,) = (folder / "out").glob("trial-*")
    assert (of_run / "checkpoint.ckpt").stat().st_size > 0
    return Record.model_validate_json((of_run / "trials.jsonl").read_text()).history


def test_one_run_of_a_configuration_shares_a_folder_with_a_study(begun):
    """It has the same history each time."""
    history = one_run(begun)
    assert history[-1][1] <= 0.1
    assert one_run(begun) == history


def attributes(url):
    return {one.study_name: one.user_attrs for one in optuna.get_all_study_summaries(url)}


@text_cases("""
command | named
worker study=own | storage=URL, study=NAME
worker {storage} study=nosuch | nosuch, own, foreign
worker storage=sqlite:///nosuch.db study=own | own, none
worker {storage} study=foreign | foreign, another program, study=NAME
worker {storage} study=later | 99, study=NAME
worker {storage} study=starts | starts, own
worker {storage} study=untold | command that began it
worker {storage} study=python | bstune.tune(..., script, storage
worker {storage} study=own | --config-dir
worker {storage} study=own trials=3 | trials
worker {storage} study=own {conf} module._target_=small.Leaves | module._target_=small.Model, \
small.Leaves
# A study of another program is left alone.
{conf} +workload=own {storage} study=foreign | foreign
{conf} +workload=own {storage} study=later | later
""")
def test_who_cannot_share_is_told_in_one_line(begun, tmp_path, monkeypatch, capsys, command, named):
    monkeypatch.chdir(tmp_path)
    url = f"sqlite:///{begun}/study.db"
    command = command.format(storage=f"storage={url}", conf=f"--config-dir {begun}/conf")
    before = attributes(url)
    assert main([*command.split(), "workers=0"]) == 2
    _, error = capsys.readouterr().err.strip().splitlines()
    assert all(word in error for word in named.split(", "))
    assert attributes(url) == before
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_another_kind_of_machine_gives_steps_alone(begun, tmp_path):
    url = f"sqlite:///{begun}/study.db"
    study = optuna.load_study(study_name="own", storage=url)
    shared = study.user_attrs["shared"]
    more = {"trials": shared["options"]["trials"] + 3, "seeds": shared["options"]["seeds"] + 1}
    # What is this machine's own is not read.
    more |= {"output": str(tmp_path / "elsewhere"), "module": {"_target_": "small.Leaves"}}
    study.set_user_attr("shared", shared | {"options": shared["options"] | more})
    count = len(study.trials)
    join = ["worker", f"storage={url}", "study=own", "--config-dir", f"{begun}/conf", "workers=0"]
    assert main([*join, f"output={tmp_path}/out", "threads=2"]) == 0
    assert not (tmp_path / "elsewhere").exists()
    trials = study.trials[count:]
    records = [Record(**json.loads(trial.user_attrs["record"])) for trial in trials]
    assert sum(record.role == "search" for record in records) >= 3
    assert any(record.reached for record in records)
    assert {record.seconds_per_step for record in records} == {None}
    assert optuna.trial.TrialState.COMPLETE not in [trial.state for trial in trials]
