"""A watch on what a study's preparation waits for: it says so, and ends a step that never ends.

The code that waits names what it waits for. Without a watch that costs a list's look-up, and
nothing is said::

    with watching(print, None), waiting_for("MyData.setup('fit')"):
        data.setup("fit")

A thread looks at it. Where nothing was printed for ten seconds, it prints ``waiting for
MyData.setup('fit'), 10 s``. A training step or an evaluation has a limit besides: past it, the
command ends with status 1 and the user's frames.
"""

import faulthandler
import gc
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import CodeType, FrameType
from typing import NoReturn

from bstune.core.errors import UserCodeError
from bstune.system import interruption
from bstune.system.failures import frame_lines, standing_frames
from bstune.system.secrets import redact

# Limit of one training step or evaluation where protocol.trial_seconds is not set. The first step
# of a large model that is compiled takes minutes; a search of many steps as long as this one would
# take weeks.
STEP_SECONDS = 300.0
# After so long without a printed line, one says what is waited for.
LINE_SECONDS = 10.0
# What such a line begins with.
WAITING = "waiting for "
# Seconds between two looks of the thread.
THREAD_LOOK_SECONDS = 1.0
# Fewest looks within the limit of a step.
LOOKS = 10
# After so long between two looks the whole process was stopped meanwhile, and waited for nothing.
STOPPED_SECONDS = 5.0
# So long past the limit, code that lets no other thread run is ended.
BACKSTOP_SECONDS = 5.0
# Modules of debuggers, one of which has the thread that waits for its user.
DEBUGGERS = {"bdb", "pdb", "ipdb", "pudb", "pydevd", "_pydevd_bundle", "debugpy"}


class Wait:
    """One thing that is waited for; :meth:`go_on` names the next part of it.

    Args:
        what: its name in the lines that are printed.
        watch: the watch that looks at it; None: nobody does.
        steps: whether it consists of training steps or evaluations, each of which has a limit.
        whole: whether lines name it in place of its parts, but for a part that takes long.
    """

    def __init__(
        self,
        what: str,
        watch: "Watch | None" = None,
        *,
        steps: bool = False,
        whole: bool = False,
    ) -> None:
        self.what = what
        self.whole = whole
        self.steps = steps
        # Whether the part that is waited for now has the limit of a step.
        self.limited = steps
        # Seconds for which the thread has seen it wait.
        self.seconds = 0.0
        # The steps, or parts, that have ended, now and at the thread's last look.
        self.ended_parts = 0
        self.ended_parts_at_look = 0
        # Whether a line has said that it is waited for.
        self.said = False
        self._watch = watch

    def go_on(self, what: str, *, limited: bool) -> None:
        """Wait for another part, named ``what``: from here on its own seconds count.

        ``limited``: whether the limit of a step holds for it.
        """
        if self._watch is not None:
            self._watch.end(self)
        self.what = what
        self.limited = limited
        self.said = False
        self.seconds = 0.0

    def progress(self) -> None:
        """Note that a step has ended, and that the next one, of the same name, begins."""
        self.ended_parts += 1


