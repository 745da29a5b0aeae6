"""The shipped workloads, their data and their modules, trained by a plain Trainer."""

import gzip
import hashlib
import itertools
import os
import tarfile
import threading
from functools import partial
from http.server import HTTPServer, SimpleHTTPRequestHandler

import numpy as np
import pytest
import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import LambdaCallback
from omegaconf import OmegaConf
from refusals import refused
from small import QUIET
from torch import nn
from torch.nn import functional
from torch.optim import SGD
from torch.utils.data import DataLoader, TensorDataset

from bstune.config import CONF, compose
from bstune.core.records import Spec, Target
from bstune.recipe.recipe import settings_of
from bstune.trial.lightning import train
from bstune.trial.trial import Trial, run_trial
from bstune.workloads.averaging import UPDATES_IN_WINDOW, RunningWeightAverage
from bstune.workloads.classifier import Classifier
from bstune.workloads.datasets import LabelledImages, Source, load_cifar10, read_file
from bstune.workloads.images import ImageData, random_crop_flip, split_images
from bstune.workloads.muon import Muon

pytestmark = pytest.mark.filterwarnings("ignore:.*does not have many workers")
UNREACHABLE = Target("val/loss", 0.0, "min")
DATA = os.environ.get("BSTUNE_DATA", "")
needs_data = pytest.mark.skipif(not DATA, reason="BSTUNE_DATA is not set")
# A step of resnet_cifar takes half a second: tests/test_cifar10.py trains a narrow one.
LEFT_OUT = {"replay", "resnet_cifar"}
TRAINED = sorted({file.stem for file in CONF.glob("workload/*.yaml")} - LEFT_OUT)
# The equally likely labels, where they are not ten classes.
LABELS = {"airfoil": None, "shakespeare_lstm": 65, "shakespeare_transformer": 65}


@pytest.mark.parametrize("name", TRAINED)
def test_a_few_steps_lower_the_loss(name):
    if name != "digits" and not DATA:
        pytest.skip("BSTUNE_DATA is not set")
    composed = compose([f"+workload={name}", "device=cpu", "threads=1"])
    recipe, labels = composed.recipe, LABELS.get(name, 10)
    trial = settings_of(16, composed.options.baseline.lr, 20)
    seed_everything(0, verbose=False)
    data, module = recipe.data(trial), recipe.module(trial)
    data.validation_batch_size = 100
    losses = []
    keep = LambdaCallback(on_train_batch_end=lambda *given: losses.append(given[2]["loss"].item()))
    settings = {"accelerator": "cpu", "max_steps": 20, "limit_val_batches": 1, "callbacks": [keep]}
    trainer = Trainer(**recipe.trainer(trial), **QUIET, **settings)
    trainer.fit(module, data)
    assert labels is None or losses[0] == pytest.approx(np.log(labels), rel=0.25)
    assert np.mean(losses[15:]) < np.mean(losses[:5])
    trainer.validate(module, data, verbose=False)
    assert np.isfinite(float(trainer.callback_metrics[composed.options.target.metric]))
    # What may be tuned is there, and a trial's values arrive.
    config = OmegaConf.create(composed.parts)
    for part in config.tunable.values():
        assert OmegaConf.select(config, part.key) is not None
    assert len(next(iter(data.train_dataloader()))[1]) == 16
    assert module.lr == trial.lr


def test_workloads_of_a_folder_have_bases(tmp_path):
    base = tmp_path / "workload" / "base"
    base.mkdir(parents=True)
    (base / "short.yaml").write_text("budget: {steps: 7}\ntrials: 3\n")
    mine = "defaults: [digits, base/nesterov@_here_, base/short@_here_, _self_]\ntrials: 5\n"
    (tmp_path / "workload" / "mine.yaml").write_text(mine)
    composed = compose(["--config-dir", str(tmp_path), "+workload=mine"])
    assert (composed.options.budget.steps, composed.options.trials) == (7, 5)
    assert composed.parts["module"]["optimizer"]["nesterov"] is True
    assert composed.parts["data"]["test"] == 297


def test_error_and_loss_are_of_all_examples():
    # 700 of 5,000 are wrong; a float32, or a mean of the batches' means, is more than 0.14.
    labels = torch.zeros(5000, dtype=torch.int64)
    logits = torch.tensor([1.0, 0.0]).repeat(5000, 1)
    logits[np.random.RandomState(0).permutation(5000)[:700]] = torch.tensor([0.0, 3.0])
    # Trials of other smoothing are compared by the same loss.
    smoothed = nn.CrossEntropyLoss(label_smoothing=0.2)
    module = Classifier(nn.Identity(), smoothed, partial(SGD), lr=0.1)
    assert module.training_step((logits, labels), 0) == smoothed(logits, labels)
    validating = Trainer(accelerator="cpu", **QUIET)
    loader = DataLoader(TensorDataset(logits, labels), 7)
    validating.validate(module, loader, verbose=False)
    metrics = validating.callback_metrics
    assert metrics["val/error"].item() == 0.14
    loss = functional.cross_entropy(logits.double(), labels)
    assert metrics["val/loss"].item() == pytest.approx(loss.item(), rel=1e-6)


