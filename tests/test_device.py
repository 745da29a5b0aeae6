"""What is asked of a CUDA device, and what is not, on a machine that need not have one."""

from types import SimpleNamespace

import pytest
import torch

from bstune.trial.devices import device
from bstune.trial.devices.device import (
    cuda_settings,
    device_of,
    forget_failed_allocations,
    memory_ran_out,
    synchronize,
)
from bstune.trial.devices.errors import is_out_of_memory
from bstune.trial.processes.restored import restored
from bstune.trial.processes.workers import mps_runs

GIB = 2**30


@pytest.fixture
def cuda(monkeypatch):
    """Stand in for torch.cuda: set what it answers, read what it was asked."""
    asked = []
    stand_in = SimpleNamespace(
        asked=asked,
        is_initialized=lambda: True,
        synchronize=lambda device: asked.append(("synchronize", device)),
        mem_get_info=lambda device: (40 * GIB, 80 * GIB),
        memory_stats=lambda device: {"num_ooms": 0},
        reset_accumulated_memory_stats=lambda device: asked.append(("reset", device)),
    )
    for name in (
        "is_initialized",
        "synchronize",
        "mem_get_info",
        "memory_stats",
        "reset_accumulated_memory_stats",
    ):
        monkeypatch.setattr(
            torch.cuda, name, lambda *arguments, name=name: getattr(stand_in, name)(*arguments)
        )
    return stand_in


@pytest.mark.parametrize(
    ("place", "initialized", "waits"),
    [
        ("cpu", True, False),
        # The trial's own device is used from then on.
        ("cuda:1", False, True),
        (None, True, True),
        # Nobody has used CUDA: to wait would open a context.
        (None, False, False),
    ],
)
def test_a_context_is_opened_for_no_trial_on_a_cpu(cuda, place, initialized, waits):
    cuda.is_initialized = lambda: initialized
    asked = None if place is None else torch.device(place)
    synchronize(asked)
    assert cuda.asked == ([("synchronize", asked)] if waits else [])


def test_a_protocols_device():
    assert device_of({"accelerator": "cuda", "devices": [1]}) == torch.device("cuda:1")
    assert device_of({"accelerator": "cpu", "devices": 1}) == device_of({}) == torch.device("cpu")


@pytest.mark.parametrize(
    ("error", "failed", "free", "found"),
    [
        (
            # Of memory only where an allocation has failed before, or the device is full.
            RuntimeError("GET was unable to find an engine to execute this computation"),
            1,
            40 * GIB,
            True,
        ),
        (
            RuntimeError("GET was unable to find an engine to execute this computation"),
            0,
            40 * GIB,
            False,
        ),
        (
            RuntimeError(
                "CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`"
            ),
            0,
            9,
            True,
        ),
        (
            RuntimeError(
                "CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`"
            ),
            0,
            GIB,
            False,
        ),
        (RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR"), 0, 9, True),
        (RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"), 0, 40 * GIB, True),
        (
            RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED"),
            0,
            40 * GIB,
            True,
        ),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling"), 0, 40 * GIB, True),
        (RuntimeError("CUDA error: out of memory"), 0, 40 * GIB, True),
        (RuntimeError("CUDA out of memory. Tried to allocate 2 GiB"), 0, 40 * GIB, True),
        # Known by its class, whatever it says.
        (torch.OutOfMemoryError("any text"), 0, 40 * GIB, True),
        (MemoryError(), 0, 40 * GIB, True),
        # No lack of memory, however little there is.
        (RuntimeError("CUDA error: device-side assert triggered"), 1, 9, False),
        (ValueError("a value"), 1, 9, False),
    ],
)
def test_an_error_of_memory_is_told_from_others(cuda, error, failed, free, found):
    cuda.memory_stats = lambda device: {"num_ooms": failed}
    cuda.mem_get_info = lambda device: (free, 80 * GIB)
    assert is_out_of_memory(error) == found


def test_without_cuda_or_after_its_end_no_memory_ran_out(cuda):
    def broken(device):
        raise RuntimeError("CUDA error: device-side assert triggered")

    cuda.mem_get_info = broken
    assert not memory_ran_out()
    cuda.is_initialized = lambda: False
    cuda.mem_get_info = lambda device: pytest.fail("this opens a context")
    assert not memory_ran_out()
    forget_failed_allocations(torch.device("cuda", 1))
    cuda.is_initialized = lambda: True
    forget_failed_allocations(torch.device("cpu"))
    assert cuda.asked == []
    forget_failed_allocations(torch.device("cuda", 1))
    assert cuda.asked == [("reset", torch.device("cuda", 1))]


@pytest.mark.parametrize(
    ("products", "convolutions", "benchmark", "tf32"),
    [
        # These are torch's defaults.
        (False, True, False, "convolutions"),
        (True, True, True, "products and convolutions"),
        (True, False, False, "products"),
        (False, False, False, "none"),
    ],
)
def test_a_record_says_what_cuda_was_set_to(monkeypatch, products, convolutions, benchmark, tf32):
    monkeypatch.setattr(device, "products_in_tf32", lambda: products)
    monkeypatch.setattr(device, "convolutions_in_tf32", lambda: convolutions)
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", benchmark)
    found = cuda_settings(torch.device("cuda", 0))
    assert (found["tf32"], found["cudnn.benchmark"]) == (tf32, str(benchmark).lower())
    assert set(found) == {"cuda", "cudnn", "cudnn.benchmark", "tf32"}
    assert cuda_settings(torch.device("cpu")) == {}


def test_by_default_convolutions_are_in_tf32_and_products_are_not(monkeypatch):
    assert (device.products_in_tf32(), device.convolutions_in_tf32()) == (False, True)
    with device.products_in(tf32=True):
        assert device.products_in_tf32()
        with device.products_in(tf32=False):
            assert not device.products_in_tf32()
        assert device.products_in_tf32()
    assert not device.products_in_tf32()
    assert torch.get_float32_matmul_precision() == "highest"


def test_a_precision_that_was_set_by_operator_is_not_asked_for_otherwise():
    with device.products_in(tf32=True), restored():
        assert device.products_in_tf32()


def test_the_device_that_a_program_uses_is_its_own_again_after_a_trial_on_another(
    cuda, monkeypatch
):
    used = [0]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_rng_state_all", list)
    monkeypatch.setattr(torch.cuda, "set_rng_state_all", lambda states: None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: used[-1])
    monkeypatch.setattr(torch.cuda, "set_device", used.append)
    with restored():
        # Lightning sets the device so.
        torch.cuda.set_device(1)
    assert used == [0, 1, 0]


def test_mps_is_found_by_its_pipe(monkeypatch, tmp_path):
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(tmp_path))
    assert not mps_runs()
    (tmp_path / "control").touch()
    assert mps_runs()


@pytest.mark.slow
def test_a_study_on_a_cpu_never_touches_the_gpu_beside_it(bstune, monkeypatch):
    """A context takes half a gigabyte of the device, from whoever uses it."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(
        torch.cuda, "_lazy_init", lambda: pytest.fail("a study on the CPU opens a context")
    )
    status, _, errors = bstune(
        "workload=digits",
        "device=cpu",
        "search.trials=2",
        "search.workers=0",
        "search.replicates=1",
        "budget.steps=12",
        "budget.examples=1",
        "protocol.noise_scale_every=4",
        "mlflow.enabled=false",
    )
    assert status in (0, None), errors
