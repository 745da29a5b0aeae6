"""Logs of a sweep's units: one that keeps nothing, one in a file, and a sweep that is stopped and goes on."""

import json
from io import StringIO

from rich.console import Console
from toolbox import FakeTime

from bstune.sweeps.unit_log import UnitLog


class StoppedError(Exception):
    """Ends a sweep after some of its units."""


def of_experiment(*options):
    """Return options of a sweep's own, such as ``seeds=2``, as a command line takes them."""
    return [f"sweep.experiment.{option}" for option in options]


def unkept():
    """Return a log without a file."""
    return log_at(None)


def log_at(path, console=None, sweep="made", now=None, commit="0123abc", **settings):
    """Return a log in a file; settings are the experiment's parameters."""
    console = console or Console(quiet=True)
    by_key = {f"sweep.experiment.{name}": value for name, value in settings.items()}
    return UnitLog(path, sweep, by_key, {"bstune": "1"}, commit, console, now or FakeTime())


def stopping_after(count, function):
    """Return the function, which raises StoppedError once it has been called so many times."""
    calls = []

    def limited(*arguments, **options):
        if len(calls) == count:
            raise StoppedError
        calls.append(arguments)
        return function(*arguments, **options)

    return limited


def printed():
    """Return a console and a function that gives what was printed on it."""
    out = StringIO()
    return Console(file=out, width=400), out.getvalue


def units_in(path):
    """Return the names of the units in a file, in the order of their lines."""
    values = [json.loads(line) for line in path.read_text().splitlines()]
    return [value["unit"] for value in values if "unit" in value]


def headers_in(path):
    """Return the headers in a file."""
    values = [json.loads(line) for line in path.read_text().splitlines()]
    return [value for value in values if "format" in value]
