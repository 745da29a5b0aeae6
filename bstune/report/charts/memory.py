"""The memory that a step takes over batch size, and its limit."""

from bstune.report.charts.traces import line_trace
from bstune.report.html import axis, chart
from bstune.report.schema import HardwareFile
from bstune.system.console import format_count, plural

# The points of the line of memory over batch size.
MEMORY_POINTS = 33
BYTES_PER_MEBIBYTE = 2.0**20


def memory_chart(hardware: HardwareFile) -> str:
    """Draw the memory that probes took, the model fitted to them, and the device's limit.

    Empty where the device gives no figures.
    """
    ceiling = hardware.ceiling
    sizes = list[int]()
    taken = list[float]()
    hover = list[str]()
    for probe in ceiling.probes:
        if not probe.peak_bytes:
            continue
        mebibytes = probe.peak_bytes / BYTES_PER_MEBIBYTE
        sizes.append(probe.batch_size)
        taken.append(mebibytes)
        size = format_count(probe.batch_size)
        hover.append(f"B = {size}: {format_count(mebibytes)} MiB, {probe.outcome}")
    if not sizes:
        return ""
    # Probes are dots without a line: the line is the model's.
    dots = line_trace(sizes, taken, "probes", hover)
    traces = [dots | {"mode": "markers", "marker": {"size": 9, "color": "--blue"}}]
    # The smallest and the largest batch size that were asked for.
    span = [ceiling.smallest, hardware.high]
    model = ceiling.model
    if model is not None:
        # On logarithmic axes the model's line is bent, so that two points are too few.
        batch_sizes = list[float]()
        predicted = list[float]()
        for i in range(MEMORY_POINTS):
            share = i / (MEMORY_POINTS - 1)
            batch_size = ceiling.smallest * (hardware.high / ceiling.smallest) ** share
            batch_sizes.append(batch_size)
            predicted_bytes = model.base + model.per_example * batch_size
            predicted.append(predicted_bytes / BYTES_PER_MEBIBYTE)
        traces.append(line_trace(batch_sizes, predicted, "base + B x an example's"))
    if ceiling.at.limit is not None:
        limit = ceiling.at.limit / BYTES_PER_MEBIBYTE
        traces.append(line_trace(span, [limit, limit], "limit", color="--vermilion", dash="dash"))
    layout = {"xaxis": axis("batch size B (examples)"), "yaxis": axis("memory (MiB)")}
    alt = f"Memory over batch size: {plural(len(sizes), 'probe')}. {hover[-1]}."
    return chart(traces, layout, height=380, alt=alt)
