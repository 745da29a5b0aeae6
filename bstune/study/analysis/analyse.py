"""Tells what trials and their posterior say: the critical batch size, S*(B), the winners and what follows.

Nothing is trained, written or printed here.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from bstune.core.curve import CurveBand, CurveError, CurveFit, fit_curve, frontier_points
from bstune.core.objectives import SOUGHT
from bstune.core.records import Merit, TrialResult
from bstune.core.step_time_law import StepTimeLaw
from bstune.result import (
    AsGood,
    CriticalAtTarget,
    CriticalBatchSize,
    Curve,
    DevicePlans,
    NotRunAgain,
    Reaching,
)
from bstune.search.acquisition import best_learning_rates, steps_band
from bstune.search.observations import Posterior, chance_of_reaching, fresh_horizons, fresh_steps
from bstune.search.posterior import frontier
from bstune.study.analysis.as_good import as_good
from bstune.study.analysis.critical import (
    INTERVAL,
    ROOM,
    at_target_value,
    critical_batch,
    growth,
    no_easier_target,
    over_targets,
)
from bstune.study.analysis.model import (
    fit_lr_exponent,
    ideal_of,
    sampler_context,
    seed_scatter,
    study_posterior,
)
from bstune.study.analysis.scale_out import scale_out, step_times
from bstune.study.analysis.step_times import law_of, timing_of
from bstune.study.analysis.summary import Analysis, OverTarget
from bstune.study.analysis.unreached import best_so_far
from bstune.study.planning.baseline import baseline_result, baseline_runs, gain_of
from bstune.study.planning.replicates import (
    Winner,
    confirmed_points,
    kept_instead,
    left_out,
    winners,
)
from bstune.study.prepare import PreparedStudy
from bstune.system.failures import optional

# Batch sizes at which the fitted curve is sent to MLflow.
CURVE_LADDER = 48
TARGET_PARTICLES = 400  # of the posterior at each easier target


def analyse(
    prepared: PreparedStudy,
    done: Sequence[TrialResult],
    posterior: Posterior,
    missing: list[str],
) -> Analysis:
    """Tell what trials and their posterior say: the critical batch size, S*(B), the winners and what follows.

    Nothing is trained, written or printed. ``missing`` gets a line for each part that fails.
    """
    options, space, budget, target = (
        prepared.options,
        prepared.space,
        prepared.budget,
        prepared.protocol.target,
    )
    ranking = done, fresh_steps(posterior), budget.objective, budget.replicates, budget.candidates
    horizons = fresh_horizons(posterior)
    use = SOUGHT[budget.objective].merits[0]
    best = dict[Merit, Winner]()
    passed_over: Winner | None = None
    for merit, first in winners(*ranking).items():
        kept = kept_instead(first, done, ranking[1], merit, budget.objective, budget.replicates)
        found = first if kept is None else kept.winner
        if kept is not None and merit == use:
            passed_over = kept.passed_over
        foreseen = replace(found, predicted_horizon=horizons.get(found.trial.number))
        if found.trial.number in horizons:
            foreseen = replace(foreseen, reaching=reaching_of(posterior, foreseen))
        best[merit] = foreseen
    critical = critical_batch(posterior, budget.objective != "steps")
    b_crit = None if critical is None else critical.value
    exponent = fit_lr_exponent(
        posterior, space.low, space.high, b_crit, options.scaling.noise_scale
    )
    band = None if critical is None else _band(posterior, critical)
    plans = _plan(prepared, posterior, critical, missing)
    law = law_of(prepared, done)
    again = confirmed_points(done, budget.replicates)
    runs = baseline_runs(done, prepared.baseline)
    scatter = seed_scatter(posterior)
    curve = None
    if band is not None:
        tau = step_times(posterior, space.high, prepared.backend.step_time)
        curve = curve_of(posterior, band, tau, law)
    winner = best.get(use)
    good: AsGood | None = None
    if curve is not None and winner is not None and (use == "steps" or curve.seconds_per_step):
        drawn = merit_draws(posterior, curve, use, law)
        good = as_good(curve.batch_size, curve.lr, drawn, winner.trial, use)
    return Analysis(
        fit=_fit(done),
        critical=critical,
        best=best,
        lr_exponent=exponent,
        curve=curve,
        seed_scatter=None if critical is None else scatter,
        baseline=baseline_result(runs, target, ideal_of(prepared)),
        so_far=best_so_far(done, target, None if runs is None else runs.first, posterior),
        gain=gain_of(runs, winner, use, scatter.scatter),
        as_good=good,
        timing=timing_of(prepared, law, winner, again),
        not_run_again=_not_run_again(left_out(*ranking), passed_over, budget.candidates),
        scale_out=plans,
    )


def reaching_of(posterior: Posterior, winner: Winner) -> Reaching | None:
    """Tell how likely further seeds reach the target at a winner whose schedule ends with the trial."""
    horizon = winner.advised_horizon
    if horizon is None:
        return None
    number = winner.trial.number
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
    """S*(B), tau(B) and the best learning rate with its interval, on the curve's ladder of batch sizes.

    ``tau`` in seconds is not the posterior's, which counts examples where the objective is steps; None: not timed.
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
    posterior: Posterior, curve: Curve, merit: Merit, law: StepTimeLaw | None
) -> NDArray[np.float64]:
    """Draw the log of the steps or seconds at each batch size of a curve: shape (draws, batch sizes)."""
    sizes = np.array(curve.batch_size)
    drawn = frontier(posterior.theta, posterior.prior.at(np.log2(sizes)), posterior.prior)
    if merit == "steps" or curve.seconds_per_step is None:
        return drawn
    drawn = drawn + np.log(curve.seconds_per_step)
    if law is None:
        return drawn
    step_times = law.draws(len(drawn), np.random.default_rng(0))
    return np.asarray(drawn + np.log(step_times.over_law(sizes)))


