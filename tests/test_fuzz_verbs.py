"""Every verb on inputs that nobody means: it ends as the input deserves, in a plain line, within seconds and memory."""

import json
import os
import random
import resource
import shutil
import signal
import sqlite3
import sys
import time
from functools import partial
from pathlib import Path

import pytest
from nasty import NUMBERS, TEXTS, VALUES, dumped, odd_path, spoil
from toolbox import made_table, make_survey, write_rows

from bstune.__main__ import main
from bstune.hardware.report import survey_json

PROJECTS = Path(__file__).parent / "projects"
# The longest time that any input may take.
GUARD_SECONDS = 60
# Bytes of addresses that a case may take beyond those of its start.
MEMORY = 4 * 2**30
# The environment names more cases, or another seed, for a night's run.
CASES = int(os.environ.get("BSTUNE_FUZZ_CASES", 500))
SEED = int(os.environ.get("BSTUNE_FUZZ_SEED", 0))
REPLAY = (
    "workload=replay",
    "workload.table=t.jsonl",
    "workload.target.value=0.14",
    "search.objective=steps",
    "search.trials=2",
    "search.replicates=0",
    "mlflow.enabled=false",
    "hardware.enabled=false",
)
# One trial of a few steps, in this process.
TRIAL = ("trial.batch_size=64", "trial.lr=0.1", "workload.budget.steps=3", "mlflow.enabled=false")
GRID = ("--batch-sizes", "8,32", "--lrs", "0.04,0.16", *REPLAY[:4])
BRANCH = ("--batch-size", "16", "--batch-sizes", "32", "--examples", "128", "--seeds", "0")
STUDY_KEYS = ("format", "settings", "study_id", "output", "device", "arguments", "lease:x")
TRIAL_KEYS = ("trial_index", "spec", "worker", "record", "resumed_from")
TRAINER = (
    *("callbacks", "logger", "plugins", "profiler", "gradient_clip_val", "benchmark", "x"),
    *("gradient_clip_algorithm", "detect_anomaly", "deterministic", "log_every_n_steps"),
    *("limit_val_batches", "inference_mode", "default_root_dir", "sync_batchnorm", "max_steps"),
    *("enable_checkpointing", "model_registry"),
)
HYDRA = ("hydra.run.dir", "hydra.sweep.dir", "hydra.job.name", "hydra.launcher", "hydra.verbose")
DRIVERS = (
    "mysql+pymysql://h/x",
    "postgresql+pg8000://h/x",
    "oracle://h/x",
    "mssql+pyodbc://h/x",
    "nothing://h/x",
    "sqlite+nothing:///x.db",
    "sqlite:////proc/x.db",
    "sqlite:///.",
    "grpc://[::1",
    "://",
)


# bstune catches Exception, so that this one passes through.
class Hangs(BaseException):
    """No error that anything catches."""


