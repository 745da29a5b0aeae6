"""Images that are read from files as they are needed, for data sets that fit no device.

They are ImageNet and Open Images. Decoding is Pillow's. A file that does not decode ends the trial
with its name: nothing is skipped.
"""

import csv
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from torchmetrics.classification import MultilabelAveragePrecision

from bstune.core.errors import ConfigError, DataError, check_positive_integer
from bstune.trial.lightning.installed import LightningDataModule
from bstune.workloads.classifier import Classifier

# Endings of images, in lower case; ImageNet's are .JPEG.
SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp")
# Mean and deviation of ImageNet's pixels per channel, black being 0 and white 1.
MEAN = (0.485, 0.456, 0.406)
STD = (0.229, 0.224, 0.225)
# Share of the area, and ratio of the sides, of the crops that Szegedy et al. 2014 (arXiv 1409.4842)
# train on.
CROP_AREA = (0.08, 1.0)
CROP_RATIO = (3 / 4, 4 / 3)
# So many crops are drawn until one lies within the image; then a central one is taken.
CROP_TRIES = 10
# The shorter side of the resized image over the side of the crop that is evaluated.
SHORT_SIDE = 256 / 224


@dataclass(frozen=True)
class ImageFiles:
    """Files of images with their classes."""

    paths: tuple[Path, ...]
    labels: NDArray[np.int64]
    """Of shape (n,): the class of each file. Or of shape (pairs, 2), sorted: the place of a file,
    and a class that it has."""
    classes: tuple[str, ...]
    """The names of the classes."""

    def target(self, place: int) -> Tensor:
        """Give the class of the file at ``place``, int64 ().

        If files may have several classes, it is float (classes,): 1 for each that the file has.
        """
        if self.labels.ndim == 1:
            return torch.tensor(self.labels[place])
        target = torch.zeros(len(self.classes))
        # The rows of labels are pairs of a file and a class, in the order of the files.
        first, end = np.searchsorted(self.labels[:, 0], (place, place + 1))
        target[self.labels[first:end, 1]] = 1.0
        return target


def load_folders(root: str | Path) -> tuple[ImageFiles, ImageFiles]:
    """List the training and validation images of ``root/train/CLASS/`` and ``root/val/CLASS/``.

    It is the layout of ImageNet. Classes are numbered in the order of their names; files that are
    no images are left alone.

    Raises:
        DataError: for a folder that is missing or of another layout, a class without images, or one
            that is not in ``train``.
    """
    folder = _checked_root(root)
    train = _list_class_folders(folder, "train")
    validation = _list_class_folders(folder, "val")
    foreign = sorted(set(validation.classes) - set(train.classes))
    if foreign:
        raise DataError(
            f"{folder / 'val' / foreign[0]} is of a class that {folder / 'train'} has not"
        )
    # The validation folders may lack classes, so their own numbering can differ from training's.
    number_in_training = {name: number for number, name in enumerate(train.classes)}
    numbers = np.array([number_in_training[name] for name in validation.classes])
    return train, ImageFiles(validation.paths, numbers[validation.labels], train.classes)


def load_open_images(root: str | Path) -> tuple[ImageFiles, ImageFiles]:
    """List the training and validation images of Open Images, each with all of its classes.

    (Kuznetsova et al. 2020.) They are kept as its publisher's tools leave them:
    ``root/train/*.jpg`` and ``root/validation/*.jpg``, the labels that people verified in
    ``root/PART-annotations-human-imagelabels.csv`` (ImageID, Source, LabelName, Confidence), and
    the classes, one per line, in ``root/classes-trainable.txt``. Labels of other classes are
    left out; an image without a label is of no class.

    Raises:
        DataError: for a file or a folder that is missing, a table without these columns, a line of
            it that is cut short, or a label of an image that is not there.
    """
    folder = _checked_root(root)
    list_of_classes = folder / "classes-trainable.txt"
    classes = tuple(_lines(list_of_classes))
    if not classes:
        raise DataError(f"{list_of_classes} has no classes")
    train = _list_labelled_images(folder, "train", classes)
    return train, _list_labelled_images(folder, "validation", classes)


