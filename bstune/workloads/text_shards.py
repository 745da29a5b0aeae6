"""Text in shards, tokenised once into files that are memory-mapped.

It is for corpora that fit neither memory nor device. Shards hold a sentence or a paragraph a line,
plain or compressed (``.gz``, ``.xz``, ``.bz2``), as the One Billion Word benchmark and the
deduplicated Common Crawl of Buck et al. 2014 do. The vocabulary is SentencePiece's (Kudo and
Richardson 2018, arXiv 1808.06226), learnt from the first shard; a character outside it becomes its
bytes, and each line ends with the same token. A shard that is cut short ends it all with its name.
"""

import bz2
import gzip
import hashlib
import json
import lzma
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice
from pathlib import Path
from tempfile import mkdtemp
from types import ModuleType
from typing import Any

import numpy as np
from filelock import FileLock
from numpy.typing import NDArray

from bstune.core.errors import ConfigError, DataError, check_positive_integer
from bstune.system.files import put_in_place, sync_file
from bstune.workloads.language import Text

OPENERS: dict[str, Any] = {".gz": gzip.open, ".xz": lzma.open, ".bz2": bz2.open}
# So many lines are tokenised together.
LINES_AT_ONCE = 10_000
# So many lines of the first shard does the vocabulary learn from.
LEARNT_LINES = 500_000
# The token of a line's end.
END_OF_LINE = 1
# The tokens of the 256 bytes, of the unknown, of a line's end, and of a few characters.
LEAST_VOCABULARY = 300
# The longest line, in bytes, that the vocabulary learns from.
LONGEST_LINE = 2**20


def load_shards(
    root: str | Path,
    train: str,
    validation: str,
    vocabulary: int,
    cache: str | Path,
    test: str | None = None,
) -> Text:
    """Read the tokens of text shards, memory-mapped.

    Shards that have not been tokenised yet are tokenised first.

    Args:
        root: folder of the shards.
        train: pattern of their names below it, such as ``train/news.en-*``.
        validation: pattern of those for the target.
        vocabulary: largest number of different tokens.
        cache: folder in which the tokens are kept, 2 bytes each (4 where the vocabulary has 65,537
            or more). They are used again while the shards' names, sizes and times of change stay
            the same.
        test: pattern of those to test on; None: there are none.

    Raises:
        DataError: for a pattern without a file, a shard that cannot be read, is cut short, is not
            UTF-8 or has no lines, or kept tokens that are cut short.
        ConfigError: without SentencePiece, for an empty ``root``, a vocabulary out of its range, or
            a shard that is in two of the parts train, validation and test.
    """
    if not str(root or ""):
        raise ConfigError("workload.data.load.root is empty: set it to the folder of the shards")
    check_positive_integer("workload.data.load.vocabulary", vocabulary)
    if vocabulary < LEAST_VOCABULARY:
        raise ConfigError(
            f"workload.data.load.vocabulary must be at least {LEAST_VOCABULARY}, but got "
            f"{vocabulary}"
        )
    patterns = {"train": train, "validation": validation}
    if test is not None:
        patterns["test"] = test
    root = Path(root).expanduser()
    shards = {part: _matching(root, part, pattern) for part, pattern in patterns.items()}
    _check_apart(shards)
    folder = Path(cache).expanduser() / _name_of_tokens(shards, vocabulary)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        # One of several trials side by side tokenises, and the others wait.
        with FileLock(f"{folder}.lock"):
            if not folder.exists():
                _tokenise(shards, vocabulary, folder)
    except OSError as error:
        raise DataError(
            f"workload.data.load.cache={cache} cannot be written ({error.strerror})"
        ) from error
    return _map_tokens(folder, str(root), shards)


def _check_apart(shards: Mapping[str, Sequence[Path]]) -> None:
    """Refuse a shard that is in two of the parts."""
    for part, paths in shards.items():
        for path in paths:
            others = [other for other in shards if other != part and path in shards[other]]
            if others:
                raise ConfigError(
                    f"{path} is in {part} and in {others[0]}: give each part shards of its own"
                )


def _name_of_tokens(shards: Mapping[str, Sequence[Path]], vocabulary: int) -> str:
    """Name the folder of the shards' tokens by all that these depend on.

    That is the shards' names, sizes and times of change, the vocabulary's size, and the longest
    line that the vocabulary learns from.
    """
    files = list[list[Any]]()
    for part, paths in shards.items():
        for path in paths:
            status = path.stat()
            files.append([part, str(path), status.st_size, status.st_mtime_ns])
    dependencies = json.dumps([files, vocabulary, LONGEST_LINE])
    return hashlib.sha256(dependencies.encode()).hexdigest()[:16]


def _matching(root: Path, part: str, pattern: str) -> list[Path]:
    """List the shards of a part, whose names match a pattern, sorted."""
    try:
        paths = sorted(path for path in root.glob(pattern) if path.is_file())
    # glob raises these for a pattern that is an absolute path, or empty.
    except (NotImplementedError, ValueError) as error:
        raise ConfigError(
            f"workload.data.load.{part} must be a pattern of names below {root}, but got "
            f"{pattern!r}"
        ) from error
    if not paths:
        raise DataError(
            f"{root} has no shard {pattern}: set workload.data.load.root, or the pattern of its "
            "names"
        )
    return paths


