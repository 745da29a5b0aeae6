"""Training up to a trial's own limit, and on from where it was stopped."""

import logging
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from omegaconf import OmegaConf

from bstune.core.errors import ConfigError
from bstune.core.files import Output
from bstune.core.records import TrialSpec
from bstune.study.prepare import compose_checked, open_trials, prepare
from bstune.trial.workload import resolve, resolve_precision

DIGITS = ("+workload=digits", "mlflow.enabled=false", "hardware.enabled=false", "budget.steps=40", "budget.examples=1")
SPEC = TrialSpec(0, 0, 64, 0.4, 0.0, 7)


@pytest.fixture
def output(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    output = Output(tmp_path / "study")
    output.checkpoints.mkdir(parents=True)
    return output


@pytest.fixture
def train(output):
    return prepare(compose_checked(DIGITS)).backend.run


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("*"))


def test_without_a_limit_the_budget_ends_a_trial_and_no_state_is_left(train, output):
    result = train(SPEC, output, None)
    assert (result.status, result.steps) == ("censored", 40)
    assert not output.states.exists()


@pytest.mark.parametrize("limit", [10, 60])
def test_a_limit_takes_the_place_of_the_budget(train, output, limit):
    """A larger one too: the budget is a first guess."""
    result = train(replace(SPEC, max_steps=limit), output, None)
    assert (result.status, result.steps) == ("censored", limit)
    assert files(output.states) == ["trial-0.ckpt"]


def test_a_trial_that_ends_otherwise_leaves_no_state(train, output, monkeypatch):
    assert train(replace(SPEC, max_steps=30, lr=1e6), output, None).status == "diverged"
    easy = prepare(compose_checked([*DIGITS, "workload.target.value=1.0"])).backend.run
    assert easy(replace(SPEC, max_steps=500), output, None).status == "reached"
    assert files(output.states) == []
    assert files(output.checkpoints) == ["trial-0.ckpt"]


def test_stopped_and_continued_is_the_same_training(train, output):
    whole = train(SPEC, output, None)
    first = train(replace(SPEC, max_steps=11), output, None)
    second = train(replace(SPEC, number=1, trial_index=1, max_steps=25, resumed_from=0), output, first)
    third = train(replace(SPEC, number=2, trial_index=2, max_steps=40, resumed_from=1), output, second)
    assert (third.number, third.trial_index, third.resumed_from, third.steps) == (2, 2, 1, 40)
    assert set(third.history) >= set(whole.history)
    assert third.history[-1] == whole.history[-1]
    assert files(output.states) == ["trial-0.ckpt", "trial-1.ckpt", "trial-2.ckpt"]


def deleted(state: Path) -> None:
    state.unlink()


def damaged(state: Path) -> None:
    content = bytearray(state.read_bytes())
    content[len(content) // 2] ^= 0xFF
    state.write_bytes(bytes(content))


def emptied(state: Path) -> None:
    state.write_bytes(b"")


@pytest.mark.parametrize("spoil", [deleted, damaged, emptied])
def test_a_parent_whose_state_is_no_use_is_trained_again_from_the_start(train, output, caplog, spoil):
    first = train(replace(SPEC, max_steps=11), output, None)
    spoil(output.state(0))
    with caplog.at_level(logging.WARNING, "bstune"):
        result = train(replace(SPEC, number=1, max_steps=25, resumed_from=0), output, first)
    (warning,) = [record.getMessage() for record in caplog.records if record.name == "bstune.trial.workload"]
    assert warning.startswith("the state of trial 0 at ")
    assert warning.endswith("; it starts afresh")
    assert (result.number, result.resumed_from, result.status, result.steps) == (1, None, "censored", 25)
    assert replace(SPEC, number=1) == TrialSpec(1, 0, result.batch_size, result.lr, result.delta, result.seed)
    assert files(output.states) == ["trial-1.ckpt"], "the spoilt one would be tried again and again"
    assert result.history == train(replace(SPEC, number=5, max_steps=25), output, None).history
    third = train(replace(SPEC, number=2, max_steps=30, resumed_from=1), output, result)
    assert (third.resumed_from, third.steps) == (1, 30)


def test_a_state_can_be_continued_while_it_is_there(train, output):
    runner = prepare(compose_checked(DIGITS)).backend
    assert runner.stops
    assert not runner.resumable(0, output)
    train(replace(SPEC, max_steps=5), output, None)
    assert runner.resumable(0, output)
    output.keep_states(set())
    assert not runner.resumable(0, output)


def test_a_schedule_with_a_horizon_stops_no_trial(output):
    horizon = "workload.module.schedule.warmup_examples=${trial.total_steps}"
    assert not prepare(compose_checked([*DIGITS, horizon])).backend.stops


@pytest.mark.parametrize(
    ("precision", "device", "has_bfloat16", "found"),
    [
        ("auto", "cpu", True, "32-true"),
        ("auto", "cuda", True, "bf16-mixed"),
        ("auto", "cuda", False, "32-true"),
        ("bf16-true", "cpu", False, "bf16-true"),
        ("bf16-true", "cuda:1", True, "bf16-true"),
        ("16-true", "cuda", False, "16-true"),
        ("16-mixed", "cuda", False, "16-mixed"),
        ("bf16-true", "cuda", False, "precision=bf16-true: GTX has no bfloat16: use 16-true or 32-true"),
        ("bf16-mixed", "cuda", False, "precision=bf16-mixed: GTX has no bfloat16: use 16-mixed or 32-true"),
        ("16-true", "cpu", True, "precision=16-true needs a CUDA device, but this is cpu: use bf16-true or 32-true"),
        (
            "64-true",
            "cpu",
            True,
            "precision must be one of auto, 32-true, bf16-mixed, 16-mixed, bf16-true, 16-true, but",
        ),
    ],
)
def test_a_precision_that_the_device_does_not_have_is_refused(monkeypatch, precision, device, has_bfloat16, found):
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: has_bfloat16)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "GTX")
    if " " in found:
        with pytest.raises(ConfigError, match=found):
            resolve_precision(precision, device)
    else:
        assert resolve_precision(precision, device) == found


@pytest.mark.parametrize(("fused", "refused"), [("true", True), ("false", False)])
def test_a_fused_optimizer_is_refused_where_a_scaler_skips_steps(monkeypatch, fused, refused):
    monkeypatch.setattr("bstune.trial.workload.resolve_device", lambda name, option: "cuda")
    config = compose_checked(
        ["+workload=resnet_cifar", "precision=16-mixed", f"workload.module.optimizer.fused={fused}"]
    )
    if not refused:
        assert resolve(config).precision == "16-mixed"
        return
    with pytest.raises(ConfigError, match=r"set workload\.module\.optimizer\.fused=false"):
        resolve(config)


def test_a_worker_on_cuda_says_of_which_device_it_takes_a_share(monkeypatch):
    """Torch refuses a device without its number there."""
    asked = []
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=1000))
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda *given: asked.append(given))
    open_trials(OmegaConf.to_container(compose_checked(DIGITS), resolve=False), None, 250)
    assert asked == [(0.25, torch.device("cuda", 0))]
