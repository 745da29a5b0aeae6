"""Inputs that nobody means, by a generator of random numbers: valid files with one thing changed, and values."""

import json
import os
import shutil
import socket

import yaml

DEEP = 100_000
DEVICES = ("/dev/zero", "/dev/null", "/dev/random", "/dev/tty", "/proc/self/mem", "/proc/kmsg")
# A value that JSON and YAML write alike stands for itself; DEEP_MARK is replaced by text nested
# deep.
DEEP_MARK = "deep-mark"
BIG_MARK = "big-mark"
VALUES = (
    None,
    True,
    -1,
    0,
    0.5,
    # Ten times it is no float any more; 1e-320 is less than the least normal one.
    1e308,
    -1e300,
    1e-320,
    # Past what 32 and 64 bits with a sign hold, and past any float.
    2**31,
    2**63,
    10**400,
    float("nan"),
    float("inf"),
    "",
    "x",
    "1",
    "\x1b[31mred\x1b[0m\r\n\x07",
    "\x00",
    # Half of a surrogate pair, which no UTF-8 has.
    "\ud800",
    "../../x",
    "/",
    "x" * 1_000_000,
    [],
    {},
    [1],
    [[]],
    [None, "a", -1],
    {"a": 1},
    # Hydra would call it.
    {"_target_": "os.system", "command": "touch pwned"},
    [DEEP_MARK],
    [BIG_MARK],
)
NUMBERS = ("nan", "inf", "-1", "0", "0.5", "1e300", "1e-320", str(2**31), str(2**63), "9" * 400)
TEXTS = (
    "",
    " ",
    "null",
    "true",
    "[]",
    "[1]",
    "{}",
    "{a: 1}",
    # OmegaConf's mark of a missing value, then references, of which the first alone leads
    # somewhere.
    "???",
    "${seed}",
    "${nothing}",
    "${",
    "'",
    "a=b",
    "~",
    "~nobody/x",
    "/",
    ".",
    "..",
    "../x",
    "a\nb",
    # How Python hands on a byte that is no UTF-8.
    "\udcff",
    "\x1b[31m",
    "x" * 300,
    "x" * 100_000,
    "[" * 1000,
    # Formats of Python, markup of Rich, and an address that urllib refuses to split.
    "%s{0}",
    "[bold]",
    "http://[::1",
    "/proc/x",
    "/proc/self/mem",
    "/dev/full",
)


def dumped(values):
    """Write values as JSON, with what a mark stands for: text that is nested deep, or a number of many digits."""
    text = json.dumps(values)
    text = text.replace(f'"{DEEP_MARK}"', "[" * DEEP + "]" * DEEP)
    return text.replace(f'"{BIG_MARK}"', "9" * 10_000)


def changed(rng, values):
    """Change one thing of nested plain values, at any depth: a value, a key that is gone, or one more."""
    # Now and then a whole branch goes.
    if not isinstance(values, dict | list) or not values or rng.random() < 0.1:
        return rng.choice(VALUES)
    copy = dict(values) if isinstance(values, dict) else list(values)
    key = rng.choice(list(copy)) if isinstance(copy, dict) else rng.randrange(len(copy))
    what = rng.random()
    if what < 0.15:
        del copy[key]
    elif what < 0.2 and isinstance(copy, dict):
        copy[rng.choice(("x", "", "\x1b[31m", "_target_", "__class__"))] = rng.choice(VALUES)
    else:
        copy[key] = changed(rng, copy[key])
    return copy


def change_values(rng, path):
    """Change one thing of the values in a file of JSON, JSON lines, YAML or CSV."""
    if path.suffix in (".csv", ".bin"):
        change_text(rng, path)
        return
    text = path.read_text()
    if path.suffix == ".json":
        path.write_text(dumped(changed(rng, json.loads(text))))
    elif path.suffix == ".yaml":
        path.write_text(dumped(changed(rng, yaml.safe_load(text))))
    else:
        lines = text.splitlines()
        place = rng.randrange(len(lines))
        lines[place] = dumped(changed(rng, json.loads(lines[place])))
        path.write_text("\n".join(lines) + "\n")


def change_text(rng, path):
    """Put something that does not belong there into a file's text, or in the place of all of it."""
    data = path.read_bytes()
    place = rng.randrange(len(data) + 1)
    pieces = (
        b"\0",
        b"\xff\xfe",
        b"\xef\xbb\xbf",
        "\ud800".encode("utf-8", "surrogatepass"),
        b"\x1b[31m\x07\r",
        b"null",
        b"NaN",
        # Minus infinity, once it is read.
        b"-1e999",
        b'"',
        b"\n\n",
        b"*a",
        # A YAML list that holds itself.
        b"&a [*a]",
        b"!!python/object/apply:os.system [touch pwned]",
        b"[" * DEEP,
        b"- " * DEEP,
        b'{"a":' * DEEP,
        b"9" * 10_000,
        b"x" * 2_000_000,
        rng.randbytes(1000),
    )
    piece = rng.choice(pieces)
    path.write_bytes(piece if rng.random() < 0.3 else data[:place] + piece + data[place:])


def flip_bits(rng, path):
    """Flip a few bits."""
    data = bytearray(path.read_bytes())
    for _ in range(rng.choice((1, 8, 64)) if data else 0):
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    path.write_bytes(data)


def truncate(rng, path):
    """Cut a file short."""
    data = path.read_bytes()
    path.write_bytes(data[: rng.choice((0, 1, rng.randrange(len(data) + 1)))])


def replace_kind(rng, path):
    """Put something that is no regular file in a file's place, or nothing."""
    path.unlink()
    kind = rng.choice(("missing", "folder", "fifo", "socket", "ring", "device", "to fifo", "mode"))
    if kind == "folder":
        path.mkdir()
        (path / "x").write_text("x")
    elif kind == "fifo":
        os.mkfifo(path)
    elif kind == "socket":
        bind(path)
    elif kind == "ring":
        path.symlink_to(path)
    elif kind == "device":
        path.symlink_to(rng.choice(DEVICES))
    elif kind == "to fifo":
        os.mkfifo(path.with_name("pipe"))
        path.symlink_to(path.with_name("pipe"))
    elif kind == "mode":
        path.write_bytes(rng.randbytes(300))
        path.chmod(0)


def bind(path):
    """Make a socket; its name may be too long for one where the folder is."""
    before = os.getcwd()
    os.chdir(path.parent)
    try:
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(path.name)
    finally:
        os.chdir(before)


def spoil(rng, path):
    """Change one file that is valid; return how."""
    # A file that can still be read goes deeper: twice as often.
    way = rng.choice((change_values, change_values, change_text, flip_bits, truncate, replace_kind))
    way(rng, path)
    return way.__name__


def odd_path(rng, folder):
    """A path that names no text of the right kind."""
    fifo = folder / "odd-fifo"
    if not fifo.exists():
        os.mkfifo(fifo)
        (folder / "odd-folder").mkdir()
        (folder / "odd-link").symlink_to(fifo)
        (folder / "odd-binary").write_bytes(rng.randbytes(5000))
        (folder / "odd-empty").write_bytes(b"")
        with (folder / "odd-huge").open("wb") as file:
            # The file is sparse.
            file.truncate(10**10)
    own = [str(path) for path in folder.glob("odd-*")]
    # Those of its own twice as often.
    return rng.choice([*own, *own, *DEVICES, *TEXTS])


def copy_folder(base, folder):
    """Copy a folder of valid inputs for one case."""
    shutil.copytree(base, folder)
    return folder
