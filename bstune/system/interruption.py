"""Ctrl-C and a termination signal end a study in order: by one exception in the main thread."""

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from bstune.core.errors import Interrupted

SIGNALS = (signal.SIGINT, signal.SIGTERM)
# After which an interruption that Python has dropped comes again.
LATER_SECONDS = 0.01


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
    again: list[threading.Timer] = []
    earlier_hook = sys.unraisablehook

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

    def once_more(lost: "sys.UnraisableHookArgs") -> None:
        """Python drops what is raised in a weak reference's call-back: it is raised later."""
        if lost.exc_value not in interruptions:
            earlier_hook(lost)
            return
        signal.signal(signal.SIGINT, interrupt)
        again.append(threading.Timer(LATER_SECONDS, os.kill, (os.getpid(), signal.SIGINT)))
        again[-1].start()

    earlier = {number: signal.getsignal(number) for number in SIGNALS}
    for number in SIGNALS:
        signal.signal(number, interrupt)
    sys.unraisablehook = once_more
    try:
        yield
    finally:
        for timer in again:
            timer.cancel()
        sys.unraisablehook = earlier_hook
        for number, handler in earlier.items():
            # None stands for a handler that C code has set, which Python cannot set again.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        if interruptions:
            raise interruptions[0]
