"""Speed records on CIFAR-10 as a loop of their own: airbench94, its Muon variant and a successor.

Jordan 2024, 94% on CIFAR-10 in 3.29 Seconds on a Single GPU, arXiv 2404.00498, with
https://github.com/KellerJordan/cifar10-airbench, and what
https://github.com/hiverge/cifar10-speedrun (2025) describes; their numbers are in conf/sweep/.
"""

import itertools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from matplotlib.figure import Figure
from pandas import DataFrame
from pydantic import NonNegativeInt, PositiveFloat, PositiveInt
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import SGD, Optimizer

from bstune.config import options_from_python
from bstune.core.clock import TrainingClock
from bstune.core.errors import InputError
from bstune.core.records import Spec, Target
from bstune.own_loop import Study
from bstune.recipe.recipe import resolve_device
from bstune.sweeps.rows import Unit, measured
from bstune.trial.trial import Trial, run_trial
from bstune.workloads.batches import WholeBatches
from bstune.workloads.datasets import load_cifar10
from bstune.workloads.images import Split, on_device, random_crop_flip, split_images
from bstune.workloads.resnet9 import BatchNorm, whitening_filters

GOAL = 0.06
# Lookahead (Zhang et al. 2019, arXiv 1907.08610), as airbench94 has it.
LOOKAHEAD_EVERY = 5
LOOKAHEAD_DECAY = 0.95**5
# Images that are evaluated at a time.
EVALUATED = 500


@dataclass(frozen=True)
class MuonRecipe:
    """Muon, which trains the filters.

    Args:
        momentum: Nesterov's.
        coefficients: of the iteration that orthogonalises.
        interval: steps between normalisations of the weights, at the start ...
        interval_growth: ... and how many more there are at the end.
        decays: filters shrink in a step, too: by their rate times the share of other weights.
    """

    momentum: float
    coefficients: tuple[float, float, float]
    interval: PositiveInt
    interval_growth: NonNegativeInt
    decays: bool


@dataclass(frozen=True)
class Recipe:
    """How a record trains.

    Args:
        batch_size, lr, epochs: that are published; an epoch has n // B batches.
        rates: of kinds of weights at that ``lr``, for a loss that is summed over the batch.
        decay: share that a weight loses in a step at the peak, by example of the batch.
        momentum: Nesterov's, of SGD.
        knots, factors: of the schedule, joined by straight lines; knots are shares of the steps.
        muon: trains the filters; None: SGD does.
        lookahead: pull the weights back to a slow copy.
        activation: all but the first, which is GELU.
        logit_scale: of the output; None: one over the inputs of the head, whose weights start with
            a standard deviation of 1.
        norm_memory: weight of the old running statistics in the new ones.
        whitening_images: of which the first layer's filters are made.
        bias_epochs: for which the first layer's bias learns.
        bias_fades: its rate falls to 0 over them; else the bias starts at 0, on the schedule.
        label_smoothing: of the loss.
        brightness, contrast: the most that is added to an image, and by which it is scaled.
        unsure: share of the test images, those of least confidence, that get six views.
        unmoved: weight of the two of these views that are not moved by a pixel.
    """

    batch_size: PositiveInt
    lr: PositiveFloat
    epochs: PositiveFloat
    rates: dict[Literal["filters", "head", "biases", "whitening"], PositiveFloat]
    decay: float
    momentum: float
    knots: list[float]
    factors: list[float]
    muon: MuonRecipe | None
    lookahead: bool
    activation: Literal["GELU", "SiLU"]
    logit_scale: PositiveFloat | None
    norm_memory: float
    whitening_images: PositiveInt
    bias_epochs: PositiveFloat
    bias_fades: bool
    label_smoothing: float
    brightness: float
    contrast: float
    unsure: float
    unmoved: float


