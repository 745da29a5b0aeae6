"""Losses that torch lacks, of (logits (N, classes), labels (N,)), averaged over examples."""

import torch
from torch import Tensor, nn
from torch.nn import functional


class SquaredError(nn.Module):
    """Half of the squared distance between logits and the label's unit vector.

    It is the mean over examples of |z - e_y|^2 / 2. (Hui and Belkin 2020, arXiv 2006.07322, without
    their scale of the vector, 1 here.) It has no smoothing.
    """

    def forward(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Compute the mean loss, a tensor without dimensions."""
        targets = functional.one_hot(labels, logits.shape[1]).to(logits.dtype)
        return torch.sum((logits - targets) ** 2) / (2 * len(labels))
