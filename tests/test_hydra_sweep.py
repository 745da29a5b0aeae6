"""Hydra's sweeper of bstune in an application that knows nothing of it: jobs, kills, and what a sweep may not hold."""

import dataclasses
import itertools
import math
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import mlflow
import pytest
import yaml
from hydra.core.plugins import Plugins
from lightning.pytorch.utilities.exceptions import SIGTERMException
from loop_trials import made_trial
from toolbox import forked_training, trials_of

import bstune
from bstune.core.errors import ConfigError
from bstune.core.records import TrialResult, TrialSpec
from bstune.integrations import hydra_sweep
from bstune.integrations.hydra_params import Range, read_params
from bstune.integrations.hydra_sweep import (
    Settings,
    _check_direction,
    _report_history,
    _settled_objective,
    application_words,
)
from bstune.study.own_loop import batches_of
from bstune.study.storage.opening import stored_settings
from bstune.system.exits import Terminated
from bstune.trial.own_loop.loop_backend import LoopLimits
from bstune.trial.own_loop.loop_trial import ENDED_SHORT, JOB_ENDED_SHORT

TESTS = Path(__file__).parent
PLUGINS = Path(bstune.__file__).parent / "integrations"
APPLICATION = TESTS / "projects" / "hydra_sweep"
QUIET = 'hydra.sweeper.options=["mlflow.enabled=false"]'
# What a job is told when it is a trial that may go on.
CONTINUED = [f"hydra.sweeper.{name}={name}" for name in ("max_steps", "resume_from", "save_to")]
# Examples, by the application's config.
BUDGET = 20_000
SEARCH = ["--multirun", "hparams_search=bstune"]
SEEDED = "hydra.sweeper.seed=seed"
# Seconds differ from run to run, and with them what a search of the least time asks.
STEPS = "hydra.sweeper.objective=steps"
# Jobs of a few steps, for what does not depend on where they end.
SHORT = ["examples=400", "hydra.sweeper.budget.examples=400"]


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def sweep(monkeypatch, hydra_in_process):
    """Return a function that runs the application in this process, with further arguments."""
    from projects.hydra_sweep.train import main

    # The application is a script, whatever runs the tests.
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", None)

    def run(*arguments, search=SEARCH):
        monkeypatch.setattr(sys, "argv", ["train.py", *search, QUIET, *arguments])
        main()
        return trials_of(Path("outputs") / "train")

    return run


def results():
    (found,) = Path().glob("multirun/*/*/optimization_results.yaml")
    assert (found.parent / "multirun.yaml").is_file()
    return yaml.safe_load(found.read_text())


def test_the_config_is_ten_lines():
    text = (APPLICATION / "conf" / "hparams_search" / "bstune.yaml").read_text()
    # A user copies it: more would be an obstacle.
    assert text.count("\n") <= 10


def test_the_plugin_is_found_and_light():
    script = (
        "import sys\n"
        "from hydra.core.plugins import Plugins\n"
        "from hydra.plugins.sweeper import Sweeper\n"
        "found = Plugins.instance().discover(Sweeper)\n"
        "heavy = {'torch', 'lightning', 'optuna', 'mlflow', 'bstune.options'} & sys.modules.keys()\n"
        "print('BstuneSweeper' in {one.__name__ for one in found}, sorted(heavy))\n"
    )
    ran = subprocess.run(
        [sys.executable, "-c", script], env=environment(), capture_output=True, text=True
    )
    # A plug-in is imported by each Hydra application, whatever it does.
    assert ran.stdout == "True []\n", ran.stderr


def environment():
    paths = [str(PLUGINS), str(PLUGINS.parents[1]), str(TESTS), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}


