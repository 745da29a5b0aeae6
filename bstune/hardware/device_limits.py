"""The device's own ceilings, measured: a matrix product in the trial's precision, and a copy in its memory.

They are what the device does in the shapes that suit it best, not the vendor's figures: a share of peak is a share of
what was seen here. Williams et al. 2009, "Roofline: an insightful visual performance model for multicore
architectures": attainable FLOP/s = min(peak FLOP/s, bytes/s x intensity); the two meet at the ridge.
"""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, get_args

import torch

from bstune.errors import HardwareError

Arithmetic = Literal["fp64", "fp32", "tf32", "bf16", "fp16"]

DTYPES: dict[str, torch.dtype] = {
    "fp64": torch.float64,
    "fp32": torch.float32,
    "tf32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}
# NVIDIA, "Deep Learning Performance: Matrix Multiplication Background", table 1: multiples of 16 bytes
TENSOR_CORE_MULTIPLES = {"tf32": 4, "bf16": 8, "fp16": 8, "int8": 16, "fp8": 16}
PRECISIONS = {
    "64-true": "fp64",
    "64": "fp64",
    "32-true": "fp32",
    "32": "fp32",
    "16-mixed": "fp16",
    "16-true": "fp16",
    "16": "fp16",
    "bf16-mixed": "bf16",
    "bf16-true": "bf16",
    "bf16": "bf16",
}
SEGMENT_SECONDS = 0.01  # calls between two synchronisations take this long, so that launches do not count


@dataclass(frozen=True)
class DeviceLimits:
    """What a device can do at most, as measured.

    Args:
        device: its name.
        dtype: the arithmetic of the matrix product: fp64, fp32, tf32, bf16 or fp16.
        flops_per_second: of the best matrix product.
        bytes_per_second: of the best copy; each byte copied counts twice, read and written.
        misaligned_flops_per_second: of the best matrix product whose sides miss the tensor cores' multiple by one;
            None where there is no such multiple.

    Raises:
        HardwareError: for a rate that is not positive and finite (NaN too).
    """

    device: str
    dtype: Arithmetic
    flops_per_second: float
    bytes_per_second: float
    misaligned_flops_per_second: float | None = None

    def __post_init__(self) -> None:
        if self.dtype not in get_args(Arithmetic):
            raise HardwareError(f"dtype must be one of {', '.join(DTYPES)}, but got {self.dtype!r}")
        for name in ("flops_per_second", "bytes_per_second", "misaligned_flops_per_second"):
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and value > 0.0):
                raise HardwareError(f"{name} of {self.device} must be positive and finite, but got {value}")

    @property
    def ridge(self) -> float:
        """FLOPs per byte above which the device computes longer than it moves bytes."""
        return self.flops_per_second / self.bytes_per_second


def arithmetic_of(precision: str | int, device_type: str) -> Arithmetic:
    """Return the arithmetic of matrix products under a Lightning precision (``bf16-mixed``, 32) or by its own name.

    fp32 is tf32 on CUDA where PyTorch's float32 matmul precision is not ``highest`` and the device has it.

    Raises:
        HardwareError: for a precision that is not known.
    """
    name = PRECISIONS.get(str(precision), str(precision))
    for arithmetic in get_args(Arithmetic):
        if arithmetic == name:
            lowered = name == "fp32" and device_type == "cuda" and torch.get_float32_matmul_precision() != "highest"
            return "tf32" if lowered and torch.cuda.get_device_capability()[0] >= 8 else arithmetic
    raise HardwareError(
        f"precision must be one of {', '.join([*PRECISIONS, *DTYPES])}, but got {precision!r}: "
        "the roofline knows no ceiling for it"
    )


def tensor_core_multiple(arithmetic: str, device_type: str) -> int | None:
    """Return what dimensions should be multiples of (8 in 16 bits, 4 in tf32, 16 in int8 and fp8); None for any."""
    return TENSOR_CORE_MULTIPLES.get(arithmetic) if device_type == "cuda" else None


