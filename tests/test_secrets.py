"""No secret is printed, written or stored: its places, its values, and whole runs of the command that are searched."""

import base64
import html
import json
import os
import shlex
import sqlite3
import subprocess
import sys
import threading
import time
from contextlib import closing
from pathlib import Path
from urllib.parse import quote, quote_plus, unquote

import pytest
import yaml
from sqlalchemy.engine import URL
from toolbox import column, contents, made_table, read_rows

from bstune.config import secret_option
from bstune.report.html import json_script
from bstune.study.storage.connection import connect
from bstune.system import secrets
from bstune.system.failures import described
from bstune.system.files import Identity, append_text, write_text
from bstune.system.secrets import (
    known,
    redact,
    redact_values,
    remember,
    remember_environment,
    secret_options,
    without_known,
)
from bstune.trial.replay import ReplayBackend

WORD = "qwJ7-zebra.41"  # a secret's value


@pytest.fixture(autouse=True)
def _nothing_remembered(monkeypatch):
    monkeypatch.setattr(secrets, "_forms", {})


# By what hides them: words for passwords, headers, tokens, keys, signatures, addresses, cookies.
SECRET_KEYS = [
    "password",
    "db_password",
    "dbPassword",
    # The words of these two run together: no capital or sign parts them.
    "PGPASSWORD",
    "sslpassword",
    "passwd",
    "passw",
    "passwort",
    "pwd",
    "pw",
    "pass",
    # Any prefix: the last part of a name decides.
    "smtp_pass",
    "passphrase",
    "password2",
    "Authorization",
    "PROXY-AUTHORIZATION",
    "auth",
    "http.auth",
    "bearer",
    "token",
    "HF_TOKEN",
    "accessToken",
    # A word such as value or header after it leaves the name a secret's.
    "token_value",
    "auth_header",
    "api_token",
    "api-key",
    "X-Api-Key",
    "x_api_key",
    # Written together, and in the two ways of camelCase.
    "apikey",
    "apiKey",
    "APIKey",
    "access_key",
    "AWS_SECRET_ACCESS_KEY",
    "secretKey",
    "private_key",
    "AccountKey",
    "secret",
    "client_secret",
    "signature",
    "X-Amz-Signature",
    "X-Goog-Credential",
    "sig",
    "sas",
    "dsn",
    "SENTRY_DSN",
    "cookie",
    "Set-Cookie",
    "credentials",
]
# Names of machine learning and of a shell that look like those of secrets.
OTHER_KEYS = [
    # Amounts of tokens.
    "tokens",
    "max_tokens",
    "num_tokens",
    "tokens_per_batch",
    "token_count",
    "token_embedding",
    "token_id",
    "pad_token_id",
    "tokenizer",
    # They begin with auth, as authorization does.
    "author",
    "authors",
    # Tokens that are pieces of a text.
    "pad_token",
    "eos_token",
    "bos_token",
    "cls_token",
    "mask_token",
    "sep_token",
    "unk_token",
    "decoder_start_token",
    # A key alone is one of a mapping or of attention.
    "key",
    "keys",
    "key_dim",
    "num_keys",
    # Passes through a network or over the data.
    "passes",
    "forward_pass",
    "compass",
    "bypass",
    # A file's name is no secret, its content is.
    "password_file",
    # They begin or end as sig, sas or pass do.
    "sigma",
    "signal",
    "design",
    "assign",
    "case",
    # Variables of a desktop and of SSH: a way, a socket, a program.
    "AUTH_MODE",
    "SSH_AUTH_SOCK",
    "GIT_ASKPASS",
    "SSH_ASKPASS",
    "XAUTHORITY",
    "GPG_KEY",
    "secretary",
    "power",
    "pw_ratio",
    "sass",
    "learning_rate",
]


# In a config, in two notations of a text, and as an option that is refused.
@pytest.mark.parametrize("key", SECRET_KEYS)
def test_a_key_of_a_secret_hides_its_text(key):
    assert redact_values({"data": [{key: WORD}]}) == {"data": [{key: "***"}]}
    assert WORD not in redact(f"got {{'{key}': '{WORD}'}} and {key}={WORD}, x")
    assert secret_options({key: WORD}, "trainer") == [f"trainer.{key}"]


@pytest.mark.parametrize("key", OTHER_KEYS)
def test_another_key_hides_nothing(key):
    values = {"data": [{key: "gpt2-large.v1"}]}
    assert redact_values(values) == values
    text = f"got {{'{key}': 'gpt2-large.v1'}} and {key}=gpt2-large.v1"
    assert redact(text) == text
    remember(values)
    assert "gpt2-large.v1" not in known()


