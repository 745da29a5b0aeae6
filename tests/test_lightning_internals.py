"""What the lean loop does in Lightning's place, function by function, and that nothing else touches private members.

Where another version of Lightning comes, the first test names the steps of the lean loop whose functions have changed:
read those, change the lean loop where they ask for it, put the new digests here and the version into ``TRIED``.
"""

import ast
import hashlib
import inspect
import re
import textwrap
from importlib import import_module
from pathlib import Path

import lightning.pytorch
import pytest
import torch

import bstune
from bstune.trial.lightning import internals as lightning_internals
from bstune.trial.lightning.internals import TRIED, version_not_tried
from bstune.trial.lightning.packages import PACKAGES, of_package

EPOCH_LOOP = "loops.training_epoch_loop._TrainingEpochLoop"
AUTOMATIC = "loops.optimization.automatic"
OPTIMIZATION = f"{AUTOMATIC}._AutomaticOptimization"
CONNECTOR = "trainer.connectors.logger_connector.logger_connector._LoggerConnector"
RESULT = "trainer.connectors.logger_connector.result"
MODULE = "core.module.LightningModule"
STRATEGY = "strategies.strategy.Strategy"
PRECISION = "plugins.precision.precision.Precision"
FABRIC_PRECISION = "fabric.plugins.precision.precision.Precision"

# A step of bstune's, and the functions of Lightning that it stands for or goes by, with digests of
# their sources. They
# are those of both packages in all versions of TRIED.
STEPS = {
    "LeanLoop._advance": {
        f"{EPOCH_LOOP}.run": "9a2dbc8ed23e",
        f"{EPOCH_LOOP}.done": "41775e8cc9e0",
        f"{EPOCH_LOOP}.on_advance_end": "ff37db5a0fab",
        f"{EPOCH_LOOP}._is_training_done": "1c92e6657dbf",
        f"{EPOCH_LOOP}._num_ready_batches_reached": "38686d8ac8fd",
        f"{EPOCH_LOOP}._should_accumulate": "6fd6b4c92a1e",
        f"{EPOCH_LOOP}._should_check_val_fx": "c3bdbba9ac75",
        f"{EPOCH_LOOP}._save_loggers_on_train_batch_end": "1e57e02846cb",
        "loops.utilities._is_max_limit_reached": "2783e6b0fe63",
    },
    "LeanSteps.train_on_batch": {
        f"{EPOCH_LOOP}.advance": "d521eed3fb72",
        f"{EPOCH_LOOP}._build_kwargs": "4eab780ad9be",
        f"{CONNECTOR}.on_batch_start": "ee2987388012",
        f"{CONNECTOR}.on_batch_end": "c8bdf9f747f0",
        f"{CONNECTOR}.update_train_step_metrics": "a72e3a38cbeb",
        "trainer.call._call_callback_hooks": "8358a6bcae04",
        "trainer.call._call_lightning_module_hook": "1d0701488948",
        "trainer.call._call_strategy_hook": "925a703e324d",
    },
    "LeanSteps._next_batch": {
        "loops.fetchers._DataFetcher.__next__": "9f5f86a9834e",
        "loops.fetchers._PrefetchDataFetcher.__next__": "f215d48918e1",
    },
    "LeanSteps._batch_on_device": {
        f"{MODULE}._on_before_batch_transfer": "4a5dfed982bd",
        f"{MODULE}._apply_batch_transfer_handler": "a0beb47bbd1d",
        f"{STRATEGY}.batch_to_device": "3a8289fff8f5",
        "core.hooks.DataHooks.transfer_batch_to_device": "68d845a3acd8",
        f"{FABRIC_PRECISION}.convert_input": "12d2bfb284ab",
    },
    "LeanSteps._take_step": {
        f"{OPTIMIZATION}.run": "979e4fe6711a",
        f"{OPTIMIZATION}._make_closure": "6fde677daf44",
        f"{OPTIMIZATION}._optimizer_step": "9e731a9e1b40",
        f"{MODULE}.optimizer_step": "cce82a81c4b9",
        "core.optimizer.LightningOptimizer.step": "cddb397ad8c7",
        f"{STRATEGY}.optimizer_step": "e0881fc01ad8",
        f"{PRECISION}.optimizer_step": "30633225cfb5",
        f"{PRECISION}._wrap_closure": "4ee8b256275e",
        f"{PRECISION}._after_closure": "9d54d96a926f",
        f"{PRECISION}._clip_gradients": "2009af84aa56",
        f"{PRECISION}.clip_gradients": "e1782ac7557d",
        f"{MODULE}.configure_gradient_clipping": "900ad5ca89d1",
        f"{MODULE}.clip_gradients": "69b57c75af1b",
    },
    "LeanSteps._closure": {
        f"{AUTOMATIC}.Closure.closure": "15cafe942fdb",
        f"{AUTOMATIC}.Closure.__call__": "7a3b859590fb",
        f"{OPTIMIZATION}._make_step_fn": "97569cafac36",
        f"{OPTIMIZATION}._make_zero_grad_fn": "512fc57c1c1e",
        f"{OPTIMIZATION}._make_backward_fn": "e8b60169809b",
        f"{OPTIMIZATION}._on_before_zero_grad": "aaba0054993c",
        f"{OPTIMIZATION}._optimizer_zero_grad": "13f1cfe14e07",
        f"{OPTIMIZATION}._training_step": "fe7ae5523c03",
        f"{STRATEGY}.training_step": "c9351d387d4b",
        f"{STRATEGY}.backward": "82523fa1b373",
        f"{PRECISION}.pre_backward": "8fbceb3d07b1",
        f"{PRECISION}.backward": "a82afa312e57",
        f"{PRECISION}.post_backward": "a7f87cad6e80",
        f"{MODULE}.backward": "a0cf8302e46f",
        f"{MODULE}.optimizer_zero_grad": "c99ad8a77bfd",
    },
    "LeanSteps._loss_of": {
        f"{AUTOMATIC}.ClosureResult._clone_loss": "e43966ce8474",
        f"{AUTOMATIC}.ClosureResult.from_training_step_output": "b209c33ea49b",
        f"{AUTOMATIC}.ClosureResult.asdict": "86b221508bfa",
    },
    "LeanSteps._step_schedules": {
        f"{EPOCH_LOOP}.update_lr_schedulers": "d24b3382adad",
        f"{EPOCH_LOOP}._update_learning_rates": "65e193bb28ca",
        f"{MODULE}.lr_scheduler_step": "a9b1d1113eb7",
    },
    "Resume": {
        "loops.evaluation_loop._EvaluationLoop.restarted_mid_evaluation": "ac6b4211b85d",
        f"{CONNECTOR}.should_reset_tensors": "c3a3894fb946",
    },
    "restore_metrics": {
        f"{RESULT}._ResultMetric.__init__": "09d8fbf16efb",
        f"{RESULT}._Metadata.__post_init__": "0c943c76dde4",
        f"{RESULT}._Sync.__post_init__": "8b2b091fa681",
    },
    "load_callbacks": {
        "trainer.call._call_callbacks_on_load_checkpoint": "e88da0301ab0",
        "trainer.call._call_callbacks_load_state_dict": "a72e24e2654f",
    },
}
ROWS = []
for step, functions in STEPS.items():
    ROWS += [(step, function) for function in functions]


