"""What a user's code can do to a trial, in studies whose trials train in processes of their own."""

import multiprocessing
import os
import re
import shutil
import subprocess
import sys

import pytest
from toolbox import trials_of

from bstune.core.records import CUT_SHORT, TrialResult

DEEDS = """
import ctypes, multiprocessing, os, signal, sys, threading
from contextlib import suppress
from pathlib import Path
from bstune.workloads.classifier import Classifier


class Does(Classifier):
    def __init__(self, *arguments, deeds, **options):
        super().__init__(*arguments, **options)
        self.deed = "nothing"
        # The study writes it before its first trial, and after the first steps.
        in_search = any(Path("outputs").glob("*/config.yaml"))
        if in_search and multiprocessing.parent_process() is not None:
            with open("begun", "a") as begun:
                begun.write(".")
                self.deed = deeds[min(begun.tell(), len(deeds)) - 1]

    def configure_optimizers(self):
        if self.deed == "refuses its rate":
            raise ValueError("too large")
        return super().configure_optimizers()

    def training_step(self, batch, batch_idx):
        if batch_idx == 2:
            self.do()
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch, batch_idx):
        if self.deed == "never validates":
            threading.Event().wait()
        super().validation_step(batch, batch_idx)

    def do(self):
        match self.deed:
            case "raises":
                raise LookupError("no such layer")
            case "stops":
                next(iter(()))
            case "exits":
                sys.exit(3)
            case "exits at once":
                os._exit(0)
            case "reads where nothing is":
                ctypes.string_at(0)
            case "is killed":
                os.kill(os.getpid(), signal.SIGKILL)
            case "never ends":
                threading.Event().wait()
            case "forks":
                if os.fork() == 0:
                    threading.Event().wait()
                os.fork()  # a copy that trains on
            case "starts a thread":
                threading.Thread(target=threading.Event().wait).start()
            case "leaves the folder":
                os.chdir("/")
            case "fills the disk":
                with suppress(OSError), open("full/other", "ab", buffering=0) as other:
                    while other.write(bytes(512)):
                        pass
"""
IMPATIENT = """
from bstune.__main__ import command
from bstune.system import files
from bstune.study.storage import patience

files.WRITE_TRIES, patience.RETRY_SECONDS = 2, 1.0
command()
"""
# The start of a process is among these seconds.
TRIAL_SECONDS = 20.0
TOO_LONG = "took longer than protocol.trial_seconds=20"
FAILURES = {
    "exits at once": "its process ended with status 0",
    "raises": r"LookupError: no such layer \(deeds.py:\d+\)",
    "refuses its rate": r"ValueError: too large \(deeds.py:\d+\)",
    "stops": r"RuntimeError: StopIteration in training_step \(deeds.py:\d+\)",
    "exits": r"RuntimeError: sys.exit\(3\) was called \(deeds.py:\d+\)",
    "reads where nothing is": "its process was ended by SIGSEGV",
    "is killed": "its process was ended by the system, .*",
    "never ends": TOO_LONG,
    "never validates": TOO_LONG,
}
HARMLESS = ("nothing", "forks", "starts a thread", "leaves the folder")
OPTIONS = (
    "workload=digits",
    "mlflow.enabled=false",
    "device=cpu",
    "hardware.enabled=false",
    "sampler=random",
)
OPTIONS += (
    "search.replicates=0",
    "search.batch_size.low=32",
    "search.batch_size.high=64",
    "workload.target.value=0.3",
)
OPTIONS += ("budget={steps: 30, examples: 1}", "workload.module._target_=deeds.Does")


def does(*deeds):
    return f"+workload.module.deeds=[{','.join(deeds)}]"


@pytest.fixture
def deeds(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "deeds.py").write_text(DEEDS)
    yield
    sys.modules.pop("deeds", None)


@pytest.fixture
def command(tmp_path, deeds):
    """A function that starts the command in a process; its output ends with the last process that writes to it."""
    started = []

    def start(*arguments):
        line = [sys.executable, "-c", IMPATIENT, *OPTIONS, *arguments]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        process = subprocess.Popen(
            line, cwd=tmp_path, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}, **pipes
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


