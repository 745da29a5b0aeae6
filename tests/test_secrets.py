"""No password or token is printed, written or stored: in texts, and in whole runs of the command."""

import os
import shlex
from pathlib import Path
from urllib.parse import quote, quote_plus, unquote

import pytest
import yaml
from omegaconf import OmegaConf
from sqlalchemy.engine import URL
from toolbox import table_rows, write_rows

from bstune.system import secrets
from bstune.system.secrets import (
    redact,
    redact_patterns,
    redact_values,
    remember,
    secrets_in_environment,
)
from bstune.trial.replay import ReplayBackend


@pytest.fixture(autouse=True)
def _nothing_remembered(monkeypatch):
    monkeypatch.setattr(secrets, "_known", set())


@pytest.mark.parametrize("text", ["x" * 100_000, "a." * 20_000, "a://" + "@" * 60 + " b"])
def test_a_long_text_takes_no_minutes(text):
    assert redact(text) == text
    with secrets_in_environment([f"study={text}"]) as arguments:
        assert arguments == [f"study={text}"]


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (
            "at mysql://me:pw@host/db and http://host:80/x@y",
            "at mysql://me:***@host/db and http://host:80/x@y",
        ),
        ("x://:pw@h/db", "x://:***@h/db"),
        ("x://me@example.org:pw@h", "x://me@example.org:***@h"),
        ("http://me:p/w@h:80", "http://me:***@h:80"),
        ("https://token@h/repository", "https://***@h/repository"),
        ("no route to x://me:pw@h: gone", "no route to x://me:***@h: gone"),
        ("""'storage="x://me:pw@h"'""", """'storage="x://me:***@h"'"""),
        ("['storage=x://me:pw@h', 'seed=1']", "['storage=x://me:***@h', 'seed=1']"),
        ("x://h/db?user=me&password=pw&sslmode=a", "x://h/db?user=me&password=***&sslmode=a"),
        (
            "x://h/db?sslpassword=p%20w&access_token=abc",
            "x://h/db?sslpassword=***&access_token=***",
        ),
        ("host=h password='p w' user=me", "host=h password='***' user=me"),
        ("+workload.data.api_key=abc", "+workload.data.api_key=***"),
        ("a: 1\n  token: abc d\nb: 2", "a: 1\n  token: ***\nb: 2"),
        ("{'token': 'abc', 'n': 3}", "{'token': '***', 'n': 3}"),
        # what is none
        ("password: null", "password: null"),
        ("(using password: YES)", "(using password: YES)"),
        ("tokens=5 key=3", "tokens=5 key=3"),
        ("sqlite:////a b/c@d.db", "sqlite:////a b/c@d.db"),
        ("storage=${oc.env:BSTUNE_STORAGE}", "storage=${oc.env:BSTUNE_STORAGE}"),
        ("x://me:${oc.env:PW}@h", "x://me:${oc.env:PW}@h"),
    ],
)
def test_texts_are_shown_without_secrets(text, shown):
    assert redact(text) == redact_patterns(text) == redact(shown) == shown


@pytest.mark.parametrize("user", ["me", None, "a b"])
@pytest.mark.parametrize("password", ["plain", "p/w", "p@w", "p:w", "p w", "p%w"])
def test_database_urls_are_shown_as_sqlalchemy_does(user, password):
    url = URL.create("postgresql", user, password, "host", 5432, "db")
    assert redact_patterns(url.render_as_string(hide_password=False)) == url.render_as_string()


def test_what_was_given_is_left_out_of_messages_that_show_it_otherwise():
    remember(
        {
            "storage": 'x://me:se%2Fcr et"@h',
            "trainer": [{"api_token": "abcdef"}, "y://me:p@ssword@h"],
        }
    )
    for shown in (
        'se/cr et"',
        "se%2Fcr et",
        "se%2Fcr%20et%22",
        "abcdef",
        "could not resolve ssword@h",
    ):
        assert "***" in redact(f"got {shown} here")
    assert redact("abcdefg is another word") == "abcdefg is another word"


def test_options_lose_secrets_by_name_and_by_value():
    options = {
        "token": 5,
        "data": [{"url": "x://me:p w@h", "api_key": "${oc.env:KEY}"}],
        "password": None,
        "keys": 3,
    }
    shown = {
        **options,
        "token": "***",
        "data": [{"url": "x://me:***@h", "api_key": "${oc.env:KEY}"}],
    }
    assert redact_values(options) == shown


