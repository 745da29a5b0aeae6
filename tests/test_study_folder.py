import json

import pytest
from builders import changed, hand_critical, result_of
from toolbox import make_trial

from bstune.core.errors import StudyError
from bstune.report.study_folder import read_study
from bstune.result import SCHEMA_NUMBER, ClosestTrial, Unreached
from bstune.system.files import Output

RESULT = result_of([make_trial(0), make_trial(1)], critical=hand_critical(40.0, 30.0, 50.0))
CURVE = RESULT.to_json()


def write_study(folder, **texts):
    """Write a folder's files, those that are not given as a whole study has them; None: it is missing."""
    folder.mkdir(exist_ok=True)
    lines = "".join(make_trial(number).to_json() + "\n" for number in (0, 1))
    whole = {
        "curve": CURVE,
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
    files = study.files
    assert study.result == RESULT
    assert [trial.number for trial in files.trials] == [0, 1]
    assert files.hardware.ceiling.smallest == 4
    assert files.hardware.measured.timings == ()
    assert (files.config, files.best) == ({"seed": 0}, {"best_by_time": {"lr": 0.1}})
    assert files.notes == ()


def test_a_curve_of_another_name_is_read_without_what_lies_beside_it(tmp_path):
    write_study(tmp_path)
    (tmp_path / "digits.json").write_text(CURVE)
    study = read_study(tmp_path / "digits.json")
    files = study.files
    assert (files.trials, files.config, files.notes, study.result.study) == ((), None, (), "s")


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
    study = read_study(write_study(tmp_path, **texts)).files
    assert not getattr(study, attribute)
    assert len(study.notes) == 1
    assert note in study.notes[0]


def test_the_records_that_can_be_read_are_kept(tmp_path):
    lines = (
        make_trial(4).to_json()
        + "\n"
        + make_trial(2).to_json()
        + "\n"
        # A line that was cut short; and records are sorted by their numbers.
        + make_trial(5).to_json()[:90]
    )
    study = read_study(write_study(tmp_path, trials=lines)).files
    assert [trial.number for trial in study.trials] == [2, 4]
    assert study.notes[0].startswith("trials.jsonl: line 3: ")


@pytest.mark.parametrize(
    ("curve", "said"),
    [
        (None, "has no curve.json (its study has not ended"),
        ('{"points": [', "curve.json is not JSON"),
        ("[1]", "curve.json is no file of this version"),
        (
            '{"target": 1}',
            f"curve.json has schema no number, and this version of bstune reads {SCHEMA_NUMBER}",
        ),
        ('{"schema_number": 99}', "run the same command under another name, study=NAME"),
        (json.dumps({"schema_number": SCHEMA_NUMBER}), "curve.json is no file of this version"),
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
    # Far more than any sane loss.
    closest = ClosestTrial(value=1e20, steps=3, number=0, batch_size=8, lr=0.1)
    curve = changed(RESULT, unreached=Unreached(closest=closest, easier=1e300)).to_json()
    study = read_study(write_study(tmp_path, curve=curve))
    assert study.result.unreached.closest.value == 1e20


@pytest.mark.parametrize("result", [RESULT, result_of([])], ids=["with a winner", "without one"])
def test_a_result_reads_back_to_an_equal_one(tmp_path, result):
    assert read_study(write_study(tmp_path, curve=result.to_json())).result == result


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"more": 1}, "more: Extra inputs are not permitted"),
        ({"trials": -1}, "trials: "),
        ({"trials": 2.0}, "trials: "),
        ({"study": 3}, "study: "),
        ({"target_value": "0.1"}, "target_value: "),
        ({"use": None, "best_by_time": {"lr": 0.1}}, "best_by_time."),
        ({"best_by_time": None}, "use names 'best_by_time'"),
        ({"statuses": {"reached": 2}}, "statuses must be"),
        ({"train": "bstune; touch x"}, "train: "),
    ],
)
def test_what_a_result_may_not_hold_is_refused_in_one_line(tmp_path, changes, said):
    curve = json.dumps(json.loads(CURVE) | changes)
    with pytest.raises(StudyError, match=r"curve\.json is no file of this version") as error:
        read_study(write_study(tmp_path, curve=curve))
    assert said in str(error.value)
    assert "\n" not in str(error.value)
