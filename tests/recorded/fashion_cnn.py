"""A study's trials, ``fashion_cnn.jsonl``, as a report would read them today."""

from pathlib import Path

import numpy as np
from optuna.distributions import FloatDistribution, IntDistribution

from bstune.core.records import Budget, Target, TrialResult
from bstune.core.scaling import sqrt
from bstune.result import Reference, SearchPlan, StudyResult
from bstune.search.frontier_findings import steps_band
from bstune.search.posterior import Posterior
from bstune.search.predictions import fresh_steps
from bstune.search.sampler import FrontierSampler
from bstune.study.analysis.analyse import curve_of
from bstune.study.analysis.critical import INTERVAL, critical_batch
from bstune.study.analysis.model import MOVES, REPORT_PARTICLES, fit_lr_exponent
from bstune.study.analysis.scale_out import step_times
from bstune.study.analysis.summary import Analysis, Asked, summarize
from bstune.study.planning.replicates import winners

FOLDER = Path(__file__).parent
TARGET = Target("val/error", 0.1, "min")
LOW, HIGH = 32, 1024


def recorded() -> tuple[list[TrialResult], Posterior, StudyResult]:
    """Give the trials, their posterior as a report draws it, and the result."""
    trials = [
        TrialResult.from_json(line)
        for line in (FOLDER / "fashion_cnn.jsonl").read_text().splitlines()
    ]
    space = {
        "batch_size": IntDistribution(LOW, HIGH, log=True),
        "lr": FloatDistribution(1e-4, 10.0, log=True),
    }
    sampler = FrontierSampler(
        objective="steps",
        rule=lambda size: sqrt(size, 128.0, 0.03),
        target=TARGET,
        ideal=0.0,
        search_space=space,
    )
    posterior = sampler.posterior(
        trials, particles=REPORT_PARTICLES, moves=MOVES, rng=np.random.default_rng(0)
    )
    critical = critical_batch(posterior, in_seconds=False)
    best = winners(trials, fresh_steps(posterior), "steps", 3, 2)
    exponent = fit_lr_exponent(posterior, LOW, HIGH, None if critical is None else critical.value)
    asked = Asked(
        study="fashion_cnn",
        workload="fashion_cnn",
        tokens=None,
        objective="steps",
        target=TARGET,
        budget=Budget(),
        search=SearchPlan(trials=len(trials), replicates=3, limit=None),
        reference=Reference(batch_size=128.0, lr=0.03, rule="sqrt"),
    )
    # From the smallest to the largest batch size that reached the target.
    sizes = sorted({round(size) for size in np.geomspace(39, 807, 49)})
    band = steps_band(posterior, sizes, INTERVAL)
    analysis = Analysis(
        critical=critical,
        best=best,
        lr_exponent=exponent,
        curve=curve_of(posterior, band, step_times(posterior, HIGH, None)),
    )
    return trials, posterior, summarize(trials, asked, analysis)