@pytest.mark.parametrize(
    ("argument", "moved", "environment"),
    [
        ("seed=1", "seed=1", {}),
        ("storage=sqlite:///a.db", "storage=sqlite:///a.db", {}),
        ("storage=x://me:p@h", "storage=${oc.env:BSTUNE_STORAGE}", {"STORAGE": "x://me:p@h"}),
        (
            "storage='x://me:p, \"w@h'",
            "storage=${oc.env:BSTUNE_STORAGE}",
            {"STORAGE": 'x://me:p, "w@h'},
        ),
        # not Hydra's grammar, which takes the first for a sweep and refuses the others
        ("storage=x://me:p,w@h", "storage=${oc.env:BSTUNE_STORAGE}", {"STORAGE": "x://me:p,w@h"}),
        (
            "storage=x://h?password=p&a=b",
            "storage=${oc.env:BSTUNE_STORAGE}",
            {"STORAGE": "x://h?password=p&a=b"},
        ),
        ("storage=x://me:p#w@h", "storage=${oc.env:BSTUNE_STORAGE}", {"STORAGE": "x://me:p#w@h"}),
        ("+a.token=123", "+a.token=${oc.decode:${oc.env:BSTUNE_A_TOKEN}}", {"A_TOKEN": "123"}),
        ("a=[x://u:p@h,b]", "a=[${oc.env:BSTUNE_A_0},b]", {"A_0": "x://u:p@h"}),
        ("a={token: c, n: 3}", "a={token:${oc.env:BSTUNE_A_TOKEN},n:3}", {"A_TOKEN": "c"}),
        ("storage=${oc.env:MINE}", "storage=${oc.env:MINE}", {}),
    ],
)
def test_secrets_of_the_command_line_move_to_the_environment(argument, moved, environment):
    before = dict(os.environ)
    with secrets_in_environment([argument]) as arguments:
        assert arguments == [moved]
        assert dict(os.environ) == before | {
            f"BSTUNE_{name}": value for name, value in environment.items()
        }
    assert dict(os.environ) == before


# Whole runs

PASSWORDS = {
    "storage": "St0re%2Fp%40ss%20w",
    "mlflow": "ml:fl0w@p4ss",
    "data": "d4ta%3Ap%2Fw",
    "token": "t0ken,w0rd",
}
STORAGE = f"sqlite:///file:bstune.db?password={PASSWORDS['storage']}&uri=true"
FAILING = f"postgresql+psycopg2://me:{PASSWORDS['storage']}@127.0.0.1:9/db"
SECRETS = (
    f"mlflow.uri=http://me:{PASSWORDS['mlflow']}@127.0.0.1:9",
    f"+trainer.api_token='{PASSWORDS['token']}'",
    f'+trainer.nested={{root: "https://me:{PASSWORDS["data"]}@host/data", n: 1}}',
)
REPLAY = (
    "workload=replay",
    "workload.table=t.jsonl",
    "workload.target.value=0.14",
    "search.trials=3",
)
REPLAY += ("workload.name=replay", "search.replicates=0", "search.objective=steps", *SECRETS)


