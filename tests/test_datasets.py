import gzip
import hashlib
import io
import stat
import struct
import subprocess
import sys
import tarfile
from dataclasses import replace
from functools import partial
from pathlib import Path

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
    header = bytes([0, 0, 8, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape)
    return header + array.tobytes()


def cifar_bytes(labels, images):
    return np.concatenate([np.array(labels, np.uint8)[:, None], images.reshape(len(labels), -1)], axis=1).tobytes()


IDX_FILES = {name: idx_bytes(array) for name, array in IDX_ARRAYS.items()}
CIFAR_IMAGES = RNG.randint(0, 256, (6, 2, 3, 32, 32)).astype(np.uint8)  # file, image, channel, row, column
CIFAR_FILES = {name: cifar_bytes([k, 9 - k], CIFAR_IMAGES[k]) for k, name in enumerate(sorted(datasets.CIFAR10.sha256))}


PARSE_PAIRS = partial(datasets.parse_table, columns=2)


def checksums(files):
    return {name: hashlib.sha256(data).hexdigest() for name, data in files.items()}


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
            Path(output_file).write_bytes(b"half a fi")
            raise page
        Path(output_file).write_bytes(page)


@pytest.fixture(autouse=True)
def mirrors(monkeypatch):
    fake = FakeMirrors()
    monkeypatch.setattr(datasets.pooch, "HTTPDownloader", fake)
    fashion = replace(datasets.FASHION_MNIST, sha256=checksums(IDX_FILES), mirrors=("http://one/", "http://two/"))
    cifar = replace(datasets.CIFAR10, sha256=checksums(CIFAR_FILES), mirrors=("http://one/",))
    monkeypatch.setattr(datasets, "FASHION_MNIST", fashion)
    monkeypatch.setattr(datasets, "CIFAR10", cifar)
    return fake


def write(folder, files, wrap=lambda data: data, suffix=""):
    folder.mkdir(parents=True)
    for name, data in files.items():
        (folder / f"{name}{suffix}").write_bytes(wrap(data))


def tar_bytes(files, extra=()):
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        for name, data in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
        for member in extra:
            archive.addfile(member)
    return buffer.getvalue()


def listing(root):
    return sorted(str(path.relative_to(root)) for path in root.rglob("*") if path.is_file())


def assert_fashion(dataset):
    assert np.array_equal(dataset.train.images[:, 0], IDX_ARRAYS["train-images-idx3-ubyte"])
    assert np.array_equal(dataset.train.labels, np.arange(6))
    assert np.array_equal(dataset.test.images[:, 0], IDX_ARRAYS["t10k-images-idx3-ubyte"])
    assert (dataset.white, dataset.train.images.dtype, dataset.train.labels.dtype) == (255, np.uint8, np.int64)


@pytest.mark.parametrize("shape", [(3,), (2, 4), (2, 3, 4), (0, 5)])
def test_parse_idx_gives_back_the_array(shape):
    array = np.arange(np.prod(shape), dtype=np.uint8).reshape(shape)
    assert np.array_equal(datasets.parse_idx(idx_bytes(array), "x"), array)


def test_parse_cifar10_gives_back_labels_and_planes():
    part = datasets.parse_cifar10(cifar_bytes([3, 7], CIFAR_IMAGES[0]), "x")
    assert part.labels.tolist() == [3, 7]
    assert np.array_equal(part.images, CIFAR_IMAGES[0])


@pytest.mark.parametrize("data", [b"1\t2\n-1e-3\t 4\n", b"1\t2\r\n-1e-3\t 4\r\n", b"1\t2\n-1e-3\t4"])
def test_parse_table(data):
    assert PARSE_PAIRS(data, "x").tolist() == [[1, 2], [-0.001, 4]]


@pytest.mark.parametrize(
    ("parse", "data", "text"),
    [
        (datasets.parse_idx, b"", "x is not an IDX file"),
        (datasets.parse_idx, b"<html>", "it starts with 3c 68 74 6d"),
        (datasets.parse_idx, b"\0\0\x0d\x01" + struct.pack(">I", 1) + b"1234", "not an IDX file of unsigned bytes"),
        (datasets.parse_idx, b"\0\0\x08\x03\0\0\0\x01", "ends inside its IDX header of 16 bytes: it has 8"),
        (datasets.parse_idx, idx_bytes(np.zeros((2, 3), np.uint8))[:-1], r"holds 5 bytes, but its .* says \(2, 3\)"),
        (datasets.parse_idx, idx_bytes(np.zeros((2, 3), np.uint8)) + b"x", "x holds 7 bytes"),
        (datasets.parse_cifar10, b"", "x holds 0 bytes"),
        (datasets.parse_cifar10, bytes(3072), "not a whole number of records of 3073 bytes"),
        (datasets.parse_cifar10, bytes([10]) + bytes(3072), "label 10"),
        (PARSE_PAIRS, b"", "x is not a table of 2 columns of finite numbers: its shape is"),
        (PARSE_PAIRS, b"1\t2\t3\n", r"its shape is \(1, 3\)"),
        (PARSE_PAIRS, b"1\t2\n3\n", "x is not a table of tab-separated numbers: "),
        (PARSE_PAIRS, b"1\ttwo\n", "could not convert string to float: 'two'"),
        (PARSE_PAIRS, b"1\tnan\n", "of finite numbers"),
        (PARSE_PAIRS, b"\xff\t1\n", "x is not a table of tab-separated numbers"),
    ],
)
def test_what_the_parsers_refuse(parse, data, text):
    with pytest.raises(DataError, match=text):
        parse(data, "x")


@pytest.mark.parametrize(
    ("wrap", "suffix"),
    [(bytes, ""), (gzip.compress, ".gz"), (lambda data: gzip.compress(data, 1, mtime=7), ".gz")],
    ids=["plain", "gzip", "other gzip wrapping"],
)
def test_complete_local_copy_needs_no_network_and_is_left_alone(tmp_path, mirrors, wrap, suffix):
    write(tmp_path / "fashion-mnist", IDX_FILES, wrap, suffix)
    before = listing(tmp_path)
    for folder in (tmp_path / "fashion-mnist", tmp_path):
        folder.chmod(stat.S_IRUSR | stat.S_IXUSR)
    assert_fashion(datasets.load_fashion_mnist(tmp_path))
    assert mirrors.requested == []
    assert listing(tmp_path) == before


def test_home_directory_is_expanded(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    write(tmp_path / "data" / "fashion-mnist", IDX_FILES)
    assert_fashion(datasets.load_fashion_mnist("~/data"))


WRAPPED = OSError("pool")
WRAPPED.reason = "no such host"
BAD_PAGES = {  # and why they cannot be used
    "offline": (OSError(WRAPPED), "no such host"),
    "empty error": (EOFError(), "EOFError"),
    "captive portal": (b"<html>log in</html>", f"{hashlib.sha256(b'<html>log in</html>').hexdigest()}, expected "),
    "truncated": (gzip.compress(RNG.bytes(1000), mtime=0)[:-20], "damaged ("),
    "other bytes": (gzip.compress(b"something else", mtime=0), "not the published file: its sha256 (uncompressed) is"),
    "damaged": (gzip.compress(RNG.bytes(1000), mtime=0)[:100] + bytes(100), "damaged ("),
}


@pytest.mark.parametrize(("bad", "reason"), BAD_PAGES.values(), ids=BAD_PAGES)
@pytest.mark.parametrize("wrap", [gzip.compress, bytes], ids=["gzip", "unwrapped by the server"])
def test_download_goes_on_to_the_next_mirror(tmp_path, mirrors, bad, reason, wrap):
    for name, data in IDX_FILES.items():
        mirrors.pages |= {f"http://one/{name}.gz": bad, f"http://two/{name}.gz": wrap(data)}
    assert_fashion(datasets.load_fashion_mnist(tmp_path / "new" / "root"))
    assert listing(tmp_path) == sorted(f"new/root/fashion-mnist/{name}" for name in IDX_FILES)
    assert len(mirrors.requested) == 8

    assert_fashion(datasets.load_fashion_mnist(tmp_path / "new" / "root"))
    assert len(mirrors.requested) == 8


@pytest.mark.parametrize(("bad", "reason"), BAD_PAGES.values(), ids=BAD_PAGES)
def test_failed_download_leaves_nothing_and_says_what_was_tried(tmp_path, mirrors, bad, reason):
    mirrors.pages = {f"http://one/{name}.gz": bad for name in IDX_FILES}
    root = tmp_path / "new" / "root"
    with pytest.raises(DataError) as caught:
        datasets.load_fashion_mnist(root)
    message = str(caught.value)
    for text in (str(root / "fashion-mnist"), *IDX_FILES, "http://one/", "http://two/", "404 Not Found", "BSTUNE_DATA"):
        assert text in message
    assert reason in message
    assert list(tmp_path.iterdir()) == []
    assert len(mirrors.requested) == 2  # one file is enough to know: the time-outs do not add up over all files


def test_files_downloaded_before_a_failure_are_kept(tmp_path, mirrors):
    first = next(iter(IDX_FILES))
    mirrors.pages[f"http://one/{first}.gz"] = gzip.compress(IDX_FILES[first], mtime=0)
    with pytest.raises(DataError) as caught:
        datasets.load_fashion_mnist(tmp_path)
    assert f"{first}, " not in str(caught.value).splitlines()[0]
    assert listing(tmp_path) == [f"fashion-mnist/{first}"]
    assert (tmp_path / "fashion-mnist" / first).read_bytes() == IDX_FILES[first]


@pytest.mark.parametrize(
    ("suffix", "data", "text"),
    [
        ("", b"other", f"{hashlib.sha256(b'other').hexdigest()}, expected "),
        (".gz", gzip.compress(RNG.bytes(99), mtime=0)[:-9], "damaged"),
        (".gz", gzip.compress(RNG.bytes(99), mtime=0)[:20] + bytes(40), "damaged"),
    ],
)
def test_damaged_local_file_is_named_and_not_replaced(tmp_path, mirrors, suffix, data, text):
    folder = tmp_path / "fashion-mnist"
    write(folder, {name: data for name, data in IDX_FILES.items() if name != "train-labels-idx1-ubyte"})
    damaged = folder / f"train-labels-idx1-ubyte{suffix}"
    damaged.write_bytes(data)
    with pytest.raises(DataError, match="Delete it, and it is downloaded again") as caught:
        datasets.load_fashion_mnist(tmp_path)
    assert f"{damaged} is " in str(caught.value)
    assert text in str(caught.value)
    assert mirrors.requested == []
    assert damaged.read_bytes() == data


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


def test_cifar10_is_taken_from_its_archive_where_files_are_missing(tmp_path, mirrors):
    members = {f"cifar-10-batches-bin/{name}": data for name, data in CIFAR_FILES.items()}
    url = "http://one/cifar-10-binary.tar.gz"
    mirrors.pages[url] = tar_bytes(members | {"../evil": b"x", "readme.html": b"x"})
    for missing, requests in ((None, 1), (None, 1), ("data_batch_3.bin", 2)):  # all files, none, one
        if missing:
            (tmp_path / "root" / "cifar-10-batches-bin" / missing).unlink()
        dataset = datasets.load_cifar10(tmp_path / "root")
        assert np.array_equal(dataset.train.images, CIFAR_IMAGES[:5].reshape(10, 3, 32, 32))
        assert dataset.train.labels.tolist() == [0, 9, 1, 8, 2, 7, 3, 6, 4, 5]
        assert np.array_equal(dataset.test.images, CIFAR_IMAGES[5])
        assert dataset.test.labels.tolist() == [5, 4]
        assert listing(tmp_path) == sorted(f"root/{name}" for name in members)
        assert mirrors.requested == [url] * requests


def link(name, target):
    member = tarfile.TarInfo(name)
    member.type, member.linkname = tarfile.SYMTYPE, target
    return member


@pytest.mark.parametrize(
    ("archive", "text"),
    [
        (tar_bytes({"other/data_batch_1.bin": b"x"}), "filename .cifar-10-batches-bin/data_batch_1.bin. not found"),
        (tar_bytes({}, [link("cifar-10-batches-bin/data_batch_1.bin", "/etc/passwd")]), "/etc/passwd. not found"),
        (tar_bytes({"cifar-10-batches-bin/data_batch_1.bin": RNG.bytes(4000)})[:-500], "Compressed file ended|invalid"),
        (b"<html>", "http://one/cifar-10-binary.tar.gz: "),
    ],
    ids=["missing member", "link", "truncated", "not an archive"],
)
def test_cifar10_bad_archive(tmp_path, mirrors, archive, text):
    mirrors.pages["http://one/cifar-10-binary.tar.gz"] = archive
    with pytest.raises(DataError, match=text):
        datasets.load_cifar10(tmp_path)
    assert listing(tmp_path) == []


def test_images_and_labels_must_match(tmp_path, monkeypatch):
    files = IDX_FILES | {"train-labels-idx1-ubyte": idx_bytes(np.zeros(5, np.uint8))}
    monkeypatch.setattr(datasets, "FASHION_MNIST", replace(datasets.FASHION_MNIST, sha256=checksums(files)))
    write(tmp_path / "fashion-mnist", files)
    with pytest.raises(DataError, match=r"\(6, 4, 5\) do not match labels of \(5,\)"):
        datasets.load_fashion_mnist(tmp_path)


def test_digits():
    dataset = datasets.load_digits()
    assert dataset.train.images.shape == (1797, 1, 8, 8)
    assert (dataset.train.images.dtype, dataset.train.images.max(), dataset.white) == (np.uint8, 16, 16)
    assert np.bincount(dataset.train.labels).tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]
    assert dataset.test is None


def test_import_stays_light():
    heavy = "{'torch', 'lightning', 'sklearn', 'requests'}"
    code = f"import sys, bstune.workloads.datasets; print(sorted({heavy} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


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
    dataset = load(root)
    n = 50_000 if shape[0] == 3 else 60_000
    assert (dataset.train.images.shape, dataset.test.images.shape) == ((n, *shape), (10_000, *shape))
    assert np.bincount(dataset.test.labels).sum() == 10_000
    assert dataset.train.labels.max() == 9
    assert dataset.train.images.mean() / 255 == pytest.approx(mean, abs=1e-4)
