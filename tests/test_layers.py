"""Imports run downwards, from core to sweeps; what shows a finished study needs core and search alone."""

import ast
import sys
from pathlib import Path

import bstune

ROOT = Path(bstune.__file__).parent
SWEEPS = ROOT.parent / "sweeps"
# From the ground up; rooms of one line are one floor.
LAYERS = (
    "core",
    "system",
    "options result",
    "recipe hydra_versions",
    "config choices hydra_recipe search",
    "report",
    "trial",
    "workloads hardware",
    "study tracking",
    "__main__ integrations",
    "sweeps",
)
RANK = {}
for rank, names in enumerate(LAYERS):
    RANK |= dict.fromkeys(names.split(), rank)
# Of one floor, and neither imports the other.
APART = (({"config", "choices", "hydra_recipe"}, {"search"}), ({"workloads"}, {"hardware"}))
# Everything else gets typed options and a recipe.
KNOW_HYDRA = (
    "config.py",
    "choices.py",
    "hydra_recipe.py",
    "hydra_versions.py",
    "__main__.py",
    "integrations/",
    "sweeps/harness.py",
)
CORE_PACKAGES = {*sys.stdlib_module_names, "numpy", "scipy", "bstune"}
HEAVY = ("torch", "lightning", "pytorch_lightning", "mlflow", "omegaconf", "hydra")


def statements(tree, is_late=False):
    """Each statement, and whether it runs inside a function, type checkers' own left aside."""
    for node in ast.iter_child_nodes(tree):
        # No expression holds an import, and most nodes are in expressions.
        if not isinstance(node, ast.stmt | ast.excepthandler | ast.match_case):
            continue
        yield node, is_late
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            for inner, _ in statements(node):
                yield inner, False
        else:
            is_function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
            yield from statements(node, is_late or is_function)


def imports(tree):
    """(line, imported module, whether it takes start-up time inside a function) of every import."""
    for node, is_late in statements(tree):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module == "bstune":
            names = [f"bstune.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module]
        for name in names:
            yield node.lineno, name, is_late


def are_apart(own, other):
    """Whether two rooms of one floor are such that neither imports the other."""
    pair = {own, other}
    return any(pair & some and pair & others for some, others in APART)


def is_commented(lines, number):
    """Whether the import in a line, from 1, has a comment: beside it, or above it and its like."""
    for line in reversed(lines[: number - 1]):
        # One comment serves the imports below it.
        if line.strip() and not line.strip().startswith(("import ", "from ")):
            return "#" in lines[number - 1] or line.strip().startswith("#")
    return "#" in lines[number - 1]


def offenders(path, text):
    """A line for each import of a file, by its path below bstune, that breaks a rule."""
    own = path.split("/")[0].removesuffix(".py")
    lines = text.splitlines()
    for number, module, late in imports(ast.parse(text)):
        other = module.split(".")[1] if module.startswith("bstune.") else None
        reasons = {
            "runs up": other in RANK and own in RANK and RANK[other] > RANK[own],
            "beside its layer": are_apart(own, other),
            "only YAML names workloads": other == "workloads" and own != "workloads",
            "report shows plain data": own == "report"
            and (
                module.split(".")[0] in HEAVY
                or other in RANK.keys() - {"core", "system", "result", "search", "report"}
            ),
            "only tracking imports mlflow": module.split(".")[0] == "mlflow"
            and not path.startswith("tracking/"),
            "only what composes knows Hydra": module.split(".")[0] in ("hydra", "omegaconf")
            and not path.startswith(KNOW_HYDRA),
            "core computes with numpy and scipy alone": own == "core"
            and module.split(".")[0] not in CORE_PACKAGES,
            "results are typed by pydantic and core alone": own == "result"
            and (
                module.split(".")[0] not in CORE_PACKAGES - {"numpy", "scipy"} | {"pydantic"}
                or other not in (None, "core", "result")
            ),
            "inside a function without a comment": late and not is_commented(lines, number),
        }
        for reason, broken in reasons.items():
            if broken:
                yield f"{path}:{number}: {module}: {reason}"


def reasons_for(path, text):
    """The rules that a file's imports break, one after the other."""
    return [line.split(": ")[-1] for line in offenders(path, text)]


def test_the_check_can_fail():
    text = (
        "from bstune.study.run import run\nimport mlflow\n\ndef f():\n    from "
        "bstune.workloads import images\n"
    )
    assert reasons_for("core/curve.py", text) == [
        "runs up",
        "only tracking imports mlflow",
        "core computes with numpy and scipy alone",
        "runs up",
        "only YAML names workloads",
        "inside a function without a comment",
    ]
    shown = "import torch\nimport bstune.options"
    assert reasons_for("report/html.py", shown) == ["report shows plain data"] * 2
    beside = "from bstune.hydra_recipe import instantiate\n"
    assert reasons_for("search/sampler.py", beside) == ["beside its layer"]
    hydra = "from omegaconf import DictConfig\nimport hydra.utils\n"
    assert reasons_for("study/early_checks.py", hydra) == ["only what composes knows Hydra"] * 2
    assert list(offenders("hydra_recipe.py", hydra)) == []
    assert list(offenders("sweeps/harness.py", hydra)) == []
    assert (
        list(
            offenders(
                "study/run.py", "def f():\n    # 4 s\n    import torch\n    import lightning\n"
            )
        )
        == []
    )


def test_imports_run_downwards():
    files = {}
    for path in ROOT.rglob("*.py"):
        if path.name != "__init__.py":
            files[str(path.relative_to(ROOT))] = path
    for path in SWEEPS.glob("*.py"):
        files[f"sweeps/{path.name}"] = path
    found = []
    for name, path in sorted(files.items()):
        found += offenders(name, path.read_text())
    assert not found, "\n".join(found)
