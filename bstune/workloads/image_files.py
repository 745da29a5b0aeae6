"""Images that are read from files as they are needed, for data sets that fit no device: ImageNet and Open Images.

Decoding is Pillow's. A file that does not decode ends the trial with its name: nothing is skipped.
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

SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp")  # in any case; ImageNet's end in .JPEG
MEAN, STD = (
    (0.485, 0.456, 0.406),
    (0.229, 0.224, 0.225),
)  # of ImageNet's pixels, black being 0 and white 1
AREA, RATIO = (
    (0.08, 1.0),
    (3 / 4, 4 / 3),
)  # of the crops that Szegedy et al. 2014 (arXiv 1409.4842) train on
TRIES = 10  # for a crop that lies within the image, before a central one is taken
SHORT_SIDE = 256 / 224  # of the resized image over the crop that is evaluated


@dataclass(frozen=True)
class ImageFiles:
    """Files of images, with what is to be learnt of each."""

    paths: tuple[Path, ...]
    labels: NDArray[
        np.int64
    ]  # (n,): a class; or (pairs, 2): the place of a file and one of its classes
    classes: tuple[str, ...]

    def target(self, place: int) -> Tensor:
        """Return a file's class, int64 (); or float (classes,), 1 where it has the class."""
        if self.labels.ndim == 1:
            return torch.tensor(self.labels[place])
        target = torch.zeros(len(self.classes))
        first, last = np.searchsorted(self.labels[:, 0], (place, place + 1))
        target[self.labels[first:last, 1]] = 1.0
        return target


def load_folders(root: str | Path) -> tuple[ImageFiles, ImageFiles]:
    """Return training and validation images of ``root/train/CLASS/`` and ``root/val/CLASS/``, as ImageNet's are kept.

    Classes are numbered in the order of their names; other files than images are left alone.

    Raises:
        DataError: for a folder that is missing or of another layout, a class without images, or one that is not in
            ``train``.
    """
    train, validation = (_folder(root, part) for part in ("train", "val"))
    if foreign := sorted(set(validation.classes) - set(train.classes)):
        raise DataError(
            f"{_at(root) / 'val' / foreign[0]} is of a class that {_at(root) / 'train'} has not"
        )
    number = {name: place for place, name in enumerate(train.classes)}
    own = np.array([number[name] for name in validation.classes])
    return train, ImageFiles(validation.paths, own[validation.labels], train.classes)


def load_open_images(root: str | Path) -> tuple[ImageFiles, ImageFiles]:
    """Return training and validation images of Open Images (Kuznetsova et al. 2020), each with all of its classes.

    They are kept as its publisher's tools leave them: ``root/train/*.jpg`` and ``root/validation/*.jpg``, the labels
    that people verified in ``root/PART-annotations-human-imagelabels.csv`` (ImageID, Source, LabelName, Confidence),
    and the classes, one a line, in ``root/classes-trainable.txt``. Classes that are not in that file do not count;
    an image without a label is one of none.

    Raises:
        DataError: for a file or a folder that is missing, a table without these columns, a line of it that is cut
            short, or a label of an image that is not there.
    """
    classes = tuple(_lines(_at(root) / "classes-trainable.txt"))
    if not classes:
        raise DataError(f"{_at(root) / 'classes-trainable.txt'} has no classes")
    train, validation = (_labelled(_at(root), part, classes) for part in ("train", "validation"))
    return train, validation


def _at(root: str | Path) -> Path:
    if not str(root or ""):
        raise ConfigError("workload.data.load.root is empty: set it to the folder of the data set")
    return Path(root).expanduser()


def _folder(root: str | Path, part: str) -> ImageFiles:
    folder = _at(root) / part
    classes = [
        one
        for one in _entries(folder, f"{_at(root)} must hold train/CLASS/*.jpg and val/CLASS/*.jpg")
        if one.is_dir()
    ]
    if not classes:
        raise DataError(f"{folder} has no folders: it must hold one a class, with its images in it")
    paths, labels = list[Path](), list[int]()
    for number, folder_of_class in enumerate(classes):
        images = _images(folder_of_class)
        if not images:
            raise DataError(f"{folder_of_class} has no images ({', '.join(SUFFIXES)})")
        paths += images
        labels += [number] * len(images)
    return ImageFiles(tuple(paths), np.array(labels, np.int64), tuple(one.name for one in classes))


