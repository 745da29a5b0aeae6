"""Speed records on CIFAR-10 as a loop of their own: airbench94, its Muon variant and a successor.

Jordan 2024, 94% on CIFAR-10 in 3.29 Seconds on a Single GPU, arXiv 2404.00498, with
https://github.com/KellerJordan/cifar10-airbench, and what
https://github.com/hiverge/cifar10-speedrun (2025) describes; their numbers are in conf/sweep/.
"""

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice, pairwise
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from matplotlib.figure import Figure
from pandas import DataFrame
from pydantic import NonNegativeInt, PositiveFloat, PositiveInt
from torch import Tensor, nn
from torch.backends import cudnn
from torch.nn import functional
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import LambdaLR

from bstune.config import options_from_python
from bstune.core.clock import TrainingClock
from bstune.core.errors import InputError
from bstune.core.records import Spec, Target
from bstune.own_loop import Study
from bstune.recipe.recipe import resolve_device
from bstune.sweeps.rows import Unit, measure_units
from bstune.trial.trial import Trial, run_trial
from bstune.workloads.batches import WholeBatches
from bstune.workloads.datasets import load_cifar10
from bstune.workloads.images import Split, on_device, random_crop_flip, split_images
from bstune.workloads.resnet9 import BatchNorm, whitening_filters

if not hasattr(torch.optim, "Muon"):
    raise InputError(f"these sweeps need torch 2.9, but got {torch.__version__}: update torch")
TARGET = Target("val/error", 0.06, "min")
# Lookahead (Zhang et al. 2019, arXiv 1907.08610), as airbench94 has it.
LOOKAHEAD_EVERY = 5
LOOKAHEAD_DECAY = 0.95**5
# Of the sources' head.
INPUTS = 256
# Images that are evaluated at a time.
EVALUATED = 500


@dataclass(frozen=True)
class MuonRecipe:
    """Muon (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon), for the filters.

    Args:
        momentum: Nesterov's.
        coefficients: of the three steps that orthogonalise.
        interval: steps between normalisations of the weights, at the start ...
        interval_growth: ... and how many more there are at the end.
        decay: as the recipe's, but times the rate.
    """

    momentum: float
    coefficients: tuple[float, float, float]
    interval: PositiveInt
    interval_growth: NonNegativeInt
    decay: float


