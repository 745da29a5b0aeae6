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
_PASSWORD = re.compile(
    rf"(?P<user>\b[a-z][\w+.-]{{0,30}}://{_USER}*+:)(?!{_REFERENCE}@|\d+[/?#])[^\s\"'<>]+(?=@)",
    re.IGNORECASE,
)
_WEB_TOKEN = re.compile(rf"(?P<scheme>\bhttps?://)(?!{_REFERENCE}@){_USER}++(?=@)", re.IGNORECASE)
_QUERY = re.compile(r"(?<=[?&])(?P<key>[\w.-]+)=[^\s&#\"'<>]+")


def is_secret(key: str) -> bool:
    """Whether a dotted, camel or snake key names a secret: ``hf_token``, not ``pad_token``."""
    words = _DIVISION.sub("_", key).lower().strip("_0123456789")
    return _SECRET_KEY.fullmatch(words) is not None and _TEXT_TOKEN.fullmatch(words) is None


def hide(value: Any, key: str = "") -> Any:
    """Copy nested options without the secrets in them.

    All that is under a secret's key is hidden, but for None, booleans and references such as
    ``${oc.env:KEY}``, which hold none. Tuples become lists.

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
        return [hide(inner) for inner in value]
    return hide_in_text(value) if isinstance(value, str) else value


def hide_in_text(text: str) -> str:
    """Leave passwords and tokens out of the URLs in a text: ``x://me:***@host``."""
    text = _PASSWORD.sub(rf"\g<user>{HIDDEN}", text)
    text = _WEB_TOKEN.sub(rf"\g<scheme>{HIDDEN}", text)
    return _QUERY.sub(_hide_query_value, text)


def _hide_query_value(pair: re.Match[str]) -> str:
    return f"{pair['key']}={HIDDEN}" if is_secret(pair["key"]) else pair[0]
