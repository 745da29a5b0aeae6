r"""One filter for secrets, on all that is written, logged and printed.

    redact("no route to x://me:s3cret-word@host")            # no route to x://me:***@host
    redact_values({"headers": {"X-Api-Key": "s3cret-word"}})  # {'headers': {'X-Api-Key': '***'}}

A secret is known by its place, or by its value:

* **by its key**, in a config, a URL's query or a text. A key is split at ``-``, ``_``, ``.`` and in
  camelCase. Its last segment decides (``X-Api-Key``, ``dbPassword``, ``hf_token``, ``sig``), or the
  one before ``value`` or ``header``. ``tokens``, ``tokenizer``, ``author``, ``key`` alone and
  ``token_id`` end in other segments. A piece of text is no secret: ``pad_token``, or what stands in
  brackets (``<|endoftext|>``). Nor is a number, a boolean, or a path that exists. What is called a
  password is hidden whatever its length, the others from 8 characters on.
* **by its place in a URL**: what stands between the user and the host.
* **by its value**: what stood in such a place, in the options or in the environment, is remembered
  if it has 8 characters and is no number. It is left out of every later text, also where that is
  escaped, quoted or encoded. Of the environment, a word in small letters alone (``AUTH=kerberos``)
  is remembered only if it is called a password. A remembered word of letters alone is replaced
  where it stands by itself, never as a key of JSON or YAML.

A secret on the command line is refused, as everyone on the machine can read it there (``ps``). The
whole value goes into an environment variable that an option refers to:
``'storage=${oc.env:STUDIES}'``. The commands in ``best.yaml`` refer to it, too. What the user's own
code prints or saves by itself is not filtered; what it logs, warns of and raises is.

Values are filtered before they are dumped, not in the document: a secret may hold a quote or a
backslash, and a document that has lost one cannot be read again.

SQLAlchemy's ``render_as_string(hide_password=True)`` is not used: it ends a password at its first
``@`` and shows the rest as the host, leaves a URL's query as it is, and reads a whole text alone.
"""

import base64
import binascii
import html
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import lru_cache
from typing import Any
from urllib.parse import quote, quote_plus, unquote, unquote_plus

from bstune.core.records import STATUSES

HIDDEN = "***"
# Fewest characters of a secret that is looked for away from its place.
SHORTEST = 8

_PASSWORDS = frozenset(
    {"password", "passwords", "passwd", "passw", "passwort", "pwd", "pw", "pass", "passphrase"}
    | {"secret", "secrets"}
)
_CREDENTIALS = frozenset(
    {"authorization", "auth", "bearer", "token", "signature", "sig", "sas", "dsn"}
    | {"cookie", "cookies", "credential", "credentials"}
)
# Ends of one segment in which words run together: PGPASSWORD, sslpassword, clientsecret, apikey.
_ENDS_OF_PASSWORDS = ("password", "passwd", "passphrase", "clientsecret")
_ENDS_OF_CREDENTIALS = tuple(
    [f"{kind}key" for kind in ("api", "access", "secret", "private", "account")]
    + [f"{kind}token" for kind in ("access", "auth", "api", "refresh", "session", "bearer")]
)
_KINDS_OF_KEYS = frozenset(
    {"api", "access", "secret", "private", "account", "auth", "signing", "encryption"}
    | {"subscription", "shared"}
)
# Keys of mappings of names to secrets.
_COLLECTIONS = frozenset({"secrets", "passwords", "cookies"})
# Short words that are a password's name in one project and a result or a ratio in another.
_AMBIGUOUS = frozenset({"pw", "pass", "passw"})
# Last segments of a key that are left out, so that the one before decides.
_FOLLOWERS = frozenset({"value", "header", "headers", "string", "str", "text", "plain", "base64"})
# What stands before `token` where it is a piece of text.
_TOKENS_OF_TEXT = frozenset(
    {"pad", "padding", "eos", "bos", "eot", "boi", "eoi", "sos", "oov", "cls", "sep", "unk"}
    | {"mask", "start", "end", "stop", "begin", "special", "image", "audio", "video", "text"}
    | {"blank", "separator", "delimiter", "class", "next", "new", "last", "first", "word"}
    | {"char", "sub", "per", "each", "newline", "space", "additional", "extra", "prefix"}
    | {"suffix", "middle", "placeholder", "prompt", "lang", "language", "sentinel", "distill"}
)
# What stands before `pass` where it is a run through something.
_PASSES = frozenset(
    {"forward", "backward", "first", "second", "last", "one", "two", "single", "multi", "per"}
    | {"num", "n", "number", "count", "max", "min"}
    | {"low", "high", "band", "full", "test", "train", "eval", "val", "validation"}
)

