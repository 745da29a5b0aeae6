"""Image files: two steps of each workload on small files of its format, crops, files that are damaged or missing."""

import sys
from dataclasses import replace
from functools import partial
from types import ModuleType

import numpy as np
import pytest
import torch
from builders import resolved
from PIL import Image
from torch import nn

from bstune.core.errors import BstuneError, ConfigError, DataError
from bstune.core.records import Budget
from bstune.trial.loop import run_trial
from bstune.trial.workload import load_data, load_workload
from bstune.workloads.image_files import (
    ImageFileData,
    ImageFiles,
    LabelTagger,
    decoded,
    load_folders,
    load_open_images,
    middle_crop,
    random_crop,
)
from tests.toolbox import make_spec

# The names of the two parts, as their sources have them.
PARTS = {"imagenet": ("train", "val"), "open-images": ("train", "validation")}


def picture(path, level=0, size=(40, 30)):
    """Write an image of noise around a level; PNG where its name ends so, else JPEG."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # Levels of 60 apart, so that classes differ by their brightness.
    pixels = np.random.RandomState(level).randint(0, 60, (*size[::-1], 3)).astype(
        np.uint8
    ) + np.uint8(60 * level)
    Image.fromarray(pixels).save(path)


@pytest.fixture
def folders(tmp_path):
    """A root with ImageNet's layout: two classes, four images of each to train on, two for the target."""
    for part, count in (("train", 4), ("val", 2)):
        for level, name in enumerate(("n01440764", "n02084071")):
            for number in range(count):
                picture(tmp_path / "imagenet" / part / name / f"{name}_{number}.JPEG", level)
    # Other files are passed over.
    (tmp_path / "imagenet" / "train" / "n01440764" / "notes.txt").write_text("no image")
    return tmp_path


@pytest.fixture
def tables(tmp_path):
    """A root with the layout of Open Images: eight images to train on, four for the target, three classes."""
    root = tmp_path / "open-images"
    for part, count in (("train", 8), ("validation", 4)):
        lines = ["ImageID,Source,LabelName,Confidence"]
        for number in range(count):
            picture(root / part / f"{part}{number}.jpg", number % 2)
            for label in range(3):
                confidence = int(label != number % 3)
                lines.append(f"{part}{number},verification,/m/{label},{confidence}")
        # A class that is not trainable is passed over.
        lines.append(f"{part}0,verification,/m/unknown,1")
        (root / f"{part}-annotations-human-imagelabels.csv").write_text("\n".join(lines) + "\n")
    (root / "classes-trainable.txt").write_text("/m/0\n/m/1\n/m/2\n")
    return tmp_path


# torchvision is not needed by these tests.
@pytest.fixture
def small_networks(monkeypatch):
    """Put small networks in place of torchvision's."""

    def build(weights, num_classes):
        layers = (
            nn.Conv2d(3, 2, 3, stride=2),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(2, num_classes),
        )
        return nn.Sequential(*layers)

    package = ModuleType("torchvision")
    package.models = ModuleType("torchvision.models")
    package.models.vgg11 = package.models.resnet50 = build
    monkeypatch.setitem(sys.modules, "torchvision", package)


def composed(name, root, *options):
    fixed = (
        f"data.root={root}",
        "device=cpu",
        "workload.data.workers=0",
        "workload.data.image_size=16",
    )
    return resolved(f"workload={name}", *fixed, "workload.data.eval_batch_size=3", *options)


@pytest.mark.parametrize(
    ("name", "root"),
    [
        ("imagenet_resnet50", "folders"),
        ("imagenet_vgg11", "folders"),
        ("openimages_resnet50", "tables"),
    ],
)
def test_each_workload_trains_two_steps_on_files_of_its_format(name, root, request, small_networks):
    options, recipe = composed(
        name, request.getfixturevalue(root), "search.batch_size.low=2", "search.batch_size.high=8"
    )
    workload, protocol = load_workload(options, recipe)
    assert (workload.train_examples, workload.validation_examples) == (8, 4)
    # The budget counts two steps.
    result = run_trial(workload, make_spec(6, 0.01), replace(protocol, budget=Budget(2, 1)))
    assert (result.status, result.steps, result.message) == ("stopped", 2, None)
    assert 0.0 <= result.history[-1][1] <= 1.0


def test_images_and_their_classes(folders, tables):
    train, validation = load_folders(folders / "imagenet")
    assert train.classes == validation.classes == ("n01440764", "n02084071")
    assert train.labels.tolist() == [0] * 4 + [1] * 4
    assert [path.parent.name for path in validation.paths] == ["n01440764"] * 2 + ["n02084071"] * 2
    assert train.target(5).tolist() == 1
    train, _ = load_open_images(tables / "open-images")
    assert train.target(0).tolist() == [0, 1, 1]
    assert train.target(1).tolist() == [1, 0, 1]
    assert train.target(2).tolist() == [1, 1, 0]
    # An image without a label has none of the classes.
    assert replace(train, labels=np.empty((0, 2), np.int64)).target(1).tolist() == [0, 0, 0]


