"""The gradient noise scale: closed forms, a training that it does not change, and the answer."""

import functools
import math
import random

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback, LightningModule
from refusals import refused
from results import of_curve, result
from scipy.stats import t as student
from small import Data, Model
from test_analysis import record, study
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import bstune
from bstune.config import compose, options_from_python
from bstune.core.noise_scale import estimate_noise_scale, terms_of
from bstune.core.records import Budget, Spec, Target
from bstune.recipe.project import recipe_of_project
from bstune.recipe.recipe import Recipe, settings_of
from bstune.report.answer import render
from bstune.report.page import page
from bstune.study.critical import noise_scale
from bstune.study.result import Interval
from bstune.trial.lightning import fit, train
from bstune.trial.noise_beside import measure
from bstune.trial.preflight import preflight
from bstune.trial.trial import Trial, run_trial


@pytest.mark.parametrize("sizes", [(1, 1), (8, 8), (8, 8, 3)])
def test_expected_norms_give_back_both_terms(sizes):
    """E|g|^2 = |G|^2 + tr(Sigma)/n of n examples, here with |G|^2 = 2 and tr Sigma = 30."""
    squares = [2 + 30 / size for size in sizes]
    assert terms_of(squares, sizes, 2 + 30 / sum(sizes)) == pytest.approx((2.0, 30.0))


# In any unit: the smallest would underflow when it is squared.
@pytest.mark.parametrize("unit", [1.0, 1e-200])
@pytest.mark.parametrize(
    ("seed", "mean", "steps"), [(0, 1.0, 12), (1, 3.0, 16), (2, 0.2, 16), (3, -0.1, 9)]
)
def test_at_the_ends_of_the_interval_the_t_test_is_at_its_level(seed, mean, steps, unit):
    rng = np.random.default_rng(seed)
    gradients, traces = rng.normal(mean, 1.0, steps), rng.gamma(9.0, 1.0, steps)
    found = estimate_noise_scale(list(zip(gradients * unit, traces, strict=True)))
    is_known = mean >= 1.0
    assert (found.value is not None, found.high is not None) == (is_known, is_known)
    for end in (found.low, found.high):
        if end is not None:
            difference = traces - end * unit * gradients
            statistic = abs(difference.mean()) / (difference.std(ddof=1) / math.sqrt(steps))
            assert statistic == pytest.approx(student.ppf(0.95, steps - 1), rel=1e-9)
    if found.value is not None:
        assert found.value == pytest.approx(traces.mean() / gradients.mean() / unit)
        assert found.low < found.value < found.high


def test_steps_are_blocked_so_that_a_drift_widens_the_interval():
    rng = np.random.default_rng(0)
    measured = np.stack([rng.normal(10.0, 1.0, 330), np.linspace(0.5, 1.5, 330)], axis=1)
    drifting = estimate_noise_scale(measured)
    mixed = estimate_noise_scale(measured[rng.permutation(330)])
    assert drifting.high - drifting.low > 2 * (mixed.high - mixed.low)


@pytest.mark.parametrize("count", [0, 3])
def test_few_steps_tell_nothing(count):
    found = estimate_noise_scale([(1.0, 2.0)] * count)
    assert (found.value, found.low, found.high, found.steps) == (None, None, None, count)


def test_a_loop_measures_a_known_noise_and_changes_no_gradient():
    """Gradients are 2 and a normal of variance 9 in each of 4 dimensions: tr/|G|^2 = 36/16."""
    generator = torch.Generator().manual_seed(1)
    weight = nn.Parameter(torch.zeros(4))
    noise = bstune.NoiseScale(window=400)
    for _ in range(400):
        weight.grad = None
        total = torch.zeros(4)
        for size in (8, 4):
            # As a gradient scaler has it.
            mean = (2.0 + 3.0 * torch.randn(size, 4, generator=generator)).mean(0) * 64
            (weight * mean).sum().mul(size / 12).backward()
            total += mean * size / 12
            noise.add([weight], size)
        assert torch.allclose(weight.grad, total)
        noise.step(scale=64.0)
    found = noise.estimate
    assert found.low < 36 / 16 < found.high < 1.5 * found.low
    assert np.mean(noise.measured, axis=0) == pytest.approx([16, 36], rel=0.1)


