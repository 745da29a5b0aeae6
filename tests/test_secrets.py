"""Secrets are known by their key or their place in a URL, and nothing else is hidden."""

import pytest
import yaml
from refusals import text_cases

from bstune.core.errors import InputError
from bstune.system.secrets import hide, hide_in_error, hide_in_text, is_secret

NAMES_OF_SECRETS = """password passwd db_password PGPASSWORD dbPassword passphrase token hf_token
accessToken secret client_secret api_key apiKey apikey X-Api-Key access_key aws_secret_access_key
AWSAccessKey private_key credential credentials storage.password api_key_2 Authorization"""
OTHER_NAMES = """max_tokens tokens tokenizer pad_token eos_token n_token nToken n_keys keyboard key
monkey lr_key secretary token_id access_key_id password_file author token.dim lr"""


@pytest.mark.parametrize("key", NAMES_OF_SECRETS.split())
def test_secret_keys(key):
    assert is_secret(key)
    assert hide({"inner": [{key: "s3cret"}]}) == {"inner": [{key: "***"}]}


@pytest.mark.parametrize("key", OTHER_NAMES.split())
def test_other_keys(key):
    assert not is_secret(key)
    assert hide({key: "word"}) == {key: "word"}


@text_cases("""
value | hidden
{password: 1234} | {password: '***'}
{token: true, secret: null} | {token: true, secret: null}
{token: '${oc.env:HF_TOKEN}'} | {token: '${oc.env:HF_TOKEN}'}
{credentials: {user: me, key: k}} | {credentials: '***'}
{storage: 'x://me:pw@host/db', lr: 0.1} | {storage: 'x://me:***@host/db', lr: 0.1}
{storage: 'x://me:p <w@"@host/db'} | {storage: 'x://me:***@host/db'}
""")
def test_values(value, hidden):
    assert hide(yaml.safe_load(value)) == yaml.safe_load(hidden)


def test_a_value_with_a_name():
    assert hide("s3cret", "mlflow.password") == "***"


@text_cases("""
text | hidden
no route to x://me:pw@host:5432/db | no route to x://me:***@host:5432/db
postgresql+psycopg://me:p@s/w@host/db | postgresql+psycopg://me:***@host/db
'a://u:p@h', 'b://v:q@h' | 'a://u:***@h', 'b://v:***@h'
git+https://ghp_1@github.com/a/b | git+https://***@github.com/a/b
# As a path.
x:/me:pw@host/curve.json | x:/me:***@host/curve.json
x://h/db?user=me&sslpassword=pw&a=1 | x://h/db?user=me&sslpassword=***&a=1
# As options, calls, mappings of Python, JSON and YAML, and Hydra write a value under a key.
--storage=x://h?password=p data.token=p,q 1 | --storage=x://h?password=*** data.token=***,q 1
Config(api_key='p, q', lr=1) | Config(api_key=***, lr=1)
"{'api_key': 'p', 'lr': 1}" | "{'api_key': ***, 'lr': 1}"
{"a": {"token": "p q"}} | {"a": {"token": ***}}
module={_target_:a.B,api_key:p} token: word | module={_target_:a.B,api_key:***} token: word
api_key={p, q | api_key=***
credentials: 1, {credentials: {user: me}, lr: 1} | credentials: 1, {credentials: ***, lr: 1}
pad_token=x, {max_tokens: 5} | pad_token=x, {max_tokens: 5}
{token: ${oc.env:T}} password=${oc.env:P} | {token: ${oc.env:T}} password=${oc.env:P}
x://me:${oc.env:PW}@host | x://me:${oc.env:PW}@host
x://${oc.env:ME}:${oc.env:PW}@host | x://${oc.env:ME}:${oc.env:PW}@host
x://${oc.env:ME}:pw@host | x://${oc.env:ME}:***@host
http://localhost:5000/a@b | http://localhost:5000/a@b
postgresql://me@host/db | postgresql://me@host/db
sqlite:///a.db, me@host, token: word | sqlite:///a.db, me@host, token: word
""")
def test_texts(text, hidden):
    assert hide_in_text(text) == hidden
    assert hide_in_text(hidden) == hidden


@text_cases("""
told | hidden
no host 'w@host' (x://me:p@w@host) | no host '***@host' (x://me:***@host)
no URL: postgresql//me:pw@host/db | no URL: postgresql//me:***@host/db
access denied for me | access denied for me
""")
def test_what_a_driver_tells_of_a_url(told, hidden):
    assert hide_in_error(told) == hidden


def test_an_error_has_none_and_steers_no_terminal():
    error = InputError("x://me:pw@host \x1b[31m\x9d1\ta\nb")
    assert str(error) == "x://me:***@host \\x1b[31m\\x9d1\ta\nb"
