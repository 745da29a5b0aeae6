from functools import partial

import pytest
import torch
from builders import options_and_recipe
from lightning.pytorch import Callback
from toolbox import TRAINER, make_spec
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader

from bstune.core.errors import ConfigError
from bstune.trial.loop import make_trainer
from bstune.trial.workload import build_module
from bstune.workloads.classifier import Classifier
from bstune.workloads.layers import BatchNorm


def classifier(model=None, **options):
    values = {"loss": nn.CrossEntropyLoss(), "optimizer": torch.optim.SGD, "lr": 0.3} | options
    return Classifier(model or nn.Identity(), **values)


def labelled(n, wrong, classes=10):
    """Logits (n, classes) that name the label in all but the first ``wrong`` of shuffled examples."""
    generator = torch.Generator().manual_seed(n + wrong)
    labels = torch.randint(classes, (n,), generator=generator)
    named = labels.clone()
    named[:wrong] = (named[:wrong] + 1) % classes
    order = torch.randperm(n, generator=generator)
    return nn.functional.one_hot(named, classes).float()[order], labels[order]


@pytest.mark.parametrize("batch_size", [7, 500, 5000])
@pytest.mark.parametrize(
    ("n", "wrong"), [(5000, 500), (5000, 0), (5000, 5000), (4999, 1), (333, 33)]
)
def test_errors_are_exact_counts(n, wrong, batch_size):
    logits, labels = labelled(n, wrong)
    module = classifier()
    logged = {}
    module.log_dict = logged.update
    # Each evaluation starts from nothing.
    for _ in range(2):
        for number, batch in enumerate(
            zip(logits.split(batch_size), labels.split(batch_size), strict=True)
        ):
            module.validation_step(batch, number)
        module.on_validation_epoch_end()
        assert torch.equal(logged["val/error"], torch.tensor(wrong, dtype=torch.float32) / n)
        torch.testing.assert_close(logged["val/loss"], nn.functional.cross_entropy(logits, labels))


@pytest.mark.parametrize("stage", ["val", "test"])
def test_views_and_smoothed_labels_are_in_what_is_evaluated(stage):
    def reversed_views(model, images):
        return model(images).flip(1)

    smoothed = nn.CrossEntropyLoss(label_smoothing=0.2)
    module = classifier(test_time=reversed_views, loss=smoothed)
    logits, labels = labelled(20, 5)
    torch.testing.assert_close(module.training_step((logits, labels), 0), smoothed(logits, labels))
    batches = DataLoader(list(zip(logits.split(8), labels.split(8), strict=True)), batch_size=None)
    trainer = make_trainer(TRAINER)
    (metrics,) = (trainer.validate if stage == "val" else trainer.test)(
        module, batches, verbose=False
    )
    error = (logits.flip(1).argmax(1) != labels).float().mean().item()
    assert error > 0.5
    loss = smoothed(logits.flip(1), labels).item()
    assert metrics == pytest.approx({f"{stage}/error": error, f"{stage}/loss": loss})


def test_optimizer_schedule_and_call_backs():
    average = Callback()
    other = Callback()
    module = classifier(nn.Linear(4, 3), optimizer=partial(torch.optim.SGD, momentum=0.9))
    (group,) = module.configure_optimizers().param_groups
    assert (group["lr"], group["momentum"], len(group["params"])) == (0.3, 0.9, 2)
    assert module.configure_callbacks() == []

    schedule = partial(LambdaLR, lr_lambda=lambda step: 0.5)
    module = classifier(nn.Linear(4, 3), schedule=schedule, average=average, callbacks=[other])
    configured = module.configure_optimizers()
    assert configured["lr_scheduler"]["interval"] == "step"
    assert configured["lr_scheduler"]["scheduler"].optimizer is configured["optimizer"]
    # The schedule's first factor is a half.
    assert configured["optimizer"].param_groups[0]["lr"] == 0.15
    assert module.configure_callbacks() == [other, average]


@pytest.mark.parametrize(
    ("workload", "option", "text"),
    [
        (
            "resnet_cifar",
            "workload.module.optimizer.momentum=0.0",
            "Nesterov momentum requires a momentum and zero",
        ),
        ("fashion_mlp", "workload.module.optimizer.momentum=-1", "Invalid momentum value: -1"),
        (
            "airfoil",
            "+workload.module.optimizer.momentun=0.1",
            "unexpected keyword argument 'momentun'",
        ),
    ],
)
def test_an_option_that_the_optimizer_refuses_is_a_plain_line(workload, option, text):
    built_by = options_and_recipe(f"+workload={workload}", option, "device=cpu")
    module = build_module(*built_by, make_spec(64))
    message = rf"workload\.module: \w+ cannot build its optimizers .*: .*{text}.* \(\w+Error"
    with pytest.raises(ConfigError, match=message):
        module.configure_optimizers()


def test_parts_that_start_from_images_are_handed_them():
    parts = [nn.Identity(), nn.Identity()]
    given = []
    for part, part.images in zip(parts, (3, 7), strict=True):
        part.initialise_from = given.append
    module = classifier(nn.Sequential(parts[0], nn.Sequential(nn.Linear(4, 3), parts[1])))
    assert (module.initial_images, classifier(nn.Linear(4, 3)).initial_images) == (7, 0)
    module.initialise_from("images")
    assert given == ["images", "images"]


def test_channels_last_changes_only_the_format():
    def convolutional(**options):
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Conv2d(3, 4, 3), BatchNorm(4, ghost_size=4), nn.Flatten(), nn.Linear(4 * 36, 5)
        )
        return classifier(model, **options)

    batch = torch.randn(8, 3, 8, 8), torch.arange(8) % 5
    plain = convolutional()
    last = convolutional(channels_last=True)
    assert last.model[0].weight.is_contiguous(memory_format=torch.channels_last)
    seen = []
    last.model[1].register_forward_hook(
        lambda layer, inputs, output: seen.extend([inputs[0], output])
    )
    losses = [module.training_step(batch, 0) for module in (plain, last)]
    assert all(images.is_contiguous(memory_format=torch.channels_last) for images in seen)
    torch.testing.assert_close(*losses)
    modules = (plain, last)
    gradients = [
        torch.autograd.grad(loss, list(m.parameters()))
        for loss, m in zip(losses, modules, strict=True)
    ]
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-5)
    assert list(plain.state_dict()) == list(last.state_dict())
    with pytest.raises(
        ConfigError, match="channels_last is for convolutions, but the model, Linear, has none"
    ):
        classifier(nn.Linear(4, 3), channels_last=True)
