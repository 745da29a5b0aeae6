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
import torch
from small import ARGUMENTS, Data, Model, Sleeps

import bstune
from bstune.__main__ import main
from bstune.core.errors import BstuneError

ROOT = Path(__file__).parents[1]


def tune(folder, module=Model, **changes):
    """A study in this process, in a folder of its own, without MLflow."""
    places = {"output": str(folder / "out"), "storage": f"sqlite:///{folder}/study.db"}
    # One that each rate which is found reaches on each seed.
    own = {"workers": 0, "mlflow": {"uri": None}, "target": "val/loss <= 0.2"}
    options = ARGUMENTS | own | places | changes
    return bstune.tune(module, Data(), **options)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """One finished study of the small project, and its folder."""
    folder = tmp_path_factory.mktemp("finished")
    return tune(folder, trials=10), folder


def test_a_study_is_answered(finished):
    result, _ = finished
    # Step times decide what is tried, so that the verdict is not the same each time.
    assert result.verdict in ("switch", "not yet")
    assert result.reached
    assert result.speedup.value == pytest.approx(result.baseline.seconds / result.best.seconds)
    assert (result.best.runs, result.baseline.runs) == (2, 2)
    assert result.configurations == 10
    assert {record.role for record in result.records} == {"baseline", "search", "new seed"}


def test_new_seeds_are_those_of_neither_search_nor_baseline(finished):
    result, _ = finished
    of_role = {"new seed": set(), "search": set(), "baseline": set()}
    for record in result.records:
        of_role[record.role].add(record.seed)
    assert len(of_role["new seed"]) == 2
    assert not of_role["new seed"] & (of_role["search"] | of_role["baseline"])


def test_the_folder_has_all_files(finished):
    result, folder = finished
    names = {path.name for path in (folder / "out").iterdir()}
    files = "curve.json trials.jsonl best.yaml curve.png report.html config.yaml hardware.json"
    assert set(files.split()) <= names
    assert not [name for name in names if name.endswith(".partial")]
    assert bstune.load(folder / "out").model_dump() == result.model_dump()


def test_the_same_call_adds_nothing_and_more_seeds_continue_a_study(finished):
    result, folder = finished
    assert tune(folder, trials=10).model_dump() == result.model_dump()
    more = tune(folder, trials=10, seeds=3)
    assert more.best.runs == 3
    assert more.records[: len(result.records)] == result.records


def test_the_same_seed_gives_the_same_histories(finished, tmp_path):
    """But for step times, which decide what comes later: the baseline and the first trials."""
    again = tune(tmp_path, trials=1, seeds=1).records[0]
    first = finished[0].records[0]
    assert (again.seed, again.history) == (first.seed, first.history)


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
    plots = optuna.visualization.matplotlib
    for plot in (
        *(plots.plot_optimization_history, plots.plot_slice, plots.plot_contour),
        *(plots.plot_intermediate_values, plots.plot_param_importances),
    ):
        plot(study)
    matplotlib.pyplot.close("all")
    answer = study.user_attrs["answer"]
    assert (answer["verdict"], answer["best"]["lr"]) == (result.verdict, result.best.lr)
    # Where optuna-dashboard 0.21 looks for a study's note.
    noted = study._storage.get_study_system_attrs(study._study_id)["dashboard:note_str:0"]
    assert str(result) in noted


def test_two_workers_train_at_once(tmp_path):
    result = tune(tmp_path, workers=2, trials=6, threads=None, survey="off")
    assert result.threads == max(len(os.sched_getaffinity(0)) // 2, 1)
    study = optuna.load_study(study_name="Model", storage=f"sqlite:///{tmp_path}/study.db")
    pairs = list(itertools.pairwise(study.trials))
    assert any(later.datetime_start < one.datetime_complete for one, later in pairs)
    assert len({record.place for record in result.records}) == len(result.records)


def test_a_metric_that_is_not_logged_is_told_with_those_that_are(tmp_path):
    with pytest.raises(BstuneError, match="val/loss"):
        tune(tmp_path, target="val/accuracy >= 0.9")
    assert not list(tmp_path.iterdir())


def test_no_batch_size_that_the_data_allows_is_one_line(tmp_path):
    with pytest.raises(BstuneError, match="256 examples"):
        tune(tmp_path, batch_size=(512, 1024), baseline=(512, 0.05))


def test_a_time_limit_is_kept_with_an_answer(tmp_path):
    began = time.monotonic()
    result = tune(tmp_path, wall_seconds=15, trials=1000)
    assert time.monotonic() - began < 25
    assert result.best is not None
    assert len(result.records) > 4
    phases = result.spent.phases
    assert phases.others > 0.0
    assert phases.total < time.monotonic() - began


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"trails": 3}, "trials"),
        ({"objective": "metric"}, "objective"),
        ({"storage": "nosuch://x"}, "storage"),
        # Before a process each imports torch.
        (
            {"devices": 64, "workers": 1, "baseline": (64, 0.1), "batch_size": (64, 128)},
            "devices .* 64",
        ),
    ],
)
def test_bad_arguments_are_one_line_and_write_nothing(tmp_path, changes, named):
    with pytest.raises(BstuneError, match=named) as error:
        tune(tmp_path, **changes)
    assert "\n" not in str(error.value)
    assert not list(tmp_path.glob("*.db"))


