"""CAUTION: all that could change the answer."""

import math
from collections.abc import Iterator

from bstune.report.lines.next_steps import how_to_narrow
from bstune.report.lines.unreached import WALL_SECONDS, cause_of, closest_texts, failures_text
from bstune.report.trust import trust_in_timing
from bstune.report.words import baseline_text, fresh_text, winner_text
from bstune.result import StudyResult
from bstune.system.console import format_count, format_number, plural

# A winner with at least this chance of reaching the target gets no caution: it is a little below
# nine of ten, as the chance itself is a prediction.
SURE_CHANCE = 0.8
# From this factor on, the gain by the runs' own seconds is told beside the one by all trials.
APART_BY_OWN_SECONDS = 1.25
TRAINING_SECONDS = "search.seconds"


def cautions(result: StudyResult) -> Iterator[str | None]:
    """Give all that could change the answer, the worst first. Without a winner, give the cause.

    A text that is None is left out.
    """
    failed = failures_text(result)
    if result.winner is None:
        why = cause_of(result).why
        # Where most trials ended in another way, the few that failed are told all the same.
        if failed is not None and failed != why:
            yield failed
        yield why
        # Which limit ended the search, and what was spent of it.
        if result.search.limit is not None and result.stop_reason not in (None, why):
            yield result.stop_reason
        return
    yield from _few_passed(result)
    yield from unused_seed(result)
    yield from _missed_seeds(result)
    yield from _chance_to_miss(result)
    yield from _ran_once(result)
    yield from _gain_of_one_run(result)
    yield from _slower_in_seconds(result)
    if failed is not None:
        yield failed
    # More of a limit changes the answer only where that limit ended the search.
    if result.search.limit is not None and result.stop_reason is not None:
        yield result.stop_reason
    yield from _not_run_again(result)
    yield from _too_easy(result)
    yield from _first_evaluation_hits(result)
    yield from _noisy_timing(result)
    yield from _other_by_own_seconds(result)
    yield from _open_interval(result)


def warnings(result: StudyResult) -> tuple[str, ...]:
    """Give the sentences that stand beside a study wherever it is compared.

    They say that nothing reached the target, that fresh seeds were all alike or missed it, that USE
    ran only once, or that the target was too easy.
    """
    if result.winner is None:
        return tuple(closest_texts(result))
    return (*unused_seed(result), *_missed_seeds(result), *_ran_once(result), *_too_easy(result))


def _few_passed(result: StudyResult) -> Iterator[str]:
    """Warn that the trials ran for another target, and tell too little of this one."""
    if result.few_passed is not None:
        yield (
            "this stands on histories of trials for another target, which tell little of this one: "
            f"{result.few_passed}"
        )


def unused_seed(result: StudyResult) -> Iterator[str]:
    """Warn that fresh seeds changed nothing, so that they say nothing of a seed's luck."""
    if not result.seed_is_unused:
        return
    use_it = "let no code of yours set a seed"
    if result.in_hydra:
        use_it = "let the application use the seed that hydra.sweeper.seed names"
    # No loop that bstune knows took the steps.
    elif result.in_python and not result.training_loops:
        use_it = "seed your loop with trial.seed"
    yield (
        f"all fresh seeds gave the same {result.metric}, to the last bit, and so say nothing of "
        f"another seed's luck: {use_it}, under another study=NAME"
    )


def _missed_seeds(result: StudyResult) -> Iterator[str]:
    """Name the winners with fresh seeds that missed the target."""
    for winner in (result.winner, result.other_winner):
        if winner is None or winner.confirmed is None or winner.confirmed.all_reached:
            continue
        diverged = ""
        if winner.confirmed.diverged:
            diverged = f"; {winner.confirmed.diverged} diverged"
        share = fresh_text(winner.confirmed)
        yield f"only {share} reached the target at {winner_text(winner)}{diverged}"


def _chance_to_miss(result: StudyResult) -> Iterator[str]:
    """Warn that further seeds may miss the target with a schedule as long as the winner's.

    The few fresh seeds that ran may all have reached it. ``reaching`` has the predicted chances,
    with this schedule and with the longest one.
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


def _ran_once(result: StudyResult) -> Iterator[str]:
    """Tell of a winner that had no fresh seeds."""
    if result.winner is not None and result.winner.confirmed is None:
        yield from not_on_fresh_seeds(result)


def not_on_fresh_seeds(result: StudyResult) -> Iterator[str]:
    """Say that USE had a single run, and name the option that gives it fresh seeds."""
    if not result.search.replicates:
        yield "USE is one run's luck, too: search.replicates=3 runs it again on fresh seeds"
        return
    text = "USE ran once, and what it takes is predicted"
    # The command that ran the trials was for another target.
    if result.few_passed is not None:
        yield f"{text}: a study of this target runs it on fresh seeds"
    elif result.stop_reason is None:
        yield f"{text}: its fresh seeds are still to come, and the same command runs them"
    else:
        yield f"{text}: no time was left for its fresh seeds, and a larger {WALL_SECONDS} runs them"


def _gain_of_one_run(result: StudyResult) -> Iterator[str]:
    """Tell of a gain that is over a single run of the user's own configuration."""
    gain = result.gain
    has_fresh_seeds = result.baseline is not None and result.baseline.runs > 0
    # Over a baseline that was stopped the gain is a lower bound: fresh seeds would not change that.
    if gain is None or gain.at_least or has_fresh_seeds:
        return
    if gain.baseline_seeds == 0:
        yield from gain_of_single_run(result)


