"""Predictions from several views of an image, at evaluation alone."""

from collections.abc import Callable

from torch import Tensor
from torch.nn import functional

from bstune.errors import ConfigError

Model = Callable[[Tensor], Tensor]


def mirrored(model: Model, images: Tensor) -> Tensor:
    """Return the mean of the logits of each image and of its mirror image (Page, part 8: 26 s).

    Args:
        model: maps images to logits (N, classes); it is called once a view.
        images: (N, C, H, W).

    Raises:
        ConfigError: for inputs that are no images.
    """
    if images.dim() != 4:
        raise ConfigError(
            f"workload.module.test_time mirrors images (N, C, H, W), but got the shape {tuple(images.shape)}: "
            "set workload.module.test_time=null"
        )
    return 0.5 * model(images) + 0.5 * model(images.flip(-1))


def mirrored_and_shifted(model: Model, images: Tensor) -> Tensor:
    """Return the weighted mean of the logits of six views of each image (cifar10-airbench, its level 2).

    These are the image, the image moved by one pixel down and to the right, and moved up and to the left, where what
    comes in is the reflection of what is there; each is taken with its mirror image. The image itself counts for half,
    the moved ones for a quarter each.

    Args:
        model: maps images to logits (N, classes); it is called once a view.
        images: (N, C, H, W), with at least two pixels a side.

    Raises:
        ConfigError: for inputs that are no images.
    """
    still = mirrored(model, images)
    height, width = images.shape[2:]
    padded = functional.pad(images, (1, 1, 1, 1), mode="reflect")
    down_right = mirrored(model, padded[:, :, :height, :width])
    up_left = mirrored(model, padded[:, :, 2:, 2:])
    return 0.5 * still + 0.25 * down_right + 0.25 * up_left
