"""The shipped workloads, their data and their modules, trained by a plain Trainer."""

import os
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from hydra.utils import instantiate
from lightning.pytorch import Trainer, seed_everything
from omegaconf import OmegaConf
from torch import nn
from torch.nn import functional
from torch.optim import SGD
from torch.utils.data import DataLoader, TensorDataset

from bstune.config import compose
from bstune.core.records import Spec, Target
from bstune.trial.lightning import train
from bstune.trial.trial import Trial, run_trial
from bstune.workloads.airfoil import AirfoilData
from bstune.workloads.classifier import Classifier
from bstune.workloads.datasets import LabelledImages, load_digits, load_tiny_shakespeare
from bstune.workloads.images import ImageData, split_images
from bstune.workloads.language import TextData
from bstune.workloads.schedules import warmup_then_constant

pytestmark = pytest.mark.filterwarnings("ignore:.*does not have many workers")
UNREACHABLE = Target("val/loss", 0.0, "min")
CONF = Path(__file__).parents[1] / "conf" / "workload"
DATA = os.environ.get("BSTUNE_DATA", "")
needs_data = pytest.mark.skipif(not DATA, reason="BSTUNE_DATA is not set")
TRAINED = [
    "digits",
    pytest.param("airfoil", marks=needs_data),
    pytest.param("fashion_mlp", marks=needs_data),
]


def composed(name, **trial):
    """A workload's file, with the values of a trial, of its baseline unless given."""
    file = OmegaConf.load(CONF / f"{name}.yaml")
    values = {**file.baseline, "seed": 0, "total_steps": 400, **trial}
    return OmegaConf.merge(file, {"trial": values, "data_root": DATA})


def trainer(*callbacks, **options):
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False}
    return Trainer(
        accelerator="cpu",
        enable_checkpointing=False,
        callbacks=list(callbacks),
        max_epochs=-1,
        **quiet,
        **options,
    )


def numbered_images(n, channels):
    """Different images, each with its number as label."""
    images = np.random.default_rng(0).integers(0, 201, (n, channels, 4, 4), np.uint8)
    return LabelledImages(torch.from_numpy(images), torch.arange(n), white=200)


@pytest.mark.parametrize("name", TRAINED)
def test_twenty_steps_lower_the_loss(name):
    seed_everything(0, verbose=False)
    config = composed(name)
    data, module = instantiate(config.data), instantiate(config.module)
    (before,) = trainer().validate(module, data, verbose=False)
    trainer(max_steps=20).fit(module, data)
    (after,) = trainer().validate(module, data, verbose=False)
    assert after["val/loss"] < 0.7 * before["val/loss"]
    assert Target.parse(config.target).metric in after
    keys = [part.key for part in config.tunable.values()]
    assert all(OmegaConf.select(config, key) is not None for key in keys)
    # A trial's values arrive.
    config = composed(name, batch_size=32, lr=0.125)
    assert len(next(iter(instantiate(config.data).train_dataloader()))[1]) == 32
    assert instantiate(config.module).lr == 0.125


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("digits", (1200, 300, 297)),
        pytest.param("fashion_mlp", (55_000, 5000, 0), marks=needs_data),
    ],
)
def test_sizes_of_shipped_splits(name, sizes):
    split = instantiate(composed(name).data).split
    assert tuple(len(part) for part in (split.train, split.validation, split.test)) == sizes


@pytest.mark.parametrize(("validation", "test"), [(300, 297), (1, 0)])
@pytest.mark.parametrize("seed", [0, 1])
def test_splits_are_disjoint_and_drawn_by_the_seed(validation, test, seed):
    n = 1000
    split = split_images(numbered_images(n, 1), validation, test, seed)
    parts = [part.tensors[1] for part in (split.validation, split.test, split.train)]
    assert torch.cat(parts).tolist() == np.random.RandomState(seed).permutation(n).tolist()
    assert [len(part) for part in parts] == [validation, test, n - validation - test]


def test_loaders_give_each_example_once_an_epoch_with_its_label():
    numbered = numbered_images(1000, 1)
    data = ImageData(numbered, 64, validation=300, validation_batch_size=250)

    def epoch(loader):
        batches = list(loader)
        images, labels = (torch.cat(parts) for parts in zip(*batches, strict=True))
        expected, _ = data.split.normalise((numbered.images[labels], labels))
        assert torch.equal(images, expected)
        return [len(batch[1]) for batch in batches], labels.tolist()

    sizes, order = epoch(data.train_dataloader())
    assert sizes == [64] * 10 + [60]
    assert sorted(order) == sorted(data.split.train.tensors[1].tolist()) != order
    assert epoch(data.train_dataloader())[1] != order
    assert epoch(data.val_dataloader()) == ([250, 50], data.split.validation.tensors[1].tolist())


