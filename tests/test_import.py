import json
import subprocess
import sys

import pytest

import bstune

HEAVY = ("torch", "lightning", "mlflow", "optuna", "hydra")


def loaded(*modules):
    """Return which of the heavy packages a fresh interpreter has loaded after importing the modules."""
    code = f"import json, sys, {', '.join(modules)}; print(json.dumps([n for n in {HEAVY!r} if n in sys.modules]))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(json.loads(run.stdout))


def test_stays_light():
    assert (
        loaded("bstune", "bstune.core.records", "bstune.core.curve", "bstune.core.scaling", "bstune.core.clock")
        == set()
    )


def test_replayed_studies_need_no_training_library():
    modules = ("bstune.__main__", "bstune.study.run", "bstune.study.record", "bstune.trial.replay")
    assert loaded(*modules).isdisjoint({"torch", "lightning", "mlflow"})


@pytest.mark.slow
def test_the_check_can_fail():
    assert {"torch", "lightning"} <= loaded("bstune.trial.loop")


def test_importing_the_package_takes_next_to_nothing():
    run = subprocess.run([sys.executable, "-X", "importtime", "-c", "import bstune"], capture_output=True, text=True)
    assert int(run.stderr.splitlines()[-1].split("|")[1]) < 50_000  # microseconds; 3,000 measured


def test_public_names():
    assert sorted(bstune.__all__) == dir(bstune)
    for name in bstune.__all__:
        assert getattr(bstune, name)
    assert bstune.survey.__module__ == "bstune.hardware.survey"
    with pytest.raises(AttributeError, match="no attribute 'nope'"):
        bstune.nope  # noqa: B018
