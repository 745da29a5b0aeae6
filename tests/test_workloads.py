import sys
from functools import partial
from types import ModuleType

import pytest
import torch
from lightning.pytorch import Callback
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader

from bstune.core.errors import ConfigError
from bstune.core.records import TrialSpec
from bstune.study.prepare import compose_checked
from bstune.trial.loop import make_trainer
from bstune.trial.workload import build_module
from bstune.workloads.classifier import Classifier
from bstune.workloads.layers import BatchNorm
from bstune.workloads.models import mlp, mobilenet_v3_large, simple_cnn

TRAINER = {"accelerator": "cpu", "devices": 1}


# Models


def test_simple_cnn_is_that_of_shallue_et_al(parameters, shapes):
    model = simple_cnn(10)
    # Two 5x5 convolutions, 1 to 32 to 64 channels, a hidden layer of 1024 units, 10 classes; each with biases.
    first, second = 32 * (5 * 5 * 1 + 1), 64 * (5 * 5 * 32 + 1)
    assert parameters(model) == first + second + 1024 * (7 * 7 * 64 + 1) + 10 * (1024 + 1) == 3_274_634
    convolution, pooled = [(32, 28, 28)] * 2, [(32, 14, 14)]
    assert shapes(model, torch.zeros(3, 1, 28, 28)) == [
        *convolution,
        *pooled,
        *[(64, 14, 14)] * 2,
        (64, 7, 7),
        (3136,),
        *[(1024,)] * 2,
        (10,),
    ]


@pytest.mark.parametrize(
    ("hidden", "count"),
    [([], 64 * 10 + 10), ([128], 64 * 128 + 128 + 128 * 10 + 10), ([5, 7], 65 * 5 + 6 * 7 + 8 * 10)],
)
def test_mlp(hidden, count, parameters):
    model = mlp(64, hidden, 10)
    assert parameters(model) == count
    assert model(torch.zeros(3, 1, 8, 8)).shape == (3, 10)
    kinds = [type(layer) for layer in model]
    assert kinds == [nn.Flatten, *[nn.Linear, nn.ReLU] * len(hidden), nn.Linear]


def torchvision_of(monkeypatch, models):
    """Put a module in place of torchvision's models."""
    package = ModuleType("torchvision")
    package.models = models
    monkeypatch.setitem(sys.modules, "torchvision", package)


def stub_models(asked):
    """Return what stands in for torchvision's models: a small net that notes how it was asked for."""

    def build(**options):
        asked.append(options)
        return nn.Sequential(nn.Conv2d(3, 2, 3, stride=2), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2, 10))

    models = ModuleType("torchvision.models")
    models.mobilenet_v3_large = build
    return models


def test_mobilenet_sees_resized_images(monkeypatch, shapes):
    asked = []
    torchvision_of(monkeypatch, stub_models(asked))
    model = mobilenet_v3_large(10, 224)
    assert asked == [{"weights": None, "num_classes": 10}]
    assert shapes(model, torch.zeros(2, 3, 32, 32)) == [(3, 224, 224), (10,)]
    constant = torch.arange(3.0).view(1, 3, 1, 1).expand(1, 3, 32, 32)
    torch.testing.assert_close(model[0](constant), constant[..., :1, :1].expand(1, 3, 224, 224))


def test_mobilenet_trains_as_its_workload_says(monkeypatch):
    torchvision_of(monkeypatch, stub_models([]))
    module = build_module(compose_checked(["+workload=mobilenet_cifar"]), TrialSpec(0, 0, 4, 5e-4, None, 0))
    images, labels = torch.randn(4, 3, 32, 32), torch.tensor([0, 9, 4, 4])
    assert module(images).shape == (4, 10)
    assert module.training_step((images, labels), 0).requires_grad
    optimizer = module.configure_optimizers()
    assert (type(optimizer), optimizer.defaults["lr"]) == (torch.optim.Adam, 5e-4)


class OfAnotherTorch(ModuleType):
    def __getattr__(self, name):
        raise RuntimeError("operator torchvision::nms does not exist")