@pytest.mark.parametrize("images", [load_digits(), numbered_images(1000, 3)])
def test_images_are_normalised_by_those_trained_on(images):
    data = ImageData(images, len(images.labels), 300, 300)
    raw = [part.tensors[0].double() for part in (data.split.train, data.split.validation)]
    std, mean = torch.std_mean(raw[0], (0, 2, 3), correction=0, keepdim=True)
    (batch,) = data.val_dataloader()
    assert batch[0].dtype == torch.float32
    torch.testing.assert_close(batch[0].double(), (raw[1] - mean) / std, atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("warmup_examples", "batch_size", "factors"),
    [
        (0, 8, [1, 1, 1]),
        (9, 8, [0.5, 1, 1]),
        (40, 8, [0.2, 0.4, 0.6, 0.8, 1, 1, 1]),
        (1, 4096, [1, 1]),
    ],
)
def test_warmup(warmup_examples, batch_size, factors):
    optimizer = SGD([nn.Parameter(torch.zeros(1))], lr=0.5)
    scheduler = warmup_then_constant(optimizer, warmup_examples, batch_size)
    rates = []
    for _ in factors:
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    assert rates == pytest.approx([0.5 * factor for factor in factors])


@pytest.mark.parametrize(("batch_size", "smoothing"), [(1000, 0.0), (1500, 0.0), (7, 0.2)])
def test_error_and_loss_are_of_all_examples(batch_size, smoothing):
    # 700 of 5,000 are wrong; a float32, or a mean of the batches' means, is more than 0.14.
    labels = torch.zeros(5000, dtype=torch.int64)
    logits = torch.tensor([1.0, 0.0]).repeat(5000, 1)
    logits[np.random.RandomState(0).permutation(5000)[:700]] = torch.tensor([0.0, 3.0])
    # Trials of other smoothing are compared by the same loss.
    smoothed = nn.CrossEntropyLoss(label_smoothing=smoothing)
    module = Classifier(nn.Identity(), smoothed, partial(SGD), lr=0.1)
    assert module.training_step((logits, labels), 0) == smoothed(logits, labels)
    validating = trainer()
    loader = DataLoader(TensorDataset(logits, labels), batch_size)
    validating.validate(module, loader, verbose=False)
    metrics = validating.callback_metrics
    assert metrics["val/error"].item() == 0.14
    loss = functional.cross_entropy(logits.double(), labels)
    assert metrics["val/loss"].item() == pytest.approx(loss.item(), rel=1e-6)


def test_airfoil_rows_are_standardised_over_all():
    table = np.random.default_rng(0).normal(3.0, 2.0, (20, 4))
    data = AirfoilData(table, batch_size=4, rows=15)
    expected = ((table - table.mean(0)) / table.std(0))[:15]
    ((features, labels),) = data.val_dataloader()
    np.testing.assert_allclose(np.column_stack([features, labels]), expected, rtol=1e-5)
    assert [len(batch[1]) for batch in data.train_dataloader()] == [4, 4, 4, 3]


def test_sequences_of_a_text_have_the_next_tokens_as_targets():
    data = TextData(torch.arange(1000), 64, context=5, validation=8, validation_batch_size=3)
    starts = []
    for loader in (data.train_dataloader(), data.val_dataloader()):
        batches = list(loader)
        tokens, targets = (torch.cat(parts) for parts in zip(*batches, strict=True))
        assert torch.equal(tokens, tokens[:, :1] + torch.arange(5))
        assert torch.equal(targets, tokens + 1)
        starts.append(tokens[:, 0].tolist())
    # Nine tenths are trained on, in an order of their own; a twentieth is for the target.
    assert sorted(starts[0]) == list(range(895)) != starts[0]
    assert starts[1] == list(range(900, 945, 6))


@needs_data
def test_an_lstm_learns_shakespeare_as_in_the_recorded_table():
    text = load_tiny_shakespeare(DATA)
    data = instantiate(composed("shakespeare_lstm").data)
    # As published, and in the parts that the recorded runs had.
    assert (len(text), len(text.unique()), len(data.train)) == (1_115_394, 65, 1_003_854 - 64)
    (tokens, _), *_ = data.val_dataloader()
    assert torch.equal(tokens[0], text[1_003_854 : 1_003_854 + 64])
    recipe = compose(["+workload=shakespeare_lstm", "threads=1", "device=cpu"]).recipe
    spec = Spec(number=0, place="", role="search", batch_size=32, lr=0.01, seed=0, max_steps=64)
    record = run_trial(partial(train, recipe), Trial(spec, UNREACHABLE, total_steps=300))
    # Its first run; characters by their frequency alone have 3.3 nats.
    assert record.history == ((64, pytest.approx(2.21825, abs=2e-3)),)
