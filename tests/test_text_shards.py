"""Text shards: two steps of each workload on small files of its format, tokens that are kept, shards that are cut."""

import bz2
import gzip
import lzma
import os
from dataclasses import replace

import numpy as np
import pytest
from builders import resolved

from bstune.core.errors import BstuneError, ConfigError, DataError
from bstune.core.records import Budget
from bstune.trial.loop import run_trial
from bstune.trial.workload import load_data, load_workload
from bstune.workloads import text_shards
from bstune.workloads.text_shards import LEAST_VOCABULARY, lines_of, load_shards
from tests.toolbox import make_spec

sentencepiece = pytest.importorskip("sentencepiece", reason="sentencepiece is not installed")
WORDS = (
    "the",
    "of",
    "and",
    "to",
    "in",
    "a",
    "is",
    "that",
    "for",
    "on",
    "was",
    "with",
    "as",
    "by",
    "at",
    "he",
    "it",
)


def sentences(count, seed=0):
    random = np.random.RandomState(seed)
    return ["".join(f"{word} " for word in random.choice(WORDS, 12)).strip() for _ in range(count)]


def write(path, lines):
    """Write lines, compressed as the name says."""
    path.parent.mkdir(parents=True, exist_ok=True)
    opened = {".gz": gzip.open, ".xz": lzma.open, ".bz2": bz2.open}.get(path.suffix, open)
    with opened(path, "wt", encoding="utf-8") as file:
        file.writelines(f"{line}\n" for line in lines)


@pytest.fixture
def corpora(tmp_path):
    """A root with the layouts of LM1B and of Common Crawl, some hundred lines each."""
    lm1b = tmp_path / "1-billion-word-language-modeling-benchmark-r13output"
    for number in (1, 2):
        shard = f"training-monolingual.tokenized.shuffled/news.en-0000{number}-of-00100"
        write(lm1b / shard, sentences(300, number))
        shard = f"heldout-monolingual.tokenized.shuffled/news.en.heldout-0000{number - 1}-of-00050"
        write(lm1b / shard, sentences(100, 10 + number))
    write(tmp_path / "commoncrawl/train/en.00.deduped.xz", sentences(300, 20))
    write(tmp_path / "commoncrawl/validation/en.99.deduped.xz", sentences(100, 21))
    return tmp_path


SMALL = {
    "lm1b_transformer": ("workload.module.model.layers=1", "workload.module.model.width=16"),
    "lm1b_lstm": ("workload.module.model.width=24", "workload.module.model.projection=8"),
    "commoncrawl_transformer": ("workload.module.model.layers=1", "workload.module.model.width=16"),
}


def composed(name, root, *options):
    sizes = (
        "workload.data.load.vocabulary=400",
        "workload.data.context=8",
        "workload.data.stride=8",
    )
    sizes = (*sizes, "workload.data.validation=20", "workload.data.eval_batch_size=10")
    fixed = (
        f"data.root={root}",
        "device=cpu",
        "search.batch_size.low=2",
        "search.batch_size.high=64",
    )
    return resolved(f"workload={name}", *fixed, *sizes, *SMALL[name], *options)


# oneDNN has no LSTM with projections, and torch warns of it.
@pytest.mark.filterwarnings("ignore:LSTM with projections")
@pytest.mark.parametrize("name", SMALL)
def test_each_workload_trains_two_steps_on_files_of_its_format(name, corpora):
    workload, protocol = load_workload(*composed(name, corpora))
    result = run_trial(workload, make_spec(6, 0.1), replace(protocol, budget=Budget(2, 1)))
    assert (result.status, result.steps, result.message) == ("stopped", 2, None)
    # Twice the loss of a model that knows nothing.
    assert 0.0 < result.history[-1][1] < 2 * np.log(400)
    assert workload.validation_examples == 20


def shards(root, **changes):
    options = {
        "train": "train/*",
        "validation": "held/*",
        "vocabulary": 400,
        "cache": root / "cache",
        **changes,
    }
    return load_shards(root, **options)


@pytest.fixture
def root(tmp_path):
    """A root of two shards to train on and one for the target."""
    for number, suffix in enumerate((".txt", ".gz")):
        write(tmp_path / f"train/{number}{suffix}", sentences(50, number))
    write(tmp_path / "held/0.bz2", [*sentences(20, 5), "", "日本 é"])
    return tmp_path


def test_tokens_are_those_of_the_lines_in_their_order(root):
    text = shards(root)
    (model,) = (root / "cache").glob("*/vocabulary.model")
    pieces = sentencepiece.SentencePieceProcessor(model_file=str(model))
    assert (text.vocabulary, text.test) == (pieces.vocab_size(), None)
    assert (text.train.dtype, type(text.train)) == (np.uint16, np.memmap)
    expected = pieces.encode([*sentences(50, 0), *sentences(50, 1)], add_eos=True)
    assert text.train.tolist() == [token for line in expected for token in line]
    ends = np.flatnonzero(text.validation == text_shards.END_OF_LINE)
    # 20 sentences, an empty line and the last one.
    assert len(ends) == 22
    # nothing is unknown: characters outside the vocabulary are their bytes
    assert pieces.decode(text.validation[ends[-2] + 1 : ends[-1]].tolist()) == "日本 é"
    assert 0 not in text.validation


