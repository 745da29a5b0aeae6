"""Trials side by side: the processes that train them, and studies that are searched with them."""

import json
import math
import multiprocessing
import os
import signal
import subprocess
import sys
from dataclasses import replace
from functools import partial
from itertools import product

import pytest
import torch

from bstune.core.files import Output
from bstune.core.records import TrialResult, TrialSpec
from bstune.hardware.memory import Ceiling, ProbeResult
from bstune.hardware.survey import Survey
from bstune.hardware.timing import Measured, StepTiming
from bstune.study.prepare import compose_checked, prepare
from bstune.study.run import _first_trials
from bstune.trial.workers import Workers, with_solo_step_time

# What the processes import: nothing that takes long. What is asked of a trial is its batch size.
TOY = """
import os, signal, sys, threading
from bstune.core.records import TrialResult


class Odd(Exception):
    def __init__(self, one, other):
        super().__init__(f"{one} and {other}")


def open_train():
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
                (output.root / "here").touch()
                while not (output.root / "go").exists():
                    threading.Event().wait(0.01)
        return TrialResult(
            **spec.trial_fields(), status="censored", steps=1, steps_low=1, examples=8, train_seconds=1.0, eval_seconds=0.0,
            startup_seconds=0.0, wall_seconds=1.0, seconds_per_step=0.5, device=str(opened), versions={},
            message=None if parent is None else parent.message,
        )

    return train


def open_nothing():
    raise LookupError("nothing to open")
"""


@pytest.fixture
def toy(tmp_path, monkeypatch):
    (tmp_path / "toy.py").write_text(TOY)
    monkeypatch.syspath_prepend(str(tmp_path))
    import toy

    yield toy
    del sys.modules["toy"]


def spec(batch_size, number=0):
    return TrialSpec(number, number, batch_size, 0.1, 0.0, 3)


@pytest.fixture
def nothing_left():
    before = set(multiprocessing.active_children())
    yield
    assert set(multiprocessing.active_children()) == before


@pytest.mark.usefixtures("nothing_left")
def test_records_and_errors_come_back(toy, tmp_path, make_result):
    output = Output(tmp_path)
    with Workers(toy.open_train, 2) as workers:
        assert workers.free
        workers.start(spec(8, 1), output, None)
        workers.start(spec(64, 2), output, make_result(message="of the parent"))
        assert not workers.free
        assert [running.number for running in workers.running] == [1, 2]
        with pytest.raises(ValueError, match="2 trials train already"):
            workers.start(spec(64), output, None)
        ended = workers.wait()  # the other one waits for "go"
        assert ended.spec.number == 2
        assert ended.result().message == "of the parent"
        (tmp_path / "go").touch()
        first = workers.wait()
        assert (first.spec.number, first.exit_reason) == (1, None)
        assert first.result().device != ended.result().device, "they were two processes"
        with pytest.raises(ValueError, match="no trial runs"):
            workers.wait()
        # each process opens what trains once, and goes on after an error
        devices = {first.result().device, ended.result().device}
        for batch_size, error, message in (
            (1, LookupError, "no such thing"),
            (2, RuntimeError, "^Odd: this and that$"),  # it could not be built again from its arguments
            (5, SystemExit, "1"),
        ):
            workers.start(spec(batch_size), output, None)
            raised = workers.wait()
            assert raised.exit_reason is None
            with pytest.raises(error, match=message):
                raised.result()
        workers.start(spec(6), output, None)  # an interruption is none of its business
        assert workers.wait().result().device in devices
        # what went well comes first
        workers.start(spec(1, 1), output, None)
        workers.start(spec(64, 2), output, None)
        for worker in workers._running:
            worker.connection.poll(None)
        assert [ended.spec.number for ended in workers.poll()] == [2, 1]


