"""Small data sets, from their publishers, with pinned checksums.

A complete local copy is used without a network, and its folder may be read-only. A missing file is
downloaded, verified and renamed into place.
Checksums and sizes are those of the uncompressed bytes, since the gzip wrapping differs between
mirrors. Parsers check nothing: their bytes have the published checksum.
"""

import gzip
import hashlib
import logging
import sys
import tarfile
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import BinaryIO, cast

import numpy as np
import pooch
from numpy.typing import NDArray

from bstune.core.errors import ConfigError, DataError
from bstune.system.files import whole_file

logger = logging.getLogger(__name__)
# Seconds for a connection, and between two reads: at two mirrors a download fails within 20 s.
MIRROR_CONNECT_SECONDS = 3.0
MIRROR_READ_SECONDS = 6.0


@dataclass(frozen=True)
class Images:
    """Images, uint8 (n, channels, height, width), with their labels, int64 (n,)."""

    images: NDArray[np.uint8]
    labels: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.labels)

    def take(self, index: NDArray[np.int64]) -> "Images":
        """Copy the examples at ``index``."""
        return Images(self.images[index], self.labels[index])


@dataclass(frozen=True)
class ImageDataset:
    """A data set as published; ``test`` is None where the publisher has no test images."""

    name: str
    white: int
    """The largest value that a pixel can have."""
    train: Images
    test: Images | None


@dataclass(frozen=True)
class Source:
    """Where the files of a data set are kept and published."""

    name: str
    folder: str
    """The name of its folder under the root."""
    sha256: Mapping[str, str]
    """The checksum of each file's uncompressed bytes, by file name."""
    sizes: Mapping[str, int]
    """The number of these bytes."""
    mirrors: tuple[str, ...]
    """https URLs that end before the remote file's name, tried in this order."""
    archive: str | None = None
    """The remote tar archive that holds folder/; None: each file is published alone."""
    suffix: str = ".gz"
    """Follows the name of a file that is published alone."""


# The files of MNIST, whose names and sizes Fashion-MNIST has taken over.
TRAIN_IMAGES = "train-images-idx3-ubyte"
TRAIN_LABELS = "train-labels-idx1-ubyte"
TEST_IMAGES = "t10k-images-idx3-ubyte"
TEST_LABELS = "t10k-labels-idx1-ubyte"
MNIST_SIZES = {
    TRAIN_IMAGES: 47_040_016,
    TRAIN_LABELS: 60_008,
    TEST_IMAGES: 7_840_016,
    TEST_LABELS: 10_008,
}


FASHION_MNIST = Source(
    name="Fashion-MNIST",
    folder="fashion-mnist",
    sha256={
        TRAIN_IMAGES: "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
        TRAIN_LABELS: "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
        TEST_IMAGES: "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
        TEST_LABELS: "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
    },
    sizes=MNIST_SIZES,
    mirrors=(
        "https://storage.googleapis.com/tensorflow/tf-keras-datasets/",
        "https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion/",
    ),
)
MNIST = Source(
    name="MNIST",
    folder="mnist",
    sha256={
        TRAIN_IMAGES: "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
        TRAIN_LABELS: "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
        TEST_IMAGES: "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
        TEST_LABELS: "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
    },
    sizes=MNIST_SIZES,
    mirrors=(
        "https://ossci-datasets.s3.amazonaws.com/mnist/",
        "https://storage.googleapis.com/cvdf-datasets/mnist/",
    ),
)
CIFAR10 = Source(
    name="CIFAR-10",
    folder="cifar-10-batches-bin",
    sha256={
        "data_batch_1.bin": "cee916563c9f80d84e3cc88e17fdc0941787f1244f00a67874d45b261883ada5",
        "data_batch_2.bin": "a591ca11fa1708a91ee40f54b3da4784ccd871ecf2137de63f51ada8b3fa57ed",
        "data_batch_3.bin": "bbe8596564c0f86427f876058170b84dac6670ddf06d79402899d93ceea26f67",
        "data_batch_4.bin": "014e562d6e23c72197cc727519169a60359f5eccd8945ad5a09d710285ff4e48",
        "data_batch_5.bin": "755304fc0b379caeae8c14f0dac912fbc7d6cd469eb67a1029a08a39453a9add",
        "test_batch.bin": "8e2eb146ae340b09e24670f29cabc6326dba54da8789dab6768acf480273f65b",
    },
    sizes={
        "data_batch_1.bin": 30_730_000,
        "data_batch_2.bin": 30_730_000,
        "data_batch_3.bin": 30_730_000,
        "data_batch_4.bin": 30_730_000,
        "data_batch_5.bin": 30_730_000,
        "test_batch.bin": 30_730_000,
    },
    mirrors=(
        "https://www.cs.toronto.edu/~kriz/",
        "https://storage.googleapis.com/s4tf-hosted-binaries/datasets/CIFAR10/",
    ),
    archive="cifar-10-binary.tar.gz",
)
AIRFOIL = Source(
    name="NASA's airfoil self-noise",
    folder="airfoil",
    sha256={
        "airfoil_self_noise.dat": "74c75fd71783f1e6b71f8a622b993dc592897a97cd689c5090a07147a1b097b3"
    },
    sizes={"airfoil_self_noise.dat": 59_984},
    mirrors=(
        "https://archive.ics.uci.edu/ml/machine-learning-databases/00291/",
        "https://d2l-data.s3-accelerate.amazonaws.com/",
    ),
    suffix="",
)

