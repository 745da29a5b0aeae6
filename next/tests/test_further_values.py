"""Further values: the coordinate of each, its parabola in the law, who takes it, and the answer."""

import math
from dataclasses import replace
from functools import partial

import numpy as np
import optuna
import pytest
import yaml
from refusals import refused
from scipy.stats import norm
from search_records import QUESTION, SPACE, Workload, record, step_time
from small import Data, Model
from test_config import composed, folder  # noqa: F401 (a fixture)
from test_found import TOLD
from test_options import SMALL, values
from test_recipe import PARTS, TRIAL
from test_run import own, places, tune

from bstune.__main__ import main
from bstune.core.errors import BstuneError
from bstune.core.space import Tunable
from bstune.options import options_from
from bstune.recipe.found import completed
from bstune.recipe.hydra import recipe_of
from bstune.recipe.project import recipe_of_project
from bstune.search.decide import propose
from bstune.search.findings import predictions
from bstune.search.law import SHIFT, make_law
from bstune.search.posterior import sample_posterior

MOMENTUM = Tunable("momentum", 0.5, 0.98)
DEPTH = Tunable("depth", 1, 4)
TUNED = replace(SPACE, tunables=(MOMENTUM, DEPTH))


@pytest.mark.parametrize(
    ("low", "high", "scale", "middle"),
    [
        (1e-6, 1e-2, "log", 1e-4),
        (0.0, 0.5, "linear", 0.25),
        (-3, 0.9, "linear", -1.05),
        (1.0, 9.0, "linear", 5.0),
        (0.8, 0.999, "log of 1 - x", 0.9859),
        (0.5, 0.98, "log of 1 - x", 0.9),
        (1, 4, "linear", 2),
        (2, 128, "log", 16),
    ],
)
def test_the_coordinate_of_a_value(low, high, scale, middle):
    tunable = Tunable("x", low, high)
    assert tunable.scale == scale
    assert tunable.value(0.5) == pytest.approx(middle, rel=1e-3)
    assert (tunable.value(0.0), tunable.value(1.0)) == (low, high)
    assert type(tunable.value(0.3)) is (int if isinstance(low, int) and high != 0.9 else float)
    for place in (0.0, 0.2, 0.7, 1.0):
        assert tunable.value(tunable.place(tunable.value(place))) == tunable.value(place)
    assert (tunable.place(low - 1.0), tunable.place(high + 1.0)) == (0.0, 1.0)


@pytest.mark.parametrize("schedule_ends", [False, True])
@pytest.mark.parametrize("misfit", [False, True])
def test_a_parabola_each_and_a_rate_that_moves(misfit, schedule_ends):
    law = make_law(TUNED, 4000, misfit, schedule_ends)
    plain = make_law(SPACE, 4000, misfit, schedule_ends)
    assert law.mean.size == plain.mean.size + 6
    theta = law.mean[None].copy()
    of_values = [0.5, 0.2, math.log(0.5), math.log(0.25), 2.0, 0.0]
    theta[0, law.first_value : law.first_value + 6] = of_values
    x, z, u = np.array([6.0]), np.array([-3.0]), np.array([[0.75, 0.7]])
    moved = plain.log_steps(plain.mean[None], x, z - 2.0 * 0.25)
    expected = moved + 0.5 * (0.25 / 0.5) ** 2 + 0.5 * (0.5 / 0.25) ** 2
    np.testing.assert_allclose(law.log_steps(theta, x, z, u), expected)
    at_best = law.log_steps(theta, x, z, np.array([[0.5, 0.2]]))
    np.testing.assert_allclose(at_best, plain.log_steps(plain.mean[None], x, z))


def test_their_prior_s_density_is_that_of_its_draws():
    law = make_law(TUNED, 4000, misfit=False)
    theta = law.sample_prior(500, np.random.default_rng(0))
    standard = np.delete((theta - law.mean) / law.spread, SHIFT, axis=1)
    of_shift = make_law(SPACE, 4000, misfit=False)
    rest = norm.logpdf(standard[:, -6:]).sum(axis=1)
    difference = law.log_prior(theta) - of_shift.log_prior(theta[:, :7]) - rest
    np.testing.assert_allclose(difference, difference[0])


def at(workload, values):
    """A workload whose steps rise by parabolas off momentum 0.9 and depth 3; momentum moves lr*."""
    momentum, depth = TUNED.places(values)
    off = momentum - MOMENTUM.place(0.9)
    cost = 0.5 * (off / 0.4) ** 2 + 0.5 * ((depth - DEPTH.place(3)) / 0.5) ** 2
    return replace(workload, s_min=100.0 * math.exp(cost), lr=0.1 * 2.0 ** (-4.0 * off))


