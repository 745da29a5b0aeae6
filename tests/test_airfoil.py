"""The airfoil data and their linear regression against numpy and closed forms."""

import functools
import hashlib
import io
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.preprocessing import StandardScaler

from bstune.core.errors import ConfigError, DataError
from bstune.trial.batches import rebatch
from bstune.workloads import datasets
from bstune.workloads.airfoil import AirfoilData, LinearRegression, standardise

RNG = np.random.RandomState(0)
TABLE = RNG.normal(size=(40, 6)) * [900.0, 6.0, 0.1, 15.0, 0.01, 7.0] + [2900.0, 7.0, 0.1, 50.0, 0.01, 125.0]


def table_bytes(table):
    text = io.StringIO(newline="")
    np.savetxt(text, table, delimiter="\t", fmt="%.17g", newline="\r\n")
    return text.getvalue().encode()


@pytest.fixture
def published(monkeypatch):
    """Make a small table the published one, and refuse the network; return its source."""

    def refuse(*_, **__):
        raise OSError("no network")

    checksum = {"airfoil_self_noise.dat": hashlib.sha256(table_bytes(TABLE)).hexdigest()}
    source = replace(datasets.AIRFOIL, sha256=checksum, mirrors=("http://one/", "http://two/"))
    monkeypatch.setattr(datasets, "AIRFOIL", source)
    monkeypatch.setattr(datasets.pooch.HTTPDownloader, "__call__", refuse)
    return source


def keep(root, data=None):
    folder = root / "airfoil"
    folder.mkdir(parents=True)
    (folder / "airfoil_self_noise.dat").write_bytes(table_bytes(TABLE) if data is None else data)


# Reading


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"1\t2\n3\t4\n", [[1, 2], [3, 4]]),
        (b"1\t2\r\n3\t4\r\n", [[1, 2], [3, 4]]),
        (b"-1e-3\t 2.5", [[-0.001, 2.5]]),
    ],
)
def test_parse_table(data, expected):
    assert datasets.parse_table(data, "x", 2).tolist() == expected


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "x is not a table of 2 columns of finite numbers: its shape is"),
        (b"1\t2\t3\n", r"its shape is \(1, 3\)"),
        (b"1\t2\n3\n", "x is not a table of tab-separated numbers: "),
        (b"1\ttwo\n", "could not convert string to float: 'two'"),
        (b"1\tnan\n", "of finite numbers"),
        (b"1\tinf\n", "of finite numbers"),
        (b"\xff\t1\n", "x is not a table of tab-separated numbers"),
    ],
)
def test_parse_table_refuses_what_is_none(data, message):
    with pytest.raises(DataError, match=message):
        datasets.parse_table(data, "x", 2)


def test_load_airfoil(tmp_path, published):
    keep(tmp_path)
    dataset = datasets.load_airfoil(tmp_path)
    assert np.array_equal(dataset.features, TABLE[:, :5])
    assert np.array_equal(dataset.labels, TABLE[:, 5])


def test_a_file_that_is_not_the_published_one_is_refused(tmp_path, published):
    keep(tmp_path, table_bytes(TABLE + 1.0))
    with pytest.raises(DataError, match=r"airfoil_self_noise\.dat is not the published file: its sha256") as caught:
        datasets.load_airfoil(tmp_path)
    assert published.sha256["airfoil_self_noise.dat"] in str(caught.value)


def test_a_missing_file_is_downloaded_under_its_own_name(tmp_path, published, monkeypatch):
    asked = []

    def serve(self, url, output_file, pooch):
        asked.append(url)
        if url.startswith("http://one/"):
            raise OSError("404 Not Found")
        Path(output_file).write_bytes(table_bytes(TABLE))

    monkeypatch.setattr(datasets.pooch.HTTPDownloader, "__call__", serve)
    assert np.array_equal(datasets.load_airfoil(tmp_path).labels, TABLE[:, 5])
    assert asked == ["http://one/airfoil_self_noise.dat", "http://two/airfoil_self_noise.dat"]
    assert [path.name for path in (tmp_path / "airfoil").iterdir()] == ["airfoil_self_noise.dat"]
    datasets.load_airfoil(tmp_path)
    assert len(asked) == 2


def test_a_file_that_cannot_be_had_is_named_and_nothing_is_left(tmp_path, published):
    with pytest.raises(DataError, match="no network") as caught:
        datasets.load_airfoil(tmp_path / "root")
    for text in ("airfoil_self_noise.dat", "http://one/", "http://two/", "BSTUNE_DATA"):
        assert text in str(caught.value)
    assert list(tmp_path.iterdir()) == []


# The data module


def make_data(root, rows=30):
    return AirfoilData(load=functools.partial(datasets.load_airfoil, root), device="cpu", rows=rows)


def expected_rows(rows):
    scaled = StandardScaler().fit_transform(TABLE)[:rows].astype(np.float32)
    return scaled[:, :5], scaled[:, 5]


def test_standardise_is_that_of_scikit_learn():
    np.testing.assert_allclose(standardise(TABLE), StandardScaler().fit_transform(TABLE), rtol=1e-10)


