"""One matrix product in pieces of different sizes, and one vector read in different orders.

Zhang et al., Dive into Deep Learning, 12.5.1 and 12.5.2. A product of n x n matrices is 2 n^3
FLOPs. What its pieces cost is their calls, and what they leave in the caches: so a vector is
gathered in orders that differ in the addresses alone.
"""

from functools import partial
from pathlib import Path

import torch
from matplotlib.figure import Figure
from pandas import DataFrame
from pydantic import PositiveFloat, PositiveInt

from bstune.recipe.recipe import resolve_device
from bstune.study.machine import describe_machine
from bstune.sweeps.timed import Ways, timed

# Numbers of fp32 in 64 bytes, a line of most processors' caches, and in a KiB.
IN_LINE = 16
IN_KIB = 256


def run(
    output: Path,
    *,
    device: str,
    size: PositiveInt,
    block: PositiveInt,
    gathered_kib: PositiveInt,
    rounds: PositiveInt,
    seconds: PositiveFloat,
) -> tuple[DataFrame, Figure]:
    """Time the product by its pieces, and gathering by its order.

    Args:
        output: the sweep's folder.
        device: ``cpu``, ``cuda`` or ``auto``.
        size: rows, and columns, of each matrix, in fp32.
        block: columns of a block.
        gathered_kib: of the vector that is gathered.
        rounds, seconds: as of :func:`bstune.sweeps.timed.timed`.
    """
    machine = describe_machine(device, None)
    with torch.device(resolve_device(device)):
        ways = {**products(size, block), **gathers(gathered_kib)}
    return timed(output, machine, ways, rounds, seconds)


def products(size: int, block: int) -> Ways:
    """Ways to multiply two matrices by pieces of the product, which their calls give."""
    b, c = torch.randn(2, size, size)
    a = torch.zeros_like(b)

    def multiply_by_pieces(rows: int, columns: int) -> torch.Tensor:
        for i in range(0, size, rows):
            for j in range(0, size, columns):
                down, right = slice(i, i + rows), slice(j, j + columns)
                torch.mm(b[down], c[:, right], out=a[down, right])
        return a

    pieces = {
        "elements": (1, 1),
        "rows": (1, size),
        "columns": (size, 1),
        f"{block} columns": (size, block),
        "whole": (size, size),
    }
    group = f"product of {size} x {size}, GFLOP/s"
    work = 2e-9 * size**3
    return {
        (group, way): (work, partial(multiply_by_pieces, *piece)) for way, piece in pieces.items()
    }


def gathers(kib: int) -> Ways:
    """Orders to gather a vector in, as their calls do."""
    vector = torch.arange(float(kib * IN_KIB))
    places = torch.arange(len(vector))
    orders = {
        "in order": places,
        "in strides of 64 bytes": places.view(-1, IN_LINE).T.flatten(),
        "at random": torch.randperm(len(vector)),
    }
    gather = partial(torch.index_select, vector, 0, out=torch.empty_like(vector))
    group = f"gathering {kib} KiB, GB/s"
    work = 1e-9 * vector.nbytes
    return {(group, way): (work, partial(gather, index=order)) for way, order in orders.items()}