@needs_data
def test_an_lstm_learns_shakespeare_as_in_the_recorded_table():
    recipe = compose(["+workload=shakespeare_lstm", "threads=1", "device=cpu"]).recipe
    spec = Spec(number=0, place="", role="search", batch_size=32, lr=0.01, seed=0, max_steps=64)
    record = run_trial(partial(train, recipe), Trial(spec, UNREACHABLE, total_steps=300))
    # Its first run; characters by their frequency alone have 3.3 nats.
    assert record.history == ((64, pytest.approx(2.21825, abs=2e-3)),)


@pytest.mark.parametrize("padding, cutout", [(1, 0), (4, 0), (2, 3)])
def test_each_image_is_a_crop_of_it(padding, cutout):
    images = np.random.RandomState(0).randn(2000, 3, 6, 5)
    torch.manual_seed(0)
    augmented = random_crop_flip(torch.tensor(images), padding, cutout).numpy()
    widths = [(0, 0), (0, 0), (padding, padding), (padding, padding)]
    padded = np.pad(images, widths, mode="reflect")
    places = itertools.product(range(2 * padding + 1), range(2 * padding + 1), (1, -1))
    crops = [
        padded[:, :, top : top + 6, left : left + 5][..., ::side] for top, left, side in places
    ]
    is_cut = augmented == 0.0
    fits = [((crop == augmented) | is_cut).all(axis=(1, 2, 3)) for crop in crops]
    assert np.any(fits, axis=0).all()
    assert np.any(fits, axis=1).all()
    assert (is_cut.sum(axis=(1, 2, 3)) == 3 * cutout**2).all()
    assert (is_cut.any(axis=(1, 3)).sum(axis=1) == cutout).all()


def test_parts_are_normalised_and_augmented_where_trained_on():
    pixels = torch.randint(256, (40, 3, 6, 6), dtype=torch.uint8)
    # A label is the image's place.
    images = LabelledImages(pixels, torch.arange(40), (pixels[:7], torch.arange(100, 107)))
    data = ImageData(images, 5, 8, 8, test=2, augment=lambda part: part + 100.0)
    data.trainer = Trainer(accelerator="cpu", **QUIET)
    data.setup("fit")
    batch, measured = data.split.train.tensors, data.split.validation.tensors[1]
    assert len({*batch[1].tolist(), *measured.tolist()}) == 30 + 8
    data.trainer.validating = True
    got, _ = data.on_after_batch_transfer(batch, 0)
    assert got.mean(dim=(0, 2, 3)).numpy() == pytest.approx(0.0, abs=1e-5)
    assert got.std(dim=(0, 2, 3), correction=0).numpy() == pytest.approx(1.0, abs=1e-5)
    data.trainer.training = True
    assert torch.equal(data.on_after_batch_transfer(batch, 0)[0], got + 100.0)
    whole, part = (split_images(images, "test", 0, 0, count) for count in (None, 10))
    assert torch.equal(part.train.tensors[1], whole.train.tensors[1][:10])
    assert torch.equal(part.scale, whole.scale)
    assert part.validation.tensors[1].tolist() == list(range(100, 107))


SETTINGS = {"lr": 0.02, "weight_decay": 0.1}
SHAPES = [(6, 2, 3, 3), (6,), (5, 4)]


# Matrices and filters move as by torch's Muon, the other weights as by AdamW.
@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch is older than 2.9")
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_weights_move_as_by_torchs_optimizers(memory_format):
    weights = [torch.randn(shape) for shape in SHAPES]
    weights[0] = weights[0].contiguous(memory_format=memory_format)
    flat = [weight.flatten(int(weight.ndim > 1)).clone() for weight in weights]
    optimizers = [
        Muon(weights, momentum=0.9, **SETTINGS),
        torch.optim.Muon(flat[::2], momentum=0.9, adjust_lr_fn="match_rms_adamw", **SETTINGS),
        torch.optim.AdamW(flat[1:2], **SETTINGS),
    ]
    for _ in range(5):
        for weight, one in zip(weights, flat, strict=True):
            weight.grad = torch.randn(weight.shape)
            one.grad = weight.grad.view(one.shape)
        for optimizer in optimizers:
            optimizer.step()
    for weight, one in zip(weights, flat, strict=True):
        assert weight.flatten().numpy() == pytest.approx(one.flatten().numpy(), rel=1e-5)


BATCHES = DataLoader(range(400))


class Counter(LightningModule):
    """Its one weight is the number of steps."""

    def __init__(self, average):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(()))
        self.average = average
        self.trained, self.evaluated = [], []

    def training_step(self, batch, batch_idx):
        self.trained.append(self.weight.item())
        return -self.weight

    def validation_step(self, batch, batch_idx):
        self.evaluated.append(self.weight.item())

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1.0)

    def configure_callbacks(self):
        return [self.average]


