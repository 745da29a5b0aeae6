"""Language models on text that lives on the device as tokens: data, models and Lightning module.

An example is a sequence of ``context`` tokens, whose targets are the same tokens one place on.
Batch sizes count sequences; times ``context`` they are tokens.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from bstune.core.errors import ConfigError, DataError, check_positive_integer
from bstune.trial.batches.index_stream import IndexStream
from bstune.trial.batches.micro_batches import micro_batch_sizes_of, splitter
from bstune.trial.devices.device import resolve_device
from bstune.trial.devices.randomness import seeded_generators
from bstune.trial.lightning.installed import LightningDataModule
from bstune.workloads.classifier import Classifier
from bstune.workloads.datasets import TINY_SHAKESPEARE, read_files

# Standard deviation of the first weights of embeddings and linear layers, as in GPT-2.
INITIAL_STD = 0.02
# The share at the end of a text that is not trained on: its first half serves for the target, its
# second half to test.
HELD_OUT_SHARE = 0.1


@dataclass(frozen=True)
class Text:
    """A text as tokens from 0 to ``vocabulary`` - 1, in parts.

    Each part has integers (n,), in memory or memory-mapped. ``test`` is None where there is none.
    ``source`` is the file that a message names.
    """

    source: str
    vocabulary: int
    train: NDArray[np.integer]
    validation: NDArray[np.integer]
    test: NDArray[np.integer] | None


def load_tiny_shakespeare(root: str | Path) -> Text:
    """Read 40,000 lines of Shakespeare (Karpathy 2015) as characters: 65 of them, 1,115,394 in all.

    The first nine tenths are to train on, a twentieth for the target, the last one to test. The
    file is kept as ``root/tinyshakespeare/input.txt``. Errors are those of
    :func:`bstune.workloads.datasets.load_fashion_mnist`.
    """
    (data,) = read_files(TINY_SHAKESPEARE, root).values()
    characters = np.frombuffer(data, np.uint8)
    alphabet = np.unique(characters)
    tokens = np.searchsorted(alphabet, characters).astype(np.uint8)
    return _split("tinyshakespeare/input.txt", tokens, len(alphabet))


def load_text(path: str | Path) -> Text:
    """Read a text file of one's own as characters, numbered in the order of their code points.

    It is cut into parts as :func:`load_tiny_shakespeare` cuts its text. The vocabulary is that of
    the part to train on.

    Raises:
        DataError: if the file cannot be read, is not UTF-8, or holds at its end a character that is
            nowhere before.
    """
    try:
        text = Path(path).expanduser().read_text(encoding="utf-8")
    except OSError as error:
        raise DataError(
            f"workload.data.load.path={path} cannot be read: {error.strerror}"
        ) from error
    except UnicodeDecodeError as error:
        raise DataError(
            f"{path} is not text in UTF-8, from byte {error.start} on: export it as UTF-8"
        ) from error
    code_points = np.array([ord(character) for character in text], np.int32)
    alphabet = np.unique(code_points[: _train_length(len(code_points))])
    foreign = np.flatnonzero(~np.isin(code_points, alphabet))
    if foreign.size:
        line = text.count("\n", 0, foreign[0]) + 1
        raise DataError(
            f"{path}, line {line}: {text[foreign[0]]!r} is outside the vocabulary, the "
            f"{len(alphabet)} characters of the first nine tenths, which are trained on: remove "
            "it, or put it into them too"
        )
    return _split(str(path), np.searchsorted(alphabet, code_points).astype(np.int32), len(alphabet))


def _train_length(characters: int) -> int:
    """How many of a text's characters are trained on."""
    return int((1.0 - HELD_OUT_SHARE) * characters)


def _split(source: str, tokens: NDArray[np.integer], vocabulary: int) -> Text:
    """Cut a text into the parts to train on, for the target, and to test."""
    validation_start = _train_length(len(tokens))
    test_start = validation_start + (len(tokens) - validation_start) // 2
    return Text(
        source=source,
        vocabulary=vocabulary,
        train=tokens[:validation_start],
        validation=tokens[validation_start:test_start],
        test=tokens[test_start:],
    )


