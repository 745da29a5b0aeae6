import json

import pytest
from toolbox import make_trial

from bstune.core.errors import StudyError
from bstune.report.answer import answer
from bstune.report.study_folder import OLDER, completed, read_study
from bstune.system.files import Output

CURVE = {
    "study": "s",
    "points": [],
    "critical": {"b_crit": 40.0},
    "best_by_time": {"number": 0, "batch_size": 8, "lr": 0.1, "steps": 9},
}


def write_study(folder, **texts):
    """Write a folder's files, those that are not given as a whole study has them; None: it is missing."""
    folder.mkdir(exist_ok=True)
    lines = "".join(make_trial(number).to_json() + "\n" for number in (0, 1))
    whole = {
        "curve": json.dumps(CURVE),
        "trials": lines,
        "best": "best_by_time: {lr: 0.1}\n",
        "config": "seed: 0\n",
    }
    for name, text in {**whole, **texts}.items():
        if text is not None:
            getattr(Output(folder), name).write_text(text)
    return folder


def test_a_whole_study_is_read_from_its_folder_and_from_its_curve(tmp_path):
    hardware = {"high": 8, "measured": {}, "ceiling": {"at": {}, "smallest": 4}}
    folder = write_study(tmp_path, survey=json.dumps(hardware))
    study = read_study(folder)
    assert study == read_study(folder / "curve.json")
    assert [trial.number for trial in study.trials] == [0, 1]
    assert (study.hardware, study.config, study.best) == (
        hardware,
        {"seed": 0},
        {"best_by_time": {"lr": 0.1}},
    )
    assert study.notes == ()


def test_a_curve_of_another_name_is_read_without_what_lies_beside_it(tmp_path):
    write_study(tmp_path)
    (tmp_path / "digits.json").write_text(json.dumps(CURVE))
    study = read_study(tmp_path / "digits.json")
    assert (study.trials, study.config, study.notes, study.summary["study"]) == ((), None, (), "s")


@pytest.mark.parametrize(
    ("texts", "attribute", "note"),
    [
        ({"config": None}, "config", "config.yaml is missing"),
        ({"config": "a: [1"}, "config", "config.yaml cannot be read: "),
        ({"config": ""}, "config", "config.yaml is empty, or no mapping"),
        ({"survey": '{"device": '}, "hardware", "hardware.json cannot be read: "),
        (
            {"survey": '{"high": 8, "ceiling": {"smallest": 4}}'},
            "hardware",
            "hardware.json is of another version",
        ),
        ({"best": None}, "best", "best.yaml is missing"),
        ({"trials": None}, "trials", "trials.jsonl is missing"),
        (
            {"trials": '{"slot": 3}\n'},
            "trials",
            "trials.jsonl: line 1: the trial record is of a former version",
        ),
        ({"trials": '[]\n{"number": 1\n'}, "trials", ", and 1 more: left out"),
    ],
)
def test_what_is_missing_or_half_written_is_none_with_a_line(tmp_path, texts, attribute, note):
    study = read_study(write_study(tmp_path, **texts))
    assert not getattr(study, attribute)
    assert len(study.notes) == 1
    assert note in study.notes[0]


def test_the_records_that_can_be_read_are_kept(tmp_path):
    lines = (
        make_trial(4).to_json()
        + "\n"
        + make_trial(2).to_json()
        + "\n"
        + make_trial(5).to_json()[:90]
    )
    study = read_study(write_study(tmp_path, trials=lines))
    assert [trial.number for trial in study.trials] == [2, 4]
    assert study.notes[0].startswith("trials.jsonl: line 3: ")


@pytest.mark.parametrize(
    ("curve", "said"),
    [
        (None, "has no curve.json (its study has not ended"),
        ('{"points": [', "curve.json cannot be read: "),
        ("[1]", "is no curve.json of bstune"),
        ('{"target": 1}', "is no curve.json of bstune"),
    ],
)
def test_without_a_curve_there_is_no_study(tmp_path, curve, said):
    folder = write_study(tmp_path, curve=curve)
    with pytest.raises(StudyError) as error:
        read_study(folder)
    assert said in str(error.value)
    assert "\n" not in str(error.value)


def test_a_folder_that_is_not_there_or_empty(tmp_path):
    with pytest.raises(StudyError, match=r"there is no folder .*nowhere"):
        read_study(tmp_path / "nowhere")
    with pytest.raises(StudyError, match="a study writes it at its end"):
        read_study(tmp_path)


def test_a_former_version_has_the_keys_of_this_one():
    summary = completed(
        {"points": [], "critical": {"b_crit": 40.0, "level": 0.8}, "best_by_steps": {"lr": 0.1}}
    )
    assert summary["critical"]["b_crit_low"] is None
    assert (summary["critical"]["b_crit"], summary["critical"]["level"]) == (40.0, 0.8)
    assert summary["best_by_steps"] == {**summary["best_by_steps"], "lr": 0.1, "confirmed": None}
    assert summary["best_by_time"] is None
    assert summary["scale_out"] == {"ideal": [], "with_all_reduce": []}


def test_a_former_versions_names_are_todays_and_a_line_says_that_parts_are_missing(tmp_path):
    old = CURVE | {"ended": "the plan is done", "statuses": {"reached": 2, "budget": 3}}
    study = read_study(write_study(tmp_path, curve=json.dumps(old)))
    assert study.summary["stop_reason"] == "the plan is done"
    assert study.summary["statuses"] == {"reached": 2, "censored": 3}
    assert study.summary["notes"] == [OLDER]
    assert (
        read_study(write_study(tmp_path, curve=json.dumps(completed(CURVE)))).summary["notes"] == []
    )
    assert dict(answer(study.summary).lines)["RUNS"] == (
        "2 reached the target, 3 stopped before; the plan is done",
    )


def test_a_winner_of_a_former_version_is_its_fresh_runs():
    fresh = {"reached": 3, "runs": 3, "steps_median": 61.0, "time_median": 0.61}
    row = {"batch_size": 64, "lr": 0.1, "steps": 46, "time_to_target": 0.46, "confirmed": fresh}
    old, now = (
        completed({"points": [], "best_by_time": row | more})
        for more in ({}, {"single_run": {"steps": 40}})
    )
    assert [old["best_by_time"][name] for name in ("steps", "time_to_target")] == [61.0, 0.61]
    assert [now["best_by_time"][name] for name in ("steps", "time_to_target")] == [46, 0.46]
