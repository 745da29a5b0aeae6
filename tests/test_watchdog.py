"""What the preparation waits for is said, a step that never ends is ended, and no exit of the user's code is silent."""

import gc
import os
import signal
import sys
import tempfile
import threading
from contextlib import suppress
from functools import partial

import pytest
from toolbox import FakeTime, forked_training

from bstune.__main__ import command as main_command
from bstune.core.errors import UserCodeError
from bstune.system import watchdog
from bstune.system.exits import os_exit_as_users_error
from bstune.system.watchdog import STEP_SECONDS, Wait, Watch, frame_of, waiting_for, watching

# One of each kind runs with the slow tests.
SOAK = pytest.mark.soak
PROJECT = """
import ctypes, os, signal, sys, threading, time
import torch
from lightning.pytorch import LightningDataModule, LightningModule
from torch.utils.data import DataLoader, TensorDataset

PLACE, DEED = os.environ["PLACE"], os.environ["DEED"]


def do(place):
    if place == PLACE:
        exec(compile(DEED, __file__, "exec"), globals())


class Data(LightningDataModule):
    def prepare_data(self):
        do("prepare_data")

    def setup(self, stage):
        do("setup")
        x = torch.arange(64.0).view(64, 1).sin()
        self.data = TensorDataset(x, 2 * x)

    def train_dataloader(self):
        do("train_dataloader")
        return DataLoader(self.data, batch_size=8, shuffle=True)

    def val_dataloader(self):
        return DataLoader(self.data, batch_size=32)


class Lit(LightningModule):
    def __init__(self, lr):
        do("__init__")
        super().__init__()
        self.lr, self.net = lr, torch.nn.Linear(1, 1)

    def configure_optimizers(self):
        do("configure_optimizers")
        return torch.optim.SGD(self.parameters(), lr=self.lr)

    def training_step(self, batch, batch_idx):
        do("training_step")
        return (self.net(batch[0]) - batch[1]).square().mean()

    def validation_step(self, batch, batch_idx):
        do("validation_step")
        self.log("val_loss", (self.net(batch[0]) - batch[1]).square().mean())
"""
WORKLOAD = """
name: mine
precision: 32-true
trials: 4
data: {_target_: project.Data}
module: {_target_: project.Lit, lr: "${trial.lr}"}
target: {metric: val_loss, value: 1.0e-4, mode: min}
reference: {batch_size: 8, lr: 0.1}
batch_size: {low: 8, high: 32}
budget: {steps: 50, examples: 1}
"""
OPTIONS = ("--config-dir", "conf", "workload=mine", "device=cpu", "mlflow.enabled=false")
PLACES = (
    "__init__",
    "setup",
    "train_dataloader",
    "configure_optimizers",
    "training_step",
    "validation_step",
)
# One before and one in the training; the others with the slow tests.
PLACES_OF_EACH = [
    place if place in ("__init__", "training_step") else pytest.param(place, marks=pytest.mark.slow)
    for place in PLACES
]
# As a deadlock does.
NEVER_ENDS = "threading.Event().wait()"


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A function that lets a project of one's own do something at a place."""
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "conf" / "workload").mkdir(parents=True)
    (tmp_path / "conf" / "workload" / "mine.yaml").write_text(WORKLOAD)
    (tmp_path / "project.py").write_text(PROJECT)
    sys.modules.pop("project", None)

    def does(place, deed):
        monkeypatch.setenv("PLACE", place)
        monkeypatch.setenv("DEED", deed)

    yield does
    sys.modules.pop("project", None)


@pytest.fixture
def command(tmp_path, project, monkeypatch):
    """Run the command in a fork of this process, which trains by itself, with temporary folders of its own."""

    def run(place, deed):
        project(place, deed)
        temporary = tmp_path / "temporary"
        temporary.mkdir()
        printed = tmp_path / "printed"
        given = (*OPTIONS, "hardware.enabled=false", "search.workers=0")

        def call():
            os.chdir(tmp_path)
            # A fork has its parent's files, and the folder that its parent has looked up.
            with printed.open("w") as file:
                os.dup2(file.fileno(), 1)
                os.dup2(file.fileno(), 2)
            tempfile.tempdir = str(temporary)
            sys.argv = ["bstune", *given]
            sys.stdout = os.fdopen(1, "w")
            sys.stderr = os.fdopen(2, "w")
            main_command()

        status = forked_training(call)
        text = printed.read_text()
        # A process that a signal or C code alone ended leaves its folders.
        if "error: " in text:
            assert [path.name for path in temporary.glob("bstune-*")] == []
        return status, text

    # The fork has it too: half a second past the limit, code that lets no thread run is ended.
    monkeypatch.setattr(watchdog, "BACKSTOP_SECONDS", 0.5)
    return run


# What is waited for, by a clock that the test moves


