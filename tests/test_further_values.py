"""Further values: the coordinate of each, its parabola in the law, who takes it, and the answer."""

import math
from dataclasses import replace

import numpy as np
import optuna
import pytest
import torch
import yaml
from refusals import cases, refused, text_cases
from search_records import SPACE
from small import Data, Model
from test_config import composed, folder  # noqa: F401 (a fixture)
from test_found import TOLD
from test_options import values
from test_own_loop import study as loop_study
from test_own_loop import train
from test_recipe import PARTS, TRIAL

from bstune.core.errors import BstuneError
from bstune.core.space import Tunable
from bstune.options import options_from
from bstune.recipe.found import fill_by_found
from bstune.recipe.hydra import recipe_of
from bstune.recipe.project import recipe_of_project
from bstune.recipe.recipe import settings_of
from bstune.search.law import make_law

TUNED = replace(SPACE, tunables=(Tunable("momentum", 0.5, 0.98), Tunable("depth", 1, 4)))


@cases("""
low | high | scale | middle
0.000001 | 0.01 | log | 0.0001
0.0 | 0.5 | linear | 0.25
0.8 | 0.999 | log of 1 - x | 0.9859
1 | 4 | linear | 2
2 | 128 | log | 16
""")
def test_the_coordinate_of_a_value(low, high, scale, middle):
    tunable = Tunable("x", low, high)
    assert tunable.scale == scale
    assert [tunable.value(place) for place in (0.0, 1.0)] == [low, high]
    assert tunable.value(0.5) == pytest.approx(middle, rel=1e-3)
    value = tunable.value(0.7)
    assert (type(value), tunable.value(tunable.place(value))) == (type(low), value)
    assert (tunable.place(low - 1.0), tunable.place(high + 1.0)) == (0.0, 1.0)


def test_a_parabola_each_and_a_rate_that_moves():
    law, plain = (make_law(space, 4000, True, True) for space in (TUNED, SPACE))
    assert law.mean.size == plain.mean.size + 6
    theta = law.mean[None].copy()
    of_values = [0.5, 0.2, math.log(0.5), math.log(0.25), 2.0, 0.0]
    theta[0, law.first_value : law.first_value + 6] = of_values
    x, z = np.array([6.0]), np.array([-3.0])
    for at_places, cost, octaves in (((0.75, 0.7), 0.125 + 2.0, 0.5), ((0.5, 0.2), 0.0, 0.0)):
        expected = plain.log_steps(plain.mean[None], x, z - octaves) + cost
        np.testing.assert_allclose(law.log_steps(theta, x, z, np.array([at_places])), expected)


class Dropped(Model):
    def __init__(self, lr=0.05, momentum=0.5, dropout=0.1):
        super().__init__(lr)
        self.momentum = momentum
        self.dropout = dropout

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.lr, momentum=self.momentum)


def tuning(**changes):
    return options_from(values(**{"tune": {"dropout": (0, 0.5)}, **changes}))


VALUED = settings_of(8, 0.25, 100, values={"dropout": 0.3})
NODE = {"_target_": f"{__name__}.Dropped"}


def of_nodes(module, key=None, **changes):
    parts = {**PARTS, "module": NODE | module}
    if key:
        parts["tunable"] = {"dropout": {"key": key}}
    return recipe_of(parts, tuning(**changes))


@cases("""
module | key | of_today
{} | null | 0.1
{dropout: '${trial.dropout}'} | null | 0.1
{dropout: 0.2} | module.dropout | 0.2
""")
def test_nodes_get_them(module, key, of_today):
    recipe = of_nodes(module, key)
    assert recipe.module(VALUED).dropout == 0.3
    assert recipe.module(TRIAL).dropout == of_today
    assert recipe.own_values() == {"dropout": of_today}


# What builds the module, its dropout of today, and the one that a survey has.
BUILDERS = [
    (Dropped, 0.1, 0.1),
    (lambda lr, dropout: Dropped(lr, dropout=dropout), None, 0.25),
    (lambda lr, **others: Dropped(lr, **others), None, 0.1),
    (lambda trial: Dropped(trial.lr, dropout=trial.values["dropout"]), None, 0.25),
]


