"""The airfoil data and their linear regression against numpy and closed forms."""

import functools
import hashlib
import io
from dataclasses import replace

import numpy as np
import pytest
import torch
from sklearn.preprocessing import StandardScaler
from toolbox import data_root

from bstune.core.errors import ConfigError
from bstune.workloads import datasets
from bstune.workloads.airfoil import AirfoilData, LinearRegression

RNG = np.random.RandomState(0)
# Columns about as wide as the published ones, which are not standardised.
TABLE = RNG.normal(size=(40, 6)) * [900.0, 6.0, 0.1, 15.0, 0.01, 7.0] + [
    2900.0,
    7.0,
    0.1,
    50.0,
    0.01,
    125.0,
]


def table_bytes(table):
    text = io.StringIO(newline="")
    np.savetxt(text, table, delimiter="\t", fmt="%.17g", newline="\r\n")
    return text.getvalue().encode()


@pytest.fixture
def data_folder(monkeypatch, tmp_path):
    """Make a small table the published one; return a folder with it."""
    checksum = {"airfoil_self_noise.dat": hashlib.sha256(table_bytes(TABLE)).hexdigest()}
    monkeypatch.setattr(
        datasets, "AIRFOIL", replace(datasets.AIRFOIL, sha256=checksum, mirrors=("http://one/",))
    )
    (tmp_path / "airfoil").mkdir()
    (tmp_path / "airfoil" / "airfoil_self_noise.dat").write_bytes(table_bytes(TABLE))
    return tmp_path


def test_the_file_is_read_and_downloaded_under_its_own_name(data_folder, monkeypatch):
    file = data_folder / "airfoil" / "airfoil_self_noise.dat"
    asked = []

    def serve(self, url, output_file, pooch):
        asked.append(url)
        output_file.write(table_bytes(TABLE))

    monkeypatch.setattr(datasets.pooch.HTTPDownloader, "__call__", serve)
    # First the file is there, then it has been removed.
    for downloaded in ([], ["http://one/airfoil_self_noise.dat"]):
        assert np.array_equal(datasets.load_airfoil(data_folder), TABLE)
        assert asked == downloaded
        assert list(file.parent.iterdir()) == [file]
        file.unlink()


def make_data(root, rows=1500):
    return AirfoilData(load=functools.partial(datasets.load_airfoil, root), device="cpu", rows=rows)


@pytest.mark.parametrize("rows", [1, 30, 40])
def test_the_first_rows_are_trained_on_and_validated_on(data_folder, rows):
    data = make_data(data_folder, rows)
    for loader in (data.train_dataloader(), data.val_dataloader()):
        ((features, labels),) = list(loader)
        expected = torch.from_numpy(StandardScaler().fit_transform(TABLE)[:rows]).float()
        torch.testing.assert_close(features, expected[:, :5], rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(labels, expected[:, 5], rtol=1e-5, atol=1e-6)
        index = torch.arange(rows).flip(0)
        torch.testing.assert_close(
            loader.dataset.__getitems__(index.tolist()), (features[index], labels[index])
        )


def test_other_rows_than_there_are(data_folder):
    for rows, message in (
        (41, "from 1 to 40, but got 41"),
        ("all", "a positive integer, but got 'all'"),
    ):
        with pytest.raises(ConfigError, match=rf"data\.rows must be {message}"):
            make_data(data_folder, rows).setup()


def test_first_weights_and_the_gradient_in_closed_form():
    """The gradient of |x w + b - y|^2 / (2 n) is x^T (x w + b - y) / n, and the mean residual for b."""
    torch.manual_seed(0)
    # Of 10,000 normal numbers the standard deviation is known to 0.7%, the mean to 1e-4.
    linear = LinearRegression(10_000, 0.01, torch.optim.SGD, 0.1).linear
    assert linear.weight.std().item() == pytest.approx(0.01, rel=0.05)
    assert linear.weight.mean().item() == pytest.approx(0.0, abs=5e-4)
    assert linear.bias.tolist() == [0.0]
    module = LinearRegression(5, 0.01, torch.optim.SGD, 0.1).double()
    x = RNG.normal(size=(9, 5))
    y = RNG.normal(size=9)
    loss = module.training_step((torch.tensor(x), torch.tensor(y)), 0)
    loss.backward()
    w = module.linear.weight.detach().numpy()[0]
    b = module.linear.bias.detach().numpy()[0]
    residual = x @ w + b - y
    assert loss.item() == pytest.approx((residual**2).sum() / 18)
    np.testing.assert_allclose(module.linear.weight.grad.numpy()[0], x.T @ residual / 9, rtol=1e-12)
    np.testing.assert_allclose(module.linear.bias.grad.numpy(), [residual.mean()], rtol=1e-12)


def test_what_the_config_says_of_the_published_rows():
    """The least loss, the loss at the start, and the largest stable learning rate, 2 over the largest eigenvalue."""
    root = data_root("airfoil")
    rows = datasets.load_airfoil(root)
    assert rows.shape == (1503, 6)
    # The first and the last row of the file as it is published.
    assert rows[0].tolist() == [800.0, 0.0, 0.3048, 71.3, 0.00266337, 126.201]
    assert rows[-1].tolist() == [6300.0, 15.6, 0.1016, 39.6, 0.0528487, 104.204]
    ((features, y),) = make_data(root).train_dataloader()
    # A column of ones for the bias.
    x = np.column_stack([features.double(), np.ones(1500)])
    y = y.double().numpy()
    w, *_ = np.linalg.lstsq(x, y, rcond=None)
    # These are the numbers in conf/workload/airfoil.yaml.
    assert ((x @ w - y) ** 2).mean() / 2 == pytest.approx(0.2417, abs=5e-5)
    assert (y**2).mean() / 2 == pytest.approx(0.493, abs=5e-4)
    largest = np.linalg.eigvalsh(x.T @ x / 1500)[-1]
    assert largest == pytest.approx(2.098, abs=5e-4)
    assert 2.0 / largest == pytest.approx(0.95, abs=5e-3)
