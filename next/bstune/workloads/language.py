"""Language models on a text of characters: data, and an LSTM.

An example is a sequence of ``context`` tokens, whose targets are the same tokens one place on.
"""

from collections.abc import Sequence

import numpy as np
import torch
from lightning.pytorch import LightningDataModule
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from bstune.workloads.batches import Batch, as_it_is

# The first nine tenths of a text are trained on; half of the rest is for the target, half to test.
TRAIN_SHARE = 0.9


class Sequences(Dataset[Batch]):
    """Pairs (tokens, targets), int64 (N, context) each, which a loader takes a batch at a time.

    Args:
        tokens: of the text, (n,).
        context: tokens of a sequence.
        stride: tokens between the beginnings of two sequences.
        most: sequences, at most; None: all.
    """

    def __init__(
        self, tokens: Tensor, context: int, stride: int = 1, most: int | None = None
    ) -> None:
        # A view: it takes no memory.
        self._windows = tokens.unfold(0, context + 1, stride)[:most]

    def __len__(self) -> int:
        return len(self._windows)

    def __getitems__(self, indices: Sequence[int]) -> Batch:
        rows = torch.from_numpy(np.asarray(indices))
        windows = self._windows.index_select(0, rows).long()
        return windows[:, :-1], windows[:, 1:]


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
        self.train = Sequences(text[:end], context)
        # The last token is a target alone.
        stride = (len(held_out) - 1) // validation
        self.validation = Sequences(held_out, context, stride, validation)

    def train_dataloader(self) -> DataLoader[Batch]:
        """Make the loader of the sequences trained on, in a new order each epoch."""
        return DataLoader(self.train, self.batch_size, shuffle=True, collate_fn=as_it_is)

    def val_dataloader(self) -> DataLoader[Batch]:
        """Make the loader of the sequences that the target is measured on."""
        return DataLoader(self.validation, self.validation_batch_size, collate_fn=as_it_is)


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
