"""What runs in the process of a Hydra job; it imports nothing."""

import time
from collections.abc import Callable
from typing import Any


def timed(task: Callable[[Any], Any], config: Any) -> tuple[Any, float]:
    """What a job returns, and its seconds; its ``sys.exit`` is an error of that job alone."""
    began = time.perf_counter()
    try:
        returned = task(config)
    except SystemExit as error:
        raise RuntimeError(f"the job called sys.exit({error.code})") from error
    return returned, time.perf_counter() - began
