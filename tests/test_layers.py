"""Imports run downwards, from core to sweeps; what shows a finished study needs core and search alone."""

import ast
import sys
from pathlib import Path

import bstune

ROOT = Path(bstune.__file__).parent
SWEEPS = ROOT.parent / "sweeps"
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
RANK = {name: rank for rank, names in enumerate(LAYERS) for name in names.split()}
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


def imports(tree):
    """(line, imported module, whether it takes start-up time inside a function) of every import."""
    typing_blocks = (
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
    )
    functions = (
        node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    )
    typing_only = {node for block in typing_blocks for node in ast.walk(block)}
    late = {node for function in functions for node in ast.walk(function)} - typing_only
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name, node in late) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            names = (
                [node.module]
                if node.module != "bstune"
                else [f"bstune.{alias.name}" for alias in node.names]
            )
            yield from ((node.lineno, name, node in late) for name in names)


def offenders(path, text):
    """A line for each import of a file, by its path below bstune, that breaks a rule."""
    own = path.split("/")[0].removesuffix(".py")
    lines = text.splitlines()
    for number, module, late in imports(ast.parse(text)):
        other = module.split(".")[1] if module.startswith("bstune.") else None
        before = [line.strip() for line in lines[: number - 1]]
        while before and (not before[-1] or before[-1].startswith(("import ", "from "))):
            before.pop()  # one comment serves the imports below it
        commented = "#" in lines[number - 1] or (before and before[-1].startswith("#"))
        reasons = {
            "runs up": other in RANK and own in RANK and RANK[other] > RANK[own],
            "beside its layer": any(
                (own in one and other in another) or (own in another and other in one)
                for one, another in APART
            ),
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
                or other not in (None, "core")
            ),
            "inside a function without a comment": late and not commented,
        }
        yield from (
            f"{path}:{number}: {module}: {reason}" for reason, broken in reasons.items() if broken
        )


def test_the_check_can_fail():
    text = "from bstune.study.run import run\nimport mlflow\n\ndef f():\n    from bstune.workloads import images\n"
    assert [line.split(": ")[-1] for line in offenders("core/curve.py", text)] == [
        "runs up",
        "only tracking imports mlflow",
        "core computes with numpy and scipy alone",
        "runs up",
        "only YAML names workloads",
        "inside a function without a comment",
    ]
    assert [
        line.split(": ")[-1]
        for line in offenders("report/html.py", "import torch\nimport bstune.options")
    ] == ["report shows plain data"] * 2
    assert [
        line.split(": ")[-1]
        for line in offenders("search/sampler.py", "from bstune.hydra_recipe import instantiate\n")
    ] == ["beside its layer"]
    hydra = "from omegaconf import DictConfig\nimport hydra.utils\n"
    assert [line.split(": ")[-1] for line in offenders("study/early.py", hydra)] == [
        "only what composes knows Hydra"
    ] * 2
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
    files = {
        str(path.relative_to(ROOT)): path
        for path in ROOT.rglob("*.py")
        if path.name != "__init__.py"
    }
    files |= {f"sweeps/{path.name}": path for path in SWEEPS.glob("*.py")}
    found = [
        line for name, path in sorted(files.items()) for line in offenders(name, path.read_text())
    ]
    assert not found, "\n".join(found)
