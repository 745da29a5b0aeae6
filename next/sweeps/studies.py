"""Studies of a sweep, which differ in one factor."""

import time
from collections.abc import Sequence
from pathlib import Path

from bstune.api import workload_from_config
from bstune.config import compose
from bstune.result import Result
from bstune.studied import run_study
from bstune.study.begin import begin
from bstune.system.ticker import say


def study(name: str, output: Path, arguments: Sequence[str]) -> Result:
    """Run a study, or go on with it, in a folder of its name in ``output``.

    Args:
        name: of the study.
        output: the sweep's folder, which has the studies' database, too.
        arguments: as on the command line, ``+workload=digits trials=32``; of two for one option
            the last one holds.

    Raises:
        BstuneError: as by :func:`bstune.studied.run_study`.
    """
    say(f"study {name}")
    where = [f"study={name}", f"output={output / name}", f"storage=sqlite:///{output}/studies.db"]
    command = [*arguments, *where]
    composed = compose(command)
    began = time.monotonic()
    begun = begin(composed.options, name, began, trains=composed.recipe is not None)
    return run_study(composed.options, workload_from_config(composed, command), begun)
