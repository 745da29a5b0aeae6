"""The probe's clock, what its end means, and real probes on a CPU."""

import multiprocessing
import os
import tempfile
import threading
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from bstune.config import compose
from bstune.core.clock import Phase
from bstune.core.errors import ConfigError, HardwareError
from bstune.core.step_time import StepTime
from bstune.hardware import memory
from bstune.hardware.memory import ProbeResult
from bstune.hardware.probe import (
    MemoryClock,
    TrialProbe,
    _clock,
    _result_of,
    evaluated_batches,
    largest_in_time,
    measure_ceiling,
)
from bstune.options import with_option
from bstune.trial.checks.preflight import PreflightFindings
from bstune.workloads.models import mlp

MiB = 2**20
TRAINED = (Phase.TRAINING, Phase.EVALUATION, Phase.CLOSING)


class Hungry(torch.nn.Module):
    """Takes a quarter of a megabyte an example for a while in training, one in evaluation."""

    def __init__(self, **arguments: object) -> None:
        super().__init__()
        self.model = mlp(**arguments)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        block = torch.ones(len(images) * (MiB // 4 if self.training else MiB), dtype=torch.uint8)
        return self.model(images) + 0.0 * block[0]


class ProcessIds(Dataset):
    """The number of the process that reads it for each of the first two examples."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        # A worker that waits does not see by itself that its parent has ended.
        if index >= 2:
            threading.Event().wait()
        return os.getpid()


class Waits(Hungry):
    """Writes the numbers of a loader's workers to a file once they run, and never ends."""

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        batches = iter(DataLoader(ProcessIds(), 1, num_workers=2))
        workers = [str(next(batches).item()) for _ in range(2)]
        Path("workers.new").write_text(" ".join(workers))
        Path("workers.new").rename("workers")
        threading.Event().wait()
        return self.model(images)


class NeedsTwo(Hungry):
    def forward(self, images: torch.Tensor) -> torch.Tensor:
        if len(images) < 2:
            raise ValueError("one example is too few")
        return self.model(images)


@pytest.mark.parametrize(
    ("phases", "peaks", "error", "enforced", "outcome"),
    [
        # The most of a phase counts.
        (
            (Phase.TRAINING, Phase.EVALUATION, *TRAINED),
            (5, 25, 30, 20, 7),
            None,
            False,
            "fits",
        ),
        (TRAINED, (50, 100, 100), None, False, "fits"),
        (TRAINED, (50, 101, 102), None, False, "training"),
        (TRAINED, (50, 90, 101), None, False, "evaluation"),
        (TRAINED, (101, 90, 80), None, False, "startup"),
        # The allocator enforces the limit itself.
        (TRAINED, (101, 101, 101), None, True, "fits"),
        ((Phase.TRAINING, Phase.CLOSING), (1, 1), "CUDA out of memory", True, "training"),
        (TRAINED, (1, 1, 1), "CUDA out of memory", True, "evaluation"),
        ((Phase.CLOSING,), (1,), "CUDA out of memory", True, "startup"),
    ],
)
def test_memory_that_runs_out_is_of_a_phase(phases, peaks, error, enforced, outcome):
    each = iter(peaks)
    resets = []
    clock = MemoryClock(lambda: next(each), lambda: resets.append(1))
    for phase in phases:
        clock.enter(phase)
    expected = ProbeResult(8, outcome, 100, None if error else peaks[1], max(peaks), error)
    assert clock.result(8, 100, error, enforced) == expected
    assert len(resets) == len(phases)


@pytest.mark.parametrize(
    ("outside", "reserved", "most", "limit", "peak"),
    [
        # All that was there at the start is still there.
        (2, 10, 12, None, 14),
        # Libraries have been loaded meanwhile.
        (5, 10, 12, None, 17),
        # Another process has ended.
        (1, 10, 12, None, 14),
        (5, 10, 12, 40, 17),
    ],
)
def test_the_peak_of_a_cuda_device_has_what_was_loaded_after_the_start(
    monkeypatch, outside, reserved, most, limit, peak
):
    device = torch.device("cuda", 1)
    capped = []
    answers = {
        # Others have 2 of 80.
        "mem_get_info": lambda asked: (78, 80),
        "memory_reserved": lambda asked: reserved,
        "max_memory_reserved": lambda asked: most,
        "reset_peak_memory_stats": lambda asked: None,
        "set_per_process_memory_fraction": lambda share, asked: capped.append((share, asked)),
    }
    for name, answer in answers.items():
        monkeypatch.setattr(torch.cuda, name, answer)
    clock, found = _clock(device, limit, lambda phase: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda asked: (80 - outside - reserved, 80))
    clock.enter(Phase.TRAINING)
    assert (clock.peaks, found) == ({Phase.STARTUP: peak}, 80 if limit is None else limit)
    assert capped == ([] if limit is None else [((limit - 2) / 80, device)])


@pytest.mark.parametrize(
    ("messages", "stopped", "exitcode", "errors", "outcome", "message"),
    [
        (["training", ProbeResult(8, "fits", 9, 3, 4)], None, 0, "", "fits", None),
        (["startup", "training"], 9 * MiB, -9, "", "training", "stopped at 9 MiB"),
        ([], 9 * MiB, -9, "", "startup", "stopped at 9 MiB"),
        (
            ["evaluation"],
            None,
            -9,
            "",
            "evaluation",
            "ended by the system, as it does when memory runs out",
        ),
        (["training"], "it did not end within 60 s", -9, "", "error", "it did not end within 60 s"),
        (
            ["startup"],
            "it did not end within 60 s",
            -9,
            "",
            "error",
            "it did not end within 60 s, and had not begun to train",
        ),
        ([], None, 1, "Traceback\nValueError: batch of 1\n\n", "error", "ValueError: batch of 1"),
        (
            [],
            None,
            1,
            "CUDA error: device-side assert\n",
            "error",
            "CUDA error: device-side assert",
        ),
        ([], None, 1, "No CUDA GPUs are available\n", "device", "No CUDA GPUs are available"),
        ([], None, -11, "", "error", "the probe ended with status -11 and printed nothing"),
    ],
)
def test_what_the_end_of_a_probe_means(messages, stopped, exitcode, errors, outcome, message):
    result = _result_of(8, 100, messages, stopped, exitcode, errors)
    assert (result.batch_size, result.outcome, result.message) == (8, outcome, message)
    assert result.fits == (outcome == "fits")


def digits(*overrides):
    # Not by builders.py: a probe imports this module, and its imports take 30 MiB there.
    composed = compose(["workload=digits", "device=cpu", "precision=32-true", *overrides])
    return composed.options, composed.trained_recipe


def probe_of(*overrides, mib=4096, seconds=60.0, model="bstune.workloads.models.mlp"):
    options, recipe = digits(*overrides, f"workload.module.model._target_={model}")
    return TrialProbe(options, recipe, int(mib * MiB), 2, seconds)


@pytest.mark.slow
def test_real_probes():
    """An evaluation of 300 images takes 300 MiB here, 1,000 examples of training 250."""
    least = probe_of()(4).peak_bytes / MiB
    # 150 MiB are too few for both, and 700 are enough for the evaluation.
    small, large = (
        probe_of(mib=least + more, model="tests.test_probe.Hungry") for more in (150, 700)
    )
    assert [small(8).outcome, small(1000).outcome, large(8).outcome] == [
        "evaluation",
        "training",
        "fits",
    ]
    pair = probe_of("protocol.noise_scale_every=null", model="tests.test_probe.NeedsTwo")
    result = pair(1)
    assert (result.outcome, result.message) == ("error", "ValueError: one example is too few")
    assert pair(2).fits
    result = probe_of(seconds=0.01)(4)
    assert (result.outcome, result.message) == (
        "error",
        "it did not end within 0.01 s, and had not begun to train",
    )
    with pytest.raises(ConfigError, match=r"hidden layer must be a positive integer, but got -1"):
        probe_of("workload.module.model.hidden=[-1]")(4)


def test_an_interruption_leaves_no_probe_behind(monkeypatch):
    started = []

    def interrupt(process):
        started.append(process)
        raise KeyboardInterrupt

    monkeypatch.setattr(memory, "resident_bytes", interrupt)
    with pytest.raises(KeyboardInterrupt):
        probe_of()(4)
    assert multiprocessing.active_children() == []
    assert not Path(f"/proc/{started[0]}").exists()


def test_a_probes_loader_leaves_no_workers_behind(monkeypatch, tmp_path):
    # Not above: a probe imports this module.
    from toolbox import still_running

    def interrupt(process):
        if Path("workers").exists():
            raise KeyboardInterrupt
        return 0

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(memory, "resident_bytes", interrupt)
    with pytest.raises(KeyboardInterrupt):
        probe_of(model="tests.test_probe.Waits")(4)
    workers = [int(worker) for worker in Path("workers").read_text().split()]
    assert len(set(workers)) == 2
    assert still_running(workers) == []


@pytest.mark.slow
def test_a_probe_that_is_stopped_leaves_no_temporary_folder(monkeypatch):
    made = []

    def over_the_limit_with_a_folder(process):
        made.extend(Path(tempfile.gettempdir()).glob(f"bstune-{process}-*"))
        return 2**60 if made else 0

    monkeypatch.setattr(memory, "resident_bytes", over_the_limit_with_a_folder)
    assert not probe_of()(4).fits
    assert len(made) == 1
    assert not made[0].exists()


@pytest.mark.slow
def test_a_real_ceiling():
    """Half a gigabyte for the interpreter, torch and 1200 digits; the range is cut to the data set."""
    options = {
        "multiple": 1,
        "relative": 0.01,
        "steps": 3,
        "seconds": 120.0,
        "largest_first": True,
        "verify": 0,
    }
    found = measure_ceiling(*digits(), 4, 5000, 1200, limit=4096 * MiB, **options)
    assert (found.batch_size, found.above, [p.batch_size for p in found.probes]) == (
        1200,
        None,
        [1200, 4],
    )
    assert 100 * MiB < found.at.training_bytes <= found.at.peak_bytes < 4096 * MiB
    assert found.notes == (
        "batch size 5000 is larger than the training data: the ceiling was looked for up to 1200",
    )
    with pytest.raises(HardwareError, match="the data and the model alone do not fit in 64 MiB"):
        measure_ceiling(*digits(), 4, 4, 1200, limit=64 * MiB, **options)
    with pytest.raises(
        HardwareError, match=r"the smallest batch size, 11, is larger than .* \(10 examples\)"
    ):
        measure_ceiling(*digits(), 11, 12, 10, limit=64 * MiB, **options)


@pytest.mark.parametrize(
    ("slow_from", "full_from", "ceiling", "probed"),
    [
        # Nothing is slow.
        (1200, 1200, 1000, [1000, 4]),
        # The largest size is: sizes up to the middle of log B follow by the memory of both others.
        (1000, 1200, 252, [1000, 4, 64]),
        # The user's own size runs today, however slow the machine is now.
        (10, 1200, 64, [1000, 4, 64]),
        # Less memory than the probe of 1000 would have shown ends the range as ever.
        (1000, 40, 4, [1000, 4, 64]),
        (1200, 500, 4, [1000, 4]),
    ],
)
def test_a_probe_that_was_too_slow_leaves_the_users_own_batch_size(
    monkeypatch, slow_from, full_from, ceiling, probed
):
    def result(self, size):
        if size >= slow_from:
            return ProbeResult(size, "error", 4096 * MiB, message="it did not end within 60 s")
        if size >= full_from:
            return ProbeResult(size, "training", 4096 * MiB, peak_bytes=5000 * MiB)
        peak = (100 + size) * MiB
        return ProbeResult(size, "fits", 4096 * MiB, training_bytes=peak, peak_bytes=peak)

    monkeypatch.setattr(TrialProbe, "__call__", result)
    options, recipe = digits()
    options = with_option(options, "scaling.batch_size", 64)
    # The survey's time is over with its first probe.
    found = measure_ceiling(
        options,
        recipe,
        4,
        1000,
        1200,
        limit=4096 * MiB,
        steps=3,
        seconds=60.0,
        multiple=1,
        relative=0.01,
        largest_first=True,
        verify=0,
        is_late=lambda: True,
    )
    assert found.batch_size == ceiling
    assert [probe.batch_size for probe in found.probes] == probed


@pytest.mark.parametrize(
    ("seconds", "batches"),
    # The seconds are of ten batches.
    [(0.0, None), (5.0, None), (50.0, 1), (10.0, 5), (500.0, 1)],
)
def test_a_probe_reads_as_many_batches_as_take_seconds(seconds, batches):
    tried = PreflightFindings(8, StepTime(0.0, 0.1), (), seconds, 10)
    assert evaluated_batches(tried) == batches
    assert evaluated_batches(None) is None


@pytest.mark.parametrize(
    ("step_time", "largest"),
    [
        # All of them are in time.
        (StepTime(0.0, 0.001), 4096),
        # 20 s of 0.01 s an example; less 9 s in the next case.
        (StepTime(0.0, 0.01), 2000),
        (StepTime(9.0, 0.01), 1100),
        # None is in time: it is at most twice the smallest one.
        (StepTime(0.0, 1.0), 128),
        # Any step takes long here, whatever its batch size.
        (StepTime(30.0, 0.01), 3128),
    ],
)
def test_no_probe_is_started_that_would_not_end(step_time, largest):
    assert largest_in_time(4096, 64, 20.0, step_time) == largest