def run(
    output: Path,
    *,
    recipe: Recipe,
    runs: PositiveInt,
    trials: NonNegativeInt,
    device: Literal["auto", "cpu", "cuda"],
    width: PositiveInt,
    train_examples: PositiveInt | None,
    test_examples: PositiveInt | None,
) -> tuple[DataFrame, Figure]:
    """Train the published batch size and rate on several seeds; then search around them.

    Args:
        output: folder of the rows and of the study.
        recipe: of the record.
        runs: seeds.
        trials: of the study; 0: there is none.
        device: auto: CUDA where there is a GPU.
        width: channels of the first group of layers, 64 in all sources.
        train_examples, test_examples: of the data set; None: all.

    Returns:
        Accuracy, and seconds as the sources count them: of whitening, training and one evaluation.
    """
    device_name = resolve_device(device)
    if device_name == "cuda" and not torch.cuda.is_available():
        raise InputError("device=cuda needs a GPU: on a CPU give device=cpu width=8")
    split = split_images(
        load_cifar10(options_from_python().data_root), "test", 0, 0, train_examples
    )
    tested = WholeBatches(*(part[:test_examples] for part in split.validation.tensors))
    data = on_device(replace(split, validation=tested), torch.device(device_name))
    n = len(data.train)
    steps = math.ceil(recipe.epochs * (n // recipe.batch_size))
    if not steps:
        raise InputError(f"train_examples must be at least {recipe.batch_size}, but got {n}")
    loop = partial(train, recipe=recipe, width=width, data=data)

    def published(seed: int, steps: int) -> dict[str, Any]:
        spec = Spec(
            number=0,
            place="published",
            role="baseline",
            batch_size=recipe.batch_size,
            lr=recipe.lr,
            seed=seed,
            max_steps=steps,
        )
        trial = Trial(spec, Target("val/error", None, "min"), total_steps=steps)
        return {"steps": steps, "seconds": loop(trial), "errors": trial.history}

    with torch.backends.cudnn.flags(enabled=True, benchmark=True):
        # The first steps load libraries and try kernels.
        published(seed=0, steps=2)
        settings = {"device": device_name, "width": width, "n": n, "recipe": str(recipe)}
        units: list[Unit] = [{"seed": seed} for seed in range(runs)]
        rows = measured(
            output / "rows.jsonl", settings, units, lambda unit: published(int(unit["seed"]), steps)
        )
        if trials:
            print(_searched(output, recipe, trials, n, loop))
    accuracies = 100.0 * (1.0 - np.array([errors[-1][1] for errors in rows.errors]))
    table = {
        "runs": runs,
        "steps": steps,
        "seconds": rows.seconds.median(),
        "accuracy": accuracies.mean(),
        "sd": accuracies.std(),
    }
    return DataFrame([table]), _figure(rows)


def _searched(
    output: Path, recipe: Recipe, trials: int, n: int, loop: Callable[[Trial], Any]
) -> object:
    """The answer of a study whose baseline is the published pair."""
    study = Study(
        output.name,
        target=Target("val/error", GOAL, "min"),
        baseline=(recipe.batch_size, recipe.lr),
        batch_size=(recipe.batch_size // 8, min(4 * recipe.batch_size, n)),
        # The published length has its mean over seeds at the goal: half of them miss it.
        budget={"steps": 1, "examples": round(1.5 * recipe.epochs * n)},
        trials=trials,
        scaling="none",
        schedule_ends=True,
        output=str(output / "study"),
        storage=f"sqlite:///{output}/study.db",
    )
    for trial in study:
        run_trial(loop, trial)
    return study.result


def _figure(rows: DataFrame) -> Figure:
    """Draw each run's error over its steps."""
    figure = Figure(layout="constrained")
    axes = figure.subplots()
    for errors in rows.errors:
        axes.plot(*np.transpose(errors), marker=".")
    axes.axhline(GOAL, color="grey", linestyle="--")
    axes.set_yscale("log")
    axes.set_xlabel("steps")
    axes.set_ylabel("error on the test images")
    return figure


def train(trial: Trial, recipe: Recipe, width: int, data: Split) -> float:
    """Train with the trial's batch size, rate and seed, and report the error after each epoch.

    In half precision on CUDA, else in float32.

    Args:
        trial: its schedule ends at ``total_steps``.
        recipe: all else.
        width: channels of the first group of layers.
        data: on the device that trains.

    Returns:
        The seconds of whitening, training and the last evaluation.
    """
    is_cuda = data.scale.is_cuda
    clock = TrainingClock(synchronize=torch.cuda.synchronize if is_cuda else lambda: None)
    torch.manual_seed(trial.seed)
    network = CifarNet(width, recipe).placed(data.scale.device)
    dtype = network.head.weight.dtype
    epoch = len(data.train) // trial.batch_size
    evaluation = 0.0
    clock.start()
    first = data.train.tensors[0][: recipe.whitening_images]
    network.whiten(normalised(first, data, torch.float32))
    training = Training(network, trial, recipe, epoch)
    stream = batches(data, trial.batch_size, recipe, dtype)
    for images, labels in itertools.islice(stream, trial.max_steps):
        training.step(images, labels)
        if training.steps % epoch and training.steps < trial.max_steps:
            continue
        clock.stop(training.steps - trial.steps)
        began = time.perf_counter()
        error = evaluated(network, data, recipe)
        evaluation = time.perf_counter() - began
        if not trial.report(training.steps, error, clock.seconds):
            break
        clock.start()
    return clock.seconds + evaluation


class CifarNet(nn.Module):
    """The network of all three sources: normalised images (N, 3, 32, 32) to logits (N, 10).

    Whitening and an activation; thrice convolution, pooling, norm, activation, convolution, norm
    and activation; pooling and a linear layer. The first filters of a convolution start as the
    identity.

    Args:
        width: channels of the first group; the others have four times as many.
        recipe: of the layers.
    """

    def __init__(self, width: int, recipe: Recipe) -> None:
        super().__init__()
        activation: Callable[[], nn.Module] = getattr(nn, recipe.activation)
        norm = partial(
            BatchNorm, ghost_size=None, scale=1.0, momentum=1.0 - recipe.norm_memory, eps=1e-12
        )
        self.whitening = nn.Conv2d(3, 24, 2)
        self.whitening.weight.requires_grad_(False)
        layers: list[nn.Module] = [self.whitening, nn.GELU()]
        for inputs, outputs in ((24, width), (width, 4 * width), (4 * width, 4 * width)):
            first = nn.Conv2d(inputs, outputs, 3, padding=1, bias=False)
            second = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
            for convolution in (first, second):
                nn.init.dirac_(convolution.weight.data[: convolution.in_channels])
            layers += [first, nn.MaxPool2d(2), norm(outputs), activation()]
            layers += [second, norm(outputs), activation()]
        self.features = nn.Sequential(*layers, nn.MaxPool2d(3), nn.Flatten())
        self.head = nn.Linear(4 * width, 10, bias=False)
        self.logit_scale = recipe.logit_scale or 1.0 / (4 * width)
        if recipe.logit_scale is None:
            self.head.weight.data /= self.head.weight.data.std()
        if not recipe.bias_fades:
            nn.init.zeros_(self.whitening.bias)  # type: ignore[arg-type]

    def forward(self, images: Tensor) -> Tensor:
        """Compute logits."""
        logits: Tensor = self.head(self.features(images)) * self.logit_scale
        return logits

    def placed(self, device: torch.device) -> "CifarNet":
        """Move it to a device, on CUDA in half precision but for the norms."""
        self.to(device, memory_format=torch.channels_last)  # type: ignore[call-overload]
        if device.type == "cuda":
            self.half()
            for layer in self.modules():
                if isinstance(layer, BatchNorm):
                    layer.float()
        return self

    @torch.no_grad()
    def whiten(self, images: Tensor) -> None:
        """Set the first filters from normalised images, and their negations."""
        filters = whitening_filters(images, kernel_size=2, eps=5e-4)
        self.whitening.weight.copy_(torch.cat([filters, -filters]))

    def state(self) -> list[Tensor]:
        """The weights and the running statistics."""
        return [one for one in self.state_dict().values() if one.is_floating_point()]


class Training:
    """The steps of a network.

    Args:
        network: that is trained.
        trial, recipe: as of :func:`train`.
        epoch: its steps.
    """

    def __init__(self, network: CifarNet, trial: Trial, recipe: Recipe, epoch: int) -> None:
        self.steps = 0
        self._network = network
        self._recipe = recipe
        self._total_steps = trial.total_steps
        self._bias_steps = math.ceil(recipe.bias_epochs * epoch)
        self._optimizers = optimizers(network, trial, recipe)
        self._slow = [weight.clone() for weight in network.state()]

    def step(self, images: Tensor, labels: Tensor) -> None:
        """Step by normalised images (B, 3, 32, 32) and their labels (B,)."""
        network, recipe = self._network, self._recipe
        network.whitening.bias.requires_grad_(self.steps < self._bias_steps)  # type: ignore[union-attr]
        loss = functional.cross_entropy(
            network(images), labels, label_smoothing=recipe.label_smoothing, reduction="sum"
        )
        loss.backward()  # type: ignore[no-untyped-call]
        knots = [int(knot * self._total_steps) for knot in recipe.knots]
        factor = float(np.interp(self.steps, knots, recipe.factors))
        fading = 1.0 - self.steps / self._bias_steps
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                fades = recipe.bias_fades and group["kind"] == "whitening"
                group["lr"] = group["initial_lr"] * (fading if fades else factor)
            optimizer.step()
            optimizer.zero_grad()
        self.steps += 1
        if recipe.lookahead:
            self._look_ahead()

    def _look_ahead(self) -> None:
        """Pull the weights to their slow copy, more strongly the later it is."""
        weights = self._network.state()
        is_due = self.steps % LOOKAHEAD_EVERY == 0
        if is_due:
            kept = LOOKAHEAD_DECAY * (self.steps / self._total_steps) ** 3
            torch._foreach_lerp_(self._slow, weights, 1.0 - kept)
        if is_due or self.steps == self._total_steps:
            torch._foreach_copy_(weights, self._slow)


def optimizers(network: CifarNet, trial: Trial, recipe: Recipe) -> list[Optimizer]:
    """SGD, and Muon for the filters where the recipe has it; ``initial_lr`` is that of the peak."""
    kinds = {
        "filters": [one for one in network.parameters() if one.ndim == 4 and one.requires_grad],
        "head": [network.head.weight],
        "biases": [layer.bias for layer in network.modules() if isinstance(layer, BatchNorm)],
        "whitening": [network.whitening.bias],
    }
    # An optimizer multiplies rate and decay: all weights shrink alike.
    shrink = recipe.decay * trial.batch_size
    groups: list[dict[str, Any]] = []
    for kind, rate in recipe.rates.items():
        lr = rate * trial.lr / recipe.lr
        decay = shrink / lr
        groups.append(
            {"kind": kind, "params": kinds[kind], "initial_lr": lr, "weight_decay": decay}
        )
    of_muon: list[Optimizer] = []
    if recipe.muon is not None:
        of_filters = [groups.pop(0)]
        of_muon = [Muon(of_filters, recipe.muon, trial.total_steps, shrink * recipe.muon.decays)]
    return [SGD(groups, momentum=recipe.momentum, nesterov=True), *of_muon]


class Muon(Optimizer):
    """Steps filters by their orthogonalised momentum.

    (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon.) m <- momentum m + g, w <- w -
    lr O(g + momentum m), where O brings the singular values of a filter bank, a matrix with a row
    for each filter, near 1. Some steps first bring w to the norm sqrt(rows).

    Args:
        groups: one, of filters.
        recipe: of the momentum, the iteration and the normalisations.
        total_steps: of the training.
        shrink: a step takes lr x shrink of each weight.
    """

    def __init__(
        self, groups: list[dict[str, Any]], recipe: MuonRecipe, total_steps: int, shrink: float
    ) -> None:
        super().__init__(groups, {})
        self._recipe = recipe
        self._total_steps = total_steps
        self._shrink = shrink
        self._steps = self._normalised = 0
        self._momenta = [torch.zeros_like(weight) for weight in groups[0]["params"]]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """Step all filters."""
        group, recipe = self.param_groups[0], self._recipe
        weights, lr = group["params"], group["lr"]
        self._steps += 1
        gradients = [weight.grad for weight in weights]
        torch._foreach_mul_(self._momenta, recipe.momentum)
        torch._foreach_add_(self._momenta, gradients)
        updates = torch._foreach_add(gradients, self._momenta, alpha=recipe.momentum)
        growth = int(recipe.interval_growth * self._steps / self._total_steps)
        if self._steps - self._normalised >= recipe.interval + growth:
            self._normalised = self._steps
            for weight in weights:
                weight.mul_(math.sqrt(len(weight)) / weight.norm())
        torch._foreach_sub_(weights, orthogonalised(updates, recipe.coefficients), alpha=lr)
        torch._foreach_mul_(weights, 1.0 - lr * self._shrink)


def orthogonalised(filters: Sequence[Tensor], coefficients: Sequence[float]) -> list[Tensor]:
    """Bring the singular values of filter banks, (rows, ...), near 1, by three Newton-Schulz steps.

    X <- a X + (b X X' + c (X X')^2) X from X = G/|G|, in bfloat16 on CUDA. All are padded to one
    shape, so that one product serves all; it has no more rows than columns.
    """
    matrices = [one.flatten(1) for one in filters]
    rows, columns = (max(sizes) for sizes in zip(*(one.shape for one in matrices), strict=True))
    x = torch.stack(
        [functional.pad(one, (0, columns - one.shape[1], 0, rows - len(one))) for one in matrices]
    )
    x = x.bfloat16() if x.is_cuda else x
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    a, b, c = coefficients
    for _ in range(3):
        square = x @ x.mT
        x = a * x + (b * square + c * square @ square) @ x
    cut = [one[: len(like), : like.shape[1]] for one, like in zip(x, matrices, strict=True)]
    return [one.reshape(like.shape).to(like) for one, like in zip(cut, filters, strict=True)]


def normalised(images: Tensor, data: Split, dtype: torch.dtype) -> Tensor:
    """Normalise uint8 images."""
    return (images * data.scale + data.shift).to(dtype, memory_format=torch.channels_last)


def batches(
    data: Split, batch_size: int, recipe: Recipe, dtype: torch.dtype
) -> Iterator[tuple[Tensor, Tensor]]:
    """Endless epochs of n // B batches of normalised images and labels.

    An image is moved by up to two pixels, and mirrored in every other epoch (Jordan 2024); then its
    brightness and its contrast are changed.
    """
    images, labels = data.train.tensors
    n, device = len(labels), labels.device
    is_mirrored = torch.rand(n, 1, device=device) < 0.5
    while True:
        for rows in torch.randperm(n, device=device).split(batch_size)[: n // batch_size]:
            batch = normalised(images[rows], data, dtype)
            batch = random_crop_flip(batch, padding=2, mirror=is_mirrored[rows])
            shift, stretch = 2.0 * torch.rand(2, batch_size, 1, 1, 1, device=device) - 1.0
            batch = (batch + recipe.brightness * shift) * (1.0 + recipe.contrast * stretch)
            yield batch.to(dtype), labels[rows]
        is_mirrored = ~is_mirrored


@torch.no_grad()
def evaluated(network: CifarNet, data: Split, recipe: Recipe) -> float:
    """Compute the error on the test images.

    The logits of the unsure ones are a mean over views: of the image, of the image moved by a pixel
    down and to the right, and up and to the left, and of the mirror images of these.
    """

    def moved(images: Tensor) -> Tensor:
        padded = functional.pad(images, [1] * 4, mode="reflect")
        views = [padded[..., :-2, :-2], padded[..., 2:, 2:]]
        mirrored = [view.flip(-1) for view in views]
        return torch.stack([network(view) for view in views + mirrored]).mean(dim=0)

    def each(call: Callable[[Tensor], Tensor], images: Tensor) -> Tensor:
        return torch.cat([call(part) for part in images.split(EVALUATED)])

    network.eval()
    test_images, labels = data.validation.tensors
    images = normalised(test_images, data, network.head.weight.dtype)
    logits = each(network, images)
    confidence = logits.float().softmax(dim=1).amax(dim=1)
    unsure = confidence.topk(int(recipe.unsure * len(images)), largest=False).indices
    few = images[unsure]
    unmoved = 0.5 * logits[unsure] + 0.5 * each(lambda part: network(part.flip(-1)), few)
    logits[unsure] = recipe.unmoved * unmoved + (1.0 - recipe.unmoved) * each(moved, few)
    network.train()
    return int((logits.argmax(dim=1) != labels).sum()) / len(labels)
