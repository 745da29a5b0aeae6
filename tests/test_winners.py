"""What becomes of a study's winners: a checkpoint that this machine lacks."""

import platform
from dataclasses import asdict, replace
from types import SimpleNamespace

import optuna
import pytest
from optuna.trial import create_trial
from toolbox import make_result

from bstune.core.records import dump_json
from bstune.study.planning.replicates import Winner
from bstune.study.storage.attributes import SPEC
from bstune.study.storage.lease import PREFIX, Lease, this_machine
from bstune.study.storage.trials import text_of
from bstune.study.winners import checkpoints_elsewhere, metrics_of_winners
from bstune.system.files import Output

HERE = Lease(
    id="a",
    role="owner",
    name=f"me@{platform.node()} (process 7)",
    machine=this_machine(),
    pid=7,
    started="",
)
AWAY = replace(HERE, name="me@elsewhere (process 7)", machine="another boot")


@pytest.mark.parametrize(
    ("lease", "names"),
    [
        # It wrote none, as where its target was set after it had ended.
        (HERE, []),
        # The machine was booted since.
        (replace(HERE, machine="another boot"), []),
        (AWAY, [AWAY.name]),
        # A worker may have a folder of its own.
        (replace(HERE, role="worker"), [HERE.name]),
        (None, ["a process that left no lease"]),
    ],
)
def test_a_checkpoint_is_elsewhere_only_where_another_machine_may_have_it(tmp_path, lease, names):
    trial = make_result(number=0)
    study = optuna.create_study()
    asked = {SPEC: text_of(trial.again(), "a")}
    study.add_trial(create_trial(value=1.0, user_attrs=asked))
    if lease is not None:
        study.set_user_attr(PREFIX + lease.id, dump_json(asdict(lease)))
    backend = SimpleNamespace(train_examples=100)
    prepared = SimpleNamespace(files=Output(tmp_path), backend=backend)
    lines = checkpoints_elsewhere(prepared, study, {"time": Winner(trial, 100.0)})
    assert [line.rpartition("but with ")[2] for line in lines] == names


@pytest.mark.parametrize(
    ("errors", "numbers"), [({0: "a", 1: "a"}, ["s 0 and 1"]), ({0: "a", 1: "b"}, [" 0", " 1"])]
)
def test_tests_that_fail_alike_are_one_line(tmp_path, errors, numbers):
    def fails(spec, folder):
        raise ValueError(errors[spec.number])

    backend = SimpleNamespace(test=fails)
    prepared = SimpleNamespace(files=Output(tmp_path), backend=backend)
    best = {
        "time": Winner(make_result(number=0), 100.0),
        "steps": Winner(make_result(number=1), 100.0),
    }
    missing = []
    assert metrics_of_winners(prepared, optuna.create_study(), best, missing) == {}
    assert [line.partition(" of trial")[2].partition(":")[0] for line in missing] == numbers


def test_a_trial_that_wins_by_time_and_by_steps_is_tested_once(tmp_path):
    tested = []

    def fails(spec, folder):
        tested.append(spec.number)
        raise ValueError("a")

    backend = SimpleNamespace(test=fails)
    prepared = SimpleNamespace(files=Output(tmp_path), backend=backend)
    winner = Winner(make_result(number=3), 100.0)
    missing = []
    best = {"time": winner, "steps": winner}
    assert metrics_of_winners(prepared, optuna.create_study(), best, missing) == {}
    assert tested == [3]
    assert [line.partition(" of ")[2].partition(":")[0] for line in missing] == ["trial 3"]
