"""An autoencoder of digits that logs histograms and reconstructions to TensorBoard."""

import lightning as L
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader


class DigitImages(L.LightningDataModule):
    def __init__(self, batch_size: int = 32):
        super().__init__()
        self.batch_size = batch_size

    def setup(self, stage: str) -> None:
        images = torch.tensor(load_digits().data, dtype=torch.float32) / 16
        self.mean_image = images[:1400].mean(0)
        self.train = images[:1400]
        self.val = images[1400:]

    def train_dataloader(self):
        return DataLoader(self.train, batch_size=self.batch_size, shuffle=True)

    def val_dataloader(self):
        return DataLoader(self.val, batch_size=128)


class AutoEncoder(L.LightningModule):
    def __init__(self, latent: int = 8, lr: float = 3e-3):
        super().__init__()
        self.save_hyperparameters()
        self.encoder = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, latent))
        self.decoder = nn.Sequential(nn.Linear(latent, 32), nn.ReLU(), nn.Linear(32, 64))

    def on_fit_start(self):
        self.logger.log_hyperparams({"train_images": len(self.trainer.datamodule.train)})
        with torch.no_grad():
            self.decoder[-1].bias.copy_(self.trainer.datamodule.mean_image)

    def training_step(self, batch, batch_idx):
        loss = nn.functional.mse_loss(self.decoder(self.encoder(batch)), batch)
        if self.global_step % 50 == 0:
            self.logger.experiment.add_histogram(
                "encoder/weight", self.encoder[0].weight, self.global_step
            )
        self.log("train_mse", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        reconstruction = self.decoder(self.encoder(batch))
        if batch_idx == 0:
            self.logger.experiment.add_images(
                "reconstruction", reconstruction.view(-1, 1, 8, 8), self.current_epoch
            )
        self.log("val_mse", nn.functional.mse_loss(reconstruction, batch))

    def on_train_epoch_end(self):
        batches = len(self.trainer.train_dataloader)
        assert batches == self.trainer.num_training_batches
        self.logger.experiment.add_scalar("batches_per_epoch", batches, self.current_epoch)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.hparams.lr)
