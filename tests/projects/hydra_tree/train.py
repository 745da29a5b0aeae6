"""Trains by the configs in conf/: ``python train.py model=linear``."""

import hydra
import lightning as L
import torch
from hydra.utils import instantiate
from sklearn.datasets import load_wine
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split


class WineData(L.LightningDataModule):
    def __init__(self, data_dir, batch_size, seed):
        super().__init__()
        self.save_hyperparameters()

    def setup(self, stage=None):
        x, y = load_wine(return_X_y=True)
        data = TensorDataset(torch.tensor((x - x.mean(0)) / x.std(0)).float(), torch.tensor(y))
        generator = torch.Generator().manual_seed(self.hparams.seed)
        self.train, self.val = random_split(data, [128, 50], generator)

    def train_dataloader(self):
        return DataLoader(self.train, self.hparams.batch_size, shuffle=True)

    def val_dataloader(self):
        return DataLoader(self.val, 50)


class LitModel(L.LightningModule):
    def __init__(self, net, optimizer):
        super().__init__()
        self.save_hyperparameters(ignore="net", logger=False)
        self.net = net

    def training_step(self, batch, batch_idx):
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def validation_step(self, batch, batch_idx):
        self.log("val/loss", nn.functional.cross_entropy(self.net(batch[0]), batch[1]))

    def configure_optimizers(self):
        return self.hparams.optimizer(params=self.parameters())


@hydra.main(version_base="1.3", config_path="conf", config_name="train")
def main(config):
    trainer = L.Trainer(max_epochs=config.epochs, default_root_dir=config.paths.root)
    trainer.fit(instantiate(config.model), instantiate(config.data))


if __name__ == "__main__":
    main()
