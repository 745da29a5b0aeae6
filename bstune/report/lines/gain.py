"""GAIN: how much faster the winner is than the user's own configuration."""

from collections.abc import Iterator

from bstune.core.search_space import SAME_POINT, are_near
from bstune.report.lines.unreached import none_to_use
from bstune.report.words import baseline_text, met_between
from bstune.result import (
    AtEqualSeconds,
    BaselineResult,
    Gain,
    StudyResult,
    UntoldOthers,
    WinnerResult,
)
from bstune.system.console import format_number, format_seconds, plural

# Of so many configurations the best one is worth its name: the first ones of a search look around.
ENOUGH_CONFIGURATIONS = 5


def gain(result: StudyResult) -> Iterator[str]:
    """Tell how much faster the winner is than the user's own configuration.

    Where that is not known it tells why.
    """
    baseline = result.baseline
    if baseline is None:
        return
    yours = f"your {baseline_text(baseline)}"
    so_far = result.so_far
    # Without a winner there are no times to the target: the metric is compared instead.
    if result.winner is None and so_far is not None and so_far.compared is not None:
        yield _compared_text(so_far.compared, yours)
        return
    compared = result.gain
    if compared is None:
        yield _no_gain_text(result, baseline, yours)
        return
    better = "fewer steps than"
    if compared.merit == "time":
        better = "as fast as"
    ratio = _ratio_text(compared.ratio)
    basis = _basis_text(compared, result, baseline)
    # A bound has no interval.
    is_bound = compared.at_least or compared.low is None
    # A schedule that ended before the target bounds nothing: under a longer one, the target may be
    # met earlier.
    if is_bound and baseline.horizon is not None:
        spent = "the time" if compared.merit == "time" else "the steps"
        yield f"not known: {yours}, missed the target in {ratio} times {spent} of USE{basis}"
        return
    # A baseline that was stopped takes longer than it ran: so the ratio is a bound.
    if is_bound:
        yield f"at least {ratio} times {better} {yours}, stopped before the target{basis}"
        return
    interval = (
        f"{compared.level:.0%} interval: {_ratio_text(compared.low)} to "
        f"{_ratio_text(compared.high)}{basis}"
    )
    if is_shown(compared):
        yield f"{ratio} times {better} {yours} ({interval})"
    else:
        yield f"not shown to be faster than {yours}: keep what you have ({ratio} times, {interval})"


def is_shown(gain: Gain) -> bool:
    """Whether the winner is shown to be faster: where the interval holds 1 it may not be.

    A gain without an interval is a lower bound, over a baseline that was stopped. It counts as
    shown.
    """
    return gain.low is None or gain.low > 1.0


def _basis_text(compared: Gain, result: StudyResult, baseline: BaselineResult) -> str:
    """Write the end of a sentence: on which runs the gain was measured.

    It is empty where both sides had all fresh seeds that were planned.
    """
    ran_on_all_seeds = compared.seeds > 0 and compared.seeds >= result.search.replicates
    if ran_on_all_seeds and baseline.status == "reached":
        return ""
    met: str | None = None
    for point in result.points:
        is_of_baseline_run = point.number == baseline.number and baseline.horizon is None
        if is_of_baseline_run and point.steps is not None:
            met = met_between(point.steps_low, point.steps)
    text = f"; {_runs_text(compared, met)}"
    # The gain leaves out runs of the baseline that missed the target: with them it would be larger.
    missed = baseline.runs - baseline.reached
    # The baseline's run in the search is not among ``runs``, those on fresh seeds. If it missed the
    # target it is left out as well, unless all of ``runs`` missed it: the gain is then over it.
    search_run_missed = baseline.status != "reached"
    is_over_search_run = not baseline.reached
    if search_run_missed and not is_over_search_run:
        missed += 1
    if missed:
        text += f"; yours was stopped before the target in {plural(missed, 'more run')}"
    return text


def _runs_text(compared: Gain, met: str | None) -> str:
    """Write on which runs a gain was measured: ``on 1 fresh seed of both``, or those of each.

    ``met``: after which steps the baseline's search trial met the target, where evaluations lie far
    apart; else None.
    """
    if compared.seeds:
        return f"on {plural(compared.seeds, 'fresh seed')} of both"
    if compared.baseline_seeds is None or compared.winner_seeds is None:
        return "on no common seed"
    of_winner = "USE's is predicted"
    if compared.winner_seeds:
        of_winner = f"USE on {plural(compared.winner_seeds, 'fresh seed')}"
    of_baseline = "yours in its single search trial"
    if met is not None:
        of_baseline += f", after {met}"
    if compared.baseline_seeds:
        of_baseline = f"yours on {plural(compared.baseline_seeds, 'other fresh seed')}"
    return f"{of_baseline}, {of_winner}"


