"""Batches of images: to the bit those of a plain loop, whatever they are cut into or made together with."""

from dataclasses import replace
from functools import partial
from itertools import islice

import pytest
import torch
from learners import Operators

from bstune.trial.batches.image_batches import EvalBatches, Normalisation, TrainBatches
from bstune.trial.batches.index_stream import endless_indices
from bstune.trial.batches.micro_batches import micro_batch_sizes_of
from bstune.trial.devices.randomness import seeded_generators
from bstune.workloads.images import random_crop_flip

IMAGES = torch.randint(
    0, 256, (20, 3, 8, 6), generator=torch.Generator().manual_seed(1), dtype=torch.uint8
)


LABELS = torch.arange(20)


SCALE = torch.linspace(0.01, 0.03, 3).view(1, 3, 1, 1)


NORMALISE = Normalisation(SCALE, -100 * SCALE)


crop = partial(random_crop_flip, padding=2)


mirror_only = partial(random_crop_flip, padding=0)


def train_batches(
    batch_size=6, micro_batch_size=None, seed=0, images=IMAGES, normalise=NORMALISE, **options
):
    labels = torch.arange(len(images), device=images.device)
    options |= {"batch_size": batch_size, "micro_batch_size": micro_batch_size, "seed": seed}
    return TrainBatches(images, labels, normalise=normalise, **options)


@pytest.mark.parametrize("batch_size", [1, 6, 20])
def test_train_batches_are_those_of_a_loop_over_examples(batch_size):
    order, _ = seeded_generators(0, "cpu", 2)
    indices = endless_indices(20, batch_size, order)
    for (x, y), index in zip(islice(train_batches(batch_size), 10), indices, strict=False):
        expected = IMAGES[index].double() * SCALE[0] - 100 * SCALE[0]
        assert (x.dtype, y.dtype) == (torch.float32, torch.int64)
        torch.testing.assert_close(x.double(), expected, rtol=0, atol=1e-6)
        assert torch.equal(y, LABELS[index])


@pytest.mark.parametrize(("micro_batch_size", "augment"), [(1, None), (4, crop), (9, None)])
def test_micro_batches_are_the_batch_bit_for_bit(micro_batch_size, augment):
    sizes = micro_batch_sizes_of(9, micro_batch_size)
    stream = iter(train_batches(9, micro_batch_size, augment=augment))
    for x, y in islice(train_batches(9, augment=augment), 8):
        images, labels = zip(*islice(stream, len(sizes)), strict=True)
        assert tuple(map(len, images)) == sizes
        assert torch.equal(torch.cat(images), x)
        assert torch.equal(torch.cat(labels), y)


def test_train_batches_are_a_function_of_the_seed_and_augmentation_keeps_their_order():
    first = list(islice(train_batches(seed=0, augment=crop), 9))
    again = list(islice(train_batches(seed=0, augment=crop), 9))
    other = list(islice(train_batches(seed=1, augment=crop), 9))
    assert equal(again, first)
    for (_, labels), (_, other_labels) in zip(first, other, strict=True):
        assert not torch.equal(labels, other_labels)
    plain = list(islice(train_batches(), 9))
    for (images, labels), (plain_images, plain_labels) in zip(first, plain, strict=True):
        assert torch.equal(labels, plain_labels)
        assert not torch.equal(images, plain_images)


def test_train_batches_have_no_length_and_go_on_at_a_whole_batch():
    batches = train_batches(6, 4)
    with pytest.raises(TypeError, match="len"):
        len(batches)
    reference = labels_of(islice(train_batches(6), 3))
    assert torch.equal(next(iter(batches))[1], reference[0][:4])
    # The rest of the first batch is not repeated.
    assert torch.equal(next(iter(batches))[1], reference[1][:4])
    assert torch.equal(torch.cat(labels_of(islice(batches, 2))), reference[2])


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
@pytest.mark.parametrize(
    ("n", "batch_size", "sizes"), [(20, 8, [8, 8, 4]), (20, 50, [20]), (0, 5, [])]
)
def test_eval_batches_are_all_examples_in_order(n, batch_size, sizes, dtype):
    images = IMAGES[:n].to(dtype)
    batches = EvalBatches(images, LABELS[:n], batch_size=batch_size, normalise=NORMALISE)
    # Normalising leaves the images as they are.
    for _ in range(2):
        pairs = list(batches)
        labels = labels_of(pairs)
        assert list(map(len, labels)) == sizes
        assert len(batches) == len(sizes)
        if n:
            assert torch.equal(torch.cat(labels), LABELS)
            images = [batch_images for batch_images, _ in pairs]
            assert torch.equal(torch.cat(images), NORMALISE(IMAGES))


