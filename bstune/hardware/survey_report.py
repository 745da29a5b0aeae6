"""A survey in words: the lines before a study, and the tables and the advice of ``python -m bstune.hardware``."""

from dataclasses import asdict

from rich import box
from rich.console import Group
from rich.table import Table

from bstune.hardware.roofline_figure import draw_roofline
from bstune.hardware.survey import Survey, probe_text
from bstune.output import Output, write_text
from bstune.records import dump_json
from bstune.report import format_count, format_number, format_seconds

MOST_MISALIGNED = 8  # rows
MUCH_OVERHEAD = 0.2  # of a step


def survey_json(survey: Survey) -> str:
    """Return the survey as strict JSON, with what follows from it."""
    model = survey.step_time
    derived = {
        "step_time": None
        if model is None
        else {"overhead": model.overhead, "per_example": model.per_example, "residual": model.residual},
        "left_out_error": survey.left_out_error,
        "turning_batch_size": survey.turning_batch_size,
        "achieved": [asdict(row) for row in survey.achieved],
        "misaligned": [asdict(row) for row in survey.misaligned],
        "plateau": survey.plateau.batch_size,
        "advice": advice(survey),
    }
    return dump_json({**asdict(survey), "derived": derived}, indent=2) + "\n"


def write_survey(survey: Survey, output: Output) -> None:
    """Write ``hardware.json`` and, where the step's cost is known, ``roofline.png``."""
    write_text(output.survey, survey_json(survey))
    if survey.cost is not None and survey.limits is not None:
        sizes = [size for size, _ in survey.pairs]
        draw_roofline(survey.cost, survey.limits, sizes, survey.pairs, survey.workload, output.roofline)


def headline(survey: Survey, kept: bool) -> tuple[str, ...]:
    """Return the lines that a study's plan says of a survey; ``kept``: it was measured before."""
    sizes = [timing.batch_size for timing in survey.measured.timings]
    taken = "kept from before" if kept else f"measured in {format_seconds(survey.seconds)}"
    lines = [
        f"{_ceiling_text(survey)}; tau(B) at {len(sizes)} batch sizes from {format_count(sizes[0])} to "
        f"{format_count(sizes[-1])} ({taken})"
    ]
    return (*lines, *survey.notes)


def survey_tables(survey: Survey) -> Group:
    """Return all that a survey found, for 80 columns."""
    facts = Table.grid(padding=(0, 2))
    facts.add_column(no_wrap=True, style="bold")
    facts.add_column(overflow="fold")
    facts.add_row("device", f"{survey.device} in {survey.precision}{_limits_text(survey)}")
    facts.add_row("memory", _ceiling_text(survey))
    facts.add_row("probes", f"{len(survey.ceiling.probes)}: " + "; ".join(map(probe_text, survey.ceiling.probes)))
    facts.add_row("step time", _model_text(survey))
    if survey.cost is not None:
        facts.add_row("roofline", _roofline_text(survey))
    for note in survey.notes:
        facts.add_row("note", note)
    for line in advice(survey):
        facts.add_row("advice", line)
    facts.add_row("took", format_seconds(survey.seconds))
    return Group(_timings_table(survey), facts)


def advice(survey: Survey) -> list[str]:
    """Return what follows for the choice of a batch size, each with its number."""
    lines = []
    plateau, ceiling = survey.plateau, survey.ceiling.batch_size
    if len(survey.pairs) < 2:
        lines.append("too little was timed to say more: raise hardware.seconds")
    elif plateau.batch_size < ceiling:
        lines.append(
            f"from batch size {format_count(plateau.batch_size)} on, a larger one hardly gives more examples a second "
            f"({format_number(plateau.throughput)} there, {format_number(_most(survey))} at most): beyond it only "
            "fewer steps can pay"
        )
    else:
        lines.append(f"examples a second still rise at the largest batch size, {format_count(ceiling)}")
    power, tau = 2 ** (ceiling.bit_length() - 1), survey.step_time
    if survey.ceiling.above is not None and power != ceiling:
        more = "" if tau is None else f" ({ceiling / tau(ceiling) * tau(power) / power - 1.0:+.1%} examples a second)"
        below = format_count(power)
        lines.append(f"{format_count(ceiling)} fits: no need to fall back to {below}, the power of two below it{more}")
    elif survey.ceiling.above is None and ceiling == survey.high:
        lines.append(f"the range ends at {format_count(ceiling)}, not the memory: see search.batch_size.high")
    heavy = [timing for timing in survey.measured.timings if (timing.overhead_share or 0.0) > MUCH_OVERHEAD]
    if heavy:
        lines.append(
            f"the framework takes {heavy[0].overhead_share:.0%} of a step at batch size "
            f"{format_count(heavy[0].batch_size)}, over {MUCH_OVERHEAD:.0%} up to {format_count(heavy[-1].batch_size)}"
        )
    for row in survey.misaligned[:MOST_MISALIGNED]:
        gain = "" if row.predicted_gain is None else f": predicted {row.predicted_gain:.2f} times its throughput"
        lines.append(f"{row.name} ({row.kind}): pad {row.dimension} from {row.size} to {row.padded}{gain}")
    return lines


