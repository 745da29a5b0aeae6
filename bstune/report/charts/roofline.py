"""The roofline: operations per second over operations per byte."""

from bstune.report.charts.traces import line_trace
from bstune.report.html import axis, chart
from bstune.report.schema import HardwareFile
from bstune.system.console import format_count, format_number


def roofline_chart(hardware: HardwareFile) -> str:
    """Draw the rates that steps achieved below the device's roof, over operations per byte.

    Empty where the device's limits, or the bytes of a step, are not known.
    """
    limits = hardware.limits
    if limits is None:
        return ""
    peak = limits.flops_per_second / 1e9
    ridge = limits.flops_per_second / limits.bytes_per_second
    intensities = list[float]()
    rates = list[float]()
    hover = list[str]()
    for row in hardware.derived.achieved:
        if not row.intensity:
            continue
        rate = row.share_of_peak * peak
        intensities.append(row.intensity)
        rates.append(rate)
        share = f"{row.share_of_peak:.1%} of the peak"
        hover.append(f"B = {format_count(row.batch_size)}: {format_number(rate)} GFLOP/s, {share}")
    if not intensities:
        return ""
    # The roof bends at the ridge alone. It reaches twice as far as the measured steps.
    corners = sorted({min(ridge, *intensities) / 2.0, ridge, max(ridge, *intensities) * 2.0})
    roof = [min(peak, limits.bytes_per_second / 1e9 * intensity) for intensity in corners]
    steps = line_trace(intensities, rates, "whole step, measured", hover, color="--purple")
    traces = [
        line_trace(corners, roof, "what the device can do", color="--ink"),
        steps | {"mode": "lines+markers"},
    ]
    layout = {"xaxis": axis("FLOPs per byte moved"), "yaxis": axis("GFLOP/s")}
    parts = ["Roofline: GFLOP/s over FLOPs per byte moved.", f"{hover[0]}.", f"{hover[-1]}."]
    if hardware.derived.bound:
        parts.append(hardware.derived.bound)
    return chart(traces, layout, height=380, alt=" ".join(parts))
