from functools import partial
from itertools import islice

import numpy as np
import pytest
import torch

from bstune.core.errors import BstuneError, ConfigError
from bstune.trial.devices.device import resolve_device
from bstune.workloads.datasets import ImageDataset, Images
from bstune.workloads.images import (
    ImageData,
    channel_mean_std,
    crop_flip,
    cut_out,
    random_crop_flip,
    split_images,
)


def fake_images(n, seed=0, channels=2):
    images = np.random.RandomState(seed).randint(0, 17, (n, channels, 4, 4)).astype(np.uint8)
    return Images(images, np.arange(n))


def fake_dataset(with_test=True):
    return ImageDataset("fake", 16, fake_images(40), fake_images(7, seed=1) if with_test else None)


def image_data(load=fake_dataset, **options):
    values = {"device": "cpu", "validation": 10, "split_seed": 0, "eval_batch_size": 4} | options
    return ImageData(load=load, **values)


@pytest.mark.parametrize(
    ("with_test", "validation", "test", "sizes"),
    [
        (True, 10, None, (30, 10, 7)),
        (True, "test", None, (40, 7, 0)),
        (False, 10, None, (30, 10, 0)),
        (False, 10, 5, (25, 10, 5)),
        (False, "test", 5, (35, 5, 0)),
    ],
)
def test_split_sizes(with_test, validation, test, sizes):
    dataset = fake_dataset(with_test)
    parts = split_images(dataset, validation, test, seed=3)
    assert tuple(map(len, parts)) == sizes
    data = image_data(partial(fake_dataset, with_test), validation=validation, test=test)
    assert (data.train_size, data.validation_size) == sizes[:2]
    assert data.validates_on_test == (validation == "test")

    # The data set's own test part counts its labels anew.
    split = [part for part in parts if dataset.test is None or len(part) != len(dataset.test)]
    labels = np.concatenate([part.labels for part in split])
    # The parts have no image in common, and lack none.
    assert sorted(labels) == list(range(40))
    for part in split:
        assert np.array_equal(part.images, dataset.train.images[part.labels])


@pytest.mark.parametrize("given", [{}, {"mean": [0.25, 0.5], "std": [0.5, 2.0]}])
def test_images_are_normalised_on_the_scale_from_black_to_white(given):
    train, validation, _ = split_images(fake_dataset(), 10, None, 0)
    scaled = train.images / 16
    mean, std = given.values() or (scaled.mean((0, 2, 3)), scaled.std((0, 2, 3)))
    if not given:
        assert channel_mean_std(train.images, 16) == (
            pytest.approx(mean, rel=1e-12),
            pytest.approx(std, rel=1e-12),
        )
    data = image_data(eval_batch_size=10, augment=partial(random_crop_flip, padding=1), **given)
    pairs = [(next(iter(data.val_dataloader()))[0], validation.images)]
    for count in (1, 30, 99):
        # These are never augmented.
        pairs.append((data.first_images(count), train.images[:count]))
    drawn, labels = next(iter(image_data(**given).train_batches(30, None, seed=0)))
    for x, images in (*pairs, (drawn, fake_dataset().train.images[labels])):
        expected = (images / 16 - np.reshape(mean, (2, 1, 1))) / np.reshape(std, (2, 1, 1))
        torch.testing.assert_close(x, torch.from_numpy(expected).float(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("count", [1, 12, 30])
def test_part_of_the_training_images_leaves_all_else_as_it_is(count):
    whole = image_data(classes=40)
    part = image_data(train_examples=count)
    assert part.train_size == count
    assert part.validation_size == whole.validation_size
    torch.testing.assert_close(part.first_images(99), whole.first_images(count), rtol=0, atol=0)
    for one, other in zip(part.val_dataloader(), whole.val_dataloader(), strict=True):
        torch.testing.assert_close(one[0], other[0], rtol=0, atol=0)
        assert one[1].tolist() == other[1].tolist()
    drawn = next(iter(part.train_batches(count, None, seed=0)))[1]
    assert sorted(drawn.tolist()) == sorted(
        split_images(fake_dataset(), 10, None, 0)[0].labels[:count].tolist()
    )


def test_split_is_the_same_in_every_version():
    train, validation, _ = split_images(fake_dataset(), 5, None, seed=0)
    assert validation.labels.tolist() == [22, 20, 25, 4, 10]
    assert train.labels[:5].tolist() == [15, 28, 11, 18, 29]
    assert (
        split_images(fake_dataset(), 5, None, seed=1)[1].labels.tolist()
        != validation.labels.tolist()
    )


NO_TEST = partial(fake_dataset, with_test=False)
CONSTANT = ImageDataset(
    "fake", 16, Images(np.full((40, 2, 4, 4), 3, np.uint8), np.arange(40)), None
)
CUT = ImageDataset("fake", 16, Images(fake_images(40).images, np.arange(39)), None)


def labelled(**third):
    """The fake data with another label of the third image of a part."""
    dataset = fake_dataset()
    for part, label in third.items():
        getattr(dataset, part).labels[2] = label
    return dataset


UNFIT = r"must have 2 value\(s\) each"


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (
            {"validation": 0},
            "^workload.data.validation must be a positive integer or 'test', but got 0",
        ),
        (
            {"validation": "all"},
            "data.validation must be a positive integer or 'test', but got 'all'",
        ),
        ({"validation": True}, "but got True"),
        ({"load": NO_TEST, "test": 0}, "data.test must be a positive integer or null, but got 0"),
        ({"test": 5}, "fake has 7 test images: set workload.data.test to null, not to 5"),
        (
            {"load": NO_TEST, "validation": "test"},
            "fake has no test images to validate on: set workload.data.test",
        ),
        ({"validation": 40}, "leave nothing to train on: fake has 40 training images"),
        (
            {"load": NO_TEST, "validation": 30, "test": 10},
            "workload.data.validation=30 and workload.data.test=10 leave nothing",
        ),
        ({"mean": [0.5], "std": [0.5]}, UNFIT),
        ({"mean": [0.5, 0.5]}, UNFIT),
        ({"std": [1.0, 1.0]}, UNFIT),
        ({"mean": [0.5, 0.5], "std": [1.0, 0.0]}, UNFIT),
        ({"load": lambda: CONSTANT}, "channel 0 of the images is constant"),
        (
            {"train_examples": 31},
            r"^workload.data.train_examples=31, but 30 training images are left after the split",
        ),
        ({"train_examples": 0}, "data.train_examples must be a positive integer, but got 0"),
        (
            {"classes": 40, "load": lambda: labelled(test=40)},
            r"fake: test image 2 has the label 40, but .* 0 to 39, as",
        ),
        (
            {"classes": 10},
            (
                r"fake: training image 10 has the label 10, but labels are 0 to 9, as "
                r"workload\.data\.classes=10"
            ),
        ),
        (
            {"load": lambda: labelled(train=-1)},
            "fake: training image 2 has the label -1, but labels are 0 and above",
        ),
        ({"load": lambda: CUT}, "fake has 40 training images, but 39 labels"),
        ({"eval_batch_size": 0}, r"data\.eval_batch_size must be a positive integer, but got 0"),
        (
            {"augment": partial(random_crop_flip, padding=4)},
            "below the image's 4x4 pixels, but got 4",
        ),
        (
            {"augment": partial(random_crop_flip, padding=1, cutout=5)},
            "at most the image's 4x4 pixels, but got 5",
        ),
        (
            {"augment": lambda x, generator: x, "alternating_flip": True},
            "needs an augmentation with an argument mirror",
        ),
    ],
)
def test_options_that_cannot_be_are_refused_before_a_trial(options, text):
    with pytest.raises(BstuneError, match=text):
        image_data(**options).prepare_data()


