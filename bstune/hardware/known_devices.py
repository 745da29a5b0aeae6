"""Devices that one may not have: their makers' figures, and where a step would turn compute-bound.

Peaks are dense. Datasheets of Ampere and Hopper print twice as much for matrices of which half is
zero ("with sparsity"): 624 TFLOP/s over 1.5 TB/s gives an A100 a ridge of 416 FLOPs per byte, where
products of whole matrices have 312 over 1.555, which is 201.
No program reaches them: a survey's own roof, which is measured, lies lower at both its sides.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from bstune.hardware.roofline import DTYPES, Arithmetic, StepCost, in_width, turning_batch_size


@dataclass(frozen=True)
class KnownDevice:
    """What a device can do at most, as its maker states it."""

    name: str
    flops_per_second: Mapping[Arithmetic, float]
    """Of dense products, by what the device can compute in."""
    bytes_per_second: float
    """Of its memory."""
    source: str
    """Where the figures are from."""

    def ridge(self, arithmetic: Arithmetic) -> float:
        """Give FLOPs per byte above which the device computes longer than it moves bytes."""
        return self.flops_per_second[arithmetic] / self.bytes_per_second


def _teraflops(**peaks: float) -> Mapping[Arithmetic, float]:
    # The names are Arithmetic's.
    return {name: 1e12 * peak for name, peak in peaks.items()}  # type: ignore[misc]


KNOWN_DEVICES = (
    KnownDevice(
        "V100",
        _teraflops(fp32=15.7, fp16=125.0),
        900e9,
        "NVIDIA V100 datasheet, 2020, SXM2",
    ),
    KnownDevice(
        "T4",
        _teraflops(fp32=8.1, fp16=65.0),
        320e9,
        "NVIDIA T4 product brief, 2020",
    ),
    KnownDevice(
        "A100 40 GB",
        _teraflops(fp32=19.5, tf32=156.0, bf16=312.0, fp16=312.0),
        1555e9,
        "NVIDIA A100 datasheet, 2020, SXM4",
    ),
    KnownDevice(
        "A100 80 GB",
        _teraflops(fp32=19.5, tf32=156.0, bf16=312.0, fp16=312.0),
        2039e9,
        "NVIDIA A100 datasheet, 2021, SXM4",
    ),
    KnownDevice(
        "H100",
        _teraflops(fp32=66.9, tf32=494.7, bf16=989.4, fp16=989.4),
        3350e9,
        "NVIDIA H100 Tensor Core GPU Architecture white paper, 2023, SXM5; the bandwidth: its "
        "datasheet",
    ),
)


@dataclass(frozen=True)
class Prediction:
    """Where a workload's step turns compute-bound on a device that it was not measured on."""

    device: str
    dtype: Arithmetic
    ridge: float
    """FLOPs per byte."""
    turning_batch_size: float | None
    """None where it is memory-bound at any batch size."""


def predictions(cost: StepCost, arithmetic: Arithmetic) -> list[Prediction]:
    """Predict the turning batch sizes of a step on every known device, in each of its arithmetics.

    ``arithmetic``: in which the step was traced.
    """
    rows = list[Prediction]()
    for device in KNOWN_DEVICES:
        for dtype in device.flops_per_second:
            width = DTYPES[dtype].itemsize / DTYPES[arithmetic].itemsize
            ridge = device.ridge(dtype)
            turning = turning_batch_size(in_width(cost, width), ridge)
            rows.append(Prediction(device.name, dtype, ridge, turning))
    return rows
