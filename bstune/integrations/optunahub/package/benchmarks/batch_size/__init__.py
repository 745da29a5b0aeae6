"""Recorded trainings as an OptunaHub benchmark.

``optunahub.load_module("benchmarks/batch_size").Problem`` loads it.
"""

from ._batch_size import Problem
from ._batch_size import Run


__all__ = ["Problem", "Run"]