@pytest.mark.usefixtures("nothing_left")
@pytest.mark.parametrize(
    ("batch_size", "words"),
    [(3, "ended with status 7"), (4, "was ended by the system, as it does when memory runs out")],
)
def test_a_process_that_dies_takes_its_own_trial_along_and_no_other(toy, tmp_path, batch_size, words):
    output = Output(tmp_path)
    with Workers(toy.open_train, 2) as workers:
        workers.start(spec(8, 1), output, None)
        workers.start(spec(batch_size, 2), output, None)
        died = workers.wait()
        assert (died.spec.number, died.exit_reason) == (2, words)
        workers.start(spec(64, 3), output, None)
        assert workers.wait().result().number == 3
        (tmp_path / "go").touch()
        assert workers.wait().result().number == 1
        for process in multiprocessing.active_children():  # while they have nothing to do
            process.kill()
            process.join()
        workers.start(spec(64, 4), output, None)
        assert workers.wait().result().number == 4


@pytest.mark.usefixtures("nothing_left")
def test_what_cannot_be_opened_says_so(toy, tmp_path):
    with Workers(toy.open_nothing, 1) as workers:
        workers.start(spec(64), Output(tmp_path), None)
        with pytest.raises(LookupError, match="nothing to open"):
            workers.wait().result()


@pytest.mark.usefixtures("nothing_left")
@pytest.mark.parametrize(
    ("number", "error"), [(signal.SIGTERM, SystemExit(128 + signal.SIGTERM)), (signal.SIGINT, KeyboardInterrupt())]
)
def test_a_signal_ends_the_processes_where_nothing_is_cut(toy, tmp_path, number, error):
    before = signal.getsignal(number)

    def terminated():
        with Workers(toy.open_train, 2) as workers:
            workers.start(spec(7, 1), Output(tmp_path), None)
            workers.start(spec(64, 2), Output(tmp_path), None)
            assert workers.wait().spec.number == 2
            assert list(workers.poll()) == []
            os.kill(os.getpid(), number)
            assert workers.running, "not here"
            workers.wait()

    with pytest.raises(type(error)) as raised:
        terminated()
    assert raised.value.args == error.args
    assert signal.getsignal(number) is before


