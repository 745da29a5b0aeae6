"""bstune tunes the batch size and learning rate of a training workload, and maps its critical batch size.

Importing this package is cheap: torch, lightning and mlflow are loaded by the modules that use them.
"""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("bstune")
except PackageNotFoundError:  # a source tree that is not installed
    __version__ = "unknown"
