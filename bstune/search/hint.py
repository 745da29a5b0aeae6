"""The noise scale that a study's trials measured, as a wide prior of B_crit: a hint, never a substitute.

McCandlish et al. 2018 (arXiv 1812.06162, section 2 and appendix D) find B_crit to be the noise scale averaged over the
training. What is measured is B_simple, which stands for it, at some steps (see :mod:`bstune.noise`). From these:

- Trials that reached the target count, none else. The noise scale grows by tens of times as |G|^2 falls: a stopped
  trial has seen the beginning alone, and one that diverged has left the path.
- Of each, all steps: the mean of |G|^2 and that of tr Sigma. Divided, they weigh a step by its |G|^2, so that the
  beginning says more than the end, and the ratio errs to the small side; the later half alone would err to the large
  one, where |G|^2 is hardly told apart from 0.
- Both means in units of the trial's own tr Sigma. Gradients of a large learning rate may be ten times as large as
  others: one such trial would speak for all. tr Sigma is known far better than |G|^2, so this adds little bias.
- Each trial is one block of the interval, which so holds what batch size, learning rate and seed change.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bstune.noise import FEWEST_BLOCKS, NoiseScaleEstimate, estimate_noise_scale
from bstune.records import TrialResult
from bstune.search.posterior import Prior, make_prior

Array = NDArray[np.float64]

FEWEST_STEPS = 2  # measured in a trial, for it to count


@dataclass(frozen=True)
class Measured:
    """The noise scale over a study's trials.

    Args:
        estimate: whose ``measurements`` are trials, each a block; its terms are in units of tr Sigma.
        steps: measured in all of them.
    """

    estimate: NoiseScaleEstimate
    steps: int


def measured_noise_scale(trials: Iterable[TrialResult]) -> Measured | None:
    """Return the noise scale over the trials of a study that reached the target; None if none of them was measured.

    Its estimate is undetermined while they are few, or |G|^2 is not told apart from 0.
    """
    gradients, steps = [], 0
    for trial in sorted(trials, key=lambda trial: trial.number):
        if not trial.reached or len(trial.noise_scale) < FEWEST_STEPS:
            continue
        _, gradient, trace = np.mean(trial.noise_scale, axis=0).tolist()
        if trace > 0.0:
            gradients.append(gradient / trace)
            steps += len(trial.noise_scale)
    return Measured(estimate_noise_scale(gradients, [1.0] * len(gradients)), steps) if gradients else None


def hint(trials: Iterable[TrialResult]) -> tuple[float, float] | None:
    """Return the measured noise scale and half the width of its interval in log; None while undetermined."""
    measured = measured_noise_scale(trials)
    if measured is None:
        return None
    value, low, high = measured.estimate.noise_scale, measured.estimate.low, measured.estimate.high
    if value is None or low is None or high is None:
        return None
    return value, 0.5 * math.log(high / low)


def study_prior(
    trials: Iterable[TrialResult],
    *,
    low: float,
    high: float,
    rule: Callable[[Array], Array],
    budget: Callable[[float], float],
    sigma: float,
    exponent_sigma: float,
    noise_scale: float | None,
    others: int,
) -> Prior:
    """Return the prior of a study after some trials: those that measured the noise scale give a hint at B_crit.

    Args:
        trials: that have finished.
        low: smallest batch size.
        high: largest batch size.
        rule: log2 of the rule's learning rate over log2 B, arrays of one shape.
        budget: steps over batch size that one expects to be more than enough.
        sigma: of the rule's level, in octaves.
        exponent_sigma: of the exponent of lr*(B) around the rule's.
        noise_scale: one that is given, in examples, which takes precedence; None for none.
        others: columns of other hyper-parameters.
    """
    value, spread = (noise_scale, 0.0) if noise_scale is not None else hint(trials) or (None, 0.0)
    return make_prior(
        low=low,
        high=high,
        rule=rule,
        log_budget=math.log(budget(math.sqrt(low * high))),
        sigma=sigma,
        exponent_sigma=exponent_sigma,
        noise_scale=value,
        noise_scale_spread=spread,
        others=others,
    )


def hint_row(
    trials: Iterable[TrialResult], posterior: Sequence[float] | None, fit_b_crit: float | None
) -> dict[str, Any] | None:
    """Return the measured noise scale as a row of ``curve.json``; None where none was measured.

    Args:
        trials: of the study.
        posterior: low end, median and high end of B_crit's interval; None for none. Its prior was the noise scale
            itself, however wide, so that the ratio to the fit is the one that is measured twice.
        fit_b_crit: B_crit of the fit to the frontier points; None if it has none.

    Returns:
        noise_scale, low, high (null where undetermined or open), level, trials, steps, undetermined (why there is no
        value, or null), and the value's ratio to B_crit, ratio_to_posterior and ratio_to_fit (null where there is
        none).
    """
    measured = measured_noise_scale(trials)
    if measured is None:
        return None
    estimate, value = measured.estimate, measured.estimate.noise_scale
    b_crits = {"posterior": None if posterior is None else posterior[1], "fit": fit_b_crit}
    ratios = {name: None if value is None or b_crit is None else value / b_crit for name, b_crit in b_crits.items()}
    return {
        "noise_scale": value,
        "low": estimate.low,
        "high": estimate.high,
        "level": estimate.level,
        "trials": estimate.measurements,
        "steps": measured.steps,
        "undetermined": None if value is not None else _reason(estimate.measurements),
        **{f"ratio_to_{name}": ratio for name, ratio in ratios.items()},
    }


def _reason(trials: int) -> str:
    if trials < FEWEST_BLOCKS:
        return f"{FEWEST_BLOCKS} trials that reach the target are needed"
    return "|G|^2 is not told apart from 0"
