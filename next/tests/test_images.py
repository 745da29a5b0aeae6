"""Image data: parts, normalisation and augmentation, against slow references."""

import itertools

import numpy as np
import pytest
import torch
from lightning.pytorch import Trainer
from small import QUIET

from bstune.workloads.datasets import LabelledImages
from bstune.workloads.images import ImageData, random_crop_flip, split_images


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
