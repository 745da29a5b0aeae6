"""Image data: parts, normalisation and augmentation, against slow references."""

import numpy as np
import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from small import QUIET

from bstune.workloads.datasets import LabelledImages
from bstune.workloads.images import ImageData, random_crop_flip, split_images

pytestmark = pytest.mark.filterwarnings("ignore:.*does not have many workers")


def data_set(count=40, size=6):
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(256, (count, 3, size, size), generator=generator, dtype=torch.uint8)
    test = images[:7].flip(0), torch.arange(100, 107)
    return LabelledImages(images, torch.arange(count), 255, test)


@pytest.mark.parametrize("padding", [1, 2, 4])
@pytest.mark.parametrize("cutout", [0, 3])
def test_each_image_is_a_crop_of_it(padding, cutout):
    images = torch.randn(50, 3, 6, 5)
    torch.manual_seed(0)
    augmented = random_crop_flip(images, padding, cutout)
    assert augmented.shape == images.shape
    seen = set()
    for image, got in zip(images.numpy(), augmented.numpy(), strict=True):
        padded = np.pad(image, [(0, 0), (padding, padding), (padding, padding)], mode="reflect")
        kept = got[0] != 0.0
        if cutout:
            rows, columns = np.nonzero(~kept)
            assert len(rows) == cutout**2
            assert np.ptp(rows) == np.ptp(columns) == cutout - 1
        # The place and the side of the crop that gives the pixels.
        crops = [
            (top, left, mirrored)
            for top in range(2 * padding + 1)
            for left in range(2 * padding + 1)
            for mirrored in (1, -1)
            if np.array_equal(
                padded[:, top : top + 6, left : left + 5][:, :, ::mirrored][:, kept], got[:, kept]
            )
        ]
        # Where all of an image shows by reflection, a crop may be a mirrored one as well.
        assert crops
        seen.add(crops[0])
    assert len(seen) > 10


class Recorder(LightningModule):
    """Keeps the batches that it trains on and validates on, in the type that it gets them."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.trained, self.validated = [], []

    def training_step(self, batch, batch_idx):
        self.trained.append(batch)
        return self.weight.sum()

    def validation_step(self, batch, batch_idx):
        self.validated.append(batch)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


def test_batches_are_normalised_and_those_trained_on_augmented():
    images = data_set()
    data = ImageData(
        images, 5, validation=8, validation_batch_size=8, test=2, augment=lambda part: part + 100.0
    )
    module = Recorder()
    Trainer(accelerator="cpu", max_epochs=1, **QUIET).fit(module, data)
    trained = torch.cat([batch[0] for batch in module.trained]) - 100.0
    assert trained.mean(dim=(0, 2, 3)).numpy() == pytest.approx(0.0, abs=1e-5)
    assert trained.std(dim=(0, 2, 3), correction=0).numpy() == pytest.approx(1.0, abs=1e-5)
    # An example's label is its place.
    used = torch.cat([labels for _, labels in module.trained])
    validated, places = module.validated[-1]
    assert len(used.unique()) == 30
    assert not set(used.tolist()) & set(places.tolist())
    pixels = images.images[used].double()
    mean, std = pixels.mean(dim=(0, 2, 3)), pixels.std(dim=(0, 2, 3), correction=0)
    expected = (images.images[places].double() - mean[:, None, None]) / std[:, None, None]
    assert validated.numpy() == pytest.approx(expected.numpy(), abs=1e-5)


def test_a_smaller_set_is_a_part_of_a_larger_one_and_the_test_images_can_be_the_target():
    images = data_set()
    whole = split_images(images, "test", 0, 0)
    part = split_images(images, "test", 0, 0, 10)
    assert len(whole.train) == 40
    assert part.train.tensors[1].tolist() == whole.train.tensors[1][:10].tolist()
    assert torch.equal(part.scale, whole.scale)
    assert part.validation.tensors[1].tolist() == list(range(100, 107))