def measure_limits(
    device: torch.device | str,
    arithmetic: Arithmetic,
    seconds: float,
    matrix_sizes: Sequence[int],
    copy_bytes: Sequence[int],
    clock: Callable[[], float] = time.perf_counter,
) -> DeviceLimits:
    """Return the ceilings of ``device``, the best of repeats over a few sizes; each is warmed up outside the clock.

    Args:
        device: such as ``cpu`` or ``cuda:0``.
        arithmetic: of the matrix product.
        seconds: for all of it, shared evenly; the first call of a ceiling's smallest size is made in any case, and a
            larger one only where the time left is enough for two of its calls, as foretold from the size before.
        matrix_sizes: sides n of the square products, 2 n^3 FLOPs each, tried in rising order.
        copy_bytes: sizes of what is copied. Choose them well past the caches: the best of them counts.
        clock: a test's own.

    Raises:
        HardwareError: for sizes or seconds that are not positive; or if the device fails, lacks the memory or does not
            know the arithmetic, with the first line of the original error.
    """
    device = torch.device(device)
    for name, values in (("seconds", [seconds]), ("matrix_sizes", matrix_sizes), ("copy_bytes", copy_bytes)):
        if not values or not all(math.isfinite(value) and value > 0 for value in values):
            raise HardwareError(f"{name} must be positive and finite, but got {values}")
    multiple = tensor_core_multiple(arithmetic, device.type)
    share = seconds / (2.0 if multiple is None else 3.0)
    try:
        with _float32_products(arithmetic, device):
            flops = _best_product(device, arithmetic, share, sorted(matrix_sizes), clock)
            odd = [size + 1 for size in sorted(matrix_sizes)]
            misaligned = None if multiple is None else _best_product(device, arithmetic, share, odd, clock)
        bandwidth = _best_copy(device, share, sorted(copy_bytes), clock)
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else _host_name(device)
    except (RuntimeError, AssertionError) as error:  # torch without CUDA asserts
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise HardwareError(f"the ceilings of {device} cannot be measured in {arithmetic}: {reason}") from error
    return DeviceLimits(name, arithmetic, flops, bandwidth, misaligned)


def _host_name(device: torch.device) -> str:
    threads = torch.get_num_threads()
    return f"{device.type} ({threads} thread{'s' if threads > 1 else ''})"


@contextmanager
def _float32_products(arithmetic: Arithmetic, device: torch.device) -> Iterator[None]:
    if device.type != "cuda" or arithmetic not in ("fp32", "tf32"):
        yield
        return
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if arithmetic == "tf32" else "highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def _best_product(
    device: torch.device, arithmetic: Arithmetic, seconds: float, sizes: Sequence[int], clock: Callable[[], float]
) -> float:
    def prepare(size: int) -> Callable[[], object]:
        left = torch.randn(size, size, device=device).to(DTYPES[arithmetic])
        right, out = left.clone(), torch.empty_like(left)
        return lambda: torch.mm(left, right, out=out)

    return _best_rate(prepare, lambda size: 2.0 * size**3, device, seconds, sizes, clock)


def _best_copy(device: torch.device, seconds: float, sizes: Sequence[int], clock: Callable[[], float]) -> float:
    def prepare(size: int) -> Callable[[], object]:
        source = torch.ones(size, dtype=torch.uint8, device=device)  # ones: untouched pages of a host are not memory
        target = torch.ones_like(source)
        return lambda: target.copy_(source)

    return _best_rate(prepare, lambda size: 2.0 * size, device, seconds, sizes, clock)


def _best_rate(
    prepare: Callable[[int], Callable[[], object]],
    work: Callable[[int], float],
    device: torch.device,
    seconds: float,
    sizes: Sequence[int],
    clock: Callable[[], float],
) -> float:
    """Return the highest work per second seen over ``sizes``, which rise."""
    end = clock() + seconds
    best = 0.0
    per_work = 0.0
    for left, size in zip(range(len(sizes), 0, -1), sizes, strict=True):
        now = clock()
        if best and now + 2.0 * per_work * work(size) > end:
            break
        call = prepare(size)
        call()  # warm-up, outside the clock: libraries load and choose their kernels here
        _synchronize(device)
        least = _least_seconds(call, device, (end - clock()) / left, clock)
        if least <= 0.0:
            raise HardwareError(f"the clock does not resolve a call of size {size}: give larger sizes")
        per_work = least / work(size)
        best = max(best, 1.0 / per_work)
    return best


def _least_seconds(
    call: Callable[[], object], device: torch.device, seconds: float, clock: Callable[[], float]
) -> float:
    """Return the least seconds a call took, over segments that fill ``seconds``, at least one."""
    end = clock() + seconds
    least, calls = math.inf, 1
    while True:
        start = clock()
        for _ in range(calls):
            call()
        _synchronize(device)
        stop = clock()
        each = (stop - start) / calls
        least = min(least, each)
        if each <= 0.0 or stop + each * calls > end:
            return least
        calls = max(1, round(SEGMENT_SECONDS / each))


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
