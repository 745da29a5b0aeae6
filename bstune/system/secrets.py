r"""One filter for secrets, on all that is written, logged and printed.

    redact("no route to x://me:s3cret-word@host")            # no route to x://me:***@host
    redact_values({"headers": {"X-Api-Key": "s3cret-word"}})  # {'headers': {'X-Api-Key': '***'}}

A secret is known by its place, or by its value:

* **by its key**, in a config, in a URL's query, and as ``key=value``, ``'key': 'value'`` or a
  header of HTTP in a text.
  The last word of the key decides (``X-Api-Key``, ``dbPassword``, ``hf_token``, ``sig``), or the
  one before ``value`` or ``header``. ``tokens``, ``tokenizer``, ``author``, ``key`` alone and
  ``token_id`` end in other words. A piece of text is no secret: ``pad_token``, or what stands in
  brackets (``<|endoftext|>``). Nor is a number, a boolean, or a path that exists. What is called a
  password is hidden whatever its length, the others from 8 characters on.
* **by its place in a URL**: what stands between the user and the host.
* **by its value**: what stood in such a place, in the options or in the environment, is remembered
  if it has 8 characters and is no number. It is left out of every later text, also where that is
  escaped, quoted or encoded as in a URL. Of the environment, a word in small letters alone
  (``AUTH=kerberos``) is remembered only if it is called a password. A remembered word of letters
  alone is replaced where it stands by itself, never as a key of JSON.

A secret on the command line is refused, as everyone on the machine can read it there (``ps``). The
whole value goes into an environment variable that an option refers to:
``'storage=${oc.env:STUDIES}'``. The commands in ``best.yaml`` refer to it, too. What the user's own
code prints or saves by itself is not filtered; what it logs, warns of and raises is. A secret that
bstune was not given is found in a text only by a key or in a URL.

SQLAlchemy's ``render_as_string(hide_password=True)`` is not used: it ends a password at its first
``@`` and shows the rest as the host, leaves a URL's query as it is, and reads a whole text alone.
"""

import html
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from typing import Any
from urllib.parse import quote, quote_plus, unquote, unquote_plus

HIDDEN = "***"
# Fewest characters of a secret that is looked for away from its place.
SHORTEST = 8

# Words of a key are divided by what is no letter, and by a capital that begins a word.
_DIVISION = re.compile(r"[^A-Za-z]+|(?<=[a-z])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")
# Keys of secrets, as words in small letters with _ between them. In some keys the words run
# together: PGPASSWORD, clientsecret, apikey.
_SECRET_KEY = re.compile(
    r"(?:(?P<password>\w*(?:password|passwd|passwort|passphrase|secret)s?|(?:\w+_)?(?:pwd?|passw?))"
    r"|(?P<credential>"
    r"(?:\w+_)?(?:authorization|auth|bearer|token|signature|sig|sas|dsn|cookies?|credentials?)"
    r"|\w*(?:access|auth|api|refresh|session|bearer)token"
    r"|\w*(?:api|access|secret|private|account|auth|signing|encryption|subscription|shared)_?keys?"
    r"))(?:_(?:value|headers?|string|str|text|plain|base))*"
)
# Keys whose token is a piece of text, and whose pass is a run through a model.
_OTHER_KEY = re.compile(
    r"(?:\w+_)?(?:(?:pad|padding|eos|bos|eot|sos|cls|mask|sep|unk|start|end|stop|begin)_token"
    r"|(?:special|image|audio|video|text|blank|prompt|newline|space|language|per|next|new)_token"
    r"|(?:forward|backward|first|second|one|two|single|multi|per)_pass)"
)
# Keys of mappings of names to secrets.
_COLLECTIONS = frozenset({"secrets", "passwords", "cookies"})
# Short words that are a password's name in one project and a result or a ratio in another.
_AMBIGUOUS = re.compile(r"(?i:pw|passw?)$")

# The first of a pair in a list, such as ["Authorization", "Basic ..."].
_HEADER = re.compile(r"[A-Z][A-Za-z]*(?:-[A-Za-z]+)*")
_REFERENCE = re.compile(r"\$\{[^{}]{0,200}\}")
_NO_SECRET = re.compile(r"null|none|true|false|yes|no|\*\*\*|\(hidden\)", re.I)
_BRACKETED = re.compile(r"<.*>|\[.*\]|\{.*\}", re.S)
_NUMBER = re.compile(r"[\d\s.,:+\-_eE]+")
# Letters alone, or an identifier's.
_LETTERS = re.compile(r"[A-Za-z_]+")
_SMALL_LETTERS = re.compile(r"[a-z_]+")
_SCHEME = re.compile(r"(?:Basic|Bearer|Token|Digest|ApiKey)\s+(\S.*)", re.I | re.S)