def leaks(folder: Path, *printed: str) -> list[str]:
    """Return where a planted secret stands, as it was given, decoded or encoded."""
    places = {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    places |= {f"printed: {text}": text.encode() for text in printed}
    plain = {form for one in PASSWORDS.values() for form in (one, unquote(one))}
    forms = {form for one in plain for form in (one, quote(one, ""), quote_plus(one))}
    return [
        f"{form} in {place}"
        for place, content in places.items()
        for form in forms
        if form.encode() in content
    ]


@pytest.fixture
def run(bstune, tmp_path, caplog):
    """Run the command beside a table, and look for secrets in all that it wrote; return its status and its errors."""
    write_rows(tmp_path / "t.jsonl", table_rows())

    def searched(*arguments: str) -> tuple[object, str, str]:
        status, out, err = bstune(*arguments)
        assert leaks(tmp_path, out, err, caplog.text) == []
        return status, out, err

    return searched


def error_of(*_: object) -> None:
    raise OSError(
        f"no route to {FAILING}, or to {unquote(PASSWORDS['storage'])} with {PASSWORDS['token']}"
    )


@pytest.mark.slow
def test_a_study_writes_no_secret_and_its_commands_run_again(run, tmp_path, caplog, monkeypatch):
    status, _, err = run(*REPLAY, "sampler=random", f"storage={STORAGE}")
    assert (status, err) == (0, "")
    assert "MLflow: could not open the study" in caplog.text
    folder = tmp_path / "outputs" / "replay"
    config = OmegaConf.to_container(OmegaConf.load(folder / "config.yaml"), resolve=False)
    assert config["storage"] == "${oc.env:BSTUNE_STORAGE}"
    assert config["trainer"]["nested"] == {"root": "${oc.env:BSTUNE_TRAINER_NESTED_ROOT}", "n": 1}
    text = (folder / "best.yaml").read_text()
    names = (
        "BSTUNE_MLFLOW_URI, BSTUNE_STORAGE, BSTUNE_TRAINER_API_TOKEN, BSTUNE_TRAINER_NESTED_ROOT"
    )
    assert text.startswith(
        f"# The commands read secrets from the environment: first set {names}.\n"
    )
    command = shlex.split(yaml.safe_load(text)["best_by_steps"]["command"])[3:]
    status, _, err = run(*command)
    assert status == 2
    assert "Environment variable 'BSTUNE_STORAGE' not found" in err
    for name in names.split(", "):
        monkeypatch.setenv(name, STORAGE)
    assert run(*command)[0] == 0


WAYS = [(), ("debug=true",), ("--multirun",), ("--multirun", "debug=true")]


@pytest.mark.parametrize(
    ("arguments", "broken"),
    [(way, "open_study") for way in WAYS]
    + [pytest.param(way, "report_study", marks=pytest.mark.slow) for way in WAYS],
)
def test_an_error_that_nobody_foresaw_shows_no_secret(run, monkeypatch, arguments, broken):
    monkeypatch.setattr(f"bstune.study.run.{broken}", error_of)
    status, _, err = run(*arguments, *REPLAY, f"storage={STORAGE}")
    assert status == 1
    assert "Traceback" in err
    assert "Error executing job" not in err, "Hydra's line, which repeats the options"
    assert (
        "OSError: no route to postgresql+psycopg2://me:***@127.0.0.1:9/db, or to *** with ***"
        in err
    )


def test_trials_that_fail_record_no_secret(run, tmp_path, monkeypatch):
    monkeypatch.setattr(ReplayBackend, "run", error_of)
    status, _, err = run(*REPLAY, f"storage={STORAGE}")
    assert status == 1
    assert "the last one with OSError: no route to" in err
    assert "***" in (tmp_path / "outputs" / "replay" / "trials.jsonl").read_text()


@pytest.mark.parametrize(
    "arguments", [(), *(pytest.param(way, marks=pytest.mark.slow) for way in WAYS[1:])]
)
def test_a_storage_that_does_not_answer_shows_no_secret(run, arguments):
    status, _, err = run(*arguments, *REPLAY, f"storage={FAILING}")
    assert status == 2
    assert "storage=postgresql+psycopg2://me:***@127.0.0.1:9/db" in err
    status, _, err = run("worker", f"storage={FAILING}", "study=replay")
    assert status == 2
    assert "the storage does not answer" in err


@pytest.mark.parametrize("arguments", [("--cfg", "job"), ("--cfg", "job", "--resolve")])
def test_hydras_own_output_shows_no_secret(run, arguments):
    status, out, _ = run(*arguments, *REPLAY, f"storage={STORAGE}")
    assert (status or 0) == 0
    assert "storage: " in out


@pytest.mark.parametrize(
    "mistake",
    [
        "storage=[x://me:{0}@h",  # is not parsed
        "nope=x://me:{0}@h",
        "search.trials=x://me:{0}@h",
        "+mlflow.password={0}",
        "sampler=x://me:{0}@h",
    ],
)
def test_refused_options_show_no_secret(run, mistake):
    status, _, err = run(*REPLAY, mistake.format(PASSWORDS["storage"]))
    assert status == 2
    assert err.startswith("error: ")


def test_a_config_file_of_the_users_is_written_without_its_secrets(run, tmp_path, tmp_path_factory):
    folder = tmp_path_factory.mktemp("configs")
    (folder / "mine").mkdir(parents=True)
    (folder / "mine" / "own.yaml").write_text(
        f"# @package _global_\ntrainer:\n  url: {FAILING}\n  token: {PASSWORDS['token']}\n"
    )
    status, _, err = run(
        "--config-dir", str(folder), *REPLAY[:-3], "+mine=own", "mlflow.enabled=false"
    )
    assert (status, err) == (0, "")
    config = yaml.safe_load((tmp_path / "outputs" / "replay" / "config.yaml").read_text())
    shown = {"token": "***", "url": FAILING.replace(PASSWORDS["storage"], "***")}
    assert config["trainer"] == {**config["trainer"], **shown}
