"""A survey as text: what a step takes at each batch size, and what bounds it."""

from collections.abc import Iterator, Sequence

from bstune.hardware.roofline import advice
from bstune.hardware.survey import Survey
from bstune.system.console import count, number, seconds, wrap

MEGABYTE = 1e6
# Throughput within this factor of the best one is as good.
HARDLY_BETTER = 1.1
COLUMNS = ("batch size", "step time", "examples/s", "memory", "FLOPs/byte", "of roofline")


def survey_line(survey: Survey, was_kept: bool) -> str:
    """A survey in one line, for a study that goes on with it."""
    parts = [f"batch sizes up to {survey.largest_fit:,} fit"]
    if survey.threads is not None:
        parts.append(count(survey.threads, "thread"))
    if survey.timings:
        # There is one where there was no time for a second.
        ends = dict.fromkeys((survey.timings[0], survey.timings[-1]))
        steps = [f"{seconds(one.seconds)} at {one.batch_size:,}" for one in ends]
        parts.append(f"a step takes {' and '.join(steps)}")
    source = "of an earlier study" if was_kept else f"in {seconds(survey.seconds)}"
    return f"survey {source}: {', '.join(parts)}{_caution(survey)}"


def _caution(survey: Survey) -> str:
    """What a survey lacks, and why."""
    if survey.failure:
        return f"; no step was timed: {survey.failure}"
    caution = ""
    if not survey.whole:
        caution = "; there was no time for all of it"
    if survey.busy:
        caution += f"; the machine is busy ({survey.waited:.0%} of the time waited for): not kept"
    return caution


def survey_text(survey: Survey, was_kept: bool) -> str:
    """A survey's table and what follows from it, in 80 columns."""
    lines = [_aligned_cells(COLUMNS)]
    for timing in survey.timings:
        size = timing.batch_size
        cells = [
            f"{size:,}",
            seconds(timing.seconds),
            number(size / timing.seconds),
            f"{survey.memory(size) / MEGABYTE:,.0f} MB",
        ]
        if survey.roofline is not None:
            share = survey.roofline.allowed_seconds(size) / timing.seconds
            cells += [number(survey.roofline.intensity(size), 2), f"{share:.0%}"]
        lines.append(_aligned_cells(cells))
    lines.append("")
    for label, text in _statements(survey, was_kept):
        lines.append(wrap(label, text))
    return "\n".join(lines)


def _aligned_cells(cells: Sequence[str]) -> str:
    return "  ".join(cell.rjust(11) for cell in cells)


def _statements(survey: Survey, was_kept: bool) -> Iterator[tuple[str, str]]:
    """What follows from a survey, as labels and texts."""
    limit = f"{survey.limit / MEGABYTE:,.0f} MB"
    fits = f"batch size {survey.largest_fit:,} fits into {limit}"
    if survey.smallest_unfit is not None:
        fits += f", {survey.smallest_unfit:,} does not"
    yield "Memory", fits
    for size, reason in survey.refused:
        yield "Refused", f"batch size {size:,}: {reason}"
    if survey.threads is not None:
        yield "Threads", f"{survey.threads} of torch"
    rates = [(one.batch_size / one.seconds, one.batch_size) for one in survey.timings]
    if rates:
        best, _ = max(rates)
        enough = next(size for rate, size in rates if rate * HARDLY_BETTER >= best)
        text = f"from batch size {enough:,} on, a larger one gives hardly more examples per second"
        if enough == survey.timings[-1].batch_size:
            text = f"examples per second still rise at batch size {enough:,}"
        yield "Throughput", text
    roofline = survey.roofline
    if roofline is not None:
        yield (
            "Roofline",
            f"{number(roofline.peak / 1e9)} GFLOP/s in {roofline.precision}, "
            f"{number(roofline.bandwidth / 1e9)} GB/s, ridge at {number(roofline.ridge, 2)} FLOPs "
            f"per byte, as measured",
        )
        timings = [(one.batch_size, one.seconds) for one in survey.timings]
        for line in advice(roofline, timings):
            yield "Advice", line
    took = "kept from an earlier time" if was_kept else seconds(survey.seconds)
    yield "Took", took + _caution(survey)