@pytest.mark.parametrize("seed", [0, 1])
def test_a_search_finds_them(seed):
    records = []
    for number in range(60):
        proposal = propose(QUESTION, TUNED, step_time, records, seed)
        assert 0.5 <= proposal.values["momentum"] <= 0.98
        assert proposal.values["depth"] in (1, 2, 3, 4)
        workload = at(Workload(noise=0.05), proposal.values)
        records.append(workload.train(number, proposal, records))
    for one in records:
        if one.resumed_from is not None:
            assert one.values == records[one.resumed_from].values
    posterior = sample_posterior(QUESTION, TUNED, step_time, records, seed=seed)
    best = min(predictions(posterior, QUESTION, step_time), key=lambda one: one.log_value).record
    least = 100 * (1 + 40 / math.sqrt(4000)) * step_time(math.sqrt(4000))
    steps = at(Workload(), best.values).steps(best.batch_size, best.lr)
    assert steps * step_time(best.batch_size) < 1.3 * least


def test_the_same_pair_with_other_values_is_another_configuration():
    only = replace(TUNED, low=64, high=64, lr_low=0.05, lr_high=0.0500001)
    tried = [record(0, values={"momentum": 0.9, "depth": 2})]
    proposal = propose(QUESTION, only, step_time, tried, 0)
    assert (proposal.batch_size, proposal.lr) == (64, 0.05)
    assert proposal.values != tried[0].values


class Dropped(Model):
    def __init__(self, lr=0.05, momentum=0.5, dropout=0.1):
        super().__init__(lr)
        self.momentum = momentum
        self.dropout = dropout

    def configure_optimizers(self):
        import torch

        return torch.optim.SGD(self.parameters(), lr=self.lr, momentum=self.momentum)


RANGE = {"dropout": (0, 0.5)}
VALUED = type(TRIAL)(**{**vars(TRIAL), "values": {"dropout": 0.3}})


def of_nodes(module, tunable=None, **changes):
    parts = {**PARTS, "module": {"_target_": f"{__name__}.Dropped", **module}}
    if tunable:
        parts["tunable"] = {"dropout": {"low": 0, "high": 0.5, **tunable}}
    return recipe_of(parts, options_from(values(tune=RANGE, **changes)))


@pytest.mark.parametrize(
    ("recipe", "of_today"),
    [
        (partial(of_nodes, {}), 0.1),
        (partial(of_nodes, {"dropout": 0.2}), 0.2),
        (partial(of_nodes, {"dropout": "${trial.dropout}"}), 0.1),
        (partial(of_nodes, {"dropout": 0.2}, {"key": "module.dropout"}), 0.2),
    ],
)
def test_nodes_get_them(recipe, of_today):
    built = recipe()
    assert built.module(VALUED).dropout == 0.3
    assert built.module(TRIAL).dropout == of_today
    assert built.own_values() == {"dropout": of_today}


@pytest.mark.parametrize(
    ("module", "of_today"),
    [
        (Dropped, 0.1),
        (lambda lr, dropout=0.2: Dropped(lr, dropout=dropout), 0.2),
        (lambda lr, dropout: Dropped(lr, dropout=dropout), None),
        (lambda trial: Dropped(trial.lr, dropout=trial.values["dropout"]), None),
    ],
)
def test_python_projects_get_them(module, of_today):
    recipe = recipe_of_project(module, Data(), options_from(values(tune=RANGE)))
    assert recipe.module(VALUED).dropout == 0.3
    # A survey needs a module, too.
    assert recipe.module(TRIAL).dropout == (of_today or 0.25)
    found = TOLD.model_copy(update={"values": recipe.own_values()})
    if of_today is None:
        with refused("baseline.values, dropout"):
            completed(options_from(values(tune=RANGE)), found, str)
        given = options_from(values(tune=RANGE, **{"baseline.values": {"dropout": 0.4}}))
        assert completed(given, found, str)[0].baseline.values == {"dropout": 0.4}
    else:
        options, _ = completed(options_from(values(tune=RANGE)), found, str)
        assert options.baseline.values == {"dropout": of_today}


