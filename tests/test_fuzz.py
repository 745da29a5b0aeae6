"""Options with values that nobody means: each command ends in a study or in a plain line, and writes where it may."""

import os
import random
import signal

import pytest
from builders import options_of
from toolbox import entries, made_table

from bstune.options import flatten

STUDY = (
    "workload=replay",
    "workload.table=t.jsonl",
    "workload.target.value=0.14",
    "search.objective=steps",
)
# Where an option is taken after all, the study is short.
STUDY += ("search.trials=2", "search.replicates=0")
NUMBERS = (
    "nan",
    "inf",
    "-inf",
    "1e300",
    "-1e300",
    "1e-320",
    "-1",
    "0",
    "0.5",
    "1",
    str(2**31),
    str(2**32),
    str(2**63),
)
OTHERS = (
    "null",
    "[]",
    "{}",
    "true",
    "false",
    "[1]",
    "[nan]",
    "{a: 1}",
    "???",
    "${seed}",
    "${nothing}",
    "~/x",
)
TEXTS = (
    "",
    " ",
    "null",
    "7",
    "1e3",
    "-1",
    "a/b",
    "../x",
    "/",
    ".",
    "~",
    "~nobody/x",
    "a\0b",
    "a\nb",
    "\udcff",
    "😀",
)
TEXTS += (
    "**",
    "x" * 300,
    "x" * 100_000,
    "http://[::1",
    "sqlite:///",
    "sqlite:///../x/y.db",
    "[bold]",
    "%s{0}",
    "a b,c",
)
# These may lie outside of the working directory.
PLACES = ("output", "storage", "mlflow.uri")
COMMANDS = 120
GUARD_SECONDS = 60


class Hangs(BaseException):
    """No error that anything catches."""


def hang(*_):
    raise Hangs


def quoted(text):
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


def commands(rng, count):
    """The arguments of commands, each with one option that has a nasty value."""
    names = {
        sampler: sorted(flatten(options_of(*STUDY, sampler).model_dump())) for sampler in SAMPLERS
    }
    values = [*NUMBERS, *OTHERS, *map(quoted, TEXTS)]
    for _ in range(count):
        sampler = rng.choice(SAMPLERS)
        groups = ["algorithm", "scaling", "schedule", "sampler", "workload"]
        # Under debug an error is shown with where it came from.
        name = rng.choice([*(one for one in names[sampler] if one != "debug"), *groups])
        # MLflow's database takes seconds.
        mlflow = [] if name.startswith("mlflow.") else ["mlflow.enabled=false"]
        yield name, (*STUDY, sampler, *mlflow, f"{name}={rng.choice(values)}")


SAMPLERS = ("sampler=frontier", "sampler=tpe", "sampler=gp", "sampler=qmc", "scaling=surge")


@pytest.mark.soak
def test_any_value_ends_in_a_study_or_in_a_plain_line(bstune, tmp_path, monkeypatch):
    made_table(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    rng = random.Random(int(os.environ.get("BSTUNE_FUZZ_SEED", 0)))
    faults = []
    before = signal.signal(signal.SIGALRM, hang)
    for number, (name, arguments) in enumerate(list(commands(rng, COMMANDS))):
        folder = tmp_path / f"case{number}" / "here"
        folder.mkdir(parents=True)
        made_table(folder)
        monkeypatch.chdir(folder)
        # No command may wait for ever.
        signal.alarm(GUARD_SECONDS)
        try:
            status, out, err = bstune(*arguments)
        except Hangs:
            status = "hangs"
            out = ""
            err = ""
        except Exception as error:  # noqa: BLE001  # it is a fault, of which all are listed
            status = repr(error)
            out = ""
            err = ""
        finally:
            signal.alarm(0)
        plain = "Traceback" not in out + err and (
            status == 0 or (status == 2 and err.startswith("error: "))
        )
        outside = entries(folder.parent) != ["here"] and name not in PLACES
        if not plain or outside:
            faults.append((arguments[-1][:200], status, err[-2000:], entries(folder.parent)))
    signal.signal(signal.SIGALRM, before)
    assert not faults, "\n".join(map(str, faults))
    assert entries(tmp_path) == sorted(
        [*(f"case{number}" for number in range(COMMANDS)), "t.jsonl"]
    )