def hang(*_):
    raise Hangs


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A folder with valid inputs of each verb; ``made`` finishes it once, by the command."""
    folder = tmp_path_factory.mktemp("valid")
    made_table(folder)
    # S = 1000 (1 + 64/B).
    rows = "".join(f"{2**k},{1000 * (1 + 64 / 2**k)}\n" for k in range(3, 10))
    (folder / "points.csv").write_text(f"batch_size,steps\n{rows}")
    shutil.copy(PROJECTS / "lightning_cli" / "config.yaml", folder / "cli.yaml")
    workload = folder / "conf" / "workload" / "mine.yaml"
    workload.parent.mkdir(parents=True)
    target = {"metric": "val/error", "value": 0.14, "mode": "min"}
    values = {"name": "mine", "table": "t.jsonl", "target": target}
    workload.write_text(json.dumps({"defaults": ["replay"], **values}))
    return folder


@pytest.fixture
def command(monkeypatch, capfd):
    """Run the command with these arguments; return its exit status and what it printed."""

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["bstune", *arguments])
        try:
            status = main()
        except SystemExit as leaving:
            status = leaving.code
        return (status, *capfd.readouterr())

    return run


def finish(base, command, monkeypatch):
    """Run what leaves further valid inputs: a study and a grid that is recorded in part."""
    if (base / "outputs").exists():
        return
    monkeypatch.chdir(base)
    assert command(*REPLAY, "study=s", "output=outputs/s")[0] == 0
    assert command("sweep", "critical_batch", "sweep.experiment.tables=[t.jsonl]",
                  "sweep.experiment.target=0.14", "sweep.experiment.easier=[1.0]",
                  "sweep.output=sweep")[0] == 0  # fmt: skip
    (base / "outputs" / "s" / "hardware.json").write_text(survey_json(make_survey()))
    monkeypatch.chdir(base)
    record = {"batch_size": 8, "lr": 0.04, "seed": 0, "steps": [1], "metric": [0.5]}
    write_rows(base / "r.jsonl.runs", [record | {"seconds_per_step": 0.1, "status": "stopped"}])
    settings = {"budget.steps": 3}
    (base / "r.jsonl.settings").write_text(json.dumps(settings))
    shutil.copy(base / "points.csv", base / "odd.csv")


def of_report(rng, folder):
    study = folder / "outputs" / "s"
    how = spoil(rng, study / rng.choice(("curve.json", "curve.json", "trials.jsonl", "study.json",
                                         "config.yaml", "best.yaml", "hardware.json")))  # fmt: skip
    targets = ("target=0.2", "target=0.2", f"target={rng.choice(NUMBERS)}", "target=x")
    return how, ("report", "outputs/s", *([rng.choice(targets)] if rng.random() < 0.6 else []))


def of_compare(rng, folder):
    shutil.copytree(folder / "outputs" / "s", folder / "outputs" / "other")
    how = spoil(
        rng, folder / "outputs" / "other" / rng.choice(("curve.json", "curve.json", "trials.jsonl"))
    )
    name = rng.choice(("outputs/other", "outputs/other/curve.json"))
    return how, ("compare", "outputs/s", name)


def of_extrapolate(rng, folder):
    for name in ("other", "third"):
        shutil.copytree(folder / "outputs" / "s", folder / "outputs" / name)
    spoiled = rng.choice(("curve.json", "curve.json", "config.yaml", "trials.jsonl"))
    how = spoil(rng, folder / "outputs" / "other" / spoiled)
    at = rng.choice(
        ("examples=1e9", "parameters=1e6", "seconds=9", f"evaluation_ratio={rng.choice(NUMBERS)}")
    )
    values = ("--values", "s=1,other=2,third=3") if rng.random() < 0.5 else ()
    studies = (f"outputs/{name}" for name in ("s", "other", "third"))
    files = ("--card", "card.yaml") if rng.random() < 0.3 else ()
    return how, ("extrapolate", *studies, "--at", at, *values, *files)


def of_record(rng, folder):
    if rng.random() < 0.5:
        how = spoil(rng, folder / "outputs" / "s" / "trials.jsonl")
        return how, ("record", "new.jsonl", "--trials", "outputs/s/trials.jsonl")
    how = spoil(rng, folder / rng.choice(("r.jsonl.runs", "r.jsonl.settings")))
    return how, ("record", "r.jsonl", *GRID)


def of_fit(rng, folder):
    return spoil(rng, folder / "points.csv"), ("fit", "points.csv")


def of_table(rng, folder):
    return spoil(rng, folder / "t.jsonl"), REPLAY


def of_output(rng, folder):
    study = folder / "outputs" / "s"
    (study / "unstored.jsonl").write_text((study / "trials.jsonl").read_text())
    name = rng.choice(("study.json", "study.json", "unstored.jsonl", "trials.jsonl", "config.yaml"))
    how = spoil(rng, study / name)
    return how, (*REPLAY, "study=s", "output=outputs/s", "search.trials=3")


def of_database(rng, folder):
    how = spoil(rng, (folder / "bstune.db").rename(folder / "database.bin"))
    if os.path.lexists(folder / "database.bin"):
        (folder / "database.bin").rename(folder / "bstune.db")
    verb = rng.choice(((), ("worker",)))
    own = REPLAY if not verb else ("storage=sqlite:///bstune.db",)
    return how, (*verb, *own, "study=s", "output=outputs/s", "search.trials=3")


def of_attributes(rng, folder):
    """A study whose attributes another program has written."""
    with sqlite3.connect(folder / "bstune.db") as database:
        if rng.random() < 0.7:
            table = "study_user_attributes"
            key = f"bstune:{rng.choice(STUDY_KEYS)}"
        else:
            table = "trial_user_attributes"
            key = f"bstune:{rng.choice(TRIAL_KEYS)}"
        found = database.execute(f"SELECT value_json FROM {table} WHERE key=?", (key,)).fetchone()  # noqa: S608
        text = dumped(rng.choice(VALUES))
        if found is not None and rng.random() < 0.4:
            inner = json.loads(found[0])
            text = json.dumps(inner[: len(inner) // 2] if isinstance(inner, str) else [inner])
        # The lease of another process, which may never have been one.
        if key == "bstune:lease:x":
            text = json.dumps(text) if rng.random() < 0.5 else text
            insert = (
                "INSERT INTO study_user_attributes (study_id, key, value_json) VALUES (1, ?, ?)"
            )
            database.execute(insert, (key, text))
        elif rng.random() < 0.2:
            database.execute(f"DELETE FROM {table} WHERE key=?", (key,))  # noqa: S608
        else:
            database.execute(f"UPDATE {table} SET value_json=? WHERE key=?", (text, key))  # noqa: S608
    database.close()
    verb = rng.choice(((), ("worker",), ("worker",)))
    own = REPLAY if not verb else ("storage=sqlite:///bstune.db",)
    return key, (*verb, *own, "study=s", "output=outputs/s", "search.trials=3")


def of_storage(rng, folder):
    name = rng.choice(("storage", "mlflow.uri"))
    url = rng.choice((*DRIVERS, *TEXTS))
    if rng.random() < 0.3:
        return "worker", ("worker", f"storage={url}", f"study={rng.choice(('s', *TEXTS))}")
    more = ("mlflow.enabled=true",) if name == "mlflow.uri" else ()
    return name, (*REPLAY, *more, f"{name}={url}")


def of_config_dir(rng, folder):
    how = spoil(rng, folder / "conf" / "workload" / "mine.yaml")
    return how, ("--config-dir", "conf", "workload=mine", *REPLAY[4:])


def of_lightning(rng, folder):
    how = spoil(rng, folder / "cli.yaml")
    return how, ("lightning", "cli.yaml", "--target", "val_loss=0.5", *TRIAL)


def of_branch(rng, folder):
    if not (folder / "c.bin").exists():
        shutil.copy(folder / "outputs" / "s" / "curve.json", folder / "c.bin")
    return spoil(rng, folder / "c.bin"), ("branch", "c.bin", *BRANCH, "workload=digits")


def of_sweep(rng, folder):
    how = spoil(rng, rng.choice((folder / "t.jsonl", folder / "sweep" / "result.json")))
    return how, ("sweep", "critical_batch", "sweep.experiment.tables=[t.jsonl]",
                 "sweep.experiment.target=0.14", "sweep.experiment.easier=[1.0]",
                 "sweep.output=sweep")  # fmt: skip


def of_trainer(rng, folder):
    value = rng.choice((*NUMBERS, *TEXTS, "3", "[x]", "{a: 1}", "[null]"))
    return "trainer", ("workload=digits", *TRIAL, f"+trainer.{rng.choice(TRAINER)}={value}")


def of_hydra(rng, folder):
    return "hydra", (*REPLAY, f"{rng.choice(HYDRA)}={rng.choice((*NUMBERS, *TEXTS, '3'))}")


def of_survey(rng, folder):
    names = ("seconds", "memory_fraction", "probe_limit", "refresh", "enabled", "x", "devices")
    value = rng.choice((*NUMBERS, *TEXTS))
    return "survey", ("survey", "workload=digits", f"hardware.{rng.choice(names)}={value}",
                      "workload.batch_size.high=16")  # fmt: skip


def of_arguments(rng, folder):
    """Arguments of the verbs that have their own."""
    odd = partial(odd_path, rng, folder)
    number = partial(rng.choice, (*NUMBERS, *TEXTS[:12]))
    cases = (
        lambda: ("fit", odd()),
        lambda: ("fit", "points.csv", "--law", odd()),
        lambda: ("lightning", odd(), "--target", "val_loss=0.5"),
        lambda: ("lightning", "cli.yaml", "--target", rng.choice((*TEXTS, *NUMBERS))),
        lambda: ("lightning", "cli.yaml", "--target", "val_loss=0.5", "--name", odd()),
        lambda: ("report", odd()),
        lambda: ("report", "outputs/s", odd()),
        lambda: ("compare", odd()),
        lambda: ("compare", "outputs/s", odd()),
        lambda: ("compare", "outputs/s", "--output", odd()),
        lambda: ("extrapolate", odd(), "--at", "examples=1e6"),
        lambda: ("extrapolate", "outputs/s", "--at", odd()),
        lambda: ("extrapolate", "outputs/s", "--at", f"examples={number()}", "--card", odd()),
        lambda: ("extrapolate", "outputs/s", "--at", "examples=9", "--values", f"s={number()}"),
        lambda: ("record", odd(), "--trials", "outputs/s/trials.jsonl"),
        lambda: ("record", "new.jsonl", "--trials", odd()),
        lambda: ("record", "new.jsonl", "--batch-sizes", number(), "--lrs", number()),
        lambda: ("branch", odd(), *BRANCH, "workload=digits"),
        lambda: ("branch", "points.csv", "--batch-size", number(), "--examples", number()),
        lambda: ("sweep", rng.choice((*TEXTS, "critical_batch")), odd()),
        lambda: ("sweep", "critical_batch", f"sweep.experiment.tables=[{number()}]"),
        lambda: ("sweep", "critical_batch", f"sweep.output={odd()}"),
        lambda: (*REPLAY, f"workload.table={odd()}"),
        lambda: (*REPLAY, f"output={odd()}"),
        lambda: ("--config-dir", odd(), *REPLAY),
        lambda: ("worker", odd()),
        lambda: (odd(),),
    )
    return "arguments", rng.choice(cases)()


# How many of 100 cases each kind makes.
KINDS = {
    of_report: 16,
    of_compare: 6,
    of_extrapolate: 6,
    of_record: 8,
    of_fit: 5,
    of_table: 6,
    of_output: 6,
    of_database: 5,
    of_attributes: 8,
    of_storage: 4,
    of_config_dir: 4,
    of_lightning: 4,
    of_branch: 3,
    of_sweep: 3,
    of_trainer: 4,
    of_hydra: 2,
    of_survey: 2,
    of_arguments: 20,
}


def limit_memory():
    """Let this process take 4 GiB more, until it is limited anew."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + MEMORY, hard))