def test_what_nothing_takes_is_refused():
    with refused("Dropped, does not take, width, lr, momentum, dropout"):
        recipe_of_project(Dropped, Data(), options_from(values(tune={"width": (1, 8)})))
    parts = {**PARTS, "module": {"_target_": f"{__name__}.Dropped"}}
    recipe = recipe_of(parts, options_from(values(tune={"width": (1, 8)})))
    with refused("Dropped, does not take, width, lr, momentum, dropout"):
        recipe.own_values()
    for key, words in (
        ("module.drop", "does not take, drop"),
        ("module.a.b", "tunable.dropout.key"),
    ):
        with refused(words):
            of_nodes({}, {"key": key}).own_values()


@pytest.mark.parametrize(
    ("tune", "words"),
    [
        ("dropout", "tune"),
        (["dropout"], "tune=dropout, range"),
        ({"dropout": [0.5, 0.5]}, "dropout, 0.5"),
        ({"dropout": [0.5, 0.1]}, "dropout, 0.5"),
        ({"dropout": [0.0, math.inf]}, "dropout, inf"),
        ({"dropout": [math.nan, 1.0]}, "dropout, nan"),
        ({"dropout": [0.1]}, "dropout"),
        ({"dropout": 0.1}, "dropout"),
        ({"dropout": ["a", 1]}, "dropout"),
        ({"lr": [0.1, 1.0]}, "lr.low"),
        ({"batch_size": [1, 8]}, "batch_size.low"),
    ],
)
def test_ranges_that_are_refused(tune, words):
    with refused(words):
        options_from(values(tune=tune))


def test_values_of_today_that_are_not_tuned():
    with refused("baseline.values, dropout, momentum"):
        options_from(values(tune=RANGE, **{"baseline.values": {"momentum": 0.1}}))
    assert SMALL.tunables == ()


@pytest.mark.parametrize(
    ("argument", "ranges"),
    [
        ("tune=[dropout]", {"dropout": (0, 0.5)}),
        ("tune={dropout: [0, 0.4], depth: [1, 4]}", {"dropout": (0, 0.4), "depth": (1, 4)}),
        ("tune=[]", None),
    ],
)
def test_a_command_line_names_them(folder, argument, ranges):  # noqa: F811
    assert composed(folder, argument).options.tune == ranges


def test_names_without_a_range_and_files_without_a_trial(folder):  # noqa: F811
    with refused("tune, width, dropout"):
        composed(folder, "tune=[width]")
    with refused("recorded"):
        composed(folder, "table=fashion_mlp", "tune={a: [0, 1]}", workload="replay")
    (folder / "other.yaml").write_text("trials: 3\n")
    with refused("trial=, other.yaml, best.yaml"):
        composed(folder, f"trial={folder}/other.yaml")


def test_a_study_of_them(tmp_path):
    arguments = {"tune": {"momentum": [0.1, 0.95], "dropout": [0.2, 0.5]}}
    result = tune(tmp_path, Dropped, trials=10, **arguments)
    assert result.baseline.values == {"momentum": 0.5, "dropout": 0.1}
    assert result.best.values.keys() == {"momentum", "dropout"}
    best = yaml.safe_load((tmp_path / "out" / "best.yaml").read_text())["trial"]
    assert best["values"] == result.best.values
    study = optuna.load_study(study_name="Dropped", storage=f"sqlite:///{tmp_path}/study.db")
    # The baseline's dropout lies outside of its range.
    assert study.trials[0].params.keys() == {"batch_size", "lr", "momentum"}
    assert study.trials[1].params.items() >= result.records[1].values.items() - {("dropout", 0.1)}
    assert tune(tmp_path, Dropped, trials=10, **arguments).model_dump() == result.model_dump()
    with pytest.raises(BstuneError, match="tune"):
        tune(tmp_path, Dropped, trials=10, tune={"momentum": [0.1, 0.9]})


def test_best_yaml_trains_again(tmp_path, capsys):
    command = [*own(tmp_path, "Dropped"), *places(tmp_path), "tune={momentum: [0, 0.95]}"]
    own_file = tmp_path / "conf" / "workload" / "own.yaml"
    own_file.write_text(own_file.read_text().replace("small.", f"{__name__}."))
    command += ["workers=0", "mlflow.uri=null"]
    assert main(command) == 0
    assert "Best" in capsys.readouterr().out
    assert main([*command, f"trial={tmp_path}/out/best.yaml", "--json"]) == 0
    best = yaml.safe_load((tmp_path / "out" / "best.yaml").read_text())["trial"]
    assert f'"momentum":{best["values"]["momentum"]}' in capsys.readouterr().out