@pytest.mark.parametrize(
    ("broken", "why"),
    [(None, "import of torchvision halted"), (OfAnotherTorch("torchvision"), "operator torchvision::nms does not")],
)
def test_mobilenet_without_torchvision_says_what_to_install(broken, why, monkeypatch):
    monkeypatch.setitem(sys.modules, "torchvision", broken)
    text = rf"torchvision, which cannot be imported \({why}.*\): pip install 'bstune\[vision\]', from .* torch 2\."
    with pytest.raises(ConfigError, match=text):
        mobilenet_v3_large(10, 224)
    with pytest.raises(ConfigError, match=text):
        build_module(compose_checked(["+workload=mobilenet_cifar"]), TrialSpec(0, 0, 4, 5e-4, None, 0))


# Classifier


def classifier(model=None, **options):
    values = {"loss": nn.CrossEntropyLoss(), "optimizer": torch.optim.SGD, "lr": 0.3} | options
    return Classifier(model or nn.Identity(), **values)


def labelled(n, wrong, classes=10):
    """Return logits (n, classes) that name the label in all but the first ``wrong`` of shuffled examples."""
    generator = torch.Generator().manual_seed(n + wrong)
    labels = torch.randint(classes, (n,), generator=generator)
    named = labels.clone()
    named[:wrong] = (named[:wrong] + 1) % classes
    order = torch.randperm(n, generator=generator)
    return torch.nn.functional.one_hot(named, classes).float()[order], labels[order]


@pytest.mark.parametrize("batch_size", [7, 500, 777, 5000])
@pytest.mark.parametrize(("n", "wrong"), [(5000, 500), (5000, 0), (5000, 5000), (4999, 1), (333, 33)])
@pytest.mark.parametrize("stage", ["val", "test"])
def test_errors_are_exact_counts(stage, n, wrong, batch_size):
    logits, labels = labelled(n, wrong)
    batches = list(zip(logits.split(batch_size), labels.split(batch_size), strict=True))
    module = classifier()
    add, end = (
        (module.validation_step, module.on_validation_epoch_end)
        if stage == "val"
        else (module.test_step, module.on_test_epoch_end)
    )
    logged = {}
    module.log_dict = logged.update
    for number, batch in enumerate(batches):
        add(batch, number)
    end()
    assert set(logged) == {f"{stage}/error", f"{stage}/loss"}
    assert torch.equal(logged[f"{stage}/error"], torch.tensor(wrong, dtype=torch.float32) / n)
    torch.testing.assert_close(logged[f"{stage}/loss"], nn.functional.cross_entropy(logits, labels))


def test_a_mean_of_means_would_be_another_number():
    """What the counts are for: batches of unequal size."""
    logits, labels = labelled(10, 3)
    means = [(a.argmax(1) != b).float().mean() for a, b in zip(logits.split(4), labels.split(4), strict=True)]
    assert torch.stack(means).mean().item() != pytest.approx(0.3, abs=1e-3)


@pytest.mark.parametrize("stage", ["val", "test"])
def test_each_evaluation_by_a_trainer_starts_from_nothing(stage):
    module = classifier()
    trainer = make_trainer(TRAINER)
    evaluate = trainer.validate if stage == "val" else trainer.test
    for wrong in (5, 2, 5):
        logits, labels = labelled(20, wrong)
        batches = list(zip(logits.split(8), labels.split(8), strict=True))
        metrics = evaluate(module, DataLoader(batches, batch_size=None), verbose=False)[0]
        assert set(metrics) == {f"{stage}/error", f"{stage}/loss"}
        assert metrics[f"{stage}/error"] == pytest.approx(wrong / 20)


def test_training_loss_is_the_mean_over_examples():
    model = nn.Linear(4, 3)
    images, labels = torch.randn(6, 4), torch.tensor([0, 1, 2, 0, 1, 2])
    loss = classifier(model).training_step((images, labels), 0)
    torch.testing.assert_close(loss, nn.functional.cross_entropy(model(images), labels))
    assert loss.requires_grad


