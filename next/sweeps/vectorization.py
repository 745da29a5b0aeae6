"""A placeholder."""

from pathlib import Path

from matplotlib.figure import Figure
from pandas import DataFrame
from pydantic import PositiveInt


def run(output: Path, *, size: PositiveInt) -> tuple[DataFrame, Figure]:
    """Do nothing."""
    output.mkdir(parents=True)
    return DataFrame({"size": [size]}), Figure()
