"""Small public data sets, from their publishers, with pinned checksums.

A file that is there is used without a network; its folder may be read-only. A missing one is
downloaded. Each data set is read once a process.
"""

import gzip
import hashlib
import io
import sys
import tarfile
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
UNUSABLE = (OSError, EOFError, KeyError, ValueError, zlib.error, tarfile.TarError)

TRAIN_IMAGES = "train-images-idx3-ubyte.gz"
TRAIN_LABELS = "train-labels-idx1-ubyte.gz"
# An IDX file begins with its type and its number of dimensions, then has the sizes, 4 bytes each.
IDX_IMAGES_HEADER_BYTES = 16
IDX_LABELS_HEADER_BYTES = 8
AIRFOIL_TABLE = "airfoil_self_noise.dat"
SHAKESPEARE_TEXT = "input.txt"
CIFAR_TEST = "test_batch.bin"
# A record of CIFAR-10 has its label, then its pixels channel by channel.
CIFAR_RECORD_BYTES = 1 + 3 * 32 * 32


@dataclass(frozen=True)
class Source:
    """Where the files of a data set are kept and published.

    Args:
        folder: the name of its folder under ``data_root``.
        sha256: the checksum of each file's uncompressed bytes, by file name: the gzip wrapping
            differs between mirrors.
        mirrors: URLs that end before a file's name, tried in this order.
        archive: the name of a gzipped tar archive that has ``folder`` with the files; None: each is
            published alone.
    """

    folder: str
    sha256: Mapping[str, str]
    mirrors: tuple[str, ...]
    archive: str | None = None