def shape(node):
    """A syntax tree as nested tuples, the same in all versions of Python: without what is empty."""
    if isinstance(node, ast.AST):
        kept = []
        for name, value in ast.iter_fields(node):
            value = shape(value)
            if value not in (None, ()) and name != "kind":
                kept.append((name, value))
        return type(node).__name__, *kept
    if isinstance(node, list):
        return tuple(shape(one) for one in node)
    if isinstance(node, str):
        # The packages differ in their names alone.
        return re.sub("pytorch_lightning", "lightning.pytorch", node)
    return repr(node) if node is not None else None


def without_words(tree):
    """Take docstrings and annotations out of a function."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            if ast.get_docstring(node) is not None:
                node.body = node.body[1:]
            node.returns = None
        if isinstance(node, ast.arg):
            node.annotation = None
    return tree


def digest(function):
    """A digest of a function's source that comments, docstrings, annotations and line breaks do not change."""
    source = textwrap.dedent(inspect.getsource(function))
    tree = without_words(ast.parse(source))
    return hashlib.sha256(repr(shape(tree)).encode()).hexdigest()[:12]


def function_of(package, place):
    """A function, or a property's, of a class or a module of Lightning."""
    owner, _, name = place.rpartition(".")
    name_of_owner = owner.rpartition(".")[2]
    if not name_of_owner.lstrip("_")[0].isupper():
        return inspect.unwrap(of_package(package, place))
    # Not getattr: of a property that is its value.
    found = inspect.getattr_static(of_package(package, owner), name)
    if isinstance(found, property):
        found = found.fget
    return inspect.unwrap(getattr(found, "__func__", found))


def changed(package):
    """A line for each function that is not what it was, and the step that goes by it."""
    lines = []
    for step, function in ROWS:
        try:
            now = digest(function_of(package, function))
        except (AttributeError, ImportError) as error:
            now = f"gone: {error}"
        if now != STEPS[step][function]:
            lines.append(f"{step}: {package}'s {function} is {now}")
    return lines