# What may stand there in place of a secret: a piece of text, a reference, a number, a path.
NO_SECRETS = {
    # Too short for a token, in brackets, or a reference to the environment.
    "token": ["<pad>", "[CLS]", "<|endoftext|>", "bpe", "${oc.env:HF_TOKEN}", 50256, None, True],
    "auth": ["basic", "none", "Bearer ${oc.env:X}", 3.0],
    # A text of digits would be a password; a number is none.
    "password": [None, False, 12345678, 0.1, "", "${oc.env:PW}", "***"],
    # A secret that is mounted as a file is told by its path.
    "credentials": [str(Path(__file__)), "/"],
}


@pytest.mark.parametrize(
    ("key", "value"), [(key, value) for key, values in NO_SECRETS.items() for value in values]
)
def test_a_value_that_is_none_stays_under_a_secrets_key(key, value):
    assert redact_values({key: value}) == {key: value}
    remember({key: value})
    assert known() == ()


def test_a_list_of_two_words_is_no_header():
    # Only a header's name, with a capital, makes a pair of two texts.
    values = [["token", "position_ids"], ["+a.b=token", "seed=12345678x"]]
    assert redact_values(values) == values


def test_nothing_that_ships_is_called_a_secret():
    root = Path(__file__).parents[1]
    files = [*(root / "conf").rglob("*.yaml"), *(root / "sweeps").rglob("*.yaml")]
    assert len(files) > 30
    for path in files:
        text = path.read_text()
        assert secret_options(yaml.safe_load(text)) == [], path
        assert redact(text) == text, path


def test_secrets_lie_in_lists_pairs_and_named_values():
    options = {
        "auth": ["someone-else", WORD],
        "headers": [["Authorization", f"Basic {WORD}"], f"X-Api-Key: {WORD}"],
        # Each cookie has a name of its own, so all values of such a mapping are secrets.
        "cookies": {"session": WORD},
        "env": [{"name": "HF_TOKEN", "value": WORD}, {"name": "EPOCHS", "value": "twelve-1"}],
        # A password is hidden whatever its length; a token needs eight characters.
        "password": {"value": "short"},
    }
    shown = redact_values(options)
    assert WORD not in json.dumps(shown)
    assert "short" not in json.dumps(shown)
    # The value belongs to the name beside it, and EPOCHS is no secret.
    assert shown["env"][1] == options["env"][1]
    remember(options)
    assert redact(f"a {WORD}!") == "a ***!"


