"""Small projects as their authors wrote them (tests/projects/), tuned unchanged by a dozen lines of YAML each."""

import importlib
import math
import shutil
import subprocess
import sys
from contextlib import chdir
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml
from builders import options_and_recipe
from lightning.pytorch import seed_everything
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.loggers.logger import DummyLogger
from toolbox import entries, make_spec, trials_of

from bstune.core.records import Budget
from bstune.hydra_recipe import instantiate
from bstune.recipe import TrialValues
from bstune.study.prepare import compose_checked
from bstune.study.tune import tune
from bstune.trial.loop import run_trial
from bstune.trial.own_project.cli_file import Chosen, read_file
from bstune.trial.own_project.lightning_cli import workload_of
from bstune.trial.workload import load_workload

PROJECTS = Path(__file__).parent / "projects"
CONFIGS = PROJECTS / "conf"
CASES = {
    path.stem: (CONFIGS, f"workload={path.stem}")
    for path in sorted((CONFIGS / "workload").glob("*.yaml"))
}
# Groups of the project's own, one of which stands beside bstune's sections.
TREE = PROJECTS / "hydra_tree" / "conf"
CASES |= {
    "wine": (TREE, "workload=wine"),
    "wine, linear": (TREE, "workload=wine model@workload.module=linear"),
}
CLI = PROJECTS / "lightning_cli" / "config.yaml"
# Its objective counts steps: what it does depends on no clock.
STUDY = ("search.trials=4", "search.objective=steps", "search.replicates=0", "search.workers=0")
STUDY += ("mlflow.enabled=false",)
STEPS = 40
OPTIMIZERS = {"two_optimizers": 2}  # that step at each batch: Lightning counts the steps of all
# Of these a study says something that a trial of theirs does not: it chooses horizons, or goes by the size of its
# batches. A trial of each project is compared with its author's fit.
STUDIED = {"one_cycle", "graph_batches"}
VALIDATES = {"early_stopping", "epoch_cosine"}  # what is trained depends on what is validated

# The warnings are the projects' own.
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::UserWarning")]


@pytest.fixture(autouse=True)
def _importable(monkeypatch):
    monkeypatch.syspath_prepend(str(PROJECTS))


def arguments(name):
    folder, options = CASES[name]
    return "--config-dir", str(folder), *options.split()


@pytest.mark.parametrize(
    "name",
    [name if name in STUDIED else pytest.param(name, marks=pytest.mark.soak) for name in CASES],
)
def test_a_project_is_tuned_as_it_is(name, bstune, tmp_path):
    trials = check_study(tmp_path, *bstune(*arguments(name), *STUDY))
    from_python = begin_in_python(compose_checked(arguments(name)))
    # What comes after these depends on how many there are to be.
    assert [record(trial) for trial in from_python[:2]] == [record(trial) for trial in trials[:2]]


def begin_in_python(composed):
    """Begin a composed study from Python; return its trials."""
    own, recipe = composed.options.workload, composed.trained_recipe
    result = tune(
        module=lambda trial: module_at(recipe, trial.lr),
        data=recipe.data(),
        target=own.target.target,
        batch_sizes=(own.batch_size.low, own.batch_size.high),
        reference=(own.reference.batch_size, own.reference.lr),
        budget=own.budget.budget,
        trainer=instantiate(own.trainer, "trainer"),
        name="python",
        objective="steps",
        trials=2,
        workers=0,
        survey=False,
        mlflow=False,
        options=["search.replicates=0"],
    )
    return result.records


def module_at(recipe, lr):
    """Build a workload's module at a learning rate: no project takes another value of the trial."""
    return recipe.module(TrialValues(batch_size=1, lr=lr, seed=0, total_steps=1))


def record(trial):
    """Return what the record of a trial says that depends on no clock."""
    return trial.batch_size, trial.lr, trial.seed, trial.status, trial.steps, trial.history


@pytest.mark.soak
def test_the_console_script_tunes_a_file_of_lightning_cli_in_the_working_directory(tmp_path):
    shutil.copytree(PROJECTS / "lightning_cli", tmp_path / "lightning_cli")
    command = [
        Path(sys.executable).with_name("bstune"),
        "lightning",
        "lightning_cli/config.yaml",
        *STUDY,
    ]
    own = (
        "--target",
        "val_loss=0.3",
        "search.trials=8",
        "search.workers=1",
        "hardware.enabled=false",
    )
    ran = subprocess.run([*command, *own], cwd=tmp_path, capture_output=True, text=True)
    check_study(tmp_path, ran.returncode, ran.stdout, ran.stderr)
    assert entries(tmp_path / "bstune_conf" / "workload") == ["LitMLP.yaml"]


def check_study(folder, status, out, err):
    """Check that a study ended, that it reached its target, and that it left nothing elsewhere."""
    assert status == 0, err
    assert set(entries(folder)) <= {"bstune.db", "bstune_conf", "lightning_cli", "outputs"}
    trials = trials_of(*(folder / "outputs").iterdir())
    assert "reached" in {trial.status for trial in trials}, out
    assert "failed" not in {trial.status for trial in trials}, out
    assert "Traceback" not in out + err
    return trials