TINY_SHAKESPEARE = Source(
    name="tiny Shakespeare",
    folder="tinyshakespeare",
    sha256={"input.txt": "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"},
    sizes={"input.txt": 1_115_394},
    mirrors=("https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/",),
    suffix="",
)


# The sources by the name of the function that reads them.
LOADED = {
    "load_fashion_mnist": FASHION_MNIST,
    "load_mnist": MNIST,
    "load_cifar10": CIFAR10,
    "load_airfoil": AIRFOIL,
}


def load_digits() -> ImageDataset:
    """Read the 1797 digits of 8 x 8 pixels, 0 to 16, that scikit-learn ships.

    They have no test images.
    """
    # scikit-learn takes a second to import.
    from sklearn.datasets import load_digits as load

    digits = load()
    images = digits.images.astype(np.uint8)[:, None]
    return ImageDataset(
        name="digits", white=16, train=Images(images, digits.target.astype(np.int64)), test=None
    )


def load_fashion_mnist(root: str | Path) -> ImageDataset:
    """Read Fashion-MNIST (Xiao et al. 2017, arXiv 1708.07747).

    It has 60,000 training and 10,000 test images of 1 x 28 x 28.

    Args:
        root: folder that holds, or is to hold, ``fashion-mnist/`` with the four IDX files, gzipped
            or not; ``~`` is the home directory.

    Raises:
        DataError: if the data are missing and cannot be downloaded, or are not the published bytes.
        ConfigError: if ``root`` is empty.
    """
    return _load_idx(FASHION_MNIST, root)


def load_mnist(root: str | Path) -> ImageDataset:
    """Read MNIST (LeCun et al. 1998), kept in ``root/mnist/`` as four IDX files.

    Sizes and errors are those of :func:`load_fashion_mnist`.
    """
    return _load_idx(MNIST, root)


def load_cifar10(root: str | Path) -> ImageDataset:
    """Read CIFAR-10 (Krizhevsky 2009), binary version: 50,000 and 10,000 images of 3 x 32 x 32.

    It is kept in ``root/cifar-10-batches-bin/``. Errors are those of :func:`load_fashion_mnist`.
    """
    files = read_files(CIFAR10, root)

    def part(*names: str) -> Images:
        data = b"".join(files[name] for name in names)
        # A record has a byte for the label, then the pixels channel by channel.
        records = np.frombuffer(data, np.uint8).reshape(-1, 1 + 3 * 32 * 32)
        return Images(records[:, 1:].reshape(-1, 3, 32, 32), records[:, 0].astype(np.int64))

    # The five files data_batch_1.bin to data_batch_5.bin, and test_batch.bin.
    *train, test = sorted(CIFAR10.sha256)
    return ImageDataset(name=CIFAR10.name, white=255, train=part(*train), test=part(test))


def load_airfoil(root: str | Path) -> NDArray[np.float64]:
    """Read NASA's airfoil self-noise (Brooks, Pope and Marcolini 1989; UCI 291).

    It has 1503 rows of 5 features and a label. The features are frequency in Hz, angle of attack in
    degrees, chord length in m, free-stream velocity in m/s and displacement thickness of the
    suction side in m; the label is the sound pressure level in dB. The file is kept in
    ``root/airfoil/``. Errors are those of :func:`load_fashion_mnist`.
    """
    (data,) = read_files(AIRFOIL, root).values()
    return np.array([line.split(b"\t") for line in data.splitlines() if line], np.float64)


