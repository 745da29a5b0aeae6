"""Modules, data modules and call-backs of ``pytorch_lightning``, other classes than those of ``lightning.pytorch``."""

import pytest
import pytorch_lightning
import torch
from fits import DATA, HELD_OUT, STEPS, Regression, Sine, fit, protocol_of, run, stop_and_continue
from learners import same_weights
from lightning import pytorch as lightning
from pytorch_lightning.callbacks import EarlyStopping, RichProgressBar
from toolbox import TRAINER
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader

from bstune.core.errors import ConfigError
from bstune.trial.lightning.packages import package_of
from bstune.trial.noise_scale import NoiseScale


class Plateau(Sine, pytorch_lightning.LightningModule):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.log("train/loss", loss, on_epoch=True)
        return loss

    def configure_optimizers(self):
        optimizer = self.optimizer()
        # It acts whenever an epoch's loss is not 20% better, and so within the trial.
        plateau = lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=0.2)
        cycle = lr_scheduler.CosineAnnealingLR(optimizer, self.trainer.estimated_stepping_batches)
        return [optimizer], [
            {"scheduler": plateau, "monitor": "train/loss"},
            {"scheduler": cycle, "interval": "step"},
        ]


class Data(pytorch_lightning.LightningDataModule):
    def on_after_batch_transfer(self, batch, dataloader_idx):
        return batch


def test_a_trial_is_what_its_own_trainer_makes_of_the_same_batches():
    stopping = EarlyStopping("val/error", patience=9)
    protocol = protocol_of(
        trainer={**TRAINER, "gradient_clip_val": 0.5, "callbacks": [stopping, RichProgressBar()]}
    )
    record, module = run(Plateau, protocol=protocol, data=Data())
    assert (record.status, record.steps, record.message) == ("stopped", STEPS, None)
    assert isinstance(module.trainer, pytorch_lightning.Trainer)
    assert isinstance(module.trainer.datamodule, Data)
    assert same_weights(module, fit(Plateau, gradient_clip_val=0.5))


def test_it_goes_on_and_its_noise_scale_is_measured(tmp_path):
    protocol = protocol_of(noise_scale_every=8)
    whole, reference = run(Plateau, protocol=protocol)
    record, module = stop_and_continue(Plateau, protocol, 21, tmp_path / "3.state")
    assert same_weights(module, reference)
    # Those of the first 21 steps are taken over.
    assert record.noise_scale == whole.noise_scale
    assert len(whole.noise_scale) == STEPS // 8


@pytest.mark.parametrize("accumulate", [1, 2])
def test_the_noise_scale_is_the_same_in_a_trainer_of_either_package(accumulate):
    measured = []
    for package in (lightning, pytorch_lightning):
        kind = type("Kind", (Sine, package.LightningModule), {})
        noise_scale = NoiseScale(every=2)
        quiet = dict.fromkeys(
            ("enable_progress_bar", "enable_model_summary", "enable_checkpointing", "logger"), False
        )
        trainer = package.Trainer(
            accelerator="cpu",
            max_epochs=2,
            callbacks=[noise_scale],
            accumulate_grad_batches=accumulate,
            **quiet,
        )
        torch.manual_seed(0)
        trainer.fit(kind(), DataLoader(DATA, batch_size=10), HELD_OUT)
        measured.append(noise_scale.measurements)
    assert measured[0] == measured[1] != ()


class Hooked(lightning.LightningDataModule):
    pass


@pytest.mark.parametrize(
    ("kind", "options", "named"),
    [
        (
            Plateau,
            {"data": Hooked()},
            "Plateau is of pytorch_lightning and Hooked is of lightning.pytorch",
        ),
        (
            Regression,
            {"data": Data()},
            "Regression is of lightning.pytorch and Data is of pytorch_lightning",
        ),
        (
            Regression,
            {"protocol": protocol_of(trainer={**TRAINER, "callbacks": EarlyStopping("val/error")})},
            "Regression is of lightning.pytorch and EarlyStopping is of pytorch_lightning",
        ),
    ],
)
def test_a_mixture_is_refused(kind, options, named):
    text = (
        f"{named}: the two packages have different classes of the same names, so that no "
        "Trainer takes both"
    )
    with pytest.raises(ConfigError, match=text):
        run(kind, **options)


def test_what_is_of_neither_package_goes_with_both():
    assert package_of(Plateau(), None, 3, NoiseScale()) == "pytorch_lightning"
    assert package_of(None) == "lightning.pytorch"
