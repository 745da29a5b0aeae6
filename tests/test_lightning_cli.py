"""LightningCLI files of several kinds: what they build for a trial, and what a mistake ends in."""

import json
import sys
from pathlib import Path

import pytest
import torch
from refusals import refused, text_cases

import bstune
from bstune.__main__ import main
from bstune.config import compose
from bstune.recipe.recipe import settings_of
from bstune.trial.look_up import base_rates, look, look_up

# Lightning uses parts of jsonargparse that are deprecated, and advises on its own ways.
pytestmark = pytest.mark.filterwarnings("ignore")
PROJECTS = Path(__file__).parent / "projects"
SCRIPT = str(PROJECTS / "lightning_cli.py")
DATA = "data: {class_path: lightning_cli.SklearnDigits, init_args: {batch_size: 12}}\n"
TRAINER = """
seed_everything: 7
trainer:
  max_epochs: 10
  accelerator: gpu
  precision: 16
  logger: {class_path: lightning.pytorch.loggers.CSVLogger, init_args: {save_dir: logs}}
  callbacks:
    - class_path: lightning.pytorch.callbacks.EarlyStopping
      init_args: {monitor: val_loss}
    - class_path: lightning.pytorch.callbacks.ModelCheckpoint
"""
MODEL = "model: {class_path: lightning_cli.WithRate, init_args: {learning_rate: 0.02}}\n"
WITHOUT_RATE = """
model:
  class_path: lightning_cli.LitMLP
  init_args:
    net: {class_path: torch.nn.Linear, init_args: {in_features: 64, out_features: 16}}
    hidden: [16]
"""
OF_SCRIPT = {"config": "model: {learning_rate: 0.02}\ndata: {batch_size: 12, features: 4}\n"}
ADAM = "class_path: torch.optim.Adam, init_args: {lr: 0.003}"
# Config files by name, the command line's further words, and the batch size, rate, epochs and steps
# that are told.
KINDS = {
    "short class names, overrides": (
        {"config": "model: lightning_cli.WithRate\ndata: lightning_cli.SklearnDigits\n"},
        ["--trainer.max_epochs=3", "--model.init_args.learning_rate=0.05"],
        (32, 0.05, 3, None),
    ),
    "several files, optimizer and lr_scheduler": (
        {
            "base": TRAINER + MODEL + DATA,
            "config": f"{WITHOUT_RATE}trainer: {{max_epochs: 4}}\noptimizer: {{{ADAM}}}\n"
            "lr_scheduler: {class_path: torch.optim.lr_scheduler.ExponentialLR, "
            "init_args: {gamma: 0.9}}\n",
        },
        [],
        (12, 0.003, 4, None),
    ),
    "an optimizer as an argument": (
        {
            "config": DATA + "trainer: {max_steps: 70}\n"
            "model:\n  class_path: lightning_cli.WithOptimizer\n"
            f"  init_args: {{optimizer: {{{ADAM}}}}}"
        },
        [],
        (12, 0.003, None, 70),
    ),
    "as LightningCLI saves it": (
        {"config": TRAINER + MODEL + DATA + "ckpt_path: null\nweights_only: null\noptimizer: null"},
        [],
        (12, 0.02, 10, None),
    ),
    "a script's classes, links and defaults": (OF_SCRIPT, [SCRIPT, "fit"], (12, 0.02, 5, None)),
    "a script's, of the other package": (OF_SCRIPT, ["other.py"], (12, 0.02, 5, None)),
    "two rates": (
        {"config": MODEL + DATA + f"trainer: {{max_epochs: 2}}\noptimizer: {{{ADAM}}}\n"},
        ["lr_key=optimizer.init_args.lr"],
        (12, 0.003, 2, None),
    ),
    "a rate of the schedule": (
        {
            "config": f"{WITHOUT_RATE}trainer: {{max_steps: 50}}\n{DATA}optimizer: {{{ADAM}}}\n"
            "lr_scheduler: {class_path: torch.optim.lr_scheduler.OneCycleLR, "
            "init_args: {max_lr: 0.04, total_steps: 51}}\n"
        },
        ["lr_key=max_lr"],
        (12, 0.04, None, 50),
    ),
}


