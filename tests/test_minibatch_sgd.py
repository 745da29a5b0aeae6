"""The sweep minibatch_sgd: its trials against gradient descent in numpy, its rows and its sentence."""

import hashlib
from dataclasses import replace
from itertools import islice

import numpy as np
import pytest
import torch
from rich.console import Console
from toolbox import data_root, make_result
from unit_logs import StoppedError, log_at, stopping_after, units_in, unkept

from bstune.core.errors import ConfigError, DataError
from bstune.core.records import TrialSpec
from bstune.sweeps import minibatch_sgd
from bstune.sweeps.harness import check_sweep, compose_sweep, write
from bstune.sweeps.minibatch_sgd import Series, row, row_by_row, sentence
from bstune.trial.workload import load_workload
from bstune.workloads import datasets
from bstune.workloads.airfoil import LinearRegression

# Of a sweep: a change elsewhere seldom breaks it, and CI runs it.
pytestmark = pytest.mark.slow

TABLE = np.random.RandomState(0).normal(size=(40, 6)) @ np.random.RandomState(1).normal(size=(6, 6))
RUNS = (
    "sweep.experiment.runs=[{name: whole, batch_size: 30, lr: 0.3, epochs: 8}, {name: one, batch_size: 1, lr: 0.02, "
    "epochs: 2}, {name: seven, batch_size: 7, lr: 0.1, epochs: 2.5}]"
)


@pytest.fixture
def root(tmp_path, monkeypatch):
    """Return a folder that holds a small table, made the published one."""
    file = tmp_path / "airfoil" / "airfoil_self_noise.dat"
    file.parent.mkdir()
    np.savetxt(file, TABLE, delimiter="\t", fmt="%.17g")
    checksum = {file.name: hashlib.sha256(file.read_bytes()).hexdigest()}
    monkeypatch.setattr(datasets, "AIRFOIL", replace(datasets.AIRFOIL, sha256=checksum, mirrors=()))
    return tmp_path


def checked(root, *options):
    own = (
        f"data.root={root}",
        "workload.data.rows=30",
        "device=cpu",
        "sweep.experiment.seeds=[3,4]",
        RUNS,
    )
    return check_sweep(
        "minibatch_sgd",
        compose_sweep("minibatch_sgd", (*own, f"sweep.output={root}/out", *options)),
    )


def seconds(workload, protocol, batch_size, lr, steps):
    """Return the seconds of steps that take longer where each row is taken out alone."""
    one_by_one = (
        type(workload.train_batches(TrialSpec(0, 0, batch_size, lr, None, 0)).dataset).__name__
        == "TensorDataset"
    )
    return (1e-3 + (1e-5 * batch_size if one_by_one else 0.0),) * steps


def run(sweep, timer=seconds, log=None):
    return sweep.find(Console(quiet=True), timer=timer, log=log or unkept())


def trained(workload, spec, protocol):
    """Return a trial of a made law, without training."""
    steps = protocol.budget.steps
    history = tuple((step, 1.0 / step + 1e-3 * spec.seed) for step in range(1, steps + 1))
    return make_result(
        batch_size=spec.batch_size, lr=spec.lr, seed=spec.seed, status="stopped", history=history
    )


def test_a_sweep_that_is_stopped_goes_on(root, tmp_path, monkeypatch):
    """Of six trials and two rounds of six timings it is stopped in a trial, and in a round."""
    path = tmp_path / "runs.jsonl"
    sweep = checked(root, "sweep.experiment.loader.rounds=2")
    monkeypatch.setattr(minibatch_sgd, "run_trial", trained)
    whole = run(sweep)
    with monkeypatch.context() as patched:
        patched.setattr(minibatch_sgd, "run_trial", stopping_after(2, trained))
        with pytest.raises(StoppedError):
            run(sweep, log=log_at(path))
    assert len(units_in(path)) == 2
    with monkeypatch.context() as patched:
        patched.setattr(minibatch_sgd, "run_trial", stopping_after(4, trained))
        with pytest.raises(StoppedError):
            # The other four trials, a round of six timings, and two of the second round.
            run(sweep, stopping_after(8, seconds), log_at(path))
    units = units_in(path)
    assert len(set(units)) == len(units) == 7
    assert units[-1] == "loader/1"
    monkeypatch.setattr(minibatch_sgd, "run_trial", None)
    # The second round begins anew.
    finding = run(sweep, stopping_after(6, seconds), log_at(path))
    assert (finding.sentence, finding.rows) == (whole.sentence, whole.rows)
    assert run(sweep, None, log_at(path)).rows == whole.rows
    with pytest.raises(ConfigError, match=r"only names nine/3, .*units: .*; loader/1; loader/2$"):
        run(checked(root, "sweep.experiment.loader.rounds=2", "sweep.experiment.only=[nine/3]"))


