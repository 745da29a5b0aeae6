"""B_crit at easier targets, by the histories of the trials that were run for the study's own."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import replace

from bstune.core.records import Record, Target, ends
from bstune.search.histories import excess_scale, log_curve
from bstune.study.critical import critical_batch_size
from bstune.study.estimates import answer_posterior
from bstune.study.plan import Plan
from bstune.study.result import CriticalAt
from bstune.study.retarget import ended_by

# Easier targets between the study's own and what half of the trials that reached it had met after
# this share of their steps.
TARGETS = 5
EARLY = 0.2
# Draws and moves of the posterior of each.
DRAWS = 300
MOVES = 4
# With more trials they would take over 2 s.
MOST_TRIALS = 300


def critical_over_targets(plan: Plan, records: Sequence[Record]) -> tuple[CriticalAt, ...]:
    """B_crit with its interval at easier targets, the easiest first.

    There are none where a schedule ends with its trial, or the best metric is sought.
    """
    question = plan.question
    if question.schedule_ends or question.seeks_metric or len(records) > MOST_TRIALS:
        return ()
    found = []
    for target in easier_targets(question.target, records):
        asked = replace(question, target=target)
        again = ended_by(asked, records)
        posterior = answer_posterior(replace(plan, question=asked), again, DRAWS, MOVES)
        interval = critical_batch_size(posterior, again).interval
        found.append(CriticalAt(goal=target.goal, interval=interval))
    return tuple(found)


def easier_targets(target: Target, records: Sequence[Record]) -> list[Target]:
    """Easier targets, the easiest first, evenly spaced in the log excess of search/histories."""
    chains = ends(records)
    scale = excess_scale(target, chains)
    early = []
    for chain in chains:
        log_steps, log_excess = log_curve(chain, target, scale).T
        before = log_excess[log_steps <= math.log(max(EARLY * chain.steps, 1.0))]
        if chain.reached and len(before):
            early.append(float(before[-1]))
    targets = []
    for place in range(TARGETS, 0, -1):
        if early and target.goal is not None:
            gap = scale * math.expm1(statistics.median(early) * place / TARGETS)
            goal = target.goal + (gap if target.mode == "min" else -gap)
            targets.append(replace(target, goal=float(f"{goal:.3g}")))
    return targets
