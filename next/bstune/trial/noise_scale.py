"""The gradient noise scale of any loop that accumulates the gradients of micro-batches."""

import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from bstune.core.noise_scale import NoiseScaleEstimate, Terms, estimate_noise_scale, terms_of

# A moving estimate takes so many of the latest measured steps: the noise grows during a training.
WINDOW = 64


class NoiseScale:
    """Measures the gradient noise scale, tr(Sigma)/|G|^2, in a loop of one's own.

    It reads the gradients of the micro-batches that a step accumulates; a loop without these takes
    its batch in two halves on the steps that it measures, such as every hundredth.

    >>> noise = NoiseScale()
    >>> for batch in batches:  # doctest: +SKIP
    ...     optimizer.zero_grad()
    ...     for x, y in micro_batches(batch):
    ...         (loss_of(model(x), y) * len(x) / batch_size).backward()
    ...         noise.add(model.parameters(), len(x))
    ...     noise.step()  # before gradients are clipped
    ...     optimizer.step()
    >>> print(noise.estimate)  # doctest: +SKIP

    The formulas and their source stand in :mod:`bstune.core.noise_scale`.

    Args:
        window: how many measured steps, the latest, count in the estimate.

    Attributes:
        measured: |G|^2 and tr(Sigma) of each measured step; one that is not finite is left out.
    """

    def __init__(self, window: int = WINDOW) -> None:
        self.measured: list[Terms] = []
        self._window = window
        self._begin_step()

    def _begin_step(self) -> None:
        self._examples: list[int] = []
        self._norms: list[Tensor] = []
        # The gradient so far, by the parameter's place.
        self._so_far: dict[int, Tensor] = {}

    @property
    def estimate(self) -> NoiseScaleEstimate:
        """The moving estimate, in examples, with its 90% interval."""
        return estimate_noise_scale(self.measured[-self._window :])

    def add(self, parameters: Iterable[nn.Parameter], examples: int) -> None:
        """Read a micro-batch's part of the gradient, after its backward pass.

        Args:
            parameters: of the model, the same ones in the same order each time.
            examples: of the micro-batch, whose mean loss was multiplied by its share of the batch.
        """
        parts = []
        for place, parameter in enumerate(parameters):
            if parameter.grad is not None:
                # In half precision the squares would overflow.
                so_far = parameter.grad.detach().to(torch.float32, copy=True)
                parts.append(so_far - self._so_far.get(place, 0.0))
                self._so_far[place] = so_far
        self._examples.append(examples)
        self._norms.append(_norm(parts))

    def step(self, scale: float = 1.0) -> None:
        """Take in the step, after its last backward pass and before gradients are clipped.

        Args:
            scale: the factor by which a gradient scaler has multiplied the losses.

        Raises:
            InputError: for a step of one micro-batch.
        """
        sizes = self._examples
        norms = [float(norm) / scale for norm in self._norms]
        of_batch = float(_norm(list(self._so_far.values()))) / scale
        self._begin_step()
        # What was read of a micro-batch is its share of the batch times its mean gradient.
        squares = [(norm * sum(sizes) / size) ** 2 for norm, size in zip(norms, sizes, strict=True)]
        terms = terms_of(squares, sizes, of_batch**2)
        if all(math.isfinite(term) for term in terms):
            self.measured.append(terms)


def _norm(tensors: list[Tensor]) -> Tensor:
    """The Euclidean norm of all values of some tensors, without waiting for their device."""
    norms = [torch.linalg.vector_norm(tensor, dtype=torch.float64) for tensor in tensors]
    return torch.linalg.vector_norm(torch.stack(norms)) if norms else torch.zeros(())
