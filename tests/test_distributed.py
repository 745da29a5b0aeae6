"""Trials on two devices, which are two processes here: the trial of one, and what one of them alone meets ends both."""

import multiprocessing
import re
from functools import partial

import pytest
import ranks
import torch
from builders import options_of, resolved
from toolbox import make_spec, trials_of
from torch.utils.data import DataLoader

import bstune
from bstune.core.errors import ConfigError
from bstune.core.records import TrialResult
from bstune.hardware.probe import TrialProbe
from bstune.options import with_option
from bstune.system.files import Output
from bstune.trial.devices import distributed
from bstune.trial.processes.workers import Workers

GUARD = 60  # seconds after which a trial whose processes wait for each other has failed


@pytest.fixture(autouse=True)
def _no_process_is_left(monkeypatch):
    monkeypatch.setattr("os.cpu_count", lambda: 2)  # wherever the tests run
    before = set(multiprocessing.active_children())
    yield
    assert set(multiprocessing.active_children()) == before


def on_two(open_train, *asked):
    """Yield the ends of trials on two devices, one after another; each is a spec, a folder and what it continues."""
    # One trial at a time, on two processes.
    with Workers(open_train, 1, GUARD, devices=2) as workers:
        for spec, folder, parent in asked:
            workers.start(spec, Output(folder), parent)
            yield workers.wait()


def weights(path):
    state = torch.load(path, weights_only=True)["state_dict"]
    return torch.cat([value.flatten() for value in state.values()])


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "micro_batch_size"), [("shipped", None), ("foreign", 5)])
def test_a_trial_on_two_devices_is_that_on_one(kind, micro_batch_size, tmp_path):
    (tmp_path / "two").mkdir()
    # An even batch, and one whose halves differ by an example.
    specs = [make_spec(size, number=size, max_steps=12) for size in (32, 33)]
    # On the same two processes, one after the other.
    asked = [(spec, tmp_path / "two", None) for spec in specs]
    for spec, finished in zip(
        specs, on_two(partial(ranks.open_train, kind, micro_batch_size), *asked), strict=True
    ):
        here = ranks.open_train(kind, micro_batch_size, devices=1)
        two, one = finished.result(), here(spec, Output(tmp_path), None)
        assert (
            (two.status, two.steps, two.examples)
            == (one.status, one.steps, one.examples)
            == ("stopped", 12, 12 * spec.batch_size)
        )
        assert [step for step, _ in two.history] == [step for step, _ in one.history]
        # Two sums of halves are rounded otherwise than one sum.
        assert [value for _, value in two.history] == pytest.approx(
            [value for _, value in one.history], rel=1e-5
        )
        found, expected = (
            weights(folder / f"{spec.number}.state") for folder in (tmp_path / "two", tmp_path)
        )
        assert torch.allclose(found, expected, rtol=1e-4, atol=1e-6)
        assert two.device == "2 x cpu (1 thread)"


# What one device alone meets, and what then comes of the trial.
FAULTS = {
    "memory": ("out of memory", "CUDA out of memory. Tried to allocate 2.00 GiB"),
    "error": ("failed", r"LookupError: no such thing \(ranks.py:\d+\)"),
    "death": ("failed", "its process ended with status 7"),
    "loss": ("diverged", r"the training loss is nan at step \d+"),
    "metric": ("diverged", r"val/loss is not finite at step \d+"),
    "stop": ("stopped", r"the training was stopped at step \d+: by the module or a call-back"),
    "reached by the first": ("reached", ""),
    "reached by the second": ("stopped", ""),
}


@pytest.mark.slow
def test_what_one_device_alone_meets_ends_the_trial_on_both(tmp_path):
    """One trial after another: each has two processes again, whatever the one before met."""
    kinds = (*FAULTS, "foreign")
    asked = []
    for number in range(len(kinds)):
        asked.append((make_spec(9, number=number, max_steps=12), tmp_path, None))
    # No trained loss is 0 or less, but where a kind says so.
    ends = on_two(partial(ranks.open_train, kinds, lowest=0.0), *asked)
    for number, (kind, finished) in enumerate(zip(kinds, ends, strict=True)):
        found = finished.result()
        status, message = FAULTS.get(kind, ("stopped", ""))
        assert (kind, found.status) == (kind, status)
        assert re.fullmatch(message, found.message or ""), kind
        assert (tmp_path / f"{number}.ckpt").exists() == (status == "reached"), kind
        if kind == "stop":
            # It asks at the third step, and the next evaluation ends the trial.
            assert found.steps == next(step for step, _ in found.history if step > 2)
        if kind == "error":
            assert "ranks.py" in finished.frames
    assert found.steps == 12
    assert not list(tmp_path.glob("*.partial"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (
            "unused",
            r"some parameters take no part in the loss, .*\(requires_grad=False\), or set devices=1",
        ),
        (
            "manual",
            r"Foreign steps its optimizers itself \(manual .* cannot be split over devices: set devices=1",
        ),
        (
            "whole batches",
            "the batches of generator are not split over devices: take them from TrainBatches or",
        ),
    ],
)
def test_what_does_not_go_with_several_devices_says_so(kind, message, tmp_path):
    (finished,) = on_two(
        partial(ranks.open_train, kind), (make_spec(9, max_steps=12), tmp_path, None)
    )
    with pytest.raises(ConfigError, match=message):
        finished.result()


