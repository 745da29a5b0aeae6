"""Starts processes by multiprocessing's fork server, which has imported what all of them need.

    start_server()  # imports torch and Lightning meanwhile
    process = make_process(train, arguments)
    start_process(process)

Processes that the user's code starts there, such as a DataLoader's workers, begin as in the user's
own process, and end with the one that started them. The server never touches the device, as CUDA
does not survive a fork. This module imports neither torch nor lightning.
"""

import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import ExitStack, contextmanager
from multiprocessing import forkserver, resource_tracker
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
    # Adds ``SPIN``, with which torch's idle threads soon leave the cores to other processes.
    spin_shortly(environment)
    with ExitStack() as stack:
        for name in ("PYTORCH_NVML_BASED_CUDA_CHECK", SPIN):
            if name in environment:
                stack.enter_context(temporarily(os.environ, name, environment[name]))
        stack.enter_context(_ignoring_ctrl_c())
        stack.enter_context(_start_method_left_open())
        _start_tracker()
        forkserver.ensure_running()


def _start_tracker() -> None:
    """Start the process that removes the semaphores of killed processes, unless it runs.

    Its warning of each semaphore that it removes is ignored: the user can do nothing about it.
    """
    filters = [os.environ.get("PYTHONWARNINGS", ""), "ignore:resource_tracker"]
    with temporarily(os.environ, "PYTHONWARNINGS", ",".join(filter(None, filters))):
        resource_tracker.ensure_running()


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


@contextmanager
def _start_method_left_open() -> Iterator[None]:
    """Let the user still set multiprocessing's start method after the body, if it is not set yet.

    multiprocessing itself fixes its default method when a first process is started.
    """
    chosen = _chosen_start_method()
    try:
        yield
    finally:
        if chosen is None:
            multiprocessing.set_start_method(None, force=True)


def _chosen_start_method() -> str | None:
    """Look up the start method that the user has set; None: Python's default holds."""
    return multiprocessing.get_start_method(allow_none=True)


def make_process(target: Callable[..., object], arguments: tuple[object, ...]) -> BaseProcess:
    """Make a process that calls ``target`` with the arguments once :func:`start_process` starts it.

    The user's code finds the same start method of multiprocessing there as in this process.
    """
    return CONTEXT.Process(target=_begin, args=(_chosen_start_method(), target, arguments))


def start_process(process: BaseProcess) -> None:
    """Start a process that does not import the caller's script.

    multiprocessing would import the script there, whether it is guarded or not. For an empty
    ``__main__``, which stands in its place meanwhile, it imports nothing.
    """
    empty_main = ModuleType("__main__")
    with temporarily(sys.modules, "__main__", empty_main), _start_method_left_open():
        process.start()


def _begin(
    method: str | None, target: Callable[..., object], arguments: tuple[object, ...]
) -> None:
    """Prepare this process, which was just started, and call ``target`` with the arguments.

    ``method`` is multiprocessing's start method that the user's script has set; None: none.
    """
    # Ctrl-C reaches every process of the terminal. The process that started this one ends it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Processes of the user's code are in the group, and are ended with this one.
    _lead_group()
    # In a process of the fork server multiprocessing sets "forkserver". With that each of a
    # DataLoader's workers would import torch and the project anew.
    multiprocessing.set_start_method(method, force=True)
    # If the user has set "forkserver" too, this process starts a fork server of its own, which
    # imports the modules once for all workers.
    CONTEXT.set_forkserver_preload(PRELOAD)
    target(*arguments)


def _lead_group() -> None:
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