class TextData(LightningDataModule):
    """A text, kept on one device, that hands each trial its own stream of sequences.

    Training takes the sequences that begin at every ``stride``-th token, each once per epoch, in
    random order. The target is measured on sequences that do not overlap, evenly spread over their
    part of the text.

    Args:
        load: returns a :class:`Text`, such as ``functools.partial(load_tiny_shakespeare,
            root=...)``.
        device: ``cpu``, ``cuda``, ``cuda:N``, or ``auto``: CUDA where there is one.
        vocabulary: how many tokens the model knows. The text may have fewer, all of them numbered
            below it.
        context: tokens in a sequence.
        stride: tokens between the beginnings of sequences that are trained on; ``context``: they do
            not overlap.
        train_tokens: how many of the first tokens to train on; None: all of that part.
        validation: how many sequences the target is measured on, and as many the test.
        eval_batch_size: sequences in an evaluation batch.
        resident: False: the text to train on stays where ``load`` has it, such as on disk, and each
            batch is moved.

    Raises:
        ConfigError: for sizes that are not positive integers, and more sequences or tokens than
            there are.
        DataError: for a token outside the vocabulary, or a text that is too short for one sequence.
    """

    def __init__(
        self,
        *,
        load: Callable[[], Text],
        device: str,
        vocabulary: int,
        context: int,
        validation: int,
        eval_batch_size: int,
        stride: int = 1,
        train_tokens: int | None = None,
        resident: bool = True,
    ) -> None:
        """Keep the arguments; the class's docstring has them. The first use reads and checks."""
        super().__init__()
        self._load = load
        self._device = device
        self._vocabulary = vocabulary
        self._context = context
        self._validation = validation
        self._eval_batch_size = eval_batch_size
        self._stride = stride
        self._train_tokens = train_tokens
        self._resident = resident
        # None before it is read.
        self._text: Text | None = None
        # The tokens to train on, on the device; None before :meth:`setup`, and where they are not
        # to be resident there.
        self._train: Tensor | None = None

    def prepare_data(self) -> None:
        """Read and check the text, off the device."""
        resolve_device(self._device)
        self._read()

    def setup(self, stage: str | None = None) -> None:
        """Put the text to train on onto the device, once, if it is to be resident there."""
        if self._train is None and self._resident:
            self._train = self._on_device(self._read().train)

    @property
    def train_size(self) -> int:
        """Sequences in one epoch."""
        return (len(self._read().train) - self._context - 1) // self._stride + 1

    @property
    def validation_size(self) -> int:
        """Sequences on which the target is measured."""
        return self._validation

    def train_batches(
        self,
        batch_size: int,
        micro_batch_size: int | None,
        seed: int,
    ) -> "TokenBatches":
        """Begin a trial's endless stream of batches, in an order that ``seed`` sets."""
        self.setup()
        # Tokens that are not to be resident on the device are taken from the host.
        tokens = self._read().train if self._train is None else self._train
        return TokenBatches(
            tokens,
            context=self._context,
            stride=self._stride,
            batch_size=batch_size,
            micro_batch_size=micro_batch_size,
            seed=seed,
        )

    def val_dataloader(self) -> "TokenEvalBatches":
        """Give the batches for the target."""
        return self._evaluation_batches(self._read().validation)

    def test_dataloader(self) -> "TokenEvalBatches":
        """Give the test batches; there are none without a test text."""
        return self._evaluation_batches(self._read().test)

    def _evaluation_batches(self, tokens: NDArray[np.integer] | None) -> "TokenEvalBatches":
        """Give batches of sequences that are evenly spread over a part of the text.

        ``tokens`` are the part's; None, for a part that the text lacks, gives no batches.
        """
        sequences = np.empty((0, self._context + 1), np.int64)
        if tokens is not None:
            # The last token is a target alone.
            every = (len(tokens) - 1) // self._validation
            sequences = sliding_window_view(tokens, self._context + 1)[::every][: self._validation]
        return TokenEvalBatches(self._on_device(sequences).long(), self._eval_batch_size)

    def _read(self) -> Text:
        """Read the text once, and refuse options that are out of range or that it cannot meet."""
        if self._text is not None:
            return self._text
        check_positive_integer("workload.data.vocabulary", self._vocabulary)
        check_positive_integer("workload.data.context", self._context)
        check_positive_integer("workload.data.stride", self._stride)
        check_positive_integer("workload.data.validation", self._validation)
        check_positive_integer("workload.data.eval_batch_size", self._eval_batch_size)
        if self._train_tokens is not None:
            check_positive_integer("workload.data.train_tokens", self._train_tokens)
        text = self._load()
        if text.vocabulary > self._vocabulary:
            raise DataError(
                f"{text.source} has {text.vocabulary} different tokens, more than "
                f"workload.data.vocabulary={self._vocabulary}: set that to {text.vocabulary}"
            )
        train = text.train
        if self._train_tokens is not None:
            if self._train_tokens > len(train):
                raise ConfigError(
                    f"workload.data.train_tokens must be at most the {len(train)} tokens that "
                    f"{text.source} has to train on, but got {self._train_tokens}"
                )
            train = train[: self._train_tokens]
        self._check("train", text.source, train, sequences=1)
        self._check("validation", text.source, text.validation, self._validation)
        if text.test is not None:
            self._check("test", text.source, text.test, self._validation)
        self._text = replace(text, train=train)
        return self._text

    def _check(self, name: str, source: str, tokens: NDArray[np.integer], sequences: int) -> None:
        """Refuse a part that is too short for ``sequences``, or has a token outside the vocabulary.

        ``name`` is the part's, and ``source`` the text's, for the message.
        """
        # The last target is a token after the last sequence.
        least = sequences * self._context + 1
        if len(tokens) < least:
            needed = "a sequence" if name == "train" else f"{sequences} sequences"
            raise DataError(
                f"{source} is too short, or cut short: its {name} part has {len(tokens)} tokens, "
                f"but {needed} of workload.data.context={self._context} tokens take {least}"
            )
        low = int(tokens.min())
        high = int(tokens.max())
        if low < 0 or high >= self._vocabulary:
            place = int(np.argmax((tokens < 0) | (tokens >= self._vocabulary)))
            raise DataError(
                f"{source}: token {tokens[place]} at place {place} of its {name} part is outside "
                f"the vocabulary, 0 to {self._vocabulary - 1}: set "
                f"workload.data.vocabulary={high + 1}, or tokenise the text again"
            )

    def _on_device(self, tokens: NDArray[np.integer]) -> Tensor:
        """Copy tokens to the device, in a small type of integers."""
        # torch does not index other unsigned integers than uint8.
        kind = np.uint8 if self._vocabulary <= 256 else np.int32
        return torch.tensor(tokens.astype(kind), device=resolve_device(self._device))