@pytest.mark.parametrize(
    "arguments",
    [
        # Tasks that return their history, or steps, are in the sweeps below.
        [
            "returns=metric",
            "hydra.sweeper.returns=metric",
            "hydra.sweeper.target=val_loss",
            "goal=0",
            "examples=4000",
            "hydra.sweeper.budget.examples=4000",
        ],
        # A sampler that is a node is refused without a _target_ in test_what_a_sweep_may_not_hold.
        pytest.param(
            [
                "hydra.sweeper.sampler={_target_:optuna.samplers.TPESampler,seed:3,n_startup_trials:1}",
                "optimizer.name=choice(SGD,Adagrad)",
                "hydra.sweeper.objective=time",
            ],
            marks=pytest.mark.slow,
        ),
    ],
)
def test_an_application_is_swept(arguments, sweep, capsys):
    records = sweep("hydra.sweeper.n_trials=3", *arguments)
    assert len(records) == 3
    for record in records:
        assert record.resumed_from is None
        assert 16 <= record.batch_size <= 256
        assert 0.01 <= record.lr <= 2
    # The reference of the application's own config.
    assert (records[0].batch_size, records[0].lr) == (32, 0.2)
    # The application is not told when to stop, and each job runs to its end.
    examples = 4000 if "examples=4000" in arguments else 20_000
    stopped = with_status(records, "stopped")
    # The goal of this one is never met.
    assert stopped or "goal=0" not in arguments
    for record in stopped:
        assert record.steps == math.ceil(examples / record.batch_size)
    found = results()
    assert {"data.batch_size", "optimizer.lr"} <= found["best_params"].keys()
    assert ("optimizer.name" in found["best_params"]) == (
        # The one case in whose list a choice is the second argument.
        "choice" in arguments[1]
    )
    assert Path(found["page"]).is_file()
    assert found["best_value"] > 0
    printed = capsys.readouterr().out
    # Options are written as a sweep sets them.
    assert "options=['" not in printed
    assert "optimization_results.yaml" in printed
    command = re.findall(r"python .*train\.py .*", printed)
    # What reached no target has no winner to train.
    if "goal=0" in arguments or with_status(records, "reached"):
        assert f"data.batch_size={found['best_params']['data.batch_size']}" in command[-1]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["train.py", "-m", "lr=1"], ["python", "train.py"]),
        (["/usr/bin/train", "--config-name=big", "x=1"], ["train", "--config-name=big"]),
        (["train.py", "-cn", "big", "x=1"], ["python", "train.py", "-cn", "big"]),
    ],
)
def test_the_application_is_called_as_it_was(arguments, words, monkeypatch):
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", None)
    assert application_words(arguments) == words
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", SimpleNamespace(name="a.b.__main__"))
    assert application_words(arguments)[:3] == ["python", "-m", "a.b"]


@pytest.mark.parametrize(
    ("keys", "continues", "place"),
    [
        # Jobs are stopped, and no key tells one to go on: nothing was to be saved.
        (CONTINUED[:1], False, None),
        (CONTINUED, True, "the path in save_to"),
        (
            [*CONTINUED[:2], "hydra.sweeper.checkpoint=last.pt"],
            True,
            "last.pt in the job's output folder",
        ),
    ],
)
def test_jobs_go_on_where_a_key_says_from_what(keys, continues, place, sweep, monkeypatch):
    seen = []

    def no_trials(options, assumptions, limits):
        seen.append(limits)
        yield from ()

    monkeypatch.setattr("bstune.integrations.hydra_sweep.batches_of", no_trials)
    # A sweep without trials has no result.
    with pytest.raises(SystemExit):
        sweep(*keys)
    (limits,) = seen
    assert limits.stops
    assert limits.continues == continues
    assert place is None or limits.save_place == place


@pytest.mark.parametrize(
    "saved",
    [
        CONTINUED[2:],
        # The job is told no place: its file is taken from its output once it has ended.
        pytest.param(
            ["hydra.sweeper.checkpoint=last.pt", "save_in_output=last.pt"], marks=pytest.mark.slow
        ),
    ],
)
def test_jobs_are_stopped_and_continued(saved, sweep, capsys):
    records = sweep("hydra.sweeper.n_trials=6", *CONTINUED[:2], *saved, SEEDED, STEPS)
    continued = [record for record in records if record.resumed_from is not None]
    assert continued
    first = records[continued[0].resumed_from]
    assert first.steps < continued[0].steps
    (overrides,) = Path().glob(f"multirun/*/*/{continued[0].number}/.hydra/overrides.yaml")
    place = Path(f"outputs/train/states/trial-{first.number}.saved").absolute()
    # Hydra's quotes keep a path with signs of its own whole.
    assert f"resume_from='{place}'" in yaml.safe_load(overrides.read_text())
    # What a part before has reported stays as it is.
    assert continued[0].history[: len(first.history)] == first.history
    # The search's best points run again on three fresh seeds.
    assert len({record.seed for record in records if record.replicate_of is not None}) == 3
    # A fresh seed may need more steps than the application's own: it gets those of the budget.
    best = bstune.load("outputs/train").best
    (command,) = re.findall(r"python .*train\.py .*", capsys.readouterr().out)
    assert f"max_steps={math.ceil(BUDGET / best.batch_size)}" in command.split()


