"""Batches that are no pair of tensors: a nested dict with a text, as samples are made."""

import lightning as L
import torch
from sklearn.datasets import load_wine
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Dataset


class Wines(Dataset):
    """Rows of a table as samples."""

    def __init__(self, part):
        x, y = load_wine(return_X_y=True)
        x = torch.tensor((x - x.mean(0)) / x.std(0), dtype=torch.float32)
        order = torch.randperm(len(x), generator=torch.Generator().manual_seed(7))
        chosen = order[: len(x) * 7 // 10] if part == "train" else order[len(x) * 7 // 10 :]
        self.x = x[chosen]
        self.y = torch.tensor(y)[chosen]

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        x, y = self.x[index], self.y[index]
        return {"inputs": {"first": x[:5], "rest": x[5:]}, "target": y, "name": f"class-{int(y)}"}


class DictData(L.LightningDataModule):
    def __init__(self):
        super().__init__()
        self.train = Wines("train")
        self.val = Wines("val")

    def train_dataloader(self):
        return DataLoader(self.train, batch_size=16, shuffle=True)

    def val_dataloader(self):
        return DataLoader(self.val, batch_size=16)


class DictModel(L.LightningModule):
    def __init__(self, lr=1e-2):
        super().__init__()
        self.lr = lr
        self.towers = nn.ModuleDict({"first": nn.Linear(5, 16), "rest": nn.Linear(8, 16)})
        self.head = nn.Linear(16, 3)

    def loss(self, batch):
        hidden = sum(tower(batch["inputs"][name]) for name, tower in self.towers.items())
        assert len(batch["name"]) == len(hidden)
        return cross_entropy(self.head(hidden.relu()), batch["target"])

    def training_step(self, batch, batch_idx):
        return {"loss": self.loss(batch)}

    def validation_step(self, batch, batch_idx):
        self.log("valid/loss", self.loss(batch), batch_size=len(batch["target"]))

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.lr)