def test_validation_may_have_fewer_classes_than_training(folders):
    for path in (folders / "imagenet" / "val" / "n01440764").iterdir():
        path.unlink()
    (folders / "imagenet" / "val" / "n01440764").rmdir()
    assert load_folders(folders / "imagenet")[1].labels.tolist() == [1, 1]


def test_a_subset_to_train_on_leaves_the_evaluation_as_it_is(folders):
    options = {"image_size": 8, "workers": 0, "eval_batch_size": 2, "classes": 5}
    load = partial(load_folders, folders / "imagenet")
    subset = ImageFileData(load=load, train_examples=3, **options)
    again = ImageFileData(load=load, train_examples=3, **options)
    assert len(subset.train_dataloader().dataset) == 3
    assert subset.train_dataloader().dataset.indices == again.train_dataloader().dataset.indices
    assert len(subset.val_dataloader().dataset) == 4


# Larger than the crop, smaller, narrow, and a single pixel.
@pytest.mark.parametrize("size", [(40, 30), (16, 16), (3, 200), (1, 1)])
def test_crops_are_squares_of_the_size_asked_for(size):
    image = Image.new("RGB", size, (10, 20, 30))
    torch.manual_seed(0)
    for crop in [random_crop(image, 24) for _ in range(20)] + [middle_crop(image, 24)]:
        assert crop.size == (24, 24)
        assert crop.getpixel((12, 12)) == (10, 20, 30)


def test_the_middle_is_evaluated_and_training_crops_are_mirrored_half_of_the_time():
    pixels = np.zeros((64, 128, 3), np.uint8)
    # The image is black on the left and white on the right.
    pixels[:, 64:] = 255
    image = Image.fromarray(pixels)
    middle = np.asarray(middle_crop(image, 32))[:, :, 0]
    # Two pixels around the edge between black and white are grey.
    assert (middle[:, :15].max(), middle[:, 17:].min()) == (0, 255)
    torch.manual_seed(0)
    turned = []
    for _ in range(300):
        row = np.asarray(random_crop(image, 32))[16, :, 0].astype(int)
        # Only crops over the edge tell their direction.
        if row[0] != row[-1]:
            turned.append(row[0] > row[-1])
    # Of 300 crops half, with a deviation of 3% at most.
    assert 0.4 < np.mean(turned) < 0.6


def test_a_batch_is_normalised_and_the_same_again_with_the_same_seed(folders):
    workload, _ = load_workload(
        *composed("imagenet_resnet50", folders, "workload.module.model.name=resnet50")
    )
    batches = []
    for _ in range(2):
        torch.manual_seed(3)
        batches.append(next(iter(workload.train_batches(make_spec(4, 0.1, seed=5)))))
    (images, labels), (others, _) = batches
    assert (images.shape, images.dtype, labels.shape) == ((4, 3, 16, 16), torch.float32, (4,))
    assert torch.equal(images, others)
    black = Image.new("RGB", (20, 20))
    black.save(folders / "imagenet" / "val" / "n01440764" / "n01440764_0.JPEG")
    evaluated, _ = next(iter(workload.validation_batches))
    assert evaluated[0, :, 3, 3].tolist() == pytest.approx(
        # Black, normalised by ImageNet's mean and standard deviation of each channel.
        [-0.485 / 0.229, -0.456 / 0.224, -0.406 / 0.225],
        abs=0.02,
    )


def test_average_precision_is_over_all_pairs():
    logits = torch.tensor([[2.0, -1.0, 0.5], [-2.0, 1.0, -0.5]])
    targets = torch.tensor([[1.0, 0.0, 0.0], [0.0, 1.0, 1.0]])
    module = LabelTagger(
        nn.Identity(), nn.BCEWithLogitsLoss(), torch.optim.SGD, 0.1, classes=3, thresholds=1000
    )
    logged = {}
    module.log = lambda name, value, **options: logged.update({name: float(value)})
    module.validation_step((logits, targets), 0)
    module.on_validation_epoch_end()
    # ranked 2 (yes), 1 (yes), 0.5 (no), -0.5 (yes): (1/1 + 2/2 + 3/4)/3
    assert logged["val/average_precision"] == pytest.approx(11 / 12, abs=1e-3)
    assert logged["val/loss"] == pytest.approx(
        float(nn.functional.binary_cross_entropy_with_logits(logits, targets))
    )


def damaged(root, path, how):
    """Damage a file below a root: ``cut`` to its half, ``text`` in its place, gone, or with other lines."""
    file = root / path
    if how == "gone":
        file.rename(root / "elsewhere")
    elif how == "cut":
        file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    else:
        file.write_text(how)