def test_a_schedule_that_ends_with_its_job_is_as_long_as_the_job(sweep, capsys):
    schedule = ["linear=true", "hydra.sweeper.schedule_ends=true", CONTINUED[0]]
    records = sweep("hydra.sweeper.n_trials=4", *schedule, SEEDED, STEPS)
    lengths = {}
    for record in records:
        assert record.resumed_from is None
        assert record.steps == record.horizon or record.status == "reached"
        (overrides,) = Path().glob(f"multirun/*/*/{record.number}/.hydra/overrides.yaml")
        lengths[record.number] = record.horizon
        assert f"max_steps={record.horizon}" in yaml.safe_load(overrides.read_text())
    # The search chooses the length.
    assert len(set(lengths.values())) > 1
    best = bstune.load("outputs/train").best
    (command,) = re.findall(r"python .*train\.py .*", capsys.readouterr().out)
    assert f"max_steps={best.horizon}" in command.split()


@pytest.mark.parametrize(
    ("is_job", "continues", "message"),
    [(False, True, ENDED_SHORT), (True, True, JOB_ENDED_SHORT), (True, False, None)],
)
def test_a_job_that_ended_short_is_told_so_only_where_it_could_go_on(is_job, continues, message):
    job_command = (lambda point, last_step: "") if is_job else None
    limits = LoopLimits(in_hindsight=is_job, continues=continues, job_command=job_command)
    study = bstune.Study(
        target="val_loss<=0.1",
        batch_sizes=(16, 64),
        reference=(32, 0.2),
        budget=bstune.Budget(steps=100),
        objective="steps",
        trials=1,
        name="short",
        mlflow=False,
    )
    batches = batches_of(study.options, (), limits)
    (trial,) = next(batches)
    for step in (10, 20):
        trial.report(step, 10.0 / step)
    assert trial.max_steps > 20
    trial.finish()
    # The next trial is asked once this one is stored.
    next(batches, None)
    batches.close()
    first, *_ = trials_of(Path("outputs") / "short")
    assert (first.status, first.steps, first.message) == ("stopped", 20, message)


@pytest.fixture
def launched(monkeypatch):
    """Return the numbers of the jobs of each launch."""
    found = []
    instantiate = Plugins.instantiate_launcher

    def with_notes(self, **arguments):
        launcher = instantiate(self, **arguments)
        launch = launcher.launch

        def noted(job_overrides, initial_job_idx):
            found.append(list(range(initial_job_idx, initial_job_idx + len(job_overrides))))
            return launch(job_overrides, initial_job_idx)

        launcher.launch = noted
        return launcher

    monkeypatch.setattr(Plugins, "instantiate_launcher", with_notes)
    return found


@pytest.mark.slow
def test_jobs_are_launched_in_batches(sweep, launched):
    records = sweep("hydra.sweeper.n_trials=5", "hydra.sweeper.n_jobs=3", SEEDED, STEPS)
    assert launched[:2] == [[0, 1, 2], [3, 4]]
    # On fresh seeds one runs at a time.
    assert {len(batch) for batch in launched[2:]} == {1}
    assert sum(record.replicate_of is None for record in records) == 5
    for record in records:
        (overrides,) = Path().glob(f"multirun/*/*/{record.number}/.hydra/overrides.yaml")
        assert f"data.batch_size={record.batch_size}" in yaml.safe_load(overrides.read_text())
    found = results()
    assert {"data.batch_size", "optimizer.lr"} == found["best_params"].keys()
    assert Path(found["page"]).is_file()
    # Each of a batch knows the ones that run.
    for batch in launched[:2]:
        points = [math.log2(records[number].lr) for number in batch]
        # Two of a batch at nearly one rate would not know of each other.
        assert min(abs(one - other) for one, other in itertools.combinations(points, 2)) > 0.05


