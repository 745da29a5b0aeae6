"""What the guides and docstrings show runs, as shorter studies in this process."""

import doctest
import re
import runpy
from pathlib import Path

import pytest

import bstune
from bstune.core import rules
from bstune.search import sampler
from bstune.study import fit_curve

PACKAGE = Path(bstune.__file__).parent
SHORTER = "trials=4, seeds=1, workers=0, survey='off', mlflow={'uri': None}"


@pytest.mark.parametrize("module, examples", [(rules, 3), (fit_curve, 4), (sampler, 10)])
def test_a_docstring_s_examples_run(module, examples):
    assert doctest.testmod(module) == (0, examples)


def blocks(path):
    """The Python of a guide."""
    return re.findall(r"```python\n(.*?)```", path.read_text(), re.DOTALL)


def run(text, folder, monkeypatch):
    """What a text of Python makes in a folder."""
    monkeypatch.chdir(folder)
    Path("shown.py").write_text(text)
    return runpy.run_path("shown.py")


@pytest.mark.filterwarnings("default")
@pytest.mark.slow
def test_the_tutorial_runs(tmp_path, monkeypatch):
    text = "\n".join(blocks(PACKAGE / "README.md"))
    before, after = text.split("trials=8")
    made = run(before + SHORTER + after, tmp_path, monkeypatch)
    assert len(made["table"]) == len(made["result"].records)
    assert (made["easier"].target.goal, made["easier"].reached) == (0.6, True)
    assert made["trainer"].global_step >= made["result"].best.steps


@pytest.mark.slow
def test_a_loop_of_ones_own_runs(tmp_path, monkeypatch):
    guide = blocks(PACKAGE / "integrations" / "README.md")
    example = next(block for block in guide if '"blobs"' in block)
    shorter = example.replace("trials=32", "trials=2, seeds=1, mlflow={'uri': None}")
    run(shorter, tmp_path, monkeypatch)
    assert bstune.load("outputs/blobs").reached
