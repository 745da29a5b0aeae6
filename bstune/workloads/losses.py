"""A loss that torch lacks."""

from torch import Tensor
from torch.nn import functional


def squared_error(logits: Tensor, labels: Tensor) -> Tensor:
    """Half of the squared distance between logits and the label's unit vector, mean over examples.

    It is that of Hui and Belkin 2020 (arXiv 2006.07322), without their scale of the vector.

    Args:
        logits: (N, classes).
        labels: (N,), whole numbers.
    """
    targets = functional.one_hot(labels, logits.shape[1]).to(logits.dtype)
    return functional.mse_loss(logits, targets, reduction="sum") / (2 * len(labels))