@pytest.mark.soak  # batches, and jobs that go on, by themselves are above
def test_batches_may_go_on_too(sweep, launched):
    means = ["hydra.sweeper.n_trials=8", "hydra.sweeper.n_jobs=2"]
    records = sweep(*means, *CONTINUED, SEEDED, STEPS)
    by_number = {record.number: record for record in records}
    continued = [record for record in records if record.resumed_from is not None]
    assert continued
    for record in continued:
        first = by_number[record.resumed_from]
        assert record.history[: len(first.history)] == first.history
    assert max(map(len, launched)) == 2


# An exit ends Hydra's launcher too, so that the others are launched one by one.
@pytest.mark.parametrize("fails_by", ["error", pytest.param("exit", marks=pytest.mark.slow)])
def test_a_job_that_fails_leaves_the_others_of_its_batch(fails_by, sweep, launched):
    failing = ["fails_in_job=1", f"fails_by={fails_by}"]
    records = sweep("hydra.sweeper.n_trials=4", "hydra.sweeper.n_jobs=3", *failing, *SHORT)
    (failed,) = with_status(records, "failed")
    assert failed.number == 1
    assert ("no room" if fails_by == "error" else "sys.exit(3)") in failed.message
    again = [[0], [1], [2]] if fails_by == "exit" else []
    assert launched == [[0, 1, 2], *again, [3, 4]]
    # It is asked once more.
    assert (records[3].batch_size, records[3].lr) == (failed.batch_size, failed.lr)
    assert len(records) - len(with_status(records, "failed")) == 4


# One that raises leaves them above, and what may not be returned is refused below.
@pytest.mark.slow
def test_what_a_job_of_a_batch_may_not_return_leaves_the_others(sweep, capsys):
    arguments = ["hydra.sweeper.n_trials=3", "hydra.sweeper.n_jobs=3"]
    with pytest.raises(SystemExit) as ended:
        sweep(*arguments, "fails_in_job=1", "fails_by=None", *SHORT)
    assert ended.value.code == 2
    assert "the task returned None" in capsys.readouterr().err
    told = trials_of(Path("outputs") / "train")
    (failed,) = with_status(told, "failed")
    assert (failed.number, len(told)) == (1, 3)
    records = sweep(*arguments, *SHORT)
    ended_well = [record for record in records if record.status != "failed"]
    assert len(ended_well) == 3
    # Those that ended well are not run again.
    assert [values(record) for record in ended_well[:2]] == [values(told[0]), values(told[-1])]


# Three processes that import all, for a launcher that bstune's sweeper knows nothing of.
@pytest.mark.soak
def test_joblibs_launcher_runs_a_batch_in_processes(tmp_path):
    pytest.importorskip("hydra_plugins.hydra_joblib_launcher", reason="it is not installed")
    ran = run_application(
        "hydra.sweeper.n_trials=2",
        "hydra.sweeper.n_jobs=2",
        "hydra/launcher=joblib",
        "hydra.launcher.n_jobs=2",
        # Its process ends, and with it all that its batch came to.
        "fails_in_job=1",
        "fails_by=process",
    )
    assert ran.returncode == 0, ran.stderr
    records = trials_of(tmp_path / "outputs" / "train")
    (failed,) = with_status(records, "failed")
    # The batch is lost with its process, of which one job had failed.
    assert (failed.number, len(records)) == (1, 3)


