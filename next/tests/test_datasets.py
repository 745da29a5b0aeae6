import gzip
import hashlib
import os
import tarfile
import threading
from functools import partial
from http.server import HTTPServer, SimpleHTTPRequestHandler

import pytest
from refusals import refused

from bstune.workloads.datasets import Source, load_cifar10, read_file

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


@pytest.mark.parametrize("data", [CONTENT, zipped(CONTENT, 1)])
def test_reads_what_is_there_in_any_wrapping(tmp_path, data):
    put(tmp_path, data)
    assert read_file(PUBLISHED, "part.gz", str(tmp_path)) == CONTENT


@pytest.mark.parametrize("data", [zipped(CONTENT[1:]), zipped(CONTENT)[:-9], b"\x1f\x8bx"])
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


def test_an_archive_is_downloaded_once_for_all_its_files(tmp_path, mirror):
    folder, url = mirror
    (folder / "one").write_bytes(CONTENT)
    sums = dict.fromkeys(["one", "two"], PUBLISHED.sha256["part.gz"])
    source = Source("set", sums, (f"{url}missing/", url), archive="set.tar.gz")
    with tarfile.open(folder / "set.tar.gz", "w:gz") as archive:
        for name in sums:
            archive.add(folder / "one", f"set/{name}")
    assert read_file(source, "one", str(tmp_path / "data")) == CONTENT
    (folder / "set.tar.gz").unlink()
    assert read_file(source, "two", str(tmp_path / "data")) == CONTENT
    with refused(f"mkdir -p {tmp_path}/set && curl -L {url}missing/set.tar.gz | tar xz"):
        read_file(source, "one", str(tmp_path))


@needs_data
def test_cifar10_is_as_published():
    cifar = load_cifar10(os.environ["BSTUNE_DATA"])
    assert cifar.labels.bincount().tolist() == [5_000] * 10
    # A frog, of which red is first.
    assert cifar.labels[0] == 6
    assert cifar.images[0, :, 0, 0].tolist() == [59, 62, 63]
    assert cifar.test[0].shape == (10_000, 3, 32, 32)


def test_what_cannot_be_downloaded_is_one_line_that_says_how(tmp_path):
    with refused(f"-Lo {tmp_path}/set/part.gz {NOWHERE}part.gz"):
        read_file(PUBLISHED, "part.gz", str(tmp_path))
    assert not (tmp_path / "set").exists()
