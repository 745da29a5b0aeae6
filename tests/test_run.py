"""The public surface, in Python and on the command line: what comes of whole studies."""

import io
import itertools
import json
import math
import os
import shlex
import shutil
import signal
import threading
import time
from contextlib import redirect_stdout

import matplotlib.pyplot
import optuna
import pytest
import yaml
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from processes import started
from refusals import cases, refused, text_cases
from small import ARGUMENTS, EXAMPLES, Counts, Data, Model, WithTest

import bstune
from bstune.__main__ import main
from bstune.core.errors import BstuneError


def tune(folder, module=Model, **changes):
    """A study in this process, in a folder of its own, without MLflow."""
    places = {"output": str(folder / "out"), "storage": f"sqlite:///{folder}/study.db"}
    # Rates far below those that diverge, so that whatever is found reaches it on each seed.
    own = {"workers": 0, "mlflow": {"uri": None}, "target": "val/loss <= 0.2", "lr": (0.005, 0.3)}
    options = {"data": Data()} | ARGUMENTS | own | places | changes
    return bstune.tune(module, options.pop("data"), **options)


TRAINER = {"enable_progress_bar": False, "enable_model_summary": False}
COUNTS = {"module": Counts, "data": WithTest(), "trainer": TRAINER}


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """One finished study of the small project, and its folder."""
    folder = tmp_path_factory.mktemp("finished")
    return tune(folder, **COUNTS), folder


def test_a_study_is_answered_and_its_folder_has_all_files(finished):
    result, folder = finished
    # Step times decide what is tried, so that the verdict is not the same each time.
    assert result.verdict in ("switch", "not yet")
    assert result.speedup.value == pytest.approx(result.baseline.seconds / result.best.seconds)
    assert (result.best.runs, result.baseline.runs, result.configurations) == (2, 2, 6)
    names = {path.name for path in (folder / "out").iterdir()}
    files = "curve.json trials.jsonl best.yaml curve.png report.html config.yaml hardware.json"
    assert set(files.split()) <= names
    assert not [name for name in names if name.endswith(".partial")]
    assert bstune.load(folder / "out").model_dump() == result.model_dump()


def test_more_seeds_continue_a_study_and_another_target_does_not(finished):
    result, folder = finished
    with refused("target", BstuneError):
        tune(folder, **COUNTS, target="val/loss <= 0.3")
    more = tune(folder, **COUNTS, seeds=3)
    assert (more.best.runs, more.records[: len(result.records)]) == (3, result.records)


@pytest.mark.filterwarnings("ignore::optuna.exceptions.ExperimentalWarning")
def test_optuna_shows_the_study(finished):
    _, folder = finished
    # Other tests go on with it.
    result = bstune.load(folder / "out")
    study = optuna.load_study(study_name="Counts", storage=f"sqlite:///{folder}/study.db")
    frame = study.trials_dataframe()
    value = "value_seconds to val/loss <= 0.2"
    assert {"params_batch_size", "params_lr", value, "state"} <= set(frame.columns)
    assert len(frame) == len(result.records)
    for plot in ("plot_contour", "plot_intermediate_values"):
        getattr(optuna.visualization.matplotlib, plot)(study)
    matplotlib.pyplot.close("all")
    assert study.user_attrs["answer"]["best"]["lr"] == result.best.lr


# Lightning advises on the loggers and loaders of the user's own training.
@pytest.mark.filterwarnings("ignore")
def test_a_studys_best_is_trained_with_the_users_callbacks(finished, tmp_path):
    result, folder = finished
    checkpoint, logger = ModelCheckpoint(monitor="val/loss"), CSVLogger(tmp_path / "logs")
    if result.verdict == "switch":
        assert result.train_command == "result.train()"
    for one in (result, result.at("val/loss <= 0.4")):
        Counts.calls.clear()
        module, trainer = one.train(callbacks=checkpoint, logger=logger)
        assert Counts.calls == [one.best.batch_size] * math.ceil(one.best.steps)
        assert module.lr == one.best.lr
        assert one.parameters and one.examples == EXAMPLES
    assert trainer.logger is logger
    assert str(tmp_path / "logs") in checkpoint.best_model_path
    with refused("bstune.tune"):
        bstune.load(folder / "out").train()


