"""A process of a test's own that has imported what this one has: none takes seconds to start."""

import multiprocessing
import os
import sys

FORK = multiprocessing.get_context("fork")


def started(log, function, *args):
    """The process that calls a function, whose value is its exit status; it prints into a file."""
    process = FORK.Process(target=_call, args=(log, function, args), daemon=True)
    process.start()
    return process


def _call(log, function, args):
    sys.stdout = sys.stderr = log.open("w", buffering=1)
    for descriptor in (1, 2):
        os.dup2(sys.stdout.fileno(), descriptor)
    sys.exit(function(*args))
