import json
import subprocess
import sys

import pytest

HEAVY = ("torch", "lightning", "mlflow", "optuna", "hydra")


def loaded(module):
    """Return which of the heavy packages a fresh interpreter has loaded after ``import module``."""
    code = f"import json, sys, {module}; print(json.dumps([name for name in {HEAVY!r} if name in sys.modules]))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(json.loads(run.stdout))


@pytest.mark.parametrize("module", ["bstune", "bstune.records", "bstune.errors", "bstune.clock", "bstune.scaling"])
def test_stays_light(module):
    assert loaded(module) == set()


def test_the_check_can_fail():
    assert {"torch", "lightning"} <= loaded("bstune.trial")
