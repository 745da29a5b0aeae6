"""The tutorial of the guide runs, as a shorter study in this process."""

import re
import runpy
from pathlib import Path

import pytest

GUIDE = Path(__file__).parents[1] / "bstune" / "README.md"
SHORTER = "trials=4, seeds=1, workers=0, survey='off', mlflow={'uri': None}"


@pytest.mark.filterwarnings("default")
def test_the_tutorial_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tutorial = GUIDE.read_text().split("## Tutorial")[1].split("\n## ")[0]
    blocks = re.findall(r"```python\n(.*?)```", tutorial, re.DOTALL)
    before, after = "\n".join(blocks).split("trials=8")
    Path("tutorial.py").write_text(before + SHORTER + after)
    made = runpy.run_path("tutorial.py")
    assert len(made["table"]) == len(made["result"].records)
    assert (made["easier"].target.goal, made["easier"].reached) == (0.6, True)
    assert made["trainer"].global_step >= made["result"].best.steps