def _plan(
    prepared: PreparedStudy,
    posterior: Posterior,
    critical: CriticalBatchSize | None,
    missing: list[str],
) -> DevicePlans:
    """Give the plan for several devices; it starts from the seconds of one.

    There is none where an end of the critical batch size's interval is open: the curve does not allow it.
    """
    if critical is None or prepared.options.devices > 1:
        return DevicePlans()
    if critical.is_open:
        if prepared.options.hardware.scale_out.show:
            missing.append(
                "no plan for several devices: the critical batch size's interval has an open end"
            )
        return DevicePlans()
    plans = DevicePlans()
    with optional("no plan for several devices", missing):
        plans = scale_out(prepared, posterior, round(ROOM * critical.largest))
    return plans  # noqa: RET504 (empty where that failed)


def _fit(done: Sequence[TrialResult]) -> CurveFit | str:
    """Return the fit to the frontier's points, or why there is none."""
    try:
        return fit_curve(frontier_points(done))
    except CurveError as error:
        return str(error)


def _not_run_again(
    left: Winner | None, passed_over: Winner | None, max_candidates: int
) -> NotRunAgain | None:
    """Give the point, predicted to be better than the winner, that got no fresh seeds.

    Args:
        left: which ``search.candidates`` kept from them.
        passed_over: for which there was no time.
        max_candidates: ``search.candidates``.
    """
    found = passed_over or left
    if found is None:
        return None
    return NotRunAgain(
        batch_size=found.trial.batch_size,
        lr=found.trial.lr,
        candidates=max_candidates if passed_over is None else None,
    )


def _band(posterior: Posterior, critical: CriticalBatchSize) -> CurveBand:
    """Return S*(B) where the study looked: between the batch sizes that reached the target."""
    ratio = critical.largest / critical.smallest
    ladder = sorted(
        {round(critical.smallest * ratio ** (i / CURVE_LADDER)) for i in range(CURVE_LADDER + 1)}
    )
    return steps_band(posterior, ladder, INTERVAL)


def easier_targets_of(
    prepared: PreparedStudy, done: Sequence[TrialResult], critical: CriticalBatchSize | None
) -> OverTarget:
    """B_crit at easier targets and how it grows, or why there is none."""
    target = prepared.protocol.target
    ideal = sampler_context(prepared)["ideal"]
    horizon = prepared.backend.horizon
    rows = list[CriticalAtTarget]()
    if not horizon:
        rows = over_targets(
            [trial for trial in done if trial.status != "failed"],
            target,
            ideal,
            lambda trials, easier: study_posterior(prepared, trials, TARGET_PARTICLES, easier),
        )
    note = None if rows else no_easier_target(target, ideal, horizon)
    found = None
    if ideal is not None and critical is not None:
        reached = sum(trial.reached for trial in done)
        found = growth([*rows, at_target_value(critical, target.value, reached)], ideal)
    return OverTarget(rows, note, found)
