import os
import re
from pathlib import Path

import pytest
from results import STATES

from bstune.report.answer import render

GOLDEN = Path(__file__).parent / "golden" / "answer.txt"
NUMBER = re.compile(r"(?<![\w.,/])\d[\d,]*\.?\d*(?:e-?\d+)?")


def numbers(text):
    # A file and line is no number of the answer.
    without_places = re.sub(r"\w+\.py:\d+", "", text)
    return [float(found.replace(",", "")) for found in NUMBER.findall(without_places)]


@pytest.mark.parametrize("state", STATES)
def test_text_is_80_columns_wide_with_at_most_30_numbers(state):
    text = render(STATES[state])
    assert max(len(line) for line in text.splitlines()) <= 80
    assert len(numbers(text)) <= 30


def test_words_of_all_states():
    blocks = [f"# {state}\n\n{render(study)}" for state, study in STATES.items()]
    words = "\n\n\n".join(blocks) + "\n"
    if os.environ.get("BSTUNE_GOLDEN"):
        GOLDEN.write_text(words)
    assert words == GOLDEN.read_text()