def test_a_loop_needs_two_micro_batches_a_step():
    noise = bstune.NoiseScale()
    noise.add([nn.Parameter(torch.zeros(4))], 8)
    with refused("2, 1"):
        noise.step()


GENERATOR = torch.Generator().manual_seed(0)
X = torch.randn(2000, 4, generator=GENERATOR)
EXAMPLES = TensorDataset(X, X.sum(1) + 2 * torch.randn(2000, generator=GENERATOR))


class Regression(LightningModule):
    """Least squares; its weights stay where they are at a rate of 0."""

    def __init__(self, lr):
        super().__init__()
        self.lr = lr
        self.weight = nn.Parameter(torch.linspace(-0.5, 0.7, 4))

    def training_step(self, batch):
        return 0.5 * ((batch[0] @ self.weight - batch[1]) ** 2).mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), self.lr)


class EachStep(Callback):
    def __init__(self):
        self.terms = []

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.terms += measure(trainer, pl_module, batch, batch_idx)


def loaders(batch=None):
    return DataLoader(EXAMPLES, 8, shuffle=True), DataLoader(EXAMPLES, 1000)


@pytest.mark.parametrize("micro_batch_size", [None, 10])
def test_a_training_shows_what_all_data_give(micro_batch_size):
    each = EachStep()
    recipe = Recipe(
        lambda trial: Regression(trial.lr),
        lambda trial: loaders(),
        device="cpu",
        threads=1,
        micro_batch_size=micro_batch_size,
    )
    fit(recipe, settings_of(17, 0.0, 150), [each])
    weight = torch.linspace(-0.5, 0.7, 4)
    gradients = (X * (X @ weight - EXAMPLES.tensors[1])[:, None]).double().numpy()
    exact = (gradients.mean(axis=0) ** 2).sum(), gradients.var(axis=0).sum()
    terms = np.array(each.terms)
    assert len(terms) == 150 * (2 if micro_batch_size else 1)
    # Four standard errors.
    errors = 4 * terms.std(axis=0) / math.sqrt(len(terms))
    assert (abs(terms.mean(axis=0) - exact) < errors).all()


class Everything(LightningModule):
    """All that a second pass could disturb: random numbers, buffers, attributes, logs, inputs."""

    def __init__(self, lr):
        super().__init__()
        self.lr = lr
        self.net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.3))
        self.head = nn.Linear(8, 1)
        self.own = torch.Generator().manual_seed(3)
        self.seen = []
        self.logged = 0

    def training_step(self, batch, batch_idx):
        x, y = batch
        x += 0.01 * torch.randn(x.shape, generator=self.own) + 0.01 * random.gauss(0, 1)
        x += 0.01 * np.random.rand()
        self.seen.append(len(x))
        loss = ((self.head(self.net(x))[:, 0] - y) ** 2).mean() / (1 + len(self.seen))
        self.log("loss", loss)
        return {"loss": loss}

    def validation_step(self, batch, batch_idx):
        self.log("val/loss", ((self.head(self.net(batch[0]))[:, 0] - batch[1]) ** 2).mean())

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), self.lr, momentum=0.9)


class RefusesHalves(Everything):
    def training_step(self, batch, batch_idx):
        if len(batch[0]) < 20:
            raise ValueError("half a batch")
        return super().training_step(batch, batch_idx)


