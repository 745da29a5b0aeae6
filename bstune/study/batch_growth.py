"""The schedule of batch sizes that a study's curve proposes: double once B_crit has passed twice the present size.

B_crit at a target that the histories passed is how much data parallelism still paid where training had come to it
(McCandlish et al. 2018, appendix D; Merrill et al. 2025, arXiv 2505.23971, let the batch size follow it).
"""

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from bstune.core.records import Target, TrialResult
from bstune.study.critical import passing

Row = Mapping[str, Any]


def proposed_growth(rows: Sequence[Row], own: Target, trial: TrialResult) -> dict[str, Any] | None:
    """Return where a trial's batch size would double as B_crit grows over the targets that it passed.

    Args:
        rows: of targets from any to the study's own, each with ``target`` and ``b_crit``; None: not determined there.
        own: the study's target.
        trial: reached it, with its history: it says after how many examples a target is met.

    Returns:
        ``start``, the batch size at the easiest target; ``switch_examples`` and the ``targets`` that are met there.
        None where B_crit, on straight lines over the metric between the targets, does not double.
    """
    measured = [
        (row["target"], math.log2(row["b_crit"])) for row in rows if row["b_crit"] is not None
    ]
    measured.sort(key=lambda pair: -own.gap(pair[0]))  # the easiest one first
    if len(measured) < 2:
        return None
    start = 2.0 ** measured[0][1]
    switches, targets = list[int](), list[float]()
    for (before, low), (after, high) in pairwise(measured):
        while high >= measured[0][1] + len(switches) + 1.0:
            wanted = measured[0][1] + len(switches) + 1.0
            value = (
                before + (after - before) * (max(wanted, low) - low) / (high - low)
                if high > low
                else after
            )
            met = passing(trial, Target(own.metric, value, own.mode))
            if switches and met.examples <= switches[-1]:
                break
            switches.append(met.examples)
            targets.append(value)
    if not switches:
        return None
    return {"start": max(1, round(start)), "switch_examples": switches, "targets": targets}
