"""Batches that are no pair of tensors: a dict, a nested tuple, a graph with its own transfer to the device."""

import lightning as L
import numpy as np
import torch
from sklearn.datasets import load_iris, load_wine
from sklearn.neighbors import kneighbors_graph
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Dataset


class Rows(Dataset):
    """Rows of a table as samples, each made by ``sample`` of its values and its class."""

    def __init__(self, load, sample, part):
        x, y = load(return_X_y=True)
        x = torch.tensor((x - x.mean(0)) / x.std(0), dtype=torch.float32)
        order = torch.randperm(len(x), generator=torch.Generator().manual_seed(7))
        chosen = order[: len(x) * 7 // 10] if part == "train" else order[len(x) * 7 // 10 :]
        self.x = x[chosen]
        self.y = torch.tensor(y)[chosen]
        self.sample = sample

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        return self.sample(self.x[index], self.y[index])


class Graph:
    """Points of a batch, joined to their nearest neighbours."""

    def __init__(self, x, y, edge_index):
        self.x = x
        self.y = y
        self.edge_index = edge_index

    @property
    def num_graphs(self):
        return len(self.y)

    def to(self, device, non_blocking=False):
        tensors = (self.x, self.y, self.edge_index)
        return Graph(*(tensor.to(device, non_blocking=non_blocking) for tensor in tensors))


def as_dict(x, y):
    return {"inputs": {"first": x[:5], "rest": x[5:]}, "target": y, "name": f"class-{int(y)}"}


def as_tuple(x, y):
    return (x[:2], x[2:]), (y, 1.0)


def as_graph(x, y):
    return x.reshape(-1, 1), y


def collate_graphs(samples):
    nodes = torch.stack([x for x, _ in samples])
    n, size, _ = nodes.shape
    ring = np.stack(kneighbors_graph([[i] for i in range(size)], 2).nonzero())
    ring = torch.from_numpy(ring).long()
    edges = torch.cat([ring + size * graph for graph in range(n)], dim=1)
    return Graph(nodes.reshape(-1, 1), torch.stack([y for _, y in samples]), edges)


class TableData(L.LightningDataModule):
    def __init__(self, load, sample, collate_fn=None, batch_size=16):
        super().__init__()
        self.train = Rows(load, sample, "train")
        self.val = Rows(load, sample, "val")
        self.options = {"collate_fn": collate_fn, "batch_size": batch_size}

    def train_dataloader(self):
        return DataLoader(self.train, shuffle=True, **self.options)

    def val_dataloader(self):
        return DataLoader(self.val, **self.options)


class DictData(TableData):
    def __init__(self):
        super().__init__(load_wine, as_dict)


class TupleData(TableData):
    def __init__(self):
        super().__init__(load_iris, as_tuple)


class GraphData(TableData):
    def __init__(self):
        super().__init__(load_wine, as_graph, collate_graphs)


class Base(L.LightningModule):
    def __init__(self, lr):
        super().__init__()
        self.lr = lr

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.lr)


class DictModel(Base):
    def __init__(self, lr=1e-2):
        super().__init__(lr)
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


class TupleModel(Base):
    def __init__(self, lr=1e-2):
        super().__init__(lr)
        self.left = nn.Linear(2, 12)
        self.right = nn.Linear(2, 12)
        self.head = nn.Linear(12, 3)

    def loss(self, batch):
        (left, right), (y, weights) = batch
        logits = self.head(torch.tanh(self.left(left) * self.right(right)))
        return (cross_entropy(logits, y, reduction="none") * weights).mean()

    def training_step(self, batch, batch_idx):
        return self.loss(batch)

    def validation_step(self, batch, batch_idx):
        self.log("valid/loss", self.loss(batch))


class GraphModel(Base):
    def __init__(self, lr=1e-2, nodes=13, width=8):
        super().__init__(lr)
        self.nodes = nodes
        self.position = nn.Parameter(torch.randn(nodes, width) / 4)
        self.embed = nn.Linear(1, width)
        self.message = nn.Linear(width, width)
        self.head = nn.Linear(nodes * width, 3)

    def loss(self, graph):
        hidden = self.embed(graph.x) + self.position.repeat(graph.num_graphs, 1)
        source, target = graph.edge_index
        messages = self.message(hidden)[source]
        hidden = hidden + torch.zeros_like(hidden).index_add(0, target, messages).relu()
        return cross_entropy(self.head(hidden.reshape(graph.num_graphs, -1)), graph.y)

    def training_step(self, graph, batch_idx):
        loss = self.loss(graph)
        self.log("train/loss", loss, batch_size=graph.num_graphs)
        return loss

    def validation_step(self, graph, batch_idx):
        self.log("valid/loss", self.loss(graph), batch_size=graph.num_graphs)