def _checked_root(root: str | Path) -> Path:
    """Give the folder of the data set; ConfigError if ``root`` is empty."""
    if not str(root or ""):
        raise ConfigError("workload.data.load.root is empty: set it to the folder of the data set")
    return Path(root).expanduser()


def _list_class_folders(root: Path, part: str) -> ImageFiles:
    """List the images of a part, ``train`` or ``val``, whose folders are the classes."""
    folder = root / part
    layout = f"{root} must hold train/CLASS/*.jpg and val/CLASS/*.jpg"
    folders = [entry for entry in _entries(folder, layout) if entry.is_dir()]
    if not folders:
        raise DataError(f"{folder} has no folders: it must hold one a class, with its images in it")
    paths = list[Path]()
    labels = list[int]()
    for number, folder_of_class in enumerate(folders):
        images = _image_paths(folder_of_class)
        if not images:
            raise DataError(f"{folder_of_class} has no images ({', '.join(SUFFIXES)})")
        paths += images
        labels += [number] * len(images)
    classes = tuple(folder_of_class.name for folder_of_class in folders)
    return ImageFiles(tuple(paths), np.array(labels, np.int64), classes)


def _list_labelled_images(root: Path, part: str, classes: Sequence[str]) -> ImageFiles:
    """List the images of a part of Open Images with the labels of the part's table.

    An image has a label for each of ``classes`` that people found in it; it may have none.
    """
    paths = _image_paths(root / part)
    if not paths:
        raise DataError(f"{root / part} has no images ({', '.join(SUFFIXES)})")
    image_numbers = {path.stem: number for number, path in enumerate(paths)}
    class_numbers = {name: number for number, name in enumerate(classes)}
    # The numbers of an image and of a class in it.
    pairs = set[tuple[int, int]]()
    table = root / f"{part}-annotations-human-imagelabels.csv"
    rows = csv.DictReader(_lines(table))
    missing = {"ImageID", "LabelName", "Confidence"} - set(rows.fieldnames or ())
    if missing:
        raise DataError(
            f"{table} has no column {min(missing)}: its first line must name ImageID, LabelName, "
            "Confidence"
        )
    for row in rows:
        if not row["Confidence"]:
            raise DataError(f"{table}, line {rows.line_num} is cut short")
        # A confidence of 0 says that people did not find the class in the image.
        if row["Confidence"] == "0" or row["LabelName"] not in class_numbers:
            continue
        if row["ImageID"] not in image_numbers:
            raise DataError(
                f"{table}, line {rows.line_num}: there is no image "
                f"{root / part / row['ImageID']}.jpg"
            )
        pairs.add((image_numbers[row["ImageID"]], class_numbers[row["LabelName"]]))
    # Without a pair the array has no rows, but two columns all the same.
    labels = np.array(sorted(pairs), np.int64).reshape(-1, 2)
    return ImageFiles(tuple(paths), labels, tuple(classes))


def _image_paths(folder: Path) -> list[Path]:
    """List the images in a folder, sorted by name."""
    return [path for path in _entries(folder) if path.suffix.lower() in SUFFIXES]


def _entries(folder: Path, layout: str = "") -> list[Path]:
    """List what is in a folder, sorted by name. The DataError for a missing one says the layout."""
    try:
        return sorted(folder.iterdir())
    except OSError as error:
        advice = f": {layout}" if layout else ""
        raise DataError(f"{folder} cannot be read ({error.strerror}){advice}") from error


def _lines(path: Path) -> list[str]:
    """Read the lines of a text file; DataError for one that cannot be read."""
    try:
        return path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror})") from error
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not text in UTF-8, from byte {error.start} on") from error