def descend(x, y, seed, lr, steps):
    """Return the losses of full-batch gradient descent from the seed's first weights, in numpy."""
    torch.manual_seed(seed)
    first = LinearRegression(x.shape[1], 0.01, torch.optim.SGD, lr).linear
    w, b = first.weight.detach().numpy()[0].astype(np.float64), float(first.bias.detach())
    losses = []
    for _ in range(steps):
        residual = x @ w + b - y
        w, b = w - lr * x.T @ residual / len(y), b - lr * residual.mean()
        losses.append(((x @ w + b - y) ** 2).mean() / 2)
    return losses


def test_each_trial_runs_through_its_epochs_and_full_batches_descend_as_in_numpy(root):
    sweep = checked(root)
    finding = run(sweep)
    table = ((TABLE - TABLE.mean(axis=0)) / TABLE.std(axis=0))[:30]
    assert [one["run"] for one in finding.rows] == ["whole", "one", "seven"]
    # 2.5 epochs of 30 are 75 examples.
    for one, steps in zip(finding.rows, (8, 60, 11), strict=True):
        assert one["curve"]["steps"][-1] == steps
        assert [(trial["seed"], trial["status"]) for trial in one["trials"]] == [
            (3, "stopped"),
            (4, "stopped"),
        ]
        tau = float(np.median([trial["seconds_per_step"] for trial in one["trials"]]))
        assert one["ms_per_step"] == pytest.approx(1e3 * tau)
        np.testing.assert_allclose(one["curve"]["seconds"], np.array(one["curve"]["steps"]) * tau)
    for trial in finding.rows[0]["trials"]:
        steps, losses = zip(*trial["history"], strict=True)
        assert steps == tuple(range(1, 9))
        np.testing.assert_allclose(
            losses, descend(table[:, :5], table[:, 5], trial["seed"], 0.3, 8), rtol=2e-5
        )
    sweep.output.mkdir(parents=True, exist_ok=True)
    write(sweep, finding, ())


def test_a_run_that_diverges_is_drawn_and_named(root):
    sweep = checked(
        root, "sweep.experiment.runs=[{name: wild, batch_size: 30, lr: 50, epochs: 40}]"
    )
    finding = run(sweep)
    assert {trial["status"] for trial in finding.rows[0]["trials"]} == {"diverged"}
    assert finding.rows[0]["steps_to_level"] is None
    assert finding.sentence.startswith(
        "No run reaches a loss of 0.25 in its epochs (medians, n = 2 seeds). With a "
    )
    sweep.output.mkdir(parents=True, exist_ok=True)
    write(sweep, finding, ())


def test_rows_that_come_one_by_one_are_the_same_rows_and_what_they_cost_is_said(root):
    sweep = checked(root, "sweep.experiment.loader.rounds=2")
    batches = []
    for composed in (sweep.composed, row_by_row(sweep.composed)):
        workload, _ = load_workload(composed.options, composed.trained_recipe)
        batches.append(list(islice(workload.train_batches(TrialSpec(0, 0, 7, 0.1, None, 3)), 3)))
    for before, after in zip(*batches, strict=True):
        assert all(torch.equal(*pair) for pair in zip(before, after, strict=True))
    finding = run(checked(root))
    assert [(row["ms_resident"], row["ms_row_by_row"]) for row in finding.rows] == [
        pytest.approx((1.0, 1.0 + size / 100)) for size in (30, 1, 7)
    ]
    text = (
        "1.01 times as long at 1, 1.07 times as long at 7, "
        "1.3 times as long at 30 as with rows that live on the device"
    )
    assert text in finding.sentence


def row_of(*histories, taus=(0.1, 0.1, 0.1), level=0.25):
    trials = [
        make_result(seed=seed, seconds_per_step=taus[seed], history=history, status="stopped")
        for seed, history in enumerate(histories)
    ]
    return row(Series("x", 5, 0.1, 2.0), trials, level)


