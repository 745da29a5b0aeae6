"""``bstune extrapolate --branches``: how the critical batch size grows within one run."""

import json
from dataclasses import asdict, replace

import pytest
import yaml

from bstune.core.branching import Branch, Branches, LargestBatch
from bstune.core.errors import ConfigError, StudyError
from bstune.core.records import dump_json
from bstune.study.verbs.branch_scales import extrapolate_branches, read_branches


def branches_at(examples_seen, largest, *, unbounded=0, **changes):
    """Build what three seeds at a checkpoint come to."""
    found = Branches(
        checkpoint=f"{examples_seen:.0f}.ckpt",
        metric="val/loss",
        start=2.0,
        batch_size=32,
        examples=6400,
        tolerance=0.01,
        lr_exponent=0.5,
        branches=tuple(Branch(32, seed, 200, "stopped", 1.9, None) for seed in range(3)),
        largest=LargestBatch(largest, largest / 1.2, largest * 1.2, unbounded),
        examples_seen=examples_seen,
    )
    return replace(found, **changes)


def square_root_growth(**changes):
    found = []
    for power in range(3):
        branches = branches_at(10**power * 1e3, 64 * 10 ** (power / 2))
        found.append(replace(branches, **changes))
    return found


def test_the_critical_batch_size_and_its_schedule_follow_the_run():
    found = extrapolate_branches(square_root_growth(), "examples", 1e5)
    law = found.laws["critical_batch_size"]
    assert law.exponent.value == pytest.approx(0.5, abs=0.02)
    assert law.wanted.value == pytest.approx(640, rel=0.05)
    # It doubles for four times the examples.
    assert [step.batch_size for step in found.schedule] == [64, 128, 256, 512]
    assert [step.start for step in found.schedule] == pytest.approx([0, 4e3, 16e3, 64e3], rel=0.05)
    # The one note says that the rate follows.
    assert len(found.notes) == 1


def test_tokens_are_those_of_an_example_times_the_examples():
    found = extrapolate_branches(square_root_growth(tokens=64), "tokens", 64e5)
    assert [row.scale for row in found.rows] == [64e3, 64e4, 64e5]


@pytest.mark.slow
def test_a_checkpoint_without_an_upper_end_is_left_out_and_named():
    branches = [*square_root_growth(), branches_at(3e5, 2048, unbounded=3)]
    found = extrapolate_branches(branches, "examples", 1e6)
    assert len(found.rows) == 3
    assert "300000.ckpt" in found.notes[0]


@pytest.mark.parametrize(
    ("found", "name", "error", "message"),
    [
        (square_root_growth(), "parameters", ConfigError, "--at parameters"),
        (square_root_growth(), "tokens", StudyError, "have no tokens"),
        (square_root_growth()[:2], "examples", StudyError, "tell 2"),
        (
            # Three checkpoints at the same examples.
            [branches_at(1e3, 64)] * 3,
            "examples",
            StudyError,
            "at least 3 different examples",
        ),
        (square_root_growth(examples_seen=None), "examples", StudyError, "do not tell"),
        (
            [*square_root_growth(), branches_at(1.0, 9, tolerance=0.02)],
            "examples",
            StudyError,
            "tolerance is 0.01 and 0.02",
        ),
    ],
)
def test_what_tells_no_law_is_refused(found, name, error, message):
    with pytest.raises(error, match=message):
        extrapolate_branches(found, name, 1e6)


@pytest.fixture
def run(run_verb, monkeypatch, tmp_path):
    """Run the verb in an empty folder; return its exit status and what it printed."""
    monkeypatch.chdir(tmp_path)
    return lambda *arguments: run_verb("extrapolate", *arguments)


def test_the_verb_reads_what_branch_printed_and_writes_a_card(run, tmp_path):
    names = list[str]()
    for found in square_root_growth(tokens=64):
        names.append(f"{found.checkpoint}.json")
        (tmp_path / names[-1]).write_text(dump_json(asdict(found), indent=1))
        assert read_branches(tmp_path / names[-1]) == found
    status, out, _ = run("--branches", *names, "--at", "tokens=64e5", "--card", "c.yaml", "--json")
    assert status == 0
    assert len(json.loads(out)["rows"]) == 3
    card = yaml.safe_load((tmp_path / "c.yaml").read_text())
    assert card["batch_size_is"] == "critical batch size"
    assert card["megatron_lm"].startswith('--step-batch-size-schedule "0:64 ')


@pytest.mark.parametrize(
    ("text", "arguments", "message"),
    [
        ("{", (), "is not what `bstune branch ... --json` prints"),
        ('{"checkpoint": 1}', (), "is not what"),
        (None, (), "cannot be read"),
        ("{}", ("outputs",), "stands in place of studies"),
    ],
)
def test_bad_files_end_in_a_line(text, arguments, message, run, tmp_path):
    if text is not None:
        (tmp_path / "b.json").write_text(text)
    for folder in arguments:
        (tmp_path / folder).mkdir()
    status, _, err = run(
        *arguments, "--at", "examples=1e6", "--branches", "b.json", "--card", "c.yaml"
    )
    assert (status, message in err) == (2, True), err
    assert not (tmp_path / "c.yaml").exists()