@pytest.mark.parametrize(
    "text",
    [
        # Many ends of a URL's user.
        "a://" + "@" * 60 + " b",
        *(part * 20_000 for part in ("xxxxx", "a.", "token=", "password: ", "password=${")),
        *(part * 20_000 for part in ("token='", "\\\\", "Bearer ", "{token: ", "a://b:")),
    ],
)
def test_a_long_text_takes_no_minutes(text):
    start = time.monotonic()
    redact(text)
    # Quadratic time would be minutes for 100,000 characters.
    assert time.monotonic() - start < 5.0
    assert secret_option(f"study={text[:500]}") in (None, "study")


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        # A port is not a password, and neither is an @ in a path.
        (
            "at mysql://me:pw@host/db and http://host:80/x@y",
            "at mysql://me:***@host/db and http://host:80/x@y",
        ),
        # No user, or a user with an @.
        ("x://:pw@h/db", "x://:***@h/db"),
        ("x://me@example.org:pw@h", "x://me@example.org:***@h"),
        # A raw password with a slash in it.
        ("http://me:p/w@h:80", "http://me:***@h:80"),
        # In place of a user an address of the web may have a token.
        ("https://ghp_token@h/repository", "https://***@h/repository"),
        ("no route to x://me:pw@h: gone", "no route to x://me:***@h: gone"),
        # Quotes of a shell and of Hydra around it.
        ("""'storage="x://me:pw@h"'""", """'storage="x://me:***@h"'"""),
        ("['storage=x://me:pw@h', 'seed=1']", "['storage=x://me:***@h', 'seed=1']"),
        # Options of a database and of signed addresses, in the query.
        ("x://h/db?user=me&password=pw&sslmode=a", "x://h/db?user=me&password=***&sslmode=a"),
        ("https://h/x?sv=1&sig=ab%2Fcdefg%3D&se=2", "https://h/x?sv=1&sig=***&se=2"),
        ("https://h/x?token=abcdefg1#a", "https://h/x?token=***"),
        # libpq's own notation.
        ("host=h password='p w' user=me", "host=h password='***' user=me"),
        ("host=h password=12345678 user=me", "host=h password=*** user=me"),
        # An argument as Hydra takes it.
        ("+workload.data.api_key=abcdefg1", "+workload.data.api_key=***"),
        # A line of YAML.
        ("a: 1\n  password: abcd\nb: 2", "a: 1\n  password: ***\nb: 2"),
        # A dict as Python prints it.
        ("{'token': 'abcdefg1', 'n': 3}", "{'token': '***', 'n': 3}"),
        (
            """{'Authorization': 'Basic abcdefg1', "X-Api-Key": "abcdefg1"}""",
            """{'Authorization': '***', "X-Api-Key": "***"}""",
        ),
        # Messages of HTTP clients.
        ("401 for Authorization: Bearer abc.def=.ghi", "401 for Authorization: ***"),
        # The same where a library refuses the header's value.
        (
            "Illegal header value b'Bearer abc.def1=.ghi\\n'",
            "Illegal header value b'Bearer ***\\n'",
        ),
        # A line that ConfigParser refuses, such as one of ~/.mlflow/credentials.
        (
            r"line: 1 'mlflow_tracking_password = a1-b\n'",
            r"line: 1 'mlflow_tracking_password = ***\n'",
        ),
        # A line of the user's code, and JSON with blanks.
        ("in f: token = 'abcdefg1'", "in f: token = '***'"),
        ('{"token" : "abcdefg1"}', '{"token" : "***"}'),
        # An option of another program.
        ("curl -u --password=ab x", "curl -u --password=*** x"),
        # Each of the cookies is a secret.
        ("Cookie: a=b12345678; csrf=zzz-1", "Cookie: ***"),
        ("{'Set-Cookie': 'a=b1234567; c=d'}", "{'Set-Cookie': '***'}"),
        # what is none
        ("password: null", "password: null"),
        ("token = self.tokens.of(12)", "token = self.tokens.of(12)"),
        ("token = self.read1(path)", "token = self.read1(path)"),
        ("bearer authentication with HTTP/1.1", "bearer authentication with HTTP/1.1"),
        ("Bearer authentication", "Bearer authentication"),
        ("(using password: YES)", "(using password: YES)"),
        # Amounts, and a key of a mapping.
        ("tokens=5 key=3", "tokens=5 key=3"),
        # Messages of parsers, which call a piece of text a token.
        ("unexpected token: something else", "unexpected token: something else"),
        ("unexpected token: 'identifier'", "unexpected token: 'identifier'"),
        # Results: a rate of tests, a position, a weight.
        ("pass: 0.95 accuracy", "pass: 0.95 accuracy"),
        ("token: 12 of 300", "token: 12 of 300"),
        ("pw=3, pass=4.5", "pw=3, pass=4.5"),
        # A sentence of argparse's.
        ("--password is required, --pass 3", "--password is required, --pass 3"),
        # Code, as a traceback shows it.
        ("    token = self.tokenizer.decode(ids)", "    token = self.tokenizer.decode(ids)"),
        ("    password = os.environ['X']", "    password = os.environ['X']"),
        # Numbers are never hidden.
        ('{"secret": [0.5, 1e-05], "pass": 3}', '{"secret": [0.5, 1e-05], "pass": 3}'),
        # An @ without a user before it.
        ("sqlite:////a b/c@d.db", "sqlite:////a b/c@d.db"),
        ("https://host/x?mail=a:b@c", "https://host/x?mail=a:b@c"),
        # A reference says where the secret is, which is no secret.
        ("storage=${oc.env:BSTUNE_STORAGE}", "storage=${oc.env:BSTUNE_STORAGE}"),
        ("x://me:${oc.env:PW}@h", "x://me:${oc.env:PW}@h"),
    ],
)
def test_texts_are_shown_without_secrets(text, shown):
    # What is shown stays as it is when it is shown again.
    assert redact(text) == redact(shown) == shown


@pytest.mark.parametrize("user", ["me", None, "a b"])
@pytest.mark.parametrize("password", ["plain", "p/w", "p@w", "p:w", "p w", "p%w"])
def test_database_urls_are_shown_as_sqlalchemy_does(user, password):
    url = URL.create("postgresql", user, password, "host", 5432, "db")
    # SQLAlchemy is the reference: its text without the password must be ours.
    assert redact(url.render_as_string(hide_password=False)) == url.render_as_string()


def test_what_was_given_is_left_out_of_messages_that_show_it_otherwise():
    remember(
        {
            # It has an escape of URLs, a blank and a quote.
            "storage": 'x://me:se%2Fcr et"@h',
            "trainer": [
                {"api_token": "abcdefgh"},
                "y://me:p@ssword1@h",
                {"auth": "Basic bWU6czNjcmV0LXB3"},
            ],
            "data": {"private_key": "-----BEGIN KEY-----\nMIIEvQ+line/one\nMIIEvQ+line/two\n"},
        }
    )
    # Each is a form in which a message may show what was given.
    for shown in (
        'se/cr et"',
        'se%2Fcr et"',
        "se%2Fcr%20et%22",
        # Escaped, as in a page.
        "se/cr et&quot;",
        r"se/cr et\"",
        "abcdefgh",
        # SQLAlchemy ends a password at its first @ and shows the rest as the host.
        "could not resolve ssword1@h",
        # Without its scheme.
        "bWU6czNjcmV0LXB3",
        # A line of a key by itself.
        "MIIEvQ+line/two",
    ):
        assert redact(f"got {shown} here").count("***") == 1, shown
    # A secret within a longer word is none.
    assert redact("abcdefghi is another word") == "abcdefghi is another word"


