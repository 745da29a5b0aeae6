"""Monthly prices of seven stocks (which matplotlib ships), forecast by pytorch-forecasting's recurrent network."""

from functools import cache

import lightning as L
import numpy as np
import pandas as pd
from matplotlib.cbook import get_sample_data
from pytorch_forecasting import GroupNormalizer, RecurrentNetwork, TimeSeriesDataSet

NAMES = ["IBM", "AAPL", "MSFT", "XRX", "AMZN", "ADBE", "^GSPC"]


@cache
def datasets():
    with get_sample_data("Stocks.csv") as file:
        prices = pd.read_csv(file, comment="#")[NAMES].dropna().reset_index(drop=True)
    prices["month"] = prices.index
    table = prices.melt("month", var_name="stock", value_name="price")
    table["price"] = np.log(table["price"].astype("float32"))
    training = TimeSeriesDataSet(
        table[table["month"] < 160],
        time_idx="month",
        target="price",
        group_ids=["stock"],
        max_encoder_length=12,
        max_prediction_length=3,
        time_varying_unknown_reals=["price"],
        target_normalizer=GroupNormalizer(groups=["stock"]),
    )
    return training, TimeSeriesDataSet.from_dataset(training, table, min_prediction_idx=160)


class Stocks(L.LightningDataModule):
    def setup(self, stage):
        self.training, self.validation = datasets()

    def train_dataloader(self):
        return self.training.to_dataloader(train=True, batch_size=64)

    def val_dataloader(self):
        return self.validation.to_dataloader(train=False, batch_size=256)


def network(learning_rate=1e-3):
    options = {"hidden_size": 8, "rnn_layers": 1, "dropout": 0.0}
    return RecurrentNetwork.from_dataset(datasets()[0], learning_rate=learning_rate, **options)
