"""The survey of the hardware: its command on a CPU, its cache, and what a study takes from it."""

import json
import re
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from builders import options_of, resolved
from toolbox import column

from bstune.core.errors import HardwareError
from bstune.core.step_time import StepTime
from bstune.hardware import survey as survey_module
from bstune.hardware import timing
from bstune.hardware.survey import (
    SURVEYS,
    _device_errors,
    _roofline,
    _time_ladder,
    _trial_limit,
    cached_survey,
    read_survey,
)
from bstune.hardware.threads import ThreadChoice
from bstune.study.tune import survey
from bstune.trial.backend import make_protocol, make_space
from bstune.trial.checks.preflight import PreflightFindings
from bstune.trial.workload import build_workload, load_data
from tests.toolbox import entries, make_survey

MiB = 2**20
FAST = (
    "hardware.step_time.rungs=3",
    "hardware.step_time.repeats=1",
    "hardware.step_time.visit_seconds=0.01",
    "hardware.ceilings.seconds=0.05",
    "hardware.ceilings.matrix_sizes=[64]",
    "hardware.ceilings.copy_bytes=[1000000]",
    "hardware.memory.verify=0",
)


@pytest.mark.slow
@pytest.mark.usefixtures("rendered")
def test_the_command_and_the_study_after_it(bstune, tmp_path, monkeypatch):
    monkeypatch.setenv("BSTUNE_CACHE", str(tmp_path / "cache"))
    status, out, err = bstune("survey", "workload=digits", *FAST)
    assert (status, err) == (0, "")
    words = (
        "batch size 1200, the largest that was tried, fits",
        "tau(B) = ",
        "roofline",
        "written outputs/digits/",
    )
    assert all(part in out for part in words)
    found = json.loads((tmp_path / "outputs/digits/hardware.json").read_text())
    assert found["ceiling"]["at"]["batch_size"] == 1200
    # sqrt(4 x 1200) = 69.
    assert column(found["measured"]["timings"], "batch_size") == [4, 69, 1200]
    assert all(
        0 < timing["low"] <= timing["seconds"] <= timing["high"]
        for timing in found["measured"]["timings"]
    )
    assert found["limits"]["flops_per_second"] > 0
    # 64 x 128 + 128 x 10 weights: 2 FLOPs each forward, and backward for the weights and for all
    # inputs but the data
    assert sum(layer["flops"]["per_example"] for layer in found["cost"]["layers"]) == 2 * (
        64 * 128 * 2 + 128 * 10 * 3
    )
    assert (tmp_path / "outputs/digits/roofline.png").read_bytes()[:4] == b"\x89PNG"
    # the survey is cached, for a study with another target too, whose range it narrows
    (path,) = (tmp_path / "cache/hardware").iterdir()
    cached = read_survey(path)
    assert survey("workload=digits", *FAST) == cached
    low = replace(cached.ceiling, at=replace(cached.ceiling.at, batch_size=700), smallest=5)
    path.write_bytes(SURVEYS.dump_json(replace(cached, ceiling=low)))
    assert "kept from before" in bstune("survey", "workload=digits", *FAST)[1]
    study = ("search.trials=2", "workload.target.value=0.2", "mlflow.enabled=false")
    status, out, err = bstune("workload=digits", *FAST, *study)
    assert (status, err) == (0, "")
    assert "tau(B) at 3 batch sizes from 4 to 1200 (kept from before)" in " ".join(out.split())
    assert "batch sizes 5 to 700, " in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("workload=digits", "search.batch_size.high=2000"),
            "batch size 2000 is larger than the training data (1200",
        ),
        (("workload=digits", "hardware.second=3"), "unknown option hardware.second"),
        (("workload=digits", "output=/proc/nowhere"), "output=/proc/nowhere"),
        (
            ("workload=digits", f"hardware.memory.limit={64 * MiB}"),
            "data and the model alone do not fit in 64 MiB",
        ),
    ],
)
def test_bad_input(bstune, tmp_path, arguments, message):
    status, _, err = bstune("survey", *arguments)
    assert (status, message in err, "Traceback" in err) == (2, True, False)
    assert entries(tmp_path) == []


class OddError(Exception):
    """No error that anyone expects."""


