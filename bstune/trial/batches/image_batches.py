"""Batches of images on the device: training batches without end, and evaluation batches."""

import functools
import inspect
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from bstune.core.errors import ConfigError, check_positive_integer
from bstune.trial.batches.index_stream import IndexStream
from bstune.trial.batches.micro_batches import micro_batch_sizes_of, splitter
from bstune.trial.devices.randomness import seeded_generators

# Takes uint8 images and a generator, and returns images of the same shape. Where it has such
# arguments, it also gets by name mirror, bool (n,), mean, of the pixels of each channel, and
# batch_size: see bstune.workloads.images.random_crop_flip. One with batch_size gets several batches
# at once, and draws the same numbers for each as for it alone.
Augment = Callable[..., Tensor]


@dataclass(frozen=True)
class Normalisation:
    """Turns pixels into ``pixels * scale + shift``; both have the shape (1, channels, 1, 1).

    The result is computed in float32, and then rounded to ``dtype`` as autocast would round it for
    a convolution.
    """

    scale: Tensor
    shift: Tensor
    dtype: torch.dtype = torch.float32
    memory_format: torch.memory_format = torch.preserve_format

    @property
    def mean(self) -> Tensor:
        """The value of a pixel that becomes 0, (1, channels, 1, 1)."""
        return -self.shift / self.scale

    def __call__(self, images: Tensor) -> Tensor:
        """Give the normalised images, of the same shape; ``images`` are left as they are."""
        # A single conversion is followed by operations in place. On a CPU that is faster than type
        # promotion, and much faster than addcmul.
        pixels = images.to(torch.float32, copy=True, memory_format=self.memory_format)
        return pixels.mul_(self.scale).add_(self.shift).to(self.dtype)


