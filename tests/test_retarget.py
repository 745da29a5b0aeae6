import json
import shutil
from dataclasses import replace
from types import SimpleNamespace

import pytest
import yaml
from builders import run_command
from toolbox import contents, made_table, make_trial, numbers, statuses, trials_of, write_rows

from bstune.config import read_yaml
from bstune.core.errors import ConfigError, StudyError
from bstune.core.records import CUT_SHORT, Target, TrialResult, TrialSpec
from bstune.report.answer import answer
from bstune.report.lines.cautions import cautions
from bstune.report.schema import CeilingAt, SurveyedCeiling, SurveyedSteps
from bstune.report.study_folder import read_files, read_study
from bstune.study.folder_config import options_of_folder
from bstune.study.planning.baseline import Baseline, baseline_runs
from bstune.study.verbs import retarget
from bstune.study.verbs.retarget import (
    Goal,
    all_met_at_first,
    at_target,
    ended_at,
    is_near,
    read_at_target,
    study_so_far,
)
from bstune.system.files import Output

TARGET = Target("val/error", 0.1, "min")
HISTORY = ((5, 0.5), (10, 0.3), (20, 0.15), (40, 0.09))


@pytest.fixture(scope="module")
def studied(tmp_path_factory):
    """The folder of a replayed study of error 0.14; its table is beside it."""
    folder = tmp_path_factory.mktemp("studied")
    made_table(folder)
    options = ("workload.table=t.jsonl", "workload.target.value=0.14", "sampler=random")
    options += ("search.trials=16", "study=s", "mlflow.enabled=false")
    run_command(folder, "workload=replay", *options)
    return folder / "outputs" / "s"


@pytest.fixture
def folder(studied, tmp_path, monkeypatch):
    """A copy of the study's folder, in the working directory that it was run from."""
    monkeypatch.chdir(studied.parents[1])
    return shutil.copytree(studied, tmp_path / "s")


@pytest.mark.parametrize(
    ("goal", "status", "steps", "steps_low"),
    [
        # Met at the first evaluation: nothing was missed before.
        (0.5, "reached", 5, 0),
        (0.2, "reached", 20, 10),
        # Exactly met counts.
        (0.15, "reached", 20, 10),
        (0.1, "reached", 40, 20),
        # It would have had to go on.
        (0.05, "stopped", 40, 40),
    ],
)
def test_a_trial_ends_where_it_first_met_the_target(goal, status, steps, steps_low):
    (found,) = ended_at(
        [make_trial(0, steps=40, steps_low=20, history=HISTORY)], Target("e", goal, "min")
    )
    assert (found.status, found.steps, found.steps_low) == (status, steps, steps_low)
    assert found.examples == found.steps * found.batch_size


def test_what_continues_a_trial_that_met_the_target_is_left_out():
    parts = [
        make_trial(0, status="stopped", steps=20, steps_low=20, history=HISTORY[:3]),
        make_trial(
            1, status="stopped", steps=30, steps_low=30, history=HISTORY[:3], resumed_from=0
        ),
        make_trial(2, steps=40, steps_low=20, history=HISTORY, resumed_from=1),
        make_trial(3, status="diverged", steps=5, steps_low=5, history=((5, 9.0),)),
    ]
    # Trial 0 meets 0.2 at step 20; trials 1 and 2 continue it.
    easier = ended_at(parts, Target("e", 0.2, "min"))
    assert numbers(easier) == [0, 3]
    assert statuses(easier) == ["reached", "diverged"]
    same = ended_at(parts, TARGET)
    assert numbers(same) == [0, 1, 2, 3]
    assert statuses(same) == ["stopped", "stopped", "reached", "diverged"]


def test_a_fresh_seed_of_a_part_that_is_left_out_counts_for_the_trial_that_met_the_target():
    half = {"status": "stopped", "history": HISTORY[:3]}
    parts = [
        make_trial(0, steps=20, steps_low=20, **half),
        make_trial(1, steps=30, steps_low=30, resumed_from=0, **half),
        make_trial(2, steps=40, steps_low=20, history=HISTORY, resumed_from=1),
        make_trial(3, steps=40, steps_low=20, history=HISTORY, seed=7, replicate_of=2),
        make_trial(4, steps=40, steps_low=20, history=HISTORY, seed=8, replicate_of=1),
    ]
    baseline = Baseline(parts[0].batch_size, parts[0].lr, {})
    # Trial 0 meets 0.2 itself. It misses the study's own target, which its last part meets.
    for goal, first in ((0.2, 0), (TARGET.value, 2)):
        runs = baseline_runs(ended_at(parts, Target("e", goal, "min")), baseline)
        assert runs.first.number == first
        assert numbers(runs.again) == [3, 4]
        assert all(run.reached for run in runs.again)


