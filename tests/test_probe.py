"""The probe's pieces: what the machine allows, what a process said, and one real probe on a CPU."""

import pytest
import torch

from bstune.core.clock import Phase
from bstune.core.errors import ConfigError, HardwareError
from bstune.hardware.memory import (
    MemoryLimit,
    make_probe,
    measure_ceiling,
    memory_limit,
    peak_resident_bytes,
    probe_server,
    read_answer,
    resident_bytes,
)
from bstune.hardware.probe import Meter, judge
from bstune.study.prepare import compose_checked
from bstune.workloads.models import mlp

MiB = 2**20


class Hungry(torch.nn.Module):
    """Takes a quarter of a megabyte an example for a while in training, one in evaluation."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        block = torch.ones(len(images) * (MiB // 4 if self.training else MiB), dtype=torch.uint8)
        return self.model(images) + 0.0 * block[0]


def hungry(**arguments: object) -> torch.nn.Module:
    return Hungry(mlp(**arguments))


class NeedsTwo(torch.nn.Module):
    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        if len(images) < 2:
            raise ValueError("one example is too few")
        return self.model(images)


def needs_two(**arguments: object) -> torch.nn.Module:
    return NeedsTwo(mlp(**arguments))


MEMINFO = {"proc/meminfo": "MemTotal:  4096 kB\nMemAvailable:    2048 kB\n"}


def v2(group: str, **limits: str) -> dict[str, str]:
    files = {f"sys/fs/cgroup/{folder.replace('_', '/')}memory.max": text for folder, text in limits.items()}
    return {"proc/self/cgroup": f"0::{group}\n", **files}


@pytest.mark.parametrize(
    ("files", "limit", "source"),
    [
        (MEMINFO, 2048 * 1024, "the memory that is free"),
        ({"proc/meminfo": "MemTotal:  4096 kB\n"}, 4096 * 1024, "the memory that is free"),
        (MEMINFO | v2("/a/b", a_b_="500100\n", a_="900000\n"), 500_000, "the container's 500,100 bytes"),
        (MEMINFO | v2("/a/b", a_b_="900000\n", a_="500100\n"), 500_000, "the container's 500,100 bytes"),
        (MEMINFO | v2("/a/b", a_b_="max\n", a_="max\n"), 2048 * 1024, "the memory that is free"),
        (MEMINFO | v2("/gone/in/a/namespace", **{"": "500100\n"}), 500_000, "the container's 500,100 bytes"),
        (MEMINFO | v2("/", **{"": "99999999999\n"}), 2048 * 1024, "the memory that is free"),
        (v2("/", **{"": "500100\n"}), 500_000, "the container's 500,100 bytes"),
        (
            MEMINFO
            | {
                "proc/self/cgroup": "5:devices:/x\n4:memory,hugetlb:/x\n0::/\n",
                "sys/fs/cgroup/memory/x/memory.limit_in_bytes": "500100\n",
                "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
                "sys/fs/cgroup/devices/x/memory.limit_in_bytes": "1\n",
            },
            500_000,
            "the container's 500,100 bytes",
        ),
    ],
)
def test_memory_limit(files, limit, source, tmp_path):
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert memory_limit(tmp_path, 100) == MemoryLimit(limit, source)


def test_no_limit_can_be_read(tmp_path):
    with pytest.raises(HardwareError, match="give a limit in bytes"):
        memory_limit(tmp_path, 100)


def test_nothing_is_left(tmp_path):
    for name, text in v2("/", **{"": "500\n"}).items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    with pytest.raises(HardwareError, match=r"no memory is left for a probe: the container's 500 bytes.*holds 600"):
        memory_limit(tmp_path, 600)


def test_the_peak_is_what_was_held_at_most():
    held = resident_bytes()
    block = torch.ones(64 * MiB, dtype=torch.uint8)
    assert resident_bytes() - held > 60 * MiB
    del block
    assert peak_resident_bytes() - held > 60 * MiB


def test_the_meter_notes_the_peak_of_each_phase():
    peaks, resets = iter([5, 20, 30, 25, 7]), []
    meter = Meter(lambda: next(peaks), lambda: resets.append(1))
    for phase in (Phase.TRAINING, Phase.EVALUATION, Phase.TRAINING, Phase.EVALUATION, Phase.CLOSING):
        meter.enter(phase)
    assert meter.peaks == {Phase.STARTUP: 5, Phase.TRAINING: 25, Phase.EVALUATION: 30}
    assert (meter.last, len(resets)) == (Phase.EVALUATION, 5)


@pytest.mark.parametrize(
    ("peaks", "compares", "outcome"),
    [
        ((50, 90, 80), True, "fits"),
        ((50, 100, 100), True, "fits"),
        ((50, 101, 80), True, "training"),
        ((50, 90, 101), True, "evaluation"),
        ((50, 101, 102), True, "training"),
        ((101, 90, 80), True, "startup"),
        ((101, 101, 101), False, "fits"),  # the allocator holds the limit itself
    ],
)
def test_judge(peaks, compares, outcome):
    each = iter(peaks)
    meter = Meter(lambda: next(each), lambda: None)
    for phase in (Phase.TRAINING, Phase.EVALUATION, Phase.CLOSING):
        meter.enter(phase)
    result = judge(meter, 8, 100, None, compares)
    assert (result.outcome, result.training_bytes, result.peak_bytes) == (outcome, peaks[1], max(peaks))


@pytest.mark.parametrize(
    ("phases", "outcome"),
    [
        ((Phase.TRAINING, Phase.CLOSING), "training"),
        ((Phase.TRAINING, Phase.EVALUATION, Phase.CLOSING), "evaluation"),
        ((Phase.CLOSING,), "startup"),
    ],
)
def test_memory_that_runs_out_is_told_by_its_phase(phases, outcome):
    meter = Meter(lambda: 1, lambda: None)
    for phase in phases:
        meter.enter(phase)
    result = judge(meter, 8, 100, "CUDA out of memory", False)
    assert (result.outcome, result.training_bytes, result.message) == (outcome, None, "CUDA out of memory")


@pytest.mark.parametrize(
    ("said", "outcome", "message"),
    [
        ({"phase": "training", "outcome": "fits", "limit": 9, "training_bytes": 3, "peak_bytes": 4}, "fits", None),
        ({"phase": "training", "ended": -9, "held": 9 * MiB}, "training", "stopped at 9 MiB"),
        ({"ended": -9, "held": 9 * MiB}, "startup", "stopped at 9 MiB"),
        ({"phase": "evaluation", "ended": -9}, "evaluation", "ended by the system, as it does when memory runs out"),
        ({"ended": 137}, "training", "ended by the system, as it does when memory runs out"),
        ({"phase": "training", "ended": -9, "late": True}, "error", "it did not end within 60 s"),
        ({"ended": 1, "stderr": "Traceback\nValueError: batch of 1\n\n"}, "error", "ValueError: batch of 1"),
        ({"ended": 1, "stderr": "RuntimeError: CUDA error: device-side assert triggered"}, "error", None),
        (
            {"ended": 1, "stderr": "RuntimeError: No CUDA GPUs are available\n"},
            "device",
            "RuntimeError: No CUDA GPUs are available",
        ),
        ({"ended": -11}, "error", "the probe ended with status -11 and said nothing"),
    ],
)
def test_read_answer(said, outcome, message):
    result = read_answer(8, 100, 60.0, {"ended": 0, "stderr": ""} | said)
    assert (result.batch_size, result.outcome) == (8, outcome)
    assert message is None or result.message == message
    assert result.fits == (outcome == "fits")


def test_a_workload_that_cannot_be_built_is_refused():
    said = {"ended": 0, "stderr": "", "refused": "workload.module cannot be built: no"}
    with pytest.raises(ConfigError, match=r"workload\.module cannot be built"):
        read_answer(8, 100, 60.0, said)


def digits(*overrides: str):
    return compose_checked(["+workload=digits", "device=cpu", "precision=32-true", *overrides])


def test_a_probe_on_a_cpu_needs_a_limit():
    with pytest.raises(HardwareError, match="needs a memory limit in bytes"):
        make_probe(lambda request: {}, digits(), None, 3, 60.0)


@pytest.fixture(scope="module")
def server():
    with probe_server() as ask:
        yield ask


def test_a_real_evaluation_that_does_not_fit_is_told_from_training_that_does_not(server):
    """An evaluation of 300 images takes 300 MiB here, 1,000 examples of training 250."""
    held = make_probe(server, digits(), 4096 * MiB, 2, 60.0)(4).peak_bytes
    hungry_digits = digits("workload.module.model._target_=tests.test_probe.hungry")
    small, large = (make_probe(server, hungry_digits, held + more * MiB, 2, 60.0) for more in (150, 700))
    assert small(8).outcome == "evaluation"
    assert small(1000).outcome == "training"
    assert large(8).outcome == "fits"


def test_a_probe_that_takes_too_long_or_breaks_is_an_error_and_the_next_one_runs(server):
    result = make_probe(server, digits(), 4096 * MiB, 2, 0.01)(4)
    assert (result.outcome, result.message) == ("error", "it did not end within 0.01 s")
    model = "workload.module.model._target_=tests.test_probe.needs_two"
    probe = make_probe(server, digits(model, "protocol.noise_scale_every=null"), 4096 * MiB, 2, 60.0)
    result = probe(1)
    assert (result.outcome, result.message) == ("error", "ValueError: one example is too few")
    assert probe(2).fits


@pytest.mark.slow
def test_a_server_that_is_gone():
    with probe_server() as ask, pytest.raises(HardwareError, match="the process that starts the probes is gone"):
        ask({"no": "request"})  # an error that ends it


def ceiling(overrides: tuple[str, ...], low: int, high: int, limit: int):
    config = digits(*overrides)
    settings = {"multiple": 1, "relative": 0.01, "steps": 3, "seconds": 120.0}
    return measure_ceiling(config, low, high, 1200, limit=limit, largest_first=True, verify=0, **settings)


@pytest.mark.slow
def test_a_real_range_that_fits_takes_a_probe_at_either_end():
    """A gigabyte for the interpreter, torch and 1200 digits; the range is cut to the data set."""
    found = ceiling((), 4, 5000, 4096 * MiB)
    assert (found.batch_size, found.above, [p.batch_size for p in found.probes]) == (1200, None, [1200, 4])
    assert 100 * MiB < found.at.training_bytes <= found.at.peak_bytes < 4096 * MiB
    assert found.notes == ("batch size 5000 is larger than the training data: the ceiling was looked for up to 1200",)


@pytest.mark.slow
def test_a_real_limit_under_the_interpreter_itself():
    with pytest.raises(HardwareError, match="the data and the model alone do not fit in 64 MiB"):
        ceiling((), 4, 4, 64 * MiB)