def test_a_constant_column_is_refused():
    table = TABLE.copy()
    table[:, 3] = 2.0
    with pytest.raises(DataError, match="column 3 of the data is constant"):
        standardise(table)


@pytest.mark.parametrize("rows", [1, 30, 40])
def test_the_first_rows_are_trained_on_and_validated_on(tmp_path, published, rows):
    keep(tmp_path)
    data = make_data(tmp_path, rows)
    for loader in (data.train_dataloader(), data.val_dataloader()):
        ((features, labels),) = list(loader)
        np.testing.assert_allclose(features, expected_rows(rows)[0], rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(labels, expected_rows(rows)[1], rtol=1e-5, atol=1e-6)
        assert (features.dtype, labels.dtype) == (torch.float32, torch.float32)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (41, "data.rows must be from 1 to 40, but got 41"),
        (0, "data.rows must be a positive integer, but got 0"),
        (2.5, "data.rows must be a positive integer, but got 2.5"),
        ("all", "data.rows must be a positive integer, but got 'all'"),
    ],
)
def test_other_rows_than_there_are(tmp_path, published, rows, message):
    keep(tmp_path)
    with pytest.raises(ConfigError) as caught:
        make_data(tmp_path, rows).setup()
    assert str(caught.value) == message


@pytest.mark.parametrize("batch_size", [1, 7, 30])
def test_batches_hold_whole_rows_each_once_an_epoch(tmp_path, published, batch_size):
    keep(tmp_path)
    features, labels = expected_rows(30)
    stream = iter(rebatch(make_data(tmp_path).train_dataloader(), batch_size, None, seed=1))
    batches = [next(stream) for _ in range(210 // batch_size)]
    assert {len(y) for _, y in batches} == {batch_size}
    x, y = (torch.cat(parts).numpy() for parts in zip(*batches, strict=True))
    found = np.array([np.argmin(np.abs(labels - value)) for value in y])
    np.testing.assert_allclose(x, features[found], rtol=1e-5, atol=1e-6)
    for epoch in found[: len(found) // 30 * 30].reshape(-1, 30):
        assert sorted(epoch) == list(range(30))


# The module


def make_module(lr=0.1):
    torch.manual_seed(0)
    return LinearRegression(5, 0.01, functools.partial(torch.optim.SGD), lr)


def test_first_weights():
    torch.manual_seed(0)
    module = LinearRegression(10_000, 0.01, torch.optim.SGD, 0.1)
    assert float(module.linear.weight.detach().std()) == pytest.approx(0.01, rel=0.05)
    assert float(module.linear.weight.detach().mean()) == pytest.approx(0.0, abs=5e-4)
    assert module.linear.bias.tolist() == [0.0]


def test_the_gradient_in_closed_form():
    """The gradient of |x w + b - y|^2 / (2 n) is x^T (x w + b - y) / n, and the mean residual for b."""
    module = make_module().double()
    x, y = RNG.normal(size=(9, 5)), RNG.normal(size=9)
    loss = module.training_step((torch.tensor(x), torch.tensor(y)), 0)
    loss.backward()
    w, b = module.linear.weight.detach().numpy()[0], module.linear.bias.detach().numpy()[0]
    residual = x @ w + b - y
    assert loss.item() == pytest.approx((residual**2).sum() / 18)
    np.testing.assert_allclose(module.linear.weight.grad.numpy()[0], x.T @ residual / 9, rtol=1e-12)
    np.testing.assert_allclose(module.linear.bias.grad.numpy(), [residual.mean()], rtol=1e-12)


# The published file


@pytest.fixture(scope="module")
def real():
    root = os.environ.get("BSTUNE_DATA", "")
    if not root or not (Path(root) / "airfoil").is_dir():
        pytest.skip(f"BSTUNE_DATA={root!r} is not a folder with airfoil/")
    return datasets.load_airfoil(root)


def test_the_published_rows(real):
    assert real.features.shape == (1503, 5)
    assert [*real.features[0], real.labels[0]] == [800.0, 0.0, 0.3048, 71.3, 0.00266337, 126.201]
    assert [*real.features[-1], real.labels[-1]] == [6300.0, 15.6, 0.1016, 39.6, 0.0528487, 104.204]


def test_what_the_configs_say_of_the_published_rows(real):
    """The least loss, the loss at the start, and the largest stable learning rate, 2 over the largest eigenvalue."""
    table = standardise(np.column_stack([real.features, real.labels]))[:1500]
    x, y = np.column_stack([table[:, :5], np.ones(1500)]), table[:, 5]
    w, *_ = np.linalg.lstsq(x, y, rcond=None)
    assert ((x @ w - y) ** 2).mean() / 2 == pytest.approx(0.2417, abs=5e-5)
    assert (y**2).mean() / 2 == pytest.approx(0.493, abs=5e-4)
    largest = np.linalg.eigvalsh(x.T @ x / 1500)[-1]
    assert largest == pytest.approx(2.098, abs=5e-4)
    assert 2.0 / largest == pytest.approx(0.95, abs=5e-3)