def gain_of_single_run(result: StudyResult) -> Iterator[str]:
    """Say why the user's own configuration had no fresh seeds, and name the option that helps.

    Nothing is said where the study wants no fresh seeds, or still runs, so that they are to come.
    """
    if result.search.replicates and result.stop_reason is not None:
        # Of the limits that end a search, only those in seconds also bound the fresh seeds.
        limit = WALL_SECONDS
        if result.search.limit == TRAINING_SECONDS:
            limit = TRAINING_SECONDS
        yield (
            "GAIN stands on a single run of your configuration, with one seed's luck in it: no "
            f"time was left for its fresh seeds, and a larger {limit} runs them"
        )


def _slower_in_seconds(result: StudyResult) -> Iterator[str]:
    """Tell by how much USE is slower, where its few steps take more seconds in all."""
    gain = result.gain_in_seconds
    if gain is None or result.baseline is None or gain.ratio >= 1.0:
        return
    longer = format_number(1.0 / gain.ratio, 3)
    interval = ""
    # A smaller gain is a larger loss, so that the ends change places.
    if gain.low is not None and gain.high is not None:
        low = format_number(1.0 / gain.high, 3)
        high = format_number(1.0 / gain.low, 3)
        interval = f" ({gain.level:.0%} interval: {low} to {high})"
    yield (
        f"steps were compared, not seconds: USE takes {longer} times the seconds of your "
        f"{baseline_text(result.baseline)}{interval}; a study with search.objective=time seeks the "
        "least time"
    )


def _not_run_again(result: StudyResult) -> Iterator[str]:
    """Tell of a point that is predicted to be better than the winner and lacks fresh seeds."""
    left_out = result.not_run_again
    if left_out is None:
        return
    size = format_count(left_out.batch_size)
    point = f"batch size {size}, learning rate {format_number(left_out.lr)}"
    how = f"no time was left, and a larger {WALL_SECONDS} does it"
    # The number of points that got fresh seeds, where that option left this one out.
    if left_out.candidates is not None:
        how = f"search.candidates={left_out.candidates + 1} does it"
    yield f"{point} may be better, and lacks fresh seeds: {how}"


def _too_easy(result: StudyResult) -> Iterator[str]:
    """Tell of a target that is too easy to tell batch sizes apart.

    ``telling_target`` is a harder one, which is there if the baseline met the study's target at its
    first evaluation.
    """
    baseline = result.baseline
    if baseline is None or baseline.telling_target is None:
        return
    value = format_number(baseline.telling_target, 2)
    steps = plural(baseline.steps, "step")
    text = (
        f"your {baseline_text(baseline)} met the target at its first look, after {steps}, where "
        "batch sizes differ little: a harder target tells more, such as "
        f"workload.target.value={value}"
    )
    # bstune refuses a target that untrained weights meet, whose mode may be wrong. A loop of the
    # user's need not evaluate these weights, so there the target may be such a one.
    if result.in_python and not result.training_loops:
        text += "; if untrained weights meet it too, it is the wrong way round"
    yield text


def _first_evaluation_hits(result: StudyResult) -> Iterator[str]:
    """Tell of fresh seeds whose steps are not known, as their first evaluation met the target."""
    if result.winner is None:
        return
    fresh = result.winner.confirmed
    if fresh is not None and fresh.untold:
        yield (
            f"{fresh.untold} of {plural(fresh.runs, 'fresh seed')} met the target at their first "
            "evaluation: when, could not be told"
        )


def _noisy_timing(result: StudyResult) -> Iterator[str]:
    """Tell of steps whose seconds are not well known.

    A survey is kept for later studies, so the option that times steps anew is named. Without one
    the trials have timed themselves, each in its own minutes.
    """
    noise = trust_in_timing(result)
    if noise is None or noise.good:
        return
    if result.timing is not None and result.timing.surveyed:
        yield f"{noise.text}: on a quiet machine, hardware.refresh=true times them anew"
    else:
        yield f"{noise.text}: trials time their own steps, so let nothing else run beside them"


def _other_by_own_seconds(result: StudyResult) -> Iterator[str]:
    """Tell where the compared runs' own seconds give another gain than the law of all trials.

    That law has one cost for a step of a batch size. Steps may change their cost while they train,
    as episodes that become longer do, or the machine was busy while some of the runs trained. A
    survey's seconds are of a few steps side by side, so nothing is said of them.
    """
    gain = result.gain
    is_surveyed = result.timing is None or result.timing.surveyed
    if gain is None or gain.by_own_seconds is None or is_surveyed:
        return
    apart = abs(math.log(gain.by_own_seconds / gain.ratio))
    if apart < math.log(APART_BY_OWN_SECONDS):
        return
    yield (
        f"timed by its {plural(gain.seeds, 'fresh seed')} alone USE is "
        f"{format_number(gain.by_own_seconds, 2)} times as fast: steps may change their cost while "
        "they train, or the machine was busy for some of them"
    )


def _open_interval(result: StudyResult) -> Iterator[str | None]:
    """Tell of a critical batch size whose interval is open, and name what would close it."""
    critical = result.critical_batch_size
    if critical is None or critical.is_of_one_size or not critical.is_open:
        return
    if critical.is_beyond_search:
        yield critical.note
        return
    open_ends = list[str]()
    if critical.low is None:
        open_ends.append("lower")
    if critical.high is None:
        open_ends.append("upper")
    missing = f"the critical batch size has no {' and no '.join(open_ends)} end yet"
    yield f"{missing}: {how_to_narrow(critical, result.search)}"