@pytest.mark.slow
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


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """A finished study of recorded runs, and what its command printed."""
    folder, printed = tmp_path_factory.mktemp("recorded"), io.StringIO()
    with redirect_stdout(printed):
        assert main([*REPLAY, *places(folder)]) == 0
    return bstune.load(folder / "out"), printed.getvalue()


def printed_json(capsys, *arguments):
    capsys.readouterr()
    assert main([*arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def dumped(result, *left_out):
    return result.model_dump(mode="json", exclude=left_out)


def test_the_command_line_answers_and_reports(recorded, capsys):
    study, answer = recorded
    assert main(["report", str(study.folder)]) == 0
    assert capsys.readouterr().out in answer
    assert printed_json(capsys, "report", str(study.folder)) == dumped(study)
    assert any(record.resumed_from is not None for record in study.records)


def test_a_folder_answers_for_another_target_and_budget(recorded, capsys):
    study, _ = recorded
    before = {path: path.read_bytes() for path in study.folder.iterdir() if path.is_file()}
    easier = study.at("val/error <= 0.2")
    assert (str(easier.target), easier.ran_for) == ("val/error <= 0.2", "val/error <= 0.14")
    assert easier.best.seconds < study.best.seconds
    assert "'target=val/error <= 0.2'" in (easier.train_command or easier.next)
    assert printed_json(capsys, "report", str(study.folder), "target=0.2") == dumped(easier)
    metric = study.at(budget={"steps": 20})
    assert (str(metric.target), metric.best.metric is None) == ("min val/error", False)
    assert main(["report", str(study.folder), "target=val/error <= 0.01"]) == 2
    assert len(capsys.readouterr().err.strip().splitlines()) == 1
    assert {path: path.read_bytes() for path in before} == before


def test_a_study_that_runs_is_answered_and_its_own_target_has_its_own_answer(
    recorded, tmp_path, capsys
):
    study, _ = recorded
    assert dumped(study.at("val/error <= 0.14")) == dumped(study)
    runs = shutil.copytree(study.folder, tmp_path / "out")
    (runs / "curve.json").unlink()
    so_far = printed_json(capsys, "report", str(runs))
    del so_far["spent"]
    assert so_far == dumped(study, "spent")


def test_advised_commands_are_taken(tmp_path, capsys):
    short = ["sampler=tpe", "budget.steps=20", "budget.examples=2000", "trials=4"]
    assert main([*REPLAY, *places(tmp_path), *short]) == 0
    result = bstune.load(tmp_path / "out")
    assert not result.reached
    # The same trials tell it.
    assert printed_json(capsys, *shlex.split(result.easier)[3:])["reached"]
    assert main([*shlex.split(result.next)[3:], "--cfg", "job"]) == 0
    told = yaml.safe_load(capsys.readouterr().out)
    assert (told["output"], told["study"][-2:]) == (f"{tmp_path}/out-2", "-2")


def test_several_studies_whichever_fails(tmp_path, capsys):
    """Each has a name and a folder of its own; the one that does not fail is of a grid."""
    command = ["-m", *REPLAY, "table=nosuch,fashion_mlp", f"output={tmp_path}"]
    grid = ["sampler=grid", "objective=steps", "trials=6"]
    assert main([*command, *grid, f"storage=sqlite:///{tmp_path}/study.db"]) == 2
    (folder,) = (path for path in tmp_path.iterdir() if path.is_dir())
    result = bstune.load(folder)
    assert result.study == folder.name == "replay-fashion_mlp"
    # It tells what it measured, at powers of two.
    assert (result.reached, result.configurations) == (True, 6)
    assert set() < {one.batch_size for one in result.measured} <= {8 * 2**k for k in range(10)}
    for wrong in (["-m", "+workload=digits", "seed=0"], ["report", "-m", str(tmp_path)]):
        assert main(wrong) == 2
    assert capsys.readouterr().err.count("-m ") >= 2


@text_cases("""
command | named
+workload=digit {places} | digits
+workload=replay table=fashion_mlp trails=3 {places} | trials
+workload=replay table=fashion_mlp output={folder}/out storage=nosuch://x | nosuch
+workload=digits {places} device=cuda workers=0 | cuda
reprot x | report
report | folder
survey | workload
survey +workload=replay table=fashion_mlp | recorded
""")
def test_a_bad_command_line_is_one_line_with_status_2(tmp_path, capsys, command, named):
    command = command.format(places=" ".join(places(tmp_path)), folder=tmp_path)
    assert main(command.split()) == 2
    error = capsys.readouterr().err.strip()
    assert named in error
    assert "Traceback" not in error
    assert not (tmp_path / "out").exists()


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


@pytest.mark.slow
def test_a_project_in_yaml_is_surveyed_and_tuned_in_two_workers(own_surveys, tmp_path, capsys):
    arguments = [*own(tmp_path), *places(tmp_path), "budget.seconds=0.5"]
    arguments += ["data._target_=small.Guarded", "+data.api_token=hunter2hunter2"]
    arguments += ["+data.account={name: me, password: hunter2}"]
    at_once = ["workers=2", "threads=null", f"mlflow.uri=sqlite:///{tmp_path}/mlflow.db"]
    assert main([*arguments, "survey=auto", *at_once]) == 0
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
    # The cores are shared.
    threads = max(len(os.sched_getaffinity(0)) // 2, 1)
    assert yaml.safe_load((tmp_path / "out" / "config.yaml").read_text())["threads"] == threads
    assert (result.threads, found["threads"], found["largest_fit"]) == (threads, threads, 128)
    assert {2, 16, 128} <= {timing["batch_size"] for timing in found["timings"]}
    # The workers train at once, and nothing twice.
    study = optuna.load_study(study_name="own", storage=f"sqlite:///{tmp_path}/study.db")
    pairs = list(itertools.pairwise(study.trials))
    assert any(later.datetime_start < one.datetime_complete for one, later in pairs)
    assert len({record.place for record in result.records}) == len(result.records)
    # The same command adds nothing, and its budget of seconds is as many steps as before.
    again = ["survey=refresh", "workers=0", f"threads={threads}", "mlflow.uri=null"]
    assert main([*arguments, *again]) == 0
    assert bstune.load(tmp_path / "out").records == result.records
    assert json.loads((tmp_path / "out" / "hardware.json").read_text())["survey"] == found


@pytest.mark.parametrize("module, status", [("Raises", 1), ("Nosuch", 2)])
def test_user_code_that_fails_is_one_line(tmp_path, capfd, module, status):
    assert main([*own(tmp_path, module), *places(tmp_path), "workers=0"]) == status
    assert "Traceback" not in capfd.readouterr().err


def test_ctrl_c_ends_within_a_second_and_the_command_goes_on(tmp_path):
    options = [*own(tmp_path, "Sleeps"), *places(tmp_path), "budget.steps=20", "budget.examples=1"]
    process = started(tmp_path / "log.txt", main, options)
    deadline = time.monotonic() + 60
    while not (tmp_path / "out/checkpoints").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    # The first trial sleeps for 30 s.
    time.sleep(2.0)
    os.kill(process.pid, signal.SIGINT)
    began = time.monotonic()
    process.join(30)
    assert time.monotonic() - began < 3.0
    assert process.exitcode == 130, (tmp_path / "log.txt").read_text()
    study = optuna.load_study(study_name="own", storage=f"sqlite:///{tmp_path}/study.db")
    assert all(trial.state.is_finished() for trial in study.trials)
