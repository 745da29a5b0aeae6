"""What a user's mistake ends in: an error of one line that names what was received."""

from contextlib import contextmanager

import pytest

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
