"""Image data that live on the device, with a stream of batches for each trial, and augmentation."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bstune.core.errors import ConfigError, DataError, check_positive_integer
from bstune.trial.batches.image_batches import (
    Augment,
    EvalBatches,
    Normalisation,
    TrainBatches,
    bind_augmentation,
)
from bstune.trial.devices.device import resolve_device
from bstune.trial.lightning.installed import LightningDataModule, move_data_to_device
from bstune.workloads.datasets import ImageDataset, Images

# Bytes of images whose batches are made together on an accelerator: 8,192 images of CIFAR, which
# take four times as much once they are normalised. On a CPU, which launches operators at once, each
# batch is made alone, within the caches.
AT_ONCE_BYTES = 24 * 2**20
HALF_PRECISIONS = {"16": torch.float16, "bf16": torch.bfloat16}


class ImageData(LightningDataModule):
    """An image data set, split, normalised on the fly and kept on one device as uint8.

    Nothing is read or checked before :meth:`prepare_data`, :meth:`setup` or the first use.

    Args:
        load: returns the data set, such as ``functools.partial(load_cifar10, root=...)``;
            ``_partial_: true`` in YAML.
        device: ``cpu``, ``cuda``, ``cuda:N``, or ``auto``: CUDA where there is one.
        validation: how many of the training images to hold out for the target; or ``test``: train
            on all of them and validate on the test images, so that no test set is left.
        test: how many of the training images to hold out as the test images, where the publisher
            has none; else None.
        split_seed: of the draw of the images that are held out.
        eval_batch_size: examples per evaluation batch.
        augment: applied to training batches; see
            :class:`~bstune.trial.batches.image_batches.TrainBatches`.
        alternating_flip: whether images are mirrored every other time; see the same.
        train_examples: how many of the training images that are left to train on, the first of the
            shuffled ones, so that a smaller set is part of a larger one; None: all. Neither
            held-out images nor normalisation change.
        classes: how many the network tells apart; None: as many as there are labels.
        mean, std: per channel, black being 0 and white 1; None for those of the training images
            that are left.
        precision: under a half precision, such as ``bf16-mixed``, batches come rounded to it, as
            autocast rounds them for a convolution or a linear layer; None, or any other: in
            float32, for models that begin with another.
        channels_last: whether batches come in that memory format.

    Raises:
        ConfigError: from :meth:`prepare_data`, for an option that the data do not allow.
        DataError: from there, for data that cannot be read, or a label below 0 or not below
            ``classes``.
    """

    def __init__(
        self,
        *,
        load: Callable[[], ImageDataset],
        device: str,
        validation: int | Literal["test"],
        split_seed: int,
        eval_batch_size: int,
        test: int | None = None,
        train_examples: int | None = None,
        classes: int | None = None,
        augment: Augment | None = None,
        alternating_flip: bool = False,
        mean: Sequence[float] | None = None,
        std: Sequence[float] | None = None,
        precision: str | None = None,
        channels_last: bool = False,
    ) -> None:
        """Keep the arguments; the class's docstring has them. Nothing is read or checked here."""
        super().__init__()
        self._load = load
        self._device = device
        self.validates_on_test = validation == "test"
        self._validation = validation
        self._test = test
        self._split_seed = split_seed
        self._eval_batch_size = eval_batch_size
        self._train_examples = train_examples
        self._classes = classes
        self._augment = augment
        self._alternating_flip = alternating_flip
        self._mean = mean
        self._std = std
        # The part of bf16-mixed or bf16-true before the dash names the type.
        self._dtype = HALF_PRECISIONS.get((precision or "").partition("-")[0], torch.float32)
        self._memory_format = torch.channels_last if channels_last else torch.preserve_format
        # None before it is read.
        self._split: _Split | None = None
        # Whether the split is on the device already.
        self._on_device = False

    def prepare_data(self) -> None:
        """Read the data, or download them, and split them, off the device.

        ConfigError for options that the data do not allow.
        """
        resolve_device(self._device)
        check_positive_integer("workload.data.eval_batch_size", self._eval_batch_size)
        split = self._read()
        # Augmenting one image shows a refused setting before any trial. Where the split is on the
        # device already, that was done.
        if self._augment is not None and not self._on_device:
            augment = bind_augmentation(self._augment, split.normalise.mean, self._alternating_flip)
            augment(split.train[0][:1], torch.Generator())

    def setup(self, stage: str | None = None) -> None:
        """Put the data on the device, once, for any stage."""
        self._resident()

    @property
    def train_size(self) -> int:
        """Examples in one training epoch, known before the data are on the device."""
        return len(self._read().train[1])

    @property
    def validation_size(self) -> int:
        """Examples on which the target is measured."""
        return len(self._read().validation[1])

    def train_batches(
        self,
        batch_size: int,
        micro_batch_size: int | None,
        seed: int,
    ) -> TrainBatches:
        """Begin a trial's endless stream of batches, in an order that ``seed`` sets."""
        data = self._resident()
        images = data.train[0]
        # Batches of so many examples are made together, by as many operators as a single one. A CPU
        # launches operators at once: 1 makes each batch alone there, within the caches.
        examples_at_once = 1
        if images.device.type != "cpu":
            examples_at_once = AT_ONCE_BYTES // images[0].numel()
        return TrainBatches(
            *data.train,
            batch_size=batch_size,
            micro_batch_size=micro_batch_size,
            seed=seed,
            normalise=self._normalise,
            augment=self._augment,
            alternating_flip=self._alternating_flip,
            examples_at_once=examples_at_once,
        )

    def first_images(self, count: int) -> Tensor:
        """Give the first ``count`` training images of the split, or all if they are fewer.

        They are normalised to float32 and not augmented.
        """
        data = self._resident()
        return data.normalise(data.train[0][:count])

    def val_dataloader(self) -> EvalBatches:
        """Give the validation batches."""
        data = self._resident()
        return EvalBatches(
            *data.validation, batch_size=self._eval_batch_size, normalise=self._normalise
        )

    def test_dataloader(self) -> EvalBatches:
        """Give the test batches; there are none without a test set."""
        data = self._resident()
        return EvalBatches(*data.test, batch_size=self._eval_batch_size, normalise=self._normalise)

    @property
    def _normalise(self) -> Normalisation:
        """How pixels become the batches' numbers, in their type and memory format."""
        return replace(self._read().normalise, dtype=self._dtype, memory_format=self._memory_format)

    def _read(self) -> "_Split":
        """Read, check and split the data set, once."""
        if self._split is None:
            dataset = self._load()
            check_labels(dataset, self._classes)
            train, validation, test = split_images(
                dataset, self._validation, self._test, self._split_seed
            )
            # The mean and the deviation are of all images that are left to train on. So a smaller
            # set of them, by ``train_examples``, is normalised alike.
            mean, std = self._mean_std(train.images, dataset.white)
            # (pixels / white - mean) / std, per channel, as one scale and one shift.
            scales = [1 / (dataset.white * deviation) for deviation in std]
            shifts = [-centre / deviation for centre, deviation in zip(mean, std, strict=True)]
            self._split = _Split(
                train=_tensors_of(first_examples(train, self._train_examples)),
                validation=_tensors_of(validation),
                test=_tensors_of(test),
                scale=torch.tensor(scales, dtype=torch.float32).view(1, -1, 1, 1),
                shift=torch.tensor(shifts, dtype=torch.float32).view(1, -1, 1, 1),
            )
        return self._split

    def _resident(self) -> "_Split":
        """Give the split data on the device; they are moved once."""
        split = self._read()
        if not self._on_device:
            split = move_data_to_device(split, resolve_device(self._device))
            # From here on :meth:`_read` gives the split that was moved.
            self._split = split
            self._on_device = True
        return split

    def _mean_std(
        self, images: NDArray[np.uint8], white: int
    ) -> tuple[Sequence[float], Sequence[float]]:
        """Give the mean and the deviation of each channel, as the options have them or computed."""
        if self._mean is None and self._std is None:
            return channel_mean_std(images, white)
        mean = list(self._mean or ())
        std = list(self._std or ())
        channels = images.shape[1]
        if len(mean) != channels or len(std) != channels or min(std) <= 0:
            raise ConfigError(
                f"workload.data.mean and workload.data.std must have {channels} value(s) each, one "
                f"per channel, with std above 0, but got mean={self._mean} and std={self._std}; "
                "set both to null to compute them from the training images"
            )
        return mean, std


