r"""The critical batch size of a run, now: ``bstune branch`` goes on from its checkpoint.

The weights, the optimizer's state and the call-backs' are the checkpoint's, and so is the learning
rate, which from there on stays, times (B/B0)^lr-exponent. Each branch trains on the same examples
in the same order. Reported is the largest batch size that loses nothing, up to a tolerance, against
the run's own (Merrill et al. 2025, arXiv 2505.23971)::

    bstune branch run.ckpt --batch-size 32 --examples 6400 --batch-sizes 64,128,256 \
        workload=shakespeare_lstm

The answer is where the loss of the metric first exceeds ``--tolerance``, on straight lines over log
B, with Student's interval over three ``--seeds`` or more. Where the loss jumps, it says between
which batch sizes. A file of another workload is refused by the first weight that differs. One that
holds more than plain data needs ``--trusted``, which runs what is in it.
"""

import argparse
import math
import os
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path

from rich.table import Table

from bstune.core.branching import LEAST_SEEDS, Branch, Branches, largest_batch
from bstune.core.errors import ConfigError
from bstune.core.records import Target, TrialResult, TrialSpec, dump_json
from bstune.core.search_space import HALF_LIVES, OVERRIDE_LR
from bstune.options import StudyOptions, option_at
from bstune.study.prepare import compose_checked
from bstune.system.console import format_count, format_number, plain_console, plural, quieten
from bstune.system.inputs import open_regular
from bstune.system.terminal import ArgumentParser, parse_values

# Level of the interval over seeds.
BRANCH_LEVEL = 0.9
# By default branches have so many times the run's own batch size.
MULTIPLES = (1, 2, 4, 8, 16, 32)
# Fewest steps of a branch.
MIN_BRANCH_STEPS = 4