_URL = re.compile(r"(?<![\w+.\-])[a-z][\w+.\-]{0,30}://[^\s\"'<>]*", re.I)
# A text that is one URL may have spaces and quotes in it.
_WHOLE_URL = re.compile(r"[a-z][\w+.\-]{0,30}://[^\n]*@\S*", re.I)
# User and password of a URL, after its scheme. They end at the last @, as raw passwords hold some.
# What follows http://host: may be a port.
_USER_INFO = re.compile(
    r"(?P<user>(?:\$\{[^{}]*\}|[^\s:/?#\"'])*)"
    r"(?P<colon>:(?!\d+(?:[/?#]|$)))?(?(colon)(?P<password>.*))(?=@)",
    re.S,
)
_WHOLE_USER_INFO = re.compile(_USER_INFO.pattern.replace(r"[^\s:", "[^:"), re.S)

_KEY = r"(?<![\w.\-])-{0,2}(?P<key>[A-Za-z_][\w.\-]{0,100})"
# Keys with their values in a text: in a URL's query, a command or a repr; quoted in Python or JSON;
# a password in YAML; and a header of HTTP, which ends with its line.
_PAIRS = (
    re.compile(_KEY + r"=(?P<value>(?![\[({])(?:\$\{[^{}]{0,200}\}|[^\s&,;\"'\\)\]}<>]){1,4096})"),
    re.compile(
        _KEY + r"(?: ?= ?|[\"'] ?: ?)[bruf]?(?P<mark>[\"'])"
        r"(?P<value>(?:\\.|(?!(?P=mark))[^\\]){1,4096})(?P=mark)"
    ),
    # A line of an INI file, and a token as HTTP's libraries name it, without its header. With a
    # digit they are neither code nor prose.
    re.compile(
        _KEY + r" = (?P<value>(?=[^\s\d(]{0,100}\d)[^\s&,;\"'\\()\[\]{}<>]{1,4096}+)(?![(\[])"
    ),
    re.compile(r"\b(?P<key>Bearer) (?P<value>(?=[^\s\d]{0,100}\d)[\w+/=.~\-]{8,8192})"),
    re.compile(
        r"(?<![\w.\-])(?P<key>[\w.\-]{0,100}?(?:password|passwd|passphrase|secret)):[ \t]+"
        r"(?P<value>[^\s\"'\\,;\])}]{1,4096})",
        re.I,
    ),
    re.compile(
        r"\b(?P<key>(?:Proxy-)?Authorization|(?:Set-)?Cookie|X-[\w\-]{1,100}):[ \t]+"
        r"(?P<value>[^\s\"'\\][^\n\"'\\]{0,8192})",
        re.I,
    ),
)

# The forms of remembered secrets, each with the pattern that finds it; None: it is found as it is.
_forms: dict[str, re.Pattern[str] | None] = {}


@lru_cache(maxsize=4096)
def _kind_of_secret(key: str) -> str | None:
    """Tell what a key holds: a ``password``, a ``credential``, or None for what is no secret."""
    words = _DIVISION.sub("_", key).lower().strip("_")
    match = _SECRET_KEY.fullmatch(words)
    if match is None or _OTHER_KEY.fullmatch(words):
        return None
    return match.lastgroup


def _is_number(text: str) -> bool:
    """Whether a text is a number, or digits with what separates them, as in a date."""
    if _NUMBER.fullmatch(text):
        return True
    try:
        float(text)
    except ValueError:
        return False
    return True


def _is_path(text: str) -> bool:
    """Whether a text is the path of something that exists, as SSH_AUTH_SOCK has it."""
    # No setting holds a longer path.
    if not text.startswith(("/", "~/", "./")) or len(text) > 1000:
        return False
    try:
        return os.path.exists(os.path.expanduser(text))
    except ValueError:
        return False


def holds_secret(key: str, text: str) -> bool:
    """Whether a text under this key is a secret.

    The key must say so, and the text must be neither a reference such as ``${oc.env:KEY}``, nor a
    path, nor a word such as ``null``.
    """
    kind = _kind_of_secret(key)
    if kind is None:
        return False
    literal = _REFERENCE.sub("", text).strip()
    if not literal or _NO_SECRET.fullmatch(literal) or _is_path(literal):
        return False
    # A password may be short. A credential is not: a few characters, or a text in brackets such
    # as <|endoftext|>, are a piece of text.
    if kind == "password":
        return True
    return len(literal) >= SHORTEST and not _BRACKETED.fullmatch(literal)