def watched(seconds=None):
    """A watch, a function that makes seconds pass in its thread's looks, the lines it said and what took too long."""
    said = []
    over = []
    now = FakeTime()
    watch = Watch(said.append, seconds, over.append, now=now)

    def pass_seconds(count):
        for _ in range(count):
            now.sleep(1.0)
            watch.look()

    return watch, pass_seconds, said, over


def test_a_line_every_ten_seconds_says_what_is_waited_for_and_how_long():
    watch, pass_seconds, said, over = watched()
    wait = Wait("Data.setup()", watch)
    watch.begin(wait)
    pass_seconds(9)
    assert said == []
    pass_seconds(16)
    assert said == ["waiting for Data.setup(), 10 s", "waiting for Data.setup(), 20 s"]
    watch.drop(wait)
    # 9 s and 16 s.
    assert said[2:] == ["Data.setup(): took 25 s"]
    pass_seconds(1000)
    assert over == [], "what is no step has no limit"


def test_a_whole_is_named_in_place_of_its_short_parts():
    watch, pass_seconds, said, _ = watched()
    timing = Wait("the timing (size 8)", watch, whole=True)
    watch.begin(timing)
    for size in (16, 32, 64):
        part = Wait("Data.setup()", watch)
        watch.begin(part)
        pass_seconds(4)
        watch.drop(part)
        timing.what = f"the timing (size {size})"
    # The parts come and go, and their sum is the whole's seconds.
    assert said == ["waiting for the timing (size 32), 10 s"]
    part = Wait("Data.setup()", watch)
    watch.begin(part)
    pass_seconds(20)
    # A part that takes long is named by itself.
    assert said[-1] == "waiting for Data.setup(), 18 s"
    watch.drop(part)
    watch.drop(timing)
    assert said[-2:] == ["Data.setup(): took 20 s", "the timing (size 64): took 32 s"]


def test_what_is_printed_puts_the_line_off():
    watch, pass_seconds, said, _ = watched()
    pass_seconds(6)
    watch.say("batch size 8 fits")
    # Ten seconds since the last line of any kind, not since the wait began.
    pass_seconds(9)
    assert said == ["batch size 8 fits"]
    pass_seconds(1)
    assert len(said) == 2


@pytest.mark.parametrize("was_enabled", [True, False])
def test_no_garbage_is_collected_as_a_threads_frame_is_taken(monkeypatch, was_enabled):
    """Python 3.11.0 to 3.11.8 may wait for ever where a collection falls into that call."""
    taken = []
    frames = sys._current_frames

    def looked():
        taken.append(gc.isenabled())
        return frames()

    monkeypatch.setattr(sys, "_current_frames", looked)
    if not was_enabled:
        gc.disable()
    try:
        frame = frame_of(threading.get_ident())
        assert gc.isenabled() == was_enabled
    finally:
        gc.enable()
    assert frame is not None
    assert taken == [False]


def test_frames_are_taken_only_past_the_limit(monkeypatch):
    taken = []
    monkeypatch.setattr(sys, "_current_frames", lambda: taken.append(1) or {})
    watch, pass_seconds, _, over = watched(7.0)
    watch.begin(Wait("a step", watch, steps=True))
    pass_seconds(7)
    assert taken == []
    pass_seconds(1)
    assert len(taken) == len(over) == 1


@pytest.mark.parametrize(("seconds", "limit"), [(None, STEP_SECONDS), (7.0, 7.0)])
def test_a_step_has_a_limit_and_each_step_its_own(seconds, limit):
    watch, pass_seconds, _, over = watched(seconds)
    wait = Wait("a step", watch, steps=True)
    watch.begin(wait)
    for _ in range(3):
        # Each progress is the end of a step, from which the next one's seconds count.
        pass_seconds(int(limit))
        wait.progress()
    wait.go_on("an evaluation", limited=True)
    pass_seconds(int(limit))
    wait.go_on("the end", limited=False)
    # What comes after the steps has no limit.
    pass_seconds(10 * int(limit))
    assert over == []
    wait.go_on("step 9", limited=True)
    pass_seconds(int(limit) + 2)
    (message,) = over
    assert message == watch.message
    assert "step 9" in message
    assert f"{limit:g} s" in message
    assert "protocol.trial_seconds" in message


def test_what_is_built_within_a_step_does_not_count_to_it():
    watch, pass_seconds, _, over = watched(7.0)
    step = Wait("a step", watch, steps=True)
    inner = Wait("Lit()", watch)
    watch.begin(step)
    pass_seconds(5)
    watch.begin(inner)
    pass_seconds(20)
    watch.drop(inner)
    # The step's seconds begin anew after it: 5 are within the limit, 8 are not.
    pass_seconds(5)
    assert over == []
    pass_seconds(3)
    assert len(over) == 1