class TrainBatches:
    """Endless training batches (x, y) from images and labels on one device.

    The images are uint8 (n, channels, height, width). Each iterator goes on where the last one left
    off, at the next whole batch. Order and augmentation depend on ``seed`` alone, not on
    ``micro_batch_size``.

    With ``alternating_flip`` an image is mirrored at random in its first epoch and then every other
    time, as in cifar10-airbench (Jordan 2024, arXiv 2404.00498, section 3.6).

    Several batches of at most ``examples_at_once`` examples together are made at once, by as many
    operators as one batch, and are the same to the bit. On an accelerator the host would otherwise
    need a large part of a short step to launch the operators. An augmentation without an argument
    ``batch_size`` is called for each batch alone.
    """

    def __init__(
        self,
        images: Tensor,
        labels: Tensor,
        *,
        batch_size: int,
        micro_batch_size: int | None,
        seed: int,
        normalise: Normalisation,
        augment: Augment | None = None,
        alternating_flip: bool = False,
        examples_at_once: int = 1,
    ) -> None:
        self.batch_size = batch_size
        self.micro_batch_sizes = micro_batch_sizes_of(batch_size, micro_batch_size)
        self._split = splitter(batch_size, micro_batch_size)
        # Each purpose has a generator of its own, as the order must not depend on the numbers that
        # augmentation draws.
        order, self._augment_generator, mirror_generator = seeded_generators(
            seed, images.device, count=3
        )
        self._images = images
        self._labels = labels
        self._normalise = normalise
        # A stopped trial goes on with the same augmentation: the stream keeps this generator's
        # state with its position.
        random_states: dict[str, Any] = {}
        if augment is not None:
            generator = self._augment_generator
            random_states = {"get_random": generator.get_state, "set_random": generator.set_state}
        batches_together = max(1, min(examples_at_once, len(images)) // batch_size)
        # An augmentation without batch_size would draw other numbers for a group than for its
        # batches one by one.
        if augment is not None and "batch_size" not in inspect.signature(augment).parameters:
            batches_together = 1
        self.stream = IndexStream(
            len(images), batch_size, order, batches_together=batches_together, **random_states
        )
        # Whole batches that were made and not handed out yet.
        self._made: Iterator[tuple[Tensor, Tensor]] = iter(())
        self._augment: Augment | None = None
        if augment is not None:
            self._augment = bind_augmentation(augment, normalise.mean, alternating_flip)
        # Whether each image is mirrored in its first epoch, bool (n,); None without such a flip.
        self._mirrored: Tensor | None = None
        if alternating_flip:
            self._mirrored = torch.randint(
                2, (len(images),), generator=mirror_generator, device=images.device
            ).bool()

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        split = self._split
        are_together = self.stream.batches_together > 1
        while True:
            images, labels = self._next_made() if are_together else self._make()
            self.stream.drawn += 1
            for x, y in zip(split(images), split(labels), strict=True):
                # Batches that are made together are normalised already. A single batch is
                # normalised in micro-batches, as all of it may be too large.
                if are_together:
                    yield x, y
                else:
                    yield self._normalise(x), y

    def _next_made(self) -> tuple[Tensor, Tensor]:
        """Give the next batch of a group that is made together, normalised.

        The next group is made where no batch is left.
        """
        batch = next(self._made, None)
        if batch is None:
            # A stopped trial that this one continues may have taken some batches of the group.
            taken_before = self.stream.drawn % self.stream.batches_together
            images, labels = self._make()
            images_of_batches = torch.split(self._normalise(images), self.batch_size)
            labels_of_batches = torch.split(labels, self.batch_size)
            batches = zip(images_of_batches, labels_of_batches, strict=True)
            self._made = islice(batches, taken_before, None)
            batch = next(self._made)
        return batch

    def _make(self) -> tuple[Tensor, Tensor]:
        """Make the next group of batches: its augmented images and its labels, a tensor each."""
        stream = self.stream
        index = stream.draw()
        images = self._images.index_select(0, index)
        labels = self._labels.index_select(0, index)
        # Whole batches are augmented, so that random numbers do not depend on micro-batches.
        options = dict[str, Any]()
        if stream.batches_together > 1:
            options["batch_size"] = self.batch_size
        mirror = None
        if self._mirrored is not None:
            # The group's place in the stream, which may straddle two epochs. The stream counts a
            # batch once it is handed out, so that it may have handed out a part of this group.
            batches_before = stream.drawn - stream.drawn % stream.batches_together
            first = batches_before * self.batch_size
            places = torch.arange(first, first + len(index), device=self._images.device)
            epoch = places // len(self._images)
            # In every other epoch each image is the other way round than in its first.
            mirror = self._mirrored[index] ^ (epoch % 2 == 1)
        if self._augment is not None:
            if mirror is not None:
                options["mirror"] = mirror
            images = self._augment(images, self._augment_generator, **options)
        elif mirror is not None:
            images = torch.where(mirror.view(-1, 1, 1, 1), images.flip(-1), images)
        return images, labels


def bind_augmentation(augment: Augment, mean: Tensor, alternating_flip: bool) -> Augment:
    """Bind an augmentation's argument ``mean``, of the pixels, (1, channels, 1, 1), if it has one.

    A ConfigError refuses one without an argument ``mirror``, where images are to be flipped.
    """
    arguments = inspect.signature(augment).parameters
    if alternating_flip and "mirror" not in arguments:
        function = augment
        if isinstance(augment, functools.partial):
            function = augment.func
        name = getattr(function, "__name__", type(function).__name__)
        raise ConfigError(
            "workload.data.alternating_flip needs an augmentation with an argument mirror, such as "
            f"bstune.workloads.images.random_crop_flip, but got {name}: set "
            "workload.data.alternating_flip to false"
        )
    if "mean" not in arguments:
        return augment
    return functools.partial(augment, mean=mean)


class EvalBatches:
    """Evaluation batches (x, y) in the order of the data; only the last one may be smaller."""

    def __init__(
        self, images: Tensor, labels: Tensor, *, batch_size: int, normalise: Normalisation
    ) -> None:
        check_positive_integer("evaluation batch size", batch_size)
        self.batch_size = batch_size
        self._images = images
        self._labels = labels
        self._normalise = normalise

    def in_batches_of(self, batch_size: int) -> "EvalBatches":
        """Give the same examples in batches of another size."""
        return EvalBatches(
            self._images, self._labels, batch_size=batch_size, normalise=self._normalise
        )

    def __len__(self) -> int:
        # The last batch, which may be smaller, counts too.
        return math.ceil(len(self._images) / self.batch_size)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for start in range(0, len(self._images), self.batch_size):
            stop = start + self.batch_size
            yield self._normalise(self._images[start:stop]), self._labels[start:stop]
