"""CAUTION: what would change the answer."""

from collections.abc import Iterator

from bstune.report.lines.next_steps import narrower
from bstune.report.lines.unreached import cause_of, closest_texts
from bstune.report.trust import trust_in_timing
from bstune.report.words import baseline_text, fresh_text, winner_text
from bstune.result import StudyResult
from bstune.system.console import format_count, format_number, plural

# Chance of reaching the target from which on a winner is called no risk: nine of ten, and some
# room.
SURE_CHANCE = 0.8


def cautions(result: StudyResult) -> Iterator[str | None]:
    """Give what would change the answer, the worst first; without a winner, why there is none."""
    if result.winner is None:
        yield cause_of(result).why
        return
    yield from _missed(result)
    yield from _may_miss(result)
    # Only where a limit ended the search would more of it change the answer.
    if result.search.limit is not None and result.stop_reason is not None:
        yield result.stop_reason
    yield from _not_run_again(result)
    yield from _too_easy(result)
    yield from _untold(result)
    noise = trust_in_timing(result)
    if noise is not None and not noise.good:
        yield noise.text
    yield from _open_interval(result)


def warnings(result: StudyResult) -> tuple[str, ...]:
    """Tell what stands beside a study wherever it is compared.

    That is, that nothing, or not all, reached the target, or that it was too easy.
    """
    if result.winner is None:
        return tuple(closest_texts(result))
    return (*_missed(result), *_too_easy(result))


def _missed(result: StudyResult) -> Iterator[str]:
    """Winners that some fresh seeds missed, or that had none."""
    for winner in (result.winner, result.other_winner):
        if winner is None or winner.confirmed is None or winner.confirmed.all_reached:
            continue
        yield f"only {fresh_text(winner.confirmed)} reached the target at {winner_text(winner)}"
    if result.search.replicates == 0:
        yield "USE is one run's luck, too: search.replicates=3 runs it again on fresh seeds"


def _may_miss(result: StudyResult) -> Iterator[str]:
    """Name a schedule that further seeds are not sure to reach the target with.

    The few fresh ones may have reached it all the same.
    """
    winner = result.winner
    if winner is None or winner.reaching is None or winner.horizon is None:
        return
    reaching = winner.reaching
    if reaching.chance >= SURE_CHANCE:
        return
    seeds = f"{reaching.chance:.0%} of further seeds are predicted to reach the target"
    text = f"{seeds} with a schedule of {plural(winner.horizon, 'step')}"
    if reaching.longest > winner.horizon:
        longest = f"the longest one, of {format_count(reaching.longest)}"
        text += f", {reaching.best_chance:.0%} with {longest}"
    yield text


def _not_run_again(result: StudyResult) -> Iterator[str]:
    """Give a point that is predicted to be better and got no fresh seeds."""
    left_out = result.not_run_again
    if left_out is None:
        return
    size = format_count(left_out.batch_size)
    point = f"batch size {size}, learning rate {format_number(left_out.lr)}"
    how = "the study ended before, and a longer one does it"
    if left_out.candidates is not None:
        how = f"search.candidates={left_out.candidates + 1} does it"
    yield f"{point} may be better, and did not run on fresh seeds: {how}"


def _too_easy(result: StudyResult) -> Iterator[str]:
    """Tell of a target that is too easy to tell batch sizes apart."""
    baseline = result.baseline
    if baseline is None or baseline.telling_target is None:
        return
    value = format_number(baseline.telling_target, 2)
    steps = plural(baseline.steps, "step")
    yield (
        f"your {baseline_text(baseline)} met the target at its first look, after {steps}, where "
        "batch sizes differ little: a harder target tells more, such as "
        f"workload.target.value={value}"
    )


def _untold(result: StudyResult) -> Iterator[str]:
    """Tell of fresh seeds whose steps are not known, as their first evaluation met the target."""
    if result.winner is None:
        return
    fresh = result.winner.confirmed
    if fresh is not None and fresh.untold:
        yield (
            f"{fresh.untold} of {plural(fresh.runs, 'fresh seed')} met the target at their first "
            "evaluation: when, could not be told"
        )


def _open_interval(result: StudyResult) -> Iterator[str]:
    """Tell what would show a critical batch size whose interval is open."""
    critical = result.critical_batch_size
    if critical is None or critical.is_of_one_size or not critical.is_open:
        return
    open_ends = list[str]()
    if critical.low is None:
        open_ends.append("lower")
    if critical.high is None:
        open_ends.append("upper")
    missing = f"the critical batch size has no {' and no '.join(open_ends)} end yet"
    yield f"{missing}: {narrower(critical, result.search)}"