def test_what_is_cut_out_is_the_mean_and_becomes_zero():
    x, _ = next(iter(train_batches(augment=partial(mirror_only, cutout=6))))
    cut = (x - NORMALISE(NORMALISE.mean.round())).abs().amax(dim=1) < 1e-6
    # 6 x 6 pixels.
    assert cut.flatten(1).sum(1).ge(36).all()
    torch.testing.assert_close(
        NORMALISE(NORMALISE.mean.expand(1, 3, 8, 6)), torch.zeros(1, 3, 8, 6)
    )


def labels_of(batches):
    return [labels for _, labels in batches]


def equal(batches, expected):
    for (images, labels), (same_images, same_labels) in zip(batches, expected, strict=True):
        if not torch.equal(images, same_images) or not torch.equal(labels, same_labels):
            return False
    return True


def own_crop(images, generator):
    """A user's augmentation, which knows one batch."""
    return crop(images, generator)


@pytest.mark.parametrize("examples_at_once", [5, 7, 20, 1000])
@pytest.mark.parametrize(
    ("batch_size", "micro_batch_size", "options"),
    [
        (3, None, {}),
        (3, 2, {"augment": crop}),
        (1, None, {"augment": partial(crop, cutout=3), "alternating_flip": True}),
        (3, None, {"alternating_flip": True}),
        (2, None, {"augment": own_crop}),
        (9, 4, {"augment": crop, "alternating_flip": True}),
    ],
)
def test_batches_made_together_are_those_made_one_by_one(
    batch_size, micro_batch_size, options, examples_at_once
):
    one_by_one = train_batches(batch_size, micro_batch_size, examples_at_once=1, **options)
    together = train_batches(
        batch_size, micro_batch_size, examples_at_once=examples_at_once, **options
    )
    assert equal(islice(together, 70), islice(one_by_one, 70))


@pytest.mark.parametrize("remembers", [False, True])
@pytest.mark.parametrize("done", range(9))
def test_they_are_resumed_within_a_group(done, remembers):
    # Four batches are made at a time.
    fresh = partial(train_batches, 3, 2, augment=crop, alternating_flip=True, examples_at_once=12)
    whole = list(islice(fresh(), 2 * (done + 9)))
    batches = fresh()
    batches.stream.remembers = remembers
    # Lightning fetches one batch ahead.
    list(islice(batches, 2 * done + 1))
    position = batches.stream.position(done)
    assert position == batches.stream.position(done)
    again = fresh()
    again.stream.resume(position)
    assert equal(islice(again, 18), whole[2 * done :])


def test_they_take_the_operators_of_one():
    def taken(batches, count):
        with Operators() as operators:
            list(islice(batches, count))
        return len(operators.names)

    options = {"augment": partial(crop, cutout=3), "alternating_flip": True}
    one = taken(train_batches(2, **options), 1)
    ten = taken(train_batches(2, **options), 10)
    together = taken(train_batches(2, examples_at_once=20, **options), 10)
    assert ten > 9 * one > 270
    # Three draws a batch, and what joins the batches, come on top.
    assert together <= one + 3 * 9 + 4


