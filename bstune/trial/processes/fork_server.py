"""Starts processes by multiprocessing's fork server, which has imported what all of them need.

    start_server()  # imports torch and Lightning meanwhile
    process = CONTEXT.Process(target=train)
    start_process(process)  # train() begins with lead_group()

The server never touches the device, as CUDA does not survive a fork. This module imports neither
torch nor lightning.
"""

import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Iterator, MutableMapping
from contextlib import ExitStack, contextmanager
from multiprocessing import forkserver
from multiprocessing.process import BaseProcess
from types import ModuleType
from typing import TypeVar

from bstune.system.openmp import SPIN, spin_shortly

Value = TypeVar("Value")
CONTEXT = multiprocessing.get_context("forkserver")
# The modules that the fork server imports, with all that they import.
PRELOAD = ["bstune.trial.workload"]


def start_server() -> None:
    """Start the fork server, unless it runs. It imports while this process goes on."""
    CONTEXT.set_forkserver_preload(PRELOAD)
    # This lets torch answer whether there is CUDA without touching the device, which the server
    # must not do before it forks.
    environment = {"PYTORCH_NVML_BASED_CUDA_CHECK": "1", **os.environ}
    spin_shortly(environment)
    with ExitStack() as stack:
        for name in ("PYTORCH_NVML_BASED_CUDA_CHECK", SPIN):
            if name in environment:
                stack.enter_context(temporarily(os.environ, name, environment[name]))
        stack.enter_context(_ignoring_ctrl_c())
        forkserver.ensure_running()


@contextmanager
def temporarily(mapping: MutableMapping[str, Value], key: str, value: Value) -> Iterator[None]:
    """Set a key of a mapping, such as ``os.environ``, while the body runs."""
    former = mapping.get(key)
    mapping[key] = value
    try:
        yield
    finally:
        if former is None:
            del mapping[key]
        else:
            mapping[key] = former


@contextmanager
def _ignoring_ctrl_c() -> Iterator[None]:
    """Within the context, a process that is started ignores SIGINT from its first moment on.

    The fork server by itself ignores it only once it has imported torch. Before that, Ctrl-C would
    print the server's traceback. In another thread than the main one nothing changes.
    """
    # Python lets the main thread alone set a signal's handler.
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    # None is a handler that was not set from Python.
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN) or signal.SIG_DFL
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)


def start_process(process: BaseProcess) -> None:
    """Start a process that does not import the caller's script.

    multiprocessing would import the script there, whether it is guarded or not.
    """
    with temporarily(sys.modules, "__main__", ModuleType("__main__")):
        process.start()


def lead_group() -> None:
    """Let this process lead a process group, which processes of the user's code then belong to.

    The group can be ended as one. It is killed when the parent process ends.
    """
    os.setpgrp()
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """Wait for the parent process to end, and kill this process's group.

    A parent that was killed could not end it: a trial that nobody records would train on.
    """
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os.killpg(0, signal.SIGKILL)
