"""What a user's mistake ends in: an error of one line that names what was received; and tables of
what users write."""

from contextlib import contextmanager

import pytest
import yaml

from bstune.core.errors import InputError


@contextmanager
def refused(words="", error=InputError):
    """Expect an error of one line with each of these words, which commas part."""
    with pytest.raises(error) as caught:
        yield
    line = str(caught.value)
    assert "\n" not in line
    for word in words.split(", "):
        assert word in line, f"{word!r} is not in {line!r}"


def rows(text):
    """The rows of a table, a line each, whose cells are parted by bars; # begins a comment."""
    lines = [line for line in text.strip().splitlines() if not line.startswith("#")]
    return [[cell.strip() for cell in line.split(" | ")] for line in lines]


def as_yaml(cell):
    """What a cell of ``key: value, ...`` says."""
    return yaml.safe_load(f"{{{cell.strip('-')}}}")


def cases(text, read=yaml.safe_load):
    """Run a test for each row of a table, whose head names the columns.

    Its cells are YAML: numbers, words, null, true, lists.
    """
    head, *lines = rows(text)
    return pytest.mark.parametrize(head, [[read(cell) for cell in line] for line in lines])


def text_cases(text):
    """The same of a table whose cells are texts."""
    return cases(text, read=str)
