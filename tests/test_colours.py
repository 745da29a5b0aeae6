"""The colours of studies in MLflow are told apart by everybody."""

import math
from itertools import combinations

import numpy as np
import pytest

from bstune.tracking.colours import PALETTE

# Machado, Oliveira and Fernandes 2009, severity 1, for linear RGB.
COLOUR_BLINDNESS = {
    "none": np.eye(3),
    "protanopia": [
        [0.152286, 1.052583, -0.204868],
        [0.114503, 0.786281, 0.099216],
        [-0.003882, -0.048116, 1.051998],
    ],
    "deuteranopia": [
        [0.367322, 0.860646, -0.227968],
        [0.280085, 0.672501, 0.047413],
        [-0.011820, 0.042940, 0.968881],
    ],
    "tritanopia": [
        [1.255528, -0.076749, -0.178779],
        [-0.078411, 0.930809, 0.147602],
        [0.004733, 0.691367, 0.303900],
    ],
}


def lab(linear: np.ndarray) -> np.ndarray:
    """CIE Lab of a colour in linear sRGB."""
    # The matrix and the white point D65 are those of sRGB (IEC 61966-2-1).
    to_xyz = [[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]]
    xyz = to_xyz @ np.clip(linear, 0, 1) / [0.9505, 1.0, 1.089]
    # CIE Lab: (6/29)^3 = 0.008856, (29/6)^2/3 = 7.787.
    x, y, z = np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116)
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


@pytest.mark.parametrize("seen", COLOUR_BLINDNESS)
def test_colours_are_told_apart(seen):
    colours = []
    for name in PALETTE:
        encoded = np.array([*bytes.fromhex(name.removeprefix("#"))]) / 255
        # sRGB's transfer function, inverted.
        linear = np.where(encoded <= 0.04045, encoded / 12.92, ((encoded + 0.055) / 1.055) ** 2.4)
        colours.append(lab(COLOUR_BLINDNESS[seen] @ linear))
    for colour, other in combinations(colours, 2):
        # The least distance was 13.9 when the palette was chosen.
        assert math.dist(colour, other) > 13.5