@pytest.mark.parametrize(
    ("histories", "goal", "told"),
    [
        # Of the first evaluations one missed 0.4, and both met 0.5.
        ((HISTORY, ((5, 0.4),)), 0.4, False),
        ((HISTORY, ((5, 0.4),)), 0.5, True),
        # One that missed it throughout tells that it is no goal of every configuration.
        ((HISTORY, ((5, 0.9), (10, 0.8))), 0.5, False),
        # Untrained weights do not count, nor do weights without a finite value.
        ((((0, 0.9), *HISTORY),), 0.5, True),
        ((HISTORY, ((5, None),)), 0.5, True),
        ((((5, None),),), 0.5, False),
    ],
)
def test_a_target_that_each_first_evaluation_meets_is_found(histories, goal, told):
    trials = []
    for number, history in enumerate(histories):
        steps = history[-1][0]
        trials.append(
            make_trial(number, status="stopped", steps=steps, steps_low=steps, history=history)
        )
    assert all_met_at_first(ended_at(trials, Target("e", goal, "min"))) == told


@pytest.mark.slow
def test_such_a_target_is_refused(folder):
    # No error is above 1.
    with pytest.raises(StudyError, match=r"val/error <= 1\.5 at its first.*val/error <= 0\.14"):
        read_at_target(str(folder), "target=1.5")


def test_its_own_target_has_the_answer_that_the_study_gave(folder):
    told = json.loads((folder / "curve.json").read_text())
    found = json.loads(at_target(Output(folder), None).result.to_json())
    for name in (
        "target",
        "points",
        "regimes",
        "best_by_time",
        "best_by_steps",
        "use",
        "curve",
        "statuses",
        "baseline",
        "gain",
    ):
        assert found[name] == told[name], name
    assert {**found["critical_batch_size"], "next_trials": []} == {
        **told["critical_batch_size"],
        "next_trials": [],
    }


@pytest.mark.slow
def test_the_size_of_data_and_module_is_what_the_result_tells(folder):
    told = json.loads((folder / "curve.json").read_text())
    size = {"examples": 600, "parameters": 9610}
    (folder / "curve.json").write_text(json.dumps({**told, "size": size}))
    for goal in (None, Goal(0.2)):
        assert at_target(Output(folder), goal).result.size.model_dump() == size
    (folder / "curve.json").unlink()
    assert at_target(Output(folder), Goal(0.2)).result.size is None


def test_an_easier_target_is_answered_from_the_histories(folder, capsys):
    retarget.main([str(folder), "target=0.2"])
    printed = capsys.readouterr().out
    found = at_target(Output(folder), Goal(0.2))
    assert found.result.target == "val/error <= 0.2"
    for trial in found.files.trials:
        if trial.reached:
            values = dict(trial.history)
            earlier = [value for step, value in values.items() if step < trial.steps]
            # Its last step is the first one that meets 0.2.
            assert values[trial.steps] <= 0.2 < min(earlier, default=1.0)
    own = json.loads((folder / "curve.json").read_text())
    assert found.result.statuses["reached"] >= own["statuses"]["reached"]
    assert found.result.best_by_time.steps < own["best_by_time"]["steps"]
    assert "val/error <= 0.2" in printed
    assert "<!doctype html>" in (folder / "report-0.2.html").read_text()
    # No target is harder than the one that it was run for.
    assert found.result.over_target[-1].target == 0.14
    assert not list(folder.glob("*.partial"))


def test_an_easier_target_has_a_gain_and_says_what_it_stands_on(folder):
    enough = at_target(Output(folder), Goal(0.2)).result
    assert enough.few_passed is None
    lines = (folder / "trials.jsonl").read_text().splitlines(keepends=True)
    # The user's own trial comes first. So few histories do not tell a critical batch size.
    (folder / "trials.jsonl").write_text("".join(lines[:5]))
    few = at_target(Output(folder), Goal(0.2)).result
    assert few.few_passed is not None
    for result in (enough, few):
        assert result.winner is not None
        assert result.baseline is not None
        has_caution = [line for line in cautions(result) if line and "another target" in line]
        assert bool(has_caution) == (result is few)