def test_medians_over_the_seeds():
    histories = (
        [(1, 0.5), (2, 0.3), (3, 0.2)],
        [(1, 0.4), (2, 0.2), (3, 0.1)],
        [(1, 0.9), (2, 0.4), (3, 0.3)],
    )
    found = row_of(*histories, taus=[0.1, 0.2, 0.4])
    # The median rate, and three steps of 0.2 s.
    assert (found["ms_per_step"], found["seconds_to_level"]) == pytest.approx((200.0, 0.6))
    # Of 3, 2 and never.
    assert found["steps_to_level"] == 3
    assert (found["last_loss"], found["curve"]["loss"]) == (0.2, [0.5, 0.3, 0.2])
    # Quartiles of three values.
    assert found["curve"]["loss_low"] == pytest.approx([0.45, 0.25, 0.15])
    assert found["curve"]["loss_high"] == pytest.approx([0.7, 0.35, 0.25])
    # A trial without a step has no time of one.
    found = row_of([], taus=[None])
    assert (found["seconds_to_level"], found["last_loss"], found["curve"]["steps"]) == (
        None,
        None,
        [],
    )


@pytest.mark.parametrize(
    ("histories", "steps"),
    [
        # A value at the level counts.
        ([[(1, 0.5), (4, 0.25)]], 4),
        ([[(1, 0.5), (4, 0.26)]], None),
        # The first time counts, whatever comes after.
        ([[(1, 0.2), (4, 0.5)]], 1),
        ([[(1, 0.2)], [(1, 0.3)], [(1, 0.3)]], None),
        ([[(1, None), (2, 0.1)]], 2),
    ],
)
def test_steps_to_the_level(histories, steps):
    assert row_of(*histories)["steps_to_level"] == steps


@pytest.mark.parametrize(
    ("steps", "n", "text"),
    [
        (
            (100, 4, None),
            5,
            "; a takes 25 times as long (100 steps of 5 ms); c never reaches it (medians, n = 5 seeds).",
        ),
        ((None, 4, None), 1, "; a and c never reach it (medians, n = 1 seed)."),
    ],
)
def test_the_sentence_is_computed(steps, n, text):
    rows = [
        {
            "run": name,
            "steps_to_level": one,
            "seconds_to_level": one and one * 5e-3,
            "ms_per_step": 5.0,
        }
        for name, one in zip("abc", steps, strict=True)
    ]
    assert (
        sentence(rows, 0.25, n)
        == f"B reaches a loss of 0.25 first, in 20.0 ms (4 steps of 5 ms){text}"
    )


@pytest.mark.parametrize(
    ("option", "message"),
    [
        (
            "sweep.experiment.runs=[]",
            "this sweep needs runs, and seeds from 0, each once, but got 0 runs and seeds [3, 4]",
        ),
        ("sweep.experiment.seeds=[-1]", "but got 3 runs and seeds [-1]"),
        ("sweep.experiment.seeds=[3,3]", "each once, but got 3 runs and seeds [3, 3]"),
        ("sweep.experiment.runs.0.name=one", "a name of its own, but got one, one, seven"),
        (
            "sweep.experiment.runs.0.batch_size=31",
            "a run needs a batch size from 1 to 30, and a positive lr",
        ),
        (
            "sweep.experiment.runs.0.epochs=nan",
            "a positive lr and epochs, but got Series(name='whole'",
        ),
        (
            "sweep.experiment.metric=val/nope",
            "the target's metric is 'val/nope', but the module logs val/loss",
        ),
        (
            "sweep.experiment.loader.steps=0",
            "sweep.experiment.loader needs rounds and steps from 1, but got Loader",
        ),
        ("device=tpu", "device must be auto, cpu, cuda or cuda:N, but got 'tpu'"),
    ],
)
def test_bad_parameters_are_named(root, option, message):
    with pytest.raises(ConfigError) as caught:
        run(checked(root, option))
    assert message in str(caught.value)


def test_missing_data_are_named(root):
    (root / "airfoil" / "airfoil_self_noise.dat").unlink()
    with pytest.raises(DataError, match=r"airfoil_self_noise\.dat missing"):
        run(checked(root))
    assert not (root / "out").exists()


def test_the_figures_of_the_book_on_the_published_rows():
    """Gradient descent at the book's learning rate stalls after about six steps; d2l prints 0.247 at its end."""
    options = ("device=cpu", f"data.root={data_root('airfoil')}", "sweep.experiment.seeds=[0,1,2]")
    config = compose_sweep("minibatch_sgd", options)
    config.sweep.experiment.runs = [
        run for run in config.sweep.experiment.runs if run.batch_size == 1500
    ]
    (found,) = run(check_sweep("minibatch_sgd", config)).rows
    losses = found["curve"]["loss"]
    assert found["curve"]["steps"] == list(range(1, 11))
    assert 4 <= int(np.argmin(losses)) + 1 <= 8
    assert 0.242 < min(losses) < losses[-1] < 0.25
