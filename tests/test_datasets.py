import gzip
import hashlib
import io
import stat
import struct
import tarfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from threading import Barrier

import numpy as np
import pytest
from toolbox import data_root

from bstune.core.errors import ConfigError, DataError
from bstune.workloads import datasets

RNG = np.random.RandomState(0)
IDX_ARRAYS = {
    "train-images-idx3-ubyte": RNG.randint(0, 256, (6, 4, 5)).astype(np.uint8),
    "train-labels-idx1-ubyte": np.arange(6, dtype=np.uint8),
    "t10k-images-idx3-ubyte": RNG.randint(0, 256, (3, 4, 5)).astype(np.uint8),
    "t10k-labels-idx1-ubyte": np.arange(3, dtype=np.uint8),
}


def idx_bytes(array):
    # The format's head: type 8 is an unsigned byte, then the size of each dimension.
    header = bytes([0, 0, 8, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape)
    return header + array.tobytes()


# The size of each of these small files is pinned to this.
SIZE = 2000
IDX_FILES = {name: idx_bytes(array) for name, array in IDX_ARRAYS.items()}
# File, image, channel, row, column.
CIFAR_IMAGES = RNG.randint(0, 256, (6, 2, 3, 32, 32)).astype(np.uint8)
CIFAR_FILES = {}
for number, name in enumerate(sorted(datasets.CIFAR10.sha256)):
    # Each of these files has two images: of the file's number, and of 9 less that.
    first, second = CIFAR_IMAGES[number]
    content = bytes([number]) + first.tobytes() + bytes([9 - number]) + second.tobytes()
    CIFAR_FILES[name] = content


def digest(data):
    return hashlib.sha256(data).hexdigest()


class FakeMirrors:
    """Stands in for pooch.HTTPDownloader: serves ``pages``, raises what is an exception, and records every URL."""

    def __init__(self):
        self.pages = {}
        self.requested = []

    def __call__(self, **_options):
        return self.download

    def download(self, url, output_file, pooch):
        assert pooch is None
        self.requested.append(url)
        page = self.pages.get(url, OSError("404 Not Found"))
        if isinstance(page, Exception):
            output_file.write(b"half a fi")
            raise page
        output_file.write(page)


@pytest.fixture(autouse=True)
def mirrors(monkeypatch):
    fake = FakeMirrors()
    monkeypatch.setattr(datasets.pooch, "HTTPDownloader", fake)
    for name, files, hosts in (
        ("FASHION_MNIST", IDX_FILES, ("one", "two")),
        ("CIFAR10", CIFAR_FILES, ("one",)),
    ):
        published = {
            "sha256": {file: digest(data) for file, data in files.items()},
            "sizes": {file: max(len(data), SIZE) for file, data in files.items()},
            "mirrors": tuple(f"http://{host}/" for host in hosts),
        }
        source = replace(getattr(datasets, name), **published)
        monkeypatch.setattr(datasets, name, source)
    return fake


def write(folder, files, wrap=bytes, suffix=""):
    folder.mkdir(parents=True)
    for name, data in files.items():
        (folder / f"{name}{suffix}").write_bytes(wrap(data))


def listing(root):
    return sorted(str(path.relative_to(root)) for path in root.rglob("*") if path.is_file())


def assert_fashion(dataset):
    for part, prefix in ((dataset.train, "train"), (dataset.test, "t10k")):
        assert np.array_equal(part.images[:, 0], IDX_ARRAYS[f"{prefix}-images-idx3-ubyte"])
        assert np.array_equal(part.labels, IDX_ARRAYS[f"{prefix}-labels-idx1-ubyte"])
    assert (dataset.white, dataset.train.images.dtype, dataset.train.labels.dtype) == (
        255,
        np.uint8,
        np.int64,
    )


def test_complete_local_copy_needs_no_network_and_is_left_alone(tmp_path, mirrors, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    copies = {
        "plain": (bytes, ""),
        "gzip": (gzip.compress, ".gz"),
        # A gzip file holds a time, so that the same content has other bytes.
        "other": (partial(gzip.compress, mtime=1), ".gz"),
    }
    for name, (wrap, suffix) in copies.items():
        root = tmp_path / name
        write(root / "fashion-mnist", IDX_FILES, wrap, suffix)
        before = listing(root)
        # Nothing can be written there.
        for folder in (root / "fashion-mnist", root):
            folder.chmod(stat.S_IRUSR | stat.S_IXUSR)
        assert_fashion(datasets.load_fashion_mnist(f"~/{name}"))
        assert mirrors.requested == []
        assert listing(root) == before


WRAPPED = OSError("pool")
WRAPPED.reason = "no such host"
# Each of these pages cannot be used, for the reason beside it.
BAD_PAGES = {
    "offline": (OSError(WRAPPED), "no such host"),
    "empty error": (EOFError(), "EOFError"),
    "captive portal": (b"<html>log in</html>", f"{digest(b'<html>log in</html>')}, expected "),
    "truncated": (gzip.compress(RNG.bytes(1000), mtime=0)[:-20], "damaged ("),
    "other bytes": (
        gzip.compress(b"something else", mtime=0),
        "not the published file: its sha256 (uncompressed) is",
    ),
    "damaged": (gzip.compress(RNG.bytes(1000), mtime=0)[:100] + bytes(100), "damaged ("),
}


@pytest.mark.parametrize(("bad", "reason"), BAD_PAGES.values(), ids=BAD_PAGES)
def test_download_goes_on_to_the_next_mirror_or_leaves_nothing_and_says_what_was_tried(
    tmp_path, mirrors, bad, reason
):
    mirrors.pages = {f"http://one/{name}.gz": bad for name in IDX_FILES}
    root = tmp_path / "new" / "root"
    with pytest.raises(DataError) as caught:
        datasets.load_fashion_mnist(root)
    said = (
        str(root / "fashion-mnist"),
        *IDX_FILES,
        "http://one/",
        "http://two/",
        "404 Not Found",
        "BSTUNE_DATA",
    )
    for text in (*said, reason):
        assert text in str(caught.value)
    assert list(tmp_path.iterdir()) == []
    # One file is enough to know: the time-outs do not add up over all files.
    assert len(mirrors.requested) == 2

    # Some servers unwrap the gzip.
    for number, (name, data) in enumerate(IDX_FILES.items()):
        mirrors.pages[f"http://two/{name}.gz"] = data if number % 2 else gzip.compress(data)
    # The first comes from the mirror, the second from the folder.
    for _ in range(2):
        assert_fashion(datasets.load_fashion_mnist(root))
        assert listing(tmp_path) == sorted(f"new/root/fashion-mnist/{name}" for name in IDX_FILES)
        # Eight more: the four files from the first mirror, and from the second.
        assert len(mirrors.requested) == 2 + 8


@pytest.mark.parametrize(
    ("suffix", "bad"),
    [("", "captive portal"), (".gz", "truncated"), (".gz", "damaged"), (".gz", "other bytes")],
)
def test_damaged_local_file_is_named_and_not_replaced(tmp_path, mirrors, suffix, bad):
    folder = tmp_path / "fashion-mnist"
    (data, text) = BAD_PAGES[bad]
    others = dict(IDX_FILES)
    del others["train-labels-idx1-ubyte"]
    write(folder, others)
    damaged = folder / f"train-labels-idx1-ubyte{suffix}"
    damaged.write_bytes(data)
    with pytest.raises(DataError) as caught:
        datasets.load_fashion_mnist(tmp_path)
    for said in (f"{damaged} is ", text, "Delete it, and it is downloaded again"):
        assert said in str(caught.value)
    assert mirrors.requested == []
    assert damaged.read_bytes() == data


def test_files_downloaded_before_a_failure_are_kept(tmp_path, mirrors):
    first = next(iter(IDX_FILES))
    mirrors.pages[f"http://one/{first}.gz"] = gzip.compress(IDX_FILES[first])
    with pytest.raises(DataError) as caught:
        datasets.load_fashion_mnist(tmp_path)
    assert f"{first}, " not in str(caught.value).splitlines()[0]
    assert listing(tmp_path) == [f"fashion-mnist/{first}"]
    assert (tmp_path / "fashion-mnist" / first).read_bytes() == IDX_FILES[first]


@pytest.mark.parametrize(
    ("root", "kind", "text"),
    [
        (__file__, DataError, r"cannot be written to .*/fashion-mnist .*BSTUNE_DATA"),
        ("~no-such-user-here/x", DataError, r"data\.root=~no-such-user-here/x cannot be read"),
        ("", ConfigError, r"data\.root is empty"),
        (None, ConfigError, r"data\.root is empty"),
    ],
)
def test_root_that_cannot_be_used(mirrors, root, kind, text):
    with pytest.raises(kind, match=text):
        datasets.load_fashion_mnist(root)
    assert mirrors.requested == []


ARCHIVE = "http://one/cifar-10-binary.tar.gz"
FIRST = "cifar-10-batches-bin/data_batch_1.bin"


def tar_bytes(files, target=None):
    """An archive; members are links to ``target`` if there is one."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        for name, data in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            if target:
                member.type = tarfile.SYMTYPE
                member.linkname = target
                member.size = 0
            archive.addfile(member, io.BytesIO(data))
    return buffer.getvalue()


def test_cifar10_is_taken_from_its_archive_where_files_are_missing(tmp_path, mirrors):
    members = {f"cifar-10-batches-bin/{name}": data for name, data in CIFAR_FILES.items()}
    mirrors.pages[ARCHIVE] = tar_bytes(members | {"../evil": b"x", "readme.html": b"x"})
    # All files, none and one of them are missing.
    for missing, requests in (
        (None, 1),
        (None, 1),
        ("data_batch_3.bin", 2),
    ):
        if missing:
            (tmp_path / "root" / "cifar-10-batches-bin" / missing).unlink()
        dataset = datasets.load_cifar10(tmp_path / "root")
        assert np.array_equal(dataset.train.images, CIFAR_IMAGES[:5].reshape(10, 3, 32, 32))
        # The number and 9 less it, of each of five files.
        assert dataset.train.labels.tolist() == [0, 9, 1, 8, 2, 7, 3, 6, 4, 5]
        assert np.array_equal(dataset.test.images, CIFAR_IMAGES[5])
        assert dataset.test.labels.tolist() == [5, 4]
        assert listing(tmp_path) == sorted(f"root/{name}" for name in members)
        assert mirrors.requested == [ARCHIVE] * requests


BAD_ARCHIVES = {
    "missing member": (
        tar_bytes({"other/data_batch_1.bin": b"x"}),
        f"the archive has no file {FIRST}",
    ),
    "link": (tar_bytes({FIRST: b""}, target="/etc/passwd"), f"the archive has no file {FIRST}"),
    "truncated": (tar_bytes({FIRST: RNG.bytes(4000)})[:-500], "unexpected end of data|invalid"),
    "another file": (tar_bytes({FIRST: b"x"}), "not the published file"),
    "not an archive": (b"<html>", f"{ARCHIVE}: "),
}


@pytest.mark.parametrize(("archive", "text"), BAD_ARCHIVES.values(), ids=BAD_ARCHIVES)
def test_cifar10_bad_archive(tmp_path, mirrors, archive, text):
    mirrors.pages[ARCHIVE] = archive
    with pytest.raises(DataError, match=text):
        datasets.load_cifar10(tmp_path)
    assert listing(tmp_path) == []


def test_two_processes_download_at_once(tmp_path, mirrors, monkeypatch):
    mirrors.pages = {
        f"http://one/{name}.gz": gzip.compress(data) for name, data in IDX_FILES.items()
    }
    both = Barrier(2, timeout=30)
    verified = datasets._verified

    def meet(*arguments):
        # Each process has its download, and the folder is still empty.
        both.wait()
        return verified(*arguments)

    monkeypatch.setattr(datasets, "_verified", meet)
    with ThreadPoolExecutor() as pool:
        first = pool.submit(datasets.load_fashion_mnist, tmp_path / "root")
        second = pool.submit(datasets.load_fashion_mnist, tmp_path / "root")
        assert_fashion(first.result())
        assert_fashion(second.result())
    assert listing(tmp_path) == sorted(f"root/fashion-mnist/{name}" for name in IDX_FILES)


def test_digits():
    dataset = datasets.load_digits()
    assert dataset.train.images.shape == (1797, 1, 8, 8)
    assert (dataset.train.images.dtype, dataset.train.images.max(), dataset.white) == (
        np.uint8,
        16,
        16,
    )
    assert np.bincount(dataset.train.labels).tolist() == [
        178,
        182,
        177,
        183,
        181,
        182,
        181,
        179,
        174,
        180,
    ]
    assert dataset.test is None


@pytest.mark.parametrize(
    ("load", "folder", "shape", "mean"),
    [
        (datasets.load_fashion_mnist, "fashion-mnist", (1, 28, 28), 0.2860),
        (datasets.load_mnist, "mnist", (1, 28, 28), 0.1307),
        (datasets.load_cifar10, "cifar-10-batches-bin", (3, 32, 32), 0.4734),
    ],
)
def test_published_data(monkeypatch, load, folder, shape, mean):
    root = data_root(folder)
    monkeypatch.undo()
    # Means that are published with each data set, over all channels.
    dataset = load(root)
    n = 50_000 if shape[0] == 3 else 60_000
    assert (dataset.train.images.shape, dataset.test.images.shape) == (
        (n, *shape),
        (10_000, *shape),
    )
    assert (len(dataset.test.labels), dataset.train.labels.max()) == (10_000, 9)
    assert dataset.train.images.mean() / 255 == pytest.approx(mean, abs=1e-4)
