"""The sweep alignment: what is padded and how, on a clock of the tests' own, and once with real layers."""

import dataclasses
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console
from torch import nn
from unit_logs import StoppedError, log_at, stopping_after, units_in, unkept

from bstune.core.errors import ConfigError
from bstune.hardware.roofline import TensorCoreMisalignment
from bstune.report.drawing import save_figure
from bstune.sweeps import alignment
from bstune.sweeps.alignment import input_shapes, layer_like, padded_shape, row_of, sentence
from bstune.sweeps.harness import check_sweep, compose_sweep

# Of a sweep: a change elsewhere seldom breaks it, and CI runs it.
pytestmark = pytest.mark.slow

ROW = TensorCoreMisalignment("0", "Linear", "in_features", 12, 16, None)


@pytest.mark.parametrize(
    ("module", "dimension", "padded", "shape", "expected"),
    [
        (nn.Linear(15, 3), "in_features", 16, (5, 7, 15), (5, 7, 16)),
        (nn.Linear(15, 3, bias=False), "out_features", 8, (5, 15), (5, 15)),
        (nn.Conv2d(6, 4, 3, padding=1, groups=2), "in_channels", 8, (5, 6, 9, 9), (5, 16, 9, 9)),
        (nn.Conv1d(3, 8, 3), "in_channels", 8, (5, 3, 9), (5, 8, 9)),
        (nn.Linear(8, 8), "batch", 8, (5, 8), (8, 8)),
        (nn.Linear(8, 8), "batch", 6, (5, 4, 8), (6, 4, 8)),
    ],
)
def test_a_layer_and_its_input_are_padded_where_they_miss_the_multiple(
    module, dimension, padded, shape, expected
):
    # A convolution's weight has the channels of one group.
    size = {"batch": 5, "in_channels": shape[1] // getattr(module, "groups", 1)}.get(dimension)
    size = size or getattr(module, dimension)
    row = TensorCoreMisalignment("0", "", dimension, size, padded, None)
    like = layer_like(module, {dimension: padded})
    assert padded_shape(row, shape) == expected
    assert (type(like), like.bias is None) == (type(module), module.bias is None)
    before, after = module(torch.ones(shape)), like(torch.ones(expected))
    # Features come last, channels after the batch.
    out = -1 if isinstance(module, nn.Linear) else 1
    assert after.shape[out] == (padded if dimension == "out_features" else before.shape[out])
    assert after.shape[2:] == before.shape[2:] or out == -1


def test_input_shapes_are_those_of_the_batch_asked_for():
    network = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(2 * 6 * 6, 4))

    def loss(module, batch):
        return module(batch).sum()

    # 4.5 times two examples are nine.
    shapes = input_shapes(network, torch.ones(2, 1, 8, 8), loss, 4.5)
    assert shapes == {"0": (9, 1, 8, 8), "1": (9, 2, 6, 6), "2": (9, 72)}
    assert layer_like(nn.Flatten(), {}) is None


def test_both_are_timed_in_turns(monkeypatch):
    """The one that is as it was takes 0.5 s a call and the padded one 0.2 s."""
    called = []

    class Timer:
        def __init__(self, call, timer, globals, num_threads):  # noqa: A002 (as torch names it)
            self.is_padded = globals["x"].shape[-1] == 16

        def blocked_autorange(self, min_run_time):
            called.append((self.is_padded, min_run_time))
            return SimpleNamespace(median=0.2 if self.is_padded else 0.5)

    monkeypatch.setattr(alignment, "Timer", Timer)
    cpu = torch.device("cpu")
    times = alignment.padding_times(nn.Linear(12, 8), ROW, (4, 12), cpu, "fp32", 3, 0.1, None)
    assert times == [(0.5, 0.2)] * 3
    # Which comes first alternates, so that a drift of the machine cancels out.
    assert called == [(padded, 0.1) for padded in (False, True, True, False, False, True)]


def test_the_gain_is_that_of_throughput():
    """Of a padded batch more examples count."""
    times = [(0.5, 0.2), (0.4, 0.2), (0.3, 0.2)]
    row = row_of(ROW, times)
    # Of gains 2.5, 2 and 1.5: the median and the quartiles.
    assert (row["gain"], row["gain_low"], row["gain_high"]) == pytest.approx((2.0, 1.75, 2.25))
    assert (row["seconds"], row["rounds"]) == (0.4, 3)
    batch = row_of(dataclasses.replace(ROW, dimension="batch"), times)
    assert batch["gain"] == pytest.approx(2.0 * 16 / 12)


def test_the_sentence_is_computed():
    rows = [
        row_of(ROW, [(0.5, 0.2)]),
        row_of(dataclasses.replace(ROW, name="1", dimension="out_features"), [(0.2, 0.4)]),
    ]
    assert sentence(rows, 1) == (
        "Padding makes 1 of 2 dimensions faster by the lower quartile; 0 gains most, 2.5 times its "
        "throughput with in_features 16 for 12 (medians, n = 1)."
    )
    assert "nothing to time" in sentence([], 1)


def found(*options, log=None):
    options = ("workload=digits", "device=cpu", *options)
    checked = check_sweep("alignment", compose_sweep("alignment", options))
    return checked.find(Console(quiet=True), log=log or unkept())


def test_a_sweep_that_is_stopped_goes_on(tmp_path, monkeypatch):
    path = tmp_path / "runs.jsonl"

    def timed(layer, row, *rest):
        return [(0.5, 0.5 * row.size / row.padded), (0.4, 0.1)]

    monkeypatch.setattr(alignment, "padding_times", timed)
    size = "sweep.experiment.batch_size=12"
    whole = found(size)
    assert len(whole.rows) > 2
    for _ in range(2):
        with monkeypatch.context() as patched:
            patched.setattr(alignment, "padding_times", stopping_after(1, timed))
            with pytest.raises(StoppedError):
                found(size, log=log_at(path))
    assert len(units_in(path)) == 2
    assert found(size, log=log_at(path)).rows == whole.rows
    # All is in the log: nothing is timed again.
    monkeypatch.setattr(alignment, "padding_times", None)
    assert found(size, log=log_at(path)).rows == whole.rows
    names = [f"{row['layer']}/{row['dimension']}" for row in whole.rows]
    assert units_in(path) == names
    with pytest.raises(ConfigError, match=f"names none, .*units: {'; '.join(names)}"):
        found(size, "sweep.experiment.only=[none]")


@pytest.mark.usefixtures("rendered")
def test_real_layers_of_a_workload_are_timed(tmp_path):
    quick = ("sweep.experiment.rounds=2", "sweep.experiment.seconds=1e-3")
    finding = found(*quick, "sweep.experiment.batch_size=12")
    assert {row["dimension"] for row in finding.rows} >= {"batch", "out_features"}
    assert all(0.01 < row["gain"] < 100.0 for row in finding.rows)
    assert (finding.n, finding.details["multiple"]) == (2, 8)
    save_figure(finding.paint, finding.inches, tmp_path / "figure.png")
    # Every size is a multiple of 1.
    aligned = found(*quick, "sweep.experiment.multiple=1")
    assert aligned.rows == []
    save_figure(aligned.paint, aligned.inches, tmp_path / "empty.png")


def test_what_cannot_be_measured_is_refused():
    with pytest.raises(
        ConfigError, match=r"fp32 on cpu does not run on tensor cores, .*multiple=8"
    ):
        found("sweep.experiment.multiple=null")
    with pytest.raises(ConfigError, match="rounds must be positive, but got 0"):
        found("sweep.experiment.rounds=0")