def test_a_module_that_runs_only_in_trials_costs_a_note_each(monkeypatch):
    def not_now(*arguments):
        raise OddError("not now")

    monkeypatch.setattr(timing, "time_trial", lambda *arguments: (0.01,) * 3)
    options, recipe = resolved("workload=digits", "device=cpu", *FAST)
    workload = replace(build_workload(options, recipe), build_module=not_now)
    space = make_space(options)
    protocol = make_protocol(options, recipe)
    arguments = options, torch.device("cpu"), workload, protocol, space
    limits, cost, notes = _roofline(*arguments)
    assert (limits.dtype, cost) == ("fp32", None)
    assert re.fullmatch(r"no roofline: OddError: not now \(test_survey.py:\d+\)", *notes)
    with monkeypatch.context() as patch:
        patch.setattr(timing, "measure_limits", not_now)
        assert _roofline(*arguments) == (None, None, notes)
    ceiling = make_survey().ceiling
    device = torch.device("cpu")
    measured, notes = _time_ladder(
        options, recipe, space, protocol, workload, ceiling, device, 30.0, None
    )
    assert {row.bare for row in measured.timings} == {None}
    assert re.fullmatch(r"no share of overhead: OddError: not now \(test_survey.py:\d+\)", *notes)


@pytest.mark.parametrize(
    ("fast", "device", "warmup_steps"),
    [("auto", "cuda", 1), ("graph", "cpu", 1), ("graph", "cuda", 3)],
)
def test_steps_are_timed_from_the_first_replay_on(monkeypatch, fast, device, warmup_steps):
    timed = []

    def time_trial(workload, protocol, *arguments):
        timed.append(protocol.warmup_steps)
        return (0.01,) * 3

    monkeypatch.setattr(timing, "time_trial", time_trial)
    monkeypatch.setattr(timing, "time_bare", lambda *arguments: (0.01,) * 3)
    overrides = (
        f"protocol.fast={fast}",
        "hardware.step_time.warmup_steps=1",
        "hardware.step_time.repeats=1",
    )
    options, recipe = resolved("workload=digits", "device=cpu", *FAST, *overrides)
    arguments = (
        make_space(options),
        make_protocol(options, recipe),
        None,
        make_survey().ceiling,
        torch.device(device),
    )
    _time_ladder(options, recipe, *arguments, 30.0, None)
    assert set(timed) == {warmup_steps}


@pytest.mark.parametrize(
    ("seconds_per_example", "largest"),
    [
        # All of them are in time.
        (1e-6, 512),
        # 0.3 of 50 s are five steps of 3 s.
        (0.01, 300),
        # Steps of twice the smallest size are in time.
        (10.0, 64),
    ],
)
def test_a_batch_size_whose_steps_would_not_end_in_time_is_not_timed(
    monkeypatch, seconds_per_example, largest
):
    timed = []
    bare = []

    def time_trial(workload, protocol, size, lr, steps):
        timed.append(size)
        return (seconds_per_example * size,) * steps

    def time_bare(workload, protocol, size, *arguments):
        bare.append(size)
        return (0.01,)

    monkeypatch.setattr(timing, "time_trial", time_trial)
    monkeypatch.setattr(timing, "time_bare", time_bare)
    options, recipe = resolved(
        "workload=digits",
        "device=cpu",
        "search.batch_size.low=32",
        "hardware.step_time.warmup_steps=2",
        "hardware.step_time.min_steps=3",
        "hardware.step_time.rungs=3",
    )
    found = PreflightFindings(32, StepTime(0.0, seconds_per_example), 4, ())
    device = torch.device("cpu")
    space = make_space(options)
    protocol = make_protocol(options, recipe)
    ceiling = replace(make_survey().ceiling, smallest=32)
    ceiling = replace(ceiling, at=replace(ceiling.at, batch_size=512))
    _, notes = _time_ladder(options, recipe, space, protocol, None, ceiling, device, 50.0, found)
    assert max(timed) == largest
    assert len(notes) == (largest < 512)
    # Without the framework no visit takes more than 2.5 s.
    assert all(5 * seconds_per_example * size <= 2.5 for size in bare)
    assert bool(bare) == (seconds_per_example < 1.0)


def test_a_device_that_is_lost():
    with (
        pytest.raises(HardwareError, match=r"the device was lost .*CUDA error: GPU is lost"),
        _device_errors(),
    ):
        raise RuntimeError("CUDA error: GPU is lost\nmore")
    with pytest.raises(RuntimeError, match="another"), _device_errors():
        raise RuntimeError("another")