def test_no_trial_runs_on_other_devices_than_it_says(tmp_path):
    with pytest.raises(
        ConfigError, match="devices=2, but here 1 would train the trial: use devices=1"
    ):
        ranks.open_train("shipped")(make_spec(8, max_steps=2), Output(tmp_path), None)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("devices=0", "devices must be at least 1, but got 0"),
        ("devices=1000", "devices=1000 but there are "),
        ("device=cuda devices=2", "device=cuda, but torch sees 0 CUDA devices"),
        (
            "devices=2 search.batch_size.low=1",
            "some without an example: set search.batch_size.low to at least 2",
        ),
        (
            "devices=2 trial.batch_size=1 trial.lr=0.1",
            "leaves some without an example: set trial.batch_size to at",
        ),
        (
            "devices=2 search.workers=2 hardware.enabled=true",
            "in processes of its own: set search.workers=1",
        ),
        ("devices=2 search.workers=0", "in processes of its own: set search.workers=1"),
        ("devices=2 compile=default", "does not go with compile=default"),
        ("devices=2 protocol.micro_batch_size=1", "set protocol.micro_batch_size to 2 or more"),
        (
            "devices=2 +workload.trainer.strategy=ddp",
            "trainer.strategy is bstune's own: devices=N trains with",
        ),
    ],
)
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_bad_input_ends_in_a_line(bstune, tmp_path, arguments, message):
    status, _, err = bstune(
        "workload=digits", "device=cpu", "mlflow.enabled=false", *arguments.split()
    )
    assert status == 2
    assert message in " ".join(err.split())
    # Nothing was begun.
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("device", "first"), [("cuda", 0), ("cuda:2", 2)])
def test_each_process_has_its_own_cuda_device_and_the_trainer_has_all(monkeypatch, device, first):
    """As far as a machine without CUDA shows it."""
    digits = options_of("workload=digits", "device=cpu")
    on_cuda = with_option(digits, "device", device)
    assert distributed.options_of_process(on_cuda).device == device
    alone = {"accelerator": "cuda", "devices": [first]}
    assert distributed.trainer_options(alone, str) == alone
    # As if three devices shared a trial.
    for rank in range(3):
        monkeypatch.setattr(distributed, "_place", distributed.Place(rank, 3))
        assert distributed.options_of_process(on_cuda).device == f"cuda:{first + rank}"
        assert distributed.options_of_process(digits).device == "cpu"
        own = distributed.trainer_options(
            {"accelerator": "cuda", "devices": [first + rank]}, lambda: "ddp"
        )
        assert (own["devices"], own["strategy"]) == ([first, first + 1, first + 2], "ddp")
        assert not own["use_distributed_sampler"]


@pytest.mark.slow
def test_a_device_that_stops_alone_ends_the_trial(tmp_path, monkeypatch):
    monkeypatch.setattr("bstune.trial.processes.team.APART_SECONDS", 1)
    (finished,) = on_two(
        partial(ranks.open_train, "epoch"), (make_spec(30, max_steps=12), tmp_path, None)
    )
    found = finished.result()
    assert (found.status, found.message) == (
        "failed",
        "did not end with the others, 1 s before: one stops where another trains on",
    )


@pytest.mark.soak
def test_a_device_that_never_answers_is_given_up(tmp_path):
    with Workers(partial(ranks.open_train, "hang"), 1, 10, devices=2) as workers:
        workers.start(make_spec(8, max_steps=12), Output(tmp_path), None)
        assert workers.wait().result().message == "took longer than protocol.trial_seconds=10"


@pytest.mark.slow
def test_a_trial_goes_on_where_it_was_stopped_bit_for_bit(tmp_path):
    """Its data set draws random numbers, which are others on each device."""
    (tmp_path / "whole").mkdir()
    half, whole = make_spec(9, number=1, max_steps=6), make_spec(9, number=3, max_steps=12)
    with Workers(partial(ranks.open_train, "noisy"), 1, GUARD, devices=2) as workers:
        workers.start(whole, Output(tmp_path / "whole"), None)
        expected = workers.wait().result()
        workers.start(half, Output(tmp_path), None)
        stopped = workers.wait().result()
        workers.start(
            make_spec(9, number=3, max_steps=12, resumed_from=1), Output(tmp_path), stopped
        )
        found = workers.wait().result()
    # Evaluations after the six steps that it did not take itself.
    later = [pair for pair in found.history if pair[0] > 6]
    assert later == [pair for pair in expected.history if pair[0] > 6]
    assert torch.equal(weights(tmp_path / "3.state"), weights(tmp_path / "whole" / "3.state"))


