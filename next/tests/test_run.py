"""The public surface, in Python and on the command line: what comes of whole studies."""

import itertools
import json
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import matplotlib.pyplot
import optuna
import pytest
from refusals import cases, refused
from small import ARGUMENTS, Data, Model

import bstune
from bstune.__main__ import main
from bstune.core.errors import BstuneError

ROOT = Path(__file__).parents[1]


def tune(folder, module=Model, **changes):
    """A study in this process, in a folder of its own, without MLflow."""
    places = {"output": str(folder / "out"), "storage": f"sqlite:///{folder}/study.db"}
    # Rates far below those that diverge, so that whatever is found reaches it on each seed.
    own = {"workers": 0, "mlflow": {"uri": None}, "target": "val/loss <= 0.2", "lr": (0.005, 0.3)}
    options = {"data": Data()} | ARGUMENTS | own | places | changes
    return bstune.tune(module, options.pop("data"), **options)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """One finished study of the small project, and its folder."""
    folder = tmp_path_factory.mktemp("finished")
    return tune(folder, trials=8), folder


def test_a_study_is_answered(finished):
    result, _ = finished
    # Step times decide what is tried, so that the verdict is not the same each time.
    assert result.verdict in ("switch", "not yet")
    assert result.speedup.value == pytest.approx(result.baseline.seconds / result.best.seconds)
    assert (result.best.runs, result.baseline.runs, result.configurations) == (2, 2, 8)
    # New seeds are those of neither search nor baseline.
    new = {record.seed for record in result.records if record.role == "new seed"}
    assert len(new) == 2
    assert new.isdisjoint(one.seed for one in result.records if one.role != "new seed")


def test_the_folder_has_all_files(finished):
    result, folder = finished
    names = {path.name for path in (folder / "out").iterdir()}
    files = "curve.json trials.jsonl best.yaml curve.png report.html config.yaml hardware.json"
    assert set(files.split()) <= names
    assert not [name for name in names if name.endswith(".partial")]
    assert bstune.load(folder / "out").model_dump() == result.model_dump()


def test_the_same_call_adds_nothing_and_more_seeds_continue_a_study(finished, tmp_path):
    result, folder = finished
    # The same seed gives the same history.
    again = tune(tmp_path, trials=1, seeds=1).records[0]
    assert (again.seed, again.history) == (result.records[0].seed, result.records[0].history)
    assert tune(folder, trials=8).model_dump() == result.model_dump()
    with refused("target", BstuneError):
        tune(folder, target="val/loss <= 0.3")
    more = tune(folder, trials=8, seeds=3)
    assert (more.best.runs, more.records[: len(result.records)]) == (3, result.records)


@pytest.mark.filterwarnings("ignore::optuna.exceptions.ExperimentalWarning")
def test_optuna_shows_the_study(finished):
    _, folder = finished
    # Other tests go on with it.
    result = bstune.load(folder / "out")
    study = optuna.load_study(study_name="Model", storage=f"sqlite:///{folder}/study.db")
    frame = study.trials_dataframe()
    value = "value_seconds to val/loss <= 0.2"
    assert {"params_batch_size", "params_lr", value, "state"} <= set(frame.columns)
    assert len(frame) == len(result.records)
    for plot in ("plot_contour", "plot_intermediate_values"):
        getattr(optuna.visualization.matplotlib, plot)(study)
    matplotlib.pyplot.close("all")
    assert study.user_attrs["answer"]["best"]["lr"] == result.best.lr