@pytest.mark.soak
def test_what_the_users_code_does_in_one_trial_is_that_trials_own_end(command, tmp_path):
    # Something harmless after each failure, as three in a row would end the study.
    order = [
        deed
        for pair in zip(FAILURES, [*HARMLESS, *HARMLESS, "nothing"], strict=True)
        for deed in pair
    ]
    study = command(does(*order), "search.trials=9", f"protocol.trial_seconds={TRIAL_SECONDS}")
    _, err = study.communicate(timeout=400)
    assert study.returncode == 0, err
    trials = trials_of(tmp_path / "outputs" / "digits")
    assert len(trials) == len(order)
    for deed, trial in zip(order, trials, strict=True):
        assert (trial.status == "failed") == (deed in FAILURES), (deed, trial)
        assert deed not in FAILURES or re.fullmatch(FAILURES[deed], trial.message), (deed, trial)


@pytest.mark.parametrize("deed", ["exits at once", pytest.param("raises", marks=pytest.mark.soak)])
def test_what_it_does_in_every_trial_ends_the_study(bstune, tmp_path, deeds, deed):
    status, _, err = bstune(*OPTIONS, does(deed), f"protocol.trial_seconds={TRIAL_SECONDS}")
    # 1 is for the user's own errors.
    assert status == (1 if "deeds.py" in FAILURES[deed] else 2), err
    plain = " ".join(err.split())
    assert re.search(
        f"error: the first 3 trials all failed, the last one with {FAILURES[deed]}", plain
    ), err
    assert "Traceback" not in err
    if "deeds.py" in FAILURES[deed]:
        assert re.search(rf"\n  {tmp_path}/deeds.py:\d+ in \w+: ", err)
    assert [trial.status for trial in trials_of(tmp_path / "outputs" / "digits")] == ["failed"] * 3
    assert multiprocessing.active_children() == []


# Three failures end a study, which the same command continues, in test_search.py too, in one process.
@pytest.mark.soak
def test_three_failures_in_a_row_end_it_and_the_same_command_continues(bstune, tmp_path, deeds):
    study = (
        *OPTIONS,
        does("nothing", "raises", "nothing", "raises", "raises", "raises", "nothing"),
        "search.trials=4",
    )
    status, _, err = bstune(*study)
    assert status == 1
    first, *frames, last = err.splitlines()
    assert re.fullmatch(
        r"error: the last 3 trials failed, the last one with LookupError: no such layer "
        r"\(deeds.py:\d+\)",
        first,
    )
    assert re.fullmatch(
        rf"  {tmp_path}/deeds.py:\d+ in do: raise LookupError\(.no such layer.\)", frames[-1]
    )
    assert (
        last == "the finished trials are stored: mend it, and the same command continues the study"
    )
    trials = trials_of(tmp_path / "outputs" / "digits")
    assert [trial.status == "failed" for trial in trials] == [0, 1, 0, 1, 1, 1]
    # The error is raised in the third batch.
    assert {trial.steps for trial in trials if trial.status == "failed"} == {2}
    # The last deed, nothing, holds for all trials that follow.
    assert bstune(*study)[::2] == (0, "")
    indices = {
        trial.trial_index
        for trial in trials_of(tmp_path / "outputs" / "digits")
        if trial.status != "failed"
    }
    assert indices == {0, 1, 2, 3}


@pytest.fixture
def small_disk(tmp_path):
    """A folder on a disk of its own."""
    folder = tmp_path / "full"
    folder.mkdir()
    mount = ("mount", "-t", "tmpfs", "-o", "size=1m", "none", folder)
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True).returncode != 0:
        pytest.skip("needs the right to mount a file system")
    yield folder
    subprocess.run(("umount", "-l", folder), check=True)


NEVER = "workload.target.value=0.0001"
# Ten classes begin at a loss of ln 10 = 2.3.
EASILY = "workload.target.value=2.1"


