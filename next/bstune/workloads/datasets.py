"""Small public data sets, from their publishers, with pinned checksums.

A file that is there is used without a network; its folder may be read-only. A missing one is
downloaded. Each data set is read once a process.
"""

import gzip
import hashlib
import io
import sys
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
import pooch
import torch
from numpy.typing import NDArray
from torch import Tensor

from bstune.core.errors import InputError
from bstune.system.files import whole_file

# Seconds for a connection, and between two reads: where there is no network, a mirror fails soon.
MIRROR_TIMEOUT = (3.0, 6.0)
GZIP_MAGIC = b"\x1f\x8b"
# What reading a file, a download or damaged bytes raise; exceptions of requests are OSErrors.
UNUSABLE = (OSError, EOFError, zlib.error, ValueError)

TRAIN_IMAGES = "train-images-idx3-ubyte.gz"
TRAIN_LABELS = "train-labels-idx1-ubyte.gz"
# An IDX file begins with its type and its number of dimensions, then has the sizes, 4 bytes each.
IDX_IMAGES_HEADER_BYTES = 16
IDX_LABELS_HEADER_BYTES = 8
AIRFOIL_TABLE = "airfoil_self_noise.dat"
SHAKESPEARE_TEXT = "input.txt"


@dataclass(frozen=True)
class Source:
    """Where the files of a data set are kept and published.

    Args:
        folder: the name of its folder under ``data_root``.
        sha256: the checksum of each file's uncompressed bytes, by file name: the gzip wrapping
            differs between mirrors.
        mirrors: URLs that end before a file's name, tried in this order.
    """

    folder: str
    sha256: Mapping[str, str]
    mirrors: tuple[str, ...]


FASHION_MNIST = Source(
    folder="fashion-mnist",
    sha256={
        TRAIN_IMAGES: "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
        TRAIN_LABELS: "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
    },
    mirrors=(
        "https://storage.googleapis.com/tensorflow/tf-keras-datasets/",
        "https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion/",
    ),
)
TINY_SHAKESPEARE = Source(
    folder="tinyshakespeare",
    sha256={SHAKESPEARE_TEXT: "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"},
    mirrors=("https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/",),
)
AIRFOIL = Source(
    folder="airfoil",
    sha256={AIRFOIL_TABLE: "74c75fd71783f1e6b71f8a622b993dc592897a97cd689c5090a07147a1b097b3"},
    mirrors=(
        "https://archive.ics.uci.edu/ml/machine-learning-databases/00291/",
        "https://d2l-data.s3-accelerate.amazonaws.com/",
    ),
)


@dataclass(frozen=True, eq=False)
class LabelledImages:
    """A data set's training images; two are equal only if they are the same object.

    Args:
        images: uint8 (n, channels, height, width).
        labels: int64 (n,).
        white: the largest value that a pixel can have.
    """

    images: Tensor
    labels: Tensor
    white: int


@lru_cache
def load_digits() -> LabelledImages:
    """Read scikit-learn's 1,797 digits of 1 x 8 x 8 pixels, 0 to 16; they have no test images."""
    # scikit-learn takes a second to import.
    from sklearn.datasets import load_digits as load

    digits = load()
    images = torch.from_numpy(digits.images.astype(np.uint8)).unsqueeze(1)
    return LabelledImages(images, torch.from_numpy(digits.target.astype(np.int64)), white=16)


@lru_cache
def load_fashion_mnist(root: str) -> LabelledImages:
    """Read the 60,000 training images, 1 x 28 x 28, of Fashion-MNIST (arXiv 1708.07747).

    Args:
        root: the folder that has, or is to have, ``fashion-mnist/``; ``~`` is the home directory.

    Raises:
        InputError: for a missing file that cannot be downloaded, or one that was not published.
    """
    pixels = np.frombuffer(read_file(FASHION_MNIST, TRAIN_IMAGES, root), np.uint8)
    labels = np.frombuffer(read_file(FASHION_MNIST, TRAIN_LABELS, root), np.uint8)
    images = torch.tensor(pixels[IDX_IMAGES_HEADER_BYTES:]).view(-1, 1, 28, 28)
    labels = labels[IDX_LABELS_HEADER_BYTES:].astype(np.int64)
    return LabelledImages(images, torch.from_numpy(labels), white=255)


@lru_cache
def load_airfoil(root: str) -> NDArray[np.float64]:
    """Read NASA's airfoil self-noise (UCI 291): 1,503 rows of 5 features and a label.

    The features are frequency in Hz, angle of attack in degrees, chord length in m, free-stream
    velocity in m/s and displacement thickness of the suction side in m; the label is the sound
    pressure level in dB. The file is kept in ``airfoil/``; errors as by
    :func:`load_fashion_mnist`.
    """
    text = read_file(AIRFOIL, AIRFOIL_TABLE, root).decode()
    return np.loadtxt(io.StringIO(text))


@lru_cache
def load_tiny_shakespeare(root: str) -> Tensor:
    """Read 40,000 lines of Shakespeare (Karpathy 2015) as 65 characters, uint8 (1,115,394,).

    The file is kept in ``tinyshakespeare/``; errors as by :func:`load_fashion_mnist`.
    """
    characters = np.frombuffer(read_file(TINY_SHAKESPEARE, SHAKESPEARE_TEXT, root), np.uint8)
    _, tokens = np.unique(characters, return_inverse=True)
    return torch.from_numpy(tokens.astype(np.uint8))


def read_file(source: Source, name: str, root: str) -> bytes:
    """Read the uncompressed bytes of one file of a source, which is downloaded if it is missing.

    Args:
        source: whose ``sha256`` has ``name``.
        name: of the file.
        root: the folder of the source's folder; ``~`` is the home directory.

    Raises:
        InputError: if it cannot be downloaded or read, or is not the published file.
    """
    path = Path(root).expanduser() / source.folder / name
    if not path.exists():
        _download(source, path)
    try:
        return _published_bytes(path.read_bytes(), source.sha256[name])
    except UNUSABLE as error:
        raise InputError(
            f"{path} is not the published file ({error}): delete it, and it is downloaded again"
        ) from error


def _published_bytes(data: bytes, sha256: str) -> bytes:
    """Unwrap gzipped bytes; ValueError unless the result has the checksum."""
    # Some servers unwrap a gzipped file while they send it.
    if data.startswith(GZIP_MAGIC):
        data = gzip.decompress(data)
    received = hashlib.sha256(data).hexdigest()
    if received != sha256:
        raise ValueError(f"its sha256, uncompressed, must be {sha256}, but is {received}")
    return data


def _download(source: Source, path: Path) -> None:
    """Put the published file in its place, from the first mirror that has it."""
    download = pooch.HTTPDownloader(progressbar=sys.stderr.isatty(), timeout=MIRROR_TIMEOUT)
    failures = []
    for mirror in source.mirrors:
        received = io.BytesIO()
        try:
            download(mirror + path.name, received, None)
            _published_bytes(received.getvalue(), source.sha256[path.name])
        except UNUSABLE as error:
            failures.append(type(error).__name__)
            continue
        with whole_file(path) as file:
            file.write(received.getvalue())
        return
    raise InputError(
        f"{path} is missing and cannot be downloaded ({', '.join(failures)}): get it with "
        f"'curl --create-dirs -Lo {path} {source.mirrors[0]}{path.name}', or set data_root to the "
        f"folder that has {source.folder}/{path.name}"
    )