def _labelled(root: Path, part: str, classes: Sequence[str]) -> ImageFiles:
    paths = _images(root / part)
    if not paths:
        raise DataError(f"{root / part} has no images ({', '.join(SUFFIXES)})")
    place = {path.stem: number for number, path in enumerate(paths)}
    number, pairs = {name: number for number, name in enumerate(classes)}, set[tuple[int, int]]()
    table = root / f"{part}-annotations-human-imagelabels.csv"
    rows = csv.DictReader(_lines(table))
    if missing := {"ImageID", "LabelName", "Confidence"} - set(rows.fieldnames or ()):
        raise DataError(
            f"{table} has no column {min(missing)}: its first line must name ImageID, LabelName, Confidence"
        )
    for row in rows:
        if not row["Confidence"]:
            raise DataError(f"{table}, line {rows.line_num} is cut short")
        if (
            row["Confidence"] == "0" or row["LabelName"] not in number
        ):  # people said that it is not there
            continue
        if row["ImageID"] not in place:
            raise DataError(
                f"{table}, line {rows.line_num}: there is no image {root / part / row['ImageID']}.jpg"
            )
        pairs.add((place[row["ImageID"]], number[row["LabelName"]]))
    return ImageFiles(
        tuple(paths), np.array(sorted(pairs), np.int64).reshape(-1, 2), tuple(classes)
    )


def _images(folder: Path) -> list[Path]:
    return [path for path in _entries(folder) if path.suffix.lower() in SUFFIXES]


def _entries(folder: Path, layout: str = "") -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError as error:
        raise DataError(
            f"{folder} cannot be read ({error.strerror}){f': {layout}' if layout else ''}"
        ) from error


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror})") from error
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not text in UTF-8, from byte {error.start} on") from error


