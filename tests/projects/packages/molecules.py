"""Polar surface areas of 300 molecules (of the NCI's, which RDKit ships), for chemprop's message passing network."""

from pathlib import Path

import lightning as L
from chemprop.data import MoleculeDatapoint, MoleculeDataset, build_dataloader
from rdkit import RDConfig


class SurfaceAreas(L.LightningDataModule):
    def setup(self, stage):
        lines = Path(RDConfig.RDDataDir, "NCI", "first_5k.tpsa.csv").read_text().splitlines()[1:301]
        molecules = [line.rsplit(",", 1) for line in lines]
        points = [MoleculeDatapoint.from_smi(smiles, [float(area)]) for smiles, area in molecules]
        self.train = MoleculeDataset(points[::3] + points[1::3])
        self.val = MoleculeDataset(points[2::3])
        self.val.normalize_targets(self.train.normalize_targets())
        self.train.cache = self.val.cache = True

    def train_dataloader(self):
        return build_dataloader(self.train, batch_size=32)

    def val_dataloader(self):
        return build_dataloader(self.val, batch_size=100, shuffle=False)
