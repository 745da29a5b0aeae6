"""The gradient noise scale of any loop, from the gradients of parts of its batches."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from bstune.core.errors import InputError
from bstune.core.noise_scale import NoiseScaleEstimate, Terms, estimate_noise_scale, terms_of

# The estimate takes so many of the latest measured steps: the noise grows during a training.
WINDOW = 64


class NoiseScale:
    """Measures the gradient noise scale, tr(Sigma)/|G|^2, in a loop of one's own.

    On some steps, such as every hundredth, give it the gradients of two halves of the batch:

    >>> noise = NoiseScale()
    >>> for step, (x, y) in enumerate(batches):  # doctest: +SKIP
    ...     if step % 100 == 0:
    ...         losses = [loss_of(model(a), b) for a, b in zip(x.chunk(2), y.chunk(2))]
    ...         parameters = list(model.parameters())
    ...         noise.add(
    ...             [torch.autograd.grad(loss, parameters) for loss in losses],
    ...             examples=[len(half) for half in x.chunk(2)],
    ...         )
    >>> print(noise.estimate)  # doctest: +SKIP

    The formulas and their source stand in :mod:`bstune.core.noise_scale`.

    Attributes:
        measured: |G|^2 and tr(Sigma) of each step; a step where they are not finite is left out.
    """

    def __init__(self) -> None:
        self.measured: list[Terms] = []

    @property
    def estimate(self) -> NoiseScaleEstimate | None:
        """Of the latest 64 steps, in examples; None while |G|^2 may be 0."""
        return estimate_noise_scale(self.measured[-WINDOW:])

    def add(self, gradients: Sequence[Sequence[Tensor | None]], examples: Sequence[int]) -> None:
        """Take in a step.

        Args:
            gradients: of each part of the batch: of its mean loss, by each parameter.
            examples: of each part.

        Raises:
            InputError: for fewer than two parts, or another number of ``examples``.
        """
        if len(gradients) != len(examples):
            raise InputError(
                f"examples must have one number for each of the {len(gradients)} parts whose "
                f"gradients are given, but got {len(examples)}"
            )
        whole: dict[int, Tensor] = {}
        squares = []
        for part, count in zip(gradients, examples, strict=True):
            square = torch.zeros((), dtype=torch.float64)
            for place, gradient in enumerate(part):
                if gradient is not None:
                    # In half precision the squares would overflow.
                    wide = gradient.detach().double()
                    square = square.to(wide.device) + wide.square().sum()
                    whole[place] = whole.get(place, 0.0) + wide * (count / sum(examples))
            squares.append(float(square))
        of_batch = sum(float(one.square().sum()) for one in whole.values())
        terms = terms_of(squares, examples, of_batch)
        if all(math.isfinite(term) for term in terms):
            self.measured.append(terms)