def test_data_are_read_once_and_stay_on_the_device():
    calls = []
    data = image_data(lambda: calls.append("load") or fake_dataset())
    assert calls == []
    for prepare in (data.prepare_data, data.setup, data.setup, data.prepare_data):
        prepare()
    stream = data.train_batches(8, None, 0)._images
    other = data.train_batches(8, None, 1)._images
    assert calls == ["load"]
    assert stream.data_ptr() == other.data_ptr()
    assert stream.dtype == torch.uint8


@pytest.mark.parametrize(
    ("precision", "kind"),
    [
        ("bf16-mixed", torch.bfloat16),
        ("16-true", torch.float16),
        ("32-true", torch.float32),
        (None, torch.float32),
    ],
)
def test_images_are_handed_out_in_the_precision_and_the_memory_format(precision, kind):
    data = image_data(precision=precision, channels_last=True, validation="test")
    plain = image_data(validation="test")
    pairs = [(data.train_batches(30, None, 0), plain.train_batches(30, None, 0))]
    pairs += [(data.val_dataloader(), plain.val_dataloader())]
    for batches, expected in pairs:
        (x, _) = next(iter(batches))
        (same, _) = next(iter(expected))
        assert x.is_contiguous(memory_format=torch.channels_last)
        assert x.dtype == kind
        assert torch.equal(x, same.to(kind))
    # Whitening is taken from images that keep their bits.
    assert torch.equal(data.first_images(9), plain.first_images(9))


@pytest.mark.parametrize("alternating", [True, False])
def test_flips_alternate_where_the_option_says_so(alternating):
    data = image_data(augment=partial(random_crop_flip, padding=0), alternating_flip=alternating)
    epochs = islice(data.train_batches(30, None, seed=0), 2)
    ordered = [images[labels.argsort()] for images, labels in epochs]
    one, two = ordered
    assert torch.equal(one.flip(-1), two) == alternating


