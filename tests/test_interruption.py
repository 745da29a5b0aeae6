import os
import subprocess
import sys
from tempfile import TemporaryDirectory

import pytest

from bstune import __main__ as command
from bstune.config import compose
from bstune.core.errors import Interrupted
from bstune.study import study
from bstune.system import interruption
from bstune.system.interruption import Stage


@pytest.mark.parametrize("stage", list(Stage))
def test_an_interruption_says_what_is_true_of_its_stage(monkeypatch, stage):
    def interrupted(*_):
        interruption.enter_stage(stage)
        raise KeyboardInterrupt

    monkeypatch.setattr(study, "run_options", interrupted)
    monkeypatch.setattr(interruption, "stage", Stage.PREPARATION)
    composed = compose(["workload=digits", "trial.batch_size=8", "trial.lr=0.1"])
    with pytest.raises(Interrupted) as caught:
        command.run(composed, [])
    assert stage.value in str(caught.value)
    assert sum(other.value in str(caught.value) for other in Stage) == 1


def test_an_interruption_while_modules_load_is_one_as_well(monkeypatch):
    def interrupted(**_):
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "loading", interrupted)
    composed = compose(["workload=digits", "trial.batch_size=8", "trial.lr=0.1"])
    with pytest.raises(Interrupted):
        command.run(composed, [])


def test_an_interruption_is_told_as_no_error(capsys):
    assert command.explain(Interrupted("interrupted: x")) == 130
    assert capsys.readouterr().err == "interrupted: x\n"


def test_a_process_is_a_command_once_it_handles_signals():
    """In a process of its own, whose handlers are not pytest's."""
    code = (
        "from bstune.system import interruption\n"
        "print(interruption.is_installed())\n"
        "interruption.install()\n"
        "interruption.note(15)\n"
        "print(interruption.is_installed(), interruption.status())\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert ended.stdout.split() == ["False", "True", "143"]


def test_a_command_that_is_through_leaves_no_temporary_folder():
    """In a process of its own, which ends as a command does."""
    code = (
        "import atexit\n"
        "from multiprocessing import forkserver\n"
        "from bstune.system import interruption\n"
        "atexit.register(interruption.leave_last)\n"
        "forkserver.ensure_running()\n"
        "interruption.last_status = 3\n"
    )
    # Short, as multiprocessing makes a socket there, whose path has 107 characters at most.
    with TemporaryDirectory(prefix="w") as temporary:
        environment = {**os.environ, "TMPDIR": temporary}
        ended = subprocess.run(
            [sys.executable, "-c", code], env=environment, capture_output=True, timeout=60
        )
        assert ended.returncode == 3
        assert os.listdir(temporary) == []
