"""The gradient noise scale: closed forms, a training that it does not change, and the answer."""

import random

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback
from refusals import refused
from scipy.stats import t as student
from search_records import spec
from small import Data, Model, examples, trained
from test_analysis import record, study
from torch import nn
from torch.utils.data import DataLoader

import bstune
from bstune.core.noise_scale import estimate_noise_scale, terms_of
from bstune.core.records import Target
from bstune.recipe.recipe import Recipe, settings_of
from bstune.study.critical import noise_scale
from bstune.trial.lightning import fit
from bstune.trial.noise_beside import measure
from bstune.trial.trial import Trial

LOSS = Target("val/loss", None, "min")


def test_expected_norms_give_back_both_terms():
    """E|g|^2 = |G|^2 + tr(Sigma)/n of n examples, here with |G|^2 = 2 and tr Sigma = 30."""
    sizes = 8, 8, 3
    squares = [2 + 30 / size for size in sizes]
    assert terms_of(squares, sizes, 2 + 30 / sum(sizes)) == pytest.approx((2.0, 30.0))


# With 34 steps blocks are of 3, and the oldest is left out.
@pytest.mark.parametrize("steps, length", [(4, 1), (34, 3)])
def test_at_the_ends_of_the_interval_the_t_test_is_at_its_level(steps, length):
    rng = np.random.default_rng(steps)
    measured = np.stack([rng.normal(3.0, 0.5, steps), rng.gamma(9.0, 1.0, steps)], axis=1)
    found = estimate_noise_scale(measured)
    blocks = measured[steps % length :].reshape(-1, length, 2).mean(axis=1)
    count = len(blocks)
    for end in (found.low, found.high):
        difference = blocks[:, 1] - end * blocks[:, 0]
        statistic = abs(difference.mean()) / (difference.std(ddof=1) / count**0.5)
        assert statistic == pytest.approx(student.ppf(0.95, count - 1))
    gradient, trace = blocks.mean(axis=0)
    assert found.value == pytest.approx(trace / gradient)


@pytest.mark.parametrize("gradients", [[], [1.0] * 3, [-1.0, -1.1] * 4, [5.0, -4.0] * 4])
def test_few_steps_and_gradients_that_may_be_0_tell_nothing(gradients):
    assert estimate_noise_scale([(gradient, 2.0) for gradient in gradients]) is None


def test_a_loop_measures_a_known_noise():
    """Gradients are 2 and a normal of variance 9 in each of 4 dimensions: tr/|G|^2 = 36/16."""
    generator = torch.Generator().manual_seed(1)
    noise = bstune.NoiseScale()
    for _ in range(400):
        parts = [2.0 + 3.0 * torch.randn(size, 4, generator=generator) for size in (20, 4)]
        # The second parameter takes no part.
        noise.add([(part.mean(0), None) for part in parts], examples=[20, 4])
    # Over 400 steps their standard errors are 3% and 4%.
    assert np.mean(noise.measured, axis=0) == pytest.approx([16, 36], rel=0.1)
    assert noise.estimate == estimate_noise_scale(noise.measured[-64:])
    for wrong in ([parts], [parts, parts]):
        with refused("2, 1"):
            noise.add(wrong, examples=[8])


def test_a_training_shows_what_all_data_give():
    class EachBatch(Callback):
        terms = []

        def on_train_batch_start(self, *arguments):
            self.terms.extend(measure(*arguments))

    torch.manual_seed(0)
    module, each = Model(lr=0.0), EachBatch()
    own = {"device": "cpu", "threads": 1, "micro_batch_size": 10}
    recipe = Recipe(lambda trial: module, lambda trial: Data(), **own)
    fit(recipe, settings_of(17, 0.0, 300), [each])
    inputs, outputs = examples(0).tensors
    ones = torch.cat([inputs, torch.ones(len(inputs), 1)], dim=1)
    off = module.linear(inputs).squeeze(1) - outputs
    gradients = (2.0 * off[:, None] * ones).detach().double()
    exact = gradients.mean(0).square().sum().item(), gradients.var(0).sum().item()
    assert len(each.terms) == 600
    assert np.mean(each.terms, axis=0) == pytest.approx(exact, rel=0.1)


class Everything(Model):
    """All that a second pass could disturb: random numbers, buffers, attributes, logs, inputs."""

    def __init__(self, lr):
        super().__init__(lr)
        layers = nn.Linear(10, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 1)
        self.linear = nn.Sequential(*layers)
        self.own = torch.Generator().manual_seed(3)
        self.seen = []

    def training_step(self, batch, batch_idx):
        batch[0].add_(0.01 * torch.randn(10, generator=self.own) + 0.01 * random.gauss(0, 1))
        self.seen.append(np.random.rand())
        loss = self.loss(batch) / (1.0 + len(self.seen) / 100)
        self.log("loss", loss)
        return {"loss": loss}


class RefusesHalves(Everything):
    def training_step(self, batch, batch_idx):
        if len(batch[0]) < 20:
            raise ValueError("half a batch")
        return super().training_step(batch, batch_idx)


def run(build, **options):
    """Train a trial; its record and its module."""
    loader = DataLoader(examples(0), 16)
    of_trial = spec(batch_size=20, lr=0.01, seed=1, max_steps=120)
    trial = Trial(of_trial, LOSS, total_steps=120)
    return trained(lambda trial: build(trial.lr), lambda trial: (loader, loader), trial, **options)


BUILDS = [(Everything, 10, True), (RefusesHalves, None, False)]


@pytest.mark.parametrize("build, micro_batch_size, measures", BUILDS)
def test_a_trial_is_the_same_bit_for_bit_with_and_without(build, micro_batch_size, measures):
    plain, module = run(build, micro_batch_size=micro_batch_size)
    beside, other = run(build, micro_batch_size=micro_batch_size, noise_scale=True)
    assert (plain.status, plain.steps, plain.noise_scale) == ("finished", 120, ())
    assert (beside.history, other.seen) == (plain.history, module.seen)
    for name, value in module.state_dict().items():
        assert torch.equal(value, other.state_dict()[name])
    assert bool(beside.noise_scale) is measures
    # Measuring is expected to take 4 steps: 20 times as many are trained before.
    assert all(step >= 80 and terms[1] > 0.0 for step, *terms in beside.noise_scale)


def measured(number, lr, steps, scale, status="reached"):
    """A trial whose noise scale is ``scale`` in the later half of its steps."""
    rng = np.random.default_rng(number)
    late = range(steps // 2 + 1, steps, 4)
    terms = [(steps // 4, 50.0, 1.0), *((step, rng.normal(1.0, 0.2), scale) for step in late)]
    return record(number, f"search/{number}", 64, lr, steps, status, noise_scale=tuple(terms))


def test_the_answer_s_is_of_trials_near_the_best_in_the_later_half_of_their_steps():
    near = [measured(number, 1.0, 60, 45.0) for number in range(3)]
    others = [measured(3, 9.0, 200, 4.0), measured(4, 0.01, 60, 4.0, "missed")]
    found = noise_scale(study().plan, [*near, *others])
    assert found.value == pytest.approx(45.0, rel=0.15)
    assert 35.0 < found.low < found.high < 60.0
    assert noise_scale(study().plan, [record(0, "search/0", 64, 1.0, 60)]) is None
