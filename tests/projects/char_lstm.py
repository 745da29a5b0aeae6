"""Next characters of Shakespeare by an LSTM, with clipped gradients."""

import os

import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

BLOCK = 32


class Blocks(Dataset):
    def __init__(self, ids):
        self.ids = ids

    def __len__(self):
        return (len(self.ids) - 1) // BLOCK

    def __getitem__(self, i):
        chunk = self.ids[i * BLOCK : (i + 1) * BLOCK + 1]
        return chunk[:-1], chunk[1:]


class CharData(L.LightningDataModule):
    def __init__(self, batch_size: int = 32, root: str = os.environ.get("PROJECT_DATA", "data")):
        super().__init__()
        self.batch_size = batch_size
        self.path = os.path.join(root, "tinyshakespeare.txt")

    def setup(self, stage):
        with open(self.path) as f:
            text = f.read()
        self.vocab = sorted(set(text))
        stoi = {c: i for i, c in enumerate(self.vocab)}
        ids = torch.tensor([stoi[c] for c in text[:210_000]])
        self.train, self.val = Blocks(ids[:200_000]), Blocks(ids[200_000:])

    def train_dataloader(self):
        return DataLoader(self.train, self.batch_size, shuffle=True, drop_last=True)

    def val_dataloader(self):
        return DataLoader(self.val, 160)


class CharLSTM(L.LightningModule):
    def __init__(self, learning_rate: float = 1e-3, vocab: int = 65, hidden: int = 64):
        super().__init__()
        self.learning_rate = learning_rate
        self.embed = nn.Embedding(vocab, 32)
        self.lstm = nn.LSTM(32, hidden, batch_first=True)
        self.head = nn.Linear(hidden, vocab)

    def loss(self, batch):
        x, y = batch
        hidden, _ = self.lstm(self.embed(x))
        return nn.functional.cross_entropy(self.head(hidden).flatten(0, 1), y.flatten())

    def training_step(self, batch, i):
        return self.loss(batch)

    def validation_step(self, batch, i):
        self.log("val_loss", self.loss(batch), prog_bar=True)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), self.learning_rate)
