"""The best trained again: exactly its steps, in the user's own Trainer or by a command."""

import math

import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from refusals import cases, refused
from small import ARGUMENTS, EXAMPLES, QUIET, Data, Model, step_by_hand

import bstune
from bstune.__main__ import main
from bstune.config import options_from_python
from bstune.recipe.project import recipe_of_project
from bstune.recipe.recipe import settings_of
from bstune.trial.train_best import train_best

# Lightning advises on the loggers and loaders of the user's own training.
pytestmark = pytest.mark.filterwarnings("ignore")


class Counts(Model):
    """It keeps the sizes of its batches, of training and test."""

    calls = []
    tested = []

    def training_step(self, batch, batch_idx):
        self.calls.append(len(batch[0]))
        return super().training_step(batch, batch_idx)

    def test_step(self, batch, batch_idx):
        self.tested.append(len(batch[0]))
        self.log("test/loss", self.loss(batch))

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), self.lr)
        length = self.trainer.max_steps
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / length)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


class Manual(Counts):
    def __init__(self, lr=0.1):
        super().__init__(lr)
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        step_by_hand(self, super().training_step(batch, batch_idx))

    def configure_optimizers(self):
        return [torch.optim.SGD([weight], self.lr) for weight in self.linear.parameters()]


class WithTest(Data):
    def test_dataloader(self):
        return self.val_dataloader()


@pytest.fixture(autouse=True)
def _nothing_counted():
    for counted in (Counts.calls, Counts.tested):
        counted.clear()


# An epoch has 12 batches of 20.
@cases("""
kind | micro_batch_size | steps | total
automatic | null | 1 | 40
automatic | null | 11 | 11
automatic | 8 | 12 | 40
automatic | 8 | 29 | 40
manual | null | 29 | 40
""")
def test_exactly_the_steps_are_trained(tmp_path, kind, micro_batch_size, steps, total):
    options = options_from_python(device="cpu", micro_batch_size=micro_batch_size)
    stops_early = EarlyStopping("val/loss", patience=0, min_delta=9.0)
    arguments = QUIET | {"callbacks": [stops_early], "max_epochs": 1}
    module = Manual if kind == "manual" else Counts
    recipe = recipe_of_project(module, WithTest(), options, arguments)
    trained, trainer = train_best(recipe, settings_of(20, 0.01, total), steps, tmp_path, {})
    sizes = [20] if micro_batch_size is None else [8, 8, 4]
    assert Counts.calls == sizes * steps
    assert Counts.tested == [EXAMPLES]
    assert {"val/loss", "test/loss"} <= trainer.callback_metrics.keys()
    assert trained is trainer.lightning_module
    if kind == "automatic":
        left = trainer.optimizers[0].param_groups[0]["lr"] / 0.01
        assert left == pytest.approx(1 - steps / total)


def test_a_studys_best_is_trained_with_the_users_callbacks(tmp_path):
    checkpoint, logger = ModelCheckpoint(monitor="val/loss"), CSVLogger(tmp_path / "logs")
    places = {"output": str(tmp_path / "out"), "storage": f"sqlite:///{tmp_path}/study.db"}
    own = {"trials": 2, "workers": 0, "mlflow": {"uri": None}}
    trainer = {"enable_progress_bar": False, "enable_model_summary": False}
    result = bstune.tune(Counts, WithTest(), **ARGUMENTS | places | own, trainer=trainer)
    if result.verdict == "switch":
        assert result.train_command == "result.train()"
    for one in (result, result.at("val/loss <= 0.2")):
        Counts.calls.clear()
        module, trainer = one.train(callbacks=checkpoint, logger=logger)
        assert Counts.calls == [one.best.batch_size] * math.ceil(one.best.steps)
        assert module.lr == one.best.lr
        assert one.parameters and one.examples == EXAMPLES
    assert trainer.logger is logger
    assert str(tmp_path / "logs") in checkpoint.best_model_path
    with refused("bstune.tune"):
        bstune.load(tmp_path / "out").train()


OWN = """
target: val/loss <= 0.9
baseline: {batch_size: 16, lr: 0.05}
batch_size: {low: 2, high: 128}
budget: {steps: 500, examples: 20_000}
threads: 1
data: {_target_: small.Data}
module: {_target_: test_train_best.Counts}
"""


@pytest.mark.parametrize("steps, as_file", [(37, True), (2, False)])
def test_a_command_trains_the_steps_that_it_names(tmp_path, capsys, steps, as_file):
    (tmp_path / "workload").mkdir()
    (tmp_path / "workload" / "own.yaml").write_text(OWN)
    best = tmp_path / "best.yaml"
    best.write_text(f"trial: {{batch_size: 16, lr: 0.01, steps: {steps}}}")
    given = ["trial.batch_size=16", "trial.lr=0.01", f"trial.steps={steps}"]
    command = ["--config-dir", str(tmp_path), "+workload=own", "workers=0", "device=cpu"]
    places = [f"output={tmp_path}/out", f"storage=sqlite:///{tmp_path}/study.db"]
    # The target is met on the way.
    assert main([*command, *places, *([f"trial={best}"] if as_file else given)]) == 0
    assert Counts.calls == [16] * steps
    assert f"{steps} steps" in capsys.readouterr().out


def test_several_studies_whichever_fails(tmp_path, capsys):
    """Each has a name and a folder of its own."""
    command = ["-m", "+workload=replay", "table=fashion_mlp,nosuch", "seed=0,1", "trials=1"]
    places = ["mlflow.uri=null", "seeds=1", f"output={tmp_path}"]
    assert main([*command, *places, f"storage=sqlite:///{tmp_path}/study.db"]) == 2
    studies = ["replay-fashion_mlp-0", "replay-fashion_mlp-1"]
    folders = sorted(path for path in tmp_path.iterdir() if path.is_dir())
    assert [bstune.load(folder).study for folder in folders] == studies
    for wrong in (["-m", "+workload=digits", "seed=0"], ["report", "-m", str(tmp_path)]):
        assert main(wrong) == 2
    assert capsys.readouterr().err.count("-m ") >= 2


class Keyed(Model):
    def __init__(self, lr, api_key):
        super().__init__(lr)
        self.save_hyperparameters()


def test_a_checkpoint_of_the_best_has_no_secrets(tmp_path):
    options = options_from_python(device="cpu")
    arguments = QUIET | {"max_epochs": 1}
    recipe = recipe_of_project(lambda trial: Keyed(trial.lr, "pw"), Data(), options, arguments)
    _, trainer = train_best(recipe, settings_of(16, 0.01, 3), 3, tmp_path, {})
    trainer.save_checkpoint(tmp_path / "best.ckpt")
    saved = torch.load(tmp_path / "best.ckpt", weights_only=True)
    assert saved["hyper_parameters"] == {"lr": 0.01, "api_key": "***"}