@pytest.mark.parametrize("module, of_today, of_survey", BUILDERS)
def test_python_projects_get_them(module, of_today, of_survey):
    recipe = recipe_of_project(module, Data(), tuning())
    assert recipe.module(VALUED).dropout == 0.3
    assert recipe.module(TRIAL).dropout == of_survey
    found = TOLD.model_copy(update={"values": recipe.own_values()})
    given = {} if of_today else {"baseline.values": {"dropout": 0.4}}
    if given:
        with refused("baseline.values, no default of dropout is, {'dropout': 0.25}"):
            fill_by_found(tuning(), found, str)
    baseline = fill_by_found(tuning(**given), found, str)[0].baseline
    assert baseline.values == {"dropout": of_today or 0.4}
    with refused("baseline.values, dropout, width"):
        fill_by_found(tuning(**{"baseline.values": {"width": 3}}), found, str)


def test_what_nothing_takes_is_refused():
    width = {"tune": {"width": (1, 8)}}
    with refused("Dropped, does not take width, lr, momentum, dropout, data"):
        recipe_of_project(Dropped, Data(), tuning(**width))
    with refused("dropout=(0.1, 0.2), number"):
        recipe_of_project(lambda lr, dropout=(0.1, 0.2): None, Data(), tuning())
    with refused("Dropped, does not take width, lr, momentum, dropout"):
        of_nodes({}, **width).own_values()
    with refused("dropout.key"):
        of_nodes({}, "module.a.b").own_values()
    # A dropout of 0 to 1 would be 0 or 1.
    found = TOLD.model_copy(update={"values": {"dropout": 0.0}})
    with refused("dropout, [0.0, 1.0]"):
        fill_by_found(tuning(tune={"dropout": (0, 1)}), found, str)


@text_cases("""
ranges | words
[dropout] | tune=dropout, range
{dropout: [a, 1]} | dropout
{batch_size: [1, 8]} | batch_size.low
""")
def test_ranges_that_are_refused(ranges, words):
    with refused(words):
        tuning(tune=yaml.safe_load(ranges))


def test_a_command_line_names_them(folder):  # noqa: F811
    assert composed(folder, "tune=[dropout]").options.tune == {"dropout": (0, 0.5)}
    given = composed(folder, "tune={dropout: [0, 0.4], depth: [1, 4]}").options
    assert given.tune == {"dropout": (0, 0.4), "depth": (1, 4)}
    for name, words in (("width", "tune, width, dropout"), ("lr", "lr.low")):
        with refused(words):
            composed(folder, f"tune=[{name}]")


def test_a_study_of_them(tmp_path):
    # Zero has no place on a log scale.
    of_today = {"momentum": 0.5, "dropout": 0.0}
    today = {"values": of_today, "batch_size": 16, "lr": 0.05}
    ranges = {"momentum": [0.1, 0.95], "dropout": [1e-3, 0.5]}
    own = loop_study(tmp_path, tune=ranges, baseline=today)
    for trial in own:
        train(trial)
    result = own.result
    assert result.baseline.values == of_today
    best = yaml.safe_load((tmp_path / "out" / "best.yaml").read_text())["trial"]
    assert best["values"] == result.best.values
    study = optuna.load_study(study_name="own", storage=f"sqlite:///{tmp_path}/study.db")
    for trial, one in zip(study.trials, result.records, strict=True):
        assert one.values.keys() == {"momentum", "dropout"}
        within = {name: value for name, value in one.values.items() if value > 0}
        assert trial.params == {"batch_size": one.batch_size, "lr": one.lr, **within}
        if one.resumed_from is not None:
            assert one.values == result.records[one.resumed_from].values
    with refused("tune", BstuneError):
        next(iter(loop_study(tmp_path, tune={"momentum": [0.1, 0.9]}, baseline=today)))
