"""NEXT, the command that trains the winner, and MORE, the options that would show more."""

from collections.abc import Iterator

from bstune.report.lines.gain import is_not_compared, is_of_baseline, is_shown
from bstune.report.lines.unreached import ADVISED_TIMES, cause_of, more_of_limit
from bstune.result import CriticalBatchSize, SearchPlan, StudyResult
from bstune.system.console import format_count, plural

# An interval of B_crit is narrow if its upper end is at most this many times its lower one. Then no
# more trials are advised.
NARROW_INTERVAL = 1.5


def next_steps(result: StudyResult) -> Iterator[str]:
    """Give the command that trains the winner, if there is one.

    Without a winner, say what to change. Where the trials ran for another target and tell little of
    this one, say what runs a study for it.
    """
    if result.run_for_target is not None:
        yield f"run a study for {result.target}:"
        yield result.run_for_target
        return
    if result.winner is not None:
        if result.train is not None:
            yield advice_to_keep(result) or "to train with USE:"
            yield result.train
            yield from on_limits(result.train)
        return
    change = cause_of(result).change
    if change is not None:
        yield f"try {change}"


def on_limits(train: str) -> Iterator[str]:
    """Explain ``budget.examples=1`` in a command that trains the winner, if it is there."""
    if "budget.examples=1" in train.split():
        yield (
            "(training ends once both limits are met, so that budget.examples=1 leaves its length "
            "to budget.steps)"
        )


def advice_to_keep(result: StudyResult) -> str | None:
    """Advise to keep the user's own configuration, if USE is not shown to be faster.

    If it is open whether others are better, or if USE missed the target on half of its fresh seeds,
    advise to try some. A command that trains the winner follows the text. None without a winner or
    a baseline. None, too, where USE is another configuration that is shown to be faster, or whose
    gain is not known.
    """
    winner = result.winner
    baseline = result.baseline
    if winner is None:
        return None
    fresh = winner.confirmed
    if fresh is not None and fresh.steps_median is None:
        missed = f"{fresh.runs - fresh.reached} of {plural(fresh.runs, 'fresh seed')}"
        return (
            f"USE missed the target on {missed}: try others with {_raised(result.search)}; to "
            "train with USE all the same:"
        )
    if baseline is None:
        return None
    if is_of_baseline(winner, baseline) and is_not_compared(result):
        return advice_to_compare(result.search)
    if is_of_baseline(winner, baseline):
        return "keep your configuration; to train with it:"
    if result.gain is None or is_shown(result.gain):
        return None
    # Whoever wants USE all the same gets the command, too.
    return (
        "keep your configuration, and train as you do today; to train with USE, batch size "
        f"{format_count(winner.batch_size)}, all the same:"
    )


def advice_to_compare(search: SearchPlan) -> str:
    """Advise to try other configurations. The command that trains the user's own one follows."""
    return f"try others with {_raised(search)}; to train with your own configuration:"


def _raised(search: SearchPlan) -> str:
    """Write the option that lets the search go on: more of the limit that ended it, or trials."""
    return more_of_limit(search) or f"search.trials={ADVISED_TIMES * search.trials}"


def more(result: StudyResult) -> Iterator[str | None]:
    """Name the options of the same command that would narrow B_crit's interval, or show more.

    A text that is None is left out.
    """
    critical = result.critical_batch_size
    if result.winner is None or critical is None or critical.is_of_one_size:
        return
    yield critical.note
    yield how_to_narrow(critical, result.search)


def how_to_narrow(critical: CriticalBatchSize, search: SearchPlan) -> str | None:
    """Write which option would close or narrow B_crit's interval.

    None where it is narrow, and where no trial of this search would close it.
    """
    if critical.is_beyond_search:
        return None
    is_narrow = False
    if critical.low is not None and critical.high is not None:
        is_narrow = critical.high <= NARROW_INTERVAL * critical.low
    if is_narrow and not critical.next_trials:
        return None
    effect = "narrows the interval"
    if critical.is_open:
        effect = "looks further"
    # Where a limit ended the search, more trials alone would change nothing.
    more_of = f"search.trials={2 * search.trials}"
    if search.limit is not None:
        more_of = f"a larger {search.limit}"
    text = f"{more_of} {effect}"
    # These are trials that would narrow the interval most: two of them are enough to begin with.
    if critical.next_trials:
        sizes = " and ".join(format_count(trial.batch_size) for trial in critical.next_trials[:2])
        text += f" (first at batch sizes {sizes})"
    return text