@pytest.mark.parametrize(
    ("path", "how", "words"),
    [
        (
            "train/n01440764/n01440764_1.JPEG",
            "cut",
            ["n01440764_1.JPEG does not decode as an image (", "restore it"],
        ),
        (
            "train/n01440764/n01440764_1.JPEG",
            "text",
            [
                (
                    "n01440764_1.JPEG does not decode as an image (cannot identify image file): "
                    "restore it"
                )
            ],
        ),
        ("val/n02084071/n02084071_0.JPEG", "", ["n02084071_0.JPEG does not decode as an image"]),
        (
            "train",
            "gone",
            [
                "imagenet/train cannot be read (No such file or directory)",
                "must hold train/CLASS/*.jpg",
            ],
        ),
        (
            "train/n02084071",
            "gone",
            ["imagenet/val/n02084071 is of a class that ", "imagenet/train has not"],
        ),
    ],
)
def test_a_file_that_is_not_as_it_should_be_is_named(folders, path, how, words):
    damaged(folders / "imagenet", path, how)

    def read_all():
        data = load_data(*composed("imagenet_vgg11", folders))
        return [*data.train_dataloader(), *data.val_dataloader()]

    with pytest.raises(DataError) as caught:
        read_all()
    for word in words:
        assert word in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda train: None, "train has no folders: it must hold one a class"),
        (lambda train: (train / "empty").mkdir(), "train/empty has no images (.jpg"),
    ],
)
def test_folders_of_another_layout(tmp_path, make, message):
    picture(tmp_path / "train" / "loose.jpg")
    make(tmp_path / "train")
    with pytest.raises(DataError) as caught:
        load_folders(tmp_path)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("path", "how", "message"),
    [
        (
            "train-annotations-human-imagelabels.csv",
            "gone",
            "imagelabels.csv cannot be read (No such file",
        ),
        (
            "train-annotations-human-imagelabels.csv",
            "a,b\n1,2\n",
            "has no column Confidence: its first line must name",
        ),
        (
            "validation-annotations-human-imagelabels.csv",
            # It ends in the midst of its third line.
            "ImageID,Source,LabelName,Confidence\nvalidation0,x,/m/0,1\nvalidation1,x,/m",
            "validation-annotations-human-imagelabels.csv, line 3 is cut short",
        ),
        (
            "validation-annotations-human-imagelabels.csv",
            "ImageID,Source,LabelName,Confidence\nnowhere,x,/m/0,1\n",
            "line 2: there is no image ",
        ),
        ("classes-trainable.txt", "", "classes-trainable.txt has no classes"),
        ("validation", "gone", "open-images/validation cannot be read"),
        ("train", "gone", "open-images/train cannot be read"),
    ],
)
def test_a_table_that_is_not_as_it_should_be_is_named(tables, path, how, message):
    damaged(tables / "open-images", path, how)
    with pytest.raises(DataError) as caught:
        load_data(*composed("openimages_resnet50", tables))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("option", "message"),
    [
        (
            "workload.data.classes=1",
            "the images have 2 classes, but workload.data.classes=1: a label is outside its range",
        ),
        (
            "workload.data.train_examples=9",
            "workload.data.train_examples must be from 1 to 8, but got 9",
        ),
        ("workload.data.image_size=0", "workload.data.image_size"),
        ("workload.data.load.root=''", "workload.data.load.root is empty"),
    ],
)
def test_options_that_cannot_be(folders, option, message):
    with pytest.raises(BstuneError) as caught:
        load_data(*composed("imagenet_vgg11", folders, option)).train_dataloader()
    assert message in str(caught.value)


def test_a_network_that_torchvision_has_not(small_networks, folders):
    workload, _ = load_workload(
        *composed("imagenet_vgg11", folders, "workload.module.model.name=vgg12")
    )
    with pytest.raises(ConfigError, match="torchvision has no network 'vgg12'"):
        workload.build_module(make_spec(4, 0.1))


@pytest.mark.slow
# The workers are processes of the DataLoader.
@pytest.mark.parametrize("workers", [0, 1])
def test_a_trial_on_a_damaged_image_ends_in_a_line_that_names_it(
    bstune, folders, small_networks, workers
):
    damaged(folders, "imagenet/train/n02084071/n02084071_2.JPEG", "cut")
    sizes = (
        "trial.batch_size=8",
        "trial.lr=0.01",
        "budget.steps=2",
        "budget.examples=16",
        "mlflow.enabled=false",
    )
    options = (f"workers={workers}", "image_size=16", "eval_batch_size=2")
    arguments = ("workload=imagenet_vgg11", f"data.root={folders}", "device=cpu", *sizes)
    status, _, err = bstune(*arguments, *(f"workload.data.{option}" for option in options))
    assert (status, len(err.splitlines())) == (2, 1)
    assert err.startswith(
        f"error: {folders}/imagenet/train/n02084071/n02084071_2.JPEG does not decode as an image"
    )


def test_decoded_turns_every_kind_of_image_into_rgb(tmp_path):
    for mode in ("L", "P", "RGBA", "CMYK"):
        # Grey, a palette, transparency, and printing colours.
        Image.new(mode, (4, 3)).save(tmp_path / f"{mode}.{'tiff' if mode == 'CMYK' else 'png'}")
    for path in tmp_path.iterdir():
        assert (decoded(path).mode, decoded(path).size) == ("RGB", (4, 3))
    assert ImageFiles((), np.array([3]), ()).target(0).tolist() == 3
