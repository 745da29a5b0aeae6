"""Sweeps over studies: on replayed ones, and what is said of made ones of a known law."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest
from rich.console import Console
from test_compare import SIZES, UNREACHED, studies, summary
from unit_logs import units_in, unkept

from bstune.config import compose
from bstune.core.errors import ConfigError, Interrupted, StudyError
from bstune.report.compare import compare
from bstune.sweeps import shallue
from bstune.sweeps.harness import check_sweep, compose_sweep, main
from bstune.sweeps.shallue import budget_curve, end_slopes, sentence

# Of a sweep: a change elsewhere seldom breaks it, and CI runs it.
pytestmark = pytest.mark.slow

REPLAYED = (
    "sweep.experiment.common=['workload=replay','search.replicates=0']",
    "~sweep.experiment.studies.none",
    "sweep.experiment.studies.smoothed=['workload.table=mnist_cnn']",
    "sweep.experiment.studies.decayed=['workload.table=fashion_mlp']",
)


def sweep(*options):
    main(["shallue_regularisation", *REPLAYED, *options])


@pytest.mark.slow
def test_each_study_runs_goes_on_and_is_compared(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(shallue, "law_text", lambda curves: f"{len(curves)} on the law")
    folder = tmp_path / "outputs/sweeps/shallue_regularisation"
    with monkeypatch.context() as patched:
        first = [shallue.run_study, interrupted]
        patched.setattr(shallue, "run_study", lambda *arguments: first.pop(0)(*arguments))
        with pytest.raises(
            Interrupted, match=r"interrupted: .*shallue_regularisation keeps all finished trials"
        ):
            sweep("sweep.experiment.options=['search.trials=2','sampler=random']")
    assert "regularisation decayed, study 2 of 2" in capfd.readouterr().out
    assert units_in(folder / "runs.jsonl") == ["smoothed"]
    more = "sweep.experiment.options=['search.trials=4','sampler=random']"
    # Its arguments have changed, so that the one that had ended goes on too.
    sweep(more)
    out = capfd.readouterr().out
    assert out.count("continues after 2 configurations") == 1
    result = json.loads((folder / "result.json").read_text())
    assert [row["study"] for row in result["rows"]] == ["smoothed", "decayed"]
    assert all(row["reached"].endswith(" of 4") for row in result["rows"])
    assert all(
        len((folder / row["study"] / "trials.jsonl").read_text().splitlines()) == 4
        for row in result["rows"]
    )
    assert result["sentence"] in out
    assert result["notes"][-1] == "2 on the law"
    assert {path.name for path in folder.glob("*.*")} == {
        *("result.json", "figure.png", "studies.db", "comparison.html", "comparison.png"),
        "runs.jsonl",
    }
    # Killed between a study's end and the line of its unit: its trials are not run again.
    units = units_in(folder / "runs.jsonl")
    lines = (folder / "runs.jsonl").read_text().splitlines(keepends=True)
    (folder / "runs.jsonl").write_text("".join(lines[:-1]))
    trials = (folder / "decayed/trials.jsonl").read_text()
    sweep(more)
    assert units_in(folder / "runs.jsonl") == units
    assert (folder / "decayed/trials.jsonl").read_text() == trials
    # Studies that have ended are compared again, and not run.
    monkeypatch.setattr(shallue, "run_study", None)
    sweep(more)
    again = json.loads((folder / "result.json").read_text())
    assert {**again, "command": None} == {**result, "command": None}


def interrupted(*arguments):
    raise KeyboardInterrupt


@pytest.mark.slow
def test_a_choice_runs_one_study_and_the_comparison_waits(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "outputs/sweeps/shallue_regularisation"
    few = "sweep.experiment.options=['search.trials=2','sampler=random']"
    sweep(few, "sweep.experiment.only=[decayed]")
    assert "1 of 2 units are measured" in capfd.readouterr().out
    assert units_in(folder / "runs.jsonl") == ["decayed"]
    assert not (folder / "result.json").exists()
    with pytest.raises(ConfigError, match=r"only names none, .*units: smoothed; decayed"):
        sweep(few, "sweep.experiment.only=[none]")
    sweep(few)
    assert units_in(folder / "runs.jsonl") == ["decayed", "smoothed"]
    rows = json.loads((folder / "result.json").read_text())["rows"]
    assert [row["study"] for row in rows] == ["smoothed", "decayed"]
    # A study of other settings is refused, and the sweep's own option is named.
    kept = (folder / "runs.jsonl").read_text()
    with pytest.raises(StudyError, match=r"seed: was 0, now 3(.|\n)*sweep\.output=DIR"):
        sweep("sweep.experiment.options=['search.trials=2','sampler=random','seed=3']")
    assert (folder / "runs.jsonl").read_text() == kept


@pytest.mark.parametrize(
    ("option", "text"),
    [
        (
            "sweep.experiment.options=['search.nope=1']",
            r"studies.smoothed: unknown option search.nope",
        ),
        ("sweep.experiment.studies.decayed=['nonsense']", r"studies.decayed: .*nonsense"),
    ],
)
def test_what_cannot_run_ends_before_any_study_does(option, text, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(shallue, "run_study", interrupted)
    with pytest.raises(ConfigError, match=text):
        sweep(option)
    assert list(tmp_path.iterdir()) == []


def test_a_sweep_of_no_study_is_refused(tmp_path):
    checked = check_sweep(
        "shallue_widths", compose_sweep("shallue_widths", (f"sweep.output={tmp_path}",))
    )
    with pytest.raises(ConfigError, match=r"sweep\.experiment\.studies has none"):
        shallue.run(Console(quiet=True), unkept(), **{**checked.parameters, "studies": {}})


@pytest.mark.parametrize(
    "name", ["algorithms", "data", "optimizers", "regularisation", "widths", "workloads"]
)
def test_the_studies_that_ship_compose(name):
    experiment = compose_sweep(f"shallue_{name}", ()).sweep.experiment
    for arguments in experiment.studies.values():
        compose([*experiment.common, *arguments, *experiment.options])


# Of S = S_min (1 + B_crit/B) the slope is -B_crit/(B + B_crit): over a factor of 4 of sizes its mean is a logarithm's.
@pytest.mark.parametrize("b_crit", [10.0, 100.0, 5000.0])
def test_slopes_are_those_of_the_curve_at_both_ends(b_crit):
    (study,) = studies(summary(b_crit=b_crit))
    low, high = study.points[0].batch_size, study.points[-1].batch_size
    expected = [math.log((1 + b_crit / (4 * low)) / (1 + b_crit / low)) / math.log(4)]
    expected += [math.log((1 + b_crit / high) / (1 + 4 * b_crit / high)) / math.log(4)]
    assert end_slopes(study) == pytest.approx(expected, abs=0.02)


def test_a_budget_of_examples_buys_what_the_law_says():
    study = studies(summary(b_crit=100.0, s_min=80.0))[0]
    examples, steps = budget_curve(study)
    # Equations 2.11 and 2.12 of S_min = 80 and E_min = S_min B_crit = 8,000.
    assert (steps / 80.0 - 1.0) * (examples / 8000.0 - 1.0) == pytest.approx(np.ones(len(SIZES)))
    # Where the smallest batches waste examples, too, they are left out.
    wasteful = replace(study, steps=study.steps * (1.0 + (30.0 / study.batch_size) ** 2))
    assert 8 < wasteful.batch_size[len(SIZES) - len(budget_curve(wasteful)[0])] < 100


@pytest.mark.parametrize("missing", [UNREACHED, {"curve": None}])
def test_a_study_without_a_curve_has_neither(missing):
    study = studies(summary(**missing))[0]
    assert end_slopes(study) == (None, None)
    assert [part.size for part in budget_curve(study)] == [0, 0]


@pytest.mark.parametrize(
    ("others", "text"),
    [
        (
            [summary("b", 400.0, 200.0, 800.0)],
            "Width: the critical batch size is largest for b, 400 (90%: 200 to 800), and smallest for a, 100 (90%: "
            "50 to 200), 4 times as large (1.5 to 11), which differ; of 1 pairs 1 differ.",
        ),
        ([summary("b", 110.0, 55.0, 220.0)], "which are not shown to differ; of 1 pairs 0 differ."),
        (
            [summary("b", 400.0, None, 800.0)],
            "4 times as large, with an open interval; of 1 pairs 0 differ.",
        ),
        (
            [summary("b", **UNREACHED)],
            "too few have a critical batch size to compare them. That of b is not known.",
        ),
    ],
)
def test_the_sentence_names_what_differs(others, text):
    found = sentence("width", compare(studies(summary("a"), *others)))
    assert text in found.replace("1.5 to 10.7", "1.5 to 11")