def test_batches_come_in_the_type_and_the_memory_format_that_are_asked_for():
    half = replace(NORMALISE, dtype=torch.bfloat16, memory_format=torch.channels_last)
    for examples_at_once in (1, 20):
        batches = train_batches(normalise=half, augment=crop, examples_at_once=examples_at_once)
        for (x, y), (same_x, same_y) in zip(
            islice(batches, 9), train_batches(augment=crop), strict=False
        ):
            assert x.dtype == torch.bfloat16
            assert x.is_contiguous(memory_format=torch.channels_last)
            assert torch.equal(x, same_x.bfloat16())
            assert torch.equal(y, same_y)


# A prime, so that no batch size divides it but 1 and itself.
ARROWS = torch.zeros(101, 1, 4, 4, dtype=torch.uint8)


# An image is bright on the left, unless it is mirrored.
ARROWS[:, :, :, 0] = 200


IDENTITY = Normalisation(torch.ones(1, 1, 1, 1), torch.zeros(1, 1, 1, 1))


arrows = partial(train_batches, images=ARROWS, normalise=IDENTITY, alternating_flip=True)


def mirrored(batches, epochs):
    """For each epoch and image, whether it was mirrored: bool, (epochs, 101)."""
    seen = []
    labels = []
    # More batches than enough: each has at least one image.
    for images, batch_labels in islice(batches, epochs * 101):
        seen.append(images[:, 0, 0, 3] > 100)
        labels.append(batch_labels)
    seen = torch.cat(seen)[: epochs * 101].view(epochs, 101)
    labels = torch.cat(labels)[: epochs * 101].view(epochs, 101)
    return seen.gather(1, labels.argsort(dim=1))


@pytest.mark.parametrize(
    ("batch_size", "augment"), [(7, mirror_only), (50, None), (101, mirror_only)]
)
def test_an_image_is_mirrored_every_other_time(batch_size, augment):
    seen = mirrored(arrows(batch_size, augment=augment), 5)
    assert (seen[:-1] ^ seen[1:]).all()
    # These are four standard deviations around a half.
    assert 30 < seen[0].sum() < 71
    squares = mirrored(arrows(batch_size, augment=partial(mirror_only, cutout=1)), 5)
    # The square may hide an arrow's end.
    assert (squares[:-1] ^ squares[1:]).float().mean() > 0.7


def test_which_are_mirrored_first_is_a_function_of_the_seed_and_of_nothing_else():
    first = mirrored(arrows(50, None), 3)
    assert torch.equal(mirrored(arrows(50, 7), 3), first)
    assert torch.equal(mirrored(arrows(8, 3), 3), first)
    assert not torch.equal(first[0], mirrored(arrows(50, seed=1), 3))
    # The order, what is cropped and what is cut out stay those of the same seed without it.
    for (_, y), (_, other) in islice(
        zip(arrows(50), arrows(50, alternating_flip=False), strict=False), 9
    ):
        assert torch.equal(y, other)


def test_without_it_mirroring_is_drawn_anew_each_time():
    seen = mirrored(arrows(50, alternating_flip=False, augment=mirror_only), 4)
    assert 0.3 < (seen[:-1] ^ seen[1:]).float().mean() < 0.7
    assert not mirrored(arrows(50, alternating_flip=False), 4).any()


def test_a_position_that_is_past_is_refused():
    stream = train_batches(augment=crop).stream
    list(islice(stream, 3))
    assert stream.position(3)["batches"] == 3
    with pytest.raises(
        ValueError, match="the position after 2 batches is not remembered: 3 are drawn"
    ):
        stream.position(2)
    with pytest.raises(
        ValueError, match="only a fresh stream can be resumed, but 3 batches are drawn"
    ):
        stream.resume(stream.position(3))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
def test_cuda_batches_never_wait_for_the_device():
    normalise = Normalisation(NORMALISE.scale.cuda(), NORMALISE.shift.cuda())
    options = {"images": IMAGES.cuda(), "normalise": normalise, "alternating_flip": True}
    fresh = partial(train_batches, 8, 3, augment=partial(crop, cutout=3), **options)
    stream = iter(fresh())
    next(stream)
    torch.cuda.set_sync_debug_mode("error")
    try:
        batches = list(islice(stream, 29))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for images, _ in batches:
        assert images.device.type == "cuda"
    assert equal(batches, islice(fresh(), 1, 30))