def _load_idx(source: Source, root: str | Path) -> ImageDataset:
    """Read the images and labels of a source in IDX files.

    A file has two zeros, the type (unsigned bytes), the number of dimensions, their sizes as 32-bit
    numbers, and the values.
    """
    arrays = dict[str, NDArray[np.uint8]]()
    for name, data in read_files(source, root).items():
        dimensions = data[3]
        shape = np.frombuffer(data, ">u4", count=dimensions, offset=4)
        arrays[name] = np.frombuffer(data, np.uint8, offset=4 + 4 * dimensions).reshape(shape)
    train = Images(arrays[TRAIN_IMAGES][:, None], arrays[TRAIN_LABELS].astype(np.int64))
    test = Images(arrays[TEST_IMAGES][:, None], arrays[TEST_LABELS].astype(np.int64))
    return ImageDataset(name=source.name, white=255, train=train, test=test)


def read_files(source: Source, root: str | Path) -> dict[str, bytes]:
    """Read the uncompressed, verified bytes of each of a source's files, by name.

    Missing files are downloaded.
    """
    folder, paths = _local_paths(source, root)
    files = dict[str, bytes]()
    for name, path in paths.items():
        try:
            if path is not None:
                with path.open("rb") as file:
                    files[name] = _verified(file, source, name)
        except OSError as error:
            raise DataError(f"{path} cannot be read: {error}") from error
        # The error is "damaged" or "not the published file", with a reason.
        except DataError as error:
            raise DataError(f"{path} is {error}. Delete it, and it is downloaded again") from error
    missing = [name for name in source.sha256 if name not in files]
    if missing:
        files |= _download(source, folder, missing)
    return files


def fetch(loader: str, root: str | Path, say: Callable[[str], None]) -> None:
    """Download the missing files of the data that the function ``loader`` of this module reads.

    ``loader`` is its name; nothing is done for one that downloads nothing. ``say`` is called with a
    line before the download. Files that are there are not verified.
    """
    source = LOADED.get(loader)
    if source is None:
        return
    folder, paths = _local_paths(source, root)
    missing = [name for name, path in paths.items() if path is None]
    if missing:
        size = sum(source.sizes[name] for name in missing) / 2**20
        say(f"downloading {source.name} to {folder}, {size:,.0f} MiB unpacked")
        _download(source, folder, missing)


def _local_paths(source: Source, root: str | Path) -> tuple[Path, dict[str, Path | None]]:
    """Give a source's folder under a root, and the path of each file, None for a missing one."""
    if not str(root or ""):
        raise ConfigError(
            f"data.root is empty: set it, or BSTUNE_DATA, to the folder that holds {source.folder}/"
        )
    try:
        folder = Path(root).expanduser() / source.folder
        return folder, {name: _local_path(folder, name) for name in source.sha256}
    # expanduser raises a RuntimeError for a home directory that there is not.
    except (OSError, RuntimeError) as error:
        raise DataError(f"data.root={root} cannot be read ({error}). {_advice(source)}") from error


def _advice(source: Source) -> str:
    """Say which folder to give for files of one's own."""
    suffix = "" if source.archive else ", gzipped or not"
    return (
        "Set data.root or the environment variable BSTUNE_DATA to a folder that holds "
        f"{source.folder}/ with {', '.join(source.sha256)}{suffix}"
    )


def _local_path(folder: Path, name: str) -> Path | None:
    """Give the path of a file, plain or gzipped; None if it is missing."""
    for path in (folder / name, folder / f"{name}.gz"):
        if path.is_file():
            return path
    return None


def _verified(file: BinaryIO, source: Source, name: str) -> bytes:
    """Read a file's bytes without their gzip wrapping, and verify their checksum.

    No published file itself begins as a gzipped one does. DataError for other bytes.
    """
    data = file.read()
    try:
        if data.startswith(b"\x1f\x8b"):
            data = gzip.decompress(data)
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise DataError(f"damaged ({error})") from error
    received = hashlib.sha256(data).hexdigest()
    if received != source.sha256[name]:
        raise DataError(
            f"not the published file: its sha256 (uncompressed) is {received}, expected "
            f"{source.sha256[name]}"
        )
    return data