@pytest.mark.parametrize(
    ("given", "device", "workers", "limit"),
    [
        ("77", "cpu", 1, 77),
        ("77", "cuda", 1, 77),
        ("null", "cuda", 1, None),
        # Half of the free memory is the limit.
        ("null", "cpu", 1, 500),
        # This process, which keeps the study, takes its share, too.
        ("900", "cpu", 2, 300),
        ("null", "cuda", 3, 20_000),
    ],
)
def test_the_memory_of_a_trial(given, device, workers, limit, monkeypatch):
    monkeypatch.setattr(survey_module, "memory_limit", lambda root, resident: 1000)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=80_000)
    )
    options = options_of(
        "workload=digits",
        f"hardware.memory.limit={given}",
        "hardware.memory.free_share=0.5",
        f"search.workers={workers}",
    )
    assert _trial_limit(options, torch.device(device)) == limit


@pytest.fixture
def cached(monkeypatch, tmp_path):
    """The survey of digits under overrides: the cached one, or else ``found``; and whether it was cached."""
    data = load_data(*resolved("workload=digits", "device=cpu"))

    def of(found, log, *overrides):
        monkeypatch.setattr(survey_module, "measure", lambda *arguments: found)
        options, recipe = resolved(
            "workload=digits", "device=cpu", "threads=1", f"hardware.cache={tmp_path}", *overrides
        )
        space = make_space(options)
        protocol = make_protocol(options, recipe)
        return cached_survey(options, recipe, space, protocol, data, None, log)

    return of


@pytest.mark.slow
def test_what_a_survey_depends_on(cached, tmp_path):
    found = make_survey()
    # What changes no step and no memory.
    same = ("workload.target.value=0.2", "search.trials=3", "hardware.seconds=90")
    # What changes a step's seconds or its memory.
    other = (
        "search.workers=2",
        "workload.module.model.hidden=[64]",
        "search.batch_size.high=600",
        "protocol.micro_batch_size=64",
        "precision=bf16-mixed",
        "compile=default",
        "hardware.memory.limit=1000000000",
        "workload.data.eval_batch_size=100",
    )
    assert not cached(found, print)[1]
    assert [option for option in (*same, *other) if cached(found, print, option)[1]] == list(same)
    assert len(entries(tmp_path)) == 1 + len(other)
    assert not cached(found, print, "hardware.refresh=true")[1]
    assert len(entries(tmp_path)) == 1 + len(other)


@pytest.mark.parametrize(
    ("changes", "options", "why"),
    [
        (
            {"threads": ThreadChoice(2)},
            (),
            "its steps ran on 2 threads, and this study's run on 1",
        ),
        # One number that was given says nothing of the others.
        ({}, ("threads=auto",), "its steps ran on 1 thread, and no other number was tried"),
        ({"threads": None}, (), "its number of threads was left alone"),
        ({"seconds_of": "trainer"}, (), "its seconds are those of trainer, not of lean"),
        ({}, ("seconds_of=trainer",), "its seconds are those of lean, not of trainer"),
    ],
)
def test_a_survey_that_was_timed_otherwise_is_measured_again_and_a_line_says_why(
    cached, tmp_path, monkeypatch, changes, options, why
):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    path = tmp_path / "digits-0123.json"
    monkeypatch.setattr(survey_module, "cache_key", lambda *arguments: "0123")
    made = make_survey(notes=("made",))
    path.write_bytes(SURVEYS.dump_json(replace(make_survey(), **changes)))
    lines = list[str]()
    assert cached(made, lines.append, *options) == (made, False)
    line = f"the cached survey of the hardware is not used, it is measured again: {why}"
    assert lines == [line]


def test_the_cache(cached, tmp_path):
    path = tmp_path / "digits-0123.json"
    path.write_text('{"ceiling": {"limit": 0.1}}')
    made = make_survey(notes=("so",))
    assert cached(made, print) == (made, False)
    assert cached(made, print) == (made, True)
    for broken in (
        b"",
        b"{}",
        SURVEYS.dump_json(made).replace(b'"fp32"', b'"fp31"'),
        b'{"workload": 3}',
    ):
        path.write_bytes(broken)
        assert read_survey(path) is None
    assert read_survey(tmp_path / "nowhere") is None