def test_optimizer_and_schedule():
    module = classifier(nn.Linear(4, 3), optimizer=partial(torch.optim.SGD, momentum=0.9))
    optimizer = module.configure_optimizers()
    assert (optimizer.defaults["lr"], optimizer.defaults["momentum"]) == (0.3, 0.9)
    assert len(optimizer.param_groups[0]["params"]) == 2

    module = classifier(nn.Linear(4, 3), schedule=partial(LambdaLR, lr_lambda=lambda step: 0.5))
    configured = module.configure_optimizers()
    assert configured["lr_scheduler"]["interval"] == "step"
    assert configured["lr_scheduler"]["scheduler"].optimizer is configured["optimizer"]
    assert configured["optimizer"].param_groups[0]["lr"] == 0.15


def test_averaging_is_a_call_back():
    average = Callback()
    assert classifier(average=average).configure_callbacks() == [average]
    assert classifier().configure_callbacks() == []


class Wanting(nn.Module):
    """Notes the images that it is given."""

    def __init__(self, images):
        super().__init__()
        self.images, self.given = images, None

    def initialise_from(self, images):
        self.given = images


def test_parts_that_start_from_images_are_handed_them():
    parts = [Wanting(3), Wanting(7)]
    module = classifier(nn.Sequential(parts[0], nn.Sequential(nn.Linear(4, 3), parts[1])))
    assert module.initial_images == 7
    images = torch.randn(7, 4)
    module.initialise_from(images)
    assert all(part.given is images for part in parts)
    assert classifier(nn.Linear(4, 3)).initial_images == 0


def convolutional(**options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), BatchNorm(4, ghost_size=4), nn.Flatten(), nn.Linear(4 * 36, 5))
    return classifier(model, **options)


def test_channels_last_changes_the_format_alone():
    batch = torch.randn(8, 3, 8, 8), torch.arange(8) % 5
    plain, last = convolutional(), convolutional(channels_last=True)
    assert last.model[0].weight.is_contiguous(memory_format=torch.channels_last)
    seen = []
    last.model[1].register_forward_hook(lambda layer, inputs, output: seen.extend([inputs[0], output]))
    losses = [module.training_step(batch, 0) for module in (plain, last)]
    assert all(images.is_contiguous(memory_format=torch.channels_last) for images in seen)
    torch.testing.assert_close(*losses)
    for loss in losses:
        loss.backward()
    for mine, its in zip(plain.parameters(), last.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, its.grad, rtol=1e-4, atol=1e-5)
    assert list(plain.state_dict()) == list(last.state_dict())


def test_channels_last_needs_convolutions():
    with pytest.raises(ConfigError, match="channels_last is for convolutions, but the model, Linear, has none"):
        classifier(nn.Linear(4, 3), channels_last=True)


@pytest.mark.parametrize("stage", ["val", "test"])
def test_views_at_test_time_are_for_evaluation_alone(stage):
    def reversed_views(model, images):
        return model(images).flip(1)

    module = classifier(test_time=reversed_views)
    logits, labels = labelled(20, 5)
    torch.testing.assert_close(module.training_step((logits, labels), 0), nn.functional.cross_entropy(logits, labels))
    trainer = make_trainer(TRAINER)
    evaluate = trainer.validate if stage == "val" else trainer.test
    metrics = evaluate(module, DataLoader([(logits, labels)], batch_size=None), verbose=False)[0]
    assert metrics[f"{stage}/error"] == (logits.flip(1).argmax(1) != labels).float().mean()
    assert metrics[f"{stage}/loss"] == pytest.approx(nn.functional.cross_entropy(logits.flip(1), labels).item())
    assert metrics[f"{stage}/error"] > 0.5


def test_smoothed_labels_are_in_the_loss_that_is_evaluated():
    smoothed = nn.CrossEntropyLoss(label_smoothing=0.2)
    logits, labels = labelled(20, 5)
    metrics = make_trainer(TRAINER).validate(
        classifier(loss=smoothed), DataLoader([(logits, labels)], batch_size=None), verbose=False
    )[0]
    assert metrics["val/loss"] == pytest.approx(smoothed(logits, labels).item())
    assert metrics["val/loss"] != pytest.approx(nn.functional.cross_entropy(logits, labels).item())