def trained(build, noise_scale, micro_batch_size=None):
    modules = []

    def module(trial):
        modules.append(build(trial.lr))
        return modules[0]

    own = DataLoader(TensorDataset(*(part[:200] for part in EXAMPLES.tensors)), 20)
    recipe = Recipe(
        module,
        lambda trial: (own, own),
        device="cpu",
        threads=1,
        micro_batch_size=micro_batch_size,
        noise_scale=noise_scale,
    )
    pair = {"batch_size": 20, "lr": 0.05}
    spec = Spec(number=0, place="", role="search", **pair, seed=1, max_steps=240)
    trial = Trial(spec, Target("val/loss", 0.0, "min"), total_steps=240)
    return run_trial(functools.partial(train, recipe), trial), modules[0]


@pytest.mark.parametrize(
    ("build", "micro_batch_size", "measures"),
    [(Everything, None, True), (Everything, 10, True), (RefusesHalves, None, False)],
)
def test_a_trial_is_the_same_bit_for_bit_with_and_without(build, micro_batch_size, measures):
    plain, module = trained(build, False, micro_batch_size)
    beside, other = trained(build, True, micro_batch_size)
    assert (plain.status, plain.noise_scale) == ("missed", ())
    assert beside.history == plain.history
    assert (beside.status, other.seen) == (plain.status, module.seen)
    for name, value in module.state_dict().items():
        assert torch.equal(value, other.state_dict()[name])
    assert bool(beside.noise_scale) is measures
    # Measuring is expected to take 6 steps, of which 20 times as many are trained before.
    assert all(step >= 120 and terms[1] > 0.0 for step, *terms in beside.noise_scale)


class Manual(Model):
    automatic_optimization = False


class RaisesOnHalves(Model):
    def training_step(self, batch, batch_idx):
        if len(batch[0]) == 8:
            raise ValueError("only 16")
        return self.loss(batch)


class Transposed(Data):
    def on_after_batch_transfer(self, batch, dataloader_idx):
        return batch[0].T if self.trainer.training else batch


@pytest.mark.parametrize(
    ("module", "data", "words"),
    [
        (Manual, Data, "Manual, noise_scale"),
        (RaisesOnHalves, Data, "ValueError: only 16, noise_scale"),
        (Model, Transposed, "16, 10, noise_scale"),
    ],
)
def test_what_cannot_be_measured_is_told_before_a_study_begins(module, data, words):
    options = options_from_python(workload="own", device="cpu", threads=1, noise_scale=True)
    recipe = recipe_of_project(module, data(), options)
    with refused(words):
        preflight(recipe, (8, 16, 32), 0.05, Budget(steps=80), Target("val/loss", None, "min"))


def test_recorded_runs_have_no_gradients():
    with refused("noise_scale"):
        compose(["+workload=replay", "table=fashion_mlp", "noise_scale=true"])


def measured(record, scale, weight=1.0):
    """A record whose noise scale is ``scale`` in the later half of its steps."""
    rng = np.random.default_rng(record.number)
    terms = [(record.steps // 4, 1.0, 1.0)]
    for step in range(record.steps // 2 + 1, record.steps, 4):
        terms.append((step, weight * rng.normal(1.0, 0.2), weight * scale))
    return record.model_copy(update={"noise_scale": tuple(terms)})


def test_the_answer_s_is_of_trials_near_the_best_in_the_later_half_of_their_steps():
    near = [
        measured(record(place, f"search/{place}", 64, 1.0, 60), 45.0, weight=10.0**place)
        for place in range(3)
    ]
    far = measured(record(3, "search/3", 64, 9.0, 200), 4.0)
    missed = measured(record(4, "search/4", 64, 0.01, 60, "missed"), 4.0)
    found = noise_scale(study().plan, [*near, far, missed])
    assert found.low < 45.0 < found.high < 1.5 * found.low
    assert found.value == pytest.approx(45.0, rel=0.15)
    assert noise_scale(study().plan, [record(0, "search/0", 64, 1.0, 60)]) is None


def test_it_stands_beside_the_critical_batch_size():
    noise = Interval(value=45.2, low=30.4, high=70.1)
    assert "45 (30 to 70)" in " ".join(render(result(noise_scale=noise)).split())
    assert "45 (30 to 70)" in page(of_curve(noise_scale=noise), [], "")