def _most(survey: Survey) -> float:
    return max(timing.throughput for timing in survey.measured.timings)


def _ceiling_text(survey: Survey) -> str:
    found = survey.ceiling
    limit, law = f"{found.at.limit / 2**20:,.0f} MiB", ""
    if found.model is not None:
        per_example = format_number(found.model.per_example / 2**10)
        law = f" ({found.model.base / 2**20:,.0f} MiB and {per_example} KiB an example)"
    if found.above is None:
        return f"batch size {format_count(found.batch_size)}, the largest of the range, fits in {limit}{law}"
    exact = "exactly" if found.precision == 1 else f"to {format_count(found.precision)} examples"
    beyond = format_count(found.above.batch_size)
    like, noise = found.spread_examples, ""
    if found.spread is not None and like is not None and like > found.precision:
        noise = f"; like processes differ by {found.spread:.1%}, or {format_count(like)} examples"
    return f"ceiling {format_count(found.batch_size)} {exact}: {beyond} does not fit in {limit}{law}{noise}"


def _limits_text(survey: Survey) -> str:
    limits = survey.limits
    if limits is None:
        return ""
    flops, moved = (format_number(rate / 1e9) for rate in (limits.flops_per_second, limits.bytes_per_second))
    ridge = format_number(limits.ridge)
    return f"; measured ceilings {flops} GFLOP/s in {limits.dtype}, {moved} GB/s, ridge {ridge} FLOPs per byte"


def _model_text(survey: Survey) -> str:
    model, measured = survey.step_time, survey.measured
    if model is None:
        return "one batch size was measured: no model between them"
    text = (
        f"tau(B) = {format_seconds(model.overhead)} + {format_number(1e6 * model.per_example)} us B within "
        f"{model.residual:.1%} (median), joined through the measured sizes"
    )
    if survey.left_out_error is not None:
        text += f"; a size left out is predicted within {survey.left_out_error:.1%} (median)"
    if measured.left_out:
        text += f"; left out for time: {', '.join(map(format_count, measured.left_out))}"
    if measured.cut:
        text += f"; fewer repeats for time: {', '.join(map(format_count, measured.cut))}"
    return text


def _roofline_text(survey: Survey) -> str:
    turning = survey.turning_batch_size
    turns = (
        "memory-bound at any batch size"
        if turning is None
        else f"memory-bound below batch size {format_count(turning)}, compute-bound from there on"
    )
    return f"by its shapes the step is {turns}"


def _timings_table(survey: Survey) -> Table:
    """Return one row a batch size; spread is between the quartiles over the median, drift between repeats."""
    table = Table(title="seconds per step", title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    names = ["batch size", "step", "spread", "drift", "examples/s", "overhead", "roof", "peak"]
    for name in names if survey.achieved else names[:-2]:
        table.add_column(name, justify="right", no_wrap=True)
    shares = {row.batch_size: row for row in survey.achieved}
    for timing in survey.measured.timings:
        row = shares.get(timing.batch_size)
        table.add_row(
            format_count(timing.batch_size),
            format_seconds(timing.seconds),
            f"{(timing.high - timing.low) / timing.seconds:.0%}",
            f"{timing.drift:.0%}",
            format_number(timing.throughput),
            "-" if timing.overhead_share is None else f"{timing.overhead_share:.0%}",
            *(() if row is None else (f"{row.share_of_roofline:.0%}", f"{row.share_of_peak:.0%}")),
        )
    return table
