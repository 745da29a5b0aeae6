"""What a workload's own module raises in a trial: errors told apart and put into a line."""

import functools
import logging

import torch
from lightning.pytorch.utilities.memory import is_oom_error

from bstune.errors import ConfigError

logger = logging.getLogger(__name__)

# What a training_step raises that is called beside the training, where it could train all the same. If it could not,
# the training raises it again.
RAISED_BY_MODULES = (
    ConfigError,
    RuntimeError,
    ValueError,
    TypeError,
    LookupError,
    AssertionError,
    AttributeError,
    MemoryError,
)


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error says that memory ran out, on the device or on the host."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    text = str(error)
    return is_oom_error(error) or "CUBLAS_STATUS_ALLOC_FAILED" in text or "DefaultCPUAllocator" in text


def first_line(error: BaseException) -> str:
    """Return the first line of an error's text, or its kind where it has none."""
    return (str(error) or type(error).__name__).splitlines()[0]


@functools.cache
def warn_once(message: str) -> None:
    """Log a warning, once in the life of the process."""
    logger.warning("%s", message)