# Every key of a secret has one of these in it, in small letters.
_HINTS = [
    "pass",
    "pw",
    "secret",
    "token",
    "auth",
    "key",
    "sig",
    "sas",
    "dsn",
    "cookie",
    "cred",
    "bearer",
    "basic",
]

_SEGMENT = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[A-Z]+")
# The first of a pair in a list, such as ["Authorization", "Basic ..."].
_HEADER = re.compile(r"[A-Z][A-Za-z]*(?:-[A-Za-z]+)*")
_REFERENCE = re.compile(r"\$\{[^{}]{0,200}\}")
_NO_SECRET = re.compile(r"null|none|true|false|yes|no|\*\*\*|\(hidden\)", re.I)
_BRACKETED = re.compile(r"<.*>|\[.*\]|\{.*\}", re.S)
_NUMBER = re.compile(r"[\d\s.,:+\-_eE]+")
# Letters alone, or an identifier's.
_LETTERS = re.compile(r"[A-Za-z_]+")
_SMALL_LETTERS = re.compile(r"[a-z_]+")
_CODE = re.compile(r"[a-z_]+(?:\.[a-z_]+)*")
_CALL = re.compile(r"[A-Za-z_]\w*(?:\.\w+)*[(\[]")
_SCHEME = re.compile(r"(Basic|Bearer|Token|Digest|ApiKey)\s+(\S.*)", re.I | re.S)

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
_KEY = re.compile(
    r"(?<![\w.\-])-{0,2}(?P<key>[A-Za-z_][\w.\-]{0,100})"
    r"(?P<sign>\\*[\"']?[ \t]{0,3}(?:=|:|%3D)(?![=/])[ \t]{0,3})"
)
_VALUE = re.compile(
    r"[bruf]?(?P<mark>\\*[\"'])(?P<quoted>.{0,4096}?)(?<!\\)(?P=mark)"
    r"|(?![\[({])(?P<bare>(?:\$\{[^{}]{0,200}\}|[^\s&,;\"'\\)\]}<>]){1,4096})"
)
_LINE = re.compile(r"^[ \t]*(?:- )?(?P<key>[\w.\-]{1,100}):[ \t]+(?P<rest>\S[^\n]*)$", re.M)
_SENT = re.compile(r"\b(?:Bearer|Basic)[ \t]+(?=[^\s\"',;]*[\d=])(?P<rest>[\w+/=.~\-]{8,})")
# A header's cookies: each has a name of its own.
_COOKIES = re.compile(r"\b(?:Set-)?Cookie:[ \t]*(?P<rest>[^\s=\"']{1,200}=[^\n\"']{1,8192})", re.I)
_OPTION = re.compile(
    r"(?<![\w\-])--(?P<key>[A-Za-z][\w\-]{0,100})[ \t]+(?P<rest>[^\s\-\"'][^\s\"']*)"
)
_PRIVATE_KEY = re.compile(
    r"-----BEGIN (?:[A-Z]+ ){0,3}PRIVATE KEY-----(?P<rest>.{1,16384}?)-----END ", re.S
)

_JSON_TEXT = re.compile(r'(?P<text>"[^"\\]*(?:\\.[^"\\]*)*")(?P<is_key>\s*:)?', re.S)
_SCRIPT = re.compile(r"(<script\b.*?</script>)", re.S)
_MARKUP = re.compile(r'[<>"]')

# The forms of remembered secrets, each with the pattern that finds it; None: it is found as it is.
_forms: dict[str, re.Pattern[str] | None] = {}


