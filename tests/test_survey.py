"""The survey of the hardware: its command on a CPU, what it keeps, what it says, and what a study takes from it."""

import json
import sys
from dataclasses import replace

import pytest
import torch

from bstune.core.errors import HardwareError
from bstune.core.records import TrialSpec
from bstune.hardware import __main__ as hardware
from bstune.hardware import survey as survey_module
from bstune.hardware.memory import Ceiling, MemoryLimit, MemoryModel, ProbeResult
from bstune.hardware.report import advice, headline, survey_json
from bstune.hardware.roofline import DeviceLimits, LayerCost, Line, StepCost
from bstune.hardware.survey import FORM, Survey, _lost_device, identity, probe_text, read
from bstune.hardware.timing import Measured, StepTiming
from bstune.study.prepare import compose_checked
from bstune.trial.backend import make_protocol, make_space
from bstune.trial.workload import build_module, resolve

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


@pytest.fixture
def command(tmp_path, monkeypatch, capfd):
    """Run python -m bstune.hardware in an empty folder; return its exit status and what it printed."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("BSTUNE_CACHE", str(tmp_path / "kept"))

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["hardware", *arguments])
        status = hardware.main()
        printed = capfd.readouterr()
        return status, printed.out, printed.err

    return run


def test_the_command_and_the_study_after_it(command, bstune, tmp_path):
    status, out, err = command("+workload=digits", *FAST)
    assert (status, err) == (0, "")
    for words in (
        "batch size 1200, the largest of the range, fits",
        "tau(B) = ",
        "roofline",
        "written outputs/digits/",
    ):
        assert words in out
    found = json.loads((tmp_path / "outputs/digits/hardware.json").read_text())
    assert found["ceiling"]["at"]["batch_size"] == 1200
    assert [timing["batch_size"] for timing in found["measured"]["timings"]] == [4, 69, 1200]
    assert all(0 < timing["low"] <= timing["seconds"] <= timing["high"] for timing in found["measured"]["timings"])
    assert found["limits"]["flops_per_second"] > 0
    # 64 x 128 + 128 x 10 weights: 2 FLOPs each forward, and backward for the weights and for all inputs but the data
    flops = sum(layer["flops"]["per_example"] for layer in found["cost"]["layers"])
    assert flops == 2 * (64 * 128 * 2 + 128 * 10 * 3)
    assert (tmp_path / "outputs/digits/roofline.png").read_bytes()[:4] == b"\x89PNG"
    assert "kept from before" in command("+workload=digits", *FAST)[1]
    # another target is the same survey, another model is not
    (path,) = (tmp_path / "kept/hardware").iterdir()
    kept = read(path)
    assert kept is not None
    status, out, err = bstune("+workload=digits", *FAST, "search.trials=2", "mlflow.enabled=false")
    assert (status, err) == (0, "")
    assert "tau(B) at 3 batch sizes from 4 to 1200 (kept from before)" in out
    # what was kept narrows the study's range
    low = replace(kept.ceiling, at=replace(kept.ceiling.at, batch_size=700), smallest=5)
    path.write_bytes(FORM.dump_json(replace(kept, ceiling=low)))
    out = bstune("+workload=digits", *FAST, "search.trials=2", "mlflow.enabled=false", "study=narrow")[1]
    assert "batch sizes 5 to 700, " in out


@pytest.mark.slow
def test_a_batch_size_that_fails_for_another_reason_than_memory(command, tmp_path):
    model = "workload.module.model._target_=tests.test_probe.needs_two"
    status, out, _ = command("+workload=digits", model, "search.batch_size.low=1", *FAST)
    assert status == 0
    words = " ".join(out.split())
    assert "batch size 1 fails: ValueError: one example is too few" in words
    assert "fails for another reason than memory (ValueError: one example is too few): the range starts at 2" in words


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "no workload was given"),
        (("+workload=replay", "workload.table=mnist_cnn"), "there is no hardware to survey"),
        (("+workload=digits", "search.batch_size.high=2000"), "batch size 2000 is larger than the training data (1200"),
        (("+workload=digits", "hardware.second=3"), "unknown option hardware.second"),
        (("+workload=digits", "hardware.seconds=soon"), "hardware.seconds"),
        (("+workload=digits", "hardware.step_time.rungs=1"), "hardware.step_time.rungs must be at least 2, but got 1"),
        (("+workload=digits", "hardware.memory.relative.cpu=2"), "hardware.memory.relative must be shares"),
        (("+workload=digits", "hardware.memory.free_share=1.5"), "hardware.memory.free_share must be a share up to 1"),
        (("+workload=digits", "output=/proc/nowhere"), "output=/proc/nowhere"),
        (
            ("+workload=digits", f"hardware.memory.limit={64 * MiB}"),
            "the data and the model alone do not fit in 64 MiB",
        ),
    ],
)
def test_bad_input(command, tmp_path, arguments, message):
    status, _, err = command(*arguments)
    assert status == 2
    assert message in err
    assert "Traceback" not in err
    assert list(tmp_path.iterdir()) == []


def test_a_device_that_is_lost_is_told_in_a_line():
    with pytest.raises(HardwareError, match=r"the device was lost .*CUDA error: GPU is lost"), _lost_device():
        raise RuntimeError("CUDA error: GPU is lost\nmore")
    with pytest.raises(RuntimeError, match="another"), _lost_device():
        raise RuntimeError("another")


@pytest.mark.parametrize(
    ("given", "device", "limit"),
    [(77, "cpu", 77), (77, "cuda", 77), (None, "cuda", None), (None, "cpu", 500)],
)
def test_on_a_cpu_a_share_of_what_is_free_is_left(given, device, limit, monkeypatch):
    monkeypatch.setattr(survey_module, "memory_limit", lambda root, resident: MemoryLimit(1000, "free"))
    assert survey_module._limit(given, 0.5, torch.device(device)) == limit


@pytest.mark.slow
@pytest.mark.parametrize(
    ("override", "same"),
    [
        ("workload.target.value=0.2", True),
        ("search.trials=3", True),
        ("search.workers=2", False),
        ("hardware.refresh=true", True),
        ("hardware.cache=/elsewhere", True),
        ("workload.module.model.hidden=[64]", False),
        ("search.batch_size.high=600", False),
        ("protocol.micro_batch_size=64", False),
        ("precision=bf16-mixed", False),
        ("compile=default", False),
        ("hardware.memory.limit=1000000000", False),
        ("workload.data.eval_batch_size=100", False),
    ],
)
def test_what_a_survey_depends_on(override, same):
    def name(*overrides):
        config = resolve(compose_checked(["+workload=digits", "device=cpu", *overrides]))
        space = make_space(config)
        protocol = make_protocol(config)
        module = build_module(config, TrialSpec(0, 0, 4, 0.1, None, 0))
        return identity(config, space, protocol, module, 1200)

    assert (name() == name(override)) == same


def probe(size, outcome="fits", taken=100):
    return ProbeResult(size, outcome, 1000 * MiB, taken * MiB, taken * MiB)


def made(sizes=((4, 1e-3), (64, 1.2e-3), (1000, 5e-3)), above=None, high=1000, bare=None, **others):
    timings = tuple(
        StepTiming(size, tau, tau, tau, 0.0, 9, None if bare is None else bare * tau) for size, tau in sizes
    )
    ceiling = Ceiling(
        probe(sizes[-1][0]), above, sizes[0][0], 3, 0.01, MemoryModel(90.0 * MiB, 1024.0, 0.0, 2), None, (probe(4),)
    )
    cost = StepCost((LayerCost("a", "Linear", 1, Line(0, 1e6), Line(0, 100), Line(0, 100), Line(1e5, 0)),), (), ())
    limits = DeviceLimits("it", "fp32", 1e9, 1e6)
    values = {"limits": limits, "cost": cost, "notes": ()} | others
    return Survey(
        "w", "it", "cpu", "32-true", {"torch": "2"}, high, ceiling, Measured(timings, (), ()), seconds=2.0, **values
    )


def test_a_survey_is_kept_whole(tmp_path):
    survey = made(notes=("so",))
    path = tmp_path / "a.json"
    path.write_bytes(FORM.dump_json(survey))
    assert read(path) == survey
    for broken in (b"", b"{}", FORM.dump_json(survey).replace(b'"fp32"', b'"fp31"'), b'{"workload": 3}'):
        path.write_bytes(broken)
        assert read(path) is None
    assert read(tmp_path / "nowhere") is None


@pytest.mark.parametrize(
    ("survey", "words"),
    [
        (made(), "examples a second still rise at the largest batch size, 1000"),
        (made(((4, 1e-3), (500, 2e-3), (1000, 3.9e-3))), "from batch size 500 on"),
        (made(), "the range ends at 1000, not the memory"),
        (made(above=probe(1010, "training")), "1000 fits: no need to fall back to 512, the power of two below it"),
        (made(bare=0.6), "the framework takes 40% of a step at batch size 4, over 20% up to 1000"),
    ],
)
def test_advice(survey, words):
    assert any(words in line for line in advice(survey))


def test_a_power_of_two_needs_no_advice():
    survey = made(((4, 1e-3), (512, 5e-3)), above=probe(520, "training"), high=600)
    assert not any("power" in line for line in advice(survey))


def test_what_follows_from_a_survey():
    survey = made()
    derived = json.loads(survey_json(survey))["derived"]
    # bytes 200 B + 1e5, FLOPs 1e6 B, ridge 1000: 1e6 B = 1000 (200 B + 1e5)
    assert derived["turning_batch_size"] == pytest.approx(125.0)
    assert derived["plateau"] == 1000
    assert len(derived["achieved"]) == 3
    assert survey.step_time(64) == pytest.approx(1.2e-3)
    assert made(cost=None).turning_batch_size is None
    assert made(limits=None).achieved == []
    one = made(((4, 1e-3),))
    assert one.step_time is None
    assert one.left_out_error is None
    assert "kept" in headline(one, True)[0]


@pytest.mark.parametrize(
    ("result", "text"),
    [
        (probe(1200), "batch size 1,200 fits (100 of 1,000 MiB)"),
        (probe(8, "training"), "batch size 8 does not fit (100 of 1,000 MiB)"),
        (probe(8, "evaluation"), "batch size 8 trains, but its evaluation does not fit (100 of 1,000 MiB)"),
        (ProbeResult(1, "error", 9, message="ValueError: no"), "batch size 1 fails: ValueError: no"),
    ],
)
def test_probes_in_words(result, text):
    assert probe_text(result) == text
