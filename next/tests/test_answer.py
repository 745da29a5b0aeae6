import os
import re
from pathlib import Path

import pytest
from results import STATES, keep, not_yet, nothing_reached, result

from bstune.core.question import WORDINGS
from bstune.report.answer import answer, header, render
from bstune.study.result import Speedup

GOLDEN = Path(__file__).parent / "golden" / "answer.txt"
NUMBER = re.compile(r"(?<![\w.,/])\d[\d,]*\.?\d*(?:e-?\d+)?")

BEST = [118, 1.18]
BASELINE = [64, 0.4]
SWITCH = ("Switch", [*BEST, 2.9, 2.3, 3.8, *BASELINE])
# All new seeds of both, and the share of further ones.
SEEDS = [3, 9, 10]
TIMES = ("Time", [33, 55, 96, 201, *SEEDS])
ALSO_GOOD = ("Also good", [48, 173, 1.05, 2.4])
RANGE = ("Also good", [48, 173])
SCALING = ("Scaling", [130, 85, 212])
TRAIN = ("Train", [118, 1.18])
CLOSEST = ("Not yet", [0.05, 0.0714, 24, 0.02])
OCTAVES = ("Range", [8, 1024, 6, 7, 724])
RATES = ("Rates", [0.45, 0.31, 0.58])
EASIER_ROW = ("Easier", [0.08, 0.08, 2])

# Some states of design.md, section 1, by hand: their rows in order, each with its numbers in order,
# in the units that they are printed in; golden/answer.txt has all states.
EXPECTED = {
    "switch": [SWITCH, TIMES, ALSO_GOOD, SCALING, TRAIN],
    "several values": [
        ("Switch", SWITCH[1][2:5] + BASELINE),
        ("Best", [*BEST, 0.74, 3]),
        TIMES,
        ("Also good", [48, 173, 1.05, 2.4]),
        SCALING,
        ("Train", []),
    ],
    "keep": [
        ("Keep", [*BASELINE, 12, 1.2]),
        ("Time", [96, 201, 96, 0.5, 91, 162, *SEEDS]),
        RANGE,
        SCALING,
    ],
    "nothing reached: still falling": [CLOSEST, EASIER_ROW, ("Next", [4000, 2])],
    "metric: switch": [
        ("Switch", [24, 0.003, 1.52, 1.61, 300, 0.09, 0.05, 0.13]),
        ("Budget", [300, 9360, 4210, 3]),
        ("Also good", [16, 40]),
        ("Train", [24, 0.003, 9360]),
    ],
    "metric: a budget of steps": [
        ("Switch", [24, 0.003, 1.52, 1.61, 9360, 0.09, 0.05, 0.13]),
        ("Budget", [9360, 5, 9360, 5, 4210, 3]),
        ("Also good", [16, 40]),
        ("Train", [24, 0.003, 9360]),
    ],
    "metric: keep": [
        ("Keep", [64, 0.001, 64, 0.0051]),
        ("Budget", [300, 4210, 9360, 3]),
        ("Also good", [16, 40]),
    ],
    "metric: not yet: the baseline is the best": [
        ("Not yet", [64, 0.001, 1.61, 1.64, 300, 0.03, 0.01, 0.07]),
        ("Budget", [300, 4210, 9360, 3]),
        ("Next", [6]),
    ],
    "largest size binds": [SWITCH, TIMES, ALSO_GOOD, ("Scaling", [812, 512]), TRAIN],
    "curve: open below": [
        ("Critical", [12, 8]),
        OCTAVES,
        RATES,
        ("Warning", [1.4, 8, 16]),
        ("Next", [128]),
    ],
}


def numbers(text):
    # A file and line is no number of the answer.
    without_places = re.sub(r"\w+\.py:\d+", "", text)
    return [float(found.replace(",", "")) for found in NUMBER.findall(without_places)]


@pytest.mark.parametrize("state", EXPECTED)
def test_rows_and_numbers_of_each_state(state):
    rows = answer(STATES[state])
    assert [(row.label, numbers(row.text)) for row in rows] == EXPECTED[state]


@pytest.mark.parametrize("state", STATES)
def test_text_is_80_columns_wide_with_at_most_30_numbers_in_the_question_s_order(
    state,
):
    study = STATES[state]
    text = render(study)
    assert max(len(line) for line in text.splitlines()) <= 80
    assert len(numbers(text)) <= 30
    labels = WORDINGS[study.objective].rows
    places = [labels.index(row.label) for row in answer(study)[1:]]
    assert places == sorted(places)


def test_an_end_of_a_speedup_is_told_from_1():
    """A switch stands on a lower end above 1, which two digits would hide."""
    speedup = Speedup(value=1.2, low=1.032, high=1.4, at_least=False)
    assert numbers(answer(result(speedup=speedup))[0].text)[2:5] == [1.2, 1.032, 1.4]


@pytest.mark.parametrize(
    ("study", "absent"),
    [
        (result(near_optimal=(118, 118), lr_alone=None), "Also good"),
        (result(critical=None), "Scaling"),
        (keep().model_copy(update={"train": "bstune"}), "Train"),
        (not_yet(train_command="bstune"), "Train"),
        (nothing_reached("failed", closest=None), "Next"),
    ],
)
def test_a_row_that_has_nothing_to_say_is_absent(study, absent):
    assert absent not in [row.label for row in answer(study)]


@pytest.mark.parametrize(
    ("device", "threads", "shown"),
    [("cpu", 4, [0.1, 4, 64, 90]), ("cuda", 4, [0.1, 64, 90])],
)
def test_header_counts_threads_on_a_cpu(device, threads, shown):
    text = header(result(device=device, threads=threads))
    assert numbers(text.replace("90%", "90")) == shown


def test_words_of_all_states():
    blocks = [f"# {state}\n\n{render(study)}" for state, study in STATES.items()]
    words = "\n\n\n".join(blocks) + "\n"
    if os.environ.get("BSTUNE_GOLDEN"):
        GOLDEN.write_text(words)
    assert words == GOLDEN.read_text()


def test_a_schedule_s_length_is_named_with_the_configuration():
    state = result()
    best = state.best.model_copy(update={"schedule_steps": 453})
    rows = answer(state.model_copy(update={"best": best}))
    assert [row.text.count("453") for row in rows if row.label == "Switch"] == [1]
    # Nothing else changes.
    assert len([row for row in rows if "453" in row.text]) == 1