@pytest.fixture(autouse=True)
def project(tmp_path, monkeypatch):
    """A folder in which people start the command; the project lies on the path."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(PROJECTS), *sys.path])
    other = Path(SCRIPT).read_text().replace("lightning.pytorch", "pytorch_lightning")
    Path("other.py").write_text(other)


def words(kind, *further):
    """Write a kind's files; the command line that reads them."""
    files, arguments, _ = KINDS[kind]
    for name, text in files.items():
        Path(f"{name}.yaml").write_text(text)
    named = [word for name in files for word in ("--config", f"{name}.yaml")]
    return [*named, *arguments, "device=cpu", "precision=32-true", "threads=1", *further]


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_is_built_with_a_trials_values(kind):
    recipe = compose(words(kind), lightning=True).recipe
    found = look_up(recipe)
    assert (found.batch_size, found.lr, found.epochs, found.steps) == KINDS[kind][2]
    assert (found.metric, found.examples) == ("val_loss", 1200)
    looked = [look(recipe, settings_of(8, 0.5, 100, seed=seed)).trainer for seed in (0, 1)]
    assert base_rates(looked[0].optimizers[0]) == [0.5]
    assert looked[0].datamodule.hparams.batch_size == 8
    weights = [next(one.lightning_module.parameters()) for one in looked]
    assert not torch.equal(*weights)
    assert weights[0].shape == (16, 4 if "script" in kind else 64)


def test_options_that_the_files_trainer_tells():
    Path("config.yaml").write_text(TRAINER + MODEL + DATA)
    words = ["config.yaml", "--trainer.devices=2"]
    options = compose(words, lightning=True).options
    assert (options.device, options.precision, options.devices) == ("cuda", "16-mixed", 2)
    overridden = compose([*words, "--trainer.precision=bf16-mixed"], lightning=True).options
    assert overridden.precision == "bf16-mixed"
    assert (options.study, options.workload) == ("config", "config")


STUDY = ["workers=0", "survey=off", "mlflow.uri=null", "trials=2", "seeds=1"]


@pytest.mark.slow
def test_a_file_is_tuned_and_its_best_trained(capsys):
    target = ["target=val_loss <= 1.8", "study=mine", "tune={dropout: [0.0, 0.1]}"]
    study = ["lightning", *words("as LightningCLI saves it", *STUDY, *target)]
    assert main(study) == 0
    result = bstune.load("outputs/mine")
    assert (result.baseline.batch_size, result.baseline.lr) == (12, 0.02)
    assert result.reached
    assert set(result.best.values) == {"dropout"}
    capsys.readouterr()
    assert main([*study, "trial=outputs/mine/best.yaml", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["values"] == result.best.values


@text_cases("""
further | named
lr_key=model.init_args.lrr | lr_key, model.init_args.learning_rate
--model.class_path=nosuch.Model | nosuch
--optimizer=Adam | lr_key, model.init_args.learning_rate, optimizer.init_args.lr
tune={width: [1, 2]} | tune, width, dropout
nosuch.yaml | nosuch.yaml
algorithm=adm | adm, adam, sgd
list.yaml | list.yaml, LightningCLI
trainer.yaml | trainer.yaml, LightningCLI
hydra.yaml | hydra.yaml, defaults
""")
def test_a_mistake_is_one_line(further, named):
    Path("list.yaml").write_text("- trainer\n")
    Path("trainer.yaml").write_text("trainer: [1]\n")
    Path("hydra.yaml").write_text("defaults: [model]\n")
    with refused(named):
        look_up(compose(words("as LightningCLI saves it", further), lightning=True).recipe)


def test_classes_that_a_script_knows_need_it():
    Path("config.yaml").write_text("model: {learning_rate: 0.1}\ndata: {batch_size: 3}\n")
    with refused("config.yaml, script"):
        look_up(compose(["config.yaml", "device=cpu"], lightning=True).recipe)
    Path("main.py").write_text("print('no cli')\n")
    with refused("main.py, LightningCLI"):
        look_up(compose(["main.py", "device=cpu"], lightning=True).recipe)
