"""``hydra/sweeper=bstune``: what a sweep says, and whole runs of two applications as others write
them."""

import json
import os
import runpy
import shutil
import sys
from pathlib import Path

import pytest
import yaml
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from processes import started
from refusals import as_yaml, cases, refused, text_cases
from search_records import history, spec

import bstune
from bstune.core.records import Target
from bstune.integrations.hydra_params import options_by_our_names, read_sweep
from bstune.integrations.hydra_sweeper import report
from bstune.trial.trial import Trial

PROJECTS = Path(__file__).parent / "projects"
# A forked process cannot ask CUDA.
HERE = ["+hydra.sweeper.mlflow.uri=null", "+hydra.sweeper.device=cpu"]
SIZE, RATE = "batch_size=range(8,1024)", "lr=tag(log,interval(1e-4,1))"


def typed(words):
    """The words of a row."""
    return words.strip("-").replace("SIZE", SIZE).replace("RATE", RATE).split()


BEST = {"target": "min val/loss"}
CONFIG = """
defaults: [{optim: sgd}, _self_]
batch_size: 64
lr: 0.25
seed: 7
steps: 500
checkpoint: null
net: {dropout: 0.5, width: 32, rate: high}
data: {train_batch_size: 16}
"""


@pytest.fixture(scope="module")
def read(tmp_path_factory):
    """Reads a sweep of a small application: its words, and the keys below hydra.sweeper."""
    folder = tmp_path_factory.mktemp("application")
    (folder / "train.yaml").write_text(CONFIG)
    (folder / "optim").mkdir()
    for name in ("sgd", "adam"):
        (folder / f"optim/{name}.yaml").write_text(f"name: {name}")
    with initialize_config_dir(str(folder), version_base=None):
        config = compose("train", ["hydra/sweeper=bstune"], return_hydra_config=True)
        loader = GlobalHydra.instance().config_loader()

        def read_words(words, **given):
            known = {"study": "s"} | options_by_our_names(given)
            return read_sweep(known, words, config, loader)

        yield read_words


@text_cases("""
words | given | options
SIZE RATE | - | batch_size: [8, 1024], lr: [0.0001, 1], budget.steps: 1
# As for Optuna's sweeper a range's end is included; steps and choices are multiples.
batch_size=range(32,260,32) RATE | - | batch_size: [32, 256, 32]
batch_size=choice(32,64,128) RATE | - | batch_size: [32, 128, 32]
# The baseline is the application's own, and belongs to the ranges.
batch_size=96,128 lr=interval(0.5,2) | - | batch_size: [64, 128, 32], lr: [0.25, 2], baseline: [64]
SIZE RATE seed=3 | - | seed: 3
# The command line's come last; whole ends are not meant where the application has 0.5.
RATE net.dropout=interval(0,1) net.width=choice(16,32) | params: {batch_size: 'range(8,64)', \
lr: 0.1, net.dropout: 0.2} | baseline.values: {net.dropout: 0.5, net.width: 32}, \
tune: {net.dropout: [0.0, 1.0], net.width: [16, 32]}
data.train_batch_size=range(4,64) RATE | - | baseline: [16, 0.25]
# The application has no such value: there is no baseline.
SIZE RATE +net.depth=range(2,8) | - | baseline: [null, null]
SIZE RATE | direction: maximize, target: null, n_trials: 9, max_failure_rate: 0.5, study_name: t, \
sampler: {_target_: TPESampler} | target: max value, trials: 9, study: t, objective: metric, \
sampler: frontier
SIZE RATE | target: a <= 1, max_steps: steps, baseline: {lr: 0.5} | objective: time, \
budget.steps: 500, baseline: [64, 0.5]
""")
def test_a_sweep_gives_the_options_of_its_study(read, words, given, options):
    found = read(typed(words), **BEST | as_yaml(given))[1]
    dumped = json.loads(found.model_dump_json()) | {"target": str(found.target)}
    for name, value in as_yaml(options).items():
        section, _, key = name.partition(".")
        got = dumped[section][key] if key else dumped[section]
        if isinstance(value, list):
            got = list(got.values())[: len(value)]
        assert got == value, name


def test_a_job_takes_what_its_keys_say(read):
    keys = {"max_steps": "steps", "resume_from": "checkpoint", "save_to": "+to"}
    words = [SIZE, RATE, "net.rate=low", "+net.depth=range(2,9)", "~data"]
    application, options = read(words, **BEST, **keys, baseline={"values": {"net.depth": 4}})
    of = spec(batch_size=96, lr=1e-05, values={"net.depth": 3}, seed=11, max_steps=40)
    trial = Trial(of, options.target, total_steps=500, save_to=Path("/it's"))
    own = ["net.rate=low", "~data", "batch_size=96", "lr=1e-05", "seed=11", "steps=40"]
    assert application.overrides(trial) == [*own, "+to='/it\\'s'", "+net.depth=3"]


@text_cases("""
words | given | named
# All that is missing is asked for at once.
- | resume_from: checkpoint, target: null | sweeper.batch_size, sweeper.lr, max_steps, save_to
SIZE | - | KEY=tag(log, hydra.sweeper.lr=KEY
+net.batch_size=4,8 data.train_batch_size=4,8 RATE | - | hydra.sweeper.batch_size=KEY
SIZE RATE | target: a <= 1 | budget.steps
batch_size=interval(8.5,64) RATE | - | batch_size.low, 8.5
SIZE RATE net.rate=choice(low,high) | - | choice(low,high), numbers
SIZE RATE nothing=interval(0,1) | - | 'nothing'
SIZE RATE | save_to: nothing | 'nothing'
SIZE RATE seed=1,2 | - | seed
SIZE RATE net.dropout=interval(0,1) | lr: net.dropout | lr=net.dropout
SIZE lr=interval( | - | hydra.sweeper.params
SIZE RATE | search_space: {lr: {}} | search_space
SIZE RATE +net.depth=range(2,8) | baseline: {lr: 0.5} | baseline, 0.5, net.depth
SIZE RATE | baseline: {lr: fast} | baseline, 'fast', lr
""")
def test_what_cannot_be_used_is_one_line(read, words, given, named):
    with refused(named):
        read(typed(words), **BEST | as_yaml(given))