@lru_cache(maxsize=4096)
def _kind_of_secret(key: str) -> str | None:
    """Tell what a key holds: a ``password``, a ``credential``, or None for what is no secret."""
    # The last segment decides, such as the token of HF_TOKEN; a "value" or "header" behind it does
    # not count.
    segments = [segment.lower() for segment in _SEGMENT.findall(key)]
    while segments and segments[-1] in _FOLLOWERS:
        segments.pop()
    if not segments:
        return None
    last = segments[-1]
    before = segments[-2] if len(segments) > 1 else ""
    if last in ("key", "keys"):
        if before in _KINDS_OF_KEYS:
            return "credential"
        return None
    # A pad_token is a piece of text, and a forward_pass is a run through something.
    if last == "token" and before in _TOKENS_OF_TEXT:
        return None
    if last == "pass" and before in _PASSES:
        return None
    if last in _PASSWORDS or last.endswith(_ENDS_OF_PASSWORDS):
        return "password"
    if last in _CREDENTIALS or last.endswith(_ENDS_OF_CREDENTIALS):
        return "credential"
    return None


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


def _is_prose(key: str, word: str) -> bool:
    """Whether the word after a key is one of a sentence or of code, and no secret.

    Examples are ``unexpected token: something`` and ``token = self.token``. After a key of
    passwords any word may be the secret.
    """
    return _kind_of_secret(key) == "credential" and _CODE.fullmatch(word.rstrip(":,;.")) is not None


def _is_result(key: str, word: str) -> bool:
    """Whether the word after a key is a result or a count, as in ``pass: 0.95`` or ``token: 12``.

    A number is, unless the key certainly means a password, which may be a number, too.
    """
    if not _is_number(word):
        return False
    last = _SEGMENT.findall(key)[-1].lower()
    return _kind_of_secret(key) == "credential" or last in _AMBIGUOUS


def _secrets_behind_keys(text: str) -> Iterator[tuple[int, int]]:
    """Yield where secrets stand behind their keys in a text, as (begin, end).

    Behind a key they are the rest of a line, an assigned value, or the word after an option of a
    command line.
    """
    yield from _secrets_in_lines(text)
    yield from _secrets_in_assignments(text)
    for option in _OPTION.finditer(text):
        key = option["key"]
        rest = option["rest"]
        # A word in small letters continues a sentence, as in "--password is required".
        is_word = _SMALL_LETTERS.fullmatch(rest) is not None
        if holds_secret(key, rest) and not is_word and not _is_result(key, rest):
            yield option.span("rest")
    # Bearer tokens, cookies and private keys are known by their form and need no key.
    for pattern in (_SENT, _COOKIES, _PRIVATE_KEY):
        for sent in pattern.finditer(text):
            yield sent.span("rest")


def _secrets_in_lines(text: str) -> Iterator[tuple[int, int]]:
    """Yield the secrets that are the rest of a line, as in ``cookie: a b c``."""
    for line in _LINE.finditer(text):
        key = line["key"]
        rest = line["rest"]
        # A quoted value is left to _secrets_in_assignments. A bracket or an = makes it code, and a
        # number is a result.
        is_plain_text = rest[0] not in "\"'[{" and "=" not in rest and not _is_number(rest)
        if not is_plain_text or not holds_secret(key, rest):
            continue
        first_word = rest.split()[0]
        if not (_is_prose(key, first_word) or _is_result(key, first_word)):
            yield line.span("rest")


def _secrets_in_assignments(text: str) -> Iterator[tuple[int, int]]:
    """Yield where a key's value is a secret: ``token=...`` or ``"password": "..."``."""
    # Where the last secret ended.
    end = 0
    for pair in _KEY.finditer(text):
        # A key within the last secret is a part of it.
        if pair.start() < end or _kind_of_secret(pair["key"]) is None:
            continue
        value = _VALUE.match(text, pair.end())
        if value is None:
            continue
        if value["quoted"] is not None:
            form = "quoted"
            is_secret = _is_quoted_secret(pair, value["quoted"])
        else:
            form = "bare"
            is_secret = _is_bare_secret(pair, value["bare"])
        if is_secret:
            yield value.span(form)
            end = value.end()


