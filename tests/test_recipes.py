"""The workloads that follow published recipes for CIFAR-10 have their sources' numbers, which sum the loss."""

import math

import pytest
import torch
from builders import options_and_recipe
from learners import factors
from toolbox import data_root, make_spec
from torch.nn import GELU, SiLU
from torch.utils.flop_counter import FlopCounterMode

from bstune.options import option_at
from bstune.trial.workload import build_module
from bstune.workloads.averaging import ExponentialMovingAverage, Lookahead
from bstune.workloads.optim import Muon
from bstune.workloads.speedrun import SeldomNormalisingMuon

RECIPES = ("resnet_cifar_fast", "airbench_cifar", "airbench_muon", "speedrun_cifar")


def recipe(name, *overrides):
    """The options, and their module at the reference batch size and learning rate."""
    options, built_by = options_and_recipe(f"+workload={name}", "device=cpu", *overrides)
    spec = make_spec(int(options.scaling.batch_size), options.scaling.lr)
    return options, build_module(options, built_by, spec)


def configured(module):
    """The optimizer's groups and the schedule."""
    configured = module.configure_optimizers()
    return configured["optimizer"].param_groups, configured["lr_scheduler"]["scheduler"]


def follow(lr, momentum, weight_decay, scale):
    """A weight over a few steps of torch's Nesterov SGD, its gradients times ``scale``."""
    weight = torch.nn.Parameter(torch.ones(3, dtype=torch.float64))
    optimizer = torch.optim.SGD(
        [weight], lr=lr, momentum=momentum, nesterov=True, weight_decay=weight_decay
    )
    seen = []
    for step in range(6):
        weight.grad = scale * torch.sin(torch.arange(3.0, dtype=torch.float64) + step)
        optimizer.step()
        seen.append(weight.detach().clone())
    return torch.stack(seen)


def assert_steps_as(group, source, batch_size):
    """The group trains on a mean over examples as the source's settings do on their sum."""
    own = follow(group["initial_lr"], group["momentum"], group["weight_decay"], 1.0)
    torch.testing.assert_close(own, follow(**source, scale=float(batch_size)), rtol=2e-5, atol=2e-6)


def test_pages_ladder_with_every_rung_on():
    options, module = recipe("resnet_cifar_fast")
    batch_size = options.workload.reference.batch_size
    assert (batch_size, options.workload.budget.examples) == (512, 13 * 50_000)
    groups, schedule = configured(module)
    biases, others = groups
    # lr_schedule([0, epochs/5, epochs - 2], [0, 1, 0.1], batch_size) divides the rate by the batch
    # size; the weight
    # decay is 5e-4 x batch size, and 64 times the one with a 64th of the other for the biases of
    # norms.
    source = {"lr": 1.0 / 512, "momentum": 0.9, "weight_decay": 5e-4 * 512}
    assert_steps_as(others, source, 512)
    assert_steps_as(biases, source | {"lr": 64.0 / 512, "weight_decay": 5e-4 * 512 / 64}, 512)
    assert len(biases["params"]) == 8
    steps = math.ceil(650_000 / 512)
    for step, (first, second) in enumerate(factors(schedule, steps)):
        # Up over a fifth of the 13 epochs, down to a tenth two epochs before the end.
        epoch = (step + 1) / steps * 13
        expected = epoch / 2.6 if epoch < 2.6 else max(0.1, 1 - 0.9 * (epoch - 2.6) / (11 - 2.6))
        assert first == second == pytest.approx(expected, abs=1e-6)
    (average,) = module.configure_callbacks()
    assert isinstance(average, ExponentialMovingAverage)
    assert average.decay(5) == pytest.approx(0.99**5)
    assert module.loss.label_smoothing == 0.2


