"""Which of Lightning's two packages is installed: ``lightning``, or ``pytorch_lightning`` alone.

Both are the same code with different classes. Where both are there, bstune's own code is
``lightning``'s.
"""

from functools import cache
from importlib import import_module

DEFAULT, OTHER = "lightning.pytorch", "pytorch_lightning"
# What they are called where packages are installed.
DISTRIBUTIONS = {DEFAULT: "lightning", OTHER: "pytorch-lightning"}


@cache
def installed_lightning() -> str:
    """Import one of the packages, and name it; ModuleNotFoundError where there is neither."""
    try:
        import_module(DEFAULT)
    except ModuleNotFoundError as error:
        # What is missing within the package is another matter.
        if error.name not in ("lightning", DEFAULT):
            raise
        import_module(OTHER)
        return OTHER
    return DEFAULT