class ImageFileData(LightningDataModule):
    """Images from files, cropped at random for training, and in the middle for evaluation.

    Training images are mirrored half of the time, too. Training crops are of 8% to 100% of the
    image's area and of a ratio of sides from 3/4 to 4/3 (Szegedy et al. 2014). For evaluation the
    image's shorter side is resized to 256/224 of the crop's, and the middle is cropped. Pixels are
    normalised by ImageNet's mean and deviation.

    Args:
        load: returns the files to train on and those for the target, as :func:`load_folders` does.
        image_size: height and width of a crop in pixels.
        workers: processes that decode; 0: this one.
        eval_batch_size: examples in an evaluation batch.
        classes: of the model, at least as many as the data have.
        train_examples: how many of the images to train on, the same ones always, at random; None:
            all.
    """

    validates_on_test = False

    def __init__(
        self,
        *,
        load: Callable[[], tuple[ImageFiles, ImageFiles]],
        image_size: int,
        workers: int,
        eval_batch_size: int,
        classes: int,
        train_examples: int | None = None,
    ) -> None:
        """Keep the arguments; the class's docstring has them. :meth:`prepare_data` checks them."""
        super().__init__()
        self._load = load
        self._image_size = image_size
        self._workers = workers
        self._eval_batch_size = eval_batch_size
        self._classes = classes
        self._train_examples = train_examples
        # The files to train on, and those for the target; None before :meth:`prepare_data`.
        self._files: tuple[ImageFiles, ImageFiles] | None = None

    def prepare_data(self) -> None:
        """List the files, once, and refuse options that are out of range."""
        if self._files is not None:
            return
        check_positive_integer("workload.data.image_size", self._image_size)
        check_positive_integer("workload.data.eval_batch_size", self._eval_batch_size)
        train, validation = self._load()
        if len(train.classes) > self._classes:
            raise DataError(
                f"the images have {len(train.classes)} classes, but "
                f"workload.data.classes={self._classes}: a label is outside its range; set it to "
                f"{len(train.classes)}"
            )
        self._files = train, validation

    def train_dataloader(self) -> DataLoader[Any]:
        """Make a loader of the images to train on, shuffled.

        It gives single examples: each trial reads it in batches of its own size.
        """
        self.prepare_data()
        assert self._files is not None  # noqa: S101  # prepared
        images = _Decoded(self._files[0], self._image_size, self._classes, at_random=True)
        if self._train_examples is None:
            return self._loader(images, batch_size=1, shuffle=True)
        if not 1 <= self._train_examples <= len(images):
            raise ConfigError(
                f"workload.data.train_examples must be from 1 to {len(images)}, but got "
                f"{self._train_examples}"
            )
        # The seed is fixed, so that all trials and studies train on the same images.
        order = np.random.RandomState(0).permutation(len(images))[: self._train_examples]
        return self._loader(
            torch.utils.data.Subset(images, order.tolist()), batch_size=1, shuffle=True
        )

    def val_dataloader(self) -> DataLoader[Any]:
        """Make a loader of the images for the target, in their order."""
        self.prepare_data()
        assert self._files is not None  # noqa: S101  # prepared
        images = _Decoded(self._files[1], self._image_size, self._classes, at_random=False)
        return self._loader(images, self._eval_batch_size)

    def _loader(
        self, images: Dataset[Any], batch_size: int, shuffle: bool = False
    ) -> DataLoader[Any]:
        """Make a loader with the processes and pinned memory of all loaders."""
        return DataLoader(
            images,
            batch_size,
            shuffle,
            num_workers=self._workers,
            pin_memory=torch.cuda.is_available(),
        )


class _Decoded(Dataset[tuple[Tensor, Tensor]]):
    """Image files as a data set of normalised crops (3, size, size) and targets."""

    def __init__(self, files: ImageFiles, size: int, classes: int, at_random: bool) -> None:
        """Keep the files, a crop's pixels a side, the model's classes, and how crops are placed.

        They are at random, or else in the middle.
        """
        self._files = files
        self._size = size
        self._classes = classes
        self._at_random = at_random

    def __len__(self) -> int:
        return len(self._files.paths)

    def __getitem__(self, place: int) -> tuple[Tensor, Tensor]:
        image = decoded(self._files.paths[place])
        crop = random_crop if self._at_random else middle_crop
        cropped = crop(image, self._size)
        pixels = torch.from_numpy(np.asarray(cropped, np.float32) / 255.0).permute(2, 0, 1)
        mean = torch.tensor(MEAN).view(3, 1, 1)
        std = torch.tensor(STD).view(3, 1, 1)
        target = self._files.target(place)
        # A vector of labels is padded with zeros, as the model may have more classes than the data.
        if target.dim() > 0:
            target = torch.nn.functional.pad(target, (0, self._classes - len(target)))
        return (pixels - mean) / std, target


