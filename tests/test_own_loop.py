"""A loop of one's own under a study: whole studies, against closed forms."""

import math
import time
from collections import Counter
from contextlib import nullcontext
from itertools import islice

import pytest
import torch
from processes import started
from refusals import as_yaml, cases, refused, text_cases
from small import ARGUMENTS, Data, Model, examples
from sqlalchemy import Pool, event

import bstune
from bstune.core.errors import StudyError, UserCodeError
from bstune.core.records import Spec
from bstune.report.hardware import survey_text
from bstune.study.folder import read_records
from bstune.trial.trial import Trial

QUESTION = {name: ARGUMENTS[name] for name in ("target", "baseline", "batch_size", "budget")}
QUESTION |= {"objective": "steps", "scaling": "linear", "trials": 5, "seeds": 1}


def study(folder, name="own", **changes):
    options = QUESTION | {"mlflow": {"uri": None}, "output": str(folder / "out")} | changes
    return bstune.Study(name, storage=f"sqlite:///{folder}/study.db", **options)


def loss(trial, step):
    """It is 0.1 after 20 (1 + 40/B) steps at the rate B/320, and later at others."""
    octaves = math.log2(trial.lr * 320 / trial.batch_size)
    value = 2 * (1 + 40 / trial.batch_size) * (1 + octaves**2) / step
    return value if octaves < 4 else math.nan


def train(trial, save=lambda path, step: path.write_text(str(step))):
    step = trial.first_step
    if trial.resume_from is not None:
        saved = trial.resume_from
        assert int((saved / "step" if saved.is_dir() else saved).read_text()) == step
    goes_on = True
    while goes_on:
        step += 2
        goes_on = trial.report(step, loss(trial, step), seconds=0.01 * step)
    if trial.worth_saving:
        save(trial.save_to, step)


def train_all(trials):
    for trial in trials:
        train(trial)
    return trials.result


def came(result):
    """What each trial was and came to, without numbers and seconds."""
    keys = ("role", "batch_size", "lr", "seed", "max_steps", "status", "history")
    return [tuple(getattr(record, key) for key in keys) for record in result.records]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    return train_all(study(tmp_path_factory.mktemp("finished")))


def test_the_trials_of_a_loop_end_by_their_closed_form(finished):
    assert finished.best.batch_size > 16
    with refused("your own loop"):
        finished.train()
    assert {record.role for record in finished.records} == {"baseline", "search", "new seed"}
    for record in finished.records:
        # Its first even step at which the loss is 0.1.
        meets = next(step for step in range(2, 10**6, 2) if not loss(record, step) > 0.1)
        status = "reached" if meets <= record.steps else "pruned"
        if math.isnan(loss(record, 2)):
            status = "diverged"
        assert record.status == status, record
        if status == "reached":
            assert (record.steps_low, record.steps) == (meets - 2, meets)


def spec_of(record):
    fields = {name: getattr(record, name) for name in Spec.model_fields}
    return Spec(**fields | {"resumed_from": None})


def leave(own, after, error):
    """Train some trials, and end the loop in the next one."""
    for count, trial in enumerate(own):
        if count == after:
            trial.report(2, 1.0)
            if error is None:
                return
            raise error
        train(trial)


@pytest.mark.slow
def test_a_study_that_is_left_goes_on_as_if_it_had_not(finished, tmp_path):
    own = study(tmp_path)
    with refused("own, no finished trial"):
        _ = own.result
    for after, error in ((0, OSError), (2, KeyboardInterrupt), (2, None)):
        with pytest.raises(error) if error else nullcontext():
            leave(own, after, error)
        # Nothing is left of a study that was left in its first trial.
        assert (tmp_path / "out").exists() == (after > 0)
    assert own.result.trials == 4
    assert str(study(tmp_path, target="val/loss <= 0.2").result.target) == "val/loss <= 0.2"
    assert came(train_all(study(tmp_path))) == came(finished)


def test_a_database_that_takes_no_more_is_one_line(tmp_path):
    def refuse(connection, *_):
        if (tmp_path / "out" / "config.yaml").exists():
            connection.execute("PRAGMA query_only = ON")

    event.listen(Pool, "checkout", refuse)
    try:
        with refused("database", StudyError):
            list(study(tmp_path))
    finally:
        event.remove(Pool, "checkout", refuse)


def folder_of(path, step):
    path.mkdir()
    (path / "step").write_text(str(step))


def train_on(trial, _):
    train(trial, folder_of)
    trial.report(trial.steps + 9, 1.0)


# What is saved last is of another step than the last one reported.
SAVES = [(train, folder_of, True), (train, lambda *_: None, False), (train_on, folder_of, False)]


@pytest.mark.parametrize("body, save, is_resumed", SAVES)
def test_what_is_saved_is_resumed(body, save, is_resumed, tmp_path):
    # The best metric is sought by parts of the budget, the best of which are resumed.
    asked = {"objective": "metric", "target": "min val/loss", "budget": 200}
    own = study(tmp_path, **asked, sampler="random", trials=20)
    for trial in islice(own, 10):
        body(trial, save)
    # The state of a trial that was pruned is there until it has been resumed.
    records = read_records(tmp_path / "out")
    resumed = {one.resumed_from for one in records} - {None}
    assert bool(resumed) == is_resumed
    there = {int(path.stem.partition("-")[2]) for path in (tmp_path / "out/checkpoints").iterdir()}
    left = {one.number for one in records if one.status == "pruned"} - resumed
    assert left
    assert there == (left if is_resumed else set())