def main(arguments: list[str]) -> str:
    """Run ``bstune branch`` with the arguments after it, and give all branches as JSON."""
    options, overrides = _parser().parse_known_args(arguments)
    console = plain_console()
    branches = run_branches(
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
    console.print(branch_table(branches))
    for line in branch_lines(branches):
        console.print(line, soft_wrap=True)
    return dump_json(asdict(branches), indent=1)


def _parser() -> ArgumentParser:
    """Make the parser of the verb's arguments."""
    parser = ArgumentParser(
        prog="bstune branch",
        usage=(
            "%(prog)s CHECKPOINT --batch-size B0 --examples N [--batch-sizes N,...] "
            "workload=NAME [OPTION=VALUE ...]"
        ),
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    sizes = partial(parse_values, int, 1, 10**15)
    seeds = partial(parse_values, int, 0, 2**32 - 1)
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
    return parser


def _between(kind: Callable[[str], float], smallest: float, largest: float, text: str) -> float:
    """Parse an option's value, of a kind such as ``int``, between two bounds."""
    try:
        value = kind(text)
    except ValueError:
        value = math.nan
    if not smallest <= value <= largest:
        what = "an integer" if kind is int else "a number"
        span = f"from {smallest:.10g} to {largest:.10g}"
        raise argparse.ArgumentTypeError(f"takes {what} {span}, but got {text!r}")
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
    """Go on from a checkpoint at several batch sizes; find the largest that loses nothing.

    Args:
        path: of the checkpoint.
        overrides: options of the command line that compose its workload.
        batch_size: of the run until then.
        batch_sizes: larger ones to go on at; None: ``MULTIPLES`` of the run's own.
        examples: on which each branch trains, rounded up to whole batches of the largest size.
        seeds: of the order of the data; each has branches of its own.
        tolerance: loss of the metric that counts as none.
        lr_exponent: of the learning rate's growth with the batch size.
        trusted: read a checkpoint that holds more than plain data.
        log: takes a line for each branch.

    Raises:
        ConfigError: for what cannot be branched. What needs neither the checkpoint nor the data
            is refused before torch and Lightning are imported, which takes seconds.
    """
    composed = compose_checked(list(overrides))
    options = composed.options
    if composed.recipe is None:
        raise ConfigError(
            "recorded runs have no checkpoint to go on from: name a workload that is trained"
        )
    _check_options(options)
    # Without given sizes, the smallest larger one has to be possible at least.
    _check_sizes(batch_size, batch_sizes or (2 * batch_size,), examples)
    os.close(open_regular(path, "the checkpoint"))

    quieten()
    # torch and Lightning take seconds to import, which a mistake need not wait for.
    from bstune.trial.branch import branch, examples_seen, read_checkpoint
    from bstune.trial.workload import load_workload

    checkpoint = read_checkpoint(path, trusted)
    workload, protocol = load_workload(options, composed.recipe)
    sizes = _sizes(batch_size, batch_sizes, examples, workload.train_examples)
    # Whole batches of the largest size. The other sizes train on as nearly as many examples.
    examples = math.ceil(examples / sizes[-1]) * sizes[-1]
    branches = list[Branch]()
    start: float | None = None
    for seed in seeds:
        own_spec = _spec_of_run(options, batch_size, seed)
        for size in sizes:
            # Each branch measures the checkpoint's metric anew. The last one's is given.
            record, start = branch(
                workload, protocol, path, checkpoint, own_spec, size, examples, lr_exponent
            )
            ended = _branch_of(record, size, seed)
            branches.append(ended)
            log(_branch_line(ended, protocol.target))

    _check_own_size(branches, batch_size, path)
    losses_by_seed = [_losses(branches, seed, batch_size, protocol.target) for seed in seeds]
    return Branches(
        checkpoint=str(path),
        metric=protocol.target.metric,
        start=start,
        batch_size=batch_size,
        examples=examples,
        tolerance=tolerance,
        lr_exponent=lr_exponent,
        branches=tuple(branches),
        largest=largest_batch(losses_by_seed, tolerance, BRANCH_LEVEL),
        examples_seen=examples_seen(checkpoint, batch_size),
        tokens=options.workload.tokens,
    )


def _branch_of(record: TrialResult, batch_size: int, seed: int) -> Branch:
    """Make a branch of its trial's record."""
    # A branch is evaluated at its end alone; one that failed has no value.
    value: float | None = None
    if record.history:
        value = record.history[-1][1]
    return Branch(
        batch_size=batch_size,
        seed=seed,
        steps=record.steps,
        status=record.status,
        value=value,
        message=record.end_message,
    )


def _check_own_size(branches: Sequence[Branch], own_size: int, path: Path) -> None:
    """Raise ConfigError where a branch at the run's own batch size came to no value.

    All other branches are measured against it.
    """
    for branch in branches:
        if branch.batch_size == own_size and branch.value is None:
            raise ConfigError(
                f"the run's own batch size, {own_size}, cannot go on from {path}: {branch.message}"
            )


def _check_options(options: StudyOptions) -> None:
    """Refuse options that a branch, which goes on with the checkpoint's state, cannot have."""
    changes_optimizer = [name for name in (*HALF_LIVES, OVERRIDE_LR) if option_at(options, name)]
    if changes_optimizer:
        raise ConfigError(
            f"a branch has the checkpoint's optimizer, which {changes_optimizer[0]} would not "
            "change: leave it out"
        )
    if options.devices > 1:
        raise ConfigError(
            f"branches are trained on one device, but got devices={options.devices}: use devices=1"
        )


def _branch_line(branch: Branch, target: Target) -> str:
    """Say in a line what a branch came to, or why it came to nothing."""
    metric = "not finite"
    if branch.value is not None:
        metric = format_number(branch.value, 5)
    shown = branch.message or f"{target.metric} {metric}"
    steps = plural(branch.steps, "step")
    return f"seed {branch.seed}  B {branch.batch_size}  {steps}  {shown}"


def _spec_of_run(options: StudyOptions, batch_size: int, seed: int) -> TrialSpec:
    """Describe the run until its checkpoint as a trial, which no search has numbered.

    Its rate only builds the module: the optimizers then take the checkpoint's state.
    """
    return TrialSpec(
        number=0,
        trial_index=0,
        batch_size=batch_size,
        lr=options.scaling.lr,
        delta=None,
        seed=seed,
    )


def _sizes(
    own_size: int, given: Sequence[int] | None, examples: int, train_examples: int
) -> tuple[int, ...]:
    """Choose the batch sizes to go on at, in rising order; the run's own is the smallest.

    ``given``: larger ones; None: the multiples of the run's own that are small enough for the data
    and for the examples.

    Raises:
        ConfigError: where there is no larger one, or one is too large.
    """
    if given is None:
        most = min(train_examples, examples // MIN_BRANCH_STEPS)
        larger = [
            own_size * multiple for multiple in MULTIPLES if own_size < own_size * multiple <= most
        ]
        # Where not even twice the run's own is small enough, that is refused below.
        given = larger or [2 * own_size]
    sizes = _check_sizes(own_size, given, examples)
    if sizes[-1] > train_examples:
        raise ConfigError(
            f"batch size {sizes[-1]} is larger than the training data, {train_examples} examples: "
            f"give --batch-sizes of at most {train_examples}, over --batch-size={own_size}"
        )
    return sizes


def _check_sizes(own_size: int, given: Sequence[int], examples: int) -> tuple[int, ...]:
    """Sort the run's own batch size and those to go on at; ConfigError for sizes that cannot be."""
    sizes = tuple(sorted({own_size, *given}))
    if sizes[0] < own_size:
        raise ConfigError(
            f"--batch-sizes must be over the run's own, --batch-size={own_size}, but got {sizes[0]}"
        )
    if len(sizes) < 2:
        raise ConfigError(
            f"--batch-sizes={own_size} is the run's own, --batch-size={own_size}: give at least "
            "one larger one"
        )
    if sizes[-1] * MIN_BRANCH_STEPS > examples:
        raise ConfigError(
            f"--examples={examples} are fewer than {MIN_BRANCH_STEPS} steps at batch size "
            f"{sizes[-1]}: give --examples={MIN_BRANCH_STEPS * sizes[-1]} or more"
        )
    return sizes


def _losses(
    branches: Sequence[Branch], seed: int, own_size: int, target: Target
) -> dict[int, float]:
    """Compute by how much each batch size is worse than the run's own on one seed, in the metric.

    It is infinite where the branch diverged. One that did not fit into memory is left out.
    """
    # A gap is how far the metric is from the target: a difference of gaps is one of metrics.
    gaps = dict[int, float]()
    for branch in branches:
        if branch.seed == seed and branch.status != "out of memory":
            gap = math.inf
            if branch.value is not None:
                gap = target.gap(branch.value)
            gaps[branch.batch_size] = gap
    return {size: gap - gaps[own_size] for size, gap in gaps.items()}


def branch_table(branches: Branches) -> Table:
    """Make a table with a row for each batch size: its steps, learning rate and metric over seeds.

    Learning rates are multiples of the run's own. The range goes from the least to the greatest
    metric over seeds; the statuses of branches without a metric follow it.
    """
    table = Table(
        title=f"{branches.checkpoint}, {format_count(branches.examples)} examples further"
    )
    columns = (
        "batch size",
        "steps",
        "learning rate",
        f"{branches.metric}, mean over seeds",
        "range",
    )
    for column in columns:
        table.add_column(column, justify="right")
    for size in sorted({branch.batch_size for branch in branches.branches}):
        of_size = [branch for branch in branches.branches if branch.batch_size == size]
        values = [branch.value for branch in of_size if branch.value is not None]
        statuses = sorted({branch.status for branch in of_size if branch.value is None})
        mean = ""
        remarks = list[str]()
        if values:
            mean = f"{statistics.fmean(values):.5g}"
            remarks.append(f"{min(values):.5g} to {max(values):.5g}")
        if statuses:
            remarks.append(", ".join(statuses))
        rate_factor = (size / branches.batch_size) ** branches.lr_exponent
        table.add_row(
            str(size), str(of_size[0].steps), f"{rate_factor:.3g}x", mean, ", ".join(remarks)
        )
    return table


def branch_lines(branches: Branches) -> list[str]:
    """Say in labelled lines what the branches come to."""
    lines = [f"LARGEST   {_largest_text(branches)}"]
    if branches.start is not None:
        lines[0] += f", from {format_number(branches.start)} at the checkpoint"
    if any(branch.status == "out of memory" for branch in branches.branches):
        lines.append(
            "MEMORY    what does not fit is left out: protocol.micro_batch_size=N accumulates it"
        )
    return lines


def _largest_text(branches: Branches) -> str:
    """Say which is the largest batch size that loses nothing, with its interval."""
    largest = branches.largest
    seeds = len({branch.seed for branch in branches.branches})
    size = format_count(largest.batch_size)
    tolerance = format_number(branches.tolerance)
    no_loss = f"loses at most {tolerance} of {branches.metric} against {branches.batch_size}"
    # No seed lost more than the tolerance at any batch size.
    if largest.unbounded == seeds:
        return f"every batch size up to {size} {no_loss}: look at larger ones, --batch-sizes"
    # A seed's loss jumps from little to far more than the tolerance between two neighbours of the
    # batch sizes that ran. Where in between it passes the tolerance is not known.
    if largest.between is not None:
        smaller, larger = largest.between
        below = format_count(smaller)
        above = format_count(larger)
        return (
            f"batch size {below} {no_loss}, {above} far more: the largest one lies between {below} "
            f"and {above}, look there, --batch-sizes"
        )
    # There are too few seeds for an interval.
    if largest.low is None:
        return (
            f"batch size {size} {no_loss}, on {plural(seeds, 'seed')}: give {LEAST_SEEDS} --seeds "
            "or more for an interval"
        )
    level = f"{BRANCH_LEVEL:.0%}"
    low = format_count(largest.low)
    if largest.high is None:
        return (
            f"batch size {size} {no_loss} ({level}: {low} to no end seen: {largest.unbounded} of "
            f"{seeds} seeds lost nothing at the largest one)"
        )
    high = format_count(largest.high)
    return f"batch size {size} {no_loss} ({level}: {low} to {high}, over {plural(seeds, 'seed')})"