@pytest.mark.slow
def test_a_target_may_name_the_studys_metric(folder):
    expected = read_at_target(str(folder), "target=0.2").result
    for argument in ("target=val/error<=0.2", "target=val/error=0.2"):
        assert read_at_target(str(folder), argument).result == expected


@pytest.mark.parametrize("argument", ["target=val/loss<=0.2", "target=val/error>=0.2"])
def test_a_target_of_another_metric_or_mode_is_refused(folder, argument):
    with pytest.raises(StudyError, match=r"own target is val/error <= 0\.14"):
        retarget.main([str(folder), argument])
    assert not list(folder.glob("report-*"))


def test_a_harder_target_says_what_would_have_to_be_run(folder, capsys):
    retarget.main([str(folder), "target=0.05"])
    printed = " ".join(capsys.readouterr().out.split())
    assert printed.count("0 trials passed it, and it takes 8") == 1
    result = at_target(Output(folder), Goal(0.05)).result
    *_, command = dict(answer(result).actions)["NEXT"]
    assert command.startswith("bstune workload=replay")
    assert "workload.target.value=0.05 study=s-0.05" in command
    assert "workload.target.value=0.14" not in command
    assert command in printed


def test_a_target_that_too_few_trials_passed_has_no_prediction_as_its_answer(folder):
    values = []
    for line in (folder / "trials.jsonl").read_text().splitlines():
        values += [value for _, value in json.loads(line)["history"]]
    closest = min(value for value in values if value is not None)
    # Extrapolation was checked from 0.16 to 0.14, to 0.875 times the distance from the best value.
    for times, expected in ((0.95, True), (0.88, True), (0.87, False), (0.4, False)):
        result = at_target(Output(folder), Goal(times * closest)).result
        assert result.winner is None
        assert result.few_passed is not None
        assert result.so_far.value == closest
        assert (result.so_far.predicted_steps, result.so_far.predicted_seconds) == (None, None)
        assert any("by extrapolation" in note for note in result.notes) == expected


@pytest.mark.parametrize(
    ("closest", "target", "ideal", "expected"),
    [
        (0.16, TARGET, 0.0, False),
        (0.11, TARGET, 0.0, True),
        # Without a best value no distance is known.
        (0.11, TARGET, None, False),
        (0.88, Target("val/accuracy", 0.89, "max"), 1.0, True),
        (0.8, Target("val/accuracy", 0.9, "max"), 1.0, False),
    ],
)
def test_a_target_is_near_by_its_distance_from_the_best_value(closest, target, ideal, expected):
    assert is_near(closest, target, ideal) == expected