def _is_quoted_secret(pair: re.Match[str], quoted: str) -> bool:
    """Whether a text in quotes is a secret; ``pair`` is the key, with its sign, before it."""
    before = pair.string[max(0, pair.start() - 2) : pair.start()]
    # A word and a space before the key make it prose, as in: unexpected token: "x".
    follows_a_word = re.fullmatch(r"\w[ \t]", before) is not None
    is_said = follows_a_word and _is_prose(pair["key"], quoted)
    return holds_secret(pair["key"], quoted) and not is_said


def _is_bare_secret(pair: re.Match[str], bare: str) -> bool:
    """Whether a text without quotes is a secret; ``pair`` is the key, with its sign, before it."""
    key = pair["key"]
    sign = pair["sign"]
    # %3D is the "=" of a URL's query within another URL.
    is_assigned = "=" in sign or "%3D" in sign
    # After a colon, or with a space at the "=", a bracket is that of a call or an index, as in
    # "token = read(path)". In "token=a1(b2" it may be the secret's own.
    may_be_called = " " in sign or not is_assigned
    if may_be_called and _CALL.match(pair.string, pair.end()):
        return False
    # A password may be a number, yet after a colon it is more likely a result.
    if _is_result(key, bare) or (_is_number(bare) and not is_assigned):
        return False
    return holds_secret(key, bare) and not _is_prose(key, bare)


def _secret_spans(text: str) -> list[tuple[int, int]]:
    """Find where secrets stand by their places, as (begin, end): in order, without overlaps."""
    spans: list[tuple[int, int]] = []
    if "://" in text:
        spans += _secrets_in_urls(text)
    # A record of many steps has none of these words: it need not be looked through key by key.
    small = text.lower()
    if any(hint in small for hint in _HINTS):
        spans += _secrets_behind_keys(text)
    # Spans that overlap are joined.
    disjoint: list[tuple[int, int]] = []
    for begin, end in sorted(spans):
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
    """Replace the remembered secrets in a text by ``***``."""
    return _without(text, known())


def _without(text: str, forms: Iterable[str]) -> str:
    """Replace these forms of remembered secrets in a text by ``***``."""
    for form in forms:
        pattern = _forms[form]
        # Without a pattern the form is found as it is, wherever it stands.
        if pattern is None:
            text = text.replace(form, HIDDEN)
        # To look for the first word is faster than to look for the pattern.
        elif form.split()[0] in text:
            text = pattern.sub(_replacement, text)
    return text


def json_without_known(document: str) -> str:
    """Replace the remembered secrets in the texts of JSON, or of lines of JSON.

    Keys, numbers and layout stay.
    """
    # Also in the form in which JSON writes it, a secret is among what is remembered.
    if without_known(document) == document:
        return document
    return _JSON_TEXT.sub(_json_text_without, document)


def _json_text_without(match: re.Match[str]) -> str:
    """Write a string of JSON without remembered secrets; a key stays as it is."""
    if match["is_key"]:
        return match[0]
    text = json.loads(match["text"])
    without = without_known(text)
    # It stays as it was written: Python's json may write it differently.
    if without == text:
        return match[0]
    return json.dumps(without)


def page_without_known(page: str) -> str:
    """Replace the remembered secrets in the texts of an HTML page.

    Scripts stay as they are: what stands in them is filtered by whoever puts it there, with
    :func:`json_without_known`.
    """
    # In a page's texts the characters < > " are escaped. A form of a secret that has them as they
    # are could match only the page's tags, which must stay.
    escaped = [form for form in known() if not _MARKUP.search(form)]
    parts = list[str]()
    for part in _SCRIPT.split(page):
        is_script = part.startswith("<script")
        parts.append(part if is_script else _without(part, escaped))
    return "".join(parts)


def document_without_known(text: str, suffix: str) -> str:
    """Replace the remembered secrets in a file's text so that it can be parsed as before.

    ``suffix`` is the end of the file's name. YAML stays as it is: it is dumped from values that
    :func:`redact_values` has filtered.
    """
    if suffix in (".json", ".jsonl"):
        return json_without_known(text)
    if suffix == ".html":
        return page_without_known(text)
    if suffix in (".yaml", ".yml"):
        return text
    return without_known(text)


