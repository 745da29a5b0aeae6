"""What a user names, or others wrote, is read within bounds, or refused in one line and at once."""

import math
import os
import socket
import threading
from pathlib import Path

import pytest

from bstune.core.errors import InputError
from bstune.system import inputs
from bstune.system.inputs import MAX_DEPTH, parse_json, parse_yaml, read_text

# Each level has the one below nine times: 2 x 9^11 texts once it is expanded.
LAUGHS = "a0: &a0 [x, x]\n" + "".join(
    f"a{level}: &a{level} [{', '.join(['*a' + str(level - 1)] * 9)}]\n" for level in range(1, 12)
)
# Each level merges the one below twice.
MERGED = "a0: &a0 {k: 1}\n" + "".join(
    f"a{level}: &a{level} {{<<: [*a{level - 1}, *a{level - 1}]}}\n" for level in range(1, 40)
)


def refused(call, *arguments, **options):
    with pytest.raises(InputError) as caught:
        call(*arguments, **options)
    message = str(caught.value)
    assert len(message.splitlines()) == 1
    assert len(message) < 600
    return message


@pytest.fixture
def pipe_to_stdin(monkeypatch):
    """Let standard input be a pipe that holds the given bytes."""
    opened = []

    def fill(data):
        reading, writing = os.pipe()
        # A pipe holds 64 KiB: more is written while it is read.
        writer = threading.Thread(target=_write, args=(writing, data), daemon=True)
        writer.start()
        file = os.fdopen(reading)
        opened.append(file)
        monkeypatch.setattr("sys.stdin", file)

    yield fill
    for file in opened:
        file.close()


def _write(descriptor, data):
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
    except BrokenPipeError:
        pass


@pytest.mark.parametrize("data", [b"", b"a,b\n", b"\xef\xbb\xbfa,b\n", "ä😀\n".encode()])
def test_a_text_is_read_as_it_is(tmp_path, pipe_to_stdin, data):
    (tmp_path / "file").write_bytes(data)
    (tmp_path / "link").symlink_to(tmp_path / "file")
    pipe_to_stdin(data)
    # A byte-order mark is no text.
    text = data.decode().removeprefix("\ufeff")
    for path in (tmp_path / "file", tmp_path / "link", Path("-")):
        assert read_text(path, "the file") == text


@pytest.mark.parametrize("data", [b"\xff\xfe", b"a\0b", b"a" * 101])
def test_what_is_no_text_or_too_long_is_refused(tmp_path, pipe_to_stdin, data):
    (tmp_path / "file").write_bytes(data)
    pipe_to_stdin(data)
    for path in (tmp_path / "file", Path("-")):
        refused(read_text, path, "the file", limit=100)


def test_a_file_of_the_limit_is_read_and_a_device_as_standard_input_ends(tmp_path, monkeypatch):
    (tmp_path / "file").write_bytes(b"a" * 100)
    assert len(read_text(tmp_path / "file", "the file", limit=100)) == 100
    with open("/dev/zero") as zeros:
        monkeypatch.setattr("sys.stdin", zeros)
        refused(read_text, Path("-"), "the file", limit=100)
    # Standard input is closed by now.
    refused(read_text, Path("-"), "the file")


def test_what_is_no_regular_file_is_refused_at_once(tmp_path, monkeypatch):
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "link").symlink_to(tmp_path / "fifo")
    (tmp_path / "ring").symlink_to(tmp_path / "ring")
    # Opened for reading, a FIFO would wait for a writer for ever.
    server = socket.socket(socket.AF_UNIX)
    monkeypatch.chdir(tmp_path)
    server.bind("socket")
    names = ("fifo", "link", "ring", "socket", ".", "missing", "x\ny\x1b[31m", "a\0b", "\udcff")
    for name in (*names, "x" * 10_000, "/dev/zero", "/dev/null", "/dev/stdin", "/proc/kmsg"):
        refused(read_text, Path(name), "the file")
    server.close()


