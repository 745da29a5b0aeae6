"""The gradient noise scale that trials measured, as the prior of B_crit."""

import math
from collections.abc import Iterable

import numpy as np

from bstune.core.noise_scale import NoiseScaleEstimate, estimate_noise_scale
from bstune.core.records import TrialResult


def measured_noise_scale(trials: Iterable[TrialResult]) -> tuple[NoiseScaleEstimate, int] | None:
    """Estimate the noise scale from the gradient norms of the trials that reached the target.

    Gives the estimate, in examples, and the number of steps at which it was measured. None where no
    such trial has measured it.
    """
    # The mean |G|^2 of each trial, in units of its own mean tr Sigma: that is then 1 for all
    # trials, and none outweighs the others by large gradients.
    gradients = list[float]()
    steps = 0
    for trial in sorted(trials, key=lambda trial: trial.number):
        # A single step scatters too much to say anything.
        if not trial.reached or len(trial.noise_scale) < 2:
            continue
        # Each measurement is (step, |G|^2, tr Sigma).
        _, gradient, trace = np.mean(trial.noise_scale, axis=0).tolist()
        if trace > 0.0:
            gradients.append(gradient / trace)
            steps += len(trial.noise_scale)
    if not gradients:
        return None
    return estimate_noise_scale(gradients, [1.0] * len(gradients)), steps


def noise_scale_prior(trials: Iterable[TrialResult]) -> tuple[float | None, float]:
    """Estimate the noise scale, in examples, and its deviation in log: half its interval's width.

    None and 0 before a trial has measured it, and while an end of the interval is not known.
    """
    measured = measured_noise_scale(trials)
    if measured is None:
        return None, 0.0
    estimate, _ = measured
    if estimate.low is None or estimate.high is None:
        return None, 0.0
    return estimate.noise_scale, 0.5 * math.log(estimate.high / estimate.low)
