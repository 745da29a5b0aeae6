"""Which of Lightning's two packages is installed: ``lightning``, or ``pytorch_lightning`` alone.

Both are the same code with different classes. Where both are there, bstune's own code is
``lightning``'s.
"""

from functools import cache
from importlib import import_module

DEFAULT, OTHER = "lightning.pytorch", "pytorch_lightning"
# The names of their distributions, as pip knows them.
DISTRIBUTIONS = {DEFAULT: "lightning", OTHER: "pytorch-lightning"}


@cache
def installed_lightning() -> str:
    """Import the installed package, and give its name; ModuleNotFoundError if there is none.

    ``lightning`` goes before ``pytorch_lightning``.
    """
    try:
        import_module(DEFAULT)
    except ModuleNotFoundError as error:
        # A module that is missing within the package is another matter.
        if error.name not in ("lightning", DEFAULT):
            raise
        import_module(OTHER)
        return OTHER
    return DEFAULT
