"""Trials side by side: the processes that train them, and studies that are searched with them."""

import importlib
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import threading
import time
from functools import partial

import pytest
import torch
from builders import prepared_study
from toolbox import make_result, make_spec, make_survey, numbers, statuses, trials_of
from torch._utils import ExceptionWrapper

from bstune.core.errors import ConfigError
from bstune.core.records import TrialSpec
from bstune.study.searching.early_end import first_trials
from bstune.system.failures import described
from bstune.system.files import Output
from bstune.trial.processes.fork_server import _ignoring_ctrl_c
from bstune.trial.processes.reached import Reached, forget, tell_evaluation, told_here
from bstune.trial.processes.workers import InProcess, Workers

# What the processes import: nothing that takes long. What is asked of a trial is its batch size.
TOY = """
import os, signal, sys, threading
from dataclasses import replace
from bstune.core.errors import ConfigError
from bstune.trial.processes.reached import tell_evaluation, tell_steps


class Odd(Exception):
    def __init__(self, one, other):
        super().__init__(f"{one} and {other}")


def open_train(record):
    opened = os.getpid()

    def train(spec, output, parent):
        match spec.batch_size:
            case 1:
                raise LookupError("no such thing")
            case 2:
                raise Odd("this", "that")
            case 3:
                os._exit(7)
            case 4:
                os.kill(os.getpid(), signal.SIGKILL)
            case 5:
                sys.exit(1)
            case 6:
                os.kill(os.getpid(), signal.SIGINT)
            case 7:
                threading.Event().wait()
            case 8:
                tell_steps(57)
                tell_evaluation(50, 0.25)
                (output.root / "here").touch()
                while not (output.root / "go").exists():
                    threading.Event().wait(0.01)
            case 9:
                raise ConfigError("no such option")
            case 10:
                os.kill(os.getpid(), signal.SIGSEGV)
        return replace(record, device=str(opened), message=parent and parent.message, **spec.trial_fields())

    return train
"""

KILLED = """
import os, toy
from functools import partial
from pathlib import Path
from bstune.system.files import Output
from bstune.core.records import TrialSpec
from bstune.trial.processes.workers import Workers

if __name__ == "__main__":
    Workers(partial(toy.open_train, None), 2).start(TrialSpec(1, 1, 8, 0.1, 0.0, 3), Output(Path()), None)
    while not Path("here").exists():
        pass
    os.kill(os.getpid(), 9)
"""


@pytest.fixture
def write_module(tmp_path, monkeypatch):
    """A function that writes and imports a module for the processes; no process is left at the end."""
    before = set(multiprocessing.active_children())
    names = []
    monkeypatch.syspath_prepend(str(tmp_path))

    def write(name, text):
        (tmp_path / f"{name}.py").write_text(text)
        names.append(name)
        return importlib.import_module(name)

    yield write
    for name in names:
        del sys.modules[name]
    # No process outlives its test.
    assert set(multiprocessing.active_children()) == before


@pytest.fixture
def toy_train(write_module):
    return partial(write_module("toy", TOY).open_train, make_result())


def spec(batch_size, number=0):
    return make_spec(batch_size, number=number, trial_index=number)


def test_how_far_a_trial_is_is_known_while_it_trains(toy_train, tmp_path):
    output = Output(tmp_path)
    with Workers(toy_train, 1) as workers:
        assert workers.reached(1) == Reached()
        workers.start(spec(8, 1), output, None)
        while not (tmp_path / "here").exists():
            time.sleep(0.01)
        assert workers.reached(1) == Reached(57, (50, 0.25))
        assert workers.reached(2) == Reached()
        (tmp_path / "go").touch()
        workers.wait()
        # The process has another trial, which has told nothing.
        workers.start(spec(64, 3), output, None)
        assert workers.reached(3) == Reached()
        workers.wait()


