"""The seconds of a step over batch size, as the survey measured them."""

from bstune.report.charts.traces import Trace, line_trace
from bstune.report.html import axis, chart
from bstune.report.schema import HardwareFile
from bstune.system.console import format_count, format_number, format_seconds


def step_time_chart(hardware: HardwareFile) -> str:
    """Draw the measured seconds of a step with their quartiles over batch size.

    Seconds without the framework's part stand beside them. Empty where nothing was timed.
    """
    timings = hardware.measured.timings
    if not timings:
        return ""
    sizes = list[int]()
    seconds = list[float]()
    bare_seconds = list[float | None]()
    above = list[float]()
    below = list[float]()
    hover = list[str]()
    for row in timings:
        sizes.append(row.batch_size)
        seconds.append(row.seconds)
        bare_seconds.append(row.bare)
        above.append(row.high - row.seconds)
        below.append(row.seconds - row.low)
        rate = format_number(row.batch_size / row.seconds)
        took = format_seconds(row.seconds)
        hover.append(f"B = {format_count(row.batch_size)}: {took}, {rate} examples a second")
    bars: Trace = {"type": "data", "symmetric": False, "color": "--blue"}
    bars |= {"array": above, "arrayminus": below}
    measured = line_trace(sizes, seconds, "measured, with quartiles", hover)
    traces = [measured | {"mode": "lines+markers", "error_y": bars}]
    # A line through only some of the batch sizes would look as if all had been measured.
    if all(bare_seconds):
        traces.append(
            line_trace(sizes, bare_seconds, "without the framework", color="--grey", dash="dash")
        )
    layout = {"xaxis": axis("batch size B (examples)"), "yaxis": axis("seconds per step, tau(B)")}
    alt = f"Seconds per step over batch size. {hover[0]}. {hover[-1]}."
    return chart(traces, layout, height=380, alt=alt)
