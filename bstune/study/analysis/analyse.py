"""Tells what trials and their posterior say: the critical batch size, S*(B), the winners, and more.

Nothing is trained, written or printed here.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from bstune.core.curve import CurveBand
from bstune.core.objectives import SOUGHT
from bstune.core.records import Merit, Target, TrialResult
from bstune.core.search_space import Space
from bstune.core.step_time_law import StepTimeLaw
from bstune.result import (
    AsGood,
    CriticalAtTarget,
    CriticalBatchSize,
    Curve,
    DevicePlan,
    Gain,
    Growth,
    NotRunAgain,
    Reaching,
)
from bstune.search.frontier_findings import best_learning_rates, steps_band
from bstune.search.frontier_law import log_steps
from bstune.search.posterior import Posterior
from bstune.search.predictions import chance_of_reaching, fresh_horizons, fresh_steps
from bstune.study.analysis.as_good import known_rates, sizes_as_good
from bstune.study.analysis.critical import (
    INTERVAL,
    ROOM,
    at_target_value,
    critical_batch,
    growth_over_target,
    no_easier_target,
    over_targets,
)
from bstune.study.analysis.model import (
    fit_lr_exponent,
    ideal_of,
    seed_scatter,
    study_posterior,
)
from bstune.study.analysis.own_best import untold_others
from bstune.study.analysis.scale_out import StepTimesOfSizes, scale_out, step_times
from bstune.study.analysis.step_times import law_of, step_time_of, timing_of
from bstune.study.analysis.summary import Analysis, OverTarget
from bstune.study.analysis.unreached import best_so_far
from bstune.study.planning.baseline import (
    BaselineRuns,
    baseline_result,
    baseline_runs,
    gain_of,
)
from bstune.study.planning.replicates import (
    Winner,
    confirmed_points,
    fresh_runs,
    next_beyond_limit,
    selection_luck,
    stand_in_for,
    winners,
)
from bstune.study.prepared import PreparedStudy
from bstune.system.failures import optional

# Steps of the rounded_sizes of batch sizes on which the curve is reported.
CURVE_LADDER = 48
# Draws of the posterior at each easier target.
TARGET_PARTICLES = 400


def analyse(
    prepared: PreparedStudy,
    done: Sequence[TrialResult],
    posterior: Posterior,
    missing: list[str],
    ran_for_target: bool = True,
) -> Analysis:
    """Analyse the trials of a study with a target: critical batch size, winners, curve, gain.

    Args:
        prepared: the study.
        done: its trials.
        posterior: of these trials.
        missing: gets a line for each part that fails.
        ran_for_target: whether the trials were run for this target. Where they were run for another
            one, the winner has no fresh seeds: it gives way to the user's own configuration where
            that is expected to be faster.
    """
    space = prepared.space
    budget = prepared.budget
    target = prepared.protocol.target
    # The first merit that an objective seeks is that of the winner to use.
    merit = SOUGHT[budget.objective].merits[0]
    ranked = _rank(prepared, done, posterior, merit)
    runs = baseline_runs(done, prepared.baseline)
    if not ran_for_target:
        best = own_where_faster(ranked.best, done, runs, posterior, merit)
        ranked = replace(ranked, best=best)
    winner = ranked.best.get(merit)
    critical = critical_batch(posterior, in_seconds=budget.objective != "steps")
    b_crit: float | None = None
    if critical is not None:
        b_crit = critical.value
    exponent = fit_lr_exponent(
        posterior, space.low, space.high, b_crit, prepared.options.scaling.noise_scale
    )
    tau = step_times(posterior, space.high, step_time_of(prepared, done))
    plans = _plan(prepared, posterior, critical, tau, missing)
    # The law is tau with its error.
    law = law_of(prepared, done)
    points_with_fresh_seeds = confirmed_points(done, budget.replicates)
    baseline_run = None if runs is None else runs.first
    # The gain has an error of timing where the seconds of the two batch sizes have one.
    timing_error = 0.0
    if law is not None and winner is not None and baseline_run is not None:
        timing_error = law.ratio_error(baseline_run.batch_size, winner.trial.batch_size)
    scatter = seed_scatter(posterior)
    # By how much the winner looks too good, as it was chosen for its runs, in log steps or seconds.
    log_selection_luck = 0.0
    if winner is not None:
        log_selection_luck = selection_luck(winner, points_with_fresh_seeds, merit, scatter.scatter)
    gain_in_seconds: Gain | None = None
    # The fewest steps may take more seconds: a study that seeks them gives both gains.
    if merit == "steps":
        gain_in_seconds = gain_of(
            runs, winner, "time", scatter.scatter, timing_error, log_selection_luck
        )
    curve: Curve | None = None
    if critical is not None:
        curve = curve_of(posterior, _band(posterior, critical), tau, law)
    as_good: AsGood | None = None
    if curve is not None and winner is not None:
        as_good = _as_good(done, posterior, curve, winner.trial, merit, space, law)
    return Analysis(
        critical=critical,
        best=ranked.best,
        lr_exponent=exponent,
        curve=curve,
        # Without a trial that reached the target the scatter is the prior's.
        seed_scatter=None if critical is None else scatter,
        baseline=baseline_result(runs, target, ideal_of(prepared)),
        so_far=best_so_far(done, target, baseline_run, posterior, prepared.last_step),
        gain=gain_of(runs, winner, merit, scatter.scatter, timing_error, log_selection_luck),
        gain_in_seconds=gain_in_seconds,
        as_good=as_good,
        timing=timing_of(prepared, law, winner, points_with_fresh_seeds),
        not_run_again=ranked.not_run_again,
        untold_others=untold_others(done, runs, winner, posterior, merit, law),
        scale_out=plans,
    )


@dataclass(frozen=True)
class _Ranked:
    """The winners by each merit, and a point without fresh seeds that may be better."""

    best: dict[Merit, Winner]
    not_run_again: NotRunAgain | None
    """None where no such point is predicted to be better than the winner to use."""


def _as_good(
    done: Sequence[TrialResult],
    posterior: Posterior,
    curve: Curve,
    winner: TrialResult,
    use: Merit,
    space: Space,
    law: StepTimeLaw | None,
) -> AsGood | None:
    """Find the batch sizes that are not shown to be worse than the winner's.

    None where seconds are compared and those of a step are not known.

    Args:
        done: the study's trials.
        posterior: of these trials.
        curve: has the batch sizes.
        winner: the trial of the winner to use.
        use: whether time or steps to the target are compared.
        space: has the scaling rule.
        law: tau(B) with its error; None where that is not known.
    """
    if use == "time" and not curve.seconds_per_step:
        return None
    reached = [trial for trial in done if trial.reached]
    known = known_rates(curve.batch_size, curve.lr, reached, space)
    drawn = merit_draws(posterior, curve, known.rates, use, law)
    return sizes_as_good(curve.batch_size, known, drawn, winner, use)


def _rank(
    prepared: PreparedStudy, done: Sequence[TrialResult], posterior: Posterior, use: Merit
) -> _Ranked:
    """Rank the points by what they took, or are predicted to take, on fresh seeds.

    ``use``: time or steps, by which the winner to use is the best.
    """
    objective = prepared.budget.objective
    replicates = prepared.budget.replicates
    max_candidates = prepared.budget.candidates
    predicted = fresh_steps(posterior)
    horizons = fresh_horizons(posterior)
    own = baseline_runs(done, prepared.baseline)
    best = dict[Merit, Winner]()
    passed_over: Winner | None = None
    for merit, first in winners(done, predicted, objective, replicates, max_candidates).items():
        winner = first
        stand_in = stand_in_for(first, done, predicted, merit, replicates)
        if stand_in is not None:
            winner = stand_in.winner
            if merit == use:
                passed_over = stand_in.passed_over
        # Where schedules end with the trial, a further seed needs the length of one, and may miss
        # the target.
        number = winner.trial.number
        winner = replace(winner, predicted_horizon=horizons.get(number))
        if own is not None and number == own.first.number and not winner.runs:
            winner = as_it_ran(winner)
        if number in horizons:
            winner = replace(winner, reaching=reaching_of(posterior, winner))
        best[merit] = winner
    beyond_limit = next_beyond_limit(done, predicted, objective, replicates, max_candidates)
    return _Ranked(best, point_not_run_again(beyond_limit, passed_over, max_candidates))


def own_where_faster(
    best: Mapping[Merit, Winner],
    done: Sequence[TrialResult],
    own: BaselineRuns | None,
    posterior: Posterior,
    use: Merit,
) -> dict[Merit, Winner]:
    """Put the user's own configuration in the place of a winner that its gain says is slower.

    A winner that ran on a fresh seed keeps its place, as does one whose gain is not known.

    Args:
        best: the winners.
        done: the study's trials.
        own: the runs of the user's own configuration, if any.
        posterior: of these trials.
        use: time or steps, by which the winner to use is the best.
    """
    winner = best.get(use)
    if own is None or winner is None or winner.runs or not own.first.reached:
        return dict(best)
    gain = gain_of(own, winner, use, seed_scatter(posterior).scatter)
    if gain is None or gain.at_least or gain.ratio >= 1.0:
        return dict(best)
    number = own.first.number
    steps = fresh_steps(posterior).get(number, float(own.first.steps))
    runs = fresh_runs(done).get(number, ())
    return {**best, use: Winner(trial=own.first, steps=steps, runs=runs)}


def as_it_ran(winner: Winner) -> Winner:
    """Tell a winner by its own trial: the schedule that ended with it, if any, and its steps.

    It is for the user's own configuration. A schedule that is predicted to cost less would make it
    another one, which has not run.
    """
    if winner.trial.horizon is None:
        return winner
    return replace(winner, predicted_horizon=winner.trial.horizon, steps=float(winner.trial.steps))


def reaching_of(posterior: Posterior, winner: Winner) -> Reaching | None:
    """Tell how likely further seeds reach the target with a schedule as long as the winner's.

    It also tells it for the longest schedule that the budget allows. It is None where schedules do
    not end with the trial.
    """
    horizon = winner.advised_horizon
    if horizon is None:
        return None
    number = winner.trial.number
    # A longer schedule may reach it more surely: the budget bounds how long it may be.
    longest = horizon
    if posterior.budget is not None:
        longest = max(horizon, math.floor(posterior.budget(winner.trial.batch_size)))
    return Reaching(
        chance=chance_of_reaching(posterior, number, horizon),
        best_chance=chance_of_reaching(posterior, number, longest),
        longest=longest,
    )


def curve_of(
    posterior: Posterior,
    band: CurveBand,
    tau: Callable[[NDArray[np.float64]], NDArray[np.float64]] | None,
    law: StepTimeLaw | None = None,
) -> Curve:
    """Give the curve over the batch sizes of a band: steps to target, best rate, seconds of a step.

    Args:
        posterior: of all trials.
        band: S*(B), the steps to the target at the best rate, with its interval, at a rising series
            of batch sizes.
        tau: gives the seconds of a step; None: not timed. (The posterior's own tau counts examples
            where the objective is steps.)
        law: tau(B) with its error; None where that is not known.
    """
    lr_low, lr, lr_high = best_learning_rates(posterior, band.batch_size, INTERVAL)
    seconds_per_step = None
    if tau is not None:
        seconds_per_step = tuple(tau(band.batch_size).tolist())
    seconds_error = None
    if law is not None:
        seconds_error = tuple(law.relative_error(size) for size in band.batch_size.tolist())
    return Curve(
        batch_size=tuple(band.batch_size.tolist()),
        steps=tuple(band.steps.tolist()),
        low=tuple(band.low.tolist()),
        high=tuple(band.high.tolist()),
        lr_low=tuple(lr_low.tolist()),
        lr=tuple(lr.tolist()),
        lr_high=tuple(lr_high.tolist()),
        seconds_per_step=seconds_per_step,
        seconds_error=seconds_error,
    )


def merit_draws(
    posterior: Posterior,
    curve: Curve,
    rates: Sequence[float],
    merit: Merit,
    law: StepTimeLaw | None,
) -> NDArray[np.float64]:
    """Draw the log of the steps, or seconds, to the target at each batch size of a curve.

    The learning ``rates`` are those that a user would take, and not the best ones of each draw.
    Steps are drawn from the posterior, and the error of tau(B) from ``law``, if that is given. The
    shape is (draws, batch sizes).
    """
    sizes = np.array(curve.batch_size)
    # What the other hyper-parameters cost, in the middle of their ranges, is the same at each batch
    # size.
    points = posterior.prior.points_at(np.log2(sizes), np.log2(rates))
    log_steps_drawn = log_steps(posterior.theta, points, posterior.prior)
    if merit == "steps" or curve.seconds_per_step is None:
        return log_steps_drawn
    log_seconds_drawn = log_steps_drawn + np.log(curve.seconds_per_step)
    if law is None:
        return log_seconds_drawn
    # The timings' error is independent of the trials': each draw gets a law of its own.
    step_times = law.draws(len(log_seconds_drawn), np.random.default_rng(0))
    return np.asarray(log_seconds_drawn + np.log(step_times.over_law(sizes)))


def _plan(
    prepared: PreparedStudy,
    posterior: Posterior,
    critical: CriticalBatchSize | None,
    tau: StepTimesOfSizes | None,
    missing: list[str],
) -> tuple[DevicePlan, ...]:
    """Plan for several devices; the plan is empty where there is none.

    There is none where an end of the critical batch size's interval is open: the curve is not known
    well enough. ``missing`` gets a line if the plan fails.
    """
    # It starts from the seconds of one device.
    if critical is None or critical.is_open or prepared.options.devices > 1:
        return ()
    # A study is not to fail for what is only predicted. The curve is claimed up to ``ROOM`` times
    # the largest batch size that reached the target.
    rows: tuple[DevicePlan, ...] = ()
    with optional("no plan for several devices", missing):
        rows = scale_out(prepared, posterior, tau, round(ROOM * critical.largest))
    return rows  # noqa: RET504 (empty where that failed)


def point_not_run_again(
    beyond_limit: Winner | None, passed_over: Winner | None, max_candidates: int
) -> NotRunAgain | None:
    """Describe the point that is predicted to be better than the winner and lacks fresh seeds.

    It is None where there is no such point.

    Args:
        beyond_limit: the point that got none because of ``search.candidates``, if any.
        passed_over: the point that lacks some for want of time, if any. It is named first.
        max_candidates: ``search.candidates``.
    """
    if passed_over is not None:
        trial = passed_over.trial
        return NotRunAgain(batch_size=trial.batch_size, lr=trial.lr, candidates=None)
    if beyond_limit is not None:
        trial = beyond_limit.trial
        return NotRunAgain(batch_size=trial.batch_size, lr=trial.lr, candidates=max_candidates)
    return None


def _band(posterior: Posterior, critical: CriticalBatchSize) -> CurveBand:
    """Give S*(B), the steps to the target at the best rate, with its interval.

    The batch sizes are even in log B between those that reached the target.
    """
    ratio = critical.largest / critical.smallest
    # Near small batch sizes several of them round to the same one.
    rounded_sizes = set[int]()
    for i in range(CURVE_LADDER + 1):
        rounded_sizes.add(round(critical.smallest * ratio ** (i / CURVE_LADDER)))
    return steps_band(posterior, sorted(rounded_sizes), INTERVAL)


def easier_targets_of(
    prepared: PreparedStudy, done: Sequence[TrialResult], critical: CriticalBatchSize | None
) -> OverTarget:
    """Estimate B_crit at easier targets and how it grows, or say why there is none."""
    target = prepared.protocol.target
    ideal = ideal_of(prepared)
    horizon = prepared.backend.horizon

    def infer(trials: Sequence[TrialResult], easier: Target) -> Posterior:
        return study_posterior(prepared, trials, TARGET_PARTICLES, easier)

    rows = list[CriticalAtTarget]()
    # A schedule that ends with its trial would have ended earlier at an easier target: what such a
    # trial had on the way tells nothing of that.
    if not horizon:
        ended = [trial for trial in done if trial.status != "failed"]
        rows = over_targets(ended, target, ideal, infer)
    note: str | None = None
    if not rows:
        note = no_easier_target(target, ideal, horizon)
    law: Growth | None = None
    if ideal is not None and critical is not None:
        reached = sum(trial.reached for trial in done)
        of_target = at_target_value(critical, target.value, reached)
        law = growth_over_target([*rows, of_target], ideal)
    return OverTarget(rows, note, law)
