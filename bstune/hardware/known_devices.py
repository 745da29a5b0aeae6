"""Devices that one may not have: their makers' figures, and what a step would be bound by there.

Peaks are dense. Datasheets of Ampere and Hopper print twice as much for matrices of which half is
zero ("with sparsity"): 624 TFLOP/s over 1.5 TB/s gives an A100 a ridge of 416 FLOPs per byte, where
products of whole matrices have 312 over 1.555, which is 201.
No program reaches them: a survey's own roof, which is measured, lies lower at both its sides.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from bstune.hardware.roofline import (
    DTYPES,
    Arithmetic,
    DeviceLimits,
    StepCost,
    allowed_seconds,
    in_width,
    turning_batch_size,
)


@dataclass(frozen=True)
class KnownDevice:
    """What a device can do at most, as its maker states it."""

    name: str
    flops_per_second: Mapping[Arithmetic, float]
    """The peak of dense products, by the arithmetic that the device can compute in."""
    bytes_per_second: float
    """The bandwidth of its memory."""
    source: str
    """Where the figures are from."""

    def limits(self, arithmetic: Arithmetic) -> DeviceLimits:
        """Give the maker's figures in the form of the limits that a survey measures."""
        return DeviceLimits(arithmetic, self.flops_per_second[arithmetic], self.bytes_per_second)


def _teraflops(**peaks: float) -> Mapping[Arithmetic, float]:
    """Convert peaks in TFLOP/s, by the name of an arithmetic, to FLOP/s."""
    return {name: 1e12 * peak for name, peak in peaks.items()}  # type: ignore[misc]


KNOWN_DEVICES = (
    KnownDevice(
        name="V100",
        flops_per_second=_teraflops(fp32=15.7, fp16=125.0),
        bytes_per_second=900e9,
        source="NVIDIA V100 datasheet, 2020, SXM2",
    ),
    KnownDevice(
        name="T4",
        flops_per_second=_teraflops(fp32=8.1, fp16=65.0),
        bytes_per_second=320e9,
        source="NVIDIA T4 product brief, 2020",
    ),
    KnownDevice(
        name="A100 40 GB",
        flops_per_second=_teraflops(fp32=19.5, tf32=156.0, bf16=312.0, fp16=312.0),
        bytes_per_second=1555e9,
        source="NVIDIA A100 datasheet, 2020, SXM4",
    ),
    KnownDevice(
        name="A100 80 GB",
        flops_per_second=_teraflops(fp32=19.5, tf32=156.0, bf16=312.0, fp16=312.0),
        bytes_per_second=2039e9,
        source="NVIDIA A100 datasheet, 2021, SXM4",
    ),
    KnownDevice(
        name="H100",
        flops_per_second=_teraflops(fp32=66.9, tf32=494.7, bf16=989.4, fp16=989.4),
        bytes_per_second=3350e9,
        source="NVIDIA H100 Tensor Core GPU Architecture white paper, 2023, SXM5; the bandwidth: "
        "its datasheet",
    ),
    KnownDevice(
        name="H200",
        flops_per_second=_teraflops(fp32=66.9, tf32=494.7, bf16=989.4, fp16=989.4),
        bytes_per_second=4800e9,
        source="the bandwidth: NVIDIA H200 datasheet, 2024, SXM; the peaks: those of the H100",
    ),
)


@dataclass(frozen=True)
class Prediction:
    """A workload's step on a device that it was not measured on."""

    device: str
    dtype: Arithmetic
    ridge: float
    """FLOPs per byte."""
    turning_batch_size: float | None
    """The batch size from which on it is compute-bound; None: it is memory-bound at any."""
    batch_size: int
    """The batch size of the step whose seconds are predicted."""
    least_seconds: float
    """The seconds that its maker's peaks allow for that step: a real one takes longer."""


def predictions(cost: StepCost, arithmetic: Arithmetic, batch_size: int) -> list[Prediction]:
    """Predict a step on every known device, in each of its arithmetics.

    Args:
        cost: of the step, as it was traced.
        arithmetic: in which it was traced.
        batch_size: of the step whose seconds are predicted.
    """
    rows = list[Prediction]()
    for device in KNOWN_DEVICES:
        for dtype in device.flops_per_second:
            limits = device.limits(dtype)
            cost_there = in_width(cost, DTYPES[dtype].itemsize / DTYPES[arithmetic].itemsize)
            rows.append(
                Prediction(
                    device=device.name,
                    dtype=dtype,
                    ridge=limits.ridge,
                    turning_batch_size=turning_batch_size(cost_there, limits.ridge),
                    batch_size=batch_size,
                    least_seconds=allowed_seconds(cost_there, limits, batch_size),
                )
            )
    return rows