def _unpacked(path: Path, source: Source, names: Sequence[str]) -> dict[str, bytes]:
    """Read the verified bytes of the files ``names`` in a gzipped tar archive.

    Nothing is written to the paths in it. DataError for a missing file.
    """
    files = dict[str, bytes]()
    # The archive is read once, from the first byte to the last.
    with tarfile.open(path, mode="r|gz") as archive:
        for member in archive:
            folder, _, name = member.name.rpartition("/")
            stream = archive.extractfile(member) if member.isfile() else None
            if folder == source.folder and name in names and stream is not None:
                files[name] = _verified(cast(BinaryIO, stream), source, name)
    for name in names:
        if name not in files:
            raise DataError(f"the archive has no file {source.folder}/{name}")
    return files


def _download(source: Source, folder: Path, missing: Sequence[str]) -> dict[str, bytes]:
    """Download missing files into a source's folder, and give their verified bytes, by name."""
    # The missing files that a remote file holds, by its name.
    names_by_remote_file: dict[str, Sequence[str]] = {
        name + source.suffix: [name] for name in missing
    }
    if source.archive:
        names_by_remote_file = {source.archive: missing}
    files: dict[str, bytes] = {}
    try:
        # Downloads are kept beside the data, on its file system, which has to have room for them:
        # that of temporary files may be small, or in memory. The data's own folder is made for
        # verified data only, so that they lie in the nearest folder that exists.
        existing = next(path for path in (folder, *folder.parents) if path.exists())
        with TemporaryDirectory(prefix=".download-", dir=existing) as staging:
            for remote_name, names in names_by_remote_file.items():
                fetched = _fetch(source, folder, remote_name, names, Path(staging, "download"))
                folder.mkdir(parents=True, exist_ok=True)
                for name, data in fetched.items():
                    with whole_file(folder / name) as file:
                        file.write(data)
                files |= fetched
    # This error is of the disk: _fetch turns errors of a mirror into a DataError.
    except OSError as error:
        raise DataError(
            f"{source.name} is not complete and cannot be written to {folder} ({error}). "
            f"{_advice(source)}, or to one that can be written"
        ) from error
    return files


def _fetch(
    source: Source, folder: Path, remote_name: str, names: Sequence[str], path: Path
) -> dict[str, bytes]:
    """Download a remote file, and give the verified bytes of the files ``names`` that it holds.

    The first mirror that has them is used. ``path`` is where the remote file is kept meanwhile.
    DataError with the failures of all mirrors.
    """
    failures = list[str]()
    # Only pooch's downloader is used: Decompress refuses a file that the server has unwrapped
    # already, and Untar follows an archive's links out of its folder on Python 3.11 (no extraction
    # filter).
    download = pooch.HTTPDownloader(
        progressbar=sys.stderr.isatty(),
        chunk_size=2**16,
        timeout=(MIRROR_CONNECT_SECONDS, MIRROR_READ_SECONDS),
    )
    for mirror in source.mirrors:
        url = mirror + remote_name
        logger.info("downloading %s", url)
        try:
            with path.open("wb") as file:
                # The last argument is a pooch registry, which this downloader does not use.
                download(url, file, None)
            if source.archive is not None:
                return _unpacked(path, source, names)
            with path.open("rb") as file:
                return {name: _verified(file, source, name) for name in names}
        # requests' exceptions are OSErrors. A captive portal's page or a cut archive raises any of
        # the others.
        except (OSError, EOFError, zlib.error, tarfile.TarError, DataError) as error:
            failures.append(f"  {url}: {_why_failed(error)}")
    missing = [name for name in source.sha256 if _local_path(folder, name) is None]
    raise DataError(
        "\n".join(
            [
                f"{source.name} is not complete in {folder}: {', '.join(missing)} missing, and "
                "every download failed:",
                *failures,
                _advice(source),
            ]
        )
    )


def _why_failed(error: Exception) -> str:
    """Say in words why a download failed."""
    # requests wraps a cause, such as a failed name resolution, twice.
    cause = None
    if error.args:
        cause = getattr(error.args[0], "reason", None)
    return str(cause or error) or type(error).__name__