@dataclass(frozen=True)
class Recipe:
    """How a record trains.

    Args:
        batch_size, lr, epochs: that are published; an epoch has n // B batches.
        rates: at that ``lr``, for a loss that is summed over the batch: of filters, of the head, of
            norms' biases and of the first layer's bias.
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
    rates: tuple[PositiveFloat, PositiveFloat, PositiveFloat, PositiveFloat]
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
        Accuracy in percent, and seconds as the sources count them: of whitening, training and one
        evaluation.
    """
    name = resolve_device(device)
    if name == "cuda" and not torch.cuda.is_available():
        raise InputError("device=cuda needs a GPU: on a CPU give device=cpu width=8")
    images = load_cifar10(options_from_python().data_root)
    split = split_images(images, "test", 0, 0, train_examples)
    tested = WholeBatches(*(part[:test_examples] for part in split.validation.tensors))
    data = on_device(replace(split, validation=tested), torch.device(name))
    n = len(data.train)
    steps = math.ceil(recipe.epochs * (n // recipe.batch_size))
    if not steps:
        raise InputError(f"train_examples must be at least {recipe.batch_size}, but got {n}")

    def loop(trial: Trial) -> float:
        """Train a trial, of the study or the published one; its seconds."""
        torch.manual_seed(trial.seed)
        return train(trial, recipe, CifarNet(width, recipe), data)

    def published(seed: int, steps: int) -> dict[str, Any]:
        """Train the published pair on a seed: a row."""
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
        seconds = loop(trial)
        record = trial.record()
        accuracy = 100.0 * (1.0 - record.finite_values[-1])
        return {"steps": steps, "seconds": seconds, "accuracy": accuracy, "errors": record.history}

    # The first steps load libraries and try kernels.
    published(seed=0, steps=2)
    settings = {"device": name, "width": width, "n": n, "recipe": str(recipe)}
    settings["tested"] = len(tested)
    units: list[Unit] = [{"seed": seed} for seed in range(runs)]
    rows = measure_units(
        output / "rows.jsonl", settings, units, lambda unit: published(int(unit["seed"]), steps)
    )
    if trials:
        study = Study(
            output.name,
            target=TARGET,
            baseline=(recipe.batch_size, recipe.lr),
            batch_size=(recipe.batch_size // 8, min(4 * recipe.batch_size, n)),
            # Half of the seeds miss the target in the published length.
            budget={"steps": 1, "examples": round(1.5 * recipe.epochs * n)},
            trials=trials,
            scaling="none",
            schedule_ends=True,
            device=name,
            output=str(output / "study"),
            storage=f"sqlite:///{output}/study.db",
        )
        for trial in study:
            run_trial(loop, trial)
        print(study.result)
    figure = Figure(layout="constrained")
    axes = figure.subplots()
    for errors in rows.errors:
        axes.semilogy(*np.transpose(errors))
    axes.set(xlabel="steps", ylabel="error on the test images")
    numbers = rows[["steps", "seconds", "accuracy"]].describe()
    return numbers.loc[["count", "mean", "std"]].reset_index(names=""), figure


@cudnn.flags(enabled=True, benchmark=True)
def train(trial: Trial, recipe: Recipe, network: "CifarNet", data: Split) -> float:
    """Train with the trial's batch size and rate, and report the error after each epoch.

    In half precision on CUDA, but for the norms; else in float32.

    Args:
        trial: its schedule ends at ``total_steps``.
        recipe: all else.
        network: that is trained.
        data: on the device that trains.

    Returns:
        The seconds of whitening, training and the last evaluation.
    """
    is_cuda = data.scale.is_cuda
    clock = TrainingClock(synchronize=torch.cuda.synchronize if is_cuda else lambda: None)
    network.to(data.scale.device, torch.half if is_cuda else None)
    for layer in network.modules():
        if isinstance(layer, BatchNorm):
            layer.float()
    epoch = len(data.train) // trial.batch_size
    bias_steps = math.ceil(recipe.bias_epochs * epoch)
    evaluation = 0.0
    clock.start()
    first = normalised(data.train.tensors[0][: recipe.whitening_images], data)
    filters = whitening_filters(first, kernel_size=2, eps=5e-4)
    network.whitening.weight.data.copy_(torch.cat([filters, -filters]))
    stepped = optimizers(network, trial, recipe, bias_steps)
    # Running statistics, too.
    fast = [one for one in network.state_dict().values() if one.is_floating_point()]
    slow = [weight.clone() for weight in fast]
    criterion = nn.CrossEntropyLoss(label_smoothing=recipe.label_smoothing, reduction="sum")
    stream = islice(batches(data, trial.batch_size, recipe), trial.max_steps)
    for step, (images, labels) in enumerate(stream, 1):
        network.whitening.bias.requires_grad_(step <= bias_steps)  # type: ignore[union-attr]
        criterion(network(images), labels).backward()
        for one in stepped:
            one.step()
        network.zero_grad()
        if recipe.lookahead:
            is_due = step % LOOKAHEAD_EVERY == 0
            if is_due:
                kept = LOOKAHEAD_DECAY * (step / trial.total_steps) ** 3
                torch._foreach_lerp_(slow, fast, 1.0 - kept)
            if is_due or step == trial.total_steps:
                torch._foreach_copy_(fast, slow)
        if step % epoch and step < trial.max_steps:
            continue
        clock.stop(step - trial.steps)
        began = time.perf_counter()
        error = error_on_test(network, data, recipe)
        evaluation = time.perf_counter() - began
        if not trial.report(step, error, clock.seconds):
            break
        clock.start()
    return clock.seconds + evaluation


class CifarNet(nn.Module):
    """The network of all three sources: normalised images (N, 3, 32, 32) to logits (N, 10).

    Whitening, whose filters :func:`train` sets, and an activation; thrice convolution, pooling,
    norm, activation, convolution, norm and activation; pooling and a linear layer.

    Args:
        width: channels of the first group; the others have four times as many.
        recipe: of the layers.
    """

    def __init__(self, width: int, recipe: Recipe) -> None:
        super().__init__()
        self.whitening = nn.Conv2d(3, 24, 2)
        self.whitening.weight.requires_grad_(False)
        layers: list[nn.Module] = [nn.GELU()]
        for inputs, outputs in pairwise((24, width, 4 * width, 4 * width)):
            for channels, pooling in ((inputs, [nn.MaxPool2d(2)]), (outputs, [])):
                norm = BatchNorm(outputs, None, 1.0, momentum=1.0 - recipe.norm_memory, eps=1e-12)
                activation = getattr(nn, recipe.activation)()
                layers += [Filters(channels, outputs), *pooling, norm, activation]
        head = nn.Linear(4 * width, 10, bias=False)
        self.layers = nn.Sequential(*layers, nn.MaxPool2d(3), nn.Flatten(), head)
        self.logit_scale = recipe.logit_scale or 1.0 / head.in_features
        if recipe.logit_scale is None:
            head.weight.data /= head.weight.data.std()
        if not recipe.bias_fades:
            nn.init.zeros_(self.whitening.bias)  # type: ignore[arg-type]

    def forward(self, images: Tensor) -> Tensor:
        """Compute logits."""
        whitened = self.whitening(images.to(self.whitening.weight))
        logits: Tensor = self.layers(whitened) * self.logit_scale
        return logits


class Filters(nn.Linear):
    """Filters of 3 x 3 pixels, the rows of a matrix, as torch's Muon takes them.

    The first ones start as the identity, one a channel.
    """

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(9 * inputs, outputs, bias=False)
        nn.init.dirac_(self.filters.data[:inputs])

    @property
    def filters(self) -> Tensor:
        """The matrix as filters (outputs, inputs, 3, 3), in the memory format channels_last."""
        return self.weight.view(self.out_features, 3, 3, -1).permute(0, 3, 1, 2)

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 (torch's name)
        """Compute images (N, outputs, H, W)."""
        return functional.conv2d(input, self.filters, padding=1)


def optimizers(network: CifarNet, trial: Trial, recipe: Recipe, bias_steps: int) -> list[Any]:
    """SGD, Muon for the filters where the recipe has it, and their schedules: all to be stepped."""
    bias, *others, head = (weight for weight in network.parameters() if weight.requires_grad)
    filters = [weight for weight in others if weight.ndim == 2]
    norms = [weight for weight in others if weight.ndim == 1]
    rates = list(recipe.rates)
    if recipe.logit_scale is None:
        # Else a step of a narrow network's logits would be as much larger, and training diverge.
        rates[1] *= head.shape[1] / INPUTS
    groups = []
    for weights, rate in zip((filters, [head], norms, [bias]), rates, strict=True):
        lr = rate * trial.lr / recipe.lr
        # An optimizer multiplies rate and decay: all weights shrink alike.
        decay = recipe.decay * trial.batch_size / lr
        groups.append({"params": weights, "lr": lr, "weight_decay": decay})
    made: list[Optimizer] = []
    if recipe.muon is not None:
        of_muon = {"lr": trial.lr, "weight_decay": recipe.muon.decay * trial.batch_size}
        made.append(NormalisingMuon(filters, recipe.muon, trial.total_steps, **of_muon))
        del groups[0]
    made.append(SGD(groups, momentum=recipe.momentum, nesterov=True))
    knots = [int(knot * trial.total_steps) for knot in recipe.knots]

    def factor(step: int, fades: bool) -> float:
        if fades and recipe.bias_fades:
            return 1.0 - step / bias_steps
        return float(np.interp(step, knots, recipe.factors))

    schedules = []
    for one in made:
        of_bias = [group["params"][0] is bias for group in one.param_groups]
        schedules.append(LambdaLR(one, [partial(factor, fades=fades) for fades in of_bias]))
    return [*made, *schedules]


class NormalisingMuon(torch.optim.Muon):
    """Muon that brings matrices to the norm sqrt(rows) before some of its steps.

    Args:
        matrices: with no more rows than columns.
        recipe: of the momentum, the iteration and the normalisations.
        total_steps: of the training.
        options: others of torch's Muon.
    """

    def __init__(
        self, matrices: list[nn.Parameter], recipe: MuonRecipe, total_steps: int, **options: Any
    ) -> None:
        of_iteration: Any = {"ns_coefficients": recipe.coefficients, "ns_steps": 3}
        super().__init__(matrices, momentum=recipe.momentum, **of_iteration, **options)
        self._recipe = recipe
        self._total_steps = total_steps
        self._steps = self._normalised = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Take a step."""
        self._steps += 1
        growth = int(self._recipe.interval_growth * self._steps / self._total_steps)
        if self._steps - self._normalised >= self._recipe.interval + growth:
            self._normalised = self._steps
            for matrix in self.param_groups[0]["params"]:
                matrix *= math.sqrt(len(matrix)) / matrix.norm()
        return super().step(closure)  # type: ignore[no-untyped-call]


def normalised(images: Tensor, data: Split) -> Tensor:
    """Normalise uint8 images, as float32 in the memory format channels_last."""
    pixels = images.to(memory_format=torch.channels_last)
    return pixels * data.scale + data.shift


def batches(data: Split, batch_size: int, recipe: Recipe) -> Iterator[tuple[Tensor, Tensor]]:
    """Endless epochs of n // B batches of normalised images and labels.

    An image is moved by up to two pixels, and mirrored in every other epoch (Jordan 2024); then its
    brightness and its contrast are changed.
    """
    images, labels = data.train.tensors
    n, device = len(labels), labels.device
    is_mirrored = torch.rand(n, 1, device=device) < 0.5
    while True:
        for rows in torch.split(torch.randperm(n, device=device), batch_size)[: n // batch_size]:
            batch = normalised(images[rows], data)
            batch = random_crop_flip(batch, padding=2, mirror=is_mirrored[rows])
            shift, stretch = 2.0 * torch.rand(2, batch_size, 1, 1, 1, device=device) - 1.0
            batch = (batch + recipe.brightness * shift) * (1.0 + recipe.contrast * stretch)
            yield batch, labels[rows]
        is_mirrored = ~is_mirrored


@torch.no_grad()
def error_on_test(network: CifarNet, data: Split, recipe: Recipe) -> float:
    """Compute the error on the test images.

    The logits of the unsure ones are a weighted sum over views: of the image, of the image moved by
    a pixel down and to the right, and up and to the left, and of the mirror images of these.
    """

    def logits_of_views(images: Tensor) -> Tensor:
        padded = functional.pad(images, [1] * 4, mode="reflect")
        of_views = (images, padded[..., :-2, :-2], padded[..., 2:, 2:])
        unmoved, *moved = (network(view) + network(view.flip(-1)) for view in of_views)
        return torch.lerp((moved[0] + moved[1]) / 2, unmoved, recipe.unmoved)

    network.eval()
    test_images, labels = data.validation.tensors
    images = normalised(test_images, data)
    first = logits_of_views if recipe.unsure == 1.0 else network
    logits = torch.cat([first(part) for part in torch.split(images, EVALUATED)])
    if recipe.unsure < 1.0:
        confidence = logits.float().softmax(dim=1).amax(dim=1)
        least_sure = confidence.topk(int(recipe.unsure * len(images)), largest=False).indices
        parts = torch.split(images[least_sure], EVALUATED)
        logits[least_sure] = torch.cat([logits_of_views(part) for part in parts])
    network.train()
    return float((logits.argmax(dim=1) != labels).sum()) / len(labels)
