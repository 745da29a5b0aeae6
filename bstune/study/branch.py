"""The critical batch size of a run, now: ``bstune branch`` goes on from its checkpoint at several batch sizes.

The weights, the optimizer's state and the call-backs' are the checkpoint's, and so is the learning rate, which from
there on stays, times (B/B0)^lr-exponent. Each branch trains on the same examples in the same order. Reported is the
largest batch size that loses nothing, up to a tolerance, against the run's own (Merrill et al. 2025, arXiv 2505.23971).
"""

import argparse
import math
import os
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from rich.table import Table

from bstune.core.branching import LargestBatch, largest_batch
from bstune.core.errors import ConfigError
from bstune.core.records import Target, TrialSpec, dump_json
from bstune.core.search_space import HALF_LIVES, OVERRIDE_LR
from bstune.options import option_at
from bstune.study.prepare import compose_checked
from bstune.system.console import format_count, format_number, plain_console, plural, quieten
from bstune.system.inputs import open_regular
from bstune.system.terminal import ArgumentParser, listed

LEVEL = 0.9  # of the interval over seeds
MULTIPLES = (1, 2, 4, 8, 16, 32)  # of the run's own batch size
MIN_STEPS = 4  # of a branch


@dataclass(frozen=True)
class Branch:
    """One branch, as it ended."""

    batch_size: int
    seed: int
    steps: int
    status: str
    value: float | None  # of the target's metric; None: it was not finite, or did not fit
    message: str | None


@dataclass(frozen=True)
class Branches:
    """All branches of a checkpoint, and what they come to."""

    checkpoint: str
    metric: str
    start: float | None  # the metric at the checkpoint
    batch_size: int  # the run's own
    examples: int
    tolerance: float
    lr_exponent: float
    branches: tuple[Branch, ...]
    largest: LargestBatch