def test_two_workers_train_at_once(tmp_path):
    result = tune(tmp_path, workers=2, trials=4, threads=None)
    assert result.threads == max(len(os.sched_getaffinity(0)) // 2, 1)
    study = optuna.load_study(study_name="Model", storage=f"sqlite:///{tmp_path}/study.db")
    pairs = list(itertools.pairwise(study.trials))
    assert any(later.datetime_start < one.datetime_complete for one, later in pairs)
    assert len({record.place for record in result.records}) == len(result.records)


def test_a_time_limit_is_kept_with_an_answer(tmp_path):
    began = time.monotonic()
    result = tune(tmp_path, wall_seconds=8, trials=1000)
    assert time.monotonic() - began < 18
    assert result.best is not None
    assert len(result.records) > 4
    phases = result.spent.phases
    assert phases.others > 0.0
    assert phases.total < time.monotonic() - began


class Locked(Data):
    """It cannot be sent to a worker."""

    def __init__(self):
        super().__init__()
        self.lock = threading.Lock()


@cases("""
changes | named
{trails: 3} | trials
{target: val/accuracy >= 0.9} | val/loss
{batch_size: [512, 1024], baseline: [512, 0.05]} | 256 examples
{data: LOCKED} | data
# Before a process each imports torch.
{devices: 64, workers: 1, baseline: [64, 0.1], batch_size: [64, 128]} | devices, 64
""")
def test_bad_arguments_are_one_line_and_write_nothing(tmp_path, changes, named):
    if "data" in changes:
        changes = {"data": Locked()}
    with refused(named, BstuneError):
        tune(tmp_path, **changes)
    assert not list(tmp_path.iterdir())


REPLAY = ["+workload=replay", "table=fashion_mlp", "trials=8", "seeds=1", "mlflow.uri=null"]


def places(folder):
    return [f"output={folder}/out", f"storage=sqlite:///{folder}/study.db"]


def test_the_command_line_answers_and_reports(tmp_path, capsys):
    assert main([*REPLAY, *places(tmp_path)]) == 0
    answer = capsys.readouterr().out
    assert main(["report", f"{tmp_path}/out"]) == 0
    assert capsys.readouterr().out in answer
    assert main(["report", f"{tmp_path}/out", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    loaded = bstune.load(tmp_path / "out")
    assert result["best"]["batch_size"] == loaded.best.batch_size
    # Trials are pruned and resumed, on the same seed and further on.
    by_number = {record.number: record for record in loaded.records}
    resumed = [record for record in loaded.records if record.resumed_from is not None]
    assert resumed
    for record in resumed:
        parent = by_number[record.resumed_from]
        assert (parent.status, parent.seed) == ("pruned", record.seed)
        assert record.steps > parent.steps


@pytest.mark.parametrize("sampler", ["tpe", "grid"])
def test_a_study_with_another_sampler_is_answered_and_goes_on(tmp_path, sampler):
    arguments = [*REPLAY, *places(tmp_path), f"sampler={sampler}", "objective=steps"]
    searched = []
    for trials in (4, 6):
        assert main([*arguments, f"trials={trials}"]) == 0
        result = bstune.load(tmp_path / "out")
        assert (result.reached, result.configurations) == (True, trials)
        of_search = [one for one in result.records if one.role == "search"]
        searched.append([(one.batch_size, one.lr, one.max_steps) for one in of_search])
    assert searched[1][: len(searched[0])] == searched[0]
    # A grid tells what it measured, at powers of two.
    sizes = {one.batch_size for one in result.measured}
    assert bool(sizes) == (sampler == "grid")
    assert sizes <= {8 * 2**power for power in range(10)}


@cases(
    """
command | named
+workload=digit {places} | digits
+workload=replay table=fashion_mlp trails=3 {places} | trials
reprot x | report
report | folder
survey | workload
survey +workload=replay table=fashion_mlp | recorded
""",
    str,
)
def test_a_bad_command_line_is_one_line_with_status_2(tmp_path, capsys, command, named):
    assert main(command.format(places=" ".join(places(tmp_path))).split()) == 2
    error = capsys.readouterr().err.strip()
    assert named in error
    assert "Traceback" not in error
    assert not list(tmp_path.iterdir())


OWN = """
target: val/loss <= 0.1
baseline: {batch_size: 16, lr: 0.05}
batch_size: {low: 2, high: 128}
budget: {steps: 500, examples: 20_000}
trials: 4
seeds: 2
threads: 1
device: cpu
survey: off
data: {_target_: small.Data}
module: {_target_: small.MODULE, lr: "${trial.lr}"}
"""


def own(folder, module="Model"):
    """A folder of configs with the small project as workload ``own``."""
    (folder / "conf" / "workload").mkdir(parents=True)
    (folder / "conf" / "workload" / "own.yaml").write_text(OWN.replace("MODULE", module))
    return ["--config-dir", str(folder / "conf"), "+workload=own"]


def test_a_project_in_yaml_is_surveyed_and_tuned_in_a_worker(tmp_path, monkeypatch, capsys):
    # matplotlib keeps its list of fonts.
    monkeypatch.setenv("MPLCONFIGDIR", matplotlib.get_cachedir())
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    arguments = [*own(tmp_path), *places(tmp_path), "budget.seconds=0.5"]
    arguments += ["data._target_=small.Guarded", "+data.api_token=hunter2hunter2"]
    arguments += ["+data.account={name: me, password: hunter2}"]
    mlflow = f"mlflow.uri=sqlite:///{tmp_path}/mlflow.db"
    assert main([*arguments, "survey=auto", mlflow]) == 0
    result = bstune.load(tmp_path / "out")
    printed = capsys.readouterr()
    assert f"batch size {result.best.batch_size}" in printed.out
    assert result.reached
    # A secret of the config is in no file, and not on the screen.
    assert "hunter2" not in printed.out + printed.err
    for path in tmp_path.rglob("*"):
        assert path.is_dir() or b"hunter2" not in path.read_bytes(), path
    assert (tmp_path / "mlflow.db").exists()
    assert (tmp_path / "out" / "roofline.png").exists()
    found = json.loads((tmp_path / "out" / "hardware.json").read_text())["survey"]
    assert (found["threads"], found["largest_fit"]) == (1, 128)
    assert {2, 16, 128} <= {timing["batch_size"] for timing in found["timings"]}
    # When the study goes on, its budget of seconds is as many steps as before.
    assert main([*arguments, "survey=refresh", "trials=5", "workers=0"]) == 0
    assert json.loads((tmp_path / "out" / "hardware.json").read_text())["survey"] == found


def test_one_run_of_a_configuration_shares_a_folder_with_a_study(tmp_path, capsys):
    arguments = [*own(tmp_path), *places(tmp_path), "workers=0", "mlflow.uri=null", "trials=1"]
    once = [*arguments, "trial.batch_size=32", "trial.lr=0.05"]
    assert main(once) == 0
    assert "reached" in capsys.readouterr().out
    (checkpoint,) = (tmp_path / "out").rglob("*.ckpt")
    assert checkpoint.stat().st_size > 0
    assert main(arguments) == 0
    assert main(once) == 0


@pytest.mark.parametrize("module, status", [("Raises", 1), ("Nosuch", 2)])
def test_user_code_that_fails_is_one_line(tmp_path, capfd, module, status):
    assert main([*own(tmp_path, module), *places(tmp_path), "workers=0"]) == status
    assert "Traceback" not in capfd.readouterr().err


def test_ctrl_c_ends_within_a_second_and_the_command_goes_on(tmp_path):
    options = [*own(tmp_path, "Sleeps"), *places(tmp_path), "budget.steps=20", "budget.examples=1"]
    paths = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    process = subprocess.Popen(
        [sys.executable, "-m", "bstune", *options], env=os.environ | {"PYTHONPATH": paths},
        stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    deadline = time.monotonic() + 60
    while not (tmp_path / "out/checkpoints").exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    time.sleep(1.0)
    process.send_signal(signal.SIGINT)
    began = time.monotonic()
    _, error = process.communicate(timeout=30)
    assert time.monotonic() - began < 3.0
    assert process.returncode == 130, error
    study = optuna.load_study(study_name="own", storage=f"sqlite:///{tmp_path}/study.db")
    assert all(trial.state.is_finished() for trial in study.trials)


def test_a_refused_study_leaves_its_folder_free(tmp_path, capsys):
    out = f"output={tmp_path}/out"
    assert main([*REPLAY, out, "storage=nosuch://x"]) == 2
    arguments = [out, f"storage=sqlite:///{tmp_path}/a.db", "device=cuda", "workers=0"]
    assert main([*own(tmp_path), *arguments]) == 2
    assert not (tmp_path / "out").exists()


def test_advised_commands_are_taken(tmp_path, capsys):
    short = ["budget.steps=20", "budget.examples=2000", "trials=4"]
    assert main([*REPLAY, *places(tmp_path), *short]) == 0
    result = bstune.load(tmp_path / "out")
    assert not result.reached
    # The same trials tell it.
    capsys.readouterr()
    assert main([*shlex.split(result.easier)[3:], "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["reached"]
    assert main([*shlex.split(result.next)[3:], "trials=3"]) == 0
    assert bstune.load(tmp_path / "out-2").study.endswith("-2")