def _tokenise(shards: Mapping[str, Sequence[Path]], vocabulary: int, folder: Path) -> None:
    """Learn the vocabulary, and write each part's tokens into ``folder``.

    They are written to a folder beside it, which is renamed once it is whole.
    """
    sentencepiece = _sentencepiece()
    # It is a list, as SentencePiece would wrap an iterator's errors in its own.
    lines_to_learn_from = list(islice(lines_of(shards["train"][0]), LEARNT_LINES))
    new_folder = Path(mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        model = new_folder / "vocabulary.model"
        _learn_vocabulary(lines_to_learn_from, vocabulary, model, source=shards["train"][0])
        pieces = sentencepiece.SentencePieceProcessor(model_file=str(model))
        size = int(pieces.vocab_size())
        token_type = np.dtype(np.uint16 if size <= 2**16 else np.uint32)
        counts = dict[str, int]()
        for part, paths in shards.items():
            with (new_folder / part).open("wb") as file:
                for path in paths:
                    lines = lines_of(path)
                    while some_lines := list(islice(lines, LINES_AT_ONCE)):
                        encoded = pieces.encode(some_lines, add_eos=True)
                        np.fromiter(chain.from_iterable(encoded), token_type).tofile(file)
                counts[part] = file.tell() // token_type.itemsize
        description = {"vocabulary": size, "type": token_type.name, "counts": counts}
        (new_folder / "tokens.json").write_text(json.dumps(description))
        for path in new_folder.iterdir():
            with path.open("rb+") as file:
                sync_file(file)
        put_in_place(new_folder, folder)
    finally:
        shutil.rmtree(new_folder, ignore_errors=True)


def _sentencepiece() -> ModuleType:
    """Import SentencePiece; ConfigError where it is not installed."""
    try:
        # It comes with an extra.
        import sentencepiece
    except ImportError as error:
        raise ConfigError(
            "text is tokenised by SentencePiece: pip install 'bstune[text]'"
        ) from error
    return sentencepiece


def _learn_vocabulary(lines: Iterable[str], vocabulary: int, path: Path, source: Path) -> None:
    """Learn a vocabulary of so many tokens from lines, and write it to ``path``.

    ConfigError where they allow none. ``source`` is the shard that they are from, for the message.
    """
    try:
        with path.open("wb") as model:
            _sentencepiece().SentencePieceTrainer.train(
                sentence_iterator=iter(lines),
                model_writer=model,
                vocab_size=vocabulary,
                max_sentence_length=LONGEST_LINE,
                # A short text has fewer.
                hard_vocab_limit=False,
                # A character without a token becomes the tokens of its bytes.
                byte_fallback=True,
                unk_id=0,
                eos_id=END_OF_LINE,
                # A negative number leaves the token out.
                bos_id=-1,
                pad_id=-1,
                # Only errors are printed.
                minloglevel=2,
            )
    except RuntimeError as error:
        reason = str(error).splitlines()[-1]
        raise ConfigError(
            f"no vocabulary of {vocabulary} tokens can be learnt from {source}: a "
            "text of many different characters takes a larger workload.data.load.vocabulary, "
            f"and its lines at most {LONGEST_LINE:,} bytes (SentencePiece says: {reason})"
        ) from error


def lines_of(path: Path) -> Iterator[str]:
    """Yield the lines of a shard without their ends.

    DataError for a shard that is cut short, empty or no text.
    """
    line = ""
    number = 0
    try:
        with OPENERS.get(path.suffix, open)(path, "rt", encoding="utf-8", newline="\n") as file:
            for line in file:
                number += 1
                yield line.rstrip("\r\n")
    except (EOFError, gzip.BadGzipFile, lzma.LZMAError, OSError) as error:
        reason = str(error)
        if isinstance(error, OSError) and error.strerror:
            reason = error.strerror
        raise DataError(f"{path} is cut short or damaged after line {number} ({reason})") from error
    except UnicodeDecodeError as error:
        raise DataError(
            f"{path} is not text in UTF-8 after line {number} ({error.reason})"
        ) from error
    if not number:
        raise DataError(f"{path} is empty")
    if not line.endswith("\n"):
        raise DataError(
            f"{path} is cut short: its last line, {number}, has no end; if it is whole, add one"
        )


def _map_tokens(folder: Path, source: str, shards: Mapping[str, Sequence[Path]]) -> Text:
    """Map the kept tokens of each part into memory. DataError for a file that is not whole.

    ``source`` is the name of the text in messages.
    """
    description = json.loads((folder / "tokens.json").read_text())
    token_type = np.dtype(description["type"])
    arrays = dict[str, NDArray[np.integer]]()
    for part in shards:
        path = folder / part
        expected = description["counts"][part] * token_type.itemsize
        size = path.stat().st_size if path.exists() else 0
        if size != expected:
            raise DataError(
                f"{path} has {size} bytes of {expected}: delete {folder}, and the shards are "
                "tokenised again"
            )
        arrays[part] = np.memmap(path, token_type, "r")
    return Text(
        source=source,
        vocabulary=description["vocabulary"],
        train=arrays["train"],
        validation=arrays["validation"],
        test=arrays.get("test"),
    )