def test_of_the_environment_secrets_are_remembered_and_paths_and_words_are_not(
    monkeypatch, tmp_path
):
    # By their names, their addresses, or pairs within their values.
    planted = {
        "MY_API_KEY": "kk-81-environ",
        "DATABASE": "postgresql://me:pp-81-environ@h/db",
        "AZURE_CONNECTION": "AccountName=a;AccountKey=aa-81-environ==;Suffix=x",
        "PGPASSWORD": "lettersonly",
    }
    # These have a hint of a secret in their names, or the form of one in their values.
    harmless = {
        "SSH_AUTH_SOCK": "/run/agent.12-x",
        "GIT_ASKPASS": "/usr/bin/ask-pass",
        "XAUTHORITY": "/home/me/.Xauthority",
        "AUTH_MODE": "validation",
        "AUTH": "validation",
        "PWD": "/not/there/any-more",
        "REGISTRY_TOKEN": str(tmp_path),
        "A_TOKEN": "12345678",
        "B_SECRET": "3.14159265",
        "EOS_TOKEN": "<|endoftext|>",
    }
    for name, value in (planted | harmless).items():
        monkeypatch.setenv(name, value)
    remember_environment()
    # A secret of digits must not eat the digits of other numbers.
    text = "\n".join(["lr 0.00314159265, seed 12345678", *harmless.values()])
    assert redact(text) == text
    for secret in ("kk-81-environ", "pp-81-environ", "aa-81-environ==", "lettersonly"):
        assert redact(f"got {secret}, x") == "got ***, x"


def test_documents_stay_what_they_are(tmp_path):
    """Numbers that equal a secret, and keys, stay; what is left can be parsed."""
    # A word that is also a key of a record, and digits that are also its numbers.
    passwords = ["validation", "12345678", "0.00012345", "q\"<uote'd"]
    remember({"password": passwords, "token": WORD})
    values = {
        "validation": [12345678, 0.00012345, -1e-05],
        # A word of letters is replaced where it stands alone; WORD has digits, so it is everywhere.
        "messages": [f"a\n{WORD}", "\nvalidation", "q\"<uote'd", "validation_split", "pre" + WORD],
    }
    shown = values | {"messages": ["a\n***", "\n***", "***", "validation_split", "pre***"]}
    # On one line and on several.
    for indent in (None, 2):
        write_text(tmp_path / "a.json", json.dumps(values, indent=indent))
        assert json.loads((tmp_path / "a.json").read_text()) == shown
    assert json.loads(without_known(json.dumps(values))) == shown
    assert html.unescape(without_known(html.escape("x q\"<uote'd y"))) == "x *** y"
    # YAML folds long lines, which must not part a secret.
    for style in (None, True, False):
        document = yaml.safe_dump(redact_values(values), default_flow_style=style, width=20)
        write_text(tmp_path / "a.yaml", document)
        read = yaml.safe_load((tmp_path / "a.yaml").read_text())
        assert WORD not in str(read)
        assert read["validation"] == values["validation"]


@pytest.mark.parametrize("secret", ["abcdefg\\", 'abcd"efgh', "</script><b>", "n\\abcd-1"])
def test_a_secret_of_quotes_and_backslashes_breaks_no_document(tmp_path, secret):
    remember({"password": secret})
    values = {"a": None, "c": [f"it is {secret}, or {secret}!", "x"]}
    without = {"a": None, "c": ["it is ***, or ***!", "x"]}
    assert redact_values(values) == without
    # Stored and given settings must agree, or the study would refuse to go on.
    assert json.loads(redact_values(json.dumps(values))) == without
    write_text(tmp_path / "a.json", json.dumps(values, indent=1))
    append_text(tmp_path / "a.jsonl", json.dumps(values) + "\n")
    for name in ("a.json", "a.jsonl"):
        assert json.loads((tmp_path / name).read_text()) == without

    text = f'<p class="a">{html.escape(secret)}</p>'
    write_text(tmp_path / "a.html", f"<html>{text}\n{json_script(values)}</html>")
    page = (tmp_path / "a.html").read_text()
    assert page.startswith('<html><p class="a">***</p>\n<script type="application/json">')
    inside = page.partition(">{")[2].partition("</script>")[0]
    assert json.loads("{" + inside) == without