def fault_of(command, arguments):
    """Run a command; say what is wrong with how it ends, None if nothing is."""
    limit_memory()
    signal.alarm(GUARD_SECONDS)
    try:
        status, out, err = command(*arguments)
    except Hangs:
        return "hangs"
    except BaseException as error:  # noqa: BLE001  # it is a fault, of which all are listed
        return f"raises {error!r:.500}"
    finally:
        signal.alarm(0)
        # -1: no limit of its own.
        resource.setrlimit(resource.RLIMIT_AS, (-1, resource.getrlimit(resource.RLIMIT_AS)[1]))
    if "Traceback" in out + err:
        return f"{status}, a traceback: {(out + err)[-1500:]}"
    # A plain refusal is 2; 1 would be the user's own error.
    if status == 0 or (status == 2 and err.strip()):
        return None
    return f"status {status}: {err[-1500:]}"


def faults_of(base, command, tmp_path, monkeypatch, capfd, count, seed, kinds=KINDS):
    """Run so many cases; list the faults."""
    finish(base, command, monkeypatch)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.syspath_prepend(str(PROJECTS))
    monkeypatch.setenv("BSTUNE_CACHE", str(tmp_path / "cache"))
    before = signal.signal(signal.SIGALRM, hang)
    faults = []
    only = os.environ.get("BSTUNE_FUZZ_CASE")
    try:
        for number in range(count) if only is None else [int(only)]:
            # A case is a function of its number, so that one can be run alone.
            rng = random.Random(f"{seed}/{number}")
            kind = rng.choices(list(kinds), list(kinds.values()))[0]
            folder = tmp_path / f"case{number}"
            shutil.copytree(base, folder)
            monkeypatch.chdir(folder)
            how, arguments = kind(rng, folder)
            began = time.monotonic()
            # No argument of a process holds a zero byte.
            fault = fault_of(command, [one.replace("\0", "") for one in arguments])
            shown = f"case {number} ({kind.__name__}, {how}) {[one[:200] for one in arguments]}"
            with capfd.disabled():
                print(f"{time.monotonic() - began:.1f} s  {shown}: {fault}", flush=True)
            # Some inputs name code that would leave this file.
            if (folder / "pwned").exists():
                fault = "runs what an input names"
            if fault is not None:
                faults.append(f"{shown}: {fault}")
            monkeypatch.chdir(tmp_path)
            shutil.rmtree(folder)
    finally:
        signal.signal(signal.SIGALRM, before)
    return faults


@pytest.mark.soak
def test_any_input_ends_as_it_deserves(base, command, tmp_path, monkeypatch, capfd):
    faults = faults_of(base, command, tmp_path, monkeypatch, capfd, CASES, SEED)
    assert not faults, "\n".join([f"{len(faults)} of {CASES}", *faults])


@pytest.mark.slow
def test_a_sample_of_inputs_ends_as_it_deserves(base, command, tmp_path, monkeypatch, capfd):
    kinds = {of_fit: 2, of_attributes: 1}
    faults = faults_of(base, command, tmp_path, monkeypatch, capfd, 20, 1, kinds)
    assert not faults, "\n".join(faults)