MNIST = Source(
    folder="mnist",
    sha256={
        TRAIN_IMAGES: "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
        TRAIN_LABELS: "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
    },
    mirrors=(
        "https://ossci-datasets.s3.amazonaws.com/mnist/",
        "https://storage.googleapis.com/cvdf-datasets/mnist/",
    ),
)
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
CIFAR10 = Source(
    folder="cifar-10-batches-bin",
    sha256={
        "data_batch_1.bin": "cee916563c9f80d84e3cc88e17fdc0941787f1244f00a67874d45b261883ada5",
        "data_batch_2.bin": "a591ca11fa1708a91ee40f54b3da4784ccd871ecf2137de63f51ada8b3fa57ed",
        "data_batch_3.bin": "bbe8596564c0f86427f876058170b84dac6670ddf06d79402899d93ceea26f67",
        "data_batch_4.bin": "014e562d6e23c72197cc727519169a60359f5eccd8945ad5a09d710285ff4e48",
        "data_batch_5.bin": "755304fc0b379caeae8c14f0dac912fbc7d6cd469eb67a1029a08a39453a9add",
        CIFAR_TEST: "8e2eb146ae340b09e24670f29cabc6326dba54da8789dab6768acf480273f65b",
    },
    mirrors=(
        "https://www.cs.toronto.edu/~kriz/",
        "https://storage.googleapis.com/s4tf-hosted-binaries/datasets/CIFAR10/",
    ),
    archive="cifar-10-binary.tar.gz",
)
TINY_SHAKESPEARE = Source(
    folder="tinyshakespeare",
    sha256={SHAKESPEARE_TEXT: "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"},
    mirrors=(
        "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/",
        "https://cdn.jsdelivr.net/gh/karpathy/char-rnn@master/data/tinyshakespeare/",
    ),
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
    """A data set; two are equal only if they are the same object.

    Args:
        images: uint8 (n, channels, height, width), to train on.
        labels: int64 (n,).
        test: images and labels to test on; empty where no workload takes them.
    """

    images: Tensor
    labels: Tensor
    test: tuple[Tensor, ...] = ()


@lru_cache
def load_digits() -> LabelledImages:
    """Read scikit-learn's 1,797 digits of 1 x 8 x 8 pixels, 0 to 16; they have no test images."""
    # scikit-learn takes a second to import.
    from sklearn.datasets import load_digits as load

    digits = load()
    images = torch.from_numpy(digits.images.astype(np.uint8)).unsqueeze(1)
    return LabelledImages(images, torch.from_numpy(digits.target.astype(np.int64)))


@lru_cache
def load_fashion_mnist(root: str) -> LabelledImages:
    """Read the 60,000 training images, 1 x 28 x 28, of Fashion-MNIST (arXiv 1708.07747).

    Args:
        root: the folder that has, or is to have, ``fashion-mnist/``; ``~`` is the home directory.

    Raises:
        InputError: for a missing file that cannot be downloaded, or one that was not published.
    """
    return _load_idx(FASHION_MNIST, root)


@lru_cache
def load_mnist(root: str) -> LabelledImages:
    """Read MNIST's 60,000 training images (LeCun et al. 1998), 1 x 28 x 28, kept in ``mnist/``.

    Errors as by :func:`load_fashion_mnist`.
    """
    return _load_idx(MNIST, root)


def _load_idx(source: Source, root: str) -> LabelledImages:
    """Read a data set in MNIST's format; errors as by :func:`read_file`."""
    pixels = np.frombuffer(read_file(source, TRAIN_IMAGES, root), np.uint8)
    labels = np.frombuffer(read_file(source, TRAIN_LABELS, root), np.uint8)
    images = torch.tensor(pixels[IDX_IMAGES_HEADER_BYTES:]).view(-1, 1, 28, 28)
    labels = labels[IDX_LABELS_HEADER_BYTES:].astype(np.int64)
    return LabelledImages(images, torch.from_numpy(labels))


@lru_cache
def load_cifar10(root: str) -> LabelledImages:
    """Read CIFAR-10 (Krizhevsky 2009), 50,000 images to train on and 10,000 to test, 3 x 32 x 32.

    The binary version, kept in ``cifar-10-batches-bin/``; errors as by :func:`load_fashion_mnist`.
    """
    files = {name: read_file(CIFAR10, name, root) for name in CIFAR10.sha256}
    test = _cifar_records(files.pop(CIFAR_TEST))
    images, labels = _cifar_records(b"".join(files.values()))
    return LabelledImages(images, labels, test=test)


def _cifar_records(data: bytes) -> tuple[Tensor, Tensor]:
    """Images, uint8 (n, 3, 32, 32), and labels, int64 (n,), of a file of CIFAR-10."""
    records = torch.frombuffer(bytearray(data), dtype=torch.uint8).view(-1, CIFAR_RECORD_BYTES)
    return records[:, 1:].reshape(-1, 3, 32, 32), records[:, 0].long()


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
    """Put the published file in its place, and all others of its archive."""
    download = pooch.HTTPDownloader(progressbar=sys.stderr.isatty(), timeout=MIRROR_TIMEOUT)
    remote = source.archive or path.name
    failures = []
    for mirror in source.mirrors:
        received = io.BytesIO()
        try:
            download(mirror + remote, received, None)
            files = {path.name: received.getvalue()}
            if source.archive:
                files = _unpacked(source, received)
            for name, data in files.items():
                _published_bytes(data, source.sha256[name])
        except UNUSABLE as error:
            failures.append(type(error).__name__)
            continue
        for name, data in files.items():
            with whole_file(path.with_name(name)) as file:
                file.write(data)
        return
    url = source.mirrors[0] + remote
    get = f"curl --create-dirs -Lo {path} {url}"
    if source.archive:
        get = f"mkdir -p {path.parent} && curl -L {url} | tar xz -C {path.parents[1]}"
    raise InputError(
        f"{path} is missing and cannot be downloaded ({', '.join(failures)}): get it with '{get}', "
        f"or set data_root to the folder that has {source.folder}/{path.name}"
    )


def _unpacked(source: Source, received: io.BytesIO) -> dict[str, bytes]:
    """Read a source's files in its archive; KeyError for one that is missing."""
    received.seek(0)
    files = {}
    with tarfile.open(fileobj=received, mode="r:gz") as archive:
        for name in source.sha256:
            file = archive.extractfile(f"{source.folder}/{name}")
            files[name] = file.read() if file else b""
    return files