def _ratio_text(ratio: float | None) -> str:
    """Write a ratio to two digits. Below 2 it has three, which tell it from 1."""
    digits = 2
    if ratio is not None and ratio < 2.0:
        digits = 3
    return format_number(ratio, digits)


def _compared_text(compared: AtEqualSeconds, yours: str) -> str:
    """Compare the metrics of the closest point and of the user's own after equal seconds.

    ``yours``: the user's own configuration in words.
    """
    value = format_number(compared.value, 3)
    of_baseline = format_number(compared.baseline_value, 3)
    seconds = format_seconds(compared.seconds)
    closest = f"after {seconds} of training the closest point was at {value}"
    return f"{closest}, {yours} at {of_baseline} (one run each)"


def _no_gain_text(result: StudyResult, baseline: BaselineResult, yours: str) -> str:
    """Say why there is no gain, and how the user's own configuration ended.

    ``yours`` is the user's own configuration in words.
    """
    use = result.winner
    after = plural(baseline.steps, "step")
    if baseline.status == "out of memory":
        return f"not known: {yours} ran out of memory after {after}"
    if baseline.status == "diverged":
        return f"not known: {yours} diverged after {after}"
    if use is None:
        if result.statuses["reached"]:
            return f"not known: {none_to_use(result)}"
        return f"not known: {none_to_use(result)}, nor did {yours} in {after}"
    # USE is another configuration: there is no gain because of how the baseline's run ended.
    is_near = are_near(use.batch_size, use.lr, baseline.batch_size, baseline.lr)
    if not is_near or use.hyperparameters != baseline.hyperparameters:
        return f"not known: {yours} {baseline.status} after {after}"
    # A point beside the baseline says no more than the baseline, if too little was compared.
    if is_of_baseline(use, baseline) or is_not_compared(result):
        return text_without_better(result, yours)
    within = 2.0**SAME_POINT - 1.0
    return f"none: USE lies within {within:.0%} of {yours}, and counts as the same configuration"


def is_of_baseline(winner: WinnerResult, baseline: BaselineResult) -> bool:
    """Whether the winner is the user's own configuration."""
    return winner.batch_size == baseline.batch_size and winner.lr == baseline.lr


def has_few_configurations(result: StudyResult) -> bool:
    """Whether so few configurations were tried that the best of them says little.

    A search that was asked for as few has done what it was to do, unless it was asked for one.
    """
    enough = min(ENOUGH_CONFIGURATIONS, max(2, result.search.trials))
    # An older file does not tell their number.
    return result.configurations is not None and result.configurations < enough


def is_not_compared(result: StudyResult) -> bool:
    """Whether other configurations were tried too little to call the user's own one the best.

    Few were tried, or one that was stopped before the target may be better.
    """
    return has_few_configurations(result) or result.untold_others is not None


def text_without_better(result: StudyResult, yours: str) -> str:
    """Say that the user's own configuration, ``yours``, is the best one.

    Where too few were tried for that, or others were stopped that may be better, say so.
    """
    count = result.configurations
    # An older file does not tell the number of configurations, and then they do not count as few.
    if count is None or not has_few_configurations(result):
        if result.untold_others is not None:
            return _untold_text(result.untold_others, yours)
        if count is None:
            return f"none: {yours} is the best that was found"
        return f"none: {yours} is the best of {plural(count, 'configuration')}"
    others = count - 1
    if others == 0:
        return f"not known: nothing was compared with {yours}"
    was = "was" if others == 1 else "were"
    return f"not known: only {plural(others, 'other configuration')} {was} tried beside {yours}"


def _untold_text(others: UntoldOthers, yours: str) -> str:
    """Say that other configurations were not run to the target, and may be better than ``yours``.

    ``others`` counts what they came to.
    """
    counts = {
        "stopped early": others.stopped,
        "diverged": others.diverged,
        "ran out of memory": others.out_of_memory,
    }
    ends = ", ".join(f"{count} {end}" for end, count in counts.items() if count)
    tried = others.reached + sum(counts.values())
    if not others.reached:
        return f"not known: none of {tried} others reached the target beside {yours} ({ends})"
    stopped = f"{others.stopped} of {plural(tried, 'other')}, stopped early"
    return f"not known: {stopped}, may be better than {yours}"
