import gzip
import hashlib
import os
import threading
from functools import partial
from http.server import HTTPServer, SimpleHTTPRequestHandler

import numpy as np
import pytest
import torch
from refusals import refused

from bstune.workloads.datasets import (
    Source,
    load_airfoil,
    load_digits,
    load_fashion_mnist,
    read_file,
)

needs_data = pytest.mark.skipif("BSTUNE_DATA" not in os.environ, reason="BSTUNE_DATA is not set")
NOWHERE = "http://127.0.0.1:9/"
# Without the time: all test processes collect the same names.
zipped = partial(gzip.compress, mtime=0)
CONTENT = b"published\n" * 100
PUBLISHED = Source("set", {"part.gz": hashlib.sha256(CONTENT).hexdigest()}, (NOWHERE,))


def put(root, data):
    path = root / "set" / "part.gz"
    path.parent.mkdir(parents=True)
    path.write_bytes(data)
    return path


@pytest.fixture
def mirror(tmp_path, monkeypatch):
    """A server of a folder, and its URL."""
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    folder = tmp_path / "mirror"
    folder.mkdir()

    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, *arguments):
            pass

    server = HTTPServer(("127.0.0.1", 0), partial(Quiet, directory=folder))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield folder, f"http://127.0.0.1:{server.server_port}/"
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.parametrize("data", [CONTENT, zipped(CONTENT, 1), zipped(CONTENT, 9)])
def test_reads_what_is_there_in_any_wrapping(tmp_path, data):
    put(tmp_path, data)
    assert read_file(PUBLISHED, "part.gz", str(tmp_path)) == CONTENT


@pytest.mark.parametrize(
    "data",
    [b"", CONTENT + b"x", zipped(CONTENT[1:]), zipped(CONTENT)[:-9], b"\x1f\x8bx"],
)
def test_other_bytes_are_refused(tmp_path, data):
    path = put(tmp_path, data)
    with refused(str(path)):
        read_file(PUBLISHED, "part.gz", str(tmp_path))


def test_downloads_from_the_first_mirror_that_has_it(tmp_path, mirror):
    folder, url = mirror
    (folder / "wrong").mkdir()
    (folder / "wrong" / "part.gz").write_bytes(b"please log in")
    (folder / "part.gz").write_bytes(zipped(CONTENT))
    mirrors = (NOWHERE, f"{url}missing/", f"{url}wrong/", url)
    source = Source("set", PUBLISHED.sha256, mirrors)
    assert read_file(source, "part.gz", str(tmp_path)) == CONTENT
    assert [path.name for path in (tmp_path / "set").iterdir()] == ["part.gz"]
    assert read_file(PUBLISHED, "part.gz", str(tmp_path)) == CONTENT


def test_what_cannot_be_downloaded_is_one_line_that_says_how(tmp_path):
    with refused(f"-Lo {tmp_path}/set/part.gz {NOWHERE}part.gz"):
        read_file(PUBLISHED, "part.gz", str(tmp_path))
    assert not (tmp_path / "set").exists()


def test_digits():
    digits = load_digits()
    assert digits.images.shape == (1797, 1, 8, 8)
    assert (digits.images.dtype, digits.labels.dtype) == (torch.uint8, torch.int64)
    assert digits.images.max() == digits.white == 16
    assert digits.labels.bincount().tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]


@needs_data
def test_fashion_mnist():
    fashion = load_fashion_mnist(os.environ["BSTUNE_DATA"])
    assert fashion.images.shape == (60_000, 1, 28, 28)
    assert fashion.labels.bincount().tolist() == [6000] * 10
    # Published: mean and standard deviation of the training pixels.
    pixels = fashion.images.float() / fashion.white
    assert [pixels.mean(), pixels.std()] == pytest.approx([0.2860, 0.3530], abs=1e-4)


@needs_data
def test_airfoil():
    table = load_airfoil(os.environ["BSTUNE_DATA"])
    assert table.shape == (1503, 6)
    assert table[0].tolist() == [800, 0, 0.3048, 71.3, 0.00266337, 126.201]
    assert np.isfinite(table).all()