def test_an_interruption_that_was_lost_is_sent_again():
    """As long as the thread stands where it stood; not once it goes on, as to clean up."""
    sent = []
    now = FakeTime()
    released = threading.Event()
    moved_on = threading.Event()
    gone = threading.Event()
    watches = []

    def stands():
        watch = Watch(print, 7.0, lambda message: sent.append(message) or True, now=now)
        watch.begin(Wait("a step", watch, steps=True))
        watches.append(watch)
        released.wait()
        moved_on.set()
        gone.wait()

    thread = threading.Thread(target=stands, daemon=True)
    thread.start()
    # The thread has to stand in the wait before the watch looks.
    while not watches or not released._cond._waiters:
        thread.join(0.01)
    for _ in range(12):
        now.sleep(1.0)
        watches[0].look()
    # Past the limit of 7 s at each of the other 5 looks of 12.
    assert len(sent) == 5
    released.set()
    moved_on.wait()
    while not gone._cond._waiters:
        thread.join(0.01)
    watches[0].look()
    assert len(sent) == 5
    gone.set()
    thread.join()


def test_seconds_in_which_the_whole_process_was_stopped_do_not_count():
    said = []
    over = []
    now = FakeTime()
    watch = Watch(said.append, 7.0, over.append, now=now)
    watch.begin(Wait("a step", watch, steps=True))
    # Two looks an hour apart: the process, or the machine, was asleep.
    now.sleep(3600.0)
    watch.look()
    assert over == []


def test_a_debugger_is_waited_for(monkeypatch):
    watch, pass_seconds, _, over = watched(7.0)
    # This test's own package stands for a debugger.
    monkeypatch.setattr(watchdog, "DEBUGGERS", {__name__.partition(".")[0]})
    watch.begin(Wait("a step", watch, steps=True))
    pass_seconds(100)
    assert over == []


def test_without_a_watch_nothing_is_said(capsys):
    with waiting_for("Data.setup()", steps=True) as wait:
        wait.go_on("more", limited=True)
        wait.progress()
    assert capsys.readouterr() == ("", "")


def test_an_error_within_a_watch_is_raised_as_it_is():
    with pytest.raises(LookupError, match="no such layer"), watching(print, None):
        raise LookupError("no such layer")
    assert watchdog._watches == []


# The user's code catches the interruption and goes on as if nothing had been.
@pytest.mark.usefixtures("interruptible")
def test_an_interruption_that_the_users_code_swallows_is_an_error_all_the_same():
    with (
        pytest.raises(UserCodeError, match="a step"),
        watching(print, 0.05),
        waiting_for("a step", steps=True),
        suppress(KeyboardInterrupt),
    ):
        threading.Event().wait()


# In a study of one's own


@pytest.mark.parametrize(
    "place", ["training_step", pytest.param("validation_step", marks=pytest.mark.slow)]
)
def test_a_step_that_never_ends_is_an_error_with_the_frames(bstune, project, tmp_path, place):
    project(place, NEVER_ENDS)
    status, _, err = bstune(*OPTIONS, "protocol.trial_seconds=0.3")
    assert status == 1, err
    assert "0.3 s" in err
    assert "protocol.trial_seconds" in err
    assert f"  {tmp_path}/project.py:" in err
    assert f" in {place}: " in err
    assert not (tmp_path / "outputs").exists()


def test_at_the_tunables_ends_too(bstune, project, tmp_path):
    """The step ends but at one corner of the further hyperparameters."""
    # The call comes from do(), two frames below the module's step.
    project("training_step", "import sys; f = sys._getframe(2).f_locals['self']; f.hold()")
    source = (tmp_path / "project.py").read_text()
    held = (
        "\n    def hold(self):\n        if self.width > 4:\n            threading.Event().wait()\n"
    )
    source = source.replace("def __init__(self, lr):", "def __init__(self, lr, width=1):")
    source = source.replace(
        "super().__init__()\n", "super().__init__()\n        self.width = width\n"
    )
    (tmp_path / "project.py").write_text(source + held)
    tunable = (
        "tunable: {width: {key: workload.module.width, low: 1, high: 9, log: false, integer: "
        "true}}\n"
    )
    module = WORKLOAD.replace('lr: "${trial.lr}"}', 'lr: "${trial.lr}", width: 1}')
    (tmp_path / "conf" / "workload" / "mine.yaml").write_text(module + tunable)
    # The preflight tries both ends of what is searched.
    status, _, err = bstune(*OPTIONS, "protocol.trial_seconds=0.3", "search.tune=[width]")
    assert status == 1, err
    assert "width 9" in err
    assert " in hold: " in err


