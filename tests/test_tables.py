"""The tables that ship, and their index."""

import re
import shlex
import shutil
from itertools import product
from pathlib import Path

import pytest
from builders import options_of

from bstune.core.errors import ConfigError
from bstune.trial.replay import SHIPPED, find_table, read_index, read_table, unusable_target

INDEX = read_index()
OF_HORIZONS = read_index(horizon=True)


def recordings(name):
    """(file, points, overrides) of each recording in the command that made a table."""
    *recorded, last = map(shlex.split, INDEX[name].command.split("&&"))
    if last[0] != "cat":
        recorded = [*recorded, last]
        last = ["cat", last[2], ">", last[2]]
    found = []
    for words in recorded:
        assert words[:2] == ["bstune", "record"]
        # Three options, each with its value; overrides follow.
        options = dict(zip(words[3:9:2], words[4:9:2], strict=True))
        grid = []
        for option in ("--batch-sizes", "--lrs", "--seeds"):
            grid.append([float(value) for value in options[option].split(",")])
        found.append((words[2], list(product(*grid)), words[9:]))
    files = [file for file, _, _ in found]
    assert last[1:] == [*files, ">", f"{name}.jsonl"]
    return found


@pytest.mark.parametrize("name", sorted(path.stem for path in SHIPPED.glob("*.jsonl")))
def test_its_target_is_reached_in_most_batch_sizes_and_not_at_once(name):
    source = (INDEX | OF_HORIZONS)[name]
    table = read_table(source.path)
    assert table.has_horizons == (name in OF_HORIZONS)
    assert unusable_target(table, source.target) is None
    reached = set()
    for run in table.runs:
        if run.steps_to(source.target) is not None:
            reached.add(run.batch_size)
    # Otherwise a study has too little to find.
    assert len(reached) > 0.5 * len(table.batch_sizes)


@pytest.mark.parametrize("name", INDEX)
def test_its_command_makes_it(name, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    runs = {(run.batch_size, run.lr, run.seed): run for run in read_table(INDEX[name].path).runs}
    recorded = recordings(name)
    of_command = []
    for _, points, _ in recorded:
        of_command += points
    assert sorted(of_command) == sorted(runs)
    target = INDEX[name].target
    for _, points, overrides in recorded:
        options = options_of(*overrides)
        budget = options.budget.budget
        assert (options.workload.name, options.workload.target.metric) == (name, target.metric)
        # The recording went on to a harder target.
        assert options.workload.target.value < target.value
        # No run was cut short.
        for run in (runs[point] for point in points):
            assert (
                run.steps_to(target) or run.diverged or run.end == budget.last_step(run.batch_size)
            )


@pytest.mark.parametrize("name", OF_HORIZONS)
def test_the_target_is_just_met_within_the_horizons_of_most_batch_sizes(name):
    source = OF_HORIZONS[name]
    table = read_table(source.path)
    within = set()
    for (size, _), runs in table.cells.items():
        seeds = set()
        horizons = set()
        met = set()
        for run in runs:
            seeds.add(run.seed)
            horizons.add(run.horizon)
            if run.steps_to(source.target) is not None:
                met.add(run.horizon)
        assert len(runs) == len(seeds) * len(horizons)
        # The shortest horizon is too short, so that there is one to find.
        if met and min(met) > min(horizons):
            within.add(size)
    assert len(within) > 0.5 * len(table.batch_sizes)


@pytest.mark.parametrize("name", ["fashion_mlp", "digits_linear"])
def test_it_is_replayed_to_its_own_target_unless_another_is_given(monkeypatch, tmp_path, name):
    monkeypatch.chdir(tmp_path)
    expected = (INDEX | OF_HORIZONS)[name].target
    for table in (name, find_table(name)):
        options = ["+workload=replay", f"workload.table={table}"]
        target = options_of(*options).workload.target
        assert (target.metric, target.value) == (expected.metric, expected.value)
        assert options_of(*options, "workload.target.value=0.3").workload.target.value == 0.3
    Path("mine.jsonl").write_text(find_table(name).read_text())
    options = ["+workload=replay", "workload.table=mine.jsonl", "workload.target.value=0.3"]
    assert options_of(*options).workload.target.metric == "val/error"


def test_a_copy_is_anyones_table(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    shutil.copy(find_table("fashion_mlp"), "fashion_mlp")
    with pytest.raises(
        ConfigError, match=r"workload.target.value is missing: give the value to reach"
    ):
        options_of("+workload=replay", "workload.table=fashion_mlp")


def test_two_tables_are_two_studies(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    text = find_table("fashion_mlp").read_text().splitlines(keepends=True)
    # The same name in two folders, and a name that no path or page takes as it is.
    files = {"a/mine.jsonl": text, "b/mine.jsonl": text[:-1], "tab <b>ü$x.jsonl": text}
    for name, lines in files.items():
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).write_text("".join(lines))
    tables = [*INDEX, str(find_table("cifar_mlp")), *files]
    own = ("+workload=replay", "workload.target.value=0.3")
    composed = [options_of(*own, f"workload.table='{table}'") for table in tables]
    names = [options.study for options in composed]
    shipped = names[: len(INDEX) + 1]
    others = names[len(INDEX) + 1 :]
    assert shipped == [*(f"replay-{name}" for name in INDEX), "replay-cifar_mlp"]
    for name in others:
        assert re.fullmatch(r"replay-(mine|tab-b-ü-x)-[0-9a-f]{6}", name)
    assert len(set(others)) == 3
    for options in composed:
        assert options.output == f"outputs/{options.study}"