def main(arguments: list[str]) -> str:
    """Run ``bstune branch`` with the arguments after it, and give all branches as JSON."""
    parser = ArgumentParser(
        prog="bstune branch",
        usage="%(prog)s CHECKPOINT --batch-size B0 --examples N [--batch-sizes N,...] workload=NAME [OPTION=VALUE ...]",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    sizes, seeds = partial(listed, int, 1, 10**15), partial(listed, int, 0, 2**32 - 1)
    parser.add_argument(
        "checkpoint", metavar="CHECKPOINT", type=Path, help="that Lightning's Trainer has written"
    )
    count = partial(_between, int, 1, 10**15)
    parser.add_argument(
        "--batch-size", type=count, required=True, metavar="B0", help="of the run until then"
    )
    parser.add_argument(
        "--examples", type=count, required=True, metavar="N", help="that each branch trains on"
    )
    parser.add_argument(
        "--batch-sizes", type=sizes, help="to go on at (default: 1, 2, 4, 8, 16, 32 times B0)"
    )
    parser.add_argument(
        "--seeds", type=seeds, default=(0, 1, 2), help="of the order of the data (default: 0,1,2)"
    )
    parser.add_argument(
        "--tolerance",
        type=partial(_between, float, 0.0, 1e15),
        default=0.01,
        help="loss of the target's metric that counts as none (default: 0.01)",
    )
    parser.add_argument(
        "--lr-exponent",
        type=partial(_between, float, -2.0, 2.0),
        default=0.5,
        help="of the learning rate's growth with B (default: 0.5)",
    )
    parser.add_argument(
        "--trusted", action="store_true", help="read a checkpoint that holds more than plain data"
    )
    options, overrides = parser.parse_known_args(arguments)
    console = plain_console()
    found = run_branches(
        options.checkpoint,
        [*overrides, "mlflow.enabled=false"],
        batch_size=options.batch_size,
        batch_sizes=options.batch_sizes,
        examples=options.examples,
        seeds=options.seeds,
        tolerance=options.tolerance,
        lr_exponent=options.lr_exponent,
        trusted=options.trusted,
        log=lambda line: console.print(line, soft_wrap=True),
    )
    console.print(branch_table(found))
    for line in branch_lines(found):
        console.print(line, soft_wrap=True)
    return dump_json(asdict(found), indent=1)


def _between(kind: Callable[[str], float], smallest: float, largest: float, text: str) -> float:
    """Parse an option's one value."""
    try:
        value = kind(text)
    except ValueError:
        value = math.nan
    if not smallest <= value <= largest:
        what = (
            f"{'an integer' if kind is int else 'a number'} from {smallest:.10g} to {largest:.10g}"
        )
        raise argparse.ArgumentTypeError(f"takes {what}, but got {text!r}")
    return value


def run_branches(
    path: Path,
    overrides: Sequence[str],
    *,
    batch_size: int,
    batch_sizes: Sequence[int] | None,
    examples: int,
    seeds: Sequence[int],
    tolerance: float,
    lr_exponent: float,
    trusted: bool,
    log: Callable[[str], None],
) -> Branches:
    """Train all branches, one after another, of a composed workload; ConfigError for what cannot be branched."""
    composed = compose_checked(list(overrides))
    options = composed.options
    if composed.recipe is None:
        raise ConfigError(
            "recorded runs have no checkpoint to go on from: name a workload that is trained"
        )
    os.close(open_regular(path, "the checkpoint"))  # seconds before it is read
    quieten()
    # torch and lightning: 4 s, which a mistake need not wait for
    from bstune.trial.branch import branch, read_checkpoint
    from bstune.trial.workload import load

    fixed = [name for name in (*HALF_LIVES, OVERRIDE_LR) if option_at(options, name)]
    if fixed:
        raise ConfigError(
            f"a branch has the checkpoint's optimizer, which {fixed[0]} would not change: leave it out"
        )
    if options.devices > 1:
        raise ConfigError(
            f"branches are trained on one device, but got devices={options.devices}: use devices=1"
        )
    checkpoint = read_checkpoint(path, trusted)
    workload, protocol = load(options, composed.recipe)
    sizes = _sizes(batch_size, batch_sizes, examples, workload.train_examples)
    examples = (
        -(-examples // sizes[-1]) * sizes[-1]
    )  # whole batches of the largest; of the others as near as they come
    lr = options.scaling.lr  # until the checkpoint's own is read
    done, start = list[Branch](), None
    for seed in seeds:
        for size in sizes:
            own = TrialSpec(0, 0, batch_size, lr, None, seed)
            record, start = branch(
                workload, protocol, path, checkpoint, own, size, examples, lr_exponent
            )
            value = record.history[-1][1] if record.history else None
            done.append(Branch(size, seed, record.steps, record.status, value, record.message))
            shown = (
                record.message
                or f"{protocol.target.metric} {'not finite' if value is None else f'{value:.5g}'}"
            )
            log(f"seed {seed}  B {size}  {plural(record.steps, 'step')}  {shown}")
    failed = next((one for one in done if one.batch_size == batch_size and one.value is None), None)
    if failed is not None:
        raise ConfigError(
            f"the run's own batch size, {batch_size}, cannot go on from {path}: {failed.message}"
        )
    by_seed = [_losses(done, seed, batch_size, protocol.target) for seed in seeds]
    largest = largest_batch(by_seed, tolerance, LEVEL)
    metric = protocol.target.metric
    return Branches(
        str(path), metric, start, batch_size, examples, tolerance, lr_exponent, tuple(done), largest
    )


def _sizes(own: int, given: Sequence[int] | None, examples: int, data: int) -> list[int]:
    """Return the batch sizes to go on at, the run's own the smallest one; ConfigError where there are not two."""
    if given is None:
        within = [
            own * multiple
            for multiple in MULTIPLES
            if own * multiple <= min(data, examples // MIN_STEPS)
        ]
        given = within if len(within) > 1 else [2 * own]
    sizes = sorted({own, *given})
    if sizes[0] < own:
        raise ConfigError(
            f"--batch-sizes must be over the run's own, --batch-size={own}, but got {sizes[0]}"
        )
    if len(sizes) < 2:
        raise ConfigError(
            f"--batch-sizes={own} is the run's own, --batch-size={own}: give at least one larger one"
        )
    if sizes[-1] > data:
        raise ConfigError(
            f"batch size {sizes[-1]} is larger than the training data, {data} examples: "
            f"give --batch-sizes of at most {data}, over --batch-size={own}"
        )
    if sizes[-1] * MIN_STEPS > examples:
        raise ConfigError(
            f"--examples={examples} are fewer than {MIN_STEPS} steps at batch size {sizes[-1]}: give "
            f"--examples={MIN_STEPS * sizes[-1]} or more"
        )
    return sizes


def _losses(done: Sequence[Branch], seed: int, own: int, target: Target) -> dict[int, float]:
    """Return by how much each batch size is worse than the run's own, on one seed; infinity where it diverged."""
    gaps = {
        one.batch_size: math.inf if one.value is None else target.gap(one.value)
        for one in done
        if one.seed == seed and one.status != "out of memory"
    }
    return {size: gap - gaps[own] for size, gap in gaps.items()}


def branch_table(found: Branches) -> Table:
    """Return batch sizes, steps and the metric over seeds as a table."""
    table = Table(title=f"{found.checkpoint}, {format_count(found.examples)} examples further")
    for name in (
        "batch size",
        "steps",
        "learning rate",
        f"{found.metric}, mean over seeds",
        "range",
    ):
        table.add_column(name, justify="right")
    for size in sorted({one.batch_size for one in found.branches}):
        own = [one for one in found.branches if one.batch_size == size]
        values = [one.value for one in own if one.value is not None]
        mean, ends = (
            (f"{statistics.fmean(values):.5g}", f"{min(values):.5g} to {max(values):.5g}")
            if values
            else ("", "")
        )
        missing = ", ".join(sorted({one.status for one in own if one.value is None}))
        rate = (size / found.batch_size) ** found.lr_exponent
        table.add_row(
            str(size),
            str(own[0].steps),
            f"{rate:.3g}x",
            mean,
            ", ".join(filter(None, (ends, missing))),
        )
    return table


def branch_lines(found: Branches) -> list[str]:
    """Return what the branches come to, in words."""
    largest, seeds = found.largest, len({one.seed for one in found.branches})
    size = format_count(largest.batch_size)
    no_more = f"loses at most {format_number(found.tolerance)} of {found.metric} against {found.batch_size}"
    if largest.unbounded == seeds:
        line = f"every batch size up to {size} {no_more}: look at larger ones, --batch-sizes"
    elif largest.low is None:
        line = f"batch size {size} {no_more}, on one seed: give more --seeds for an interval"
    elif largest.high is None:
        line = (
            f"batch size {size} {no_more} ({LEVEL:.0%}: {format_count(largest.low)} to no end seen: "
            f"{largest.unbounded} of {seeds} seeds lost nothing at the largest one)"
        )
    else:
        ends = f"{format_count(largest.low)} to {format_count(largest.high)}"
        line = f"batch size {size} {no_more} ({LEVEL:.0%}: {ends}, over {plural(seeds, 'seed')})"
    start = "" if found.start is None else f", from {format_number(found.start)} at the checkpoint"
    lines = [f"LARGEST   {line}{start}"]
    if any(one.status == "out of memory" for one in found.branches):
        lines.append(
            "MEMORY    what does not fit is left out: protocol.micro_batch_size=N accumulates it"
        )
    return lines
