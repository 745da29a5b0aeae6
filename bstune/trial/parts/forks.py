"""Ends copies of the process that trains, which a module's code may make by a fork."""

import os


class OneProcess:
    """Lets only the process in which it was made train on."""

    def __init__(self) -> None:
        self._process = os.getpid()

    def exit_if_forked(self) -> None:
        """End this process if it is a copy, without the clean-up that the original will do."""
        if os.getpid() != self._process:
            os._exit(0)