def test_another_studys_settings_are_refused(finished):
    _, folder = finished
    before = sorted(path.name for path in folder.rglob("*"))
    # That is told before anything is asked of the worker.
    with pytest.raises(BstuneError, match="target"):
        tune(folder, target="val/loss <= 0.3", device="cuda")
    assert sorted(path.name for path in folder.rglob("*")) == before


REPLAY = ["+workload=replay", "table=fashion_mlp", "trials=16", "mlflow.uri=null"]


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


@pytest.mark.parametrize(
    ("sampler", "options"),
    [
        ("tpe", []),
        ("grid", ["objective=steps"]),
        ("random", ["objective=metric", "target=min val/error", "budget.steps=400"]),
    ],
)
def test_a_study_with_another_sampler_is_answered_and_goes_on(tmp_path, sampler, options):
    arguments = [*REPLAY, *places(tmp_path), *options, f"sampler={sampler}", "seeds=1"]
    searched = []
    for trials in (4, 6):
        assert main([*arguments, f"trials={trials}"]) == 0
        result = bstune.load(tmp_path / "out")
        assert (result.reached, result.configurations) == (True, trials)
        assert result.verdict in ("switch", "keep", "not yet")
        of_search = [one for one in result.records if one.role == "search"]
        searched.append([(one.batch_size, one.lr, one.max_steps) for one in of_search])
    assert searched[1][: len(searched[0])] == searched[0]
    tried = [8 * 2**power for power in range(10)] if sampler == "grid" else []
    assert {one.batch_size for one in result.measured} <= set(tried)
    assert bool(result.measured) == (sampler == "grid")


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["+workload=digit"], "digits"),
        ([*REPLAY, "trails=3"], "trials"),
        (["reprot", "x"], "report"),
        (["report"], "folder"),
        (["compare"], "later"),
        (["survey"], "workload"),
        (["survey", *REPLAY], "recorded"),
        (["--config-dir", "/nosuch", "+workload=digits"], "/nosuch"),
    ],
)
def test_a_bad_command_line_is_one_line_with_status_2(tmp_path, capsys, arguments, named):
    if any("workload" in argument for argument in arguments):
        arguments = [*arguments, *places(tmp_path)]
    assert main(arguments) == 2
    error = capsys.readouterr().err.strip()
    assert named in error
    assert "Traceback" not in error
    assert not list(tmp_path.iterdir())