def test_a_trial_in_this_process_tells_how_far_it_is(tmp_path):
    def train(spec, output, parent):
        # Nothing is left of what another trial has told.
        assert told_here() == Reached()
        tell_evaluation(9, None)
        return make_result()

    forget()
    tell_evaluation(50, 0.5)
    runner = InProcess(train)
    runner.start(spec(8), Output(tmp_path), None)
    runner.wait().result()
    assert runner.reached(0) == Reached(evaluation=(9, None))


def test_records_and_errors_come_back(toy_train, tmp_path):
    output = Output(tmp_path)
    with Workers(toy_train, 2) as workers:
        assert workers.free
        workers.start(spec(8, 1), output, None)
        workers.start(spec(64, 2), output, make_result(message="of the parent"))
        assert not workers.free
        assert numbers(workers.running) == [1, 2]
        # The other one waits for "go".
        second = workers.wait()
        assert (second.spec.number, second.result().message) == (2, "of the parent")
        (tmp_path / "go").touch()
        first = workers.wait()
        assert (first.spec.number, first.error) == (1, None)
        devices = {first.result().device, second.result().device}
        # The device in this record is the process's number.
        assert len(devices) == 2, "they were two processes"
        for batch_size, message in (
            (1, "LookupError: no such thing"),
            (2, "Odd: this and that"),
            (5, "SystemExit: 1"),
        ):
            workers.start(spec(batch_size), output, None)
            finished = workers.wait()
            (file, line) = re.fullmatch(
                rf"{message} \((toy.py):(\d+)\)", finished.result().message
            ).groups()
            assert finished.result().status == "failed"
            assert finished.frames.startswith(f"  {tmp_path / file}:{line} in train: ")
            assert finished.frames.count("\n") == 1, "no frames of bstune's"
        # An error of bstune's own ends the study.
        workers.start(spec(9), output, None)
        with pytest.raises(ConfigError, match="no such option"):
            workers.wait().result()
        # An interruption is none of the worker's business.
        workers.start(spec(6), output, None)
        opened = workers.wait().result().device
        assert opened not in devices, "a process is not used again after an error"
        workers.start(spec(64), output, None)
        assert workers.wait().result().device == opened, (
            "but otherwise it is, and opens what trains once"
        )
        # what went well comes first
        workers.start(spec(9, 1), output, None)
        workers.start(spec(64, 2), output, None)
        # Both have ended before anyone looks.
        for worker in workers._running:
            worker.connection.poll(None)
        assert [finished.spec.number for finished in workers.poll()] == [2, 1]
    with Workers(toy_train, 1, trials=2) as workers:
        opened = []
        for _ in range(5):
            workers.start(spec(64), output, None)
            opened.append(workers.wait().result().device)
        # A process is replaced after two trials.
        assert opened[0] == opened[1] != opened[2] == opened[3] != opened[4]
    # What opens the training may fail, too.
    with Workers(partial(int, "nothing to open"), 1) as workers:
        workers.start(spec(64), output, None)
        assert workers.wait().result().message.startswith("ValueError: invalid literal for int()")


def test_an_error_in_a_loaders_process_is_named():
    def errs():
        raise LookupError("no such file")

    try:
        errs()
    except LookupError:
        sent = ExceptionWrapper(where="in DataLoader worker process 0")
    with pytest.raises(
        LookupError, match="Caught LookupError in DataLoader worker process 0"
    ) as error:
        sent.reraise()
    message, frames = described(error.value)
    assert message == "LookupError: no such file"
    assert "test_workers.py" in frames


def test_a_process_that_dies_takes_its_own_trial_along_and_no_other(toy_train, tmp_path):
    output = Output(tmp_path)
    with Workers(toy_train, 2) as workers:
        workers.start(spec(8, 1), output, None)
        reasons = {
            3: "status 7",
            # An exit with a status of its own, the kernel's kill, and a crash in C code.
            4: "by the system, as it does when memory runs out: lower ",
            10: "by SIGSEGV",
        }
        for size, reason in reasons.items():
            workers.start(spec(size, 2), output, None)
            died = workers.wait()
            assert (died.spec.number, died.result().status) == (2, "failed")
            assert reason in died.result().message
        workers.start(spec(64, 3), output, None)
        assert workers.wait().result().number == 3
        (tmp_path / "go").touch()
        assert workers.wait().result().number == 1
        # They have nothing to do meanwhile.
        for process in multiprocessing.active_children():
            process.kill()
            process.join()
        workers.start(spec(64, 4), output, None)
        assert workers.wait().result().number == 4