def test_a_target_that_fresh_seeds_alone_passed_was_not_missed_by_all(folder):
    rows = [json.loads(line) for line in (folder / "trials.jsonl").read_text().splitlines()]
    # A run on a fresh seed that went far beyond the others.
    rerun = next(row for row in rows if row["replicate_of"] is not None)
    step, _ = rerun["history"][-1]
    rerun["history"][-1] = [step, 0.01]
    (folder / "trials.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    result = at_target(Output(folder), Goal(0.02)).result
    assert (result.winner, result.statuses["reached"]) == (None, 1)
    lines = dict(answer(result).lines)
    assert f"in only 1 of {result.trials} trials" in lines["USE"][0]
    for label in ("GAIN", "DEVICES"):
        assert f"only 1 of {result.trials} trials reached the target" in lines[label][0]


def test_a_study_of_python_objects_has_no_command_for_another_target(folder):
    summary = read_at_target(str(folder), "target=0.05").result
    own_call = "the study's own call with workload.target.value=0.05, name='s-0.05'"
    in_python = summary.model_copy(update={"in_python": True, "run_for_target": own_call})
    *_, call = dict(answer(in_python).actions)["NEXT"]
    assert call == "the study's own call with target=\"val/error<=0.05\", name='s-0.05'"


def test_a_report_leaves_the_study_as_it_is(folder, capsys):
    before = contents(folder)
    retarget.main([str(folder)])
    after = contents(folder)
    # The page alone is written anew.
    before.pop(folder / "report.html", None)
    after.pop(folder / "report.html", None)
    assert after == before
    assert str(folder / "report.html") in capsys.readouterr().out


def test_a_half_written_study_is_shown_with_what_its_trials_say(folder, capsys):
    (folder / "curve.json").unlink()
    (folder / "best.yaml").unlink()
    trials = (folder / "trials.jsonl").read_text()
    # The last line is cut through.
    (folder / "trials.jsonl").write_text(trials[: len(trials) // 2])
    retarget.main([str(folder)])
    printed = capsys.readouterr().out
    assert "the study has not ended" in printed
    assert "trials.jsonl: line" in printed
    assert "the study has not ended" in (folder / "report.html").read_text()


def test_a_study_that_has_gone_on_since_its_results_is_shown_with_all_its_trials(folder, capsys):
    told = json.loads((folder / "curve.json").read_text())
    # As if two trials had ended after it was written.
    (folder / "curve.json").write_text(json.dumps(told | {"trials": told["trials"] - 2}))
    retarget.main([str(folder)])
    printed = capsys.readouterr().out
    assert "the study has not ended" in printed
    assert f"{told['configurations']} configurations" in printed


def test_a_trial_that_was_cut_short_leaves_a_study_that_has_ended_as_it_is(folder):
    told = read_study(folder).result
    trials = trials_of(folder)
    spec = TrialSpec(len(trials), len(trials), 32, 0.1, 0.0, 1)
    cut = TrialResult.unmeasured(spec, "failed", message=CUT_SHORT)
    with (folder / "trials.jsonl").open("a") as lines:
        lines.write(cut.to_json() + "\n")
    found = study_so_far(folder)
    assert found.result == told
    assert len(found.files.trials) == len(trials) + 1


def test_the_batch_sizes_of_a_survey_that_predicts_its_ceiling_were_searched(folder):
    ceiling = SurveyedCeiling(at=CeilingAt(batch_size=64), smallest=2, predicted=4096)
    survey = SimpleNamespace(
        ceiling=ceiling, measured=SurveyedSteps(), seconds_of="trainer", threads=None
    )
    content = replace(read_files(Output(folder)), hardware=survey)
    prepared, _ = retarget._prepared(Output(folder), content, goal=None, trust=False)
    searched = options_of_folder(content.config, folder / "config.yaml").search.batch_size
    assert (prepared.space.low, prepared.space.high) == (2, min(4096, searched.high))
    assert searched.high > 64


def test_a_file_that_is_no_study_is_refused_and_nothing_of_its_folder_is_shown(folder):
    (folder / "other.json").write_text((folder / "curve.json").read_text())
    with pytest.raises(StudyError, match=r"other\.json is no study: give its output folder"):
        retarget.main([str(folder / "other.json")])


@pytest.mark.parametrize(
    ("argument", "said"),
    [
        ("target=low", "target must be a finite number, but got target=low"),
        ("target=nan", "target must be a finite number"),
        ("target=", "target must be a finite number"),
        ("target=val/error<=low", "target must be a metric and a number"),
        ("target=val/error<=inf", "must be a finite number"),
        ("0.12", "target=VALUE may stand after a study, but got 0.12"),
        ("goal=0.12", "but got goal=0.12"),
    ],
)
def test_another_argument_is_refused(folder, argument, said):
    with pytest.raises(ConfigError, match=said):
        retarget.main([str(folder), argument])
    assert not list(folder.glob("report-*"))


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("trials.jsonl", "", "does not tell what its trials were"),
        ("config.yaml", "a: [1", "config.yaml is not YAML"),
        ("config.yaml", "seed: 0\n", "config.yaml is no config of this version of bstune"),
    ],
)
def test_what_does_not_tell_enough_is_refused_in_one_line(folder, name, text, said):
    (folder / name).write_text(text)
    with pytest.raises(StudyError) as error:
        retarget.main([str(folder), "target=0.2"])
    assert said in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["search.precision", "mlflow.retries", "prior", "debug"])
def test_an_option_that_came_after_the_folder_has_its_default(folder, name):
    file = folder / "config.yaml"
    values = yaml.safe_load(file.read_text())
    section, _, option = name.partition(".")
    if option:
        del values[section][option]
    else:
        del values[section]
    file.write_text(yaml.safe_dump(values))
    options = options_of_folder(yaml.safe_load(file.read_text()), file)
    default = read_yaml("config.yaml")[section]
    found = getattr(options, section)
    if option:
        assert getattr(found, option) == default[option]
    elif section == "prior":
        assert found.level_sigma == default["level_sigma"]
    else:
        assert found == default


def test_schedules_that_end_with_the_trial_tell_nothing_of_another_target(folder):
    trials = [json.loads(one.to_json()) | {"horizon": one.steps} for one in trials_of(folder)]
    write_rows(folder / "trials.jsonl", trials)
    with pytest.raises(
        StudyError, match=r"its schedules end with the trial.*target\.value=0\.2 study=NAME"
    ):
        at_target(Output(folder), Goal(0.2))