def start(folder, *options):
    """The command line in a process of its own; at most ten tests do that."""
    command = [sys.executable, "-m", "bstune", *options, *places(folder)]
    paths = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    return subprocess.Popen(
        command, cwd=folder, env={**os.environ, "PYTHONPATH": paths},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip


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


def test_a_project_in_yaml_is_surveyed_and_tuned_in_a_worker(tmp_path, monkeypatch):
    # matplotlib keeps its list of fonts.
    monkeypatch.setenv("MPLCONFIGDIR", matplotlib.get_cachedir())
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    arguments = [*own(tmp_path), "survey=auto", "budget.seconds=0.5"]
    process = start(tmp_path, *arguments, f"mlflow.uri=sqlite:///{tmp_path}/mlflow.db")
    out, error = process.communicate(timeout=110)
    assert process.returncode == 0, error
    result = bstune.load(tmp_path / "out")
    assert f"batch size {result.best.batch_size}" in out
    assert result.reached
    assert (tmp_path / "mlflow.db").exists()
    assert (tmp_path / "out" / "roofline.png").exists()
    found = json.loads((tmp_path / "out" / "hardware.json").read_text())["survey"]
    assert (found["threads"], found["largest_fit"]) == (1, 128)
    assert {2, 16, 128} <= {timing["batch_size"] for timing in found["timings"]}
    # When the study goes on, its budget of seconds is as many steps as before.
    process = start(tmp_path, *arguments, "survey=refresh", "trials=5")
    _, error = process.communicate(timeout=110)
    assert process.returncode == 0, error
    assert json.loads((tmp_path / "out" / "hardware.json").read_text())["survey"] == found


def test_one_run_of_a_configuration(tmp_path):
    process = start(tmp_path, *own(tmp_path), "trial.batch_size=32", "trial.lr=0.05")
    out, error = process.communicate(timeout=110)
    assert process.returncode == 0, error
    assert "reached" in out
    (checkpoint,) = (tmp_path / "out").rglob("*.ckpt")
    assert checkpoint.stat().st_size > 0


def test_a_secret_of_the_config_is_in_no_file(tmp_path, capsys):
    arguments = [*own(tmp_path), "data._target_=small.Guarded", "+data.api_token=hunter2hunter2"]
    settings = ["workers=0", "trials=1", f"mlflow.uri=sqlite:///{tmp_path}/mlflow.db"]
    assert main([*arguments, *settings, *places(tmp_path)]) == 0
    for path in tmp_path.rglob("*"):
        assert path.is_dir() or b"hunter2" not in path.read_bytes(), path
    printed = capsys.readouterr()
    assert "hunter2" not in printed.err


@pytest.mark.parametrize(("module", "status"), [("Raises", 1), ("Nosuch", 2)])
def test_user_code_that_fails_is_one_line(tmp_path, module, status):
    process = start(tmp_path, *own(tmp_path, module))
    _, error = process.communicate(timeout=110)
    assert process.returncode == status, error
    assert "Traceback" not in error


def test_ctrl_c_ends_within_a_second_and_the_command_goes_on(tmp_path):
    arguments = own(tmp_path, "Sleeps")
    process = start(tmp_path, *arguments, "trials=2", "budget.steps=20", "budget.examples=1")
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
    assert Sleeps is not None


def test_one_run_and_a_study_share_a_folder(tmp_path, capsys):
    once = [*REPLAY, *places(tmp_path), "trial.batch_size=64", "trial.lr=0.1"]
    assert main(once) == 0
    assert main([*REPLAY, *places(tmp_path)]) == 0
    assert main(once) == 0


def test_a_refused_study_leaves_its_folder_free(tmp_path, capsys):
    out = f"output={tmp_path}/out"
    assert main([*REPLAY, out, "storage=nosuch://x"]) == 2
    assert main([*own(tmp_path), out, f"storage=sqlite:///{tmp_path}/a.db", "device=cuda"]) == 2
    assert not (tmp_path / "out").exists()
    assert main([*REPLAY, *places(tmp_path)]) == 0


def test_data_that_cannot_be_sent_is_one_line(tmp_path):
    data = Data()
    data.lock = threading.Lock()
    places = {"output": str(tmp_path / "out"), "storage": f"sqlite:///{tmp_path}/study.db"}
    with pytest.raises(BstuneError, match="data"):
        bstune.tune(Model, data, **ARGUMENTS, **places, workers=0, mlflow={"uri": None})


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


class Anneals(Model):
    """Its rate falls to zero over what the Trainer says is its length."""

    ends = []

    def configure_optimizers(self):
        length = self.trainer.estimated_stepping_batches
        optimizer = torch.optim.SGD(self.parameters(), lr=self.lr)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / length)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]

    def on_train_end(self):
        share_left = self.trainer.optimizers[0].param_groups[0]["lr"] / self.lr
        self.ends.append((self.trainer.max_steps, self.trainer.global_step, share_left))


def test_schedules_end_where_the_study_chose(tmp_path):
    Anneals.ends.clear()
    result = tune(tmp_path, Anneals, trials=8, schedule_ends=True)
    records = result.records
    # The preflight trains before them.
    ends = Anneals.ends[-len(records) :]
    for record, (length, steps, share_left) in zip(records, ends, strict=True):
        assert (record.schedule_steps, record.steps) == (length, steps)
        assert share_left == pytest.approx(1 - steps / length)
    assert records[0].schedule_steps == 1250
    assert len({record.schedule_steps for record in records}) > 4
    assert all(record.resumed_from is None for record in result.records)
    assert result.best.schedule_steps is not None