@pytest.mark.parametrize(
    ("arguments", "status", "message", "exit_status"),
    [
        (["returns=not_finite"], "diverged", "not finite", 2),
        # As StopAtTarget has it; where time counts it needs no seconds.
        pytest.param(
            *(["returns=lost", "hydra.sweeper.objective=time"], "diverged", "not finite", 2),
            marks=pytest.mark.slow,
        ),
        pytest.param(["returns=error"], "failed", "no room for this", 1, marks=pytest.mark.slow),
    ],
)
def test_a_job_that_comes_to_nothing_is_a_trial(
    arguments, status, message, exit_status, sweep, capsys
):
    with pytest.raises(SystemExit) as ended:
        sweep(*arguments, "hydra.sweeper.returns=steps", "hydra.sweeper.n_trials=3", *SHORT)
    assert ended.value.code == exit_status
    assert "error: " in capsys.readouterr().err
    records = trials_of(Path("outputs") / "train")
    assert len(records) == 3
    for record in records:
        assert record.status == status
        assert message in record.message


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["hydra.sweeper.lr=optimizer.rate"],
            "names the learning rate, .* none of data.batch_size",
        ),
        (["optimizer.lr=0.1", "hydra.sweeper.lr=optimizer.lr"], "optimizer.lr=0.1, one value"),
        (
            ["optimizer.lr=0.1"],
            r"\(data.batch_size\) is the learning rate\? .*hydra.sweeper.lr=KEY",
        ),
        (
            ["data.batch_size=32"],
            r"\(optimizer.lr\) is the batch size\? .*hydra.sweeper.batch_size=",
        ),
        (["seed=1,2", "+data.train_batch_size=1,2"], "several of them may be"),
        (["optimizer.lr=interval(0,1)"], "numbers over 0, but got 0 to 1"),
        (["optimizer.lr=choice(a,0.1)"], "numbers over 0, but got a, 0.1"),
        (["data.batch_size=interval(1.5,8)"], "whole numbers from 1 on, but got 1.5 to 8"),
        (["data.batch_size=choice(a,b)"], "whole numbers from 1 on, but got a, b"),
        (['+hydra.sweeper.params.nope="choice(1,2)"'], "cannot be composed: .*nope"),
        (["hydra.sweeper.n_jobs=0"], "n_jobs must be .* 1 or more, but got 0"),
        (['hydra.sweeper.options=["search.workers=3"]'], "search.workers=3: leave it out"),
        (["hydra.sweeper.returns=seconds"], "seconds_per_step"),
        (["hydra.sweeper.returns=loss"], "must be steps or metric, but got 'loss'"),
        (["hydra.sweeper.target=null"], "hydra.sweeper.target is missing"),
        (["hydra.sweeper.budget=null"], "hydra.sweeper.budget must be"),
        (["hydra.sweeper.resume_from=resume_from"], "name max_steps"),
        (
            ["hydra.sweeper.schedule_ends=true"],
            "schedule_ends=true needs .*hydra.sweeper.max_steps=",
        ),
        (
            [*CONTINUED, "hydra.sweeper.schedule_ends=true"],
            "resume_from=resume_from .* leave one of the two out",
        ),
        (["hydra.sweeper.seed=sed"], "no sed: add 'sed: null' to it, or name it .sed"),
        (
            [*CONTINUED, "hydra.sweeper.resume_from=resume"],
            "hydra.sweeper.resume_from=resume: .*has no",
        ),
        (["hydra.sweeper.reference=[64]"], "must be a batch size and a learning rate"),
        (["hydra.sweeper.sampler={seed: 1}"], "a node with a _target_"),
        (["hydra.sweeper.sampler=nope"], "nope"),
        (['hydra.sweeper.target="loss<0,3"'], "target"),
        # The wrong way round, by the name or by the mode.
        (['hydra.sweeper.target="val/f1<=0.9"'], "write val/f1>=0.9, or hydra.sweeper.mode=min"),
        (['hydra.sweeper.target="val_loss>=5"'], "write val_loss<=5, or hydra.sweeper.mode=max"),
        (
            ['hydra.sweeper.target="score<=5"', "hydra.sweeper.mode=max"],
            "write score>=5, or hydra.sweeper.mode=min",
        ),
        (["hydra.sweeper.mode=maximize"], "mode must be min or max, but got 'maximize'"),
    ],
)
def test_what_a_sweep_may_not_hold(arguments, message, sweep, capsys, tmp_path):
    with pytest.raises(SystemExit) as ended:
        sweep(*arguments)
    assert ended.value.code == 2
    assert re.search(f"error: .*{message}", capsys.readouterr().err, flags=re.DOTALL)
    # Nothing has been composed or launched.
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("target", "mode"),
    [
        ("val/f1<=0.9", "min"),
        ("val/f1>=0.9", None),
        ("val/f1=0.9", None),
        # The name tells no direction, and a metric alone has no sign.
        ("score<=5", None),
        ("val/f1", "min"),
    ],
)
def test_a_direction_that_is_meant_is_kept(target, mode):
    _check_direction(target, mode)