# Images, uint8 (n, channels, height, width), and labels, int64 (n,).
Part = tuple[Tensor, Tensor]


def _tensors_of(part: Images) -> Part:
    """Copy images and labels into tensors."""
    return torch.tensor(part.images), torch.tensor(part.labels)


class _Split(NamedTuple):
    """A data set's parts, and the scale and shift, (1, channels, 1, 1), that normalise pixels."""

    train: Part
    validation: Part
    test: Part
    scale: Tensor
    shift: Tensor

    @property
    def normalise(self) -> Normalisation:
        return Normalisation(self.scale, self.shift)


def split_images(
    dataset: ImageDataset, validation: int | Literal["test"], test: int | None, seed: int
) -> tuple[Images, Images, Images]:
    """Split a data set at random into training, validation and test images.

    Args:
        dataset: whose training images are split.
        validation: how many of them are held out for the target; or ``test``: none, as the test
            images serve for it.
        test: how many are held out as test images, where the data set has none; else None.
        seed: of the draw.

    Returns:
        The three parts. The last is empty where no test images are left.
    """
    validates_on_test = validation == "test"
    if not validates_on_test and not _is_positive_integer(validation):
        raise ConfigError(
            f"workload.data.validation must be a positive integer or 'test', but got {validation!r}"
        )
    if test is not None and not _is_positive_integer(test):
        raise ConfigError(
            f"workload.data.test must be a positive integer or null, but got {test!r}"
        )
    if test is not None and dataset.test is not None:
        raise ConfigError(
            f"{dataset.name} has {len(dataset.test)} test images: set workload.data.test to null, "
            f"not to {test}"
        )
    if validates_on_test and test is None and dataset.test is None:
        raise ConfigError(
            f"{dataset.name} has no test images to validate on: set workload.data.test to how many "
            "to hold out"
        )
    n = len(dataset.train)
    validation_count = 0 if validates_on_test else int(validation)
    test_count = test or 0
    if validation_count + test_count >= n:
        raise ConfigError(
            f"workload.data.validation={validation} and workload.data.test={test} leave nothing to "
            f"train on: {dataset.name} has {n} training images"
        )
    # Images are drawn without replacement, whatever their labels. numpy never changes RandomState's
    # streams (NEP 19).
    order = np.random.RandomState(seed).permutation(n)
    indices_of_parts = np.split(order, [validation_count, validation_count + test_count])
    validation_images, test_images, train = (
        dataset.train.take(index) for index in indices_of_parts
    )
    if dataset.test is not None:
        test_images = dataset.test
    if validates_on_test:
        # The test images serve for the target, and none are left to test. That empty part is
        # ``validation_images``, as no images were held out for the target.
        return train, test_images, validation_images
    return train, validation_images, test_images


