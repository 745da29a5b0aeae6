"""A character-level transformer, trained on the descriptions that scikit-learn ships with its data sets."""

import math

import pytorch_lightning as pl
import torch
from sklearn.datasets import load_breast_cancer, load_diabetes, load_iris, load_wine
from torch import nn
from torch.utils.data import DataLoader, Dataset

LOADERS = (load_diabetes, load_iris, load_wine, load_breast_cancer)


class Characters(Dataset):
    def __init__(self, text, vocabulary, length):
        self.ids = torch.tensor([vocabulary.index(character) for character in text])
        self.length = length

    def __len__(self):
        return (len(self.ids) - 1) // self.length

    def __getitem__(self, index):
        start = index * self.length
        return self.ids[start : start + self.length], self.ids[start + 1 : start + self.length + 1]


class Descriptions(pl.LightningDataModule):
    def __init__(self, batch_size=16, length=32):
        super().__init__()
        self.batch_size = batch_size
        self.length = length

    def setup(self, stage=None):
        text = "".join(load().DESCR for load in LOADERS)
        vocabulary = sorted(set(text))
        cut = len(text) * 9 // 10
        self.train = Characters(text[:cut], vocabulary, self.length)
        self.val = Characters(text[cut:], vocabulary, self.length)

    def train_dataloader(self):
        return DataLoader(self.train, batch_size=self.batch_size, shuffle=True)

    def val_dataloader(self):
        return DataLoader(self.val, batch_size=64)


class TransformerLM(pl.LightningModule):
    def __init__(
        self, vocab_size=128, width=32, heads=2, layers=1, length=32, lr=3e-3, warmup_steps=20
    ):
        super().__init__()
        self.save_hyperparameters()
        self.tokens = nn.Embedding(vocab_size, width)
        self.positions = nn.Embedding(length, width)
        layer = nn.TransformerEncoderLayer(
            width, heads, 2 * width, dropout=0.0, batch_first=True, norm_first=True
        )
        self.blocks = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, vocab_size)

    def forward(self, ids):
        length = ids.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length, device=ids.device)
        hidden = self.tokens(ids) + self.positions(torch.arange(length, device=ids.device))
        return self.head(self.blocks(hidden, mask=mask, is_causal=True))

    def loss(self, batch):
        ids, following = batch
        return nn.functional.cross_entropy(self(ids).flatten(0, 1), following.flatten())

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.log("train/loss", loss)
        self.log("lr", self.trainer.optimizers[0].param_groups[0]["lr"], prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val/loss", self.loss(batch), sync_dist=True)

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams.lr, betas=(0.9, 0.98))
        warmup = self.hparams.warmup_steps
        total = self.trainer.max_steps

        def factor(step):
            if step < warmup:
                return (step + 1) / warmup
            done = (step - warmup) / max(1, total - warmup)
            return 0.1 + 0.45 * (1 + math.cos(math.pi * min(1.0, done)))

        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "interval": "step", "frequency": 1},
        }