@pytest.mark.parametrize(
    ("number", "error"),
    [(signal.SIGTERM, SystemExit(128 + signal.SIGTERM)), (signal.SIGINT, KeyboardInterrupt())],
)
def test_a_signal_ends_the_processes_where_nothing_is_cut(toy_train, tmp_path, number, error):
    before = signal.getsignal(number)

    def terminated():
        with Workers(toy_train, 2) as workers:
            workers.start(spec(7, 1), Output(tmp_path), None)
            workers.start(spec(64, 2), Output(tmp_path), None)
            assert workers.wait().spec.number == 2
            assert list(workers.poll()) == []
            os.kill(os.getpid(), number)
            # The signal is held back where a process is being started or ended.
            assert workers.running, "not here"
            workers.wait()

    with pytest.raises(type(error)) as raised:
        terminated()
    assert raised.value.args == error.args
    assert signal.getsignal(number) is before


@pytest.mark.parametrize("comes_after", [False, True])
def test_a_trial_that_a_signal_to_all_processes_ended_has_not_failed(
    comes_after, toy_train, tmp_path, monkeypatch
):
    def signalled():
        with Workers(toy_train, 1) as workers:
            workers.start(spec(7, 1), Output(tmp_path), None)
            take = workers._take_finished

            def die_first(seconds):
                if not comes_after:
                    os.kill(os.getpid(), signal.SIGTERM)
                for process in multiprocessing.active_children():
                    process.kill()
                    process.join()
                take(seconds)
                if comes_after:
                    threading.Timer(0.01, os.kill, (os.getpid(), signal.SIGTERM)).start()

            monkeypatch.setattr(workers, "_take_finished", die_first)
            workers.wait()

    monkeypatch.setattr("bstune.trial.processes.workers.SIGNAL_SECONDS", 60.0)
    with pytest.raises(SystemExit) as raised:
        signalled()
    assert raised.value.args == (128 + signal.SIGTERM,)