def first_examples(images: Images, count: int | None) -> Images:
    """Take the first ``count`` of the training images; None: all of them.

    ConfigError for more than there are.
    """
    if count is None:
        return images
    check_positive_integer("workload.data.train_examples", count)
    if count > len(images):
        raise ConfigError(
            f"workload.data.train_examples={count}, but {len(images)} training images are left "
            "after the split"
        )
    return Images(images.images[:count], images.labels[:count])


def check_labels(dataset: ImageDataset, classes: int | None) -> None:
    """Refuse images without a label each, and labels outside of 0 to ``classes`` - 1.

    ``classes`` None allows any label from 0 on.
    """
    allowed = "0 and above"
    limit = math.inf
    if classes is not None:
        allowed = f"0 to {classes - 1}, as workload.data.classes={classes}"
        limit = classes
    for name, part in (("training", dataset.train), ("test", dataset.test)):
        if part is None:
            continue
        if len(part.images) != len(part.labels):
            raise DataError(
                f"{dataset.name} has {len(part.images)} {name} images, but {len(part.labels)} "
                "labels"
            )
        outside = (part.labels < 0) | (part.labels >= limit)
        if outside.any():
            place = int(outside.argmax())
            raise DataError(
                f"{dataset.name}: {name} image {place} has the label {part.labels[place]}, but "
                f"labels are {allowed}"
            )