class ImageFileData(LightningDataModule):
    """Images from files, cropped and mirrored at random for training, resized and cropped in the middle otherwise.

    Training crops are of 8% to 100% of the image's area and of a ratio of sides from 3/4 to 4/3 (Szegedy et al. 2014);
    evaluated is the middle of the image whose shorter side is 256/224 of the crop's. Pixels are normalised by
    ImageNet's mean and deviation.

    Args:
        load: returns the files to train on and those for the target, as :func:`load_folders` does.
        image_size: height and width of a crop in pixels.
        workers: processes that decode; 0: this one.
        eval_batch_size: examples in an evaluation batch.
        classes: of the model, at least as many as the data have.
        train_examples: how many of the images to train on, the same ones always, at random; None: all.
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
        super().__init__()
        self._load, self._image_size, self._workers = load, image_size, workers
        self._eval_batch_size, self._classes, self._train_examples = (
            eval_batch_size,
            classes,
            train_examples,
        )
        self._files: tuple[ImageFiles, ImageFiles] | None = None

    def prepare_data(self) -> None:
        """List the files, once, and refuse options that cannot be."""
        if self._files is not None:
            return
        check_positive_integer("workload.data.image_size", self._image_size)
        check_positive_integer("workload.data.eval_batch_size", self._eval_batch_size)
        train, validation = self._load()
        if len(train.classes) > self._classes:
            raise DataError(
                f"the images have {len(train.classes)} classes, but workload.data.classes={self._classes}: a label is "
                f"outside its range; set it to {len(train.classes)}"
            )
        self._files = train, validation

    def train_dataloader(self) -> DataLoader[Any]:
        """Return the images to train on, shuffled."""
        self.prepare_data()
        assert self._files is not None  # noqa: S101  # prepared
        own = _Decoded(self._files[0], self._image_size, self._classes, at_random=True)
        if self._train_examples is None:
            return self._loader(own, 1, shuffle=True)
        if not 1 <= self._train_examples <= len(own):
            raise ConfigError(
                f"workload.data.train_examples must be from 1 to {len(own)}, but got {self._train_examples}"
            )
        order = np.random.RandomState(0).permutation(len(own))[: self._train_examples]
        return self._loader(torch.utils.data.Subset(own, order.tolist()), 1, shuffle=True)

    def val_dataloader(self) -> DataLoader[Any]:
        """Return the images for the target, in their order."""
        self.prepare_data()
        assert self._files is not None  # noqa: S101  # prepared
        return self._loader(
            _Decoded(self._files[1], self._image_size, self._classes, at_random=False),
            self._eval_batch_size,
        )

    def _loader(
        self, images: Dataset[Any], batch_size: int, shuffle: bool = False
    ) -> DataLoader[Any]:
        return DataLoader(
            images,
            batch_size,
            shuffle,
            num_workers=self._workers,
            pin_memory=torch.cuda.is_available(),
        )


class _Decoded(Dataset[tuple[Tensor, Tensor]]):
    """Files as normalised crops (3, size, size) and targets."""

    def __init__(self, files: ImageFiles, size: int, classes: int, at_random: bool) -> None:
        self._files, self._size, self._classes, self._at_random = files, size, classes, at_random

    def __len__(self) -> int:
        return len(self._files.paths)

    def __getitem__(self, place: int) -> tuple[Tensor, Tensor]:
        image = decoded(self._files.paths[place])
        cropped = (
            random_crop(image, self._size) if self._at_random else middle_crop(image, self._size)
        )
        pixels = torch.from_numpy(np.asarray(cropped, np.float32) / 255.0).permute(2, 0, 1)
        target = self._files.target(place)
        if target.dim():  # the model may have classes that the data do not
            target = torch.nn.functional.pad(target, (0, self._classes - len(target)))
        return (pixels - torch.tensor(MEAN).view(3, 1, 1)) / torch.tensor(STD).view(3, 1, 1), target


def decoded(path: Path) -> Image.Image:
    """Return an image file's pixels, as RGB; a DataError names one that does not decode."""
    try:
        with Image.open(path) as image:
            return image.convert("RGB")
    except (
        OSError,
        SyntaxError,
        ValueError,
        Image.DecompressionBombError,
    ) as error:  # Pillow's, by format
        reason = (
            str(error).partition("<")[0].replace(repr(str(path)), "").strip()
            or type(error).__name__
        )
        raise DataError(
            f"{path} does not decode as an image ({reason}): restore it, or remove it"
        ) from error


def random_crop(image: Image.Image, size: int) -> Image.Image:
    """Return a random part of an image, resized to a square and mirrored half of the time.

    Numbers are drawn from torch's generator, which a trial seeds.
    """
    width, height = image.size
    box: tuple[float, float, float, float] = _middle(width, height, min(width, height))
    for _ in range(TRIES):
        low, high = AREA
        area = width * height * (low + (high - low) * float(torch.rand(())))
        ratio = math.exp(math.log(RATIO[0]) + math.log(RATIO[1] / RATIO[0]) * float(torch.rand(())))
        w, h = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < w <= width and 0 < h <= height:
            left, top = (
                int(torch.randint(width - w + 1, ())),
                int(torch.randint(height - h + 1, ())),
            )
            box = (left, top, left + w, top + h)
            break
    resized = image.resize((size, size), Image.Resampling.BILINEAR, box)
    return resized.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if torch.rand(()) < 0.5 else resized


def middle_crop(image: Image.Image, size: int) -> Image.Image:
    """Return the middle of an image, after its shorter side is resized to 256/224 of ``size``."""
    width, height = image.size
    return image.resize(
        (size, size),
        Image.Resampling.BILINEAR,
        _middle(width, height, min(width, height) / SHORT_SIDE),
    )


def _middle(width: int, height: int, side: float) -> tuple[float, float, float, float]:
    left, top = (width - side) / 2, (height - side) / 2
    return (left, top, left + side, top + side)


class LabelTagger(Classifier):
    """Trains ``model`` on images with any number of classes each, and logs ``val/average_precision`` and ``val/loss``.

    Average precision is taken over all pairs of an image and a class (micro-averaged), with ``thresholds`` bins of the
    predicted probability. Arguments are those of :class:`~bstune.workloads.classifier.Classifier`, whose ``loss`` is of
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