def _replacement(match: re.Match[str]) -> str:
    """Replace a remembered word or phrase by ``***``, unless it is a key or a part of a word."""
    word = match[0]
    text = match.string
    end = match.end()
    if not _LETTERS.fullmatch(word):
        return HIDDEN
    # The text just before the word suffices. Copying all of a long text would take long.
    before = text[max(0, match.start() - 100) : match.start()]
    # The word is the end of a longer one, unless the letter before it is that of an escape: \n.
    if re.search(r"\w$", before) and not re.search(r"\\[abfnrtv]$", before):
        return word
    # It is a key of JSON.
    if text.startswith('":', end):
        return word
    # A key of YAML follows a line's beginning, a bracket, a comma or a dash.
    opening = before.rstrip(" \"'")[-1:]
    is_yaml_key = text.startswith(":", end) and opening in ("", "\n", "{", ",", "-")
    if is_yaml_key:
        return word
    return HIDDEN


def redact_values(values: Any, name: str = "") -> Any:
    """Copy nested options without the secrets in them; references such as ``${oc.env:KEY}`` stay.

    Secrets are found by their keys, and in texts. A text that is itself a JSON object or list is
    filtered by the keys in it, and stays JSON. ``name`` is the dotted name of the options.
    """

    def shown(key: str, text: str) -> str:
        """Write the text of an option without the secrets in it."""
        if holds_secret(key, text):
            return HIDDEN
        if not text.startswith(("{", "[")):
            return redact(text)
        try:
            inner = json.loads(text)
        except (ValueError, RecursionError):
            return redact(text)
        without = redact_values(inner, key)
        if without == inner:
            return text
        return json.dumps(without)

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
            scheme, token = header.groups()
            yield token
            if scheme.lower() == "basic":
                yield from _basic_password(token)


def _basic_password(encoded: str) -> Iterator[str]:
    """Yield the password in the value of HTTP's basic authentication: base64 of ``user:password``.

    Nothing is yielded for another value.
    """
    try:
        decoded = base64.b64decode(encoded, validate=True).decode()
    except (binascii.Error, UnicodeDecodeError):
        return
    if ":" in decoded:
        yield decoded.partition(":")[2]


def _remember_forms(secret: str) -> None:
    """Remember a secret in all forms in which a text may show it, such as quoted or encoded.

    One that is short, a number or a word such as ``null`` is not remembered.
    """
    if (
        secret in _forms
        or len(secret) < SHORTEST
        or _is_number(secret)
        or _NO_SECRET.fullmatch(secret)
    ):
        return
    plain = {secret, unquote(secret), unquote_plus(secret)}
    forms = set(plain)
    for text in plain:
        # These forms stand in URLs.
        forms |= {quote(text, ""), quote(text), quote_plus(text)}
        # These stand in Python and in YAML.
        forms |= {repr(text)[1:-1], text.replace("'", "''")}
        # These stand in JSON, and in JSON within a page, where < is escaped.
        in_json = json.dumps(text)[1:-1]
        forms |= {in_json, json.dumps(text, ensure_ascii=False)[1:-1]}
        forms.add(in_json.replace("<", "\\u003c"))
        # These stand in HTML.
        forms |= {html.escape(text), html.escape(text, quote=False)}
        # This one stands in a header of HTTP.
        forms.add(base64.b64encode(text.encode(errors="surrogateescape")).decode())
    for form in forms:
        # A secret that is the same word as a trial's status would spoil every record.
        if len(form) >= SHORTEST and not _is_number(form) and form not in STATUSES:
            _forms[form] = _pattern(form)


def _pattern(form: str) -> re.Pattern[str] | None:
    """Make the pattern that finds a form of a secret in a text.

    A form of letters alone is found as a whole word, a form with spaces also where it is broken
    over lines. None for other forms, which are found as they are.
    """
    # _replacement checks that no letter stands before the word: a look-behind here would be slower.
    if _LETTERS.fullmatch(form):
        return re.compile(rf"{form}(?!\w)")
    if re.search(r"\s", form):
        return re.compile(r"\s+".join(re.escape(part) for part in form.split()))
    return None