@pytest.mark.parametrize("package", PACKAGES)
def test_lightning_is_what_the_lean_loop_stands_for(package):
    version = import_module(package).__version__
    lines = changed(package)
    assert not lines, f"{package} {version} has changed:\n" + "\n".join(lines)
    assert version in TRIED, f"nothing has changed: {package} {version} may be added to TRIED"


def test_a_change_is_told_with_its_step(monkeypatch):
    def backward(self, loss):
        """Do something else."""
        (2 * loss).backward()

    monkeypatch.setattr(lightning.pytorch.LightningModule, "backward", backward)
    monkeypatch.delattr(of_package("lightning.pytorch", CONNECTOR), "on_batch_end")
    lines = changed("lightning.pytorch")
    of_loop, of_module = lines
    batch_end = f"LeanSteps.train_on_batch: lightning.pytorch's {CONNECTOR}.on_batch_end"
    assert of_loop.startswith(f"{batch_end} is ")
    backward = f"LeanSteps._closure: lightning.pytorch's {MODULE}.backward"
    assert of_module.startswith(f"{backward} is ")
    assert changed("pytorch_lightning") == []


def test_words_and_line_breaks_are_no_change():
    written = 'def add(a: int) -> int:\n    """Add."""\n    return a + 1  # one\n'
    otherwise = "def add(a):\n    # Otherwise written.\n    return (\n        a + 1\n    )\n"
    another = "def add(a):\n    return a + 2\n"
    shapes = [shape(without_words(ast.parse(text))) for text in (written, otherwise, another)]
    assert shapes[0] == shapes[1]
    assert shapes[0] != shapes[2]


@pytest.mark.parametrize("package", PACKAGES)
def test_another_version_is_told_and_one_that_was_tried_is_not(package, monkeypatch):
    assert version_not_tried(package) is None
    version = import_module(package).__version__
    monkeypatch.setattr(lightning_internals, "TRIED", ("1.0", "1.1"))
    assert version_not_tried(package) == (
        f"{package} {version} is not one of the versions that it was compared with, 1.0 and 1.1"
    )


# Private members elsewhere

ROOT = Path(bstune.__file__).parent
HERE = Path(lightning_internals.__file__)


def private_names():
    """The names with an underscore that Lightning gives to attributes, functions and classes of its own."""
    found = set()
    for path in Path(lightning.pytorch.__file__).parent.rglob("*.py"):
        matches = re.findall(
            r"self\.(_[a-z]\w*)|def (_[a-z]\w*)|class (_[A-Z]\w*)", path.read_text()
        )
        for names in matches:
            found.update(filter(None, names))
    # A name that torch has as well tells nothing.
    of_torch = {*dir(torch.nn.Module()), *dir(torch.optim.SGD([torch.zeros(1)])), *dir(torch)}
    return found - of_torch


def used(text):
    """Yield (line, name) of each private member that a file takes of another object, or names in a text."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Attribute):
            owner = ast.unparse(node.value)
            if owner not in ("self", "cls", "super()"):
                yield node.lineno, node.attr
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            # As getattr takes it.
            for name in re.findall(r"(?:^|\.)(_[a-zA-Z]\w*)$", node.value):
                yield node.lineno, name
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                yield node.lineno, alias.name


def offenders(text, private):
    """Lines and names of the private members of Lightning that a file touches."""
    return [f"{line}: {name}" for line, name in used(text) if name in private]


def test_the_check_of_private_members_can_fail():
    private = private_names()
    text = (
        "trainer._logger_connector\nself._results\ngetattr(loop, '_results')\nfrom a import "
        "_ResultMetric\n"
    )
    assert offenders(text, private) == ["4: _ResultMetric", "1: _logger_connector", "3: _results"]
    assert offenders(HERE.read_text(), private)


def test_only_one_file_touches_lightnings_private_members():
    private = private_names()
    found = {}
    for folder in ("hardware", "trial", "workloads"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            lines = offenders(path.read_text(), private)
            if lines and path != HERE:
                found[str(path.relative_to(ROOT))] = lines
    assert found == {}


def test_nobody_outside_takes_steps_but_through_take_steps():
    """``graph``, ``lean_loop``, ``watch`` and what they need are the room's own."""
    room = ROOT / "trial" / "fast"
    open_to_others = ("compile", "take_steps")
    inner = [path.stem for path in room.glob("*.py") if path.stem not in open_to_others]
    names = "|".join(inner)
    imported = re.compile(
        rf"^\s*(from|import) bstune\.trial\.fast(\.| import )({names})\b", re.MULTILINE
    )
    for path in ROOT.rglob("*.py"):
        assert path.parent == room or not imported.search(path.read_text()), path
    assert imported.search((room / "take_steps.py").read_text())
