"""Small projects as their authors wrote them (tests/projects/), tuned unchanged by a dozen lines of YAML each."""

import importlib
import math
from contextlib import chdir
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from lightning.pytorch import seed_everything
from lightning.pytorch.loggers.logger import DummyLogger
from omegaconf import OmegaConf
from toolbox import make_spec, trials_of

from bstune.config import instantiate
from bstune.core.records import Budget
from bstune.study.prepare import compose_checked
from bstune.trial.loop import run_trial
from bstune.trial.workload import load

PROJECTS = Path(__file__).parent / "projects"
CONFIGS = PROJECTS / "conf"
NAMES = sorted(path.stem for path in (CONFIGS / "workload").glob("*.yaml"))
# Its objective counts steps: what it does depends on no clock.
STUDY = ("search.objective=steps", "search.replicates=1", "search.workers=0", "mlflow.enabled=false")
STEPS = 40
OPTIMIZERS = {"two_optimizers": 2}  # that step at each batch: Lightning counts the steps of all
VALIDATES = {"early_stopping"}  # what is trained depends on what is validated

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::UserWarning")]  # the projects' own


@pytest.fixture(autouse=True)
def _importable(monkeypatch):
    monkeypatch.syspath_prepend(str(PROJECTS))


@pytest.mark.parametrize("name", NAMES)
def test_a_project_is_tuned_as_it_is(name, bstune, tmp_path):
    status, out, err = bstune("--config-dir", str(CONFIGS), f"workload={name}", "search.trials=20", *STUDY)
    assert status == 0, err
    trials = trials_of(tmp_path / "outputs" / name)
    assert "reached" in {trial.status for trial in trials}, out
    assert "failed" not in {trial.status for trial in trials}, out
    assert "Traceback" not in out + err


def fit(name, config, spec, workload, folder):
    """Train as the project's author would, on the batches of a trial; return the module."""
    lightning = importlib.import_module("pytorch_lightning" if name.startswith("pl_") else "lightning.pytorch")
    config = OmegaConf.merge(config, {"trial": {"lr": spec.lr}})
    seed_everything(spec.seed)
    module, data = (instantiate(config.workload[part], part) for part in ("module", "data"))
    batches = workload.train_batches(spec)
    data.train_dataloader = lambda: batches
    trainer = lightning.Trainer(
        accelerator="cpu",
        max_steps=STEPS * OPTIMIZERS.get(name, 1),
        max_epochs=math.ceil(STEPS / len(batches)),
        limit_val_batches=None if name in VALIDATES else 0,
        num_sanity_val_steps=0,
        default_root_dir=folder,
        logger=DummyLogger() if lightning.__name__ == "lightning.pytorch" else False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **OmegaConf.to_container(config.workload.get("trainer", OmegaConf.create())),
    )
    trainer.fit(module, datamodule=data)
    return module


def numbers(trainer):
    """Return what a module may ask its Trainer."""
    names = ("max_epochs", "num_training_batches", "estimated_stepping_batches", "current_epoch", "global_step")
    return {name: getattr(trainer, name) for name in names}


@pytest.mark.parametrize("name", NAMES)
def test_a_trial_equals_the_fit_of_a_trainer_on_its_batches(name, tmp_path):
    config = compose_checked(["--config-dir", str(CONFIGS), f"workload={name}", "device=cpu"])
    spec = make_spec(2 * int(config.workload.batch_size.low) + 1, config.workload.reference.lr, seed=5)
    with chdir(tmp_path):
        workload, protocol = load(config)
        modules = []

        def build(spec):
            modules.append(workload.build_module(spec))
            return modules[-1]

        target = replace(protocol.target, value=-1e9 if protocol.target.mode == "min" else 1e9)  # never reached
        protocol = replace(protocol, budget=Budget(STEPS, 1), target=target, divergence=1e9, noise_scale_every=4)
        record = run_trial(replace(workload, build_module=build), spec, protocol)
    assert (record.status, record.steps) == ("censored", STEPS), record.message
    module = fit(name, config, spec, workload, tmp_path)
    trained, expected = modules[-1].state_dict(), module.state_dict()
    assert trained.keys() == expected.keys()
    assert [key for key in expected if not torch.equal(trained[key], expected[key])] == []
    assert numbers(modules[-1].trainer) == numbers(module.trainer)