def averages(fraction, steps):
    """The average of 1, 2, ... after each step, by each snapshot's cumulative weight."""
    snapshots, expected = [], []
    for step in range(1, steps + 1):
        if not snapshots or step >= snapshots[-1] * (1 + fraction / UPDATES_IN_WINDOW):
            snapshots.append(step)
        shares = [(snapshot / snapshots[-1]) ** (1 / fraction) for snapshot in snapshots]
        weights = [share - before for share, before in zip(shares, [0.0, *shares], strict=False)]
        products = [weight * value for weight, value in zip(weights, snapshots, strict=True)]
        expected.append(sum(products))
    return expected


def test_evaluates_the_polynomial_average_and_trains_the_weights():
    fraction, steps = 0.5, 400
    module = Counter(RunningWeightAverage(fraction))
    trainer = Trainer(
        accelerator="cpu",
        max_steps=steps,
        max_epochs=-1,
        val_check_interval=1,
        check_val_every_n_epoch=None,
        num_sanity_val_steps=0,
        **QUIET,
    )
    trainer.fit(module, BATCHES, DataLoader(range(1)))
    assert module.trained == list(range(steps))
    assert module.evaluated == pytest.approx(averages(fraction, steps), rel=1e-5)
    # The mean age of what counts is the stated share of the steps; the last update is recent.
    assert module.evaluated[-1] == pytest.approx(steps / (1 + fraction), rel=0.03)
    assert module.weight.item() == module.evaluated[-1]


NOWHERE = "http://127.0.0.1:9/"
# Without the time: all test processes collect the same names.
zipped = partial(gzip.compress, mtime=0)
CONTENT = b"published\n" * 100
PUBLISHED = Source("set", {"part.gz": hashlib.sha256(CONTENT).hexdigest()}, (NOWHERE,))


def put(root, data):
    path = root / "set" / "part.gz"
    path.parent.mkdir(parents=True)
    path.write_bytes(data)
    return path


@pytest.fixture
def mirror(tmp_path, monkeypatch):
    """A server of a folder, and its URL."""
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    folder = tmp_path / "mirror"
    folder.mkdir()

    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, *arguments):
            pass

    server = HTTPServer(("127.0.0.1", 0), partial(Quiet, directory=folder))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield folder, f"http://127.0.0.1:{server.server_port}/"
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.parametrize("data", [CONTENT, zipped(CONTENT, 1)])
def test_reads_what_is_there_in_any_wrapping(tmp_path, data):
    put(tmp_path, data)
    assert read_file(PUBLISHED, "part.gz", str(tmp_path)) == CONTENT


@pytest.mark.parametrize("data", [zipped(CONTENT[1:]), zipped(CONTENT)[:-9], b"\x1f\x8bx"])
def test_other_bytes_are_refused(tmp_path, data):
    path = put(tmp_path, data)
    with refused(str(path)):
        read_file(PUBLISHED, "part.gz", str(tmp_path))


def test_downloads_from_the_first_mirror_that_has_it(tmp_path, mirror):
    folder, url = mirror
    (folder / "wrong").mkdir()
    (folder / "wrong" / "part.gz").write_bytes(b"please log in")
    (folder / "part.gz").write_bytes(zipped(CONTENT))
    mirrors = (NOWHERE, f"{url}missing/", f"{url}wrong/", url)
    source = Source("set", PUBLISHED.sha256, mirrors)
    assert read_file(source, "part.gz", str(tmp_path)) == CONTENT
    assert [path.name for path in (tmp_path / "set").iterdir()] == ["part.gz"]
    assert read_file(PUBLISHED, "part.gz", str(tmp_path)) == CONTENT


def test_an_archive_is_downloaded_once_for_all_its_files(tmp_path, mirror):
    folder, url = mirror
    (folder / "one").write_bytes(CONTENT)
    sums = dict.fromkeys(["one", "two"], PUBLISHED.sha256["part.gz"])
    source = Source("set", sums, (f"{url}missing/", url), archive="set.tar.gz")
    with tarfile.open(folder / "set.tar.gz", "w:gz") as archive:
        for name in sums:
            archive.add(folder / "one", f"set/{name}")
    assert read_file(source, "one", str(tmp_path / "data")) == CONTENT
    (folder / "set.tar.gz").unlink()
    assert read_file(source, "two", str(tmp_path / "data")) == CONTENT
    with refused(f"mkdir -p {tmp_path}/set && curl -L {url}missing/set.tar.gz | tar xz"):
        read_file(source, "one", str(tmp_path))


@needs_data
def test_cifar10_is_as_published():
    cifar = load_cifar10(os.environ["BSTUNE_DATA"])
    assert cifar.labels.bincount().tolist() == [5_000] * 10
    # A frog, of which red is first.
    assert cifar.labels[0] == 6
    assert cifar.images[0, :, 0, 0].tolist() == [59, 62, 63]
    assert cifar.test[0].shape == (10_000, 3, 32, 32)


def test_what_cannot_be_downloaded_is_one_line_that_says_how(tmp_path):
    with refused(f"-Lo {tmp_path}/set/part.gz {NOWHERE}part.gz"):
        read_file(PUBLISHED, "part.gz", str(tmp_path))
    assert not (tmp_path / "set").exists()
