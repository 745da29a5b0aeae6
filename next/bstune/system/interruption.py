"""Ctrl-C and a termination signal end a study in order: by one exception in the main thread."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from bstune.core.errors import Interrupted

SIGNALS = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def interruptible() -> Iterator[None]:
    """Let the first SIGINT or SIGTERM raise Interrupted in the body; a second one kills at once.

    Waiting for a process, a lock or a file ends by it, too. Whatever the body makes of it, such as
    the ImportError of a compiled module, Interrupted comes out. The handlers that were there before
    are restored. Outside the main thread, where Python takes no handlers, nothing changes.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    interruptions: list[Interrupted] = []

    def interrupt(number: int, frame: FrameType | None) -> None:
        """Raise Interrupted; from now on the signals end the process."""
        for each in SIGNALS:
            signal.signal(each, signal.SIG_DFL)
        name = signal.Signals(number).name
        interruptions.append(
            Interrupted(
                f"interrupted by {name}: finished trials are stored, the same command continues"
            )
        )
        raise interruptions[0]

    earlier = {number: signal.getsignal(number) for number in SIGNALS}
    for number in SIGNALS:
        signal.signal(number, interrupt)
    try:
        yield
    finally:
        for number, handler in earlier.items():
            # None stands for a handler that C code has set, which Python cannot set again.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        if interruptions:
            raise interruptions[0]