def _secrets_in_urls(text: str) -> Iterator[tuple[int, int]]:
    """Yield where secrets stand in a text's URLs, as (begin, end).

    They are passwords, as in ``x://user:password@host``, and a token in place of the user, as in
    ``https://token@host``.
    """
    whole = _WHOLE_URL.fullmatch(text)
    # Where the text is one URL, its password may hold spaces and quotes. Within a longer text these
    # end a URL.
    if whole:
        urls = [whole]
        user_info_of = _WHOLE_USER_INFO
    else:
        urls = list(_URL.finditer(text))
        user_info_of = _USER_INFO
    for url in urls:
        begin = url.start() + url[0].index("://") + len("://")
        user_info = user_info_of.match(text, begin, url.end())
        if user_info is None:
            continue
        # A reference such as ${oc.env:KEY} is no secret: what is left without references may be.
        if user_info["password"] is not None:
            if _REFERENCE.sub("", user_info["password"]) not in ("", HIDDEN):
                yield user_info.span("password")
            continue
        user = _REFERENCE.sub("", user_info["user"])
        is_web = url[0].lower().startswith("http") and user_info["colon"] is None
        # A shorter one is the name of a user.
        if is_web and len(user) >= SHORTEST:
            yield user_info.span("user")


def _secrets_behind_keys(text: str) -> Iterator[tuple[int, int]]:
    """Yield where secrets stand behind their keys in a text, as (begin, end)."""
    for pairs in _PAIRS:
        for pair in pairs.finditer(text):
            key = pair["key"]
            value = pair["value"]
            # A password may be a number, but pass=0.95 is a result.
            is_result = _is_number(value) and (
                _kind_of_secret(key) == "credential" or _AMBIGUOUS.search(key) is not None
            )
            if holds_secret(key, value) and not is_result:
                yield pair.span("value")


def _secret_spans(text: str) -> list[tuple[int, int]]:
    """Find where secrets stand by their places, as (begin, end): in order, without overlaps."""
    spans = sorted([*_secrets_in_urls(text), *_secrets_behind_keys(text)])
    # Spans that overlap are joined.
    disjoint: list[tuple[int, int]] = []
    for begin, end in spans:
        if disjoint and begin < disjoint[-1][1]:
            last_begin, last_end = disjoint[-1]
            disjoint[-1] = (last_begin, max(end, last_end))
        else:
            disjoint.append((begin, end))
    return disjoint


def redact(text: str) -> str:
    """Replace all secrets in a text by ``***``.

    They are those behind a key or in a URL, and the remembered ones.
    """
    parts: list[str] = []
    end_of_last = 0
    for begin, end in _secret_spans(text):
        parts += [text[end_of_last:begin], HIDDEN]
        end_of_last = end
    return without_known("".join([*parts, text[end_of_last:]]))


def without_known(text: str) -> str:
    """Replace the remembered secrets in a text by ``***``, so that JSON in it can be read again."""
    for form in known():
        pattern = _forms[form]
        # Without a pattern the form is found as it is, wherever it stands.
        if pattern is None:
            text = text.replace(form, HIDDEN)
        # To look for the word is faster than to look for the pattern.
        elif form in text:
            text = pattern.sub(HIDDEN, text)
    return text


def redact_values(values: Any, name: str = "") -> Any:
    """Copy nested options without the secrets in them; references such as ``${oc.env:KEY}`` stay.

    Secrets are found by their keys, and in texts. ``name`` is the dotted name of the options.
    """

    def shown(key: str, text: str) -> str:
        """Write the text of an option without the secrets in it."""
        return HIDDEN if holds_secret(key, text) else redact(text)

    return _each_text(values, name, shown)


def secret_options(values: object, name: str = "") -> list[str]:
    """Name the options among nested ones that hold a secret in clear, by dotted names."""
    names: list[str] = []

    def look(key: str, text: str) -> str:
        """Note the option's name if its text holds a secret, and give it back unchanged."""
        if holds_secret(key, text) or _secret_spans(text):
            names.append(key)
        return text

    _each_text(values, name, look)
    return list(dict.fromkeys(names))