def decoded(path: Path) -> Image.Image:
    """Read an image file's pixels, as RGB; a DataError names one that does not decode."""
    try:
        with Image.open(path) as image:
            return image.convert("RGB")
    # Which of these Pillow raises depends on the format.
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        # Its texts repeat the path, or end with an object's address.
        reason = str(error).partition("<")[0].replace(repr(str(path)), "").strip()
        if not reason:
            reason = type(error).__name__
        raise DataError(
            f"{path} does not decode as an image ({reason}): restore it, or remove it"
        ) from error


def random_crop(image: Image.Image, size: int) -> Image.Image:
    """Crop a random part of an image, resize it to a square, and mirror it half of the time.

    The square has ``size`` pixels a side. Numbers are drawn from torch's generator, which a trial
    seeds.
    """
    width, height = image.size
    # The central crop stays where none of the drawn ones lies within the image.
    box: tuple[float, float, float, float] = _middle(width, height, min(width, height))
    low, high = CROP_AREA
    narrow, wide = CROP_RATIO
    for _ in range(CROP_TRIES):
        area = width * height * (low + (high - low) * float(torch.rand(())))
        ratio = math.exp(math.log(narrow) + math.log(wide / narrow) * float(torch.rand(())))
        crop_width = round(math.sqrt(area * ratio))
        crop_height = round(math.sqrt(area / ratio))
        if 0 < crop_width <= width and 0 < crop_height <= height:
            left = int(torch.randint(width - crop_width + 1, ()))
            top = int(torch.randint(height - crop_height + 1, ()))
            box = (left, top, left + crop_width, top + crop_height)
            break
    resized = image.resize((size, size), Image.Resampling.BILINEAR, box)
    if torch.rand(()) < 0.5:
        return resized.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    return resized


def middle_crop(image: Image.Image, size: int) -> Image.Image:
    """Crop the middle of an image, after its shorter side is resized to 256/224 of ``size``."""
    width, height = image.size
    box = _middle(width, height, min(width, height) / SHORT_SIDE)
    return image.resize((size, size), Image.Resampling.BILINEAR, box)


def _middle(width: int, height: int, side: float) -> tuple[float, float, float, float]:
    """Give the edges of the middle square with a side: left, top, right, bottom, in pixels."""
    left = (width - side) / 2
    top = (height - side) / 2
    return (left, top, left + side, top + side)


class LabelTagger(Classifier):
    """Trains ``model`` on images with any number of classes each.

    It logs ``val/average_precision`` and ``val/loss``. Average precision is taken over all pairs of
    an image and a class (micro-averaged), with ``thresholds`` bins of the predicted probability.
    Arguments are those of :class:`~bstune.workloads.classifier.Classifier`, whose ``loss`` is of
    (logits, targets), each (N, classes), such as torch's BCEWithLogitsLoss.
    """

    def __init__(self, *arguments: Any, classes: int, thresholds: int, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.precision_over_recall = MultilabelAveragePrecision(
            classes, average="micro", thresholds=thresholds
        )

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        """Add up losses and counts on the device."""
        images, targets = batch
        logits = self(images).float()
        self.precision_over_recall.update(logits.sigmoid(), targets.long())
        self.log("val/loss", self.loss(logits, targets), on_epoch=True, batch_size=len(targets))

    def on_validation_epoch_end(self) -> None:
        """Log ``val/average_precision``."""
        self.log("val/average_precision", self.precision_over_recall.compute())
        self.precision_over_recall.reset()