def test_a_process_ends_with_the_one_that_started_it(toy, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import os, toy\n"
        "from pathlib import Path\n"
        "from bstune.core.files import Output\n"
        "from bstune.core.records import TrialSpec\n"
        "from bstune.trial.workers import Workers\n"
        "if __name__ == '__main__':\n"
        "    workers = Workers(toy.open_train, 2)\n"
        "    workers.start(TrialSpec(1, 1, 8, 0.1, 0.0, 3), Output(Path()), None)\n"
        "    while not Path('here').exists():\n"
        "        pass\n"
        "    os.kill(os.getpid(), 9)\n"
    )
    # Its output ends when the last process that writes to it does.
    run = subprocess.run([sys.executable, str(script)], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert run.returncode == -9
    assert "Error" not in run.stderr  # Python's own words on what a killed process leaves are fine


def test_seconds_per_step_are_those_measured_alone(make_result):
    beside = make_result(batch_size=64, seconds_per_step=3.0, train_seconds=300.0)
    found = with_solo_step_time(beside, lambda batch_size: batch_size / 6400)
    assert found == make_result(batch_size=64, seconds_per_step=0.01, train_seconds=300.0)
    assert found.time_to_target == 1.0
    assert with_solo_step_time(make_result(seconds_per_step=None), lambda batch_size: 1.0).seconds_per_step is None


@pytest.mark.parametrize(
    ("trial_indices", "whole"),
    [((), 0), ((3, 1, 0, 2), 4), ((0, 1, 2, 3, 5, 6, 7, 8), 4), ((0, 1, 2, 3, 4, 5, 6, 7, 9), 8)],
)
def test_the_precision_is_checked_where_all_earlier_trials_are_done(trial_indices, whole, make_result):
    trials = [make_result(number=number, trial_index=trial_index) for number, trial_index in enumerate(trial_indices)]
    assert sorted(trial.trial_index for trial in _first_trials(trials)) == list(range(whole))


# Studies, answered from a table by processes that import no more than that takes.

SIZES, LRS = (8, 32, 128, 512), (0.01, 0.04, 0.16, 0.64)
REPLAY = ("workload=replay", "workload.table=t.jsonl", "workload.target.value=0.14", "mlflow.enabled=false")
REPLAY += ("search.objective=steps", "search.replicates=1")

ANSWERS = """
import multiprocessing, os, signal, threading
from pathlib import Path
from bstune.study.prepare import compose_checked
from bstune.study.prepare import prepare


def open_train(arguments, slot, what):
    table = prepare(compose_checked(list(arguments))).backend.run

    def train(spec, output, parent):
        output.checkpoint(spec.number).with_suffix(".partial").write_text("weights")
        output.states.mkdir(exist_ok=True)
        output.state(spec.number).with_name(f"trial-{spec.number}.ckpt.partial").write_text("state")
        result = table(spec, output, parent)
        if spec.trial_index == slot:
            once(what)
        # what another process tidies up meanwhile must leave these alone
        output.checkpoint(spec.number).with_suffix(".partial").replace(output.checkpoint(spec.number))
        output.state(spec.number).with_name(f"trial-{spec.number}.ckpt.partial").replace(output.state(spec.number))
        return result

    return train


def once(what):
    if what == "always dies":
        os._exit(9)
    if what == "raises":
        raise ValueError("two are too many")
    if Path("once").exists():
        return
    Path("once").touch()
    if what == "dies":
        os._exit(9)
    if what == "interrupts":
        os.kill(multiprocessing.parent_process().pid, signal.SIGINT)
        threading.Event().wait()
"""


def row(size, lr, seed):
    hit = round(200 * (1 + 64 / size) * (1 + math.log2(lr / (0.16 * (size / 128) ** 0.5)) ** 2)) + 5 * seed
    steps = sorted({max(1, round(hit * 1.1**-i)) for i in range(31)})
    metric = [0.13 + 0.5 * (1 - step / hit) ** 2 + (0.02 if step < hit else 0.0) for step in steps]
    cell = {"batch_size": size, "lr": lr, "seed": seed, "seconds_per_step": 0.01 + 0.0001 * size}
    return cell | {"steps": steps, "metric": metric}


@pytest.fixture
def side_by_side(bstune, tmp_path, monkeypatch):
    """Run the command on a table with two processes, of which one does something unusual at a slot."""
    (tmp_path / "t.jsonl").write_text("".join(json.dumps(row(*cell)) + "\n" for cell in product(SIZES, LRS, (0, 1))))
    (tmp_path / "answers.py").write_text(ANSWERS)
    monkeypatch.syspath_prepend(str(tmp_path))
    import answers

    what = {"trial_index": None, "what": ""}

    def prepared(*arguments):
        study = prepare(*arguments)
        study.config.search.workers = 2
        opens = partial(answers.open_train, REPLAY, what["trial_index"], what["what"])
        return replace(study, open_workers=partial(Workers, opens, 2))

    monkeypatch.setattr("bstune.study.prepare.prepare", prepared)

    def run(*arguments, trial_index=None, does=""):
        what.update(trial_index=trial_index, what=does)
        return bstune(*REPLAY, *arguments)

    yield run
    del sys.modules["answers"]


def trials_of(study):
    return [TrialResult.from_json(line) for line in (study / "trials.jsonl").read_text().splitlines()]


def check_slots(trials, count):
    """Each slot has one trial that was not cut short, and no two trials go on from the same one."""
    searched = [trial for trial in trials if trial.replicate_of is None and trial.status != "failed"]
    assert sorted(trial.trial_index for trial in searched) == list(range(count))
    parents = [trial.resumed_from for trial in searched if trial.resumed_from is not None]
    assert len(set(parents)) == len(parents)
    return searched


@pytest.mark.slow
@pytest.mark.usefixtures("nothing_left")
@pytest.mark.parametrize(("sampler", "does"), [("frontier", "nothing"), ("tpe", "dies")])
def test_a_study_side_by_side(side_by_side, tmp_path, sampler, does, caplog):
    arguments = ("search.trials=16", "search.precision=null", f"sampler={sampler}")
    status, out, err = side_by_side(*arguments, trial_index=5, does=does)
    assert status == 0, err
    trials = trials_of(tmp_path / "outputs" / "replay")
    assert [trial.number for trial in trials] == list(range(len(trials)))
    searched = check_slots(trials, 16)
    assert sum(out.count(f"trial {trial_index + 1}/16") for trial_index in range(16)) == 16 + (does == "dies")
    failed = [trial for trial in trials if trial.status == "failed"]
    if does == "dies":
        again = next(trial for trial in searched if trial.trial_index == 5)
        assert [(t.trial_index, t.batch_size, t.lr) for t in failed] == [(5, again.batch_size, again.lr)]
        assert "its process ended with status 9; it is asked again" in caplog.text
    else:
        assert failed == []
    # confirmations come after the search
    fresh = [trial for trial in trials if trial.replicate_of is not None]
    assert bool(fresh) == any(trial.reached for trial in searched)
    assert sampler == "frontier" or fresh
    assert all(trial.number > max(other.number for other in searched) for trial in fresh)
    # once more is nothing more
    assert side_by_side(*arguments)[0] == 0
    assert trials_of(tmp_path / "outputs" / "replay") == trials


@pytest.mark.slow
@pytest.mark.usefixtures("nothing_left")
def test_an_interrupted_study_goes_on(side_by_side, tmp_path, caplog):
    status, _, err = side_by_side("search.trials=12", "sampler=tpe", trial_index=6, does="interrupts")
    assert status == 130, err
    assert "interrupted: every finished trial is stored" in err
    before = trials_of(tmp_path / "outputs" / "replay")
    cut = [trial for trial in before if trial.status == "failed"]
    assert 6 in {trial.trial_index for trial in cut}
    assert "was cut short; the finished ones are stored" in caplog.text
    assert side_by_side("search.trials=12", "sampler=tpe", trial_index=6, does="interrupts")[0] == 0
    after = trials_of(tmp_path / "outputs" / "replay")
    check_slots(after, 12)
    assert after[: len(before)] == before


@pytest.mark.usefixtures("nothing_left")
def test_a_slot_whose_process_always_dies_ends_the_study(side_by_side, tmp_path):
    status, _, err = side_by_side("search.trials=12", "sampler=tpe", trial_index=2, does="always dies")
    assert status == 2
    assert "ended with status 9, 3 times: lower search.workers or search.batch_size.high" in " ".join(err.split())
    trials = trials_of(tmp_path / "outputs" / "replay")
    assert sum(trial.trial_index == 2 for trial in trials) == 3
    assert len({(t.batch_size, t.lr) for t in trials if t.trial_index == 2}) == 1
    assert side_by_side("search.trials=12", "sampler=tpe")[0] == 0
    check_slots(trials_of(tmp_path / "outputs" / "replay"), 12)


@pytest.mark.usefixtures("nothing_left")
def test_what_a_trial_raises_ends_the_study_in_its_words(side_by_side, tmp_path):
    with pytest.raises(ValueError, match="two are too many") as raised:
        side_by_side("search.trials=12", "sampler=tpe", trial_index=3, does="raises")
    assert "in once" in str(raised.value.__cause__), "the worker's own traceback"
    cut = [trial.trial_index for trial in trials_of(tmp_path / "outputs" / "replay") if trial.status == "failed"]
    assert 3 in cut


# Training.

MLFLOW = "mlflow.enabled=false"
DIGITS = ("workload=digits", MLFLOW, "search.batch_size.low=32", "search.batch_size.high=512", "device=cpu")
EASY = ("workload.target.value=1.0", "budget.steps=60", "budget.examples=6000")

TRAINED = """
import multiprocessing, os
from pathlib import Path
from bstune.workloads.classifier import Classifier


class Dies(Classifier):
    def training_step(self, batch, batch_idx):
        if multiprocessing.parent_process() is not None and not Path("once").exists():
            Path("once").touch()
            os._exit(5)
        return super().training_step(batch, batch_idx)


"""


def surveyed(sizes=(32, 128, 512)):
    """Return what a survey may have found: steps of 1 ms and 10 microseconds an example."""
    timings = tuple(StepTiming(size, *[1e-3 + 1e-5 * size] * 3, 0.0, 9, None) for size in sizes)
    fits = ProbeResult(sizes[-1], "fits", 2**30, 2**20, 2**20)
    ceiling = Ceiling(fits, None, sizes[0], 1, None, None, None, (fits,))
    return Survey(
        "digits", "it", "cpu", "32-true", {}, sizes[-1], ceiling, Measured(timings, (), ()), None, None, seconds=1.0
    )


@pytest.fixture
def trained(tmp_path, monkeypatch):
    (tmp_path / "trained.py").write_text(TRAINED)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr("bstune.hardware.survey.cached_survey", lambda *_: (surveyed(), True))
    yield
    sys.modules.pop("trained", None)


@pytest.mark.usefixtures("nothing_left", "trained")
def test_trials_train_side_by_side(bstune, tmp_path):
    """One of the processes dies on the way."""
    arguments = (*DIGITS, *EASY, "hardware.enabled=true", "search.trials=8", "search.replicates=1")
    arguments += ("workload.module._target_=trained.Dies", "search.candidates=1")
    status, out, err = bstune(*arguments, "search.workers=2")
    assert status == 0, err
    assert "2 trials at once, each with 1 thread within 1,024 MiB; seconds per step are the survey's" in out
    study = tmp_path / "outputs" / "digits"
    trials = trials_of(study)
    searched = check_slots(trials, 8)
    assert [trial.status for trial in trials].count("failed") == 1
    model = surveyed().step_time
    assert [trial.seconds_per_step for trial in searched] == [model(trial.batch_size) for trial in searched]
    assert all(trial.train_seconds > 0 for trial in searched)
    fresh = [trial for trial in trials if trial.replicate_of is not None]
    assert all(trial.seconds_per_step != model(trial.batch_size) for trial in fresh), "they are measured, alone"
    # a history is what the spec says, wherever it was trained
    if torch.get_num_threads() == 1:
        last = next(trial for trial in searched if trial.resumed_from is None and trial.history)
        train = prepare(compose_checked([*arguments, "search.workers=1"])).backend.run
        spec = TrialSpec(90, 90, last.batch_size, last.lr, last.delta, last.seed, max_steps=last.steps)
        (tmp_path / "again").mkdir()
        assert train(spec, Output(tmp_path / "again"), None).history == last.history
    assert not list(study.rglob("*.partial"))
    # and the study goes on in this process
    assert bstune(*arguments, "search.workers=1")[0] == 0
    assert trials_of(study)[: len(trials)] == trials


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            (*DIGITS, "search.workers=2", "hardware.enabled=true"),
            "search.workers=2 needs steps that are timed at two batch sizes or more",
        ),
        (
            ("workload=replay", "workload.table=mnist_cnn", MLFLOW, "search.workers=2"),
            "so there is nothing to train in parallel",
        ),
    ],
)
def test_bad_input(bstune, tmp_path, monkeypatch, arguments, message):
    monkeypatch.setattr("bstune.hardware.survey.cached_survey", lambda *_: (surveyed((512,)), True))
    status, _, err = bstune(*arguments)
    assert status == 2
    assert message in " ".join(err.split())
    assert list(tmp_path.iterdir()) == []
