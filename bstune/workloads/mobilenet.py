"""MobileNetV3 (large) of Howard et al. 2019 (arXiv 1905.02244), as torchvision builds it, for images of any size."""

import torch
from torch import nn

from bstune.errors import ConfigError


def mobilenet_v3_large(classes: int, image_size: int) -> nn.Sequential:
    """Return the network with random weights: images (N, 3, H, W), resized to squares, to logits (N, classes).

    The resize is on the device, in the model, so that a step holds it: data sets are kept at their own size.

    Args:
        classes: number of classes.
        image_size: height and width in pixels, after a bilinear resize.

    Raises:
        ConfigError: without torchvision, which bstune does not need otherwise, or with one that is not the torch's.
    """
    try:
        from torchvision import models
    except (ImportError, RuntimeError) as error:  # the latter: its operators are built for another torch
        raise ConfigError(
            f"MobileNetV3 comes from torchvision, which cannot be imported ({error}): pip install 'bstune[vision]', "
            f"from the place that torch {torch.__version__} is from"
        ) from error
    resize = nn.Upsample(size=(image_size, image_size), mode="bilinear", align_corners=False)
    return nn.Sequential(resize, models.mobilenet_v3_large(weights=None, num_classes=classes))
