"""Lightning modules of packages that people use, tuned as they are: chemprop and pytorch-forecasting.

BSTUNE_PACKAGES names a folder into which .ci/packages.txt was installed: ``uv pip install --no-deps --target``, as they
want other versions of what bstune needs.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from toolbox import entries, trials_of

PROJECTS = Path(__file__).parent / "projects"
# In this process: to import a package takes longer than its trials.
STUDY = ("search.trials=8", "search.objective=steps", "search.replicates=0", "search.workers=0")


@pytest.mark.soak
@pytest.mark.parametrize("name", ["molecules", "stocks"])
def test_a_module_of_a_package_is_tuned(name, tmp_path):
    packages = os.environ.get("BSTUNE_PACKAGES", "")
    if not Path(packages, "chemprop").is_dir():
        pytest.skip(f"BSTUNE_PACKAGES={packages!r} is not a folder with .ci/packages.txt installed")
    command = [
        sys.executable,
        "-m",
        "bstune",
        "--config-dir",
        PROJECTS / "packages" / "conf",
        f"workload={name}",
    ]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(PROJECTS), packages])}
    own = (*STUDY, "hardware.enabled=false", "mlflow.enabled=false")
    ran = subprocess.run(
        [*command, *own], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stderr
    assert entries(tmp_path) == ["bstune.db", "outputs"]
    trials = trials_of(tmp_path / "outputs" / name)
    assert "reached" in {trial.status for trial in trials}, ran.stdout
    assert "failed" not in {trial.status for trial in trials}, ran.stdout
