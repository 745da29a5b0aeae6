"""Two processes that train one trial: as one process does, resumed bit for bit, or all ended."""

import os

import pytest
import torch
from search_records import spec
from small import Data, Model, trained

from bstune.core.records import Target
from bstune.recipe.recipe import Recipe
from bstune.trial.preflight import pilot, preflight
from bstune.trial.ranks import Ranks
from bstune.trial.trial import Trial
from bstune.trial.worker import Returned, call

pytestmark = pytest.mark.slow
SECONDS = 60.0


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    with Ranks(tmp_path_factory.mktemp("ranks") / "log.txt", 2) as group:
        yield group


class FailsInOne(Model):
    """Its second process raises, and the first one waits for it."""

    def training_step(self, batch, batch_idx):
        if self.global_rank == 1 and batch_idx == 3:
            raise ValueError("only here")
        return self.loss(batch)


class DiesInOne(Model):
    def training_step(self, batch, batch_idx):
        if self.global_rank == 1 and batch_idx == 3:
            os._exit(7)
        return self.loss(batch)


def run(folder, build, devices, max_steps, earlier=None, resumes=False, until=None):
    """Weights and record of a trial; it is saved in the folder, and resumed from there."""
    trial = Trial(
        spec(batch_size=16, lr=0.05, seed=1, max_steps=max_steps),
        Target("val/loss", 0.0, "min"),
        total_steps=60,
        earlier=earlier,
        save_to=folder / "saved.ckpt",
        resume_from=folder / "saved.ckpt" if resumes else None,
        until=until,
    )
    own = {"micro_batch_size": 5, "devices": devices}
    record, module = trained(lambda trial: build(trial.lr), lambda trial: Data(), trial, **own)
    return module.linear.weight.detach(), record


def test_two_processes_train_as_one(ranks, tmp_path):
    def together(*args):
        outcome = call(ranks, run, tmp_path, Model, 2, *args, limit=SECONDS)
        assert isinstance(outcome, Returned), outcome
        return outcome.value

    weights, record = together(60)
    alone, of_one = run(tmp_path, Model, 1, 60)
    assert (record.status, record.steps) == ("missed", 60)
    assert [step for step, _ in record.history] == [step for step, _ in of_one.history]
    torch.testing.assert_close(weights, alone)
    _, pruned = together(25)
    assert (pruned.status, pruned.steps) == ("pruned", 25)
    resumed, rest = together(60, pruned, True)
    assert torch.equal(resumed, weights)
    assert set(record.history) <= set(rest.history)
    assert together(60, None, False, 0.0)[1].status == "pruned"


def test_two_processes_agree_on_what_they_check(ranks):
    recipe = Recipe(lambda trial: Model(trial.lr), lambda trial: Data(), device="cpu", devices=2)
    target = Target("val/loss", None, "min")
    checks = call(ranks, preflight, recipe, (2, 16, 64), 0.1, None, target, limit=SECONDS)
    assert isinstance(checks, Returned), checks
    assert checks.value.resumes
    piloted = call(ranks, pilot, recipe, 16, 0.1, 0.5, target, None, limit=SECONDS)
    assert isinstance(piloted, Returned), piloted
    assert piloted.value.history


def test_one_that_fails_ends_all_and_others_begin(ranks, tmp_path):
    for build, words in ((FailsInOne, "ValueError: only here"), (DiesInOne, "status 7")):
        outcome = call(ranks, run, tmp_path, build, 2, 60, limit=SECONDS)
        reason = outcome.value[1].message if isinstance(outcome, Returned) else outcome.reason
        assert words in reason
