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


@pytest.mark.parametrize(
    "module",
    [
        "bstune",
        "bstune.core.records",
        "bstune.core.errors",
        "bstune.core.clock",
        "bstune.core.scaling",
        "bstune.trial.replay",
    ],
)
def test_stays_light(module):
    assert loaded(module) == set()


@pytest.mark.parametrize(
    "module", ["bstune.study.run", "bstune.__main__", "bstune.trial.replay", "bstune.study.record"]
)
def test_needs_no_training_library(module):
    assert loaded(module).isdisjoint({"torch", "lightning", "mlflow"})


@pytest.mark.slow
def test_the_check_can_fail():
    assert {"torch", "lightning"} <= loaded("bstune.trial.loop")