def fit(name, own, spec, workload, build, folder):
    """Train as the project's author would, on the batches of a trial; return the module."""
    lightning = importlib.import_module(
        "pytorch_lightning" if name.startswith("pl_") else "lightning.pytorch"
    )
    module, data = build(spec)
    batches = workload.train_batches(spec)
    data.train_dataloader = lambda: batches
    logger = DummyLogger() if lightning.__name__ == "lightning.pytorch" else False
    trainer = lightning.Trainer(
        accelerator="cpu",
        max_steps=STEPS * OPTIMIZERS.get(name, 1),
        max_epochs=math.ceil(STEPS / len(batches)),
        limit_val_batches=None if name in VALIDATES else 0,
        num_sanity_val_steps=0,
        default_root_dir=folder,
        enable_progress_bar=False,
        enable_model_summary=False,
        **{"logger": logger, **instantiate(own.trainer, "trainer")},
    )
    trainer.fit(module, datamodule=data)
    return module


def numbers(trainer):
    """Return what a module may ask its Trainer."""
    names = (
        "max_epochs",
        "num_training_batches",
        "estimated_stepping_batches",
        "current_epoch",
        "global_step",
    )
    return {name: getattr(trainer, name) for name in names}


@pytest.mark.parametrize("name", CASES)
def test_a_trial_equals_the_fit_of_a_trainer_on_its_batches(name, tmp_path):
    composed = compose_checked([*arguments(name), "device=cpu"])
    recipe = composed.trained_recipe

    def build_both(spec):
        seed_everything(spec.seed)
        return module_at(recipe, spec.lr), recipe.data()

    check_equal(name, composed, build_both, tmp_path)


def fitted(name, folder):
    """Train a project as its author would, and write a checkpoint; return the options and the module."""
    options, recipe = options_and_recipe(*arguments(name), "device=cpu")
    workload, _ = load_workload(options, recipe)
    reference = options.workload.reference
    spec = make_spec(int(reference.batch_size), reference.lr)
    both = module_at(recipe, spec.lr), recipe.data()
    module = fit(name, options.workload, spec, workload, lambda spec: both, folder)
    module.trainer.save_checkpoint(folder / "run.ckpt")
    return options, module


@pytest.mark.parametrize(
    "name",
    [
        "early_stopping",
        "epoch_cosine",
        "lazy_layers",
        "pl_transformer",
        "two_optimizers",
        "checkpoint_state",
    ],
)
def test_a_checkpoint_of_a_projects_run_is_branched(name, bstune, tmp_path):
    options, _ = fitted(name, tmp_path)
    size = int(options.workload.reference.batch_size)
    own = (
        "--batch-size",
        size,
        "--batch-sizes",
        2 * size,
        "--examples",
        20 * size,
        "--seeds",
        0,
        "--trusted",
    )
    status, out, err = bstune("branch", "run.ckpt", *own, *arguments(name))
    assert (status, err) == (0, "")
    steps = [int(line.split()[4]) for line in out.splitlines() if line.startswith("seed 0")]
    assert steps == [20, 10]


# Lightning calls jsonargparse by former names.
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_trial_equals_the_fit_of_a_file_of_lightning_cli(tmp_path):
    workload, _ = workload_of(read_file(CLI, Chosen("val_loss=0.2")))
    (tmp_path / "workload").mkdir()
    (tmp_path / "workload" / "cli.yaml").write_text(yaml.safe_dump(workload))

    def build(spec):
        own = [
            "--config",
            str(CLI),
            "--seed_everything",
            str(spec.seed),
            "--optimizer.init_args.lr",
            str(spec.lr),
        ]
        cli = LightningCLI(
            run=False, save_config_callback=None, args=[*own, "--trainer.callbacks", "null"]
        )
        return cli.model, cli.datamodule

    check_equal(
        "cli", compose_checked(["--config-dir", str(tmp_path), "workload=cli"]), build, tmp_path
    )


def check_equal(name, composed, build_both, folder):
    """Check that a trial ends with the weights, and the Trainer's numbers, of a fit on the same batches."""
    own = composed.options.workload
    spec = make_spec(2 * own.batch_size.low + 1, own.reference.lr, seed=5)
    with chdir(folder):
        workload, protocol = load_workload(composed.options, composed.trained_recipe)
        modules = []

        def build(spec):
            modules.append(workload.build_module(spec))
            return modules[-1]

        # It is never reached.
        target = replace(protocol.target, value=-1e9 if protocol.target.mode == "min" else 1e9)
        protocol = replace(
            protocol, budget=Budget(STEPS, 1), target=target, divergence=1e9, noise_scale_every=4
        )
        record = run_trial(replace(workload, build_module=build), spec, protocol)
    assert (record.status, record.steps) == ("stopped", STEPS), record.message
    module = fit(name, own, spec, workload, build_both, folder)
    trained, expected = modules[-1].state_dict(), module.state_dict()
    assert trained.keys() == expected.keys()
    assert [key for key in expected if not torch.equal(trained[key], expected[key])] == []
    assert numbers(modules[-1].trainer) == numbers(module.trainer)
