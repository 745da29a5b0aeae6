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
    """Print that the body loads PyTorch and Lightning, and every ten seconds that it still does.

    The first line is left out where this process has loaded PyTorch before, and without
    ``training``: the body then does not load them.
    """
    if training and "torch" not in sys.modules:
        write_out(LOADING)
    with watching(write_out, seconds=None), waiting_for("the libraries"):
        yield