class Watch:
    """Looks at what is waited for, says so in lines, and tells when a step takes too long.

    Args:
        say: prints a line.
        seconds: the limit of a training step or an evaluation; None: ``STEP_SECONDS``.
        overrun: is called with the error's text once one has taken longer. Where it returns True,
            it is called again as long as the thread stands at the same place.
        silence: seconds without a line, after which one says what is waited for; None: ten.
        backstop: whether the process is ended where code lets no other thread run.
        now: a clock of seconds; tests move it.
    """

    def __init__(
        self,
        say: Callable[[str], None],
        seconds: float | None,
        overrun: Callable[[str], bool | None],
        *,
        backstop: bool = False,
        silence: float | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.seconds = STEP_SECONDS
        self._advice = "set protocol.trial_seconds to more than the seconds that it needs"
        if seconds is not None:
            self.seconds = seconds
            self._advice = "raise protocol.trial_seconds if it needs longer"
        self._say = say
        self._overrun = overrun
        self._backstop = backstop
        self._now = now
        self._silence = LINE_SECONDS if silence is None else silence
        # The thread that waits, whose frames are shown.
        self._thread = threading.get_ident()
        # What is waited for, the innermost last. The first stands there while nothing is named.
        self._waits = [Wait("what trains to be loaded")]
        self._looked = now()
        self._printed = self._looked
        # The error's text, once a step has taken too long.
        self.message: str | None = None
        # Where the thread stood as it was told to end; None: it need not be told again.
        self._stands_at: tuple[tuple[CodeType, int], ...] | None = None

    def say(self, line: str) -> None:
        """Print a line; the watch says nothing for ten seconds after it."""
        self._printed = self._now()
        self._say(line)

    def begin(self, wait: Wait) -> None:
        """Wait for a thing within the one that is waited for now, which goes on afterwards."""
        self._waits.append(wait)
        self._arm_process_timer(wait)

    def end(self, wait: Wait) -> None:
        """Say how long a thing took, if a line has said that it is waited for."""
        if wait.said:
            self.say(f"{wait.what}: took {wait.seconds:.0f} s")

    def drop(self, wait: Wait) -> None:
        """Wait no longer for ``wait``, the innermost thing that is waited for."""
        self.end(wait)
        self._waits.pop()
        # It was a part of the thing around it, such as a step of a training.
        self._waits[-1].progress()
        # The timer that ends a process which is stuck in C code is set for that thing.
        self._arm_process_timer(self._waits[-1])

    def look(self) -> None:
        """Look once at what is waited for, and count its seconds since the last look.

        A step past its limit is reported to ``overrun``, which ends it. Else a line says what is
        waited for, if nothing was printed for some time.
        """
        now = self._now()
        wait = self._waits[-1]
        self._arm_process_timer(wait)
        self._count_seconds(wait, now)
        # This step has been told to end already.
        if self.message is not None:
            self._end_again()
            return
        if wait.limited and wait.seconds > self.seconds:
            frame = frame_of(self._thread)
            # A user at a breakpoint may take any time.
            if not _is_debugged(frame):
                self.message = self._too_long(wait, frame)
                # overrun gives True if the interruption may be lost. The frame's position tells
                # later whether to send it again.
                if self._overrun(self.message):
                    self._stands_at = _instructions(frame)
                return
        if now - self._printed >= self._silence:
            named = self._named(wait)
            named.said = True
            self.say(f"{WAITING}{named.what}, {named.seconds:.0f} s")

    def _named(self, wait: Wait) -> Wait:
        """Choose what a line names: ``wait``, or the whole that it is a short part of."""
        if wait.seconds < self._silence:
            for around in reversed(self._waits):
                if around.whole:
                    return around
        return wait

    def _count_seconds(self, wait: Wait, now: float) -> None:
        """Add the seconds since the last look; those of a new step begin at 0."""
        passed = now - self._looked
        self._looked = now
        if wait.ended_parts != wait.ended_parts_at_look:
            wait.ended_parts_at_look = wait.ended_parts
            # The limit is of each step. A thing without a limit, such as loading, is counted as a
            # whole.
            if wait.limited:
                wait.seconds = 0.0
        # After a longer gap the process itself was stopped, as on a laptop that slept.
        if passed >= STOPPED_SECONDS:
            return
        wait.seconds += passed
        for around in self._waits[:-1]:
            if around.whole:
                around.seconds += passed

    def _end_again(self) -> None:
        """Tell the thread again to end, if it still stands where it was when first told.

        Elsewhere it has taken the interruption, and may be cleaning up.
        """
        if self.message is None or self._stands_at is None:
            return
        if self._stands_at == _instructions(frame_of(self._thread)):
            self._overrun(self.message)

    def _too_long(self, wait: Wait, frame: FrameType | None) -> str:
        """Write the error of a step that has not ended in time, with the user's frames."""
        where = frame_lines(standing_frames(frame))
        return redact(
            f"{wait.what} has not ended within {self.seconds:g} s: mend what never ends there, or "
            f"{self._advice}; it stands at\n{where}".rstrip()
        )

    def _arm_process_timer(self, wait: Wait) -> None:
        """Let faulthandler's thread end the process if the watch does not look again in time.

        The watch is a thread of Python: code that holds the interpreter's lock keeps it from
        looking, but not faulthandler's thread, which is C. Only training steps and evaluations
        have a limit. The process has one such timer: it is the innermost watch's.
        """
        if _watches and _watches[-1] is not self:
            return
        if self._backstop and wait.steps:
            # Where it can, the watch comes first, as its message says what to do.
            faulthandler.dump_traceback_later(self.seconds + BACKSTOP_SECONDS, exit=True, file=2)
        elif self._backstop:
            # This disarms it: nothing with a limit is waited for any more.
            faulthandler.cancel_dump_traceback_later()

    def keep_looking(self, ended: threading.Event) -> None:
        """Look again and again until ``ended`` is set; to be run in a thread."""
        # A short limit needs closer looks, so that it is not passed by much.
        while not ended.wait(min(THREAD_LOOK_SECONDS, self.seconds / LOOKS)):
            # Nobody may read what is printed any more.
            with suppress(OSError, ValueError):
                self.look()


def frame_of(thread: int) -> FrameType | None:
    """Find the frame at which a thread stands, by its identifier; None where it has ended.

    No garbage is collected meanwhile: below Python 3.11.9 a collection within that call may wait
    for a lock that the call itself holds (github.com/python/cpython/issues/106883).
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        return sys._current_frames().get(thread)
    finally:
        if was_enabled:
            gc.enable()


def _instructions(frame: FrameType | None) -> tuple[tuple[CodeType, int], ...]:
    """List code and current instruction of each call on a thread's stack.

    A thread that has moved since has another list.
    """
    return tuple((call.f_code, call.f_lasti) for call, _ in traceback.walk_stack(frame))


def _is_debugged(frame: FrameType | None) -> bool:
    """Whether a debugger has the thread: it waits for its user, who may take hours."""
    # Given None, traceback would walk the stack of this thread.
    if frame is None:
        return False
    for call, _ in traceback.walk_stack(frame):
        package = str(call.f_globals.get("__name__")).partition(".")[0]
        if package in DEBUGGERS:
            return True
    return False


# The watches that are open; the last one is the present one.
_watches: list[Watch] = []


def end_command(message: str) -> NoReturn:
    """End the command with an error, whatever the main thread does."""
    interruption.end(f"error: {message}\n", 1)


@contextmanager
def watching(
    say: Callable[[str], None],
    seconds: float | None,
    end: Callable[[str], NoReturn] | None = None,
    silence: float | None = None,
) -> Iterator[Callable[[str], None]]:
    """Watch what the body waits for. The body is given a function by which it prints its own lines.

    In a command, a step past its limit ends the process, in C code as well. In a process of the
    user's, such as a notebook, nothing is killed. The main thread is interrupted there, as by
    Ctrl-C, and a UserCodeError raised. A step that stands in C code, or in another thread, goes on,
    and a line says so.

    Args:
        say: prints a line.
        seconds: the limit of each training step and evaluation; None: ``STEP_SECONDS``.
        end: ends this process with the error's text. None: a command ends with status 1, and a
            process of the user's is interrupted.
        silence: seconds without a line, after which one says what is waited for; None: ten.
    """
    if end is None and interruption.is_installed():
        end = end_command
    on_main = threading.current_thread() is threading.main_thread()
    # With another handler than Python's own, the signal would raise no KeyboardInterrupt.
    can_interrupt = on_main and signal.getsignal(signal.SIGINT) is signal.default_int_handler

    # Called by ``watch``, which is made of it below.
    def overrun(message: str) -> bool:
        """End the process, or interrupt its main thread; True: the thread may need it again."""
        if end is not None:
            end(message)
        if not can_interrupt:
            watch.say(message)
            return False
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        # The thread may have to be told again: a signal that arrives between Python's last look for
        # signals and a wait in C interrupts nothing.
        return True

    watch = Watch(say, seconds, overrun, backstop=end is not None, silence=silence)
    ended = threading.Event()
    thread = threading.Thread(
        target=watch.keep_looking, args=(ended,), name="bstune-watchdog", daemon=True
    )
    _watches.append(watch)
    thread.start()
    try:
        yield watch.say
        ended.set()
        # An interruption that was just sent arrives here.
        thread.join()
    except BaseException as error:
        if watch.message is not None and can_interrupt:
            raise UserCodeError(watch.message) from error
        raise
    finally:
        ended.set()
        thread.join()
        _watches.remove(watch)
        if end is not None:
            # This disarms the backstop: the dump with which faulthandler ends a process that is
            # stuck in C code.
            faulthandler.cancel_dump_traceback_later()
    # The user's code has swallowed the interruption.
    if watch.message is not None and can_interrupt:
        raise UserCodeError(watch.message)


@contextmanager
def waiting_for(what: str, *, steps: bool = False, whole: bool = False) -> Iterator[Wait]:
    """Name what the body waits for: the watch, if there is one, prints that name.

    Args:
        what: the name, which the body may change.
        steps: whether it consists of training steps or evaluations, each of which has a limit.
        whole: whether lines name it in place of its parts, but for a part that takes long.
    """
    watch = _watches[-1] if _watches else None
    wait = Wait(what, watch, steps=steps, whole=whole)
    if watch is None:
        yield wait
        return
    watch.begin(wait)
    try:
        yield wait
    finally:
        watch.drop(wait)