class TokenBatches:
    """Endless training batches (tokens, targets), each int64 (B, context).

    They are on the device of ``tokens`` (n,). Each iterator goes on where the last left off, at the
    next whole batch. The order depends on ``seed`` alone. If ``tokens`` is an array and no tensor,
    it is read sequence by sequence, and the batches are in main memory.
    """

    def __init__(
        self,
        tokens: Tensor | NDArray[np.integer],
        *,
        context: int,
        stride: int,
        batch_size: int,
        micro_batch_size: int | None,
        seed: int,
    ) -> None:
        check_positive_integer("batch size", batch_size)
        self.batch_size = batch_size
        self.micro_batch_sizes = micro_batch_sizes_of(batch_size, micro_batch_size)
        # Cuts a batch into its micro-batches; of several devices each process takes its own.
        self._split = splitter(batch_size, micro_batch_size)
        # A view, (sequences, context + 1): targets are the tokens one further on.
        self._sequences: Tensor | NDArray[np.integer]
        device = torch.device("cpu")
        if isinstance(tokens, Tensor):
            self._sequences = tokens.unfold(0, context + 1, stride)
            device = tokens.device
        else:
            self._sequences = sliding_window_view(tokens, context + 1)[::stride]
        (generator,) = seeded_generators(seed, device, count=1)
        self.stream = IndexStream(len(self._sequences), batch_size, generator)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for index in self.stream:
            for part in self._split(self._sequences_at(index)):
                yield part[:, :-1], part[:, 1:]

    def _sequences_at(self, index: Tensor) -> Tensor:
        """Give the sequences at ``index`` (B,), int64 (B, context + 1)."""
        if isinstance(self._sequences, Tensor):
            return self._sequences.index_select(0, index).long()
        return torch.from_numpy(self._sequences[index.numpy()].astype(np.int64))