@pytest.mark.parametrize(
    ("history", "steps", "status"),
    [
        # The schedule ends at step 20, between two evaluations of the job.
        ([(6, 0.9), (12, 0.8), (18, 0.7)], 20, "stopped"),
        ([(18, None)], 18, "diverged"),
        ([(10, 0.9), (20, 0.7)], 20, "stopped"),
        # The untrained weights were evaluated twice.
        ([(0, 1.0), (0, 1.0), (18, 0.7)], 20, "stopped"),
        ([(6, 0.9), (12, 0.1)], 12, "reached"),
    ],
)
def test_a_jobs_last_evaluation_stands_for_the_end_of_its_schedule(history, steps, status):
    trial = made_trial(schedule_ends=True)
    assert _report_history(trial, history) == steps
    trial.finish(seconds=1.0)
    finished = trial.abandon().result()
    assert (finished.steps, finished.status) == (steps, status)


def test_a_job_that_ended_long_before_its_schedule_is_refused():
    trial = made_trial(schedule_ends=True)
    assert _report_history(trial, [(5, 0.9), (10, 0.8)]) == 10
    with pytest.raises(ConfigError, match="train and report until then"):
        trial.finish(seconds=1.0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["returns=None"], "the task returned None: return"),
        pytest.param(["returns=text"], "the task returned '0.5': return", marks=pytest.mark.slow),
        pytest.param(["returns=other"], "a dict of loss: return", marks=pytest.mark.slow),
        (["returns=steps"], "hydra.sweeper.returns must say what it is"),
        (["returns=metric", "hydra.sweeper.returns=steps"], "a whole number from 1"),
        (
            ["returns=steps", "hydra.sweeper.returns=steps", "hydra.sweeper.objective=time"],
            "seconds",
        ),
    ],
)
def test_what_a_task_may_not_return(arguments, message, sweep, capsys):
    with pytest.raises(SystemExit) as ended:
        sweep(*arguments, *SHORT)
    assert ended.value.code == 2
    assert re.search(f"error: .*{message}", capsys.readouterr().err)


@pytest.mark.slow
def test_a_task_that_has_been_mended_is_asked_the_same_trial_again(sweep):
    with pytest.raises(SystemExit):
        sweep("returns=None", *SHORT)
    records = sweep("hydra.sweeper.n_trials=1", "returns=history", *SHORT)
    assert records[-1].batch_size == 32


@pytest.mark.slow
def test_a_study_goes_on_unless_it_may_not(sweep, capsys):
    assert len(sweep("hydra.sweeper.n_trials=1", *SHORT)) == 1
    assert len(sweep("hydra.sweeper.n_trials=2", *SHORT)) == 2
    with pytest.raises(SystemExit):
        sweep("hydra.sweeper.n_trials=3", "hydra.sweeper.load_if_exists=false", *SHORT)
    assert "'train' has begun" in capsys.readouterr().err
    assert len(trials_of(Path("outputs") / "train")) == 2


def of_lightning(signal_error, error):
    """Return the error that Lightning makes of a signal's."""
    error.__context__ = signal_error
    return error


@pytest.mark.parametrize(
    ("error", "status", "is_told"),
    [
        (KeyboardInterrupt(), 130, True),
        (of_lightning(KeyboardInterrupt(), SystemExit(1)), 130, True),
        (SIGTERMException(), 143, True),
        (Terminated(), 143, True),
        # The user's own exit.
        (SystemExit(3), 3, False),
    ],
    ids=["Ctrl-C", "Ctrl-C in Lightning", "SIGTERM in Lightning", "SIGTERM", "exit"],
)
def test_a_signal_ends_a_sweep_with_a_line_and_its_status(
    error, status, is_told, monkeypatch, capsys
):
    def end(*arguments):
        raise error

    monkeypatch.setattr(hydra_sweep, "_sweep", end)
    with pytest.raises(SystemExit) as ended:
        hydra_sweep.run_sweep(None, [])
    assert ended.value.code == status
    assert capsys.readouterr().err.startswith("interrupted: ") == is_told