def test_airbench():
    options, module = recipe("airbench_cifar", "budget.examples=487_424")
    batch_size = 1024
    steps = math.ceil(9.9 * (50_000 // 1024))
    assert options.workload.reference.batch_size == batch_size
    assert steps == 476 == math.ceil(options.budget.examples / batch_size)
    assert options.workload.budget.examples == 1.5 * 487_424
    groups, schedule = configured(module)
    # The source's own, of its momentum.
    kilostep_scale = 1024 * (1 + 1 / (1 - 0.85))
    lr = 11.5 / kilostep_scale
    decay = 0.0153 * batch_size / kilostep_scale
    norms, whitening, others = groups
    for group, rate, parameters in ((others, lr, 7), (whitening, lr, 1), (norms, 64 * lr, 6)):
        assert_steps_as(
            group, {"lr": rate, "momentum": 0.85, "weight_decay": decay / rate}, batch_size
        )
        assert len(group["params"]) == parameters

    warmup = int(steps * 0.23)
    for step, (first, of_whitening, last) in enumerate(factors(schedule, steps)):
        source = (
            0.2 + 0.8 * step / warmup
            if step < warmup
            else 1 - 0.93 * (step - warmup) / (steps - warmup)
        )
        # The rate is a step ahead of the source's.
        assert first == last == pytest.approx(source, abs=0.012)
        # The bias of the whitening is trained for three epochs of 48 steps.
        assert of_whitening == (first if step < 3 * 48 else 0.0)
    (lookahead,) = module.configure_callbacks()
    assert isinstance(lookahead, Lookahead)
    assert vars(lookahead)["_decay"] == pytest.approx(0.95**5)
    assert vars(lookahead)["_total_steps"] == steps


def test_airbench_with_muon():
    options, module = recipe("airbench_muon", "budget.examples=400_000")
    batch_size = 2000
    steps = 200
    assert options.workload.reference.batch_size == batch_size
    assert math.ceil(options.budget.examples / batch_size) == steps
    assert options.workload.budget.examples == 1.5 * 400_000
    groups, schedule = configured(module)
    assert isinstance(schedule.optimizer, Muon)
    norms, whitening, head, filters = groups
    wd = 2e-6 * batch_size
    for group, rate in ((norms, 0.053), (whitening, 0.053), (head, 0.67)):
        assert_steps_as(
            group, {"lr": rate, "momentum": 0.85, "weight_decay": wd / rate}, batch_size
        )
        assert not group["orthogonalise"]
    assert [len(group["params"]) for group in groups] == [6, 1, 1, 6]
    assert (filters["initial_lr"], filters["momentum"], filters["nesterov"]) == (0.24, 0.6, True)
    assert (
        filters["orthogonalise"],
        filters["normalise_weights"],
        filters["steps_of_iteration"],
    ) == (True, True, 3)
    for step, used in enumerate(factors(schedule, steps)):
        line = 1 - step / steps
        # Three epochs of 25 steps.
        assert used == pytest.approx([line, max(0.0, 1 - step / 75), line, line])
    assert module.configure_callbacks() == []
    assert module.model.head.weight.std().item() == pytest.approx(1.0)
    assert module.model.logit_scale == 1 / 256


def test_hiverges_speedrun():
    options, module = recipe("speedrun_cifar", "budget.examples=373_248")
    batch_size = 1536
    steps = math.ceil(7.59 * (50_000 // 1536))
    assert options.workload.reference.batch_size == batch_size
    assert steps == 243 == math.ceil(options.budget.examples / batch_size)
    groups, schedule = configured(module)
    assert isinstance(schedule.optimizer, SeldomNormalisingMuon)
    norms, whitening, head, filters = groups
    wd = 1.0418e-6 * batch_size
    for group, rate in ((norms, 0.0573), (whitening, 0.0573), (head, 0.5415)):
        assert_steps_as(
            group, {"lr": rate, "momentum": 0.825, "weight_decay": wd / rate}, batch_size
        )
    assert [len(group["params"]) for group in groups] == [6, 1, 1, 6]
    assert (filters["initial_lr"], filters["momentum"], filters["nesterov"]) == (0.205, 0.655, True)
    assert filters["weight_decay"] == pytest.approx(wd, rel=1e-5)
    assert (filters["steps_of_iteration"], len(schedule.optimizer.due)) == (3, steps + 1)
    for step, used in enumerate(factors(schedule, steps)):
        line = 1 - step / steps
        # A share of an epoch's 32 steps.
        assert used == pytest.approx([line, max(0.0, 1 - step / math.ceil(0.19 * 32)), line, line])
    assert [type(layer) for layer in module.modules() if isinstance(layer, GELU | SiLU)] == [
        GELU
    ] + 6 * [SiLU]
    assert module.loss.label_smoothing == 0.09
    # The standard deviations of CIFAR-10's channels, as pixels.
    white = torch.tensor([0.247, 0.2435, 0.2616]) * 255
    jitter = option_at(options, "workload.data.augment")
    assert torch.tensor(jitter["brightness"]).tolist() == pytest.approx(
        (0.1399 * white).tolist(), rel=1e-4
    )
    assert jitter["contrast"] == 0.1308


SHAPES = {
    **dict.fromkeys(
        (*RECIPES, "resnet_cifar", "cifar_mlp", "cifar_resnet8", "cifar_vgg11"), (3, 32, 32)
    ),
    **dict.fromkeys(
        ("fashion_mlp", "fashion_cnn", "mnist_cnn", "mnist_mlp", "mnist_simple_cnn"), (1, 28, 28)
    ),
    "digits": (1, 8, 8),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SHAPES)
def test_the_cost_of_an_evaluated_example_is_that_of_its_flops(name):
    few = ["workload.module.model.whitening.images=4"] * (name in RECIPES)
    options, module = recipe(name, *few)
    batch = torch.randn(4, *SHAPES[name]), torch.arange(4)
    if module.initial_images:
        module.initialise_from(batch[0])
    with FlopCounterMode(display=False) as training:
        module.training_step(batch, 0).backward()
    with torch.no_grad(), FlopCounterMode(display=False) as evaluation:
        module.validation_step(batch, 0)
    cost = evaluation.get_total_flops() / training.get_total_flops()
    stated = options.protocol.evaluation_cost
    assert cost <= 1.1 * stated
    # That of others, 0.5, leaves room for what is no product: it is as large a share of short
    # forward passes.
    assert cost >= (0.9 if name in RECIPES else 0.6) * stated


NARROW = dict.fromkeys(RECIPES, "workload.module.model.widths=[8,16,16]")
NARROW["resnet_cifar_fast"] = "workload.module.model.width=8"


# Of the others the reduced ladder trains each (test_dawnbench.py).
@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [*(pytest.param(one, marks=pytest.mark.soak) for one in RECIPES[:-1]), RECIPES[-1]]
)
def test_each_learns_from_cifar10_when_it_is_narrow(name, bstune, tmp_path):
    data_root("cifar-10-batches-bin")
    options = (
        "device=cpu",
        "precision=32-true",
        "mlflow.enabled=false",
        "budget={steps: 10, examples: 1}",
    )
    sizes = (NARROW[name], "workload.data.validation=100", "trial.batch_size=100", "trial.lr=0.1")
    status, _, err = bstune(f"+workload={name}", *options, *sizes)
    assert status == 0, err
    record = next(tmp_path.rglob("trial.json")).read_text()
    assert '"status": "stopped"' in record
    assert '"steps": 10' in record
    assert '"horizon": 10' in record