def test_ten_megabytes_take_about_a_second():
    # Twenty secrets are more than a study has.
    tokens = [{"token": f"{WORD}-{i}"} for i in range(20)]
    remember({"tokens": 1, "a": tokens, "password": "two words"})
    # A record of 100 evaluations, as a study has many.
    history = [[i, i / 7] for i in range(100)]
    record = json.dumps({"number": 1, "history": history, "message": None})
    text = f"{record}\n" * (10_000_000 // len(record))
    start = time.process_time()
    assert without_known(text) == text
    # The processor's seconds, as other programs may run: twice what the name says.
    assert time.process_time() - start < 2.0


@pytest.mark.parametrize(
    ("argument", "option"),
    [
        # None of these is a secret.
        ("seed=1", None),
        ("storage=sqlite:///a.db", None),
        ("storage=${oc.env:MINE}", None),
        ("storage=x://me:${oc.env:PW}@h", None),
        ("+a.token=null", None),
        ("+a.pad_token='<pad>'", None),
        ("+a.tokenizer=gpt2-large", None),
        ("+a={tokens: 12345678, author: someone-else}", None),
        # In the storage's URL, with the quotes and commas that Hydra parses.
        ("storage=x://me:p@h", "storage"),
        ("storage='x://me:p, \"w@h'", "storage"),
        ("storage=x://me:p,w@h", "storage"),
        ("storage=x://h?password=p&a=b", "storage"),
        ("storage=x://me:p#w@h", "storage"),
        # In a query of the tracker's address.
        ("mlflow.uri=https://h/x?sig=abcdefg1", "mlflow.uri"),
        # By an option's name, also one of a header.
        ("+a.token=abcdefg1", "a.token"),
        ("+a.password=p", "a.password"),
        ("++a.b.X-Api-Key='abcd efg'", "a.b.X-Api-Key"),
        # Inside a list and a mapping, as Hydra writes them.
        ("a=[x://u:p@h,b]", "a"),
        ("a={token: abcdefg1, n: 3}", "a.token"),
        ('+a.headers={Authorization: "Basic abcdefg1"}', "a.headers.Authorization"),
        # A sweep over two addresses.
        ("a=x://u:p@h,x://v:p@h", "a"),
        # A bracket that is never closed: Hydra cannot parse it, and it is looked through all the
        # same.
        ("a=[x://u:p@h", "a"),
        # No option, or one of argparse.
        ("x://u:p@h/d?a=b", ""),
        ("--output=https://u:p@h", "output"),
    ],
)
def test_secrets_of_the_command_line_are_found(argument, option):
    assert secret_option(argument) == option


@pytest.mark.parametrize(
    "command",
    # A verb each, and Hydra's own ways of running and of showing.
    [
        ["workload=digits", "storage=postgresql://me:{}@h/db"],
        ["+workload=digits", "mlflow.uri=https://h/x?sig={}"],
        ["workload=digits", "+trainer.api_token={}", "--cfg", "job"],
        ["workload=digits", "seed=1,2", "+trainer.auth=[me,{}]", "--multirun"],
        ["worker", "storage=mysql://me:{}@h/db", "study=x"],
        ["survey", "workload=digits", "+workload.data.headers={{X-Api-Key: {}}}"],
        ["compare", "http://me:{}@h"],
        ["sweep", "noise", "+a.password={}"],
        # Hydra would print what it cannot parse.
        ["storage=[x://me:{}@h"],
    ],
)
def test_a_password_on_the_command_line_is_refused(bstune, tmp_path, command):
    arguments = [argument.format(WORD) for argument in command]
    status, out, err = bstune(*arguments)
    # The line names the way that needs no password in the command.
    assert status == 2
    assert out == ""
    assert "${oc.env:" in err
    assert WORD not in err
    assert "Traceback" not in err
    # Nothing was written before it was refused.
    assert list(tmp_path.iterdir()) == []


def test_errors_of_users_show_no_secret():
    remember({"token": WORD})
    try:
        raise OSError(f"no route to x://me:p@h with {WORD}")
    except OSError as error:
        message, frames = described(error)
    assert message.startswith("OSError: no route to x://me:***@h with ***")
    assert WORD not in frames


def test_a_study_keeps_its_folders_identity_whatever_is_remembered():
    # The identity is made once before and once after the password is known.
    before = Identity.of("s", "postgresql://me:secret-word@host/db")
    remember({"password": "secret-word"})
    assert Identity.of("s", "postgresql://me:secret-word@host/db") == before
    assert before.storage == "postgresql://me:***@host/db"


def test_attributes_are_stored_without_secrets(tmp_path):
    remember({"token": WORD})
    storage = connect(f"sqlite:///{tmp_path}/a.db")
    import optuna

    study = optuna.create_study(storage=storage)
    trial = study.ask()
    study.set_user_attr("arguments", [f"a={WORD}", "+b.password=abc", "seed=12345678"])
    # A number stays, whatever digits it has.
    trial.set_user_attr("record", json.dumps({"message": f"a\n{WORD}", "steps": 12345678}))
    assert study.user_attrs["arguments"] == ["a=***", "+b.password=***", "seed=12345678"]
    assert json.loads(study.trials[0].user_attrs["record"]) == {
        "message": "a\n***",
        "steps": 12345678,
    }
    # SQLite keeps what was deleted: the secret must never have been there.
    assert WORD.encode() not in (tmp_path / "a.db").read_bytes()


# Whole runs

# Each has characters that URLs, YAML or shells write in another way.
PASSWORDS = {
    "storage": "St0re%2Fp%40ss%20w",
    "mlflow": "ml:fl0w@p4ss",
    "data": "d4ta%3Ap%2Fw-x",
    "token": "t0ken,w0rd",
    "header": "h3ader/w0rd==",
}
# SQLite takes options that it does not know, so that the URL may hold a password.
STORAGE = f"sqlite:///file:bstune.db?password={PASSWORDS['storage']}&uri=true"
# Nothing listens at port 9.
FAILING = f"postgresql+psycopg2://me:{PASSWORDS['storage']}@127.0.0.1:9/db"
OWN = f"""# @package _global_
storage: ${{oc.env:STUDIES}}
mlflow: {{uri: "${{oc.env:TRACKING}}"}}
trainer:
  api_token: '{PASSWORDS["token"]}'
  headers: {{Authorization: "Basic {PASSWORDS["header"]}", accept: text/html}}
  nested: [{{root: 'https://me:{PASSWORDS["data"]}@host/data', n: 1}}]
  note: my {PASSWORDS["token"]} is here
"""
REPLAY = (
    "+mine=own",
    "workload=replay",
    "workload.table=t.jsonl",
    "workload.target.value=0.14",
    "search.trials=3",
)
REPLAY += ("workload.name=replay", "search.replicates=0", "search.objective=steps")


def leaks(planted: dict[str, str], folder: Path, *printed: str) -> list[str]:
    """The places where a planted secret stands, as it was given, decoded, encoded or escaped."""
    places = contents(folder)
    for text in printed:
        places[f"printed: {text}"] = text.encode()
    found = []
    # Each way of writing that a message, an address or a page may use.
    for name, secret in planted.items():
        forms = {secret, unquote(secret), base64.b64encode(secret.encode()).decode()}
        for form in (secret, unquote(secret)):
            forms |= {quote(form, ""), quote_plus(form)}
        forms |= {repr(secret)[1:-1], json.dumps(secret)[1:-1], html.escape(secret)}
        for place, content in places.items():
            for form in forms:
                if form.encode() in content:
                    found.append(f"{name}: {form} in {place}")
    return found


@pytest.fixture
def run(bstune, tmp_path, caplog, monkeypatch, tmp_path_factory):
    """Run the command beside a table, and look for secrets in all that it wrote; return its status and its errors."""
    made_table(tmp_path)
    folder = tmp_path_factory.mktemp("configs")
    (folder / "mine").mkdir()
    (folder / "mine" / "own.yaml").write_text(OWN)
    monkeypatch.setenv("STUDIES", STORAGE)
    monkeypatch.setenv("TRACKING", f"http://me:{PASSWORDS['mlflow']}@127.0.0.1:9")

    def searched(*arguments: str) -> tuple[object, str, str]:
        given = f"--config-dir={folder}"
        arguments = [one.replace("--config-dir=conf", given) for one in arguments]
        status, out, err = bstune(*arguments)
        # The folder of configs is the user's own, and lies elsewhere.
        assert leaks(PASSWORDS, tmp_path, out, err, caplog.text) == []
        return status, out, err

    return searched


def error_of(*_: object, **__: object) -> None:
    raise OSError(
        f"no route to {FAILING}, or to {unquote(PASSWORDS['storage'])} with {PASSWORDS['token']}"
    )


@pytest.mark.slow
def test_a_study_writes_no_secret_and_its_commands_run_again(run, tmp_path, caplog, monkeypatch):
    status, _, err = run(
        "--config-dir=conf", *REPLAY, "sampler=random", "storage=${oc.env:STUDIES}"
    )
    assert (status, err) == (0, "")
    # Nothing listens at the address of MLflow.
    assert "MLflow: could not open the study" in caplog.text
    folder = tmp_path / "outputs" / "replay"
    config = yaml.safe_load((folder / "config.yaml").read_text())
    assert config["storage"] == "sqlite:///file:bstune.db?password=***&uri=true"
    assert config["mlflow"]["uri"] == "http://me:***@127.0.0.1:9"
    assert config["trainer"] == {
        **config["trainer"],
        "api_token": "***",
        "headers": {"Authorization": "***", "accept": "text/html"},
        "nested": [{"root": "https://me:***@host/data", "n": 1}],
        "note": "my *** is here",
    }
    text = (folder / "best.yaml").read_text()
    assert text.startswith("# The commands read the environment: first set STUDIES.\n")
    # The first three words are python -m bstune.
    command = shlex.split(yaml.safe_load(text)["best_by_steps"]["command"])[3:]
    assert run(*command)[0] == 0
    monkeypatch.delenv("STUDIES")
    status, _, err = run(*command)
    assert status == 2
    assert "Environment variable 'STUDIES' not found" in err


# Hydra has an error path of its own for each of these.
WAYS = [(), ("debug=true",), ("--multirun",), ("--multirun", "debug=true")]


@pytest.mark.parametrize(
    ("arguments", "broken"),
    # The study fails as it is opened, and as it is reported on.
    [(way, "open_study") for way in WAYS]
    + [pytest.param(way, "report_study", marks=pytest.mark.slow) for way in WAYS],
)
def test_an_error_that_nobody_foresaw_shows_no_secret(run, monkeypatch, arguments, broken):
    monkeypatch.setattr(f"bstune.study.run.{broken}", error_of)
    status, _, err = run("--config-dir=conf", *arguments, *REPLAY)
    assert status == 1
    assert "Traceback" in err
    assert "Error executing job" not in err, "Hydra's line, which repeats the options"
    # All that stood in the message, but for the secrets.
    assert (
        "OSError: no route to postgresql+psycopg2://me:***@127.0.0.1:9/db, or to *** with ***"
        in err
    )


@pytest.mark.slow
def test_trials_that_fail_record_no_secret(run, tmp_path, monkeypatch):
    monkeypatch.setattr(ReplayBackend, "run", error_of)
    status, _, err = run("--config-dir=conf", *REPLAY)
    assert status == 1
    assert "the last one with OSError: no route to" in err
    # The trial's message was kept, without the secrets in it.
    assert "***" in (tmp_path / "outputs" / "replay" / "trials.jsonl").read_text()


@pytest.mark.parametrize(
    "arguments", [(), *(pytest.param(way, marks=pytest.mark.slow) for way in WAYS[1:])]
)
def test_a_storage_that_does_not_answer_shows_no_secret(run, arguments, monkeypatch):
    monkeypatch.setenv("STUDIES", FAILING)
    # A storage that is down is tried again for a while, which a test need not wait for.
    monkeypatch.setattr("bstune.study.storage.patience.RETRY_SECONDS", 0.0)
    status, _, err = run("--config-dir=conf", *arguments, *REPLAY)
    assert status == 2
    assert "storage=postgresql+psycopg2://me:***@127.0.0.1:9/db" in err
    status, _, err = run("worker", "storage=${oc.env:STUDIES}", "study=replay")
    assert status == 2
    assert "the storage does not answer" in err


@pytest.mark.parametrize("arguments", [("--cfg", "job"), ("--cfg", "job", "--resolve")])
def test_hydras_own_output_shows_no_secret(run, arguments):
    status, out, _ = run("--config-dir=conf", *arguments, *REPLAY)
    # Hydra ends without a status.
    assert (status or 0) == 0
    assert "storage: " in out
    assert yaml.safe_load(out)["seed"] == 0


# A workload that tells its secrets in every way in which code can.
LEAKY = """
import logging, multiprocessing, os, threading, warnings
from torch.utils.data import DataLoader
from bstune.workloads.classifier import Classifier
from bstune.workloads.images import ImageData


class Data(ImageData):
    def __init__(self, *arguments, url, cookies, **options):
        super().__init__(*arguments, **options)
        self.url = url


class Broken:
    def __len__(self):
        return 1

    def __getitem__(self, index):
        raise OSError(f"cannot read with {os.environ['WORKER_SECRET']}")


class Leaky(Classifier):
    def __init__(self, *arguments, api_token, options_of_mine, deeds, **options):
        super().__init__(*arguments, **options)
        self.save_hyperparameters("api_token", "options_of_mine")
        self.deed = "nothing"
        if multiprocessing.parent_process() is not None:
            with open("begun", "a") as begun:
                begun.write(".")
                self.deed = deeds[min(begun.tell(), len(deeds)) - 1]
        if self.deed == "constructor":
            raise KeyError(f"{self.hparams}")

    def training_step(self, batch, batch_idx):
        if batch_idx == 2 and self.deed == "raises":
            raise LookupError(f"no such thing at {os.environ['SERVICE_URL']}, {os.environ['MY_SERVICE_TOKEN']!r}")
        if batch_idx == 2 and self.deed == "worker":
            next(iter(DataLoader(Broken(), num_workers=1)))
        if batch_idx == 2 and self.deed == "says":
            logging.getLogger("mine").warning("logs in with %s", os.environ["LOGGED_PASSWORD"])
            try:
                raise ValueError(os.environ["CAUGHT_API_KEY"])
            except ValueError:
                logging.getLogger("mine").exception("goes on")
            warnings.warn(f"sends {os.environ['WARNED_CREDENTIAL']}")
            thread = threading.Thread(target=self.fails)
            thread.start()
            thread.join()
        return super().training_step(batch, batch_idx)

    def fails(self):
        raise RuntimeError(os.environ["THREAD_AUTH"])
"""
NAMES = (
    "password authorization api_key auth private_key passw user_info sig cookie api_token "
    "option_dsn STUDIES "
    "SERVICE_URL MY_SERVICE_TOKEN WORKER_SECRET LOGGED_PASSWORD CAUGHT_API_KEY "
    "WARNED_CREDENTIAL THREAD_AUTH "
    "MLFLOW_TRACKING_TOKEN"
)
# Places, each with a value of its own.
PLANTED = {}
# The number makes each value another's, so that a leak is known by its place.
for i, name in enumerate(NAMES.split()):
    PLANTED[name] = f"{name[:3]}-{i}zQ/{i * 7919}+x"


@pytest.mark.soak
def test_secrets_planted_in_twenty_places_are_found_nowhere(tmp_path):
    planted = PLANTED
    conf = tmp_path / "conf" / "mine"
    study = tmp_path / "study"
    conf.mkdir(parents=True)
    study.mkdir()
    (tmp_path / "leaky.py").write_text(LEAKY)
    own = {
        "storage": "${oc.env:STUDIES}",
        "mine": {
            "password": planted["password"],
            "headers": {
                "Authorization": f"Basic {planted['authorization']}",
                "X-Api-Key": planted["api_key"],
            },
            "auth": ["me", planted["auth"]],
            "deep": [{"er": [{"private_key": planted["private_key"]}]}],
            "passw": planted["passw"],
        },
        "workload": {
            "data": {
                "_target_": "leaky.Data",
                "url": f"https://me:{quote(planted['user_info'], '')}@h/x?sig={quote(planted['sig'], '')}",
                "cookies": {"session": planted["cookie"]},
            },
            "module": {
                "_target_": "leaky.Leaky",
                "api_token": planted["api_token"],
                "options_of_mine": {
                    "dsn": planted["option_dsn"],
                    "note": f"also {planted['api_token']}",
                },
                # In the order of modules that are made: the first steps' and the survey's, then each
                # deed between two trials that go well, as three failures end it.
                "deeds": [
                    *["nothing"] * 5,
                    "says",
                    "raises",
                    "nothing",
                    "worker",
                    "nothing",
                    "constructor",
                    "nothing",
                ],
            },
        },
    }
    (conf / "own.yaml").write_text("# @package _global_\n" + yaml.safe_dump(own))
    # Names in capitals are variables of the environment.
    variables = {name: value for name, value in planted.items() if name.isupper()}
    variables["STUDIES"] = (
        f"sqlite:///file:bstune.db?password={quote(planted['STUDIES'], '')}&uri=true"
    )
    variables["SERVICE_URL"] = f"https://me:{quote(planted['SERVICE_URL'], '')}@h/"
    command = """bstune --config-dir ../conf workload=digits +mine=own device=cpu sampler=random hardware.enabled=false
        search.trials=5 search.replicates=1 search.batch_size.low=32 search.batch_size.high=64 search.workers=1
        workload.target.value=0.6 budget.steps=60 budget.examples=1 search.objective=steps"""
    environment = {**os.environ, **variables, "PYTHONPATH": str(tmp_path), "MPLBACKEND": "agg"}
    process = subprocess.Popen(
        [sys.executable, "-m", *command.split()],
        cwd=study,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    seen = set()
    output = []
    reader = threading.Thread(target=lambda: output.append(process.stdout.read()))
    reader.start()
    while reader.is_alive():
        # A command line can be read by everybody on the machine, for as long as its process runs.
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                seen.add(path.read_text(errors="replace"))
            # The process has ended.
            except OSError:
                continue
        reader.join(0.2)
    process.stdout.close()
    (printed,) = output
    assert process.wait() == 0, printed
    folder = study / "outputs" / "digits"
    messages = str(column(read_rows(folder / "trials.jsonl"), "message"))
    # Each deed was done, so that its secret had a chance to leak.
    for said in ("LookupError: no such thing", "OSError: cannot read with ***", "KeyError"):
        assert said in messages
    for said in ("logs in with ***", "ValueError: ***", "sends ***", "RuntimeError: ***"):
        assert said in printed, printed
    names = {path.name for path in contents(study)}
    assert {
        "bstune.db",
        "mlflow.db",
        "config.yaml",
        "report.html",
        "curve.json",
        "best.yaml",
        "study.json",
    } <= names
    assert leaks(planted, study, printed, *seen) == []
    with closing(sqlite3.connect(study / "mlflow.db")) as database:
        assert (
            # What MLflow got has the stars: it was filtered, not left out.
            database.execute("select count(*) from tags where value like '%***%'").fetchone()[0]
            >= 3
        )
    json.loads((folder / "curve.json").read_text())
    config = yaml.safe_load((folder / "config.yaml").read_text())
    assert config["workload"]["module"]["options_of_mine"] == {"dsn": "***", "note": "also ***"}


@pytest.mark.parametrize("name", ["batch_size", "seconds_per_step", "loss"])
def test_a_key_that_equals_a_remembered_secret_stays(name, monkeypatch):
    monkeypatch.setattr(secrets, "_forms", {})
    secrets.remember({"password": name})
    text = json.dumps({name: 3, "points": [{name: 1.5}]})
    assert secrets.without_known(text) == text
