"""The best trained again: exactly its steps, in the user's own Trainer or by a command."""

import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping
from refusals import cases
from small import EXAMPLES, QUIET, Counts, Data, Model, WithTest, step_by_hand
from test_run import own, places

from bstune.__main__ import main
from bstune.config import options_from_python
from bstune.recipe.project import recipe_of_project
from bstune.recipe.recipe import settings_of
from bstune.trial.train_best import train_best

# Lightning advises on the loggers and loaders of the user's own training.
pytestmark = pytest.mark.filterwarnings("ignore")


class Manual(Counts):
    def __init__(self, lr=0.1):
        super().__init__(lr)
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        step_by_hand(self, super().training_step(batch, batch_idx))

    def configure_optimizers(self):
        return [torch.optim.SGD([weight], self.lr) for weight in self.linear.parameters()]


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


@pytest.mark.parametrize("steps, as_file", [(37, True), (2, False)])
def test_a_command_trains_the_steps_that_it_names(tmp_path, capsys, steps, as_file):
    best = tmp_path / "best.yaml"
    best.write_text(f"trial: {{batch_size: 16, lr: 0.01, steps: {steps}}}")
    given = ["trial.batch_size=16", "trial.lr=0.01", f"trial.steps={steps}"]
    # The target is met on the way.
    command = [*own(tmp_path, "Counts"), *places(tmp_path), "workers=0", "target=val/loss <= 0.9"]
    assert main([*command, *([f"trial={best}"] if as_file else given)]) == 0
    assert Counts.calls == [16] * steps
    assert f"{steps} steps" in capsys.readouterr().out


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