def run_application(*arguments):
    command = [sys.executable, APPLICATION / "train.py", *SEARCH, QUIET]
    return subprocess.run(
        [*command, *arguments], env=environment(), capture_output=True, text=True, timeout=280
    )


# Batches that go on are seen above without a kill.
@pytest.mark.parametrize(
    "n_jobs",
    [pytest.param(1, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.soak)],
)
def test_a_sweep_that_is_killed_goes_on_where_it_was(n_jobs, sweep, tmp_path, monkeypatch):
    means = ["hydra.sweeper.n_trials=5", f"hydra.sweeper.n_jobs={n_jobs}"]
    arguments = [*means, *CONTINUED, SEEDED, STEPS]
    # Nine or more steps were taken by a job that is continued.
    killed = forked_training(lambda: sweep(*arguments, "kill_when_continued=true"))
    assert killed == -signal.SIGKILL
    records = sweep(*arguments)
    # All of the batch were running.
    assert 1 <= len(with_status(records, "failed")) <= n_jobs
    (tmp_path / "whole").mkdir()
    monkeypatch.chdir(tmp_path / "whole")
    whole = sweep(*arguments)
    finished = [record for record in records if record.status != "failed"]
    assert list(map(values, finished)) == list(map(values, whole))


def with_status(records, status):
    return [record for record in records if record.status == status]


def values(record):
    """Return what depends on no clock."""
    return record.batch_size, record.lr, record.seed, record.status, record.steps, record.history


PARAMETERS = {
    "x=interval(0.1,10)": Range(0.1, 10.0, False, False),
    "x=tag(log,interval(0.1,10))": Range(0.1, 10.0, True, False),
    "x=int(interval(2.0,8.0))": Range(2.0, 8.0, False, True),
    "x=tag(log,int(interval(2,8)))": Range(2.0, 8.0, True, True),
    # Hydra's range leaves its end out.
    "x=range(2,8)": Range(2.0, 7.0, False, True),
    "x=range(2,9,3)": Range(2.0, 8.0, False, True, ("2", "5", "8")),
    "x=choice(a,b)": Range(math.nan, math.nan, False, True, ("a", "b")),
    # A list of values is read as a choice, in its order.
    "+x=1,4,2": Range(1.0, 4.0, False, True, ("1", "4", "2")),
}


@pytest.mark.parametrize("line", PARAMETERS)
def test_ranges_are_those_of_the_optuna_sweeper(line):
    lines = ["lr=interval(0.1,1)", "batch_size=16,64,32", "fixed=3", "one=choice(b)", line]
    params = read_params(lines, None, None, None)
    # 16, 32 and 64 have 16 as their common divisor.
    assert (params.batch_size, params.lr, params.multiple) == ("batch_size", "lr", 16)
    ((key, found),) = params.others.items()
    assert repr(found) == repr(PARAMETERS[line])
    assert sorted(params.fixed) == ["fixed=3", "one=b"]
    name = params.names[key]
    assert params.values({name: 1}) == {key: found.values[1] if found.values else "1"}


def test_names_in_a_study_are_short_where_they_are_one_ones_own():
    lines = ["lr=0.1,1", "batch_size=1,2", "a.x=1,2", "b.x=1,2", "a.y=1,2", "a.delta=1,2"]
    names = read_params(lines, None, None, None).names
    # Two parameters named x need their groups, and delta is the search's own.
    assert names == {"a.x": "a_x", "b.x": "b_x", "a.y": "y", "a.delta": "a_delta"}


def record(status, seconds_per_step):
    spec = TrialSpec(number=0, trial_index=0, batch_size=32, lr=0.1, delta=None, seed=0)
    unmeasured = TrialResult.unmeasured(spec, status)
    return dataclasses.replace(unmeasured, seconds_per_step=seconds_per_step)


@pytest.mark.parametrize(
    ("records", "told"),
    [
        ([("reached", 0.1)], "time"),
        ([("stopped", None), ("reached", 0.1)], "time"),
        ([("stopped", None), ("failed", None)], "steps"),
        # A job that has failed or diverged may lack seconds that others return.
        ([("failed", None), ("diverged", None)], None),
        ([], None),
    ],
)
def test_the_seconds_of_trials_settle_the_objective(records, told):
    assert _settled_objective([record(*values) for values in records]) == told


