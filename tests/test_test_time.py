import pytest
import torch
from torch import nn

from bstune.core.errors import ConfigError
from bstune.workloads.layers import mirrored, mirrored_and_shifted


class Noting:
    """A model whose logits are pixels of the image; it notes what it is given."""

    def __init__(self):
        self.seen = []

    def __call__(self, images):
        self.seen.append(images)
        return images[:, 0, 1].exp()  # of a row that differs in all views; not linear in the weights of the views


def images(n=4, height=5, width=6):
    return torch.randn(n, 2, height, width, generator=torch.Generator().manual_seed(0))


def test_mirrored_is_the_mean_over_image_and_mirror_image():
    model, x = Noting(), images()
    row = x[:, 0, 1]
    torch.testing.assert_close(mirrored(model, x), (row.exp() + row.flip(1).exp()) / 2)
    assert len(model.seen) == 2


def moved(x, by):
    """Return images moved down and to the right by ``by`` pixels; what comes in is the reflection."""
    height, width = x.shape[2:]

    def index(size):
        places = [abs(place - by) for place in range(size)]
        return [place if place < size else 2 * (size - 1) - place for place in places]

    return x[:, :, index(height)][:, :, :, index(width)]


def test_mirrored_and_shifted_is_the_weighted_mean_over_six_views():
    model, x = Noting(), images()
    views = [(0.25, x), (0.25, x.flip(-1))]
    for by in (1, -1):
        views += [(0.125, moved(x, by)), (0.125, moved(x, by).flip(-1))]
    assert sum(weight for weight, _ in views) == 1.0
    expected = sum(weight * view[:, 0, 1].exp() for weight, view in views)
    torch.testing.assert_close(mirrored_and_shifted(model, x), expected)
    seen = {tuple(view.flatten().tolist()) for view in model.seen}
    assert seen == {tuple(view.flatten().tolist()) for _, view in views}


@pytest.mark.parametrize("views", [mirrored, mirrored_and_shifted])
def test_a_model_that_does_not_care_gives_what_it_gives(views):
    def model(images):
        return images.amax((2, 3)) + 1.0

    x = images()
    x[:, :, 2, 2] = 9.0  # inside, so that no shift loses it
    torch.testing.assert_close(views(model, x), model(x))


@pytest.mark.parametrize("views", [mirrored, mirrored_and_shifted])
def test_inputs_that_are_no_images_are_refused(views):
    text = r"test_time mirrors images \(N, C, H, W\), but got the shape \(7, 5\): set workload\.module\.test_time=null"
    with pytest.raises(ConfigError, match=text):
        views(nn.Linear(5, 3), torch.zeros(7, 5))