def _is_positive_integer(size: object) -> bool:
    """Whether a value is a whole number over 0; True, which Python counts as 1, is none."""
    return isinstance(size, int) and not isinstance(size, bool) and size > 0


def channel_mean_std(images: NDArray[np.uint8], white: int) -> tuple[list[float], list[float]]:
    """Compute the mean and the standard deviation of each channel over all pixels.

    Black is 0 and ``white`` is 1. DataError for a channel that is constant.
    """
    mean = list[float]()
    std = list[float]()
    values = np.arange(256)
    for channel, pixels in enumerate(torch.from_numpy(images).unbind(1)):
        # Exact counts of pixel values give the same mean on every machine. numpy's bincount would
        # make an int64 copy.
        counts = torch.bincount(pixels.flatten(), minlength=256).numpy()
        n = int(counts.sum())
        total = int(counts @ values)
        squares = int(counts @ values**2)
        if n * squares == total**2:
            raise DataError(f"channel {channel} of the images is constant: it cannot be normalised")
        mean.append(total / n / white)
        std.append(math.sqrt(n * squares - total**2) / n / white)
    return mean, std


def random_crop_flip(
    images: Tensor,
    generator: torch.Generator,
    padding: int,
    cutout: int = 0,
    mirror: Tensor | None = None,
    mean: Tensor | None = None,
    batch_size: int | None = None,
) -> Tensor:
    """Pad each image by reflection, crop it at a random place, mirror it, and cut out a square.

    Page's augmentation for CIFAR-10 (2018 and 2019, "How to train your ResNet"); with a padding of
    2 the crop is the translation of cifar10-airbench. Padding does not repeat the edge. Nothing
    waits for an accelerator.

    Args:
        images: (n, channels, height, width), of any type.
        generator: all draws come from it; on the images' device.
        padding: pixels of padding on each side; 0 only mirrors.
        cutout: side of a square, wholly inside the image, that is set to the mean; 0: none; 8,
            later 5, in Page's code.
        mirror: which images to mirror, bool, (n,); None mirrors each with probability 1/2.
        mean: of the pixels per channel, (1, channels, 1, 1), rounded where the images are whole
            numbers; for ``cutout`` only. :class:`~bstune.trial.batches.image_batches.TrainBatches`
            passes it.
        batch_size: the images are whole batches of this size, and each draws the numbers that it
            would draw alone. None: the images are one batch.

    Raises:
        ConfigError: for a ``padding`` or a ``cutout`` out of its range, or a ``cutout`` without a
            mean.
    """
    n = len(images)
    device = images.device
    height, width = images.shape[-2:]
    pixels = f"the image's {height}x{width} pixels"
    if not 0 <= padding < min(height, width):
        raise ConfigError(
            f"augment.padding must be at least 0 and below {pixels}, but got {padding}"
        )
    if not 0 <= cutout <= min(height, width):
        raise ConfigError(
            f"augment.cutout must be at least 0 and at most {pixels}, but got {cutout}"
        )
    if cutout and mean is None:
        raise ConfigError(
            f"augment.cutout={cutout} needs the mean of the pixels: take batches from TrainBatches"
        )

    def draw(high: int, *shape: int) -> Tensor:
        return torch.randint(high, shape, generator=generator, device=device)

    def draw_batch(size: int) -> list[Tensor]:
        # First rows and columns of the crops, whether to mirror, and those of the squares.
        drawn = [*draw(2 * padding + 1, 2, size)]
        if mirror is None:
            drawn.append(draw(2, size))
        if cutout:
            drawn.append(draw(height + 1 - cutout, size))
            drawn.append(draw(width + 1 - cutout, size))
        return drawn

    sizes = [n]
    if batch_size is not None:
        sizes = [batch_size] * (n // batch_size)
    # Each of the draws, joined over the batches.
    joined = list[Tensor]()
    for parts in zip(*map(draw_batch, sizes), strict=True):
        joined.append(parts[0] if len(parts) == 1 else torch.cat(parts))
    top, left, *others = joined
    if mirror is None:
        mirror = others.pop(0).bool()
    images = crop_flip(images, top, left, mirror, padding)
    if mean is None or not cutout:
        return images
    square_top, square_left = others
    return cut_out(images, square_top, square_left, cutout, mean)


def cut_out(images: Tensor, top: Tensor, left: Tensor, size: int, mean: Tensor) -> Tensor:
    """Set a square of each image to the mean of the pixels.

    Its side is ``size``; ``top`` and ``left``, each (n,), are its first rows and columns.
    """
    height, width = images.shape[-2:]
    rows = torch.arange(height, device=images.device) - top[:, None]
    columns = torch.arange(width, device=images.device) - left[:, None]
    in_rows = ((rows >= 0) & (rows < size))[:, None, :, None]
    in_columns = ((columns >= 0) & (columns < size))[:, None, None, :]
    # The cast to whole numbers below would cut the mean off.
    if not images.is_floating_point():
        mean = mean.round()
    return torch.where(in_rows & in_columns, mean.to(images.dtype), images)


def crop_flip(images: Tensor, top: Tensor, left: Tensor, mirror: Tensor, padding: int) -> Tensor:
    """Pad each image by reflection, crop it, then mirror some of them.

    ``top`` and ``left``, each (n,), are the crop's first row and column in the padded image;
    ``mirror``, (n,), says which images are mirrored.
    """
    n, channels, height, width = images.shape
    device = images.device
    rows = _crop_indices(height, padding, device).index_select(0, top)
    # A list of columns for each place of the crop, then the same lists reversed for mirrored
    # images.
    lists_of_columns = _crop_indices(width, padding, device)
    lists_of_columns = torch.cat([lists_of_columns, lists_of_columns.flip(1)])
    choices = torch.add(left, mirror, alpha=2 * padding + 1)
    columns = lists_of_columns.index_select(0, choices)
    # Rows are taken first, then columns. That is several times faster on a CPU than four index
    # tensors, and needs no index per pixel. A plane is a channel of an image: here stands the
    # number of its first row among all rows.
    planes = torch.arange(0, n * channels * height, height, device=device).view(n, channels, 1)
    source_rows = (planes + rows[:, None, :]).flatten()
    cropped = (
        images.reshape(-1, width).index_select(0, source_rows).view(n, channels * height, width)
    )
    return cropped.gather(2, columns[:, None, :].expand_as(cropped)).view_as(images)


def _crop_indices(size: int, padding: int, device: torch.device) -> Tensor:
    """Give the numbers of the pixels that a crop takes along a side, (places of the crop, size).

    The side has ``size`` pixels, and ``padding`` reflected ones at each end.
    """
    # Reflection does not repeat the edge: -1 is pixel 1, and ``size`` is pixel ``size`` - 2.
    padded = torch.arange(-padding, size + padding, device=device)
    return ((size - 1) - ((size - 1) - padded.abs()).abs()).unfold(0, size, 1)