# test_fork_server.py has a command that is killed, whose processes end likewise.
@pytest.mark.soak
def test_a_process_ends_with_the_one_that_started_it(toy_train, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(KILLED)
    # Its output ends when the last process that writes to it does.
    run = subprocess.run(
        # subprocess waits for the end of the output: a process that stays would hold it open.
        [sys.executable, str(script)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert run.returncode == -9
    # Python's own words on what a killed process leaves are fine.
    assert "Error" not in run.stderr


@pytest.mark.parametrize(
    ("trial_indices", "whole"),
    # Index 4 is missing, then 8: precision is looked at after every fourth.
    [((), 0), ((3, 1, 0, 2), 4), ((0, 1, 2, 3, 5, 6, 7, 8), 4), ((0, 1, 2, 3, 4, 5, 6, 7, 9), 8)],
)
def test_the_precision_is_checked_where_all_earlier_trials_are_done(trial_indices, whole):
    trials = []
    for number, index in enumerate(trial_indices):
        trials.append(make_result(number=number, trial_index=index))
    assert sorted(trial.trial_index for trial in first_trials(trials)) == list(range(whole))


def check_indices(trials, points):
    """Each index has one trial that was not cut short, and no two trials go on from the same one."""
    searched = []
    continued = []
    for trial in trials:
        if trial.replicate_of is None and trial.status != "failed":
            searched.append(trial)
            if trial.resumed_from is not None:
                continued.append(trial.resumed_from)
    # All indices from 0, each once.
    assert sorted(trial.trial_index for trial in searched) == list(range(len(searched)))
    assert len(searched) - len(continued) == points
    assert len(set(continued)) == len(continued)
    return searched


# Training.

MLFLOW = "mlflow.enabled=false"
DIGITS = (
    "workload=digits",
    MLFLOW,
    "search.batch_size.low=32",
    "search.batch_size.high=512",
    "device=cpu",
)
DIGITS += ("hardware.enabled=true",)

TRAINED = """
import os
from pathlib import Path
from bstune.workloads.classifier import Classifier


class Dies(Classifier):
    def training_step(self, batch, batch_idx):
        # The study writes it before its first trial.
        in_search = Path("outputs/digits/config.yaml").exists()
        if in_search and not Path("once").exists():
            Path("once").touch()
            os._exit(5)
        return super().training_step(batch, batch_idx)
"""


def surveyed(sizes=(32, 128, 512)):
    """A survey's outcome: steps of 1 ms and 10 microseconds an example."""
    return make_survey([(size, 1e-3 + 1e-5 * size) for size in sizes], high=sizes[-1])


@pytest.mark.slow
def test_trials_train_side_by_side(bstune, tmp_path, monkeypatch, write_module, caplog):
    """One of the processes dies on the way."""
    write_module("trained", TRAINED)
    monkeypatch.setattr("bstune.hardware.survey_cache.cached", lambda *_: (surveyed(), True))
    arguments = (
        *DIGITS,
        "workload.target.value=1.0",
        "budget={steps: 60, examples: 6000}",
        "search.trials=8",
    )
    arguments += (
        "search.replicates=1",
        "search.candidates=1",
        "workload.module._target_=trained.Dies",
    )
    status, out, err = bstune(*arguments, "search.workers=2")
    assert status == 0, err
    assert (
        "2 trials at once, each with 1 thread within 1,000 MiB; seconds per step are the survey's"
        in out
    )
    assert "its process ended with status 5" in out
    study = tmp_path / "outputs" / "digits"
    trials = trials_of(study)
    searched = check_indices(trials, 8)
    assert statuses(trials).count("failed") == 1
    # What the survey says, not what two trials at once measured.
    model = surveyed().step_time
    last_searched = max(numbers(searched))
    for trial in trials:
        if trial.status != "failed":
            assert trial.seconds_per_step == model(trial.batch_size)
            assert trial.measured_seconds_per_step not in (None, trial.seconds_per_step)
        if trial.replicate_of is not None:
            assert trial.number > last_searched
    for trial in searched:
        assert trial.train_seconds > 0
    # a history is what the spec says, wherever it was trained
    if torch.get_num_threads() == 1:
        last = next(trial for trial in searched if trial.resumed_from is None and trial.history)
        train = prepared_study(*arguments, "search.workers=0").backend.run
        spec = TrialSpec(
            90, 90, last.batch_size, last.lr, last.delta, last.seed, max_steps=last.steps
        )
        (tmp_path / "again" / "checkpoints").mkdir(parents=True)
        assert train(spec, Output(tmp_path / "again"), None).history == last.history
    assert not list(study.rglob("*.partial"))
    # and the study goes on in this process
    assert bstune(*arguments, "search.workers=1")[0] == 0
    assert trials_of(study)[: len(trials)] == trials


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (DIGITS, "search.workers=2 needs steps that are timed at two batch sizes or more"),
        (("workload=replay", "workload.table=mnist_cnn", MLFLOW), "which need no training"),
    ],
)
def test_bad_input(bstune, tmp_path, monkeypatch, arguments, message):
    monkeypatch.setattr("bstune.hardware.survey_cache.cached", lambda *_: (surveyed((512,)), True))
    status, _, err = bstune(*arguments, "search.workers=2")
    assert status == 2
    assert message in " ".join(err.split())
    assert list(tmp_path.iterdir()) == []


def test_a_process_that_is_started_ignores_ctrl_c_from_its_first_moment_on():
    handler = signal.getsignal(signal.SIGINT)
    code = "import signal; print(signal.getsignal(signal.SIGINT) is signal.SIG_IGN)"
    with _ignoring_ctrl_c():
        # As a child that is started while the handler is set inherits it.
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        )
    assert done.stdout == "True\n"
    assert signal.getsignal(signal.SIGINT) is handler
