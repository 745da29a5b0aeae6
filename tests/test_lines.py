"""How wide the package's code is: ruff's line-length rule holds docstrings alike, which are wider."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
COLUMNS = 100
CODE = [*ROOT.glob("bstune/**/*.py"), *ROOT.glob("sweeps/*.py")]


def wide_lines(text):
    """Return the numbers of the lines of code over 100 columns; docstrings, of attributes too, are none."""
    lines = text.splitlines()
    wide = [number for number, line in enumerate(lines, start=1) if len(line) > COLUMNS]
    if not wide:
        # To parse it takes most of the time.
        return []
    documented = set()
    for node in ast.walk(ast.parse(text)):
        is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if is_text and isinstance(node.value.value, str):
            documented.update(range(node.lineno, node.end_lineno + 1))
    return [number for number in wide if number not in documented]


@pytest.mark.parametrize(
    ("text", "numbers"),
    [
        (f"x = '{'a' * 94}'\n", []),
        (f"x = '{'a' * 95}'\n", [1]),
        (f"y = 1\n# {'a' * 99}\n", [2]),
        # Of an attribute.
        (f"y: int\n'''{'a' * 99}'''\n", []),
    ],
)
def test_wide_lines_are_found(text, numbers):
    assert wide_lines(text) == numbers


def test_no_line_of_code_is_over_100_columns():
    wide = []
    for path in CODE:
        numbers = wide_lines(path.read_text(encoding="utf-8"))
        wide += [f"{path.relative_to(ROOT)}:{number}" for number in numbers]
    # The folders were found.
    assert len(CODE) > 100
    assert wide == []