@cases("""
target | whole | returned | status | evaluations | seconds
min a | true | [[3, 0.5], [9, 0.7]] | finished | 100 0.5 | 8.0
min a | true | [[3, 0.5], [9, .nan]] | diverged | 100 - | 8.0
min a | false | {a: null, seconds: 2, b: 1} | diverged | 100 - | 2.0
a <= 1 | false | {a: [[20, 3], [60, 1], [80, 0]], seconds: 4} | reached | 20 3, 60 1 | 3.0
a <= 1 | false | [[0, 9]] | failed | null | 0.0
""")
def test_what_a_job_returns_is_its_trials(target, whole, returned, status, evaluations, seconds):
    trial = Trial(spec(), Target.parse(target), total_steps=100)
    report(trial, returned, 8.0, whole)
    record = trial.record()
    assert (record.status, record.history) == (status, history(evaluations))
    assert record.train_seconds == pytest.approx(seconds)


WRONG = [["a <= 1", 0.5], ["min a", None], ["min a", {"b": 1}], ["min a", [0.5, 0.4]]]


@pytest.mark.parametrize("target, returned", WRONG)
def test_a_job_is_told_what_to_return(target, returned):
    with refused("return"):
        report(Trial(spec(), Target.parse(target), total_steps=100), returned, 8.0, False)


def run(folder, *words):
    """Start an application's sweep; its status, what it printed, and the jobs that it launched."""
    log = folder / "log.txt"
    process = started(log, start, folder, words)
    process.join(100)
    printed = log.read_text()
    return process.exitcode, printed, printed.count("\t#")


def start(folder, words):
    """Be ``python train.py -m ...``."""
    GlobalHydra.instance().clear()
    os.chdir(folder)
    sys.argv = ["train.py", "-m", *words]
    runpy.run_path("train.py", run_name="__main__")


def application(tmp_path, name):
    folder = tmp_path / name
    shutil.copytree(PROJECTS / name, folder)
    return folder


def test_jobs_are_pruned_and_resumed(tmp_path):
    folder = application(tmp_path, "hydra_digits")
    status, printed, jobs = run(folder, "hydra.sweeper.trials=6", "hydra.sweeper.seeds=1", *HERE)
    assert status == 0, printed
    result = bstune.load(folder / "outputs/train")
    assert jobs == len(result.records)
    assert result.train_command is None or "python train.py batch_size=" in printed
    train = runpy.run_path(str(folder / "train.py"))["train"]
    for record in result.records:
        # As if it had not stopped before.
        whole = train(record.batch_size, record.lr, record.seed, record.steps)
        assert set(whole["val/loss"]) <= set(record.history)
        first = 0 if record.resumed_from is None else result.records[record.resumed_from].steps
        assert record.train_seconds == pytest.approx(
            whole["seconds"] * (record.steps - first) / record.steps
        )
    assert any(record.resumed_from is not None for record in result.records)


def test_a_config_of_hydras_optuna_sweeper_changed_in_one_line(tmp_path):
    folder = application(tmp_path, "hydra_number")
    config = folder / "conf/config.yaml"
    text = config.read_text()
    words = ["hydra.sweep.dir=sweep", "+hydra.sweeper.seeds=1", *HERE]
    config.write_text(text.replace("hydra/sweeper: optuna", "hydra/sweeper: bstune"))
    status, printed, jobs = run(folder, "fault=memory", *words)
    assert status == 0, printed
    result = bstune.load(folder / "outputs/train")
    statuses = {record.status for record in result.records}
    assert {"finished", "out of memory"} <= statuses <= {"finished", "out of memory", "diverged"}
    assert all(record.is_unfit == (record.batch_size > 100) for record in result.records)
    assert result.configurations == 4
    assert jobs == len(result.records)
    best = yaml.safe_load((folder / "sweep/optimization_results.yaml").read_text())
    assert best["best_value"] == result.best.metric
    assert best["best_params"] == {
        "data.batch_size": result.best.batch_size,
        "optimizer.lr": result.best.lr,
        "model.dropout": result.best.values["model.dropout"],
    }
    # Hydra's own folders, one a job.
    assert len(list((folder / "sweep").glob("*/.hydra/overrides.yaml"))) == jobs


def test_three_failures_in_a_row_end_it_with_the_users_own_error(tmp_path):
    folder = application(tmp_path, "hydra_number")
    guarded = "+hydra.sweeper.mlflow.uri=http://me:hunter2@127.0.0.1:1"
    words = ["hydra/sweeper=bstune", "hydra.sweeper.n_jobs=1", "fault=raise", guarded, HERE[1]]
    status, printed, jobs = run(folder, *words)
    assert (status, jobs) == (1, 3)
    assert printed.splitlines()[-1] == "ValueError: no such column (train.py:15)"
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert "multirun.yaml" in [path.name for path in files]
    assert not [path for path in files if b"hunter2" in path.read_bytes()]


def test_ctrl_c_ends_it_with_one_line(tmp_path):
    folder = application(tmp_path, "hydra_number")
    words = ["hydra/sweeper=bstune", "hydra.sweeper.n_jobs=1", "fault=interrupt", *HERE]
    status, printed, jobs = run(folder, *words)
    assert (status, jobs) == (130, 1)
    assert "Traceback" not in printed