@pytest.mark.soak  # the trials are those above, the command that of the study below
def test_a_shipped_workload_by_the_command(bstune, tmp_path):
    arguments = (
        "workload=digits",
        "trial.batch_size=33",
        "trial.lr=0.3",
        "device=cpu",
        "workload.target.value=0.5",
    )
    found = []
    # 33 examples: halves of 17 and 16, and those in micro-batches.
    for devices, micro_batch_size in ((1, "null"), (2, "null"), (2, "6")):
        folder = tmp_path / f"{devices}-{micro_batch_size}"
        options = (
            f"devices={devices}",
            f"protocol.micro_batch_size={micro_batch_size}",
            f"output={folder}",
        )
        status, _, err = bstune(*arguments, *options)
        assert (status, err) == (0, "")
        trial = folder / "trial-B33-lr0.3-seed0"
        record = TrialResult.from_json((trial / "trial.json").read_text())
        found.append((record, weights(trial / "checkpoints" / "trial-0.ckpt")))
    one, one_weights = found[0]
    for two, two_weights in found[1:]:
        assert (two.status, two.steps) == (one.status, one.steps) == ("reached", two.steps)
        assert [step for step, _ in two.history] == [step for step, _ in one.history]
        assert [value for _, value in two.history] == pytest.approx(
            [value for _, value in one.history], rel=1e-5
        )
        assert (one_weights - two_weights).abs().max().item() < 1e-5
        assert two.device == "2 x cpu (1 thread)"


@pytest.mark.soak
def test_a_study_on_two_devices(bstune, tmp_path):
    """It is surveyed, and continues trials that it stopped."""
    arguments = (
        "workload=digits",
        "mlflow.enabled=false",
        "device=cpu",
        "devices=2",
        "hardware.seconds=1",
    )
    arguments += (
        "search.batch_size.low=32",
        "search.batch_size.high=512",
        "workload.target.value=1.0",
    )
    arguments += (
        "budget={steps: 60, examples: 6000}",
        "search.trials=6",
        "search.replicates=1",
        "search.objective=steps",
    )
    status, out, err = bstune(*arguments)
    assert (status, err) == (0, "")
    text = " ".join(out.split())
    assert "on 2 x cpu (1 thread) in 32-true" in text
    assert "2 devices: a probe trains the share of one, ceil(B/2), in 1/2 of the memory" in text
    assert "no roofline: it is one device's, and 2 share the steps" in text
    assert "all evaluate all validation data; the noise scale is not measured" in text
    assert "No plan for further devices" in text
    trials = trials_of(tmp_path / "outputs" / "digits")
    assert {trial.device for trial in trials} == {"2 x cpu (1 thread)"}
    assert len({trial.number for trial in trials}) == len(trials) >= 6
    assert all(not trial.noise_scale for trial in trials)
    # Seconds of one device do not go with those of two.
    status, _, err = bstune(*arguments, "devices=1")
    assert status == 2
    assert "device" in err


@pytest.mark.slow
def test_python_objects_on_two_devices(tmp_path, monkeypatch):
    """Without a survey; the loaders know nothing of devices either."""
    monkeypatch.chdir(tmp_path)
    loaders = [
        DataLoader(ranks.Noisy(600, 0), batch_size=8, shuffle=True),
        DataLoader(ranks.FOREIGN[1], batch_size=20),
    ]
    result = bstune.tune(
        lambda trial: ranks.Foreign(trial),
        loaders,
        target=bstune.Target("val/loss", 0.9, "min"),
        batch_sizes=(8, 128),
        reference=(32, 0.01),
        budget=bstune.Budget(50, 5000),
        objective="steps",
        trials=3,
        survey=False,
        mlflow=False,
        options=["devices=2", "search.replicates=0", "device=cpu"],
    )
    assert set(result.trials_table(columns="all")["device"]) == {"2 x cpu (1 thread)"}
    assert not set(result.trials["status"]) & {"failed", "out of memory"}


@pytest.mark.slow
@pytest.mark.parametrize(("devices", "outcomes"), [(1, ["error"]), (2, ["fits", "error"])])
def test_a_probe_trains_the_share_of_one_device(devices, outcomes):
    options, recipe = resolved(
        "workload=digits",
        "workload.module._target_=ranks.Limited",
        "device=cpu",
        f"devices={devices}",
    )
    probe = TrialProbe(options, recipe, 2**34, steps=2, seconds=GUARD)
    # The module takes 17 examples: ceil(34/2) = 17, ceil(35/2) = 18.
    found = [probe(batch_size) for batch_size in (34, 35)[: len(outcomes)]]
    assert [one.outcome for one in found] == outcomes
    assert [one.batch_size for one in found] == [34, 35][: len(outcomes)]
