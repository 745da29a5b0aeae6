"""One line a trial, on the error stream, so that the answer alone is the output."""

import sys
from collections.abc import Callable

from bstune.core.records import Record
from bstune.system.console import number
from bstune.system.secrets import hide_in_text

_ROLES = {"baseline": "baseline", "search": "trial", "new seed": "new seed"}


def say(text: str) -> None:
    """Print a line of progress at once."""
    print(hide_in_text(text), file=sys.stderr, flush=True)


class Progress:
    """An observer that says how each trial ended."""

    def __init__(self, write: Callable[[str], None] = say) -> None:
        self._write = write

    def finished(self, record: Record) -> None:
        """Say how a trial ended."""
        what = _ROLES[record.role]
        if record.resumed_from is not None:
            what = f"resumed {record.resumed_from}"
        line = (
            f"{record.number:>4}  {what:<12}  batch size {record.batch_size:<6} "
            f"lr {number(record.lr):<9} {record.status} after {record.steps:,} steps"
        )
        if record.message:
            line += f": {record.message}"
        self._write(line)
