"""NEXT, the command that trains the winner, and MORE, the options that would show more."""

from collections.abc import Iterator

from bstune.report.lines.gain import is_of_baseline
from bstune.report.lines.unreached import cause_of
from bstune.result import CriticalBatchSize, SearchPlan, StudyResult
from bstune.system.console import format_count

# An interval of B_crit is narrow if its upper end is at most this many times its lower one. Then no
# more trials are advised.
NARROW_INTERVAL = 1.5


def next_steps(result: StudyResult) -> Iterator[str | None]:
    """Give the command that trains the winner. Without a winner, say what to change."""
    if result.winner is not None:
        baseline = result.baseline
        # The advice may be to change nothing. Whoever wants USE all the same gets the command, too.
        is_own = baseline is not None and is_of_baseline(result.winner, baseline)
        gain = result.gain
        is_shown = gain is None or gain.low is None or gain.low > 1.0
        if result.train is not None and is_own:
            yield "keep your configuration; to train with it:"
        elif result.train is not None and not is_shown:
            yield "keep your configuration; to train with USE all the same:"
        elif result.train is not None:
            yield "to train with USE:"
        yield result.train
        return
    change = cause_of(result).change
    if change is not None:
        yield f"try {change}"


def more(result: StudyResult) -> Iterator[str | None]:
    """Name the options of the same command that would narrow B_crit's interval, or show more."""
    critical = result.critical_batch_size
    if result.winner is None or critical is None or critical.is_of_one_size:
        return
    yield critical.note
    yield how_to_narrow(critical, result.search)


def how_to_narrow(critical: CriticalBatchSize, search: SearchPlan) -> str | None:
    """Write which option would close or narrow B_crit's interval. None where it is narrow."""
    is_narrow = False
    if critical.low is not None and critical.high is not None:
        is_narrow = critical.high <= NARROW_INTERVAL * critical.low
    is_closed = not critical.is_open
    if is_closed and is_narrow and not critical.next_trials:
        return None
    effect = "narrows the interval"
    if critical.is_open:
        effect = "looks further"
    # Where a limit ended the search, more trials alone would change nothing.
    more_of = f"search.trials={2 * search.trials}"
    if search.limit is not None:
        more_of = f"a larger {search.limit}"
    text = f"{more_of} {effect}"
    if critical.next_trials:
        sizes = " and ".join(format_count(trial.batch_size) for trial in critical.next_trials[:2])
        text += f" (first at batch sizes {sizes})"
    return text