class TokenEvalBatches:
    """Evaluation batches (tokens, targets) of sequences (n, context + 1), int64.

    There are no batches without sequences.
    """

    def __init__(self, sequences: Tensor, batch_size: int) -> None:
        self.batch_size = batch_size
        self._sequences = sequences

    def in_batches_of(self, batch_size: int) -> "TokenEvalBatches":
        """Hand out the same sequences in batches of another size."""
        return TokenEvalBatches(self._sequences, batch_size)

    def __len__(self) -> int:
        # The last batch may be smaller.
        return math.ceil(len(self._sequences) / self.batch_size)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for start in range(0, len(self._sequences), self.batch_size):
            part = self._sequences[start : start + self.batch_size]
            yield part[:, :-1], part[:, 1:]


class LanguageModel(Classifier):
    """Trains ``model`` to predict the token that follows each token.

    The model maps tokens (N, context) to logits (N, context, vocabulary). ``val/loss`` and
    ``test/loss`` are nats a token, ``val/error`` and ``test/error`` shares of tokens. Arguments are
    those of :class:`~bstune.workloads.classifier.Classifier`.
    """

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Give the mean loss over the batch's tokens, in nats."""
        tokens, targets = batch
        return self.loss(self(tokens).flatten(0, 1), targets.flatten())

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        """Add up errors and losses on the device."""
        tokens, targets = batch
        self.add_up(self(tokens).flatten(0, 1), targets.flatten())

    test_step = validation_step


