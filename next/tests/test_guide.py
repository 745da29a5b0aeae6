"""The tutorial of the guide runs as it stands."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

GUIDE = Path(__file__).parents[1] / "bstune" / "README.md"


@pytest.mark.timeout(300)
def test_the_tutorial_runs(tmp_path):
    tutorial = GUIDE.read_text().split("## Tutorial")[1].split("\n## ")[0]
    blocks = re.findall(r"```python\n(.*?)```", tutorial, re.DOTALL)
    checks = [
        "assert len(table) == len(result.records)",
        "assert easier.target.goal == 0.6 and easier.reached",
        "assert trainer.global_step >= result.best.steps",
    ]
    script = tmp_path / "tutorial.py"
    script.write_text("\n".join([*blocks, *checks]))
    done = subprocess.run(
        [sys.executable, script.name],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(GUIDE.parents[1])},
    )
    assert done.returncode == 0, done.stderr
