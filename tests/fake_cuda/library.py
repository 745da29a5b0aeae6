"""Builds guard.cpp against the headers of the torch that is installed, once a version of either."""

import hashlib
import os
import shutil
import subprocess
from pathlib import Path

import torch

HERE = Path(__file__).parent
SOURCE = HERE / "guard.cpp"
COMPILER = "g++"


def missing() -> str | None:
    """The reason why nothing runs on fake CUDA tensors here; None if it does."""
    if torch.version.cuda is not None:
        return "torch's CUDA build has its own guard in the place of the fake one"
    return None if shutil.which(COMPILER) else f"there is no compiler ({COMPILER})"


def library() -> Path:
    """The shared library, which is built in half a minute where it is not there yet."""
    key = hashlib.sha256(torch.__version__.encode() + SOURCE.read_bytes()).hexdigest()[:16]
    path = HERE / "build" / f"guard-{key}.so"
    if path.exists():
        return path
    path.parent.mkdir(exist_ok=True)
    # Several processes may build it at once: whole it gets its name.
    partial = path.with_suffix(f".{os.getpid()}")
    torchs = Path(torch.__file__).parent
    flags = [
        "-std=c++20",
        "-O1",
        "-fPIC",
        "-shared",
        f"-I{torchs / 'include'}",
        f"-L{torchs / 'lib'}",
    ]
    links = ["-lc10", "-ltorch_cpu", f"-Wl,-rpath,{torchs / 'lib'}"]
    subprocess.run([COMPILER, *flags, "-o", partial, SOURCE, *links], check=True)
    partial.replace(path)
    return path


def environment() -> dict[str, str]:
    """The environment of a process that loads the library before torch."""
    return {**os.environ, "LD_PRELOAD": str(library()), "OMP_NUM_THREADS": "1"}
