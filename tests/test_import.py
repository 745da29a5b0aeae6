import subprocess
import sys

import pytest

import bstune
from bstune.study import tune

HEAVY = {"torch", "lightning", "mlflow"}


def loaded(*modules):
    """Tell what a fresh interpreter has loaded after importing the modules."""
    return loaded_by("-c", f"import {', '.join(modules)}")


def loaded_by(*arguments):
    """Tell what a fresh interpreter has loaded at its end."""
    # It writes a line for each module that is loaded.
    command = [sys.executable, "-X", "importtime", *arguments]
    return loaded_in(subprocess.run(command, capture_output=True, text=True, check=True).stderr)


def loaded_in(told):
    """The modules that -X importtime has told of."""
    rows = [line.split("|") for line in told.splitlines() if line.startswith("import time:")]
    return {row[2].strip() for row in rows}


def test_the_package_and_its_core_stay_light():
    core = ("records", "curve", "scaling", "clock")
    names = loaded("bstune", *(f"bstune.core.{name}" for name in core))
    assert "bstune.core.curve" in names
    assert not names & {*HEAVY, "optuna", "hydra"}


@pytest.mark.parametrize("asked", ["--help", "--version"])
def test_what_is_asked_of_the_command_itself_needs_no_library(asked):
    names = loaded_by("-m", "bstune", asked)
    assert "bstune.core.clock" in names
    assert not names & {*HEAVY, "optuna", "hydra", "omegaconf", "pydantic", "numpy", "scipy"}


@pytest.mark.parametrize(
    "arguments",
    [
        ("report", "nope"),
        ("report", "nope", "target=1"),
        ("compare", "nope"),
        ("compare", "target=1", "nope"),
        ("extrapolate", "nope", "--at", "examples=1"),
        ("lightning", "nope.yaml", "--target", "val_loss<=0.1"),
    ],
)
def test_a_path_that_is_not_there_needs_no_library(arguments, tmp_path):
    command = [sys.executable, "-X", "importtime", "-m", "bstune", *arguments]
    ended = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert ended.returncode == 2
    assert "nope" in ended.stderr.splitlines()[-1]
    names = loaded_in(ended.stderr)
    assert "bstune.core.clock" in names
    assert not names & {*HEAVY, "optuna", "hydra", "pydantic", "numpy", "scipy"}


def test_public_names():
    assert sorted(bstune.__all__) == dir(bstune)
    for name in bstune.__all__:
        assert getattr(bstune, name)
    assert bstune.survey is tune.survey
    points = [
        bstune.FrontierPoint(size, 100 * (1 + 64 / size), False, None) for size in (16, 64, 256)
    ]
    # S = 100 (1 + 64/B).
    assert bstune.fit_curve(points).critical_batch_size == pytest.approx(64)
    with pytest.raises(AttributeError, match="no attribute 'nope'"):
        bstune.nope  # noqa: B018