@cases("""
reports | words
[] | trial.report(step, value)
[[4, 1.0], [2, 1.0]] | trial.first_step
[[4, 1.0, 2.0], [6, 1.0, 1.0]] | seconds=seconds
""")
def test_a_loop_that_reports_wrongly_is_told_the_line_to_write(reports, words, tmp_path):
    with refused(words, UserCodeError):
        for trial in study(tmp_path):
            for report in reports:
                trial.report(*report)


# Options -> what holds for each trial.
ASKED = {
    "objective: metric, target: min val/loss, budget: 60": lambda trial: (
        trial.total_steps == 60 and trial.status != "reached"
    ),
    "schedule_ends: true": lambda trial: (
        trial.total_steps == trial.max_steps and not trial.worth_saving
    ),
    "tune: {dropout: [0, 0.5]}, baseline: {batch_size: 16, lr: 0.05, values: {dropout: 0.1}}": (
        lambda trial: 0 <= trial.values["dropout"] <= 0.5
    ),
}


@pytest.mark.parametrize("options", ASKED)
def test_what_is_asked_is_what_trials_are(options, tmp_path):
    own = study(tmp_path, **as_yaml(options))
    for trial in islice(own, 2):
        train(trial)
        assert ASKED[options](trial)


@text_cases("""
changes | words
target: null, budget: null, baseline: null | target, budget, baseline, missing
tune: {dropout: [0, 0.5]} | baseline, values, dropout
precision: bf16-mixed, survey: off | precision, survey, bstune.tune
trails: 3 | trails, trials
""")
def test_what_is_missing_or_of_no_use_is_told_at_once(changes, words, tmp_path):
    with refused(words):
        study(tmp_path, **as_yaml(changes))
    assert list(tmp_path.iterdir()) == []


def train_beside(folder, name):
    """Train a study's trials beside another process; each of them has one at least."""
    # A forked process cannot ask CUDA.
    for trial in study(folder, trials=3, device="cpu"):
        (folder / name).touch()
        while len(list(folder.glob("?"))) < 2:
            time.sleep(0.01)
        train(trial)
        with (folder / "trained").open("a") as file:
            file.write(name)


def test_processes_share_a_study(tmp_path):
    """The same loop twice: no place of the plan is done twice, none is left out."""
    processes = [started(tmp_path / f"{name}.txt", train_beside, tmp_path, name) for name in "ab"]
    for process in processes:
        process.join(100)
    assert [process.exitcode for process in processes] == [0, 0]
    records = bstune.load(tmp_path / "out").records
    assert set(Counter(record.place for record in records).values()) == {1}
    trained = (tmp_path / "trained").read_text()
    assert (len(trained), set(trained)) == (len(records), {"a", "b"})


def test_a_notebook_shows_a_result(finished):
    shown = finished._repr_html_()
    assert "&lt;= 0.1" in shown
    assert "data:image/png;base64," in shown
    table = finished.trials_dataframe()
    assert list(table.steps) == [record.steps for record in finished.records]


@pytest.mark.slow
def test_a_project_is_surveyed(own_surveys):
    given = {"batch_size": (16, 64), "survey_seconds": 1.0, "threads": 1, "device": "cpu"}
    survey = bstune.survey(Model, Data(), **given)
    assert survey.largest_fit == 64
    assert str(survey) == survey_text(survey, was_kept=False)


def test_hugging_face_trials_resume_as_if_they_had_not_stopped(tmp_path):
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    from bstune.integrations.huggingface import StopAtTarget, training_arguments

    def rows_of(seed):
        return [{"inputs": inputs, "labels": label} for inputs, label in examples(seed)]

    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = torch.nn.Linear(10, 1)

        def forward(self, inputs, labels):
            inputs = torch.nn.functional.dropout(inputs, 0.1, self.training)
            outputs = self.linear(inputs).squeeze(1)
            return {"loss": torch.nn.functional.mse_loss(outputs, labels), "outputs": outputs}

    def fit_trainer(trial):
        trainer = transformers.Trainer(
            model_init=Net,
            args=training_arguments(trial, disable_tqdm=True, use_cpu=True),
            train_dataset=rows_of(0),
            eval_dataset=rows_of(1),
            callbacks=[StopAtTarget(trial, 256)],
        )
        trainer.train(resume_from_checkpoint=trial.resume_from)

    asked = as_yaml("objective: metric, target: min eval_loss, budget: 60, baseline: [16, 0.01]")
    own = study(tmp_path, scaling="sqrt", **asked)
    for trial in own:
        fit_trainer(trial)
    resumed = [record for record in own.result.records if record.resumed_from is not None]
    assert resumed
    for record in resumed:
        spec = spec_of(record)
        never = Trial(spec, trial.target, total_steps=own.result.budget.last_step(spec.batch_size))
        fit_trainer(never)
        assert set(never.history) <= set(record.history)
