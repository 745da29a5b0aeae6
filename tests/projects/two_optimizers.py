"""A small generative adversarial network of digits, with an optimizer each and manual optimization."""

import lightning as L
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits as bce
from torch.utils.data import DataLoader, TensorDataset


class GAN(L.LightningModule):
    def __init__(self, lr: float = 1e-3, latent_dim: int = 16):
        super().__init__()
        self.save_hyperparameters()
        self.automatic_optimization = False
        self.generator = nn.Sequential(
            nn.Linear(latent_dim, 64), nn.ReLU(), nn.Linear(64, 64), nn.Sigmoid()
        )
        self.discriminator = nn.Sequential(
            nn.Linear(64, 64), nn.LeakyReLU(0.2), nn.Linear(64, 1), nn.Flatten(0)
        )
        self.register_buffer(
            "fixed_noise", torch.randn(256, latent_dim, generator=torch.Generator().manual_seed(0))
        )

    def training_step(self, batch, batch_idx):
        (real,) = batch
        opt_g, opt_d = self.optimizers()
        fake = self.generator(torch.randn(len(real), self.hparams.latent_dim, device=self.device))
        ones = torch.ones(len(real), device=self.device)
        zeros = torch.zeros(len(real), device=self.device)

        self.toggle_optimizer(opt_d)
        d_loss = (
            bce(self.discriminator(real), ones) + bce(self.discriminator(fake.detach()), zeros)
        ) / 2
        opt_d.zero_grad()
        self.manual_backward(d_loss)
        opt_d.step()
        self.untoggle_optimizer(opt_d)

        self.toggle_optimizer(opt_g)
        g_loss = bce(self.discriminator(fake), ones)
        opt_g.zero_grad()
        self.manual_backward(g_loss)
        opt_g.step()
        self.untoggle_optimizer(opt_g)
        self.log_dict({"g_loss": g_loss, "d_loss": d_loss}, prog_bar=True)

    def validation_step(self, batch, batch_idx):
        (real,) = batch
        fake = self.generator(self.fixed_noise)
        self.log("mean_distance", (fake.mean(0) - real.mean(0)).abs().mean())

    def configure_optimizers(self):
        options = {"lr": self.hparams.lr, "betas": (0.5, 0.999)}
        opt_g = torch.optim.Adam(self.generator.parameters(), **options)
        opt_d = torch.optim.Adam(self.discriminator.parameters(), **options)
        return [opt_g, opt_d], []


class RealDigits(L.LightningDataModule):
    def setup(self, stage):
        images = torch.tensor(load_digits().data, dtype=torch.float32) / 16
        self.train = TensorDataset(images[:1500])
        self.val = TensorDataset(images[1500:])

    def train_dataloader(self):
        return DataLoader(self.train, batch_size=64, shuffle=True)

    def val_dataloader(self):
        return DataLoader(self.val, batch_size=300)
