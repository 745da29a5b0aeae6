"""A module imports its own layer or lower ones."""

import ast
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "bstune"
LAYERS = (
    {"core", "system"},
    {"options", "search"},
    {"recipe"},
    {"trial", "workloads"},
    {"hardware"},
    {"study"},
    {"report", "tracking"},
    {"config", "result", "run_study", "api", "join", "own_loop"},
    {"integrations"},
    {"__main__"},
    {"sweeps"},
)
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}


def unit(module):
    return module.split(".")[1]


def imports(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("bstune."):
            yield unit(node.module)


def violations(root):
    found = []
    # A link to them is not followed.
    for path in sorted([*root.rglob("*.py"), *root.glob("sweeps/*.py")]):
        own = path.relative_to(root).parts[0].removesuffix(".py")
        if own == "__init__":
            continue
        found += [(own, other) for other in imports(path) if LEVEL[other] > LEVEL[own]]
    return found


def test_modules_import_their_own_layer_or_lower_ones():
    assert violations(PACKAGE) == []


def test_that_test_can_fail(tmp_path):
    (tmp_path / "core").mkdir()
    (tmp_path / "core" / "bad.py").write_text("from bstune.study.plan import Plan\n")
    assert violations(tmp_path) == [("core", "study")]
