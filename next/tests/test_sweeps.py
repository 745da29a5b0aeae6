"""The command of the sweeps, and the rows that each keeps."""

import json

import pytest
from refusals import cases, refused

from bstune.__main__ import main
from bstune.core.errors import InputError
from bstune.sweeps.rows import measure_units
from bstune.sweeps.studies import study

UNITS = [{"size": 1}, {"size": 2}, {"size": 3}]


def squares(calls):
    def measure(unit):
        calls.append(unit["size"])
        if unit["size"] in (2, 3) and len(calls) < 4:
            raise KeyboardInterrupt
        return {"square": unit["size"] ** 2}

    return measure


def test_rows_of_a_sweep_that_is_interrupted_twice(tmp_path):
    path, calls = tmp_path / "new" / "rows.jsonl", []
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            measure_units(path, {"seed": 0}, UNITS, squares(calls))
    # What a kill in the midst of a line leaves.
    with path.open("a") as file:
        file.write('{"size": 2, "squ')
    table = measure_units(path, {"seed": 0}, UNITS, squares(calls))
    assert calls == [1, 2, 2, 2, 3]
    assert table.to_dict("list") == {"size": [1, 2, 3], "square": [1, 4, 9]}
    assert [json.loads(line) for line in path.read_text().splitlines()][1:] == [
        {"size": size, "square": size**2} for size in (1, 2, 3)
    ]


def test_rows_of_other_settings_are_refused(tmp_path):
    measure_units(tmp_path / "rows", {"seed": 0}, UNITS, lambda unit: {})
    with pytest.raises(InputError, match="other settings"):
        measure_units(tmp_path / "rows", {"seed": 1}, UNITS, lambda unit: {})


@pytest.mark.parametrize("line", ["[1]", "{", "3", "[" * 3000])
def test_what_is_no_row_is_refused(tmp_path, line):
    settings = {"command": ["data.token=pw"]}
    measure_units(tmp_path / "rows", settings, UNITS, lambda unit: {})
    assert "pw" not in (tmp_path / "rows").read_text()
    with (tmp_path / "rows").open("a") as file:
        file.write(line + "\n")
    with refused("rows"):
        measure_units(tmp_path / "rows", settings, UNITS, lambda unit: {})


@cases(
    """
arguments
nothing
vectorization sise=3
vectorization size=-3
vectorization size=[3
vectorization size
vectorization run=3
vectorization output=null
""",
    str,
)
def test_what_is_no_sweep_and_no_setting_is_refused(arguments, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["sweep", *arguments.split()]) == 2
    assert arguments.split()[0] in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_study_of_other_settings_is_refused(tmp_path):
    (tmp_path / "a.json").write_text('["+workload=digits"]')
    with pytest.raises(InputError, match="other settings"):
        study("a", tmp_path, ["+workload=digits", "trials=3"])


def test_sweeps_are_listed_with_their_sources(capsys):
    assert main(["sweep"]) == 0
    assert "Dive into Deep Learning" in capsys.readouterr().out