@pytest.mark.parametrize(
    ("name", "devices", "expected"),
    [
        *[
            ("auto", 0, "cpu"),
            ("auto", 1, "cuda"),
            ("cpu", 1, "cpu"),
            ("cuda", 1, "cuda"),
            ("cuda:1", 2, "cuda:1"),
        ],
        ("mps", 1, "device must be auto, cpu, cuda or cuda:N, but got"),
        ("cuda:x", 1, "device must be auto, cpu, cuda or cuda:N, but got"),
        ("", 1, "device must be auto, cpu, cuda or cuda:N, but got"),
        (0, 1, "device must be auto, cpu, cuda or cuda:N, but got"),
        ("cuda", 0, "device=cuda, but torch sees 0 CUDA devices"),
        ("cuda:1", 1, "device=cuda:1, but torch sees 1 CUDA devices"),
    ],
)
def test_resolve_device(monkeypatch, name, devices, expected):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: devices > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: devices)
    if " " in expected:
        with pytest.raises(ConfigError, match=expected):
            image_data(device=name).prepare_data()
    else:
        assert str(resolve_device(name)) == expected


# Augmentation


def random_pixels(n, dtype=torch.uint8):
    return torch.randint(256, (n, 3, 8, 6), generator=torch.Generator().manual_seed(1)).to(dtype)


@pytest.mark.parametrize("padding", [0, 1, 4, 5])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
def test_crop_flip_is_numpys_at_every_place(padding, dtype):
    places = torch.arange(2 * padding + 1)
    # Each place with and without mirroring, an image each.
    top, left, mirror = torch.cartesian_prod(places, places, torch.arange(2)).T
    images = random_pixels(len(top), dtype)
    padded = np.pad(
        images.numpy(), ((0, 0), (0, 0), (padding, padding), (padding, padding)), mode="reflect"
    )
    expected = []
    places = zip(top.tolist(), left.tolist(), mirror.tolist(), strict=True)
    for image, (first_row, first_column, flip) in zip(padded, places, strict=True):
        crop = image[:, first_row : first_row + 8, first_column : first_column + 6]
        expected.append(crop[:, :, ::-1] if flip else crop)
    result = crop_flip(images, top, left, mirror.bool(), padding)
    assert result.dtype == dtype
    assert np.array_equal(result, np.stack(expected))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
@pytest.mark.parametrize("size", [1, 3, 6])
def test_cut_out_is_a_loops_at_every_place(size, dtype):
    places = torch.cartesian_prod(torch.arange(8 + 1 - size), torch.arange(6 + 1 - size))
    images = random_pixels(len(places), dtype)
    mean = torch.tensor([10.4, 20.6, 30.0]).view(3, 1, 1)
    expected = images.clone()
    # Whole numbers take the rounded mean.
    for image, (top, left) in zip(expected, places.tolist(), strict=True):
        image[:, top : top + size, left : left + size] = (
            mean.round() if dtype == torch.uint8 else mean
        )
    result = cut_out(images, *places.T, size, mean[None])
    assert result.dtype == dtype
    assert torch.equal(result, expected)


def chi_squared(counts):
    """The statistic of counts that are expected to be equal."""
    expected = counts.sum() / len(counts)
    return ((counts - expected) ** 2 / expected).sum()


def test_crops_and_squares_lie_at_every_place_equally_often():
    ramp = torch.arange(8 * 6, dtype=torch.uint8).view(1, 1, 8, 6).expand(50_000, 1, 8, 6)
    crops = random_crop_flip(ramp, torch.Generator().manual_seed(0), padding=2)
    # The pixel in the middle tells the place, and its neighbour the mirroring.
    centre = crops[:, 0, 4, 2:4].long()
    counts = torch.unique(centre, dim=0, return_counts=True)[1]
    assert len(counts) == 5 * 5 * 2
    # With 49 degrees of freedom, p = 0.001.
    assert chi_squared(counts) < 85.4

    white = torch.full((40_000, 1, 5, 4), 255, dtype=torch.uint8)
    mean = torch.zeros(1, 1, 1, 1)
    cut = (
        random_crop_flip(white, torch.Generator().manual_seed(0), padding=0, cutout=2, mean=mean)
        == 0
    )
    assert cut.flatten(1).sum(1).eq(4).all()
    # This is the first pixel that was cut out.
    corner = cut.flatten(1).long().argmax(1)
    counts = torch.bincount(corner, minlength=20).view(5, 4)[:4, :3].flatten()
    assert counts.sum() == 40_000
    # With 11 degrees of freedom, p = 0.001.
    assert chi_squared(counts) < 31.3


def test_a_square_is_drawn_last_and_none_draws_nothing():
    images = random_pixels(20)
    mean = torch.zeros(1, 3, 1, 1)
    plain = torch.Generator().manual_seed(0)
    without = torch.Generator().manual_seed(0)
    cut = torch.Generator().manual_seed(0)
    crops = random_crop_flip(images, plain, padding=2)
    assert torch.equal(crops, random_crop_flip(images, without, padding=2, cutout=0, mean=mean))
    assert torch.equal(plain.get_state(), without.get_state())
    result = random_crop_flip(images, cut, padding=2, cutout=3, mean=mean)
    assert torch.equal(result[result != 0], crops[result != 0])
    with pytest.raises(ConfigError, match=r"augment\.cutout=3 needs the mean of the pixels"):
        random_crop_flip(images, cut, padding=0, cutout=3)
    with pytest.raises(ConfigError, match="below the image's 8x6 pixels, but got -1"):
        random_crop_flip(images, cut, padding=-1)