def test_a_name_that_leads_elsewhere_meanwhile_is_refused(tmp_path, monkeypatch):
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "file").write_text("a")
    of_file = os.stat(tmp_path / "file")
    monkeypatch.setattr(inputs.os, "stat", lambda path: of_file)
    refused(read_text, tmp_path / "fifo", "the file")


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("{}", {}),
        ('{"a": [1, 2.5, null, "[[["]}', {"a": [1, 2.5, None, "[[["]}),
        ('["' + "[" * 100 + '\\"' + "{" * 100 + '"]', ["[" * 100 + '"' + "{" * 100]),
        ("[" * MAX_DEPTH + "]" * MAX_DEPTH, None),
        ("[" + ", ".join(["[]"] * 1000) + "]", [[]] * 1000),
        ('"\\ud83d\\ude00"', "😀"),
    ],
)
def test_json_is_read(text, value):
    found = parse_json(text, "the file", finite=True)
    assert value is None or found == value


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[",
        '{"a": 1',
        "[" * (MAX_DEPTH + 1) + "]" * (MAX_DEPTH + 1),
        "[" * 100_000,
        '{"a":' * 100_000,
        '"' + '\\"' * 1_000_000,
        '"' + '[\\"' * 1_000_000 + "\\",
        "1" * 5000,
        '"\\ud800"',
        "\x1b[31m\n",
    ],
)
def test_other_json_is_refused(text):
    refused(parse_json, text, "the file")


@pytest.mark.parametrize("text", ["NaN", "[-Infinity]", "1e999", "1" * 400])
def test_numbers_that_are_not_finite_are_refused_where_asked(text):
    parse_json(text, "the file")
    refused(parse_json, text, "the file", finite=True)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("", None),
        ("a: &x [1, .inf]\nb: *x\nc: {<<: {d: 2}}", None),
        ("a: 'b'\nc: [1, {d: null}]", {"a": "b", "c": [1, {"d": None}]}),
        ("[" * MAX_DEPTH + "]" * MAX_DEPTH, None),
    ],
)
def test_yaml_is_read(text, value):
    found = parse_yaml(text, "the file")
    assert value is None or found == value


@pytest.mark.parametrize(
    "text",
    [
        LAUGHS,
        MERGED,
        "&a [*a]",
        "&a {b: *a}",
        "a: *b",
        "[" * 100_000,
        "- " * 100_000,
        "".join(" " * level + "a:\n" for level in range(200)),
        "{a: " * 100_000,
        "a: [",
        "a: b: c",
        "\ta",
        "a: \x1b[31m",
        "--- 1\n--- 2",
        "x" * (inputs.YAML_CHARACTERS + 1),
        "1" * 5000,
        "2001-99-99",
        "!!int ''",
        "!!bool x",
        "!!float x",
        "!!timestamp x",
        "!!python/object/apply:os.system [ls]",
        '"\\U00110000"',
        '"\\ud800"',
        "? [a]\n: b",
    ],
)
def test_other_yaml_is_refused(text):
    refused(parse_yaml, text, "the file")


@pytest.mark.parametrize("loader", ["SafeLoader", "CSafeLoader"])
def test_both_of_yamls_loaders_do(monkeypatch, loader):
    monkeypatch.setattr(inputs, "_YAML_LOADER", getattr(inputs.yaml, loader))
    assert math.isinf(parse_yaml("a: .inf", "the file")["a"])
    for text in (LAUGHS, MERGED, "[" * 100_000, "- " * 100_000, '"\\ud800"'):
        refused(parse_yaml, text, "the file")


LONG = "x" * 5000


@pytest.mark.parametrize(
    "command",
    [("compare", LONG), ("report", LONG), ("--config-dir", LONG, "workload=digits"), ("fit", LONG)],
)
def test_a_name_that_no_system_call_takes_is_refused(bstune, tmp_path, command):
    status, out, err = bstune(*command)
    assert (status, out) == (2, "")
    assert len(err.splitlines()) == 1
    assert "File name too long" in err
    assert list(tmp_path.iterdir()) == []
