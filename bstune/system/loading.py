"""Says that the libraries load, where a call of Python's would otherwise be silent meanwhile.

with loading(training=True):
    import torch
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from bstune.system.terminal import write_out
from bstune.system.watchdog import waiting_for, watching

# The libraries that train, by the module that is imported.
LIBRARIES = {"torch": "PyTorch", "lightning": "Lightning"}
LOADING = "bstune: loading PyTorch and Lightning, 5 to 30 s"


@contextmanager
def loading(*, training: bool) -> Iterator[None]:
    """Print that libraries load, where the body takes long to load them.

    ``training``: whether the body loads PyTorch and Lightning. One line then says so at once,
    unless this process has loaded PyTorch before.
    """
    if training and "torch" not in sys.modules:
        write_out(LOADING)
    # After each ten seconds of silence a line says what is waited for.
    with watching(write_out, seconds=None), waiting_for(what_loads(training)):
        yield


def what_loads(training: bool) -> str:
    """Name what a call loads, so that two calls in a row do not seem to wait for the same.

    ``training``: whether it loads PyTorch and Lightning, unless the user's script has done so.
    """
    if not training:
        return "the modules of bstune"
    missing = [name for module, name in LIBRARIES.items() if module not in sys.modules]
    return " and ".join(missing) or "the arguments of the study"
