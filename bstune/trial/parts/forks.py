"""Copies of the process that trains, which a module's code may make.

One process alone is to train on.
"""

import os


class OneProcess:
    """Ends copies of the process in which it was made."""

    def __init__(self) -> None:
        self._process = os.getpid()

    def end_copy(self) -> None:
        """End this process, if it is a copy, without the clean-up that is the first one's to do."""
        if os.getpid() != self._process:
            os._exit(0)