@pytest.mark.parametrize(
    ("given", "goal", "is_open"),
    [
        ({}, "time", True),
        ({"returns": "steps"}, "time", True),
        ({"returns": "metric"}, "loss", False),
        ({"objective": "steps"}, "steps", False),
        ({"options": ["search.trials=3", "search.objective=curve"]}, "curve", False),
    ],
)
def test_a_sweep_seeks_the_least_time_unless_told_otherwise(given, goal, is_open):
    names = [field.name for field in dataclasses.fields(Settings)]
    settings = Settings(**{**dict.fromkeys(names), "options": [], **given})
    assert (settings.goal, settings.goal_is_open) == (goal, is_open)


def objective():
    """Return the objective of the study, which its storage and its result must agree on."""
    stored = stored_settings("train", "sqlite:///bstune.db")["search.objective"]
    assert bstune.load("outputs/train").summary.objective == stored
    return stored


NUMBERS = ["returns=steps", "hydra.sweeper.returns=steps"]


@pytest.mark.parametrize(
    ("arguments", "sought"),
    [
        ([], "time"),
        pytest.param([STEPS], "steps", marks=pytest.mark.soak),
        # The whole first batch is kept.
        pytest.param([*NUMBERS, "hydra.sweeper.n_jobs=2"], "steps", marks=pytest.mark.slow),
    ],
)
def test_jobs_that_return_seconds_are_compared_by_time(arguments, sought, sweep, launched, capsys):
    records = sweep("hydra.sweeper.n_trials=3", *arguments)
    assert objective() == sought
    printed = capsys.readouterr().out
    assert ("returns no seconds_per_step" in printed) == (arguments[:2] == NUMBERS)
    # No job is launched twice.
    assert list(itertools.chain(*launched)) == [0, 1, 2]
    assert len(records) == 3
    best = results()["best_value"]
    assert best < 5 if sought == "time" else best >= 5
    # A continued sweep keeps it, whatever its next jobs return.
    sweep("hydra.sweeper.n_trials=4", *arguments)
    assert objective() == sought
    assert list(itertools.chain(*launched)) == [0, 1, 2, 3]
    assert "if the first trials tell no seconds" not in capsys.readouterr().out


@pytest.mark.slow
def test_a_sweep_that_was_ended_before_its_objective_was_stored_goes_on(sweep, monkeypatch):
    def end(*arguments):
        raise KeyboardInterrupt

    with monkeypatch.context() as ending:
        ending.setattr(hydra_sweep, "change_objective", end)
        with pytest.raises(SystemExit) as ended:
            sweep("hydra.sweeper.n_trials=2", *NUMBERS)
    assert ended.value.code == 130
    assert len(trials_of(Path("outputs") / "train")) == 1
    assert len(sweep("hydra.sweeper.n_trials=2", *NUMBERS)) == 2
    assert objective() == "steps"


@pytest.mark.parametrize(
    ("arguments", "sought"),
    [
        pytest.param([], "time", marks=pytest.mark.soak),
        pytest.param(NUMBERS, "steps", marks=pytest.mark.slow),
    ],
)
def test_mlflow_shows_the_objective_that_was_settled(arguments, sought, sweep):
    sweep("hydra.sweeper.n_trials=1", *arguments, "hydra.sweeper.options=[]")
    client = mlflow.MlflowClient(f"sqlite:///{Path('mlflow.db').absolute()}")
    experiment = client.get_experiment_by_name("bstune")
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.data.params["objective"] == sought


@pytest.mark.slow
def test_seconds_that_go_missing_later_end_a_sweep_of_time(sweep, capsys):
    sweep("hydra.sweeper.n_trials=1")
    with pytest.raises(SystemExit) as ended:
        sweep("hydra.sweeper.n_trials=2", *NUMBERS)
    assert ended.value.code == 2
    assert "the objective time needs seconds" in capsys.readouterr().err
    assert stored_settings("train", "sqlite:///bstune.db")["search.objective"] == "time"
