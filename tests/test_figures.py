"""Each number of the READMEs follows from a record, is a setting, or says that it was not
recorded."""

import json
import re
from dataclasses import replace
from fnmatch import fnmatch

import pytest
import yaml
from recorded.accounts import HELD, not_recorded, unaccounted
from recorded.figure import (
    NUMBER,
    TOP,
    Figure,
    RecordFormatError,
    Unit,
    rows_of,
    units_in,
    units_of,
)
from recorded.figures import FIGURES

KNOWN_OF_A_RECORD = {"device", "date", "commit", "command"}
MEBIBYTE = 1 << 20
TOPICS = list(dict.fromkeys((figure.readme, figure.topic) for figure in FIGURES))
# Derived in a moment, one of them within a tolerance.
QUICK = ("coverage", "stated seconds", "trained", "fixed budget", "losses")


# A hundred fits, or many posteriors: the other topics have one of each kind.
LONG = (
    ("tests/benchmarks/README.md", "in training"),
    ("sweeps/README.md", "what moves B_crit"),
    ("sweeps/README.md", "optimizers"),
    ("conf/README.md", "workloads"),
)
RUNS = [
    pytest.param(*topic, marks=pytest.mark.soak if topic in LONG else pytest.mark.slow)
    for topic in TOPICS
]


def of_topic(readme, topic):
    return [figure for figure in FIGURES if (figure.readme, figure.topic) == (readme, topic)]


@pytest.mark.parametrize(("readme", "topic"), RUNS)
def test_each_number_is_what_its_records_say(readme, topic):
    units = units_in(readme)
    wrong = list[str]()
    for figure in of_topic(readme, topic):
        if figure.unit_that_states_it(units) is None:
            wrong.append(figure.text)
    assert wrong == []


def with_another_number(text, place):
    """Change one number: its first digit becomes another, so that it is far off."""
    number = list(re.finditer(NUMBER, text))[place]
    first = number.start() + number[0].startswith("-")
    digit = "9" if text[first] in "12345" else "1"
    return text[:first] + digit + text[first + 1 :]


@pytest.mark.slow
@pytest.mark.parametrize("topic", QUICK)
def test_a_number_that_is_changed_by_hand_is_found(topic):
    for figure in FIGURES:
        if figure.topic != topic:
            continue
        unit = figure.unit_that_states_it(units_in(figure.readme))
        # Of its sentence, not of what stands around it.
        text = re.search(figure.shape, unit.text)[0]
        for place in range(len(re.findall(NUMBER, text))):
            changed = replace(unit, text=with_another_number(text, place))
            assert figure.unit_that_states_it([changed]) is None, changed.text


@pytest.mark.parametrize("readme", HELD)
def test_each_number_has_a_record_or_says_that_it_has_none(readme):
    figures = [figure for figure in FIGURES if figure.readme == readme]
    assert unaccounted(units_in(readme), figures) == []


@pytest.mark.parametrize(
    ("text", "numbers"),
    [
        ("It takes 1.23 s.", ["1.23"]),
        ("| a | 12 |", ["12"]),
        ("It takes 1.23 s: at commit 1234abc, 3 November 2026; not recorded.", []),
        ("It takes 1.23 s: at some commit; not recorded.", ["1.23"]),
        ("`lr=0.1` of CIFAR-10 on an H100, B = 64, n = 5, 90% intervals, in 2018", []),
        ("[7 rows](rows_60.jsonl)", ["7"]),
    ],
)
def test_which_numbers_need_a_record(text, numbers):
    assert [number for number, _ in unaccounted([Unit("", text, text)], [])] == numbers


def test_a_paragraph_says_for_the_table_below_it_that_nothing_was_recorded():
    said = "B: measured at commit 1234abc, 3 November 2026; not recorded."
    units = list(units_of(f"# A\n{said}\n\n| 1.5 |\n\nIt is 2.5."))
    assert [number for number, _ in unaccounted(units, [])] == ["2.5"]
    assert len(not_recorded(units)) == 1


def test_of_each_record_it_is_known_how_it_was_measured():
    known = yaml.safe_load((TOP / "tests/recorded/records.yaml").read_text(encoding="utf-8"))
    for record in {record for figure in FIGURES for record in figure.records}:
        entries = [entry for path, entry in known.items() if fnmatch(record, path)]
        assert len(entries) == 1, record
        assert entries[0].keys() >= KNOWN_OF_A_RECORD, record


def test_records_are_small():
    records = {record for figure in FIGURES for record in figure.records}
    assert sum((TOP / record).stat().st_size for record in records) < 5 * MEBIBYTE


def mean_seconds(path):
    rows = rows_of(path)
    return {"seconds": sum(row["seconds"] for row in rows) / len(rows)}


@pytest.mark.parametrize(
    "line", ['{"wall": 2.0}', '{"seconds": '], ids=["another field", "half a line"]
)
def test_a_record_of_another_format_is_said_to_be_measured_again(tmp_path, line):
    record = tmp_path / "rows.jsonl"
    figure = Figure("own", "README.md", "It takes {seconds:.1f} s", (str(record),), mean_seconds)
    record.write_text(json.dumps({"seconds": 2.0}))
    assert figure.text == "It takes 2.0 s"
    other = tmp_path / "other.jsonl"
    other.write_text(line)
    with pytest.raises(RecordFormatError, match=r"other\.jsonl.*measure again"):
        _ = replace(figure, records=(str(other),)).text