def test_the_processes_one_timer_is_the_innermost_watchs(monkeypatch):
    calls = []
    timer = watchdog.faulthandler
    monkeypatch.setattr(timer, "dump_traceback_later", lambda *_, **named: calls.append("set"))
    monkeypatch.setattr(timer, "cancel_dump_traceback_later", lambda: calls.append("cancelled"))
    outer = watchdog.Watch(print, None, end, backstop=True)
    inner = watchdog.Watch(print, None, end, backstop=True)
    monkeypatch.setattr(watchdog, "_watches", [outer, inner])
    inner.begin(watchdog.Wait("a step", inner, steps=True))
    # The outer watch looks every second, too, and must not cancel the inner one's timer.
    outer.look()
    inner.look()
    assert calls == ["set", "set"]


def test_slow_data_are_waited_for_and_said(bstune, project, monkeypatch):
    monkeypatch.setattr(watchdog, "LINE_SECONDS", 0.1)
    project("setup", "time.sleep(0.4)")
    status, out, err = bstune(
        # Building data is no step: it may take longer than the limit.
        *OPTIONS,
        "protocol.trial_seconds=0.3",
        "trial.batch_size=8",
        "trial.lr=0.1",
    )
    assert status == 0, err
    assert "waiting for Data.setup('fit'), 0 s" in out


@pytest.mark.parametrize("deed", ["sys.exit(0)", pytest.param("exit()", marks=SOAK)])
@pytest.mark.parametrize("place", PLACES_OF_EACH)
def test_sys_exit_of_the_users_code_is_an_error_and_no_interruption(
    bstune, project, tmp_path, place, deed
):
    project(place, deed)
    status, out, err = bstune(*OPTIONS)
    assert status == 1, (out, err)
    assert "interrupted" not in err
    assert "sys.exit(" in err
    assert f"  {tmp_path}/project.py:" in err


class Ended(BaseException):
    """Stands for the end of the process."""


def end(text, status):
    raise Ended(text, status)


@pytest.mark.parametrize("place", PLACES_OF_EACH)
def test_os_exit_of_the_users_code_is_said_with_its_frames(bstune, project, tmp_path, place):
    project(place, "os._exit(0)")
    status, _, err = bstune(*OPTIONS)
    assert status == 1
    assert "os._exit(0)" in err
    assert f"  {tmp_path}/project.py:" in err


def test_os_exit_in_the_commands_own_process_is_answered(bstune, project, tmp_path, monkeypatch):
    monkeypatch.setattr(
        "bstune.__main__.os_exit_as_users_error", partial(os_exit_as_users_error, end)
    )
    project("training_step", "os._exit(0)")
    leave = os._exit
    with pytest.raises(Ended) as ended:
        bstune(*OPTIONS, "search.workers=0")
    text, status = ended.value.args
    assert status == 1
    assert "os._exit(0)" in text
    assert f"  {tmp_path}/project.py:" in text
    assert os._exit is leave


def test_forked_processes_may_end_so():
    # A child of a fork leaves by os._exit, as Python itself does it.
    with os_exit_as_users_error(end):
        child = os.fork()
        if child == 0:
            os._exit(7)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


@pytest.mark.parametrize(
    "deed",
    [
        # Other threads run meanwhile.
        pytest.param("ctypes.CDLL(None).pause()", marks=SOAK),
        # No other thread runs meanwhile.
        pytest.param("ctypes.PyDLL(None).sleep(1000)", marks=pytest.mark.slow),
        pytest.param("threading.Event().wait()", marks=SOAK),
    ],
)
def test_what_stands_in_c_code_ends_with_the_process(command, tmp_path, monkeypatch, deed):
    # In place of protocol.trial_seconds, which does not go with trials in this process.
    monkeypatch.setattr(watchdog, "STEP_SECONDS", 0.5)
    status, err = command("training_step", deed)
    assert status == 1, err
    assert "project.py" in err
    assert not (tmp_path / "outputs").exists()


@pytest.mark.parametrize(
    ("place", "deed", "expected"),
    [
        pytest.param("setup", "os._exit(0)", 1, marks=SOAK),
        pytest.param(
            "training_step",
            "threading.Thread(target=os._exit, args=(0,)).start(); time.sleep(60)",
            1,
            marks=pytest.mark.slow,
        ),
        # Signals of C code end the process with their own status.
        pytest.param("training_step", "os.abort()", -signal.SIGABRT, marks=SOAK),
        pytest.param(
            "training_step",
            "os.kill(os.getpid(), signal.SIGKILL)",
            -signal.SIGKILL,
            marks=SOAK,
        ),
        pytest.param(
            "training_step",
            # 128 + 15, as shells count SIGTERM.
            "os.kill(os.getpid(), signal.SIGTERM); time.sleep(60)",
            143,
            marks=SOAK,
        ),
    ],
)
def test_the_process_never_ends_with_status_0(command, place, deed, expected):
    status, err = command(place, deed)
    assert status == expected, err
    assert "os._exit(0)" in err or expected != 1
