import json

import pytest
from toolbox import make_trial

from bstune.core.errors import StudyError
from bstune.core.records import STATUSES
from bstune.report.study_folder import completed, read_study
from bstune.system.files import Output

CURVE = {
    "study": "s",
    "points": [],
    "critical": {"b_crit": 40.0, "smallest": 8, "largest": 64},
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
    hardware = {"high": 8, "measured": {}, "ceiling": {"at": {"batch_size": 8}, "smallest": 4}}
    folder = write_study(tmp_path, survey=json.dumps(hardware))
    study = read_study(folder)
    assert study == read_study(folder / "curve.json")
    assert [trial.number for trial in study.trials] == [0, 1]
    assert study.hardware["ceiling"]["smallest"] == 4
    assert study.hardware["measured"] == {"timings": []}
    assert (study.config, study.best) == ({"seed": 0}, {"best_by_time": {"lr": 0.1}})
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
        ({"config": "a: [1"}, "config", "config.yaml is not YAML"),
        ({"config": ""}, "config", "config.yaml is empty, or no mapping"),
        ({"survey": '{"device": '}, "hardware", "hardware.json is not JSON"),
        (
            {"survey": '{"high": 8, "ceiling": {"smallest": 4}}'},
            "hardware",
            "hardware.json is no file of this version",
        ),
        ({"best": None}, "best", "best.yaml is missing"),
        ({"trials": None}, "trials", "trials.jsonl is missing"),
        (
            {"trials": '{"slot": 3}\n'},
            "trials",
            "trials.jsonl: line 1: a trial record lacks batch_size",
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
        ('{"points": [', "curve.json is not JSON"),
        ("[1]", "curve.json is no file of this version"),
        ('{"target": 1}', "curve.json is no file of this version"),
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


def test_metrics_of_trials_that_diverge_may_be_as_large_as_they_are(tmp_path):
    closest = {"value": 1e20, "steps": 3, "number": 0, "batch_size": 8, "lr": 0.1}
    curve = CURVE | {"unreached": {"closest": closest, "easier": 1e300}}
    study = read_study(write_study(tmp_path, curve=json.dumps(curve)))
    assert study.summary["unreached"]["closest"]["value"] == 1e20


def test_a_summary_that_lacks_parts_has_all_keys():
    row = {"number": 0, "batch_size": 8, "lr": 0.1, "steps": 9}
    summary = completed({"points": [], "best_by_steps": row})
    assert summary["best_by_steps"] == {**summary["best_by_steps"], **row, "confirmed": None}
    assert summary["best_by_time"] is None
    assert summary["scale_out"] == {"ideal": [], "with_all_reduce": []}
    assert summary["statuses"] == dict.fromkeys(STATUSES, 0)
