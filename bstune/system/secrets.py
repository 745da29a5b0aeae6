"""Secrets are left out of what is written, logged and printed.

    hide({"storage": "x://me:s3cret@host", "api_key": "s3cret"})
    # {"storage": "x://me:***@host", "api_key": "***"}

A secret is known by its place alone: under a key that names it, or in a URL. Nothing is guessed in
prose.
"""

import re
from collections.abc import Mapping
from typing import Any

HIDDEN = "***"

# A key's words are divided by what is no letter and no digit, and by a capital that begins a word.
_DIVISION = re.compile(r"[^A-Za-z0-9]+|(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")
# The last words of a key decide, in small letters with _ between them. What is called a password
# may run together with the word before, as in PGPASSWORD.
_SECRET_KEY = re.compile(
    r".*(?:password|passwd|passphrase)s?"
    r"|(?:.*_)?(?:pwd|token|secrets?|credentials?|authorization)"
    r"|(?:.*_)?(?:api|access|account|private|secret|signing|encryption)_?key"
)
# These tokens are pieces of text, or a number of them.
_TEXT_TOKEN = re.compile(
    r"(?:.*_)?(?:pad|padding|bos|eos|cls|sep|mask|unk|start|end|stop|special|image|next"
    r"|n|num|max|min|per)_token"
)
# OmegaConf's reference to an environment variable holds no secret itself.
_REFERENCE = r"\$\{[^{}]*\}"

_USER = rf"(?:{_REFERENCE}|[^\s:/?#@\"'<>])"
# user:password@ after a scheme. A password may hold @ and /, so it ends at the last @; digits
# before / are the port of a URL without a user.
_TO_PASSWORD = rf"(?P<user>\b[a-z][\w+.-]{{0,30}}:/{{1,2}}{_USER}*+:)(?!{_REFERENCE}@|\d+[/?#])"
_PASSWORD = re.compile(rf"{_TO_PASSWORD}[^\s\"'<>]+(?=@)", re.IGNORECASE)
# Where a value is a URL and nothing else, a password may hold spaces and quotes, too.
_PASSWORD_OF_URL = re.compile(rf"{_TO_PASSWORD}.+(?=@)", re.IGNORECASE)
_WEB_TOKEN = re.compile(
    rf"(?P<scheme>\bhttps?:/{{1,2}})(?!{_REFERENCE}@){_USER}++(?=@)", re.IGNORECASE
)
# A key of a value in a text: as options, calls and queries of URLs write it and, in braces, as
# mappings do.
_KEY = r"(?<![\w.-])(?P<key>[\w.-]++)"
_GIVEN = re.compile(rf"{_KEY}=")
_MAPPED = re.compile(rf"{_KEY}['\"]?\s*:\s*")
_MAPPING = re.compile(r"\{(?:.*\}|.*)")
# A quotation or a bracket that does not end holds the rest.
_VALUE = re.compile(
    rf"(?!{_REFERENCE})(?:'[^']*'?|\"[^\"]*\"?|\{{[^{{}}]*\}}?|\[[^\[\]]*\]?"
    r"|[^\s&#'\"<>,;(){}\[\]]+)"
)


def is_secret(key: str) -> bool:
    """Whether a dotted, camel or snake key names a secret: ``hf_token``, not ``pad_token``."""
    words = _DIVISION.sub("_", key).lower().strip("_0123456789")
    return _SECRET_KEY.fullmatch(words) is not None and _TEXT_TOKEN.fullmatch(words) is None


def hide(value: Any, key: str = "") -> Any:
    """Copy nested options without the secrets in them.

    All that is under a secret's key is hidden, but for None, booleans and references such as
    ``${oc.env:KEY}``, which hold none.

    Args:
        value: mappings, lists and plain values, at any depth.
        key: the name of ``value``, where it has one.
    """
    if value is None or isinstance(value, bool):
        return value
    if is_secret(key):
        is_reference = isinstance(value, str) and re.fullmatch(_REFERENCE, value)
        return value if is_reference else HIDDEN
    if isinstance(value, Mapping):
        return {name: hide(inner, str(name)) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        kind = tuple if isinstance(value, tuple) else list
        return kind(map(hide, value))
    if not isinstance(value, str):
        return value
    url = _PASSWORD_OF_URL.match(value)
    return hide_in_text(value if url is None else f"{url['user']}{HIDDEN}{value[url.end() :]}")


def hide_in_text(text: str) -> str:
    """Leave secrets out of a text: ``x://me:***@host``, ``data.token=***``, ``{api_key: ***}``."""
    text = _PASSWORD.sub(rf"\g<user>{HIDDEN}", text)
    text = _WEB_TOKEN.sub(rf"\g<scheme>{HIDDEN}", text)
    text = _without_values(text, _GIVEN)
    return _MAPPING.sub(lambda mapping: _without_values(mapping[0], _MAPPED), text)


def hide_in_error(text: str) -> str:
    """Leave secrets out of what is told of a URL that may be none.

    A driver takes the rest of a password with an @, which has to be quoted, for a part of the host.
    """
    return re.sub(r"[^\s\"'(/:]+@", f"{HIDDEN}@", hide_in_text(text))


def _without_values(text: str, keys: re.Pattern[str]) -> str:
    """Leave out what stands behind the keys of secrets."""
    parts, end = [], 0
    for key in keys.finditer(text):
        value = _VALUE.match(text, key.end())
        if value is not None and key.end() > end and is_secret(key["key"]):
            parts += [text[end : key.end()], HIDDEN]
            end = value.end()
    return "".join([*parts, text[end:]])
