"""Tells errors in a trial apart, such as memory that ran out, and words them."""

import logging
import re

import torch

from bstune.system.console import without_numbers
from bstune.trial.devices.device import memory_ran_out
from bstune.trial.lightning.installed import is_oom_error

logger = logging.getLogger(__name__)

# Errors of a step that is run beside the training: the user's code may raise anything. If the
# training cannot run the step either, it raises the error again.
USER_CODE_ERRORS = (Exception,)
# Texts of torch and CUDA's libraries for memory that ran out, which torch raises as a RuntimeError.
NO_MEMORY = re.compile(
    r"(CU[A-Z]+_STATUS|[A-Z]+)_ALLOC(ATION)?_FAILED|CUDA error: out of memory|DefaultCPUAllocator"
)
# Texts that have other reasons too, such as a convolution that cuDNN does not have.
PERHAPS_NO_MEMORY = re.compile(
    "unable to find an engine|CU(BLAS|DNN|SOLVER)_STATUS_(NOT_INITIALIZED|INTERNAL_ERROR)"
)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory ran out, on the device or on the host."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError) or is_oom_error(error):
        return True
    text = str(error)
    if NO_MEMORY.search(text):
        return True
    # These texts have other causes as well.
    return bool(PERHAPS_NO_MEMORY.search(text)) and memory_ran_out()


def first_line(error: BaseException) -> str:
    """Give the first line of an error's text, or the name of its class where it has no text."""
    return (str(error) or type(error).__name__).splitlines()[0]


# Messages that were logged, without their numbers.
WARNED = set[str]()


def warn_once(message: str) -> None:
    """Log a warning, once in the life of the process, whatever the numbers in it."""
    kind = without_numbers(message)
    if kind in WARNED:
        return
    WARNED.add(kind)
    logger.warning("%s", message)
