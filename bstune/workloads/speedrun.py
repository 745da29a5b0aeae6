"""The parts that hiverge's cifar10-speedrun (2025) adds to airbench94_muon.

It reports 94.01% of CIFAR-10 in 2.015 s on an A100. This is written from its description
(https://github.com/hiverge/cifar10-speedrun and hiverge.ai/blog/cifar-speedrun): images that vary
in brightness and contrast, weights that are normalised every few steps rather than at each, and
views of an image at evaluation only where the network is unsure. A value out of its range is a
ConfigError.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from bstune.core.errors import ConfigError
from bstune.workloads.images import random_crop_flip
from bstune.workloads.layers import Model, mirrored
from bstune.workloads.optim import EPS, Muon

# Steps between normalisations at the start, and how many more there are at the end.
FIRST_INTERVAL = 2
INTERVAL_GROWTH = 15


def random_crop_flip_jitter(
    images: Tensor,
    generator: torch.Generator,
    padding: int,
    brightness: Sequence[float],
    contrast: float,
    mirror: Tensor | None = None,
    mean: Tensor | None = None,
) -> Tensor:
    """Crop and mirror images, and vary the brightness and contrast of each, as float32.

    Images are cropped by :func:`random_crop_flip`. A pixel x becomes mean + (1 + contrast v)(x -
    mean + brightness u), where u and v are drawn for each image from -1 to 1: in the source, which
    draws them after it has normalised, brightness is a share of a channel's deviation. Like the
    source, this keeps values below black and over white. Nothing waits for an accelerator.

    Args:
        images: (n, channels, height, width).
        generator: all draws come from it; on the images' device.
        padding: of the crop, in pixels.
        brightness: the largest shift of each channel, in units of the images' own values, at least
            0.
        contrast: from 0 to below 1.
        mirror: as :func:`random_crop_flip` takes it.
        mean: of the pixels per channel, (1, channels, 1, 1);
            :class:`~bstune.trial.batches.image_batches.TrainBatches` passes it.

    Raises:
        ConfigError: for a value out of its range, or without a mean.
    """
    if len(brightness) != images.shape[1] or min(brightness) < 0.0:
        raise ConfigError(
            f"augment.brightness must be {images.shape[1]} numbers of at least 0, one for each "
            f"channel, but got {list(brightness)}"
        )
    if not 0.0 <= contrast < 1.0:
        raise ConfigError(f"augment.contrast must lie in [0, 1), but got {contrast}")
    if mean is None:
        raise ConfigError(
            "augment.contrast needs the mean of the pixels: take batches from TrainBatches"
        )
    cropped = random_crop_flip(images, generator, padding, mirror=mirror)
    u, v = 2.0 * torch.rand(2, len(images), generator=generator, device=images.device) - 1.0
    # Each channel's size is a number, not a tensor, which would have to be copied to an
    # accelerator.
    shift = torch.stack([size * u for size in brightness], dim=1)[:, :, None, None]
    stretch = (1.0 + contrast * v)[:, None, None, None]
    varied: Tensor = (cropped - mean + shift) * stretch + mean
    return varied


def six_views_where_unsure(model: Model, images: Tensor, share: float) -> Tensor:
    """Compute the logits (N, classes) of images (N, C, H, W), from six views of the unsure ones.

    Unsure are the int(share N) images whose largest probability is least. Each gets the mean of the
    logits of six views: the image, the image moved by one pixel down and to the right, the image
    moved up and to the left, and the mirror images of these three. The source takes the unsure
    images of the whole test set; here they are those of each batch.

    Raises:
        ConfigError: for a share outside of [0, 1].
    """
    if not 0.0 <= share <= 1.0:
        raise ConfigError(f"workload.module.test_time.share must lie in [0, 1], but got {share}")
    logits = model(images)
    confidence = logits.float().softmax(dim=1).amax(dim=1)
    unsure = confidence.topk(int(share * len(images)), largest=False).indices
    if not len(unsure):
        return logits
    few = images.index_select(0, unsure)
    padded = functional.pad(few, (1, 1, 1, 1), mode="reflect")
    views = (few, padded[:, :, :-2, :-2], padded[:, :, 2:, 2:])
    averaged = torch.stack([mirrored(model, view) for view in views]).mean(dim=0)
    return logits.index_copy(0, unsure, averaged)


class SeldomNormalisingMuon(Muon):
    """Muon that scales weights to the norm sqrt(rows) every few steps, in place of each step.

    With p the share of the steps that are taken, this one included, weights are normalised before a
    step if at least 2 + floor(15 p) steps have passed since they were; after every step they shrink
    by lr x weight_decay, which keeps their norms in between. Products of matrices are batched by
    shape, where the source pads them all to one. Which steps normalise lies in a table on the
    device, so that every step launches the same kernels, and can be captured.

    Args:
        params: parameters, or groups of them with options of their own, as those of :class:`Muon`.
        lr: learning rate.
        total_steps: the trial's own steps, over 0.
        options: the others of :class:`Muon`, but for ``normalise_weights``.

    Attributes:
        due: whether each step normalises, by its number; (total_steps + 1,), bool.
    """

    def __init__(self, params: Any, lr: float, *, total_steps: int, **options: Any) -> None:
        if total_steps < 1:
            raise ConfigError(
                f"muon that normalises at intervals needs at least one step, but got {total_steps}"
            )
        super().__init__(params, lr, normalise_weights=False, **options)
        # With this option torch loads the count of steps onto the parameter's device.
        self.defaults["capturable"] = True
        for group in self.param_groups:
            group["capturable"] = True
        self.due = torch.tensor(_normalising(total_steps))

    def _step_orthogonal(
        self, group: dict[str, Any], trained: list[Tensor], gradients: list[Tensor]
    ) -> None:
        """Step a group of matrices as Muon does, and normalise its weights before it if due."""
        device = trained[0].device
        # The group's one count of steps stands with its first weights.
        state = self.state[trained[0]]
        self.due = self.due.to(device)
        if "step" not in state:
            state["step"] = torch.zeros((), device=device)
        state["step"] += 1.0
        # Whether this step, whose number counts from 1, normalises: a tensor, as all of it stays on
        # the device. Steps past the planned ones do as the last one.
        number = state["step"].long().clamp(max=len(self.due) - 1).view(1)
        is_due = self.due.index_select(0, number)
        factors = list[Tensor]()
        for weight, norm in zip(trained, _norms(trained), strict=True):
            factors.append(math.sqrt(len(weight)) / norm)
        # The factor is 1 where no normalisation is due: every step launches the same kernels.
        factors_if_due = torch.where(is_due, torch.stack(factors), 1.0)
        torch._foreach_mul_(trained, list(factors_if_due.unbind()))
        # The weights decay after the step here, where Muon's decay before it.
        super()._step_orthogonal(group | {"weight_decay": 0.0}, trained, gradients)
        torch._foreach_mul_(trained, 1.0 - group["lr"] * group["weight_decay"])


def _norms(weights: list[Tensor]) -> tuple[Tensor, ...]:
    """Compute the norm of each weight tensor, at least EPS."""
    norms = torch._foreach_norm(weights)
    torch._foreach_clamp_min_(norms, EPS)
    return norms


def _normalising(total_steps: int) -> list[bool]:
    """Tell for each step, by its number from 0 on, whether it normalises the weights.

    It does once 2 + floor(15 p) steps have passed since the last one that did, with p the share of
    the steps that are taken, this one included. Steps count from 1: number 0 is none.
    """
    due = [False]
    last_normalised = 0
    for step in range(1, total_steps + 1):
        interval = FIRST_INTERVAL + int(INTERVAL_GROWTH * step / total_steps)
        due.append(step - last_normalised >= interval)
        if due[-1]:
            last_normalised = step
    return due
