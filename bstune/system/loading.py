"""Says that the libraries load, where a call of Python's would otherwise be silent meanwhile.

with loading(training=True):
    import torch
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from bstune.system.terminal import write_out
from bstune.system.watchdog import waiting_for, watching

LOADING = "bstune: loading PyTorch and Lightning, 5 to 30 s"


@contextmanager
def loading(*, training: bool) -> Iterator[None]:
    """Print that libraries load, where the body takes long to load them.

    ``training``: whether the body loads PyTorch and Lightning. One line then says so at once,
    unless this process has loaded PyTorch before.
    """
    if training and "torch" not in sys.modules:
        write_out(LOADING)
    # After each ten seconds of silence a line says that the libraries are waited for.
    with watching(write_out, seconds=None), waiting_for("the libraries"):
        yield
