"""Language models on a text of characters: data, an LSTM and a Transformer.

An example is a sequence of ``context`` tokens, whose targets are the same tokens one place on.
"""

from typing import Any

import torch
from lightning.pytorch import LightningDataModule
from torch import Tensor, nn
from torch.utils.data import DataLoader

from bstune.workloads.batches import Batch, WholeBatches

# The first nine tenths of a text are trained on; half of the rest is for the target, half to test.
TRAIN_SHARE = 0.9


def sequences(tokens: Tensor, context: int, stride: int = 1) -> tuple[Tensor, Tensor]:
    """Views of a text's sequences, (N, context), and of their targets.

    Args:
        tokens: of the text, (n,).
        context: tokens of a sequence.
        stride: tokens between the beginnings of two sequences.
    """
    windows = tokens.unfold(0, context + 1, stride)
    return windows[:, :-1], windows[:, 1:]


def as_integers(batch: Any) -> Batch:
    """Give tokens and targets the type that a model takes, int64."""
    tokens, targets = batch
    return tokens.long(), targets.long()


class TextData(LightningDataModule):
    """Batches of sequences: training takes those that begin at each token.

    The target is measured on sequences that do not overlap, spread evenly over their part.

    Args:
        text: tokens, (n,).
        batch_size: sequences of a training batch.
        context: tokens of a sequence.
        validation: sequences that the target is measured on.
        validation_batch_size: sequences of a validation batch.
    """

    def __init__(
        self,
        text: Tensor,
        batch_size: int,
        context: int,
        validation: int,
        validation_batch_size: int,
    ) -> None:
        super().__init__()
        self.batch_size = batch_size
        self.validation_batch_size = validation_batch_size
        end = int(TRAIN_SHARE * len(text))
        held_out = text[end : (end + len(text)) // 2]
        self.train = WholeBatches(*sequences(text[:end], context))
        # The last token is a target alone.
        stride = (len(held_out) - 1) // validation
        spread = sequences(held_out, context, stride)
        self.validation = WholeBatches(*(part[:validation] for part in spread))

    def train_dataloader(self) -> DataLoader[Batch]:
        """Make the loader of the sequences trained on, in a new order each epoch."""
        return DataLoader(self.train, self.batch_size, shuffle=True, collate_fn=as_integers)

    def val_dataloader(self) -> DataLoader[Batch]:
        """Make the loader of the sequences that the target is measured on."""
        return DataLoader(self.validation, self.validation_batch_size, collate_fn=as_integers)


class Lstm(nn.Module):
    """An LSTM whose state begins at 0 with each sequence.

    Args:
        vocabulary: different tokens.
        embedding: size of a token's vector.
        width: of the state.
    """

    def __init__(self, vocabulary: int, embedding: int, width: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, embedding)
        self.cells = nn.LSTM(embedding, width, batch_first=True)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        """Compute logits (N, vocabulary, T) for tokens (N, T)."""
        states, _ = self.cells(self.tokens(tokens))
        logits: Tensor = self.head(states)
        return logits.transpose(1, 2)


class Transformer(nn.Module):
    """A decoder of pre-normalised blocks without dropout, as GPT-2 (Radford et al. 2019).

    Args:
        vocabulary: different tokens.
        context: tokens of a sequence.
        layers, width, heads: blocks, size of a token's vector, and heads of attention.
    """

    def __init__(self, vocabulary: int, context: int, layers: int, width: int, heads: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.places = nn.Parameter(torch.empty(context, width))
        block = nn.TransformerEncoderLayer(
            width, heads, 4 * width, 0.0, activation="gelu", batch_first=True, norm_first=True
        )
        norm = nn.LayerNorm(width)
        self.blocks = nn.TransformerEncoder(block, layers, norm, enable_nested_tensor=False)
        self.head = nn.Linear(width, vocabulary, bias=False)
        mask = nn.Transformer.generate_square_subsequent_mask(context)
        self.register_buffer("mask", mask, persistent=False)
        # torch's blocks are copies of one.
        for weight in self.parameters():
            if weight.ndim > 1:
                nn.init.normal_(weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        """Compute logits (N, vocabulary, context) for tokens (N, context)."""
        stream = self.tokens(tokens) + self.places
        logits: Tensor = self.head(self.blocks(stream, self.mask, is_causal=True))
        return logits.transpose(1, 2)