def test_tokens_are_kept_until_a_shard_changes(root, monkeypatch):
    first = shards(root)
    monkeypatch.setattr(text_shards, "_tokenise", lambda *arguments: pytest.fail("tokenised again"))
    again = shards(root)
    assert again.train.tolist() == first.train.tolist()
    monkeypatch.undo()
    write(root / "train/0.txt", sentences(51, 0))
    assert len(shards(root).train) > len(first.train)
    assert len([path for path in (root / "cache").iterdir() if path.is_dir()]) == 2
    assert len(shards(root, test="train/1.gz", train="train/0*").test) > 0


def test_a_large_vocabulary_takes_four_bytes(root, monkeypatch):
    class Wide:
        def __init__(self, model_file):
            pass

        def vocab_size(self):
            # More than 2^16 tokens.
            return 70_000

        def encode(self, lines, add_eos):
            return [[69_999, 1]] * len(lines)

    monkeypatch.setattr(sentencepiece, "SentencePieceProcessor", Wide)
    text = shards(root)
    assert (text.train.dtype, text.train[:2].tolist(), len(text.train)) == (
        np.uint32,
        [69_999, 1],
        200,
    )


def cut(path):
    path.write_bytes(path.read_bytes()[:-40])


@pytest.mark.parametrize(
    ("shard", "damage", "message"),
    [
        ("train/1.gz", cut, "train/1.gz is cut short or damaged after line "),
        ("held/0.bz2", cut, "held/0.bz2 is cut short or damaged after line "),
        ("train/0.txt", cut, "train/0.txt is cut short: its last line, 49, has no end"),
        (
            "train/1.gz",
            lambda path: path.write_bytes(b"no gzip\n"),
            "train/1.gz is cut short or damaged after line 0 (",
        ),
        (
            "train/0.txt",
            lambda path: path.write_bytes(b"good\n\xff\xfe\n"),
            "train/0.txt is not text in UTF-8 after",
        ),
        ("train/0.txt", lambda path: path.write_bytes(b""), "train/0.txt is empty"),
        ("held/0.bz2", os.remove, "has no shard held/*: set workload.data.load.root"),
    ],
)
def test_a_shard_that_is_not_whole_is_named_and_nothing_is_kept(root, shard, damage, message):
    damage(root / shard)
    with pytest.raises(DataError) as caught:
        shards(root)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert [path.name for path in root.glob("cache/*") if path.is_dir()] == []


def test_an_xz_that_is_cut_short(tmp_path):
    write(tmp_path / "one.xz", sentences(50))
    cut(tmp_path / "one.xz")
    with pytest.raises(DataError, match=r"one\.xz is cut short or damaged after line \d+"):
        list(lines_of(tmp_path / "one.xz"))


def test_kept_tokens_that_are_cut_short_are_named(root):
    shards(root)
    (path,) = root.glob("cache/*/train")
    size = path.stat().st_size
    path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(DataError, match=rf"{path} has {size - 3} bytes of {size}: delete "):
        shards(root)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        (
            {"vocabulary": 299},
            ConfigError,
            "workload.data.load.vocabulary must be at least 300, but got 299",
        ),
        ({"vocabulary": "many"}, ConfigError, "workload.data.load.vocabulary"),
        (
            {"validation": "train/1*"},
            ConfigError,
            "train/1.gz is in train and in validation: give each part shards",
        ),
        (
            {"cache": "/proc/nowhere"},
            DataError,
            "workload.data.load.cache=/proc/nowhere cannot be written",
        ),
        (
            {"train": "/train/*"},
            ConfigError,
            "workload.data.load.train must be a pattern of names below ",
        ),
        ({"test": ""}, ConfigError, "workload.data.load.test must be a pattern of names below "),
        (
            {"train": "many/*", "vocabulary": 300},
            ConfigError,
            "no vocabulary of 300 tokens can be learnt from ",
        ),
    ],
)
def test_options_that_cannot_be(root, changes, error, message):
    # 128 characters and 256 bytes are more than 300 tokens.
    write(root / "many" / "characters", ["".join(map(chr, range(0x4E00, 0x4E80)))])
    with pytest.raises(error) as caught:
        shards(root, **changes)
    assert message in str(caught.value)


def test_a_paragraph_a_line_may_be_long(root):
    write(root / "long" / "one.txt", [" ".join(sentences(200))] * 3)
    assert shards(root, train="long/*").vocabulary > LEAST_VOCABULARY - 40


def test_a_root_that_is_empty():
    with pytest.raises(ConfigError, match=r"workload\.data\.load\.root is empty"):
        load_shards("", "a", "b", 400, "cache")


def test_without_sentencepiece_it_is_said_what_to_install(root, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "sentencepiece", None)
    with pytest.raises(ConfigError, match=r"pip install 'bstune\[text\]'"):
        shards(root)


def test_a_token_outside_the_models_vocabulary_is_refused(corpora):
    with pytest.raises(BstuneError, match=r"more than workload\.data\.vocabulary=200: set that to"):
        load_data(*composed("lm1b_transformer", corpora, "workload.data.vocabulary=200"))
