"""The step time and the law's posterior, as the records of a study tell them."""

from dataclasses import replace

import numpy as np

from bstune.core.records import Records, StepTime
from bstune.core.space import Space
from bstune.core.step_time import step_time_of_trials
from bstune.search.grid import best_of_grid
from bstune.search.law import EXPONENT, SHIFT, SPREADS, Law, make_law
from bstune.search.posterior import Posterior, rows_of, sample, sample_posterior
from bstune.study.plan import Plan

# Draws and moves of the posterior that the answer stands on. By the sampler's seed alone B_crit
# then moves by 2 to 6% on four recorded studies; with half the moves by up to 17%.
DRAWS = 600
MOVES = 12
# Standard deviations in octaves: of a rate that counts as the best one, and of the best one of a
# grid, whose rates lie half an octave apart or more, off a power of B.
NO_SPREAD = 1e-6
OF_BEST_RATE = 0.5


def step_time_of(plan: Plan, records: Records) -> StepTime:
    """tau(B), in seconds: known beforehand, or by the survey's timings and the trials' own."""
    return plan.step_time or step_time_of_trials(records, 2.0**plan.space.middle, plan.timings)


def answer_posterior(
    plan: Plan, records: Records, draws: int = DRAWS, moves: int = MOVES
) -> Posterior:
    """The posterior of all trials, with the misfit, that the answer stands on.

    A grid has tuned each batch size by itself: of its trials those with the best rates count.
    """
    if plan.sampler == "grid" and not plan.question.seeks_metric:
        best = best_of_grid(plan.space, records, plan.fits)
        if best:
            return _posterior_of_best(plan, best, draws, moves)
    return sample_posterior(
        plan.question,
        plan.space,
        records,
        seed=plan.seed,
        misfit=True,
        draws=draws,
        moves=moves,
    )


def _posterior_of_best(plan: Plan, best: Records, draws: int, moves: int) -> Posterior:
    """The posterior of trials that have the best rates of their batch sizes.

    The law of other rates takes no part: over the four octaves and more that a grid tries it is far
    off. With it B_crit was 3 to 5 times the truth in 9 grids of fashion_mlp, and a sixth of it in
    one of mnist_cnn; 32 of 36 intervals of four tables hold it, with the law of other rates 17.
    """
    space = plan.space
    law = law_at_best_rates(space.low, space.high, plan.question.last_step(2.0**space.middle))
    rows = rows_of(best, plan.question.target)
    rates = {one.batch_size: one.lr for one in best}
    x = np.log2(list(rates))
    # The best rates' power of B, by a regression on the prior around the rule.
    of_rule = np.log2([space.rule_lr(2.0**size) for size in (law.middle - 0.5, law.middle + 0.5)])
    prior = np.array([of_rule.mean(), of_rule[1] - of_rule[0]])
    precision = np.diag([SPREADS[SHIFT] ** -2.0, SPREADS[EXPONENT] ** -2.0])
    octaves = np.log2(list(rates.values()))
    terms = np.stack([np.ones(x.size), x - law.middle], axis=1)
    covariance = np.linalg.inv(precision + terms.T @ terms / OF_BEST_RATE**2)
    line = covariance @ (precision @ prior + terms.T @ octaves / OF_BEST_RATE**2)
    rng = np.random.default_rng(plan.seed)
    theta = sample(law, rows._replace(z=np.zeros(len(best))), rng, draws, moves)
    theta[:, [SHIFT, EXPONENT]] = rng.multivariate_normal(line, covariance, draws)
    on_line = line[0] + line[1] * (rows.x - law.middle)
    return Posterior(law, theta, rows._replace(z=on_line), tuple(best))


def law_at_best_rates(low: int, high: int, budget: float) -> Law:
    """The law over batch sizes, with a misfit, whose rates, log2 of them 0, are the best.

    A grid's answer and :func:`bstune.fit_curve` use it.

    Args:
        low, high: batch sizes.
        budget: as of :func:`bstune.search.law.make_law`.
    """
    law = make_law(Space(low, high, 1.0, 1.0, "none", (1.0, 1.0)), budget, misfit=True)
    spread = law.spread.copy()
    spread[[SHIFT, EXPONENT]] = NO_SPREAD
    return replace(law, spread=spread)
