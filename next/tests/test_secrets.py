"""Secrets are known by their key or their place in a URL, and nothing else is hidden."""

import pytest
import yaml
from refusals import cases

from bstune.system.secrets import hide, hide_in_text, is_secret

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


@cases(
    """
value | hidden
{password: 1234} | {password: '***'}
{token: true, secret: null} | {token: true, secret: null}
{token: '${oc.env:HF_TOKEN}'} | {token: '${oc.env:HF_TOKEN}'}
{credentials: {user: me, key: k}} | {credentials: '***'}
{storage: 'x://me:pw@host/db', lr: 0.1} | {storage: 'x://me:***@host/db', lr: 0.1}
""",
    str,
)
def test_values(value, hidden):
    assert hide(yaml.safe_load(value)) == yaml.safe_load(hidden)


def test_a_value_with_a_name():
    assert hide("s3cret", "mlflow.password") == "***"


@cases(
    """
text | hidden
no route to x://me:pw@host:5432/db | no route to x://me:***@host:5432/db
postgresql+psycopg://me:p@s/w@host/db | postgresql+psycopg://me:***@host/db
'a://u:p@h', 'b://v:q@h' | 'a://u:***@h', 'b://v:***@h'
git+https://ghp_1@github.com/a/b | git+https://***@github.com/a/b
x://h/db?user=me&sslpassword=pw&a=1 | x://h/db?user=me&sslpassword=***&a=1
x://me:${oc.env:PW}@host | x://me:${oc.env:PW}@host
x://${oc.env:ME}:${oc.env:PW}@host | x://${oc.env:ME}:${oc.env:PW}@host
x://${oc.env:ME}:pw@host | x://${oc.env:ME}:***@host
http://localhost:5000/a@b | http://localhost:5000/a@b
postgresql://me@host/db | postgresql://me@host/db
sqlite:///a.db, me@host, token: word | sqlite:///a.db, me@host, token: word
""",
    str,
)
def test_texts(text, hidden):
    assert hide_in_text(text) == hidden
