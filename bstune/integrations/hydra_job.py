"""What a Hydra job takes of its trial, and what runs in its process; it imports nothing."""

import time
from collections.abc import Callable
from typing import Any

# What each trial has that an application may take, under a key of its own.
TAKEN = ("batch_size", "lr", "seed", "max_steps", "resume_from", "save_to")


def call_timed(task: Callable[[Any], Any], config: Any) -> tuple[Any, float]:
    """Call a job where the launcher runs it: what it returns, and its seconds.

    Its ``sys.exit`` is an error of that job alone.
    """
    began = time.perf_counter()
    try:
        returned = task(config)
    except SystemExit as error:
        raise RuntimeError(f"the job called sys.exit({error.code})") from error
    return returned, time.perf_counter() - began