class Transformer(nn.Module):
    """A decoder of pre-normalised blocks without dropout, as GPT-2 (Radford et al. 2019).

    Its output layer has weights of its own. It maps tokens (N, T), T up to ``context``, to logits
    (N, T, vocabulary). Weights start normal around 0, with standard deviation 0.02, and those that
    add to the residual stream with 0.02/sqrt(2 layers).

    Args:
        vocabulary: different tokens.
        context: tokens in the longest sequence.
        layers, width, heads: blocks, size of the residual stream, and heads of attention, which
            share the width.

    Raises:
        ConfigError: for sizes that are not positive integers, or a width that the heads do not
            divide.
    """

    def __init__(
        self, *, vocabulary: int, context: int, layers: int, width: int, heads: int
    ) -> None:
        super().__init__()
        sizes = {
            "vocabulary": vocabulary,
            "context": context,
            "layers": layers,
            "width": width,
            "heads": heads,
        }
        for name, size in sizes.items():
            check_positive_integer(f"workload.module.model.{name}", size)
        if width % heads:
            raise ConfigError(
                f"workload.module.model.width={width} must be a multiple of heads={heads}"
            )
        self.tokens = nn.Embedding(vocabulary, width)
        self.places = nn.Parameter(torch.empty(context, width))
        self.blocks = nn.Sequential(*(_Block(width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        # Each of the blocks adds to the residual stream twice. Those weights start smaller by the
        # root of that number, as in GPT-2, so that the stream does not grow with the layers.
        for name, weight in self.named_parameters():
            if weight.dim() > 1:
                shrinks_by = math.sqrt(2 * layers) if "residual" in name else 1.0
                nn.init.normal_(weight, std=INITIAL_STD / shrinks_by)
            elif name.endswith("bias"):
                nn.init.zeros_(weight)

    def forward(self, tokens: Tensor) -> Tensor:
        """Compute logits (N, T, vocabulary) for tokens (N, T)."""
        stream = self.tokens(tokens) + self.places[: tokens.shape[1]]
        logits: Tensor = self.head(self.norm(self.blocks(stream)))
        return logits


class _Block(nn.Module):
    """A block of a Transformer: attention and a hidden layer, each added to the stream.

    It maps the stream (N, T, width) to one of the same shape.
    """

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self._heads = heads
        # They are made in this order, as each draws its weights from the trial's random numbers.
        self.attention_norm = nn.LayerNorm(width)
        self.hidden_norm = nn.LayerNorm(width)
        self.attention = nn.Linear(width, 3 * width)
        self.attention_residual = nn.Linear(width, width)
        self.hidden = nn.Linear(width, 4 * width)
        self.hidden_residual = nn.Linear(4 * width, width)

    def forward(self, stream: Tensor) -> Tensor:
        """Map the residual stream (N, T, width), a vector for each token, to the next one."""
        examples, length, width = stream.shape
        attention: Tensor = self.attention(self.attention_norm(stream))
        parts = attention.view(examples, length, 3, self._heads, -1)
        # Queries, keys and values, each (N, heads, T, width/heads).
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        mixed = _attend(query, key, value).transpose(1, 2).reshape(examples, length, width)
        stream = stream + self.attention_residual(mixed)
        hidden = functional.gelu(self.hidden(self.hidden_norm(stream)))
        change: Tensor = self.hidden_residual(hidden)
        return stream + change


def _attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Compute causal attention; all of shape (N, heads, T, width/heads).

    On a CPU in bfloat16, plain products replace torch's fused kernel, which takes half of a step,
    most of it backward: 57 ms for 256 heads of 64 tokens, where the products take 12.
    """
    if query.device.type != "cpu" or query.dtype == torch.float32:
        return functional.scaled_dot_product_attention(query, key, value, is_causal=True)
    examples, heads, length, width = query.shape
    query = query.reshape(-1, length, width)
    key = key.reshape(-1, length, width)
    value = value.reshape(-1, length, width)
    future = torch.full((length, length), -torch.inf, dtype=query.dtype).triu(1)
    scores = torch.baddbmm(future, query, key.transpose(1, 2), alpha=width**-0.5)
    weights = torch.softmax(scores, -1).to(value.dtype)
    return torch.bmm(weights, value).view(examples, heads, length, width)


class Lstm(nn.Module):
    """An LSTM whose state begins at 0 with each sequence.

    Maps tokens (N, T) to logits (N, T, vocabulary).

    Args:
        vocabulary: different tokens.
        embedding: size of a token's vector.
        width, layers: size of the state, and layers of it.
        projection: size that a layer's state is projected to before it is used; 0: it is not.

    Raises:
        ConfigError: for sizes that are not positive integers, or a projection that is not smaller
            than the width.
    """

    def __init__(
        self, *, vocabulary: int, embedding: int, width: int, layers: int, projection: int = 0
    ) -> None:
        super().__init__()
        sizes = {"vocabulary": vocabulary, "embedding": embedding, "width": width, "layers": layers}
        for name, size in sizes.items():
            check_positive_integer(f"workload.module.model.{name}", size)
        if not 0 <= projection < width:
            raise ConfigError(
                f"workload.module.model.projection must be from 0 to below width={width}, but got "
                f"{projection}"
            )
        self.tokens = nn.Embedding(vocabulary, embedding)
        self.cells = nn.LSTM(embedding, width, layers, batch_first=True, proj_size=projection)
        self.head = nn.Linear(projection or width, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        """Compute logits (N, T, vocabulary) for tokens (N, T)."""
        states, _ = self.cells(self.tokens(tokens))
        logits: Tensor = self.head(states)
        return logits