def _each_text(values: Any, name: str, change: Callable[[str, str], str]) -> Any:
    """Copy nested options with each text changed by ``change``, a function of its name and itself.

    The name tells whether the text is a secret. It is the option's dotted name, but for two cases.
    Within a mapping of secrets, such as ``cookies``, it is the name of that mapping. In ``{name:
    X-Api-Key, value: ...}`` the value's name is X-Api-Key.

    Args:
        values: mappings, lists and plain values, at any depth.
        name: the dotted name of ``values``; empty at the top.
        change: called with the name and the text.
    """
    if isinstance(values, str):
        return change(name, values)
    if isinstance(values, Mapping):
        label = values.get("name", values.get("key"))
        in_collection = name.rpartition(".")[2].lower() in _COLLECTIONS
        changed: dict[Any, Any] = {}
        for key, value in values.items():
            inner = f"{name}.{key}" if name else str(key)
            if in_collection:
                inner = name
            # The secret is the value in {name: X-Api-Key, value: ...}.
            elif key == "value" and isinstance(label, str) and _kind_of_secret(label):
                inner = label
            changed[key] = _each_text(value, inner, change)
        return changed
    if isinstance(values, list | tuple):
        is_pair = len(values) == 2 and all(isinstance(value, str) for value in values)
        # A header may be a pair of its name and its value.
        if is_pair and _HEADER.fullmatch(values[0]) and _kind_of_secret(values[0]):
            return [values[0], _each_text(values[1], values[0], change)]
        return [_each_text(value, name, change) for value in values]
    return values


def remember(values: object, name: str = "") -> None:
    """Remember the secrets among nested options, and those of the environment as it is now.

    ``name`` is the dotted name of the options.
    """

    def keep(key: str, text: str) -> str:
        """Remember the secrets in the text of an option, and give it back unchanged."""
        for secret in _secrets_of(key, text):
            _remember_forms(secret)
        return text

    _each_text(values, name, keep)
    remember_environment()


def remember_environment() -> None:
    """Remember the secrets of the environment: by variables' names, and in their values."""
    for variable, text in os.environ.items():
        # These are the working directories, whose names end as a password's may.
        if variable in ("PWD", "OLDPWD"):
            continue
        for secret in _secrets_of(variable, text):
            # A plain word, as in AUTH=kerberos, is a secret only where it is called a password.
            if _SMALL_LETTERS.fullmatch(secret) and _kind_of_secret(variable) == "credential":
                continue
            _remember_forms(secret)


def known() -> tuple[str, ...]:
    """List all forms of the remembered secrets, the longest first.

    A process that this one starts is given them by :func:`know`.
    """
    return tuple(sorted(_forms, key=len, reverse=True))


def know(secrets: tuple[str, ...]) -> None:
    """Remember the secrets that another process remembers, as :func:`known` lists them."""
    for secret in secrets:
        _remember_forms(secret)


def _secrets_of(key: str, text: str) -> Iterator[str]:
    """Yield the secrets in the text of an option or variable.

    Each comes in all parts that may stand by themselves elsewhere, such as a token without its
    scheme.
    """
    spans = list[tuple[int, int]]()
    if holds_secret(key, text):
        spans.append((0, len(text)))
    spans += _secrets_in_urls(text)
    spans += _secrets_behind_keys(text)
    for begin, end in spans:
        secret = text[begin:end].strip()
        # With a reference in it, it is not the secret itself, and stands so in no other text.
        if _REFERENCE.search(secret):
            continue
        yield secret
        # SQLAlchemy takes what follows an @ in a password for a part of the host.
        if "@" in secret:
            yield secret.split("@", 1)[1] + "@"
        # A private key has a line before it and one after it that are in every such key.
        if "\n" in secret:
            yield from (line for line in secret.splitlines() if not line.startswith("-----"))
        # A header's value has a scheme before the secret, as in "Bearer TOKEN".
        header = _SCHEME.fullmatch(secret)
        if header:
            yield header[1]


def _remember_forms(secret: str) -> None:
    """Remember a secret in all forms in which a text may show it, such as quoted or encoded.

    One that is short, a number or a word such as ``null`` is not remembered.
    """
    if secret in _forms or _is_number(secret) or _NO_SECRET.fullmatch(secret):
        return
    plain = {secret, unquote(secret), unquote_plus(secret)}
    forms = set(plain)
    for text in plain:
        # These forms stand in URLs.
        forms |= {quote(text, ""), quote(text), quote_plus(text)}
        # These stand in Python and in JSON, also within a page, where < is escaped.
        in_json = json.dumps(text)[1:-1]
        forms |= {repr(text)[1:-1], in_json, json.dumps(text, ensure_ascii=False)[1:-1]}
        forms.add(in_json.replace("<", "\\u003c"))
        # These stand in HTML.
        forms |= {html.escape(text), html.escape(text, quote=False)}
    for form in forms:
        if len(form) < SHORTEST or _is_number(form):
            continue
        _forms[form] = None
        # A word of letters is a secret as a whole word, which no letter but that of an escape
        # precedes, as in \n, and which is no key of JSON.
        if _LETTERS.fullmatch(form):
            _forms[form] = re.compile(rf'(?:(?<!\w)|(?<=\\[abfnrtv])){form}(?!\w|":)')