@pytest.mark.soak
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        # The checkpoint is the first file that does not fit.
        (
            (EASILY, "output=full/s"),
            r"\S+/full/s/\S+ cannot be written: No space left",
        ),
        # Here it is a state.
        (
            (NEVER, "output=full/s", "sampler=frontier"),
            r"\S+/full/s/\S+ cannot be written: No space left",
        ),
        (
            (NEVER, "output=full/s"),
            r"\S+/s/trials.jsonl cannot be written: No space left on device; tried 2 times",
        ),
        (
            (NEVER, "storage=sqlite:///full/s.db"),
            "the storage does not answer: .*(disk is full|disk I/O error)",
        ),
    ],
)
def test_a_full_disk_ends_the_study_in_a_line(command, tmp_path, small_disk, arguments, message):
    study = (does("nothing", "fills the disk", "nothing"), "search.trials=3", *arguments)
    process = command(*study)
    _, err = process.communicate(timeout=100)
    assert process.returncode == 2
    assert re.search(f"error: {message}", " ".join(err.split())), err
    assert "Traceback" not in err
    (small_disk / "other").unlink()
    files = small_disk / "s" if "output=full/s" in arguments else tmp_path / "outputs" / "digits"
    first, *_ = trials_of(files)
    again = command(*study)
    _, err = again.communicate(timeout=100)
    assert (again.returncode, err) == (0, "")
    trials = trials_of(files)
    assert trials[0] == first
    assert sorted(trial.trial_index for trial in trials if trial.message != CUT_SHORT) == [0, 1, 2]
    assert not list(tmp_path.rglob("*.partial"))


RAISES = """
    def training_step(self, batch, batch_idx):
        if batch_idx >= {first}:
            raise {error}
        return super().training_step(batch, batch_idx)
"""
ALONE = ("trial.batch_size=32", "trial.lr=0.001")


@pytest.mark.parametrize(
    ("error", "message", "arguments"),
    [
        ("LookupError('no such layer')", "LookupError: no such layer (deeds.py:", ()),
        ("LookupError('no such layer')", "LookupError: no such layer (deeds.py:", ALONE),
        ("SystemExit(3)", "RuntimeError: sys.exit(3) was called (deeds.py:", ()),
    ],
)
def test_what_cannot_be_trained_at_all_is_said_before_any_trial(
    bstune, tmp_path, deeds, error, message, arguments
):
    (tmp_path / "deeds.py").write_text(DEEDS + RAISES.format(first=0, error=error))
    status, _, err = bstune(*OPTIONS, does("nothing"), *arguments)
    assert status == 1
    assert f"error: the workload cannot be trained: {message}" in err
    assert f" in training_step: raise {error}\n" in err
    assert not (tmp_path / "outputs").exists()


def test_a_crash_before_any_trial_says_where(bstune, tmp_path, deeds):
    (tmp_path / "deeds.py").write_text(DEEDS + RAISES.format(first=0, error="ctypes.string_at(0)"))
    status, out, err = bstune(*OPTIONS, does("nothing"))
    assert status == 1
    # What the process printed as it ended.
    assert re.search(r"deeds.py\", line \d+ in training_step\n", out), out
    assert err == "error: the workload cannot be trained: its process was ended by SIGSEGV\n"


def test_a_trial_by_itself_that_fails_leaves_its_record(bstune, tmp_path, deeds):
    # Behind the steps that are tried before any trial.
    (tmp_path / "deeds.py").write_text(
        DEEDS + RAISES.format(first=20, error="LookupError('no such layer')")
    )
    status, _, err = bstune(*OPTIONS, does("nothing"), *ALONE)
    assert status == 1
    (record,) = tmp_path.rglob("trial.json")
    result = TrialResult.from_json(record.read_text())
    assert result.status == "failed"
    assert f"error: the trial failed with {result.message}\n  {tmp_path}/deeds.py:" in err
    assert f"record {record}" in err
