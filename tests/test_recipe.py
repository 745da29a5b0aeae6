"""What a recipe builds for a trial, of a config's nodes and of Python objects."""

from types import SimpleNamespace

import cloudpickle
import pytest
import yaml
from lightning.pytorch import LightningDataModule, LightningModule
from refusals import as_yaml, cases, refused, text_cases

from bstune.config import options_from_python
from bstune.core.errors import InputError
from bstune.recipe.hydra import recipe_of
from bstune.recipe.project import recipe_of_project

OPTIONS = options_from_python(
    workload="tiny", target="a <= 1", budget=9, batch_size=(4, 64), baseline=(8, 0.1), device="cpu"
)
TRIAL = SimpleNamespace(batch_size=8, lr=0.25, values={}, seed=3, max_steps=50, total_steps=100)
PARTS = yaml.safe_load("""
device: cpu
data_root: /data
width: 7
data: {_target_: builtins.dict, root: '${data_root}', size: '${trial.batch_size}'}
module: {_target_: builtins.dict, lr: '${trial.lr}', on: '${device}'}
trainer: null
""")


@text_cases("""
node | built
data: {_target_: builtins.dict, root: '${data_root}', size: '${trial.batch_size}'} | \
root: /data, size: 8
module: {_target_: builtins.dict, a: '${.inner.lr}', x: ['${trial.lr}', '${trial.seed}'], \
inner: {_target_: builtins.dict, lr: '${trial.lr}', w: '${width}'}} | \
a: 0.25, x: [0.25, 3], inner: {lr: 0.25, w: 7}
trainer: {a: '${trial.total_steps}', b: [{_target_: builtins.int}]} | a: 100, b: [0]
""")
def test_nodes(node, built):
    given = as_yaml(node)
    recipe = recipe_of(PARTS | given, OPTIONS)
    # It goes to the worker as a pickle, which is small.
    pickled = cloudpickle.dumps(getattr(recipe, *given))
    assert len(pickled) < 2000
    assert cloudpickle.loads(pickled)(TRIAL) == as_yaml(built)


@text_cases("""
parts | words
module: null | module, _target_
algorithm: {lr: 1} | algorithm._target_
data: {_target_: a.B, x: '${nope}'} | data.x, nope
# Where a run stops is no end of a schedule.
data: {_target_: a.B, x: '${trial.max_steps}'} | data.x, trial.max_steps, total_steps
trainer: {x: '${oc.env:BSTUNE_NOPE}'} | trainer.x, BSTUNE_NOPE
""")
def test_nodes_that_are_refused(parts, words):
    with refused(words):
        recipe_of(PARTS | as_yaml(parts), OPTIONS)


@cases("""
node | error | words
{_target_: nowhere.Data} | InputError | data.*nowhere
# What the user's own code raises stays what it is: out of memory is told by its class.
{_target_: fractions.Fraction, numerator: a} | ValueError | "'a'"
{_target_: 3} | InputError | data.*3
""")
def test_targets_that_cannot_be_built(node, error, words):
    recipe = recipe_of({**PARTS, "data": node}, OPTIONS)
    with pytest.raises((InputError, ValueError), match=words) as caught:
        recipe.data(TRIAL)
    assert caught.typename == error


class Net(LightningModule):
    def __init__(self, lr=0.1):
        super().__init__()
        self.lr = lr


class Literal(LightningModule):
    pass


class Spelled(Net):
    def __init__(self, learning_rate):
        super().__init__(learning_rate)


class Wide(Net):
    def __init__(self, width, lr):
        super().__init__(lr)


class Data(LightningDataModule):
    def __init__(self, batch_size=1):
        super().__init__()
        self.batch_size = batch_size


def of(module=Net, data=Data, **further):
    recipe = recipe_of_project(module, data, **{"options": OPTIONS, **further})
    return cloudpickle.loads(cloudpickle.dumps(recipe))


@pytest.mark.parametrize(
    "module",
    [
        Net,
        Spelled,
        lambda trial: Wide(3, trial.lr),
        lambda lr, batch_size, total_steps: Net(lr if (batch_size, total_steps) == (8, 100) else 0),
        # Where a run stops is no end of a schedule.
        lambda lr, max_steps=7: Net(lr if max_steps == 7 else 0),
    ],
)
def test_modules(module):
    first, second = of(module).module(TRIAL), of(module).module(TRIAL)
    assert first.lr == second.lr == 0.25
    assert first is not second


LOADERS = (["train"], ["validation"])


@pytest.mark.parametrize(
    "data, batch_size",
    [(Data(5), 5), (Data, 8), (lambda: Data(), 1), (lambda batch_size=16: Data(batch_size), 8)],
)
def test_data(data, batch_size):
    assert of(data=data).data(TRIAL).batch_size == batch_size
    for loaders in (LOADERS, lambda: LOADERS):
        assert of(data=loaders).data(TRIAL) == LOADERS


@pytest.mark.parametrize(
    "given, words",
    [
        ({"module": Net()}, "module, Net(lr=trial.lr)"),
        ({"module": Literal}, "module=Literal, lr, override_lr=True"),
        ({"module": Wide}, "module=Wide, width"),
        ({"module": lambda: Net(0.1)}, "module, override_lr=True"),
        ({"module": 3}, "module, 3"),
        ({"module": int}, "module, int"),
        ({"trainer": 3}, "trainer, 3"),
        ({"data": ("train", "validation", "test")}, "data, test"),
        ({"data": lambda a, b: None}, "needs a, b:"),
    ],
)
def test_projects_that_are_refused(given, words):
    with refused(words):
        of(**given)
